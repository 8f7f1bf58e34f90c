//! sockperf, memcached, PostgreSQL and shell programs.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use usmc_tests::{Fixture, Process, build};

/// Lets a load go on for so long once it was seen in shared memory, and ends it by the signal that its summary follows; what it says. One that
/// ends by itself may be over before a slow machine has looked.
fn end_of_seen(
    fixture: &Fixture,
    port: u16,
    mut load: Process,
    (lasts, signal): (Duration, i32),
) -> String {
    fixture.assert_serves_smcd(port);
    thread::sleep(lasts);
    load.signal(signal);
    load.succeed()
}

fn sockperf(name: &str, client: &[&str]) {
    let fixture = Fixture::new(name);
    let port = fixture.port();
    let end = port.to_string();
    let mut server = fixture.command("sockperf");
    server.args(["server", "--tcp", "-i", "127.0.0.1", "-p", &end]);
    let mut server = fixture.spawn(server);
    fixture.wait_for_port(port);
    let mut command = fixture.command("sockperf");
    command.args(client).args(["--tcp", "-i", "127.0.0.1", "-p", &end]);
    let load = fixture.spawn(command);
    // It begins two seconds behind its connection, and leaves half a second out of its figures.
    let output = end_of_seen(&fixture, port, load, (Duration::from_secs(4), libc::SIGINT));
    if client[0] == "ping-pong" {
        for what in ["dropped messages = 0", "duplicated messages = 0", "out-of-order messages = 0"]
        {
            assert!(output.contains(what), "{output}");
        }
    } else {
        assert!(output.contains("Summary: BandWidth"), "{output}");
    }
    server.kill();
    drop(server);
    fixture.finish();
}

#[test]
fn sockperf_ping_pong() {
    // It has ten megabytes for the times of each second.
    sockperf("sockperf ping-pong", &["ping-pong", "-t", "30", "-m", "14"]);
}

#[test]
fn sockperf_throughput() {
    sockperf("sockperf throughput", &["throughput", "-t", "60", "-m", "64000"]);
}

#[test]
fn memcached_with_four_threads() {
    let fixture = Fixture::new("memcached");
    let port = fixture.port();
    let mut server = fixture.command("memcached");
    server.args(["-l", "127.0.0.1", "-p", &port.to_string(), "-U", "0", "-t", "4", "-m", "1024"]);
    server.args(["-u", "root"]);
    let mut server = fixture.spawn(server);
    fixture.wait_for_port(port);
    let mut client = fixture.command("/usr/bin/python3");
    client.arg(build::tests_dir().join("programs/python/memcached_client.py"));
    client.arg(port.to_string());
    let mut client = fixture.spawn(client);
    client.line_after("connected");
    fixture.assert_serves_smcd(port);
    client.say("go on");
    client.succeed();
    server.terminate();
    drop(server);
    fixture.finish();
}

#[test]
fn bash_talks_through_its_own_redirections() {
    let fixture = Fixture::new("bash");
    let mut server = fixture.command(build::program("load"));
    server.arg("server");
    let mut server = fixture.spawn(server);
    let port = server.number_after("port");
    let script = "exec 3<>/dev/tcp/127.0.0.1/$0; for i in $(seq 200); do echo line $i >&3; \
                  read -u 3 got; [ \"$got\" = \"line $i\" ] || exit 9; done; echo done; read x";
    let mut bash = fixture.command("bash");
    bash.args(["-c", script, &port.to_string()]);
    let mut bash = fixture.spawn(bash);
    bash.line_after("done");
    // bash makes the connection its standard output for each line, and libc's streams are served there.
    if !usmc_tests::is_plain() {
        let ends = fixture.connections(u16::try_from(port).expect("a port"));
        assert!(ends.len() == 2 && ends.iter().all(|s| s.is_smcd()), "{ends:#?}");
    }
    bash.say("end");
    bash.succeed();
    server.succeed();
    fixture.finish();
}

// --- PostgreSQL

/// The command, as the user `postgres` where we are root: the server refuses to run as root.
fn as_postgres(fixture: &Fixture, program: &Path, under_usmc: bool) -> Command {
    // SAFETY: geteuid(2) always succeeds.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        return if under_usmc { fixture.command(program) } else { fixture.plain(program) };
    }
    let user = ["--reuid=postgres", "--regid=postgres", "--clear-groups"];
    let mut command = fixture.plain("setpriv");
    command.args(user);
    if under_usmc && !usmc_tests::is_plain() {
        command.arg(build::usmc()).args(["run", "--"]);
    }
    command.arg(program);
    command
}

#[test]
fn postgresql_with_a_process_per_connection() {
    let bin = build::postgres_dir().expect("PostgreSQL, which make test-deps installs");
    let fixture = Fixture::with_limit("postgresql", Duration::from_secs(120));
    // SAFETY: as above.
    if unsafe { libc::geteuid() } == 0 {
        fixture.give_to("postgres");
    }
    let data = fixture.scratch().join("data");
    let mut init = as_postgres(&fixture, &bin.join("initdb"), false);
    init.args(["-A", "trust", "-U", "postgres", "--no-sync", "-D"]).arg(&data);
    fixture.run(init);
    let port = fixture.port();
    let end = port.to_string();
    let mut server = as_postgres(&fixture, &bin.join("postgres"), true);
    server.arg("-D").arg(&data).args(["-p", &end, "-h", "127.0.0.1", "-F"]);
    server.arg("-k").arg(fixture.scratch());
    let mut server = fixture.spawn(server);
    let client = |program: &str, args: &[&str]| {
        let mut command = as_postgres(&fixture, &bin.join(program), true);
        command.args(["-h", "127.0.0.1", "-p", &end, "-U", "postgres"]).args(args);
        fixture.spawn(command)
    };
    fixture.wait_until("PostgreSQL to accept connections", || {
        client("pg_isready", &["-q"]).wait().success()
    });
    client("pgbench", &["-i", "-q", "postgres"]).succeed();
    let sql = |text: &str| client("psql", &["-qAtc", text, "postgres"]).succeed();
    for options in [&["-S"][..], &["-N"], &["-S", "-C"]] {
        // Connections of one transaction each cannot be looked at.
        let is_seen = !options.contains(&"-C");
        let mut args = vec!["-n", "-c", "8", "-j", "2", "-T", if is_seen { "60" } else { "2" }];
        args.extend(options);
        args.push("postgres");
        let mut load = client("pgbench", &args);
        let output = match is_seen {
            // As its own timer ends it.
            true => end_of_seen(&fixture, port, load, (Duration::from_secs(2), libc::SIGALRM)),
            false => load.succeed(),
        };
        assert!(output.contains("number of failed transactions: 0"), "{output}");
    }
    // Large results and large input, checked by the server's own hash.
    let rows = "select g, md5(g::text) from generate_series(1, 200000) g";
    let there =
        sql(&format!("create table t as {rows}; select md5(string_agg(t::text, ',')) from t"));
    let dump = sql("copy t to stdout");
    assert_eq!(dump.lines().count(), 200_000);
    let path = fixture.scratch().join("t.tsv");
    std::fs::write(&path, dump + "\n").expect("our own file");
    sql("create table u (like t)");
    sql(&format!("\\copy u from '{}'", path.display()));
    assert_eq!(sql("select md5(string_agg(u::text, ',')) from u"), there);
    server.signal(libc::SIGINT);
    assert!(server.wait().success());
    drop(server);
    fixture.finish();
}
