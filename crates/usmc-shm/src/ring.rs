//! One direction: a byte ring with monotonic cursors, one producing and one consuming end.
//!
//! The producer writes bytes, then `prod` (Release); the consumer reads `prod` (Acquire), the bytes, then
//! writes `cons` (Release), which the producer reads (Acquire) before it reuses the room. A position is
//! the cursor's distance from a base modulo the window, which are one word ([`Producer::window`]). It changes while
//! the ring is empty, published by the same Release store of `prod` as the first bytes that use it; or while
//! bytes are unread, for those that follow ([`Ring::grow`]).
//!
//! The producer looks at `cons` when it has come to its limit. Where it finds the ring empty it starts over
//! beside the place where the two rings of a slot meet, with the next limit so near that as few pages are
//! touched, and as little cache, as the bytes that are under way at one time need. A window is used up to its
//! end where it finds bytes unread. Before it waits for a consumer it takes a larger one, as far as that goes.
//!
//! Sleep and wake are store–fence–load on both sides ([`Ring::arm_rx`] against [`Ring::has_rx_sleepers`],
//! [`Ring::arm_tx`] against [`Ring::has_tx_sleepers`]): either the sleeper sees the new cursor, or the
//! waker sees the arm bit.
//!
//! [`Producer::window`]: crate::layout::Producer::window

use crate::Broken;
use crate::copy::{copy_in, copy_out};
use crate::layout::{
    ARM_RINGING, ARM_TCP, CLIENT, Direction, SHARED, Slot, WINDOW_SHIFT_MIN, WINDOW_SPLIT,
    shift_of, window_word,
};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::sync::{AtomicU32, Byte, MODEL, fence};

/// A sleeping producer is woken when `window >> ROOM_SHIFT` is free: a quarter, where TCP waits for a third
/// (`sk_stream_is_writeable`), so that whoever waits for a writer never waits longer than with TCP.
pub const ROOM_SHIFT: u32 = if MODEL { 1 } else { 2 };
/// The consumer looks for sleepers at multiples of `window >> MARK_SHIFT`.
pub const MARK_SHIFT: u32 = if MODEL { 1 } else { 4 };
/// A window that grows for a message gets four times its size.
const GROWTH_SHIFT: u32 = 2;

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

/// A window of the ring, and which cursors lie there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    base: u32,
    /// Bytes, a power of two.
    len: usize,
}

impl Window {
    #[inline(always)]
    fn of(&self, cursor: u64) -> usize {
        (cursor as u32).wrapping_sub(self.base) as usize & (self.len - 1)
    }
}

/// Where cursors lie in the ring's memory.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Bytes of the window, a power of two.
    pub window: usize,
    base: u32,
    /// Cursors before this one lie where they lay before the window grew.
    grown_at: u64,
    before: Window,
}

impl Place {
    /// A window that has not grown under the bytes from `first` on.
    #[inline(always)]
    fn whole(window: Window, first: u64) -> Place {
        Place { window: window.len, base: window.base, grown_at: first, before: window }
    }

    #[inline(always)]
    fn is_before(&self, cursor: u64) -> bool {
        (cursor.wrapping_sub(self.grown_at) as i64) < 0
    }

    /// The window that `cursor` lies in, and how many bytes from there on.
    #[inline(always)]
    fn at(&self, cursor: u64) -> (Window, usize) {
        if self.is_before(cursor) {
            return (self.before, self.grown_at.wrapping_sub(cursor) as usize);
        }
        (Window { base: self.base, len: self.window }, usize::MAX)
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
        p.window.store(window_word(0, WINDOW_SHIFT_MIN), Relaxed);
        p.limit.store(0, Relaxed);
        p.state.store(0, Relaxed);
        p.flags.store(0, Relaxed);
        p.bells_sent.store(0, Relaxed);
        p.boundary.store(0, Relaxed);
        p.resume.store(0, Relaxed);
        p.resent.store(0, Relaxed);
        p.grown_at.store(0, Relaxed);
        p.window_before.store(0, Relaxed);
        p.stamp.store(0, Relaxed);
        p.behind.store(0, Relaxed);
        p.behind_bytes.store(0, Relaxed);
        p.copied.store(0, Relaxed);
        p.cpu.store(0, Relaxed);
        p.voucher.store(0, Relaxed);
        self.dir.consumer.cons.store(0, Relaxed);
        self.dir.arm.rx.store(0, Relaxed);
        self.dir.arm.tx.store(0, Relaxed);
    }

    #[inline(always)]
    fn check(&self, word: u64) -> Result<Window, Broken> {
        let shift = shift_of(word);
        if shift < WINDOW_SHIFT_MIN || shift > self.ring_shift {
            return Err(Broken);
        }
        Ok(Window { base: word as u32, len: 1 << shift })
    }

