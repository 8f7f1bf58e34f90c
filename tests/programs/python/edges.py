"""A client of edges, which reads until nothing is left, and a server that sends it more than a ring holds.

edges.py server ADDRESS PORT BYTES    prints "listening", "behind" once it has sent more than a quarter, and "done" once the client has all
edges.py client ADDRESS PORT BYTES    prints "port PORT"; both exchange messages until a line comes: "quiet"; with the next it asks for the
                                      bytes, with one more it begins to wait, and prints "got BYTES" whenever nothing is left
"""
import select
import socket
import sys

role, address, port, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

if role == "server":
    listener = socket.create_server((address, port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    while (got := sock.recv(9)) != b"go":
        sock.sendall(got)
    sock.setblocking(False)
    waiting = select.poll()
    waiting.register(sock, select.POLLOUT)
    sent, is_behind = 0, False
    while sent < size:
        try:
            sent += sock.send(bytes(min(4096, size - sent)))
        except BlockingIOError:
            waiting.poll()
        if sent > size * 9 // 32 and not is_behind:
            is_behind = True
            print("behind", flush=True)
    sock.setblocking(True)
    assert sock.recv(9) == b"all"
    print("done", flush=True)
else:
    sock = socket.create_connection((address, port))
    print("port", sock.getsockname()[1], flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        sock.sendall(b"hello")
        assert sock.recv(9) == b"hello"
    sys.stdin.readline()
    sock.setblocking(False)
    waiting = select.epoll()
    waiting.register(sock, select.EPOLLIN | select.EPOLLET)
    waiting.poll(0)
    print("quiet", flush=True)
    sys.stdin.readline()
    sock.sendall(b"go")
    sys.stdin.readline()
    total = 0
    while total < size:
        waiting.poll()
        try:
            while total < size:
                total += len(sock.recv(1 << 20))
        except BlockingIOError:
            pass
        print("got", total, flush=True)
    sock.setblocking(True)
    sock.sendall(b"all")
    sock.recv(1)
