"""What one run needs of the machine: directories, a port, processes, and a look at its connections."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USMC = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").resolve() / "release" / "usmc"
PROGRAMS = ("redis-server", "redis-benchmark", "redis-cli", "nginx", "wrk", "sockperf", "taskset")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

START_LIMIT = 10
LOAD_LIMIT = 120
STOP_LIMIT = 5
LOOK_AGAIN = 0.5
SEEK_EVERY = 0.05


class Failure(Exception):
    """A run that cannot be counted; the text says what to do."""


def prepare():
    """Makes the signals that end the demo unwind it, and finds what the demo runs."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        raise Failure(f"not installed: {', '.join(missing)}. `make demo-deps` installs what is missing.")
    if not USMC.exists():
        raise Failure(f"{USMC} is not there. `make build` builds it.")


def cores():
    """One CPU of each core this process may use."""
    found = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        with suppress(OSError):
            found.setdefault(siblings.read_text(), cpu)
            continue
        found[cpu] = cpu
    return list(found.values())


class World:
    """The directories, the port and the processes of one run. As a context, it leaves nothing behind."""

    def __init__(self, smc):
        self.smc = smc
        self.proof = None
        # A connection that ends with its first answer stays TCP on purpose: being ready to leave is proof enough.
        self.brief = False
        self.port = free_port()
        self._running = []

    def __enter__(self):
        with undisturbed():
            self.scratch = Path(tempfile.mkdtemp(prefix="usmc-demo-"))
            self._ism = tempfile.mkdtemp(prefix="usmc-demo-", dir="/dev/shm")
        self._environment = plain_environment() | {"USMC_ISM_DIR": self._ism}
        return self

    def __exit__(self, *_):
        with undisturbed():
            for process in reversed(self._running):
                process.stop()
            shutil.rmtree(self._ism)
            shutil.rmtree(self.scratch)

    def serve(self, *command, cpu=None):
        """Starts a server and waits until it listens at the run's port."""
        server = self._start(command, cpu)
        deadline = time.monotonic() + START_LIMIT
        while not listens(self.port):
            if server.ended() or time.monotonic() > deadline:
                raise Failure(f"no server listens at port {self.port}.\n{self._story()}")
            time.sleep(0.02)

    def load(self, *command, cpu=None):
        """Runs a client to its end, looks at its connections meanwhile, and returns what it printed."""
        client = self._start(command, cpu)
        deadline = time.monotonic() + LOAD_LIMIT
        enough = False
        while not client.wait(SEEK_EVERY if not self._seen() else LOAD_LIMIT if enough else LOOK_AGAIN):
            if time.monotonic() > deadline:
                raise Failure(f"the load is not done after {LOAD_LIMIT} s.\n{self._story()}")
            # One look after what had to be seen, when all connections are there: each look costs the load time.
            enough = self._seen()
            self._look()
            enough |= self.brief and self._seen()
        if client.status() != 0:
            raise Failure(f"the load failed.\n{self._story()}")
        self._judge()
        return client.output()

    def ask(self, *command):
        """What a short program prints, run without the library."""
        done = subprocess.run(command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=START_LIMIT)
        return done.stdout + done.stderr

    def _story(self):
        """What has become of each program, and the end of what it said."""
        return "\n".join(f"{process}\n{process.output()[-2000:]}" for process in self._running)

    def _start(self, command, cpu):
        if self.smc:
            command = (str(USMC), "run", "--", *command)
        if cpu is not None:
            command = ("taskset", "-c", str(cpu), *command)
        path = self.scratch / f"output-{len(self._running)}"
        with undisturbed():
            process = Process(command, self._environment, path)
            self._running.append(process)
        return process

    def _look(self):
        """Keeps the last look that shows most: connections come and go, and some programs rest before they begin."""
        proof = Proof(self.port)
        if self.proof is None or proof.rank() >= self.proof.rank():
            self.proof = proof

    def _seen(self):
        """False while shared memory is still to be seen."""
        if not self.smc:
            return True
        return self.proof is not None and (self.proof.smcd > 0 or (self.brief and self.proof.ready > 0))

    def _judge(self):
        if self.proof is None:
            raise Failure("the load was done before `usmc ss` could look at it.")
        if not self._seen():
            raise Failure(f"{self.proof}{self.proof.reasons()}.\n{self._story()}\n"
                          f"`{USMC} check` says whether uSMC works here; rules in /etc/usmc.toml and "
                          "~/.config/usmc.toml count, too.")
        if not self.smc and self.proof.smcd > 0:
            raise Failure(f"{self.proof} in the run over TCP. Is the library in /etc/ld.so.preload?")


class Process:
    """A program with a process group of its own, printing to a file."""

    def __init__(self, command, environment, path):
        self._name = " ".join(command)
        self._path = path
        with path.open("wb") as output:
            self._child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=let_signals_in)

    def __str__(self):
        state = f"ended with status {self.status()}" if self.ended() else "runs"
        return f"`{self._name}` {state}"

    def ended(self):
        return self._child.poll() is not None

    def status(self):
        return self._child.returncode

    def wait(self, seconds):
        """Waits at most so long; true if the program has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(max(seconds, 0))
        return self.ended()

    def output(self):
        return self._path.read_text(errors="replace")

    def stop(self):
        """Ends the whole group: kindly, then not."""
        self._signal(signal.SIGTERM)
        self.wait(STOP_LIMIT)
        self._signal(signal.SIGKILL)
        self._child.wait()

    def _signal(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)


class Proof:
    """What `usmc ss` says about the connections of one port: both ends count."""

    def __init__(self, port):
        self._port = port
        self._ends = [end for end in sockets() if str(port) in (port_of(end["local"]), port_of(end["peer"]))]
        self.smcd = sum(end["mode"] == "SMCD" for end in self._ends)
        self.ready = sum((end["fallback_reason"] or "").startswith("too little use") for end in self._ends)

    def __str__(self):
        ready = f", {self.ready} were about to, had they lasted" if self.ready else ""
        return f"usmc ss: {self.smcd} of {len(self._ends)} ends of port {self._port} were SMCD{ready}"

    def rank(self):
        return self.smcd, self.ready, len(self._ends)

    def reasons(self):
        """Why ends are not SMCD, in the words of `usmc ss`."""
        found = sorted({end["fallback_reason"] for end in self._ends if end["fallback_reason"]})
        return f" ({', '.join(found)})" if found else ""


def sockets():
    """The connected sockets of all programs under uSMC."""
    done = subprocess.run([USMC, "ss", "--json"], env=plain_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"`{USMC} ss --json` ended with status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def port_of(address):
    return address.rpartition(":")[2]


def plain_environment():
    """Ours, without anything that would bring the library in or configure it."""
    return {name: value for name, value in os.environ.items()
            if name != "LD_PRELOAD" and not name.startswith("USMC_")}


def free_port():
    """A port of 127.0.0.1 that nobody uses, below those the kernel gives to clients."""
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def listens(port):
    """Does anyone listen there? Asked of the kernel, so that servers see no connection of ours."""
    wanted = f"0100007F:{port:04X} 00000000:0000 0A"
    return wanted in Path("/proc/net/tcp").read_text()


@contextmanager
def undisturbed():
    """Holds the signals that end the demo back, so that whatever is made can be removed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_signals_in():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
