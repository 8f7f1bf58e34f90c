//! Memory of a region: it comes back when its owner has died and nobody uses it, and not before.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_shm::region::{BOARD_AT, UNIT, len_for};
use usmc_tests::{Fixture, Process, build, is_plain, region, ss};

/// Room for some processes: those of the first have large rings, and the last take a unit each.
const SIZE: &str = "2M";

/// Clients, one after the other.
const ROUNDS: usize = 24;

/// More clients of one connection than such a region has room for.
const MOST_CLIENTS: usize = 24;

fn usmc(args: &[&str]) -> String {
    let out = Command::new(build::usmc()).args(args).output().expect("usmc");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "usmc {args:?}: {errors}");
    String::from_utf8(out.stdout).expect("text")
}

/// A region, and the programs of several hosts that use it: each host has an ISM directory of its own.
struct World {
    fixture: Fixture,
    region: PathBuf,
}

/// Where servers run, and where clients do.
const SERVERS: &str = "servers";
const CLIENTS: &str = "clients";

impl World {
    fn new(name: &str) -> World {
        World::with_size(name, SIZE)
    }

    fn with_size(name: &str, size: &str) -> World {
        // What has to be built first takes none of the test's time.
        build::usmc();
        build::program("load");
        let fixture = Fixture::new(name);
        let region = fixture.scratch().join("region");
        usmc(&["region", "init", path(&region), "--size", size]);
        for host in [SERVERS, CLIENTS] {
            std::fs::create_dir(fixture.scratch().join(host)).expect("a new directory");
        }
        World { fixture, region }
    }

    /// A program on this host.
    fn command(&self, host: &str, program: impl AsRef<Path>) -> Command {
        let mut command = self.fixture.command(program);
        command.env("USMC_REGIONS", &self.region);
        command.env("USMC_ISM_DIR", self.fixture.scratch().join(host));
        command
    }

    fn load(&self, host: &str, args: &[&str]) -> Process {
        let mut command = self.command(host, build::program("load"));
        command.args(args);
        self.fixture.spawn(command)
    }

    /// A server, and its port.
    fn server(&self) -> (Process, String) {
        let mut server = self.load(SERVERS, &["server"]);
        let port = server.line_after("port");
        (server, port)
    }

    /// A client with one connection, which has had a hundred messages each way.
    fn client(&self, port: &str) -> Process {
        self.client_on(CLIENTS, port)
    }

    fn client_on(&self, host: &str, port: &str) -> Process {
        let mut client = self.load(host, &["many", port, "1"]);
        client.line_after("connected");
        for _ in 0..100 {
            client.say("talk");
            client.line_after("round");
        }
        client
    }

    /// Clients until one finds the region full: those in it, and that one.
    fn fill(&self, port: &str) -> (Vec<Process>, Process) {
        self.fill_from(CLIENTS, port)
    }

    fn fill_from(&self, host: &str, port: &str) -> (Vec<Process>, Process) {
        let mut inside = Vec::new();
        loop {
            let client = self.client_on(host, port);
            match connection_of(&client) {
                (true, _) => inside.push(client),
                (false, reason) => {
                    assert_eq!(reason, "region full", "{}", self.shown());
                    assert!(!inside.is_empty());
                    return (inside, client);
                }
            }
            assert!(inside.len() < MOST_CLIENTS, "{}", self.shown());
        }
    }

    fn shown(&self) -> Value {
        let text = usmc(&["region", "show", path(&self.region), "--json"]);
        serde_json::from_str(&text).expect("JSON")
    }

