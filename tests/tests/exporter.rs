//! `usmc exporter`, read as Prometheus reads it, and by Prometheus itself.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::{Fixture, Process, build};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

/// A running exporter.
struct Exporter {
    process: Process,
    port: u16,
}

impl Exporter {
    fn start(fixture: &Fixture, args: &[&str]) -> Exporter {
        Exporter::start_by(fixture, fixture.plain(build::usmc()), args)
    }

    /// By a command that runs `usmc` with the words that follow.
    fn start_by(fixture: &Fixture, mut command: Command, args: &[&str]) -> Exporter {
        command.args(["exporter", "--listen", "127.0.0.1:0"]).args(args);
        let mut process = fixture.spawn(command);
        let address = process.line_after("listening at");
        let port = address.rsplit(':').next().and_then(|port| port.parse().ok());
        Exporter { process, port: port.unwrap_or_else(|| panic!("no port in {address}")) }
    }

    /// The metrics, in the older format.
    fn metrics(&self) -> Metrics {
        Metrics::parse(&get(self.port, "/metrics", "").1)
    }

    fn end(mut self) {
        assert!(self.process.terminate().success(), "{}", self.process.errors());
    }
}

/// An answer's header and body.
fn exchange(mut stream: impl Read + Write, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer, and its end");
    let text = String::from_utf8(answer).expect("UTF-8");
    let (header, body) = text.split_once("\r\n\r\n").expect("a header");
    (header.to_owned(), body.to_owned())
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("somebody listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    stream
}

fn get(port: u16, path: &str, accept: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: here\r\nAccept: {accept}\r\n\r\n");
    exchange(connect(port), &request)
}

/// Values by name and labels, `name{label="value",…}`.
struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    fn parse(text: &str) -> Metrics {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let values = lines.map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
        });
        Metrics(values.collect())
    }

    /// The sum of what has this name and all of these labels.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let has = |key: &str, (label, value): &(&str, &str)| {
            key.contains(&format!("{label}=\"{value}\""))
        };
        let is_it = |key: &str| {
            key.split('{').next() == Some(name) && labels.iter().all(|label| has(key, label))
        };
        self.0.iter().filter(|(key, _)| is_it(key)).map(|(_, n)| *n as u64).sum()
    }
}

/// Of a program in this test's ISM directory.
fn of(fixture: &Fixture, metrics: &Metrics, name: &str, program: &str) -> u64 {
    let dir = fixture.ism_dir().display().to_string();
    metrics.sum(name, &[("ism_dir", &dir), ("program", program)])
}

