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
//! end where it finds bytes unread. Before it waits for a consumer it takes a larger one, which may lie in the ring's far
//! part: megabytes, as TCP's buffers have, of which only what is used is ever in memory. Where it finds the ring empty then,
//! it comes back from there, and may give that memory back ([`Ring::leave_far`]).
//!
//! Sleep and wake are store–fence–load on both sides ([`Ring::arm_rx`] against [`Ring::has_rx_sleepers`],
//! [`Ring::arm_tx`] against [`Ring::has_tx_sleepers`]): either the sleeper sees the new cursor, or the
//! waker sees the arm bit.
//!
//! [`Producer::window`]: crate::layout::Producer::window

mod sleep;
mod window;

use crate::Broken;
use crate::copy::{copy_in, copy_out, copy_past};
use crate::layout::{
    CLIENT, Direction, SHARED, Slot, WINDOW_SHIFT_MIN, WINDOW_SPLIT, shift_of, window_word,
};
use crate::sync::Ordering::{Acquire, Relaxed, Release};
use crate::sync::{Byte, MODEL};

/// A sleeping producer is woken when `window >> ROOM_SHIFT` is free: a quarter, where TCP waits for a third
/// (`sk_stream_is_writeable`), so that whoever waits for a writer never waits longer than with TCP.
pub const ROOM_SHIFT: u32 = if MODEL { 1 } else { 2 };
/// The consumer looks for sleepers at multiples of `window >> MARK_SHIFT`, or of [`MARK_MOST`] bytes.
const MARK_SHIFT: u32 = if MODEL { 1 } else { 4 };
/// What a look costs does not count beside so many bytes. Marks of large windows so close to each other let a sender leave much
/// less unread than the window holds ([`Ring::stream`]).
const MARK_MOST: usize = 64 << 10;

/// A window that grows for a message gets four times its size.
const GROWTH_SHIFT: u32 = 2;

#[inline(always)]
fn writable(unread: usize, window: usize) -> bool {
    unread <= window - (window >> ROOM_SHIFT)
}

/// How far apart the consumer's looks for sleepers are in a window of so many bytes.
#[inline(always)]
pub fn mark(window: usize) -> usize {
    (window >> MARK_SHIFT).min(MARK_MOST)
}

/// The least that a sender may limit itself to with a window of so many bytes: it has room worth waking for at a mark before all
/// is read.
#[inline(always)]
pub fn least_limit(window: usize) -> usize {
    mark(window) << (MARK_SHIFT - ROOM_SHIFT)
}

/// Where the two rings of a slot are mapped.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Where they meet.
    pub meet: *mut Byte,
    /// log2 of the bytes of the client's ring and of the acceptor's.
    pub shifts: [u32; 2],
    /// The far part of the client's ring, and behind it the acceptor's; null where they are out of reach.
    pub far: *mut Byte,
    /// log2 of the bytes of each; more than those of the rings, if they are in reach.
    pub far_shift: u32,
}

/// One direction of a mapped slot.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    dir: &'a Direction,
    memory: Memory,
    /// log2 of its bytes.
    shift: u32,
    /// All bits where this is the ring below the place where they meet, none where it is above.
    below: usize,
    /// How many bytes may be unread: the sender's own limit.
    most: usize,
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

    /// How far apart the consumer's looks for sleepers are, from `cursor` on.
    #[inline(always)]
    pub fn mark(&self, cursor: u64) -> u64 {
        mark(self.at(cursor).0.len) as u64
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

/// What a producer that grows its window may use.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    /// So much of what it has asked for. Of the far part also less: a power of two.
    pub bytes: usize,
    /// From its start on so many bytes are in memory by now.
    pub in_memory: usize,
}

impl Grant {
    /// Nothing.
    pub const NONE: Grant = Grant { bytes: 0, in_memory: 0 };

