//! Registrations with epoll sets are told of what happens to a record.

use crate::os::hook::Hook;

/// A step of this connection's handshake exchanges the socket behind its number (number, record): its registrations follow. Without
/// locks.
pub static EXCHANGES: Hook<(i32, u32)> = Hook::new();
/// The phase of this record has changed.
pub static PHASE_CHANGED: Hook<u32> = Hook::new();
/// The connection of this record is in the ring no more.
pub static LEFT_RING: Hook<u32> = Hook::new();
