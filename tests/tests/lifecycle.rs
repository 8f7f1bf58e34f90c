//! Tests about whole processes: who meets whom, who dies when, what is left, what it costs.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use usmc_tests::{Fixture, Process, build, is_plain, leftovers, number, procfs};

/// A `load` program under uSMC, and one that is not.
fn load(fixture: &Fixture, args: &[&str]) -> Process {
    started(fixture, fixture.command(build::program("load")), args)
}

fn plain_load(fixture: &Fixture, args: &[&str]) -> Process {
    started(fixture, fixture.plain(build::program("load")), args)
}

fn started(fixture: &Fixture, mut command: Command, args: &[&str]) -> Process {
    command.args(args);
    fixture.spawn(command)
}

/// Starts a server and returns it with its port.
fn serve(mut server: Process) -> (Process, u16) {
    let port = server.number_after("port");
    (server, u16::try_from(port).expect("a port"))
}

/// Counts of the server: served, open, resets, bytes.
fn stats(server: &mut Process) -> [u64; 4] {
    server.say("stats");
    let line = server.line_after("stats");
    let counts: Vec<u64> = line.split(' ').filter_map(|w| w.parse().ok()).collect();
    counts.try_into().expect("four counts")
}

/// The counts once the server has seen all ends: its input may be reported before them, see docs/differences.md.
fn last_stats(fixture: &Fixture, server: &mut Process) -> [u64; 4] {
    let mut counts = stats(server);
    fixture.wait_until("the server to see all ends", || {
        counts = stats(server);
        counts[1] == 0
    });
    counts
}

/// Opens `count` connections, talks over each, and returns the client.
fn many(mut client: Process) -> Process {
    client.line_after("connected");
    for _ in 0..8 {
        client.say("talk");
        client.line_after("round");
    }
    client
}

/// Every connection of the server is TCP, with a reason that a person can read.
fn assert_tcp_with_a_reason(fixture: &Fixture, port: u16) {
    if is_plain() {
        return;
    }
    let connections = fixture.connections(port);
    assert!(!connections.is_empty(), "usmc ss shows no connection of port {port}");
    for c in connections {
        assert!(c.mode == "TCP" && !c.fallback_reason.is_empty(), "{c:?}");
    }
}

#[test]
fn plain_client_talks_to_a_server_under_usmc() {
    let fixture = Fixture::new("plain client");
    let (mut server, port) = serve(load(&fixture, &["server"]));
    let mut client = many(plain_load(&fixture, &["many", &port.to_string(), "20"]));
    assert_tcp_with_a_reason(&fixture, port);
    client.succeed();
    assert_eq!(last_stats(&fixture, &mut server)[..3], [20, 0, 0]);
    server.succeed();
    fixture.finish();
}

#[test]
fn client_under_usmc_talks_to_a_plain_server() {
    let fixture = Fixture::new("plain server");
    let (mut server, port) = serve(plain_load(&fixture, &["server"]));
    let mut client = many(load(&fixture, &["many", &port.to_string(), "20"]));
    assert_tcp_with_a_reason(&fixture, port);
    client.succeed();
    assert_eq!(last_stats(&fixture, &mut server)[..3], [20, 0, 0]);
    server.succeed();
    fixture.finish();
}

#[test]
fn plain_and_usmc_clients_share_a_server() {
    let fixture = Fixture::new("both clients");
    let (mut server, port) = serve(load(&fixture, &["server"]));
    let port_text = port.to_string();
    let mut plain = many(plain_load(&fixture, &["many", &port_text, "10"]));
    let mut ours = many(load(&fixture, &["many", &port_text, "10"]));
    let at_server = fixture.connections(port).into_iter().filter(|c| c.local_port() == port);
    let smcd = at_server.filter(|c| c.is_smcd()).count();
    assert_eq!(smcd, if is_plain() { 0 } else { 10 });
    plain.succeed();
    ours.succeed();
    assert_eq!(last_stats(&fixture, &mut server)[..2], [20, 0]);
    server.succeed();
    fixture.finish();
}

#[test]
fn devices_that_differ_mean_tcp() {
    let fixture = Fixture::new("two devices");
    let elsewhere = Fixture::new("the other device");
    let (mut server, port) = serve(load(&fixture, &["server"]));
    let mut client = many(load(&elsewhere, &["many", &port.to_string(), "5"]));
    assert_tcp_with_a_reason(&fixture, port);
    client.succeed();
    server.succeed();
    elsewhere.finish();
    fixture.finish();
}