    /// So many bytes, which get memory when they are first written.
    pub fn of(bytes: usize) -> Grant {
        Grant { bytes, in_memory: 0 }
    }
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
    /// The ring of `slot` that end `sender` writes: its bytes, the client's before `meet`, the acceptor's from there
    /// on, and the far parts.
    ///
    /// # Safety
    /// These are valid for reads and writes for as long as the ring is used.
    #[inline(always)]
    pub unsafe fn new(slot: &'a Slot, sender: usize, memory: Memory) -> Ring<'a> {
        let below = if sender == CLIENT { usize::MAX } else { 0 };
        let shift = memory.shifts[sender & 1];
        Ring { dir: &slot.dir[sender & 1], memory, shift, below, most: usize::MAX }
    }

    /// The same for a sender that leaves at most so many bytes unread: a multiple of [`SHARED`], and at least the smallest
    /// window's.
    #[inline(always)]
    #[must_use]
    pub fn limited(self, most: usize) -> Ring<'a> {
        Ring { most, ..self }
    }

    /// Where the slot's rings meet.
    pub fn meet(&self) -> *mut Byte {
        self.memory.meet
    }

    /// Bytes of the ring without its far part.
    #[inline(always)]
    fn near(&self) -> usize {
        1 << self.shift
    }

    /// How many bytes of a window may be unread. Not less than the consumer passes marks in, where the window was made for
    /// more.
    #[inline(always)]
    fn limit(&self, window: usize) -> usize {
        self.most.max(least_limit(window)).min(window)
    }

    /// How many bytes may be unread with such a window: those from before it grew into the far part, too.
    #[inline(always)]
    fn most(&self, window: usize) -> usize {
        if window > self.near() { self.most.max(least_limit(window)) } else { self.limit(window) }
    }

    /// log2 of the largest window.
    #[inline(always)]
    fn largest_shift(&self) -> u32 {
        if self.memory.far.is_null() { self.shift } else { self.memory.far_shift }
    }

    #[inline(always)]
    fn start(&self, window: usize) -> *mut Byte {
        if window > self.near() {
            return self.far();
        }
        // SAFETY: the window is at most the ring's bytes, and lies at that end of it (`new`'s contract).
        unsafe { self.memory.meet.sub(window & self.below) }
    }

    /// The start of the far part.
    fn far(&self) -> *mut Byte {
        self.memory.far.wrapping_add((1 << self.memory.far_shift) & !self.below)
    }

