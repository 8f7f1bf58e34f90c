//! Handshakes at the start of the stream, between peers that say SMC in SYN and SYN-ACK: of uSMC with uSMC through
//! translated addresses, and with what the kernel's SMC sends and waits for. In network namespaces and a cgroup of the
//! tests' own, with the programs of `usmc ebpf` loaded.
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::path::{Path, PathBuf};

use smc_proto::decline::DeclineCode;
use smc_proto::ids::PeerId;
use smc_proto::wire::clc::{Decline, MAX_LEN, Message};
use usmc_tests::network::{At, Network, SERVER, SERVICE, ebpf};
use usmc_tests::ss::Socket;
use usmc_tests::{Fixture, Process, build, procfs};

const PORT: u16 = 9100;

struct World {
    fixture: Fixture,
    network: Network,
}

impl World {
    /// With the programs loaded. `None` where that is not possible.
    fn new(name: &str) -> Option<World> {
        let (fixture, network) = Network::with_programs(name)?;
        Some(World { fixture, network })
    }

    fn end(self) {
        assert!(ebpf("unload", self.network.cgroup()).status.success());
        self.network.end();
        self.fixture.finish();
    }

    /// The device that all places share.
    fn device(&self) -> PathBuf {
        self.fixture.ism_dir().to_owned()
    }

    /// One of a place's own.
    fn own_device(&self, at: At) -> PathBuf {
        self.fixture.scratch().join(format!("ism-{at:?}"))
    }

    fn under_usmc(&self, at: At, device: &Path, words: &[&str]) -> Process {
        let mut command = self.network.under_usmc(&self.fixture, at, device, "auto");
        command.args(python("echo.py")).args(words);
        self.fixture.spawn(command)
    }

    fn serve(&self, role: &str, style: &str, device: &Path) -> Process {
        let words = [role, style, "0.0.0.0", &PORT.to_string()];
        let mut server = self.under_usmc(At::Server, device, &words);
        server.line_after("listening");
        server
    }

    /// What stands for the kernel's SMC.
    fn kernel(&self, at: At, words: &[&str]) -> Process {
        let mut command = self.network.command(&self.fixture, at, "/usr/bin/python3");
        command.args(&python("smc_kernel.py")[1..]).args(words);
        self.fixture.spawn(command)
    }

    /// What is shown of a process' only connection, once it is so.
    fn shows(&self, process: &Process, is_so: impl Fn(&Socket) -> bool) {
        self.fixture.wait_until("what usmc ss shows", || {
            let all = self.fixture.sockets();
            let its = all.into_iter().find(|s| s.pid == process.pid() && s.state != "LISTEN");
            its.as_ref().is_some_and(&is_so)
        });
    }

    /// Makes [`SERVICE`] the server's address for the client, and hides the client's own.
    fn translate(&self) {
        self.network.route_by(&format!(
            "table ip nat {{
                chain pre {{ type nat hook prerouting priority -100; \
                    ip daddr {SERVICE} dnat to {SERVER}; }}
                chain post {{ type nat hook postrouting priority 100; masquerade; }}
            }}"
        ));
        self.network.do_at(At::Client, "ip", &["route", "add", SERVICE, "via", "10.77.1.1"]);
    }
}

fn python(script: &str) -> [String; 2] {
    let path = build::tests_dir().join("programs/python").join(script);
    ["/usr/bin/python3".to_owned(), path.display().to_string()]
}

/// The first CLC message of this type in a capture of the kernel's SMC.
fn captured(file: &str, kind: u8) -> Vec<u8> {
    let captures = build::tests_dir().join("../crates/smc-proto/tests/captures");
    let pcap = fs::read(captures.join(file)).expect("a capture");
    let is_one = |at: &&[u8]| matches!(at[..5], [0xe2, 0xd4, 0xc3, 0xc4 | 0xd9, k] if k == kind);
    let from = pcap.windows(8).position(|at| is_one(&at)).expect("a message");
    let length = usize::from(u16::from_be_bytes([pcap[from + 5], pcap[from + 6]]));
    pcap[from..from + length].to_vec()
}

