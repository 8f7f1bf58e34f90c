//! How long a thread looks for what it waits for before it sleeps, and how it lets others run meanwhile. docs/performance.md has
//! the measurements behind the numbers.

use core::hint::spin_loop;
use core::sync::atomic::Ordering::Relaxed;

use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::{clock, config, device, sys};

/// What the waits on one connection, or on one set, have learnt. All zeros: nothing yet.
pub struct Learnt {
    /// The budget in nanoseconds, plus one.
    ns: AtomicU32,
    bar: Bar,
}

impl Learnt {
    /// Nothing yet.
    pub const fn new() -> Learnt {
        Learnt { ns: AtomicU32::new(0), bar: Bar::new() }
    }

    /// Another connection or set uses the record.
    pub fn forget(&self) {
        self.ns.store(0, Relaxed);
        self.bar.forget();
    }
}

/// No yields for a while: a program that computes has had the CPU. Beside such a program each sched_yield(2) gives a whole slice away,
/// while a sleeper that is woken takes the CPU from it. Time that spins have lost so counts against what they have saved: a yield now
/// and then is away for long beside others that spin, too. While a bar is down, spins are short and give nothing away. Each bar that
/// follows another one soon is twice as long.
struct Bar {
    /// The level, and the millisecond at which the time ends, plus one; 0 = never.
    word: AtomicU32,
    /// A bucket of microseconds lost, which leaks, and from bit 32 on the millisecond of the last loss.
    lost: AtomicU64,
}

impl Bar {
    const LEVEL_SHIFT: u32 = 28;
    const MS_MASK: u32 = (1 << Bar::LEVEL_SHIFT) - 1;
    const MOST_LEVEL: u32 = 6;
    /// How long the first one is. It doubles with each level.
    const FIRST_MS: u32 = 4;
    /// One that follows in so many times as long after the end is of the next level.
    const SOON: u32 = 8;
    /// How much is lost before: more than one slice.
    const LOST_US: u64 = 5_000;
    /// A loss of one in so many milliseconds is none.
    const LEAK: u64 = 16;
    /// What a thread that sleeps costs itself and others, and for each connection that wakes it.
    const WAKE_UP_US: u64 = 40;
    const BELL_US: u64 = 16;

    const fn new() -> Bar {
        Bar { word: AtomicU32::new(0), lost: AtomicU64::new(0) }
    }

    fn forget(&self) {
        self.word.store(0, Relaxed);
        self.lost.store(0, Relaxed);
    }

    fn len_ms(level: u32) -> u32 {
        Bar::FIRST_MS << level.min(Bar::MOST_LEVEL)
    }

    fn now_ms() -> u32 {
        (clock::now_ns() / 1_000_000) as u32
    }

    /// The level and how long before `now` the end was, in milliseconds; negative before it.
    fn state(&self, now: u32) -> Option<(u32, i32)> {
        let word = self.word.load(Relaxed).checked_sub(1)?;
        let spare = u32::BITS - Bar::LEVEL_SHIFT;
        let since = (now.wrapping_sub(word) << spare) as i32 >> spare;
        Some((word >> Bar::LEVEL_SHIFT, since))
    }

    fn is_down(&self) -> bool {
        self.word.load(Relaxed) != 0 && self.is_down_at(Bar::now_ms())
    }

    fn is_down_at(&self, now: u32) -> bool {
        // A time that is far ahead was long ago: the count has begun anew.
        self.state(now)
            .is_some_and(|(level, since)| (-(Bar::len_ms(level) as i32)..0).contains(&since))
    }

    /// A spin has lost so much to a program that computes, and found something.
    fn displaced(&self, ns: u64, found: u32, now: u32) {
        let lost_us = (ns / 1000).saturating_sub(Bar::saved_us(found));
        if self.is_down_at(now) || !self.fills(lost_us, now) {
            return;
        }
        self.lost.store(0, Relaxed);
        let level = match self.state(now) {
            Some((level, since)) if (since as u32) < Bar::len_ms(level) * Bar::SOON => {
                (level + 1).min(Bar::MOST_LEVEL)
            }
            _ => 0,
        };
        let until = now.wrapping_add(Bar::len_ms(level)) & Bar::MS_MASK;
        self.word.store((level << Bar::LEVEL_SHIFT | until) + 1, Relaxed);
    }

    /// Adds a loss to the bucket; whether it is full.
    fn fills(&self, us: u64, now: u32) -> bool {
        let before = self.lost.load(Relaxed);
        let leaked = u64::from(now.wrapping_sub((before >> 32) as u32)) * 1000 / Bar::LEAK;
        let lost = (before & u64::from(u32::MAX)).saturating_sub(leaked) + us.min(Bar::LOST_US);
        self.lost.store(u64::from(now) << 32 | lost, Relaxed);
        lost >= Bar::LOST_US
    }

