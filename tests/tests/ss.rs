//! What `usmc ss` and `usmc stats` say of programs that really run.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use usmc_tests::{Fixture, Process, build, is_plain};

/// `usmc ss --json` with further options, read.
fn ss(fixture: &Fixture, options: &[&str]) -> Vec<Value> {
    let mut command = fixture.plain(build::usmc());
    let out = command.args(["ss", "--json"]).args(options).output().expect("usmc ss");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("an array")
}

/// The rows of a process.
fn rows_of(fixture: &Fixture, process: &Process, options: &[&str]) -> Vec<Value> {
    let all = ss(fixture, options).into_iter();
    all.filter(|row| row["pid"].as_i64() == Some(process.pid().into())).collect()
}

/// A number of a process' statistics.
fn counted(fixture: &Fixture, process: &Process, name: &str) -> u64 {
    let mut command = fixture.plain(build::usmc());
    let out = command.args(["stats", "--json", "-p", &process.pid().to_string()]).output();
    let stats: Value = serde_json::from_slice(&out.expect("usmc stats").stdout).expect("an object");
    let number = &stats["devices"][0]["processes"][0][name];
    let [client, server] =
        ["client", "server"].map(|role| number[role].as_u64().expect("a number"));
    client + server
}

fn load(fixture: &Fixture, environment: &[(&str, &str)], args: &[&str]) -> Process {
    let mut command = fixture.command(build::program("load"));
    command.args(args).envs(environment.iter().copied());
    fixture.spawn(command)
}

fn serve(fixture: &Fixture, environment: &[(&str, &str)]) -> (Process, u16) {
    let mut server = load(fixture, environment, &["server"]);
    let port = server.number_after("port");
    (server, u16::try_from(port).expect("a port"))
}

/// One of its only connections.
fn connection(fixture: &Fixture, process: &Process) -> Value {
    let rows = rows_of(fixture, process, &[]);
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows[0].clone()
}

#[test]
fn both_ends_agree_wherever_a_handshake_rests() {
    let fixture = Fixture::new("a handshake that rests");
    if is_plain() {
        return;
    }
    let (mut server, port) = serve(&fixture, &[]);
    let mut client = load(&fixture, &[], &["many", &port.to_string(), "1", "100"]);
    client.line_after("connected");
    let mut modes = Vec::new();
    for requests in 1..=6u64 {
        client.say("talk");
        client.line_after("round");
        // An end counts behind the call whose bytes the other one has, and may look at the handshake behind that.
        let ends = fixture.wait_until_so(
            "both ends to agree",
            || [&client, &server].map(|process| connection(&fixture, process)).to_vec().into(),
            |ends: &Value| {
                let [one, other] = [&ends[0], &ends[1]];
                let have_counted = [one, other].iter().all(|end| {
                    let bytes = [end["tx_bytes"].as_u64(), end["rx_bytes"].as_u64()];
                    bytes == [Some(100 * requests); 2]
                });
                let mut shown = ["mode", "fallback_reason"].iter();
                have_counted && shown.all(|what| one[what] == other[what])
            },
        );
        for process in [&client, &server] {
            assert_eq!(counted(&fixture, process, "handshake_errors"), 0, "after {requests}");
        }
        modes.push(ends[0]["mode"].as_str().unwrap_or_default().to_owned());
    }
    assert_eq!((&modes[0][..], &modes[5][..]), ("TCP", "SMCD"), "{modes:?}");
    assert_eq!(counted(&fixture, &server, "smc_connections"), 1);
    client.succeed();
    server.succeed();
    fixture.finish();
}

#[test]
fn a_ring_is_what_the_configuration_says_and_its_window_grows() {
    let fixture = Fixture::new("rings");
    if is_plain() {
        return;
    }
    let size = [("USMC_RING_SIZE", "64K")];
    let (mut server, port) = serve(&fixture, &size);
    let port_text = port.to_string();
    // Short messages, and such as a window of the first size does not hold.
    for (length, least, most) in [("100", 16_384, 16_384), ("50000", 32_768, 65_536)] {
        let mut client = load(&fixture, &size, &["many", &port_text, "1", length]);
        client.line_after("connected");
        for _ in 0..8 {
            client.say("talk");
            client.line_after("round");
        }
        let end = connection(&fixture, &client);
        assert_eq!((&end["mode"], &end["ring_size"]), (&"SMCD".into(), &65_536.into()), "{end}");
        let window = end["window"].as_u64().expect("a window");
        assert!((least..=most).contains(&window), "{end}");
        client.succeed();
        fixture.wait_until("the connection to end", || rows_of(&fixture, &server, &[]).is_empty());
    }
    server.succeed();
    fixture.finish();
}

#[test]
fn a_listener_is_ready_or_says_why_not() {
    let fixture = Fixture::new("listeners");
    if is_plain() {
        return;
    }
    let port = fixture.port().to_string();
    let (mut ready, _) = serve(&fixture, &[]);
    let mut excluded = load(&fixture, &[("USMC_EXCLUDE_PORTS", &port)], &["server", &port]);
    excluded.number_after("port");
    for (process, mode, reason) in [
        (&ready, "SMCD-ready", Value::Null),
        (&excluded, "TCP", "excluded by configuration".into()),
    ] {
        let rows = rows_of(&fixture, process, &["-l"]);
        assert_eq!(rows.len(), 1, "{rows:?}");
        let shown = [&rows[0]["state"], &rows[0]["mode"], &rows[0]["fallback_reason"]];
        assert_eq!(shown, [&"LISTEN".into(), &mode.into(), &reason]);
        assert_eq!(rows_of(&fixture, process, &[]), Vec::<Value>::new());
    }
    ready.succeed();
    excluded.succeed();
    fixture.finish();
}

