//! What connections cost where that can be counted: memory, and system calls.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use usmc_tests::{Fixture, build, is_plain, procfs};

/// Issue 4's bound on what an idle connection keeps in memory beyond TCP's own, both processes together.
const IDLE_BYTES: i64 = 8192;

/// Bytes in RAM of a server and its client with so many connections, each of which has had a hundred messages each way.
fn resident(fixture: &Fixture, connections: u32, program: impl Fn() -> Command) -> i64 {
    let started = |args: &[&str]| {
        let mut command = program();
        command.args(args);
        fixture.spawn(command)
    };
    let mut server = started(&["server"]);
    let port = server.number_after("port").to_string();
    let mut client = started(&["many", &port, &connections.to_string()]);
    client.line_after("connected");
    for _ in 0..100 {
        client.say("talk");
        client.line_after("round");
    }
    let sum: u64 = [server.pid(), client.pid()].map(procfs::resident).iter().sum();
    client.succeed();
    server.succeed();
    i64::try_from(sum).expect("a size")
}

#[test]
fn an_idle_connection_keeps_little_memory() {
    const MORE: u32 = 400;
    let fixture = Fixture::new("idle memory");
    let each = |program: &dyn Fn() -> Command| {
        (resident(&fixture, 1 + MORE, program) - resident(&fixture, 1, program)) / i64::from(MORE)
    };
    let tcp = each(&|| fixture.plain(build::program("load")));
    let ours = each(&|| fixture.command(build::program("load")));
    assert!(ours - tcp <= IDLE_BYTES, "{} bytes more than TCP's {tcp}", ours - tcp);
    fixture.finish();
}

/// A process with both ends of a connection: fills it, reads it to its end, and lets time pass in some way. Prints its shared
/// memory in RAM at each of these points, in bytes.
const FILL: &str = "import select, socket, sys, threading, time
def shared():
    for line in open('/proc/self/status'):
        if line.startswith('RssShmem'): return int(line.split()[1]) * 1024
s = socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(s.getsockname()); a = s.accept()[0]
def talk():
    for k in range(100): c.send(b'x' * 100); a.recv(200); a.send(b'y' * 100); c.recv(200)
talk()
begun = shared()
print('begun', begun)
c.setblocking(False)
n = 0
try:
    while True: n += c.send(b'z' * 65536)
except BlockingIOError: pass
print('sent', n)
print('filled', shared())
while n: n -= len(a.recv(65536))
c.setblocking(True)
way = sys.argv[1]
LEFT = 300 * 1024
def until_given_back(wait):
    for k in range(20):
        if shared() - begun <= LEFT: break
        wait()
if way == 'poll':
    p = select.poll(); p.register(c, select.POLLIN); until_given_back(lambda: p.poll(1100))
elif way == 'epoll':
    p = select.epoll(); p.register(c, select.EPOLLIN); until_given_back(lambda: p.poll(1.1))
elif way == 'recv':
    def answer(): time.sleep(1.2); a.send(b'q')
    def ask():
        t = threading.Thread(target=answer); t.start(); assert c.recv(1) == b'q'; t.join()
    until_given_back(ask)
elif way == 'send':
    until_given_back(lambda: (talk(), time.sleep(1.1)))
elif way == 'close':
    c.close(); a.close()
print('left', shared())";

#[test]
fn what_was_unread_is_given_back() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("given back");
    for way in ["poll", "epoll", "recv", "send", "close"] {
        let mut command = fixture.command("python3");
        command.args(["-c", FILL, way]);
        let mut process = fixture.spawn(command);
        let [begun, sent, filled, left] =
            ["begun", "sent", "filled", "left"].map(|word| process.number_after(word));
        process.succeed();
        assert!(sent > 3 << 20 && filled - begun >= sent - (64 << 10), "{sent}: {begun}, {filled}");
        // The ring itself may have grown.
        assert!(left - begun <= 300 << 10, "{way}: {} bytes are left", left - begun);
    }
    fixture.finish();
}

/// A server that is left by its only client, which has not closed the connection. Prints its shared memory in RAM before and
/// after that, in bytes.
const LEFT: &str = "import os, socket, subprocess, sys
def shared():
    for line in open('/proc/self/status'):
        if line.startswith('RssShmem'): return int(line.split()[1]) * 1024
def whole(c, n):
    while n: n -= len(c.recv(n))
