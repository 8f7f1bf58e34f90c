//! Whether a call that a signal interrupts goes on: what the program's handlers say (sigaction(2), SA_RESTART).

use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::Relaxed;

use crate::os::sys::Handling;
use crate::os::{clock, sys};

/// What the handlers of this program say of calls that a signal interrupts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Handlers {
    /// They go on (SA_RESTART), or nothing is handled.
    Restart,
    /// They end.
    End,
    /// The ones say this, the others that, and which of them ran nobody tells.
    Both,
}

impl Handlers {
    const BITS: u64 = 3;

    /// What they say, or said a moment ago: a system call for each signal is worth a memory of some sleeps.
    #[cold]
    pub fn now() -> Handlers {
        Handlers::believed_for(100_000)
    }

    fn believed_for(ns: u64) -> Handlers {
        let found = FOUND_HANDLERS.load(Relaxed);
        if clock::now_ns().wrapping_sub(found) < ns {
            return Handlers::of(found & Handlers::BITS);
        }
        Handlers::ask()
    }

    /// The same, or said within the last second.
    #[cold]
    pub fn lately() -> Handlers {
        Handlers::believed_for(1_000_000_000)
    }

    /// What they say now.
    #[cold]
    pub fn ask() -> Handlers {
        let [ends, goes_on] = sets();
        let bits = u64::from(ends != 0) | u64::from(goes_on != 0) << 1;
        FOUND_HANDLERS.store(clock::now_ns() & !Handlers::BITS | bits, Relaxed);
        Handlers::of(bits)
    }

    /// A bit for those that do not restart, and one for those that do.
    fn of(bits: u64) -> Handlers {
        match bits {
            0b01 => Handlers::End,
            0b11 => Handlers::Both,
            _ => Handlers::Restart,
        }
    }
}

/// The signals whose handlers end a call, and those after whose handlers it goes on, a bit each.
#[cold]
pub fn sets() -> [u64; 2] {
    // 32 and 33 are libc's own.
    let signals = (1..=64).filter(|signal| !matches!(signal, 32 | 33));
    signals.fold([0; 2], |mut sets, signal| {
        let bit = 1 << (signal - 1);
        match sys::handling(signal) {
            Handling::None => {}
            Handling::Ends => sets[0] |= bit,
            Handling::Restarts => sets[1] |= bit,
        }
        sets
    })
}

/// What was found, in the lowest bits, and when.
static FOUND_HANDLERS: AtomicU64 = AtomicU64::new(0);
