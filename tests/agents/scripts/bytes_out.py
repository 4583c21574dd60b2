"""Write every kind of byte to both streams."""

import sys

everything = bytes(range(256)) + b"\x00\r\n\xff\xfe half \xc3\r progress\r\n" * 1000 + b"no end of line"
sys.stdout.buffer.write(everything)
sys.stdout.flush()
sys.stderr.buffer.write(everything[::-1])
sys.stderr.flush()
