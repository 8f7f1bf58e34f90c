"""The kernel's SMC as a peer, as far as TCP shows it: says SMC in SYN and SYN-ACK, does CLC before anything else, and goes on
by TCP. The bytes are as in echo.py.

smc_kernel.py client ADDRESS PORT FIRST [GREETING]  sends FIRST (hex), waits for the answer, prints `answer TYPE CODE`, or
                                                    `answer none` where FIRST is a Decline; then `echoed`
smc_kernel.py silent ADDRESS PORT                   connects, and says nothing until its standard input ends
smc_kernel.py server ADDRESS PORT DECLINE           waits for the client's first message, prints `first TYPE CODE`, declines
                                                    a Proposal; then echoes, and prints `served` at the end
"""
import socket
import sys

SMC = (286, 1 << 8 | 254)
SPEAKS = 2
PROPOSAL, DECLINE = 1, 4


def say(*words):
    print(*words, flush=True)


def speaks(sock):
    assert int.from_bytes(sock.getsockopt(*SMC, 4), sys.byteorder) == SPEAKS, "the peer says no SMC"


def receive(sock, count):
    got = sock.recv(count, socket.MSG_WAITALL)
    assert len(got) == count, (count, got)
    return got


def message(sock):
    """As smc_clc_wait_msg() of the kernel: eight bytes, then what they say."""
    header = receive(sock, 8)
    assert header[:4] in (b"\xe2\xd4\xc3\xd9", b"\xe2\xd4\xc3\xc4"), ("no CLC", header)
    whole = header + receive(sock, int.from_bytes(header[5:7], "big") - 8)
    return whole[4], whole


def code(kind, whole):
    return whole[16:20].hex() if kind == DECLINE else "-"


def client(address, port, first, greeting=""):
    sock = socket.socket()
    sock.settimeout(20)
    sock.setsockopt(*SMC, 1)
    sock.connect((address, int(port)))
    speaks(sock)
    first = bytes.fromhex(first)
    sock.sendall(first)
    if first[4] == PROPOSAL:
        kind, whole = message(sock)
        say("answer", kind, code(kind, whole))
    else:
        say("answer none")
    greeting = greeting.encode()
    assert receive(sock, len(greeting)) == greeting if greeting else True
    sent = 0
    for length in (1, 700, 3000) * 40:
        data = bytes((sent + i) & 0xFF for i in range(length))
        sock.sendall(data)
        assert receive(sock, length) == bytes(255 - b for b in data)
        sent += length
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    say("echoed")


def silent(address, port):
    sock = socket.socket()
    sock.setsockopt(*SMC, 1)
    sock.connect((address, int(port)))
    speaks(sock)
    sys.stdin.read()


def server(address, port, decline):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, int(port)))
    listener.setsockopt(*SMC, 1)
    listener.listen()
    say("listening")
    sock, _ = listener.accept()
    sock.settimeout(20)
    speaks(sock)
    kind, whole = message(sock)
    say("first", kind, code(kind, whole))
    if kind == PROPOSAL:
        sock.sendall(bytes.fromhex(decline))
    total = 0
    while data := sock.recv(65536):
        assert data == bytes((total + i) & 0xFF for i in range(len(data))), (total, data[:100])
        sock.sendall(bytes(255 - b for b in data))
        total += len(data)
    say("served")


globals()[sys.argv[1]](*sys.argv[2:])
