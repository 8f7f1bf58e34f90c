//! The models of `tests/loom` again, under many random schedules: sequentially consistent, but with any
//! number of preemptions, in any place.
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test -p usmc-shm --release --test shuttle
//! ```
#![cfg(shuttle)]

#[path = "loom/back.rs"]
mod back;
#[path = "loom/bell.rs"]
mod bell;
#[path = "loom/handshake.rs"]
mod handshake;
#[path = "loom/lock.rs"]
mod lock;
#[path = "loom/model.rs"]
mod model;
#[path = "loom/ring.rs"]
mod ring;
#[path = "loom/sleep.rs"]
mod sleep;
#[path = "loom/span.rs"]
mod span;
#[path = "loom/units.rs"]
mod units;
