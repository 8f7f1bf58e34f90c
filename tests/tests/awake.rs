//! Ends of connections with one request each, which stay TCP, and whose waits look for a moment before they sleep.

use std::process::Command;

use usmc_tests::{Fixture, build, is_plain};

/// Connections one after the other: more than a second without looks, and less than one address has ports for.
const CONNECTIONS: u32 = 12_000;

/// How often both ends have slept for each connection, with this longest spin.
fn sleeps(fixture: &Fixture, way: &str, busy_us: Option<&str>) -> f64 {
    let started = |args: &[&str]| {
        let mut command: Command = fixture.command(build::program("load"));
        command.args(args);
        match busy_us {
            Some(us) => command.env("USMC_BUSY_POLL_US", us),
            None => command.env_remove("USMC_BUSY_POLL_US"),
        };
        fixture.spawn(command)
    };
    let count = CONNECTIONS.to_string();
    let mut server = started(&["answer", way, &count]);
    let port = server.number_after("port").to_string();
    let mut client = started(&["ask", way, &port, &count]);
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
    let fixture = Fixture::new("awake");
    for way in ["blocks", "poll", "epoll"] {
        let never = sleeps(&fixture, way, Some("0"));
        let ours = sleeps(&fixture, way, None);
        println!("{way}: {never:.2} sleeps for each connection without looks, {ours:.2} with them");
        assert!(never > 0.5, "{way}: {never} sleeps for each connection without looks");
        assert!(
            ours < never / 2.0,
            "{way}: {ours} sleeps for each connection, {never} without looks"
        );
    }
    fixture.finish();
}
