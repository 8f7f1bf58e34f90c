//! Whether spins pay where others want the CPU. A program that computes gets a whole slice by each sched_yield(2), while a sleeper that is
//! woken takes the CPU from it; and a thread that spins keeps its CPU from those that wait for another one. But a server that answers hundreds
//! of clients at once gains more by a batch than it loses by a slice, and among many that spin a yield is how each gets its turn. Which of
//! these it is, no single wait can know. So a process that loses slices, or spins long in others' way, measures what it gets done with spins
//! and without them, at the same times as all others ([`trial`]): a process that sleeps gains nothing while its peer gives slices away, and
//! gains at the cost of those that yield.

use usmc_shm::sync::Ordering::Relaxed;

use usmc_shm::sync::{AtomicBool, AtomicU32, AtomicU64};

use crate::os::clock;
use crate::os::trial::{self, IDLE, Measures, Pace};

/// The steps of a process. Losses lead from `Quiet` to `Beside`; calm periods, or a time without waits, lead back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// The process spins, and loses nothing to speak of.
    Quiet,
    /// The process loses slices or is in others' way, for the last time so many measured parts ago (`calm`). `spins`: spins have proven
    /// better.
    Beside { spins: bool, calm: u32 },
}

impl Step {
    fn word(self) -> u32 {
        match self {
            Step::Quiet => 0,
            Step::Beside { spins, calm } => 2 | u32::from(spins) | calm << 2,
        }
    }

    fn of(word: u32) -> Step {
        match word {
            0 => Step::Quiet,
            _ => Step::Beside { spins: word & 1 != 0, calm: word >> 2 },
        }
    }
}

/// A part of a period has `1 << PART_SHIFT` nanoseconds (67 ms): many slices of any program.
const PART_SHIFT: u32 = 26;
/// Where one way finds more than twice of what the other does, it is clear which one is better.
const CLEAR: u64 = 2;
/// After so many periods without a loss to speak of the others are gone.
const CALM: u32 = 3;

/// The part at this time ([`clock::now_ns`]).
fn part_at(now_ns: u64) -> u32 {
    trial::part_at(now_ns, PART_SHIFT)
}

/// What is known of both ways.
#[derive(Clone, Copy, Debug)]
struct Course {
    step: Step,
    /// The part of time that is counted.
    part: u32,
    /// Whether all of it is counted.
    is_whole: bool,
    /// What waits have found in a part without spins, and with them, or [`UNKNOWN`].
    rates: [u32; 2],
}

/// A rate that was not measured.
const UNKNOWN: u32 = u32::MAX;

impl Course {
    const QUIET: Course =
        Course { step: Step::Quiet, part: 0, is_whole: false, rates: [UNKNOWN; 2] };

    /// A process that spins has lost slices.
    fn begun(part: u32) -> Course {
        let step = Step::Beside { spins: true, calm: 0 };
        Course { step, part, ..Course::QUIET }
    }

    fn spins(&self) -> bool {
        let Step::Beside { spins, .. } = self.step else { return true };
        trial::spins(self.measures(), spins)
    }

    /// The part is over. `found`: what waits have found in it. `lost_us`: what spins have lost.
    fn next(mut self, found: u32, lost_us: u64, part: u32) -> Course {
        let Step::Beside { spins, calm } = self.step else { return self };
        if part.wrapping_sub(self.part) > IDLE {
            return Course::QUIET;
        }
        match self.measures() {
            Measures::Spins if self.is_whole => {
                let calm = if lost_us < LITTLE_US { calm + 1 } else { 0 };
                if calm == CALM {
                    return Course::QUIET;
                }
                self.note(true, found);
                self.step = Step::Beside { spins: self.spins_are_better(spins), calm };
            }
            Measures::Sleeps if self.is_whole => {
                self.note(false, found);
                self.step = Step::Beside { spins: self.spins_are_better(spins), calm };
            }
            _ => {}
        }
        Course { part, is_whole: true, ..self }
    }

    /// The rate follows what is measured.
    fn note(&mut self, spins: bool, found: u32) {
        let known = &mut self.rates[usize::from(spins)];
        *known = if *known == UNKNOWN { found } else { found.midpoint(*known) };
    }

