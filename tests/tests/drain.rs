//! A region that one of two hosts is about to lose: `usmc region drain`. Both are directories of this kernel, which have nothing but the
//! region in common.

use std::fs;
use std::process::{Command, Output};

use usmc_tests::build::{self, tests_dir};
use usmc_tests::region::Hosts;
use usmc_tests::ss::{self, Socket};
use usmc_tests::{Fixture, Process, is_plain};

/// Bytes of the region.
const REGION: usize = 64 << 20;

fn spawn(fixture: &Fixture, hosts: &Hosts, host: usize, program: &str, args: &[&str]) -> Process {
    fixture.spawn(python(fixture, hosts, host, program, args))
}

fn python(fixture: &Fixture, hosts: &Hosts, host: usize, program: &str, args: &[&str]) -> Command {
    let mut command = fixture.command("/usr/bin/python3");
    hosts.dress(host, &mut command);
    command.arg(tests_dir().join("programs/python").join(program)).args(args);
    command
}

fn run(hosts: &Hosts, args: &[&str]) -> Output {
    let mut command = Command::new(build::usmc());
    let out = command.args(["region", "drain"]).arg(hosts.region()).args(args).output();
    out.expect("usmc")
}

fn tell(hosts: &Hosts, args: &[&str]) -> String {
    let out = run(hosts, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

/// The host's number in the region, and its state there. Hosts join one after the other.
fn peer(hosts: &Hosts, host: usize) -> (String, String) {
    let peer = &hosts.shown()["peers"][host];
    (peer["number"].to_string(), peer["state"].as_str().expect("a state").to_owned())
}

/// Takes the connections of a host's programs out of the region.
fn drain(hosts: &Hosts, host: usize) {
    let said = tell(hosts, &["--peer", &peer(hosts, host).0]);
    assert!(said.contains("no connection is left in the region"), "{said}");
    assert_eq!(peer(hosts, host).1, "drains");
}

fn ends(port: u16, client: u16) -> Vec<Socket> {
    let is_end = |s: &Socket| {
        let ports = (s.local_port(), s.peer_port());
        ports == (port, client) || ports == (client, port)
    };
    ss::list().into_iter().filter(is_end).collect()
}

fn wait_for(fixture: &Fixture, (port, client): (u16, u16), is_so: impl Fn(&Socket) -> bool) {
    fixture.wait_until("both ends", || {
        let ends = ends(port, client);
        ends.len() == 2 && ends.iter().all(&is_so)
    });
}

fn is_drained(socket: &Socket) -> bool {
    !socket.is_smcd() && socket.fallback_reason == "region is being drained"
}

#[test]
fn connections_leave_a_region_that_goes_whatever_they_wait_by() {
    if is_plain() {
        return;
    }
    let styles = ["blocking", "waitall", "peek", "select", "poll", "epoll", "edge", "oneshot"];
    for (n, style) in styles.iter().enumerate() {
        let fixture = Fixture::new("drain awake");
        let hosts = Hosts::new(&fixture, 2, REGION);
        let port = fixture.port();
        let number = port.to_string();
        let args = ["server", styles[(n + 3) % 8], "127.0.0.1", &number];
        let mut server = spawn(&fixture, &hosts, 0, "echo.py", &args);
        assert_eq!(server.line(), "listening");
        let args = ["client", style, "127.0.0.1", &number, "pause"];
        let mut client = spawn(&fixture, &hosts, 1, "echo.py", &args);
        let both = (port, u16::try_from(client.number_after("port")).expect("a port"));
        wait_for(&fixture, both, Socket::is_smcd);
        println!("{args:?}: host {} loses the region", n % 2);
        drain(&hosts, n % 2);
        wait_for(&fixture, both, is_drained);
        client.close_stdin();
        let bytes = client.number_after("echoed");
        assert_eq!(server.line(), format!("served {bytes}"));
        client.succeed();
        server.succeed();
        fixture.finish();
    }
    println!("{} connections were in shared memory, and left it", styles.len());
}

#[test]
fn connections_that_sleep_are_woken_to_leave_a_region() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("drain asleep");
    let hosts = Hosts::new(&fixture, 2, REGION);
    let mut sleepers = Vec::new();
    for (n, style) in ["blocking", "select", "poll", "epoll", "edge"].into_iter().enumerate() {
        let port = fixture.port();
        let number = port.to_string();
        let sides = [n % 2, 1 - n % 2];
        let mut server = spawn(&fixture, &hosts, sides[0], "idle.py", &["server", style, &number]);
        assert_eq!(server.line(), "listening");
        let mut client = spawn(&fixture, &hosts, sides[1], "idle.py", &["client", style, &number]);
        let both = (port, u16::try_from(client.number_after("port")).expect("a port"));
        wait_for(&fixture, both, Socket::is_smcd);
        client.say("sleep");
        assert_eq!((client.line().as_str(), server.line().as_str()), ("asleep", "asleep"));
        sleepers.push((server, client, both));
    }
    drain(&hosts, 1);
    for (_, _, both) in &sleepers {
        wait_for(&fixture, *both, is_drained);
    }
    for (mut server, mut client, _) in sleepers {
        server.say("after");
        assert_eq!(server.line(), "back");
        server.close_stdin();
        server.succeed();
        client.succeed();
    }
    fixture.finish();
}

/// The doorbell comes while the client still spins, and the spin takes it away.
#[test]
fn a_connection_that_is_about_to_sleep_leaves_a_region() {
    if is_plain() {
        return;
    }
    for style in ["blocking", "select", "poll", "epoll", "edge"] {
        let fixture = Fixture::new("drain spinning");
        let hosts = Hosts::new(&fixture, 2, REGION);
        let port = fixture.port();
        let number = port.to_string();
        let mut server = spawn(&fixture, &hosts, 0, "idle.py", &["server", style, &number]);
        assert_eq!(server.line(), "listening");
        let mut client = python(&fixture, &hosts, 1, "idle.py", &["client", style, &number]);
        client.env("USMC_BUSY_POLL_US", "1000000");
        let mut client = fixture.spawn(client);
        let both = (port, u16::try_from(client.number_after("port")).expect("a port"));
        wait_for(&fixture, both, Socket::is_smcd);
        client.say("sleep");
        assert_eq!((client.line().as_str(), server.line().as_str()), ("asleep", "asleep"));
        drain(&hosts, 1);
        wait_for(&fixture, both, is_drained);
        server.say("after");
        assert_eq!(server.line(), "back");
        server.close_stdin();
        server.succeed();
        client.succeed();
        fixture.finish();
    }
}

/// It is named, and leaves as soon as it waits for a socket.
#[test]
fn a_program_that_waits_for_something_else_keeps_its_connections() {
    const BYTES: u64 = 1 << 20;
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("drain elsewhere");
    let hosts = Hosts::new(&fixture, 2, REGION);
    let (port, size) = (fixture.port(), BYTES.to_string());
    let number = port.to_string();
    let args = |role| [role, "127.0.0.1", &number, &size];
    let mut server = spawn(&fixture, &hosts, 0, "edges.py", &args("server"));
    assert_eq!(server.line(), "listening");
    let mut client = spawn(&fixture, &hosts, 1, "edges.py", &args("client"));
    let both = (port, u16::try_from(client.number_after("port")).expect("a port"));
    wait_for(&fixture, both, Socket::is_smcd);
    client.say("quiet");
    assert_eq!(client.line(), "quiet");
    let number = peer(&hosts, 1).0;
    let out = run(&hosts, &["--peer", &number, "--wait", "0"]);
    let said = String::from_utf8(out.stderr).expect("text");
    let client_end = ends(both.0, both.1).into_iter().find(|s| s.local_port() == both.1);
    let named = format!("python3 ({}): 1", client_end.expect("the client's end").pid);
    assert!(!out.status.success() && said.contains("left in the region: 1;"), "{said}");
    assert!(said.contains(&named), "{named}: {said}");
    client.say("go");
    client.say("wait");
    while client.number_after("got") < BYTES {}
    server.line_after("done");
    drain(&hosts, 1);
    client.succeed();
    server.succeed();
    fixture.finish();
}

/// A device of a virtual machine that is unplugged is a file that has become too short: whoever touches it gets SIGBUS.
#[test]
fn a_region_that_is_gone_ends_no_program_without_connections() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("gone without a word");
    let hosts = Hosts::new(&fixture, 2, REGION);
    let port = fixture.port();
    let number = port.to_string();
    let mut server = spawn(&fixture, &hosts, 0, "echo.py", &["mirror", "-", "127.0.0.1", &number]);
    assert_eq!(server.line(), "listening");
    let connect = || {
        let mut client = spawn(&fixture, &hosts, 1, "idle.py", &["client", "poll", &number]);
        let both = (port, u16::try_from(client.number_after("port")).expect("a port"));
        (client, both)
    };
    let (mut client, both) = connect();
    wait_for(&fixture, both, Socket::is_smcd);
    client.kill();
    fixture.wait_until("its end", || ends(both.0, both.1).is_empty());
    fs::File::options().write(true).open(hosts.region()).and_then(|f| f.set_len(0)).expect("ours");
    let (mut client, both) = connect();
    wait_for(&fixture, both, |socket| {
        !socket.is_smcd() && socket.tx_bytes.max(socket.rx_bytes) > 10_000
    });
    client.kill();
    server.close_stdin();
    server.succeed();
    fixture.finish();
}

