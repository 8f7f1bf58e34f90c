//! Whether a wait for the kernel's TCP looks again for a moment before it sleeps.
//!
//! Connections with one request stay TCP, so that their ends wait in the kernel, and each sleep costs both ends some time: the waker its
//! call to another CPU, the sleeper two changes of context and cold caches. Where the answer comes within [`AWAKE_NS`] a few looks with
//! yields between them cost less; on a CPU that both ends have, the first yield brings the answer. Where the other end is slow or another
//! program computes they cost more. No single wait knows which of these it is: what a server gains shows in how fast its clients come
//! back. So a process that opens many connections measures how many it opens and what CPU time these take, with such looks and without
//! them, at the same times as all others ([`trial`]).

use core::mem;
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicBool, AtomicU32, AtomicU64};

use crate::os::signals::Signals;
use crate::os::trial::{self, Measures, Pace};
use crate::os::{clock, config, kernel_only, single, spin, sys, yields};

/// How long a wait looks, if the last look of the process has found something; docs/performance.md has the sweep. An end that sleeps comes
/// later than one that looks: this is long enough for two ends of which both slept until now.
const AWAKE_NS: u64 = 120_000;
/// A part of a period has `1 << PART_SHIFT` nanoseconds (17 ms): some hundred connections, where there are many.
const PART_SHIFT: u32 = 24;
/// A process that opens so many connections within [`MANY_MS`] begins to measure: where each takes half a millisecond the sleeps are a
/// small part of it.
const MANY: u32 = 64;
const MANY_MS: u32 = 25;
/// One that opens them at less than a quarter of that rate for so long ends it.
const FEW_MS: u32 = 256;
/// Each look in a row that has found nothing halves the next one, and so many are the last ones in a part.
const VAIN: u32 = 4;
/// In the place of that number once a look has given a slice of time to a program that computes.
const LOST: u32 = 1 << 16;

/// The steps of a process. Many new connections lead from `Rare` to `Often`; few of them, or a time without waits, lead back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Its waits sleep at once.
    Rare,
    /// Its waits do what has proven better, apart from parts that are measured.
    Often { looks: bool },
}

impl Step {
    fn word(self) -> u32 {
        match self {
            Step::Rare => 0,
            Step::Often { looks } => 2 | u32::from(looks),
        }
    }

    fn of(word: u32) -> Step {
        match word {
            0 => Step::Rare,
            _ => Step::Often { looks: word & 1 != 0 },
        }
    }
}

/// What measured parts of one kind have come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Way {
    /// Connections that the process has opened.
    opened: u32,
    /// Microseconds that this has taken.
    wall_us: u32,
    /// Microseconds of CPU time of all threads.
    cpu_us: u32,
}

impl Way {
    const UNKNOWN: Way = Way { opened: 0, wall_us: 0, cpu_us: 0 };
    /// With so many connections it is known. Where they come at random, their number is one of chance by a sixteenth.
    const ENOUGH: u32 = 256;
    /// So many are enough where one way is far better.
    const SOME: u32 = 64;
    /// Or so much time, where the other way opens enough.
    const LONG_US: u32 = 80_000;
    /// More than so many are much.
    const MUCH: u32 = 1024;
    /// Of any number, so that products of two fit.
    const LIMIT: u32 = 1 << 26;

    fn is_known(self, other: Way, enough: u32) -> bool {
        self.opened >= enough || self.wall_us >= Way::LONG_US && other.opened >= enough
    }

    /// With another part, and half of all before it where that `is_much`.
    fn and(self, part: Way, is_much: bool) -> Way {
        let shift = u32::from(is_much);
        let sum = |old: u32, new: u32| ((old >> shift) + new).min(Way::LIMIT);
        Way {
            opened: sum(self.opened, part.opened),
            wall_us: sum(self.wall_us, part.wall_us),
            cpu_us: sum(self.cpu_us, part.cpu_us),
        }
    }
}

/// 1 in the numbers of [`Verdict`].
const ONE: u64 = 1 << 10;
/// More than eightfold is eightfold.
const MOST: u64 = 8 * ONE;

