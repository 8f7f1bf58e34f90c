"""Connections that never rest: each one's bytes go there and back again, in odd sizes, and each byte is checked.

under_load.py serve ADDRESS PORT COUNT         echoes COUNT connections; prints "ready", and "served" once all have ended
under_load.py call ADDRESS PORT COUNT AT STOP  fills COUNT connections until there is a file STOP, and takes the rest; AT is a file with the number
                                               of bytes that all of them have had back at least; prints "called BYTES" at the end
"""
import os
import random
import socket
import sys
import threading
import time

# Of a length that divides no buffer's.
PERIOD = 65_521
BYTES = random.Random(1).randbytes(PERIOD) * 3
SIZES = [1, 13, 511, 4099, 30_011, 100_003]

failures = []


def guarded(act):
    """A thread's failure is the program's."""

    def run(*args):
        try:
            act(*args)
        except BaseException as error:
            failures.append(error)
            print("failed", repr(error), flush=True)

    return run


@guarded
def echo(sock):
    draw = random.Random(1)
    while data := sock.recv(draw.choice([1021, 65_537])):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    sock.close()


def serve(address, port, count):
    listener = socket.create_server((address, int(port)))
    print("ready", flush=True)
    threads = []
    for _ in range(int(count)):
        threads.append(threading.Thread(target=echo, args=(listener.accept()[0],)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    print("served", flush=True)


class Stream:
    def __init__(self, number, address, port, stop):
        self.sock = socket.create_connection((address, int(port)))
        self.draw = random.Random(number)
        self.start = number * 7919
        self.stop = stop
        self.sent = self.got = 0
        self.threads = [threading.Thread(target=act, args=(self,)) for act in (Stream.send, Stream.receive)]
        for thread in self.threads:
            thread.start()

    def piece(self, at, length):
        return BYTES[(self.start + at) % PERIOD :][:length]

    @guarded
    def send(self):
        while not os.path.exists(self.stop):
            data = self.piece(self.sent, self.draw.choice(SIZES))
            self.sock.sendall(data)
            self.sent += len(data)
        self.sock.shutdown(socket.SHUT_WR)

    @guarded
    def receive(self):
        while data := self.sock.recv(65_537):
            assert data == self.piece(self.got, len(data)), self.got
            self.got += len(data)


def call(address, port, count, at, stop):
    streams = [Stream(number, address, port, stop) for number in range(int(count))]
    while any(thread.is_alive() for stream in streams for thread in stream.threads):
        with open(at + ".new", "w") as file:
            print(min(stream.got for stream in streams), file=file)
        os.replace(at + ".new", at)
        time.sleep(0.05)
    for stream in streams:
        assert stream.sent == stream.got, (stream.sent, stream.got)
    print("called", min(stream.got for stream in streams), flush=True)


globals()[sys.argv[1]](*sys.argv[2:])
sys.exit(bool(failures))
