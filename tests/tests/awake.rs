//! Ends of connections with one request each, which stay TCP, and whose waits look for a moment before they sleep.

use std::sync::{Mutex, MutexGuard, PoisonError};

use usmc_tests::{Fixture, Process, build, is_plain};

/// Connections one after the other: more than a second without looks, and less than one address has ports for.
const CONNECTIONS: u32 = 12_000;
/// The library measures whether looks pay, and another program may disturb that.
const TRIES: u32 = 5;

/// One test at a time: beside another one looks may pay less.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The test program, with this longest spin; `None`: by default.
fn load(fixture: &Fixture, args: &[&str], busy_us: Option<&str>) -> Process {
    let mut command = fixture.command(build::program("load"));
    command.args(args);
    match busy_us {
        Some(us) => command.env("USMC_BUSY_POLL_US", us),
        None => command.env_remove("USMC_BUSY_POLL_US"),
    };
    fixture.spawn(command)
}

/// How often both ends have slept for each connection.
fn sleeps(fixture: &Fixture, way: &str, busy_us: Option<&str>) -> f64 {
    let count = CONNECTIONS.to_string();
    let mut server = load(fixture, &["answer", way, &count], busy_us);
    let port = server.number_after("port").to_string();
    let mut client = load(fixture, &["ask", way, &port, &count], busy_us);
    let slept = client.number_after("slept") + server.number_after("slept");
    client.succeed();
    server.succeed();
    slept as f64 / f64::from(CONNECTIONS)
}

#[test]
fn ends_of_brief_connections_stay_awake() {
    if is_plain() {
        return;
    }
    let _alone = alone();
    let fixture = Fixture::new("awake");
    for way in ["blocks", "poll", "epoll"] {
        let never = sleeps(&fixture, way, Some("0"));
        assert!(never > 0.5, "{way}: {never} sleeps for each connection without looks");
        let is_awake = (0..TRIES).any(|_| {
            let ours = sleeps(&fixture, way, None);
            println!("{way}: {never:.2} sleeps for each connection without looks, {ours:.2} with");
            ours < never / 2.0
        });
        assert!(is_awake, "{way}: each connection costs as many sleeps as without looks");
    }
    fixture.finish();
}

/// A signal that comes during a look ends the call as one does that comes during its sleep.
#[test]
fn signals_end_waits_that_look() {
    const ROUNDS: u64 = 300;
    let _alone = alone();
    let fixture = Fixture::new("interrupted looks");
    for call in ["accept", "recv", "poll", "epoll_wait"] {
        let rounds = ROUNDS.to_string();
        let mut process = load(&fixture, &["interrupted", call, &rounds], None);
        let late = process.number_after("late");
        process.succeed();
        println!("{call}: {late} of {ROUNDS} waits were not ended by their signal");
        // One that comes before the call has begun ends none, also over TCP.
        assert!(late <= ROUNDS / 10, "{call}: {late} of {ROUNDS} waits went on");
    }
    fixture.finish();
}

/// A look is a part of the time that a wait may take.
#[test]
fn waits_that_look_take_no_longer() {
    /// A look in vain takes four times that.
    const MORE_NS: u64 = 30_000;
    let _alone = alone();
    let fixture = Fixture::new("timed looks");
    let took = |call: &str, busy_us| {
        let mut process = load(&fixture, &["timed", call, "300"], busy_us);
        let took = process.number_after("took");
        process.succeed();
        took
    };
    for call in ["poll", "epoll"] {
        let is_kept = (0..TRIES).any(|_| {
            let (never, ours) = (took(call, Some("0")), took(call, None));
            println!("{call}: {never} ns without looks, {ours} ns with");
            ours <= never + MORE_NS
        });
        assert!(is_kept, "{call}: a wait with a time limit takes longer by its look");
    }
    fixture.finish();
}

/// A signal that nobody handles ends no wait, also where it comes during a look.
#[test]
fn signals_without_handlers_end_no_wait() {
    let _alone = alone();
    let fixture = Fixture::new("ignored signals");
    for call in ["poll", "epoll"] {
        let mut process = load(&fixture, &["ignored", call, "300"], None);
        let ended = process.number_after("ended");
        process.succeed();
        assert!(ended <= 3, "{call}: a signal that is ignored has ended {ended} of 300 waits");
    }
    fixture.finish();
}
