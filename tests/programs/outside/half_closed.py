"""Talks with a service by lines, then sends all the rest at once, ends, and shows what is said to that.

half_closed.py PORT LINES BYTES: prints its own port after the lines, and goes on once it reads a line.
"""

import socket
import sys

port, lines, rest = map(int, sys.argv[1:])
with socket.create_connection(("127.0.0.1", port)) as s:
    answers = s.makefile("rb")
    for i in range(lines):
        s.sendall(b"line %d\n" % i)
        assert answers.readline() == b"line %d\n" % i
    print(s.getsockname()[1], flush=True)
    sys.stdin.readline()
    s.sendall(b"rest\n" + b"x" * rest)
    s.shutdown(socket.SHUT_WR)
    sys.stdout.write(answers.read().decode())
    assert s.recv(1) == b""