    /// A spin has found so much: what it has saved makes up for losses.
    fn saved(&self, found: u32) {
        let before = self.lost.load(Relaxed);
        let lost = before & u64::from(u32::MAX);
        if lost != 0 {
            self.lost.store(before - lost.min(Bar::saved_us(found)), Relaxed);
        }
    }

    fn saved_us(found: u32) -> u64 {
        if found == 0 { 0 } else { Bar::WAKE_UP_US + u64::from(found) * Bar::BELL_US }
    }
}

/// Of connections and sets that have learnt nothing yet.
static NEW: Bar = Bar::new();

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

impl<'a> Budget<'a> {
    /// Of a wait of which nothing else is known.
    pub fn new(learnt: &'a Learnt) -> Budget<'a> {
        Budget { learnt, work: None, most_ns: config::get().busy_ns }
    }

    /// Of a thread that works between two waits: it may spin as long once more, so that spinning never takes more of a CPU than the
    /// work.
    pub fn beside(learnt: &'a Learnt, work: &'a Work) -> Budget<'a> {
        let most_ns = config::get().busy_ns + work.credit_ns();
        Budget { learnt, work: Some(work), most_ns }
    }

    /// Nanoseconds to spin now.
    pub fn get(&self) -> u64 {
        match self.learnt.ns.load(Relaxed) {
            0 => self.most_ns,
            ns => u64::from(ns - 1).min(self.most_ns),
        }
    }

    /// Whether a program that computes would take the CPU.
    fn is_barred(&self) -> bool {
        let is_new = self.learnt.ns.load(Relaxed) == 0;
        let bar = if is_new { &NEW } else { &self.learnt.bar };
        bar.is_down()
    }

    fn set(&self, ns: u64) {
        self.learnt.ns.store(ns.min(self.most_ns) as u32 + 1, Relaxed);
    }

    /// Spins for at most `most_ns` nanoseconds, with all that others do meanwhile, and no longer than the budget, until `ready` says
    /// how much it has found; the budget learns from it.
    #[inline]
    pub fn spin(
        &self,
        most_ns: u64,
        own_cpu: &AtomicU32,
        peer_cpu: u32,
        ready: impl FnMut() -> u32,
    ) -> bool {
        let usual_ns = config::get().busy_ns;
        let (most_ns, gives_way) = match self.is_barred() {
            true => (most_ns.min(usual_ns), false),
            false => (most_ns, true),
        };
        let spun = spin(self.get(), most_ns, gives_way, own_cpu, peer_cpu, ready);
        if let Some(work) = self.work
            && let Some(beyond) = spun.own_ns.checked_sub(usual_ns)
        {
            work.charge(beyond);
        }
        if spun.lost_ns > 0 && config::get().busy_adapts {
            let now = Bar::now_ms();
            if self.learnt.ns.load(Relaxed) == 0 {
                NEW.displaced(spun.lost_ns, spun.found, now);
            }
            self.learnt.bar.displaced(spun.lost_ns, spun.found, now);
            self.set(self.most_ns);
        } else if spun.found > 0 {
            self.learnt.bar.saved(spun.found);
            self.set((self.get() * 2).max(FIRST_NS));
        }
        spun.found > 0
    }