const PROPOSAL: u8 = 1;

/// Proposals of kernels: SMC-R of version 1, with version 2, and SMC-D by loopback.
const PROPOSALS: [&str; 3] = [
    "smcr-v1-first-and-next-contact.pcap",
    "smcr-v2-first-and-next-contact.pcap",
    "smcd-v2-loopback.pcap",
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn decline(v1: bool) -> String {
    let message = Message::Decline(Decline::new(v1, PeerId::default(), DeclineCode::NOSMCDEV));
    hex(message.emit(&mut [0; MAX_LEN]).expect("room"))
}

fn end(mut server: Process, mut client: Process) {
    client.close_stdin();
    let echoed = client.line_after("echoed").to_owned();
    assert_eq!(server.line_after("served"), echoed);
    client.succeed();
    server.succeed();
}

/// Where one of them is no program under uSMC, and tells no count.
fn both_are_done(mut server: Process, mut client: Process) {
    client.line_after("echoed");
    client.succeed();
    server.line_after("served");
    server.succeed();
}

#[test]
fn peers_meet_through_translated_addresses_without_being_declared() {
    let Some(world) = World::new("option DNAT") else { return };
    world.translate();
    let device = world.device();
    for (role, [server_style, style]) in [
        ("server", ["epoll", "poll"]),
        ("server", ["blocking", "blocking"]),
        ("server", ["edge", "oneshot"]),
        ("greeter", ["blocking", "select"]),
        ("greeter", ["epoll", "blocking"]),
        ("greeter", ["edge", "edge"]),
        ("greeter", ["poll", "peek"]),
    ] {
        let server = world.serve(role, server_style, &device);
        let caller = if role == "greeter" { "guest" } else { "client" };
        let words = [caller, style, SERVICE, &PORT.to_string(), "pause"];
        let client = world.under_usmc(At::Client, &device, &words);
        for process in [&server, &client] {
            world.shows(process, |s| s.is_smcd() && s.tcp_option == "speaks");
        }
        end(server, client);
    }
    world.end();
}

#[test]
fn in_one_namespace_nobody_asks_and_nothing_is_exchanged() {
    let Some(world) = World::new("option alone") else { return };
    let device = world.device();
    let server = world.serve("server", "epoll", &device);
    let words = ["client", "poll", "127.0.0.1", &PORT.to_string(), "pause"];
    let client = world.under_usmc(At::Server, &device, &words);
    world.shows(&server, |s| s.is_smcd() && s.tcp_option == "silent");
    world.shows(&client, |s| s.is_smcd() && s.tcp_option.is_empty());
    end(server, client);
    world.end();
}

#[test]
fn peers_without_a_common_device_say_so_to_each_other() {
    let Some(world) = World::new("option apart") else { return };
    world.translate();
    for (role, caller, style) in [
        ("server", "client", "poll"),
        ("greeter", "guest", "epoll"),
        ("greeter", "guest", "blocking"),
    ] {
        let server = world.serve(role, style, &world.own_device(At::Server));
        let words = [caller, style, SERVICE, &PORT.to_string(), "pause"];
        let client = world.under_usmc(At::Client, &world.own_device(At::Client), &words);
        let why = "CLC handshake was declined: 03030007 (no SMC-Dv2 device reaches the peer)";
        for process in [&server, &client] {
            world.shows(process, |s| !s.is_smcd() && s.fallback_reason == why);
        }
        end(server, client);
    }
    world.end();
}

#[test]
fn a_kernel_client_is_answered_before_anything_else() {
    let Some(world) = World::new("option kernel client") else { return };
    for (file, expected) in PROPOSALS.iter().zip(["03030002", "03030002", "03030007"]) {
        for (role, style) in [
            ("server", "blocking"),
            ("server", "epoll"),
            ("greeter", "blocking"),
            ("greeter", "poll"),
            ("greeter", "edge"),
        ] {
            let server = world.serve(role, style, &world.device());
            let first = hex(&captured(file, PROPOSAL));
            let greeting = if role == "greeter" { "220 ready\r\n" } else { "" };
            let words = ["client", SERVER, &PORT.to_string(), &first, greeting];
            let mut client = world.kernel(At::Client, &words);
            let told = client.line_after("answer").to_owned();
            let code = told.strip_prefix("4 ").unwrap_or_else(|| panic!("no Decline: {told}"));
            // What it offers and we have not.
            assert_eq!(code, expected, "{file} {style}");
            both_are_done(server, client);
        }
    }
    world.end();
}

/// The kernel's SMC waits in connect(2), for six seconds, whatever the server's application does meanwhile.
#[test]
fn a_kernel_client_is_answered_by_a_server_that_accepts_others_first() {
    const CLIENTS: usize = 3;
    let Some(world) = World::new("option kernel clients") else { return };
    let first = hex(&captured(PROPOSALS[1], PROPOSAL));
    let mut command = world.network.under_usmc(&world.fixture, At::Server, &world.device(), "auto");
    let port = PORT.to_string();
    command.args(python("crowd.py")).args(["0.0.0.0", &port, &(1 + CLIENTS).to_string()]);
    let mut server = world.fixture.spawn(command);
    server.line_after("listening");
    // The Proposal of this one does not come: the next accept(2) waits for both, and a signal does not end it.
    let mut silent = world.kernel(At::Client, &["silent", SERVER, &port]);
    server.line_after("taken");
    world.fixture.wait_until("the next accept", || {
        let polls = [libc::SYS_poll, libc::SYS_ppoll];
        procfs::sleeps_in(server.pid()).is_some_and(|call| polls.contains(&call))
    });
    server.signal(libc::SIGUSR1);
    let mut clients: Vec<Process> = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = world.kernel(At::Client, &["client", SERVER, &port, &first]);
        // The last one is answered by the application's first call.
        client.line_after("answer 4 ");
        clients.push(client);
    }
    for mut client in clients {
        client.line_after("echoed");
        client.succeed();
    }
    silent.close_stdin();
    silent.succeed();
    server.line_after("served");
    server.succeed();
    world.end();
}

