"""End in the way that the argument names."""

import os
import signal
import sys
import threading

way = sys.argv[1]
if way == "exit3":
    sys.exit(3)
elif way == "message":
    sys.exit("a message")
elif way == "interrupt":
    raise KeyboardInterrupt
elif way == "os_exit":
    os._exit(7)
elif way == "thread":
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
elif way == "none":
    sys.exit()
elif way == "nothing":
    pass
else:
    os.kill(os.getpid(), getattr(signal, way))
