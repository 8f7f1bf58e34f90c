//! `usmc top` in a real terminal, which tmux(1) is.

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use usmc_tests::{Fixture, Process, build, is_plain, procfs};

/// A terminal in which a shell has started the command, and waits when that has ended.
struct Terminal<'a> {
    fixture: &'a Fixture,
    socket: PathBuf,
    shell: i32,
}

const SHELL: &str = r#"stty -g > before; "$USMC" top -d 0.3; echo $? > status; stty -g > after; echo ended; exec sleep 1000"#;

impl Terminal<'_> {
    fn open<'a>(fixture: &'a Fixture, [width, height]: [&str; 2]) -> Terminal<'a> {
        for file in ["before", "status", "after"] {
            let _ = fs::remove_file(fixture.scratch().join(file));
        }
        // One that is about to end does not take another's orders.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let socket = fixture.scratch().join(format!("tmux{number}"));
        let mut command = Terminal::tmux(fixture, &socket);
        command.args([
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            width,
            "-y",
            height,
            "-s",
            "t",
        ]);
        command.args(["-P", "-F", "#{pane_pid}"]).arg(SHELL).env("USMC", build::usmc());
        let shell = fixture.run(command).trim().parse().expect("a pid");
        Terminal { fixture, socket, shell }
    }

    /// A server of its own, which ends with the test.
    fn tmux(fixture: &Fixture, socket: &Path) -> Command {
        let mut command = fixture.plain("tmux");
        command.arg("-S").arg(socket).env_remove("TMUX").env("SHELL", "/bin/sh");
        command
    }

    fn do_it(&self, args: &[&str]) -> String {
        let mut command = Terminal::tmux(self.fixture, &self.socket);
        command.args(args);
        self.fixture.run(command)
    }

    fn screen(&self) -> String {
        self.do_it(&["capture-pane", "-p", "-t", "t"])
    }

    fn press(&self, keys: &[&str]) {
        self.do_it(&[&["send-keys", "-t", "t"], keys].concat());
    }

    /// Waits until the screen is so, and returns it.
    fn shows(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        self.fixture.wait_until_so(what, || self.screen(), |screen| is_so(screen))
    }

    /// The command's process.
    fn top(&self) -> i32 {
        let mut found = None;
        self.fixture.wait_until("usmc top", || {
            let children = procfs::children(self.shell);
            found = children.into_iter().find(|pid| procfs::comm(*pid) == "usmc");
            found.is_some()
        });
        found.expect("a process")
    }

    /// The command has ended in order and has left the terminal as it was.
    fn end_in_order(self) {
        self.shows("the shell", |screen| screen.contains("ended") && !screen.contains("usmc top:"));
        let read = |file: &str| fs::read_to_string(self.fixture.scratch().join(file)).expect(file);
        assert_eq!(read("status"), "0\n");
        assert_eq!(read("before"), read("after"), "stty");
        let state =
            self.do_it(&["display-message", "-p", "-t", "t", "#{alternate_on} #{cursor_flag}"]);
        assert_eq!(state, "0 1", "the first screen, with its cursor");
        self.do_it(&["kill-server"]);
    }
}

/// Bytes a second in the first row with these words, as the screen has them: sent, received.
fn rates<'a>(screen: &'a str, words: &[&str]) -> Option<[&'a str; 2]> {
    let line = screen.lines().find(|line| words.iter().all(|word| line.contains(word)))?;
    let mut cells = line.split_whitespace().skip_while(|cell| *cell != "SMCD");
    Some([cells.nth(1)?, cells.next()?])
}

struct Load {
    server: Process,
    benchmark: Process,
    /// Not under uSMC.
    plain: TcpStream,
}

fn load(fixture: &Fixture) -> Load {
    let port = fixture.port();
    let port_text = port.to_string();
    let mut command = fixture.command("redis-server");
    command.args(["--port", &port_text, "--bind", "127.0.0.1", "--save", "", "--daemonize", "no"]);
    let mut server = fixture.spawn(command);
    while !server.line().contains("Ready to accept connections") {}
    let plain = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connected");
    let mut command = fixture.command("redis-benchmark");
    command.args(["-p", &port_text, "-q", "-t", "get", "-n", "1000000000", "-c", "4"]);
    let benchmark = fixture.spawn(command);
    fixture.assert_serves_smcd(port);
    Load { server, benchmark, plain }
}

