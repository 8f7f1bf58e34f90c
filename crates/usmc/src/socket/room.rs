//! Room for what the peer does not read. TCP's buffers take some megabytes of it (tcp(7): tcp_wmem, tcp_rmem), and programs
//! count on that: both ends send before they read, or one thread has both, or programs in a ring send to the next one before
//! they read from the one before. So a window that is full becomes the whole ring, and who sleeps although nothing is read
//! goes back to TCP.

use core::sync::atomic::Ordering::Relaxed;
use usmc_shm::layout::{Slot, TXF_BACK, TXF_DONE, TXF_LEFT};

use super::demote;
use super::family::Family;
use crate::conn::{self, Conn, RING};
use crate::reason::Reason;
use crate::{clock, memory, process};

/// How long nothing is read while this end itself has left bytes unread. Long enough for another of its threads to read.
const UNREAD_NS: u64 = 20_000_000;
/// The same otherwise: the reader may wait for whoever waits here, by ways that nobody sees.
const IDLE_NS: u64 = 1_000_000_000;
/// Before the next try, where it could not leave.
const FAILED_NS: u64 = 5_000_000_000;

/// Whether the ring takes more now, having become larger. Waits for nobody: looks at readiness come here with locks, and who
/// is just sending does it himself.
#[cold]
pub fn grow(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let tx = conn.tx(slot);
    if !tx.can_grow() {
        return false;
    }
    let Some(_held) = conn.tx_lock.try_enter() else { return false };
    if !conn.has_slot(slot) {
        return false;
    }
    let Some(_family) = Family::sending(fd, conn, slot) else { return false };
    let flags = conn.own(slot).flags.load(Relaxed);
    flags & (TXF_LEFT | TXF_BACK | TXF_DONE) == 0
        && tx.grow(|at, len| memory::take(at.cast(), len)) == Ok(true)
}

/// Somebody waits for so many unread bytes: leaves a ring that does not hold them. Whether it has.
pub fn leave_for(fd: i32, index: u32, bytes: usize) -> bool {
    let conn = conn::at(index);
    conn.phase() == RING
        && bytes > 1 << conn.full_shift()
        && demote::leave(fd, index, Reason::TooMuch).is_ok()
}

/// How long nothing need be read before whoever waits for room is taken to wait in vain. `None`: there is room.
fn patience_ns(conn: &Conn, slot: &Slot) -> Option<u64> {
    if conn.tx(slot).is_writable() {
        return None;
    }
    Some(if conn.rx(slot).has_data() { UNREAD_NS } else { IDLE_NS })
}

/// Whether who sleeps for room may well wait for himself: the peer may wait for our reading, or be this process.
pub fn may_wait_for_itself(conn: &Conn, slot: &Slot) -> bool {
    conn.rx(slot).has_data() || slot.end[1 - conn.side()].pid.load(Relaxed) == process::pid()
}

/// In how many nanoseconds a sleeper for room has to look by itself, to [`leave_if_stuck`], if at all.
pub fn look_in_ns(conn: &Conn, slot: &Slot) -> Option<u64> {
    const LEAST: u64 = 1_000_000;
    let patience = patience_ns(conn, slot)?;
    let (since, now) = (conn.stuck.load(Relaxed), clock::now_ns());
    let left = match since {
        0 => patience,
        // It could not leave.
        _ if since > now => since - now,
        _ => patience.saturating_sub(now - since),
    };
    Some(left.max(LEAST))
}

/// Before each sleep for room: goes back to TCP if nothing has been read for too long. Whether it has.
pub fn leave_if_stuck(fd: i32, index: u32) -> bool {
    let conn = conn::at(index);
    let Some(slot) = conn.slot() else { return false };
    let Some(patience) = patience_ns(conn, slot) else {
        conn.stuck.store(0, Relaxed);
        return false;
    };
    let (read, now) = (conn.tx(slot).read(), clock::now_ns());
    let since = conn.stuck.load(Relaxed);
    if since == 0 || read != conn.stuck_at.load(Relaxed) {
        conn.stuck_at.store(read, Relaxed);
        conn.stuck.store(now, Relaxed);
        return false;
    }
    if now.saturating_sub(since) < patience {
        return false;
    }
    let left = demote::leave(fd, index, Reason::Unread).is_ok();
    if !left {
        conn.stuck.store(now + FAILED_NS, Relaxed);
    }
    left
}
