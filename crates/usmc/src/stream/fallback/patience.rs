//! How long one step of a way back may take.

use crate::os::clock;
use crate::os::sys::{self, Errno};

/// How long a peer's doorbell may be in flight; it is one system call that does not wait.
pub const BELL_NS: u64 = 1_000_000_000;

/// How long the CPU is only given away for it.
const YIELDING_NS: u64 = 1_000_000;

/// The same for a call that comes again by itself.
pub const BRIEF_NS: u64 = 20_000_000;

/// Gives up after a time in which the peer, if it runs at all, has done its part.
pub struct Patience {
    since: u64,
    most_ns: u64,
}

impl Patience {
    /// From now on, for a second.
    pub fn new() -> Patience {
        Patience::lasting(BELL_NS)
    }

    /// From now on, for so many nanoseconds.
    pub fn lasting(most_ns: u64) -> Patience {
        Patience { since: clock::now_ns(), most_ns }
    }

    /// From now on, for what comes again by itself otherwise.
    pub fn brief() -> Patience {
        Patience::lasting(BRIEF_NS)
    }

    /// Nanoseconds since then.
    pub fn lasted_ns(&self) -> u64 {
        clock::now_ns() - self.since
    }

    /// Gives the CPU away.
    ///
    /// # Errors
    /// EBUSY once it is over.
    pub fn wait(&self) -> Result<(), Errno> {
        if self.lasted_ns() > YIELDING_NS {
            // The awaited thread may be of a lower priority, and have this CPU.
            sys::poll1(-1, 0, 1);
        } else {
            sys::sched_yield();
        }
        if self.lasted_ns() < self.most_ns { Ok(()) } else { Err(libc::EBUSY) }
    }
}
