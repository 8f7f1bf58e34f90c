//! Locks without a kernel object: one word, one atomic when nobody competes, and a holder that is known.
//!
//! The word names its holder, so the same thread coming again from a signal handler is recognised (and
//! refused, where a mutex would hang), and in shared memory the death of the holder can be found out.

use crate::sync::AtomicU64;
use crate::sync::Ordering::{Acquire, Relaxed, Release};

/// Why a lock was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The caller's own thread holds it: we are in a signal handler that interrupted the holder.
    Reentered,
    /// The waiting policy gave up.
    GaveUp,
}

/// What to do while somebody else holds the lock.
pub trait Wait {
    /// Called between attempts with the holder's word; `Steal` only when the holder is dead.
    fn wait(&mut self, holder: u64, attempt: u32) -> Verdict;
}

/// A waiting policy's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Try again.
    Again,
    /// The holder is dead: take the lock from it.
    Steal,
    /// Stop trying.
    GiveUp,
}

/// In whose hands a lock was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// In nobody's.
    Free,
    /// In those of a dead holder, which may have left its step half done.
    Left,
}

/// Takes `word` for holder `me` (not 0).
///
/// # Errors
/// See [`Refused`].
#[inline(always)]
pub fn acquire(word: &AtomicU64, me: u64, wait: &mut impl Wait) -> Result<Found, Refused> {
    // Acquire: pairs with the Release in `release`.
    if word.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
        return Ok(Found::Free);
    }
    acquire_slow(word, me, wait)
}

#[cold]
fn acquire_slow(word: &AtomicU64, me: u64, wait: &mut impl Wait) -> Result<Found, Refused> {
    let mut attempt = 0;
    let mut holder = word.load(Relaxed);
    loop {
        if holder == me {
            return Err(Refused::Reentered);
        }
        let expect = if holder == 0 {
            0
        } else {
            match wait.wait(holder, attempt) {
                Verdict::Again => {
                    attempt = attempt.saturating_add(1);
                    holder = word.load(Relaxed);
                    continue;
                }
                Verdict::Steal => holder,
                Verdict::GiveUp => return Err(Refused::GaveUp),
            }
        };
        match word.compare_exchange(expect, me, Acquire, Relaxed) {
            Ok(0) => return Ok(Found::Free),
            Ok(_) => return Ok(Found::Left),
            Err(found) => holder = found,
        }
    }
}

/// Gives `word` back.
#[inline(always)]
pub fn release(word: &AtomicU64) {
    // Release: pairs with the Acquire in `acquire`.
    word.store(0, Release);
}
