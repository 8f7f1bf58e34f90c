//! The client's side: it leaves an offer, hands the memory over, and confirms.

use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::sync::Ordering::Relaxed;

use super::attach::is_spent;
use super::calling_off::{call_off, release_slot, withdraw};
use super::{
    begin_elsewhere, begin_ring, bind_slot, clear_offer, has_high_lowat, is_free, offer_id,
    store_offer_id, store_tuple, stored_tuple, usage,
};
use crate::device;
use crate::device::segment::{self, OwnSlot};
use crate::family::{holders, liveness, mark};
use crate::handshake::{clc, syn_option};
use crate::host::{self, DmbRef};
use crate::os::reason::Reason;
use crate::os::route::{self, Route};
use crate::os::{config, log};
use crate::record::conn::Conn;
use crate::record::kernel;
use crate::record::phase::Event;
use crate::record::tuple::{self, Endpoint, Tuple};

/// Whether somebody may listen there on a device of this process.
pub(super) fn may_be_listening(server: Endpoint) -> bool {
    device::all().any(|(_, device)| device.board().is_listening(None, server))
}

/// Leaves an offer, or asks for the other end's holder. Where that cannot be just now, a later call will.
pub(super) fn offer(fd: i32, conn: &Conn) -> Result<(), Reason> {
    let meant = Endpoint::server_of(&stored_tuple(conn));
    if !may_be_listening(meant) {
        return Err(syn_option::reason_of(conn, device::not_registered()));
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
    let is_region = |device: &device::Index| *device != device::of_host();
    let listening = || {
        let listening = |(_, device): &(_, &'static dyn device::Device)| {
            device.board().is_listening(None, server)
        };
        device::all().filter(listening).map(|(index, _)| index)
    };
    // A listener on all addresses stands for this host's, and a region for other hosts'.
    let in_region = listening().any(|device| is_region(&device));
    let route = if in_region { route_of(&tuple) } else { Route::Local };
    let is_ours = config::get().uses_loopback
        && route == Route::Local
        && host::current().board().is_listening(Some(tuple.netns), server);
    if !is_ours {
        // A peer that says that it holds a connection is sent messages: only of hosts that are meant to be such peers.
        let is_near = matches!(route, Route::Local | Route::OnLink)
            || config::get().is_in_region_nets(server.ip());
        let asked = listening().filter(|device| is_near || !is_region(device));
        return match clc::ask(fd, conn, &tuple, asked) {
            Err(Reason::NotRegistered) if in_region && !is_near => Err(Reason::NotOnLink),
            asked => asked,
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
    let own = segment::take_slot(device::of_host(), &tuple)?;
    let usage = bind_own(fd, conn, &own)?;
    store_tuple(conn, &tuple);
    let dmb = DmbRef { segment: own.id, slot: own.slot, usage: usage.to_bits() };
    let offered = host::current().board().offer(&tuple, dmb);
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

/// How far the server is. A connection from an address to itself is this host's; the kernel knows of others.
fn route_of(tuple: &Tuple) -> Route {
    if tuple.client.addr == tuple.server.addr { Route::Local } else { route::to(tuple.server.ip()) }
}

/// Ties the record to a slot that was just taken, for its next connection.
pub fn bind_own(fd: i32, conn: &Conn, own: &OwnSlot) -> Result<Use, Reason> {
    let Ok(usage) = own.segment.map.prepare(own.slot) else {
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

pub(super) fn step_client(fd: i32, conn: &Conn) {
    let Some(slot) = conn.slot() else { return };
    match handshake::phase(&slot.control, usage(conn)) {
        // The holder of the peer's end now may be without the library.
        SlotState::Offered if conn.returns() > 0 && is_spent(fd, conn) => {
            withdraw(conn, Reason::PeerLeft)
        }
        SlotState::Offered => {
            let device = host::current();
            if offer_id(conn).device == device::of_host()
                && let Some(process) = device.board().wanted_by(offer_id(conn))
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
        SlotState::Attached if has_high_lowat(fd, conn) => {
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
                clear_offer(conn);
            }
        }
        SlotState::Confirmed => begin_ring(conn),
        SlotState::Gone => begin_elsewhere(fd, conn, slot),
    }
}
