//! How a ring's window grows, goes to the far part, and comes back from there.

use super::{Grant, Place, Ring, Room, Window, least_limit, writable};
use crate::Broken;
use crate::layout::{PAGE, WINDOW_SHIFT_MIN, WINDOW_SPLIT, shift_of, window_word};
use crate::sync::Byte;
use crate::sync::Ordering::{Acquire, Relaxed, Release};

/// Memory of the far part is taken in steps of so many bytes, at least.
const FAR_STEP: usize = 16 * PAGE;

impl Ring<'_> {
    /// How many of `free` bytes at cursor `prod` may be used at once, of which `want` are wanted: a window in the far part is
    /// taken step by step, so that what is given back is what was used.
    pub(super) fn taken(&self, window: Window, prod: u64, free: usize, want: usize) -> usize {
        let pages = &self.dir.producer.far_pages;
        let have = (pages.load(Relaxed) as usize).saturating_mul(PAGE);
        if window.len <= self.near() || have >= window.len {
            return free;
        }
        // It is used from its start on: beyond what it has there is nothing yet.
        let pos = window.of(prod);
        let step = free.min(want.max(FAR_STEP));
        let need = (pos + step).next_multiple_of(PAGE).min(window.len);
        if need > have {
            pages.store((need / PAGE) as u32, Relaxed);
        }
        free.min(need.max(have) - pos)
    }

    /// Bytes of the window before it grew into the far part.
    pub(super) fn before_far(&self) -> usize {
        let shift = shift_of(self.dir.producer.window_before.load(Relaxed));
        1 << shift.clamp(WINDOW_SHIFT_MIN, self.shift)
    }

    /// Where what is free ends while bytes are unread from before the window grew: a larger one in the ring has theirs for its
    /// own, too. `None` where no such bytes are unread.
    pub(super) fn end_beside_old(&self, word: u64, cons: u64) -> Option<u64> {
        let p = &self.dir.producer;
        let grown_at = p.grown_at.load(Relaxed);
        if word & WINDOW_SPLIT == 0 || (cons.wrapping_sub(grown_at) as i64) >= 0 {
            return None;
        }
        let (now, before) = (shift_of(word), shift_of(p.window_before.load(Relaxed)));
        // Our own words, in the reach of the peer: `room_slow` checks what comes of them.
        let shared = if now > self.shift { 0 } else { 1 << (before & 31) };
        let new = (1u64 << (now & 31)).wrapping_sub(shared);
        Some(grown_at.wrapping_add(new))
    }

    /// [`Ring::end_beside_old`] of the present window. Once the old bytes are read, the window counts as one that has not grown.
    pub(super) fn grown_at_unread(&self, cons: u64) -> Option<u64> {
        let window = &self.dir.producer.window;
        let word = window.load(Relaxed);
        let end = self.end_beside_old(word, cons);
        if end.is_none() && word & WINDOW_SPLIT != 0 {
            window.store(word & !WINDOW_SPLIT, Relaxed);
        }
        end
    }

    /// What [`Ring::grow`] would make of a window of `len` bytes, of which `used` are unread. `None`: nothing, as more room
    /// than what wakes a sleeping producer would not come of it.
    pub(super) fn larger(&self, len: usize, used: usize) -> Option<usize> {
        let most = self.most.checked_next_power_of_two().unwrap_or(usize::MAX);
        let largest = if most > self.near() { 1 << self.largest_shift() } else { self.near() };
        let larger = largest.min(most);
        (len <= self.near() && larger > len && writable(used, self.limit(larger))).then_some(larger)
    }

    /// Whether [`Ring::grow`] is worth a try.
    pub fn can_grow(&self) -> bool {
        let word = self.dir.producer.window.load(Relaxed);
        self.check(word).is_ok_and(|window| self.larger(window.len, self.unread()).is_some())
    }

    /// Before the producer waits for a consumer that does not read: takes the largest window for the bytes that follow.
    /// Those that are unread stay where they are. `may_grow` gets the start and the bytes of what is new, and says what it
    /// grants. Whether the ring is writable now. Other sleepers for room are not told: they have tried it, too.
    ///
    /// # Errors
    /// As for [`Ring::room`].
    #[cold]
    pub fn grow(&self, may_grow: impl FnOnce(*mut Byte, usize) -> Grant) -> Result<bool, Broken> {
        let p = &self.dir.producer;
        let (prod, cons) = (p.prod.load(Relaxed), self.dir.consumer.cons.load(Acquire));
        let used = prod.wrapping_sub(cons);
        let old = self.check(p.window.load(Relaxed))?;
        if used > (self.near() + old.len) as u64 {
            return Err(Broken);
        }
        let used = used as usize;
        let Some(mut len) = self.larger(old.len, used) else { return Ok(self.is_writable()) };
        if self.is_writable() || self.grown_at_unread(cons).is_some() {
            return Ok(self.is_writable());
        }
        let (base, new);
        if len > self.near() {
            let Grant { bytes, in_memory } = may_grow(self.far(), len);
            // Also where it is not used: it is given back from there.
            let pages = &p.far_pages;
            pages.store(pages.load(Relaxed).max((in_memory.min(len) / PAGE) as u32), Relaxed);
            len = len.min(bytes);
            if len <= self.near() || !len.is_power_of_two() || !writable(used, self.limit(len)) {
                return Ok(false);
            }
            let free = len.min(self.most(len) - used);
            (base, new) = (prod as u32, self.taken(Window { base: 0, len }, 0, free, 0));
        } else {
            // The old window is that end of the new one where the rings meet.
            let start = self.start(len).wrapping_add(old.len & !self.below);
            if may_grow(start, len - old.len).bytes < len - old.len {
                return Ok(false);
            }
            // The next byte is the first of the new part.
            base = (prod as u32).wrapping_sub((old.len & !self.below) as u32);
            new = (len - old.len).min(self.limit(len) - used);
        }
        self.set_window(prod, Window { base, len }, true);
        p.limit.store(prod.wrapping_add(new as u64), Relaxed);
        Ok(true)
    }

    /// For a sender that streams `want` bytes, has found room in the ring itself and not used it yet: goes on in the far part, whose
    /// bytes it uses in turn. So the next bytes do not lie where the consumer has just read, and neither fetches them out of the
    /// other's caches. `may_grow` as for [`Ring::grow`]. The next look that finds the ring empty comes back from there.
    #[cold]
    pub fn stream(
        &self,
        want: usize,
        may_grow: impl FnOnce(*mut Byte, usize) -> Grant,
    ) -> Option<Room> {
        let p = &self.dir.producer;
        // Acquire: as in `room_slow`.
        let (prod, cons) = (p.prod.load(Relaxed), self.dir.consumer.cons.load(Acquire));
        let old = self.check(p.window.load(Relaxed)).ok()?;
        let used = prod.wrapping_sub(cons) as usize;
        let mut len = self.in_turn();
        if len <= self.near() || old.len > self.near() || used > old.len {
            return None;
        }
        if self.grown_at_unread(cons).is_some() {
            return None;
        }
        let Grant { bytes, in_memory } = may_grow(self.far(), len);
        let pages = &p.far_pages;
        pages.store(pages.load(Relaxed).max((in_memory.min(len) / PAGE) as u32), Relaxed);
        len = len.min(bytes);
        if len <= self.near() || !len.is_power_of_two() {
            return None;
        }
        // A thread that sleeps for room is woken as before: what is unread has the marks of the window that it lies in.
        let window = Window { base: 0, len };
        self.set_window(prod, window, used > 0);
        let free = len.min(self.most(len).saturating_sub(used));
        let free = self.taken(window, prod, free, want);
        p.limit.store(prod.wrapping_add(free as u64), Relaxed);
        Some(Room { prod, free, unread: used > 0, place: Place::whole(window, prod) })
    }

    /// The window for bytes that are used in turn: the largest that the sender's limit goes with. It may hold far more than may be
    /// unread, as where TCP's buffers are small.
    pub(super) fn in_turn(&self) -> usize {
        if self.memory.far.is_null() {
            return 0;
        }
        let mut windows = (self.shift..=self.memory.far_shift).rev().map(|shift| 1 << shift);
        windows.find(|window| least_limit(*window) <= self.most).unwrap_or(0)
    }

    /// The bytes from cursor `prod` on lie in this window. `is_split`: bytes in the present window are unread.
    pub(super) fn set_window(&self, prod: u64, window: Window, is_split: bool) {
        let p = &self.dir.producer;
        p.window_before.store(p.window.load(Relaxed) & !WINDOW_SPLIT, Relaxed);
        // Release: a consumer that sees this cursor sees the window before it.
        p.grown_at.store(prod, Release);
        let split = if is_split { WINDOW_SPLIT } else { 0 };
        // Release: a consumer that sees the new window sees from where on it counts.
        p.window.store(window_word(window.base, window.len.trailing_zeros()) | split, Release);
    }

    /// Bytes of the present window.
    ///
    /// # Errors
    /// As for [`Ring::room`].
    pub fn window_len(&self) -> Result<usize, Broken> {
        self.window()
    }

    /// Whether memory of the far part may be in use ([`Ring::leave_far`]).
    #[inline(always)]
    pub fn has_far(&self) -> bool {
        self.dir.producer.far_pages.load(Relaxed) != 0
    }

    /// The memory of the far part, if nothing is there; the sender comes back from there first. The caller has the sending
    /// locks, may have the kernel take that memory away, and calls [`Ring::left_far`] then.
    #[cold]
    pub fn leave_far(&self) -> Option<(*mut Byte, usize)> {
        let p = &self.dir.producer;
        if self.memory.far.is_null() {
            return None;
        }
        let prod = p.prod.load(Relaxed);
        if self.check(p.window.load(Relaxed)).ok()?.len > self.near() {
            // Acquire: as in `room_slow`.
            if self.dir.consumer.cons.load(Acquire) != prod {
                return None;
            }
            let len = self.before_far();
            // As little is free as nothing: the next look at the room finds the ring empty, and where to begin.
            p.window.store(window_word(prod as u32, len.trailing_zeros()), Relaxed);
            p.limit.store(prod, Relaxed);
        }
        let len = (p.far_pages.load(Relaxed) as usize).saturating_mul(PAGE);
        Some((self.far(), len.min(1 << self.memory.far_shift)))
    }

    /// See there.
    pub fn left_far(&self) {
        self.dir.producer.far_pages.store(0, Relaxed);
    }
}
