//! One direction: a byte ring with monotonic cursors, one producing and one consuming end.
//!
//! The producer writes bytes, then `prod` (Release); the consumer reads `prod` (Acquire), the bytes, then
//! writes `cons` (Release), which the producer reads (Acquire) before it reuses the room. A position is
//! the cursor modulo the window; the window grows only while the ring is empty, and its size is published
//! by the same Release store of `prod` as the first bytes that use it.
//!
//! Sleep and wake are store–fence–load on both sides ([`Ring::arm_rx`] against [`Ring::has_rx_sleepers`],
//! [`Ring::arm_tx`] against [`Ring::has_tx_sleepers`]): either the sleeper sees the new cursor, or the
//! waker sees the arm bit.

use crate::Broken;
use crate::copy::{copy_in, copy_out};
use crate::layout::{ARM_TCP, Direction, WINDOW_SHIFT_MIN};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::sync::{Byte, MODEL, fence};

/// A sleeping producer is woken when `window >> ROOM_SHIFT` is free: a quarter, where TCP waits for a third
/// (`sk_stream_is_writeable`), so that whoever waits for a writer never waits longer than with TCP.
pub const ROOM_SHIFT: u32 = if MODEL { 1 } else { 2 };
/// The consumer looks for sleepers at multiples of `window >> MARK_SHIFT`.
pub const MARK_SHIFT: u32 = if MODEL { 1 } else { 4 };

#[inline(always)]
fn writable(unread: usize, window: usize) -> bool {
    unread <= window - (window >> ROOM_SHIFT)
}

/// One direction of a mapped slot.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    dir: &'a Direction,
    data: *mut Byte,
    ring_shift: u32,
}

/// Room found by the producer. Valid until the producer publishes.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// The cursor of the first free byte.
    pub prod: u64,
    /// Free bytes.
    pub free: usize,
    /// Bytes of the window, a power of two.
    pub window: usize,
}

/// Data found by the consumer. Valid until the consumer consumes.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// The cursor of the first unread byte.
    pub cons: u64,
    /// Unread bytes.
    pub len: usize,
    /// Bytes of the window, a power of two.
    pub window: usize,
}

impl<'a> Ring<'a> {
    /// A ring over `1 << ring_shift` bytes at `data`.
    ///
    /// # Safety
    /// `data` is valid for reads and writes of that many bytes for as long as the ring is used.
    pub unsafe fn new(dir: &'a Direction, data: *mut Byte, ring_shift: u32) -> Ring<'a> {
        Ring { dir, data, ring_shift }
    }

    /// The cursors and flags.
    #[inline(always)]
    pub fn dir(&self) -> &'a Direction {
        self.dir
    }

    /// Prepares an unused slot's direction.
    pub fn reset(&self) {
        let p = &self.dir.producer;
        p.prod.store(0, Relaxed);
        p.cons_seen.store(0, Relaxed);
        p.window_shift.store(WINDOW_SHIFT_MIN, Relaxed);
        p.state.store(0, Relaxed);
        p.flags.store(0, Relaxed);
        p.bells_sent.store(0, Relaxed);
        p.boundary.store(0, Relaxed);
        p.resume.store(0, Relaxed);
        p.resent.store(0, Relaxed);
        p.stamp.store(0, Relaxed);
        p.cpu.store(0, Relaxed);
        p.voucher.store(0, Relaxed);
        self.dir.consumer.cons.store(0, Relaxed);
        self.dir.arm.rx.store(0, Relaxed);
        self.dir.arm.tx.store(0, Relaxed);
    }

    #[inline(always)]
    fn window(&self) -> Result<usize, Broken> {
        // Relaxed: ordered by the Acquire load of `prod` (consumer) or own (producer).
        let shift = self.dir.producer.window_shift.load(Relaxed);
        if shift < WINDOW_SHIFT_MIN || shift > self.ring_shift {
            return Err(Broken);
        }
        Ok(1 << shift)
    }

