"""A server or a client, run by a Python of 32 or of 64 bits. Its arguments are its part:

serve                listens, prints `port N` and serves HTTP
serve-by PYTHON      likewise, but becomes that other Python once it listens
fetch PORT           gets bodies of all sizes over one connection, checks each, prints `local N` and waits for input
maps                 prints `bits N` and `library PATH`, the one of uSMC that is loaded
run PROGRAM ...      runs it, as fork and exec
"""
import hashlib
import http.client
import http.server
import os
import socket
import struct
import subprocess
import sys

SIZES = [0, 1, 100, 4096, 65536, 1000003]


def body(size):
    block = hashlib.sha256(b"%d" % size).digest()
    return (block * (size // len(block) + 1))[:size]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        data = body(int(self.path[1:]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def serve(listener):
    server = http.server.ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()


def listen():
    listener = socket.create_server(("127.0.0.1", 0))
    print("port", listener.getsockname()[1], flush=True)
    return listener


def fetch(port):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for size in SIZES * 5:
        connection.request("GET", "/%d" % size)
        got = connection.getresponse().read()
        assert got == body(size), (size, len(got))
    print("local", connection.sock.getsockname()[1], flush=True)
    sys.stdin.read()


def maps():
    print("bits", struct.calcsize("P") * 8)
    with open("/proc/self/maps") as lines:
        paths = {line.split()[-1] for line in lines if "usmc_preload" in line}
    print("library", *paths, flush=True)


part, *rest = sys.argv[1:]
if part == "serve":
    serve(listen())
elif part == "serve-by":
    listener = listen()
    listener.set_inheritable(True)
    os.execv(rest[0], [rest[0], __file__, "serve-fd", str(listener.fileno())])
elif part == "serve-fd":
    serve(socket.socket(fileno=int(rest[0])))
elif part == "fetch":
    fetch(int(rest[0]))
elif part == "maps":
    maps()
elif part == "run":
    subprocess.run(rest, check=True)
