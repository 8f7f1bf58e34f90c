"""An echo server and its client that check every byte, and that what is readable can be read.

echo.py server STYLE ADDRESS PORT     serves one connection, prints "listening", and at its end "served BYTES"
echo.py client STYLE ADDRESS PORT N   sends N messages, each when the last one is answered; prints "port PORT", "echoed"

echo.py late STYLE ADDRESS PORT N     as the client, but that it connects without blocking
echo.py greeter, echo.py guest        as server and client, but that the server says a line before it is sent anything
echo.py forker, echo.py keeper        as the server, but that a child serves; the parent closes the connection, or keeps it
echo.py batch, echo.py job            as server and client, but that the client sends N bytes and its end before it reads, and the
                                      server answers behind that

The client's bytes count up, the server answers with their complement: a byte too many, too few, or of somebody else's
shows at once. STYLE is how to wait: blocking, waitall, peek, select, poll, epoll, edge, oneshot, nested (poll on an epoll set), or busy
(not at all). With "pause" for N the client sends until its standard input ends.

echo.py heir - ADDRESS PORT           sends one connection's bytes back as they are; at a "!" among them it looks at nothing
                                      until a line comes on its standard input, and ends with a child in its place
echo.py half STYLE ADDRESS PORT        the same, but that it counts what still comes then, by recv or by splice after a shutdown,
                                      or by these at once (recv-at-once, at-once); "got N", and "reset" where it ends so
echo.py mirror - ADDRESS PORT         sends everybody's bytes back as they are, until its standard input ends
"""
import fcntl
import os
import random
import select
import socket
import struct
import sys
import termios

IN = select.POLLIN


