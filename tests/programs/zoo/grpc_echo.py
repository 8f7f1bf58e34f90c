# gRPC without generated code: a server that gives back what it is sent, and its client.
# Usage: grpc_echo.py serve PORT; grpc_echo.py talk PORT SECONDS, which prints messages per second.
import hashlib
import signal
import sys
import threading
import time
from concurrent import futures

import grpc


def message(number):
    return hashlib.sha256(b"%d" % number).digest() * (1 + number * number * 97 % 1500 if number % 20 else 30000)


def serve(port):
    handlers = grpc.method_handlers_generic_handler("zoo", {
        "one": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
        "many": grpc.stream_stream_rpc_method_handler(lambda requests, _: requests),
    })
    server = grpc.server(futures.ThreadPoolExecutor(8), handlers=(handlers,))
    server.add_insecure_port("127.0.0.1:%d" % port)
    server.start()
    signal.sigwait({signal.SIGTERM})
    server.stop(5).wait()


def talk(port, end, thread, counts):
    # A connection of its own.
    with grpc.insecure_channel("127.0.0.1:%d" % port, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        one, many = channel.unary_unary("/zoo/one"), channel.stream_stream("/zoo/many")
        number = thread * 1000
        while time.monotonic() < end:
            for number in range(number + 1, number + 21):
                assert one(message(number), timeout=20) == message(number), "message %d is another" % number
            sent = range(number + 1, number + 21)
            got = many(map(message, sent), timeout=20)
            assert all(answer == message(n) for n, answer in zip(sent, got, strict=True)), "a stream is another"
            number = sent[-1]
        counts[thread] = number - thread * 1000


port = int(sys.argv[2])
if sys.argv[1] == "serve":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    serve(port)
else:
    seconds, counts = float(sys.argv[3]), {}
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=talk, args=(port, end, thread, counts)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == len(threads), "a thread has failed"
    print("%.0f" % (sum(counts.values()) / seconds))
