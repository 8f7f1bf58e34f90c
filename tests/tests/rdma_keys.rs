//! The agent's settings, each by what a program or a command sees of it: two hosts with the fake libibverbs.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::build::{tests_dir, usmc};
use usmc_tests::rdma::{Hosts, share};
use usmc_tests::{Fixture, Process, is_plain};

const CLIENT: usize = 0;
const SERVER: usize = 1;

struct World {
    fixture: Fixture,
    hosts: Hosts,
}

/// The ends of a connection.
struct Pair {
    ends: [Process; 2],
    port: u16,
}

impl World {
    fn new(name: &str, options: [&[&str]; 2]) -> World {
        let fixture = Fixture::new(name);
        let hosts = Hosts::with(&fixture, options);
        World { fixture, hosts }
    }

    /// A program of each host, which are connected.
    fn pair(&self) -> Pair {
        self.pair_of(1)
    }

    /// The same with so many connections, over each of which a byte has gone.
    fn pair_of(&self, connections: usize) -> Pair {
        let port = self.fixture.port();
        let start = |host: usize, role: &str, address: &str| {
            let mut command = self.hosts.command(&self.fixture, host, "/usr/bin/python3");
            command.arg(tests_dir().join("programs/python/room.py"));
            command.args([role, address, &port.to_string(), &connections.to_string()]);
            self.fixture.spawn(command)
        };
        let mut server = start(SERVER, "server", "0.0.0.0");
        assert_eq!(server.line(), "listening");
        let mut client = start(CLIENT, "client", &self.hosts.address(SERVER));
        assert_eq!(client.line(), "connected");
        // A server's end is handed over with its first call.
        for end in [&mut client, &mut server] {
            assert_eq!(end.line(), "moved");
        }
        Pair { ends: [client, server], port }
    }

    fn assert_smcr(&self, pair: &Pair) {
        self.assert_all_smcr(pair, 2);
    }

    fn assert_all_smcr(&self, pair: &Pair, ends: usize) {
        let mut seen = Vec::new();
        self.fixture.wait_until("all ends by RDMA", || {
            seen = self.fixture.connections(pair.port);
            share(&seen) == (ends, ends)
        });
        println!("{ends} of {ends} ends by RDMA");
    }

    fn json(&self, host: usize, words: &[&str]) -> Value {
        let mut command = self.hosts.plain(&self.fixture, host);
        command.arg(usmc()).args(words).env("USMC_ISM_DIR", self.hosts.ism_dir(host));
        serde_json::from_slice(&command.output().expect("usmc").stdout).expect("JSON")
    }

    /// The link of the only group of SMC-R that a host's agent has.
    fn link(&self, host: usize) -> Value {
        let groups = self.json(host, &["linkgroup", "--json"]);
        let is_smcr = |group: &&Value| group["mode"] == "SMCR";
        let groups: Vec<&Value> =
            groups.as_array().expect("groups").iter().filter(is_smcr).collect();
        let [group] = groups[..] else { panic!("{groups:?}") };
        group["links"][0].clone()
    }

    /// Messages that a host's device has under way.
    fn under_way(&self, host: usize) -> u64 {
        let stats = self.json(host, &["stats", "--json"]);
        let device = &stats["agents"][0]["devices"][0];
        let count = |name: &str| device[name].as_u64().unwrap_or_else(|| panic!("{stats}"));
        count("posts") - count("completions")
    }

    fn end(self, pair: Pair) {
        for mut end in pair.ends {
            end.close_stdin();
            end.succeed();
        }
        let World { fixture, hosts } = self;
        let Hosts { agents, .. } = hosts;
        for mut agent in agents {
            agent.signal(libc::SIGTERM);
            agent.succeed();
        }
        fixture.finish();
    }
}

