//! Programs that bring their own ways of using sockets: rsync, OpenSSH, OpenSSL, Node, Python, Java, iperf3, qperf; and
//! programs that the library cannot get into, which stay on TCP.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use usmc_tests::{Fixture, build};

/// Bytes that tell their place.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len.div_ceil(8)).flat_map(|i| ((i * i + seed) as u64).to_le_bytes()).take(len).collect()
}

/// A directory of files of many sizes.
fn tree(dir: &Path) {
    fs::create_dir(dir).expect("our own directory");
    for (i, len) in [0, 1, 700, 4096, 65536, 1_000_003, 20_000_000].into_iter().enumerate() {
        fs::write(dir.join(format!("file{i}")), pattern(len, i)).expect("our own file");
    }
}

fn assert_same(one: &Path, other: &Path) {
    let mut names = 0;
    for entry in fs::read_dir(one).expect("a directory").flatten() {
        let copy = fs::read(other.join(entry.file_name())).expect("the copy");
        assert!(copy == fs::read(entry.path()).expect("a file"), "{:?} differs", entry.file_name());
        names += 1;
    }
    assert_eq!(names, 7);
}

/// Runs a program whose connections come and go too fast for `usmc ss`: its library's log tells that some were in a ring,
/// and a ring has two ends.
fn run_in_ring(fixture: &Fixture, mut command: Command) -> String {
    let log = fixture.scratch().join("log");
    command.env("USMC_LOG", format!("debug:{}", log.display()));
    let output = fixture.run(command);
    if !usmc_tests::is_plain() {
        let log = fs::read_to_string(&log).expect("a log");
        assert!(log.contains("sending through the ring"), "all connections were TCP:\n{log}");
    }
    // The next program's is its own.
    let _ = fs::remove_file(&log);
    output
}

/// `serve` starts rsync's daemon.
fn rsync_sends_and_receives(name: &str, serve: impl FnOnce(&Fixture, u16) -> Command) {
    let fixture = Fixture::new(name);
    let (port, dir) = (fixture.port(), fixture.scratch());
    tree(&dir.join("from"));
    // Only root may say so, and has to.
    let root = fs::metadata("/proc/self").expect("/proc").uid() == 0;
    let identity = if root { "uid = root\ngid = root\n" } else { "" };
    let config = format!(
        "use chroot = no\n{identity}port = {port}\naddress = 127.0.0.1\nlock file = {0}/lock\n\
         [module]\npath = {0}\nread only = no\n",
        dir.display()
    );
    fs::write(dir.join("rsyncd.conf"), config).expect("our own file");
    let mut daemon = fixture.spawn(serve(&fixture, port));
    fixture.wait_for_port(port);
    let url = format!("rsync://127.0.0.1:{port}/module");
    let mut fetch = fixture.command("rsync");
    fetch.args(["-a", &format!("{url}/from/"), "fetched/"]);
    run_in_ring(&fixture, fetch);
    assert_same(&dir.join("from"), &dir.join("fetched"));
    let mut push = fixture.command("rsync");
    push.args(["-a", "fetched/", &format!("{url}/pushed/")]);
    run_in_ring(&fixture, push);
    assert_same(&dir.join("from"), &dir.join("pushed"));
    daemon.kill();
    drop(daemon);
    fixture.finish();
}

#[test]
fn rsync_daemon_sends_and_receives() {
    rsync_sends_and_receives("rsync", |fixture, _| {
        let mut daemon = fixture.command("rsync");
        daemon.args(["--daemon", "--no-detach", "--config=rsyncd.conf"]);
        daemon
    });
}

