//! A client and a server of our own, from their start to the figures: the driver's end of what [`super::part`] says.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;

use super::agents::Work;
use super::case::{Count, Counts, Cpu};
use super::ending::Ending;
use super::host::World;
use super::mode::Mode;
use super::part::NAME;
use super::part::spec::{Address, Done, Role, Spec};
use super::proof::{Proof, Wanted};

/// A part that says nothing for so long is stuck.
const PATIENCE: Duration = Duration::from_secs(120);
/// Times that a warm-up is repeated for connections that are not in shared memory yet.
const WARM_UPS: usize = 20;
/// Bytes that are shown of what a part said before it ended early.
const LAST_WORDS: usize = 4000;
/// How often we look whether somebody wants us to end, while a part is silent.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// One of our own processes; killed and reaped when dropped.
pub struct Part {
    child: Child,
    out: ChildStdout,
    rest: Vec<u8>,
    /// What it and the library have to say beside that, which may be more than a pipe takes (`USMC_LOG`).
    errors: PathBuf,
    who: &'static str,
    ending: Ending,
    at: Address,
}

impl Part {
    /// Starts it in the run's mode.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(world: &World, who: &'static str, spec: &Spec) -> Result<Part> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let text = serde_json::to_string(spec).context("a part's description")?;
        let mut command = world.usmc(&[NAME, &text])?;
        let errors = world.scratch.join(format!("part-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        let file = File::create(&errors).context("cannot make a file")?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().context("cannot start usmc itself")?;
        let out = child.stdout.take().context("the part has no output")?;
        let (ending, at) = (world.ending.clone(), spec.at.clone());
        Ok(Part { child, out, rest: Vec::new(), errors, who, ending, at })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it a word.
    ///
    /// # Errors
    /// When it is gone.
    pub fn tell(&mut self, word: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("the part has no input")?;
        let told = stdin.write_all(format!("{word}\n").as_bytes());
        told.with_context(|| format!("the {} is gone", self.who))
    }

    /// Waits for a line that begins with this word, and returns its value.
    ///
    /// # Errors
    /// When another one comes, or none.
    pub fn hear<T: DeserializeOwned>(&mut self, word: &str) -> Result<T> {
        let line = self.line()?;
        let (said, value): (String, T) = serde_json::from_str(&line)
            .with_context(|| format!("the {} says {line:?}, not {word:?}", self.who))?;
        if said != word {
            bail!("the {} says {said:?}, not {word:?}", self.who);
        }
        Ok(value)
    }

    fn line(&mut self) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            self.ending.check()?;
            if Instant::now() > deadline {
                bail!("the {} said nothing for {} s", self.who, PATIENCE.as_secs());
            }
            match poll(&mut [PollFd::new(&self.out, PollFlags::IN)], Some(&TICK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                other => other.context("poll")?,
            };
            let mut bytes = [0; 4096];
            match self.out.read(&mut bytes) {
                Ok(0) => {
                    let said = self.last_words();
                    bail!("the {} ended early: {said}", self.who)
                }
                Ok(n) => self.rest.extend(&bytes[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("cannot hear"),
            }
        }
    }

    fn last_words(&mut self) -> String {
        let _ = self.child.kill();
        let said = fs::read(&self.errors).unwrap_or_default();
        let said = &said[said.len().saturating_sub(LAST_WORDS)..];
        String::from_utf8_lossy(said).trim().to_owned()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = Pid::from_raw(self.child.id() as i32).map(|pid| kill_process(pid, Signal::KILL));
        let _ = self.child.wait();
    }
}

/// What pairs of a client and a server did at the same time.
pub struct Measured {
    /// Each client's figures.
    pub done: Vec<Done>,
    /// CPU seconds of all clients and of all servers.
    pub cpu: [f64; 2],
    /// What carried the bytes.
    pub proof: Proof,
    /// Frames on the wire meanwhile, where there is one.
    pub frames: Option<u64>,
    /// Sleeps and doorbells meanwhile, where all connections are in shared memory.
    pub wakes: Option<u64>,
    /// What agents did meanwhile, where connections are by RDMA.
    pub agents: Option<Work>,
}

impl Measured {
    /// Operations of all clients in a second.
    pub fn rate(&self) -> f64 {
        self.done.iter().map(|done| done.operations as f64 / done.seconds).sum()
    }

    /// Operations of all clients.
    pub fn operations(&self) -> f64 {
        self.done.iter().map(|done| done.operations as f64).sum()
    }

    /// CPU time of an operation of which `parts` make one, in nanoseconds.
    pub fn cpu(&self, parts: f64) -> Option<Cpu> {
        let each = |seconds: f64| seconds * 1e9 / self.operations() / parts;
        let [client, server] = self.cpu;
        let agents_ns = self.agents.and_then(|agents| agents.cpu_of(self.operations() * parts));
        Some(Cpu { client_ns: each(client), server_ns: each(server), agents_ns })
    }

    /// Frames, and sleeps with doorbells, of which `parts` operations make one.
    pub fn counts(&self, parts: f64) -> [Option<Count>; 2] {
        let operations = self.operations() * parts;
        [self.frames, self.wakes].map(|count| Count::new(count?, operations))
    }

    /// What agents did, of which `parts` operations make one.
    pub fn agents(&self, parts: f64) -> Counts {
        self.agents.map(|agents| agents.counts(self.operations() * parts)).unwrap_or_default()
    }
}

/// What has to be shown of the connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    /// So many in shared memory per client, before and after the run, and all bytes of the run in their rings.
    Bytes(usize),
    /// Short ones cannot be in shared memory: one that follows them is.
    OneThatLasts,
}

/// Of two CPUs the server has the first and the client the last, if they are alone.
fn own_cpus(spec: &Spec, count: usize, end: usize) -> Vec<usize> {
    match spec.cpus[..] {
        [first, second] if count == 1 => vec![[first, second][end]],
        _ => spec.cpus.clone(),
    }
}

/// Starts one of `count` servers and waits until it listens.
///
/// # Errors
/// When it does not.
pub fn serve(world: &mut World, spec: &Spec, role: Role, count: usize) -> Result<()> {
    let at = match world.mode {
        Mode::Unix => Address::Unix(world.scratch.join(format!("socket-{}", world.parts.len()))),
        _ => Address::Tcp(SocketAddrV4::new(world.address, 0)),
    };
    let own = Spec { at, role, cpus: own_cpus(spec, count, 0), ..spec.clone() };
    let mut part = Part::start(world, "server", &own)?;
    let port = part.hear("listening")?;
    if let Address::Tcp(at) = &mut part.at {
        at.set_port(port);
    }
    world.port = port;
    world.parts.push(part);
    Ok(())
}

/// Where the servers listen.
pub fn addresses(world: &World) -> Vec<Address> {
    match world.far() {
        Some(_) => vec![Address::Tcp(SocketAddrV4::new(world.address, world.port))],
        None => world.parts.iter().map(|part| part.at.clone()).collect(),
    }
}

/// Runs `count` pairs at the same time, whose roles are told by `server` and `client`.
///
/// # Errors
/// When a part fails, or a run was not over what its mode says.
pub fn run(
    world: &mut World,
    spec: &Spec,
    server: &Role,
    client: &Role,
    count: usize,
    shown: Shown,
) -> Result<Measured> {
    for _ in 0..count {
        serve(world, spec, server.clone(), count)?;
    }
    clients(world, spec, client, shown)
}

/// Runs a client for each of the servers, wherever these are.
///
/// # Errors
/// As [`run`].
pub fn clients(world: &World, spec: &Spec, role: &Role, shown: Shown) -> Result<Measured> {
    let all = addresses(world);
    let cpus = own_cpus(spec, all.len(), 1);
    let start = |at| {
        let own = Spec { at, role: role.clone(), cpus: cpus.clone(), ..spec.clone() };
        Part::start(world, "client", &own)
    };
    let clients = all.into_iter().map(start).collect::<Result<Vec<Part>>>()?;
    go(world, spec, clients, shown)
}

/// Runs clients that are started and have something to say.
///
/// # Errors
/// As [`run`].
pub fn go(world: &World, spec: &Spec, mut clients: Vec<Part>, shown: Shown) -> Result<Measured> {
    let servers = world.servers();
    let all = [servers.clone(), clients.iter().map(Part::pid).collect()].concat();
    let port = if addresses(world).len() == 1 { world.port } else { 0 };
    for client in &mut clients {
        client.hear::<()>("begin")?;
    }
    let wanted = match shown {
        Shown::Bytes(connections) => Some(Wanted::All(connections * clients.len())),
        Shown::OneThatLasts => None,
    };
    // In shared memory before the run: what is measured is no mixture.
    let mut before = world.look(&all, port)?;
    if let (Mode::Usmc, Some(wanted)) = (world.mode, wanted) {
        for _ in 0..WARM_UPS {
            if world.judge(&before, wanted).is_ok() {
                break;
            }
            for client in &mut clients {
                client.tell("more")?;
            }
            for client in &mut clients {
                client.hear::<()>("begin")?;
            }
            before = world.look(&all, port)?;
        }
        world.judge(&before, wanted)?;
    }
    let server_cpu = world.server_cpu(&servers)?;
    let agents = world.agents()?;
    let frames = world.frames()?;
    for client in &mut clients {
        client.tell("go")?;
    }
    for client in &mut clients {
        client.hear::<()>("measured")?;
    }
    let frames = world.frames()?.zip(frames).map(|(after, before)| after - before);
    let agents = world.agents_since(agents)?;
    let server_cpu = world.server_cpu(&servers)? - server_cpu;
    let after = world.look(&all, port)?;
    for client in &mut clients {
        client.tell("tell")?;
    }
    let done = clients.iter_mut().map(|c| c.hear::<Done>("done")).collect::<Result<Vec<Done>>>()?;
    let mut proof = match wanted {
        None => {
            let seen = world.look(&all, port)?;
            let mut proof = world.judge(&seen, Wanted::Some)?;
            if world.mode == Mode::Usmc {
                proof.how =
                    format!("a lasting connection of the same two processes: {}", proof.how);
            }
            if let Some(agents) = agents {
                let short = shown_by(&agents, &done)?;
                proof.how += &format!("; the agents carried both ends of all {short} short ones");
            }
            proof
        }
        Some(wanted) => world.judge(&after, wanted)?,
    };
    let mut wakes = None;
    if world.mode == Mode::Usmc && wanted.is_some() {
        let operations: u64 = done.iter().map(|done| done.operations).sum();
        let moved = operations * (spec.request + spec.answer) as u64;
        // Each byte is sent by one end and received by the other.
        let ring = after.bytes().saturating_sub(before.bytes()) / 2;
        wakes = Some(after.wakes().saturating_sub(before.wakes()));
        proof.ring_bytes = Some(ring);
        proof.moved_bytes = Some(moved);
        if ring < moved {
            bail!("the rings carried {ring} of {moved} bytes: {after}");
        }
    }
    let client_cpu = done.iter().map(|done| done.cpu_seconds).sum();
    for client in &mut clients {
        client.tell("end")?;
    }
    Ok(Measured { done, cpu: [client_cpu, server_cpu], proof, frames, wakes, agents })
}

/// How many short connections there were. They are gone when somebody looks: that they were by RDMA is what the agents at both ends have
/// counted.
fn shown_by(agents: &Work, done: &[Done]) -> Result<u64> {
    let connections: u64 = done.iter().map(|done| done.operations).sum();
    if agents.established < 2 * connections {
        let Work { established, fallbacks, failures, .. } = agents;
        bail!(
            "the run was not by RDMA: of {connections} connections, with two ends each, the agents of both hosts have carried \
             {established} ends; {fallbacks} stayed TCP, {failures} were reset"
        );
    }
    Ok(connections)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_connections_were_by_rdma_if_agents_had_both_ends_of_each() {
        let done = |operations| Done { operations, ..Done::default() };
        for (established, fits) in [(14, true), (15, true), (13, false), (0, false)] {
            let agents = Work { established, ..Work::default() };
            let shown = shown_by(&agents, &[done(3), done(4)]);
            assert_eq!(shown.is_ok(), fits, "{established}: {shown:?}");
        }
    }
}
