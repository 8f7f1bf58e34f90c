//! `usmc off` and `usmc on`: programs that run leave shared memory and come back to it, and no byte is lost.

use std::process::{Command, Output};

use usmc_tests::build::{self, tests_dir};
use usmc_tests::ss::Socket;
use usmc_tests::{Fixture, Process, is_plain};

fn spawn(fixture: &Fixture, program: &str, args: &[&str]) -> Process {
    let mut command = fixture.command("/usr/bin/python3");
    command.arg(tests_dir().join("programs/python").join(program)).args(args);
    fixture.spawn(command)
}

fn run(fixture: &Fixture, args: &[&str]) -> Output {
    let mut command = Command::new(build::usmc());
    command.args(args).arg("--ism-dir").arg(fixture.ism_dir()).output().expect("usmc")
}

fn tell(fixture: &Fixture, args: &[&str]) -> String {
    let out = run(fixture, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

fn wait_for(fixture: &Fixture, port: u16, is_so: impl Fn(&Socket) -> bool) {
    fixture.wait_until("both ends", || {
        let ends = fixture.connections(port);
        ends.len() == 2 && ends.iter().all(&is_so)
    });
}

fn is_off(socket: &Socket) -> bool {
    !socket.is_smcd() && socket.fallback_reason == "switched off by usmc off"
}

#[test]
fn connections_leave_shared_memory_and_come_back_whatever_they_wait_by() {
    if is_plain() {
        return;
    }
    let styles = ["blocking", "waitall", "peek", "select", "poll", "epoll", "edge", "oneshot"];
    let fixture = Fixture::new("off and on, awake");
    let mut pairs = Vec::new();
    for (n, style) in styles.iter().enumerate() {
        let port = fixture.port();
        let number = port.to_string();
        let mut server =
            spawn(&fixture, "echo.py", &["server", styles[(n + 3) % 8], "127.0.0.1", &number]);
        assert_eq!(server.line(), "listening");
        let client = spawn(&fixture, "echo.py", &["client", style, "127.0.0.1", &number, "pause"]);
        pairs.push((port, server, client));
    }
    let all = |is_so: fn(&Socket) -> bool| {
        pairs.iter().for_each(|(port, ..)| wait_for(&fixture, *port, is_so));
    };
    all(Socket::is_smcd);
    // As often as a connection comes back.
    for _ in 0..3 {
        let said = tell(&fixture, &["off"]);
        assert!(said.starts_with("off: 16 ends of connections are back on TCP"), "{said}");
        all(is_off);
        assert_eq!(
            tell(&fixture, &["on"]),
            "on: connections leave TCP again, each at its next requests\n"
        );
        all(Socket::is_smcd);
    }
    for (_, mut server, mut client) in pairs {
        client.number_after("port");
        client.close_stdin();
        let bytes = client.number_after("echoed");
        assert_eq!(server.line(), format!("served {bytes}"));
        client.succeed();
        server.succeed();
    }
    println!("{} connections were in shared memory, and left it three times", styles.len());
    fixture.finish();
}

#[test]
fn connections_that_sleep_are_woken_to_leave_shared_memory() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("off, asleep");
    let mut sleepers = Vec::new();
    for style in ["blocking", "select", "poll", "epoll", "edge"] {
        let port = fixture.port();
        let number = port.to_string();
        let mut server = spawn(&fixture, "idle.py", &["server", style, &number]);
        assert_eq!(server.line(), "listening");
        let mut client = spawn(&fixture, "idle.py", &["client", style, &number]);
        client.number_after("port");
        wait_for(&fixture, port, Socket::is_smcd);
        client.say("sleep");
        assert_eq!((client.line().as_str(), server.line().as_str()), ("asleep", "asleep"));
        sleepers.push((server, client, port));
    }
    tell(&fixture, &["off"]);
    for (_, _, port) in &sleepers {
        wait_for(&fixture, *port, is_off);
    }
    for (mut server, mut client, _) in sleepers {
        server.say("after");
        assert_eq!(server.line(), "back");
        server.close_stdin();
        server.succeed();
        client.succeed();
    }
    println!("5 connections were in shared memory, and left it");
    fixture.finish();
}

/// A program that starts while it is off makes its connections by TCP, and they leave TCP once it is on.
#[test]
fn what_begins_while_it_is_off_stays_tcp_until_it_is_on() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("begun off");
    let nowhere = run(&fixture, &["off"]);
    assert!(!nowhere.status.success());
    assert!(
        String::from_utf8_lossy(&nowhere.stderr).contains("no program has used"),
        "{nowhere:?}"
    );
    let port = fixture.port();
    let number = port.to_string();
    let mut server = spawn(&fixture, "echo.py", &["server", "epoll", "127.0.0.1", &number]);
    assert_eq!(server.line(), "listening");
    assert_eq!(
        tell(&fixture, &["off"]),
        "off: 0 ends of connections are back on TCP; new connections stay there until usmc on\n"
    );
    let mut client = spawn(&fixture, "echo.py", &["client", "poll", "127.0.0.1", &number, "pause"]);
    client.number_after("port");
    wait_for(&fixture, port, is_off);
    let checked = run(&fixture, &["check"]);
    assert!(!checked.status.success(), "{checked:?}");
    assert!(String::from_utf8_lossy(&checked.stdout).contains("was switched off by usmc off"));
    tell(&fixture, &["on"]);
    wait_for(&fixture, port, Socket::is_smcd);
    assert_eq!(tell(&fixture, &["on"]), "on, as before\n");
    client.close_stdin();
    let bytes = client.number_after("echoed");
    assert_eq!(server.line(), format!("served {bytes}"));
    client.succeed();
    server.succeed();
    println!("1 connection was in shared memory");
    fixture.finish();
}

/// A program that waits for nothing is named, and leaves as soon as it waits for a socket.
#[test]
fn a_program_that_is_busy_is_named() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("off, busy");
    let port = fixture.port();
    let number = port.to_string();
    let mut server = spawn(&fixture, "echo.py", &["server", "epoll", "127.0.0.1", &number]);
    assert_eq!(server.line(), "listening");
    let mut client = spawn(&fixture, "echo.py", &["client", "poll", "127.0.0.1", &number, "pause"]);
    client.number_after("port");
    wait_for(&fixture, port, Socket::is_smcd);
    client.signal(libc::SIGSTOP);
    let refused = run(&fixture, &["off", "--wait", "1"]);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && told.contains("python3 ("), "{refused:?}");
    client.signal(libc::SIGCONT);
    wait_for(&fixture, port, is_off);
    client.close_stdin();
    client.number_after("echoed");
    client.succeed();
    server.succeed();
    println!("1 connection was in shared memory");
    fixture.finish();
}
