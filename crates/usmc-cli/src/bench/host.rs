//! What one run needs of the machine: directories, a port, processes, a look at its connections. It leaves nothing.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::agents::Work;
use super::case::Case;
use super::control::{Start as FarStart, Tuning};
use super::ending::Ending;
use super::far::Far;
use super::local::{directory, free_port, ids, listens, password};
use super::mode::{Mode, Way};
use super::pair::Part;
use super::process::{Program, TICK, families, pinned, reap};
use super::proof::{Look, Proof, Seen, Wanted, judge};
use super::sweep::Setting;
use super::watch::Watch;
use super::{cpus, programs};
use crate::config::profiles;
use crate::library;

/// A server listens after this time, or something is wrong.
const START_LIMIT: Duration = Duration::from_secs(20);
/// A load is done this long after its planned end, or something is wrong.
pub const LOAD_LIMIT: Duration = Duration::from_secs(120);

/// The size of a region that is made for a run. Pages that nobody uses take no memory.
const REGION_SIZE: &str = "512M";

/// The user that a server runs as which refuses root.
pub type User = &'static str;

/// Which ends of a run this machine has.
#[derive(Clone)]
pub enum Ends {
    /// Both.
    Both,
    /// The client's. The server's is there.
    Client(Rc<Far>),
    /// The server's, which listens at this address.
    Server(Ipv4Addr),
}

/// The place of one run.
pub struct World {
    /// Which of its ends are here.
    pub ends: Ends,
    /// What carries its bytes.
    pub mode: Mode,
    /// A directory for its files.
    pub scratch: PathBuf,
    /// The server's address.
    pub address: Ipv4Addr,
    /// A port of it that nobody else uses; where the server listens, once it does.
    pub port: u16,
    /// What a server asks for that is not on this machine's own address; empty: nothing.
    pub password: String,
    /// Whether to end.
    pub ending: Ending,
    /// What the library is told in this run.
    pub setting: Option<Setting>,
    /// Servers of our own that have been started.
    pub parts: Vec<Part>,
    ism: Option<PathBuf>,
    children: Vec<Program>,
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
    /// Frames on the wire meanwhile, where there is one.
    pub frames: Option<u64>,
    /// What agents did meanwhile, where connections are by RDMA.
    pub agents: Option<Work>,
}

impl World {
    /// A new one.
    ///
    /// # Errors
    /// When there is no place for its directories, or no port.
    pub fn new(mode: Mode, ends: &Ends, ending: &Ending) -> Result<World> {
        let shared = Path::new("/dev/shm");
        let temporary = env::temp_dir();
        let address = match ends {
            Ends::Both => Ipv4Addr::LOCALHOST,
            Ends::Client(far) => far.address,
            Ends::Server(address) => *address,
        };
        let mut world = World {
            ends: ends.clone(),
            mode,
            scratch: directory(&temporary)?,
            address,
            port: 0,
            password: String::new(),
            ending: ending.clone(),
            setting: None,
            parts: Vec::new(),
            ism: None,
            children: Vec::new(),
        };
        // Between machines the user's own directory serves: each new one would take a place in the region for ever.
        if matches!(ends, Ends::Both) {
            world.ism = Some(directory(if shared.is_dir() { shared } else { &temporary })?);
        }
        if matches!(ends, Ends::Server(_)) {
            world.password = password()?;
        }
        if world.far().is_none() {
            world.port = free_port(address)?;
        }
        Ok(world)
    }

    /// The machine with the server, if it is not this one.
    pub fn far(&self) -> Option<&Far> {
        match &self.ends {
            Ends::Client(far) => Some(far),
            _ => None,
        }
    }

    /// The region that all connections of this run are to be in, if there is one.
    fn own_region(&self) -> Option<PathBuf> {
        let is_wanted = self.setting.as_ref().is_some_and(Setting::has_own_region);
        self.ism.as_ref().filter(|_| is_wanted).map(|ism| ism.join("region"))
    }

    /// Makes it, by a process of its own: what is mapped here would stay.
    fn make_region(&self) -> Result<()> {
        let Some(path) = self.own_region() else { return Ok(()) };
        let mut make = Command::new(own_file()?);
        let made = make.args(["region", "init", "--size", REGION_SIZE]).arg(path).output();
        let made = made.context("cannot run usmc")?;
        ensure!(made.status.success(), "no region: {}", String::from_utf8_lossy(&made.stderr));
        Ok(())
    }

    /// What was seen of the run, if it was what its mode and setting say.
    ///
    /// # Errors
    /// If not: what was seen instead.
    pub fn judge(&self, seen: &Seen, wanted: Wanted) -> Result<Proof> {
        let way = self.far().map_or(Way::Any, |far| far.way);
        let proof = judge(self.mode, way, seen, wanted)?;
        let (all, inside) = (proof.smcd_ends, proof.region_ends);
        let is_so = self.mode != Mode::Usmc || self.own_region().is_none() || all == inside;
        ensure!(is_so, "{inside} of {all} ends in shared memory were in the run's region");
        Ok(proof)
    }

    /// Starts the case's server, wherever it is to be, if the case does not do so itself.
    ///
    /// # Errors
    /// When it does not listen.
    pub fn begin(&mut self, case: &Case, seconds: f64) -> Result<()> {
        self.make_region()?;
        if let Some(far) = self.far() {
            let setting = self.setting.as_ref().map(Tuning::new).transpose()?;
            let (case, mode) = (case.name(), self.mode);
            let up = far.start(FarStart { case, mode, setting, seconds })?;
            (self.port, self.password) = (up.port, up.password);
        } else if let Some(server) = &case.server {
            server(self).map(drop)?;
        }
        Ok(())
    }

