//! What one run needs of the machine: directories, a port, processes, a look at its connections. It leaves nothing.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use procfs::net::{self, TcpState};
use procfs::process;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

use super::ending::Ending;
use super::mode::Mode;
use super::proof::{Look, Proof, Wanted, judge};
use super::sweep::Setting;
use super::{cpus, programs};
use crate::library;

/// A server listens after this time, or something is wrong.
const START_LIMIT: Duration = Duration::from_secs(20);
/// A load is done this long after its planned end, or something is wrong.
const LOAD_LIMIT: Duration = Duration::from_secs(120);
/// A program that was asked to end is killed after this time.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at a child.
const TICK: Duration = Duration::from_millis(10);
/// Between two looks at connections that are not in shared memory yet, and before the last one.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const LAST_LOOK: Duration = Duration::from_millis(400);

/// The user that a server runs as which refuses root.
pub type User = &'static str;

/// The place of one run.
pub struct World {
    /// What carries its bytes.
    pub mode: Mode,
    /// A directory for its files.
    pub scratch: PathBuf,
    /// A port of 127.0.0.1 that nobody else uses.
    pub port: u16,
    /// Whether to end.
    pub ending: Ending,
    /// What the library is told in this run.
    pub setting: Option<Setting>,
    ism: PathBuf,
    children: Vec<Program>,
}

/// A program, printing to a file.
pub struct Program {
    child: Child,
    name: String,
    output: PathBuf,
    stop: Signal,
}

/// How to start it.
#[derive(Clone, Default)]
pub struct Start<'a> {
    /// The only CPUs it may use; none: all.
    pub cpus: &'a [usize],
    /// Who runs it, if we are root.
    pub user: Option<User>,
    /// The signal that ends it well; none: SIGTERM.
    pub stop: Option<Signal>,
}

/// What a load did.
pub struct Load {
    /// What it printed.
    pub output: String,
    /// CPU seconds of the client.
    pub client_cpu: f64,
    /// CPU seconds of the servers meanwhile.
    pub server_cpu: f64,
    /// What its connections were.
    pub proof: Proof,
}

impl World {
    /// A new one.
    ///
    /// # Errors
    /// When there is no place for its directories, or no port.
    pub fn new(mode: Mode, ending: &Ending) -> Result<World> {
        let shared = Path::new("/dev/shm");
        let temporary = env::temp_dir();
        let place = if shared.is_dir() { shared } else { &temporary };
        let ism = directory(place)?;
        let scratch = directory(&temporary).inspect_err(|_| drop(fs::remove_dir(&ism)))?;
        let ending = ending.clone();
        let children = Vec::new();
        let mut world = World { mode, scratch, port: 0, ending, setting: None, ism, children };
        world.port = free_port()?;
        Ok(world)
    }

    /// This program again, in this run's mode, ready to be started.
    ///
    /// # Errors
    /// When this program's own file is not known.
    pub fn usmc(&self, args: &[&str]) -> Result<Command> {
        self.command(self.mode, &own_file()?, args, None)
    }

    /// Gives the run's directories to the user, if we are root.
    ///
    /// # Errors
    /// When there is no such user.
    pub fn give_to(&self, user: User) -> Result<()> {
        if rustix::process::geteuid().is_root() {
            let (uid, gid) = ids(user).with_context(|| format!("there is no user {user}"))?;
            for dir in [&self.scratch, &self.ism] {
                std::os::unix::fs::chown(dir, Some(uid), Some(gid)).context("chown")?;
            }
        }
        Ok(())
    }

    /// A command as its user would start it: alone, or by `usmc run`.
    fn command(
        &self,
        mode: Mode,
        name: &Path,
        args: &[&str],
        user: Option<User>,
    ) -> Result<Command> {
        let mut words: Vec<OsString> = Vec::new();
        if let Some(user) = user.filter(|_| rustix::process::geteuid().is_root()) {
            words.push("setpriv".into());
            words.push(format!("--reuid={user}").into());
            words.push(format!("--regid={user}").into());
            words.push("--clear-groups".into());
        }
        if mode == Mode::Usmc {
            words.push(own_file()?.into());
            words.extend(["run", "--"].map(OsString::from));
        }
        words.push(name.into());
        words.extend(args.iter().map(OsString::from));
        let mut command = Command::new(&words[0]);
        // What brings the library in is `usmc run` alone; the rest of the user's settings stay.
        command.args(&words[1..]).env_remove("USMC_OFF").env("USMC_ISM_DIR", &self.ism);
        if let Some(Setting { name, value }) = &self.setting {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        match env::var_os("LD_PRELOAD").and_then(|list| library::strip(&list)) {
            Some(list) => command.env("LD_PRELOAD", list),
            None => command.env_remove("LD_PRELOAD"),
        };
        // A group of its own: Ctrl-C is for us, and we end it.
        command.env("PATH", programs::search_path());
        command.process_group(0).stdin(Stdio::null()).current_dir(&self.scratch);
        Ok(command)
    }

    /// Runs a short program to its end, without the library, and returns what it printed.
    ///
    /// # Errors
    /// When it fails, with what it printed.
    pub fn ask(&self, words: &[&str], user: Option<User>) -> Result<String> {
        let mut command = self.command(Mode::Tcp, Path::new(words[0]), &words[1..], user)?;
        let output = command.output().with_context(|| format!("cannot run {}", words[0]))?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            bail!("`{}` failed.\n{said}{log}", words.join(" "));
        }
        Ok(said)
    }

