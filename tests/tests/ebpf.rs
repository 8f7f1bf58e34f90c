//! "I speak SMC" in SYN and SYN-ACK, by programs in the kernel: who says it, what the wire carries, and what middleboxes
//! make of it. In network namespaces and a cgroup of the tests' own.
#![cfg(target_arch = "x86_64")]

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use usmc_tests::network::{At, CLIENT, Network, SERVER, SERVER6, SERVICE, Syn, ebpf, option, syns};
use usmc_tests::ss::Socket;
use usmc_tests::{Fixture, Process, build, is_plain};

/// What getsockopt(2) answers (`usmc/src/syn_option.rs`).
const UNARMED: &str = "0";
const UNDECIDED: &str = "1";
const SPEAKS: &str = "2";
const SILENT: &str = "3";
const ECHOED: &str = "4";
/// Where no program is loaded: EOPNOTSUPP.
const UNKNOWN: &str = "errno=95";

/// Kinds of TCP options: SMC's, and the one that shows echoes.
const SMC: u8 = 254;
const PROBE: u8 = 253;

struct World {
    fixture: Fixture,
    network: Network,
    script: PathBuf,
    next_port: Cell<u16>,
}

impl World {
    /// With the programs loaded. `None` where that is not possible.
    fn new(name: &str) -> Option<World> {
        let (fixture, network) = Network::with_programs(name)?;
        // An ordinary user cannot read the sources everywhere.
        let script = fixture.scratch().join("syn_option.py");
        fs::copy(build::tests_dir().join("programs/python/syn_option.py"), &script)
            .expect("a copy");
        Some(World { fixture, network, script, next_port: Cell::new(9000) })
    }

