"""One connection, and what its ends do that real programs seldom do.

ends.py serve|call ADDRESS PORT urgent         both ends send bytes around an urgent one, round after round; prints "urgent ROUNDS"
ends.py serve|call ADDRESS PORT alarm GATE     the client sends an urgent byte among others, and its end; the server, which sends nothing, prints "rang",
                                               waits until somebody has written to the FIFO at GATE, and reads all; both print "moved BYTES HASH"
ends.py serve|call ADDRESS PORT full GATE      the client writes until nothing more fits, and prints "full"; the server reads once somebody has
                                               written to the FIFO at GATE; both print "moved BYTES HASH"
ends.py serve|call ADDRESS PORT killed GATE    the same, and the server is killed meanwhile: the client prints "reset"
"""
import array
import errno
import fcntl
import hashlib
import random
import select
import socket
import sys
import threading

SO_PROTOCOL, IPPROTO_SMC = 38, 256
ROUNDS = 8
BEFORE, BEHIND = 50, 30
BYTES = random.Random(2).randbytes(3_000_001)


def is_at_mark(sock):
    answer = array.array("i", [0])
    fcntl.ioctl(sock, 0x8905, answer)  # SIOCATMARK
    return bool(answer[0])


def exactly(sock, count):
    got = b""
    while len(got) < count:
        data = sock.recv(count - len(got))
        assert data, (got, count)
        got += data
    return got


def urgent_byte(n):
    """No doorbell, and none of the bytes around it."""
    return bytes([65 + n])


def send_urgent(sock, n):
    sock.sendall(b"d" * BEFORE)
    assert sock.send(urgent_byte(n), socket.MSG_OOB) == 1, n
    sock.sendall(b"e" * BEHIND)


def urgent(sock, _):
    # The kernel's SMC steps over the urgent byte with the one before, and so nobody is at the mark.
    is_kernels = sock.getsockopt(socket.SOL_SOCKET, SO_PROTOCOL) == IPPROTO_SMC
    waiting = select.poll()
    waiting.register(sock, select.POLLPRI)
    for n in range(ROUNDS):
        # A sender in the kernel's SMC waits behind an urgent byte until it was read.
        sender = threading.Thread(target=send_urgent, args=(sock, n))
        sender.start()
        assert waiting.poll(20_000), n
        got = exactly(sock, BEFORE)
        assert got == b"d" * BEFORE, (n, got)
        assert is_kernels or is_at_mark(sock), n
        byte = sock.recv(1, socket.MSG_OOB)
        assert byte == urgent_byte(n), (n, byte)
        got = exactly(sock, BEHIND)
        assert got == b"e" * BEHIND, (n, got)
        sender.join()
        # As by TCP, one that was not read before the next comes is urgent no more.
        sock.sendall(b"a")
        assert exactly(sock, 1) == b"a", n
    print("urgent", ROUNDS, flush=True)


def alarm(sock, gate):
    data = BYTES[:300_007]
    if sys.argv[1] == "call":
        send_urgent(sock, 7)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    else:
        assert exactly(sock, BEFORE // 2) == b"d" * (BEFORE // 2)
        waiting = select.poll()
        waiting.register(sock, select.POLLPRI)
        assert waiting.poll(20_000)
        # By then the agent sleeps, and has to hear that the bytes before are read.
        print("rang", flush=True)
        with open(gate) as opened:
            opened.read()
        assert exactly(sock, BEFORE // 2) == b"d" * (BEFORE // 2)
        assert sock.recv(1, socket.MSG_OOB) == urgent_byte(7)
        assert exactly(sock, BEHIND) == b"e" * BEHIND
        data = b"".join(iter(lambda: sock.recv(4099), b""))
    print("moved", len(data), hashlib.sha256(data).hexdigest(), flush=True)


def write_all_that_fits(sock):
    sock.setblocking(False)
    sent = 0
    room = select.poll()
    room.register(sock, select.POLLOUT)
    # The peer's kernel may still be taking some.
    while room.poll(500):
        try:
            sent += sock.send(BYTES[sent : sent + 30_011])
        except BlockingIOError:
            pass
    sock.setblocking(True)
    return sent


def full(sock, gate):
    if sys.argv[1] == "call":
        sent = write_all_that_fits(sock)
        assert 10_000 < sent < len(BYTES), sent
        print("full", sent, flush=True)
        sock.sendall(BYTES[sent:])
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
        data = BYTES
    else:
        # A kernel's client waits in connect(2) until the server makes a call on the connection.
        assert select.select([sock], [], [], 20)[0]
        with open(gate) as opened:
            opened.read()
        data = b"".join(iter(lambda: sock.recv(65_537), b""))
    print("moved", len(data), hashlib.sha256(data).hexdigest(), flush=True)


def killed(sock, gate):
    try:
        full(sock, gate)
    except OSError as error:
        assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED), error
        print("reset", flush=True)


def main(role, address, port, how, gate=None):
    sock = socket.socket()
    if role == "serve":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, int(port)))
        sock.listen()
        print("ready", flush=True)
        sock, _ = sock.accept()
    else:
        sock.connect((address, int(port)))
    globals()[how](sock, gate)
    sock.close()


main(*sys.argv[1:])
