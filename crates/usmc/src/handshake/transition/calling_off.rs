//! Calling a handshake off, and the end of a record, which gives its slots back.

use usmc_shm::handshake::{self, SlotState};
use usmc_shm::layout::{ACCEPTOR, End};
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed};

use super::{begin_elsewhere, changed, clear_offer, give_lowat_back, step, usage};
use crate::device::{self, segment};
use crate::family::holders::{self, Remaining};
use crate::family::{liveness, mark};
use crate::handshake::clc;
use crate::os::members;
use crate::os::reason::Reason;
use crate::record::conn::{self, Conn, F_CLIENT};
use crate::record::phase::Phase;

/// The connection has to stay TCP although an offer may be out, or be just on its way: the thread that makes it has begun
/// in [`Phase::Early`] and does not look again. Where the acceptor was faster, nothing has changed.
pub fn take_back(conn: &Conn, reason: Reason) {
    let _step = conn.step_lock.enter();
    if !conn.give_up_early(reason) && conn.phase() == Phase::Offered {
        withdraw(conn, reason);
    }
}

/// Ends a handshake from either side, to begin anew later. Where that is not possible now, nothing happens.
pub fn put_off(fd: i32, conn: &Conn) {
    let Some(_step) = conn.step_lock.enter() else { return };
    if matches!(conn.phase(), Phase::Offered | Phase::Attached)
        && let Some(slot) = conn.slot()
        && call_off(conn)
    {
        begin_elsewhere(fd, conn, slot);
    }
}

/// Ends a handshake, from either side, however far it is. Says whether it is over, which may mean that the connection
/// is in the ring; false where a signal handler interrupted a step of it.
pub fn decline(fd: i32, index: u32, reason: Reason) -> bool {
    let conn = conn::at(index);
    let Some(held) = conn.step_lock.enter() else { return false };
    let before = conn.phase();
    if !conn.give_up_early(reason) && matches!(before, Phase::Offered | Phase::Attached) {
        if call_off(conn) {
            mark::leave_ring(fd);
            give_lowat_back(fd, conn);
            conn.give_up(reason);
        } else {
            // Confirmed in this instant.
            step(fd, conn);
        }
    }
    let now = conn.phase();
    drop(held);
    if now != before {
        changed(fd, index);
    }
    !matches!(now, Phase::Early | Phase::Offered | Phase::Attached)
}

/// The client takes its offer back; the slot is released when the record ends.
pub fn withdraw(conn: &Conn, reason: Reason) {
    let Some(slot) = conn.slot() else { return };
    match handshake::withdraw(&slot.control, usage(conn)) {
        Ok(()) => slot.end[ACCEPTOR].refs.store(0, Relaxed),
        // The acceptor has declined, or a process that shares this end was first.
        Err(SlotState::Gone) => {}
        Err(_) => return,
    }
    clear_offer(conn);
    conn.give_up(reason);
}

/// The same for either side, and also after the acceptor's answer. False where the client has confirmed it.
pub fn call_off(conn: &Conn) -> bool {
    let Some(slot) = conn.slot() else { return false };
    let usage = usage(conn);
    if conn.has(F_CLIENT) && handshake::withdraw(&slot.control, usage).is_ok() {
        slot.end[ACCEPTOR].refs.store(0, Relaxed);
    } else if handshake::decline(&slot.control, usage) != SlotState::Gone {
        return false;
    }
    if conn.has(F_CLIENT) {
        clear_offer(conn);
    }
    true
}

/// The record ends or connects anew: withdraws what is offered and gives the slots back. Says what their counts tell of other
/// processes.
pub fn end(conn: &Conn) -> Remaining {
    if clc::is_on(conn) {
        clc::end(conn);
    }
    match conn.phase() {
        Phase::Offered => {
            let _step = conn.step_lock.enter();
            // Not the offer of another process that goes on with the connection.
            let alone = conn.slot().is_none_or(|s| conn.end(s).refs.load(Acquire) <= 1);
            if alone {
                withdraw(conn, Reason::PeerGone);
            }
            if alone && conn.phase() == Phase::Offered {
                // Attached in this instant: the acceptor will see our end closed.
                clear_offer(conn);
            }
            release_slots(conn)
        }
        Phase::Early | Phase::Attached | Phase::Ring | Phase::Plain => release_slots(conn),
        _ => Remaining::Unknown,
    }
}

/// Gives our hold on all slots back. Called with the last fd of this process.
fn release_slots(conn: &Conn) -> Remaining {
    device::of(conn).check();
    let mut remaining = Remaining::Unknown;
    for (end, segment, index) in conn.past_ends() {
        remaining = release(conn, end, segment, index);
    }
    conn.forget_past();
    release_slot(conn).or(remaining)
}

/// Gives our hold on the present slot back.
pub fn release_slot(conn: &Conn) -> Remaining {
    let Some(slot) = conn.slot() else { return Remaining::Unknown };
    let (segment, index) = (conn.segment.load(Relaxed), conn.slot_index.load(Relaxed));
    conn.forget_slot();
    // Before the socket is closed here. Where nobody else holds it, the slot says more.
    liveness::stop_vouching(conn, slot, crate::os::process::pid());
    release(conn, conn.end(slot), segment, index)
}

fn release(conn: &Conn, end: &End, segment: u32, index: u32) -> Remaining {
    members::leave(&end.members);
    let remaining = Remaining::of(end.refs.fetch_sub(1, AcqRel));
    if remaining == Remaining::Others {
        holders::leave_to_parent(end);
    }
    segment::let_go(segment, conn.has(F_CLIENT).then_some(index), liveness::has_ended(conn));
    remaining
}