#[test]
fn a_kernel_client_that_declines_first_is_waited_for_no_longer() {
    let Some(world) = World::new("option kernel declines") else { return };
    for (role, style) in [("server", "poll"), ("greeter", "epoll"), ("greeter", "blocking")] {
        let server = world.serve(role, style, &world.device());
        let greeting = if role == "greeter" { "220 ready\r\n" } else { "" };
        let words = ["client", SERVER, &PORT.to_string(), &decline(style == "poll"), greeting];
        let mut client = world.kernel(At::Client, &words);
        client.line_after("answer none");
        both_are_done(server, client);
    }
    world.end();
}

#[test]
fn a_kernel_server_gets_a_proposal_first() {
    let Some(world) = World::new("option kernel server") else { return };
    for (style, v1) in [("blocking", false), ("poll", true), ("epoll", false), ("waitall", true)] {
        let mut server =
            world.kernel(At::Server, &["server", "0.0.0.0", &PORT.to_string(), &decline(v1)]);
        server.line_after("listening");
        let words = ["client", style, SERVER, &PORT.to_string(), "pause"];
        let mut client = world.under_usmc(At::Client, &world.device(), &words);
        assert_eq!(server.line_after("first"), "1 -", "a Proposal");
        let why = "CLC handshake was declined: 03030000 (no usable SMC-D or SMC-R device)";
        world.shows(&client, |s| s.fallback_reason == why);
        client.close_stdin();
        both_are_done(server, client);
    }
    world.end();
}

