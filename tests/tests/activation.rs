//! Servers that others start for each connection or at the first one: inetd, socat, systemd's socket activation.

use std::fs;

use usmc_tests::{Fixture, Process, build};

/// Talks with an echoing server at `port`, and looks at the connection after some rounds.
fn talk(fixture: &Fixture, port: u16, looks: impl Fn(u16)) {
    let mut command = fixture.command(build::program("cases"));
    command.args(["--talk", &port.to_string()]);
    let mut client = fixture.spawn(command);
    let local = |line: String| line.split(' ').next().and_then(|p| p.parse().ok()).expect("a port");
    // The second time, whoever accepted it has closed its own for sure.
    for _ in 0..3 {
        let at = local(client.line());
        client.say("");
        looks(at);
    }
    client.end_input();
    client.succeed();
}

/// All bytes are TCP's, and the program's end says why.
fn stays_tcp(fixture: &Fixture, port: u16, program: &str, reason: &str) {
    talk(fixture, port, |local| {
        fixture.assert_tcp(local, port);
        let ends = fixture.connections(port);
        let mut its = ends.iter().filter(|s| s.comm == program && s.peer_port() == local);
        assert!(
            usmc_tests::is_plain() || its.any(|s| s.fallback_reason == reason),
            "{program}: {ends:#?}"
        );
    });
}

fn listening(fixture: &Fixture, port: u16) {
    // Not by a connection: it would start a server, and there may be but one.
    fixture.wait_until("the port", || {
        let hex = format!("0100007F:{port:04X} 00000000:0000 0A");
        fs::read_to_string("/proc/net/tcp").expect("/proc").contains(&hex)
    });
}

fn inetd(fixture: &Fixture) -> (Process, u16) {
    let port = fixture.port();
    let user = if fs::metadata("/root").is_ok_and(|m| is_ours(&m)) { "root".into() } else { name() };
    let service = format!(
        "127.0.0.1:{port} stream tcp nowait {user} {0} cases --echo 0\n",
        build::program("cases").display()
    );
    fs::write(fixture.scratch().join("inetd.conf"), service).expect("our own file");
    let mut command = fixture.command(build::system_program("inetd"));
    command.args(["-i", "-E", "inetd.conf"]);
    let process = fixture.spawn(command);
    listening(fixture, port);
    (process, port)
}
