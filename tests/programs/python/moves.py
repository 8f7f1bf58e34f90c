"""One connection that both ends fill at a time, of which one end's process changes half-way.

moves.py serve|call ADDRESS PORT HOW BYTES GATE

Each end sends BYTES in odd sizes and checks each byte that it gets. Half-way it prints "half" and waits until somebody writes to the
FIFO at GATE. Then it does what HOW says, and in the end prints "moved BYTES sent BYTES":

stay    goes on
fork    a child goes on, and the parent closes its descriptor
share   the parent sends the rest, and a child gets it
exec    another program goes on with the descriptor
pass    another process that was started before gets it by SCM_RIGHTS and goes on
reset   closes with SO_LINGER of 0 seconds
expect  goes on until the peer's reset, which has to come
end     sends nothing more, and its end; the peer's bytes come all the same
"""
import os
import random
import select
import socket
import struct
import sys

# Of a length that divides no buffer's.
PERIOD = 65_521
BYTES = random.Random(1).randbytes(PERIOD) * 3


def piece(at, length):
    return BYTES[at % PERIOD:][:length]


class Stream:
    def __init__(self, sock, how, gate, count, sent=0, got=0, is_half=False):
        self.sock, self.how, self.gate, self.count = sock, how, gate, count
        self.sent, self.got, self.is_half = sent, got, is_half
        self.goal = count
        self.draw = random.Random(count)
        sock.setblocking(False)

    def send(self):
        size = min(self.draw.choice([1, 13, 511, 4099, 30_011, 100_003]), self.goal - self.sent)
        try:
            self.sent += self.sock.send(piece(self.sent, size))
        except BlockingIOError:
            pass
        if self.sent == self.goal:
            self.sock.shutdown(socket.SHUT_WR)

    def receive(self):
        """Whether there is more to come."""
        try:
            data = self.sock.recv(self.draw.choice([1, 17, 1021, 65_537]))
        except BlockingIOError:
            return True
        assert data == piece(self.got, len(data)), (self.got, data[:100])
        self.got += len(data)
        return bool(data)

    def run(self, sends=True, receives=True):
        """Whether the connection is at its end, and was this process' until then."""
        waiting = select.poll()
        sends = sends and self.sent < self.goal
        while sends or receives:
            waiting.register(self.sock, select.POLLIN * receives | select.POLLOUT * sends)
            for _, events in waiting.poll():
                if receives and events & ~select.POLLOUT:
                    receives = self.receive()
                if sends and events & ~select.POLLIN:
                    self.send()
                    sends = self.sent < self.goal
            if not self.is_half and min(self.sent, self.got) > self.count // 2:
                self.is_half = True
                print("half", flush=True)
                with open(self.gate) as gate:
                    gate.read()
                if not self.change():
                    return False
                sends = sends and self.sent < self.goal
        return True

    def say(self, *more):
        print("moved", self.got, "sent", self.sent, *more, flush=True)

    def rest(self):
        """What another process is told."""
        return [self.how, self.gate, self.count, self.sent, self.got]

    def change(self):
        """Whether this process goes on."""
        if self.how == "fork" and os.fork():
            self.sock.close()
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        if self.how == "share":
            if child := os.fork():
                self.run(receives=False)
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            self.run(sends=False)
            self.say()
            return False
        if self.how == "exec":
            os.set_inheritable(self.sock.fileno(), True)
            words = ["adopt", self.sock.fileno(), *self.rest()]
            os.execv(sys.executable, [sys.executable, __file__, *map(str, words)])
        if self.how == "pass":
            words = " ".join(map(str, self.rest())).encode()
            socket.send_fds(helper, [words], [self.sock.fileno()])
            self.sock.close()
            helper.shutdown(socket.SHUT_WR)
            assert helper.recv(1) == b""
            return False
        if self.how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()
            self.say()
            return False
        if self.how == "expect":
            try:
                self.run()
            except (ConnectionResetError, BrokenPipeError) as error:
                self.say(type(error).__name__)
                return False
            raise AssertionError("an end came, and no reset")
        if self.how == "end":
            self.goal = self.sent
            self.sock.shutdown(socket.SHUT_WR)
        return True


def adopt(sock, words):
    how, gate, *numbers = words
    count, sent, got = map(int, numbers)
    stream = Stream(sock, how, gate, count, sent, got, is_half=True)
    stream.run()
    stream.say()


role = sys.argv[1]
if role == "adopt":
    adopt(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    sys.exit()
address, port, how, count, gate = sys.argv[2:]
if how == "pass":
    helper, other = socket.socketpair()
    if not os.fork():
        helper.close()
        words, [number], _, _ = socket.recv_fds(other, 4096, 1)
        adopt(socket.socket(fileno=number), words.decode().split())
        os._exit(0)
    other.close()
if role == "serve":
    listener = socket.create_server((address, int(port)))
    print("ready", flush=True)
    sock, _ = listener.accept()
    listener.close()
else:
    sock = socket.create_connection((address, int(port)))
stream = Stream(sock, how, gate, int(count))
if stream.run():
    stream.say()
