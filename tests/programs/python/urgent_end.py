"""A server that learns of an urgent byte behind the end of its client, which has sent nothing else; and the client.

urgent_end.py serve ADDRESS PORT    prints "listening", and "urgent" once it has the byte
urgent_end.py call ADDRESS PORT
"""
import os
import select
import socket
import sys

CLOSE_WAIT = 8


def serve(listener):
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((sys.argv[2], int(sys.argv[3])))
    listener.listen()
    print("listening", flush=True)
    sock, _ = listener.accept()
    sock.send(b"hello")
    urgent = select.poll()
    urgent.register(sock, select.POLLPRI)
    while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != CLOSE_WAIT:
        os.sched_yield()
    [(_, events)] = urgent.poll(10_000)
    assert events & select.POLLPRI, events
    assert sock.recv(1, socket.MSG_OOB) == b"!"
    urgent.modify(sock, select.POLLIN)
    assert urgent.poll(10_000) == [(sock.fileno(), select.POLLIN)]
    assert sock.recv(1) == b""
    print("urgent", flush=True)
    sock.close()


def call(sock):
    sock.connect((sys.argv[2], int(sys.argv[3])))
    assert sock.recv(5, socket.MSG_WAITALL) == b"hello"
    sock.send(b"!", socket.MSG_OOB)
    sock.close()


{"serve": serve, "call": call}[sys.argv[1]](socket.socket())
