//! What the library itself says of a run's connections, as `usmc ss` shows it. A figure counts only if its bytes went
//! where its column says.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use usmc::observe::{AGENT_ID, Mode as Carrier, State};
use usmc::reason::Reason;

use super::mode::{Mode, Way};
use crate::observed::{self, Socket};
use crate::proc;

/// What was seen.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct Proof {
    /// In words.
    pub how: String,
    /// Ends of connections in shared memory.
    pub smcd_ends: usize,
    /// All ends that the library knows of.
    pub ends: usize,
    /// Of those in shared memory, the ends that have theirs in a region, which other machines have, too.
    #[serde(default)]
    pub region_ends: usize,
    /// Of those in shared memory, the ends that share theirs with an agent, and so are by RDMA.
    #[serde(default)]
    pub smcr_ends: usize,
    /// Bytes that the ring carried during the run, as the library counts them, where they were counted.
    pub ring_bytes: Option<u64>,
    /// Bytes that the client says it exchanged.
    pub moved_bytes: Option<u64>,
}

/// One look at the connections of a run.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Look {
    /// Ends in shared memory.
    pub smcd: usize,
    /// Ends that stay TCP because they had too little use so far.
    pub ready: usize,
    /// All of them.
    pub ends: usize,
    /// Ends in a region's memory.
    pub in_region: usize,
    /// Ends in an agent's. It is left out where there is none, as earlier versions do not know it.
    #[serde(default, skip_serializing_if = "is_none")]
    pub smcr: usize,
    /// Bytes that ends in shared memory have sent and received, both ends of each counted.
    pub bytes: u64,
    /// Their sleeps, and the doorbells that they sent and took.
    pub wakes: u64,
    /// Whether the library is in any of the processes.
    pub library: bool,
    reasons: BTreeSet<String>,
}

fn is_none(ends: &usize) -> bool {
    *ends == 0
}

impl Look {
    /// At these processes, and the connections that have to do with this port; 0: with any.
    pub fn at(pids: &[u32], port: u16) -> Look {
        let files = pids.iter().flat_map(|pid| proc::record_files(*pid));
        let mut look = Look::default();
        let mut known: BTreeMap<_, Socket> = BTreeMap::new();
        for file in files {
            look.library = true;
            for socket in observed::read(&file).map(|reading| reading.sockets).unwrap_or_default() {
                let ports = [socket.local.port(), socket.peer.port()];
                if matches!(socket.state, State::Init | State::Listen)
                    || (port != 0 && !ports.contains(&port))
                {
                    continue;
                }
                // Processes that share an end by fork have a record each; the highest count is the latest.
                let name = (socket.local, socket.peer);
                let bytes = socket.tx_bytes + socket.rx_bytes;
                let old = known.get(&name);
                if old.is_none_or(|old| {
                    let rank = |s: &Socket, bytes| (s.mode == Carrier::Smcd, bytes);
                    rank(&socket, bytes) >= rank(old, old.tx_bytes + old.rx_bytes)
                }) {
                    known.insert(name, socket);
                }
            }
        }
        for socket in known.values() {
            look.ends += 1;
            match (socket.mode, Reason::from_code(socket.reason)) {
                (Carrier::Smcd | Carrier::Smcr, _) => {
                    look.smcd += 1;
                    look.smcr += usize::from(socket.mode == Carrier::Smcr);
                    look.in_region += usize::from(socket.region.is_some_and(|id| id != AGENT_ID));
                    look.bytes += socket.tx_bytes + socket.rx_bytes;
                    let [.., sleeps, _, sent, drained] = socket.counters;
                    look.wakes += sleeps + sent + drained;
                }
                (Carrier::Tcp, Some(Reason::Short)) => look.ready += 1,
                (Carrier::Tcp, reason) => {
                    look.reasons.extend(reason.map(|reason| reason.text().to_owned()));
                }
            }
        }
        look
    }

    /// Which of two looks shows more.
    pub fn rank(&self) -> (usize, usize, usize) {
        (self.smcd, self.ready, self.ends)
    }
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.library {
            return f.write_str("the library is in none of the processes");
        }
        let place = match self.smcr {
            0 => "in shared memory",
            all if all == self.smcd => "by RDMA",
            _ => "in shared memory or by RDMA",
        };
        write!(f, "{} of {} ends were {place}", self.smcd, self.ends)?;
        if self.ready > 0 {
            write!(f, ", {} were about to, had they lasted", self.ready)?;
        }
        if !self.reasons.is_empty() {
            let reasons: Vec<&str> = self.reasons.iter().map(String::as_str).collect();
            write!(f, " ({})", reasons.join(", "))?;
        }
        Ok(())
    }
}

