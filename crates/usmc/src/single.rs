//! Steps on private memory that need no locked instruction while the process has one thread. Signal handlers that come
//! between the load and the store leave what they have found: they take and give back, count up and down again.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::compiler_fence;
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use crate::real;

/// Whether no other thread can come between two instructions of this one.
#[inline(always)]
pub fn is_single() -> bool {
    !real::may_have_threads()
}

/// Keeps the compiler from moving what follows before what precedes, which a signal handler would see.
#[inline(always)]
pub fn in_order() {
    compiler_fence(SeqCst);
}

/// Adds, and returns what was there. SeqCst.
#[inline(always)]
pub fn add(word: &AtomicU32, more: u32) -> u32 {
    if !is_single() {
        return word.fetch_add(more, SeqCst);
    }
    let before = word.load(Relaxed);
    word.store(before.wrapping_add(more), Relaxed);
    in_order();
    before
}

/// The same, less.
#[inline(always)]
pub fn sub(word: &AtomicU32, less: u32) -> u32 {
    in_order();
    add(word, less.wrapping_neg())
}
