//! One look at all sockets of programs under uSMC, for `usmc ss` and `usmc top`: what their processes publish, what the other end
//! says of the same connection, and what the kernel and agents know.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use anyhow::Result;
use usmc::observe::{Mode, State};
use usmc::reason::Reason;
use usmc_shm::layout::WINDOW_SHIFT_MAX;

use crate::agent::{self, Report};
use crate::config::{Config, ConfigArgs};
use crate::observed::{self, Reading, Refusal, Socket, Totals};
use crate::regions::device_name;
use crate::sock_diag::{self, Kernel};
use crate::{proc, remedies};

/// Sockets that are the same end of the same connection have the same key.
type End = (Option<u64>, SocketAddr, SocketAddr);

/// Where a socket is in its life, in smcss(8)'s words.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Life {
    /// Neither connected nor listening.
    Init,
    /// Listening.
    Listen,
    /// Connected.
    Active,
    /// The peer has closed its sending direction: it waits for the application.
    PeerClosed,
    /// This end has closed its sending direction: it waits for the peer.
    AppClosed,
    /// Both have, the peer first.
    BothClosedPeerFirst,
    /// Both have, this end first.
    BothClosedAppFirst,
    /// Nothing is left but the descriptor.
    Closed,
}

/// Whether a socket in this state, as its process publishes it, has or had a peer.
pub fn is_connected(state: State) -> bool {
    Life::published(state).is_connected()
}

impl Life {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Life::Init => "INIT",
            Life::Listen => "LISTEN",
            Life::Active => "ACTIVE",
            Life::PeerClosed => "APPLCLW1",
            Life::AppClosed => "PEERCLW1",
            Life::BothClosedPeerFirst => "APPLCLW2",
            Life::BothClosedAppFirst => "PEERCLW2",
            Life::Closed => "CLOSED",
        }
    }

    /// Whether it has or had a peer.
    pub fn is_connected(self) -> bool {
        !matches!(self, Life::Init | Life::Listen)
    }

    fn published(state: State) -> Life {
        match state {
            State::Init => Life::Init,
            State::Listen => Life::Listen,
            State::Active => Life::Active,
            State::PeerClosed => Life::PeerClosed,
            State::AppClosed => Life::AppClosed,
        }
    }

    fn in_kernel(state: u8) -> Option<Life> {
        Some(match state {
            sock_diag::ESTABLISHED => Life::Active,
            sock_diag::SYN_SENT => Life::Init,
            sock_diag::FIN_WAIT1 | sock_diag::FIN_WAIT2 => Life::AppClosed,
            sock_diag::CLOSE_WAIT => Life::PeerClosed,
            sock_diag::LAST_ACK => Life::BothClosedPeerFirst,
            sock_diag::CLOSING => Life::BothClosedAppFirst,
            sock_diag::LISTEN => Life::Listen,
            sock_diag::CLOSE => Life::Closed,
            _ => return None,
        })
    }
}

/// A process with sockets under uSMC.
#[derive(Clone, Default, Debug)]
pub struct Program {
    /// Its number.
    pub pid: u32,
    /// When it began, in ticks after boot.
    pub start: Option<u64>,
    /// Its name, harmless to print.
    pub comm: String,
    /// What it has counted for connections that are closed, by file.
    pub totals: Vec<Totals>,
}

/// A socket and its place in the machine.
#[derive(Clone, Debug)]
pub struct Seen {
    /// As its process describes it, with addresses that the kernel knows better.
    pub socket: Socket,
    /// Where it is in its life.
    pub life: Life,
    /// Where in [`Look::programs`] its process is.
    pub program: usize,
    /// Its network namespace.
    pub netns: Option<u64>,
    /// Its inode.
    pub inode: Option<u64>,
    /// What the kernel tells of it; nothing where it is of another network namespace.
    pub kernel: Option<Kernel>,
    /// Whose memory or which device it goes by; `None` on TCP.
    pub device: Option<String>,
    /// Bytes that the other end has sent and received, where that is seen.
    other: Option<[u64; 2]>,
    /// In the ring, which its other end has not noticed: see [`settle_pending`].
    is_ahead: bool,
}