    /// Whether they are; as before while one of them is unknown. A little more without spins may be chance.
    fn spins_are_better(&self, before: bool) -> bool {
        let [without, with] = self.rates.map(u64::from);
        match before {
            _ if self.rates.contains(&UNKNOWN) => before,
            true => without * 16 <= with * 17,
            false => without <= with,
        }
    }

    /// What is measured in its part.
    fn measures(&self) -> Measures {
        trial::measures(self.part, self.pace())
    }

    /// A period without a loss is followed by a look whether the next one has none.
    fn pace(&self) -> Pace {
        let [without, with] = self.rates.map(u64::from);
        match self.step {
            _ if self.rates.contains(&UNKNOWN) => Pace::First,
            Step::Beside { calm: 1.., .. } => Pace::Usual,
            _ if without > CLEAR * with || with > CLEAR * without => Pace::Seldom,
            _ => Pace::Usual,
        }
    }
}

/// The course of this process, and what is counted in its present part. A thread that reads while another one writes may see some of
/// both parts, which is no worse than a look at another time. There is no lock that a forked child could miss the end of.
struct Process {
    step: AtomicU32,
    /// The thread that replaces it ends the part.
    part: AtomicU32,
    is_whole: AtomicBool,
    rates: [AtomicU32; 2],
    found: AtomicU32,
    lost_us: AtomicU64,
    /// While it is quiet: a bucket of microseconds lost, which leaks, and from bit 32 on the millisecond of the last loss.
    bucket: AtomicU64,
}

/// How much is lost before it is measured: more than one slice.
const LOST_US: u64 = 5_000;
/// A loss of one in so many milliseconds is none.
const LEAK: u64 = 16;
/// Less than a quarter of that in a part is none, too.
const LITTLE_US: u64 = (1 << PART_SHIFT) / 1000 / LEAK / 4;

impl Process {
    const fn new() -> Process {
        Process {
            step: AtomicU32::new(0),
            part: AtomicU32::new(0),
            is_whole: AtomicBool::new(false),
            rates: [const { AtomicU32::new(UNKNOWN) }; 2],
            found: AtomicU32::new(0),
            lost_us: AtomicU64::new(0),
            bucket: AtomicU64::new(0),
        }
    }

    fn course(&self) -> Course {
        Course {
            step: Step::of(self.step.load(Relaxed)),
            part: self.part.load(Relaxed),
            is_whole: self.is_whole.load(Relaxed),
            rates: self.rates.each_ref().map(|rate| rate.load(Relaxed)),
        }
    }

    /// The caller has ended the part.
    fn keep(&self, course: Course) {
        self.is_whole.store(course.is_whole, Relaxed);
        for (kept, rate) in self.rates.iter().zip(course.rates) {
            kept.store(rate, Relaxed);
        }
        self.found.store(0, Relaxed);
        self.lost_us.store(0, Relaxed);
        self.step.store(course.step.word(), Relaxed);
    }

    fn spins(&self, now_ns: impl Fn() -> u64) -> bool {
        if self.step.load(Relaxed) == Step::Quiet.word() {
            return true;
        }
        self.spins_at(now_ns())
    }

    #[cold]
    fn spins_at(&self, now_ns: u64) -> bool {
        let (ended, part) = (self.part.load(Relaxed), part_at(now_ns));
        // Another thread may have looked at the clock later.
        let is_over = part.wrapping_sub(ended) as i32 > 0;
        if is_over && self.part.compare_exchange(ended, part, Relaxed, Relaxed).is_ok() {
            let (found, lost_us) = (self.found.load(Relaxed), self.lost_us.load(Relaxed));
            let course = Course { part: ended, ..self.course() };
            self.keep(course.next(found, lost_us, part));
        }
        self.course().spins()
    }

    fn found(&self, count: u32) {
        if self.step.load(Relaxed) != Step::Quiet.word() {
            self.found.fetch_add(count, Relaxed);
        }
    }

