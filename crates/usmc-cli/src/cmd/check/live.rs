//! The library at work: does it load, and do two processes under it leave TCP?

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use usmc::observe::Mode;
use usmc::reason::Reason;

use super::between_hosts::Reached;
use super::report::Finding;
use crate::agent;
use crate::config::Config;
use crate::library::{self, Library, NARROW_LINKER, NoNarrow};
use crate::observed::{self, Socket};
use crate::{proc, remedies};

/// Between two looks at a connection.
const LOOK: Duration = Duration::from_millis(20);
/// Longest wait for a line from one of our own processes.
const PATIENCE: Duration = Duration::from_secs(10);

/// The program that is tried under the library: usmc itself, which a system with another C library may have in its static
/// form alone.
///
/// # Errors
/// What there is to say where none runs.
pub fn probe() -> Result<PathBuf, Finding> {
    let not_tried = |why: String| {
        let fact = format!("the library was not tried here: {why}");
        Finding::note(fact, "start a program of yours by `usmc run`, and see `usmc ss`")
    };
    let program = library::dynamic_self().map_err(|e| not_tried(format!("{e:#}")))?;
    let alone = Command::new(&program).args(["probe", "alone"]).env_remove("LD_PRELOAD").output();
    match alone {
        Ok(output) if output.status.success() => Ok(program),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("it gave no reason");
            Err(not_tried(format!("{} does not run: {said}", program.display())))
        }
        Err(e) => Err(not_tried(format!("{} does not run: {e}", program.display()))),
    }
}

/// Whether the dynamic linker takes the library.
pub fn loads(probe: &Path, library: &Library) -> Finding {
    let shown = library.path.display();
    let remedy = "see `ldd` of it: it must fit this machine's processor and C library";
    let probe = command(probe, library).arg("loaded").output();
    match probe {
        Ok(output) if output.status.success() => Finding::good(format!("{shown} loads")),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("the dynamic linker gave no reason");
            Finding::failure(format!("{shown} does not load: {said}"), remedy)
        }
        Err(e) => Finding::failure(format!("cannot start usmc itself as a probe: {e}"), remedy),
    }
}

/// Whether the 32-bit dynamic linker takes the 32-bit library. Nothing where no 32-bit programs run.
pub fn loads_narrow(library: &Library) -> Option<Finding> {
    let path = match &library.narrow {
        Ok(path) => path,
        Err(NoNarrow::NoPrograms) => return None,
        Err(NoNarrow::Missing(path)) => {
            return Some(Finding::note(
                format!("32-bit programs stay TCP: there is no {}", path.display()),
                "build it with `make deps32 build` and install it, if any of yours has 32 bits",
            ));
        }
    };
    let shown = path.display();
    let remedy = "see `ldd` of it: it must fit this machine's 32-bit C library";
    // No 32-bit program is known to be here; the linker itself looks up all that the library needs.
    let listed = Command::new(NARROW_LINKER).arg("--list").arg(path).output();
    Some(match listed {
        Ok(output) if output.status.success() => {
            Finding::good(format!("{shown} loads into 32-bit programs"))
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("the dynamic linker gave no reason");
            Finding::failure(format!("{shown} does not load: {said}"), remedy)
        }
        Err(e) => Finding::failure(format!("{shown} cannot load: {NARROW_LINKER}: {e}"), remedy),
    })
}

/// A connection between two processes under the library.
pub fn connection(probe: &Path, config: &Config, library: &Library) -> Finding {
    match talk(probe, config, library) {
        Ok(ends) => judge(&ends),
        Err(problem) => Finding::failure(
            format!("two processes could not talk to each other under the library: {problem:#}"),
            "run `usmc run --log debug -- PROGRAM` and look for the first failed step",
        ),
    }
}

/// One end of the connection and what its library logged.
struct End {
    name: &'static str,
    socket: Option<Socket>,
    log: String,
}

