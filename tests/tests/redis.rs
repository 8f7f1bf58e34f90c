//! redis from Debian's packages, unmodified.

use std::fs;
use std::time::Duration;

use usmc_tests::{Fixture, Process};

/// Starts redis-server with its data in the test's own directory.
fn serve(fixture: &Fixture, port: u16, options: &[&str]) -> Process {
    let mut command = fixture.command("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    command.args(["--dir", &fixture.scratch().to_string_lossy(), "--daemonize", "no"]);
    command.args(options);
    let mut server = fixture.spawn(command);
    while !server.line().contains("Ready to accept connections") {}
    server
}

/// A redis-cli command's answer.
fn cli(fixture: &Fixture, port: u16, args: &[&str]) -> String {
    let mut command = fixture.command("redis-cli");
    command.args(["-p", &port.to_string()]).args(args);
    fixture.run(command)
}

fn benchmark(fixture: &Fixture, port: u16, args: &[&str]) -> Process {
    let mut command = fixture.command("redis-benchmark");
    command.args(["-p", &port.to_string(), "-q"]).args(args);
    fixture.spawn(command)
}

/// Each benchmark's line has a rate, and no error was printed.
fn assert_rates(output: &str, tests: &[&str]) {
    assert!(!output.to_lowercase().contains("error"), "{output}");
    for test in tests {
        let done = format!("{test}: ");
        let rate = output
            .split(['\n', '\r'])
            .any(|l| l.starts_with(&done) && l.contains("requests per second"));
        assert!(rate, "{test} has no result: {output}");
    }
}

fn end(fixture: Fixture, mut server: Process) {
    assert!(server.terminate().success());
    drop(server);
    fixture.finish();
}

#[test]
fn set_and_get_with_two_hundred_clients() {
    let fixture = Fixture::new("redis set get");
    let port = fixture.port();
    let server = serve(&fixture, port, &[]);
    let args = ["-t", "set,get", "-n", "200000", "-c", "200", "-d", "1024", "-r", "1000"];
    let mut load = benchmark(&fixture, port, &args);
    fixture.assert_serves_smcd(port);
    assert_rates(&load.succeed(), &["SET", "GET"]);
    assert_eq!(cli(&fixture, port, &["strlen", "key:000000000007"]), "1024");
    assert_eq!(cli(&fixture, port, &["dbsize"]), "1000");
    end(fixture, server);
}

#[test]
fn pipelines_of_sixteen() {
    let fixture = Fixture::new("redis pipeline");
    let port = fixture.port();
    let server = serve(&fixture, port, &[]);
    let args = ["-t", "set,get,incr,lpush", "-n", "300000", "-c", "20", "-P", "16"];
    let mut load = benchmark(&fixture, port, &args);
    fixture.assert_serves_smcd(port);
    assert_rates(&load.succeed(), &["SET", "GET", "INCR", "LPUSH"]);
    assert_eq!(cli(&fixture, port, &["get", "counter:__rand_int__"]), "300000");
    assert_eq!(cli(&fixture, port, &["llen", "mylist"]), "300000");
    end(fixture, server);
}

#[test]
fn threaded_input_and_output() {
    let fixture = Fixture::new("redis io-threads");
    let port = fixture.port();
    let server = serve(&fixture, port, &["--io-threads", "2", "--io-threads-do-reads", "yes"]);
    let args = ["-t", "set,get", "-n", "100000", "-c", "50", "-d", "4000", "--threads", "2"];
    let mut load = benchmark(&fixture, port, &args);
    fixture.assert_serves_smcd(port);
    assert_rates(&load.succeed(), &["SET", "GET"]);
    end(fixture, server);
}

#[test]
fn ten_thousand_clients() {
    let fixture = Fixture::with_limit("redis 10000", Duration::from_secs(120));
    let port = fixture.port();
    let server = serve(&fixture, port, &["--maxclients", "10500"]);
    let args = ["-t", "set", "-n", "1000000", "-c", "10000"];
    let mut load = benchmark(&fixture, port, &args);
    fixture.assert_serves_smcd(port);
    assert_rates(&load.succeed(), &["SET"]);
    let refused = cli(&fixture, port, &["info", "stats"]);
    assert!(refused.contains("rejected_connections:0"), "{refused}");
    end(fixture, server);
}

#[test]
fn publish_and_subscribe() {
    let fixture = Fixture::new("redis pubsub");
    let port = fixture.port();
    let server = serve(&fixture, port, &[]);
    let mut subscribers: Vec<Process> = (0..3)
        .map(|_| {
            let mut command = fixture.command("redis-cli");
            command.args(["-p", &port.to_string(), "subscribe", "news"]);
            let mut subscriber = fixture.spawn(command);
            while subscriber.line() != "1" {}
            subscriber
        })
        .collect();
    let mut publisher = fixture.command("redis-cli");
    publisher.args(["-p", &port.to_string()]);
    let mut publisher = fixture.spawn(publisher);
    for i in 0..1000 {
        publisher.say(&format!("publish news message-{i}"));
        assert_eq!(publisher.line(), "3", "receivers of message {i}");
    }
    fixture.assert_serves_smcd(port);
    for subscriber in &mut subscribers {
        for i in 0..1000 {
            assert_eq!(subscriber.line(), "message");
            assert_eq!(subscriber.line(), "news");
            assert_eq!(subscriber.line(), format!("message-{i}"));
        }
        subscriber.kill();
    }
    publisher.succeed();
    end(fixture, server);
}

#[test]
fn save_and_background_save_under_load() {
    let fixture = Fixture::new("redis save");
    let port = fixture.port();
    let server = serve(&fixture, port, &["--enable-debug-command", "local"]);
    assert_eq!(cli(&fixture, port, &["debug", "populate", "100000", "kept", "200"]), "OK");
    // For ever: one that ends may be over before the second look.
    let args = ["-t", "set,get", "-n", "100000", "-c", "50", "-d", "512", "-r", "10000", "-l"];
    let mut load = benchmark(&fixture, port, &args);
    fixture.assert_serves_smcd(port);
    for _ in 0..3 {
        assert_eq!(cli(&fixture, port, &["bgsave"]), "Background saving started");
        fixture.wait_until("the background save", || {
            let state = cli(&fixture, port, &["info", "persistence"]);
            assert!(state.contains("rdb_last_bgsave_status:ok"), "{state}");
            state.contains("rdb_bgsave_in_progress:0")
        });
    }
    assert_eq!(cli(&fixture, port, &["save"]), "OK");
    fixture.assert_serves_smcd(port);
    // It gets after it has set.
    let mut output = String::new();
    while !output.contains("GET: ") {
        output += &(load.line() + "\n");
    }
    load.kill();
    assert_rates(&output, &["SET", "GET"]);
    fixture.wait_until("the load's end", || fixture.connections(port).is_empty());
    assert_eq!(cli(&fixture, port, &["save"]), "OK");
    let keys = cli(&fixture, port, &["dbsize"]);
    let mut server = server;
    assert!(server.terminate().success());
    // What was saved is what comes back.
    let server = serve(&fixture, port, &["--dbfilename", "dump.rdb"]);
    assert_eq!(cli(&fixture, port, &["dbsize"]), keys);
    assert_eq!(cli(&fixture, port, &["strlen", "kept:4711"]), "200");
    end(fixture, server);
}

#[test]
fn values_of_many_megabytes() {
    let fixture = Fixture::new("redis large values");
    let port = fixture.port();
    let server = serve(&fixture, port, &[]);
    let value: String = (0..1_000_000).map(|i| format!("{i:08}")).collect();
    let file = fixture.scratch().join("value");
    fs::write(&file, &value).expect("our own file");
    let mut set = fixture.command("sh");
    set.args(["-c", "redis-cli -p $0 -x set large < $1"]).arg(port.to_string()).arg(&file);
    assert_eq!(fixture.run(set), "OK");
    assert_eq!(cli(&fixture, port, &["strlen", "large"]), value.len().to_string());
    assert!(cli(&fixture, port, &["get", "large"]) == value, "the value came back changed");
    end(fixture, server);
}

#[test]
fn replica_follows_its_master() {
    let fixture = Fixture::new("redis replica");
    let (one, other) = (fixture.port(), fixture.port());
    let master = serve(&fixture, one, &["--repl-diskless-sync-delay", "0"]);
    let of = format!("127.0.0.1 {one}");
    let replica = serve(&fixture, other, &["--replicaof", &of, "--dbfilename", "replica.rdb"]);
    let args = ["-t", "set", "-n", "50000", "-c", "10", "-d", "300", "-r", "5000"];
    let mut load = benchmark(&fixture, one, &args);
    assert_rates(&load.succeed(), &["SET"]);
    assert_eq!(cli(&fixture, one, &["wait", "1", "20000"]), "1");
    let digest = |port| cli(&fixture, port, &["debug", "digest"]);
    fixture.wait_until("equal data sets", || digest(one) == digest(other));
    fixture.assert_serves_smcd(one);
    drop((replica, master));
    fixture.finish();
}
