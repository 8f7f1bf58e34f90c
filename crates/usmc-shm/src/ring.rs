//! One direction: a byte ring with monotonic cursors, one producing and one consuming end.
//!
//! The producer writes bytes, then `prod` (Release); the consumer reads `prod` (Acquire), the bytes, then
//! writes `cons` (Release), which the producer reads (Acquire) before it reuses the room. A position is
//! the cursor's distance from a base modulo the window. Both change only while the ring is empty, and are
//! published by the same Release store of `prod` as the first bytes that use them.
//!
//! The producer looks at `cons` when it has come to its limit. Where it finds the ring empty it starts over
//! beside the place where the two rings of a slot meet, with the next limit so near that as few pages are
//! touched, and as little cache, as the bytes that are under way at one time need. A window is used up to its
//! end where it finds bytes unread.
//!
//! Sleep and wake are store–fence–load on both sides ([`Ring::arm_rx`] against [`Ring::has_rx_sleepers`],
//! [`Ring::arm_tx`] against [`Ring::has_tx_sleepers`]): either the sleeper sees the new cursor, or the
//! waker sees the arm bit.

use crate::Broken;
use crate::copy::{copy_in, copy_out};
use crate::layout::{ARM_RINGING, ARM_TCP, CLIENT, Direction, SHARED, Slot, WINDOW_SHIFT_MIN};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::sync::{AtomicU32, Byte, MODEL, fence};

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
    /// Where the two rings of the slot meet.
    meet: *mut Byte,
    /// All bits where this is the ring below that place, none where it is above.
    below: usize,
    ring_shift: u32,
}

/// Where cursors lie in the ring's memory.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    base: u64,
    /// Bytes of the window, a power of two.
    pub window: usize,
}

impl Place {
    #[inline(always)]
    fn of(&self, cursor: u64) -> usize {
        cursor.wrapping_sub(self.base) as usize & (self.window - 1)
    }
}

/// Room found by the producer. Valid until the producer publishes.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// The cursor of the first free byte.
    pub prod: u64,
    /// Free bytes; at least as many as were wanted, if there are.
    pub free: usize,
    /// False where the consumer is known to have read everything.
    pub unread: bool,
    /// Where they are.
    pub place: Place,
}

/// Data found by the consumer. Valid until the consumer consumes.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// The cursor of the first unread byte.
    pub cons: u64,
    /// Unread bytes.
    pub len: usize,
    /// Where they are.
    pub place: Place,
}

