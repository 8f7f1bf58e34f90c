//! The arm bits of a ring: which sleepers wait for data, and which for room.

use super::{Data, ROOM_SHIFT, Ring, writable};
use crate::layout::{ARM_EAR, ARM_RINGING, ARM_TCP, WINDOW_SPLIT};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::sync::{AtomicU32, fence};

impl Ring<'_> {
    /// The consumer announces that it is going to sleep; it must look at the ring once more afterwards.
    #[inline]
    pub fn arm_rx(&self, bits: u32) {
        // Release: pairs with the Acquire in `take_rx_sleepers`; whoever hears of the bell then rung also
        // sees that this sleeper is counted (`crate::bell`).
        self.dir.arm.rx.fetch_or(bits, Release);
        // Pairs with the fence in `has_rx_sleepers`.
        fence(SeqCst);
    }

    /// After `publish`: whether the producer has to wake somebody; false in the common case.
    #[inline(always)]
    pub fn has_rx_sleepers(&self) -> bool {
        // Pairs with the fence in `arm_rx`.
        fence(SeqCst);
        self.dir.arm.rx.load(Relaxed) != 0
    }

    /// The sleepers that the caller has to wake (`ARM_*`). Inside [`crate::span::TxSpan::ring`]. `shared`: other processes send here, too, and
    /// look after the sleepers until [`Ring::rang_rx`], should this one be killed before the doorbell is in the stream.
    #[inline]
    pub fn take_rx_sleepers(&self, shared: bool) -> u32 {
        // ARM_LEFT stays: it concerns every byte published from now on.
        take(&self.dir.arm.rx, shared)
    }

    /// The producer announces that it is going to sleep for room; it must look once more afterwards, and
    /// sleep only if [`Ring::is_writable`] still says no.
    #[inline]
    pub fn arm_tx(&self, bits: u32) {
        // Release: as in `arm_rx`.
        self.dir.arm.tx.fetch_or(bits, Release);
        // Pairs with the fence in `has_tx_sleepers`.
        fence(SeqCst);
    }

    /// Gives the first `len` bytes of `data` back and says whether somebody is to be woken; false in the common
    /// case.
    ///
    /// Looks for sleepers only when the cursor passes a mark (a multiple of a fraction of the window) and
    /// leaves room worth waking for: few fences, and no wake-up for a crumb. None is lost: a producer
    /// sleeps only while the ring is not writable ([`Ring::is_writable`]); it becomes writable at a cursor
    /// ahead of the one the producer saw, and at the next mark the consumer looks. What it has seen of
    /// `prod` may be old, which makes it look too often, never too seldom. The window may have grown meanwhile: it knows
    /// once it has seen the sleeper.
    #[inline(always)]
    pub fn consume_waking(&self, data: &Data, len: usize) -> bool {
        let cons = data.cons.wrapping_add(len as u64);
        self.consume(cons);
        let (window, unread) = (data.place.window, data.len.saturating_sub(len));
        let passed = (data.cons ^ cons) >= data.place.mark(data.cons);
        passed
            && (writable(unread, window) || window <= self.near())
            && self.has_tx_sleepers()
            && self.window().is_ok_and(|window| writable(unread, window))
    }

    /// Whether there is room worth waking for, as the producer sees it. It sleeps only when not.
    #[inline]
    pub fn is_writable(&self) -> bool {
        let word = self.dir.producer.window.load(Relaxed);
        let Ok(window) = self.check(word) else { return false };
        let limit = self.limit(window.len);
        writable(self.unread(), limit)
            && (word & WINDOW_SPLIT == 0 || self.is_writable_beside_old(word, limit))
    }

    /// Whether so much is free where the bytes from before the window grew do not lie.
    #[cold]
    pub(super) fn is_writable_beside_old(&self, word: u64, limit: usize) -> bool {
        let end = self.end_beside_old(word, self.dir.consumer.cons.load(Relaxed));
        let prod = self.dir.producer.prod.load(Relaxed);
        end.is_none_or(|end| end.wrapping_sub(prod) >= (limit >> ROOM_SHIFT) as u64)
    }

    /// After `consume` past a mark (see [`Ring::consume_waking`]): whether the consumer has to wake somebody.
    #[inline(always)]
    pub fn has_tx_sleepers(&self) -> bool {
        // Pairs with the fence in `arm_tx`.
        fence(SeqCst);
        self.dir.arm.tx.load(Relaxed) != 0
    }

    /// The sleepers that the caller has to wake (`ARM_*`), as [`Ring::take_rx_sleepers`].
    #[inline]
    pub fn take_tx_sleepers(&self, shared: bool) -> u32 {
        take(&self.dir.arm.tx, shared)
    }

    /// The doorbell is in the stream whose sleepers [`Ring::take_rx_sleepers`] has taken as `shared`.
    pub fn rang_rx(&self) {
        self.dir.arm.rx.fetch_and(!ARM_RINGING, Release);
    }

    /// The same of [`Ring::take_tx_sleepers`].
    pub fn rang_tx(&self) {
        self.dir.arm.tx.fetch_and(!ARM_RINGING, Release);
    }

    /// Somebody of this end was killed, and may have been about to wake the other one's sleepers for room.
    pub fn stand_in_for_consumer(&self) {
        self.dir.arm.tx.fetch_or(ARM_RINGING, Release);
    }

    /// Having found the ring empty: whether sleepers for room wait for a doorbell of a killed process. `shared`: others
    /// may have been, of whom nobody knows yet.
    #[inline]
    pub fn owes_wake_up(&self, shared: bool) -> bool {
        let bits = self.dir.arm.tx.load(Relaxed);
        bits & ARM_RINGING != 0 || (shared && bits != 0)
    }

    /// Takes the sleepers' arm bits back, of all of them. Only where no other thread of this end arms
    /// meanwhile: another's bit would be lost, and its wake-up. Staying armed costs one needless doorbell.
    #[inline]
    pub fn disarm_rx(&self) {
        if self.dir.arm.rx.load(Relaxed) & SLEEPERS != 0 {
            self.dir.arm.rx.fetch_and(!SLEEPERS, Relaxed);
        }
    }

    /// Whether the next bytes wake so (`ARM_*`), or by a doorbell, which wakes all, as far as this end can tell; a waker may be taking the bit just
    /// now.
    #[inline]
    pub fn is_rx_armed_by(&self, bit: u32) -> bool {
        self.dir.arm.rx.load(Relaxed) & (bit | ARM_TCP) != 0
    }
}

/// The bits of those that sleep.
const SLEEPERS: u32 = ARM_TCP | ARM_EAR;

/// Takes the sleepers' bits out of an arm word. Whoever was about to ring may have been killed: that is done again.
#[inline]
fn take(arm: &AtomicU32, shared: bool) -> u32 {
    const AWAITED: u32 = SLEEPERS | ARM_RINGING;
    // Acquire: see `arm_rx`. Release: a thread that finds the bits taken also finds the bell begun (`crate::back`).
    let bits = match shared {
        false => arm.fetch_and(!AWAITED, AcqRel),
        true => {
            let ringing =
                |bits: u32| (bits & AWAITED != 0).then_some((bits | ARM_RINGING) & !SLEEPERS);
            arm.fetch_update(AcqRel, Acquire, ringing).unwrap_or_else(|bits| bits)
        }
    };
    if bits & ARM_RINGING != 0 { bits | ARM_TCP } else { bits }
}