/// As inetd would start it: the connection is its standard input and output.
#[test]
fn rsync_daemon_for_each_connection_sends_and_receives() {
    rsync_sends_and_receives("rsync-inetd", |fixture, port| {
        let mut server = fixture.command("socat");
        server.arg(format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork"));
        server.arg("EXEC:rsync --daemon --config=rsyncd.conf,nofork");
        server
    });
}

/// sshd's directory for its sandboxed child, made by its service's start.
struct PrivilegeSeparation(bool);

impl PrivilegeSeparation {
    const DIR: &str = "/run/sshd";

    fn new() -> PrivilegeSeparation {
        // Refused unless we are root, and needed only then.
        PrivilegeSeparation(fs::DirBuilder::new().mode(0o755).create(Self::DIR).is_ok())
    }
}

impl Drop for PrivilegeSeparation {
    fn drop(&mut self) {
        if self.0 {
            let _ = fs::remove_dir(Self::DIR);
        }
    }
}

/// Its child before the log-in forbids itself most system calls, on pain of death.
/// Its monitor and its child hold the connection together, so it stays TCP: nobody is its sole holder.
#[test]
fn ssh_runs_commands_and_forwards() {
    let fixture = Fixture::new("ssh");
    let _dir = PrivilegeSeparation::new();
    let (port, dir) = (fixture.port(), fixture.scratch());
    for key in ["host", "client"] {
        let mut keygen = fixture.plain("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", key]);
        fixture.run(keygen);
    }
    let config = format!(
        "Port {port}\nListenAddress 127.0.0.1\nHostKey {0}/host\nAuthorizedKeysFile {0}/client.pub\n\
         StrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\nSubsystem sftp internal-sftp\n",
        dir.display()
    );
    fs::write(dir.join("sshd_config"), config).expect("our own file");
    let mut daemon = fixture.command(build::system_program("sshd"));
    daemon.args(["-D", "-e", "-f"]).arg(dir.join("sshd_config"));
    let mut daemon = fixture.spawn(daemon);
    fixture.wait_for_port(port);
    let options = ["-F", "none", "-i", "client", "-o", "StrictHostKeyChecking=no"];
    let quiet =
        ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes"];
    let mut sum = fixture.command("ssh");
    sum.args(options).args(quiet).args(["-p", &port.to_string(), "127.0.0.1"]);
    sum.arg("head -c 20000000 /dev/zero | md5sum; head -c 5000000 /dev/zero");
    let output = fixture.run(sum);
    let (hash, zeros) = output.split_once('\n').expect("two outputs");
    let mut local = fixture.plain("sh");
    local.args(["-c", "head -c 20000000 /dev/zero | md5sum"]);
    assert_eq!(hash, fixture.run(local).trim_end());
    assert!(zeros.len() == 5_000_000 && zeros.bytes().all(|b| b == 0), "{} zeros", zeros.len());
    tree(&dir.join("from"));
    fs::write(dir.join("batch"), format!("get -r {}/from fetched\n", dir.display())).expect("ours");
    let mut sftp = fixture.command("sftp");
    sftp.args(options).args(quiet).args([
        "-q",
        "-P",
        &port.to_string(),
        "-b",
        "batch",
        "127.0.0.1",
    ]);
    fixture.run(sftp);
    assert_same(&dir.join("from"), &dir.join("fetched"));
    daemon.kill();
    drop(daemon);
    fixture.finish();
}

#[test]
fn openssl_serves_curl() {
    let fixture = Fixture::new("openssl");
    let (port, dir) = (fixture.port(), fixture.scratch());
    let mut certificate = fixture.plain("openssl");
    certificate
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out"]);
    certificate.args(["certificate.pem", "-days", "2", "-subj", "/CN=localhost"]);
    fixture.run(certificate);
    tree(&dir.join("from"));
    let mut server = fixture.command("openssl");
    server.args(["s_server", "-accept", &format!("127.0.0.1:{port}"), "-key", "key.pem", "-cert"]);
    server.args(["certificate.pem", "-WWW", "-quiet"]);
    let mut server = fixture.spawn(server);
    fixture.wait_for_port(port);
    fs::create_dir(dir.join("fetched")).expect("our own directory");
    let mut curl = fixture.command("curl");
    curl.args(["-sS", "--fail", "--cacert", "certificate.pem", "--resolve"]);
    curl.arg(format!("localhost:{port}:127.0.0.1"));
    curl.arg(format!("https://localhost:{port}/from/file[0-6]")).args(["-o", "fetched/file#1"]);
    run_in_ring(&fixture, curl);
    assert_same(&dir.join("from"), &dir.join("fetched"));
    server.kill();
    drop(server);
    fixture.finish();
}

fn source(name: &str) -> PathBuf {
    build::tests_dir().join("programs/outside").join(name)
}

/// A program of Node that serves itself, over shared memory.
fn node(script: &str) {
    let fixture = Fixture::new(script);
    let mut node = fixture.command("node");
    node.arg(source(script));
    let mut node = fixture.spawn(node);
    let port = node.line_after("port ").parse().expect("a port");
    fixture.assert_serves_smcd(port);
    node.say("go on");
    assert!(node.succeed().contains("all well"));
    fixture.finish();
}

#[test]
fn node_serves_itself() {
    node("requests.js");
}

/// The workers get their connections from the primary, in messages.
#[test]
fn node_primary_gives_connections_to_its_workers() {
    node("cluster.js");
}

/// Each connection crosses a fork and an exec.
#[test]
fn programs_inherit_their_connections() {
    let fixture = Fixture::new("handed");
    let python = |args: &[&str]| {
        let mut command = fixture.command("/usr/bin/python3");
        command.arg(source("handed.py")).args(args);
        fixture.spawn(command)
    };
    let mut server = python(&["serve", "3"]);
    let port: String = server.line_after("port ");
    for _ in 0..3 {
        let mut client = python(&["ask", &port]);
        client.line_after("well so far");
        fixture.assert_serves_smcd(port.parse().expect("a port"));
        client.say("go on");
        assert!(client.succeed().contains("all well"));
    }
    assert!(server.succeed().contains("all well"));
    fixture.finish();
}

