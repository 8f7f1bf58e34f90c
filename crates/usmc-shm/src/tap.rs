//! A ring in which one process shows another what it does (`usmc dump`): the writer never waits, and what finds no room
//! is counted and left out.
//!
//! One writer at a time, which its caller sees to, and one reader, which uses pread(2) and pwrite(2) on the file behind
//! it. Both cursors can be written by both, so the writer trusts neither: every position is taken modulo the size.

use crate::copy::copy_in;
use crate::sync::Ordering::{Acquire, Relaxed, Release};
use crate::sync::{AtomicU64, Byte};

/// The cursors. Monotonic; a position is the cursor modulo the size.
#[derive(Default)]
#[repr(C, align(64))]
pub struct TapControl {
    /// Bytes ever written.
    pub head: AtomicU64,
    /// Bytes of messages that found no room, and how many those were; the writer's own words.
    pub lost: [AtomicU64; 2],
    _pad: [AtomicU64; 5],
    /// Bytes that the reader has taken.
    pub tail: AtomicU64,
}

// 32-bit processes are read by a 64-bit `usmc dump`.
#[cfg(not(any(loom, shuttle)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<TapControl>() == 128 && offset_of!(TapControl, tail) == 64);
};

/// The writer's view.
pub struct Tap<'a> {
    control: &'a TapControl,
    data: *mut Byte,
    size: usize,
}

impl<'a> Tap<'a> {
    /// A ring of `size` bytes, a power of two.
    ///
    /// # Safety
    /// `data` is writable for `size` bytes for as long as the ring is used.
    pub unsafe fn new(control: &'a TapControl, data: *mut Byte, size: usize) -> Tap<'a> {
        debug_assert!(size.is_power_of_two());
        Tap { control, data, size }
    }

    /// The cursor at which a message of `len` bytes may be written; `None`, and `bytes` counted as lost, where there
    /// is no room.
    pub fn reserve(&self, len: usize, bytes: usize) -> Option<u64> {
        let head = self.control.head.load(Relaxed);
        // Acquire: pairs with the reader's pwrite(2), before which it has read.
        let used = head.wrapping_sub(self.control.tail.load(Acquire));
        // Also where the cursors are nonsense.
        if used > self.size as u64 || self.size - (used as usize) < len {
            self.lose(bytes);
            return None;
        }
        Some(head)
    }

    /// A message with so many bytes was left out.
    pub fn lose(&self, bytes: usize) {
        self.control.lost[0].fetch_add(bytes as u64, Relaxed);
        self.control.lost[1].fetch_add(1, Relaxed);
    }

    /// Copies `len` bytes, at most the size, to cursor `at`; returns the cursor behind them.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes.
    pub unsafe fn put(&self, at: u64, src: *const u8, len: usize) -> u64 {
        let len = len.min(self.size);
        let pos = at as usize & (self.size - 1);
        let first = len.min(self.size - pos);
        // SAFETY: pos + first ≤ size, len - first ≤ size; `src` by the caller's contract.
        unsafe {
            copy_in(self.data.add(pos), src, first);
            copy_in(self.data, src.add(first), len - first);
        }
        at.wrapping_add(len as u64)
    }

    /// Shows everything before cursor `head` to the reader.
    pub fn publish(&self, head: u64) {
        // Release: the reader's pread(2) of the bytes comes after that of the cursor.
        self.control.head.store(head, Release);
    }
}