fn redis(fixture: &Fixture, port: u16) -> Process {
    let mut command = fixture.command("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    command.args(["--dir", &fixture.scratch().to_string_lossy(), "--daemonize", "no"]);
    let mut server = fixture.spawn(command);
    while !server.line().contains("Ready to accept connections") {}
    server
}

/// A client whose connection is in shared memory.
fn cli(fixture: &Fixture, port: u16, program: impl AsRef<Path>) -> Process {
    let mut command = fixture.command(program);
    command.args(["-p", &port.to_string()]);
    let mut cli = fixture.spawn(command);
    for i in 0..20 {
        cli.say(&format!("set before {i}"));
        assert_eq!(cli.line(), "OK");
    }
    fixture.assert_serves_smcd(port);
    cli
}

fn end(fixture: Fixture, mut server: Process) {
    assert!(server.terminate().success());
    drop(server);
    fixture.finish();
}

const SENT: &str = "usmc_transmit_bytes_total";
const RECEIVED: &str = "usmc_receive_bytes_total";
const ENDED: &str = "usmc_processes_ended_total";

/// What a program sends right before its end is counted to the byte, as its peer counts it.
#[test]
fn bytes_outlive_their_program() {
    let fixture = Fixture::new("exporter outlive");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let exporter = Exporter::start(&fixture, &[]);
    let mut client = cli(&fixture, port, "redis-cli");
    let seen = exporter.metrics();
    assert_eq!(of(&fixture, &seen, "usmc_processes", "redis-cli"), 1);
    let dir = fixture.ism_dir().display().to_string();
    let open = |program| {
        let port = port.to_string();
        let labels = [("ism_dir", &*dir), ("program", program), ("port", &port), ("mode", "SMCD")];
        seen.sum("usmc_connections", &labels)
    };
    assert_eq!((open("redis-cli"), open("redis-server")), (1, 1));
    let before = of(&fixture, &seen, SENT, "redis-cli");
    assert!(before > 0);
    for i in 0..2000 {
        client.say(&format!("set last{i} {}", "x".repeat(100)));
    }
    client.succeed();
    fixture.wait_until("the server to close", || fixture.connections(port).is_empty());
    let mut last = (0, 0);
    fixture.wait_until("the sums to agree", || {
        let metrics = exporter.metrics();
        let get = |name, program| of(&fixture, &metrics, name, program);
        last = (get(SENT, "redis-cli"), get(RECEIVED, "redis-server"));
        get(ENDED, "redis-cli") == 1 && last.0 == last.1
    });
    assert!(last.0 > before + 2000 * 100, "{last:?}");
    assert!(of(&fixture, &exporter.metrics(), "usmc_changed_over_total", "redis-cli") >= 1);
    exporter.end();
    end(fixture, server);
}

/// Programs that nobody waits for: each lives for some milliseconds, of which the exporter is told by the kernel.
#[test]
fn short_lived_programs_are_noticed() {
    const ENOUGH: u64 = 5;
    let fixture = Fixture::new("exporter short");
    let port = fixture.port();
    let server = redis(&fixture, port);
    // None but what inotify tells of.
    let exporter = Exporter::start(&fixture, &["--interval", "3600"]);
    exporter.metrics();
    let (mut times, mut noticed, mut sent) = (0, 0, 0);
    // A machine that does something else may let a program end before the exporter's turn.
    fixture.wait_until("some that are noticed", || {
        let mut client = fixture.command("redis-cli");
        client.args(["-p", &port.to_string(), "-r", "2000", "ping"]);
        fixture.run(client);
        let metrics = exporter.metrics();
        times += 1;
        noticed = of(&fixture, &metrics, ENDED, "redis-cli");
        sent = of(&fixture, &metrics, SENT, "redis-cli");
        noticed >= ENOUGH
    });
    println!("{noticed} of {times} were noticed");
    assert!(sent > noticed * 2000 * "ping".len() as u64, "{noticed}: {sent} bytes");
    exporter.end();
    end(fixture, server);
}

/// Sums outlive the exporter, also one that was killed, and never become smaller.
#[test]
fn sums_outlive_the_exporter() {
    let fixture = Fixture::new("exporter state");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let path = fixture.scratch().join("state.json");
    let state = ["--state", &*path.to_string_lossy()];
    let sums = |exporter: &Exporter| {
        let metrics = exporter.metrics();
        let get = |name, program| of(&fixture, &metrics, name, program);
        [get(SENT, "redis-cli"), get(ENDED, "redis-cli"), get(RECEIVED, "redis-server")]
    };
    let mut exporter = Exporter::start(&fixture, &state);
    cli(&fixture, port, "redis-cli").succeed();
    fixture.wait_until("the client's end", || sums(&exporter)[1] == 1);
    let mut known = sums(&exporter);
    assert!(known.iter().all(|n| *n > 0), "{known:?}");
    for is_killed in [false, true] {
        let mut second = fixture.plain(build::usmc());
        second.args(["exporter", "--listen", "127.0.0.1:0"]).args(state);
        let mut second = fixture.spawn(second);
        assert_eq!(second.wait().code(), Some(1));
        assert!(second.errors().contains("another exporter's"), "{}", second.errors());
        if is_killed {
            exporter.process.kill();
        } else {
            exporter.end();
        }
        // Nobody sees this one; its server's counts are there still.
        cli(&fixture, port, "redis-cli").succeed();
        exporter = Exporter::start(&fixture, &state);
        let now = sums(&exporter);
        assert_eq!(now[..2], known[..2], "killed: {is_killed}");
        assert!(now[2] > known[2], "{now:?} {known:?}");
        known = now;
    }
    exporter.end();
    end(fixture, server);
}

/// More processes than there are descriptors for: some are not counted, which is said, and none is counted twice.
#[test]
fn processes_without_a_descriptor_left_have_not_ended() {
    // As many as an earlier exporter held, which then had none left for its next look at them.
    const PROCESSES: u64 = 136;
    const CODE: &str = "import os, socket, sys
listener = socket.create_server(('127.0.0.1', 0), backlog=1000)
begun, begins = os.pipe()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        client = socket.create_connection(listener.getsockname()); os.write(begins, b'x')
        sys.stdin.read(); os._exit(0)
for _ in range(int(sys.argv[1])): os.read(begun, 1)
print('ready', flush=True); sys.stdin.read()
for _ in range(int(sys.argv[1])): os.wait()";
    let fixture = Fixture::new("exporter limit");
    let mut command = fixture.command("/usr/bin/python3");
    command.args(["-c", CODE, &PROCESSES.to_string()]);
    let mut program = fixture.spawn(command);
    assert_eq!(program.line(), "ready");
    let mut command = fixture.plain("sh");
    command.args(["-c", "ulimit -n 400 && exec \"$@\"", "sh"]).arg(build::usmc());
    let exporter = Exporter::start_by(&fixture, command, &["--interval", "1"]);
    let mut metrics = exporter.metrics();
    fixture.wait_until("some looks", || {
        metrics = exporter.metrics();
        metrics.sum("usmc_exporter_looks_total", &[]) > 10
    });
    let dir = fixture.ism_dir().display().to_string();
    assert_eq!(metrics.sum(ENDED, &[("ism_dir", &dir)]), 0);
    assert!(metrics.sum("usmc_exporter_untracked_processes", &[]) >= PROCESSES / 4);
    exporter.end();
    program.close_stdin();
    program.succeed();
    fixture.finish();
}

/// By promtool, and by the parser of Prometheus' own Python library, which is the reference for OpenMetrics.
fn assert_valid(classic: &str, open: &str) {
    const PARSE: &str = "
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
print(sum(len(family.samples) for family in parse(sys.stdin.read())))
";
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]);
    let mut python = Command::new(build::system_program("python3"));
    python.args(["-c", PARSE]);
    let said = fed(promtool, classic);
    assert_eq!(said, "", "promtool");
    let values = open.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(fed(python, open).trim(), values.to_string());
}

