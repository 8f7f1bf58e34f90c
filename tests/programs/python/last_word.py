"""A server that says nothing until it is told to, and then all at once.

last_word.py server END PORT     takes one client, reads until its standard input has a line, answers with 100 000 bytes and ends the
                                 connection by END: shutdown or close; prints "listening"
last_word.py client - PORT       sends bytes until its standard input has a line, and prints "quiet"; reads without waiting; prints
                                 "port PORT", and "took BYTES" at the end
"""
import select
import socket
import sys

role, end, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
ANSWER = bytes(range(250)) * 400


def read():
    """What there is to be read; None: nothing yet."""
    try:
        return sock.recv(1 << 20, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def is_told():
    return bool(select.select([sys.stdin], [], [], 0)[0])


if role == "server":
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    sock, _ = listener.accept()
    while not is_told():
        read()
    while read():
        pass
    sock.sendall(ANSWER)
    if end == "shutdown":
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    sock.close()
else:
    sock = socket.create_connection(("127.0.0.1", port))
    print("port", sock.getsockname()[1], flush=True)
    while not is_told():
        sock.sendall(b"-")
        assert read() is None
    # An event loop: no doorbell while it looks by itself.
    waiting = select.epoll()
    waiting.register(sock, select.EPOLLIN)
    waiting.poll(0.01)
    waiting.unregister(sock)
    print("quiet", flush=True)
    took = b""
    while (some := read()) != b"":
        took += some or b""
    assert ANSWER.startswith(took)
    print("took", len(took), flush=True)
