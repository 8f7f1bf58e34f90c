//! Programs that make an io_uring and keep their connections in shared memory: Node 24 and MariaDB; and such as are told
//! that there is none.

use std::process::Command;
use std::{fs, path::PathBuf};

use usmc_tests::ss::Socket;
use usmc_tests::{Fixture, build};

/// Whether a kernel lets us have rings (kernel.io_uring_disabled, seccomp): where not, nothing here differs from others.
const MAKES_RING: &str = "import ctypes
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(425, 8, ctypes.create_string_buffer(120))
print('ring', 'made' if fd >= 0 else ctypes.get_errno())";

fn source(name: &str) -> PathBuf {
    build::tests_dir().join("programs/outside").join(name)
}

/// Asserts that of a server's connections, `least` or more, every one is in shared memory at both ends.
fn assert_all_smcd(fixture: &Fixture, port: u16, least: usize) {
    if usmc_tests::is_plain() {
        return;
    }
    let ends = fixture.connections(port);
    let rings = ends.iter().filter(|end| end.is_smcd()).count();
    assert!(ends.len() >= 2 * least && rings == ends.len(), "{rings} of {}: {ends:#?}", ends.len());
}

/// A program of Node 24's that serves itself at some ports; of each all of at least so many connections are in rings.
fn node(script: &str, options: &[&str], ports: &[usize]) {
    let fixture = Fixture::new(script);
    let mut node = if usmc_tests::is_plain() {
        fixture.plain(build::node24())
    } else {
        let mut node = fixture.plain(build::usmc());
        node.arg("run").args(options).arg("--").arg(build::node24());
        node
    };
    node.arg(source(script));
    let mut node = fixture.spawn(node);
    for &least in ports {
        let port = node.line_after("port ").parse().expect("a port");
        assert_all_smcd(&fixture, port, least);
    }
    node.say("go on");
    assert!(node.succeed().contains("all well"));
    fixture.finish();
}

#[test]
fn node_batches_its_registrations_by_a_ring() {
    node("requests.js", &[], &[20]);
}

#[test]
fn node_has_a_ring_in_each_thread() {
    node("loops.js", &[], &[8, 8]);
}

/// The primary's and each worker's; connections are passed on between them.
#[test]
fn node_has_a_ring_in_each_worker() {
    node("cluster.js", &[], &[8]);
}

#[test]
fn node_without_a_ring() {
    node("requests.js", &["--io-uring", "deny"], &[20]);
}

#[test]
fn denied_rings_are_not_there() {
    if usmc_tests::is_plain() {
        return;
    }
    let fixture = Fixture::new("denied");
    let made = |value: Option<&str>| {
        let mut python = fixture.command("/usr/bin/python3");
        if let Some(value) = value {
            python.env("USMC_IO_URING", value);
        }
        python.args(["-c", MAKES_RING]);
        fixture.run(python)
    };
    let mut plain = fixture.plain("/usr/bin/python3");
    plain.args(["-c", MAKES_RING]);
    let plain = fixture.run(plain);
    assert_eq!(made(None), plain);
    assert_eq!(made(Some("auto")), plain);
    assert_eq!(made(Some("deny")), format!("ring {}", libc::ENOSYS));
    fixture.finish();
}

/// InnoDB reads and writes its files by liburing.
#[test]
fn mariadb_has_a_ring_for_its_files() {
    let fixture = Fixture::new("mariadb");
    let (port, dir) = (fixture.port(), fixture.scratch().join("data"));
    // SAFETY: geteuid(2) always succeeds.
    let root = unsafe { libc::geteuid() } == 0;
    let user = if root { "root" } else { "" };
    let said = |command: &mut Command| {
        command.arg("--no-defaults").arg(format!("--datadir={}", dir.display()));
        if !user.is_empty() {
            command.arg(format!("--user={user}"));
        }
    };
    let mut install = fixture.plain("mariadb-install-db");
    said(&mut install);
    install.args(["--auth-root-authentication-method=normal", "--skip-test-db"]);
    fixture.run(install);
    let mut server = fixture.command(build::system_program("mariadbd"));
    said(&mut server);
    server.args(["--bind-address=127.0.0.1", &format!("--port={port}")]);
    server.arg(format!("--socket={}", fixture.scratch().join("socket").display()));
    server.arg(format!("--log-error={}", fixture.scratch().join("log.err").display()));
    let mut server = fixture.spawn(server);
    fixture.wait_for_port(port);
    let errors = fs::read_to_string(fixture.scratch().join("log.err")).expect("the server's log");
    assert!(errors.contains("InnoDB: Using io_uring"), "no ring, nothing to test:\n{errors}");
    let mut slap = fixture.command("mariadb-slap");
    slap.args(["--no-defaults", "--host=127.0.0.1", &format!("--port={port}"), "--user=root"]);
    slap.args([
        "--concurrency=8",
        "--iterations=2",
        "--auto-generate-sql",
        "--auto-generate-sql-add-autoincrement",
    ]);
    slap.args([
        "--auto-generate-sql-load-type=mixed",
        "--number-of-queries=20000",
        "--engine=innodb",
    ]);
    let mut slap = fixture.spawn(slap);
    // Of its eight connections all, while they are there.
    if !usmc_tests::is_plain() {
        fixture.wait_until("all connections in rings", || {
            let of_server = |end: &Socket| end.local_port() == port && end.is_smcd();
            fixture.connections(port).iter().filter(|end| of_server(end)).count() >= 8
        });
    }
    slap.succeed();
    let mut query = fixture.command("mariadb");
    query.args([
        "--no-defaults",
        "--host=127.0.0.1",
        &format!("--port={port}"),
        "--user=root",
        "-NB",
        "-e",
    ]);
    query.arg("select repeat('0123456789', 400000)");
    let answer = fixture.run(query);
    assert!(answer.trim_end() == "0123456789".repeat(400_000), "{} bytes, changed", answer.len());
    server.terminate();
    server.succeed();
    fixture.finish();
}