#[test]
fn java_selectors_and_blocking_sockets() {
    let fixture = Fixture::new("java");
    let mut compiler: Command = fixture.plain("javac");
    compiler.args(["-d", "."]).arg(source("Sockets.java"));
    fixture.run(compiler);
    let mut java = fixture.command("java");
    java.args(["-cp", ".", "Sockets"]);
    assert!(run_in_ring(&fixture, java).contains("all well"));
    fixture.finish();
}

/// A connection for control, and four for data, first in the one direction and then in the other.
#[test]
fn iperf3_measures_both_directions() {
    let fixture = Fixture::new("iperf3");
    let port = fixture.port().to_string();
    let mut server = fixture.command("iperf3");
    server.args(["-s", "--forceflush", "-B", "127.0.0.1", "-p", &port]);
    let mut server = fixture.spawn(server);
    for direction in [&[][..], &["-R"]] {
        // Also behind a run: until then the server turns others away.
        server.line_after("Server listening");
        let mut client = fixture.command("iperf3");
        client.args(["-c", "127.0.0.1", "-p", &port, "-J", "-P", "4", "-n", "200M"]);
        client.args(direction);
        let report = run_in_ring(&fixture, client);
        let report: serde_json::Value = serde_json::from_str(&report).expect("a report");
        let moved = |end: &str| report["end"][end]["bytes"].as_f64().unwrap_or(0.0);
        let [sent, received] = ["sum_sent", "sum_received"].map(moved);
        assert!(sent >= 200e6 && received > 0.0 && received <= sent, "{report:#}");
    }
    server.kill();
    drop(server);
    fixture.finish();
}

#[test]
fn qperf_measures_bandwidth_and_latency() {
    let fixture = Fixture::new("qperf");
    let port = fixture.port();
    let listen = ["-lp".to_owned(), port.to_string()];
    let mut server = fixture.command("qperf");
    server.args(&listen);
    let mut server = fixture.spawn(server);
    fixture.wait_for_port(port);
    let mut client = fixture.command("qperf");
    client.args(&listen).args(["127.0.0.1", "-t", "1", "tcp_bw", "tcp_lat"]);
    let report = run_in_ring(&fixture, client);
    assert!(report.contains("bw  =") && report.contains("latency  ="), "{report}");
    server.kill();
    drop(server);
    fixture.finish();
}

/// Both ends check every byte, of which there are too many for one buffer.
fn transfer(fixture: &Fixture, to: &str, from: &str) {
    let run = |name: &str, args: &[&str]| {
        let mut command = fixture.command(build::program(name));
        command.args(args);
        fixture.spawn(command)
    };
    let mut sink = run(to, &["sink"]);
    let port = sink.line_after("port");
    let sent = run(from, &["source", &port, "30000000"]).succeed();
    let received = sink.succeed();
    let hash = |text: &str, word: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(word)).map(str::to_owned);
        line.expect("a hash")
    };
    assert_eq!(hash(&sent, "sent"), hash(&received, "received"));
    assert_eq!(hash(&received, "sent"), hash(&sent, "received"));
}

/// A statically linked program at either end: TCP, every byte, and the reason at the end that has the library.
#[test]
fn static_programs_stay_on_tcp() {
    let fixture = Fixture::new("static programs");
    transfer(&fixture, "load", "load-static");
    transfer(&fixture, "load-static", "load");
    for (server, client, reason) in [
        ("load", "load-static", "client made no offer"),
        ("load-static", "load", "peer is not under uSMC on this device"),
    ] {
        let port = fixture.port();
        let mut serve = fixture.command(build::program(server));
        serve.args(["server", &port.to_string()]);
        let mut serve = fixture.spawn(serve);
        serve.line_after("port");
        let mut talk = fixture.command(build::program(client));
        talk.args(["many", &port.to_string(), "3"]);
        let mut talk = fixture.spawn(talk);
        talk.line_after("connected");
        // A reason is final once the server has looked for an offer long enough.
        for _ in 0..50 {
            talk.say("talk");
            talk.line_after("round");
        }
        if !usmc_tests::is_plain() {
            let seen = fixture.connections(port);
            let all = seen.iter().all(|s| !s.is_smcd() && s.fallback_reason == reason);
            assert!(seen.len() == 3 && all, "of {server}: {seen:#?}");
        }
        talk.succeed();
        serve.succeed();
    }
    fixture.finish();
}
