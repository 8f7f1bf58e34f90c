//! `usmc bench --vm` and `--serve` between two network namespaces, which have nothing in common but a region and a cable.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use usmc_tests::netns::{Netns, Who};
use usmc_tests::region::Hosts;
use usmc_tests::{Fixture, Process, build, is_plain, procfs};

/// Bytes of the region: room for fifty connections of the first size.
const REGION: usize = 128 << 20;
/// What is measured runs for so long, and several programs start and end.
const LIMIT: Duration = Duration::from_secs(150);

/// `usmc bench` by itself, whose files are to be gone at the end.
fn dress(command: &mut Command, fixture: &Fixture, name: &str) -> PathBuf {
    let temporary = fixture.scratch().join(name);
    fs::create_dir(&temporary).expect("our own directory");
    command.arg(build::usmc()).arg("bench").env("TMPDIR", &temporary);
    temporary
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).expect("our own directory").next().is_none()
}

fn end(mut server: Process, temporary: &Path) {
    server.signal(libc::SIGINT);
    assert!(server.wait().success(), "{}", server.errors());
    assert!(is_empty(temporary), "files of the server's");
}

#[test]
fn figures_between_two_hosts_are_of_the_region_and_of_the_cable() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::with_limit("bench between hosts", LIMIT);
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let at = format!("{}:{}", net.address(0), fixture.port());
    let mut serve = net.plain(&fixture, 0, Who::default());
    hosts.dress(0, &mut serve);
    let served = dress(&mut serve, &fixture, "served");
    serve.args(["--serve", &at]);
    let mut server = fixture.spawn(serve);
    assert!(server.line().contains(&format!("usmc bench --vm {at}")));

    let mut bench = net.plain(&fixture, 1, Who::default());
    hosts.dress(1, &mut bench);
    let measured = dress(&mut bench, &fixture, "measured");
    let file = fixture.scratch().join("json");
    bench.args(["--vm", &at, "--rounds", "1", "--duration", "0.5", "--json"]).arg(&file);
    // Not sockperf's throughput: a stream one way may stay TCP on a crowded machine, and is no figure then.
    bench.args(["pingpong", "stream", "redis", "sockperf/pp-14B"]);
    let mut bench = fixture.spawn(bench);
    let table = bench.succeed();
    let record = fs::read(&file).expect("the figures");
    let record: Value = serde_json::from_slice(&record).expect("JSON");
    assert_eq!((&record["failed"], &record["skipped"]), (&json!([]), &json!([])), "{record}");
    assert_eq!(record["server"]["interface"], "v0", "{}", record["server"]);

    let cases = record["cases"].as_array().expect("cases");
    let named = |name: &str| {
        let case = cases.iter().find(|case| case["name"] == name);
        case.unwrap_or_else(|| panic!("{name} in {record}"))
    };
    for (name, connections) in [
        ("pingpong/14B/blocking", 1),
        ("pingpong/14B/blocking/awake", 1),
        ("stream/64KB/blocking", 1),
        ("sockperf/pp-14B", 1),
        ("redis/c50", 50),
        ("redis/c1", 1),
    ] {
        let case = named(name);
        for measure in case["measures"].as_array().expect("measures") {
            for mode in ["tcp", "usmc"] {
                let figure = &measure["figures"][mode]["median"];
                assert!(figure.as_f64() > Some(0.0), "{name}: {measure}");
            }
        }
        let [tcp, usmc] = ["tcp", "usmc"].map(|mode| &case["proof"][mode]);
        assert!(tcp["how"].as_str().is_some_and(|how| how.contains("none")), "{name}: {tcp}");
        assert_eq!((&tcp["smcd_ends"], &tcp["region_ends"]), (&json!(0), &json!(0)), "{name}");
        assert!(usmc["smcd_ends"].as_u64() >= Some(2 * connections), "{name}: {usmc}");
        assert_eq!(usmc["region_ends"], usmc["smcd_ends"], "{name}: not in the region");
        assert!(case["cpu"]["usmc"]["client_ns"]["median"].as_f64() > Some(0.0), "{name}: {case}");
        let frames = |mode: &str| case["frames"][mode]["run"]["median"].as_f64();
        assert!(frames("tcp") > Some(0.0) && frames("usmc").is_some(), "{name}: {case}");
    }
    // Nobody sleeps there, so that nobody is woken by a byte; but where another program takes the processor away.
    let awake = &named("pingpong/14B/blocking/awake")["frames"];
    let each = |mode: &str| awake[mode]["each"]["median"].as_f64().expect("a count");
    assert!(each("tcp") > 0.5 && each("usmc") < each("tcp") / 2.0, "{awake}");
    let wakes = &named("pingpong/14B/blocking/awake")["wakes"]["each"]["median"];
    assert!(wakes.as_f64() < Some(0.5), "{wakes}");
    for words in ["frames of a run", "interface v0", "the server's is"] {
        assert!(table.contains(words), "{words} in {table}");
    }
    assert!(is_empty(&measured), "files of the client's");
    assert_eq!(procfs::marked(fixture.marker()), [server.pid()], "programs");
    assert!(procfs::children(server.pid()).is_empty(), "servers");
    end(server, &served);
    fixture.finish();
}

/// A client that says what it likes.
struct Client {
    stream: TcpStream,
    lines: BufReader<TcpStream>,
}