impl Pair {
    fn says(&mut self, end: usize, line: &str, answer: &str) -> u64 {
        self.ends[end].say(line);
        let answered = self.ends[end].line();
        let words: Vec<&str> = answered.split(' ').collect();
        assert_eq!(words[0], answer, "{line}");
        words.get(1).map_or(0, |number| number.parse().expect("a number"))
    }

    /// A byte from this end to the other one.
    fn move_byte(&mut self, from: usize) {
        self.says(from, "send", "sent");
        self.says(1 - from, "take 1", "taken");
    }

    /// How many bytes this end can write while the other one does not read; it reads them then.
    fn room(&mut self, from: usize) -> u64 {
        let room = self.says(from, "fill", "filled");
        self.says(1 - from, &format!("take {room}"), "taken");
        room
    }
}

/// A direction holds what its sender's send buffer and its receiver's RMB hold: each end has both sizes from its own agent.
#[test]
fn send_buffers_and_rmbs_have_sizes_of_their_own() {
    if is_plain() {
        return;
    }
    const K: u64 = 1 << 10;
    for (options, rooms) in [
        (
            [["--sndbuf", "64K", "--rcvbuf", "16K"], ["--sndbuf", "32K", "--rcvbuf", "512K"]],
            [64 + 512, 32 + 16],
        ),
        (
            [
                ["--ring-size", "32K", "--sndbuf", "256K"],
                ["--ring-size", "64K", "--rcvbuf", "128K"],
            ],
            [256 + 128, 64 + 32],
        ),
    ] {
        let world = World::new("two sizes", options.each_ref().map(|own| &own[..]));
        let mut pair = world.pair();
        world.assert_smcr(&pair);
        for _ in 0..2 {
            // Twice: the cursors wrap in each of the rings. A peer does not tell of each byte that it has read.
            let found = [CLIENT, SERVER].map(|end| pair.room(end));
            let is_so = |(found, room): (u64, u64)| (room * K - K..=room * K).contains(&found);
            assert!(found.into_iter().zip(rooms).all(is_so), "{options:?}: {found:?}");
        }
        world.assert_smcr(&pair);
        world.end(pair);
    }
}

/// So many messages of a link are under way at most, of which two are LLC's, as nobody acknowledges them. What waits goes out then.
#[test]
fn control_buffers_bound_what_is_under_way() {
    if is_plain() {
        return;
    }
    for (options, wrs, most) in
        [(&[][..], [16, 48], 14), (&["--ctrl-buffer-count", "4", "--mtu", "512"], [4, 12], 2)]
    {
        let world = World::new("control buffers", [options, options]);
        let mut pair = world.pair();
        world.assert_smcr(&pair);
        let link = world.link(CLIENT);
        assert_eq!([&link["send_wr"], &link["recv_wr"]], wrs, "{link}");
        // The fake's ports have 1024.
        assert_eq!(link["mtu"], if options.is_empty() { 1024 } else { 512 }, "{link}");
        assert_eq!(world.link(SERVER)["mtu"], link["mtu"]);
        world.fixture.wait_until("nothing under way", || world.under_way(CLIENT) == 0);
        world.hosts.fabric.hold("host0", "host1").expect("a line");
        let mut sent = 0;
        world.fixture.wait_until("as much as there may be", || {
            pair.says(CLIENT, "send", "sent");
            sent += 1;
            world.under_way(CLIENT) == most
        });
        for _ in 0..10 {
            pair.says(CLIENT, "send", "sent");
            sent += 1;
            assert_eq!(world.under_way(CLIENT), most, "{options:?}");
        }
        world.hosts.fabric.release("host0", "host1").expect("a line");
        pair.says(SERVER, &format!("take {sent}"), "taken");
        pair.move_byte(SERVER);
        world.assert_smcr(&pair);
        world.end(pair);
    }
}

