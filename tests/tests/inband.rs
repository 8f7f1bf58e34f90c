//! SMC-D by CLC in the TCP stream: between network namespaces and users that share a device, and not elsewhere.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use usmc_tests::build::{self, tests_dir};
use usmc_tests::device::{ANSWERED, CONFIRMED, Device, HELD, PROPOSED};
use usmc_tests::fixture::tool;
use usmc_tests::netns::{Netns, ROOT, Who};
use usmc_tests::region::Hosts;
use usmc_tests::ss::Socket;
use usmc_tests::{Fixture, Process, is_plain};

/// Users with nothing in common but a group.
const SERVER: u32 = 61_001;
const CLIENT: u32 = 61_002;
const GROUP: u32 = 61_000;

fn alone(user: u32) -> Who {
    Who { user: Some(user), group: Some(GROUP), alone: true }
}

/// Shares the device with a group: whoever is in it may use it, and remove only what is his own.
fn share_with_group(fixture: &Fixture) {
    let dir = fixture.ism_dir();
    std::os::unix::fs::chown(dir, None, Some(GROUP)).expect("we are root");
    fs::set_permissions(dir, fs::Permissions::from_mode(0o3770)).expect("our own directory");
}

/// Bytes of a region between the two namespaces, each of which is a host's.
const REGION: usize = 64 << 20;

fn echo(mut command: Command, args: &[&str]) -> Command {
    command.arg(tests_dir().join("programs/python/echo.py")).args(args);
    command
}

/// A server in namespace 0 and its client in 1, up to where both have said where they are.
fn meet(
    fixture: &Fixture,
    net: &Netns,
    who: [Who; 2],
    styles: [&str; 2],
    dress: impl Fn(usize, &mut Command),
    to: &str,
) -> ([Process; 2], u16, u16) {
    let port = fixture.port();
    let number = port.to_string();
    let mut server = net.command(fixture, 0, who[0], "/usr/bin/python3");
    dress(0, &mut server);
    let mut server = fixture.spawn(echo(server, &["server", styles[0], "0.0.0.0", &number]));
    assert_eq!(server.line(), "listening");
    let mut client = net.command(fixture, 1, who[1], "/usr/bin/python3");
    dress(1, &mut client);
    let mut client = fixture.spawn(echo(client, &["client", styles[1], to, &number, "pause"]));
    let line = client.line();
    let client_port = line.strip_prefix("port ").and_then(|p| p.parse().ok()).expect("its port");
    ([server, client], port, client_port)
}

fn end([mut server, mut client]: [Process; 2]) {
    client.close_stdin();
    let echoed = client.line();
    let bytes = echoed.strip_prefix("echoed ").unwrap_or_else(|| panic!("{echoed}"));
    assert!(bytes.parse::<u64>().expect("a number") > 0);
    assert_eq!(server.line(), format!("served {bytes}"));
    client.succeed();
    server.succeed();
}

/// Waits until both ends show what is asked for.
fn wait_for(fixture: &Fixture, port: u16, client: u16, is_so: impl Fn(&Socket) -> bool) {
    if is_plain() {
        return;
    }
    let mut last = String::new();
    fixture.wait_until("both ends to agree", || {
        let ends: Vec<Socket> = fixture
            .sockets()
            .into_iter()
            .filter(|s| {
                let ports = [s.local_port(), s.peer_port()];
                // A client that has made no offer does not know its own.
                ports == [port, client] || ports == [client, port] || ports == [0, port]
            })
            .collect();
        // What a test that fails shows.
        let now = format!("{ends:?}");
        if now != last {
            println!("{now}");
            last = now;
        }
        ends.len() == 2 && ends.iter().all(&is_so)
    });
}