    fn free(&self) -> u64 {
        self.shown()["free"].as_u64().expect("a number")
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// How a process' one connection is carried, and why by TCP.
fn connection_of(process: &Process) -> (bool, String) {
    let pid = process.pid();
    let end = ss::list().into_iter().find(|end| end.pid == pid && end.state != "LISTEN");
    let end = end.expect("a connection");
    (end.is_smcd(), end.fallback_reason)
}

/// Programs of one host have memory of their own, and take nothing of the region.
#[test]
fn the_nearest_device_is_used() {
    if is_plain() {
        return;
    }
    let world = World::new("nearest");
    let all = world.free();
    let (mut server, port) = world.server();
    let mut near = world.client_on(SERVERS, &port);
    assert!(connection_of(&near).0);
    assert_eq!(world.free(), all);
    let mut far = world.client(&port);
    assert!(connection_of(&far).0);
    assert!(world.free() < all);
    let device = |process: &Process| {
        let pid = process.pid();
        let ends = ss::list();
        ends.into_iter().find(|end| end.pid == pid && end.is_smcd()).map(|end| end.device)
    };
    assert_eq!(device(&near).as_deref(), Some("loopback"));
    assert_eq!(device(&far), world.shown()["gid"].as_str().map(str::to_owned));
    println!("2 connections in shared memory");
    near.succeed();
    far.succeed();
    server.succeed();
    world.fixture.finish();
}

/// Forty connections at a time, twice, and then one.
const MANY: &str = "import socket, sys
def connect(n):
    all = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(n)]
    for k in range(100):
        for s in all: s.send(b'x' * 100)
        for s in all:
            n = 0
            while n < 100: n += len(s.recv(100))
    return all
for n in 40, 40, 1:
    all = connect(n)
    print('connected', n, flush=True)
    sys.stdin.readline()
    for s in all:
        s.close()
";

/// A process takes no more than its connections need, and gives back what none of them uses.
#[test]
fn memory_follows_the_connections() {
    if is_plain() {
        return;
    }
    let world = World::with_size("memory follows", "64M");
    let all = world.free();
    let (mut server, port) = world.server();
    let mut command = world.command(CLIENTS, "python3");
    command.args(["-c", MANY, &port]);
    let mut client = world.fixture.spawn(command);
    for connections in [40, 40, 1] {
        assert_eq!(client.line_after("connected"), connections.to_string());
        let pid = client.pid();
        let in_ring = ss::list().iter().filter(|end| end.pid == pid && end.is_smcd()).count();
        assert_eq!(in_ring, connections);
        // Rings of 256 KiB take nine units. Those that are made while the region is empty take more: an eighth of it, and a segment.
        let (taken, needed) = (all - world.free(), 9 * connections as u64);
        let most = 2 * needed + all / 8 + all / 16;
        assert!(taken >= needed / 2 && taken <= most, "{taken} units, {needed} needed");
        client.say("close");
    }
    println!("81 connections in shared memory");
    client.succeed();
    server.succeed();
    world.fixture.finish();
}

#[test]
fn units_of_the_killed_come_back() {
    if is_plain() {
        return;
    }
    let world = World::new("units of the killed");
    let all = world.free();
    let (mut server, port) = world.server();
    for round in 0..ROUNDS {
        let mut client = world.client(&port);
        let (in_ring, reason) = connection_of(&client);
        assert!(in_ring, "client {round} stays TCP: {reason}; {}", world.shown());
        assert!(world.free() < all);
        client.kill();
    }
    println!("{ROUNDS} connections in shared memory");
    // More than the region has room for at one time were there.
    let mut last = world.client(&port);
    assert!(connection_of(&last).0);
    last.succeed();
    let shown = world.shown();
    let peers = shown["peers"].as_array().expect("peers");
    assert_eq!(peers.len(), 2, "{shown}");
    assert!(peers.iter().all(|peer| peer["state"] == "alive"), "{shown}");
    server.succeed();
    world.fixture.finish();
}

/// What clients of one host have left goes to clients of another, once a process of their own host that only serves has come.
#[test]
fn units_of_the_killed_go_to_other_hosts() {
    if is_plain() {
        return;
    }
    let world = World::new("units for other hosts");
    let mut server = world.load(CLIENTS, &["server"]);
    let port = server.line_after("port");
    let (inside, late) = world.fill_from(SERVERS, &port);
    inside.into_iter().chain([late]).for_each(|mut client| client.kill());
    let (mut next, port) = world.server();
    let mut client = world.client(&port);
    let (in_ring, reason) = connection_of(&client);
    assert!(in_ring, "{reason}; {}", world.shown());
    let shown = world.shown();
    let peers = shown["peers"].as_array().expect("peers");
    assert!(peers.iter().any(|peer| peer["units"] == 0), "{shown}");
    client.succeed();
    next.succeed();
    server.succeed();
    world.fixture.finish();
}

/// A server that does not read has its slot still, whatever has become of the client.
#[test]
fn units_in_use_do_not_come_back() {
    if is_plain() {
        return;
    }
    let world = World::new("units in use");
    let mut holder = world.load(SERVERS, &["unread"]);
    let port = holder.line_after("port");
    let mut victim = world.load(CLIENTS, &["blocked", &port]);
    victim.line_after("talked");
    assert!(connection_of(&victim).0);
    victim.kill();
    let (mut server, port) = world.server();
    let (mut others, mut late) = world.fill(&port);
    late.succeed();
    holder.close_stdin();
    holder.succeed();
    let mut next = world.client(&port);
    let (in_ring, reason) = connection_of(&next);
    assert!(in_ring, "{reason}; {}", world.shown());
    next.succeed();
    others.iter_mut().for_each(|client| _ = client.succeed());
    server.succeed();
    world.fixture.finish();
}

/// A process that has had a connection, and its child, which has one still when its parent has ended.
const FORKED: &str = "import os, socket, sys
def talk(s):
    for k in range(100):
        s.send(b'x' * 100)
        n = 0
        while n < 100: n += len(s.recv(100))
def connected():
    s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    talk(s)
    return s
first = connected()
if os.fork():
    os._exit(0)
first.close()
s = connected()
print('pid', os.getpid(), flush=True)
sys.stdin.readline()
talk(s)
print('whole', flush=True)
";

#[test]
fn a_forked_childs_units_are_its_own() {
    if is_plain() {
        return;
    }
    let world = World::new("a forked child's units");
    let (mut server, port) = world.server();
    let mut command = world.command(CLIENTS, "python3");
    command.args(["-c", FORKED, &port]);
    let mut child = world.fixture.spawn(command);
    let pid = child.number_after("pid") as i32;
    let is_in_ring = || ss::list().iter().any(|end| end.pid == pid && end.is_smcd());
    assert!(is_in_ring());
    // The parent's have gone to these, and the child's go to nobody.
    let (mut others, mut late) = world.fill(&port);
    child.say("go on");
    child.line_after("whole");
    late.succeed();
    others.iter_mut().for_each(|client| _ = client.succeed());
    server.succeed();
    world.fixture.finish();
}

#[test]
fn a_peer_is_evicted_once() {
    if is_plain() {
        return;
    }
    let world = World::new("evicted");
    let (mut server, port) = world.server();
    let mut client = world.client(&port);
    assert!(connection_of(&client).0);
    client.kill();
    server.kill();
    let peers = world.shown()["peers"].clone();
    let has_units = |peer: &&Value| peer["units"].as_u64() > Some(0);
    let owner = peers.as_array().expect("peers").iter().find(has_units).expect("an owner");
    let number = owner["number"].to_string();
    usmc(&["region", "evict", path(&world.region), &number]);
    let state = || {
        let peers = world.shown()["peers"].clone();
        let evicted =
            peers.as_array().expect("peers").iter().find(|p| p["number"] == owner["number"]);
        evicted.map(|peer| peer["state"].clone())
    };
    assert_eq!(state(), Some("gone".into()));
    let again = Command::new(build::usmc())
        .args(["region", "evict", path(&world.region), &number])
        .output()
        .expect("usmc");
    assert!(!again.status.success());
    // The next to join takes back what it has left, and its place.
    let (mut server, port) = world.server();
    let mut client = world.client(&port);
    assert!(connection_of(&client).0);
    let shown = world.shown();
    assert_eq!(shown["peers"].as_array().map(Vec::len), Some(2), "{shown}");
    assert_eq!(state(), Some("alive".into()), "it has joined again, in the same place");
    client.succeed();
    server.succeed();
    world.fixture.finish();
}

#[test]
fn a_region_is_made_once_and_known_for_one() {
    let world = World::new("made once");
    let file = path(&world.region);
    let refused = |args: &[&str]| {
        let out = Command::new(build::usmc()).args(args).output().expect("usmc");
        assert!(!out.status.success(), "{args:?}");
        String::from_utf8(out.stderr).expect("text")
    };
    assert!(refused(&["region", "init", file]).contains("is made once"));
    assert!(refused(&["region", "init", file, "--size", "64K"]).contains("at least"));
    let other = world.fixture.scratch().join("other");
    std::fs::write(&other, vec![0; 1 << 20]).expect("a file");
    assert!(refused(&["region", "show", path(&other)]).contains("no region"));
    assert!(refused(&["region", "evict", file, "7"]).contains("no peer 7"));
    assert!(usmc(&["region", "show", file]).contains("are free"));
    world.fixture.finish();
}

/// Writes anything anywhere in the region, for as long as its standard input is open. Tables that nobody can read any more are put
/// right now and then, so that connections get into the ring.
const SCRIBBLER: &str = "import mmap, os, random, select, sys, time
f = os.open(sys.argv[1], os.O_RDWR)
n = os.fstat(f).st_size
m = mmap.mmap(f, n)
tables, units = int(sys.argv[2]), int(sys.argv[3])
whole, done = bytes(m[:tables]), 0
print('begins', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(random.choice([1, 50, 3000])):
        where = random.random()
        if where < 0.6:
            # The headers and the slots of segments.
            at = units + random.randrange(0, (n - units) >> 16) * 65536 + random.randrange(0, 12288)
        elif where < 0.9: at = random.randrange(0, units)
        else: at = random.randrange(0, n - 8)
        at &= ~7
        word = random.choice([0, 1, 2, (1 << 64) - 1, random.getrandbits(64), random.getrandbits(8)])
        m[at:at + 8] = word.to_bytes(8, 'little')
    done += 1
    time.sleep(0.002)
    if done % 10 == 0: m[:tables] = whole
m[:tables] = whole
print('scribbled', done, flush=True)
";

/// Connects and talks, whatever comes of it, and meanwhile to somebody of whom nobody in the region knows.
const SUFFERER: &str = "import select, socket, sys
port, third = map(int, sys.argv[1:3])
def talk(s, n):
    for k in range(n):
        s.sendall(b'x' * 700)
        got = 0
        while got < 700:
            d = s.recv(700)
            if not d: raise OSError('over')
            got += len(d)
whole = broken = 0
t = socket.create_connection(('127.0.0.1', third))
def exact(k):
    t.sendall(bytes([k % 256]) * 50)
    assert t.recv(50, socket.MSG_WAITALL) == bytes([k % 256]) * 50
print('begins', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    exact(whole + broken)
    try:
        s = socket.create_connection(('127.0.0.1', port), timeout=2)
        s.settimeout(2)
        talk(s, 60)
        whole += 1
    except OSError: broken += 1
    s.close()
print('suffered', whole, broken, flush=True)
t.close()
t = socket.create_connection(('127.0.0.1', third))
for k in range(100): exact(k)
print('third', flush=True)
";

#[test]
fn a_member_that_scribbles_ends_nobody() {
    if is_plain() {
        return;
    }
    let world = World::with_size("scribbled", "3M");
    let (mut server, port) = world.server();
    // A third host, without the library.
    let mut third = world.fixture.plain(build::program("load"));
    let mut third = world.fixture.spawn({
        third.arg("server");
        third
    });
    let third_port = third.line_after("port");
    let mut sufferers = [SERVERS, CLIENTS, CLIENTS].map(|host| {
        let mut command = world.command(host, "python3");
        command.args(["-c", SUFFERER, &port, &third_port]);
        world.fixture.spawn(command)
    });
    sufferers.iter_mut().for_each(|process| _ = process.line_after("begins"));
    let mut scribbler = world.fixture.plain("python3");
    // Header and peers, and where the first unit is.
    let (tables, units) = (BOARD_AT.to_string(), (len_for(1) - UNIT).to_string());
    scribbler.args(["-c", SCRIBBLER, path(&world.region), &tables, &units]);
    let mut scribbler = world.fixture.spawn(scribbler);
    scribbler.line_after("begins");
    let pids: Vec<i32> = sufferers.iter().map(Process::pid).collect();
    let (mut in_ring, mut seen) = (0, 0);
    let begun = Instant::now();
    while in_ring <= 20 || begun.elapsed() < Duration::from_secs(8) {
        // The rest takes its time, too.
        let is_late = world.fixture.time_left() < Duration::from_secs(15);
        assert!(!is_late, "the peer's bytes met nobody: {in_ring} of {seen}");
        let ends = ss::list();
        let ours = ends.iter().filter(|end| pids.contains(&end.pid) && end.state != "LISTEN");
        ours.for_each(|end| {
            seen += 1;
            in_ring += usize::from(end.is_smcd());
        });
    }
    println!("{in_ring} of {seen} connections in shared memory");
    scribbler.close_stdin();
    println!("{} bursts", scribbler.line_after("scribbled"));
    scribbler.succeed();
    for process in &mut sufferers {
        process.close_stdin();
        println!("whole, broken: {}", process.line_after("suffered"));
        process.line_after("third");
        process.succeed();
    }
    third.succeed();
    // It still serves those that have nothing to do with the region.
    let mut command = world.fixture.plain("python3");
    let call = "import socket, sys
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
s.sendall(b'hello'); print('got', s.recv(5, socket.MSG_WAITALL).decode())";
    command.args(["-c", call, &port]);
    let mut last = world.fixture.spawn(command);
    assert_eq!(last.line_after("got"), "hello");
    last.succeed();
    server.succeed();
    world.fixture.finish();
}

/// A connection that has been lent to another program, and so had two slots, goes to a child, and with the child to another program.
const HANDED_DOWN: &str = "import os, socket, subprocess, sys
def talk(s):
    for k in range(100):
        s.send(b'x' * 100)
        n = 0
        while n < 100: n += len(s.recv(100))
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
talk(s)
print('first', flush=True); sys.stdin.readline()
subprocess.run(['/bin/true'], stdin=s)
talk(s)
print('second', flush=True); sys.stdin.readline()
pid = os.fork()
if pid == 0:
    s.set_inheritable(True)
    os.execv('/bin/sleep', ['sleep', '1000'])
s.close()
print('pid', pid, flush=True); sys.stdin.readline()
os.kill(pid, 9)
os.waitpid(pid, 0)
";

#[test]
fn all_slots_of_a_connection_come_back() {
    if is_plain() {
        return;
    }
    let world = World::new("all slots");
    let all = world.free();
    let (mut server, port) = world.server();
    let mut command = world.command(CLIENTS, "python3");
    command.args(["-c", HANDED_DOWN, &port]);
    let mut program = world.fixture.spawn(command);
    for time in ["first", "second"] {
        program.line_after(time);
        let (in_ring, reason) = connection_of(&program);
        assert!(in_ring, "the {time} time: {reason}");
        program.say("go on");
    }
    let child = program.number_after("pid") as i32;
    let became = || std::fs::read_to_string(format!("/proc/{child}/comm"));
    world.fixture.wait_until("the next program", || became().is_ok_and(|name| name == "sleep\n"));
    // The parent goes on, and so does who has started it.
    program.say("go on");
    program.succeed();
    server.succeed();
    // Processes that join give back what the dead have left, and those of both hosts have to.
    let mut sink = world.load(SERVERS, &["sink"]);
    let port = sink.line_after("port");
    world.load(CLIENTS, &["source", &port, "3000000"]).succeed();
    sink.succeed();
    assert_eq!(world.free(), all, "{}\n{}", world.shown(), region::lost(&world.region).text);
    println!("3 connections in shared memory");
    world.fixture.finish();
}
