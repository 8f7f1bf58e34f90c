//! Programs in tight memory cgroups: what the rings take must not end them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

use usmc_tests::memory::{self, MemoryLimit};
use usmc_tests::{Fixture, build, is_plain};

/// So much is more than the program by itself needs, and less than it and full-sized rings.
const LIMIT: u64 = 40 << 20;
const CONNECTIONS: u64 = 600;
/// Asks for a ring of 128 KiB.
const LENGTH: u64 = 60_000;

/// Connections of a process within the limit, which takes so many bytes of memory itself as soon as they talk.
fn talk_at_the_limit(name: &str, connections: u64, taken: u64) {
    let Some(limit) = MemoryLimit::new(LIMIT) else { return memory::is_missing(name) };
    let fixture = Fixture::new(name);
    let mut server = fixture.command(build::program("load"));
    server.arg("server");
    let mut server = fixture.spawn(server);
    let port = server.number_after("port");
    let mut client = limit.command(&fixture, build::program("load"));
    let numbers = [port, connections, LENGTH, taken];
    client.arg("many").args(numbers.map(|n| n.to_string()));
    let mut client = fixture.spawn(client);
    client.line_after("connected");
    for _ in 0..6 {
        client.say("talk");
        client.line_after("round");
    }
    if !is_plain() {
        let (smcd, tcp): (Vec<_>, Vec<_>) = fixture
            .connections(u16::try_from(port).expect("a port"))
            .into_iter()
            .filter(|c| u64::from(c.peer_port()) == port)
            .partition(|c| c.is_smcd());
        assert!(!smcd.is_empty(), "rings were not used while there was memory");
        let short = tcp.iter().filter(|c| c.fallback_reason.contains("memory")).count();
        assert!(short > 0, "no connection was refused memory: {} over TCP", tcp.len());
        let usage = limit.usage();
        assert!(usage < LIMIT - LIMIT / 16, "nothing is left to the program: {usage}");
    }
    client.succeed();
    server.succeed();
    drop(limit);
    fixture.finish();
}

#[test]
fn connections_of_a_process_at_its_memory_limit_stay_or_become_tcp() {
    talk_at_the_limit("memory limit", CONNECTIONS, 0);
}

#[test]
fn memory_that_a_process_takes_meanwhile_is_minded() {
    talk_at_the_limit("memory taken", 200, LIMIT / 2);
}

/// A server that sends as much as is taken at once to one client after another, of which each reads it and closes. Prints how
/// much the first and the last ones were sent.
const FILL_EACH: &str = "import os, socket, sys
s = socket.create_server(('127.0.0.1', 0))
told, tell = os.pipe()
times = int(sys.argv[1])
if os.fork() == 0:
    for i in range(times):
        c = socket.create_connection(s.getsockname())
        for k in range(100): c.send(b'x' * 100); c.recv(100)
        left = int.from_bytes(os.read(told, 8), 'little')
        while left: left -= len(c.recv(65536))
        c.close()
    os._exit(0)
sent = []
for i in range(times):
    a = s.accept()[0]
    for k in range(100): a.recv(200); a.send(b'y' * 100)
    a.setblocking(False)
    n = 0
    try:
        while True: n += a.send(b'z' * 65536)
    except BlockingIOError: pass
    os.write(tell, n.to_bytes(8, 'little'))
    a.setblocking(True); assert a.recv(1) == b''
    sent.append(n); a.close()
assert os.wait()[1] == 0
print('first', min(sent[:3])); print('last', min(sent[-3:]))";

#[test]
fn room_for_what_nobody_reads_comes_back_with_each_connection() {
    const ROOMY: u64 = 256 << 20;
    let Some(limit) = MemoryLimit::new(ROOMY) else { return memory::is_missing("room") };
    let fixture = Fixture::new("room");
    let mut python = fixture.command("/usr/bin/python3");
    python.args(["-c", FILL_EACH, "100"]);
    let mut process = fixture.spawn(limit.enclose(&fixture, python));
    let [first, last] = ["first", "last"].map(|word| process.number_after(word));
    process.succeed();
    assert!(first > 1 << 20 && last > 1 << 20, "{first} bytes fit at first, {last} in the end");
    drop(limit);
    fixture.finish();
}

/// Memory that nobody has written is taken by whoever reads it first, so that another user's peer can make us take all of
/// its rings, whatever it sends.
#[test]
fn rings_with_strangers_are_counted_as_a_whole() {
    const GROUP: u32 = 61_000;
    const RING: u64 = 256 << 10;
    const MOST: u64 = 4 * LIMIT;
    let Some(limit) = MemoryLimit::new(MOST) else { return memory::is_missing("strangers") };
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("strangers' memory");
    chown(fixture.ism_dir(), None, Some(GROUP)).expect("we are root");
    let mode = fs::Permissions::from_mode(0o3770);
    fs::set_permissions(fixture.ism_dir(), mode).expect("our own directory");
    let load_by = |user: u32| {
        let mut command: Command = fixture.plain("setpriv");
        let id = user.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--groups", &GROUP.to_string()]);
        command.arg(build::usmc()).args(["run", "--"]).arg(build::program("load"));
        command
    };
    let mut server = load_by(61_001);
    server.arg("server");
    let mut server = fixture.spawn(limit.enclose(&fixture, server));
    let port = server.number_after("port");
    let mut client = load_by(61_002);
    client.arg("many").args([port, 200, 1000, 0].map(|n| n.to_string()));
    let mut client = fixture.spawn(client);
    client.line_after("connected");
    for _ in 0..6 {
        client.say("talk");
        client.line_after("round");
    }
    let port = u16::try_from(port).expect("a port");
    let ends = fixture.connections(port);
    let smcd = ends.iter().filter(|c| c.is_smcd() && c.peer_port() == port).count() as u64;
    assert!(smcd > 0, "rings were not used while there was memory");
    assert!(2 * smcd * RING < MOST, "{smcd} connections may take more than there is");
    assert!(2 * smcd * RING > MOST / 8, "{smcd} rings are all that there was memory for");
    client.succeed();
    server.succeed();
    fixture.finish();
}