    /// Room for the producer, who wants `want` bytes; the peer's cursor is read only if the last known
    /// one does not leave enough, and the window grows when the ring is empty and too small.
    ///
    /// # Errors
    /// [`Broken`] when the cursors cannot be right.
    #[inline(always)]
    pub fn room(&self, want: usize) -> Result<Room, Broken> {
        self.room_if(want, |_, _| true)
    }

    /// The same, where the memory that a larger window takes (from its start on, in bytes) has to be granted.
    ///
    /// # Errors
    /// As for [`Ring::room`].
    #[inline(always)]
    pub fn room_if(
        &self,
        want: usize,
        may_grow: impl FnOnce(*mut Byte, usize) -> bool,
    ) -> Result<Room, Broken> {
        let p = &self.dir.producer;
        let prod = p.prod.load(Relaxed);
        let window = self.window()?;
        let used = prod.wrapping_sub(p.cons_seen.load(Relaxed));
        if used <= window as u64 && window - used as usize >= want {
            return Ok(Room { prod, free: window - used as usize, window });
        }
        self.room_slow(prod, window, want, may_grow)
    }

    #[cold]
    fn room_slow(
        &self,
        prod: u64,
        mut window: usize,
        want: usize,
        may_grow: impl FnOnce(*mut Byte, usize) -> bool,
    ) -> Result<Room, Broken> {
        let p = &self.dir.producer;
        // Acquire: pairs with the consumer's Release in `consume`; its reads are over before we overwrite.
        let cons = self.dir.consumer.cons.load(Acquire);
        let used = prod.wrapping_sub(cons);
        if used > window as u64 {
            return Err(Broken);
        }
        p.cons_seen.store(cons, Relaxed);
        if used == 0 && want >= window && window < 1 << self.ring_shift {
            // Empty: nobody looks at any position until the next `publish` releases this store.
            let want = want.min(1 << self.ring_shift);
            let shift = (want.next_power_of_two().trailing_zeros() + 1).min(self.ring_shift);
            if may_grow(self.data, 1 << shift) {
                p.window_shift.store(shift, Relaxed);
                window = 1 << shift;
            }
        }
        Ok(Room { prod, free: window - used as usize, window })
    }

    /// Copies `len` bytes to cursor `at`.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes. `at..at + len` lies within a [`Room`] the caller holds.
    #[inline(always)]
    pub unsafe fn copy_in(&self, at: u64, window: usize, src: *const u8, len: usize) {
        let pos = at as usize & (window - 1);
        let first = len.min(window - pos);
        // SAFETY: pos + first ≤ window ≤ the ring's bytes, and len - first ≤ window (a Room's free).
        unsafe {
            copy_in(self.data.add(pos), src, first);
            if first < len {
                copy_in(self.data, src.add(first), len - first);
            }
        }
    }

    /// Makes everything before cursor `prod` visible to the consumer.
    #[inline(always)]
    pub fn publish(&self, prod: u64) {
        // Release: pairs with the Acquire in `data`.
        self.dir.producer.prod.store(prod, Release);
    }

    /// The consumer's view.
    ///
    /// # Errors
    /// [`Broken`] when the cursors cannot be right.
    #[inline(always)]
    pub fn data(&self) -> Result<Data, Broken> {
        let cons = self.dir.consumer.cons.load(Relaxed);
        // Acquire: pairs with the Release in `publish`; the bytes and the window are visible.
        let prod = self.dir.producer.prod.load(Acquire);
        let len = prod.wrapping_sub(cons);
        if len == 0 {
            return Ok(Data { cons, len: 0, window: 0 });
        }
        let window = self.window()?;
        if len > window as u64 {
            return Err(Broken);
        }
        Ok(Data { cons, len: len as usize, window })
    }

    /// Whether a look at [`Ring::data`] is worth while (nothing is checked).
    #[inline(always)]
    pub fn has_data(&self) -> bool {
        // Relaxed: no byte is read upon this answer; `data` orders.
        self.dir.consumer.cons.load(Relaxed) != self.dir.producer.prod.load(Relaxed)
    }