/// What looks give and take, as multiples of what sleeps do.
#[derive(Clone, Copy, Debug)]
struct Verdict {
    /// The fourth power of connections in a second.
    gain: u64,
    /// CPU time of a connection.
    cost: u64,
}

impl Verdict {
    fn of(looks: Way, sleeps: Way) -> Verdict {
        let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let ratio = |a: u64, b: u64| (a * ONE / b.max(1)).min(MOST);
        let rate =
            ratio(product(looks.opened, sleeps.wall_us), product(sleeps.opened, looks.wall_us));
        let cost = match looks.cpu_us.min(sleeps.cpu_us) {
            // A filter refuses the question.
            0 => 2 * ONE,
            _ => ratio(product(looks.cpu_us, sleeps.opened), product(sleeps.cpu_us, looks.opened)),
        };
        let square = rate * rate / ONE;
        Verdict { gain: square * square / ONE, cost }
    }

    /// Whether looks are better. A gain of a twentieth is worth a fifth more of the process's own CPU time, as its sleeps cost the other
    /// ends some of theirs. Little more may be chance.
    fn looks(self, before: bool) -> bool {
        let Verdict { gain, cost } = self;
        if before { gain > cost } else { gain * 8 > cost * 9 }
    }

    /// Whether one way is better by so many halves.
    fn is_beyond(self, halves: u64) -> bool {
        let Verdict { gain, cost } = self;
        gain * 2 > cost * halves || cost * 2 > gain * halves
    }
}

/// What is known of both ways.
#[derive(Clone, Copy, Debug)]
struct Course {
    step: Step,
    /// The part of time that is counted.
    part: u32,
    /// Whether all of it is counted.
    is_whole: bool,
    /// Parts without looks, and with them.
    ways: [Way; 2],
    /// A part with looks, until the next one without them can be told beside it: the load may change in between.
    pending: Way,
}

impl Course {
    const RARE: Course = Course {
        step: Step::Rare,
        part: 0,
        is_whole: false,
        ways: [Way::UNKNOWN; 2],
        pending: Way::UNKNOWN,
    };

    /// Many connections were opened.
    fn begun(part: u32) -> Course {
        Course { step: Step::Often { looks: false }, part, ..Course::RARE }
    }

    fn looks(&self) -> bool {
        match self.step {
            Step::Rare => false,
            Step::Often { looks } => trial::spins(self.measures(), looks),
        }
    }

    /// The part is over, and has come to `done`. `few`: the process opens few connections by now.
    fn next(mut self, done: Way, few: bool, part: u32) -> Course {
        let Step::Often { looks } = self.step else { return self };
        if few {
            return Course::RARE;
        }
        let measures = self.measures();
        // All of this part, and nothing else.
        let is_all = self.is_whole && part.wrapping_sub(self.part) == 1;
        let before = mem::replace(&mut self.pending, Way::UNKNOWN);
        match measures {
            Measures::Spins if is_all => self.pending = done,
            Measures::Sleeps if is_all && before != Way::UNKNOWN => {
                let [sleeps, with_looks] = self.ways;
                // Both forget as much, as the load of some periods may have been another one.
                let is_much = sleeps.opened.max(with_looks.opened) > Way::MUCH;
                self.ways = [sleeps.and(done, is_much), with_looks.and(before, is_much)];
                let looks = self.verdict().map_or(looks, |verdict| verdict.looks(looks));
                self.step = Step::Often { looks };
            }
            _ => {}
        }
        Course { part, is_whole: true, ..self }
    }

    /// Of both ways, once they are known.
    fn verdict(&self) -> Option<Verdict> {
        /// That is, four times better.
        const FAR: u64 = 8;
        let [sleeps, looks] = self.ways;
        let are_known = |enough| sleeps.is_known(looks, enough) && looks.is_known(sleeps, enough);
        let verdict = Verdict::of(looks, sleeps);
        let is_known = are_known(Way::ENOUGH) || are_known(Way::SOME) && verdict.is_beyond(FAR);
        is_known.then_some(verdict)
    }

