"""A server that takes all its connections before it does anything with them. accept(2) goes on behind SIGUSR1 (SA_RESTART).

crowd.py ADDRESS PORT COUNT  prints "listening"; takes COUNT connections, and then echoes each in a thread of its own, as echo.py does;
                             prints "served" at the end
"""
import ctypes
import os
import signal
import socket
import sys
import threading

address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def serve(sock):
    while data := sock.recv(65_536):
        sock.sendall(bytes(255 - byte for byte in data))
    sock.close()


def accept():
    """Without Python's own look at EINTR."""
    fd = libc.accept(listener.fileno(), None, None)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    return socket.socket(fileno=fd)


libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.siginterrupt(signal.SIGUSR1, False)
listener = socket.create_server((address, port))
print("listening", flush=True)
taken = []
for _ in range(count):
    taken.append(accept())
    print("taken", flush=True)
threads = [threading.Thread(target=serve, args=(sock,)) for sock in taken]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("served", flush=True)
