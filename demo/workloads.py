"""The workloads: how each is set up, what it measures, and what is expected of the ratio."""

import csv
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from host import Failure, World

MESSAGE = 64000
"""The largest round payload of `sockperf`: it takes less than 65507 bytes."""

PING_PONG_RATE = 4_000_000
"""`sockperf` reserves its records by the rate and aborts beyond; its own maximum is too low for uSMC."""

NGINX = """\
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
{user}
events {{}}
http {{
    access_log off;
    sendfile on;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {directory}/www;
    }}
}}
"""


@dataclass(frozen=True)
class Measure:
    """One line of the table: `label` is its first cell, `what` says the same within its workload."""

    label: str
    what: str
    unit: str
    target: float
    lower_is_better: bool = False

    def ratio(self, tcp, smc):
        return tcp / smc if self.lower_is_better else smc / tcp


@dataclass(frozen=True)
class Workload:
    """One pair of server and client. `run` takes a world and seconds, and returns a figure per measure."""

    name: str
    measures: tuple[Measure, ...]
    run: Callable[[World, int], tuple[float, ...]]
    note: str = ""
    often: int = 1
    """How many times the rounds of the others: one where figures vary more than what they are to show."""


def workloads(cores):
    """Those that can run on so many cores."""
    first, *others = cores
    if others:
        second = others[0]
        yield Workload(
            "ping-pong",
            (Measure("`sockperf ping-pong`, two cores, median one way", "median one way", "µs", 20,
                     lower_is_better=True),),
            partial(ping_pong, first, second), f"CPUs {first} and {second}")
    yield Workload(
        "ping-pong-one-core",
        (Measure("`sockperf ping-pong`, one core, median one way", "median one way", "µs", 1,
                 lower_is_better=True),),
        partial(ping_pong, first, first), f"CPU {first}")
    if others:
        yield Workload(
            "throughput",
            (Measure("`sockperf throughput`, 64 KB messages", "bandwidth", "GB/s", 2.5),),
            partial(throughput, first, second), f"CPUs {first} and {second}")
    yield Workload(
        "redis",
        (Measure("`redis-benchmark -c 200 -d 1024`, SET", "SET", "k/s", 1.6),
         Measure("`redis-benchmark -c 200 -d 1024`, GET", "GET", "k/s", 1.6)),
        redis)
    yield Workload(
        "nginx",
        (Measure("nginx and `wrk`, keep-alive, 64 connections, 1 KB", "requests", "k/s", 1.4),),
        nginx, "1 worker")
    yield Workload(
        "nginx-close",
        (Measure("nginx and `wrk`, `Connection: close`", "requests", "k/s", 0.95),),
        partial(nginx, header="Connection: close"),
        "1 worker; a connection that ends with its first answer stays TCP: changing over would not pay",
        often=3)


def ping_pong(server_cpu, client_cpu, world, seconds):
    """Half a round trip, median, in microseconds."""
    output = sockperf(world, server_cpu, client_cpu, "ping-pong", "-t", seconds, f"--mps={PING_PONG_RATE}")
    if "# dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0" not in output:
        raise Failure(f"sockperf lost messages.\n{output}")
    return (find(r"percentile 50\.000 = +([\d.]+)", output),)


def throughput(server_cpu, client_cpu, world, seconds):
    """Gigabytes in a second."""
    output = sockperf(world, server_cpu, client_cpu, "throughput", "-t", seconds, "-m", MESSAGE)
    return (find(r"Message Rate is (\d+)", output) * MESSAGE / 1e9,)


def sockperf(world, server_cpu, client_cpu, mode, *options):
    at = ("--tcp", "-i", "127.0.0.1", "-p", str(world.port))
    world.serve("sockperf", "server", *at, cpu=server_cpu)
    return world.load("sockperf", mode, *at, *map(str, options), cpu=client_cpu)


def redis(world, seconds):
    """Thousands of SETs and GETs in a second."""
    at = ("--port", str(world.port), "--bind", "127.0.0.1")
    world.serve("redis-server", *at, "--save", "", "--appendonly", "no", "--dir", str(world.scratch))
    requests = 100_000 * seconds
    to = ("-h", "127.0.0.1", "-p", str(world.port))
    output = world.load("redis-benchmark", *to, "-c", "200", "-d", "1024", "-n", str(requests), "-t", "set,get",
                        "--csv")
    rates = {row[0]: float(row[1]) / 1e3 for row in csv.reader(output.splitlines()) if row[0] in ("SET", "GET")}
    if len(rates) != 2:
        raise Failure(f"redis-benchmark did not print SET and GET.\n{output}")
    # Without system calls the rates can be so high that one wants to hear it from the server, too.
    counted = world.ask("redis-cli", *to, "info", "commandstats")
    for command in ("set", "get"):
        if f"cmdstat_{command}:calls={requests}," not in counted:
            raise Failure(f"redis-server did not count {requests} of {command}.\n{counted}")
    return rates["SET"], rates["GET"]


def nginx(world, seconds, header=None):
    """Thousands of requests in a second."""
    pages = world.scratch / "www"
    pages.mkdir()
    (pages / "1k").write_bytes(b"x" * 1024)
    # Workers that drop root's rights could open neither the ISM directory nor the page.
    user = "user root;" if os.geteuid() == 0 else ""
    config = world.scratch / "nginx.conf"
    config.write_text(NGINX.format(directory=world.scratch, port=world.port, user=user))
    world.serve("nginx", "-e", "stderr", "-p", str(world.scratch), "-c", str(config))
    headers = ("-H", header) if header else ()
    world.brief = header == "Connection: close"
    output = world.load("wrk", "-t", "1", "-c", "64", "-d", str(seconds), *headers,
                        f"http://127.0.0.1:{world.port}/1k")
    if "Socket errors" in output or "Non-2xx" in output:
        raise Failure(f"wrk saw errors.\n{output}")
    return (find(r"Requests/sec: +([\d.]+)", output) / 1e3,)


def find(pattern, output):
    """The number a program printed."""
    match = re.search(pattern, output)
    if not match or float(match[1]) <= 0:
        raise Failure(f"no figure like `{pattern}` in:\n{output}")
    return float(match[1])