    #[inline(always)]
    fn window(&self) -> Result<usize, Broken> {
        // Relaxed: ordered by the Acquire load of `prod` (consumer) or own (producer).
        self.check(self.dir.producer.window.load(Relaxed)).map(|window| window.len)
    }

    /// Where cursors from `first` on lie, who is unread or, if nothing is, the next.
    #[inline(always)]
    fn place(&self, first: u64) -> Result<Place, Broken> {
        // Acquire: pairs with the Release in `grow`. A word from before it leaves out only what was published after it.
        let word = self.dir.producer.window.load(Acquire);
        let place = Place::whole(self.check(word)?, first);
        if word & WINDOW_SPLIT == 0 { Ok(place) } else { self.split(place) }
    }

    #[cold]
    fn split(&self, place: Place) -> Result<Place, Broken> {
        let p = &self.dir.producer;
        // Acquire: what was there before the window grew at this cursor. If it has grown once more meanwhile, everything
        // before this cursor lies in the window before.
        let grown_at = p.grown_at.load(Acquire);
        let before = self.check(p.window_before.load(Relaxed))?;
        let split = Place { grown_at, before, ..place };
        let first = place.grown_at;
        if split.is_before(first) && grown_at.wrapping_sub(first) > before.len as u64 {
            return Err(Broken);
        }
        Ok(if split.is_before(first) { split } else { place })
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
        let window = self.check(p.window.load(Relaxed))?;
        let free = p.limit.load(Relaxed).wrapping_sub(prod);
        if free <= window.len as u64 && free as usize >= want {
            let place = Place::whole(window, prod);
            return Ok(Room { prod, free: free as usize, unread: true, place });
        }
        self.room_slow(prod, window, want, may_grow)
    }

    #[cold]
    fn room_slow(
        &self,
        prod: u64,
        mut window: Window,
        want: usize,
        may_grow: impl FnOnce(*mut Byte, usize) -> bool,
    ) -> Result<Room, Broken> {
        let p = &self.dir.producer;
        // Acquire: pairs with the consumer's Release in `consume`; its reads are over before we overwrite.
        let cons = self.dir.consumer.cons.load(Acquire);
        let used = prod.wrapping_sub(cons);
        if used > window.len as u64 {
            return Err(Broken);
        }
        if used > 0 {
            let limit = match self.grown_at_unread(cons) {
                Some(limit) => limit,
                None => cons.wrapping_add(window.len as u64),
            };
            p.limit.store(limit, Relaxed);
            let free = limit.wrapping_sub(prod);
            if free > window.len as u64 {
                return Err(Broken);
            }
            let place = Place::whole(window, prod);
            return Ok(Room { prod, free: free as usize, unread: true, place });
        }
        // Empty: nobody looks at any position until the next `publish` releases these stores.
        let most = 1 << self.ring_shift;
        if want >= window.len && window.len < most {
            let shift = want.min(most).next_power_of_two().trailing_zeros() + GROWTH_SHIFT;
            let larger = 1 << shift.min(self.ring_shift);
            if may_grow(self.start(larger), larger) {
                window.len = larger;
            }
        }
        let free = want.min(window.len).next_multiple_of(SHARED).max(SHARED);
        window.base = (prod as u32).wrapping_sub(((window.len - free) & self.below) as u32);
        p.window.store(window_word(window.base, window.len.trailing_zeros()), Relaxed);
        p.limit.store(prod.wrapping_add(free as u64), Relaxed);
        Ok(Room { prod, free, unread: false, place: Place::whole(window, prod) })
    }

    /// The producer's limit where bytes are unread from before the window grew: the old one, which they lie in, belongs to
    /// the new one. Otherwise that is over.
    fn grown_at_unread(&self, cons: u64) -> Option<u64> {
        let p = &self.dir.producer;
        let word = p.window.load(Relaxed);
        if word & WINDOW_SPLIT == 0 {
            return None;
        }
        let grown_at = p.grown_at.load(Relaxed);
        if (cons.wrapping_sub(grown_at) as i64) < 0 {
            let (now, before) = (shift_of(word), shift_of(p.window_before.load(Relaxed)));
            // Our own words, in the reach of the peer: `room_slow` checks what comes of them.
            let new = (1u64 << (now & 31)).wrapping_sub(1 << (before & 31));
            return Some(grown_at.wrapping_add(new));
        }
        p.window.store(word & !WINDOW_SPLIT, Relaxed);
        None
    }

    /// Whether [`Ring::grow`] is worth a try.
    pub fn can_grow(&self) -> bool {
        let word = self.dir.producer.window.load(Relaxed);
        self.check(word).is_ok_and(|window| window.len << ROOM_SHIFT <= 1 << self.ring_shift)
    }

    /// The consumer's cursor, as the producer sees it.
    pub fn read(&self) -> u64 {
        self.dir.consumer.cons.load(Relaxed)
    }

