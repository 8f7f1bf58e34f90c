//! Real programs say the same with and without the shared object: switched off (a pure hand-over to libc),
//! and switched on.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use support::{directory, have, shared_object};

/// How a program is run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Bare,
    Off,
    On,
}

const MODES: [Mode; 3] = [Mode::Bare, Mode::Off, Mode::On];

/// A test's own directory, which is also its device; gone with the test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        Place(directory(name))
    }

    fn command(&self, mode: Mode, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.0).stdin(Stdio::null());
        command.env_remove("LD_PRELOAD").env("USMC_ISM_DIR", self.0.join("ism"));
        if mode != Mode::Bare {
            command.env("LD_PRELOAD", shared_object());
        }
        if mode == Mode::Off {
            command.env("USMC_OFF", "1");
        }
        command
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// Starts it and returns once it printed a line that contains `ready`.
    fn start(mut command: Command, ready: &str) -> Server {
        let mut server = Server(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
        let mut seen = Vec::new();
        while let Some(line) = lines.next() {
            let line = line.unwrap();
            if line.contains(ready) {
                // Whatever it says from now on must not fill the pipe.
                std::thread::spawn(move || lines.for_each(drop));
                return server;
            }
            seen.push(line);
        }
        panic!("{command:?} said {seen:?}");
    }
}

/// A port nobody listens at.
fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn fed(mut command: Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let done = child.wait_with_output().unwrap();
    let _ = writer.join().unwrap();
    done
}

fn compare(name: &str, run: impl Fn(Mode) -> Output) {
    let bare = run(Mode::Bare);
    for mode in [Mode::Off, Mode::On] {
        assert_same(name, mode, &bare, &run(mode));
    }
}

fn assert_same(name: &str, mode: impl std::fmt::Debug, bare: &Output, ours: &Output) {
    let (want, got) =
        (String::from_utf8_lossy(&bare.stdout), String::from_utf8_lossy(&ours.stdout));
    for (want, got) in want.lines().zip(got.lines()) {
        assert_eq!(got, want, "{name}, {mode:?}");
    }
    assert_eq!(got.len(), want.len(), "{name}, {mode:?}");
    let errors = |o: &Output| String::from_utf8_lossy(&o.stderr).into_owned();
    assert_eq!(errors(ours), errors(bare), "{name}, {mode:?}");
    assert_eq!(ours.status, bare.status, "{name}, {mode:?}");
}

#[test]
fn calls_that_fit_no_signature() {
    compare_abi("abi", shared_object(), &[]);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn calls_of_32_bit_programs_that_fit_no_signature() {
    let time64 = ["-m32", "-D_TIME_BITS=64", "-D_FILE_OFFSET_BITS=64"];
    for (name, flags) in [("abi32", &time64[..1]), ("abi32t", &time64)] {
        compare_abi(name, support::narrow_shared_object(), flags);
    }
}

fn compare_abi(name: &str, library: &Path, flags: &[&str]) {
    let place = Place::new(name);
    let program = place.0.join("abi");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi.c");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-w", "-pthread"]).args(flags).arg("-o").arg(&program).arg(source).arg("-ldl");
    assert!(cc.status().unwrap().success());
    let run = |mode: Mode, args: &[&str]| {
        let mut command = place.command(mode, &program);
        if mode != Mode::Bare {
            command.env("LD_PRELOAD", library);
        }
        command.args(args).output().unwrap()
    };
    compare(name, |mode| run(mode, &[]));
    compare("overflow", |mode| run(mode, &["overflow"]));
}

#[test]
fn python() {
    let place = Place::new("python");
    if !have("python3") {
        return;
    }
    let script = "
import os, select, signal, socket, subprocess, sys, tempfile, threading
print(sum(range(1000)), sys.version_info[:2])
with tempfile.NamedTemporaryFile() as f:
    f.write(b'x' * 100000); f.flush()
    print(len(open(f.name, 'rb').read()))
print(subprocess.run(['echo', 'from a child'], capture_output=True).stdout)
pid = os.fork()
if pid == 0:
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
listener = socket.create_server(('127.0.0.1', 0))
def serve():
    peer, _ = listener.accept()
    with peer:
        while data := peer.recv(65536):
            peer.sendall(data[::-1])
server = threading.Thread(target=serve)
server.start()
with socket.create_connection(listener.getsockname()) as s:
    for i in range(200):
        message = b'%05d' % i * 20
        s.sendall(message)
        got = b''
        while len(got) < len(message):
            got += s.recv(len(message) - len(got))
        assert got == message[::-1], (i, got)
    print(select.select([s], [s], [], 0)[1] == [s])
    s.shutdown(socket.SHUT_WR)
    print(s.recv(1))
server.join()
a, b = socket.socketpair()
print(select.select([a], [], [], 0), a.send(b'1'), b.recv(9))
signal.signal(signal.SIGALRM, lambda *_: print('alarm'))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
";
    compare("python", |mode| place.command(mode, "python3").args(["-c", script]).output().unwrap());
}

/// Native SMC sockets are the kernel's where uSMC is switched off, and ours, which always work, where it is on.
#[test]
fn native_smc() {
    let place = Place::new("native_smc");
    if !have("python3") {
        return;
    }
    let script = "
import socket
for arguments in (43, 1, 0), (43, 1, 1), (43, 1, 7), (43, 2, 0), (2, 1, 256), (10, 1, 256):
    try:
        s = socket.socket(*arguments)
        print(*arguments, [s.getsockopt(1, name) for name in (socket.SO_DOMAIN, socket.SO_PROTOCOL)])
    except OSError as e:
        print(*arguments, e.errno)
";
    let run = |mode| place.command(mode, "python3").args(["-c", script]).output().unwrap();
    assert_same("native_smc", Mode::Off, &run(Mode::Bare), &run(Mode::Off));
    let on = run(Mode::On);
    let said = String::from_utf8_lossy(&on.stdout);
    let want = "43 1 0 [43, 0]\n43 1 1 [43, 1]\n43 1 7 93\n43 2 0 94\n2 1 256 [2, 256]\n10 1 256 [10, 256]\n";
    assert_eq!(said, want, "{}", String::from_utf8_lossy(&on.stderr));
}

