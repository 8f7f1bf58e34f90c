//! The locks of an end that several processes share.

use usmc_shm::layout::{End, Slot};
use usmc_shm::span::RxSpan;
use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::Relaxed;

use crate::conn::{Conn, F_SHARED};
use crate::process::{Held, SharedLock};

/// A lock in the slot, held where several processes share this end.
pub struct Family<'a>(Option<SharedLock<'a>>);

impl<'a> Family<'a> {
    /// The sending direction's; `None` when the peer made it unusable.
    #[inline(always)]
    pub fn sending(conn: &Conn, slot: &'a Slot) -> Option<Family<'a>> {
        let end = conn.end(slot);
        let family = Family::enter(conn, end, &end.tx_lock)?;
        if family.0.is_some() {
            conn.follow_window(slot);
        }
        Some(family)
    }

    /// The receiving direction's, likewise.
    #[inline(always)]
    pub fn receiving(conn: &Conn, slot: &'a Slot) -> Option<Family<'a>> {
        let end = conn.end(slot);
        let family = Family::enter(conn, end, &end.rx_lock)?;
        if family.0.as_ref().is_some_and(SharedLock::was_left) {
            // It may have read bytes that it did not account for.
            RxSpan::new(slot, conn.side()).recount();
        }
        Some(family)
    }

    /// The caller has the record's own lock of that direction.
    #[inline(always)]
    fn enter(conn: &Conn, end: &End, word: &'a AtomicU64) -> Option<Family<'a>> {
        // Another number: somebody whom this process has not heard of is here as well ([`super::fetch`]).
        if !conn.has(F_SHARED) && end.refs.load(Relaxed) == 1 {
            return Some(Family(None));
        }
        Some(Family(Some(SharedLock::enter(word).ok()?)))
    }
}

/// Both locks of the receiving direction: this process' threads are kept out, and the processes that share this end.
/// Whoever asks the kernel how much has been read needs them.
pub struct Receiving<'a> {
    _family: Family<'a>,
    _held: Held<'a>,
}

impl<'a> Receiving<'a> {
    /// `None` in a signal handler that has interrupted a receive, or when the peer made the lock unusable.
    pub fn enter(conn: &'a Conn, slot: &'a Slot) -> Option<Receiving<'a>> {
        let held = conn.rx_lock.enter()?;
        Some(Receiving { _family: Family::receiving(conn, slot)?, _held: held })
    }
}
