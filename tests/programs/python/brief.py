"""Many connections to one server, most of which carry one message and its answer.

brief.py server ADDRESS PORT   echoes all that comes on any connection, until its standard input ends: prints "listening"
brief.py client ADDRESS PORT   does what lines of its standard input say:
    brief N   so many connections, one after the other, with a message and its answer each: prints "done"
    open N    so many that stay open, likewise: prints "opened MS", the milliseconds since the last brief one had ended
    send N    sends so many messages by each that is open, with their answers: prints "sent"
    close     closes what is open: prints "closed"
"""
import selectors
import socket
import sys
import time

address = (sys.argv[2], int(sys.argv[3]))


def serve():
    waiter = selectors.DefaultSelector()
    listener = socket.create_server(address, backlog=512)
    waiter.register(listener, selectors.EVENT_READ)
    waiter.register(sys.stdin, selectors.EVENT_READ)
    print("listening", flush=True)
    while True:
        for key, _ in waiter.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                waiter.register(listener.accept()[0], selectors.EVENT_READ)
            elif got := key.fileobj.recv(4096):
                key.fileobj.sendall(got)
            else:
                waiter.unregister(key.fileobj)
                key.fileobj.close()


def exchange(sock):
    sock.sendall(b"message")
    got = b""
    while len(got) < 7:
        got += sock.recv(7)
    assert got == b"message"


def opened():
    sock = socket.create_connection(address)
    exchange(sock)
    return sock


def client():
    held, ended = [], 0
    for line in sys.stdin:
        words = line.split()
        count = int(words[1]) if words[1:] else 0
        if words[0] == "brief":
            for _ in range(count):
                opened().close()
            ended = time.monotonic()
            print("done", flush=True)
        elif words[0] == "open":
            held += [opened() for _ in range(count)]
            print("opened", round(1000 * (time.monotonic() - ended)), flush=True)
        elif words[0] == "send":
            for sock in held:
                for _ in range(count):
                    exchange(sock)
            print("sent", flush=True)
        else:
            while held:
                held.pop().close()
            print("closed", flush=True)


serve() if sys.argv[1] == "server" else client()
