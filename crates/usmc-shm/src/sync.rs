//! The only file that names atomics; the model checkers and the fuzz targets replace them here.

#[cfg(not(any(loom, shuttle, fuzzing)))]
pub use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
    Ordering, compiler_fence, fence,
};
#[cfg(fuzzing)]
pub use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicUsize, Ordering, compiler_fence,
    fence,
};
#[cfg(loom)]
pub use loom::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
    Ordering, fence,
};
#[cfg(shuttle)]
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
    Ordering, fence,
};
#[cfg(fuzzing)]
pub use watched::{AtomicU32, AtomicU64, watch};

/// Whether a model checker runs this: windows of a few bytes then.
pub const MODEL: bool = cfg!(any(loom, shuttle));

/// A byte of a ring. Under loom a tracked cell, so that a missing Acquire or Release is found.
#[cfg(not(loom))]
pub type Byte = u8;
/// A byte of a ring. Under loom a tracked cell, so that a missing Acquire or Release is found.
#[cfg(loom)]
pub type Byte = loom::cell::UnsafeCell<u8>;

#[cfg(fuzzing)]
mod watched;
