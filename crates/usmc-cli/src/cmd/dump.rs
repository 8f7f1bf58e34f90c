//! `usmc dump`: what goes through connections, as a capture that Wireshark opens.

use std::collections::HashMap;
use std::ffi::c_int;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGPIPE, SIGTERM};
use usmc::observe::{AGENT_ID, State};

use crate::dump::attached::{self, Attached, Carrier, Event, Filter};
use crate::dump::capture::Capture;
use crate::regions::{Regions, device_name};
use crate::{observed, proc};

/// How often new processes are looked for.
const SCAN: Duration = Duration::from_millis(100);
/// Names of carriers remembered; beyond these all are asked for anew.
const CARRIERS: usize = 1 << 12;
/// How long a look at empty rings is put off.
const IDLE: Duration = Duration::from_millis(2);

/// Capture what connections carry, for Wireshark
///
/// Shared memory is invisible to tcpdump: this shows its bytes as TCP segments between the real addresses, and those
/// of connections on TCP likewise. What is captured are connections of running programs under `usmc run`, all of a
/// process or those accepted at an address.
#[derive(clap::Args, Debug)]
#[command(after_help = "Ends with SIGINT or SIGTERM, or with the processes named.\n\
                        Example: usmc dump :6379 | tshark -r -")]
#[command(
    override_usage = "usmc dump [OPTIONS] <LISTENER>\n       usmc dump [OPTIONS] -p <PID>..."
)]
pub struct Args {
    /// Write to FILE; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    write: PathBuf,
    /// Capture all connections of process PID; repeatable
    #[arg(short, long, value_name = "PID", conflicts_with = "listener")]
    pid: Vec<u32>,
    /// End after so many packets
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Say nothing on standard error but errors
    #[arg(short, long)]
    quiet: bool,
    /// Capture what is accepted at ADDRESS:PORT, by whichever process; without ADDRESS at any. Instead of -p
    #[arg(value_name = "LISTENER", value_parser = listener, required_unless_present = "pid")]
    listener: Option<SocketAddr>,
}

fn listener(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').or_else(|| text.strip_prefix("*:")).unwrap_or(text);
    let at = match port.parse::<u16>() {
        Ok(port) => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)),
        Err(_) => text.parse().ok(),
    };
    at.filter(|at| at.port() != 0)
        .ok_or_else(|| format!("{text:?} is no address with a port; write 127.0.0.1:80 or :80"))
}

/// Captures until told to end.
///
/// # Errors
/// A process that cannot be captured, or a file that cannot be written.
pub fn run(args: &Args) -> Result<c_int> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot hear signals")?;
    }
    // Who reads may end first; the processes are let go all the same.
    let ignored = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGPIPE, ignored).context("cannot hear signals")?;
    let out: Box<dyn Write> = if args.write.as_os_str() == "-" {
        if io::stdout().is_terminal() {
            bail!("a capture is no text for a terminal; use -w FILE, or a pipe to tshark -r -");
        }
        Box::new(io::stdout())
    } else {
        let name = args.write.display();
        Box::new(File::create(&args.write).with_context(|| format!("cannot write {name}"))?)
    };
    let mut session = Session {
        args,
        capture: Capture::begin(BufWriter::with_capacity(1 << 20, out))?,
        attached: Vec::new(),
        seen: HashMap::new(),
        regions: Regions::default(),
        carriers: HashMap::new(),
        since_ns: now_ns(),
    };
    let outcome = session.capture(&stop);
    match session.end(outcome) {
        // What tcpdump does when its reader has seen enough.
        Err(problem) if is_broken_pipe(&problem) => Ok(0),
        other => other,
    }
}

/// The memory that carries an event's bytes: whose it is, and in a region the kernels of both ends, the client's first.
fn name_of(regions: &mut Regions, process: &Attached, event: &Event) -> String {
    let (socket, ids) = process.record_of(event).unwrap_or_default();
    let Some(place) = usize::from(event.carrier.number).checked_sub(2) else {
        return format!("{} memory", device_name(None));
    };
    let id = ids.get(place).copied().unwrap_or_default();
    if id == AGENT_ID {
        return "RDMA".to_owned();
    }
    let ends = socket.and_then(|socket| regions.ends(process.pid, &socket));
    let between = ends.map(|[client, server]| format!(" between {client} and {server}"));
    format!("region {}{}", device_name(Some(id)), between.unwrap_or_default())
}

fn is_broken_pipe(problem: &anyhow::Error) -> bool {
    problem.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().or_else(|| {
            cause.downcast_ref::<pcap_file::PcapError>().and_then(|e| match e {
                pcap_file::PcapError::IoError(e) => Some(e),
                _ => None,
            })
        });
        io.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    })
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64)
}

struct Session<'a> {
    args: &'a Args,
    capture: Capture<BufWriter<Box<dyn Write>>>,
    attached: Vec<(u32, Attached)>,
    /// Files that were looked at, and whether they are captured.
    seen: HashMap<attached::Identity, bool>,
    regions: Regions,
    /// By number of the process and its own words.
    carriers: HashMap<(u32, Carrier), Rc<str>>,
    since_ns: u64,
}

