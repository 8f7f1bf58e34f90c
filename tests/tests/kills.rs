//! Processes that are killed at any moment. The seed is printed; `USMC_TESTS_SEED` repeats a run.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use usmc_shm::region::len_for;
use usmc_tests::region::Hosts;
use usmc_tests::{Draw, Fixture, Process, build, is_plain, number, procfs};

/// Lets a random time pass, by the clock: the point is the instant, not to wait for something.
fn instant(draw: &mut Draw, most: Duration) {
    let end = Instant::now() + Duration::from_nanos(draw.below(most.as_nanos() as u64));
    while Instant::now() < end {
        std::thread::yield_now();
    }
}

/// Where servers run, and where clients do, if these are different hosts.
const SERVERS: usize = 0;
const CLIENTS: usize = 1;

/// One host, or two with a region in common.
struct World {
    fixture: Fixture,
    hosts: Option<Hosts>,
}

impl World {
    fn load(&self, host: usize, args: &[&str]) -> Process {
        let mut command = self.fixture.command(build::program("load"));
        command.args(args);
        if let Some(hosts) = &self.hosts {
            hosts.dress_for_region(host, &mut command);
        }
        self.fixture.spawn(command)
    }

    fn server(&self, port: &str) -> Process {
        let mut server = self.load(SERVERS, &["server", port]);
        server.line_after("port");
        server
    }

    /// A client that makes one connection after the other.
    fn client(&self, port: &str, seed: u64) -> Process {
        // Between hosts it takes a few messages until a connection is in the region.
        let most = if self.hosts.is_some() { "200" } else { "12" };
        let mut client = self.load(CLIENTS, &["cycle", port, &seed.to_string(), most]);
        client.line_after("ready");
        client
    }
}

/// Cycles done by a survivor, and those that a death broke.
fn cycles(client: &mut Process) -> u64 {
    client.say("?");
    let line = client.line_after("cycles");
    line.split(' ').next().and_then(|n| n.parse().ok()).expect("a count")
}

#[test]
fn clients_and_servers_killed_at_any_moment_harm_nobody_else() {
    let rounds = number("USMC_TESTS_KILLS", 1000);
    let fixture = Fixture::with_limit("kill storm", Duration::from_secs(120 + rounds / 10));
    let world = World { fixture, hosts: None };
    kill_many(&world, rounds);
    world.fixture.finish();
}

/// The region has room for a few connections, so that what the killed have left is needed at once.
#[test]
fn what_the_killed_of_two_hosts_have_left_comes_back() {
    const UNITS: usize = 100;
    if is_plain() {
        return;
    }
    let rounds = number("USMC_TESTS_KILLS", 400);
    let fixture = Fixture::with_limit("kills in a region", Duration::from_secs(120 + rounds / 10));
    let hosts = Hosts::new(&fixture, 2, len_for(UNITS));
    let all = hosts.free();
    let world = World { fixture, hosts: Some(hosts) };
    let (inside, ends) = kill_many(&world, rounds);
    println!("{inside} of {ends} ends in the region");
    assert!(inside * 5 > ends, "the processes were killed over TCP");
    // Each host's next process takes back what its own have left: the server's first, as the runs are the clients'.
    let port = world.fixture.port().to_string();
    let hosts = world.hosts.as_ref().expect("two hosts");
    for _ in 0..2 {
        let mut serving = world.server(&port);
        let mut client = world.load(CLIENTS, &["many", &port, "1"]);
        client.line_after("connected");
        client.succeed();
        serving.succeed();
    }
    assert_eq!(hosts.free(), all, "units are lost: {}", hosts.shown());
    world.fixture.finish();
}

/// Kills as many clients, and a quarter as many servers. How many ends of connections were in the region, and how many were seen.
fn kill_many(world: &World, rounds: u64) -> (usize, usize) {
    let mut draw = Draw::announced("USMC_TESTS_SEED");
    let port = world.fixture.port().to_string();
    let mut serving = world.server(&port);
    // Two that live through it all, and check every byte.
    let mut survivors = [1, 2].map(|seed| world.client(&port, seed));
    let mut last = [0; 2];
    let (mut inside, mut ends) = (0, 0);
    for round in 0..rounds {
        let mut victim = world.client(&port, 1000 + round);
        instant(&mut draw, Duration::from_millis(4));
        if draw.below(4) == 0 {
            serving.kill();
            serving = world.server(&port);
        }
        victim.kill();
        if round % 20 == 19 {
            // Nobody hangs: each survivor goes on making connections.
            for (survivor, last) in survivors.iter_mut().zip(&mut last) {
                world.fixture.wait_until("a survivor to go on", || cycles(survivor) > *last);
                *last = cycles(survivor);
            }
            if let Some(hosts) = &world.hosts {
                let seen = world.fixture.connections(port.parse().expect("a port"));
                inside += hosts.count(&seen);
                ends += seen.len();
            }
        }
    }
    for survivor in &mut survivors {
        assert_nothing_piled_up(survivor);
        survivor.succeed();
    }
    world.fixture.wait_until("the server to see all ends", || {
        serving.say("stats");
        serving.line_after("stats").contains(" open 0 ")
    });
    assert_nothing_piled_up(&serving);
    serving.succeed();
    (inside, ends)
}

fn assert_nothing_piled_up(process: &Process) {
    let fds = procfs::open_fds(process.pid());
    assert!(fds < 64, "{fds} open fds after a storm of short connections");
    let mappings = procfs::shared_mappings(process.pid());
    assert!(mappings < 64, "{mappings} shared mappings after a storm of short connections");
}

#[test]
fn server_stopped_and_continued_at_any_moment() {
    let world = World { fixture: Fixture::new("stops"), hosts: None };
    let mut draw = Draw::announced("USMC_TESTS_SEED");
    let port = world.fixture.port().to_string();
    let serving = world.server(&port);
    let mut client = world.client(&port, 1);
    for _ in 0..50 {
        let before = cycles(&mut client);
        instant(&mut draw, Duration::from_millis(2));
        serving.signal(libc::SIGSTOP);
        instant(&mut draw, Duration::from_millis(2));
        serving.signal(libc::SIGCONT);
        world.fixture.wait_until("the client to go on", || cycles(&mut client) > before);
    }
    let line = {
        client.say("?");
        client.line_after("cycles")
    };
    assert!(line.ends_with("broken 0"), "{line}");
    client.succeed();
    let mut serving = serving;
    serving.succeed();
    world.fixture.finish();
}

/// The kill comes when the device file is whole and has no name yet.
#[test]
fn a_process_killed_while_it_makes_a_device_leaves_nothing() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("killed while it makes a device");
    let mut command = fixture.plain("strace");
    command.args(["-f", "-o", "/dev/null", "-e", "inject=linkat:signal=KILL:when=1"]);
    command.arg(build::usmc()).args(["run", "--", "/usr/bin/python3", "-c"]);
    command.arg("import socket; socket.create_server(('127.0.0.1', 0))");
    let status = fixture.spawn(command).wait();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "nothing was made");
    let left: Vec<_> = fs::read_dir(fixture.ism_dir()).expect("a device").flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    fixture.finish();
}
