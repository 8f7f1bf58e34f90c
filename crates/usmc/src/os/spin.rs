//! How long a thread looks for what it waits for before it sleeps, and how it lets others run meanwhile. docs/performance.md has
//! the measurements behind the numbers.

use core::hint::spin_loop;
use usmc_shm::sync::Ordering::Relaxed;

use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::signals::Signals;
use crate::os::{clock, config, sys, yields};

/// What the waits on one connection, or on one set, have learnt. All zeros: nothing yet.
pub struct Learnt {
    /// The budget in nanoseconds, plus one.
    ns: AtomicU32,
}

impl Learnt {
    /// Nothing yet.
    pub const fn new() -> Learnt {
        Learnt { ns: AtomicU32::new(0) }
    }

    /// Another connection or set uses the record.
    pub fn forget(&self) {
        self.ns.store(0, Relaxed);
    }
}

/// What the threads that wait in a set do between two waits. All zeros: unknown.
pub struct Work {
    /// When the last wait ended, CLOCK_MONOTONIC nanoseconds; 0 = unknown.
    since: AtomicU64,
    /// Nanoseconds that spins may take beyond the usual budget: as many as the work took.
    credit: AtomicU32,
}

impl Work {
    /// The most that spins may take at once.
    const MOST_CREDIT_NS: u64 = 500_000;

    /// Another set uses the record.
    pub fn forget(&self) {
        self.since.store(0, Relaxed);
        self.credit.store(0, Relaxed);
    }

    /// A wait has ended.
    pub fn begins(&self, now_ns: u64) {
        self.since.store(now_ns, Relaxed);
    }

    /// A wait begins.
    pub fn ends(&self, now_ns: u64) {
        let since = self.since.load(Relaxed);
        if since != 0 {
            self.since.store(0, Relaxed);
            let credit = u64::from(self.credit.load(Relaxed)) + now_ns.saturating_sub(since);
            self.credit.store(credit.min(Work::MOST_CREDIT_NS) as u32, Relaxed);
        }
    }

    fn credit_ns(&self) -> u64 {
        if config::get().busy_adapts { self.credit.load(Relaxed).into() } else { 0 }
    }

    fn charge(&self, ns: u64) {
        let credit = u64::from(self.credit.load(Relaxed)).saturating_sub(ns);
        self.credit.store(credit as u32, Relaxed);
    }
}

/// A spin budget that grows while spinning pays and shrinks to nothing while it does not.
pub struct Budget<'a> {
    learnt: &'a Learnt,
    work: Option<&'a Work>,
    /// The longest one now.
    most_ns: u64,
}

/// The first budget after a spin that paid where there was none.
const FIRST_NS: u64 = 4_000;
/// Less is not worth a spin.
const LEAST_NS: u64 = 2_000;

/// The longest spin with so much credit; 0 where sleeps get more done.
fn most_ns(credit_ns: u64) -> u64 {
    if yields::pay() { config::get().busy_ns + credit_ns } else { 0 }
}

impl<'a> Budget<'a> {
    /// Of a wait of which nothing else is known.
    pub fn new(learnt: &'a Learnt) -> Budget<'a> {
        Budget { learnt, work: None, most_ns: most_ns(0) }
    }

    /// Of a thread that works between two waits: it may spin as long once more, so that spinning never takes more of a CPU than the
    /// work.
    pub fn beside(learnt: &'a Learnt, work: &'a Work) -> Budget<'a> {
        Budget { learnt, work: Some(work), most_ns: most_ns(work.credit_ns()) }
    }

    /// Nanoseconds to spin now.
    pub fn get(&self) -> u64 {
        match self.learnt.ns.load(Relaxed) {
            0 => self.most_ns,
            ns => u64::from(ns - 1).min(self.most_ns),
        }
    }

    fn set(&self, ns: u64) {
        self.learnt.ns.store(ns.min(self.most_ns) as u32 + 1, Relaxed);
    }