    /// What is measured in its part.
    fn measures(&self) -> Measures {
        /// Half as good again.
        const CLEAR: u64 = 3;
        let pace = match (self.verdict(), self.step) {
            (None, _) => Pace::First,
            // Sleeps cost less than a look that finds nothing.
            (Some(verdict), Step::Often { looks: true }) if !verdict.is_beyond(CLEAR) => {
                Pace::Usual
            }
            _ => Pace::Seldom,
        };
        trial::measures(self.part, pace)
    }
}

/// What the clocks say.
#[derive(Clone, Copy)]
struct Now {
    wall_ns: u64,
    cpu_ns: u64,
}

impl Now {
    fn get() -> Now {
        Now { wall_ns: clock::now_ns(), cpu_ns: sys::process_cpu_ns() }
    }

    fn ms(self) -> u32 {
        (self.wall_ns / 1_000_000) as u32
    }
}

/// A [`Way`] that threads share. One that reads while another one writes may see some of both, which is no worse than a look at another
/// time.
struct SharedWay([AtomicU32; 3]);

impl SharedWay {
    const fn new() -> SharedWay {
        SharedWay([const { AtomicU32::new(0) }; 3])
    }

    fn get(&self) -> Way {
        let [opened, wall_us, cpu_us] = self.0.each_ref().map(|word| word.load(Relaxed));
        Way { opened, wall_us, cpu_us }
    }

    fn set(&self, way: Way) {
        for (word, value) in self.0.iter().zip([way.opened, way.wall_us, way.cpu_us]) {
            word.store(value, Relaxed);
        }
    }
}

/// The course of this process, and where its present part began. There is no lock that a forked child could miss the end of.
struct Process {
    step: AtomicU32,
    /// The thread that replaces it ends the part.
    part: AtomicU32,
    is_whole: AtomicBool,
    ways: [SharedWay; 2],
    pending: SharedWay,
    /// Whether waits look in this part.
    looks: AtomicBool,
    /// Connections that were ever opened.
    opened: AtomicU32,
    /// When the last [`MANY`] of them were complete, in milliseconds.
    many_at: AtomicU32,
    /// When it was last asked whether they are few, in milliseconds, and how many there were then.
    asked_at: AtomicU32,
    opened_then: AtomicU32,
    /// At the beginning of the part.
    opened_before: AtomicU32,
    wall_before: AtomicU64,
    cpu_before: AtomicU64,
    /// Looks in a row that have found nothing.
    vain: AtomicU32,
}

impl Process {
    const fn new() -> Process {
        Process {
            step: AtomicU32::new(0),
            part: AtomicU32::new(0),
            is_whole: AtomicBool::new(false),
            ways: [const { SharedWay::new() }; 2],
            pending: SharedWay::new(),
            looks: AtomicBool::new(false),
            opened: AtomicU32::new(0),
            many_at: AtomicU32::new(0),
            asked_at: AtomicU32::new(0),
            opened_then: AtomicU32::new(0),
            opened_before: AtomicU32::new(0),
            wall_before: AtomicU64::new(0),
            cpu_before: AtomicU64::new(0),
            vain: AtomicU32::new(0),
        }
    }

    #[inline(always)]
    fn is_rare(&self) -> bool {
        self.step.load(Relaxed) == Step::Rare.word()
    }

    fn course(&self) -> Course {
        Course {
            step: Step::of(self.step.load(Relaxed)),
            part: self.part.load(Relaxed),
            is_whole: self.is_whole.load(Relaxed),
            ways: self.ways.each_ref().map(SharedWay::get),
            pending: self.pending.get(),
        }
    }

    /// The caller has ended the part.
    fn keep(&self, course: Course, now: Now) {
        self.is_whole.store(course.is_whole, Relaxed);
        self.ways.iter().zip(course.ways).for_each(|(kept, way)| kept.set(way));
        self.pending.set(course.pending);
        self.opened_before.store(self.opened.load(Relaxed), Relaxed);
        self.wall_before.store(now.wall_ns, Relaxed);
        self.cpu_before.store(now.cpu_ns, Relaxed);
        self.vain.store(0, Relaxed);
        self.looks.store(course.looks(), Relaxed);
        self.step.store(course.step.word(), Relaxed);
    }

