"""The other end of streams.go: `serve` echoes as many connections, `talk PORT` checks what comes back."""

import random
import socket
import sys
import threading

CONNECTIONS, SIZE = 8, 5_000_000


def echo(conn):
    while data := conn.recv(65536):
        conn.sendall(data)
    conn.shutdown(socket.SHUT_WR)


def serve():
    listener = socket.create_server(("127.0.0.1", 0))
    print("port", listener.getsockname()[1], flush=True)
    for _ in range(CONNECTIONS):
        threading.Thread(target=echo, args=listener.accept()[:1]).start()
    sys.stdin.read()


def talk(port, seed, wrong):
    sent = random.Random(seed).randbytes(SIZE)
    conn = socket.create_connection(("127.0.0.1", port))

    def send():
        conn.sendall(sent)
        conn.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    got = b"".join(iter(lambda: conn.recv(65536), b""))
    sender.join()
    if got != sent:
        wrong.append(seed)


def main():
    if sys.argv[1] == "serve":
        return serve()
    wrong = []
    threads = [threading.Thread(target=talk, args=(int(sys.argv[2]), i, wrong)) for i in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        sys.exit("what came back differs")
    print("all well")


main()