    /// Spins for at most `most_ns` nanoseconds, with all that others do meanwhile, and no longer than the budget, until `ready` says
    /// how much it has found; the budget learns from it. `ready` is told the time of the last look at the clock
    /// ([`clock::now_ns`]), 0 = there was none. `cpus`: where the waiter notes its CPU, and the peer's. `idle` is called once where
    /// nothing is found at once. A spin that goes on ends where one of the `signals` has come.
    #[inline]
    pub fn spin(
        &self,
        most_ns: u64,
        cpus: (&AtomicU32, u32),
        signals: &mut Signals,
        idle: impl FnOnce(),
        ready: impl FnMut(u64) -> u32,
    ) -> bool {
        let usual_ns = config::get().busy_ns;
        let spun = spin(self.get(), most_ns, cpus, idle, || signals.watch(), ready);
        if let Some(work) = self.work
            && let Some(beyond) = spun.own_ns.checked_sub(usual_ns)
        {
            work.charge(beyond);
        }
        if spun.lost_ns > 0 && config::get().busy_adapts {
            yields::lost(spun.lost_ns);
            self.set(self.most_ns);
            return spun.found > 0;
        }
        let in_the_way_ns = spun.in_the_way_ns();
        if in_the_way_ns > 0 && config::get().busy_adapts {
            yields::lost(in_the_way_ns);
        }
        // Where nothing may be spun nothing is learnt.
        if spun.found > 0 && self.most_ns > 0 {
            self.set((self.get() * 2).max(FIRST_NS));
        }
        spun.found > 0
    }

    /// A sleep took this long: spinning would have paid if that is less than the longest budget, or, where others have used the
    /// CPU meanwhile, than the time for which they are let.
    pub fn slept(&self, ns: u64) {
        if self.most_ns == 0 {
            return;
        }
        let most_ns = match config::get().busy_adapts && is_crowded(clock::now_ns()) {
            true => LET_NS,
            false => self.most_ns,
        };
        if ns < most_ns {
            self.set(self.most_ns);
        } else {
            let half = self.get() / 2;
            self.set(if half < LEAST_NS { 0 } else { half });
        }
    }
}

/// When another thread of this machine was last seen to wait for the CPU that a thread of this process spun on
/// ([`clock::now_ns`]).
static CROWDED_AT: AtomicU64 = AtomicU64::new(0);
/// How long that is believed of all of them.
const CROWDED_NS: u64 = 2_000_000;
/// A sched_yield(2) that takes longer has run another thread, where system calls are as fast as on hardware.
const ALONE_NS: u64 = 1_500;
/// The same in calls of the cheapest kind: where the processor is emulated, each takes microseconds.
const ALONE_CALLS: u64 = 4;
/// The clock is looked at after so many looks: a look at a set with hundreds of connections takes microseconds.
const LOOKS: u32 = 16;
/// How long a spin lasts at most, with the time of other threads.
const LET_NS: u64 = 1_000_000;
/// How long a spin lasts at most where the peer has the waiter's CPU, with the time of other threads.
const LET_PEER_NS: u64 = 10_000_000;
/// A spin is watched for signals once it has lasted so long. Many programs work as long between two waits, and a handler that runs then ends
/// no wait either. The two system calls of it would double the time of a spin that finds something at once.
const WATCHED_NS: u64 = 50_000;
/// From then on the spin looks for them at such distances.
const WATCH_NS: u64 = 1_000_000;

/// A sched_yield(2) that is over.
struct Yielded {
    /// When it was.
    at: u64,
    /// How long it took.
    away_ns: u64,
    /// The part that other threads have used.
    others_ns: u64,
}

/// Gives the CPU to any thread that waits for it; notes whether one did.
fn give_way(now: u64) -> Yielded {
    sys::sched_yield();
    let at = clock::now_ns();
    let away_ns = at.wrapping_sub(now);
    let alone_ns = if away_ns > ALONE_NS { alone_ns() } else { ALONE_NS };
    let others_ns = away_ns.saturating_sub(alone_ns);
    if others_ns > 0 {
        CROWDED_AT.store(at, Relaxed);
    }
    Yielded { at, away_ns, others_ns }
}

/// The longest sched_yield(2) that has run nobody else. Measured once, and only where one has taken long.
#[cold]
fn alone_ns() -> u64 {
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    let known = KNOWN.load(Relaxed);
    if known != 0 {
        return known.into();
    }
    let call = || {
        let begun = clock::now_ns();
        sys::getpid();
        clock::now_ns().wrapping_sub(begun)
    };
    // The shortest of some: any of them may have been interrupted.
    let fastest = call().min(call()).min(call());
    let ns = (fastest * ALONE_CALLS).clamp(ALONE_NS, u64::from(u32::MAX));
    KNOWN.store(ns as u32, Relaxed);
    ns
}