/// What was seen of a run: both ends by one look, or each by one of its own.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Seen {
    /// In this machine.
    pub here: Look,
    /// In the other one, if the server is there.
    pub there: Option<Look>,
}

impl Seen {
    fn looks(&self) -> impl Iterator<Item = &Look> {
        std::iter::once(&self.here).chain(&self.there)
    }

    fn sum(&self, of: impl Fn(&Look) -> usize) -> usize {
        self.looks().map(of).sum()
    }

    /// As [`Look::bytes`].
    pub fn bytes(&self) -> u64 {
        self.looks().map(|look| look.bytes).sum()
    }

    /// As [`Look::wakes`].
    pub fn wakes(&self) -> u64 {
        self.looks().map(|look| look.wakes).sum()
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.there {
            None => self.here.fmt(f),
            Some(there) => write!(f, "here {}; in the other machine {there}", self.here),
        }
    }
}

/// Bytes that show that a connection in shared memory carries the load, and not its control alone.
const ENOUGH: u64 = 4096;

/// What has to be seen under uSMC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// Both ends of so many connections in shared memory.
    All(usize),
    /// At least one connection in shared memory, and not unused.
    Some,
    /// One in shared memory, or short ones that were ready to leave.
    Ready,
}

impl Wanted {
    /// Whether a look shows it that sees so many ends of each connection.
    pub fn is_shown_by(self, look: &Look, ends: usize) -> bool {
        match self {
            Wanted::All(connections) => look.smcd >= ends * connections,
            Wanted::Some => look.smcd > 0 && look.bytes >= ENOUGH,
            Wanted::Ready => look.smcd > 0 || look.ready > 0,
        }
    }
}

