"""A connection with itself, closed step by step: one step for each line of input.

closing.py ADDRESS EXCHANGES: listens at ADDRESS, connects by 127.0.0.1, accepts; talks so often; this end closes its sending
direction, and then the other one.
"""

import socket
import sys


def say(word):
    print(word, flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


listener = socket.create_server((sys.argv[1], 0))
client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
server, _ = listener.accept()
say(f"port {client.getsockname()[1]}")
for _ in range(int(sys.argv[2])):
    client.sendall(b"question")
    assert server.recv(8, socket.MSG_WAITALL) == b"question"
    server.sendall(b"answer")
    assert client.recv(6, socket.MSG_WAITALL) == b"answer"
say("talked")
client.shutdown(socket.SHUT_WR)
assert server.recv(1) == b""
say("half")
server.shutdown(socket.SHUT_WR)
assert client.recv(1) == b""
say("both")
