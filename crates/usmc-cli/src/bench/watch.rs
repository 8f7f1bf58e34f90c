//! Looks at connections while a load runs, which may end before anybody asks.

use std::time::{Duration, Instant};

use super::mode::Mode;
use super::proof::{Look, Wanted};

/// Between two looks at connections that are not in shared memory yet, and before the last one.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const LAST_LOOK: Duration = Duration::from_millis(400);

/// What has been seen so far.
pub struct Watch {
    mode: Mode,
    wanted: Wanted,
    ends: usize,
    best: Look,
    next: Instant,
    looks_after_the_first: usize,
}

impl Watch {
    /// For a run in this mode in which that is to be shown. `ends` of each connection are looked at, one or both.
    pub fn new(mode: Mode, wanted: Wanted, ends: usize) -> Watch {
        let next = Instant::now() + LOOK_AGAIN;
        Watch { mode, wanted, ends, best: Look::default(), next, looks_after_the_first: 0 }
    }

    /// Looks, if it is time, and takes what shows most. There is one look after the first that shows what is wanted, when all
    /// connections are there: each takes time.
    pub fn tick(&mut self, look: impl FnOnce() -> Look) {
        if self.looks_after_the_first >= 2 || Instant::now() <= self.next {
            return;
        }
        let look = look();
        if look.rank() >= self.best.rank() || look.bytes > self.best.bytes {
            self.best = look;
        }
        let shown = self.mode != Mode::Usmc || self.wanted.is_shown_by(&self.best, self.ends);
        self.looks_after_the_first += usize::from(shown);
        self.next = Instant::now() + if shown { LAST_LOOK } else { LOOK_AGAIN };
    }

    /// What showed most.
    pub fn best(&self) -> &Look {
        &self.best
    }
}