#[test]
fn users_of_a_group_share_its_directory_whatever_their_umask() {
    let fixture = Fixture::new("two users");
    if is_plain() || !is_root() {
        return;
    }
    let dir = fixture.ism_dir();
    std::os::unix::fs::chown(dir, None, Some(65534)).expect("chgrp");
    std::fs::set_permissions(dir, Permissions::from_mode(0o3770)).expect("chmod");
    let as_nobody = |program: &Path| {
        let mut command = fixture.plain("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
        command
    };
    if !as_nobody(build::usmc()).arg("--version").output().is_ok_and(|o| o.status.success()) {
        eprintln!("left out: another user cannot run what is built here");
        return;
    }
    // Each of them comes first once, and creates what is missing.
    for nobody_serves in [true, false] {
        let run = |nobody: bool, args: &[&str]| {
            let mut command = as_nobody(build::usmc());
            command.args(["run", "--"]).arg(build::program("load"));
            started(
                &fixture,
                if nobody { command } else { fixture.command(build::program("load")) },
                args,
            )
        };
        let (mut server, port) = serve(run(nobody_serves, &["server"]));
        let mut client = many(run(!nobody_serves, &["many", &port.to_string(), "5"]));
        let connections = fixture.connections(port);
        assert_eq!(connections.len(), 10);
        assert!(connections.iter().all(|c| c.is_smcd()), "{connections:?}");
        client.succeed();
        assert_eq!(last_stats(&fixture, &mut server)[..3], [5, 0, 0]);
        server.succeed();
        for entry in std::fs::read_dir(dir).expect("our directory").flatten() {
            std::fs::remove_file(entry.path()).expect("removing a file of the device");
        }
    }
    fixture.finish();
}

#[test]
fn a_directory_has_its_mode_whatever_the_umask() {
    let fixture = Fixture::new("umask");
    if is_plain() {
        return;
    }
    let dir = fixture.scratch().join("device");
    let mut command = fixture.plain("sh");
    command.args(["-c", "umask 0177; exec \"$0\" run -- \"$1\" server"]);
    command.arg(build::usmc()).arg(build::program("load")).env("USMC_ISM_DIR", &dir);
    let (mut server, port) = serve(fixture.spawn(command));
    let mode = std::fs::metadata(&dir).expect("the directory").permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);
    many(load(&fixture, &["many", &port.to_string(), "1"])).succeed();
    server.succeed();
    fixture.finish();
}

