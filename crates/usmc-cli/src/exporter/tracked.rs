//! The processes under uSMC, each with its record file held open: the file outlives its process, so that nothing is lost of what it
//! said last.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};
use rustix::io::Errno;
use usmc::observe::Mode;

use super::counts::{Counts, Wraps};
use super::exits::Exits;
use super::ledger::{Ledger, NONE, Names, Owner};
use super::sampled::Sampled;
use super::state::Live;
use crate::observed::{self, Reading, Refusal};
use crate::proc::{self, Process};
use crate::sock_diag::Kernel;
use crate::sockets::is_connected;

/// What tells a record file from others, as long as it is open.
pub type Identity = (u64, u64);

/// A process.
#[derive(Debug)]
pub struct Tracked {
    /// Its number.
    pub pid: u32,
    start: u64,
    file: File,
    /// Whose counts its are.
    pub owner: Owner,
    /// The highest that was seen, with what is in `extra` by then.
    counts: Counts,
    /// What the file does not say: what counters that began anew had counted, and bytes of TCP. A file has no bytes of that device.
    extra: Counts,
    wraps: Wraps,
    /// An earlier exporter has counted it, and this one has not looked at it so far.
    is_restored: bool,
    is_refused: bool,
    /// Has its end told as long as it is open.
    _exit: Option<OwnedFd>,
}

impl Tracked {
    fn look(&mut self, names: &mut Names, has_ended: bool) -> Option<Reading> {
        let reading = match observed::read(&self.file) {
            Ok(reading) => reading,
            Err(refusal) => {
                self.is_refused = refusal != Refusal::Unfinished;
                return None;
            }
        };
        self.take(&reading, names, has_ended).then_some(reading)
    }

    /// Takes what the file says; false where that makes no sense.
    fn take(&mut self, reading: &Reading, names: &mut Names, has_ended: bool) -> bool {
        let counts = Counts::of(reading, has_ended);
        self.is_refused = !counts.is_plausible();
        if self.is_refused {
            return false;
        }
        // A counter that has begun anew is completed before it is compared with what it was.
        self.extra.add(&self.wraps.look(&reading.sockets));
        let mut counts = names.tell_apart(&counts);
        counts.add(&self.extra);
        self.counts.raise_to(&counts);
        true
    }

    /// What is known of it, with bytes of TCP that were seen since the last look.
    fn sum(&self) -> Counts {
        let mut sum = self.counts.clone();
        sum.raise_to(&self.extra);
        sum
    }
}

/// A process as it was just seen: its facts, and what its file says.
#[derive(Debug)]
pub struct Seen {
    /// Its facts, without the files.
    pub process: Process,
    /// Whose its counts are.
    pub owner: Owner,
    /// What its files say.
    pub readings: Vec<Reading>,
}

/// All processes and all sums.
#[derive(Debug)]
pub struct Tracker {
    exits: Exits,
    tracked: BTreeMap<Identity, Tracked>,
    tokens: HashMap<u64, Identity>,
    next_token: u64,
    /// Files whose counts are among the sums already, though somebody may still have them.
    folded: BTreeSet<Identity>,
    names: Names,
    ledger: Ledger,
    /// What an earlier exporter knew of, and this one has not met yet.
    restored: Vec<Live>,
    sampled: Sampled,
    most: usize,
    /// Processes that no descriptor was left for.
    pub untracked: usize,
    /// Processes that may not be looked at.
    pub hidden: usize,
}

