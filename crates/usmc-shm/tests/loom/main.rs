//! The protocols in shared memory under the weak-memory outcomes and the interleavings that loom tries.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p usmc-shm --release --test loom
//! ```
//!
//! Rings have 4 bytes here, the smallest window has 2, and each data byte is a tracked cell: an access
//! that is not ordered after the other side's last one fails the model, whatever the value read.
//!
//! Loom does not try every interleaving: of the accesses to a word it remembers the last one, so an access
//! of its own can hide another thread's from the one about to run. Hence `tests/shuttle.rs`, too.
#![cfg(loom)]

mod back;
mod bell;
mod handshake;
mod lock;
mod model;
mod ring;
mod sleep;
mod span;
mod units;
