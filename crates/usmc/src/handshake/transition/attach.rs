//! The acceptor's side: it looks for the offer, takes the slot, and waits for the client to confirm.

use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::sync::Ordering::Relaxed;

use super::{
    LOOKS, LOOKS_EACH, SELDOM, begin_elsewhere, begin_ring, bind_slot, has_high_lowat, is_free,
    puts_aside, store_tuple, stored_tuple, usage,
};
use crate::device::{
    self, Index,
    segment::{self, InUse},
};
use crate::family::{liveness, mark};
use crate::handshake::{clc, syn_option};
use crate::host::{self, DmbRef};
use crate::os::reason::Reason;
use crate::os::{log, process};
use crate::record::conn::Conn;
use crate::record::kernel;
use crate::record::phase::Event;
use crate::record::tuple::{self, Endpoint, Tuple};

/// Whether all calls are made in which an answer was waited for. Those of a program that polls, or of a poll of ours that
/// has not slept yet, count only where the peer has sent something meanwhile.
pub fn is_spent(fd: i32, conn: &Conn) -> bool {
    let left = conn.looks.load(Relaxed);
    let counts = !left.is_multiple_of(LOOKS_EACH) || is_used(fd, conn);
    let next = if counts { left.checked_sub(1) } else { Some(left + LOOKS_EACH - 1) };
    conn.looks.store(next.unwrap_or(0), Relaxed);
    next.is_none()
}

/// Whether the peer has sent anything since this was last asked: calls that find nothing, as of a program that polls
/// without a sleep, say nothing about what the connection is good for.
pub(super) fn is_used(fd: i32, conn: &Conn) -> bool {
    // Plus one: the first time is the measure of the next.
    let received = kernel::tcp_received(fd).map_or(u64::MAX, |bytes| bytes + 1);
    let before = conn.received.swap(received, Relaxed);
    before != 0 && before != received
}

/// The acceptor's tuple. Of a listener on all addresses, accept(2) did not tell which one it is.
pub(super) fn named(fd: i32, conn: &Conn) -> Option<[u64; 6]> {
    let words = stored_tuple(conn);
    if !Endpoint::server_of(&words).is_wildcard() {
        return Some(words);
    }
    let (server, client) = (tuple::local(fd).ok()?, tuple::peer(fd).ok()?);
    store_tuple(conn, &Tuple { netns: words[0], client, server });
    Some(stored_tuple(conn))
}

/// The calls that are left to an acceptor after one that has looked in vain; `None` = none. Where the peer sends nothing
/// they do not become fewer, and still only some look.
pub(super) fn left_after_look(left: u32, is_used: impl FnOnce() -> bool) -> Option<u32> {
    match left {
        _ if left > SELDOM => Some(left - 1),
        _ if is_used() => left.checked_sub(1),
        _ => Some((left + LOOKS_EACH - 1).min(SELDOM - 1)),
    }
}

pub(super) fn step_acceptor(fd: i32, conn: &Conn) {
    let left = conn.looks.load(Relaxed);
    if left < SELDOM && !left.is_multiple_of(LOOKS_EACH) {
        conn.looks.store(left - 1, Relaxed);
        return;
    }
    let Some(words) = named(fd, conn) else { return };
    clc::take_mail();
    let Some(found) = host::current().board().find_offer(&words) else {
        if clc::hold_if_asked(fd, conn) {
            return;
        }
        let why = syn_option::reason_of(conn, Reason::NoOffer);
        conn.reason.store(why as u32, Relaxed);
        match left_after_look(left, || is_used(fd, conn)) {
            Some(left) => conn.looks.store(left, Relaxed),
            None => conn.give_up(why),
        }
        return;
    };
    // Another connection has the names of one that was reset, and this offer is for that.
    if kernel::is_over(fd) {
        return conn.give_up(Reason::PeerGone);
    }
    match is_free(fd, conn) {
        Ok(true) => {}
        Ok(false) => return,
        Err(reason) => return conn.give_up(reason),
    }
    // Once attached we may be rung, and a doorbell is one byte: it has to wake.
    if has_high_lowat(fd, conn) {
        return conn.give_up(Reason::KernelFeature);
    }
    let known = segment::use_peer(found.dmb.segment).or_else(|| {
        // It may have come since the offer was found.
        clc::take_mail();
        segment::use_peer(found.dmb.segment)
    });
    let Some(segment) = known else {
        if segment::is_refused(found.dmb.segment) {
            return conn.give_up(Reason::NoMemory);
        }
        // The client hands it over at its next call, which may be long in coming: a large send can last
        // for any number of calls here.
        conn.reason.store(Reason::Pending as u32, Relaxed);
        match host::current().want_segment(found.id) {
            Ok(false) => conn.looks.store(LOOKS, Relaxed),
            // What cannot be kept is not asked for at every call for ever.
            Ok(true) if left == 0 => conn.give_up(Reason::NoSegment),
            Ok(true) => conn.looks.store(left - 1, Relaxed),
            Err(reason) => conn.give_up(reason),
        }
        return;
    };
    attach_to(fd, conn, found.dmb, &segment);
}

