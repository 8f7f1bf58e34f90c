//! Hosts whose network or programs are slow, as those of emulated machines are: TCP's buffers are never empty while a stream flows, and
//! connections leave rings whose readers stand still.

use std::collections::HashSet;
use std::process::Command;

use usmc_tests::build::{self, tests_dir};
use usmc_tests::netns::{Netns, Who};
use usmc_tests::region::Hosts;
use usmc_tests::ss::{self, Socket};
use usmc_tests::{Fixture, Process, is_plain};

fn python(fixture: &Fixture, net: &Netns, host: usize, program: &str) -> Command {
    let mut command = net.command(fixture, host, Who::default(), "/usr/bin/python3");
    command.arg(tests_dir().join("programs/python").join(program));
    command
}

fn spawn(fixture: &Fixture, net: &Netns, host: usize, args: &[&str]) -> Process {
    let mut command = python(fixture, net, host, "stream.py");
    command.args(args);
    fixture.spawn(command)
}

/// Waits until both ends of a client's connection are in shared memory.
fn wait_for_memory(fixture: &Fixture, port: u16) {
    if is_plain() {
        return;
    }
    fixture.wait_until("both ends to be in shared memory", || {
        let is_end = |s: &&Socket| [s.local_port(), s.peer_port()].contains(&port);
        ss::list().iter().filter(is_end).filter(|s| s.is_smcd()).count() == 2
    });
}

/// A stream comes to shared memory, and all of it arrives.
fn flow(fixture: &Fixture, mut source: Process, mut sink: Process) {
    let port = u16::try_from(source.number_after("port")).expect("a port");
    wait_for_memory(fixture, port);
    source.say("enough");
    let sent = source.number_after("sent");
    assert_eq!(sink.number_after("took"), sent);
    source.succeed();
    sink.succeed();
}

#[test]
fn streams_leave_a_slow_link_from_their_first_byte_on() {
    let fixture = Fixture::new("slow link");
    let net = Netns::new();
    for host in [0, 1] {
        let limit = ["rate", "400mbit", "burst", "64kb", "latency", "50ms"];
        net.tool(host, &[&["tc", "qdisc", "add", "dev", "v0", "root", "tbf"], &limit[..]].concat());
    }
    let styles = ["blocking", "poll"];
    for style in styles {
        let number = fixture.port().to_string();
        let mut sink = spawn(&fixture, &net, 0, &["sink", "-", "0.0.0.0", &number]);
        assert_eq!(sink.line(), "listening");
        let to = net.address(0);
        let source = spawn(&fixture, &net, 1, &["source", style, &to, &number]);
        flow(&fixture, source, sink);
    }
    println!("{} connections in shared memory", styles.len());
    fixture.finish();
}

/// A client that tries its server's port again and again connects, and streams, as soon as the kernel listens. The server is slow to go
/// on from there.
#[test]
fn streams_that_begin_before_listen_returns_find_the_listener() {
    const LATE: [&str; 2] = ["-e", "inject=listen:delay_exit=500000"];
    let fixture = Fixture::new("eager streams");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, 64 << 20);
    for is_region in [false, true] {
        let number = fixture.port().to_string();
        let command = |host: usize, program: &str| {
            let mut command = net.command(&fixture, host, Who::default(), program);
            if is_region {
                hosts.dress(host, &mut command);
            }
            command
        };
        let stream = |mut command: Command, args: &[&str]| {
            command.arg(tests_dir().join("programs/python/stream.py")).args(args);
            fixture.spawn(command)
        };
        let python = "/usr/bin/python3";
        let to = net.address(0);
        let mut source = stream(command(1, python), &["source", "blocking", &to, &number]);
        assert_eq!(source.line(), "tries");
        let mut server = command(0, "strace");
        server.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=listen"]).args(LATE).arg(python);
        let mut sink = stream(server, &["sink", "-", "0.0.0.0", &number]);
        assert_eq!(sink.line(), "listening");
        flow(&fixture, source, sink);
    }
    println!("2 connections in shared memory");
    fixture.finish();
}

/// A sender that finds no room sends by TCP from then on. Its bytes come late, when the receiver has read the ring and nothing else.
#[test]
fn what_comes_by_tcp_behind_a_ring_is_an_edge() {
    const BYTES: u64 = 1 << 20;
    let fixture = Fixture::new("edges behind a ring");
    let net = Netns::new();
    // Its first ring takes a quarter of these, and the socket takes some more.
    let hosts = Hosts::new(&fixture, 2, 12 << 20);
    let (to, port, size) = (net.address(0), fixture.port().to_string(), BYTES.to_string());
    let start = |host: usize, role: &str| {
        let mut command = python(&fixture, &net, host, "edges.py");
        hosts.dress(host, &mut command);
        command.args([role, &to, &port, &size]);
        fixture.spawn(command)
    };
    let mut server = start(0, "server");
    assert_eq!(server.line(), "listening");
    let mut client = start(1, "client");
    let its_port = u16::try_from(client.number_after("port")).expect("a port");
    wait_for_memory(&fixture, its_port);
    net.tool(1, &["nft", "add table ip t"]);
    net.tool(1, &["nft", "add chain ip t i { type filter hook input priority 0; policy accept; }"]);
    client.say("quiet");
    assert_eq!(client.line(), "quiet");
    if is_plain() {
        client.say("go");
        client.say("wait");
    } else {
        net.tool(1, &["nft", "add rule ip t i drop"]);
        client.say("go");
        server.line_after("behind");
        client.say("wait");
        let got = client.number_after("got");
        assert!(got > 0 && got < BYTES, "{got}");
        net.tool(1, &["nft", "flush chain ip t i"]);
    }
    while client.number_after("got") < BYTES {}
    assert_eq!(server.line_after("done"), "");
    client.succeed();
    server.succeed();
    fixture.finish();
}