    /// A sleep took this long: spinning would have paid if that is less than the longest budget, or, where others have used the
    /// CPU meanwhile, than the time for which they are let.
    pub fn slept(&self, ns: u64) {
        let may_be_let = self.most_ns > 0 && config::get().busy_adapts && !self.is_barred();
        let most_ns = match may_be_let && is_crowded(clock::now_ns()) {
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
/// A sched_yield(2) that takes longer has run another thread.
const ALONE_NS: u64 = 1_500;
/// What such a one costs the thread itself.
const SWITCH_NS: u64 = 1_500;
/// How long a spin lasts at most, with the time of other threads.
const LET_NS: u64 = 1_000_000;
/// How long a spin lasts at most where the peer has the waiter's CPU, with the time of other threads.
const LET_PEER_NS: u64 = 10_000_000;

/// Gives the CPU to any thread that waits for it; notes whether one did. Returns the time.
fn give_way(now: u64) -> u64 {
    sys::sched_yield();
    let after = clock::now_ns();
    let away = after.wrapping_sub(now);
    if away > ALONE_NS {
        CROWDED_AT.store(after, Relaxed);
    }
    after
}

fn is_crowded(now: u64) -> bool {
    now.wrapping_sub(CROWDED_AT.load(Relaxed)) < CROWDED_NS
}

/// What came of a spin.
struct Spun {
    /// So many things.
    found: u32,
    /// Nanoseconds of one sched_yield(2) that was away for so long that a program may have used up its slice.
    lost_ns: u64,
    /// How long it took, without the time that others have used, where that was long.
    own_ns: u64,
}

impl Spun {
    fn found(found: u32) -> Spun {
        Spun { found, lost_ns: 0, own_ns: 0 }
    }
}

/// Spins for at most `budget` nanoseconds of its own until `ready`; what others use of the CPU meanwhile does not count, up to a
/// limit of `most_ns` at most. Gives the CPU away at each look when `peer_cpu` says that the peer needs this very one, or somebody else does, and now
/// and then to find that out.
#[inline]
fn spin(
    budget: u64,
    most_ns: u64,
    gives_way: bool,
    own_cpu: &AtomicU32,
    peer_cpu: u32,
    mut ready: impl FnMut() -> u32,
) -> Spun {
    let cpu = clock::cpu();
    if own_cpu.load(Relaxed) != cpu {
        own_cpu.store(cpu, Relaxed);
    }
    let same = peer_cpu == cpu;
    if budget == 0 || most_ns == 0 || (same && !gives_way) {
        device::current().keep_alive();
        return Spun::found(ready());
    }
    let start = clock::now_ns();
    let mut now = start;
    if !same && (!gives_way || !is_crowded(now)) {
        for _ in 0..200 {
            let found = ready();
            if found > 0 {
                return Spun::found(found);
            }
            spin_loop();
        }
        now = clock::now_ns();
    }
    device::current().keep_alive();
    // The scheduler parts two threads that both want to run. While one of them sleeps it has no reason to.
    let most_ns = if same { LET_PEER_NS } else { LET_NS }.max(budget).min(most_ns);
    // By others, and in yields that were away for long.
    let (mut used, mut lost_ns) = (0, 0);
    loop {
        let mut looks = 32;
        if gives_way {
            let before = now;
            now = give_way(now);
            let away = now.wrapping_sub(before);
            used += away.saturating_sub(SWITCH_NS);
            lost_ns += if away > LET_NS { away } else { 0 };
            looks = if same || is_crowded(now) { 1 } else { 32 };
        }
        for _ in 0..looks {
            let found = ready();
            if found > 0 {
                // It was the peer that has used this CPU.
                let lost_ns = if same { 0 } else { lost_ns };
                return Spun { found, lost_ns, own_ns: now - start - used };
            }
            spin_loop();
        }
        now = clock::now_ns();
        let is_over = now - start > most_ns || now - start > budget + used;
        if is_over || (lost_ns > 0 && !same) {
            return Spun { found: 0, lost_ns, own_ns: now - start - used };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE_NS: u64 = 3_000_000;

    #[test]
    fn a_bar_comes_down_after_two_slices_lost_for_little() {
        let bar = Bar::new();
        bar.displaced(SLICE_NS, 0, 1000);
        assert!(!bar.is_down_at(1000), "a yield now and then is away for long");
        bar.displaced(SLICE_NS, 0, 1001);
        assert!(bar.is_down_at(1001) && bar.is_down_at(1004));
        assert!(!bar.is_down_at(1005) && !bar.is_down_at(1000 + (1 << 27)));
    }

    #[test]
    fn losses_that_leak_or_are_made_up_for_bring_no_bar_down() {
        let (leaks, saves, large) = (Bar::new(), Bar::new(), Bar::new());
        for i in 0..100 {
            leaks.displaced(SLICE_NS, 0, i * 48);
            saves.displaced(SLICE_NS, 0, i * 4);
            (0..60).for_each(|_| saves.saved(1));
            // After its slice, each of 200 connections has something.
            large.displaced(SLICE_NS, 200, i * 4);
        }
        let now = 100 * 48;
        assert!([leaks, saves, large].iter().all(|bar| bar.state(now).is_none()));
    }

    #[test]
    fn bars_that_follow_soon_are_longer_up_to_a_limit() {
        let bar = Bar::new();
        let mut now = u32::MAX - 500;
        let mut down = || {
            bar.displaced(SLICE_NS, 0, now);
            bar.displaced(SLICE_NS, 0, now);
            let begun = now;
            while bar.is_down_at(now) {
                now = now.wrapping_add(1);
            }
            let len = now.wrapping_sub(begun);
            (len, std::mem::replace(&mut now, begun.wrapping_add(len)))
        };
        let lens: Vec<u32> = (0..9).map(|_| down().0).collect();
        assert_eq!(lens, [4, 8, 16, 32, 64, 128, 256, 256, 256]);
        let later = 256 * Bar::SOON + 1;
        now = now.wrapping_add(later);
        bar.displaced(SLICE_NS, 0, now);
        bar.displaced(SLICE_NS, 0, now);
        assert!(bar.is_down_at(now) && !bar.is_down_at(now.wrapping_add(4)));
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
