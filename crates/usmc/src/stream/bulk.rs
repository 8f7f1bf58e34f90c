//! Which connections stream, and how their bytes get into the ring. A few connections at once send by the far parts of their rings
//! all the time: a window larger than a core's own caches is handed over in the shared one. More of them would push each other's
//! bytes out of that. Where the two cores share no cache, bytes that go past the caches arrive sooner; which cores these are changes
//! with each move of a thread (and a virtual machine is not told of moves), so that each sender measures both ways.
//! docs/performance.md has the figures.

use usmc_shm::sync::Ordering::Relaxed;

use usmc_shm::copy::{CAN_PASS, Stores};
use usmc_shm::ring::Room;
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::clock;
use crate::record::conn::{self, Conn};

/// A send of so many bytes is one of a stream.
pub const STREAM: usize = 16 << 10;
/// So many connections of a process stream at once.
const SEATS: usize = 4;
/// A connection streams after so many large sends.
const SENDS: u32 = 16;
/// A seat is free when it was not used for so long, in milliseconds.
const KEPT_MS: u32 = 100;

/// What a connection that streams has. The holder of that connection's sending lock writes it, but for `held`.
struct Seat {
    /// The connection's record plus one, and in the upper half the millisecond of its last use; 0 = free.
    held: AtomicU64,
    step: AtomicU32,
    costs: [AtomicU32; 2],
    began: AtomicU64,
    bytes: AtomicU64,
    tried_ms: AtomicU32,
}

impl Seat {
    const fn new() -> Seat {
        Seat {
            held: AtomicU64::new(0),
            step: AtomicU32::new(0),
            costs: [const { AtomicU32::new(0) }; 2],
            began: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            tried_ms: AtomicU32::new(0),
        }
    }

    fn course(&self) -> Course {
        Course {
            step: Step::of(self.step.load(Relaxed)),
            settled: self.costs[0].load(Relaxed),
            best: self.costs[1].load(Relaxed),
            began: self.began.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            tried_ms: self.tried_ms.load(Relaxed),
        }
    }

    fn keep(&self, course: Course) {
        self.step.store(course.step.word(), Relaxed);
        self.costs[0].store(course.settled, Relaxed);
        self.costs[1].store(course.best, Relaxed);
        self.began.store(course.began, Relaxed);
        self.bytes.store(course.bytes, Relaxed);
        self.tried_ms.store(course.tried_ms, Relaxed);
    }
}

static ALL: [Seat; SEATS] = [const { Seat::new() }; SEATS];

/// A large send has found room in the ring itself, with the sending lock: whether its bytes go by the far part.
pub fn is_seated(conn: &Conn) -> bool {
    let sends = conn.streamed.load(Relaxed);
    if sends < SENDS {
        conn.streamed.store(sends + 1, Relaxed);
        return false;
    }
    let now = clock::now_ms();
    seat_of(conn, now).is_some() || sits_down(conn, now)
}

/// The connection's seat, which is in use now.
fn seat_of(conn: &Conn, now_ms: u32) -> Option<&'static Seat> {
    let me = conn::index_of(conn) + 1;
    let seat = ALL.iter().find(|seat| seat.held.load(Relaxed) as u32 == me)?;
    seat.held.store(word(me, now_ms), Relaxed);
    Some(seat)
}

fn sits_down(conn: &Conn, now_ms: u32) -> bool {
    let me = conn::index_of(conn) + 1;
    let free = ALL.iter().find(|seat| {
        let held = seat.held.load(Relaxed);
        let is_free = held == 0 || now_ms.wrapping_sub((held >> 32) as u32) > KEPT_MS;
        let mine = word(me, now_ms);
        is_free && seat.held.compare_exchange(held, mine, Relaxed, Relaxed).is_ok()
    });
    if let Some(seat) = free {
        seat.keep(Course::new(now_ms));
    }
    free.is_some()
}

fn word(me: u32, now_ms: u32) -> u64 {
    u64::from(now_ms) << 32 | u64::from(me)
}