fn fed(mut command: Command, text: &str) -> String {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it is installed (make test-deps)");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads");
    let out = child.wait_with_output().expect("its end");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{errors}");
    format!("{errors}{}", String::from_utf8_lossy(&out.stdout))
}

#[test]
fn both_formats_are_valid_also_with_odd_names() {
    let fixture = Fixture::new("exporter formats");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let exporter = Exporter::start(&fixture, &[]);
    let odd = fixture.scratch().join("o\"d\\d{\n}");
    // By another process: a child that another test starts at this moment would hold the file open (ETXTBSY).
    assert!(Command::new("cp").arg("/usr/bin/redis-cli").arg(&odd).status().expect("cp").success());
    let mut client = cli(&fixture, port, &odd);
    let (classic_header, classic) = get(exporter.port, "/metrics", "text/plain");
    let (open_header, open) = get(exporter.port, "/metrics", OPEN_METRICS);
    assert!(classic_header.contains("content-type: text/plain; version=0.0.4"), "{classic_header}");
    assert!(open_header.contains(&format!("content-type: {OPEN_METRICS}")), "{open_header}");
    assert_valid(&classic, &open);
    let metrics = Metrics::parse(&classic);
    // A line's end is no character of a name.
    assert!(of(&fixture, &metrics, SENT, "o\\\"d\\\\d{?}") > 0, "{classic}");
    client.succeed();
    exporter.end();
    end(fixture, server);
}