    /// Copies `len` bytes from cursor `at`.
    ///
    /// # Safety
    /// `dst` is writable for `len` bytes. `at..at + len` lies within a [`Data`] the caller holds.
    #[inline(always)]
    pub unsafe fn copy_out(&self, at: u64, window: usize, dst: *mut u8, len: usize) {
        let pos = at as usize & (window - 1);
        let first = len.min(window - pos);
        // SAFETY: pos + first ≤ window ≤ the ring's bytes, and len - first ≤ window (a Data's len).
        unsafe {
            copy_out(dst, self.data.add(pos), first);
            if first < len {
                copy_out(dst.add(first), self.data, len - first);
            }
        }
    }

    /// Contiguous memory at cursor `at`, for a system call that moves bytes itself.
    #[inline]
    pub fn contiguous(&self, at: u64, window: usize, len: usize) -> (*mut Byte, usize) {
        let pos = at as usize & (window - 1);
        // SAFETY: pos < window ≤ the ring's bytes.
        (unsafe { self.data.add(pos) }, len.min(window - pos))
    }

    /// Gives everything before cursor `cons` back to the producer.
    #[inline(always)]
    pub fn consume(&self, cons: u64) {
        // Release: pairs with the Acquire in `room_slow`.
        self.dir.consumer.cons.store(cons, Release);
    }

    /// Unread bytes as the producer sees them, 0 when the cursors are nonsense.
    pub fn unread(&self) -> usize {
        // Relaxed: no byte is written upon this answer; `room` orders.
        let used =
            self.dir.producer.prod.load(Relaxed).wrapping_sub(self.dir.consumer.cons.load(Relaxed));
        if used > 1 << self.ring_shift { 0 } else { used as usize }
    }

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

    /// Whom it has to wake (`ARM_*`). Inside [`crate::span::TxSpan::begin_bell`].
    #[inline]
    pub fn take_rx_sleepers(&self) -> u32 {
        // Acquire: see `arm_rx`. Release: who finds the bits taken also finds the bell begun (`crate::back`).
        // ARM_LEFT stays: it concerns every byte published from now on.
        self.dir.arm.rx.fetch_and(!ARM_TCP, AcqRel)
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
    /// `prod` may be old, which makes it look too often, never too seldom.
    #[inline(always)]
    pub fn consume_waking(&self, data: &Data, len: usize) -> bool {
        let cons = data.cons.wrapping_add(len as u64);
        self.consume(cons);
        let passed = (data.cons ^ cons) >= (data.window >> MARK_SHIFT) as u64;
        passed && writable(data.len.saturating_sub(len), data.window) && self.has_tx_sleepers()
    }

    /// Whether there is room worth waking for, as the producer sees it. It sleeps only when not.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.window().is_ok_and(|window| writable(self.unread(), window))
    }

    /// After `consume` past a mark (see [`Ring::consume_waking`]): whether the consumer has to wake somebody.
    #[inline(always)]
    pub fn has_tx_sleepers(&self) -> bool {
        // Pairs with the fence in `arm_tx`.
        fence(SeqCst);
        self.dir.arm.tx.load(Relaxed) != 0
    }

    /// Whom it has to wake (`ARM_*`). Inside [`crate::span::TxSpan::begin_bell`].
    #[inline]
    pub fn take_tx_sleepers(&self) -> u32 {
        // AcqRel: as in `take_rx_sleepers`.
        self.dir.arm.tx.swap(0, AcqRel)
    }

    /// Whether the next bytes will ring, as far as this end can tell; a waker may be taking the bit just now.
    #[inline]
    pub fn is_rx_armed(&self) -> bool {
        self.dir.arm.rx.load(Relaxed) != 0
    }

    /// Takes the sleepers' arm bits back, of all of them. Only for one who knows that nobody else of this end arms
    /// meanwhile: another's bit would be lost, and its wake-up. Staying armed costs one needless doorbell.
    #[inline]
    pub fn disarm_rx(&self) {
        if self.dir.arm.rx.load(Relaxed) & ARM_TCP != 0 {
            self.dir.arm.rx.fetch_and(!ARM_TCP, Relaxed);
        }
    }
}
