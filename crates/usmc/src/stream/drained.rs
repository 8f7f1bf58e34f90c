//! Connections that are to leave the ring: those in a region that one of their ends is about to lose (`usmc region drain`), and all
//! connections of a directory that was switched off (`usmc off`). They go back to TCP before a thread of this process waits for anything.
//!
//! The other end may be asleep: a doorbell wakes it first.

use usmc_shm::layout::{ARM_TCP, Slot};
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use super::{bells, fallback};
use crate::device;
use crate::handshake::transition;
use crate::host;
use crate::os::clock;
use crate::os::process::Lock;
use crate::os::reason::Reason;
use crate::record::conn::{self, Conn, F_DEPUTY};
use crate::record::numbers::{self, Hold};
use crate::record::phase::Phase;

/// How long to wait before what did not leave is tried again.
const AGAIN_MS: u32 = 100;

/// Held by the thread that takes connections out: a connection that has left calls [`look_at_last`] within.
static LOCK: Lock = Lock::new();
/// When it is tried again, in milliseconds; 0 = nothing is left to be done.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A thread is about to wait. Without locks of a connection. Whether connections have left.
#[inline(always)]
pub fn look() -> bool {
    (host::current().new_switch().is_some() || device::changes().next().is_some()) && leave_all()
}

/// The same once a connection has come out of the ring: what waits for TCP alone does not look.
pub fn look_at_last() {
    NEXT.store(0, Relaxed);
    look();
}

/// In how many nanoseconds a sleeper has to [`look`] by itself, if at all.
pub fn look_in_ns() -> Option<u64> {
    match NEXT.load(Relaxed) {
        0 => None,
        next => Some(u64::from(left_ms(next).max(1)) * 1_000_000),
    }
}

fn left_ms(next: u32) -> u32 {
    let left = next.wrapping_sub(clock::now_ms());
    if left > AGAIN_MS { 0 } else { left }
}

#[cold]
fn leave_all() -> bool {
    let Some(_held) = LOCK.try_enter() else { return false };
    let next = NEXT.load(Relaxed);
    if next != 0 && left_ms(next) > 0 {
        return false;
    }
    let (mut any, mut is_done) = (false, true);
    if let Some(switch) = host::current().new_switch() {
        let (left, all) = leave_those(why_off);
        any |= left;
        is_done &= all;
        if all {
            host::current().acted_upon_switch(switch);
        }
    }
    for (index, device, generation) in device::changes() {
        let (left, all) = leave_those(|conn, slot| why_drained(index, conn, slot));
        any |= left;
        is_done &= all && device.acted_upon(generation);
    }
    let again = clock::now_ms().wrapping_add(AGAIN_MS).max(1);
    NEXT.store(if is_done { 0 } else { again }, Relaxed);
    any
}

/// Whether any connection has left of those that have a reason to, and whether all of them have.
fn leave_those(why: impl Fn(&Conn, &Slot) -> Option<Reason>) -> (bool, bool) {
    let (mut any, mut all) = (false, true);
    conn::for_each(|index, conn| {
        if let Some(reason) = due(conn, &why) {
            let left = leave(index, conn, reason) || due(conn, &why).is_none();
            any |= left;
            all &= left;
        }
    });
    (any, all)
}

fn due(conn: &Conn, why: impl Fn(&Conn, &Slot) -> Option<Reason>) -> Option<Reason> {
    let has_slot = matches!(conn.phase(), Phase::Offered | Phase::Attached | Phase::Ring);
    conn.slot().filter(|_| has_slot).and_then(|slot| why(conn, slot))
}

/// Why a connection is to leave its ring, if it is.
pub fn why(conn: &Conn, slot: &Slot) -> Option<Reason> {
    why_off(conn, slot)
        .or_else(|| why_drained(conn.device.load(Relaxed) as device::Index, conn, slot))
}

/// The agent's connections are drained by it (`usmc agent`).
fn why_off(conn: &Conn, _slot: &Slot) -> Option<Reason> {
    (host::current().is_off() && !conn.has(F_DEPUTY)).then_some(Reason::SwitchedOff)
}

fn why_drained(device: device::Index, conn: &Conn, slot: &Slot) -> Option<Reason> {
    let is_its = conn.device.load(Relaxed) as device::Index == device;
    (is_its && device::of(conn).is_to_leave(conn, slot)).then_some(Reason::RegionDrained)
}

/// False where it could not leave now.
fn leave(index: u32, conn: &Conn, reason: Reason) -> bool {
    let Some(hold) = Hold::in_step(index) else { return false };
    let Some(fd) = numbers::any_number(index) else { return false };
    let fd = hold.fd(fd);
    if let Some(slot) = conn.slot().filter(|_| conn.phase() == Phase::Ring) {
        wake_peer(fd, conn, slot);
    }
    if fallback::leave(fd, index, reason).is_ok() {
        return true;
    }
    // A send of this process' sleeps: it finds its direction over when it looks.
    fallback::send_by_tcp(fd, index);
    false
}

fn wake_peer(fd: i32, conn: &Conn, slot: &Slot) {
    if transition::tx_is_ring(fd, conn, slot) {
        let (tx, rx) = (conn.tx(slot), conn.rx(slot));
        bells::ring_bell(fd, conn, slot, |shared| {
            tx.take_rx_sleepers(shared) | rx.take_tx_sleepers(shared) | ARM_TCP
        });
    }
}

/// Fork, in the child: the thread that was at it does not exist.
pub fn after_fork() {
    LOCK.reset();
}