    /// What the part has come to.
    fn done(&self, now: Now) -> Way {
        let us = |now: u64, before: &AtomicU64| {
            (now.saturating_sub(before.load(Relaxed)) / 1000).min(Way::LIMIT.into()) as u32
        };
        let opened = self.opened.load(Relaxed).wrapping_sub(self.opened_before.load(Relaxed));
        Way {
            opened: opened.min(Way::LIMIT),
            wall_us: us(now.wall_ns, &self.wall_before),
            cpu_us: us(now.cpu_ns, &self.cpu_before),
        }
    }

    /// [`MANY`] connections once more were opened.
    #[cold]
    fn has_opened_many(&self, now: impl FnOnce() -> Now) {
        let now = now();
        let before = self.many_at.swap(now.ms(), Relaxed);
        if self.is_rare() && now.ms().wrapping_sub(before) <= MANY_MS {
            let part = trial::part_at(now.wall_ns, PART_SHIFT);
            self.part.store(part, Relaxed);
            self.ask_at(now);
            self.keep(Course::begun(part), now);
        }
    }

    fn ask_at(&self, now: Now) {
        self.asked_at.store(now.ms(), Relaxed);
        self.opened_then.store(self.opened.load(Relaxed), Relaxed);
    }

    /// Whether the process opens few connections by now.
    fn opens_few(&self, now: Now) -> bool {
        let ms = now.ms().wrapping_sub(self.asked_at.load(Relaxed));
        if ms < FEW_MS {
            return false;
        }
        let opened = self.opened.load(Relaxed).wrapping_sub(self.opened_then.load(Relaxed));
        self.ask_at(now);
        u64::from(opened) * u64::from(MANY_MS) < u64::from(MANY / 4) * u64::from(ms)
    }

    /// Whether a wait looks before it sleeps. `now` is asked for at the end of a part.
    fn looks(&self, wall_ns: u64, now: impl FnOnce() -> Now) -> bool {
        let (ended, part) = (self.part.load(Relaxed), trial::part_at(wall_ns, PART_SHIFT));
        // Another thread may have looked at the clock later.
        let is_over = part.wrapping_sub(ended) as i32 > 0;
        if is_over && self.part.compare_exchange(ended, part, Relaxed, Relaxed).is_ok() {
            let now = now();
            let course = Course { part: ended, ..self.course() };
            self.keep(course.next(self.done(now), self.opens_few(now), part), now);
        }
        self.looks.load(Relaxed) && self.vain.load(Relaxed) < VAIN
    }

    /// What a look has come to. One that has lost a slice is the last one in the part.
    fn note(&self, found: bool, lost: bool) {
        let before = self.vain.load(Relaxed);
        let vain = match (found, lost) {
            (_, true) => LOST,
            (true, false) if before < LOST => 0,
            _ => before + 1,
        };
        if vain != before {
            self.vain.store(vain, Relaxed);
        }
    }
}

static PROCESS: Process = Process::new();

/// The process has opened a connection: one that it has asked for, or one that it has accepted.
#[inline]
pub fn opened() {
    let is_many = single::add(&PROCESS.opened, 1).wrapping_add(1).is_multiple_of(MANY);
    if is_many && config::get().busy_ns > 0 {
        PROCESS.has_opened_many(Now::get);
    }
}

/// How a wait goes on that has found nothing.
#[derive(Clone, Copy)]
pub struct Awake {
    /// For so long it looks again.
    ns: u64,
    /// All that happens meanwhile may take so long.
    most_ns: u64,
}

impl Awake {
    /// It sleeps.
    pub const NO: Awake = Awake { ns: 0, most_ns: 0 };

    /// As has proven better. `left_ns`: how long the wait may last.
    #[inline(always)]
    pub fn get(left_ns: impl FnOnce() -> u64) -> Awake {
        if PROCESS.is_rare() { Awake::NO } else { Awake::measured(left_ns()) }
    }

    #[cold]
    fn measured(most_ns: u64) -> Awake {
        let may = !kernel_only::is_sandboxed() && yields::pay();
        let looks = may && PROCESS.looks(clock::now_ns(), Now::get);
        let ns = if looks { AWAKE_NS >> PROCESS.vain.load(Relaxed).min(VAIN) } else { 0 };
        // What the user has set is the most; by default it is learnt.
        let config = config::get();
        let set_ns = if config.busy_adapts { AWAKE_NS } else { config.busy_ns };
        Awake { ns: ns.min(set_ns).min(most_ns), most_ns }
    }