/// A port that has come up is used when it has settled: connections are TCP before.
#[test]
fn a_port_settles_first() {
    if is_plain() {
        return;
    }
    let begun = Instant::now();
    let world = World::new("a port settles", [&["--port-add-delay", "2"], &[]]);
    let mut last = None;
    world.fixture.wait_until("a connection by RDMA", || {
        let pair = world.pair();
        let seen = world.fixture.connections(pair.port);
        let is_smcr = share(&seen).0 > 0;
        if !is_smcr {
            println!("TCP after {:?}", begun.elapsed());
        }
        last = Some(pair);
        is_smcr
    });
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    let pair = last.expect("a pair");
    world.assert_smcr(&pair);
    world.end(pair);
    let world = World::new("a port does not settle", [&["--port-add-delay", "3600"], &[]]);
    let pair = world.pair();
    let seen = world.fixture.connections(pair.port);
    assert_eq!((share(&seen), seen.len()), ((0, 2), 2), "{seen:?}");
    println!("0 of 2 ends by RDMA, as it is to be");
    world.end(pair);
}

/// A link group that has as many connections as it may have is followed by another one; an idle link is tested.
#[test]
fn groups_are_as_large_as_they_may_be_and_idle_links_are_tested() {
    if is_plain() {
        return;
    }
    let options = &["--max-conns", "16", "--testlink-time", "1"][..];
    let world = World::new("small groups", [options, options]);
    let pair = world.pair_of(17);
    world.assert_all_smcr(&pair, 34);
    let groups = world.json(CLIENT, &["linkgroup", "--json"]);
    let is_smcr = |group: &&Value| group["mode"] == "SMCR";
    let groups = groups.as_array().expect("groups").iter().filter(is_smcr);
    let mut conns: Vec<u64> = groups.filter_map(|group| group["conns"].as_u64()).collect();
    conns.sort_unstable();
    assert_eq!(conns, [1, 16]);
    let came = || {
        let stats = world.json(CLIENT, &["stats", "--json"]);
        stats["agents"][0]["devices"][0]["messages"].as_u64().expect("a number")
    };
    // Programs say nothing: what comes is TEST_LINK, and the answers to it, of two links.
    let before = came();
    world.fixture.wait_until("tests of both links", || came() >= before + 4);
    world.end(pair);
}

/// Each setting gets to the agent, from a file and as an option of `usmc agent`, which looks at none of them.
#[test]
fn settings_get_to_the_agent() {
    let fixture = Fixture::new("settings");
    let file = fixture.scratch().join("usmc.toml");
    let refused = |args: &[&str]| {
        let mut command = fixture.plain(usmc());
        command.arg("agent").arg("--ism-dir").arg(fixture.ism_dir()).args(args);
        let output = command.output().expect("usmc");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (key, value, said) in [
        ("buffer_size", "1", "--ring-size takes a power of two from 16K to 4M, not 1"),
        ("sndbuf", "1", "--sndbuf takes a power of two from 16K to 4M, not 1"),
        ("rcvbuf", "1", "--rcvbuf takes a power of two from 16K to 4M, not 1"),
        ("ctrl_buffer_count", "3", "--ctrl-buffer-count takes a number from 4 to 512, not 3"),
        ("mtu", "1500", "--mtu takes 256, 512, 1024, 2048 or 4096, not 1500"),
        ("port_add_delay", "-1", "--port-add-delay takes a number from 0 to 3600, not -1"),
        ("max_conns", "15", "--max-conns takes a number from 16 to 255, not 15"),
        ("max_links", "3", "--max-links takes a number from 1 to 2, not 3"),
        ("testlink_time", "-1", "--testlink-time takes a number from 0 to"),
    ] {
        let option = format!("--{}={value}", key.replace('_', "-"));
        let by_option = refused(&[&option]);
        assert!(by_option.contains(said), "{option}: {by_option}");
        fs::write(&file, format!("[agent]\n{key} = {value}\n")).expect("our own file");
        let by_file = refused(&["--config", &file.to_string_lossy()]);
        assert!(by_file.contains(said), "{key}: {by_file}");
    }
    fixture.finish();
}
