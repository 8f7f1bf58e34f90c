//! A started program: its group, its output, its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A running program, leader of its own process group. Killed with its group when dropped.
pub struct Process {
    name: String,
    pid: i32,
    deadline: Instant,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    seen: Vec<String>,
    errors: Arc<Mutex<String>>,
    errors_done: Receiver<()>,
    exited: Receiver<ExitStatus>,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts a command with pipes on all three standard fds.
    pub(crate) fn start(mut command: Command, deadline: Instant) -> Process {
        let name = command
            .get_args()
            .last()
            .unwrap_or_else(|| command.get_program())
            .to_string_lossy()
            .into_owned();
        let name = format!("{} … {name}", command.get_program().to_string_lossy());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        // SAFETY: prctl is a bare system call that allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {name}: {e}"));
        let pid = i32::try_from(child.id()).expect("a pid");
        let stdin = child.stdin.take();
        let lines = read_lines(child.stdout.take().expect("a pipe"));
        let (errors, errors_done) = collect(child.stderr.take().expect("a pipe"));
        let exited = wait(child);
        Process {
            name,
            pid,
            deadline,
            stdin,
            lines,
            seen: Vec::new(),
            errors,
            errors_done,
            exited,
            status: None,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn fail(&self, what: &str) -> ! {
        let errors = self.errors();
        let out = self.seen[self.seen.len().saturating_sub(50)..].join("\n");
        panic!("{}: {what}\n--- its output\n{out}\n--- its errors\n{errors}", self.name)
    }

    /// The next line of its output; `None` at the end of the output.
    pub fn try_line(&mut self) -> Option<String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                self.seen.push(line.clone());
                Some(line)
            }
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => self.fail("printed nothing in time"),
        }
    }

    /// The next line of its output.
    pub fn line(&mut self) -> String {
        self.try_line().unwrap_or_else(|| {
            let status = self.wait();
            self.fail(&format!("ended with {status} where a line was expected"))
        })
    }

    /// Reads lines up to the one that starts with `word`, and returns the rest of that one.
    pub fn line_after(&mut self, word: &str) -> String {
        loop {
            if let Some(rest) = self.line().strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Reads lines up to `WORD number` and returns the number: a port, a count.
    pub fn number_after(&mut self, word: &str) -> u64 {
        let rest = self.line_after(word);
        rest.parse().unwrap_or_else(|_| self.fail(&format!("{word} {rest}: not a number")))
    }

    /// Writes a line to its standard input. A process that is gone does not matter here.
    pub fn say(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Whether its end has been waited for.
    pub fn has_ended(&self) -> bool {
        self.status.is_some()
    }

    /// Closes its standard input.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        if let Some(status) = self.status {
            return status;
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let Ok(status) = self.exited.recv_timeout(left) else { self.fail("did not end in time") };
        self.status = Some(status);
        status
    }

    /// Waits for its end, which has to be exit status 0, and returns all it printed.
    pub fn succeed(&mut self) -> String {
        self.stdin = None;
        while self.try_line().is_some() {}
        let status = self.wait();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let _ = self.errors_done.recv_timeout(left);
        if !status.success() {
            self.fail(&format!("ended with {status}"));
        }
        self.seen.join("\n")
    }

    /// What it wrote to standard error so far; all of it, once it has ended. Others may have it open still.
    pub fn errors(&self) -> String {
        if self.status.is_some() {
            let _ = self.errors_done.recv_timeout(Duration::from_secs(1));
        }
        self.errors.lock().map(|e| e.clone()).unwrap_or_default()
    }

    /// Sends a signal to the process alone.
    pub fn signal(&self, signal: i32) {
        assert!(self.status.is_none(), "{} has ended already", self.name);
        // SAFETY: kill(2) touches no memory of ours.
        unsafe { libc::kill(self.pid, signal) };
    }

    /// Kills the process (not its group) with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        if self.status.is_none() {
            self.signal(libc::SIGKILL);
            let status = self.wait();
            let clean = status.signal() == Some(libc::SIGKILL) || status.success();
            if !clean {
                self.fail(&format!("ended with {status} before it was killed"));
            }
        }
    }

    /// Asks it to end with SIGTERM and waits.
    pub fn terminate(&mut self) -> ExitStatus {
        if self.status.is_none() {
            self.signal(libc::SIGTERM);
        }
        self.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let errors = self.errors();
        if thread::panicking() && !errors.is_empty() {
            eprintln!("--- {} ({}) wrote\n{errors}", self.name, self.pid);
        }
        if self.status.is_none() || thread::panicking() {
            // SAFETY: kill(2) touches no memory of ours; the group is the one made in `start`.
            unsafe { libc::kill(-self.pid, libc::SIGKILL) };
        }
        if self.status.is_none() {
            let _ = self.exited.recv_timeout(Duration::from_secs(5));
        }
    }
}

fn read_lines(stdout: impl Read + Send + 'static) -> Receiver<String> {
    let (to, lines) = channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned();
            if to.send(line).is_err() {
                break;
            }
            bytes.clear();
        }
    });
    lines
}

fn collect(mut stderr: impl Read + Send + 'static) -> (Arc<Mutex<String>>, Receiver<()>) {
    let text = Arc::new(Mutex::new(String::new()));
    let (done, errors_done) = channel();
    let shared = Arc::clone(&text);
    thread::spawn(move || {
        let mut chunk = [0; 4096];
        while let Ok(n @ 1..) = stderr.read(&mut chunk) {
            if let Ok(mut text) = shared.lock() {
                text.push_str(&String::from_utf8_lossy(&chunk[..n]));
            }
        }
        let _ = done.send(());
    });
    (text, errors_done)
}

fn wait(mut child: Child) -> Receiver<ExitStatus> {
    let (to, exited) = channel();
    thread::spawn(move || {
        if let Ok(status) = child.wait() {
            let _ = to.send(status);
        }
    });
    exited
}
