"""A server that waits by poll(2) for an urgent byte, while another thread of it makes the first call on the connection; and its client.

beside.py serve ADDRESS PORT    prints "listening", "waits" once the other thread's send waits for the agent, and "urgent"
beside.py call ADDRESS PORT     prints "connected"; for a line it sends an urgent byte
"""
import os
import select
import socket
import sys
import threading


POLL, PPOLL = "7", "271"


def waits_for_agent(thread):
    with open(f"/proc/self/task/{thread.native_id}/syscall") as opened:
        return opened.read().split()[0] in (POLL, PPOLL)


def serve(listener):
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((sys.argv[2], int(sys.argv[3])))
    listener.listen()
    print("listening", flush=True)
    sock, _ = listener.accept()
    waiting = select.poll()
    waiting.register(sock, select.POLLPRI)
    sender = threading.Thread(target=sock.send, args=(b"hello",))
    sender.start()
    while not waits_for_agent(sender):
        os.sched_yield()
    print("waits", flush=True)
    [(_, events)] = waiting.poll()
    assert events == select.POLLPRI, events
    print("urgent", flush=True)
    sender.join()
    sock.close()


def call(sock):
    sock.connect((sys.argv[2], int(sys.argv[3])))
    print("connected", flush=True)
    sys.stdin.readline()
    sock.send(b"!", socket.MSG_OOB)
    assert sock.recv(5, socket.MSG_WAITALL) == b"hello"
    sock.close()


{"serve": serve, "call": call}[sys.argv[1]](socket.socket())