/// Who can write the device's file can truncate it, which ends the processes that use it.
#[test]
fn files_of_a_device_are_for_those_only_whom_its_directory_lets_in() {
    let fixture = Fixture::new("files' modes");
    if is_plain() || !is_root() {
        return;
    }
    let dir = fixture.ism_dir();
    // Without set-group-ID files would be their maker's group's, whoever is in that.
    for (mode, group) in
        [(0o700, 0), (0o755, 0), (0o750, 61_000), (0o770, 61_000), (0o3770, 61_000)]
    {
        std::os::unix::fs::chown(dir, None, Some(group)).expect("chgrp");
        std::fs::set_permissions(dir, Permissions::from_mode(mode)).expect("chmod");
        let mut command = fixture.plain("sh");
        command.args(["-c", "umask 0; exec \"$0\" run -- \"$1\" server"]);
        command.arg(build::usmc()).arg(build::program("load"));
        let (mut server, port) = serve(fixture.spawn(command));
        many(load(&fixture, &["many", &port.to_string(), "1"])).succeed();
        let entries: Vec<_> = std::fs::read_dir(dir).expect("our directory").flatten().collect();
        assert!(entries.len() >= 2, "a device file and a mailbox");
        let shared = if mode & 0o020 != 0 { (0o660, group) } else { (0o600, 0) };
        for entry in &entries {
            let facts = entry.metadata().expect("a file of the device");
            let bits = facts.mode() & 0o777;
            let gid = if bits & 0o070 != 0 { facts.gid() } else { 0 };
            assert_eq!((bits, gid), shared, "{} in {mode:o}", entry.path().display());
        }
        server.succeed();
        for entry in entries {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    fixture.finish();
}

#[test]
fn log_spares_a_number_that_is_the_programs() {
    let fixture = Fixture::new("log");
    let mut command = fixture.command(build::program("cases"));
    command.arg("log_spares_a_number_that_is_the_programs").env("USMC_LOG", "debug");
    fixture.run(command);
    fixture.finish();
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").expect("our process").uid() == 0
}

#[test]
fn device_that_cannot_be_used_means_tcp() {
    let fixture = Fixture::new("no device");
    let mut command = fixture.command(build::program("load"));
    command.arg("server").env("USMC_ISM_DIR", "/proc/nowhere");
    let (mut server, port) = serve(fixture.spawn(command));
    let mut client = many(load(&fixture, &["many", &port.to_string(), "5"]));
    assert_tcp_with_a_reason(&fixture, port);
    client.succeed();
    server.succeed();
    fixture.finish();
}

#[test]
fn switched_off_means_tcp() {
    let fixture = Fixture::new("off");
    let mut command = fixture.command(build::program("load"));
    command.arg("server").env("USMC_OFF", "1");
    let (mut server, port) = serve(fixture.spawn(command));
    many(load(&fixture, &["many", &port.to_string(), "5"])).succeed();
    server.succeed();
    fixture.finish();
}

#[test]
fn reuseport_group_mixed_with_a_plain_server_loses_nothing() {
    let fixture = Fixture::new("reuseport");
    let (mut ours, port) = serve(load(&fixture, &["server", "0", "reuseport"]));
    let port_text = port.to_string();
    let (mut plain, _) = serve(plain_load(&fixture, &["server", &port_text, "reuseport"]));
    let mut client = many(load(&fixture, &["many", &port_text, "200"]));
    client.succeed();
    let (one, other) = (stats(&mut ours), stats(&mut plain));
    assert_eq!(one[0] + other[0], 200);
    assert!(one[0] > 20 && other[0] > 20, "the kernel spreads connections: {one:?} {other:?}");
    assert_eq!((one[2], other[2]), (0, 0), "resets");
    assert_eq!(one[3] + other[3], 200 * 8 * 100);
    ours.succeed();
    plain.succeed();
    fixture.finish();
}

#[test]
fn registry_of_a_killed_server_harms_nobody() {
    let fixture = Fixture::new("stale registry");
    let (mut server, port) = serve(load(&fixture, &["server"]));
    let port_text = port.to_string();
    many(load(&fixture, &["many", &port_text, "3"])).succeed();
    server.kill();
    // A plain server takes the port over; the device may still say that it is one of ours.
    let (mut plain, _) = serve(plain_load(&fixture, &["server", &port_text]));
    let mut client = many(load(&fixture, &["many", &port_text, "20"]));
    assert_tcp_with_a_reason(&fixture, port);
    client.succeed();
    assert_eq!(last_stats(&fixture, &mut plain)[..3], [20, 0, 0]);
    plain.succeed();
    // And back.
    let (mut server, _) = serve(load(&fixture, &["server", &port_text]));
    let mut client = many(load(&fixture, &["many", &port_text, "3"]));
    fixture.assert_serves_smcd(port);
    client.succeed();
    server.succeed();
    fixture.finish();
}

#[test]
fn ten_thousand_connections() {
    let count = number("USMC_TESTS_CONNECTIONS", 10_000);
    let fixture = Fixture::with_limit("10 000 connections", Duration::from_secs(120));
    let (mut server, port) = serve(load(&fixture, &["server"]));
    let mut client = many(load(&fixture, &["many", &port.to_string(), &count.to_string()]));
    assert_eq!(stats(&mut server), [count, count, 0, count * 8 * 100]);
    if !is_plain() {
        let ends = fixture.connections(port);
        let tcp: Vec<_> = ends.iter().filter(|s| !s.is_smcd()).collect();
        assert_eq!(ends.len() as u64, 2 * count);
        assert!(tcp.is_empty(), "{} are not SMC-D, for example {:?}", tcp.len(), tcp[0]);
    }
    client.succeed();
    last_stats(&fixture, &mut server);
    let fds = procfs::open_fds(server.pid());
    assert!(fds < 64, "the server still holds {fds} fds");
    server.succeed();
    fixture.finish();
}

#[test]
fn many_gigabytes_both_ways_at_once() {
    let bytes = number("USMC_TESTS_TRANSFER_MB", 5120) << 20;
    let limit = Duration::from_secs(60 + (bytes >> 20) / 20);
    let fixture = Fixture::with_limit("transfer", limit);
    let (mut sink, port) = serve(load(&fixture, &["sink"]));
    let mut source = load(&fixture, &["source", &port.to_string(), &bytes.to_string()]);
    source.line_after("connected");
    fixture.assert_serves_smcd(port);
    let sent = [source.line_after("sent"), sink.line_after("sent")];
    let received = [sink.line_after("received"), source.line_after("received")];
    assert_eq!(sent, received, "hashes of both directions");
    source.succeed();
    sink.succeed();
    fixture.finish();
}

#[test]
fn idle_connections_use_no_processor_time() {
    for call in ["recv", "poll", "select", "epoll"] {
        let fixture = Fixture::new(call);
        let (mut server, port) = serve(load(&fixture, &["server"]));
        let mut client = load(&fixture, &["idle", &port.to_string(), call]);
        client.line_after("idle");
        fixture.assert_serves_smcd(port);
        let pids = [server.pid(), client.pid()];
        // What polling there is has to end by itself; then a second must pass without a tick or two.
        let used = |pids: &[i32; 2]| pids.map(procfs::cpu_time).iter().sum::<Duration>();
        fixture.wait_until("both ends to come to rest", || {
            let before = used(&pids);
            std::thread::park_timeout(Duration::from_millis(50));
            used(&pids) == before
        });
        let before = used(&pids);
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            std::thread::park_timeout(Duration::from_secs(1).saturating_sub(start.elapsed()));
        }
        let spent = used(&pids) - before;
        assert!(spent <= Duration::from_millis(10), "{call}: {spent:?} in a second of nothing");
        server.succeed();
        client.succeed();
        fixture.finish();
    }
}

/// A device of another layout is none of ours: its programs may be running.
#[test]
fn versions_share_a_directory_without_harm() {
    let fixture = Fixture::new("versions");
    let others = ["device", "m.0", "v2.device", "v2.m.0"].map(|name| fixture.ism_dir().join(name));
    for file in &others {
        std::fs::write(file, "of another layout").expect("our directory");
    }
    let (mut server, port) = serve(load(&fixture, &["server"]));
    let mut client = many(load(&fixture, &["many", &port.to_string(), "3"]));
    fixture.assert_serves_smcd(port);
    client.succeed();
    server.succeed();
    for file in &others {
        assert_eq!(std::fs::read_to_string(file).expect("still there"), "of another layout");
        std::fs::remove_file(file).expect("our directory");
    }
    fixture.finish();
}

#[test]
fn preload_is_not_noticed_by_programs_without_sockets() {
    let fixture = Fixture::new("no sockets");
    for _ in 0..10 {
        let mut echo = fixture.command("echo");
        echo.arg("hello");
        assert_eq!(fixture.run(echo), "hello");
        let mut fails = fixture.command("sh");
        fails.args(["-c", "exit 7"]);
        assert_eq!(fixture.spawn(fails).wait().code(), Some(7));
    }
    assert!(
        std::fs::read_dir(fixture.ism_dir()).expect("our directory").next().is_none(),
        "a program without sockets has touched the device"
    );
    fixture.finish();
}

#[test]
fn directories_of_a_killed_runner_go_with_the_next_and_no_others() {
    let fixture = Fixture::new("directories_of_a_killed_runner_go_with_the_next_and_no_others");
    let mut sleep = fixture.plain("sleep");
    sleep.arg("1000");
    let mut runner = fixture.spawn(sleep);
    let dir = |name: &str| {
        let path = fixture.scratch().join(name);
        fs::create_dir_all(path.join("with a directory")).expect("a directory");
        path
    };
    let of_runner = dir(&format!("usmc-tests-{}-0", runner.pid()));
    let others = [
        dir(&leftovers::name()),
        dir(&format!("usmc-tests-kept-{}-0", runner.pid())),
        dir(&format!("usmc-test-{}-0", runner.pid())),
    ];
    leftovers::sweep(fixture.scratch());
    assert!(of_runner.exists(), "the runner lives");
    runner.kill();
    let foreign = dir(&format!("usmc-tests-{}-1", runner.pid()));
    if is_root() {
        chown(&foreign, Some(65534), None).expect("chown by root");
    }
    leftovers::sweep(fixture.scratch());
    assert!(!of_runner.exists(), "nothing of an ended runner stays");
    assert_eq!(foreign.exists(), is_root(), "what is another user's stays");
    for other in others {
        assert!(other.exists(), "{} is of no ended runner", other.display());
    }
    fixture.finish();
}