if len(sys.argv) > 1:
    c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    for k in range(100): c.send(b'x' * 100); whole(c, 100)
    c.send(b'x' * 100); assert sys.stdin.read() == ''
    whole(c, 2 << 20); c.send(b'y' * 100)
    os._exit(0)
s = socket.create_server(('127.0.0.1', 0))
print('begun', shared(), flush=True)
p = subprocess.Popen([sys.executable, '-c', sys.orig_argv[2], str(s.getsockname()[1])], stdin=subprocess.PIPE)
a = s.accept()[0]
for k in range(100): whole(a, 100); a.send(b'y' * 100)
whole(a, 100); a.sendall(b'z' * (2 << 20)); p.stdin.close(); whole(a, 100)
print('used', shared(), flush=True)
assert p.wait() == 0 and a.recv(1) == b''
a.close()
print('left', shared())";

#[test]
fn nothing_is_kept_of_a_client_that_has_ended() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("client has ended");
    let mut command = fixture.command("python3");
    command.args(["-c", LEFT]);
    let mut process = fixture.spawn(command);
    let [begun, used, left] = ["begun", "used", "left"].map(|word| process.number_after(word));
    process.succeed();
    assert!(used - begun > 1 << 20, "{begun}, {used}");
    assert!(left - begun <= 128 << 10, "{} bytes are left of {}", left - begun, used - begun);
    fixture.finish();
}

/// Large requests, each of which is answered once the client is asleep.
const LARGE: &str = "import socket, sys, threading, time
s = socket.create_server(('127.0.0.1', 0))
def serve():
    a = s.accept()[0]
    while True:
        left = 1 << 20
        time.sleep(0.002)
        while left:
            n = len(a.recv(left))
            if not n: return
            left -= n
        a.send(b'y')
t = threading.Thread(target=serve); t.start()
c = socket.create_connection(s.getsockname())
for i in range(int(sys.argv[1])): c.sendall(b'x' * (1 << 20)); assert c.recv(1) == b'y'
c.close(); t.join()";

#[test]
fn memory_in_use_is_not_given_back_at_each_sleep() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("large requests");
    let log = fixture.scratch().join("calls");
    let mut command = fixture.plain("strace");
    command.args(["-f", "-c", "-o"]).arg(&log).arg(build::usmc());
    command.args(["run", "--", "/usr/bin/python3", "-c", LARGE, "100"]);
    fixture.spawn(command).succeed();
    let given_back = counts(&log).get("madvise").copied().unwrap_or(0);
    assert!(given_back < 25, "{given_back} times for 100 requests");
    fixture.finish();
}

/// Connections of a process to itself, which never has to wait: connect, accept, messages to and fro, close.
const CONNECTIONS: &str = "import socket, sys
s = socket.create_server(('127.0.0.1', 0))
for i in range(int(sys.argv[1])):
    c = socket.create_connection(s.getsockname()); a = s.accept()[0]
    for k in range(int(sys.argv[2])):
        c.send(b'x' * 100); a.recv(200); a.send(b'y' * 100); c.recv(200)
    a.close(); c.close()";

/// A command that counts the system calls of the one that is added to it.
fn counting(fixture: &Fixture, log: &Path) -> Command {
    let mut command = fixture.plain("strace");
    command.args(["-f", "-c", "-o"]).arg(log);
    command
}

/// Such a command for a program of many connections, whose waits sleep at once: how often they would look before that depends on time
/// (`awake.rs` has a test of it).
fn counting_without_looks(fixture: &Fixture, log: &Path) -> Command {
    let mut command = counting(fixture, log);
    command.env("USMC_BUSY_POLL_US", "0");
    command
}

/// How often each system call was made, by a whole run.
fn calls(fixture: &Fixture, under_usmc: bool, numbers: [u32; 2]) -> BTreeMap<String, i64> {
    const MANY: u32 = 100;
    let log = fixture.scratch().join("calls");
    let mut command = match numbers[0] {
        MANY.. => counting_without_looks(fixture, &log),
        _ => counting(fixture, &log),
    };
    if under_usmc {
        command.arg(build::usmc()).args(["run", "--"]);
    }
    command.args(["/usr/bin/python3", "-c", CONNECTIONS]).args(numbers.map(|n| n.to_string()));
    fixture.run(command);
    counts(&log)
}

