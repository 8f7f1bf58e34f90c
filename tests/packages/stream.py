# Streams whose every byte is checked, for as long as a file is there.
#   stream.py serve PORT             sends back what each connection sends, until it is terminated
#   stream.py talk PORT FILE         prints the port of its end, counts round trips in FILE.count, and ends well once FILE is gone
import os
import signal
import socket
import sys
import threading

BLOCK = 3000


def echo(connection):
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def serve(port):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with socket.create_server(("127.0.0.1", port), backlog=16) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()


def receive(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise SystemExit("the stream ended early")
        data += part
    return data


def talk(port, file):
    with socket.create_connection(("127.0.0.1", port)) as connection, open(file + ".count", "w") as count:
        connection.settimeout(30)
        print(connection.getsockname()[1], flush=True)
        rounds = 0
        while os.path.exists(file):
            block = (b"%016d" % rounds) + bytes((rounds + i) % 256 for i in range(BLOCK))
            connection.sendall(block)
            if receive(connection, len(block)) != block:
                raise SystemExit(f"round {rounds}: other bytes came back")
            rounds += 1
            os.pwrite(count.fileno(), b"%016d\n" % rounds, 0)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1):
            raise SystemExit("bytes came back that were not sent")


match sys.argv[1:]:
    case ["serve", port]:
        serve(int(port))
    case ["talk", port, file]:
        talk(int(port), file)
    case _:
        raise SystemExit("stream.py serve PORT | talk PORT FILE")