/// What has joined before stays TCP, and what comes later uses the region again.
#[test]
fn a_region_that_goes_takes_no_connections_until_it_is_back() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("drain and back");
    let hosts = Hosts::new(&fixture, 2, REGION);
    let echo = |wanted: fn(&Socket) -> bool| {
        let port = fixture.port();
        let number = port.to_string();
        let args = ["server", "epoll", "127.0.0.1", &number];
        let mut server = spawn(&fixture, &hosts, 0, "echo.py", &args);
        assert_eq!(server.line(), "listening");
        let args = ["client", "poll", "127.0.0.1", &number, "pause"];
        let mut client = spawn(&fixture, &hosts, 1, "echo.py", &args);
        let both = (port, u16::try_from(client.number_after("port")).expect("a port"));
        wait_for(&fixture, both, wanted);
        client.close_stdin();
        let bytes = client.number_after("echoed");
        assert_eq!(server.line(), format!("served {bytes}"));
        client.succeed();
        server.succeed();
    };
    echo(Socket::is_smcd);
    for host in [0, 1] {
        drain(&hosts, host);
        echo(|socket| !socket.is_smcd() && socket.fallback_reason != "handshake pending");
        tell(&hosts, &["--undo", "--peer", &peer(&hosts, host).0]);
        assert_eq!(peer(&hosts, host).1, "alive");
        echo(Socket::is_smcd);
    }
    fixture.finish();
}