impl<'a> Ring<'a> {
    /// The ring of `slot` that end `sender` writes: `1 << ring_shift` bytes, the client's before `meet`, the
    /// acceptor's from there on.
    ///
    /// # Safety
    /// These are valid for reads and writes for as long as the ring is used.
    #[inline(always)]
    pub unsafe fn new(slot: &'a Slot, sender: usize, meet: *mut Byte, ring_shift: u32) -> Ring<'a> {
        let below = if sender == CLIENT { usize::MAX } else { 0 };
        Ring { dir: &slot.dir[sender & 1], meet, below, ring_shift }
    }

    /// Where the slot's rings meet.
    pub fn meet(&self) -> *mut Byte {
        self.meet
    }

    #[inline(always)]
    fn start(&self, window: usize) -> *mut Byte {
        // SAFETY: the window is at most the ring's bytes, and lies at that end of it (`new`'s contract).
        unsafe { self.meet.sub(window & self.below) }
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
        p.base.store(0, Relaxed);
        p.limit.store(0, Relaxed);
        p.window_shift.store(WINDOW_SHIFT_MIN, Relaxed);
        p.state.store(0, Relaxed);
        p.flags.store(0, Relaxed);
        p.bells_sent.store(0, Relaxed);
        p.boundary.store(0, Relaxed);
        p.resume.store(0, Relaxed);
        p.resent.store(0, Relaxed);
        p.stamp.store(0, Relaxed);
        p.behind.store(0, Relaxed);
        p.behind_bytes.store(0, Relaxed);
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

    /// Room for the producer, who wants `want` bytes; the peer's cursor is read only at the limit, where a ring
    /// that is found empty starts over, its window grown if that was too small.
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
        let free = p.limit.load(Relaxed).wrapping_sub(prod);
        if free <= window as u64 && free as usize >= want {
            let place = Place { base: p.base.load(Relaxed), window };
            return Ok(Room { prod, free: free as usize, unread: true, place });
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
        if used > 0 {
            p.limit.store(cons.wrapping_add(window as u64), Relaxed);
            let place = Place { base: p.base.load(Relaxed), window };
            return Ok(Room { prod, free: window - used as usize, unread: true, place });
        }
        // Empty: nobody looks at any position until the next `publish` releases these stores.
        let most = 1 << self.ring_shift;
        if want >= window && window < most {
            let shift = want.min(most).next_power_of_two().trailing_zeros() + 2;
            let larger = 1 << shift.min(self.ring_shift);
            if may_grow(self.start(larger), larger) {
                window = larger;
                p.window_shift.store(window.trailing_zeros(), Relaxed);
            }
        }
        let free = want.min(window).next_multiple_of(SHARED).max(SHARED);
        let base = prod.wrapping_sub(((window - free) & self.below) as u64);
        p.base.store(base, Relaxed);
        p.limit.store(prod.wrapping_add(free as u64), Relaxed);
        Ok(Room { prod, free, unread: false, place: Place { base, window } })
    }

    /// Copies `len` bytes to cursor `at`.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes. `at..at + len` lies within a [`Room`] the caller holds.
    #[inline(always)]
    pub unsafe fn copy_in(&self, at: u64, place: Place, src: *const u8, len: usize) {
        let (pos, start) = (place.of(at), self.start(place.window));
        let first = len.min(place.window - pos);
        // SAFETY: pos + first ≤ window ≤ the ring's bytes, and len - first ≤ window (a Room's free).
        unsafe {
            copy_in(start.add(pos), src, first);
            if first < len {
                copy_in(start, src.add(first), len - first);
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
            return Ok(Data { cons, len: 0, place: Place { base: 0, window: 1 } });
        }
        let window = self.window()?;
        if len > window as u64 {
            return Err(Broken);
        }
        // Relaxed: as the window.
        let base = self.dir.producer.base.load(Relaxed);
        Ok(Data { cons, len: len as usize, place: Place { base, window } })
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
    pub unsafe fn copy_out(&self, at: u64, place: Place, dst: *mut u8, len: usize) {
        let (pos, start) = (place.of(at), self.start(place.window));
        let first = len.min(place.window - pos);
        // SAFETY: pos + first ≤ window ≤ the ring's bytes, and len - first ≤ window (a Data's len).
        unsafe {
            copy_out(dst, start.add(pos), first);
            if first < len {
                copy_out(dst.add(first), start, len - first);
            }
        }
    }

    /// Contiguous memory at cursor `at`, for a system call that moves bytes itself.
    #[inline]
    pub fn contiguous(&self, at: u64, place: Place, len: usize) -> (*mut Byte, usize) {
        let pos = place.of(at);
        // SAFETY: pos < window ≤ the ring's bytes.
        (unsafe { self.start(place.window).add(pos) }, len.min(place.window - pos))
    }

    /// The window's memory.
    ///
    /// # Errors
    /// [`Broken`] when it cannot be right.
    pub fn memory(&self) -> Result<(*mut Byte, usize), Broken> {
        let window = self.window()?;
        Ok((self.start(window), window))
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

    /// Whom it has to wake (`ARM_*`). Inside [`crate::span::TxSpan::ring`]. `shared`: other processes send here, too, and
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
    /// `prod` may be old, which makes it look too often, never too seldom.
    #[inline(always)]
    pub fn consume_waking(&self, data: &Data, len: usize) -> bool {
        let cons = data.cons.wrapping_add(len as u64);
        self.consume(cons);
        let window = data.place.window;
        let passed = (data.cons ^ cons) >= (window >> MARK_SHIFT) as u64;
        passed && writable(data.len.saturating_sub(len), window) && self.has_tx_sleepers()
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

    /// Whom it has to wake (`ARM_*`), as [`Ring::take_rx_sleepers`].
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

    /// Having found the ring empty: whether sleepers for room wait for a doorbell of one who was killed. `shared`: others
    /// may have been, of whom nobody knows yet.
    #[inline]
    pub fn owes_wake_up(&self, shared: bool) -> bool {
        let bits = self.dir.arm.tx.load(Relaxed);
        bits & ARM_RINGING != 0 || (shared && bits != 0)
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

/// Takes the sleepers' bits out of an arm word. Whoever was about to ring may have been killed: that is done again.
#[inline]
fn take(arm: &AtomicU32, shared: bool) -> u32 {
    const AWAITED: u32 = ARM_TCP | ARM_RINGING;
    // Acquire: see `arm_rx`. Release: who finds the bits taken also finds the bell begun (`crate::back`).
    let bits = match shared {
        false => arm.fetch_and(!AWAITED, AcqRel),
        true => {
            let ringing = |bits: u32| (bits & AWAITED != 0).then_some((bits | AWAITED) & !ARM_TCP);
            arm.fetch_update(AcqRel, Acquire, ringing).unwrap_or_else(|bits| bits)
        }
    };
    if bits & ARM_RINGING != 0 { bits | ARM_TCP } else { bits }
}