    /// Whether it looks again.
    #[inline(always)]
    pub fn looks(self) -> bool {
        self.ns > 0
    }

    /// Looks until `ready` says that something has come, or the time is over; whether it did. Signals are kept away from then on, until
    /// the sleep that follows: the handler of one that is handled in between would end nothing.
    #[inline(always)]
    pub fn until(self, signals: &mut Signals, ready: impl FnMut() -> bool) -> bool {
        self.looks() && self.looks_until(signals, ready)
    }

    #[cold]
    fn looks_until(self, signals: &mut Signals, ready: impl FnMut() -> bool) -> bool {
        signals.keep();
        let spun = spin::look_with_yields(self.ns, self.most_ns, ready);
        PROCESS.note(spun.found > 0, spun.lost_ns > 0);
        spun.found > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::trial::PARTS;

    const PART_NS: u64 = 1 << PART_SHIFT;

    /// Connections that a process opens in a millisecond, and the CPU time of each in microseconds.
    #[derive(Clone, Copy)]
    struct Load {
        opened: u32,
        cpu_us: u64,
    }

    fn load(opened: u32, cpu_us: u64) -> Load {
        Load { opened, cpu_us }
    }

    /// A process, and its clocks.
    struct Run {
        process: Process,
        now: Now,
    }

    impl Run {
        fn new(begin_ns: u64) -> Run {
            Run { process: Process::new(), now: Now { wall_ns: begin_ns, cpu_ns: 0 } }
        }

        /// So many milliseconds, with this load while its waits sleep at once and that one while they look. How many it has looked.
        fn take(&mut self, ms: u64, loads: [Load; 2]) -> u64 {
            let mut looked = 0;
            for _ in 0..ms {
                self.now.wall_ns += 1_000_000;
                let now = self.now;
                let looks = !self.process.is_rare() && self.process.looks(now.wall_ns, || now);
                let load = loads[usize::from(looks)];
                self.now.cpu_ns += u64::from(load.opened) * load.cpu_us * 1000;
                for _ in 0..load.opened {
                    let all = self.process.opened.fetch_add(1, Relaxed) + 1;
                    if all.is_multiple_of(MANY) {
                        self.process.has_opened_many(|| now);
                    }
                }
                looked += u64::from(looks);
            }
            looked
        }
    }

    #[test]
    fn a_process_that_opens_few_connections_sleeps() {
        let mut run = Run::new(12_345_678);
        for _ in 0..100 {
            assert_eq!(run.take(100, [load(0, 0); 2]), 0);
            assert_eq!(run.take(3, [load(20, 40); 2]), 0);
        }
    }

    #[test]
    fn looks_that_bring_more_go_on() {
        for begin in 0..u64::from(PARTS) {
            let mut run = Run::new(begin * PART_NS + 1);
            run.take(150, [load(12, 84), load(29, 66)]);
            assert!(run.take(1000, [load(12, 84), load(29, 66)]) > 950, "{begin}");
        }
    }

    #[test]
    fn where_nobody_tells_cpu_time_looks_have_to_bring_much() {
        for (opened, expected) in [(10, 0..100), (15, 900..1001)] {
            let mut run = Run::new(1);
            run.take(300, [load(10, 0), load(opened, 0)]);
            let looked = run.take(1000, [load(10, 0), load(opened, 0)]);
            assert!(expected.contains(&looked), "{opened}: {looked} of 1000 ms");
        }
    }

    #[test]
    fn as_many_connections_by_less_cpu_time_are_better() {
        let mut run = Run::new(1);
        run.take(200, [load(16, 62), load(16, 50)]);
        assert!(run.take(1000, [load(16, 62), load(16, 50)]) > 850);
    }

    #[test]
    fn looks_that_bring_nothing_for_their_cpu_time_end() {
        let mut run = Run::new(1);
        run.take(300, [load(5, 60), load(5, 120)]);
        let looked = run.take(4000, [load(5, 60), load(5, 120)]);
        assert!(looked < 4000 / 20, "{looked} ms");
        // Clients that come back sooner if this process looks.
        run.take(1500, [load(5, 60), load(10, 60)]);
        assert!(run.take(1000, [load(5, 60), load(10, 60)]) > 900, "it has changed");
        run.take(4000, [load(10, 60), load(5, 60)]);
        assert!(run.take(1000, [load(10, 60), load(5, 60)]) < 100, "and back");
    }

    #[test]
    fn looks_that_lose_slices_are_tried_seldom() {
        let loads = [load(10, 60), load(1, 600)];
        let mut run = Run::new(1);
        run.take(300, loads);
        run.take(1000, loads);
        let looked = run.take(8000, loads);
        assert!((100..400).contains(&looked), "{looked} of 8000 ms");
    }

    #[test]
    fn where_looks_make_no_difference_waits_sleep() {
        let mut run = Run::new(1);
        for noise in [0, 1, 0, 0, 1, 1, 0, 1] {
            run.take(317, [load(20, 60), load(20, 59 + 2 * noise)]);
            assert_eq!(run.process.course().step, Step::Often { looks: false });
        }
        // Nor do looks go on that have paid once.
        run.take(2000, [load(10, 60), load(20, 60)]);
        assert_eq!(run.process.course().step, Step::Often { looks: true });
        run.take(6000, [load(20, 60), load(20, 66)]);
        assert_eq!(run.process.course().step, Step::Often { looks: false });
    }

    #[test]
    fn both_ends_of_connections_look_at_the_same_times() {
        let loads = [load(5, 60), load(5, 120)];
        let mut runs = [Run::new(3 * PART_NS + 5), Run::new(3 * PART_NS + 9)];
        // Both know by then that it is not worth while, and look in each period's first part, or each fourth one's.
        let begin = 480 * u64::from(PARTS) * PART_NS;
        for run in &mut runs {
            let ms = (begin - run.now.wall_ns) / 1_000_000;
            run.take(ms, loads);
        }
        let both = runs.map(|mut run| (0..40).map(|_| run.take(1, loads)).collect::<Vec<_>>());
        assert!(both[0].contains(&1), "{both:?}");
        assert_eq!(both[0], both[1]);
    }

    #[test]
    fn a_process_without_new_connections_sleeps_again() {
        let loads = [load(12, 84), load(29, 66)];
        let mut run = Run::new(1);
        run.take(300, loads);
        assert!(run.process.course().looks());
        run.take(2000, [load(0, 0); 2]);
        assert!(run.process.is_rare(), "it still waits");
        run.take(300, loads);
        run.now.wall_ns += 1_000_000_000;
        run.take(300, [load(0, 0); 2]);
        assert!(run.process.is_rare(), "it has not waited");
        run.take(300, loads);
        for _ in 0..20 {
            run.now.wall_ns += 49_000_000;
            run.take(1, [load(0, 0); 2]);
        }
        assert!(run.process.is_rare(), "it waits now and then");
    }

    #[test]
    fn looks_in_vain_end_until_the_next_part() {
        let mut run = Run::new(1);
        run.take(300, [load(12, 84), load(29, 66)]);
        let (now, process) = (run.now, &run.process);
        let looks = |at: u64| process.looks(now.wall_ns + at, || now);
        for _ in 0..VAIN {
            assert!(looks(0));
            process.note(false, false);
        }
        assert!(!looks(0));
        process.note(true, false);
        assert!(looks(0));
        process.note(true, true);
        process.note(true, false);
        assert!(!looks(0), "a slice was lost");
        assert!(looks(PART_NS) || looks(2 * PART_NS));
    }

    #[test]
    fn a_forked_child_whose_clock_begins_anew_learns_anew() {
        let loads = [load(12, 84), load(29, 66)];
        let mut run = Run::new(1);
        run.take(300, loads);
        run.now.cpu_ns = 0;
        run.take(500, loads);
        assert!(run.take(500, loads) > 450);
    }

    #[test]
    fn steps_are_kept_as_they_are() {
        for step in [Step::Rare, Step::Often { looks: false }, Step::Often { looks: true }] {
            assert_eq!(Step::of(step.word()), step);
        }
    }
}