    /// The servers here.
    pub fn servers(&self) -> Vec<u32> {
        let programs = self.children.iter().map(|program| program.child.id());
        programs.chain(self.parts.iter().map(Part::pid)).collect()
    }

    /// CPU seconds that these servers have had; or the other machine's.
    ///
    /// # Errors
    /// When that does not say.
    pub fn server_cpu(&self, servers: &[u32]) -> Result<f64> {
        if let Some(far) = self.far() {
            return Ok(far.sight()?.cpu);
        }
        let parts: Vec<u32> = self.parts.iter().map(Part::pid).collect();
        let programs: Vec<u32> =
            servers.iter().copied().filter(|pid| !parts.contains(pid)).collect();
        let of_programs = families(&programs).into_iter().map(cpus::coarse).sum::<f64>();
        Ok(cpus::seconds(&parts) + of_programs)
    }

    /// A look at the connections that have to do with this port, of these processes here and of the other machine's; 0: with any.
    ///
    /// # Errors
    /// When that does not say.
    pub fn look(&self, pids: &[u32], port: u16) -> Result<Seen> {
        let here = Look::at(pids, port);
        let there = self.far().map(|far| anyhow::Ok(far.sight()?.now)).transpose()?;
        Ok(Seen { here, there })
    }

    /// Frames that have been on the wire so far, where there is one.
    ///
    /// # Errors
    /// When they are not counted any more.
    pub fn frames(&self) -> Result<Option<u64>> {
        self.far().map(|far| far.wire.frames()).transpose()
    }

    /// Whether this run's connections have to be by RDMA.
    pub fn is_by_rdma(&self) -> bool {
        self.mode == Mode::Usmc && self.far().is_some_and(|far| far.way == Way::Rdma)
    }

    /// What the agents of both hosts have done so far, if the run's connections are theirs.
    ///
    /// # Errors
    /// When one of both hosts has none any more.
    pub fn agents(&self) -> Result<Option<Work>> {
        self.far().filter(|_| self.is_by_rdma()).map(Far::agents).transpose()
    }

    /// What they have done since then.
    ///
    /// # Errors
    /// As [`World::agents`]; when one began anew.
    pub fn agents_since(&self, before: Option<Work>) -> Result<Option<Work>> {
        let both = self.agents()?.zip(before);
        both.map(|(after, before)| after.since(before)).transpose()
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
            for dir in self.ism.iter().chain([&self.scratch]) {
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
        command.args(&words[1..]).env_remove("USMC_OFF");
        // Those of a profile that was handed on here are not this run's.
        command.env_remove(profiles::HANDED);
        if let Some(ism) = &self.ism {
            command.env("USMC_ISM_DIR", ism);
            // A directory takes a place in each region that its programs join, and keeps it when it is gone.
            if env::var_os("USMC_REGIONS").is_none() {
                command.env("USMC_REGIONS", "none");
            }
        }
        if self.is_by_rdma() && env::var_os("USMC_CHANGE_OVER").is_none() {
            // Else a client of many brief connections has most of them by TCP.
            command.env("USMC_CHANGE_OVER", "at-once");
        }
        if let Some(region) = self.own_region() {
            command.env("USMC_REGIONS", region).env("USMC_LOOPBACK", "off");
        } else if let Some(Setting { name, value }) = &self.setting {
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
        let servers = self.servers();
        let before = self.server_cpu(&servers)?;
        let agents = self.agents()?;
        let frames = self.frames()?;
        self.start(words, start)?;
        let client = self.children.len() - 1;
        let deadline = Instant::now() + LOAD_LIMIT;
        let all = self.servers();
        let ends = if self.far().is_some() { 1 } else { 2 };
        let mut watch = Watch::new(self.mode, wanted, ends);
        while !self.children[client].has_ended() {
            self.ending.check()?;
            if Instant::now() > deadline {
                bail!("the load is not done after {} s.\n{}", LOAD_LIMIT.as_secs(), self.story());
            }
            watch.tick(|| Look::at(&families(&all), self.port));
            thread::sleep(TICK);
        }
        let frames = self.frames()?.zip(frames).map(|(after, before)| after - before);
        let agents = self.agents_since(agents)?;
        let client_cpu = cpus::coarse(self.children[client].child.id());
        let server_cpu = self.server_cpu(&servers)? - before;
        let status = self.children[client].child.wait().context("cannot wait")?;
        if !status.success() {
            bail!("the load failed: {status}.\n{}", self.story());
        }
        let there = self.far().map(|far| anyhow::Ok(far.sight()?.best)).transpose()?;
        let seen = Seen { here: watch.best().clone(), there };
        let proof = self.judge(&seen, wanted).map_err(|problem| problem.context(self.story()))?;
        let output = self.children[client].printed();
        Ok(Load { output, client_cpu, server_cpu, proof, frames, agents })
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
        self.parts.clear();
        // What lost its parent is ours.
        for pid in families(&[std::process::id()]) {
            if pid != std::process::id() {
                let _ = Pid::from_raw(pid as i32).map(|pid| kill_process(pid, Signal::KILL));
            }
        }
        reap();
        for dir in self.ism.iter().chain([&self.scratch]) {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

fn own_file() -> Result<PathBuf> {
    library::dynamic_self()
}
