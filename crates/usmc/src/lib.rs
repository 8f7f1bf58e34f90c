//! The stack: TCP's semantics over rings in shared memory.
#![no_std]

pub mod observe;
pub mod reason;