    /// Waits until a short program succeeds.
    ///
    /// # Errors
    /// When it does not.
    pub fn wait_until(&self, words: &[&str], user: Option<User>) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            self.ending.check()?;
            match self.ask(words, user) {
                Ok(_) => return Ok(()),
                Err(problem) if Instant::now() > deadline => return Err(problem),
                Err(_) => thread::sleep(TICK),
            }
        }
    }

    /// A path of the run's own, as a word of a command line.
    pub fn path(&self, name: &str) -> String {
        self.scratch.join(name).display().to_string()
    }

    /// Starts a server and waits until it listens: at the run's port, or in mode UNIX at this path.
    ///
    /// # Errors
    /// When it does not.
    pub fn serve(&mut self, words: &[&str], path: Option<&str>, start: &Start) -> Result<()> {
        self.start(words, start)?;
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let listens = match path.filter(|_| self.mode == Mode::Unix) {
                Some(path) => UnixStream::connect(path).is_ok(),
                None => listens(self.port),
            };
            if listens {
                return Ok(());
            }
            let ended = self.children.last().is_none_or(Program::has_ended);
            if ended || Instant::now() > deadline {
                bail!("no server listens.\n{}", self.story());
            }
            self.ending.check()?;
            thread::sleep(TICK);
        }
    }

    /// Runs a client to its end, looks at its connections meanwhile, and returns what came of it.
    ///
    /// # Errors
    /// When it fails, or the run was not over what its mode says.
    pub fn load(&mut self, words: &[&str], wanted: Wanted, start: &Start) -> Result<Load> {
        let servers: Vec<u32> = self.children.iter().map(|program| program.child.id()).collect();
        let server_cpu = || families(&servers).into_iter().map(cpus::coarse).sum::<f64>();
        let before = server_cpu();
        self.start(words, start)?;
        let client = self.children.len() - 1;
        let deadline = Instant::now() + LOAD_LIMIT;
        let mut best = Look::default();
        let mut next = Instant::now() + LOOK_AGAIN;
        let mut looks_after_the_first = 0;
        while !self.children[client].has_ended() {
            self.ending.check()?;
            if Instant::now() > deadline {
                bail!("the load is not done after {} s.\n{}", LOAD_LIMIT.as_secs(), self.story());
            }
            // One look after the first that shows what is wanted, when all connections are there: each takes time.
            if looks_after_the_first < 2 && Instant::now() > next {
                let all: Vec<u32> =
                    self.children.iter().map(|program| program.child.id()).collect();
                let look = Look::at(&families(&all), self.port);
                if look.rank() >= best.rank() || look.bytes > best.bytes {
                    best = look;
                }
                let shown = self.mode != Mode::Usmc || judge(self.mode, &best, wanted).is_ok();
                looks_after_the_first += usize::from(shown);
                next = Instant::now() + if shown { LAST_LOOK } else { LOOK_AGAIN };
            }
            thread::sleep(TICK);
        }
        let client_cpu = cpus::coarse(self.children[client].child.id());
        let server_cpu = server_cpu() - before;
        let status = self.children[client].child.wait().context("cannot wait")?;
        if !status.success() {
            bail!("the load failed: {status}.\n{}", self.story());
        }
        let proof =
            judge(self.mode, &best, wanted).map_err(|problem| problem.context(self.story()))?;
        let output = self.children[client].printed();
        Ok(Load { output, client_cpu, server_cpu, proof })
    }

    fn start(&mut self, words: &[&str], start: &Start) -> Result<()> {
        let mut command = self.command(self.mode, Path::new(words[0]), &words[1..], start.user)?;
        let output = self.scratch.join(format!("output-{}", self.children.len()));
        let file = File::create(&output).context("cannot make a file")?;
        command.stdout(file.try_clone().context("a second descriptor")?).stderr(file);
        let child = pinned(start.cpus, || command.spawn())
            .with_context(|| format!("cannot start {}", words[0]))?;
        let stop = start.stop.unwrap_or(Signal::TERM);
        self.children.push(Program { child, name: words.join(" "), output, stop });
        Ok(())
    }

    /// What has become of each program, and the end of what it said.
    fn story(&self) -> String {
        let told = self.children.iter().map(|program| {
            let state = if program.has_ended() { "ended" } else { "runs" };
            let printed = program.printed();
            let from = printed.char_indices().rev().nth(1500).map_or(0, |(at, _)| at);
            format!("`{}` {state}.\n{}", program.name, &printed[from..])
        });
        told.collect::<Vec<String>>().join("\n")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for program in self.children.iter_mut().rev() {
            program.end();
        }
        // What lost its parent is ours.
        for pid in families(&[std::process::id()]) {
            if pid != std::process::id() {
                let _ = Pid::from_raw(pid as i32).map(|pid| kill_process(pid, Signal::KILL));
            }
        }
        reap();
        for dir in [&self.ism, &self.scratch] {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

impl Program {
    /// Leaves the ended program as it is, so that it can still be asked for its CPU time.
    fn has_ended(&self) -> bool {
        let Some(pid) = Pid::from_raw(self.child.id() as i32) else { return true };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(pid), options), Ok(None))
    }

    fn printed(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// Ends the whole group: kindly, then not.
    fn end(&mut self) {
        let group = Pid::from_raw(self.child.id() as i32);
        let signal = |signal| group.map(|group| kill_process_group(group, signal));
        if !self.has_ended() {
            // Not to the group: a server ends its own children.
            let _ = group.map(|pid| kill_process(pid, self.stop));
            let deadline = Instant::now() + STOP_LIMIT;
            while !self.has_ended() && Instant::now() < deadline {
                thread::sleep(TICK);
            }
        }
        signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Takes the exit statuses of processes that became ours.
fn reap() {
    let deadline = Instant::now() + STOP_LIMIT;
    while let Ok(found) = waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        if found.is_none() {
            if Instant::now() > deadline {
                return;
            }
            thread::sleep(TICK);
        }
    }
}

/// Starts something on these CPUs only.
pub fn pinned<T>(only: &[usize], start: impl FnOnce() -> T) -> T {
    let Ok(before) = rustix::thread::sched_getaffinity(None) else { return start() };
    cpus::pin(only);
    let started = start();
    let _ = rustix::thread::sched_setaffinity(None, &before);
    started
}

/// These processes and all that descend from them.
pub fn families(heads: &[u32]) -> Vec<u32> {
    let mut members: BTreeSet<u32> = heads.iter().copied().collect();
    let all = process::all_processes().into_iter().flatten().flatten();
    let mut rest: Vec<(u32, u32)> = all
        .filter_map(|process| process.stat().ok())
        .map(|stat| (stat.pid as u32, stat.ppid as u32))
        .collect();
    loop {
        let before = members.len();
        rest.retain(|(pid, parent)| {
            let is_member = members.contains(parent);
            if is_member {
                members.insert(*pid);
            }
            !is_member
        });
        if members.len() == before {
            return members.into_iter().collect();
        }
    }
}

fn own_file() -> Result<PathBuf> {
    library::dynamic_self()
}

/// User and group of this name (passwd(5)).
fn ids(user: &str) -> Option<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd").ok()?;
    let line = passwd.lines().find(|line| line.split(':').next() == Some(user))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn directory(place: &Path) -> Result<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = place.join(format!("usmc-bench-{}-{number}", std::process::id()));
    let made = DirBuilder::new().mode(0o700).create(&path);
    made.with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

/// A port of 127.0.0.1 that nobody uses, below those the kernel gives to clients.
///
/// # Errors
/// When there is none.
pub fn free_port() -> Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(7919);
    for _ in 0..1000 {
        let number = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (number % 20_000) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of 127.0.0.1 is free; is the interface lo up? (ip link set lo up)")
}

/// Does anyone listen there? Asked of the kernel, so that servers see no connection of ours.
fn listens(port: u16) -> bool {
    let sockets = [net::tcp(), net::tcp6()].into_iter().flatten().flatten();
    let mut listeners = sockets.filter(|socket| socket.state == TcpState::Listen);
    listeners.any(|listener| listener.local_address.port() == port)
}