/// Whether this kernel makes MPTCP sockets.
fn has_mptcp() -> bool {
    let make = ["-c", "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)"];
    Command::new("python3").args(make).stderr(Stdio::null()).status().unwrap().success()
}

/// Libraries that turn TCP sockets into others, in front of uSMC and behind it, as `usmc run smc_run` has it.
#[test]
fn wrapped_sockets() {
    let place = Place::new("wrapped");
    if !have("python3") {
        return;
    }
    let wrapper = place.0.join("wrapper.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wrapper.c");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&wrapper).arg(source).arg("-ldl");
    assert!(cc.status().unwrap().success());
    let script = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
for s in listener, client, server:
    print(s.getsockopt(1, socket.SO_DOMAIN), s.getsockopt(1, socket.SO_PROTOCOL))
for i in range(100):
    message = b'%05d' % i * 20
    for one, other in (client, server), (server, client):
        one.sendall(message)
        assert other.recv(1000) == message
client.close()
print(server.recv(1))
";
    for (kind, order, want) in [
        ("smc", [&wrapper, shared_object()], "43 0"),
        ("smc", [shared_object(), &wrapper], "2 6"),
        ("mptcp", [&wrapper, shared_object()], "2 262"),
        ("mptcp", [shared_object(), &wrapper], "2 262"),
    ] {
        if kind == "mptcp" && !has_mptcp() {
            continue;
        }
        let order = order.map(|path| path.to_str().unwrap()).join(":");
        let mut command = place.command(Mode::On, "python3");
        command.env("LD_PRELOAD", &order).env("WRAPPER", kind);
        let done = command.args(["-c", script]).output().unwrap();
        let errors = String::from_utf8_lossy(&done.stderr);
        let want = format!("{}b''\n", format!("{want}\n").repeat(3));
        assert_eq!(String::from_utf8_lossy(&done.stdout), want, "{order}: {errors}");
    }
}

#[test]
fn bash() {
    let place = Place::new("bash");
    let script = "echo hi | cat; for i in 1 2 3; do (echo $i) & wait $!; done; x=$(seq 3 | tail -n 1); echo $x; \
        exec 7>file; echo kept >&7; exec 7>&-; cat file <(echo two); trap 'echo term' TERM; kill $$; exit 3";
    compare("bash", |mode| place.command(mode, "bash").args(["-c", script]).output().unwrap());
}

#[test]
fn curl() {
    if !(have("curl") && have("python3")) {
        return;
    }
    let place = Place::new("curl");
    let body: Vec<u8> = (0..300_000u32).flat_map(|i| format!("{i}\n").into_bytes()).collect();
    std::fs::write(place.0.join("body"), body).unwrap();
    let serve = "
import http.server, socketserver
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass
server = socketserver.ThreadingTCPServer(('127.0.0.1', 0), Quiet)
print('port', server.server_address[1], file=open('port', 'w'), flush=True)
print('ready', flush=True)
server.serve_forever()
";
    let mut bare = None;
    for server_mode in MODES {
        let mut command = place.command(server_mode, "python3");
        command.args(["-c", serve]);
        let _server = Server::start(command, "ready");
        let port = std::fs::read_to_string(place.0.join("port")).unwrap();
        let url = format!("http://127.0.0.1:{}/body", port.trim().trim_start_matches("port "));
        for client_mode in MODES {
            let done =
                place.command(client_mode, "curl").args(["-sS", &url, &url]).output().unwrap();
            assert!(done.status.success());
            let bare = bare.get_or_insert_with(|| done.clone());
            assert_same("curl", (server_mode, client_mode), bare, &done);
        }
    }
}

#[test]
fn redis() {
    if !(have("redis-server") && have("redis-cli")) {
        return;
    }
    let place = Place::new("redis");
    let large = "v".repeat(300_000);
    let mut input = format!("FLUSHALL\nSET large {large}\nGET large\nSTRLEN large\n");
    for i in 0..500 {
        input += &format!("SET key:{i} value-{i}\nGET key:{i}\nLPUSH list {i}\n");
    }
    input += "LRANGE list 0 -1\nDBSIZE\nNOSUCHCOMMAND\n";
    let mut bare = None;
    for server_mode in MODES {
        let port = free_port();
        let mut command = place.command(server_mode, "redis-server");
        command.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        let _server = Server::start(command, "Ready to accept connections");
        for client_mode in MODES {
            let mut command = place.command(client_mode, "redis-cli");
            command.args(["-h", "127.0.0.1", "-p", &port]);
            let done = fed(command, input.as_bytes());
            assert!(done.status.success());
            let bare = bare.get_or_insert_with(|| done.clone());
            assert_same("redis", (server_mode, client_mode), bare, &done);
        }
    }
}

#[test]
fn java() {
    if !have("java") {
        return;
    }
    let place = Place::new("java");
    compare("java", |mode| {
        place
            .command(mode, "java")
            .args(["-Xshare:auto", "-XshowSettings:none", "-version"])
            .output()
            .unwrap()
    });
}