    /// A part of `syn_option.py`, by an ordinary user.
    fn start(&self, at: At, words: &[&str]) -> Process {
        let mut command = self.network.command(&self.fixture, at, "setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]);
        command.arg(&self.script).args(words);
        self.fixture.spawn(command)
    }

    /// A server at a port of its own; nobody else is in its namespace.
    fn serve(&self, address: &str, how: &str) -> (Process, String) {
        let port = self.next_port.replace(self.next_port.get() + 1);
        let mut server = self.start(At::Server, &["serve", address, &port.to_string(), how]);
        let port = server.number_after("port").to_string();
        (server, port)
    }

    /// Connects and moves bytes both ways; what the client was told, and the address that it sees.
    fn connect(&self, address: &str, port: &str, how: &str) -> [String; 2] {
        let mut client = self.start(At::Client, &["connect", address, port, how]);
        let told = client.line_after("connected");
        client.line_after("echoed");
        client.succeed();
        let (outcome, peer) = told.split_once(' ').expect("two words");
        [outcome.to_owned(), peer.to_owned()]
    }

    fn end(self) {
        assert!(said(&ebpf("unload", self.network.cgroup())).starts_with("unloaded from"));
        self.network.end();
        self.fixture.finish();
    }
}

/// What a command that succeeds prints.
fn said(out: &Output) -> String {
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {errors}", out.status);
    String::from_utf8_lossy(&out.stdout).trim().to_owned()
}

/// What an acceptor was told: outcome, saved SYN, the peer's address.
fn accepted(server: &mut Process) -> [String; 3] {
    let line = server.line_after("accepted");
    let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    words.try_into().unwrap_or_else(|words| panic!("three words: {words:?}"))
}

/// The options of the kernel's own SMC, from a capture: SYN, SYN-ACK.
fn kernels() -> [Vec<u8>; 2] {
    let captures = build::tests_dir().join("../crates/smc-proto/tests/captures");
    let pcap = fs::read(captures.join("smcr-v2-first-and-next-contact.pcap")).expect("a capture");
    let first = |is_answer| {
        let found = syns(&pcap).into_iter().find(|syn: &Syn| syn.is_answer == is_answer);
        found.expect("a handshake").options
    };
    [first(false), first(true)]
}

#[test]
fn the_wire_carries_what_armed_sockets_ask_for() {
    let Some(world) = World::new("ebpf wire") else { return };
    let recording = world.network.record(&world.fixture, At::Server);
    let [kernels_syn, kernels_answer] = kernels();
    for (address, listener, client, told, server_told) in [
        (SERVER, "arm", "arm", SPEAKS, SPEAKS),
        (SERVER6, "arm", "arm", SPEAKS, SPEAKS),
        (SERVER, "arm", "", UNARMED, SILENT),
        (SERVER, "", "arm", SILENT, UNARMED),
        (SERVER, "", "", UNARMED, UNARMED),
        // As a listener that comes by exec, and one that is passed on to somebody who does not speak SMC.
        (SERVER, "late", "arm", SPEAKS, SPEAKS),
        (SERVER, "unsave", "arm", SPEAKS, SPEAKS),
        (SERVER, "disarm", "arm", SILENT, UNARMED),
    ] {
        let case = format!("{address}: listener {listener:?}, client {client:?}");
        let (mut server, port) = world.serve(address, listener);
        let [outcome, _] = world.connect(address, &port, client);
        let [server_outcome, saved, _] = accepted(&mut server);
        assert_eq!((&*outcome, &*server_outcome), (told, server_told), "{case}");
        server.kill();
        let [syn, answer] = recording.handshake(&world.fixture, port.parse().expect("a port"));
        let expected = |says: bool, kernels| if says { option(SMC, kernels) } else { None };
        assert_eq!(option(SMC, &syn.options), expected(client == "arm", &kernels_syn), "{case}");
        assert_eq!(option(PROBE, &syn.options).is_some(), client == "arm", "{case}");
        assert_eq!(
            option(SMC, &answer.options),
            expected(told == SPEAKS, &kernels_answer),
            "{case}"
        );
        assert_eq!(option(PROBE, &answer.options), None, "{case}");
        // What the application sees of it without any option of ours.
        let has_saved = matches!(listener, "arm" | "late" | "unsave");
        assert_eq!(saved.contains("fe06e2d4c3d9"), has_saved && client == "arm", "{case}: {saved}");
    }
    recording.end();
    world.end();
}

#[test]
fn both_ends_know_it_through_translated_addresses() {
    let Some(world) = World::new("ebpf DNAT") else { return };
    let (mut server, port) = world.serve(SERVER, "arm");
    world.network.route_by(&format!(
        "table ip nat {{
            chain pre {{ type nat hook prerouting priority -100; \
                ip daddr {SERVICE} tcp dport 80 dnat to {SERVER}:{port}; }}
            chain post {{ type nat hook postrouting priority 100; masquerade; }}
        }}"
    ));
    world.network.do_at(At::Client, "ip", &["route", "add", SERVICE, "via", "10.77.1.1"]);
    let [outcome, peer] = world.connect(SERVICE, "80", "arm");
    let [server_outcome, _, client] = accepted(&mut server);
    assert_eq!((&*outcome, &*server_outcome), (SPEAKS, SPEAKS));
    // Neither end knows the connection by the other's name for it.
    assert_eq!((&*peer, &*client), (SERVICE, "10.77.2.1"));
    assert_ne!(client, CLIENT);
    server.kill();
    world.end();
}

#[test]
fn what_middleboxes_do_to_the_option_ends_in_tcp() {
    let Some(world) = World::new("ebpf middleboxes") else { return };
    let forward = |rule: &str| {
        format!(
            "table ip filter {{
                chain fw {{
                    type filter hook forward priority 0
                    {rule}
                }}
            }}"
        )
    };
    for (rule, told, server_told) in [
        // Stripped from both.
        ("meta l4proto tcp reset tcp option 254", SILENT, SILENT),
        ("ip daddr 10.77.2.2 reset tcp option 254", SILENT, SILENT),
        // The server has said yes and cannot know that nobody heard it.
        ("ip saddr 10.77.2.2 reset tcp option 254", SILENT, SPEAKS),
        // Who drops what it does not know gets a SYN without it.
        ("tcp option 254 exists drop", SILENT, SILENT),
    ] {
        world.network.route_by(&forward(rule));
        let (mut server, port) = world.serve(SERVER, "arm");
        let [outcome, _] = world.connect(SERVER, &port, "arm");
        let [server_outcome, ..] = accepted(&mut server);
        assert_eq!((&*outcome, &*server_outcome), (told, server_told), "{rule}");
        server.kill();
        world.network.route_freely();
    }
    world.end();
}

