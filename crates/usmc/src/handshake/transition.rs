//! The dynamic transition: offer, attach, confirm, without waiting; then each direction changes over at an
//! exact byte. Every failure leaves the connection what it was, plain TCP.

mod calling_off;

pub use calling_off::{call_off, decline, end, put_off, release_slot, take_back, withdraw};

use core::ptr;
use usmc_shm::Broken;
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{
    ACCEPTOR, ARM_TCP, CLIENT, END_CORK, END_CUT, END_ERROR_TAKEN, END_FAR, END_GIVEN_BACK,
    END_NODELAY, END_RESET_SEEN, END_SENT_AFTER, END_SHUT_RD, End, Slot, TXF_ABORT, TXF_CLOSED,
    TXF_ENDS,
};
use usmc_shm::region::Segment;
use usmc_shm::span::{Switch, TxSpan};
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use crate::device::segment::{self, OwnSlot};
use crate::family::life::{self, Life};
use crate::family::{custody, holders, mark};
use crate::handshake::{clc, syn_option};
use crate::host::{self, DmbRef, OfferId};
use crate::os::reason::Reason;
use crate::os::{config, kernel_only, log, sockopt, sys};
use crate::record::change_over::{self, Call};
use crate::record::conn::{
    self, Conn, F_ADOPTED, F_CLIENT, F_COPIED, F_HANDED, F_KERNEL_ONLY, F_SCRIBBLED, F_SETTLING,
    F_SHARED, F_STALE, F_TUNED,
};
use crate::record::phase::{Event, Phase};
use crate::record::tuple::{self, Endpoint, Tuple};
use crate::record::{kernel, limit, numbers, watched};
use crate::watch::observer;
use usmc_shm::layout::END_RESETS;

/// Calls in which an acceptor looks for an offer before it settles for TCP: after the first [`LOOKS_EACH`] only
/// every [`LOOKS_EACH`]th looks, for a client that sends a long request before it makes its offer.
pub const LOOKS: u32 = 128 * LOOKS_EACH;
const LOOKS_EACH: u32 = 64;
/// From here on down.
const SELDOM: u32 = LOOKS - LOOKS_EACH;

/// The record's tuple.
pub fn stored_tuple(conn: &Conn) -> [u64; 6] {
    core::array::from_fn(|i| conn.tuple[i].load(Relaxed))
}

/// The same, as a tuple.
pub fn stored(conn: &Conn) -> Tuple {
    Tuple::of(&stored_tuple(conn))
}

/// Sets it.
pub fn store_tuple(conn: &Conn, tuple: &Tuple) {
    for (place, word) in conn.tuple.iter().zip(tuple.words()) {
        place.store(word, Relaxed);
    }
}

/// After connect(2) succeeded or went into progress: once it lasts, the connection is offered to the destination
/// if that is registered.
pub fn begin_client(fd: i32, index: u32, server: Endpoint) {
    let conn = conn::at(index);
    store_tuple(conn, &Tuple { server, ..Tuple::default() });
    conn.set_flag(F_CLIENT, true);
    conn.calls.store(0, Relaxed);
    conn.syn_option.store(0, Relaxed);
    clc::forget(conn);
    syn_option::settle(fd, conn);
    if conn.has(F_KERNEL_ONLY) {
        conn.give_up(Reason::KernelFeature);
    } else if let Some(why) = kernel_only::reason() {
        conn.give_up(why);
    } else if conn.has(F_COPIED | F_ADOPTED) {
        // Made before a fork, or elsewhere: who else has it knows nothing of this connection.
        conn.give_up(Reason::Adopted);
    } else if !config::get().allows(|| server.ip(), server.port) {
        conn.give_up(Reason::Excluded);
    } else if numbers::is_libcs(fd) {
        conn.give_up(Reason::Stdio);
    } else if syn_option::may_speak(conn) || clc::is_declared(fd, server) {
        clc::declare(conn);
        conn.go(Event::Begins);
        if syn_option::outcome(conn) == syn_option::Outcome::Speaks {
            // Before anything else: the kernel's SMC waits for it.
            progress(fd, index, Call::Look);
        }
    } else {
        let why = match host::current().is_listening(None, server) {
            true => Reason::Short,
            // Who will accept may be about to learn of the listener: asked once more where the connection lasts.
            false => syn_option::reason_of(conn, Reason::NotRegistered),
        };
        conn.reason.store(why as u32, Relaxed);
        conn.go(Event::Begins);
        log::debug(format_args!("fd {fd}: connects to port {}", server.port));
        begin_at_once(fd, index);
    }
    observer::changed(fd, index);
}

