//! Memory shared with a stranger: rings, slots, ready queues, locks.
#![cfg_attr(not(loom), no_std)]

pub mod sync;
