"""A stream in one direction from its first byte on, of which every byte is checked.

stream.py source STYLE ADDRESS PORT    says "tries", connects as soon as somebody listens, and sends until its standard input has a
                                       line; prints "port PORT", and "sent BYTES" at the end
stream.py sink - ADDRESS PORT          takes one; prints "listening", and "took BYTES" at the end

STYLE: blocking, or poll: sends that do not wait.
"""
import select
import socket
import sys
import time

role, style, address, port = sys.argv[1:4] + [int(sys.argv[4])]
PERIOD = bytes(range(251)) * 263
PIECE = 1 << 16


def piece(start, length):
    return PERIOD[start % 251 : start % 251 + length]


def connect():
    print("tries", flush=True)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            pass
    sys.exit("nobody listens")


total = 0
if role == "sink":
    listener = socket.create_server((address, port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    while data := sock.recv(PIECE):
        assert data == piece(total, len(data)), total
        total += len(data)
    print("took", total, flush=True)
else:
    sock = connect()
    print("port", sock.getsockname()[1], flush=True)
    sock.setblocking(style == "blocking")
    waiting = select.poll()
    waiting.register(sock, select.POLLOUT)
    while not select.select([sys.stdin], [], [], 0)[0]:
        try:
            total += sock.send(piece(total, PIECE))
        except BlockingIOError:
            waiting.poll()
    print("sent", total, flush=True)