/// A connection has just been made. Its handshake begins with it, if the configuration says so.
pub fn begin_at_once(fd: i32, index: u32) {
    if config::get().changes_over_at_once {
        progress(fd, index, Call::Look);
    }
}

/// Leaves an offer. Where it cannot be left just now, a later call will.
fn offer(fd: i32, conn: &Conn) -> Result<(), Reason> {
    let meant = Endpoint::server_of(&stored_tuple(conn));
    if !host::current().is_listening(None, meant) {
        return Err(syn_option::reason_of(conn, Reason::NotRegistered));
    }
    if !is_free(fd, conn)? {
        return Ok(());
    }
    let (Ok(client), Ok(server)) = (tuple::local(fd), tuple::peer(fd)) else { return Ok(()) };
    // connect(0.0.0.0) goes to 127.0.0.1.
    if server.port != meant.port || (server.addr != meant.addr && !meant.is_wildcard()) {
        // The number means another connection by now.
        return Err(Reason::NotRegistered);
    }
    let netns = tuple::netns(fd);
    let tuple = Tuple { netns, client, server };
    if !host::current().is_listening(Some(netns), server) {
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
    let own = segment::take_slot(&tuple)?;
    let usage = bind_own(fd, conn, &own)?;
    store_tuple(conn, &tuple);
    let dmb = DmbRef { segment: own.id, slot: own.slot, usage: usage.to_bits() };
    let offered = host::current().offer(&tuple, dmb);
    let offered = offered.inspect_err(|_| {
        release_slot(conn);
    })?;
    conn.offer_index.store(offered.index, Relaxed);
    conn.offer_use.store(offered.use_count, Relaxed);
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
    let Ok(usage) = prepare(&own.map, own.slot) else {
        segment::unuse(own.segment);
        return Err(Reason::NoMemory);
    };
    bind_slot(fd, conn, &own.map, own.segment, own.slot, true)?;
    if let Some(slot) = conn.slot() {
        life::vouch(conn, slot);
    }
    conn.usage.store(usage.to_bits(), Relaxed);
    Ok(usage)
}

/// Another process may hold the socket, too, and could not learn of the memory: false until it let go.
fn is_ours_alone(fd: i32, conn: &Conn) -> Result<bool, Reason> {
    if !holders::is_sole_holder(conn) {
        return Ok(false);
    }
    // The others may have shut it down.
    if kernel::is_established(fd) { Ok(true) } else { Err(Reason::ShutDown) }
}

/// Resets a slot's words for its next connection and opens it for an acceptor.
fn prepare(map: &Segment, index: u32) -> Result<Use, Broken> {
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
    handshake::offer(&slot.control)
}

fn reset_end(end: &End) {
    for cell in [&end.tcp_sends, &end.rx_sleepers, &end.tx_sleepers, &end.bells_drained, &end.flags]
    {
        cell.store(0, Relaxed);
    }
    end.tx_lock.store(0, Relaxed);
    end.back_lock.store(0, Relaxed);
    end.rx_lock.store(0, Relaxed);
    end.tcp_left.store(0, Relaxed);
    end.rcvlowat.store(0, Relaxed);
    end.custody.store(0, Relaxed);
    end.blocked_sends.store(0, Relaxed);
    end.leaving.store(0, Relaxed);
    end.bells_for.store(0, Relaxed);
    end.members.iter().for_each(|id| id.store(0, Relaxed));
    // Set for both: who attaches holds its end from that moment on.
    end.refs.store(1, Relaxed);
}

fn bind_slot(
    fd: i32,
    conn: &Conn,
    map: &Segment,
    seg: u32,
    index: u32,
    client: bool,
) -> Result<(), Reason> {
    let mine = if client { CLIENT } else { ACCEPTOR };
    let slot = map.slot(index).map_err(|_| Reason::PeerBroken)?;
    let end = &slot.end[mine];
    end.rcv_buf.store(conn.rcv_buf.load(Relaxed), Relaxed);
    end.pid.store(crate::os::process::pid(), Relaxed);
    end.fd.store(fd.cast_unsigned(), Relaxed);
    conn.segment.store(seg, Relaxed);
    conn.slot_index.store(index, Relaxed);
    conn.set_flag(F_SCRIBBLED, false);
    // A stranger can make us take what it says it has written: memory for that has to be put aside.
    let reaches_far = !conn.is_with_stranger() || conn.clc.has_far_aside();
    // SAFETY: the segment counts this record as a user until `release_slot`.
    unsafe { tie(conn, map, index, reaches_far) }.map_err(|_| Reason::PeerBroken)?;
    if conn.has_far() {
        end.flags.fetch_or(END_FAR, Relaxed);
    }
    numbers::note_handing_on(conn);
    Ok(())
}

/// Ties the record to a slot. `reaches_far`: and to the far parts of its rings, if those are mapped.
///
/// # Errors
/// [`Broken`] when there is no such slot.
///
/// # Safety
/// The segment stays mapped until the record forgets the slot.
pub unsafe fn tie(conn: &Conn, map: &Segment, index: u32, reaches_far: bool) -> Result<(), Broken> {
    let (slot, mut memory) = (map.slot(index)?, map.memory(index)?);
    if !reaches_far {
        memory.far = ptr::null_mut();
    }
    // SAFETY: the caller's contract.
    unsafe { conn.set_slot(slot, memory) };
    Ok(())
}

/// After accept(2): once it lasts, each call on the connection looks for its offer. Not accept itself: a
/// server that hands the socket on at once (inetd, fork and exec) leaves it plain for the next program.
pub fn begin_acceptor(index: u32, tuple: &Tuple) {
    let conn = conn::at(index);
    store_tuple(conn, tuple);
    conn.looks.store(LOOKS, Relaxed);
    conn.reason.store(Reason::Short as u32, Relaxed);
    conn.go(Event::Begins);
}

/// Leaves its slot, for its end or the peer's may come to another process under uSMC, and into a ring again. False where
/// that cannot be. The caller holds both locks, and keeps steps away by the step's lock or [`F_SETTLING`].
pub fn begin_again(conn: &Conn, slot: &Slot, reason: Reason) -> bool {
    if !has_no_end(conn, slot) || !conn.leave_slot() {
        return false;
    }
    conn.reason.store(reason as u32, Relaxed);
    begin(conn);
    conn.came_back();
    true
}

fn begin(conn: &Conn) {
    conn.calls.store(0, Relaxed);
    conn.looks.store(LOOKS, Relaxed);
    conn.go_on_with_kernel_calls();
    conn.go(Event::ComesBack);
}

/// Whether nothing of the connection's end has begun, of which only the slot knows.
fn has_no_end(conn: &Conn, slot: &Slot) -> bool {
    const ENDS: u32 = END_SHUT_RD | END_RESET_SEEN | END_ERROR_TAKEN | END_SENT_AFTER | END_CUT;
    let flags = conn.own(slot).flags.load(Relaxed) | conn.peer(slot).flags.load(Relaxed);
    flags & TXF_ENDS == 0
        && conn.end(slot).flags.load(Relaxed) & ENDS == 0
        && conn.kernel_events.load(Relaxed) == 0
}

/// Names the record of a connection that came from elsewhere and stays TCP; nobody tells which end it is.
pub fn name_adopted(fd: i32, index: u32) {
    if let (Ok(server), Ok(client)) = (tuple::local(fd), tuple::peer(fd)) {
        store_tuple(conn::at(index), &Tuple { netns: tuple::netns(fd), client, server });
    }
}

/// A connection that was passed on to this process, if [`custody`] knows who else has it.
pub fn begin_adopted(fd: i32, index: u32, client: bool) {
    let conn = conn::at(index);
    let (Ok(local), Ok(peer)) = (tuple::local(fd), tuple::peer(fd)) else {
        return conn.give_up(Reason::Adopted);
    };
    let netns = tuple::netns(fd);
    let (client_end, server) = if client { (local, peer) } else { (peer, local) };
    store_tuple(conn, &Tuple { netns, client: client_end, server });
    conn.set_flag(F_CLIENT, client);
    conn.reason.store(Reason::Adopted as u32, Relaxed);
    begin(conn);
    observer::changed(fd, index);
}

/// Whether nobody else may use the socket, and no call of an earlier time does. Remembers who else has it.
pub fn is_free(fd: i32, conn: &Conn) -> Result<bool, Reason> {
    if conn.has(F_HANDED) || (conn.has(F_SHARED) && !is_ours_alone(fd, conn)?) {
        return Ok(false);
    }
    let is_quiet = || conn.unseen.load(SeqCst) == 0 && conn.is_past_sent();
    if !is_quiet() || !custody::is_sole(fd, conn) {
        return Ok(false);
    }
    // Another process that had it may have left the ring for the kernel's sake.
    let had_others = conn.has(F_COPIED | F_ADOPTED) || conn.returns() > 0;
    if had_others && (sockopt::are_kernels(fd) || kernel::has_signals(fd)) {
        return Err(Reason::KernelFeature);
    }
    // Or have shut it down.
    if had_others && !kernel::is_established(fd) {
        return Err(Reason::ShutDown);
    }
    Ok(is_quiet())
}

/// The kernel alone has to know this socket's readiness. Says whether it stays TCP for good; what is in the
/// ring does not go back.
pub fn stay_tcp(index: u32) -> bool {
    let conn = conn::at(index);
    match conn.phase() {
        Phase::Fresh => conn.set_flag(F_KERNEL_ONLY, true),
        Phase::Early | Phase::Offered => take_back(conn, Reason::TableFull),
        _ => {}
    }
    !matches!(conn.phase(), Phase::Offered | Phase::Attached | Phase::Ring)
}

/// Whether a step of the handshake may be due at this call, which is noted. Costs a few loads.
#[inline(always)]
pub fn is_due(conn: &Conn, call: Call) -> bool {
    match conn.phase() {
        Phase::Early => {
            (change_over::lasts(conn, call) || clc::is_on(conn)) && !conn.has(F_SETTLING)
        }
        Phase::Offered | Phase::Attached => true,
        _ => false,
    }
}

/// One step of the handshake, where one is due. Never waits.
#[inline(always)]
pub fn progress(fd: i32, index: u32, call: Call) {
    if is_due(conn::at(index), call) {
        make_progress(fd, index);
        if call != Call::Look && config::get().changes_over_at_once {
            await_acceptor(fd, index);
        }
    }
}

#[inline(never)]
fn make_progress(fd: i32, index: u32) {
    let conn = conn::at(index);
    // Somebody else is at it: the next call goes on.
    let Some(held) = conn.step_lock.try_enter() else {
        if conn.step_lock.is_mine() && conn.leave_early(Event::GivesUp) {
            // A signal handler interrupted the step, whose end its calls cannot wait for.
            conn.reason.store(Reason::Interrupted as u32, Relaxed);
        }
        return;
    };
    let (before, reason) = (conn.phase(), conn.reason.load(Relaxed));
    step(fd, conn);
    if conn.phase() != before {
        // Takes the sets' locks, which others hold while they begin a step.
        drop(held);
        changed(fd, index);
    } else if conn.reason.load(Relaxed) != reason {
        drop(held);
        observer::changed(fd, index);
    }
}

/// With `change_over = "at-once"` a client waits for its acceptor at its first call, for a little while: a message that is
/// sent before goes by TCP, and most tests send one. An event loop, which may have to accept it, waits less.
#[cold]
fn await_acceptor(fd: i32, index: u32) {
    const MOST_MS: u32 = 10;
    const MOST_OF_LOOPS_MS: u32 = 2;
    let conn = conn::at(index);
    if conn.phase() != Phase::Offered || !change_over::may_await(conn) {
        return;
    }
    let most = if holders::is_nonblocking(fd, conn) { MOST_OF_LOOPS_MS } else { MOST_MS };
    for _ in 0..most {
        // A millisecond, unless the connection ends.
        if conn.phase() != Phase::Offered || sys::poll1(fd, 0, 1) != 0 {
            return;
        }
        make_progress(fd, index);
    }
}

/// The caller holds the step's lock.
fn step(fd: i32, conn: &Conn) {
    match conn.phase() {
        Phase::Early if let Some(why) = kernel_only::reason() => conn.give_up(why),
        Phase::Early if clc::is_on(conn) => clc::step(fd, conn),
        Phase::Early if conn.has(F_CLIENT) => {
            if let Err(reason) = offer(fd, conn) {
                conn.give_up(reason);
            }
        }
        Phase::Early => step_acceptor(fd, conn),
        Phase::Offered => step_client(fd, conn),
        Phase::Attached => step_attached(fd, conn),
        _ => return,
    }
    if conn.phase() == Phase::Ring {
        tune(fd, conn);
        // Now, as the word of a peer that has died cannot be found any more.
        if let Some(slot) = conn.slot() {
            life::look(conn, slot);
        }
    }
}

fn changed(fd: i32, index: u32) {
    observer::changed(fd, index);
    watched::PHASE_CHANGED.call(index);
}

/// SO_LINGER was set, or the slot is new: the peer has to know how a death ends this end. The caller holds the step's lock.
pub fn note_linger(fd: i32, conn: &Conn, slot: &Slot) {
    conn.set_end_bit(slot, END_RESETS, kernel::resets(fd));
}

fn usage(conn: &Conn) -> Use {
    Use::from_bits(conn.usage.load(Relaxed))
}

fn offer_id(conn: &Conn) -> OfferId {
    OfferId { index: conn.offer_index.load(Relaxed), use_count: conn.offer_use.load(Relaxed) }
}

fn step_client(fd: i32, conn: &Conn) {
    let Some(slot) = conn.slot() else { return };
    match handshake::phase(&slot.control, usage(conn)) {
        // Whoever has the peer's end now may be without the library.
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
        // Nothing smaller than the mark may wake whoever sleeps on the kernel's socket by now, a doorbell has to.
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
fn is_used(fd: i32, conn: &Conn) -> bool {
    // Plus one: the first time is the measure of the next.
    let received = kernel::tcp_received(fd).map_or(u64::MAX, |bytes| bytes + 1);
    let before = conn.received.swap(received, Relaxed);
    before != 0 && before != received
}

/// The acceptor's tuple. Of a listener on all addresses, accept(2) did not tell which one it is.
fn named(fd: i32, conn: &Conn) -> Option<[u64; 6]> {
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
fn left_after_look(left: u32, is_used: impl FnOnce() -> bool) -> Option<u32> {
    match left {
        _ if left > SELDOM => Some(left - 1),
        _ if is_used() => left.checked_sub(1),
        _ => Some((left + LOOKS_EACH - 1).min(SELDOM - 1)),
    }
}

fn step_acceptor(fd: i32, conn: &Conn) {
    let left = conn.looks.load(Relaxed);
    if left < SELDOM && !left.is_multiple_of(LOOKS_EACH) {
        conn.looks.store(left - 1, Relaxed);
        return;
    }
    let device = host::current();
    let Some(words) = named(fd, conn) else { return };
    clc::take_mail();
    let Some(found) = device.find_offer(&words) else {
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
    if has_high_lowat(fd) {
        return conn.give_up(Reason::KernelFeature);
    }
    let known = segment::use_peer(found.dmb.segment).or_else(|| {
        // It may have come since the offer was found.
        clc::take_mail();
        segment::use_peer(found.dmb.segment)
    });
    let Some((seg, map)) = known else {
        if segment::is_refused(found.dmb.segment) {
            return conn.give_up(Reason::NoMemory);
        }
        // The client hands it over at its next call, which may be long in coming: a large send can last
        // for any number of calls here.
        conn.reason.store(Reason::Pending as u32, Relaxed);
        match device.want_segment(found.id) {
            Ok(false) => conn.looks.store(LOOKS, Relaxed),
            // What cannot be kept is not asked for at every call for ever.
            Ok(true) if left == 0 => conn.give_up(Reason::NoSegment),
            Ok(true) => conn.looks.store(left - 1, Relaxed),
            Err(reason) => conn.give_up(reason),
        }
        return;
    };
    attach_to(fd, conn, found.dmb, seg, &map);
}

/// Attaches to memory that was handed over for this very connection ([`clc`]).
pub fn attach(fd: i32, conn: &Conn, dmb: DmbRef, file: u64) {
    match is_free(fd, conn) {
        Ok(true) => {}
        Ok(false) => return,
        Err(reason) => return conn.give_up(reason),
    }
    match segment::use_delivered(dmb.segment, file) {
        Some((seg, map)) => attach_to(fd, conn, dmb, seg, &map),
        None => conn.give_up(Reason::NoMemory),
    }
}

/// The caller has counted a use of the segment, and holds the step's lock.
fn attach_to(fd: i32, conn: &Conn, dmb: DmbRef, seg: u32, map: &Segment) {
    // Receivers of this process are kept out while the record gets its slot; calls in the kernel's TCP would
    // be uncounted in the slot, so with any of them in flight the next call tries again.
    let Some(_rx) = conn.rx_lock.try_enter() else { return segment::unuse(seg) };
    if !conn.stop_kernel_calls() {
        return segment::unuse(seg);
    }
    if conn.returns() > 0 && !is_free(fd, conn).is_ok_and(|free| free) {
        conn.go_on_with_kernel_calls();
        return segment::unuse(seg);
    }
    if !mark::enter_ring(fd) {
        conn.go_on_with_kernel_calls();
        conn.give_up(Reason::Adopted);
        return segment::unuse(seg);
    }
    let bound = match conn.is_with_stranger() && !conn.clc.put_aside(map.shifts()) {
        true => Err(Reason::NoMemory),
        false => bind_slot(fd, conn, map, seg, dmb.slot, false),
    };
    if let Err(reason) = bound {
        conn.clc.give_back();
        mark::leave_ring(fd);
        conn.go_on_with_kernel_calls();
        conn.give_up(reason);
        return segment::unuse(seg);
    }
    let Some(slot) = conn.slot() else { return };
    let usage = Use::from_bits(dmb.usage);
    conn.usage.store(dmb.usage, Relaxed);
    // Before the slot is: a signal handler of this thread may want the connection to stay TCP.
    let moved = conn.leave_early(Event::Attaches);
    if moved
        && handshake::attach(&slot.control, usage, crate::os::process::pid()) == SlotState::Attached
    {
        life::vouch(conn, slot);
        conn.reason.store(Reason::Pending as u32, Relaxed);
        log::debug(format_args!("fd {fd}: attached to slot {}", dmb.slot));
        return;
    }
    // Withdrawn, or taken by a process that shares this very socket: not ours to use.
    mark::leave_ring(fd);
    conn.forget_slot();
    segment::unuse(seg);
    if moved {
        conn.give_up(Reason::PeerGone);
    }
}

/// The connection is in the ring from now on. Who had it, too, before may have set O_NONBLOCK meanwhile.
fn begin_ring(conn: &Conn) {
    if conn.returns() > 0 || conn.custody.load(Relaxed) != 0 || conn.has(F_ADOPTED | F_COPIED) {
        conn.set_flag(F_STALE, true);
    }
    conn.go(Event::Confirms);
}

fn step_attached(fd: i32, conn: &Conn) {
    let Some(slot) = conn.slot() else { return };
    match handshake::phase(&slot.control, usage(conn)) {
        SlotState::Confirmed => begin_ring(conn),
        SlotState::Attached => {}
        SlotState::Offered => conn.give_up(Reason::PeerBroken),
        SlotState::Gone => begin_elsewhere(fd, conn, slot),
    }
}

/// The handshake has ended, perhaps because the peer passes its end on.
fn begin_elsewhere(fd: i32, conn: &Conn, slot: &Slot) {
    let (Some(_rx), Some(_tx)) = (conn.rx_lock.try_enter(), conn.tx_lock.try_enter()) else {
        return;
    };
    mark::leave_ring(fd);
    give_lowat_back(fd, conn);
    if !begin_again(conn, slot, Reason::PeerGone) {
        conn.give_up(Reason::PeerGone);
    }
}

/// Prepares the kernel socket for its new work: doorbell bytes go out at once and wake at the first one.
/// What the application had set is kept in the slot and given back to getsockopt.
fn tune(fd: i32, conn: &Conn) {
    if conn.has(F_TUNED) {
        return;
    }
    let Some(slot) = conn.slot() else { return };
    let end = conn.end(slot);
    end.flags.fetch_and(!END_GIVEN_BACK, Relaxed);
    if sockopt::int(fd, libc::IPPROTO_TCP, libc::TCP_CORK, 0) != 0 {
        end.flags.fetch_or(END_CORK, Relaxed);
        // Sends what is held back; later bytes are doorbells.
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, &0i32);
    }
    if sockopt::int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 0) != 0 {
        end.flags.fetch_or(END_NODELAY, Relaxed);
    } else {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32);
    }
    take_lowat(fd, conn);
    note_linger(fd, conn, slot);
    conn.set_flag(F_TUNED, true);
}

fn has_high_lowat(fd: i32) -> bool {
    sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1) > 1
}

/// SO_RCVLOWAT is ours from now on: a doorbell is one byte, and has to wake.
fn take_lowat(fd: i32, conn: &Conn) {
    let lowat = sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1);
    if lowat > 1 {
        conn.set_lowat(lowat as u32);
        let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &1i32);
    }
}