#[test]
fn every_way_to_wait_sees_the_applications_bytes_only() {
    let fixture = Fixture::new("in-band styles");
    let net = Netns::new();
    let styles = ["blocking", "waitall", "peek", "select", "poll", "epoll", "edge", "oneshot"];
    for (n, style) in styles.iter().enumerate() {
        let both = [*style, styles[(n + 3) % styles.len()]];
        let to = net.address(0);
        let (ends, port, client) = meet(&fixture, &net, [ROOT; 2], both, |_, _| {}, &to);
        wait_for(&fixture, port, client, Socket::is_smcd);
        end(ends);
    }
    fixture.finish();
}

/// Such a client makes thousands of calls before the answer to its Proposal can be there.
#[test]
fn a_client_that_never_sleeps_waits_for_the_answer() {
    let fixture = Fixture::new("in-band busy");
    let net = Netns::new();
    for server in ["waitall", "blocking", "epoll"] {
        let to = net.address(0);
        let (ends, port, client) =
            meet(&fixture, &net, [ROOT; 2], [server, "busy"], |_, _| {}, &to);
        wait_for(&fixture, port, client, Socket::is_smcd);
        end(ends);
    }
    fixture.finish();
}

#[test]
fn users_in_pid_mount_and_network_namespaces_of_their_own() {
    let fixture = Fixture::new("in-band users");
    let net = Netns::new();
    share_with_group(&fixture);
    let who = [alone(SERVER), alone(CLIENT)];
    let (ends, port, client) =
        meet(&fixture, &net, who, ["epoll", "blocking"], |_, _| {}, &net.address(0));
    wait_for(&fixture, port, client, Socket::is_smcd);
    end(ends);
    fixture.finish();
}

#[test]
fn users_in_one_network_namespace() {
    let fixture = Fixture::new("in-band two users");
    let net = Netns::new();
    share_with_group(&fixture);
    let port = fixture.port().to_string();
    let who = |user| Who { user: Some(user), group: Some(GROUP), alone: false };
    let server = net.command(&fixture, 0, who(SERVER), "/usr/bin/python3");
    let mut server = fixture.spawn(echo(server, &["server", "poll", "127.0.0.1", &port]));
    assert_eq!(server.line(), "listening");
    let client = net.command(&fixture, 0, who(CLIENT), "/usr/bin/python3");
    let mut client =
        fixture.spawn(echo(client, &["client", "select", "127.0.0.1", &port, "pause"]));
    let line = client.line();
    let client_port: u16 = line.strip_prefix("port ").and_then(|p| p.parse().ok()).expect("a port");
    wait_for(&fixture, port.parse().expect("a port"), client_port, Socket::is_smcd);
    end([server, client]);
    fixture.finish();
}

/// Each sees the other by the number of whoever its user namespace does not know, which is its own number as well.
#[test]
fn strangers_of_one_number_agree_in_the_stream() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("in-band overflow users");
    let net = Netns::new();
    share_with_group(&fixture);
    let port = fixture.port().to_string();
    let nobody = |user| {
        let who = Who { user: Some(user), group: Some(GROUP), alone: false };
        let mut command = net.plain(&fixture, 0, who);
        command.args(["unshare", "--user", "--map-user=65534"]).arg(build::usmc());
        command.args(["run", "--log", "debug", "--", "/usr/bin/python3"]);
        command
    };
    let server = echo(nobody(SERVER), &["server", "poll", "127.0.0.1", &port]);
    let mut server = fixture.spawn(server);
    server.line_after("listening");
    let client = echo(nobody(CLIENT), &["client", "select", "127.0.0.1", &port, "pause"]);
    let mut client = fixture.spawn(client);
    let client_port = u16::try_from(client.number_after("port")).expect("a port");
    wait_for(&fixture, port.parse().expect("a port"), client_port, Socket::is_smcd);
    assert!(server.errors().contains("accept sent"), "{}", server.errors());
    assert!(client.errors().contains("confirmed with slot"), "{}", client.errors());
    end([server, client]);
    fixture.finish();
}

