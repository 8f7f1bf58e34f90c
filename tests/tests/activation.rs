//! Servers that others start for each connection or at the first one: inetd, socat, systemd's socket activation.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt;

use usmc_tests::{Fixture, Process, build};

/// Talks with an echoing server at `port`, and looks at the connection after some rounds.
fn talk(fixture: &Fixture, port: u16, looks: impl Fn(u16)) {
    let mut command = fixture.command(build::program("cases"));
    command.args(["--talk", &port.to_string()]);
    let mut client = fixture.spawn(command);
    for _ in 0..3 {
        let line = client.line();
        looks(line.split(' ').next().and_then(|p| p.parse().ok()).expect("a port"));
        client.say("");
    }
    client.succeed();
}

/// It goes over to shared memory once the program alone has it.
fn is_served(fixture: &Fixture, port: u16) {
    let rounds = Cell::new(0);
    talk(fixture, port, |local| {
        rounds.set(rounds.get() + 1);
        if rounds.get() == 3 {
            fixture.assert_smcd(local, port);
        }
    });
}

/// Not by a connection: it would start a server.
fn wait_for_listener(fixture: &Fixture, port: u16) {
    let entry = format!(" 0100007F:{port:04X} 00000000:0000 0A ");
    fixture.wait_until("the server to listen", || {
        fs::read_to_string("/proc/net/tcp").expect("/proc").contains(&entry)
    });
}

fn echo(number: u32) -> String {
    format!("{} --echo {number}", build::program("cases").display())
}

#[test]
fn inetd_gives_the_connection_as_standard_input_and_output() {
    let fixture = Fixture::new("inetd");
    let port = fixture.port();
    let id = fs::metadata(fixture.scratch()).expect("our own directory").uid();
    let passwd = fs::read_to_string("/etc/passwd").expect("the users");
    let user = passwd.lines().find(|l| l.split(':').nth(2) == Some(&id.to_string()));
    let user = user.and_then(|l| l.split(':').next()).expect("our own name");
    let program = build::program("cases");
    let service =
        format!("127.0.0.1:{port} stream tcp nowait {user} {} cases --echo 0\n", program.display());
    fs::write(fixture.scratch().join("inetd.conf"), service).expect("our own file");
    let mut command = fixture.command(build::system_program("inetd"));
    command.args(["-i", "-E", "inetd.conf"]);
    let mut server = fixture.spawn(command);
    wait_for_listener(&fixture, port);
    is_served(&fixture, port);
    server.kill();
    drop(server);
    fixture.finish();
}

/// socat that starts a program for each connection.
fn socat(fixture: &Fixture, port: u16, program: &str) -> Process {
    let mut command = fixture.command("socat");
    let listen = format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork");
    command.arg(listen).arg(format!("EXEC:{program},nofork"));
    let server = fixture.spawn(command);
    wait_for_listener(fixture, port);
    server
}

/// A script that reads lines, and then starts what reads the rest of a client that has sent all and ended.
#[test]
fn shell_as_a_service_hands_its_input_on() {
    const SCRIPT: &str = "while read -r line && test \"$line\" != rest; do echo \"$line\"; done\n\
        wc -c\n\
        echo the end\n";
    let fixture = Fixture::new("shell");
    let port = fixture.port();
    let script = fixture.scratch().join("service.sh");
    fs::write(&script, SCRIPT).expect("our own file");
    let mut server = socat(&fixture, port, &format!("sh {}", script.display()));
    let mut command = fixture.command(build::system_program("python3"));
    command.arg(build::tests_dir().join("programs/outside/half_closed.py"));
    command.args([port.to_string(), "300".to_owned(), "100000".to_owned()]);
    let mut client = fixture.spawn(command);
    let line = client.line();
    let local = line.trim().parse().expect("a port");
    fixture.assert_smcd(local, port);
    client.say("");
    assert_eq!(client.line().trim(), "100000");
    assert_eq!(client.line().trim(), "the end");
    client.succeed();
    server.kill();
    drop(server);
    fixture.finish();
}

#[test]
fn socat_gives_the_connection_as_standard_input_and_output() {
    let fixture = Fixture::new("socat");
    let port = fixture.port();
    let mut server = socat(&fixture, port, &echo(0));
    is_served(&fixture, port);
    server.kill();
    drop(server);
    fixture.finish();
}

/// `systemd-socket-activate` hands the environment on by name.
fn activate(fixture: &Fixture, port: u16, options: &[&str], number: u32) -> Process {
    let mut command = fixture.command(build::system_program("systemd-socket-activate"));
    command.args(["-l", &format!("127.0.0.1:{port}")]).args(options);
    for name in ["LD_PRELOAD", "USMC_ISM_DIR", "USMC_TESTS_ID"] {
        command.args(["-E", name]);
    }
    command.args(echo(number).split(' '));
    let server = fixture.spawn(command);
    wait_for_listener(fixture, port);
    server
}

#[test]
fn systemd_gives_each_connection_as_standard_input_and_output() {
    let fixture = Fixture::new("systemd-inetd");
    let port = fixture.port();
    let mut server = activate(&fixture, port, &["--accept", "--inetd"], 0);
    is_served(&fixture, port);
    server.kill();
    drop(server);
    fixture.finish();
}

#[test]
fn systemd_gives_each_connection_as_a_further_descriptor() {
    let fixture = Fixture::new("systemd-accept");
    let port = fixture.port();
    let mut server = activate(&fixture, port, &["--accept"], 3);
    is_served(&fixture, port);
    server.kill();
    drop(server);
    fixture.finish();
}

/// As `make install` would install them, but for the path of the command.
#[test]
fn the_units_are_what_systemd_understands() {
    let fixture = Fixture::new("units");
    let units = build::tests_dir().join("../docs/systemd");
    let mut command = fixture.plain(build::system_program("systemd-analyze"));
    command.args(["verify", "--man=no"]);
    let mut count = 0;
    for unit in fs::read_dir(units).expect("the units").flatten() {
        let text = fs::read_to_string(unit.path()).expect("a unit");
        let usmc = build::usmc().display().to_string();
        let path = fixture.scratch().join(unit.file_name());
        fs::write(&path, text.replace("/usr/local/bin/usmc", &usmc)).expect("our own file");
        command.arg(path);
        count += 1;
    }
    let said = command.output().expect("systemd-analyze");
    let text = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.success() && text.is_empty(), "{text}");
    assert_eq!(count, 7, "units");
    fixture.finish();
}
