//! Looks in, rows with rates out.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use usmc::observe::{Mode, REASONS};
use usmc::reason::Reason;

use super::counts::{Counts, Rates, sum};
use crate::sockets::{Life, Look, Seen, address};

/// A process is the same at two looks if its number and its start are.
pub type Who = (u32, Option<u64>);

/// What tells an end of a connection from all others, at each look.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    /// Its process.
    pub who: Who,
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Place {
    /// Of its socket.
    Inode(u64),
    /// Where that is not known.
    Descriptor(u32, SocketAddr, SocketAddr),
}

/// An end of a connection.
#[derive(Clone, Debug)]
pub struct Conn {
    /// What tells it from others.
    pub key: Key,
    /// What the look found.
    pub seen: Seen,
    /// Since the look before; unknown for one that was not there then.
    pub rates: Rates,
}

impl Conn {
    /// Which part of its ring waits to be read, of the fuller direction. More than 1 is beyond the ring itself.
    pub fn fill(&self) -> Option<f64> {
        if self.seen.socket.mode == Mode::Tcp {
            return None;
        }
        let ring = self.seen.socket.ring_size.unwrap_or(self.seen.socket.window).max(1);
        let most = self.seen.queued().into_iter().flatten().max()?;
        Some(most as f64 / f64::from(ring))
    }
}

/// Numbers by what moves the bytes: SMC-D, SMC-R, TCP.
pub type ByMode<T> = [T; 3];

/// The place in [`ByMode`].
pub fn place(mode: Mode) -> usize {
    match mode {
        Mode::Smcd => 0,
        Mode::Smcr => 1,
        Mode::Tcp => 2,
    }
}

/// A process under uSMC.
#[derive(Clone, Debug)]
pub struct Program {
    /// What tells it from others.
    pub who: Who,
    /// Its name, harmless to print.
    pub comm: String,
    /// Open connections.
    pub conns: ByMode<usize>,
    /// Listeners.
    pub listeners: usize,
    /// Since the look before, connections included that are closed; of those on TCP only the open ones.
    pub rates: Rates,
    /// Bytes a second in both directions.
    pub bytes: ByMode<Option<f64>>,
    /// Why open connections are on TCP, the most frequent reason first.
    pub reasons: Vec<(String, usize)>,
    /// Connections that were in a ring, since it began.
    pub smc_since_start: u64,
    /// Those that were not, by reason, the most frequent first.
    pub tcp_since_start: Vec<(String, u64)>,
}

impl Program {
    /// The part of its bytes that went through shared memory or by RDMA.
    pub fn share(&self) -> Option<f64> {
        share(self.bytes.map(|bytes| bytes.unwrap_or(0.0)))
    }
}

/// The part of what is not TCP; unknown of nothing.
pub fn share([smcd, smcr, tcp]: ByMode<f64>) -> Option<f64> {
    let all = smcd + smcr + tcp;
    (all > 0.0).then(|| (smcd + smcr) / all)
}

/// All of it.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Summary {
    /// Processes.
    pub programs: usize,
    /// Listeners.
    pub listeners: usize,
    /// Ends of connections.
    pub connections: ByMode<usize>,
    /// Bytes a second, sent and received.
    pub bytes: ByMode<Option<f64>>,
    /// Of all programs.
    pub rates: Rates,
    /// Why connections are on TCP, the most frequent reason first.
    pub reasons: Vec<(String, usize)>,
    /// Processes that may not be inspected.
    pub hidden: usize,
    /// Of these, those under uSMC.
    pub hidden_under: usize,
    /// What was odd.
    pub remarks: Vec<String>,
}

/// What the last look found, and what it needs of the one before.
#[derive(Default, Debug)]
pub struct Model {
    /// Ends of connections, in no order.
    pub conns: Vec<Conn>,
    /// Processes, in the order of their numbers.
    pub programs: Vec<Program>,
    /// All of it.
    pub summary: Summary,
    /// Looks so far.
    pub looks: u64,
    before: Before,
}

#[derive(Default, Debug)]
struct Before {
    at: Duration,
    conns: HashMap<Key, Counts>,
    closed: HashMap<Who, Counts>,
}

impl Model {
    /// Takes a look that was taken at `at`, which is counted from any moment on.
    pub fn take(&mut self, look: Look, at: Duration) {
        let seconds = at.saturating_sub(self.before.at).as_secs_f64();
        let before = std::mem::take(&mut self.before);
        let now = Before { at, ..Before::default() };
        (self.before, self.conns) = (now, Vec::with_capacity(look.sockets.len()));
        self.programs = look.programs.iter().map(program).collect();
        let mut grown = vec![Counts { is_in_ring: true, ..Counts::default() }; self.programs.len()];
        for seen in look.sockets {
            let at = seen.program;
            let program = &mut self.programs[at];
            program.note(&seen);
            if !seen.life.is_connected() {
                continue;
            }
            let key = key(program.who, &seen);
            let counts = Counts::of(&seen);
            let since = before.conns.get(&key).map(|then| counts.since(then));
            let rates = since.map(|since| since.rates(seconds)).unwrap_or_default();
            if before.closed.contains_key(&program.who) {
                // All that one has done that was not there before, was done since then.
                let since = since.unwrap_or(counts);
                grown[at].add(&since);
                let bytes = since.rates(seconds).all_bytes();
                let place = &mut program.bytes[place(seen.socket.mode)];
                *place = sum([*place, bytes]);
            }
            self.before.conns.insert(key, counts);
            self.conns.push(Conn { key, seen, rates });
        }
        let ended = self.ended(&before);
        for (at, source) in look.programs.iter().enumerate() {
            let who = self.programs[at].who;
            let closed = Counts::closed(&source.totals);
            if let Some(then) = before.closed.get(&who) {
                let mut more = closed.since(then);
                more.subtract(ended.get(&who).unwrap_or(&Counts::default()));
                grown[at].add(&more);
                let program = &mut self.programs[at];
                program.rates = grown[at].rates(seconds);
                let bytes = more.rates(seconds).all_bytes();
                program.bytes[0] = sum([program.bytes[0], bytes]);
            }
            self.before.closed.insert(who, closed);
        }
        self.sum_up(look.hidden, look.hidden_under, look.remarks);
        self.looks += 1;
    }

