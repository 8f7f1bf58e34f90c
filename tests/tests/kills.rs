//! Processes that are killed at any moment. The seed is printed; `USMC_TESTS_SEED` repeats a run.

use std::time::{Duration, Instant};

use usmc_tests::{Draw, Fixture, Process, build, number, procfs};

/// Lets a random time pass, by the clock: the point is the instant, not to wait for something.
fn instant(draw: &mut Draw, most: Duration) {
    let end = Instant::now() + Duration::from_nanos(draw.below(most.as_nanos() as u64));
    while Instant::now() < end {
        std::thread::yield_now();
    }
}

fn load(fixture: &Fixture, args: &[&str]) -> Process {
    let mut command = fixture.command(build::program("load"));
    command.args(args);
    fixture.spawn(command)
}

fn server(fixture: &Fixture, port: &str) -> Process {
    let mut server = load(fixture, &["server", port]);
    server.line_after("port");
    server
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
    let mut draw = Draw::announced("USMC_TESTS_SEED");
    let port = fixture.port().to_string();
    let mut serving = server(&fixture, &port);
    // Two that live through it all, and check every byte.
    let mut survivors: Vec<Process> =
        (1..3).map(|i| load(&fixture, &["cycle", &port, &i.to_string()])).collect();
    for survivor in &mut survivors {
        survivor.line_after("ready");
    }
    let mut last = [0; 2];
    for round in 0..rounds {
        let mut victim = load(&fixture, &["cycle", &port, &(1000 + round).to_string()]);
        victim.line_after("ready");
        instant(&mut draw, Duration::from_millis(4));
        if draw.below(4) == 0 {
            serving.kill();
            serving = server(&fixture, &port);
        }
        victim.kill();
        if round % 20 == 19 {
            // Nobody hangs: each survivor goes on making connections.
            for (survivor, last) in survivors.iter_mut().zip(&mut last) {
                fixture.wait_until("a survivor to go on", || cycles(survivor) > *last);
                *last = cycles(survivor);
            }
        }
    }
    for survivor in &mut survivors {
        assert_nothing_piled_up(survivor);
        survivor.succeed();
    }
    fixture.wait_until("the server to see all ends", || {
        serving.say("stats");
        serving.line_after("stats").contains(" open 0 ")
    });
    assert_nothing_piled_up(&serving);
    serving.succeed();
    fixture.finish();
}

fn assert_nothing_piled_up(process: &Process) {
    let fds = procfs::open_fds(process.pid());
    assert!(fds < 64, "{fds} open fds after a storm of short connections");
    let mappings = procfs::shared_mappings(process.pid());
    assert!(mappings < 64, "{mappings} shared mappings after a storm of short connections");
}

#[test]
fn server_stopped_and_continued_at_any_moment() {
    let fixture = Fixture::new("stops");
    let mut draw = Draw::announced("USMC_TESTS_SEED");
    let port = fixture.port().to_string();
    let serving = server(&fixture, &port);
    let mut client = load(&fixture, &["cycle", &port, "1"]);
    client.line_after("ready");
    for _ in 0..50 {
        let before = cycles(&mut client);
        instant(&mut draw, Duration::from_millis(2));
        serving.signal(libc::SIGSTOP);
        instant(&mut draw, Duration::from_millis(2));
        serving.signal(libc::SIGCONT);
        fixture.wait_until("the client to go on", || cycles(&mut client) > before);
    }
    let line = {
        client.say("?");
        client.line_after("cycles")
    };
    assert!(line.ends_with("broken 0"), "{line}");
    client.succeed();
    let mut serving = serving;
    serving.succeed();
    fixture.finish();
}
