//! `usmc dump`, read by tshark: what the programs say to each other is there, whole and in order.

use std::path::{Path, PathBuf};
use std::process::Command;

use usmc_tests::{Fixture, Process, build};

/// A running `usmc dump -w` and its file.
struct Dump {
    process: Process,
    file: PathBuf,
}

impl Dump {
    /// Starts it, and waits until it captures `processes` of them.
    fn start(fixture: &Fixture, args: &[&str], processes: usize) -> Dump {
        let file = fixture.scratch().join("dump.pcapng");
        let mut command = fixture.plain(build::usmc());
        command.arg("dump").arg("-w").arg(&file).args(args);
        let process = fixture.spawn(command);
        fixture.wait_until("usmc dump", || {
            process.errors().matches("capturing process").count() >= processes
        });
        Dump { process, file }
    }

    /// Ends it; all that was sent so far is in the file.
    fn end(mut self) -> PathBuf {
        self.process.signal(libc::SIGINT);
        self.process.succeed();
        let errors = self.process.errors();
        assert!(!errors.contains("dropped"), "{errors}");
        self.file
    }
}

/// tshark's fields of the packets that match, one line each.
fn tshark(file: &Path, ports: &[(u16, &str)], filter: &str, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new(build::system_program("tshark"));
    command.arg("-n").arg("-r").arg(file).args([
        "-Y",
        filter,
        "-T",
        "fields",
        "-E",
        "aggregator=|",
    ]);
    command.args(["-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE"]);
    for (port, protocol) in ports {
        command.arg("-d").arg(format!("tcp.port=={port},{protocol}"));
    }
    for field in fields {
        command.args(["-e", field]);
    }
    let out = command.output().expect("tshark (make test-deps installs it)");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect()
}

/// Nothing is missing, doubled, malformed or wrongly summed.
fn assert_whole(file: &Path, ports: &[(u16, &str)]) {
    let faults = "tcp.analysis.lost_segment || tcp.analysis.ack_lost_segment || tcp.analysis.retransmission \
                  || tcp.analysis.out_of_order || _ws.malformed || tcp.checksum.status == 0 \
                  || ip.checksum.status == 0 || frame.comment contains \"bytes\"";
    let found = tshark(file, ports, faults, &["frame.number", "_ws.col.Info"]);
    assert!(found.is_empty(), "{found:#?}");
}

fn redis(fixture: &Fixture, port: u16) -> Process {
    let mut command = fixture.command("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    command.args(["--dir", &fixture.scratch().to_string_lossy(), "--daemonize", "no"]);
    let mut server = fixture.spawn(command);
    while !server.line().contains("Ready to accept connections") {}
    server
}

/// Ends it, and what the test has made.
fn end(fixture: Fixture, mut server: Process) {
    assert!(server.terminate().success());
    drop(server);
    fixture.finish();
}

fn cli(fixture: &Fixture, port: u16) -> Process {
    let mut command = fixture.command("redis-cli");
    command.args(["-p", &port.to_string()]);
    fixture.spawn(command)
}

/// Sets large values, so many times.
fn benchmark(fixture: &Fixture, port: u16, times: u32) -> String {
    let mut command = fixture.command("redis-benchmark");
    command.args(["-p", &port.to_string(), "-q", "-t", "set", "-n", &times.to_string()]);
    command.args(["-d", "16000", "-c", "4"]);
    fixture.run(command)
}

/// Runs commands over one connection, long enough that it is in the ring for most of them.
fn say(fixture: &Fixture, port: u16, commands: &[String]) {
    let mut cli = cli(fixture, port);
    for line in commands {
        cli.say(line);
    }
    cli.succeed();
}

fn commands() -> Vec<String> {
    let mut commands: Vec<String> = (0..50).map(|i| format!("set key{i} value{i}")).collect();
    // Larger than a ring.
    commands.push(format!("set large {}", "x".repeat(600_000)));
    commands.push("get large".to_owned());
    commands.extend((0..50).map(|i| format!("get key{i}")));
    commands
}

/// The keys' values that went in and out, as tshark understands them.
fn assert_has_commands(file: &Path, port: u16) {
    let ports = [(port, "resp")];
    assert_whole(file, &ports);
    let filter = format!("resp && tcp.dstport == {port}");
    let asked = tshark(file, &ports, &filter, &["resp.bulk_string.value"]).join("\n");
    let filter = format!("resp && tcp.srcport == {port}");
    let answered = tshark(file, &ports, &filter, &["resp.bulk_string.value"]).join("\n");
    let hex = |text: &str| text.bytes().map(|b| format!("{b:02x}")).collect::<String>();
    for i in 0..50 {
        let value = hex(&format!("value{i}"));
        assert!(asked.contains(&value) || asked.contains(&format!("value{i}")), "{i}: {asked}");
        assert!(answered.contains(&value) || answered.contains(&format!("value{i}")), "{i}");
    }
    let (text, bytes) = ("x".repeat(600_000), "78".repeat(600_000));
    for side in [asked, answered] {
        assert!(side.contains(&text) || side.contains(&bytes), "the large value");
    }
}

#[test]
fn redis_commands_are_whole_at_the_server() {
    let fixture = Fixture::new("dump redis -p");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let dump = Dump::start(&fixture, &["-p", &server.pid().to_string()], 1);
    say(&fixture, port, &commands());
    fixture.wait_until("the server to close", || fixture.connections(port).is_empty());
    let file = dump.end();
    assert_has_commands(&file, port);
    // From the first SYN to the last FIN.
    let ends = tshark(&file, &[], "tcp.flags.syn == 1 || tcp.flags.fin == 1", &["tcp.flags.str"]);
    assert_eq!(ends.len(), 4, "{ends:?}");
    end(fixture, server);
}

/// Both ends show the same bytes, which appear once; and the connection was there before.
#[test]
fn both_ends_at_once_show_each_byte_once() {
    let fixture = Fixture::new("dump both ends");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let mut cli = cli(&fixture, port);
    for i in 0..20 {
        cli.say(&format!("set before {i}"));
        assert_eq!(cli.line(), "OK");
    }
    fixture.assert_serves_smcd(port);
    let pids = [server.pid(), cli.pid()].map(|pid| pid.to_string());
    let dump = Dump::start(&fixture, &["-p", &pids[0], "-p", &pids[1]], 2);
    for line in commands() {
        cli.say(&line);
        cli.line();
    }
    cli.succeed();
    let file = dump.end();
    assert_has_commands(&file, port);
    let syns = tshark(&file, &[], "tcp.flags.syn == 1", &["frame.number"]);
    assert!(syns.is_empty(), "it was open already: {syns:?}");
    end(fixture, server);
}

const NGINX: &str = "
worker_processes 2;
pid nginx.pid;
events { worker_connections 200; }
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    keepalive_requests 1000000;
    server { listen 127.0.0.1:PORT; root www; sendfile SENDFILE; }
}
";

