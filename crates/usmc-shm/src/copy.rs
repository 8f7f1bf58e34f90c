//! The one copy into shared memory and the one copy out of it.
//!
//! The shared side is only ever a raw pointer: the peer may change it at any time, so no reference to it
//! exists. What is copied out is the application's data, never a value the library acts upon.

use crate::sync::Byte;

/// Copies `len` bytes of the application's memory into shared memory.
///
/// # Safety
/// `src` is readable and `dst` lies in a live mapping, both for `len` bytes; they do not overlap.
#[cfg(not(loom))]
#[inline(always)]
pub unsafe fn copy_in(dst: *mut Byte, src: *const u8, len: usize) {
    // SAFETY: the caller's contract; the peer may race on `dst`, whose content we never interpret.
    unsafe { core::ptr::copy_nonoverlapping(src, dst, len) }
}

/// How bytes get into shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stores {
    /// By the sender's cache, out of which the receiver's core fetches them: fastest where both share a cache.
    Cached,
    /// Past all caches, into memory: does not depend on how far the other core is.
    Past,
}

/// Whether this processor has stores that go past its caches ([`copy_past`] is [`copy_in`] otherwise).
pub const CAN_PASS: bool = cfg!(all(target_arch = "x86_64", not(miri), not(loom)));

/// Copies `len` bytes of the application's memory into shared memory, past the caches. The bytes are visible to others before anything that the caller stores afterwards.
///
/// # Safety
/// As for [`copy_in`].
#[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
pub unsafe fn copy_past(dst: *mut Byte, src: *const u8, len: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    const WORDS: usize = LINE / size_of::<__m128i>();
    let head = dst.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: the caller's contract: `head`, the lines and the rest are `len` bytes. SSE2 is part of x86_64, and `to` is aligned to a
    // line.
    unsafe {
        copy_in(dst, src, head);
        for line in 0..lines {
            let at = head + line * LINE;
            let (to, from) = (dst.add(at).cast::<__m128i>(), src.add(at).cast::<__m128i>());
            // All are read before the first is written, so that the line's stores follow each other.
            let words: [__m128i; WORDS] = core::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
            for (i, word) in words.into_iter().enumerate() {
                _mm_stream_si128(to.add(i), word);
            }
        }
        let at = head + lines * LINE;
        copy_in(dst.add(at), src.add(at), len - at);
        // Such stores are ordered by this alone (Intel's manual, volume 1, 10.4.6.2), a Release does not do it.
        _mm_sfence();
    }
}

/// Copies by the caches, as this processor has no other stores.
///
/// # Safety
/// As above.
#[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
pub unsafe fn copy_past(dst: *mut Byte, src: *const u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe { copy_in(dst, src, len) }
}

/// Copies `len` bytes of shared memory into the application's memory.
///
/// # Safety
/// `dst` is writable and `src` lies in a live mapping, both for `len` bytes; they do not overlap.
#[cfg(not(loom))]
#[inline(always)]
pub unsafe fn copy_out(dst: *mut u8, src: *const Byte, len: usize) {
    // SAFETY: the caller's contract; the peer may race on `src`, whose content we never interpret.
    unsafe { core::ptr::copy_nonoverlapping(src, dst, len) }
}

/// As above, telling loom of every byte written.
///
/// # Safety
/// As above.
#[cfg(loom)]
pub unsafe fn copy_in(dst: *mut Byte, src: *const u8, len: usize) {
    for i in 0..len {
        // SAFETY: the caller's contract.
        unsafe { (*dst.add(i)).with_mut(|byte| *byte = *src.add(i)) }
    }
}

/// As above, telling loom of every byte read.
///
/// # Safety
/// As above.
#[cfg(loom)]
pub unsafe fn copy_out(dst: *mut u8, src: *const Byte, len: usize) {
    for i in 0..len {
        // SAFETY: the caller's contract.
        unsafe { *dst.add(i) = (*src.add(i)).with(|byte| *byte) }
    }
}