impl Tracker {
    /// With what was kept, for so many files at one time.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(
        mut names: Names,
        ended: Vec<(Owner, Counts)>,
        restored: Vec<Live>,
        most: usize,
    ) -> Result<Tracker> {
        let mut ledger = Ledger::default();
        for (owner, counts) in ended {
            names.know(&owner, &counts);
            ledger.restore(owner, &counts);
        }
        restored.iter().for_each(|live| names.know(&live.owner, &live.counts));
        Ok(Tracker {
            exits: Exits::new().context("cannot watch processes; raise the limit of open files")?,
            tracked: BTreeMap::new(),
            tokens: HashMap::new(),
            next_token: 0,
            folded: BTreeSet::new(),
            names,
            ledger,
            restored,
            sampled: Sampled::default(),
            most,
            untracked: 0,
            hidden: 0,
        })
    }

    /// Readable while a process has ended whose counts are not among the sums so far.
    pub fn exits(&self) -> &Exits {
        &self.exits
    }

    /// How many processes are tracked.
    pub fn len(&self) -> usize {
        self.tracked.len()
    }

    /// Those whose files make no sense.
    pub fn refused(&self) -> usize {
        self.tracked.values().filter(|tracked| tracked.is_refused).count()
    }

    /// The sums of all processes, whether they have ended or not.
    pub fn sums(&self) -> Ledger {
        let live: Vec<_> = self.tracked.values().map(|t| (&t.owner, t.sum())).collect();
        self.ledger.with(live.iter().map(|(owner, counts)| (*owner, counts)))
    }

    /// What is to be kept.
    pub fn kept(&self) -> (Vec<(Owner, Counts)>, Vec<Live>) {
        let ended = self.ledger.iter().map(|(owner, counts)| (owner.clone(), counts.clone()));
        let live = self.tracked.iter().map(|(identity, tracked)| Live {
            pid: tracked.pid,
            start: tracked.start,
            file: *identity,
            owner: tracked.owner.clone(),
            counts: tracked.counts.clone(),
            extra: tracked.extra.clone(),
        });
        // Those that are not met yet are not forgotten.
        (ended.collect(), live.chain(self.restored.iter().cloned()).collect())
    }

    /// Adds the counts of processes that have ended to the sums.
    pub fn fold_ended(&mut self) {
        for token in self.exits.ended() {
            if let Some(identity) = self.tokens.get(&token).copied() {
                self.fold(identity);
            }
        }
    }

    /// The process is gone, or runs another program by now.
    fn fold(&mut self, identity: Identity) {
        let Some(mut tracked) = self.tracked.remove(&identity) else { return };
        self.tokens.retain(|_, of| *of != identity);
        tracked.look(&mut self.names, true);
        self.ledger.fold(tracked.owner.clone(), &tracked.sum());
        self.folded.insert(identity);
    }

    /// Takes a process' files, if they are not held already; says which they are.
    pub fn admit(&mut self, process: &mut Process) -> Vec<Identity> {
        let files = std::mem::take(&mut process.files);
        let admitted = files.into_iter().filter_map(|file| {
            let identity = identity_of(&file)?;
            if self.folded.contains(&identity) {
                return None;
            }
            if !self.tracked.contains_key(&identity) {
                if self.tracked.len() >= self.most {
                    self.untracked += 1;
                    return None;
                }
                self.begin(process, file, identity);
            }
            Some(identity)
        });
        admitted.collect()
    }

    fn begin(&mut self, process: &Process, file: File, identity: Identity) {
        let token = self.next_token;
        self.next_token += 1;
        // The number may be another process' by the time that its start is read: it then has no such file, as the next look finds.
        let exit = self.exits.watch(process.pid, token);
        let start = proc::start_of(process.pid).unwrap_or(0);
        let is_it = |live: &Live| {
            (live.pid, live.start, live.file) == (process.pid, start, identity) && start != 0
        };
        let before = self.restored.iter().position(is_it).map(|at| self.restored.swap_remove(at));
        let dir = process.device.as_ref().map(|(dir, _)| dir.display().to_string());
        let owner = match &before {
            Some(before) => before.owner.clone(),
            None => self.names.owner(dir.as_deref().unwrap_or(NONE), &process.comm),
        };
        let is_restored = before.is_some();
        let (counts, extra) = before.map(|live| (live.counts, live.extra)).unwrap_or_default();
        let has_ended = matches!(exit, Err(Errno::SRCH));
        let tracked = Tracked {
            pid: process.pid,
            start,
            file,
            owner,
            counts,
            extra,
            wraps: Wraps::default(),
            is_restored,
            is_refused: false,
            _exit: exit.ok(),
        };
        self.tokens.insert(token, identity);
        self.tracked.insert(identity, tracked);
        if has_ended {
            self.fold(identity);
        }
    }

    /// Looks at all processes.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn look(&mut self, tcp: impl FnOnce() -> HashMap<u64, Kernel>) -> Result<Vec<Seen>> {
        let scan = proc::scan()?;
        self.hidden = scan.hidden;
        self.untracked = 0;
        let (mut found, mut present) = (BTreeSet::new(), BTreeSet::new());
        let mut all = Vec::new();
        for mut process in scan.processes {
            present.extend(process.files.iter().filter_map(identity_of));
            let identities = self.admit(&mut process);
            found.extend(identities.iter().copied());
            all.push((process, identities));
        }
        self.folded.retain(|identity| present.contains(identity));
        self.fold_missing(&found);
        // What has not been met by now has ended while nobody looked.
        for live in std::mem::take(&mut self.restored) {
            let mut sum = live.counts;
            sum.raise_to(&live.extra);
            self.ledger.fold(live.owner, &sum);
            // One of an earlier boot's has no number: its file's may be another one's by now.
            if live.pid != 0 {
                self.folded.insert(live.file);
            }
        }
        let mut seen: Vec<Seen> = Vec::new();
        for (process, identities) in all {
            let mut readings = Vec::new();
            let mut owner = None;
            for identity in identities {
                let Some(tracked) = self.tracked.get_mut(&identity) else { continue };
                owner = Some(tracked.owner.clone());
                readings.extend(tracked.look(&mut self.names, false));
            }
            seen.extend(owner.map(|owner| Seen { process, owner, readings }));
        }
        self.sample(&seen, tcp);
        Ok(seen)
    }

    /// Files that nobody was seen to have: their processes have ended, or run another program.
    fn fold_missing(&mut self, found: &BTreeSet<Identity>) {
        let missing: Vec<(Identity, u32)> = self
            .tracked
            .iter()
            .filter(|(identity, _)| !found.contains(*identity))
            .map(|(identity, tracked)| (*identity, tracked.pid))
            .collect();
        for (identity, pid) in missing {
            // One that may not be looked at any more, because it has changed its user, still counts. So does one for which no descriptor is left.
            if matches!(proc::facts(pid), Ok(_) | Err(Errno::NOENT | Errno::SRCH)) {
                self.fold(identity);
            }
        }
    }

    /// Counts bytes of TCP.
    fn sample(&mut self, seen: &[Seen], tcp: impl FnOnce() -> HashMap<u64, Kernel>) {
        let open: Vec<(u32, u64, Mode)> = seen.iter().flat_map(connections).collect();
        let is_on_tcp = |(_, _, mode): &(u32, u64, Mode)| *mode == Mode::Tcp;
        let (sockets, others): (Vec<_>, Vec<_>) = open.into_iter().partition(is_on_tcp);
        others.into_iter().for_each(|(_, inode, _)| self.sampled.keep(inode));
        let kernel = if sockets.is_empty() { HashMap::new() } else { tcp() };
        let mut of_pid: HashMap<u32, Identity> = HashMap::new();
        for (identity, tracked) in &self.tracked {
            of_pid.entry(tracked.pid).or_insert(*identity);
        }
        for (pid, inode, _) in sockets {
            let tracked = of_pid.get(&pid).and_then(|identity| self.tracked.get_mut(identity));
            if let (Some(tracked), Some(kernel)) = (tracked, kernel.get(&inode)) {
                tracked.extra.add(&self.sampled.look(inode, kernel, tracked.is_restored));
            }
        }
        self.sampled.end_look();
        self.tracked.values_mut().for_each(|tracked| tracked.is_restored = false);
    }
}