fn is_crowded(now: u64) -> bool {
    now.wrapping_sub(CROWDED_AT.load(Relaxed)) < CROWDED_NS
}

/// What came of a spin.
pub struct Spun {
    /// So many things.
    pub found: u32,
    /// Nanoseconds of one sched_yield(2) that was away for so long that a program may have used up its slice.
    pub lost_ns: u64,
    /// How long others have used the CPU in yields.
    others_ns: u64,
    /// How long the rest of it took, where that was long.
    own_ns: u64,
    /// The part of `own_ns` that changes to others took.
    changes_ns: u64,
}

/// A spin that takes less than a wake-up costs is in nobody's way.
const WAKE_UP_NS: u64 = 35_000;
/// Others that have the CPU for less than one part in so many of a spin's own time do not want it.
const WANTED: u64 = 8;
/// A spin that leaves others so many times its own time gives them what they want.
const GIVEN: u64 = 4;

impl Spun {
    fn found(found: u32) -> Spun {
        Spun { found, lost_ns: 0, others_ns: 0, own_ns: 0, changes_ns: 0 }
    }

    /// The time in which it was in others' way, if it was. A thread that spins keeps its CPU from being idle, where a wake-up would put another
    /// thread and the scheduler's balance would look for one: a yield gives way to those only that wait for this CPU already.
    fn in_the_way_ns(&self) -> u64 {
        let (own, others) = (self.own_ns.saturating_sub(self.changes_ns), self.others_ns);
        let is_long = own > WAKE_UP_NS;
        if is_long && others * WANTED > own && own * GIVEN > others { own } else { 0 }
    }
}

/// Spins for at most `budget` nanoseconds of its own until `ready`; what others use of the CPU meanwhile does not count, up to a
/// limit of `most_ns` at most. Gives the CPU away at each look when `peer_cpu` says that the peer needs this very one, or somebody else does, and now
/// and then to find that out. `watch` is asked once the spin has lasted [`WATCHED_NS`], and then each [`WATCH_NS`]; it may end the spin.
#[inline]
fn spin(
    budget: u64,
    most_ns: u64,
    (own_cpu, peer_cpu): (&AtomicU32, u32),
    idle: impl FnOnce(),
    mut watch: impl FnMut() -> bool,
    mut ready: impl FnMut(u64) -> u32,
) -> Spun {
    let cpu = clock::cpu();
    if own_cpu.load(Relaxed) != cpu {
        own_cpu.store(cpu, Relaxed);
    }
    let same = peer_cpu == cpu;
    if budget == 0 || most_ns == 0 {
        idle();
        return Spun::found(ready(0));
    }
    let start = clock::now_ns();
    let mut now = start;
    let mut watch_at = start + WATCHED_NS;
    let mut has_come = |now| {
        now > watch_at && {
            watch_at = now + WATCH_NS;
            watch()
        }
    };
    if !same && !is_crowded(now) {
        for look in 1..=200 {
            let found = ready(now);
            if found > 0 {
                return Spun::found(found);
            }
            spin_loop();
            if look % LOOKS == 0 {
                now = clock::now_ns();
                if now - start > budget {
                    break;
                }
                if has_come(now) {
                    return Spun { own_ns: now - start, ..Spun::found(0) };
                }
            }
        }
        now = clock::now_ns();
    }
    idle();
    // The scheduler parts two threads that both want to run. While one of them sleeps it has no reason to.
    let most_ns = if same { LET_PEER_NS } else { LET_NS }.max(budget).min(most_ns);
    let mut spun = Spun::found(0);
    loop {
        let yielded = give_way(now);
        now = yielded.at;
        spun.others_ns += yielded.others_ns;
        spun.changes_ns +=
            if yielded.others_ns > 0 { yielded.away_ns - yielded.others_ns } else { 0 };
        spun.lost_ns += if yielded.away_ns > LET_NS { yielded.away_ns } else { 0 };
        let looks = if same || is_crowded(now) { 1 } else { 2 * LOOKS };
        for look in 1..=looks {
            spun.found = ready(now);
            if spun.found > 0 {
                spun.own_ns = now - start - spun.others_ns;
                return spun;
            }
            spin_loop();
            if look % LOOKS == 0 {
                now = clock::now_ns();
            }
        }
        now = clock::now_ns();
        spun.own_ns = now - start - spun.others_ns;
        let is_over = now - start > most_ns || spun.own_ns > budget;
        if is_over || has_come(now) || (spun.lost_ns > 0 && !same) {
            return spun;
        }
    }
}