fn judge(ends: &[End; 2]) -> Finding {
    let sockets = ends.iter().map(|end| end.socket.as_ref());
    if sockets.clone().all(|s| s.is_some_and(|s| s.mode == Mode::Smcd)) {
        return Finding::good("a client and a server moved their bytes through shared memory");
    }
    let log: String = ends.iter().flat_map(|end| end.log.lines()).take(1).collect();
    let logged = if log.is_empty() { String::new() } else { format!(" ({log})") };
    let mut facts = Vec::new();
    let mut remedy = "run `usmc run --log debug -- PROGRAM` and look for the first failed step";
    for End { name, socket, .. } in ends {
        match socket {
            None => {
                facts.push(format!("the {name}'s library shows no record of its socket"));
                remedy =
                    "is a rule excluding it, or are its tables full? see `usmc ss` and ulimit -n";
            }
            Some(socket) if socket.mode == Mode::Tcp => {
                let reason = Reason::from_code(socket.reason);
                facts
                    .push(format!("the {name} stayed on TCP: {}", reason.map_or("", Reason::text)));
                remedy = reason.filter(is_of_machine).and_then(remedies::of).unwrap_or(remedy);
            }
            Some(_) => {}
        }
    }
    Finding::failure(facts.join("; ") + &logged, remedy)
}

/// Others are not to be, between two programs that are started alike.
fn is_of_machine(reason: &Reason) -> bool {
    use Reason::{NoDevice, NoMemory, NoSegment, OffersFull, TableFull};
    matches!(reason, NoDevice | NoMemory | NoSegment | OffersFull | TableFull)
}

fn talk(program: &Path, config: &Config, library: &Library) -> Result<[End; 2]> {
    let mut server = Probe::start("server", command(program, library), config, &["serve"])?;
    let port: u16 = server.line()?.trim().parse().context("the server printed no port")?;
    let mut client =
        Probe::start("client", command(program, library), config, &["connect", &port.to_string()])?;
    client.line()?;
    let ends = [&server, &client].map(|probe| probe.socket(port));
    let [at_server, at_client] = ends;
    // The client first: the server ends when its connection does.
    let client_log = client.end();
    let server_log = server.end();
    Ok([
        End { name: "server", socket: at_server, log: server_log },
        End { name: "client", socket: at_client, log: client_log },
    ])
}

/// A connection of a program under the library to that place, once it is decided what that is by, or after ten seconds. It moves no byte.
///
/// # Errors
/// There is no connection.
pub fn reach(
    program: &Path,
    (config, library): (&Config, &Library),
    place: SocketAddr,
) -> Result<Reached> {
    let (command, args) = (command(program, library), ["reach", &place.to_string()]);
    let mut probe = Probe::start("client", command, config, &args)?;
    let dir = config.ism_dir();
    if let Err(problem) = probe.line() {
        // The probe says it itself.
        bail!("{}", format!("{problem:#}").trim_start_matches("the client ended early: usmc: "));
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let socket = probe.socket(place.port()).context("the library shows no record of it")?;
        let report = agent::report(&dir);
        let (has_agent, mut conns) = (!report.agents.is_empty(), report.conns.into_iter());
        let conn = conns.find(|conn| (conn.local, conn.peer) == (socket.local, socket.peer));
        let reached = Reached { socket, conn, has_agent };
        if reached.is_settled() || Instant::now() >= deadline {
            return Ok(reached);
        }
        // It ends where the connection does.
        probe.stirs(Instant::now() + LOOK)?;
    }
}

/// The environment of a process of ours that stands for programs: this configuration, but for rules about programs and ports, which are
/// about others.
pub fn environment(config: &Config, library: &Library) -> Vec<(OsString, OsString)> {
    let mut variables: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    let is_left_out =
        |name: &str| ["_PROGRAMS", "_PORTS", "USMC_OFF"].iter().any(|end| name.ends_with(end));
    for (name, value) in config.environment() {
        match value.filter(|_| !is_left_out(name)) {
            Some(value) => variables.insert(name.into(), value.into()),
            None => variables.remove(OsStr::new(name)),
        };
    }
    let before = variables.remove(OsStr::new("LD_PRELOAD"));
    let preload = library::prepend(&library.preload, before.as_deref());
    variables.insert("LD_PRELOAD".into(), preload);
    variables.into_iter().collect()
}

