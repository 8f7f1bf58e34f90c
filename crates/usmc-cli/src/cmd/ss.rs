//! `usmc ss`: who runs over what, and why not over shared memory; like ss(8) and smcss(8).

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde::Serialize;
use usmc::observe::{Mode, State};
use usmc::reason::Reason;
use usmc::syn_option::Outcome;

use usmc_shm::layout::WINDOW_SHIFT_MAX;

use crate::agent::{self, Report};
use crate::config::{Config, ConfigArgs};
use crate::observed::{self, Refusal, Socket};
use crate::regions::{Host, Regions, device_name, short};
use crate::{proc, remedies, sock_diag, table};

/// Show sockets of programs under uSMC
///
/// Lists the TCP sockets of running programs under `usmc run`: whether their bytes move through shared
/// memory (SMCD), by RDMA (SMCR) or over TCP, and the reason for TCP.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without -a and -l, connected sockets are shown.\n\
                        Queues are bytes sent and not yet read; - where the other end cannot be seen.")]
pub struct Args {
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
    /// Show all sockets: connected, listening and others
    #[arg(short, long)]
    all: bool,
    /// Show listening sockets only
    #[arg(short, long, conflicts_with = "all")]
    listening: bool,
}

/// One line of output.
#[derive(Serialize, Debug)]
struct Row {
    pid: u32,
    comm: String,
    fd: u32,
    state: &'static str,
    local: String,
    peer: String,
    mode: &'static str,
    device: Option<String>,
    host: Option<Host>,
    fallback_reason: Option<String>,
    remedy: Option<&'static str>,
    tcp_option: Option<&'static str>,
    tx_bytes: Option<u64>,
    rx_bytes: Option<u64>,
    ring_size: Option<u32>,
    tx_queued: Option<u64>,
    rx_queued: Option<u64>,
}

/// A socket and its place in the machine.
pub struct Found {
    /// Its record.
    pub socket: Socket,
    /// The process that has it.
    pub pid: u32,
    /// That one's place in the list of processes.
    pub process: usize,
    /// The inode of its network namespace.
    pub netns: Option<u64>,
    /// Its own.
    pub inode: Option<u64>,
    /// In the ring, which its other end has not noticed: see [`settle_pending`].
    pub is_ahead: bool,
}

/// Sockets that are the same end of the same connection have the same key.
pub type End = (Option<u64>, SocketAddr, SocketAddr);

/// Lists the sockets.
///
/// # Errors
/// When /proc cannot be read or the output not be written.
pub fn run(args: &Args) -> Result<c_int> {
    let scan = proc::scan()?;
    let mut found = collect(&scan);
    settle_pending(&mut found);
    let ends = ends(&found);
    found.retain(|f| args.wants(f.socket.state));
    found.sort_by_key(|f| (f.pid, f.socket.local, f.socket.peer, f.socket.fd));
    let needs_kernel =
        found.iter().any(|f| f.socket.mode == Mode::Tcp && is_connected(f.socket.state));
    let kernel = if needs_kernel { sock_diag::tcp_sockets() } else { HashMap::new() };
    let mut regions = Regions::default();
    let config = Config::load(&ConfigArgs::default()).map(|config| config.ism_dir());
    let has_rdma = found.iter().any(|f| f.socket.mode == Mode::Smcr);
    let agents = match config {
        Ok(dir) if has_rdma => agent::report(&dir),
        _ => Report::default(),
    };
    let by_ends: HashMap<_, _> =
        agents.conns.into_iter().map(|conn| ((conn.local, conn.peer), conn.device)).collect();
    // The agent alone knows whether a handshake of its own is over.
    for f in found.iter_mut().filter(|f| f.socket.mode == Mode::Smcr) {
        if let Some(None) = by_ends.get(&(f.socket.local, f.socket.peer)) {
            (f.socket.mode, f.socket.reason, f.is_ahead) = (Mode::Tcp, Reason::Pending as u8, true);
        }
    }
    let rows: Vec<Row> = found
        .iter()
        .map(|f| {
            let is_in_memory = f.socket.mode == Mode::Smcd;
            let host = is_in_memory.then(|| regions.other_end(f.pid, &f.socket)).flatten();
            let mut row =
                Row { host, ..row(f, scan.processes[f.process].comm.clone(), &ends, &kernel) };
            if let Some(device) = by_ends.get(&(f.socket.local, f.socket.peer)) {
                row.device.clone_from(device);
            }
            row
        })
        .collect();
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = if args.json { print_json(&mut out, &rows) } else { print_text(&mut out, &rows) };
    printed.and_then(|()| out.flush()).context("cannot write the list; free the output's disk")?;
    if scan.hidden > 0 {
        eprintln!(
            "usmc: {} processes of other users could not be inspected; run `sudo usmc ss` to see them",
            scan.hidden
        );
    }
    Ok(0)
}