/// Bytes that wait: sent and not yet read at the other end, and the other way round.
pub type Queued = [Option<u64>; 2];

impl Seen {
    /// A socket as its process alone describes it.
    pub fn new(socket: Socket, program: usize, netns: Option<u64>, inode: Option<u64>) -> Seen {
        let (kernel, device, other) = (None, None, None);
        let life = Life::published(socket.state);
        Seen { socket, life, program, netns, inode, kernel, device, other, is_ahead: false }
    }

    /// What moves its bytes: `SMCD`, `SMCR`, `TCP`, or `SMCD-ready` for a listener whose connections may be SMCD.
    pub fn mode_name(&self) -> &'static str {
        match self.socket.mode {
            Mode::Smcd => "SMCD",
            Mode::Smcr => "SMCR",
            Mode::Tcp if self.is_ready() => "SMCD-ready",
            Mode::Tcp => "TCP",
        }
    }

    fn is_ready(&self) -> bool {
        self.life == Life::Listen && self.socket.reason == Reason::None as u8
    }

    /// Why it is TCP.
    pub fn fallback_reason(&self) -> Option<String> {
        let is_said = self.life.is_connected() || self.socket.reason != Reason::None as u8;
        (self.socket.mode == Mode::Tcp && is_said).then(|| self.socket.reason_text())
    }

    /// What can be done about that.
    pub fn remedy(&self) -> Option<&'static str> {
        let reason = Reason::from_code(self.socket.reason);
        reason.filter(|_| self.socket.mode == Mode::Tcp).and_then(remedies::of)
    }

    /// The kernel's counts of a connection.
    fn counts(&self) -> Option<&Kernel> {
        self.kernel.as_ref().filter(|_| self.life.is_connected())
    }

    /// Bytes sent and received since the connection began.
    pub fn bytes(&self) -> [Option<u64>; 2] {
        let s = &self.socket;
        if s.mode != Mode::Tcp {
            return [Some(s.tx_bytes), Some(s.rx_bytes)];
        }
        // What has gone through the ring is not among the kernel's.
        let in_ring = if self.is_ahead { [s.tx_bytes, s.rx_bytes] } else { [0, 0] };
        let counts = self.counts();
        [counts.map(|k| k.tx_bytes.max(in_ring[0])), counts.map(|k| k.rx_bytes.max(in_ring[1]))]
    }

    /// Sends and receives through the ring, or segments with data on TCP.
    pub fn messages(&self) -> [Option<u64>; 2] {
        if self.socket.mode != Mode::Tcp {
            let [_, _, tx, rx, ..] = self.socket.counters;
            return [Some(tx), Some(rx)];
        }
        let counts = self.counts();
        [counts.map(|k| k.tx_segments), counts.map(|k| k.rx_segments)]
    }

    /// Bytes that wait at either end.
    pub fn queued(&self) -> Queued {
        let s = &self.socket;
        if s.mode == Mode::Tcp {
            return [self.counts().map(|k| k.tx_queued), self.counts().map(|k| k.rx_queued)];
        }
        // The two ends are read at different moments: what looks like more than a ring is not.
        // The counts are not read at one moment, and programs write them.
        const MOST: u64 = 2 << WINDOW_SHIFT_MAX;
        let fill = |sent: u64, read: u64| sent.saturating_sub(read).min(MOST);
        let [tx, rx] = self.other.map_or([None, None], |[tx, rx]| [Some(tx), Some(rx)]);
        [rx.map(|read| fill(s.tx_bytes, read)), tx.map(|sent| fill(sent, s.rx_bytes))]
    }
}

/// What is found at one moment.
#[derive(Default, Debug)]
pub struct Look {
    /// Processes with sockets under uSMC.
    pub programs: Vec<Program>,
    /// Their sockets.
    pub sockets: Vec<Seen>,
    /// Processes that may not be inspected.
    pub hidden: usize,
    /// Of these, those that run under uSMC.
    pub hidden_under: usize,
    /// Processes whose records could not be read, and why.
    pub remarks: Vec<String>,
}

