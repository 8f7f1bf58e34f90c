"""Programs for tests/ebpf.rs: sockets that ask to say SMC in their SYN, what came of it, and a stranger in the way.

serve ADDRESS PORT [arm|late|unsave|disarm]  accepts and echoes; `accepted OUTCOME SAVED-SYN PEER` for each connection
connect ADDRESS PORT [arm [BYTES]]     `connected OUTCOME PEER`, then sends, receives and prints `echoed`
echo INTERFACE                         a host without a kernel: answers a SYN with the SYN's own options
passer PATH PORT, taker PATH           a listener that goes from one to the other by SCM_RIGHTS
"""

import array
import os
import socket
import struct
import sys

SMC = (286, 1 << 8 | 254)
TCP_SAVE_SYN = 27
TCP_SAVED_SYN = 28


def arm(sock, on=1):
    sock.setsockopt(*SMC, on)


def outcome(sock):
    try:
        return int.from_bytes(sock.getsockopt(*SMC, 4), sys.byteorder)
    except OSError as e:
        return f"errno={e.errno}"


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def say(*words):
    print(*words, flush=True)


def serve(address, port, how=""):
    listener = socket.socket(family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, int(port)))
    if how == "arm":
        arm(listener)
    listener.listen()
    if how == "unsave":
        # As an application that does not know of us.
        arm(listener)
        listener.setsockopt(socket.IPPROTO_TCP, TCP_SAVE_SYN, 0)
    if how in ("late", "disarm"):
        arm(listener)
    if how == "disarm":
        arm(listener, 0)
    say("port", listener.getsockname()[1])
    while True:
        sock, peer = listener.accept()
        saved = sock.getsockopt(socket.IPPROTO_TCP, TCP_SAVED_SYN, 200)
        say("accepted", outcome(sock), saved.hex() or "-", peer[0])
        while data := sock.recv(4096):
            sock.sendall(data)
        sock.close()


def connect(address, port, how="", most=100_000):
    sock = socket.socket(family(address))
    sock.settimeout(20)
    if how == "arm":
        arm(sock)
    sock.connect((address, int(port)))
    say("connected", outcome(sock), sock.getpeername()[0])
    for size in (4, int(most)):
        text = os.urandom(size)
        sock.sendall(text)
        got = b""
        while len(got) < size:
            got += sock.recv(65536)
        assert got == text
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    say("echoed")


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def answer(frame, flags, seq, ack, options=b"", data=b""):
    """The frame that goes back to where `frame` came from."""
    ip, tcp = frame[14:34], frame[34:]
    header = tcp[2:4] + tcp[:2] + struct.pack(">IIBBHHH", seq, ack, (20 + len(options)) << 2, flags, 65535, 0, 0)
    segment = header + options + data
    pseudo = ip[16:20] + ip[12:16] + struct.pack(">HH", 6, len(segment))
    segment = segment[:16] + struct.pack(">H", checksum(pseudo + segment)) + segment[18:]
    start = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, 6, 0)
    packet = start + ip[16:20] + ip[12:16]
    packet = packet[:10] + struct.pack(">H", checksum(packet)) + packet[12:]
    return frame[6:12] + frame[:6] + b"\x08\0" + packet + segment


def echo(interface):
    """TCP as some servers have it: whatever options come with a SYN are sent back."""
    FIN, SYN, PSH, ACK = 1, 2, 8, 16
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    link.bind((interface, 0))
    say("ready")
    ours = {}
    while True:
        frame, where = link.recvfrom(65536)
        if where[2] == socket.PACKET_OUTGOING or frame[23] != 6 or frame[14] != 0x45:
            continue
        frame = frame[:14 + struct.unpack(">H", frame[16:18])[0]]
        tcp = frame[34:]
        port, seq, flags, start = tcp[:2], *struct.unpack(">I", tcp[4:8]), tcp[13], (tcp[12] >> 4) * 4
        data = tcp[start:]
        if flags & SYN:
            ours[port] = 1000
            # All but the timestamps, which would be somebody's clock: NOPs in their place.
            options = tcp[20:start]
            at = options.find(b"\x08\x0a")
            if at >= 0:
                options = options[:at] + b"\x01" * 10 + options[at + 10:]
            say("syn", options.hex())
            link.send(answer(frame, SYN | ACK, ours[port], seq + 1, options))
            ours[port] += 1
        elif port in ours and (data or flags & FIN):
            end = seq + len(data) + (flags & FIN)
            link.send(answer(frame, ACK | PSH | flags & FIN, ours[port], end & 0xFFFFFFFF, data=data))
            ours[port] += len(data) + (flags & FIN)


def passer(path, port):
    listener = socket.create_server(("", int(port)))
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    say("armed", outcome(listener))
    socket.send_fds(channel, [b"x"], [listener.fileno()])
    say("passed", outcome(listener))
    sys.stdin.read()


def taker(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    say("ready")
    channel = server.accept()[0]
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    listener = socket.socket(fileno=fds[0])
    say("taken", outcome(listener))
    sys.stdin.read()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