    fn lost(&self, ns: u64, now_ns: u64) {
        let us = ns / 1000;
        if self.step.load(Relaxed) != Step::Quiet.word() {
            self.lost_us.fetch_add(us, Relaxed);
        } else if self.fills(us, (now_ns / 1_000_000) as u32) {
            self.bucket.store(0, Relaxed);
            self.part.store(part_at(now_ns), Relaxed);
            self.keep(Course::begun(part_at(now_ns)));
        }
    }

    /// Adds a loss to the bucket; whether it is full.
    fn fills(&self, us: u64, now_ms: u32) -> bool {
        let before = self.bucket.load(Relaxed);
        let leaked = u64::from(now_ms.wrapping_sub((before >> 32) as u32)) * 1000 / LEAK;
        let lost = (before & u64::from(u32::MAX)).saturating_sub(leaked) + us.min(LOST_US);
        self.bucket.store(u64::from(now_ms) << 32 | lost, Relaxed);
        lost >= LOST_US
    }
}

static PROCESS: Process = Process::new();

/// Whether spins pay now; sleeps otherwise.
#[inline]
pub fn pay() -> bool {
    PROCESS.spins(clock::now_ns)
}

/// A wait has found so much, be it by a spin or after a sleep.
#[inline]
pub fn found(count: u32) {
    PROCESS.found(count);
}

