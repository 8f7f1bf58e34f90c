"""A terminal that shows what it is given and answers no question.

mute_terminal.py FIRST SECOND PROGRAM...    runs PROGRAM in 80 columns until FIRST is on the screen, then in 132 until SECOND is, and types q;
prints the exit status
"""
import fcntl
import os
import pty
import struct
import sys
import termios
import time

first, second, program = sys.argv[1].encode(), sys.argv[2].encode(), sys.argv[3:]
deadline = time.monotonic() + 60


def resize(columns, rows):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read():
    """What the program writes; nothing once it has ended."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def read_until(words):
    seen = b""
    while words not in seen:
        assert time.monotonic() < deadline, seen
        more = read()
        assert more, seen
        seen += more


is_sized, sized = os.pipe()
child, terminal = pty.fork()
if child == 0:
    os.read(is_sized, 1)
    os.execv(program[0], program)
resize(80, 24)
os.write(sized, b"\n")
read_until(first)
resize(132, 50)
read_until(second)
os.write(terminal, b"q")
while read():
    pass
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