/// Looks with a sched_yield(2) before each, for at most `ns` nanoseconds of its own, until `ready`: for what only a system call can tell.
/// What others use of the CPU meanwhile does not count, as in [`spin`].
pub fn look_with_yields(ns: u64, most_ns: u64, mut ready: impl FnMut() -> bool) -> Spun {
    let start = clock::now_ns();
    let (mut now, mut used) = (start, 0);
    let mut spun = Spun::found(0);
    while now - start < ns + used && now - start < LET_NS.min(most_ns) {
        let yielded = give_way(now);
        if yielded.away_ns > LET_NS {
            spun.lost_ns = yielded.away_ns;
            if config::get().busy_adapts {
                yields::lost(yielded.away_ns);
            }
        }
        if ready() {
            spun.found = 1;
            break;
        }
        used += yielded.others_ns;
        now = clock::now_ns();
    }
    spun
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spin_that_goes_on_is_watched_and_may_end_by_that() {
        let cpus = (&AtomicU32::new(0), 0);
        let mut watched = 0;
        let mut watch = || {
            watched += 1;
            watched == 3
        };
        let begun = clock::now_ns();
        let spun = spin(60_000_000_000, u64::MAX, cpus, || {}, &mut watch, |_| 0);
        let took = clock::now_ns() - begun;
        assert_eq!((spun.found, watched), (0, 3));
        assert!((WATCHED_NS + 2 * WATCH_NS..10_000_000_000).contains(&took), "{took} ns");
        // Not one that finds something at once.
        let found = spin(60_000_000_000, u64::MAX, cpus, || {}, || panic!(), |_| 1).found;
        assert_eq!(found, 1);
    }

    #[test]
    fn spins_are_in_the_way_of_those_that_want_the_cpu_and_do_not_get_it() {
        let us = |own: u64, others: u64| {
            let [own_ns, others_ns] = [own, others].map(|us| us * 1000);
            let changes_ns = 5_000;
            let own_ns = own_ns + changes_ns;
            Spun { own_ns, others_ns, changes_ns, ..Spun::found(1) }.in_the_way_ns() / 1000
        };
        // Short; alone; giving way.
        for (own, others) in [(0, 0), (30, 30), (100, 0), (400, 40), (40, 200), (0, 3000)] {
            assert_eq!(us(own, others), 0, "{own} us beside {others}");
        }
        for (own, others) in [(40, 70), (100, 100), (50, 8), (500, 1900)] {
            assert_eq!(us(own, others), own, "{own} us beside {others}");
        }
    }

    #[test]
    fn a_find_where_nothing_may_be_spun_says_nothing() {
        let learnt = Learnt::new();
        learnt.ns.store(30_001, Relaxed);
        let budget = Budget { learnt: &learnt, work: None, most_ns: 0 };
        assert!(budget.spin(1000, (&AtomicU32::new(0), 0), &mut Signals::new(), || {}, |_| 1));
        assert_eq!(learnt.ns.load(Relaxed), 30_001);
    }

    #[test]
    fn work_pays_for_spins_once_and_not_without_end() {
        let work = Work { since: AtomicU64::new(0), credit: AtomicU32::new(0) };
        work.ends(1_000);
        assert_eq!(work.credit.load(Relaxed), 0, "no wait has ended yet");
        work.begins(1_000);
        work.ends(61_000);
        work.ends(99_000);
        assert_eq!(work.credit.load(Relaxed), 60_000);
        work.charge(20_000);
        assert_eq!(work.credit.load(Relaxed), 40_000);
        work.charge(50_000);
        assert_eq!(work.credit.load(Relaxed), 0);
        work.begins(1_000);
        work.ends(1 << 40);
        assert_eq!(u64::from(work.credit.load(Relaxed)), Work::MOST_CREDIT_NS);
    }
}