/// The states of the client's end and the server's, and their modes.
fn ends(fixture: &Fixture, process: &Process, port: u64) -> [[String; 2]; 2] {
    let name = format!("127.0.0.1:{port}");
    let rows = rows_of(fixture, process, &[]);
    ["local", "peer"].map(|end| {
        let row = rows.iter().find(|row| row[end] == name[..]);
        let row = row.unwrap_or_else(|| panic!("{end} {name} of {rows:?}"));
        ["state", "mode"].map(|of| row[of].as_str().unwrap_or_default().to_owned())
    })
}

#[test]
fn addresses_are_known_from_the_first_moment_and_closing_is_seen() {
    let fixture = Fixture::new("closing");
    if is_plain() {
        return;
    }
    for (exchanges, mode) in [("1", "TCP"), ("10", "SMCD")] {
        let mut command = fixture.command("/usr/bin/python3");
        command.arg(build::tests_dir().join("programs/python/closing.py"));
        command.args(["0.0.0.0", exchanges]);
        let mut process = fixture.spawn(command);
        let port = process.number_after("port");
        // Nothing has been said, and nobody has asked for a name; the listener has none.
        let rows = rows_of(&fixture, &process, &[]);
        assert_eq!(rows.len(), 2, "{rows:?}");
        for row in &rows {
            let is_one = |end: &str| {
                row[end]
                    .as_str()
                    .is_some_and(|at| at.starts_with("127.0.0.1:") && !at.ends_with('*'))
            };
            assert!(is_one("local") && is_one("peer"), "{row}");
        }
        assert_eq!(ends(&fixture, &process, port).map(|[state, _]| state), ["ACTIVE", "ACTIVE"]);
        process.say("");
        process.line_after("talked");
        let of = |states: [&str; 2]| states.map(|state| [state.to_owned(), mode.to_owned()]);
        assert_eq!(ends(&fixture, &process, port), of(["ACTIVE", "ACTIVE"]));
        process.say("");
        process.line_after("half");
        assert_eq!(ends(&fixture, &process, port), of(["PEERCLW1", "APPLCLW1"]));
        process.say("");
        process.line_after("both");
        let rows = rows_of(&fixture, &process, &[]);
        assert!(rows.len() == 2 && rows.iter().all(|row| row["state"] == "CLOSED"), "{rows:?}");
        assert!(rows.iter().all(|row| row["mode"] == mode), "{rows:?}");
        process.succeed();
    }
    fixture.finish();
}

fn is_root() -> bool {
    // SAFETY: touches no memory of ours.
    unsafe { libc::geteuid() == 0 }
}

fn errors(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// In a process namespace where nothing else runs.
fn alone(fixture: &Fixture, script: &str) -> Output {
    let mut command = fixture.plain("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]);
    command.arg(build::usmc()).arg(build::program("load"));
    command.output().expect("unshare")
}

#[test]
fn nothing_is_said_in_words() {
    let fixture = Fixture::new("nothing to show");
    if is_plain() || !is_root() {
        return;
    }
    // Nothing but what a program reads.
    let out = alone(&fixture, r#""$0" ss --json"#);
    assert!(
        out.status.success() && out.stdout == b"[]\n" && out.stderr.is_empty(),
        "{}",
        errors(&out)
    );
    let out = alone(&fixture, r#""$0" ss"#);
    assert!(out.status.success() && out.stdout.starts_with(b"State"), "{}", errors(&out));
    assert_eq!(
        errors(&out),
        "usmc: no program runs under uSMC; start one by `usmc run -- PROGRAM`\n"
    );
    let server = r#"mkfifo in; : >out; "$0" run -- "$1" server <in >out & exec 3>in
        until grep -q port out; do :; done; "$0" ss; exec 3>&-; wait"#;
    let out = alone(&fixture, server);
    assert!(out.status.success() && out.stdout.starts_with(b"State"), "{}", errors(&out));
    assert_eq!(
        errors(&out),
        "usmc: 1 program under uSMC, no connections yet; -a shows listeners\n"
    );
    fixture.finish();
}

#[test]
fn programs_of_other_users_are_counted() {
    let fixture = Fixture::new("other users");
    if is_plain() || !is_root() {
        return;
    }
    let (mut server, _) = serve(&fixture, &[]);
    let as_nobody = |program: &Path| -> Command {
        let mut command = fixture.plain("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
        command
    };
    if !as_nobody(build::usmc()).arg("--version").output().is_ok_and(|o| o.status.success()) {
        eprintln!("left out: another user cannot run what is built here");
        server.succeed();
        return fixture.finish();
    }
    let said = errors(&as_nobody(build::usmc()).arg("ss").output().expect("usmc ss"));
    let count =
        said.split_once("of other users, ").and_then(|(_, rest)| rest.split_once(" of them"));
    let count: Option<u32> = count.and_then(|(count, _)| count.parse().ok());
    assert!(count.is_some_and(|count| count >= 1), "{said}");
    server.succeed();
    fixture.finish();
}