impl Args {
    fn wants(&self, state: State) -> bool {
        match state {
            State::Listen => self.all || self.listening,
            State::Init => self.all,
            _ => !self.listening,
        }
    }
}

/// Whether a socket in this state has a peer.
pub fn is_connected(state: State) -> bool {
    !matches!(state, State::Init | State::Listen)
}

/// Reads all files; what is odd about them goes to standard error.
fn collect(scan: &proc::Scan) -> Vec<Found> {
    let mut found = Vec::new();
    for (index, process) in scan.processes.iter().enumerate() {
        let (pid, comm) = (process.pid, &process.comm);
        for file in &process.files {
            let reading = match observed::read(file) {
                Ok(reading) => reading,
                Err(Refusal::Unfinished) => continue,
                Err(Refusal::Version(version)) => {
                    eprintln!(
                        "usmc: process {pid} ({comm}) runs another version of the library (layout \
                         {version}) and is left out; use its own `usmc ss`, or restart it"
                    );
                    continue;
                }
                Err(refusal) => {
                    eprintln!(
                        "usmc: process {pid} ({comm}) shows no readable records ({refusal:?}) and is \
                         left out; restart it if it should run under uSMC"
                    );
                    continue;
                }
            };
            if reading.unsteady + reading.senseless > 0 {
                eprintln!(
                    "usmc: process {pid} ({comm}): {} records kept changing and {} made no sense; \
                     left out, try again",
                    reading.unsteady, reading.senseless
                );
            }
            found.extend(reading.sockets.into_iter().map(|socket| Found {
                pid,
                process: index,
                netns: process.netns,
                inode: process.sockets.get(&socket.fd).copied(),
                is_ahead: false,
                socket,
            }));
        }
    }
    found
}

/// The end of a handshake is noticed by one end first, and its begin, too: until both have noticed it, neither shows more
/// than that it is under way.
pub fn settle_pending(found: &mut [Found]) {
    let is_pending = |s: &Socket| s.mode == Mode::Tcp && s.reason == Reason::Pending as u8;
    let end = |f: &Found| (f.netns, f.socket.local, f.socket.peer);
    let in_ring: HashSet<End> =
        found.iter().filter(|f| f.socket.mode == Mode::Smcd).map(end).collect();
    // Of an end that several processes hold one may not have noticed for long.
    let pending: HashSet<End> = found
        .iter()
        .filter(|f| is_pending(&f.socket) && !in_ring.contains(&end(f)))
        .map(end)
        .collect();
    for f in found {
        let has_begun = f.socket.mode == Mode::Smcd
            || [Reason::Short, Reason::NoOffer].iter().any(|why| f.socket.reason == *why as u8);
        if has_begun && pending.contains(&(f.netns, f.socket.peer, f.socket.local)) {
            f.is_ahead = f.socket.mode == Mode::Smcd;
            f.socket.mode = Mode::Tcp;
            f.socket.reason = Reason::Pending as u8;
        }
    }
}

/// Bytes sent and received by every end of an SMC-D connection. Processes that share an end through
/// fork each have a record of it; the highest count is the latest.
pub fn ends(found: &[Found]) -> HashMap<End, Socket> {
    let mut ends: HashMap<End, Socket> = HashMap::new();
    for f in found.iter().filter(|f| f.socket.mode == Mode::Smcd) {
        let s = &f.socket;
        let known = ends.entry((f.netns, s.local, s.peer)).or_insert_with(|| s.clone());
        known.tx_bytes = known.tx_bytes.max(s.tx_bytes);
        known.rx_bytes = known.rx_bytes.max(s.rx_bytes);
    }
    ends
}

/// Bytes in the rings of a connection of SMC-D, sent and received; `None`: the other end cannot be seen.
pub fn queued(found: &Found, ends: &HashMap<End, Socket>) -> Option<(u64, u64)> {
    let s = &found.socket;
    let other = ends.get(&(found.netns, s.peer, s.local))?;
    // The two ends are read at different moments: what looks like more than a ring is not.
    // The counts are not read at one moment, and programs write them.
    const MOST: u64 = 2 << WINDOW_SHIFT_MAX;
    let fill = |sent: u64, read: u64| sent.saturating_sub(read).min(MOST);
    Some((fill(s.tx_bytes, other.rx_bytes), fill(other.tx_bytes, s.rx_bytes)))
}