impl Session<'_> {
    fn capture(&mut self, stop: &AtomicBool) -> Result<()> {
        self.look_for_processes(true)?;
        self.say_what_is_waited_for();
        let mut looked = Instant::now();
        while !stop.load(Ordering::Relaxed) && !self.has_enough() {
            let is_busy = self.take_all()?;
            if looked.elapsed() >= SCAN {
                self.let_go()?;
                if self.attached.is_empty() && !self.args.pid.is_empty() {
                    break;
                }
                self.look_for_processes(false)?;
                looked = Instant::now();
            }
            if !is_busy {
                self.capture.flush()?;
                thread::sleep(IDLE);
            }
        }
        Ok(())
    }

    /// Even where the file cannot be written any more, the processes are let go.
    fn end(mut self, outcome: Result<()>) -> Result<c_int> {
        let stopped: Result<()> = self.attached.iter().try_for_each(|(_, process)| process.stop());
        outcome.and(stopped)?;
        while !self.has_enough() && self.take_all()? {}
        self.note_losses()?;
        self.attached.clear();
        let packets = self.capture.packets();
        let lost = self.capture.end()?;
        if !self.args.quiet {
            eprintln!("usmc: {packets} packets captured");
        }
        if lost.events > 0 {
            eprintln!("usmc: {} bytes in {} events were dropped", lost.bytes, lost.events);
        }
        Ok(0)
    }

    fn has_enough(&self) -> bool {
        self.args.count.is_some_and(|count| self.capture.packets() >= count)
    }

    /// Takes what all rings hold, in the order of time; true if there was something.
    fn take_all(&mut self) -> Result<bool> {
        let mut events: Vec<(u32, Event)> = Vec::new();
        let mut spoiled = Vec::new();
        for (number, process) in &mut self.attached {
            if let Err(problem) = process.take(|event| events.push((*number, event))) {
                eprintln!("usmc: {problem:#}; it is left alone");
                spoiled.push(*number);
            }
        }
        self.note_losses()?;
        if self.attached.len() > 1 {
            events.sort_by_key(|(_, event)| event.time_ns);
        }
        let most = self.args.count.unwrap_or(u64::MAX);
        for (number, event) in &events {
            let carrier = self.carrier(*number, event);
            self.capture.write(*number, event, &carrier, most)?;
        }
        // Names of carriers are known by them until now.
        self.attached.retain(|(number, _)| !spoiled.contains(number));
        Ok(!events.is_empty())
    }

    /// What carries an event's bytes, for people; empty: TCP.
    fn carrier(&mut self, number: u32, event: &Event) -> Rc<str> {
        if event.carrier.number == 0 {
            return "".into();
        }
        if let Some(known) = self.carriers.get(&(number, event.carrier)) {
            return Rc::clone(known);
        }
        if self.carriers.len() >= CARRIERS {
            self.carriers.clear();
        }
        let process = self.attached.iter().find(|(attached, _)| *attached == number);
        let name = match process {
            Some((_, process)) => name_of(&mut self.regions, process, event),
            None => "shared memory".to_owned(),
        };
        Rc::clone(self.carriers.entry((number, event.carrier)).or_insert(name.into()))
    }

    fn note_losses(&mut self) -> Result<()> {
        for (number, process) in &self.attached {
            self.capture.lost(*number, process.lost()?);
        }
        Ok(())
    }

    /// Processes that have ended have nothing to show once their ring is empty.
    fn let_go(&mut self) -> Result<()> {
        if self.attached.iter().any(|(_, process)| process.has_ended()) {
            while self.take_all()? {}
            self.attached.retain(|(_, process)| !process.has_ended());
        }
        Ok(())
    }

    fn look_for_processes(&mut self, first: bool) -> Result<()> {
        if let Some(at) = self.args.listener {
            for process in proc::scan()?.processes {
                for file in &process.files {
                    if self.is_new(file) && serves(file, at) {
                        self.attach(&process, file, Filter::Listener(at))?;
                    }
                }
            }
            return Ok(());
        }
        for pid in &self.args.pid {
            let process = match proc::find(*pid) {
                Ok(found) => found,
                Err(problem) if first => return Err(problem),
                Err(_) => continue,
            };
            for file in process.iter().flat_map(|process| &process.files) {
                if self.is_new(file)
                    && let Some(process) = &process
                {
                    self.attach(process, file, Filter::All)?;
                }
            }
            if first && process.is_none() {
                bail!("process {pid} has no sockets under uSMC; was it started by usmc run?");
            }
        }
        Ok(())
    }

    fn is_new(&self, file: &File) -> bool {
        attached::identity(file).is_ok_and(|id| !self.seen.contains_key(&id))
    }

    fn attach(&mut self, process: &proc::Process, file: &File, filter: Filter) -> Result<()> {
        let attached = match Attached::attach(process.pid, file, filter, self.since_ns) {
            Ok(attached) => attached,
            // Of one that was named this is the end; one that was found may have ended meanwhile.
            Err(problem) if filter == Filter::All => return Err(problem),
            Err(problem) => {
                self.seen.insert(attached::identity(file)?, false);
                eprintln!("usmc: {problem:#}; it is left out");
                return Ok(());
            }
        };
        self.seen.insert(attached.identity()?, true);
        // Of an earlier process with its number other files were mapped.
        self.regions = Regions::default();
        let number = self.capture.add(process.pid, &process.comm)?;
        self.attached.push((number, attached));
        if !self.args.quiet {
            eprintln!("usmc: capturing process {} ({})", process.pid, process.comm);
        }
        Ok(())
    }

    fn say_what_is_waited_for(&self) {
        if let Some(at) = self.args.listener.filter(|_| self.attached.is_empty()) {
            let port = at.port();
            eprintln!("usmc: nobody under uSMC listens at port {port}, waiting; -h says more");
        }
    }
}

/// Whether a process has to do with a listener at this address.
fn serves(file: &File, at: SocketAddr) -> bool {
    let Ok(reading) = observed::read(file) else { return false };
    reading.sockets.iter().any(|socket| {
        let local = socket.local;
        let is_addr =
            local.ip() == at.ip() || local.ip().is_unspecified() || at.ip().is_unspecified();
        local.port() == at.port() && is_addr && (socket.state == State::Listen || !socket.is_client)
    })
}