/// The first slot of a client's segment (`usmc-shm/src/layout.rs`): the acceptor's count of holders, and its lock for receives.
const HOLDERS_AT: u64 = 4096 + 256;
const LOCK_AT: u64 = HOLDERS_AT + 32;

/// Its memory is the client's as well, which may write what it likes.
#[test]
fn nobody_waits_for_a_stopped_process_that_another_user_names() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("in-band lock");
    let net = Netns::new();
    share_with_group(&fixture);
    let who = |user| Who { user: Some(user), group: Some(GROUP), alone: false };
    let mut stopped = net.plain(&fixture, 0, who(SERVER));
    stopped.args(["sh", "-c", "kill -STOP $$"]);
    let mut stopped = fixture.spawn(stopped);
    let status = format!("/proc/{}/status", stopped.pid());
    fixture.wait_until("the stop", || {
        fs::read_to_string(&status).is_ok_and(|text| text.contains("State:\tT"))
    });
    let both = [who(SERVER), who(CLIENT)];
    let (ends, port, client_port) =
        meet(&fixture, &net, both, ["blocking", "blocking"], |_, _| {}, &net.address(0));
    wait_for(&fixture, port, client_port, Socket::is_smcd);
    let [mut server, mut client] = ends;
    let fds = fs::read_dir(format!("/proc/{}/fd", client.pid())).expect("a process");
    let is_segment = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("usmc-segment"))
    };
    let segment = fds.flatten().map(|fd| fd.path()).find(is_segment).expect("a segment");
    let segment = fs::File::options().write(true).open(segment).expect("we are root");
    let word = (stopped.pid() as u64) << 40 | 1;
    segment.write_all_at(&word.to_ne_bytes(), LOCK_AT).expect("a slot");
    segment.write_all_at(&2u32.to_ne_bytes(), HOLDERS_AT).expect("a slot");
    assert!(!server.wait().success());
    assert!(server.errors().contains("ConnectionResetError"), "{}", server.errors());
    assert!(!client.wait().success());
    stopped.kill();
    fixture.finish();
}

#[test]
fn without_a_common_device_they_stay_on_tcp() {
    let fixture = Fixture::new("in-band apart");
    let net = Netns::new();
    let other = fixture.scratch().join("other");
    fs::create_dir(&other).expect("our own directory");
    fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).expect("our own directory");
    let dress = |end: usize, command: &mut Command| {
        if end == 1 {
            command.env("USMC_ISM_DIR", &other);
        }
    };
    let (ends, port, client) =
        meet(&fixture, &net, [ROOT; 2], ["epoll", "poll"], dress, &net.address(0));
    let reasons = ["peer is not under uSMC on this device", "client made no offer"];
    wait_for(&fixture, port, client, |s| {
        !s.is_smcd() && reasons.contains(&s.fallback_reason.as_str())
    });
    end(ends);
    fixture.finish();
}