#[test]
fn a_connect_that_does_not_block_proposes_before_its_first_bytes() {
    let Some(world) = World::new("option asyncio") else { return };
    let mut server =
        world.kernel(At::Server, &["server", "0.0.0.0", &PORT.to_string(), &decline(false)]);
    server.line_after("listening");
    let text = "import asyncio, sys
async def main():
    r, w = await asyncio.open_connection(sys.argv[1], sys.argv[2])
    for i in range(100):
        w.write(bytes([i]))
        assert await r.readexactly(1) == bytes([255 - i])
    w.close()
asyncio.run(main())
print('echoed')";
    let mut command = world.network.under_usmc(&world.fixture, At::Client, &world.device(), "auto");
    command.args(["/usr/bin/python3", "-c", text, SERVER, &PORT.to_string()]);
    let client = world.fixture.spawn(command);
    assert_eq!(server.line_after("first"), "1 -", "a Proposal");
    both_are_done(server, client);
    world.end();
}

#[test]
fn a_server_that_hands_its_connection_on_answers_first() {
    let Some(world) = World::new("option handed on") else { return };
    // To a program without the library, at once.
    let text = "import socket, subprocess, sys
s = socket.create_server(('', int(sys.argv[1])))
print('listening', flush=True)
c = s.accept()[0]
code = '''import socket
c = socket.socket(fileno=0); total = 0
while d := c.recv(70000):
    assert d == bytes((total + i) & 255 for i in range(len(d))), d[:50]
    c.sendall(bytes(255 - b for b in d)); total += len(d)'''
subprocess.run(['/usr/bin/python3', '-c', code], stdin=c, env={}, check=True)
print('served', flush=True)";
    let mut command = world.network.under_usmc(&world.fixture, At::Server, &world.device(), "auto");
    command.args(["/usr/bin/python3", "-c", text, &PORT.to_string()]);
    let mut server = world.fixture.spawn(command);
    server.line_after("listening");
    let first = hex(&captured(PROPOSALS[1], PROPOSAL));
    let mut client = world.kernel(At::Client, &["client", SERVER, &PORT.to_string(), &first]);
    assert!(client.line_after("answer").starts_with("4 "));
    both_are_done(server, client);
    world.end();
}

#[test]
fn a_peer_that_did_not_say_smc_is_sent_nothing() {
    let Some(world) = World::new("option silent") else { return };
    let plain = |at, words: &[&str]| {
        let mut command = world.network.command(&world.fixture, at, "/usr/bin/python3");
        command.args(&python("echo.py")[1..]).args(words);
        world.fixture.spawn(command)
    };
    let port = PORT.to_string();
    // Their bytes are checked by who runs without the library.
    let mut server = plain(At::Server, &["server", "poll", "0.0.0.0", &port]);
    server.line_after("listening");
    let words = ["client", "poll", SERVER, &port, "300"];
    let client = world.under_usmc(At::Client, &world.device(), &words);
    end(server, client);
    for (role, caller) in [("server", "client"), ("greeter", "guest")] {
        let server = world.serve(role, "epoll", &world.device());
        let client = plain(At::Client, &[caller, "poll", SERVER, &port, "300"]);
        end(server, client);
    }
    world.end();
}

#[test]
fn who_is_not_told_that_the_server_speaks_gets_its_bytes_only() {
    let Some(world) = World::new("option stripped") else { return };
    // The server has said yes and cannot know that nobody heard it: it waits for a Proposal, for a while.
    world.network.route_by(
        "table ip filter {
            chain fw {
                type filter hook forward priority 0
                ip saddr 10.77.2.2 reset tcp option 254
            }
        }",
    );
    for (role, caller, style) in [
        ("server", "client", "epoll"),
        ("greeter", "guest", "blocking"),
        ("greeter", "guest", "poll"),
        ("greeter", "guest", "edge"),
    ] {
        let server = world.serve(role, style, &world.device());
        let words = [caller, style, SERVER, &PORT.to_string(), "300"];
        let client = world.under_usmc(At::Client, &world.device(), &words);
        end(server, client);
    }
    world.end();
}
