//! The only file that names atomics; loom replaces them here.

#[cfg(not(loom))]
pub use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
    Ordering, compiler_fence, fence,
};
#[cfg(loom)]
pub use loom::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
    Ordering, fence,
};

/// A byte of a ring. Under loom a tracked cell, so that a missing Acquire or Release is found.
#[cfg(not(loom))]
pub type Byte = u8;
/// A byte of a ring. Under loom a tracked cell, so that a missing Acquire or Release is found.
#[cfg(loom)]
pub type Byte = loom::cell::UnsafeCell<u8>;
