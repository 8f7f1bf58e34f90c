"""A client that opens connections one after the other and keeps them.

opens.py STYLE ADDRESS PORT COUNT

STYLE is how a connection is made: blocking, poll (without blocking, then poll(2)), or epoll. Each sends a text of its own to an echo server,
and reads it back. Prints "took CONNECT FIRST", in milliseconds: until the connection was made, and until the answer had come. Prints
"open COUNT" at last; at a line on its standard input each connection echoes once more; "again COUNT". Where a connection
is not made it prints "refused NAME" with the name of the errno, and goes on.
"""
import errno
import select
import socket
import sys
import time

style, address, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def connect(sock):
    """The errno it comes to."""
    if style == "blocking":
        return sock.connect_ex((address, port))
    sock.setblocking(False)
    first = sock.connect_ex((address, port))
    if first not in (0, errno.EINPROGRESS):
        # A refusal may be back at once.
        return first
    if style == "poll":
        waiter = select.poll()
        waiter.register(sock, select.POLLOUT)
        ready = waiter.poll(30_000)
    else:
        waiter = select.epoll()
        waiter.register(sock, select.EPOLLOUT)
        ready = waiter.poll(30)
        waiter.close()
    assert ready, "the connection is never made"
    result = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    sock.setblocking(True)
    return result


def echo(sock, text):
    sock.sendall(text)
    came = b""
    while len(came) < len(text):
        part = sock.recv(len(text) - len(came))
        assert part, f"the end after {came[:80]!r}"
        came += part
    assert came == text, f"{came[:80]!r}"


socks = []
for number in range(count):
    sock = socket.socket()
    begun = time.monotonic()
    result = connect(sock)
    made = time.monotonic()
    if result != 0:
        print("refused", errno.errorcode[result], flush=True)
        sock.close()
        continue
    sock.settimeout(30)
    assert sock.getpeername() == (address, port)
    echo(sock, b"%d " % number * 200)
    answered = time.monotonic()
    print(f"took {(made - begun) * 1000:.1f} {(answered - begun) * 1000:.1f}", flush=True)
    socks.append(sock)
print("open", len(socks), flush=True)
for line in sys.stdin:
    for number, sock in enumerate(socks):
        echo(sock, b"%d again " % number * 200)
    print("again", len(socks), flush=True)