impl Look {
    /// Takes it.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn take() -> Result<Look> {
        let scan = proc::scan()?;
        let mut look = Look::of(scan);
        look.ask_kernel();
        settle_pending(&mut look.sockets);
        look.ask_agents();
        look.join_ends();
        Ok(look)
    }

    /// Joins what both ends of each connection publish, of a look that nothing else is known for.
    pub fn settle_ends(&mut self) {
        settle_pending(&mut self.sockets);
        self.join_ends();
    }

    /// What the processes publish.
    fn of(scan: proc::Scan) -> Look {
        let mut look =
            Look { hidden: scan.hidden, hidden_under: scan.hidden_under, ..Look::default() };
        for process in scan.processes {
            let mut totals = Vec::new();
            for file in &process.files {
                if let Some(reading) = look.read(&process, file) {
                    totals.push(reading.totals);
                }
            }
            let (pid, comm) = (process.pid, process.comm);
            look.programs.push(Program { pid, start: proc::start_of(pid), comm, totals });
        }
        look
    }

    fn read(&mut self, process: &proc::Process, file: &std::fs::File) -> Option<Reading> {
        let (pid, comm) = (process.pid, &process.comm);
        let mut reading = match observed::read(file) {
            Ok(reading) => reading,
            Err(Refusal::Unfinished) => return None,
            Err(Refusal::Version(version)) => {
                self.remarks.push(format!(
                    "process {pid} ({comm}) runs another version of the library (layout {version}) \
                     and is left out; use its own `usmc`, or restart it"
                ));
                return None;
            }
            Err(refusal) => {
                self.remarks.push(format!(
                    "process {pid} ({comm}) shows no readable records ({refusal:?}) and is \
                     left out; restart it if it should run under uSMC"
                ));
                return None;
            }
        };
        if reading.unsteady + reading.senseless > 0 {
            self.remarks.push(format!(
                "process {pid} ({comm}): {} records kept changing and {} made no sense; \
                 left out, try again",
                reading.unsteady, reading.senseless
            ));
        }
        let program = self.programs.len();
        self.sockets.extend(std::mem::take(&mut reading.sockets).into_iter().map(|socket| {
            let inode = process.sockets.get(&socket.fd).copied();
            Seen::new(socket, program, process.netns, inode)
        }));
        Some(reading)
    }

    /// Joins what the kernel says of the sockets of our network namespace.
    fn ask_kernel(&mut self) {
        if self.sockets.is_empty() {
            return;
        }
        let mut known = sock_diag::tcp_sockets();
        let own = proc::own_netns();
        // A kernel that does not tell knows of no socket at all.
        let tells = !known.is_empty() && own.is_some();
        for seen in &mut self.sockets {
            let Some(inode) = seen.inode else { continue };
            seen.kernel = known.remove(&inode);
            match &seen.kernel {
                Some(kernel) => seen.believe(*kernel),
                None if tells && seen.netns == own && seen.life.is_connected() => {
                    seen.life = Life::Closed;
                }
                None => {}
            }
        }
    }

    /// The agent alone knows by which device a connection goes, and whether a handshake of its own is over.
    fn ask_agents(&mut self) {
        for seen in self.sockets.iter_mut().filter(|seen| seen.socket.mode == Mode::Smcd) {
            seen.device = Some(device_name(seen.socket.region));
        }
        let has_rdma = self.sockets.iter().any(|seen| seen.socket.mode == Mode::Smcr);
        let config = Config::load(&ConfigArgs::default()).map(|config| config.ism_dir());
        let agents = match config {
            Ok(dir) if has_rdma => agent::report(&dir),
            _ => Report::default(),
        };
        let by_ends: HashMap<_, _> =
            agents.conns.into_iter().map(|conn| ((conn.local, conn.peer), conn.device)).collect();
        for seen in &mut self.sockets {
            let Some(device) = by_ends.get(&(seen.socket.local, seen.socket.peer)) else {
                continue;
            };
            seen.device = device.as_deref().map(proc::harmless);
            if seen.socket.mode == Mode::Smcr && device.is_none() {
                (seen.socket.mode, seen.socket.reason) = (Mode::Tcp, Reason::Pending as u8);
                seen.is_ahead = true;
            }
        }
    }

    /// Bytes sent and received by every end of an SMC connection. Processes that share an end through fork each have a record of it;
    /// the highest count is the latest.
    pub fn join_ends(&mut self) {
        let mut ends: HashMap<End, [u64; 2]> = HashMap::new();
        for seen in self.sockets.iter().filter(|seen| seen.socket.mode == Mode::Smcd) {
            let s = &seen.socket;
            let [tx, rx] = ends.entry((seen.netns, s.local, s.peer)).or_default();
            (*tx, *rx) = ((*tx).max(s.tx_bytes), (*rx).max(s.rx_bytes));
        }
        for seen in &mut self.sockets {
            let s = &seen.socket;
            seen.other = ends.get(&(seen.netns, s.peer, s.local)).copied();
        }
    }
}

