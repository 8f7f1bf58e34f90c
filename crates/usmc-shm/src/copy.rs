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