/// Bytes that are unread in the ring when the connection is handed on are there at once: the peer's program, which is
/// elsewhere, is not waited for.
#[test]
fn what_is_handed_on_does_not_wait_for_a_peer_in_another_namespace() {
    let fixture = Fixture::new("in-band handed on");
    let net = Netns::new();
    let port = fixture.port();
    let serve = "import socket, subprocess, sys
s = socket.create_server(('', int(sys.argv[1])))
print('listening', flush=True)
c = s.accept()[0]
while (d := c.recv(1)) != b'!': c.sendall(d)
print('turn', flush=True); sys.stdin.readline()
print('got', end=' ', flush=True)
subprocess.run(['/usr/bin/head', '-c', '5'], stdin=c, env={}, check=True)
print()";
    let call = "import select, socket, sys
c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print('port', c.getsockname()[1], flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    c.sendall(b'x'); assert c.recv(1) == b'x'
sys.stdin.readline(); c.sendall(b'!'); c.sendall(b'hello')
print('sent', flush=True); sys.stdin.read()";
    let mut server = net.command(&fixture, 0, ROOT, "/usr/bin/python3");
    server.args(["-c", serve, &port.to_string()]);
    let mut server = fixture.spawn(server);
    server.line_after("listening");
    let mut client = net.command(&fixture, 1, ROOT, "/usr/bin/python3");
    client.args(["-c", call, &net.address(0), &port.to_string()]);
    let mut client = fixture.spawn(client);
    let client_port = u16::try_from(client.number_after("port")).expect("a port");
    wait_for(&fixture, port, client_port, Socket::is_smcd);
    client.say("on");
    client.line_after("sent");
    server.line_after("turn");
    server.say("on");
    assert_eq!(server.line_after("got"), "hello");
    client.succeed();
    server.succeed();
    fixture.finish();
}

/// The client's address for the server is one that the server does not know.
fn translate(net: &Netns) -> String {
    let (away, there) = ("10.214.0.9", net.address(0));
    net.tool(1, &["nft", "add table ip t"]);
    net.tool(1, &["nft", "add chain ip t o { type nat hook output priority -100 ; }"]);
    net.tool(1, &["nft", &format!("add rule ip t o ip daddr {away} dnat to {there}")]);
    net.tool(1, &["ip", "route", "add", &format!("{away}/32"), "via", &there]);
    away.to_owned()
}

#[test]
fn behind_nat_they_stay_on_tcp() {
    let fixture = Fixture::new("in-band NAT");
    let net = Netns::new();
    let to = translate(&net);
    let (ends, port, client) = meet(&fixture, &net, [ROOT; 2], ["epoll", "poll"], |_, _| {}, &to);
    wait_for(&fixture, port, client, |s| {
        let asks = "no process of this device holds the other end (NAT, or it does not look)";
        let reason = if s.local_port() != port { asks } else { "client made no offer" };
        !s.is_smcd() && s.fallback_reason == reason
    });
    end(ends);
    fixture.finish();
}

#[test]
fn declared_peers_meet_through_nat() {
    let fixture = Fixture::new("in-band declared");
    let net = Netns::new();
    let to = translate(&net);
    let from = net.address(1);
    for styles in [["epoll", "poll"], ["blocking", "blocking"], ["poll", "oneshot"]] {
        let dress = |end: usize, command: &mut Command| {
            command.env("USMC_PEERS", if end == 0 { &from } else { &to });
        };
        let (ends, port, client) = meet(&fixture, &net, [ROOT; 2], styles, dress, &to);
        wait_for(&fixture, port, client, Socket::is_smcd);
        end(ends);
    }
    fixture.finish();
}

#[test]
fn a_declared_client_that_does_not_propose_is_served_as_ever() {
    let fixture = Fixture::new("in-band declared plain");
    let net = Netns::new();
    let port = fixture.port().to_string();
    let mut server = net.command(&fixture, 0, ROOT, "/usr/bin/python3");
    server.env("USMC_PEERS", "10.0.0.0/8");
    let mut server = fixture.spawn(echo(server, &["server", "epoll", "0.0.0.0", &port]));
    assert_eq!(server.line(), "listening");
    let mut client = net.plain(&fixture, 1, ROOT);
    client.arg("/usr/bin/python3");
    let client = echo(client, &["client", "poll", &net.address(0), &port, "300"]);
    let out = fixture.run(client);
    assert!(out.contains("echoed "), "{out}");
    assert!(server.line().starts_with("served "));
    server.succeed();
    fixture.finish();
}

#[test]
fn redis_and_its_benchmark_as_two_users_in_namespaces() {
    let fixture = Fixture::new("in-band redis");
    let net = Netns::new();
    share_with_group(&fixture);
    let port = fixture.port();
    let number = port.to_string();
    let mut server = net.command(&fixture, 0, alone(SERVER), "redis-server");
    server.args(["--port", &number, "--save", "", "--daemonize", "no", "--protected-mode", "no"]);
    let mut server = fixture.spawn(server);
    while !server.line().contains("Ready to accept connections") {}
    let mut load = net.command(&fixture, 1, alone(CLIENT), "redis-benchmark");
    load.args(["-h", &net.address(0), "-p", &number, "-q"]);
    load.args(["-t", "set,get", "-n", "200000", "-c", "50", "-d", "1024", "-r", "1000"]);
    let mut load = fixture.spawn(load);
    fixture.assert_serves_smcd(port);
    let out = load.succeed();
    assert!(!out.to_lowercase().contains("error"), "{out}");
    let mut cli = net.command(&fixture, 1, alone(CLIENT), "redis-cli");
    cli.args(["-h", &net.address(0), "-p", &number, "strlen", "key:000000000007"]);
    assert_eq!(fixture.run(cli).trim(), "1024");
    let mut stop = net.plain(&fixture, 1, ROOT);
    stop.args(["redis-cli", "-h", &net.address(0), "-p", &number, "shutdown", "nosave"]);
    fixture.run(stop);
    server.succeed();
    fixture.finish();
}

/// The messages of one connection as Wireshark names them; nothing is malformed.
#[test]
fn a_capture_shows_the_three_messages() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("in-band capture");
    let net = Netns::new();
    let file = fixture.scratch().join("capture.pcap");
    let path = file.to_string_lossy().into_owned();
    let mut capture = net.plain(&fixture, 0, ROOT);
    capture.args([
        "tcpdump",
        "-Z",
        "root",
        "-U",
        "--immediate-mode",
        "-i",
        "v0",
        "-w",
        &path,
        "tcp",
    ]);
    let mut capture = fixture.spawn(capture);
    fixture.wait_until("tcpdump", || capture.errors().contains("listening on"));
    let to = net.address(0);
    let (ends, port, client) =
        meet(&fixture, &net, [ROOT; 2], ["epoll", "blocking"], |_, _| {}, &to);
    wait_for(&fixture, port, client, Socket::is_smcd);
    end(ends);
    let shown = |filter: &str| {
        let out =
            tool("tshark", &["-r", &path, "-Y", filter, "-T", "fields", "-e", "_ws.col.Info"]);
        // A file that is being written may end in the middle of a packet.
        String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    fixture.wait_until("the capture", || shown("smc").len() >= 3);
    assert!(capture.terminate().success());
    let messages = shown("smc");
    let names = ["SMC-Dv2-Proposal", "SMC-Dv2-Accept", "SMC-Dv2-Confirm"];
    assert_eq!(messages.len(), names.len(), "{messages:#?}");
    for (message, name) in messages.iter().zip(names) {
        assert!(message.contains(name), "{name} in {message}");
    }
    assert_eq!(shown("_ws.malformed"), Vec::<String>::new());
    fixture.finish();
}

/// What a command that prints JSON says.
fn json(args: &[&str]) -> Value {
    let out = Command::new(build::usmc()).args(args).output().expect("usmc");
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}"))
}

