"""Two connections of the same names, one after the other: the server keeps the first, which was reset, and goes on looking at it.

namesake.py server ADDRESS PORT FROM    takes both, and reads the first at each line "first"; reads 50 messages of the second at the line "second", and
                                        prints what was wrong there
namesake.py client ADDRESS PORT FROM    connects from that port; exchanges a message at each line "go on"; resets the connection at its end
"""
import socket
import struct
import sys

role, address, port, source = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
MESSAGE = b"m" * 90


def steps():
    for line in sys.stdin:
        yield line.strip()
        print("done", flush=True)


def read(sock):
    try:
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except (BlockingIOError, ConnectionResetError):
        return b""


if role == "server":
    listener = socket.create_server(("", port))
    print("listening", flush=True)
    first = listener.accept()[0]
    print("first", flush=True)
    second = None
    for step in steps():
        if step == "first":
            some = read(first)
            assert some in (b"", MESSAGE), some
        elif step == "accept":
            second = listener.accept()[0]
        else:
            some = b""
            while some.count(b"m") < 50 * len(MESSAGE):
                some += read(second)
            print("read", len(some), "of others", len(some) - some.count(b"m"), flush=True)
else:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.bind(("", source))
    sock.connect((address, port))
    print("connected", flush=True)
    for step in steps():
        sock.sendall(MESSAGE)
        assert read(sock) == b""
    sock.close()