/// Both ends send more than their rings hold, edge-triggered: connections go back to TCP at any moment, also just where the other end has
/// read all, and come to a ring again.
#[test]
fn edges_are_told_while_connections_go_back_and_forth() {
    const COUNT: &str = "40";
    let fixture = Fixture::new("edges of the way back");
    let hosts = Hosts::new(&fixture, 2, 64 << 20);
    let number = fixture.port().to_string();
    let start = |host: usize, args: &[&str]| {
        let mut command = fixture.command(build::program("guests"));
        hosts.dress(host, &mut command);
        command.env("USMC_RING_SIZE", "16384");
        command.args([args[0], "127.0.0.1", &number]).args(&args[1..]);
        fixture.spawn(command)
    };
    let server = start(0, &["serve", "epoll"]);
    fixture.wait_for_port(number.parse().expect("a port"));
    let mut client = start(1, &["talk", "stalls", COUNT, "8000000"]);
    let mut seen = HashSet::new();
    if !is_plain() {
        // They go and come back, and one look finds some of them.
        fixture.wait_until("most connections to have been in shared memory", || {
            let is_in = |s: &Socket| s.is_smcd() && s.device.len() == 32;
            let ends = ss::list().into_iter().filter(|s| s.peer_port().to_string() == number);
            seen.extend(ends.filter(is_in).map(|s| s.local_port()));
            seen.len() > 20
        });
    }
    client.line_after("done");
    println!("{} of {COUNT} connections were in shared memory", seen.len());
    for mut process in [client, server] {
        process.signal(libc::SIGTERM);
        process.wait();
    }
    fixture.finish();
}

/// The reader is held where it is about to read TCP, while its peer goes over to the ring, says all it has to say there and ends: the
/// kernel knows of the end alone.
#[test]
fn what_was_said_in_the_ring_before_an_end_that_came_by_tcp_is_read() {
    let fixture = Fixture::new("last words");
    let ends = ["shutdown", "close"];
    for end in ends {
        let number = fixture.port().to_string();
        let program = |mut command: Command, args: &[&str]| {
            command.arg(tests_dir().join("programs/python/last_word.py")).args(args).arg(&number);
            fixture.spawn(command)
        };
        let python = "/usr/bin/python3";
        let mut server = program(fixture.command(python), &["server", end]);
        assert_eq!(server.line(), "listening");
        let mut slow = fixture.command("strace");
        let late = ["-e", "trace=recvmsg", "-e", "inject=recvmsg:delay_enter=20000"];
        slow.args(["-f", "-qq", "-o", "/dev/null"]).args(late).arg(python);
        let mut client = program(slow, &["client", "-"]);
        let port = u16::try_from(client.number_after("port")).expect("a port");
        wait_for_memory(&fixture, port);
        client.say("enough");
        assert_eq!(client.line(), "quiet");
        server.say("speak");
        assert_eq!(client.number_after("took"), 100_000, "of what a server said before its {end}");
        client.succeed();
        server.succeed();
    }
    println!("{} connections in shared memory", ends.len());
    fixture.finish();
}

/// Each thread of a server makes a listener, and echoes to one client. A line is one write: print(3) of two threads mixes theirs.
const LISTENERS: &str = "import os, socket, sys, threading
def serve(port):
    l = socket.create_server(('0.0.0.0', port)); os.write(1, b'listening\\n')
    s = l.accept()[0]
    while data := s.recv(1000): s.sendall(data)
threads = [threading.Thread(target=serve, args=(int(port),)) for port in sys.argv[1:]]
for t in threads: t.start()
for t in threads: t.join()
";
/// A client that sends and receives until its standard input has a line.
const ASKS: &str = "import select, socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); print('port', s.getsockname()[1], flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    s.sendall(b'x' * 100); assert len(s.recv(100, socket.MSG_WAITALL)) == 100
";

/// One thread maps the regions, which takes its time; the other one's listener is in them as well.
#[test]
fn listeners_of_threads_that_begin_at_once_are_all_in_a_region() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("listeners of threads");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, 64 << 20);
    let numbers = [(); 2].map(|()| fixture.port().to_string());
    let command = |host: usize, program: &str| {
        let mut command = net.command(&fixture, host, Who::default(), program);
        hosts.dress(host, &mut command);
        command
    };
    let mut server = command(0, "strace");
    server.args(["-f", "-qq", "-o", "/dev/null", "-P"]).arg(hosts.region());
    server.args(["-e", "inject=openat:delay_exit=500000"]);
    server.args(["/usr/bin/python3", "-c", LISTENERS]).args(&numbers);
    let mut server = fixture.spawn(server);
    (0..2).for_each(|_| assert_eq!(server.line(), "listening"));
    for number in &numbers {
        let mut client = command(1, "/usr/bin/python3");
        client.args(["-c", ASKS, &net.address(0), number]);
        let mut client = fixture.spawn(client);
        let port = u16::try_from(client.number_after("port")).expect("a port");
        wait_for_memory(&fixture, port);
        client.say("enough");
        client.succeed();
    }
    server.succeed();
    println!("2 connections in shared memory");
    fixture.finish();
}