#[test]
fn other_requests_are_refused() {
    let fixture = Fixture::new("exporter requests");
    let exporter = Exporter::start(&fixture, &[]);
    let port = exporter.port;
    for (request, status) in [
        ("GET / HTTP/1.0\r\n\r\n", "200"),
        ("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200"),
        ("GET /../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
    ] {
        let (header, body) = exchange(connect(port), request);
        assert!(header.split(' ').nth(1) == Some(status), "{request}: {header}");
        assert_eq!(body.is_empty(), request.starts_with("HEAD") || status == "400", "{request}");
    }
    // A header without an end: refused once it is too long, before its time is over.
    let mut endless = connect(port);
    let begun = Instant::now();
    let line = format!("X: {}\r\n", "y".repeat(1000));
    let sent =
        endless.write_all(format!("GET /metrics HTTP/1.1\r\n{}", line.repeat(40)).as_bytes());
    let mut answer = Vec::new();
    // What it has not read makes its end a reset.
    let ended = sent.and_then(|()| endless.read_to_end(&mut answer));
    let is_reset = ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset);
    let answer = String::from_utf8_lossy(&answer);
    assert!(is_reset || answer.contains(" 431 "), "{answer}");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(get(port, "/metrics", "").0.contains(" 200 "));
    exporter.end();
    fixture.finish();
}

/// More clients than are served at a time, none of which says anything: they have to go.
#[test]
fn silent_clients_do_not_keep_others_out() {
    let fixture = Fixture::new("exporter silent");
    let exporter = Exporter::start(&fixture, &[]);
    let silent: Vec<TcpStream> = (0..24).map(|_| connect(exporter.port)).collect();
    let begun = Instant::now();
    let (header, _) = get(exporter.port, "/metrics", "");
    assert!(header.contains(" 200 "), "{header}");
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    drop(silent);
    exporter.end();
    fixture.finish();
}

#[test]
fn a_socket_is_a_path_or_systemds() {
    let fixture = Fixture::new("exporter sockets");
    let path = fixture.scratch().join("exporter.sock");
    let mut command = fixture.plain(build::usmc());
    command.arg("exporter").arg("--listen").arg(&path);
    let mut exporter = fixture.spawn(command);
    exporter.line_after("listening at");
    let stream = UnixStream::connect(&path).expect("it listens");
    let (header, body) = exchange(stream, "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(header.contains(" 200 ") && body.contains("usmc_build_info{"), "{header}");
    assert!(exporter.terminate().success());
    assert!(!path.exists(), "the socket is left");

    let port = fixture.port();
    let mut command = fixture.plain(build::system_program("systemd-socket-activate"));
    command.args(["-l", &format!("127.0.0.1:{port}"), "-E", "USMC_ISM_DIR", "-E", "USMC_TESTS_ID"]);
    command.arg(build::usmc()).arg("exporter");
    let mut exporter = fixture.spawn(command);
    fixture.wait_for_port(port);
    let (header, _) = get(port, "/metrics", "");
    assert!(header.contains(" 200 "), "{header}");
    assert!(exporter.terminate().success(), "{}", exporter.errors());
    fixture.finish();
}

/// Each metric that a panel shows is one that the exporter has.
#[test]
fn the_dashboard_shows_what_there_is() {
    let fixture = Fixture::new("exporter dashboard");
    let exporter = Exporter::start(&fixture, &[]);
    let (_, text) = get(exporter.port, "/metrics", "");
    let names: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(names.len() > 40, "{names:?}");
    let dashboard = build::tests_dir().join("../docs/grafana/usmc.json");
    let dashboard = fs::read_to_string(dashboard).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut used = Vec::new();
    for panel in panels {
        for target in panel["targets"].as_array().expect("targets") {
            let found = metrics_in(target["expr"].as_str().expect("an expression"));
            assert!(!found.is_empty(), "{target}");
            used.extend(found);
        }
    }
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        used.extend(metrics_in(variable["definition"].as_str().unwrap_or_default()));
    }
    assert!(used.len() > 30, "{used:?}");
    for name in used {
        assert!(names.contains(&&*name), "{name} is none of {names:?}");
    }
    exporter.end();
    fixture.finish();
}

fn metrics_in(expression: &str) -> Vec<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = expression.split(|c| !is_of_name(c));
    words.filter(|word| word.starts_with("usmc_")).map(str::to_owned).collect()
}