#[test]
fn a_cookie_answers_without_the_option() {
    let Some(world) = World::new("ebpf cookies") else { return };
    // Always, not only when the queue is full.
    world.network.sysctl(At::Server, "net.ipv4.tcp_syncookies=2");
    let (mut server, port) = world.serve(SERVER, "arm");
    let [outcome, _] = world.connect(SERVER, &port, "arm");
    assert_eq!(outcome, SILENT);
    assert_eq!(accepted(&mut server)[0], SILENT);
    server.kill();
    world.end();
}

#[test]
fn a_host_that_echoes_options_is_not_taken_for_a_speaker() {
    let Some(world) = World::new("ebpf echo") else { return };
    let network = &world.network;
    // The link's far end has no address any more: its kernel answers nothing.
    network.do_at(At::Router, "ip", &["address", "flush", "dev", "north"]);
    network.do_at(
        At::Client,
        "sh",
        &[
            "-c",
            "ip neigh replace 10.77.1.1 lladdr 02:00:00:00:00:01 dev north && \
         ip neigh replace 10.77.1.9 lladdr 02:00:00:00:00:09 dev north",
        ],
    );
    let mut command = network.command(&world.fixture, At::Router, "/usr/bin/python3");
    command.arg(&world.script).args(["echo", "north"]);
    let mut host = world.fixture.spawn(command);
    host.line_after("ready");
    let mut client = world.start(At::Client, &["connect", "10.77.1.9", "80", "arm", "1000"]);
    let outcome = client.line_after("connected");
    let syn = host.line_after("syn");
    assert!(syn.contains("fe06e2d4c3d9"), "{syn}");
    assert_eq!(outcome, format!("{ECHOED} 10.77.1.9"));
    client.line_after("echoed");
    client.succeed();
    host.kill();
    world.end();
}

#[test]
fn programs_are_loaded_replaced_shown_and_taken_away() {
    let Some(world) = World::new("ebpf load") else { return };
    let cgroup = world.network.cgroup().to_owned();
    let name = cgroup.display().to_string();
    let usmc = |user: &str, words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={user}"), "--clear-groups"]).arg(build::usmc());
        command.arg("ebpf").args(words).output().expect("running usmc ebpf")
    };
    let status = || {
        let out = usmc("0", &["status", "--json"]);
        let parsed = serde_json::from_slice::<serde_json::Value>(&out.stdout).expect("JSON");
        let all = parsed["cgroups"].as_array().expect("root may list them").clone();
        all.into_iter().find(|one| one["path"] == *name)
    };
    let before = status().expect("loaded");
    assert_eq!(before["complete"], true);
    assert_eq!(before["programs"].as_array().map(Vec::len), Some(3));
    // Twice.
    assert_eq!(said(&ebpf("load", &cgroup)), format!("already loaded at {name}"));
    assert_eq!(status().expect("loaded"), before);
    let shown = said(&usmc("0", &["status"]));
    assert!(shown.contains(&format!("loaded at {name}: programs ")), "{shown}");
    // An ordinary user may neither load, unload nor list, and is told who may.
    for words in [&["load", "--cgroup", &name][..], &["unload", "--cgroup", &name]] {
        let out = usmc("65534", words);
        let errors = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{words:?}: {errors}");
        assert!(errors.contains("run it as root"), "{words:?}: {errors}");
    }
    let out = usmc("65534", &["status"]);
    let shown = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(shown.contains("for root to see"), "{shown}");
    // But sees by a socket whether they are there: in the cgroup, by a process of it.
    let mut inside = world.network.command(&world.fixture, At::Client, "setpriv");
    inside.args(["--reuid=65534", "--clear-groups"]).arg(build::usmc()).args(["ebpf", "status"]);
    let shown = world.fixture.run(inside);
    assert!(shown.contains("sockets of this process can say SMC"), "{shown}");
    // No cgroup.
    let out = ebpf("load", &world.fixture.scratch().join("none"));
    assert!(String::from_utf8_lossy(&out.stderr).contains("name one that exists"));
    let out = ebpf("load", world.fixture.scratch());
    assert!(String::from_utf8_lossy(&out.stderr).contains("is no cgroup"));
    // Taken away under an armed listener: its clients find a TCP server.
    let (mut server, port) = world.serve(SERVER, "arm");
    assert_eq!(world.connect(SERVER, &port, "arm")[0], SPEAKS);
    assert_eq!(accepted(&mut server)[0], SPEAKS);
    assert_eq!(said(&ebpf("unload", &cgroup)), format!("unloaded from {name}"));
    assert_eq!(status(), None);
    assert_eq!(world.connect(SERVER, &port, "")[0], UNKNOWN);
    assert_eq!(accepted(&mut server)[0], UNKNOWN);
    assert_eq!(said(&ebpf("unload", &cgroup)), format!("nothing was loaded at {name}"));
    // And brought back: what a listener answers, its acceptor knows, though nobody has armed it again.
    assert_eq!(said(&ebpf("load", &cgroup)), format!("loaded at {name}"));
    assert_eq!(world.connect(SERVER, &port, "arm")[0], SPEAKS);
    assert_eq!(accepted(&mut server)[0], SPEAKS);
    assert_eq!(world.connect(SERVER, &port, "")[0], UNARMED);
    assert_eq!(accepted(&mut server)[0], UNARMED);
    server.kill();
    world.end();
}

