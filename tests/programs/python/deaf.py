"""deaf.py SOCKET OTHER: an agent that lets go of the first process that asks it, without having read what that asks. The socket OTHER
takes the place of its own before. Prints "ready"."""
import os
import select
import socket
import sys

path, other = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
listener.listen()
print("ready", flush=True)
visitor, _ = listener.accept()
assert select.select([visitor], [], [], 60)[0], "nobody asked"
os.rename(other, path)
