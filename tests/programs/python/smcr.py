"""What smcr(8), smc_pnet(8) and smcss(8) ask of the kernel's SMC: no package of Debian 12 has them.

smcr.py ueid NAME                    one more user-defined EID
smcr.py pnet NAME NETDEV DEVICE      both belong to that physical network
smcr.py sockets PORT                 how many sockets with that port at either end are connected, and by RDMA
smcr.py links                        for each link "GROUP DEVICE STATE CONNECTIONS"; STATE as in smc_core.h: 3 is active
smcr.py show PORT                    as JSON, the active links with connections, and the sockets with that port at either end

linux/smc.h and linux/smc_diag.h have the numbers.
"""
import ipaddress
import json
import socket
import struct
import sys

GENERIC, SOCK_DIAG = 16, 4
REQUEST, ACK, DUMP = 1, 4, 0x300
ERROR, DONE = 2, 3
CTRL, GETFAMILY, FAMILY_ID, FAMILY_NAME = 16, 3, 1, 2


def attribute(kind, data):
    return struct.pack("HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def attributes(data):
    """By their kinds."""
    found, at = {}, 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("HH", data, at)
        found[kind & 0x3FFF] = data[at + 4 : at + size]
        at += (size + 3) & ~3
    return found


def ask(protocol, kind, flags, body):
    """The bodies of the answers."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    sock.settimeout(10)
    sock.send(struct.pack("IHHII", 16 + len(body), kind, REQUEST | flags, 1, 0) + body)
    answers = []
    while True:
        data, at = sock.recv(1 << 20), 0
        while at < len(data):
            size, kind = struct.unpack_from("IH", data, at)
            if kind == DONE:
                return answers
            if kind == ERROR:
                code = struct.unpack_from("i", data, at + 16)[0]
                assert code == 0, code
                return answers
            answers.append(data[at + 16 : at + size])
            at += (size + 3) & ~3


def generic(family, command, flags, *parts):
    """The attributes of each answer."""
    name = attribute(FAMILY_NAME, family.encode() + b"\0")
    answers = ask(GENERIC, CTRL, ACK, struct.pack("BBH", GETFAMILY, 1, 0) + name)
    number = struct.unpack("H", attributes(answers[0][4:])[FAMILY_ID])[0]
    body = struct.pack("BBH", command, 1, 0) + b"".join(parts)
    return [attributes(answer[4:]) for answer in ask(GENERIC, number, flags, body)]


def ueid(name):
    ADD_UEID = 10
    generic("SMC_GEN_NETLINK", ADD_UEID, ACK, attribute(1, name.encode().ljust(32) + b"\0"))


def pnet(name, netdev, device):
    SET, NAME, ETH, IB, PORT = 2, 1, 2, 3, 4
    name = attribute(NAME, name.encode() + b"\0")
    generic("SMC_PNETID", SET, ACK, name, attribute(ETH, netdev.encode() + b"\0"))
    generic("SMC_PNETID", SET, ACK, name, attribute(IB, device.encode() + b"\0"), attribute(PORT, b"\1"))


def by_rdma(port):
    """The ports of both ends of each connection by RDMA. The kernel shows no addresses of sockets by IPPROTO_SMC."""
    BY_FAMILY, AF_SMC, ACTIVE, BY_RDMA = 20, 43, 1, 0
    answers = ask(SOCK_DIAG, BY_FAMILY, DUMP, struct.pack("BBBB48x", AF_SMC, 0, 0, 0))
    ends = []
    for answer in answers:
        _, state, mode, _, *ports = struct.unpack_from("!BBBBHH", answer)
        if state == ACTIVE and mode == BY_RDMA and int(port) in ports:
            ends.append(ports)
    return ends


def sockets(port):
    print(len(by_rdma(port)))


def all_links():
    """Each link's group and the attributes of both."""
    GET_LINK, GROUP, LINK = 3, 2, 3
    number, group = 0, {}
    for answer in generic("SMC_GEN_NETLINK", GET_LINK, DUMP):
        # Each group is told before its links.
        if GROUP in answer:
            number, group = number + 1, attributes(answer[GROUP])
        if LINK in answer:
            yield number, group, attributes(answer[LINK])


def numbers(link):
    """Its state and its connections."""
    COUNT, STATE = 6, 10
    return [struct.unpack("I", link[kind])[0] for kind in (STATE, COUNT)]


def links():
    DEVICE = 2
    for group, _, link in all_links():
        print(group, link[DEVICE].rstrip(b"\0").decode(), *numbers(link))


def address(gid):
    found = ipaddress.IPv6Address(gid.rstrip(b"\0").decode())
    return f"::ffff:{found.ipv4_mapped}" if found.ipv4_mapped else str(found)


def show(port):
    ROLE, ID, GID, PEER_GID, ACTIVE = 2, 1, 4, 5, 3
    found = []
    for _, group, link in all_links():
        state, count = numbers(link)
        if state == ACTIVE and count > 0:
            gid, peer_gid = (address(link[kind]) for kind in (GID, PEER_GID))
            role = ["CLNT", "SERV"][group[ROLE][0]]
            found.append(dict(role=role, id=link[ID][0], gid=gid, peer_gid=peer_gid, conns=count))
    print(json.dumps(dict(links=found, sockets=by_rdma(port))))


globals()[sys.argv[1]](*sys.argv[2:])