class Waiter:
    """Waits until a socket is readable, and then insists on it."""

    def __init__(self, style, sock):
        self.style, self.sock = style, sock
        if style == "poll":
            self.set = select.poll()
            self.set.register(sock, IN)
        if style == "nested":
            self.inner = select.epoll()
            self.inner.register(sock, select.EPOLLIN)
            self.set = select.poll()
            self.set.register(self.inner, IN)
        if style in ("epoll", "edge", "oneshot"):
            self.set = select.epoll()
            self.flags = select.EPOLLIN
            self.flags |= {"edge": select.EPOLLET, "oneshot": select.EPOLLONESHOT}.get(style, 0)
            self.set.register(sock, self.flags)

    def receive(self, most):
        """Some bytes; nothing at the end."""
        if self.style == "blocking":
            return self.sock.recv(most)
        if self.style == "waitall":
            return self.sock.recv(most, socket.MSG_WAITALL)
        if self.style == "peek":
            return self.peek(most)
        while self.style == "busy":
            try:
                return self.sock.recv(most, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
        if self.style == "select":
            assert select.select([self.sock], [], [], 60)[0], "nothing came"
        elif self.style == "poll":
            assert self.set.poll(60_000), "nothing came"
        elif self.style == "nested":
            while not self.inner.poll(0):
                assert self.set.poll(60_000), "nothing came"
        else:
            if self.style == "edge":
                # The edge may have been that of bytes already read.
                try:
                    return self.sock.recv(most, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
            assert self.set.poll(60), "nothing came"
            if self.style == "oneshot":
                self.set.modify(self.sock, self.flags)
        # No waiting: what was reported has to be there.
        return self.sock.recv(most, socket.MSG_DONTWAIT)

    def peek(self, most):
        seen = self.sock.recv(most, socket.MSG_PEEK)
        unread = struct.unpack("i", fcntl.ioctl(self.sock, termios.FIONREAD, b"    "))[0]
        assert unread >= len(seen), (unread, len(seen))
        got = self.sock.recv(most)
        assert got[: len(seen)] == seen
        return got


def count_from(start, length):
    return bytes((start + i) & 0xFF for i in range(length))


GREETING = b"220 ready\r\n"


def greet(style, sock):
    """As a program that waits for room where it does not block."""
    if style == "blocking":
        return sock.sendall(GREETING)
    sock.setblocking(False)
    room = select.epoll() if style in ("epoll", "edge") else select.poll()
    room.register(sock, select.EPOLLOUT | (select.EPOLLET if style == "edge" else 0))
    left = GREETING
    while left:
        try:
            left = left[sock.send(left):]
        except BlockingIOError:
            assert room.poll(20_000 if isinstance(room, type(select.poll())) else 20), "no room"
    sock.setblocking(True)


def serve(style, address, port, role):
    listener = socket.create_server((address, port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    if role in ("forker", "keeper") and (child := os.fork()):
        if role == "forker":
            sock.close()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if role == "greeter":
        greet(style, sock)
    waiter, total = Waiter(style, sock), 0
    most = 1 if style == "waitall" else 70_000
    while data := waiter.receive(most):
        assert data == count_from(total, len(data)), (total, data[:400])
        total += len(data)
        sock.sendall(bytes(255 - b for b in data))
    print("served", total, flush=True)


def call(style, address, port, count, role):
    sock = socket.create_connection((address, port), 60 if role == "late" else None)
    sock.settimeout(None)
    print("port", sock.getsockname()[1], flush=True)
    if role == "guest":
        assert sock.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
        print("greeted", flush=True)
    waiter, draw, sent = Waiter(style, sock), random.Random(port), 0
    messages = 0
    while messages < count if isinstance(count, int) else not select.select([sys.stdin], [], [], 0)[0]:
        length = draw.choice([1, 1, 7, 60, 500, 3000]) if style != "waitall" else draw.choice([1, 9])
        sock.sendall(count_from(sent, length))
        left = length
        while left > 0:
            data = waiter.receive(left)
            assert data, "the end came early"
            start = sent + length - left
            assert data == bytes(255 - b for b in count_from(start, len(data))), (start, data[:400])
            left -= len(data)
        sent += length
        messages += 1
        if messages % 10 == 0:
            assert not select.select([sock], [], [], 0)[0], "something to read where nothing was sent"
    print("echoed", sent, flush=True)


def batch(style, address, port):
    listener = socket.create_server((address, port))
    print("listening", flush=True)
    waiter, got = Waiter(style, sock := listener.accept()[0]), b""
    while data := waiter.receive(70_000):
        got += data
    assert got == count_from(0, len(got)), got[:400]
    sock.sendall(bytes(255 - b for b in got))
    print("served", len(got), flush=True)


def job(style, address, port, count):
    sock = socket.create_connection((address, port))
    sock.sendall(count_from(0, count))
    sock.shutdown(socket.SHUT_WR)
    print("port", sock.getsockname()[1], flush=True)
    waiter, got = Waiter(style, sock), b""
    while data := waiter.receive(70_000):
        got += data
    assert got == bytes(255 - b for b in count_from(0, count)), (len(got), got[:400])
    try:
        sock.send(b"x")
        raise AssertionError("a send behind the end")
    except BrokenPipeError:
        print("echoed", count, flush=True)


def heir(address, port):
    listener = socket.create_server((address, port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    while data := sock.recv(70_000):
        sock.sendall(data)
        if b"!" in data:
            sys.stdin.readline()
            if os.fork():
                os._exit(0)
            print("heir", flush=True)
    print("served", flush=True)


def half(style, address, port):
    listener = socket.create_server((address, port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    data = b""
    while b"!" not in data:
        data = sock.recv(70_000)
        sock.sendall(data)
    sys.stdin.readline()
    if not style.endswith("at-once"):
        sock.shutdown(socket.SHUT_WR)
    print("half", flush=True)
    out, into = os.pipe()
    by_pipe = lambda: os.read(out, n) if (n := os.splice(sock.fileno(), into, 70_000)) else b""
    by_recv = lambda: sock.recv(70_000)
    got, ending = 0, ""
    try:
        while data := (by_recv if style.startswith("recv") else by_pipe)():
            got += len(data)
    except ConnectionResetError:
        ending = " reset"
    print("got", str(got) + ending, flush=True)


def mirror(address, port):
    listener = socket.create_server((address, port))
    waiting = select.poll()
    for what in (sys.stdin, listener):
        waiting.register(what, IN)
    print("listening", flush=True)
    socks = {}
    while True:
        for number, _ in waiting.poll():
            if number == 0:
                return
            if number == listener.fileno():
                sock, _ = listener.accept()
                socks[sock.fileno()] = sock
                waiting.register(sock, IN)
                continue
            sock = socks[number]
            try:
                data = sock.recv(70_000)
                sock.sendall(data)
            except ConnectionError:
                data = b""
            if not data:
                waiting.unregister(sock)
                socks.pop(number).close()


role, style, address, port = sys.argv[1:5]
if role == "half":
    half(style, address, int(port))
elif role in ("mirror", "heir"):
    (mirror if role == "mirror" else heir)(address, int(port))
elif role in ("server", "greeter", "forker", "keeper"):
    serve(style, address, int(port), role)
elif role == "batch":
    batch(style, address, int(port))
elif role == "job":
    job(style, address, int(port), int(sys.argv[5]))
else:
    count = sys.argv[5]
    call(style, address, int(port), int(count) if count.isdigit() else count, role)