    /// The cursors and flags.
    #[inline(always)]
    pub fn dir(&self) -> &'a Direction {
        self.dir
    }

    /// Prepares an unused slot's direction.
    pub fn reset(&self) {
        let (p, arm) = (&self.dir.producer, &self.dir.arm);
        let cursors = [&p.prod, &p.limit, &p.grown_at, &p.window_before, &self.dir.consumer.cons];
        let places = [&p.boundary, &p.resume, &p.resent, &p.copied];
        let stamps = [&p.stamp, &p.behind, &p.behind_bytes];
        for word in cursors.into_iter().chain(places).chain(stamps) {
            word.store(0, Relaxed);
        }
        for word in [&p.state, &p.flags, &p.bells_sent, &p.cpu, &p.voucher, &arm.rx, &arm.tx] {
            word.store(0, Relaxed);
        }
        p.window.store(window_word(0, WINDOW_SHIFT_MIN), Relaxed);
    }

    #[inline(always)]
    fn check(&self, word: u64) -> Result<Window, Broken> {
        let shift = shift_of(word);
        if shift < WINDOW_SHIFT_MIN || shift > self.largest_shift() {
            return Err(Broken);
        }
        Ok(Window { base: word as u32, len: 1 << shift })
    }

    #[inline(always)]
    fn window(&self) -> Result<usize, Broken> {
        // Relaxed: ordered by the Acquire load of `prod` (consumer) or own (producer).
        self.check(self.dir.producer.window.load(Relaxed)).map(|window| window.len)
    }

    /// Where cursors from `first` on lie: the first unread byte or, if there is none, the next.
    ///
    /// # Errors
    /// [`Broken`] when the window cannot be right.
    #[inline(always)]
    pub fn place(&self, first: u64) -> Result<Place, Broken> {
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
        // A window in the far part does not grow: both windows hold no more than the ring and its far part do.
        let fits = before.len <= self.near() && grown_at.wrapping_sub(first) <= before.len as u64;
        if split.is_before(first) && !fits {
            return Err(Broken);
        }
        Ok(if split.is_before(first) { split } else { place })
    }

    /// Room for the producer, which wants `want` bytes; the peer's cursor is read only at the limit, where a ring
    /// that is found empty starts over, its window grown if that was too small. A window in the far part is left then.
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
        if used > 0 {
            let end = match self.grown_at_unread(cons) {
                Some(end) => end,
                None => cons.wrapping_add(window.len as u64),
            };
            let free = end.wrapping_sub(prod);
            if free > window.len as u64 || used > (self.near() + window.len) as u64 {
                return Err(Broken);
            }
            // Beside a far part, the ring's own bytes count as well.
            let free = (free as usize).min(self.most(window.len).saturating_sub(used as usize));
            let free = self.taken(window, prod, free, want);
            p.limit.store(prod.wrapping_add(free as u64), Relaxed);
            let place = Place::whole(window, prod);
            return Ok(Room { prod, free, unread: true, place });
        }
        // Empty: nobody looks at any position until the next `publish` releases these stores.
        let most = self.near().min(self.most.checked_next_power_of_two().unwrap_or(usize::MAX));
        let mut least = want;
        if window.len > self.near() {
            // What it had before was too small.
            window.len = self.before_far();
            least = window.len.max(want);
        }
        if least >= window.len && window.len < most {
            let larger = least.min(most).next_power_of_two() << GROWTH_SHIFT;
            let larger = larger.min(most);
            if may_grow(self.start(larger), larger) {
                window.len = larger;
            }
        }
        let free = want.min(self.limit(window.len)).next_multiple_of(SHARED).max(SHARED);
        window.base = (prod as u32).wrapping_sub(((window.len - free) & self.below) as u32);
        p.window.store(window_word(window.base, window.len.trailing_zeros()), Relaxed);
        p.limit.store(prod.wrapping_add(free as u64), Relaxed);
        Ok(Room { prod, free, unread: false, place: Place::whole(window, prod) })
    }

    /// The consumer's cursor, as the producer sees it.
    pub fn read(&self) -> u64 {
        self.dir.consumer.cons.load(Relaxed)
    }

    /// Copies `len` bytes to cursor `at`.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes. `at..at + len` lies within a [`Room`] the caller holds.
    #[inline(always)]
    pub unsafe fn copy_in(&self, at: u64, place: Place, src: *const u8, len: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.put(at, place, src, len, copy_in) };
    }

    /// Copies `len` bytes to cursor `at`, past the caches ([`copy_past`]).
    ///
    /// # Safety
    /// As for [`Ring::copy_in`].
    #[cold]
    pub unsafe fn copy_past(&self, at: u64, place: Place, src: *const u8, len: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.put(at, place, src, len, copy_past) };
    }

    /// Copies `len` bytes to cursor `at` by `copy`.
    ///
    /// # Safety
    /// As for [`Ring::copy_in`].
    #[inline(always)]
    unsafe fn put(
        &self,
        at: u64,
        place: Place,
        src: *const u8,
        len: usize,
        copy: unsafe fn(*mut Byte, *const u8, usize),
    ) {
        let window = Window { base: place.base, len: place.window };
        let (pos, start) = (window.of(at), self.start(window.len));
        let first = len.min(window.len - pos);
        // SAFETY: pos + first ≤ window ≤ the ring's bytes, and len - first ≤ window (a Room's free).
        unsafe {
            copy(start.add(pos), src, first);
            if first < len {
                copy(start, src.add(first), len - first);
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
        // `split` has checked these.
        let before = if place.is_before(cons) { place.grown_at.wrapping_sub(cons) } else { 0 };
        if len > before + place.window as u64 {
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
    /// `dst` is writable for `len` bytes. `at..at + len` lies within a [`Data`] the caller holds, or is no longer than the window of its
    /// `place`, whose bytes the caller knows to be there.
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

    /// The window's memory in the ring itself.
    ///
    /// # Errors
    /// [`Broken`] when it cannot be right.
    pub fn memory(&self) -> Result<(*mut Byte, usize), Broken> {
        let window = self.window()?.min(self.near());
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
        if used > (self.near() as u64) + (1 << self.largest_shift()) { 0 } else { used as usize }
    }
}