fn nginx(fixture: &Fixture, port: u16, sendfile: &str) -> Process {
    let dir = fixture.scratch();
    std::fs::create_dir(dir.join("www")).expect("our own directory");
    std::fs::write(dir.join("www/page"), "p".repeat(5000)).expect("our own file");
    std::fs::write(dir.join("www/large"), "l".repeat(3_000_000)).expect("our own file");
    let config = NGINX.replace("PORT", &port.to_string()).replace("SENDFILE", sendfile);
    let path = dir.join("nginx.conf");
    std::fs::write(&path, config).expect("our own file");
    let mut command = fixture.command(build::system_program("nginx"));
    command.arg("-p").arg(dir).arg("-c").arg(&path);
    command.args(["-g", "daemon off; error_log stderr warn;"]);
    let nginx = fixture.spawn(command);
    fixture.wait_for_port(port);
    nginx
}

/// A listener's workers are all captured, whichever serves; a sole request that stays on TCP is, too.
#[test]
fn http_is_whole_at_a_listener_and_in_a_pipe() {
    for sendfile in ["on", "off"] {
        let fixture = Fixture::new("dump http");
        let port = fixture.port();
        let mut server = nginx(&fixture, port, sendfile);
        // The master and its workers.
        let dump = Dump::start(&fixture, &[&format!(":{port}")], 3);
        let get = |urls: &[String]| {
            let mut curl = fixture.command("curl");
            curl.args(["-sS", "--fail", "-o", "/dev/null", "-o", "/dev/null"]);
            curl.args(["--parallel-max", "1"]);
            curl.args(urls);
            fixture.run(curl);
        };
        let url = |path: &str| format!("http://127.0.0.1:{port}/{path}");
        get(&[url("page")]);
        get(&[url("page?[1-40]"), url("large?[1-2]")]);
        let file = dump.end();
        let ports = [(port, "http")];
        assert_whole(&file, &ports);
        let requests = tshark(&file, &ports, "http.request", &["http.request.uri"]);
        assert_eq!(requests.len(), 43, "sendfile {sendfile}: {requests:?}");
        let fields = ["http.response.code", "http.content_length"];
        let mut answers = tshark(&file, &ports, "http.response", &fields);
        answers.sort();
        assert_eq!(answers.len(), 43, "{answers:?}");
        assert_eq!(answers.iter().filter(|a| *a == "200\t5000").count(), 41, "{answers:?}");
        assert_eq!(answers.iter().filter(|a| *a == "200\t3000000").count(), 2, "{answers:?}");
        let bodies = tshark(&file, &ports, "http.response", &["http.file_data"]);
        let whole = bodies.iter().filter(|b| is_run_of(b, 'l', 3_000_000)).count();
        assert_eq!(whole, 2, "the large page's bytes");
        let status = server.terminate();
        assert!(status.success(), "nginx ended with {status}: {}", server.errors());
        drop(server);
        fixture.finish();
    }
}

