//! Memory shared with a stranger: the layout of a segment, its rings and the locks of one end.
//!
//! Read in the order a byte travels: [`layout`] says where everything lies, [`copy`] is the only place
//! where application memory and shared memory meet, [`ring`] moves the cursors and says which sleepers have to be
//! woken, [`bell`] how that is done over TCP, [`lock`] keeps several threads or forked processes of one end
//! apart, [`segment`] carves checked references out of a mapping. Before that, [`handshake`] brings two ends
//! to one slot, and [`span`] moves a direction from TCP to the ring at an exact byte; [`back`] is the way back.
//! [`tap`] shows bytes to `usmc dump`; [`agent`] has the messages by which connections to other hosts are handed over.
//!
//! Everything the peer can write is treated as hostile: one atomic load into a local, a range check,
//! then use. A value no correct peer writes is [`Broken`]; the caller gives up that one connection.
//!
//! How it is proven, each by the code that ships:
//!
//! | question | command |
//! |---|---|
//! | weak-memory outcomes, and the interleavings loom tries | `RUSTFLAGS="--cfg loom" cargo test -p usmc-shm --release --test loom` |
//! | interleavings at random, far more and deeper | `RUSTFLAGS="--cfg shuttle" cargo test -p usmc-shm --release --test shuttle` |
//! | do the models notice a weaker ordering? | `python3 crates/usmc-shm/tests/loom/mutants.py` |
//! | is a ring a queue, from any cursor? | `cargo test -p usmc-shm --test oracle` |
//! | a peer that writes anything anywhere | `cargo test -p usmc-shm --test hostile` |
//! | data races on real threads | `crates/usmc-shm/tests/sanitize.sh tsan` (or `miri`) |
//! | what it costs | `cargo bench -p usmc-shm --bench ring` |
#![cfg_attr(not(any(loom, shuttle)), no_std)]

pub mod agent;
pub mod back;
pub mod bell;
pub mod board;
pub mod copy;
pub mod handshake;
pub mod layout;
pub mod lock;
pub mod region;
pub mod ring;
pub mod segment;
pub mod span;
pub mod state;
pub mod sync;
pub mod tap;

/// Shared memory held a value that no correct peer writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Broken;