impl Client {
    fn new(fixture: &Fixture, port: u16) -> Client {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("the server");
        stream.set_read_timeout(Some(fixture.time_left())).expect("a socket");
        let lines = BufReader::new(stream.try_clone().expect("a socket"));
        Client { stream, lines }
    }

    /// One that is served.
    fn greeted(fixture: &Fixture, port: u16) -> Client {
        let mut client = None;
        // The server may be at its last client still.
        fixture.wait_until("a greeting", || {
            let mut next = Client::new(fixture, port);
            let is_served = next.hear().get("greeting").is_some();
            client = is_served.then_some(next);
            is_served
        });
        client.expect("one")
    }

    /// The server may have closed already.
    fn say(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).unwrap_or_else(|problem| panic!("{line:?}: {problem}"))
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.say(format!("{request}\n").as_bytes());
        self.hear()
    }

    /// Says no more, and hears what there is up to the end.
    fn leave(mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
        let _ = self.lines.read_to_end(&mut Vec::new());
    }
}

fn start(case: &str, mode: &str) -> Value {
    json!({"start": {"case": case, "mode": mode, "setting": null, "seconds": 0.1}})
}

#[test]
fn a_hostile_client_harms_nothing() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("hostile client of a bench");
    let port = fixture.port();
    let mut serve = fixture.plain("env");
    let served = dress(&mut serve, &fixture, "served");
    serve.args(["--serve", &format!("127.0.0.1:{port}")]);
    let mut server = fixture.spawn(serve);
    assert!(server.line().contains("usmc bench --vm"));
    let alone = [server.pid()];
    // redis-server writes its name over its environment, where the mark is.
    let is_alone =
        || procfs::marked(fixture.marker()) == alone && procfs::children(alone[0]).is_empty();

    let long = [b'x'; 1 << 20];
    let nested = "[".repeat(1000) + "\n";
    let all: Vec<u8> = (0..=255).chain([b'\n']).collect();
    for bytes in [
        &all,
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &long,
        nested.as_bytes(),
        b"\n",
        b"{\"run\":\"id\"}\n",
    ] {
        let mut client = Client::greeted(&fixture, port);
        client.say(bytes);
        client.leave();
    }
    // Half a line, and nothing.
    for bytes in [&b"{\"start\":"[..], b""] {
        Client::greeted(&fixture, port).say(bytes);
    }

    let mut client = Client::greeted(&fixture, port);
    assert!(client.ask(&json!("look"))["failed"].is_string(), "nothing runs");
    let agents = client.ask(&json!("agents"));
    assert!(agents["failed"].as_str().is_some_and(|why| why.contains("usmc agent")), "{agents}");
    assert_eq!(client.ask(&json!("stop")), "stopped");
    for (case, mode) in
        [("sh -c id", "tcp"), ("../redis/c1", "tcp"), ("", "tcp"), ("redis/c1", "unix")]
    {
        let reply = client.ask(&start(case, mode));
        assert!(reply["failed"].is_string(), "{case} {mode}: {reply}");
    }
    for (member, value) in [
        ("seconds", json!(0)),
        ("seconds", json!(1e9)),
        ("setting", json!({"knob": "ring_size", "value": 1})),
    ] {
        let mut request = start("pingpong/14B/blocking", "usmc");
        request["start"][member] = value;
        let reply = client.ask(&request);
        assert!(reply["failed"].is_string(), "{request}: {reply}");
    }
    assert!(is_alone(), "{}", procfs::describe(fixture.marker()));
    // Who comes meanwhile is told so.
    let refusal = Client::new(&fixture, port).hear();
    assert!(refusal["failed"].as_str().is_some_and(|why| why.contains("another")), "{refusal}");

    // Clients that go while a server of theirs runs, and with half a connection to it.
    for (case, mode) in [("pingpong/14B/blocking", "usmc"), ("redis/c50", "tcp")] {
        let mut previous = None;
        // The second server takes the place of the first.
        for _ in 0..2 {
            let up = client.ask(&start(case, mode))["up"]["port"].as_u64().expect("a port");
            let up = u16::try_from(up).expect("a port");
            let connection = TcpStream::connect(("127.0.0.1", up)).expect("a server");
            assert!(!is_alone());
            previous = Some((up, connection));
        }
        drop(client);
        fixture.wait_until("the servers to end", is_alone);
        let (up, connection) = previous.expect("two servers");
        drop(connection);
        assert!(TcpStream::connect(("127.0.0.1", up)).is_err(), "{case} listens still");
        client = Client::greeted(&fixture, port);
    }
    // It serves as ever.
    let up = client.ask(&start("redis/c1", "usmc"))["up"]["port"].as_u64();
    let up = up.and_then(|up| u16::try_from(up).ok()).expect("a port");
    let mut stranger = TcpStream::connect(("127.0.0.1", up)).expect("redis-server");
    stranger.write_all(b"CONFIG GET dir\r\n").expect("a connection");
    let mut answer = String::new();
    BufReader::new(stranger).read_line(&mut answer).expect("an answer");
    assert!(answer.starts_with("-NOAUTH"), "it talks to others: {answer}");
    assert!(client.ask(&json!("look"))["seen"]["now"]["library"] == true);
    assert_eq!(client.ask(&json!("stop")), "stopped");
    assert!(is_alone(), "{}", procfs::describe(fixture.marker()));
    // The server ends with a client, too, and with what that has started.
    assert!(client.ask(&start("redis/c1", "tcp"))["up"].is_object());
    end(server, &served);
    drop(client);
    fixture.finish();
}
