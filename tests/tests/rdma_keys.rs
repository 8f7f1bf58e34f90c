//! The agent's settings, each by what a program or a command sees of it: two hosts with the fake libibverbs.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::build::usmc;
use usmc_tests::rdma::share;
use usmc_tests::rdma::world::{CLIENT, SERVER, World, finish};
use usmc_tests::{Fixture, Process, is_plain};

/// The ends of some connections.
struct Pair {
    ends: [Process; 2],
    port: u16,
}

fn two_hosts(name: &str, options: [&[&str]; 2]) -> World {
    World::with(Fixture::new(name), options)
}

/// The link of the only group of SMC-R that a host's agent has.
fn only_link(world: &World, host: usize) -> Value {
    let groups = world.groups(host);
    let [group] = &groups[..] else { panic!("{groups:?}") };
    group["links"][0].clone()
}

/// Messages that a host's device has under way.
fn under_way(world: &World, host: usize) -> u64 {
    let stats = world.json(host, &["stats", "--json"]);
    let device = &stats["agents"][0]["devices"][0];
    let count = |name: &str| device[name].as_u64().unwrap_or_else(|| panic!("{stats}"));
    count("posts") - count("completions")
}

impl Pair {
    /// A program of each host, with so many connections, over each of which a byte has gone.
    fn new(world: &World, connections: usize) -> Pair {
        let port = world.fixture.port();
        let start = |host: usize, role: &str, address: &str| {
            let mut command = world.python(host, "room.py");
            command.args([role, address, &port.to_string(), &connections.to_string()]);
            world.fixture.spawn(command)
        };
        let mut server = start(SERVER, "server", "0.0.0.0");
        assert_eq!(server.line(), "listening");
        let mut client = start(CLIENT, "client", &world.hosts.address(SERVER));
        assert_eq!(client.line(), "connected");
        // A server's end is handed over with its first call.
        for end in [&mut client, &mut server] {
            assert_eq!(end.line(), "moved");
        }
        Pair { ends: [client, server], port }
    }

    /// Both programs end.
    fn end(self) {
        let [client, server] = self.ends;
        finish(client, server);
    }

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
        let world = two_hosts("two sizes", options.each_ref().map(|own| &own[..]));
        let mut pair = Pair::new(&world, 1);
        world.assert_smcr(pair.port, 2);
        for _ in 0..2 {
            // Twice: the cursors wrap in each of the rings. A peer does not tell of each byte that it has read.
            let found = [CLIENT, SERVER].map(|end| pair.room(end));
            let is_so = |(found, room): (u64, u64)| (room * K - K..=room * K).contains(&found);
            assert!(found.into_iter().zip(rooms).all(is_so), "{options:?}: {found:?}");
        }
        world.assert_smcr(pair.port, 2);
        pair.end();
        world.end();
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
        let world = two_hosts("control buffers", [options, options]);
        let mut pair = Pair::new(&world, 1);
        world.assert_smcr(pair.port, 2);
        let link = only_link(&world, CLIENT);
        assert_eq!([&link["send_wr"], &link["recv_wr"]], wrs, "{link}");
        // The fake's ports have 1024.
        assert_eq!(link["mtu"], if options.is_empty() { 1024 } else { 512 }, "{link}");
        assert_eq!(only_link(&world, SERVER)["mtu"], link["mtu"]);
        world.fixture.wait_until("nothing under way", || under_way(&world, CLIENT) == 0);
        world.hosts.fabric.hold("host0", "host1").expect("a line");
        let mut sent = 0;
        world.fixture.wait_until("as much as there may be", || {
            pair.says(CLIENT, "send", "sent");
            sent += 1;
            under_way(&world, CLIENT) == most
        });
        for _ in 0..10 {
            pair.says(CLIENT, "send", "sent");
            sent += 1;
            assert_eq!(under_way(&world, CLIENT), most, "{options:?}");
        }
        world.hosts.fabric.release("host0", "host1").expect("a line");
        pair.says(SERVER, &format!("take {sent}"), "taken");
        pair.move_byte(SERVER);
        world.assert_smcr(pair.port, 2);
        pair.end();
        world.end();
    }
}

/// A port that has come up is used when it has settled: connections are TCP before.
#[test]
fn a_port_settles_first() {
    if is_plain() {
        return;
    }
    let begun = Instant::now();
    let world = two_hosts("a port settles", [&["--port-add-delay", "2"], &[]]);
    let mut last = None;
    world.fixture.wait_until("a connection by RDMA", || {
        let pair = Pair::new(&world, 1);
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
    world.assert_smcr(pair.port, 2);
    pair.end();
    world.end();
    let world = two_hosts("a port does not settle", [&["--port-add-delay", "3600"], &[]]);
    let pair = Pair::new(&world, 1);
    let seen = world.fixture.connections(pair.port);
    assert_eq!((share(&seen), seen.len()), ((0, 2), 2), "{seen:?}");
    println!("0 of 2 ends by RDMA, as it is to be");
    pair.end();
    world.end();
}

/// A link group that has as many connections as it may have is followed by another one; an idle link is tested.
#[test]
fn groups_are_as_large_as_they_may_be_and_idle_links_are_tested() {
    if is_plain() {
        return;
    }
    let options = &["--max-conns", "16", "--testlink-time", "1"][..];
    let world = two_hosts("small groups", [options, options]);
    let pair = Pair::new(&world, 17);
    world.assert_smcr(pair.port, 34);
    let groups = world.groups(CLIENT);
    let mut conns: Vec<u64> = groups.iter().filter_map(|group| group["conns"].as_u64()).collect();
    conns.sort_unstable();
    assert_eq!(conns, [1, 16]);
    let came = || {
        let stats = world.json(CLIENT, &["stats", "--json"]);
        stats["agents"][0]["devices"][0]["messages"].as_u64().expect("a number")
    };
    // Programs say nothing: what comes is TEST_LINK, and the answers to it, of two links.
    let before = came();
    world.fixture.wait_until("tests of both links", || came() >= before + 4);
    pair.end();
    world.end();
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