fn row(
    found: &Found,
    comm: String,
    ends: &HashMap<End, Socket>,
    kernel: &HashMap<u64, sock_diag::Kernel>,
) -> Row {
    let s = &found.socket;
    let connected = is_connected(s.state);
    let mut row = Row {
        pid: found.pid,
        comm,
        fd: s.fd,
        state: state_name(s.state),
        local: name(s.local),
        peer: name(s.peer),
        mode: match s.mode {
            Mode::Smcd => "SMCD",
            Mode::Smcr => "SMCR",
            Mode::Tcp => "TCP",
        },
        device: (s.mode == Mode::Smcd).then(|| device_name(s.region)),
        host: None,
        fallback_reason: None,
        remedy: None,
        tcp_option: s.syn_option.and_then(option_name),
        tx_bytes: Some(s.tx_bytes),
        rx_bytes: Some(s.rx_bytes),
        ring_size: None,
        tx_queued: None,
        rx_queued: None,
    };
    match s.mode {
        Mode::Smcd | Mode::Smcr => {
            row.ring_size = Some(s.ring_size);
            (row.tx_queued, row.rx_queued) = queued(found, ends).unzip();
        }
        Mode::Tcp => {
            let kernel = found.inode.filter(|_| connected).and_then(|inode| kernel.get(&inode));
            if let (0, Some(kernel)) = (s.local.port(), kernel) {
                row.local = kernel.local.to_string();
            }
            let is_said = connected || s.reason != Reason::None as u8;
            row.fallback_reason = is_said.then(|| s.reason_text());
            row.remedy = Reason::from_code(s.reason).and_then(remedies::of);
            // What has gone through the ring is not among the kernel's.
            let in_ring = if found.is_ahead { (s.tx_bytes, s.rx_bytes) } else { (0, 0) };
            row.tx_bytes = kernel.map(|k| k.tx_bytes.max(in_ring.0));
            row.rx_bytes = kernel.map(|k| k.rx_bytes.max(in_ring.1));
            row.tx_queued = kernel.map(|k| k.tx_queued);
            row.rx_queued = kernel.map(|k| k.rx_queued);
        }
    }
    row
}

/// The address; `0.0.0.0:*` for one that is not known, as ss(8) writes it.
fn name(addr: SocketAddr) -> String {
    let text = addr.to_string();
    match text.strip_suffix('0') {
        Some(start) if addr.port() == 0 => format!("{start}*"),
        _ => text,
    }
}

/// smcss(8)'s names. The state a kernel socket is in when its peer has closed waits for the
/// application, and the other way round.
fn state_name(state: State) -> &'static str {
    match state {
        State::Init => "INIT",
        State::Listen => "LISTEN",
        State::Active => "ACTIVE",
        State::PeerClosed => "APPLCLW1",
        State::AppClosed => "PEERCLW1",
    }
}

/// What the TCP option came to; `None` where it was not asked for, or nothing is known.
fn option_name(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Unarmed => None,
        Outcome::Undecided => Some("undecided"),
        Outcome::Speaks => Some("speaks"),
        Outcome::Silent => Some("silent"),
        Outcome::Echoed => Some("echoed"),
    }
}

fn print_json(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    // One object a line, so that line tools work on it too.
    out.write_all(b"[")?;
    for (i, row) in rows.iter().enumerate() {
        out.write_all(if i == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *out, row)?;
    }
    out.write_all(b"\n]\n")
}

const COLUMNS: [table::Column; 14] = [
    ("State", false),
    ("Pid", true),
    ("Program", false),
    ("Local Address", false),
    ("Peer Address", false),
    ("Mode", false),
    ("Device", false),
    ("Host", false),
    ("Tx-Bytes", true),
    ("Rx-Bytes", true),
    ("Tx-Queue", true),
    ("Rx-Queue", true),
    ("Ring", true),
    ("Fallback-Reason", false),
];

fn print_text(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
    let cells = rows.iter().map(|r| {
        [
            r.state.to_owned(),
            r.pid.to_string(),
            r.comm.clone(),
            r.local.clone(),
            r.peer.clone(),
            r.mode.to_owned(),
            r.device.as_deref().map_or("-".to_owned(), short),
            r.host.as_ref().map_or("-".to_owned(), Host::to_string),
            number(r.tx_bytes),
            number(r.rx_bytes),
            number(r.tx_queued),
            number(r.rx_queued),
            number(r.ring_size.map(u64::from)),
            r.fallback_reason.clone().unwrap_or("-".to_owned()),
        ]
    });
    table::print(out, &COLUMNS, cells)
}