    /// What was known of connections in a ring that are not there any more: it is part of what is counted as closed.
    fn ended(&self, before: &Before) -> HashMap<Who, Counts> {
        let open: HashSet<&Key> = self.before.conns.keys().collect();
        let mut ended: HashMap<Who, Counts> = HashMap::new();
        for (key, counts) in before.conns.iter().filter(|(key, _)| !open.contains(key)) {
            if counts.is_in_ring {
                ended.entry(key.who).or_default().add(counts);
            }
        }
        ended
    }

    fn sum_up(&mut self, hidden: usize, hidden_under: usize, remarks: Vec<String>) {
        let mut all = Summary {
            programs: self.programs.len(),
            hidden,
            hidden_under,
            remarks,
            ..Summary::default()
        };
        let mut reasons: HashMap<&str, usize> = HashMap::new();
        for program in &self.programs {
            all.listeners += program.listeners;
            all.rates.add(&program.rates);
            for i in 0..all.bytes.len() {
                all.connections[i] += program.conns[i];
                all.bytes[i] = sum([all.bytes[i], program.bytes[i]]);
            }
            for (reason, n) in &program.reasons {
                *reasons.entry(reason).or_default() += n;
            }
        }
        if all.bytes.iter().any(Option::is_some) {
            all.bytes = all.bytes.map(|bytes| bytes.or(Some(0.0)));
        }
        all.reasons = most_first(reasons.into_iter().map(|(reason, n)| (reason.to_owned(), n)));
        self.summary = all;
    }

    /// The program of a connection.
    pub fn program_of(&self, conn: &Conn) -> &Program {
        &self.programs[conn.seen.program]
    }
}

/// Which end it is.
fn key(who: Who, seen: &Seen) -> Key {
    let s = &seen.socket;
    let place = match seen.inode {
        Some(inode) => Place::Inode(inode),
        None => Place::Descriptor(s.fd, s.local, s.peer),
    };
    Key { who, place }
}

fn most_first<N: Ord + Copy>(reasons: impl Iterator<Item = (String, N)>) -> Vec<(String, N)> {
    let mut all: Vec<_> = reasons.collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    all
}

/// A process without its sockets.
fn program(source: &crate::sockets::Program) -> Program {
    let mut smc = 0u64;
    let mut tcp: HashMap<String, u64> = HashMap::new();
    for totals in &source.totals {
        for role in 0..totals.smcd.len() {
            smc = smc.saturating_add(totals.smcd[role]);
            for (code, n) in totals.fallback[role].iter().enumerate().filter(|(_, n)| **n > 0) {
                let sum = tcp.entry(reason_name(code)).or_default();
                *sum = sum.saturating_add(*n);
            }
        }
    }
    Program {
        who: (source.pid, source.start),
        comm: source.comm.clone(),
        conns: [0; 3],
        listeners: 0,
        rates: Rates::default(),
        bytes: [None; 3],
        reasons: Vec::new(),
        smc_since_start: smc,
        tcp_since_start: most_first(tcp.into_iter()),
    }
}

fn reason_name(code: usize) -> String {
    debug_assert!(code < REASONS);
    match Reason::from_code(code as u8) {
        Some(Reason::None) => "not decided yet".to_owned(),
        Some(reason) => reason.text().to_owned(),
        None => format!("reason {code}"),
    }
}

impl Program {
    /// One more socket.
    fn note(&mut self, seen: &Seen) {
        if seen.life == Life::Listen {
            self.listeners += 1;
        }
        if !seen.life.is_connected() {
            return;
        }
        self.conns[place(seen.socket.mode)] += 1;
        if seen.socket.was_smcd || seen.socket.mode != Mode::Tcp {
            self.smc_since_start = self.smc_since_start.saturating_add(1);
        }
        let Some(reason) = seen.fallback_reason() else { return };
        if !seen.socket.was_smcd {
            add_one(&mut self.tcp_since_start, &reason);
        }
        add_one(&mut self.reasons, &reason);
    }
}

/// Counts a reason, and keeps the most frequent first.
fn add_one<N: Ord + Copy + std::ops::AddAssign + From<u8>>(
    all: &mut Vec<(String, N)>,
    reason: &str,
) {
    let known = all.iter().position(|(known, _)| known == reason);
    let mut at = known.unwrap_or_else(|| {
        all.push((reason.to_owned(), N::from(0)));
        all.len() - 1
    });
    all[at].1 += N::from(1);
    while at > 0 && all[at - 1].1 < all[at].1 {
        all.swap(at - 1, at);
        at -= 1;
    }
}

/// The addresses of both ends, as one text.
pub fn ends(conn: &Conn) -> String {
    let s = &conn.seen.socket;
    let arrow = if s.is_client { "->" } else { "<-" };
    format!("{} {arrow} {}", address(s.local), address(s.peer))
}