/// Whether a run was what its mode says, at both ends, and went the way that it has to go.
///
/// # Errors
/// If not: what was seen instead.
pub fn judge(mode: Mode, way: Way, seen: &Seen, wanted: Wanted) -> Result<Proof> {
    if mode != Mode::Usmc {
        if seen.looks().any(|look| look.library) {
            bail!(
                "the run over {mode} had the library in it: {seen}; is it in /etc/ld.so.preload?"
            );
        }
        let how = match mode {
            Mode::Unix => "UNIX sockets; the library was in none of the processes",
            _ => "the library was in none of the processes",
        };
        return Ok(Proof { how: how.to_owned(), ..Proof::default() });
    }
    let is_elsewhere = |look: &Look| look.smcr < look.smcd || look.smcr == 0;
    if way == Way::Rdma && seen.looks().any(is_elsewhere) {
        bail!(
            "the run was not by RDMA: {seen}. `usmc check HOST:PORT` says what a connection to the other machine is by, and why; \
             /etc/usmc.toml and ~/.config/usmc.toml count, too"
        );
    }
    let ends = if seen.there.is_some() { 1 } else { 2 };
    if !seen.looks().all(|look| wanted.is_shown_by(look, ends)) {
        bail!(
            "the run was not over shared memory: {seen}. `usmc check` says whether uSMC works here; rules in \
             /etc/usmc.toml and ~/.config/usmc.toml count, too"
        );
    }
    Ok(Proof {
        how: seen.to_string(),
        smcd_ends: seen.sum(|look| look.smcd),
        ends: seen.sum(|look| look.ends),
        region_ends: seen.sum(|look| look.in_region),
        smcr_ends: seen.sum(|look| look.smcr),
        ..Proof::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_what_it_claims_or_an_error() {
        let seen = |smcd, ready, ends| {
            let bytes = smcd as u64 * 10_000;
            Look { smcd, ready, ends, bytes, library: true, ..Look::default() }
        };
        let nothing = Look::default();
        for (mode, look, wanted, fits) in [
            (Mode::Tcp, &nothing, Wanted::All(1), true),
            (Mode::Unix, &nothing, Wanted::All(1), true),
            (Mode::Tcp, &seen(0, 0, 0), Wanted::All(1), false),
            (Mode::Tcp, &seen(2, 0, 2), Wanted::All(1), false),
            (Mode::Usmc, &nothing, Wanted::Some, false),
            (Mode::Usmc, &nothing, Wanted::Ready, false),
            (Mode::Usmc, &seen(2, 0, 2), Wanted::All(1), true),
            (Mode::Usmc, &seen(1, 0, 2), Wanted::All(1), false),
            (Mode::Usmc, &seen(19, 0, 20), Wanted::All(10), false),
            (Mode::Usmc, &seen(1, 0, 200), Wanted::Some, true),
            (Mode::Usmc, &Look { bytes: 9, ..seen(1, 0, 200) }, Wanted::Some, false),
            (Mode::Usmc, &seen(0, 7, 20), Wanted::Some, false),
            (Mode::Usmc, &seen(0, 7, 20), Wanted::Ready, true),
        ] {
            let seen = Seen { here: look.clone(), there: None };
            let judged = judge(mode, Way::Any, &seen, wanted);
            assert_eq!(judged.is_ok(), fits, "{mode} {look:?} {wanted:?}: {judged:?}");
        }
    }

    #[test]
    fn two_machines_have_to_show_it_both() {
        let seen = |smcd| {
            let bytes = smcd as u64 * 10_000;
            Look { smcd, ends: 50, bytes, in_region: smcd, library: true, ..Look::default() }
        };
        let nothing = Look::default();
        for (mode, here, there, wanted, fits) in [
            (Mode::Tcp, &nothing, &nothing, Wanted::All(1), true),
            (Mode::Tcp, &nothing, &seen(0), Wanted::All(1), false),
            (Mode::Usmc, &seen(1), &seen(1), Wanted::All(1), true),
            (Mode::Usmc, &seen(2), &nothing, Wanted::All(1), false),
            (Mode::Usmc, &seen(50), &seen(49), Wanted::All(50), false),
            (Mode::Usmc, &seen(50), &seen(50), Wanted::All(50), true),
            (Mode::Usmc, &seen(2), &seen(0), Wanted::Some, false),
        ] {
            let both = Seen { here: here.clone(), there: Some(there.clone()) };
            let judged = judge(mode, Way::Any, &both, wanted);
            assert_eq!(judged.is_ok(), fits, "{mode} {both:?} {wanted:?}: {judged:?}");
            if let (Mode::Usmc, Ok(proof)) = (mode, judged) {
                let both = here.smcd + there.smcd;
                assert_eq!((proof.smcd_ends, proof.region_ends), (both, both));
            }
        }
    }

    #[test]
    fn what_has_to_be_by_rdma_is_so_at_both_ends() {
        let seen = |smcd, smcr| Look {
            smcd,
            smcr,
            ends: 3,
            bytes: 10_000,
            library: true,
            ..Look::default()
        };
        for (here, there, fits) in [
            ([2, 2], [2, 2], true),
            ([2, 2], [2, 1], false),
            ([2, 0], [2, 0], false),
            ([2, 2], [0, 0], false),
            ([0, 0], [0, 0], false),
        ] {
            let [here, there] = [here, there].map(|[smcd, smcr]| seen(smcd, smcr));
            let both = Seen { here, there: Some(there) };
            for wanted in [Wanted::All(2), Wanted::Some] {
                let judged = judge(Mode::Usmc, Way::Rdma, &both, wanted);
                assert_eq!(judged.is_ok(), fits, "{both:?}: {judged:?}");
                if let Ok(proof) = judged {
                    assert_eq!((proof.smcd_ends, proof.smcr_ends), (4, 4));
                    assert!(proof.how.contains("2 of 3 ends were by RDMA"), "{}", proof.how);
                }
            }
        }
        let tcp = judge(Mode::Tcp, Way::Rdma, &Seen::default(), Wanted::All(2));
        assert_eq!(tcp.expect("no library").smcr_ends, 0);
    }

    #[test]
    fn a_look_without_rdma_is_one_for_earlier_versions() {
        let said = |look: &Look| serde_json::to_string(look).expect("JSON");
        let plain = Look { smcd: 2, library: true, ..Look::default() };
        assert!(!said(&plain).contains("smcr"));
        let by_rdma = Look { smcr: 2, ..plain.clone() };
        for look in [plain, by_rdma] {
            assert_eq!(serde_json::from_str::<Look>(&said(&look)).expect("a look"), look);
        }
    }
}
