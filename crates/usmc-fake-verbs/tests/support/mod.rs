//! A fabric for one test, and processes on it: each is this test program once more, which does what it is told by lines.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

pub mod actor;
#[path = "../../../usmc-verbs/examples/pingpong.rs"]
pub mod pingpong;

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv6Addr;
use std::ops::Deref;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use usmc_fake_verbs::fabric::{DIRECTORY, Fabric, VISIBLE};

/// The longest time that an answer may take: nothing here waits for as long unless it fails.
const ANSWER: Duration = Duration::from_secs(30);

/// Two devices, `a` at 10.0.0.1 and `b` at 10.0.0.2, in a directory that goes with the test.
pub struct Stage {
    fabric: Fabric,
}

impl Stage {
    pub fn new() -> Stage {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabric-{}-{number}", std::process::id());
        let fabric = Fabric::create(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
            .expect("a directory");
        for (device, last) in [("a", 1), ("b", 2)] {
            fabric.device(device, 1024).expect("the fabric can be written");
            let address = Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0x0a00, last);
            fabric.gid(device, 1, address, "lo").expect("the fabric can be written");
        }
        Stage { fabric }
    }

    /// A process that sees that device only.
    pub fn process(&self, device: &str) -> Process {
        Process::start(self.fabric.directory(), device, false)
    }

    /// The same in a network namespace of its own, if this user may have one.
    pub fn process_apart(&self, device: &str) -> Process {
        Process::start(self.fabric.directory(), device, true)
    }

    /// A process for each device, with queue pairs that are connected: 8.4 ms are waited for an acknowledgement, with that many
    /// repetitions.
    pub fn two(&self, retries: u8) -> [Process; 2] {
        let [mut a, mut b] = [self.process("a"), self.process("b")];
        let facts = [a.ask("open a"), b.ask("open b")];
        a.ask_ok(&format!("peer {} 11 {retries} 7", facts[1]));
        b.ask_ok(&format!("peer {} 11 {retries} 7", facts[0]));
        (a.facts, b.facts) = (Facts::new(&facts[0]), Facts::new(&facts[1]));
        [a, b]
    }
}

impl Deref for Stage {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.fabric.directory());
    }
}

/// What `open` answers: what a peer has to know.
#[derive(Default, Clone)]
pub struct Facts {
    pub qp_num: u32,
    pub psn: u32,
    pub gid: String,
    pub address: u64,
    pub rkey: u32,
}

impl Facts {
    pub fn new(text: &str) -> Facts {
        let words: Vec<_> = text.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        Facts {
            qp_num: number(0) as u32,
            psn: number(1) as u32,
            gid: words[2].into(),
            address: number(3),
            rkey: number(4) as u32,
        }
    }
}

/// A process, which is killed when this is dropped.
pub struct Process {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
    pub facts: Facts,
}

impl Process {
    fn start(fabric: &Path, device: &str, is_apart: bool) -> Process {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        if is_apart {
            // SAFETY: One system call, which allocates nothing. Without the right to it the test shows less.
            unsafe {
                command.pre_exec(|| {
                    if libc::unshare(libc::CLONE_NEWNET) < 0 {
                        libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET);
                    }
                    Ok(())
                })
            };
        }
        let mut child = command
            .args(["actor", "--exact", "--nocapture", "--test-threads=1"])
            .env(actor::ROLE, "1")
            .envs(environment(fabric, device))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts");
        let commands = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // What the test harness prints is before the first answer, or has no such mark.
                if let Some((_, answer)) = line.split_once(actor::MARK) {
                    let _ = sender.send(answer.trim().to_owned());
                }
            }
        });
        Process { child, commands, answers, facts: Facts::default() }
    }

    /// Tells something and does not wait for the answer, which [`Process::answer`] has.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").expect("the process reads");
    }

    pub fn answer(&mut self) -> String {
        self.answers.recv_timeout(ANSWER).expect("the process answers in time")
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    #[track_caller]
    pub fn ask_ok(&mut self, command: &str) {
        assert_eq!(self.ask(command), "ok", "{command}");
    }

    /// kill -9.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Names a real device, on which both ends then are, by the real library. `pairs` runs there (in a guest with rdma_rxe, for instance), and so
/// shows what the fake has in common with it; `faults` does not.
pub const REAL: &str = "USMC_VERBS_DEVICE";

/// Whether there is a real device instead of the fake.
pub fn is_real() -> bool {
    std::env::var_os(REAL).is_some()
}

fn environment(fabric: &Path, device: &str) -> Vec<(&'static str, OsString)> {
    if is_real() {
        return Vec::new();
    }
    vec![
        (DIRECTORY, fabric.into()),
        (VISIBLE, device.into()),
        ("LD_LIBRARY_PATH", library().into()),
    ]
}

/// A directory with the fake as libibverbs.so.1. It lies beside this program, where cargo has built it.
fn library() -> PathBuf {
    static COPY: Once = Once::new();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-verbs");
    COPY.call_once(|| {
        let program = std::env::current_exe().expect("this program has a path");
        let built = program.with_file_name("libusmc_fake_verbs.so");
        std::fs::create_dir_all(&directory).expect("the target directory can be written");
        // By a new name, as another test program may use the old file now.
        let new = directory.join(format!("new-{}", std::process::id()));
        std::fs::copy(&built, &new).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        std::fs::rename(&new, directory.join("libibverbs.so.1")).expect("as above");
    });
    directory
}