/// A program under `usmc run` in the network; an ISM directory for each place.
fn under_usmc(world: &World, at: At, option: &str, words: &[&str]) -> Process {
    let dir = world.fixture.scratch().join(format!("ism-{at:?}"));
    let mut command = world.network.under_usmc(&world.fixture, at, &dir, option);
    command.arg("/usr/bin/python3").args(words);
    world.fixture.spawn(command)
}

/// What `usmc ss` shows of a process: of its only connection.
fn shown(world: &World, process: &Process) -> Socket {
    let all = world.fixture.sockets();
    let of = |s: &&Socket| s.pid == process.pid() && s.state != "LISTEN";
    all.iter().find(of).unwrap_or_else(|| panic!("{} is shown: {all:#?}", process.pid())).clone()
}

const SERVE: &str = "import socket
s = socket.create_server(('', 0))
print('port', s.getsockname()[1], flush=True)
while True:
    c = s.accept()[0]
    print('accepted', flush=True)
    while d := c.recv(100): c.send(d)";

const CLIENT_OF: &str = "import asyncio, socket, sys
async def main():
    r, w = await asyncio.open_connection(sys.argv[2], sys.argv[3])
    w.write(b'x'); await r.read(1)
    print('there', flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    w.close()
if sys.argv[1] == 'asyncio':
    asyncio.run(main())
else:
    c = socket.create_connection((sys.argv[2], int(sys.argv[3])))
    c.send(b'x'); c.recv(1)
    print('there', flush=True)
    sys.stdin.read()";

#[test]
fn the_library_asks_for_it_where_it_is_told_to_and_shows_what_came_of_it() {
    let Some(world) = World::new("ebpf library") else { return };
    let declined = "CLC handshake was declined: 03030007 (no SMC-Dv2 device reaches the peer)";
    let silent = "peer says no SMC in its SYN";
    let elsewhere = "peer is not under uSMC on this device";
    for (server_option, client_option, way, told, why, server_told) in [
        ("on", "on", "blocking", "speaks", declined, "speaks"),
        ("auto", "auto", "asyncio", "speaks", declined, "speaks"),
        ("off", "auto", "blocking", "silent", silent, ""),
        ("off", "on", "asyncio", "silent", silent, ""),
        ("on", "off", "blocking", "", elsewhere, "silent"),
    ] {
        let case = format!("server {server_option}, client {client_option}, {way}");
        let mut server = under_usmc(&world, At::Server, server_option, &["-c", SERVE]);
        let port = server.number_after("port").to_string();
        let words = ["-c", CLIENT_OF, way, SERVER, &port];
        let mut client = under_usmc(&world, At::Client, client_option, &words);
        client.line_after("there");
        server.line_after("accepted");
        let (here, there) = (shown(&world, &client), shown(&world, &server));
        assert_eq!((&*here.tcp_option, &*here.fallback_reason), (told, why), "{case}");
        assert_eq!(there.tcp_option, server_told, "{case}");
        assert_eq!((&*here.mode, &*there.mode), ("TCP", "TCP"), "{case}");
        client.succeed();
        server.kill();
    }
    world.end();
}

#[test]
fn a_listener_that_leaves_the_library_says_smc_no_more() {
    let Some(world) = World::new("ebpf passing on") else { return };
    let script = world.script.to_string_lossy().into_owned();
    let channel = world.fixture.scratch().join("channel").to_string_lossy().into_owned();
    // To a program without the library.
    let mut command = world.network.command(&world.fixture, At::Server, "/usr/bin/python3");
    command.arg(&world.script).args(["taker", &channel]);
    let mut taker = world.fixture.spawn(command);
    taker.line_after("ready");
    let mut passer = under_usmc(&world, At::Server, "on", &[&script, "passer", &channel, "0"]);
    assert_eq!(passer.line_after("armed"), UNDECIDED);
    assert_eq!(passer.line_after("passed"), UNARMED);
    assert_eq!(taker.line_after("taken"), UNARMED);
    passer.succeed();
    taker.succeed();
    fs::remove_file(&channel).expect("the channel");
    // To one with it, which asks again.
    let mut taker = under_usmc(&world, At::Server, "on", &[&script, "taker", &channel]);
    taker.line_after("ready");
    let mut passer = under_usmc(&world, At::Server, "on", &[&script, "passer", &channel, "0"]);
    assert_eq!(passer.line_after("armed"), UNDECIDED);
    assert_eq!(taker.line_after("taken"), UNDECIDED);
    passer.succeed();
    taker.succeed();
    // By exec, to one that has been told to leave TCP alone and to one that has not.
    let exec = "import os, socket, sys
if len(sys.argv) > 1:
    s = socket.create_server(('', 0)); s.set_inheritable(True)
    os.execve('/usr/bin/python3', ['python3', '-c', os.environ['AGAIN'], ], dict(os.environ, FD=str(s.fileno()), **{sys.argv[1]: sys.argv[2]}))
s = socket.socket(fileno=int(os.environ['FD']))
print('outcome', int.from_bytes(s.getsockopt(286, 510, 4), 'little'))";
    for (name, value, told) in [("LD_PRELOAD", "", UNARMED), ("UNUSED", "", UNDECIDED)] {
        let mut command = world.network.command(&world.fixture, At::Server, build::usmc());
        command.env("AGAIN", exec).args(["run", "--tcp-option", "on", "--", "/usr/bin/python3"]);
        command.args(["-c", exec, name, value]);
        let told_by = world.fixture.run(command);
        assert_eq!(told_by.trim(), format!("outcome {told}"), "{name}");
    }
    world.end();
}

#[test]
fn a_kernel_that_refuses_need_not_stop_what_comes_next() {
    let fixture = Fixture::new("ebpf refused");
    let load = |options: &[&str]| {
        let mut command = fixture.plain("setpriv");
        command.args(["--bounding-set=-all", "--"]).arg(build::usmc()).args(["ebpf", "load"]);
        // It is no cgroup, so that nothing is loaded where it may.
        command.args(["--cgroup", "/proc"]).args(options).output().expect("setpriv")
    };
    let (strict, lax) = (load(&[]), load(&["--if-allowed"]));
    assert_eq!((strict.status.code(), lax.status.code()), (Some(1), Some(0)));
    assert!(!lax.stderr.is_empty() && lax.stderr == strict.stderr, "{lax:?}");
    fixture.finish();
}

#[test]
fn without_the_programs_a_process_asks_once() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("no eBPF");
    let connects = "import socket
s = socket.create_server(('127.0.0.1', 0))
for i in range(20):
    c = socket.create_connection(s.getsockname()); a = s.accept()[0]
    c.close(); a.close()";
    for (option, calls) in [("on", 1), ("auto", 1), ("off", 0)] {
        let mut command = fixture.plain("strace");
        let log = fixture.scratch().join(option);
        command
            .args(["-f", "-e", "trace=setsockopt,getsockopt", "-o"])
            .arg(&log)
            .arg(build::usmc());
        command.args(["run", "--tcp-option", option, "--", "/usr/bin/python3", "-c", connects]);
        fixture.run(command);
        let log = fs::read_to_string(&log).expect("strace's output");
        let ours: Vec<_> =
            log.lines().filter(|l| l.contains(", 0x1fe") || l.contains(", 510, ")).collect();
        assert_eq!(ours.len(), calls, "{option}: {ours:#?}");
    }
    fixture.finish();
}
