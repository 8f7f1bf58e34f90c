"""How many bytes go into a connection whose peer does not read.

room.py server ADDRESS PORT N   accepts N connections, and does with the first one what its standard input says
room.py client ADDRESS PORT N   the same with connections that it makes

A byte goes over each of them from the client to the server, and both say "moved".

What is said, a line each, and answered by a line:
  fill       writes without blocking until there is no room after a fifth of a second: "filled N", N bytes since the last time
  send       writes a byte: "sent"
  take N     reads N bytes: "taken"
At the end of its standard input it closes.
"""
import select
import socket
import sys

role, address, port, count = sys.argv[1:]
if role == "server":
    listener = socket.create_server((address, int(port)), backlog=int(count))
    print("listening", flush=True)
    socks = [listener.accept()[0] for _ in range(int(count))]
    for sock in socks:
        assert sock.recv(1) == b"x"
else:
    socks = [socket.create_connection((address, int(port))) for _ in range(int(count))]
    print("connected", flush=True)
    for sock in socks:
        sock.sendall(b"x")
print("moved", flush=True)
sock = socks[0]
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def push():
    """Writes until there is no room."""
    pushed = 0
    while True:
        try:
            pushed += sock.send(bytes(1 << 16))
        except BlockingIOError:
            return pushed


def fill():
    sock.setblocking(False)
    wait = select.poll()
    wait.register(sock, select.POLLOUT)
    written, is_full = push(), False
    # What goes from one buffer into the other within that time makes room, which may be too little for an event.
    while not is_full:
        wait.poll(200)
        more = push()
        written, is_full = written + more, more == 0
    sock.setblocking(True)
    return written


for line in sys.stdin:
    said = line.split()
    if said[0] == "fill":
        print("filled", fill(), flush=True)
    elif said[0] == "send":
        sock.sendall(b"x")
        print("sent", flush=True)
    else:
        left = int(said[1])
        while left:
            left -= len(sock.recv(min(left, 1 << 16)))
        print("taken", flush=True)
for sock in socks:
    sock.close()
