# Threads and a started program that exchange messages by TCP.
import os
import socket
import subprocess
import sys
import threading

listener = socket.create_server(("127.0.0.1", 0))


def serve():
    for _ in range(2):
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                stream.write(line.upper())
                stream.flush()


thread = threading.Thread(target=serve)
thread.start()
client = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as s, s.makefile("rwb") as stream:
    for i in range(200):
        stream.write(b"line %d\\n" % i)
        stream.flush()
        assert stream.readline() == b"LINE %d\\n" % i
print("done")
"""
port = str(listener.getsockname()[1])
for _ in range(2):
    print(subprocess.check_output([sys.executable, "-c", client, port]))
thread.join()
print(os.popen("echo ended").read())