impl Seen {
    /// Takes over what the kernel knows better.
    fn believe(&mut self, kernel: Kernel) {
        self.count_tcp_span(&kernel);
        let s = &mut self.socket;
        let is_unknown = |addr: SocketAddr| addr.port() == 0 || addr.ip().is_unspecified();
        let life = Life::in_kernel(kernel.state);
        if life != Some(Life::Listen) && !is_unknown(kernel.local) && is_unknown(s.local) {
            s.local = kernel.local;
        }
        if kernel.peer.port() != 0 && is_unknown(s.peer) {
            s.peer = kernel.peer;
        }
        self.life = match (self.life, life) {
            // A socket that the program has bound, or that is no connection any more.
            (Life::Init | Life::Listen, Some(Life::Closed)) => self.life,
            (_, Some(life)) => life,
            (known, None) => known,
        };
    }
}

impl Seen {
    /// As long as a direction has not used its ring, all its bytes went over TCP, where a doorbell is a byte, too.
    fn count_tcp_span(&mut self, kernel: &Kernel) {
        let s = &mut self.socket;
        if s.mode == Mode::Tcp {
            return;
        }
        let [_, _, tx_calls, rx_calls, .., sent, drained] = s.counters;
        for (bytes, calls, by_tcp, bells) in [
            (&mut s.tx_bytes, tx_calls, kernel.tx_bytes, sent),
            (&mut s.rx_bytes, rx_calls, kernel.rx_bytes, drained),
        ] {
            if calls == 0 {
                *bytes = (*bytes).max(by_tcp.saturating_sub(bells));
            }
        }
    }
}

/// The end of a handshake is noticed by one end first, and its begin, too: until both have noticed it, neither shows more
/// than that it is under way.
fn settle_pending(sockets: &mut [Seen]) {
    let is_pending = |s: &Socket| s.mode == Mode::Tcp && s.reason == Reason::Pending as u8;
    let end = |seen: &Seen| (seen.netns, seen.socket.local, seen.socket.peer);
    let in_ring: HashSet<End> =
        sockets.iter().filter(|seen| seen.socket.mode == Mode::Smcd).map(end).collect();
    // Of an end that several processes hold one may not have noticed for long.
    let pending: HashSet<End> = sockets
        .iter()
        .filter(|seen| is_pending(&seen.socket) && !in_ring.contains(&end(seen)))
        .map(end)
        .collect();
    for seen in sockets {
        let has_begun = seen.socket.mode == Mode::Smcd
            || [Reason::Short, Reason::NoOffer].iter().any(|why| seen.socket.reason == *why as u8);
        if has_begun && pending.contains(&(seen.netns, seen.socket.peer, seen.socket.local)) {
            seen.is_ahead = seen.socket.mode == Mode::Smcd;
            seen.socket.mode = Mode::Tcp;
            seen.socket.reason = Reason::Pending as u8;
        }
    }
}

/// An address; `0.0.0.0:*` for one that is not known, as ss(8) writes it.
pub fn address(addr: SocketAddr) -> String {
    let text = addr.to_string();
    match text.strip_suffix('0') {
        Some(start) if addr.port() == 0 => format!("{start}*"),
        _ => text,
    }
}