/// Whether tshark shows `count` times this byte, as text or in hexadecimal.
fn is_run_of(shown: &str, byte: char, count: usize) -> bool {
    let hex = format!("{:02x}", byte as u32);
    (shown.len() == count && shown.chars().all(|c| c == byte))
        || (shown.len() == 2 * count && shown.as_bytes().chunks(2).all(|c| c == hex.as_bytes()))
}

/// `usmc dump | tshark -r -`, until enough is seen.
#[test]
fn a_pipe_to_tshark_is_read_as_it_comes() {
    let fixture = Fixture::new("dump pipe");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let mut command = fixture.plain("sh");
    let usmc = build::usmc().display();
    let tshark = build::system_program("tshark");
    command.arg("-c").arg(format!(
        "{usmc} dump :{port} | {} -n -l -r - -d tcp.port=={port},resp -Y resp -c 30 2>tshark.errors",
        tshark.display()
    ));
    let mut pipe = fixture.spawn(command);
    fixture.wait_until("usmc dump", || pipe.errors().contains("capturing process"));
    say(&fixture, port, &commands());
    let shown = pipe.succeed();
    assert!(shown.contains("RESP"), "{shown}");
    end(fixture, server);
}

/// Who reads too slowly is told what it missed, and the application is not.
#[test]
fn a_reader_that_stands_still_is_told_what_it_missed() {
    let fixture = Fixture::new("dump slow");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let dump = Dump::start(&fixture, &["-p", &server.pid().to_string()], 1);
    dump.process.signal(libc::SIGSTOP);
    let output = benchmark(&fixture, port, 4000);
    assert!(output.contains("requests per second"), "{output}");
    dump.process.signal(libc::SIGCONT);
    let Dump { mut process, file } = dump;
    process.signal(libc::SIGINT);
    process.succeed();
    let errors = process.errors();
    assert!(errors.contains("were dropped"), "{errors}");
    let told = tshark(&file, &[], "frame.comment", &["frame.comment"]);
    assert!(
        told.iter().any(|c| c.contains("bytes were dropped: usmc dump was too slow")),
        "{told:?}"
    );
    end(fixture, server);
}

/// A reader that was killed is not written for any longer, and the next one finds the process free.
#[test]
fn a_killed_reader_leaves_the_process_to_the_next() {
    let fixture = Fixture::new("dump killed");
    let port = fixture.port();
    let server = redis(&fixture, port);
    let pid = server.pid().to_string();
    let dump = Dump::start(&fixture, &["-p", &pid], 1);
    let mut second = fixture.plain(build::usmc());
    second.args(["dump", "-w", "other", "-p", &pid]);
    let mut second = fixture.spawn(second);
    assert_eq!(second.wait().code(), Some(1));
    let errors = second.errors();
    assert!(errors.contains("is captured by another usmc dump"), "{errors}");
    dump.process.signal(libc::SIGKILL);
    drop(dump);
    // More than the ring holds.
    benchmark(&fixture, port, 3000);
    let dump = Dump::start(&fixture, &["-p", &pid], 1);
    say(&fixture, port, &commands());
    let file = dump.end();
    assert_has_commands(&file, port);
    end(fixture, server);
}

const FORKING: &str = "
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
class Server(socketserver.ForkingTCPServer):
    allow_reuse_address = True
with Server(('127.0.0.1', int(sys.argv[1])), Echo) as server:
    print('READY', flush=True)
    server.serve_forever()
";

const TALKING: &str = "
import socket, sys
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
f = s.makefile('rw', newline='\\n')
for part in range(2):
    for i in range(200):
        f.write('line %d\\n' % i)
        f.flush()
        assert f.readline() == 'line %d\\n' % i
    print('PART', flush=True)
    sys.stdin.readline()
";

/// A child that its server forks for each connection is captured from the connection's first byte on, although it is
/// found only later.
#[test]
fn children_of_a_captured_listener_are_captured() {
    let fixture = Fixture::new("dump forks");
    let port = fixture.port();
    let python = |script: &str| {
        let mut command = fixture.command("python3");
        command.args(["-c", script, &port.to_string()]);
        fixture.spawn(command)
    };
    let mut server = python(FORKING);
    server.line_after("READY");
    let dump = Dump::start(&fixture, &[&format!("127.0.0.1:{port}")], 1);
    let mut client = python(TALKING);
    client.line_after("PART");
    fixture.wait_until("the child", || {
        dump.process.errors().matches("capturing process").count() == 2
    });
    client.say("go on");
    client.line_after("PART");
    client.say("end");
    client.succeed();
    fixture.wait_until("the child's end", || fixture.connections(port).is_empty());
    let file = dump.end();
    assert_whole(&file, &[]);
    let each: usize = (0..200).map(|i| format!("line {i}\n").len()).sum();
    for direction in ["srcport", "dstport"] {
        let filter = format!("tcp.{direction} == {port}");
        let lens = tshark(&file, &[], &filter, &["tcp.len"]);
        let sum: usize = lens.iter().map(|len| len.parse::<usize>().expect("a length")).sum();
        assert_eq!(sum, 2 * each, "tcp.{direction}");
    }
    server.terminate();
    drop(server);
    fixture.finish();
}