/// The columns "calls" and "syscall" of what `strace -c` writes.
fn counts(log: &Path) -> BTreeMap<String, i64> {
    let text = fs::read_to_string(log).expect("strace's output");
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let name = words.last().filter(|name| **name != "total")?;
        Some(((*name).to_owned(), words.get(3)?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// What the second run has more of than the first.
fn more(one: &BTreeMap<String, i64>, other: &BTreeMap<String, i64>) -> BTreeMap<String, i64> {
    let of = |counts: &BTreeMap<String, i64>, name| counts.get(name).copied().unwrap_or(0);
    let names = one.keys().chain(other.keys());
    names.map(|name| (name.clone(), of(other, name) - of(one, name))).collect()
}

#[test]
fn a_short_connection_costs_no_system_call_beyond_tcp() {
    const MORE: u32 = 100;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("short connections");
    for exchanges in [0, 1] {
        let each = |ours| {
            more(
                &calls(&fixture, ours, [100, exchanges]),
                &calls(&fixture, ours, [100 + MORE, exchanges]),
            )
        };
        let beyond = more(&each(false), &each(true));
        // What a process does once may come one time more or less.
        let beyond: Vec<_> = beyond.iter().filter(|(_, n)| n.abs() > 5).collect();
        assert!(beyond.is_empty(), "{exchanges} exchanges, {MORE} connections: {beyond:?}");
    }
    fixture.finish();
}

/// Serves so many connections of one exchange each.
const SERVER: &str = "
import socket, sys
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(100)
print('port', s.getsockname()[1], flush=True)
for i in range(int(sys.argv[1])):
    a = s.accept()[0]; a.send(a.recv(200)); a.close()";
const CLIENT: &str = "
import socket, sys
for i in range(int(sys.argv[1])):
    c = socket.create_connection(('127.0.0.1', int(sys.argv[2]))); c.send(b'x' * 100); c.recv(200); c.close()";

/// As [`calls`], of a process of its own that never listens.
fn calls_of_client(fixture: &Fixture, under_usmc: bool, connections: u32) -> BTreeMap<String, i64> {
    let count = connections.to_string();
    let python = "/usr/bin/python3";
    let mut server = if under_usmc { fixture.command(python) } else { fixture.plain(python) };
    server.args(["-c", SERVER, &count]);
    let mut server = fixture.spawn(server);
    let port = server.number_after("port").to_string();
    let log = fixture.scratch().join("calls");
    let mut client = counting_without_looks(fixture, &log);
    if under_usmc {
        client.arg(build::usmc()).args(["run", "--"]);
    }
    client.args([python, "-c", CLIENT, &count, &port]);
    fixture.run(client);
    server.succeed();
    counts(&log)
}

#[test]
fn a_client_of_short_connections_makes_no_system_call_beyond_tcp() {
    const MORE: u32 = 100;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("short connections of a client");
    let each = |ours| {
        more(&calls_of_client(&fixture, ours, 100), &calls_of_client(&fixture, ours, 100 + MORE))
    };
    let beyond = more(&each(false), &each(true));
    let beyond: Vec<_> = beyond.iter().filter(|(_, n)| n.abs() > 5).collect();
    assert!(beyond.is_empty(), "{MORE} connections: {beyond:?}");
    fixture.finish();
}

/// Waits on epoll sets, by whichever call.
fn waits(counts: &BTreeMap<String, i64>) -> i64 {
    ["epoll_wait", "epoll_pwait"].iter().filter_map(|name| counts.get(*name)).sum()
}

/// A connection that stays TCP, and asks an epoll set again and again for the same: readable or writable, and reports of it.
const SAME_AGAIN: &str = "
import select, socket, sys
s = socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(s.getsockname()); a = s.accept()[0]
p = select.epoll(); p.register(c, select.EPOLLIN | select.EPOLLOUT)
for i in range(int(sys.argv[1])):
    p.modify(c, select.EPOLLIN | select.EPOLLOUT)
    assert p.poll(5) == [(c.fileno(), select.EPOLLOUT)]
p.modify(c, select.EPOLLIN)
assert p.poll(0) == []
a.send(b'x')
assert p.poll(5) == [(c.fileno(), select.EPOLLIN)]";

#[test]
fn asking_an_epoll_set_for_the_same_again_costs_no_system_call() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("the same again");
    let log = fixture.scratch().join("calls");
    let asks = |times: &str| {
        let mut command = fixture.plain("strace");
        command.args(["-f", "-c", "-o"]).arg(&log).arg(build::usmc());
        command.args(["run", "--", "/usr/bin/python3", "-c", SAME_AGAIN, times]);
        fixture.run(command);
        counts(&log)
    };
    let more = more(&asks("10"), &asks("60"));
    assert_eq!(more["epoll_ctl"], 0, "{more:?}");
    assert_eq!(waits(&more), 50, "{more:?}");
    fixture.finish();
}

/// Short connections between two processes that sleep in epoll sets; tells how often either has waited.
const SLEEPERS: &str = "
import os, select, socket, sys
times, waits = int(sys.argv[1]), 0
def wait(p):
    global waits
    waits += 1
    return p.poll()
s = socket.create_server(('127.0.0.1', 0))
child = os.fork()
p = select.epoll()
if child == 0:
    for i in range(times):
        c = socket.socket()
        c.setblocking(False)
        c.connect_ex(s.getsockname())
        p.register(c, select.EPOLLOUT)
        wait(p)
        c.send(b'x' * 100)
        p.modify(c, select.EPOLLIN)
        while wait(p) and c.recv(2000):
            pass
        c.close()
else:
    p.register(s, select.EPOLLIN)
    for i in range(times):
        wait(p)
        a = s.accept()[0]
        p.register(a, select.EPOLLIN)
        wait(p)
        a.recv(2000)
        a.send(b'y' * 1000)
        a.close()
    os.waitpid(child, 0)
os.write(1, b'waits %d\\n' % waits)
os._exit(0)";

#[test]
fn waiting_for_short_connections_costs_no_more_system_calls() {
    const TIMES: u32 = 40;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("sleepers");
    let log = fixture.scratch().join("calls");
    let mut command = fixture.plain("strace");
    command.args(["-f", "-c", "-o"]).arg(&log).arg(build::usmc());
    command.args(["run", "--", "/usr/bin/python3", "-c", SLEEPERS, &TIMES.to_string()]);
    let mut process = fixture.spawn(command);
    let waits: u64 = (0..2).map(|_| process.number_after("waits")).sum();
    process.succeed();
    let counts = counts(&log);
    // What is not registered yet is asked by poll(2), in the place of a wait, and sometimes in vain; but then it was not
    // registered and changed by system calls of their own.
    let of = |name| counts.get(name).copied().unwrap_or(0).cast_unsigned();
    let asked = self::waits(&counts).cast_unsigned() + of("ppoll");
    let registered = 1 + 3 * u64::from(TIMES);
    assert!(asked <= waits + u64::from(TIMES) / 2, "{waits} waits: {counts:?}");
    assert!(asked + of("epoll_ctl") <= waits + registered, "{waits} waits: {counts:?}");
    fixture.finish();
}

/// A process that serves its own connections, whose requests are there before they are accepted.
const BRIEF: &str = "
import select, socket, sys
s = socket.create_server(('127.0.0.1', 0))
p = select.epoll(); p.register(s, select.EPOLLIN)
for i in range(int(sys.argv[1])):
    c = socket.create_connection(s.getsockname()); c.send(b'x' * 100)
    assert p.poll(5) == [(s.fileno(), select.EPOLLIN)]
    a = s.accept()[0]
    p.register(a, select.EPOLLIN)
    assert p.poll(5) == [(a.fileno(), select.EPOLLIN)]
    a.recv(200); a.send(b'y' * 100); a.close()
    c.recv(200); c.close()";

#[test]
fn a_server_of_short_connections_registers_none() {
    const MORE: i64 = 100;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("brief");
    let log = fixture.scratch().join("calls");
    let serves = |under_usmc: bool, times: i64| {
        let mut command = counting_without_looks(&fixture, &log);
        if under_usmc {
            command.arg(build::usmc()).args(["run", "--"]);
        }
        command.args(["/usr/bin/python3", "-c", BRIEF, &times.to_string()]);
        fixture.run(command);
        counts(&log)
    };
    let each = |ours| more(&serves(ours, 50), &serves(ours, 50 + MORE));
    let (tcp, ours) = (each(false), each(true));
    let of = |counts: &BTreeMap<String, i64>, name| counts.get(name).copied().unwrap_or(0);
    // One question in the place of a registration and of a wait.
    assert_eq!(of(&tcp, "epoll_ctl") - of(&ours, "epoll_ctl"), MORE);
    assert_eq!(waits(&tcp) - waits(&ours), MORE);
    assert_eq!(of(&ours, "ppoll") - of(&tcp, "ppoll"), MORE);
    let mut beyond = more(&tcp, &ours);
    beyond.retain(|name, n| n.abs() > 5 && !name.starts_with("epoll_") && name != "ppoll");
    assert!(beyond.is_empty(), "{MORE} connections: {beyond:?}");
    fixture.finish();
}

#[test]
fn a_message_between_awake_peers_costs_no_system_call() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("messages");
    let few = calls(&fixture, true, [10, 100]);
    let many = calls(&fixture, true, [10, 300]);
    const OURS: [&str; 8] =
        ["sendto", "recvfrom", "sendmsg", "recvmsg", "poll", "ppoll", "ioctl", "getsockopt"];
    let sum: i64 = OURS.iter().map(|name| more(&few, &many).get(*name).copied().unwrap_or(0)).sum();
    assert_eq!(sum, 0, "for 8000 messages: {:?}", more(&few, &many));
    fixture.finish();
}

/// System calls of both ends together by which a connection changes over and ends (docs/waiting.md has the list); those of
/// its messages before that have their counterparts over TCP.
const CHANGE_OVER: i64 = 29;
/// Those that carry messages by TCP until then, beyond the four of a connection of one exchange.
const MESSAGES: i64 = 4;

#[test]
fn changing_over_costs_a_fixed_number_of_system_calls() {
    const MORE: u32 = 200;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("changing over");
    let each =
        |n: [u32; 2]| more(&calls(&fixture, true, n), &calls(&fixture, true, [n[0] + MORE, n[1]]));
    let beyond = more(&each([50, 1]), &each([50, 50]));
    let both_ends: i64 = beyond.values().sum::<i64>() - i64::from(MORE) * MESSAGES;
    let per_connection = (both_ends + i64::from(MORE) / 2) / i64::from(MORE);
    assert_eq!(per_connection, CHANGE_OVER, "{beyond:?}");
    fixture.finish();
}

/// A receiver that takes one message at a time, when it is told to, and a sender likewise.
const RECEIVER: &str = "import socket, sys
s = socket.create_server(('127.0.0.1', 0))
print('port', s.getsockname()[1], flush=True)
a = s.accept()[0]
for i in range(100):
    a.sendall(a.recv(100))
for line in sys.stdin:
    assert len(a.recv(100)) == 100
    print('received', flush=True)";
const SENDER: &str = "import socket, sys
c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for i in range(100):
    c.sendall(b'x' * 100); assert len(c.recv(100)) == 100
print('connected', flush=True)
for line in sys.stdin:
    for i in range(3):
        c.send(b'x' * 100)
    print('done', flush=True)";

#[test]
fn a_sleeper_costs_its_waker_one_system_call() {
    const ROUNDS: usize = 20;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("sleepers");
    let mut receiver = fixture.command("/usr/bin/python3");
    receiver.args(["-c", RECEIVER]);
    let mut receiver = fixture.spawn(receiver);
    let port = receiver.number_after("port").to_string();
    let log = fixture.scratch().join("sends");
    let mut sender = fixture.plain("strace");
    sender.args(["-f", "-e", "trace=sendto,sendmsg,write", "-o"]).arg(&log);
    sender.arg(build::usmc()).args(["run", "--", "/usr/bin/python3", "-c", SENDER, &port]);
    let mut sender = fixture.spawn(sender);
    sender.line_after("connected");
    let sleeps = [libc::SYS_recvfrom, libc::SYS_poll, libc::SYS_ppoll, libc::SYS_recvmsg];
    for _ in 0..ROUNDS {
        receiver.say("one");
        fixture.wait_until("the receiver to sleep", || {
            procfs::sleeps_in(receiver.pid()).is_some_and(|call| sleeps.contains(&call))
        });
        sender.say("three");
        sender.line_after("done");
        for _ in 0..2 {
            receiver.line_after("received");
            receiver.say("one");
        }
        receiver.line_after("received");
    }
    sender.succeed();
    receiver.succeed();
    let log = fs::read_to_string(&log).expect("strace's output");
    let (_, log) = log.split_once("connected").expect("what the sender has said");
    assert_eq!(log.matches("send").count(), ROUNDS, "{log}");
    fixture.finish();
}