/// Prometheus' answer to a query: the value, if there is one.
fn query(port: u16, expression: &str) -> Option<f64> {
    let escaped: String = expression
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
            _ => format!("%{byte:02x}"),
        })
        .collect();
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    let request = format!("GET /api/v1/query?query={escaped} HTTP/1.0\r\n\r\n");
    let (header, body) = exchange(stream, &request);
    // It is not ready yet.
    if header.contains(" 503 ") {
        return None;
    }
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(answer["status"], "success", "{answer}");
    answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
}

fn prometheus(fixture: &Fixture, port: u16, exporter: u16) -> Process {
    let config = fixture.scratch().join("prometheus.yml");
    let text = format!(
        "global:\n  scrape_interval: 3s\n  scrape_timeout: 3s\n\
         scrape_configs:\n- job_name: usmc\n  static_configs:\n  - targets: ['127.0.0.1:{exporter}']\n"
    );
    fs::write(&config, text).expect("our own file");
    let mut command = fixture.plain("prometheus");
    command.arg(format!("--config.file={}", config.display()));
    command.arg(format!("--storage.tsdb.path={}", fixture.scratch().join("tsdb").display()));
    command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    fixture.spawn(command)
}

#[test]
fn prometheus_sees_the_bytes_of_a_benchmark() {
    const REQUESTS: u64 = 20_000;
    const SIZE: u64 = 1000;
    let fixture = Fixture::new("exporter prometheus");
    let [redis_port, web_port] = [fixture.port(), fixture.port()];
    let exporter = Exporter::start(&fixture, &[]);
    let mut prometheus = prometheus(&fixture, web_port, exporter.port);
    let server = redis(&fixture, redis_port);
    let mut command = fixture.command("redis-benchmark");
    command.args(["-p", &redis_port.to_string(), "-q", "-t", "set", "-c", "4"]);
    command.args(["-n", &REQUESTS.to_string(), "-d", &SIZE.to_string()]);
    let benchmark = fixture.run(command);
    assert!(benchmark.contains("requests per second"), "{benchmark}");
    let dir = fixture.ism_dir().display();
    let bytes = |program: &str, name: &str| {
        format!("sum({name}{{ism_dir=\"{dir}\",program=\"{program}\",mode=\"SMCD\"}})")
    };
    for (program, name) in [("redis-benchmark", SENT), ("redis-server", RECEIVED)] {
        fixture.wait_until("Prometheus to have the bytes", || {
            query(web_port, &bytes(program, name))
                .is_some_and(|n| n as u64 > REQUESTS * SIZE * 9 / 10)
        });
    }
    // A machine that does something else may let a scrape take too long.
    fixture.wait_until("a scrape in time", || query(web_port, "min(up)") == Some(1.0));
    let changed = format!("sum(usmc_changed_over_total{{ism_dir=\"{dir}\",role=\"server\"}})");
    assert!(query(web_port, &changed) >= Some(4.0), "{:?}", query(web_port, &changed));
    let (_, classic) = get(exporter.port, "/metrics", "");
    let (_, open) = get(exporter.port, "/metrics", OPEN_METRICS);
    assert_valid(&classic, &open);
    assert!(prometheus.terminate().success(), "{}", prometheus.errors());
    exporter.end();
    end(fixture, server);
}