/// A command that succeeds.
fn succeed(args: &[&str]) {
    let out = Command::new("timeout").arg("60").arg(build::usmc()).args(args).output();
    let out = out.expect("usmc");
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Each command names the region, and the kernel at the other end of a connection in it.
fn shows_the_region(hosts: &Hosts, [server, client]: &[Process; 2], port: u16) {
    let region = hosts.region().to_str().expect("UTF-8");
    let shown = json(&["region", "show", "--json", region]);
    let gid = &shown["gid"];
    let ends = usmc_tests::ss::list()
        .into_iter()
        .filter(|s| [s.local_port(), s.peer_port()].contains(&port));
    let mut peers: Vec<u8> =
        ends.filter(Socket::is_smcd).map(|s| s.host.expect("a kernel").0).collect();
    peers.sort_unstable();
    assert_eq!(peers, [1, 2], "each end names the other one");
    let name = &shown["peers"][0]["name"];
    assert!(name.as_str().is_some_and(|name| !name.is_empty()), "{shown}");

    let groups = json(&["linkgroup", "--json"]);
    let group = groups.as_array().and_then(|all| all.iter().find(|group| group["device"] == *gid));
    let group = group.unwrap_or_else(|| panic!("{groups}"));
    assert_eq!((&group["host"]["name"], &group["conns"]), (name, &1.into()), "{group}");

    let devices = json(&["device", "--json", "--regions", region]);
    let device = &devices["regions"][0];
    assert_eq!((&device["gid"], &device["state"]), (gid, &"usable".into()), "{device}");
    assert_eq!((&device["peers"], &device["link_groups"]), (&2.into(), &1.into()), "{device}");
    assert_eq!(device["processes"].as_array().map(Vec::len), Some(2), "{device}");

    // Its client goes on sending.
    let path = hosts.region().with_extension("pcapng");
    let path = path.to_str().expect("UTF-8");
    let pid = client.pid().to_string();
    succeed(&["dump", "-q", "-c", "4", "-w", path, "-p", &pid]);
    let capture = fs::read(path).expect("the capture");
    let capture = String::from_utf8_lossy(&capture);
    let host = |place: usize| {
        let name = shown["peers"][place]["name"].as_str().unwrap_or("");
        format!("{name}/{}", shown["peers"][place]["number"])
    };
    let (one, other) = (host(0), host(1));
    let ways =
        [(&one, &other), (&other, &one)].map(|(from, to)| format!("between {from} and {to}"));
    let begin = format!("by region {} ", gid.as_str().expect("an id"));
    let is_told = |way: &String| capture.contains(&format!("{begin}{way} from here on"));
    assert!(ways.iter().any(is_told), "no {begin}{ways:?} in the comments");

    for pid in [server, client].map(|end| end.pid().to_string()) {
        let stats = json(&["stats", "--json", "-p", &pid]);
        let of = &stats["devices"][0]["by_memory"];
        let of_region = of.as_array().and_then(|all| all.iter().find(|of| of["device"] == *gid));
        assert!(of_region.is_some_and(|of| of["tx_bytes"].as_u64() > Some(0)), "{stats}");
    }
}

#[test]
fn hosts_meet_in_a_region_whatever_their_programs_wait_by() {
    let fixture = Fixture::new("region styles");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let styles =
        ["blocking", "waitall", "peek", "select", "poll", "epoll", "edge", "oneshot", "busy"];
    for (n, style) in styles.iter().enumerate() {
        let both = [styles[(n + 3) % 8], *style];
        let to = net.address(0);
        let dress = |host: usize, command: &mut Command| hosts.dress(host, command);
        let (ends, port, client) = meet(&fixture, &net, [ROOT; 2], both, dress, &to);
        wait_for(&fixture, port, client, Socket::is_smcd);
        if n == 0 && !is_plain() {
            shows_the_region(&hosts, &ends, port);
        }
        end(ends);
    }
    println!("{} connections in shared memory", styles.len());
    fixture.finish();
}

#[test]
fn users_of_two_hosts_meet_in_a_region() {
    let fixture = Fixture::new("region users");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    hosts.give_to(GROUP, &[SERVER, CLIENT]);
    let who = [alone(SERVER), alone(CLIENT)];
    let dress = |host: usize, command: &mut Command| hosts.dress(host, command);
    let (ends, port, client) =
        meet(&fixture, &net, who, ["epoll", "blocking"], dress, &net.address(0));
    wait_for(&fixture, port, client, Socket::is_smcd);
    end(ends);
    fixture.finish();
}

/// As nginx on each of many virtual machines. Each is asked for its own.
#[test]
fn a_listener_on_all_addresses_stands_for_its_own_host() {
    let fixture = Fixture::new("region wildcards");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let dress = |host: usize, command: &mut Command| hosts.dress(host, command);
    let (ends, port, client) =
        meet(&fixture, &net, [ROOT; 2], ["epoll", "poll"], dress, &net.address(0));
    wait_for(&fixture, port, client, Socket::is_smcd);
    end(ends);
    // The same port on both hosts.
    let number = port.to_string();
    let servers = [0, 1].map(|host| {
        let mut server = net.command(&fixture, host, ROOT, "/usr/bin/python3");
        hosts.dress(host, &mut server);
        let server = echo(server, &["server", "select", "0.0.0.0", &number]);
        let mut server = fixture.spawn(server);
        assert_eq!(server.line(), "listening");
        server
    });
    for (host, server) in servers.into_iter().enumerate() {
        let to = net.address(host);
        let mut client = net.command(&fixture, 1, ROOT, "/usr/bin/python3");
        hosts.dress(1, &mut client);
        let client = echo(client, &["client", "blocking", &to, &number, "pause"]);
        let mut client = fixture.spawn(client);
        let its_port = u16::try_from(client.number_after("port")).expect("a port");
        wait_for(&fixture, port, its_port, Socket::is_smcd);
        end([server, client]);
    }
    fixture.finish();
}

/// A lying peer must not make a client send messages to whom it names.
#[test]
fn only_hosts_on_a_network_of_ours_are_asked_for() {
    let fixture = Fixture::new("region gateway");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let (far, there) = ("10.215.0.1", net.address(0));
    net.tool(0, &["ip", "addr", "add", &format!("{far}/32"), "dev", "lo"]);
    net.tool(1, &["ip", "route", "add", &format!("{far}/32"), "via", &there]);
    let dress = |host: usize, command: &mut Command| hosts.dress(host, command);
    let (ends, port, client) = meet(&fixture, &net, [ROOT; 2], ["epoll", "poll"], dress, far);
    wait_for(&fixture, port, client, |s| {
        let gateway = "listener of a region behind a gateway";
        let reason = if s.local_port() != port { gateway } else { "client made no offer" };
        !s.is_smcd() && s.fallback_reason == reason
    });
    end(ends);
    let dress = |host: usize, command: &mut Command| {
        hosts.dress(host, command);
        command.env("USMC_REGION_NETS", "10.215.0.0/16");
    };
    let (ends, port, client) = meet(&fixture, &net, [ROOT; 2], ["epoll", "poll"], dress, far);
    wait_for(&fixture, port, client, Socket::is_smcd);
    end(ends);
    fixture.finish();
}

/// A third host has no part in the region, and a member that lies about it there has it sent no message.
#[test]
fn a_member_that_lies_about_a_third_host_has_it_sent_nothing() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("region third host");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let far = "10.215.0.1";
    net.tool(0, &["ip", "addr", "add", &format!("{far}/32"), "dev", "lo"]);
    net.tool(1, &["ip", "route", "add", &format!("{far}/32"), "via", &net.address(0)]);
    let port = fixture.port();
    let at = SocketAddr::new(far.parse().expect("an address"), port);
    let member = Device::open_region(hosts.region());
    member.listen(at);
    let mut server = net.plain(&fixture, 0, ROOT);
    server.arg("/usr/bin/python3");
    let mut server = fixture.spawn(echo(server, &["server", "poll", far, &port.to_string()]));
    assert_eq!(server.line(), "listening");
    let mut client = net.command(&fixture, 1, ROOT, "/usr/bin/python3");
    hosts.dress(1, &mut client);
    let client = echo(client, &["client", "blocking", far, &port.to_string(), "pause"]);
    let mut client = fixture.spawn(client);
    let its_port = u16::try_from(client.number_after("port")).expect("a port");
    let from = SocketAddr::new(net.address(1).parse().expect("an address"), its_port);
    // It says that somebody holds the connection, and is at any step with it.
    let place = member.ask(from, at);
    let mut looks = 0;
    fixture.wait_until("the client to know", || {
        for phase in [HELD, PROPOSED, ANSWERED, CONFIRMED] {
            member.set_phase(place, phase);
            (0..3).for_each(|message| member.announce(place, message, looks));
        }
        looks += 1;
        let ends = fixture.sockets();
        let why = ends.iter().find(|end| end.peer_port() == port).map(|end| &end.fallback_reason);
        looks > 50 && why.is_some_and(|why| why == "listener of a region behind a gateway")
    });
    // Each byte is compared at both ends.
    end([server, client]);
    fixture.finish();
}

