//! The program itself, under the fake library.

mod process;

use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use process::fake::{device, fabric, next_test};
use process::{Agent, Process, ask_at, loopback};
use rustix::process::{Pid, Signal, kill_process};
use usmc_fake_verbs::fabric::{Call, DIRECTORY, Fabric};
use usmc_shm::agent::Role;

const LIMIT: Duration = Duration::from_secs(60);

fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("program-{}-{name}", std::process::id()))
}

fn program(fabric: &Path) -> Command {
    let library =
        std::env::current_exe().expect("this program").with_file_name("libusmc_fake_verbs.so");
    let mut command = Command::new(env!("CARGO_BIN_EXE_usmc-agent"));
    command.env("USMC_IBVERBS", library).env(DIRECTORY, fabric);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// How it ends, and what it has said.
fn end(mut child: Child) -> (Option<i32>, String) {
    let begun = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if begun.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("it does not end");
        }
        std::thread::yield_now();
    }
    let mut said = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    (child.wait().expect("a child").code(), said)
}

#[test]
fn it_says_ready_and_ends_when_told() {
    let (directory, socket) = (place("fabric"), place("socket"));
    let fabric = Fabric::create(&directory).expect("a directory");
    fabric.device("one", 1024).expect("a device");
    fabric.gid("one", 1, Ipv4Addr::LOCALHOST.to_ipv6_mapped(), "lo").expect("an address");
    let start = || {
        let mut command = program(&directory);
        command.arg("--socket").arg(&socket).args(["--spin", "never", "--ueid", "TEST"]);
        command.spawn().expect("the program")
    };
    for signal in [Signal::TERM, Signal::INT] {
        let mut child = start();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        out.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        // A second one has no place there.
        let (code, said) = end(start());
        assert!(code == Some(1) && said.contains("another agent"), "{code:?} {said}");
        kill_process(Pid::from_child(&child), signal).expect("a signal");
        assert_eq!(end(child), (Some(0), String::new()));
        assert!(!socket.exists());
    }
}

/// Connections stay TCP, and who has started the agent learns why.
#[test]
fn a_device_that_refuses_memory_is_told_of_once() {
    let (fabric, _) = fabric();
    let test = next_test();
    let (name, socket) = (device(test, 1), place("refuses"));
    fabric.device(&name, 1024).expect("a device");
    let address = Ipv4Addr::new(10, 1, test, 2).to_ipv6_mapped();
    fabric.gid(&name, 1, address, "lo").expect("an address");
    fabric.refuse(&name, Call::RegMr, 100, libc::ENOMEM).expect("a line");
    let peer = Agent::start(test, 0);
    let mut command = program(fabric.directory());
    command.arg("--socket").arg(&socket).args(["--ueid", "AGENT", "--device", &name]);
    let mut child = command.spawn().expect("the program");
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    out.read_line(&mut String::new()).expect("a line");
    for _ in 0..2 {
        let [client, server] = loopback();
        let mut process = Process::default();
        process.hand(&peer, 0, client, 0, 0);
        let mut other = Process::default();
        other.take(ask_at(&socket, Role::Server, server), [1, 0], 0);
        // Both agents leave.
        process.ends[0].wait_for_leave();
        other.ends[0].wait_for_leave();
    }
    kill_process(Pid::from_child(&child), Signal::TERM).expect("a signal");
    let (code, said) = end(child);
    assert_eq!((code, said.lines().count()), (Some(0), 1), "{said}");
    assert!(said.contains("LimitMEMLOCK"), "{said}");
    peer.end();
}

/// Nobody may read what it tells.
#[test]
fn it_goes_on_where_nobody_listens() {
    let (directory, socket) = (place("deaf"), place("deaf-socket"));
    let fabric = Fabric::create(&directory).expect("a directory");
    fabric.device("one", 1024).expect("a device");
    fabric.gid("one", 1, Ipv4Addr::LOCALHOST.to_ipv6_mapped(), "lo").expect("an address");
    let (own, other) = UnixStream::pair().expect("a pair");
    drop(other);
    let mut command = program(&directory);
    command.arg("--socket").arg(&socket).arg("--verbose").stderr(OwnedFd::from(own));
    let mut child = command.spawn().expect("the program");
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    out.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    kill_process(Pid::from_child(&child), Signal::TERM).expect("a signal");
    assert_eq!(child.wait().expect("a child").code(), Some(0));
}

#[test]
fn what_is_missing_is_said_with_its_remedy() {
    let directory = place("empty");
    let fabric = Fabric::create(&directory).expect("a directory");
    let socket = place("nowhere");
    let run = |set: &dyn Fn(&mut Command)| {
        let mut command = program(&directory);
        set(command.arg("--socket").arg(&socket));
        let (code, said) = end(command.spawn().expect("the program"));
        assert_eq!(code, Some(1), "{said}");
        said
    };
    assert!(run(&|_| ()).contains("rdma link add"));
    fabric.device("bare", 1024).expect("a device");
    assert!(run(&|command| _ = command.args(["--device", "bare"])).contains("IP address"));
    assert!(run(&|command| _ = command.args(["--device", "none"])).contains("none"));
    let missing = run(&|command| _ = command.env("USMC_IBVERBS", "/nonexistent.so"));
    assert!(missing.contains("install libibverbs"), "{missing}");
    assert!(run(&|command| _ = command.arg("--frobnicate")).contains("--help"));
}
