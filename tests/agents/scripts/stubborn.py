"""Leave processes everywhere, ignore SIGTERM, and wait. Writes all pids to the file named by the argument."""

import os
import signal
import subprocess
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
sleep = [sys.executable, "-S", "-c", wait]
group = subprocess.Popen(sleep)
session = subprocess.Popen(sleep, start_new_session=True)
# Its parent ends at once: nobody's child, in a session of its own.
fork = f"import subprocess as s; print(s.Popen({sleep!r}, start_new_session=True, stdout=s.DEVNULL).pid)"
forked = subprocess.run(
    [sys.executable, "-S", "-c", fork],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
)
path = sys.argv[1] + os.environ["RANK"]
with open(path + ".part", "w") as file:
    print(os.getpid(), group.pid, session.pid, forked.stdout.strip(), file=file)
os.rename(path + ".part", path)
if "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "leave" in sys.argv:
    os._exit(0)
time.sleep(600)
