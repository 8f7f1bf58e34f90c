//! Memory shared with a stranger: the layout of a segment, its rings and the locks of one end.
//!
//! Read in the order a byte travels: [`layout`] says where everything lies, [`copy`] is the only place
//! where application memory and shared memory meet, [`ring`] moves the cursors and says who has to be
//! woken, [`bell`] how that is done over TCP, [`lock`] keeps several threads or forked processes of one end apart, [`region`] carves checked
//! references out of a mapping. Before that, [`handshake`] brings two ends to one slot, and [`span`] moves
//! a direction from TCP to the ring at an exact byte.
//!
//! Everything the peer can write is treated as hostile: one atomic load into a local, a range check,
//! then use. A value no correct peer writes is [`Broken`]; the caller gives up that one connection.
#![cfg_attr(not(loom), no_std)]

pub mod bell;
pub mod copy;
pub mod handshake;
pub mod layout;
pub mod lock;
pub mod region;
pub mod ring;
pub mod span;
pub mod sync;

/// Shared memory held a value that no correct peer writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Broken;
