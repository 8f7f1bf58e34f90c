"""Two ends of a connection over which COUNT messages go to and fro. Then one sends more. The other lets the handshake go
on without reading it, and becomes another program, as often as it takes. Where that is refused it reads first.

usage: becomes.py server|client ADDRESS PORT COUNT send|become
"""
import os
import socket
import sys

NEXT = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
got = bytes.fromhex(sys.argv[2])
while more := s.recv(1000): got += more
print('got', got, flush=True)
"""

role, to, port, count, part = sys.argv[1:6]
if role == 'server':
    listener = socket.create_server((to, int(port)))
    print('listening', flush=True)
    s = listener.accept()[0]
else:
    s = socket.create_connection((to, int(port)))
for _ in range(int(count)):
    if role == 'client':
        s.sendall(b'x' * 90)
    assert len(s.recv(90, socket.MSG_WAITALL)) == 90
    if role == 'server':
        s.sendall(b'y' * 90)
print('done', flush=True)

if part == 'send':
    sys.stdin.readline()
    s.sendall(b'z' * 30)
    print('sent', flush=True)
    s.setblocking(False)
    while sys.stdin.readline() == 'step\n':
        # Its part of the handshake goes on at each call.
        for _ in range(1000):
            try:
                assert s.recv(1) != b''
            except BlockingIOError:
                pass
        print('stepped', flush=True)
    s.setblocking(True)
    s.shutdown(socket.SHUT_WR)
    assert s.recv(1) == b''
    sys.exit()


def become(got):
    program = ['python3', '-c', NEXT, str(s.fileno()), got.hex()]
    os.execv('/usr/bin/python3', program)


s.set_inheritable(True)
while sys.stdin.readline() == 'step\n':
    assert s.recv(1, socket.MSG_PEEK) == b'z'
    print('stepped', flush=True)
for refused in range(3):
    print('refused', refused, flush=True)
    try:
        become(b'')
    except OSError:
        pass
unread = s.recv(30, socket.MSG_WAITALL)
print('refused', 3, flush=True)
become(unread)
