"""eager.py ADDRESS PORT COUNT     connects so often without blocking, and tries to send until it can

Each connection gets its bytes back. Prints "back", and ends with its standard input.
"""
import socket
import sys

address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
socks = [socket.socket() for _ in range(count)]
for sock in socks:
    sock.setblocking(False)
    sock.connect_ex((address, port))
unsent = list(socks)
while unsent:
    for sock in list(unsent):
        try:
            sock.send(b"%d" % socks.index(sock))
            unsent.remove(sock)
        except (BlockingIOError, BrokenPipeError):
            # EPIPE is said of a connection that is not made yet.
            pass
for number, sock in enumerate(socks):
    sock.setblocking(True)
    got = sock.recv(100)
    assert got == b"%d" % number, (number, got)
print("back", flush=True)
sys.stdin.read()