/// A spin has lost so much: a yield was away for so long that a program may have used up its slice, or it was in others' way.
#[cold]
pub fn lost(ns: u64) {
    PROCESS.lost(ns, clock::now_ns());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::trial::{FIRST, PARTS};

    const SLICE_NS: u64 = 3_000_000;
    const MS: u64 = 1_000_000;

    /// A process that finds so much in each millisecond, without spins and with them, and loses a slice in every eighth with them
    /// if `is_beside` a program that computes. `now` is in milliseconds. How many of them it has spun.
    fn run(process: &Process, now: &mut u64, ms: u64, rates: [u32; 2], is_beside: bool) -> u32 {
        let mut spun = 0;
        for _ in 0..ms {
            *now += 1;
            let spins = process.spins(|| *now * MS);
            process.found(rates[usize::from(spins)]);
            if spins && is_beside && now.is_multiple_of(8) {
                process.lost(SLICE_NS, *now * MS);
            }
            spun += u32::from(spins);
        }
        spun
    }

    #[test]
    fn a_process_that_loses_no_slices_always_spins() {
        let (process, mut now) = (Process::new(), 12_345);
        assert_eq!(run(&process, &mut now, 10_000, [90, 10], false), 10_000);
        for _ in 0..100 {
            process.lost(SLICE_NS, now * MS);
            now += 64;
            assert!(process.spins(|| now * MS), "one slice now and then is no reason");
        }
    }

    #[test]
    fn spins_that_cost_more_than_they_bring_end() {
        // The number of the part begins anew meanwhile.
        let (process, mut now) = (Process::new(), (1 << (u32::BITS + PART_SHIFT)) / MS - 9_000);
        run(&process, &mut now, 20_000, [90, 50], true);
        assert!(run(&process, &mut now, 20_000, [90, 50], true) < 2000);
        run(&process, &mut now, 5000, [90, 100], false);
        assert_eq!(run(&process, &mut now, 4000, [90, 100], false), 4000, "that program has ended");
    }

    #[test]
    fn spins_that_bring_more_go_on() {
        let (process, mut now) = (Process::new(), 7);
        run(&process, &mut now, 2000, [50, 90], true);
        assert!(run(&process, &mut now, 20_000, [50, 90], true) > 18_000);
        run(&process, &mut now, 20_000, [90, 50], true);
        assert!(run(&process, &mut now, 20_000, [90, 50], true) < 2000, "it has changed");
    }

    #[test]
    fn a_way_is_kept_until_the_other_one_is_better() {
        const SPINS: [u32; 2] = [80, 90];
        const SLEEPS: [u32; 2] = [90, 50];
        for (before, rates, spins) in [
            (SPINS, [90, 88], true),
            (SPINS, [90, 80], false),
            (SLEEPS, [92, 90], false),
            (SLEEPS, [90, 90], true),
        ] {
            let (process, mut now) = (Process::new(), 7);
            run(&process, &mut now, 20_000, before, true);
            run(&process, &mut now, 20_000, rates, true);
            let is_most = run(&process, &mut now, 20_000, rates, true) > 10_000;
            assert_eq!(is_most, spins, "{rates:?} behind {before:?}");
        }
    }

    #[test]
    fn a_process_that_begins_to_lose_slices_knows_soon_what_is_better() {
        for rates in [[90, 50], [50, 90]] {
            for begin in 0..(u64::from(PARTS) << PART_SHIFT) / MS {
                let (process, mut now) = (Process::new(), begin);
                // Until the losses count, and then both ways.
                run(
                    &process,
                    &mut now,
                    20 + ((u64::from(2 * FIRST)) << PART_SHIFT) / MS,
                    rates,
                    true,
                );
                let course = process.course();
                assert!(!course.rates.contains(&UNKNOWN), "{begin}: {course:?}");
                let step = Step::Beside { spins: rates[1] > rates[0], calm: 0 };
                assert_eq!(course.step, step, "{begin}: {course:?}");
            }
        }
    }

    #[test]
    fn little_losses_now_and_then_keep_nothing_up() {
        let (process, mut now) = (Process::new(), 7);
        run(&process, &mut now, 20_000, [90, 50], true);
        for _ in 0..20_000 / 64 {
            run(&process, &mut now, 64, [90, 50], false);
            process.lost(SLICE_NS / 6, now * MS);
        }
        assert_eq!(process.course().step, Step::Quiet);
    }

    #[test]
    fn what_is_clear_is_measured_seldom() {
        for (rates, most) in [([100, 10], 500), ([100, 60], 1800)] {
            let (process, mut now) = (Process::new(), 7);
            run(&process, &mut now, 10_000, rates, true);
            let spun = run(&process, &mut now, 20_000, rates, true);
            assert!((most / 2..=most).contains(&spun), "{spun} of 20000 ms for {rates:?}");
        }
        let (process, mut now) = (Process::new(), 7);
        run(&process, &mut now, 20_000, [100, 10], true);
        // Within two rare measurements and the calm periods.
        run(&process, &mut now, 7000, [10, 100], false);
        assert_eq!(run(&process, &mut now, 2000, [10, 100], false), 2000);
    }

    #[test]
    fn all_processes_measure_at_the_same_times() {
        let begin_of = |part: u32| (u64::from(part) << PART_SHIFT) / MS + 1;
        let end = begin_of(10 * PARTS);
        let all: Vec<(Process, u64)> = (0..5).map(|i| (Process::new(), i * 37)).collect();
        for (process, begin) in &all {
            let mut now = *begin;
            run(process, &mut now, end - 1 - begin, [50, 90], true);
        }
        let at = |part: u32| {
            let now = begin_of(10 * PARTS + part) * MS;
            let spins = all.iter().map(|(process, _)| process.spins(|| now));
            spins.collect::<Vec<_>>()
        };
        assert_eq!(at(0), vec![true; 5]);
        all.iter().for_each(|(process, _)| process.lost(SLICE_NS, end * MS));
        assert_eq!(at(1), vec![false; 5]);
        assert_eq!(at(2), vec![true; 5]);
    }

    #[test]
    fn a_process_that_was_idle_begins_anew() {
        let (process, mut now) = (Process::new(), 7);
        run(&process, &mut now, 4000, [90, 50], true);
        now += (u64::from(IDLE + 2) << PART_SHIFT) / MS;
        assert!(process.spins(|| now * MS));
        assert_eq!(process.course().step, Step::Quiet);
    }

    #[test]
    fn a_thread_that_has_looked_at_the_clock_earlier_ends_no_part() {
        let (process, mut now) = (Process::new(), 7);
        run(&process, &mut now, 4000, [90, 50], true);
        let part = process.course().part;
        process.spins(|| u64::from(part - 1) << PART_SHIFT);
        assert_eq!((process.course().part, process.course().step == Step::Quiet), (part, false));
    }

    #[test]
    fn steps_are_kept_as_they_are() {
        let of = |spins| Step::Beside { spins, calm: CALM - 1 };
        for step in [Step::Quiet, of(false), of(true)] {
            assert_eq!(Step::of(step.word()), step);
        }
    }
}
