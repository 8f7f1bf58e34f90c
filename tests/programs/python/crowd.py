"""A server that takes all its connections before it does anything with them.

crowd.py ADDRESS PORT COUNT  prints "listening"; takes COUNT connections, and then echoes each in a thread of its own, as echo.py does;
                             prints "served" at the end
"""
import socket
import sys
import threading

address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def serve(sock):
    while data := sock.recv(65_536):
        sock.sendall(bytes(255 - byte for byte in data))
    sock.close()


listener = socket.create_server((address, port))
print("listening", flush=True)
taken = [listener.accept()[0] for _ in range(count)]
threads = [threading.Thread(target=serve, args=(sock,)) for sock in taken]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("served", flush=True)