/// The inodes of a process' connections, and what moves their bytes.
fn connections(seen: &Seen) -> impl Iterator<Item = (u32, u64, Mode)> + '_ {
    let sockets = seen.readings.iter().flat_map(|reading| &reading.sockets);
    let sockets = sockets.filter(|s| is_connected(s.state));
    sockets.filter_map(|s| Some((seen.process.pid, *seen.process.sockets.get(&s.fd)?, s.mode)))
}

fn identity_of(file: &File) -> Option<Identity> {
    file.metadata().ok().map(|facts| (facts.dev(), facts.ino()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::mem::offset_of;
    use std::os::unix::fs::FileExt;
    use std::process::{Child, Command, Stdio};

    use rustix::fs::{MemfdFlags, memfd_create};
    use usmc::observe::{Header, MAGIC, MEMFD_NAME, RECORDS_OFFSET, Record, TOTALS_OFFSET, Totals};

    use super::super::counts::{Counter, Device};
    use super::*;

    fn record_file() -> File {
        let file = File::from(memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(RECORDS_OFFSET as u64).expect("its size");
        let put = |at: usize, bytes: &[u8]| file.write_all_at(bytes, at as u64).expect("bytes");
        put(offset_of!(Header, version), &usmc::observe::VERSION.to_ne_bytes());
        put(offset_of!(Header, record_size), &(size_of::<Record>() as u32).to_ne_bytes());
        put(offset_of!(Header, magic), &MAGIC.to_ne_bytes());
        file
    }

    fn send(file: &File, bytes: u64) {
        let at = TOTALS_OFFSET + offset_of!(Totals, closed);
        file.write_all_at(&bytes.to_ne_bytes(), at as u64).expect("a word");
    }

    fn child() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat")
    }

    fn process(child: &Child, file: &File) -> Process {
        Process {
            pid: child.id(),
            comm: "cat".to_owned(),
            netns: None,
            files: vec![file.try_clone().expect("a descriptor")],
            sockets: HashMap::new(),
            device: None,
            segments: Vec::new(),
        }
    }

    fn tracker(ended: Vec<(Owner, Counts)>, live: Vec<Live>) -> Tracker {
        Tracker::new(Names::new(100), ended, live, 100).expect("a tracker")
    }

    fn sent(tracker: &Tracker) -> u64 {
        let of_it = |counts: &Counts| {
            let all = counts.iter();
            let all = all.filter(|(key, _)| key.counter == Counter::TransmitBytes);
            all.map(|(_, n)| n).sum::<u64>()
        };
        let sums = tracker.sums();
        sums.iter().filter(|(owner, _)| owner.program == "cat").map(|(_, c)| of_it(c)).sum()
    }

    fn end(mut child: Child) {
        let _ = child.stdin.take().map(|mut stdin| stdin.flush());
        child.wait().expect("its end");
    }

    #[test]
    fn what_a_process_said_last_is_kept() {
        let (file, child) = (record_file(), child());
        send(&file, 5);
        let mut tracker = tracker(Vec::new(), Vec::new());
        let [identity] = tracker.admit(&mut process(&child, &file))[..] else { panic!("one file") };
        send(&file, 9);
        end(child);
        tracker.fold_ended();
        assert_eq!((tracker.len(), sent(&tracker)), (0, 9));
        // Somebody has it still.
        let other = super::tests::child();
        assert_eq!(tracker.admit(&mut process(&other, &file)), []);
        assert_eq!(sent(&tracker), 9);
        assert!(tracker.folded.contains(&identity));
        end(other);
    }

    /// As this test does, which is none of the processes.
    #[test]
    fn a_file_that_somebody_keeps_counts_once() {
        let (file, child) = (record_file(), child());
        send(&file, 5);
        let mut tracker = tracker(Vec::new(), Vec::new());
        let [identity] = tracker.admit(&mut process(&child, &file))[..] else { panic!("one file") };
        end(child);
        tracker.fold_ended();
        for _ in 0..3 {
            tracker.look(HashMap::new).expect("/proc");
            assert_eq!((sent(&tracker), tracker.folded.contains(&identity)), (5, true));
        }
        drop(file);
        tracker.look(HashMap::new).expect("/proc");
        assert!(!tracker.folded.contains(&identity));
    }

    #[test]
    fn what_an_earlier_boot_knew_is_nobodys_file() {
        let (file, child) = (record_file(), child());
        send(&file, 5);
        let mut first = tracker(Vec::new(), Vec::new());
        first.admit(&mut process(&child, &file));
        let (ended, mut live) = first.kept();
        live.iter_mut().for_each(|live| live.pid = 0);
        drop(first);
        let mut second = tracker(ended, live);
        second.look(HashMap::new).expect("/proc");
        assert!(second.folded.is_empty());
        end(child);
    }

    #[test]
    fn a_process_that_ended_before_it_was_held_counts() {
        let (file, mut child) = (record_file(), child());
        send(&file, 7);
        let mut process = process(&child, &file);
        drop(child.stdin.take());
        child.wait().expect("its end");
        let mut tracker = tracker(Vec::new(), Vec::new());
        tracker.admit(&mut process);
        assert_eq!((tracker.len(), sent(&tracker)), (0, 7));
    }

    #[test]
    fn the_next_exporter_goes_on() {
        let (file, child) = (record_file(), child());
        send(&file, 5);
        let mut first = tracker(Vec::new(), Vec::new());
        first.admit(&mut process(&child, &file));
        let identity = *first.tracked.keys().next().expect("one");
        let names = &mut Names::new(9);
        first.tracked.get_mut(&identity).expect("it").look(names, false).expect("a reading");
        let (ended, live) = first.kept();
        assert_eq!((ended.len(), live.len()), (0, 1));
        drop(first);
        send(&file, 8);
        // It runs still.
        let mut second = tracker(ended.clone(), live.clone());
        second.admit(&mut process(&child, &file));
        assert!(second.restored.is_empty());
        assert_eq!(sent(&second), 5, "what was known, until it is looked at");
        second.fold(identity);
        assert_eq!(sent(&second), 8);
        drop(second);
        // It has ended meanwhile: what was known is kept, and counted once.
        end(child);
        let mut third = tracker(ended, live);
        third.look(HashMap::new).expect("/proc");
        assert_eq!(sent(&third), 5);
        third.look(HashMap::new).expect("/proc");
        assert_eq!(sent(&third), 5);
    }

    /// A record with a counter of 32 bits that wraps: the sum goes on from there.
    #[test]
    fn a_counter_that_begins_anew_adds_what_it_counted() {
        let (file, child) = (record_file(), child());
        let mut tracker = tracker(Vec::new(), Vec::new());
        tracker.admit(&mut process(&child, &file));
        let identity = *tracker.tracked.keys().next().expect("one");
        let spins = |tracker: &Tracker| {
            let counts = tracker.tracked[&identity].sum();
            counts.iter().find(|(key, _)| key.counter == Counter::SpinsPaid).map_or(0, |(_, n)| n)
        };
        let high = u64::from(u32::MAX);
        for (counted, sum) in [(high, high), (7, (1 << 32) + 7), (9, (1 << 32) + 9)] {
            let reading = reading_with_spins(counted);
            let (tracked, names) =
                (tracker.tracked.get_mut(&identity).expect("it"), &mut Names::new(9));
            tracked.take(&reading, names, false);
            assert_eq!(spins(&tracker), sum, "{counted}");
        }
        // The next exporter goes on from there.
        let (ended, live) = tracker.kept();
        let mut next = super::tests::tracker(ended, live);
        next.admit(&mut process(&child, &file));
        next.tracked.get_mut(&identity).expect("it").take(
            &reading_with_spins(11),
            &mut Names::new(9),
            false,
        );
        assert_eq!(spins(&next), (1 << 32) + 11);
        end(child);
    }

    fn reading_with_spins(spins: u64) -> Reading {
        let mut reading = Reading::default();
        let socket = crate::top::sample::socket(Mode::Smcd, [40_000, 80], [0, 0]);
        reading
            .sockets
            .push(crate::observed::Socket { counters: [0, 0, 0, 0, 0, 0, spins, 0, 0], ..socket });
        reading
    }

    #[test]
    fn nonsense_is_not_added() {
        let (file, child) = (record_file(), child());
        let mut tracker = tracker(Vec::new(), Vec::new());
        tracker.admit(&mut process(&child, &file));
        send(&file, u64::MAX);
        let identity = *tracker.tracked.keys().next().expect("one");
        let names = &mut Names::new(9);
        let tracked = tracker.tracked.get_mut(&identity).expect("it");
        assert!(tracked.look(names, false).is_none() && tracked.is_refused);
        file.set_len(3).expect("another length");
        assert!(tracked.look(names, false).is_none() && tracked.is_refused);
        end(child);
        tracker.fold_ended();
        assert_eq!(sent(&tracker), 0);
        let loopback = Device::Loopback;
        assert_eq!(loopback.name(), "loopback");
    }
}