/// Attaches to memory that was handed over for this very connection ([`clc`]).
pub fn attach(fd: i32, conn: &Conn, dmb: DmbRef, file: u64) {
    match is_free(fd, conn) {
        Ok(true) => {}
        Ok(false) => return,
        Err(reason) => return conn.give_up(reason),
    }
    match segment::use_delivered(dmb.segment, file) {
        Some(segment) => attach_to(fd, conn, dmb, &segment),
        None => conn.give_up(Reason::NoMemory),
    }
}

/// Attaches to memory that was named on a board, if it is for this connection.
pub fn attach_named(fd: i32, conn: &Conn, device: Index, dmb: DmbRef) {
    match is_free(fd, conn) {
        Ok(true) => {}
        Ok(false) => return,
        Err(reason) => return conn.give_up(reason),
    }
    let segment = match segment::use_named(device, dmb.segment) {
        Ok(segment) => segment,
        Err(reason) => return conn.give_up(reason),
    };
    let tokens = [&conn.clc.peer, &conn.clc.own];
    let is_ours = segment.map.slot(dmb.slot).is_ok_and(|slot| {
        slot.control.tokens.iter().zip(tokens).all(|(a, b)| a.load(Relaxed) == b.load(Relaxed))
    });
    if is_ours {
        return attach_to(fd, conn, dmb, &segment);
    }
    segment::unuse(segment.index);
    conn.give_up(Reason::PeerBroken);
}

/// The caller has counted a use of the segment, and holds the step's lock.
pub(super) fn attach_to(fd: i32, conn: &Conn, dmb: DmbRef, segment: &InUse) {
    // Receivers of this process are kept out while the record gets its slot; calls in the kernel's TCP would
    // be uncounted in the slot, so with any of them in flight the next call tries again.
    let Some(_rx) = conn.rx_lock.try_enter() else { return segment::unuse(segment.index) };
    if !conn.stop_kernel_calls() {
        return segment::unuse(segment.index);
    }
    if conn.returns() > 0 && !is_free(fd, conn).is_ok_and(|free| free) {
        conn.go_on_with_kernel_calls();
        return segment::unuse(segment.index);
    }
    if !mark::enter_ring(fd) {
        conn.go_on_with_kernel_calls();
        conn.give_up(Reason::Adopted);
        return segment::unuse(segment.index);
    }
    let bound = match puts_aside(conn, segment.device, segment.map.shifts()) {
        false => Err(Reason::NoMemory),
        true => bind_slot(fd, conn, segment, dmb.slot, false),
    };
    if let Err(reason) = bound {
        conn.clc.give_back();
        mark::leave_ring(fd);
        conn.go_on_with_kernel_calls();
        conn.give_up(reason);
        return segment::unuse(segment.index);
    }
    let Some(slot) = conn.slot() else { return };
    let usage = Use::from_bits(dmb.usage);
    conn.usage.store(dmb.usage, Relaxed);
    // Before the slot is: a signal handler of this thread may want the connection to stay TCP.
    let moved = conn.leave_early(Event::Attaches);
    if moved
        && handshake::attach(&slot.control, usage, process::pid(), device::of(conn).peer())
            == SlotState::Attached
    {
        liveness::vouch(conn, slot);
        conn.reason.store(Reason::Pending as u32, Relaxed);
        log::debug(format_args!("fd {fd}: attached to slot {}", dmb.slot));
        return;
    }
    // Withdrawn, or taken by a process that shares this very socket: not ours to use.
    mark::leave_ring(fd);
    conn.forget_slot();
    segment::unuse(segment.index);
    if moved {
        conn.give_up(Reason::PeerGone);
    }
}

pub(super) fn step_attached(fd: i32, conn: &Conn) {
    let Some(slot) = conn.slot() else { return };
    match handshake::phase(&slot.control, usage(conn)) {
        SlotState::Confirmed => begin_ring(conn),
        SlotState::Attached => {}
        SlotState::Offered => conn.give_up(Reason::PeerBroken),
        SlotState::Gone => begin_elsewhere(fd, conn, slot),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks in so many calls, and whether the last one was made.
    fn looks(calls: u32, is_used: impl Fn() -> bool) -> (u32, bool) {
        let (mut left, mut looks) = (LOOKS, 0);
        for _ in 0..calls {
            if left < SELDOM && !left.is_multiple_of(LOOKS_EACH) {
                left -= 1;
                continue;
            }
            looks += 1;
            match left_after_look(left, &is_used) {
                Some(next) => left = next,
                None => return (looks, true),
            }
        }
        (looks, false)
    }

    #[test]
    fn an_acceptor_looks_seldom_after_a_while() {
        const CALLS: u32 = 100 * LOOKS;
        let most = LOOKS_EACH + CALLS / LOOKS_EACH + 2;
        let (silent, ended) = looks(CALLS, || false);
        assert!(!ended && silent <= most, "{silent} looks for a silent peer");
        let (used, ended) = looks(CALLS, || true);
        assert!(ended && used <= LOOKS_EACH + LOOKS / LOOKS_EACH + 2, "{used} looks");
        assert!(!looks(LOOKS, || true).1, "too early");
    }
}