/// How up to `want` bytes get into `room`, with the sending lock. `now`: [`clock::tsc`].
#[inline(always)]
pub fn stores(conn: &Conn, room: &Room, want: usize, now: u64) -> Stores {
    if !CAN_PASS || want < STREAM || room.place.window <= 1 << conn.full_shift() {
        return Stores::Cached;
    }
    way_of_stream(conn, room.free.min(want), now)
}

#[cold]
fn way_of_stream(conn: &Conn, bytes: usize, now: u64) -> Stores {
    let now_ms = clock::now_ms();
    let Some(seat) = seat_of(conn, now_ms) else { return Stores::Cached };
    let course = seat.course().sent(bytes as u64, now, now_ms);
    seat.keep(course);
    course.step.way()
}

/// The steps of a sender: `Settled` leads to `Lead` when a try is due, `Lead` to `Tries`, and `Tries` to `Settled` with the better way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// The sender goes one way, and has measured so many stretches of it.
    Settled(Stores, u32),
    /// The sender tries this way; the receiver still reads the bytes that came by the other one.
    Lead(Stores),
    /// The sender tries this way, and has measured so many stretches of it.
    Tries(Stores, u32),
}

impl Step {
    fn way(self) -> Stores {
        match self {
            Step::Settled(way, _) | Step::Lead(way) | Step::Tries(way, _) => way,
        }
    }

    fn word(self) -> u32 {
        let (step, n) = match self {
            Step::Settled(_, n) => (0, n),
            Step::Lead(_) => (1, 0),
            Step::Tries(_, n) => (2, n),
        };
        u32::from(self.way() == Stores::Past) | step << 1 | n << 3
    }

    fn of(word: u32) -> Step {
        let way = if word & 1 == 0 { Stores::Cached } else { Stores::Past };
        match word >> 1 & 3 {
            0 => Step::Settled(way, word >> 3),
            1 => Step::Lead(way),
            _ => Step::Tries(way, word >> 3),
        }
    }
}

fn other(way: Stores) -> Stores {
    if way == Stores::Cached { Stores::Past } else { Stores::Cached }
}

/// What a sender knows of both ways. It measures how long a stretch takes, the receiver's part included. A stretch that was
/// interrupted says nothing, so that the best of a few counts.
#[derive(Clone, Copy, Debug)]
struct Course {
    step: Step,
    /// What the settled way costs, in cycles for each page, and the best of the step's stretches.
    settled: u32,
    best: u32,
    /// Where the stretch began ([`clock::tsc`]), and how many bytes of it were sent.
    began: u64,
    bytes: u64,
    /// The end of the last try, in milliseconds.
    tried_ms: u32,
}

impl Course {
    /// Longer than the far part: most of a stretch is sent while the receiver reads bytes that came by this way, too.
    const STRETCH: u64 = 8 << 20;
    /// As long as the far part.
    const LEAD: u64 = 4 << 20;
    const STRETCHES: u32 = 3;
    /// From one try to the next one, which takes a millisecond or two, in milliseconds.
    const EACH_MS: u32 = 100;
    /// The least, where the settled way has become slower.
    const LEAST_MS: u32 = 20;

    /// A stream begins: it tries both ways soon.
    fn new(now_ms: u32) -> Course {
        Course {
            step: Step::Settled(Stores::Cached, 0),
            settled: u32::MAX,
            best: u32::MAX,
            began: 0,
            bytes: 0,
            tried_ms: now_ms.wrapping_sub(Course::EACH_MS),
        }
    }

    /// So many bytes are about to be sent.
    fn sent(mut self, bytes: u64, now: u64, now_ms: u32) -> Course {
        let goal = if matches!(self.step, Step::Lead(_)) { Course::LEAD } else { Course::STRETCH };
        if self.began == 0 {
            (self.began, self.bytes) = (now, 0);
        } else if self.bytes >= goal {
            let cost = now.wrapping_sub(self.began) / (self.bytes >> 12);
            self = self.measured(u32::try_from(cost).unwrap_or(u32::MAX), now_ms);
            (self.began, self.bytes) = (now, 0);
        }
        self.bytes += bytes;
        self
    }