/// Runs a probe that prints a line and ends.
///
/// # Errors
/// It did not, within that time.
pub fn one_line(
    program: &Path,
    environment: &[(OsString, OsString)],
    args: &[&str],
    limit: Duration,
) -> Result<String> {
    let mut command = Command::new(program);
    command.arg("probe").args(args).env_clear().envs(environment.iter().cloned());
    let mut probe = Probe::spawn("process that was to connect", command)?;
    let line = probe.line_within(limit)?;
    drop(probe.end());
    Ok(line)
}

/// The probe, with the library and without any variable of uSMC.
fn command(program: &Path, library: &Library) -> Command {
    let mut command = Command::new(program);
    command.arg("probe");
    for key in &crate::config::KEYS {
        command.env_remove(key.env);
    }
    let before = std::env::var_os("LD_PRELOAD");
    command.env("LD_PRELOAD", library::prepend(&library.preload, before.as_deref()));
    command
}

/// A running probe; killed and reaped when dropped.
struct Probe {
    name: &'static str,
    child: Child,
    out: ChildStdout,
}

impl Probe {
    fn start(
        name: &'static str,
        mut command: Command,
        config: &Config,
        args: &[&str],
    ) -> Result<Probe> {
        // Rules are left out: they are about the user's programs.
        for (variable, value) in config.environment() {
            if let (true, Some(value)) = (!variable.contains("CLUDE_"), value) {
                command.env(variable, value);
            }
        }
        command.env_remove("USMC_OFF").env("USMC_LOG", "warn").args(args);
        Probe::spawn(name, command)
    }

    fn spawn(name: &'static str, mut command: Command) -> Result<Probe> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start usmc itself as a probe")?;
        let out = child.stdout.take().context("the probe has no output")?;
        Ok(Probe { name, child, out })
    }

    /// Waits until the probe writes or ends; false when it does neither.
    fn stirs(&self, deadline: Instant) -> Result<bool> {
        loop {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
            match poll(&mut [PollFd::new(&self.out, PollFlags::IN)], Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                other => return Ok(other? > 0),
            }
        }
    }

    /// The probe's next line.
    fn line(&mut self) -> Result<String> {
        self.line_within(PATIENCE)
    }

    fn line_within(&mut self, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        let mut line = Vec::new();
        let mut byte = [0];
        while self.stirs(deadline)? {
            if self.out.read(&mut byte)? == 0 {
                let log = self.end();
                bail!("the {} ended early: {}", self.name, log.trim());
            }
            if byte == *b"\n" {
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            line.push(byte[0]);
        }
        bail!("the {} said nothing for {} s", self.name, limit.as_secs())
    }

    /// The record of the connected socket at `port`.
    fn socket(&self, port: u16) -> Option<Socket> {
        let files = proc::record_files(self.child.id());
        let mut sockets = files.iter().flat_map(|file: &File| {
            observed::read(file).map(|reading| reading.sockets).unwrap_or_default()
        });
        sockets.find(|s| s.peer.port() != 0 && [s.local.port(), s.peer.port()].contains(&port))
    }

    /// Ends it by end of file, by force if it hangs, and returns what it wrote to standard error.
    fn end(&mut self) -> String {
        drop(self.child.stdin.take());
        if !self.stirs(Instant::now() + PATIENCE).unwrap_or(false) {
            let _ = self.child.kill();
        }
        let mut log = String::new();
        if let Some(mut err) = self.child.stderr.take() {
            let _ = err.read_to_string(&mut log);
        }
        let _ = self.child.wait();
        log
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
