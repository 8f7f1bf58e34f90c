//! The client's side: it leaves an offer, hands the memory over, and confirms.

use usmc_shm::Broken;
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{ACCEPTOR, ARM_TCP, CLIENT, End};
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::Relaxed;

use super::attach::is_spent;
use super::calling_off::{call_off, release_slot, withdraw};
use super::{
    begin_elsewhere, begin_ring, bind_slot, has_high_lowat, is_free, offer_id, store_offer_id,
    store_tuple, stored_tuple, usage,
};
use crate::device;
use crate::device::segment::{self, OwnSlot};
use crate::family::{holders, liveness, mark};
use crate::handshake::{clc, syn_option};
use crate::host::{self, DmbRef};
use crate::os::log;
use crate::os::reason::Reason;
use crate::record::conn::Conn;
use crate::record::kernel;
use crate::record::phase::Event;
use crate::record::tuple::{self, Endpoint, Tuple};

/// Leaves an offer. Where it cannot be left just now, a later call will.
pub(super) fn offer(fd: i32, conn: &Conn) -> Result<(), Reason> {
    let meant = Endpoint::server_of(&stored_tuple(conn));
    if !host::current().is_listening(None, meant) {
        return Err(syn_option::reason_of(conn, Reason::NotRegistered));
    }
    if !is_free(fd, conn)? {
        return Ok(());
    }
    let Ok(tuple) = Tuple::live(fd, true) else { return Ok(()) };
    let server = tuple.server;
    // connect(0.0.0.0) goes to 127.0.0.1.
    if server.port != meant.port || (server.addr != meant.addr && !meant.is_wildcard()) {
        // The number means another connection by now.
        return Err(Reason::NotRegistered);
    }
    if !host::current().is_listening(Some(tuple.netns), server) {
        return match host::current().is_listening(None, server) {
            true => clc::ask(fd, conn, &tuple),
            false => Err(Reason::NotRegistered),
        };
    }
    // Receivers and senders in the kernel's TCP know nothing of a slot.
    let Some(_rx) = conn.rx_lock.try_enter() else { return Ok(()) };
    if !conn.stop_kernel_calls() {
        return Ok(());
    }
    if conn.returns() > 0 && !is_free(fd, conn)? {
        // A call began meanwhile that was on its way when the connection came back.
        conn.go_on_with_kernel_calls();
        return Ok(());
    }
    let own = segment::take_slot(device::for_new(), &tuple)?;
    let usage = bind_own(fd, conn, &own)?;
    store_tuple(conn, &tuple);
    let dmb = DmbRef { segment: own.id, slot: own.slot, usage: usage.to_bits() };
    let offered = host::current().offer(&tuple, dmb);
    let offered = offered.inspect_err(|_| {
        release_slot(conn);
    })?;
    store_offer_id(conn, offered);
    conn.reason.store(Reason::Pending as u32, Relaxed);
    if !conn.leave_early(Event::Offers) {
        // A signal handler of this thread wants it to stay TCP.
        call_off(conn);
        return Ok(());
    }
    log::debug(format_args!("fd {fd}: offered slot {} to port {}", own.slot, server.port));
    Ok(())
}

/// Ties the record to a slot that was just taken, for its next connection.
pub fn bind_own(fd: i32, conn: &Conn, own: &OwnSlot) -> Result<Use, Reason> {
    let Ok(usage) = prepare(&own.segment.map, own.slot) else {
        segment::unuse(own.segment.index);
        return Err(Reason::NoMemory);
    };
    bind_slot(fd, conn, &own.segment, own.slot, true)?;
    if let Some(slot) = conn.slot() {
        liveness::vouch(conn, slot);
    }
    conn.usage.store(usage.to_bits(), Relaxed);
    Ok(usage)
}

/// Another process may hold the socket, too, and could not learn of the memory: false until it let go.
pub(super) fn is_ours_alone(fd: i32, conn: &Conn) -> Result<bool, Reason> {
    if !holders::is_sole_holder(conn) {
        return Ok(false);
    }
    // The others may have shut it down.
    if kernel::is_established(fd) { Ok(true) } else { Err(Reason::ShutDown) }
}

/// Resets a slot's words for its next connection and opens it for an acceptor.
pub(super) fn prepare(map: &Segment, index: u32) -> Result<Use, Broken> {
    let slot = map.slot(index)?;
    for side in [CLIENT, ACCEPTOR] {
        let ring = map.ring(index, side)?;
        ring.reset();
        // Sleepers of the time before the ring are asleep on the TCP socket.
        ring.arm_rx(ARM_TCP);
        let end = &slot.end[side];
        reset_end(end);
    }
    // The slot came from the free list, so its last use is over whatever the word says.
    let last = slot.control.state.load(Relaxed) >> 8;
    handshake::release(&slot.control, Use::from_bits(last));
    slot.control.attached_peer.store(0, Relaxed);
    handshake::offer(&slot.control)
}

pub(super) fn reset_end(end: &End) {
    let counts = [&end.tcp_sends, &end.rx_sleepers, &end.tx_sleepers, &end.blocked_sends];
    let others = [&end.bells_drained, &end.bells_for, &end.flags, &end.rcvlowat, &end.passed_on];
    for cell in
        counts.into_iter().chain(others).chain([&end.leaving, &end.ears]).chain(&end.members)
    {
        cell.store(0, Relaxed);
    }
    for cell in [&end.tx_lock, &end.rx_lock, &end.back_lock, &end.tcp_left] {
        cell.store(0, Relaxed);
    }
    // Set for both: the acceptor holds its end from that moment on.
    end.refs.store(1, Relaxed);
}

pub(super) fn step_client(fd: i32, conn: &Conn) {
    let Some(slot) = conn.slot() else { return };
    match handshake::phase(&slot.control, usage(conn)) {
        // The holder of the peer's end now may be without the library.
        SlotState::Offered if conn.returns() > 0 && is_spent(fd, conn) => {
            withdraw(conn, Reason::PeerLeft)
        }
        SlotState::Offered => {
            let device = host::current();
            if let Some(process) = device.wanted_by(offer_id(conn))
                && let Some(memfd) = segment::fd_of(conn.segment.load(Relaxed))
            {
                match device.push_segment(offer_id(conn), process, memfd) {
                    Ok(()) | Err(libc::EAGAIN) => {}
                    Err(errno) => {
                        log::warn(format_args!("fd {fd}: segment not handed over, errno {errno}"));
                        withdraw(conn, Reason::NoSegment);
                    }
                }
            }
        }
        // Nothing smaller than the mark may wake a thread that sleeps on the kernel's socket by now, a doorbell has to.
        SlotState::Attached if has_high_lowat(fd) => {
            if call_off(conn) {
                conn.give_up(Reason::KernelFeature);
            }
        }
        SlotState::Attached => {
            // An fd number that changed hands behind our back must not confirm another connection.
            let stored = stored_tuple(conn);
            let live = (tuple::local(fd), tuple::peer(fd));
            if let (Ok(client), Ok(server)) = live
                && (Tuple { netns: stored[0], client, server }).words() == stored
            {
                if !mark::enter_ring(fd) {
                    call_off(conn);
                    return conn.give_up(Reason::Adopted);
                }
                begin_ring(conn);
                if handshake::confirm(&slot.control, usage(conn)) != SlotState::Confirmed {
                    mark::leave_ring(fd);
                    conn.give_up(Reason::PeerGone);
                }
                host::current().clear_offer(offer_id(conn));
            }
        }
        SlotState::Confirmed => begin_ring(conn),
        SlotState::Gone => begin_elsewhere(fd, conn, slot),
    }
}