    /// Before the producer waits for a consumer that does not read: takes the whole ring as its window for the bytes that
    /// follow. Those that are unread stay where they are. `may_grow`: as for [`Ring::room_if`], of what is new. Whether
    /// the ring is writable now. Nobody else who sleeps for room is told: they have tried it, too.
    ///
    /// # Errors
    /// As for [`Ring::room`].
    #[cold]
    pub fn grow(&self, may_grow: impl FnOnce(*mut Byte, usize) -> bool) -> Result<bool, Broken> {
        let p = &self.dir.producer;
        let (prod, cons) = (p.prod.load(Relaxed), self.dir.consumer.cons.load(Acquire));
        let used = prod.wrapping_sub(cons);
        let old = self.check(p.window.load(Relaxed))?;
        if used > old.len as u64 {
            return Err(Broken);
        }
        let shift = self.ring_shift;
        // By less than what wakes a sleeping producer it does not grow: that may not find room before all is read that is
        // unread now.
        let is_worth_while = old.len << ROOM_SHIFT <= 1 << shift;
        if self.is_writable() || !is_worth_while || self.grown_at_unread(cons).is_some() {
            return Ok(self.is_writable());
        }
        let (len, new) = (1 << shift, (1 << shift) - old.len);
        // The old window is that end of the new one where the rings meet.
        let start = self.start(len).wrapping_add(old.len & !self.below);
        if !may_grow(start, new) {
            return Ok(false);
        }
        // The next byte is the first of the new part.
        let base = (prod as u32).wrapping_sub((old.len & !self.below) as u32);
        p.window_before.store(p.window.load(Relaxed) & !WINDOW_SPLIT, Relaxed);
        // Release: who sees this cursor sees the window before it.
        p.grown_at.store(prod, Release);
        // Release: who sees the new window sees from where on it counts.
        p.window.store(window_word(base, shift) | WINDOW_SPLIT, Release);
        p.limit.store(prod.wrapping_add(new as u64), Relaxed);
        Ok(true)
    }

    /// Copies `len` bytes to cursor `at`.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes. `at..at + len` lies within a [`Room`] the caller holds.
    #[inline(always)]
    pub unsafe fn copy_in(&self, at: u64, place: Place, src: *const u8, len: usize) {
        let window = Window { base: place.base, len: place.window };
        let (pos, start) = (window.of(at), self.start(window.len));
        let first = len.min(window.len - pos);
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
            let nowhere = Window { base: 0, len: 1 };
            return Ok(Data { cons, len: 0, place: Place::whole(nowhere, cons) });
        }
        let place = self.place(cons)?;
        if len > place.window as u64 {
            return Err(Broken);
        }
        Ok(Data { cons, len: len as usize, place })
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
        let (window, most) = place.at(at);
        let head = len.min(most);
        let (pos, start) = (window.of(at), self.start(window.len));
        let first = head.min(window.len - pos);
        // SAFETY: pos + first ≤ window ≤ the ring's bytes, and head - first ≤ window: a Data's len, or the bytes from
        // before it grew, which `split` has checked.
        unsafe {
            copy_out(dst, start.add(pos), first);
            if first < head {
                copy_out(dst.add(first), start, head - first);
            }
        }
        if head < len {
            // SAFETY: the rest, as the caller promises for all of it.
            unsafe {
                self.copy_rest(at.wrapping_add(head as u64), place, dst.add(head), len - head)
            };
        }
    }

    /// What follows the bytes from before the window grew.
    ///
    /// # Safety
    /// As for `copy_out`.
    #[cold]
    unsafe fn copy_rest(&self, at: u64, place: Place, dst: *mut u8, len: usize) {
        let window = Window { base: place.base, len: place.window };
        // SAFETY: as there.
        unsafe { self.copy_out(at, Place::whole(window, at), dst, len) };
    }

    /// Contiguous memory at cursor `at`, for a system call that moves bytes itself.
    #[inline]
    pub fn contiguous(&self, at: u64, place: Place, len: usize) -> (*mut Byte, usize) {
        let (window, most) = place.at(at);
        let pos = window.of(at);
        // SAFETY: pos < window ≤ the ring's bytes.
        (unsafe { self.start(window.len).add(pos) }, len.min(most).min(window.len - pos))
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
    /// `prod` may be old, which makes it look too often, never too seldom. The window may have grown meanwhile: it knows
    /// once it has seen the sleeper.
    #[inline(always)]
    pub fn consume_waking(&self, data: &Data, len: usize) -> bool {
        let cons = data.cons.wrapping_add(len as u64);
        self.consume(cons);
        let (window, unread) = (data.place.window, data.len.saturating_sub(len));
        let passed = (data.cons ^ cons) >= (window >> MARK_SHIFT) as u64;
        passed
            && (writable(unread, window) || window < 1 << self.ring_shift)
            && self.has_tx_sleepers()
            && self.window().is_ok_and(|window| writable(unread, window))
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