/// A client that waits for an answer by `STYLE`, and says how that ends and after how long.
const ASKS: &str = "import errno, select, socket, sys, time
style, to, port = sys.argv[1:4]
s = socket.create_connection((to, int(port)))
print('port', s.getsockname()[1], flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    s.sendall(b'x' * 9); assert s.recv(9, socket.MSG_WAITALL) == b'x' * 9
sys.stdin.readline()
s.setsockopt(socket.IPPROTO_TCP, 18, 1500)  # TCP_USER_TIMEOUT
print('quiet', flush=True); sys.stdin.readline()
begun = time.monotonic()
s.sendall(b'y' * 9)
try:
    if style == 'poll':
        p = select.poll(); p.register(s, select.POLLIN); assert p.poll(15000), 'nothing'
    elif style == 'select': assert select.select([s], [], [], 15)[0], 'nothing'
    elif style == 'epoll':
        p = select.epoll(); p.register(s, select.EPOLLIN); assert p.poll(15), 'nothing'
    elif style == 'edge':
        p = select.epoll(); p.register(s, select.EPOLLIN | select.EPOLLET); p.poll(0); assert p.poll(15), 'nothing'
    print('got', s.recv(9), flush=True)
except OSError as e:
    print('failed', errno.errorcode[e.errno], 'late' if time.monotonic() - begun > 10 else 'soon', flush=True)
";

/// Its kernel sends no FIN, and a ring does not tell. TCP's own timers do.
#[test]
fn a_host_that_is_gone_is_noticed_as_by_tcp() {
    let fixture = Fixture::new("region host gone");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let mut clients = Vec::new();
    for style in ["blocking", "poll", "select", "epoll", "edge"] {
        let port = fixture.port();
        let number = port.to_string();
        let mut server = net.command(&fixture, 0, ROOT, "/usr/bin/python3");
        hosts.dress(0, &mut server);
        // It is awake when its host goes, so that nobody rings for what follows.
        server.env("USMC_BUSY_POLL_US", "1000000");
        server
            .arg(tests_dir().join("programs/python/echo.py"))
            .args(["mirror", "-", "0.0.0.0", &number]);
        let mut server = fixture.spawn(server);
        assert_eq!(server.line(), "listening");
        let mut client = net.command(&fixture, 1, ROOT, "/usr/bin/python3");
        hosts.dress(1, &mut client);
        client.args(["-c", ASKS, style, &net.address(0), &number]);
        let mut client = fixture.spawn(client);
        let its_port = u16::try_from(client.number_after("port")).expect("a port");
        wait_for(&fixture, port, its_port, Socket::is_smcd);
        client.say("quiet");
        client.line_after("quiet");
        clients.push((style, client, server));
    }
    // A host that is gone runs no program and answers nothing.
    for (_, _, server) in &clients {
        server.signal(libc::SIGSTOP);
    }
    net.tool(0, &["nft", "add table ip t"]);
    net.tool(0, &["nft", "add chain ip t i { type filter hook input priority 0; policy drop; }"]);
    clients.iter_mut().for_each(|(_, client, _)| client.say("go on"));
    for (style, client, _) in &mut clients {
        assert_eq!(client.line_after("failed"), "ETIMEDOUT soon", "{style}");
    }
    for (_, mut client, mut server) in clients {
        client.succeed();
        server.kill();
    }
    fixture.finish();
}
