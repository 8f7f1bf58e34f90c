"""Sets and gets values of all sizes from several threads, and checks each."""
import hashlib
import socket
import sys
import threading

PORT = int(sys.argv[1])


class Client:
    def __init__(self):
        self.socket = socket.create_connection(("127.0.0.1", PORT))
        self.buffer = b""

    def fill(self):
        piece = self.socket.recv(65536)
        assert piece, "memcached closed the connection"
        self.buffer += piece

    def line(self):
        while b"\r\n" not in self.buffer:
            self.fill()
        line, self.buffer = self.buffer.split(b"\r\n", 1)
        return line

    def take(self, count):
        while len(self.buffer) < count:
            self.fill()
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def set(self, key, value):
        self.socket.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
        assert self.line() == b"STORED"

    def get(self, key):
        self.socket.sendall(b"get %s\r\n" % key)
        head = self.line().split()
        assert head[:2] == [b"VALUE", key], head
        value = self.take(int(head[3]))
        assert self.line() == b"" and self.line() == b"END"
        return value


def value_of(thread, number):
    seed = hashlib.sha256(b"%d %d" % (thread, number)).digest()
    return (seed * 20000)[: (number * 7919) % 500000]


def work(thread, client, failed):
    try:
        for number in range(150):
            key = b"key-%d-%d" % (thread, number)
            client.set(key, value_of(thread, number))
            back = number // 2
            assert client.get(b"key-%d-%d" % (thread, back)) == value_of(thread, back)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.socket.recv(1) == b""
    except BaseException as error:  # told to the main thread
        failed.append(error)
        raise


clients = [Client() for _ in range(8)]
for client in clients:
    for _ in range(8):
        client.set(b"warm", b"up")
print("connected", flush=True)
sys.stdin.readline()
failed = []
threads = [threading.Thread(target=work, args=(i, c, failed)) for i, c in enumerate(clients)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(1 if failed else 0)
