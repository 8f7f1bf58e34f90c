//! Doorbells: bytes on the connection's own TCP socket that wake whoever sleeps there.
//!
//! TCP has been read to its span's boundary, so every byte on it is a doorbell. It wakes all sleepers of
//! this end, of whatever process, whether they wait for data or for room, and goes on doing so until
//! somebody reads it away. Reading it away is the delicate step: the bell may be another sleeper's only one.
//!
//! A thread that may sleep: count yourself as a sleeper, [`Ring::arm_rx`] or [`Ring::arm_tx`], look once more, sleep.
//! A thread that wakes: publish or consume, look for arm bits, and if there are any, [`TxSpan::ring`]: take them, count in
//! `bells_sent`, then send the byte.
//!
//! [`TxSpan::ring`]: crate::span::TxSpan::ring

use crate::layout::{ARM_TCP, End};
use crate::ring::Ring;
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use crate::sync::{AtomicU32, fence};

/// The doorbells that one end receives.
#[derive(Clone, Copy)]
pub struct Bells<'a> {
    /// The end that receives them.
    pub end: &'a End,
    /// The ring this end reads.
    pub rx: Ring<'a>,
    /// The ring this end writes.
    pub tx: Ring<'a>,
}

/// What became of a doorbell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rung {
    /// It was sent.
    Rung,
    /// Another has woken them meanwhile.
    Nobody,
    /// There are no doorbells any more: the direction goes back to TCP, or the receiver wants it to ([`crate::back`]).
    Back,
}

/// What to do about doorbells found while the ring is empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drain {
    /// Data came meanwhile: read it, do not sleep.
    Data,
    /// They are waking a sleeper for room: leave them. A thread that must sleep now does it with a limit.
    Leave,
    /// Read exactly so many bytes away (fewer if they are not there yet) and report them to
    /// [`Bells::drained`]. May be 0.
    Bells(u32),
}

impl Bells<'_> {
    /// Decides about the doorbells in the TCP stream. The caller holds the receiving lock, keeps it until
    /// [`Bells::drained`], and has read TCP to the boundary. A thread that is counted as a sleeper itself loses
    /// nothing by it but time.
    ///
    /// `readers` and `writers` tell whether anybody else of this end is asleep, or about to be, for data
    /// or for room. Their sleep is announced anew before the bell they have not heard yet is taken away.
    #[inline]
    pub fn drain(&self, readers: impl FnOnce() -> bool, writers: impl FnOnce() -> bool) -> Drain {
        // Acquire: a bell counted here was rung for an event the looks below cannot miss. One rung later
        // is not among the bytes to be read, hence the count, and hence before the looks.
        let sent = self.rx.dir().producer.bells_sent.load(Acquire);
        let pending = sent.wrapping_sub(self.end.bells_drained.load(Relaxed));
        if pending == 0 {
            return Drain::Bells(0);
        }
        if readers() {
            self.rx.arm_rx(ARM_TCP);
        }
        if self.rx.has_data() {
            return Drain::Data;
        }
        if writers() {
            self.tx.arm_tx(ARM_TCP);
            if self.tx.is_writable() {
                return Drain::Leave;
            }
        }
        Drain::Bells(pending)
    }

    /// Accounts for doorbells read away.
    #[inline]
    pub fn drained(&self, bells: u32) {
        // Relaxed: written under the receiving lock.
        self.end.bells_drained.fetch_add(bells, Relaxed);
    }
}

/// The sleepers of one end that wait for the same: how many of this process, and how many of all processes that share the
/// end, as far as it is shared. There may be too many in the latter, after a fork beside a sleep or the death of a
/// sleeper, and never too few.
#[derive(Clone, Copy)]
pub struct Sleepers<'a> {
    /// This process'.
    pub own: &'a AtomicU32,
    /// All: [`End::rx_sleepers`] or [`End::tx_sleepers`]; `None` where there is no slot.
    pub all: Option<&'a AtomicU32>,
}

impl Sleepers<'_> {
    /// One more, about to announce itself. `is_shared`: whether [`Sleepers::share`] has been called, by its `share`.
    pub fn enter(&self, is_shared: impl FnOnce() -> bool) {
        self.own.fetch_add(1, AcqRel);
        // Pairs with the fence in `share`: it counts us, or we see that it is shared.
        fence(SeqCst);
        if let Some(all) = self.all.filter(|_| is_shared()) {
            all.fetch_add(1, AcqRel);
        }
    }

    /// One less. Nothing where it was forgotten: a process that was forked by a signal handler has none, and goes on in the
    /// call that was interrupted.
    pub fn leave(&self, is_shared: impl FnOnce() -> bool) {
        if self.own.load(Relaxed) == 0 {
            return;
        }
        if let Some(all) = self.all.filter(|_| is_shared()) {
            less(all);
        }
        // Last: a thread that does not find the sleeper among its own any more, finds it taken out of all.
        less(self.own);
    }

    /// This process has held the end alone and does not from now on, as `share` makes known to its threads.
    pub fn share(&self, share: impl FnOnce()) {
        if let Some(all) = self.all {
            // What earlier holders have left.
            all.store(0, Relaxed);
        }
        share();
        // Pairs with the fence in `enter`.
        fence(SeqCst);
        if let Some(all) = self.all {
            all.fetch_add(self.own.load(Acquire), AcqRel);
        }
    }
}

/// One less, unless it has been forgotten among the dead.
pub fn less(count: &AtomicU32) {
    let _ = count.fetch_update(AcqRel, Relaxed, |n| n.checked_sub(1));
}
