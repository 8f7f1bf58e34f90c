"""eager.py ADDRESS PORT COUNT          connects so often without blocking, and tries to send until it can
eager.py ADDRESS PORT COUNT FROM TO  the same, but that each connection has a thread that waits by poll(2), without a time limit; they
                                     begin to wait at even distances between those milliseconds after the SYNs

Each connection gets its bytes back. Prints "back", and ends with its standard input.
"""
import select
import socket
import sys
import threading
import time

address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
socks = [socket.socket() for _ in range(count)]
began = []
for sock in socks:
    sock.setblocking(False)
    began.append(time.monotonic())
    sock.connect_ex((address, port))


def wait_and_send(number):
    first, last = map(float, sys.argv[4:])
    at = began[number] + (first + (last - first) * number / count) / 1000
    time.sleep(max(0, at - time.monotonic()))
    waiting = select.poll()
    waiting.register(socks[number], select.POLLOUT)
    waiting.poll()
    assert socks[number].send(b"%d" % number)


if sys.argv[4:]:
    threads = [threading.Thread(target=wait_and_send, args=(number,)) for number in range(count)]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
unsent = list(socks) if not sys.argv[4:] else []
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