/// The connection stays TCP after all.
#[inline(always)]
pub fn give_lowat_back(fd: i32, conn: &Conn) {
    let lowat = conn.lowat();
    if lowat > 0 {
        conn.set_lowat(0);
        let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &lowat.cast_signed());
    }
}

/// Whether our sending direction is in the ring; changes it over when that is due and possible.
#[inline(always)]
pub fn tx_is_ring(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let span = TxSpan::new(slot, conn.side());
    span.is_ring() || (conn.phase() == Phase::Ring && switch_tx(fd, conn, &span))
}

/// Whether the peer has ended without a close. What its kernel answers to bytes of TCP need not be told from what it answers
/// to doorbells.
fn was_killed(conn: &Conn, slot: &Slot) -> bool {
    life::look(conn, slot) == Life::Ended
        && conn.peer(slot).flags.load(Relaxed) & (TXF_ABORT | TXF_CLOSED) == 0
}

#[cold]
fn switch_tx(fd: i32, conn: &Conn, span: &TxSpan<'_>) -> bool {
    let Some(slot) = conn.slot() else { return false };
    // A client is in the ring an instant before it confirms, and the acceptor may have called it off.
    let is_confirmed = handshake::phase(&slot.control, usage(conn)) == SlotState::Confirmed;
    if !is_confirmed || was_killed(conn, slot) {
        return false;
    }
    let client = conn.has(F_CLIENT);
    // Of a number that another thread has closed meanwhile, and that means something else, the answer is none.
    let is_ours = || numbers::number(fd, conn::index_of(conn)) == fd;
    let switched = span.try_switch(|| kernel::tcp_sent(fd, client).filter(|_| is_ours()));
    if switched == Ok(Switch::Ring) {
        limit::set(fd, conn, slot);
        log::debug(format_args!("fd {fd}: sending through the ring"));
    }
    switched == Ok(Switch::Ring)
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
