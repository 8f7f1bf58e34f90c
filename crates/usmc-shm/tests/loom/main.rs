//! The protocols in shared memory under every interleaving and every weak-memory outcome loom knows.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p usmc-shm --release --test loom
//! ```
//!
//! Rings have 4 bytes here, the smallest window has 2, and each data byte is a tracked cell: an access
//! that is not ordered after the other side's last one fails the model, whatever the value read.
#![cfg(loom)]

mod bell;
mod handshake;
mod lock;
mod model;
mod ring;
mod sleep;
mod span;
