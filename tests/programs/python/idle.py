"""A connection of which both ends are asleep for a while.

idle.py server STYLE PORT    serves one: prints "listening"; a line on its standard input is sent, and what comes back printed
idle.py client STYLE PORT    prints "port PORT"; sends back what comes, until the end

Both first exchange messages until the client's standard input has a line, and say "asleep" then. STYLE is how to wait: blocking, select,
poll, epoll or edge.
"""
import select
import socket
import sys

style, port = sys.argv[2], int(sys.argv[3])


def wait(sock, others=()):
    """Until there is something to read; which."""
    if style == "poll":
        waiter = select.poll()
        for one in (sock, *others):
            waiter.register(one, select.POLLIN)
        return [fd for fd, _ in waiter.poll()]
    if style in ("epoll", "edge"):
        waiter = select.epoll()
        waiter.register(sock, select.EPOLLIN | (select.EPOLLET if style == "edge" else 0))
        for one in others:
            waiter.register(one, select.EPOLLIN)
        return [fd for fd, _ in waiter.poll()]
    if style == "select" or others:
        return [one.fileno() for one in select.select([sock, *others], [], [])[0]]
    return [sock.fileno()]


def receive(sock):
    while sock.fileno() not in wait(sock):
        pass
    return sock.recv(1 << 20)


if sys.argv[1] == "server":
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    while (got := receive(sock)) != b"sleep":
        sock.sendall(got)
    sock.sendall(b"asleep")
    print("asleep", flush=True)
    for line in iter(lambda: sys.stdin.readline() if sys.stdin.fileno() in wait(sock, [sys.stdin]) else None, ""):
        assert line, "something came unasked"
        message = line.strip().encode() * 9999
        sock.sendall(message)
        got = b""
        while len(got) < len(message):
            got += receive(sock)
        assert got == message
        print("back", flush=True)
else:
    sock = socket.create_connection(("127.0.0.1", port))
    print("port", sock.getsockname()[1], flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        sock.sendall(b"awake")
        assert receive(sock) == b"awake"
    sock.sendall(b"sleep")
    assert receive(sock) == b"asleep"
    print("asleep", flush=True)
    while got := receive(sock):
        sock.sendall(got)