    /// A stretch is over.
    fn measured(mut self, cost: u32, now_ms: u32) -> Course {
        const LAST: u32 = Course::STRETCHES - 1;
        let best = self.best.min(cost);
        (self.step, self.best) = match self.step {
            Step::Settled(way, n) if n < LAST => (Step::Settled(way, n + 1), best),
            Step::Settled(way, _) => {
                let wait = if is_half_more(best, self.settled) {
                    Course::LEAST_MS
                } else {
                    Course::EACH_MS
                };
                self.settled = best;
                let is_due = now_ms.wrapping_sub(self.tried_ms) >= wait;
                (if is_due { Step::Lead(other(way)) } else { Step::Settled(way, 0) }, u32::MAX)
            }
            Step::Lead(way) => (Step::Tries(way, 0), u32::MAX),
            Step::Tries(way, n) if n < LAST && !is_half_more(cost, self.settled) => {
                (Step::Tries(way, n + 1), best)
            }
            Step::Tries(way, _) => {
                self.tried_ms = now_ms;
                let is_better = best < self.settled - self.settled / 4;
                if is_better {
                    self.settled = best;
                }
                (Step::Settled(if is_better { way } else { other(way) }, 0), u32::MAX)
            }
        };
        self
    }
}

fn is_half_more(cost: u32, than: u32) -> bool {
    cost > than.saturating_add(than / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams `ms` milliseconds in sends of 64 KB, at `cost(way)` cycles for each page, with 3000 cycles for a microsecond. How
    /// many bytes went each way.
    fn stream(course: &mut Course, now: &mut u64, ms: u64, cost: [u64; 2]) -> [u64; 2] {
        const BYTES: u64 = 64 << 10;
        let mut sent = [0; 2];
        let end = *now + ms * 3_000_000;
        while *now < end {
            *course = course.sent(BYTES, *now, (*now / 3_000_000) as u32);
            let way = course.step.way() as usize;
            sent[way] += BYTES;
            *now += cost[way] * (BYTES >> 12);
        }
        sent
    }

    fn begun() -> (Course, u64) {
        (Course::new(1), 3_000_000)
    }

    #[test]
    fn a_stream_goes_the_faster_way_after_each_change() {
        const NEAR: [u64; 2] = [320, 900];
        const APART: [u64; 2] = [2500, 900];
        let (mut course, mut now) = begun();
        stream(&mut course, &mut now, 30, NEAR);
        assert_eq!(course.step.way(), Stores::Cached);
        for _ in 0..3 {
            stream(&mut course, &mut now, 300, APART);
            let [cached, past] = stream(&mut course, &mut now, 1000, APART);
            assert!(cached * 50 < past, "{cached} beside {past}");
            stream(&mut course, &mut now, 300, NEAR);
            let [cached, past] = stream(&mut course, &mut now, 1000, NEAR);
            assert!(past * 50 < cached, "{past} beside {cached}");
        }
    }

    #[test]
    fn trying_the_slower_way_takes_little() {
        let (mut course, mut now) = begun();
        let [cached, past] = stream(&mut course, &mut now, 10_000, [320, 900]);
        assert!(past * 100 < cached, "{past} of {cached}");
        assert!(past > 0);
    }

    #[test]
    fn a_stream_that_both_ways_take_alike_stays_where_it_is() {
        let (mut course, mut now) = begun();
        let [cached, past] = stream(&mut course, &mut now, 10_000, [2000, 1800]);
        assert!(past * 8 < cached, "{past} of {cached}");
        assert_eq!(course.step.way(), Stores::Cached);
    }

    #[test]
    fn steps_are_kept_as_they_are() {
        for way in [Stores::Cached, Stores::Past] {
            for step in [Step::Settled(way, 2), Step::Lead(way), Step::Tries(way, 1)] {
                assert_eq!(Step::of(step.word()), step);
            }
        }
    }
}
