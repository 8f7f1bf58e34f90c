# A client of Dask: tasks with small results, then sums of arrays that workers get from each other, while one is killed.
# Usage: dask_sums.py PORT SECONDS WORKER (its process), prints tasks per second.
import os
import signal
import sys
import time

import numpy
from distributed import Client


def array(number):
    return numpy.arange(number, number + 200000, dtype=numpy.int64)


def add(*arrays):
    return sum(arrays)


port, seconds, worker = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
with Client("tcp://127.0.0.1:%d" % port, timeout=60) as client:
    client.wait_for_workers(2, timeout=60)
    begin, count = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        squares = client.gather(client.map(lambda n: n * n, range(count, count + 100), pure=False))
        assert squares == [n * n for n in range(count, count + 100)], "other squares"
        count += 100
    print("%.0f" % (count / (time.monotonic() - begin)))
    for kill in (False, True):
        arrays = client.map(array, range(40), pure=False)
        sums = [client.submit(add, *arrays[n:n + 10], pure=False) for n in range(0, 40, 5)]
        if kill:
            os.kill(worker, signal.SIGKILL)
        for n, got in zip(range(0, 40, 5), client.gather(sums)):
            expected = sum(array(k) for k in range(n, min(n + 10, 40)))
            assert (got == expected).all(), "sum %d is another" % n
    assert len(client.scheduler_info()["workers"]) == 1