#[test]
fn a_live_view_shows_sorts_filters_and_leaves_the_terminal_as_it_was() {
    let fixture = Fixture::new("top");
    if is_plain() {
        return;
    }
    let mut load = load(&fixture);
    let terminal = Terminal::open(&fixture, ["80", "24"]);
    terminal.shows("the view", |screen| screen.contains("usmc top:"));
    // Other tests' programs may be there, too: by the process.
    let server = load.server.pid().to_string();
    terminal.press(&["/", &server, "Enter"]);
    let words = ["redis-server", "SMCD", &server[..]];
    let screen = terminal.shows("a rate", |screen| {
        rates(screen, &words)
            .is_some_and(|rates| rates.iter().all(|rate| !["-", "0"].contains(rate)))
    });
    assert!(screen.contains("Spins that paid/s") && screen.contains("*TX/s"), "{screen}");
    terminal.press(&["s"]);
    terminal.shows("sorted by RX/s", |screen| screen.contains("*RX/s"));
    terminal.press(&["r"]);
    // What has no rate comes first now: the connection on which nothing moves.
    terminal.shows("the other order", |screen| {
        let first = screen.lines().skip_while(|line| !line.contains("^RX/s")).nth(1);
        first.is_some_and(|line| line.contains("TCP") && line.contains(&server))
    });
    terminal.press(&["t"]);
    let plain = load.plain.local_addr().expect("a name").to_string();
    terminal.shows("TCP alone", |screen| {
        screen.contains("[only TCP") && screen.contains(&plain) && rates(screen, &words).is_none()
    });
    terminal.press(&["Enter"]);
    let screen = terminal.shows("details", |screen| screen.contains("What helps"));
    let reason =
        screen.contains("client made no offer") || screen.contains("too little use so far");
    assert!(reason && screen.contains(&plain), "{screen}");
    terminal.press(&["p"]);
    terminal
        .shows("programs", |screen| screen.contains("SHARE") && screen.contains("redis-server"));
    terminal.press(&["Space"]);
    terminal.shows("the pause", |screen| screen.contains("PAUSED"));
    // A pause costs nothing, nor does what is between two looks.
    let top = terminal.top();
    fixture.wait_until("top to sleep", || procfs::state(top, top) == 'S');
    let used = procfs::cpu_time(top);
    for _ in 0..30 {
        terminal.screen();
    }
    assert_eq!(procfs::cpu_time(top), used);
    terminal.do_it(&["resize-window", "-t", "t", "-x", "40", "-y", "10"]);
    terminal.shows("40 columns", |screen| {
        screen.lines().all(|line| line.len() <= 40) && screen.contains("usmc top:")
    });
    terminal.do_it(&["resize-window", "-t", "t", "-x", "132", "-y", "50"]);
    terminal.shows("132 columns", |screen| screen.contains("SPIN/s"));
    terminal.press(&["q"]);
    terminal.end_in_order();
    load.benchmark.kill();
    assert!(load.server.terminate().success());
    drop(load);
    fixture.finish();
}

#[test]
fn signals_end_it_and_the_terminal_is_given_back() {
    let fixture = Fixture::new("top and signals");
    if is_plain() {
        return;
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let terminal = Terminal::open(&fixture, ["80", "24"]);
        terminal.shows("the view", |screen| screen.contains("usmc top:"));
        // SAFETY: touches no memory of ours.
        assert_eq!(unsafe { libc::kill(terminal.top(), signal) }, 0);
        terminal.end_in_order();
    }
    fixture.finish();
}

/// A terminal at the end of a slow line may answer too late.
#[test]
fn a_terminal_that_does_not_answer_is_drawn_on() {
    let fixture = Fixture::new("top on a mute terminal");
    if is_plain() {
        return;
    }
    let mut command = fixture.plain("/usr/bin/python3");
    command.arg(build::tests_dir().join("programs/python/mute_terminal.py"));
    command.args(["usmc top:", "SPIN/s"]).arg(build::usmc()).args(["top", "-d", "0.2"]);
    command.env("TERM", "xterm");
    assert_eq!(fixture.run(command), "status 0");
    fixture.finish();
}

#[test]
fn a_pipe_gets_tables() {
    let fixture = Fixture::new("top in a pipe");
    if is_plain() {
        return;
    }
    let mut load = load(&fixture);
    let server = load.server.pid().to_string();
    let mut command = fixture.plain(build::usmc());
    command.args(["top", "-d", "0.2", "-n", "2", "-f", &server]);
    let text = fixture.run(command);
    assert_eq!(text.matches("WHY TCP").count(), 2, "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let second = text.rsplit("WHY TCP").next().expect("a table");
    let rates = rates(second, &["redis-server", &server, "SMCD"]).expect("a row");
    assert!(rates.iter().all(|rate| !["-", "0"].contains(rate)), "{text}");
    load.benchmark.kill();
    assert!(load.server.terminate().success());
    drop(load);
    fixture.finish();
}
