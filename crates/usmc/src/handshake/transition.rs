//! The dynamic transition: offer, attach, confirm, without waiting; then each direction changes over at an
//! exact byte. Every failure leaves the connection what it was, plain TCP.

mod attach;
mod calling_off;
mod offer;

pub use attach::{attach, attach_named, is_spent};
pub use offer::bind_own;

pub use calling_off::{call_off, decline, end, put_off, release_slot, take_back};

use core::ptr;
use usmc_shm::Broken;
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{ACCEPTOR, CLIENT, Slot};
use usmc_shm::span::{Switch, TxSpan};
use usmc_shm::state::EndFlags;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use crate::device;
use crate::device::segment::InUse;
use crate::family::liveness::{self, Life};
use crate::family::{holders, locks, mark, passed_on};
use crate::handshake::clc::deputy::Opened;
use crate::handshake::{clc, syn_option};
use crate::host::{self, OfferId};
use crate::os::reason::Reason;
use crate::os::{config, kernel_only, log, sockopt, sys};
use crate::record::change_over::{self, Call};
use crate::record::conn::{
    self, Conn, F_ADOPTED, F_CLIENT, F_COPIED, F_HANDED, F_KERNEL_ONLY, F_SETTLING, F_SHARED,
    F_TUNED,
};
use crate::record::near;
use crate::record::phase::{Event, Phase};
use crate::record::tuple::{Endpoint, Tuple};
use crate::record::{kernel, limit, numbers, options, watched};
use crate::watch::observer;
use attach::{step_acceptor, step_attached};
use offer::{is_ours_alone, offer, step_client};

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
pub fn begin_client(fd: i32, index: u32, server: Endpoint, opened: Opened) {
    let conn = conn::at(index);
    store_tuple(conn, &Tuple { server, ..Tuple::default() });
    conn.set_flag(F_CLIENT, true);
    conn.calls.store(0, Relaxed);
    conn.syn_option.store(0, Relaxed);
    clc::forget(conn);
    clc::deputy::opened(conn, opened);
    syn_option::settle(fd, conn);
    if conn.has(F_KERNEL_ONLY) {
        conn.give_up(Reason::KernelFeature);
    } else if let Some(why) = kernel_only::reason() {
        conn.give_up(why);
    } else if conn.has(F_COPIED | F_ADOPTED) {
        // Made before a fork, or elsewhere: its other holders know nothing of this connection.
        conn.give_up(Reason::Adopted);
    } else if !config::get().allows(|| server.ip(), server.port) {
        conn.give_up(Reason::Excluded);
    } else if numbers::is_libcs(fd) {
        conn.give_up(Reason::Stdio);
    } else if opened.is_proposed() || syn_option::may_speak(conn) || clc::is_declared(fd, server) {
        clc::declare(conn);
        conn.go(Event::Begins);
        let has_said = syn_option::outcome(conn) == syn_option::Outcome::Speaks;
        if has_said || (!syn_option::may_speak(conn) && clc::deputy::expect(conn)) {
            // Before anything else: the kernel's SMC waits for it, and a server's application.
            progress(fd, index, Call::Look);
        }
    } else {
        let why = match offer::may_be_listening(server) {
            true => Reason::Short,
            // The acceptor may be about to learn of the listener: asked once more where the connection lasts.
            false => syn_option::reason_of(conn, device::not_registered()),
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

pub fn bind_slot(
    fd: i32,
    conn: &Conn,
    segment: &InUse,
    index: u32,
    client: bool,
) -> Result<(), Reason> {
    let mine = if client { CLIENT } else { ACCEPTOR };
    let slot = segment.map.slot(index).map_err(|_| Reason::PeerBroken)?;
    let end = &slot.end[mine];
    end.rcv_buf.store(conn.rcv_buf.load(Relaxed), Relaxed);
    near::name_process(end);
    end.fd.store(fd.cast_unsigned(), Relaxed);
    conn.segment.store(segment.index, Relaxed);
    conn.slot_index.store(index, Relaxed);
    locks::trust(conn);
    // A stranger can make us take what it says it has written: memory for that has to be put aside.
    let reaches_far = !conn.is_with_other_user() || conn.clc.has_far_aside();
    // SAFETY: the segment counts this record as a user until `release_slot`.
    unsafe { tie(conn, segment, index, reaches_far) }.map_err(|_| Reason::PeerBroken)?;
    if conn.has_far() {
        end.set_reaches_far();
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
pub unsafe fn tie(
    conn: &Conn,
    segment: &InUse,
    index: u32,
    reaches_far: bool,
) -> Result<(), Broken> {
    let map = &segment.map;
    let (slot, mut memory) = (map.slot(index)?, map.memory(index)?);
    if !reaches_far {
        memory.far = ptr::null_mut();
    }
    // SAFETY: the caller's contract.
    unsafe { conn.set_slot(slot, memory, (segment.device, device::at(segment.device).near())) };
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
    let either = conn.own(slot).flags(Relaxed) | conn.peer(slot).flags(Relaxed);
    !either.has_ended()
        && !conn.end(slot).flags().has_ended()
        && conn.kernel_events.load(Relaxed) == 0
}

/// Names the record of a connection that came from elsewhere and stays TCP; nobody tells which end it is.
pub fn name_adopted(fd: i32, index: u32) {
    if let Ok(tuple) = Tuple::live(fd, false) {
        store_tuple(conn::at(index), &tuple);
    }
}

/// A connection that was passed on to this process, if [`passed_on`] knows its other holders.
pub fn begin_adopted(fd: i32, index: u32, client: bool) {
    let conn = conn::at(index);
    let Ok(tuple) = Tuple::live(fd, client) else { return conn.give_up(Reason::Adopted) };
    store_tuple(conn, &tuple);
    conn.set_flag(F_CLIENT, client);
    conn.reason.store(Reason::Adopted as u32, Relaxed);
    begin(conn);
    observer::changed(fd, index);
}

/// Whether no other process may use the socket, and no call of an earlier time does. Remembers its other holders.
pub fn is_free(fd: i32, conn: &Conn) -> Result<bool, Reason> {
    if conn.has(F_HANDED) || (conn.has(F_SHARED) && !is_ours_alone(fd, conn)?) {
        return Ok(false);
    }
    let is_quiet = || conn.unseen.load(SeqCst) == 0 && conn.is_past_sent();
    if !is_quiet() || !passed_on::is_sole(fd, conn) {
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
        Phase::Fresh => conn.keep_to_kernel(),
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
        if conn.step_lock.is_mine() {
            // A signal handler interrupted the step, whose end its calls cannot wait for.
            conn.give_up_early(Reason::Interrupted);
        }
        return;
    };
    let (before, reason) = (conn.phase(), conn.reason.load(Relaxed));
    step(fd, conn);
    clc::restore(fd, conn);
    if clc::deputy::is_due(conn) {
        drop(held);
        watched::EXCHANGES.call((fd, index));
    } else if conn.phase() != before {
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
        Phase::Early => step_early(fd, conn),
        Phase::Offered => step_client(fd, conn),
        Phase::Attached => step_attached(fd, conn),
        _ => return,
    }
    if conn.phase() == Phase::Ring {
        tune(fd, conn);
        // Now, as the word of a peer that has died cannot be found any more.
        if let Some(slot) = conn.slot() {
            liveness::look(conn, slot);
        }
    }
}

fn step_early(fd: i32, conn: &Conn) {
    if let Some(why) = kernel_only::reason() {
        conn.give_up(why);
    } else if clc::is_on(conn) {
        clc::step(fd, conn);
    } else if host::current().is_off() {
        // It leaves TCP once it may: at a later call.
        conn.reason.store(Reason::SwitchedOff as u32, Relaxed);
    } else if !conn.has(F_CLIENT) {
        step_acceptor(fd, conn);
    } else if let Err(why) = offer(fd, conn) {
        conn.give_up(why);
    }
}

fn changed(fd: i32, index: u32) {
    observer::changed(fd, index);
    watched::PHASE_CHANGED.call(index);
}

/// SO_LINGER was set, or the slot is new: the peer has to know how a death ends this end. The caller holds the step's lock.
pub fn note_linger(fd: i32, conn: &Conn, slot: &Slot) {
    let may_reset = options::may_be_set(conn, libc::SOL_SOCKET, libc::SO_LINGER);
    conn.end(slot).set_resets(may_reset && kernel::resets(fd));
}

fn usage(conn: &Conn) -> Use {
    Use::from_bits(conn.usage.load(Relaxed))
}

/// Bits of [`Conn::offer_index`] below the number of the device.
const INDEX_BITS: u32 = 24;

/// Its offer, or where a board keeps its handshake.
pub fn offer_id(conn: &Conn) -> OfferId {
    let place = conn.offer_index.load(Relaxed);
    let (device, index) = ((place >> INDEX_BITS) as u8, place & ((1 << INDEX_BITS) - 1));
    OfferId { device, index, use_count: conn.offer_use.load(Relaxed) }
}

/// Sets it, and the device, which is shown also where the handshake leads nowhere.
pub fn store_offer_id(conn: &Conn, id: OfferId) {
    conn.device.store(id.device.into(), Relaxed);
    conn.offer_index.store(u32::from(id.device) << INDEX_BITS | id.index, Relaxed);
    conn.offer_use.store(id.use_count, Relaxed);
}

/// Clears it on its board.
pub fn clear_offer(conn: &Conn) {
    let id = offer_id(conn);
    device::board_of(id).clear_offer(id);
}

/// Puts memory aside that another user's peer may make us take, where the device's memory is this process'. False where there is
/// none.
pub fn puts_aside(conn: &Conn, device: device::Index, shifts: (u32, u32)) -> bool {
    let is_needed = conn.is_with_other_user() && device::at(device).is_charged();
    !is_needed || conn.clc.put_aside(shifts)
}

/// The tokens of the connection, the client's first, go into its slot: whoever finds the slot's name on the board can tell for which
/// connection it is.
pub fn store_tokens(conn: &Conn, tokens: [u64; 2]) {
    let Some(slot) = conn.slot() else { return };
    slot.control.tokens.iter().zip(tokens).for_each(|(word, token)| word.store(token, Relaxed));
}

/// The connection is in the ring from now on. Its other holders of before may have set O_NONBLOCK meanwhile.
pub fn begin_ring(conn: &Conn) {
    if conn.returns() > 0 || conn.passed_on.load(Relaxed) != 0 || conn.has(F_ADOPTED | F_COPIED) {
        holders::doubt_nonblocking(conn);
    }
    conn.go(Event::Confirms);
    // Both have begun their handshake before they were to stay TCP.
    host::current().look_at_switch_again();
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
pub fn tune(fd: i32, conn: &Conn) {
    if conn.has(F_TUNED) {
        return;
    }
    let Some(slot) = conn.slot() else { return };
    let end = conn.end(slot);
    end.keep_options();
    let is_set = |name| {
        options::may_be_set(conn, libc::IPPROTO_TCP, name)
            && sockopt::int(fd, libc::IPPROTO_TCP, name, 0) != 0
    };
    if is_set(libc::TCP_CORK) {
        end.set_cork(true);
        // Sends what is held back; later bytes are doorbells.
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, &0i32);
    }
    if conn.clc.hurries.swap(0, Relaxed) != 0 {
        // It is on already, and the application has not set it.
    } else if is_set(libc::TCP_NODELAY) {
        end.set_nodelay(true);
    } else {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32);
    }
    take_lowat(fd, conn);
    note_linger(fd, conn, slot);
    conn.set_flag(F_TUNED, true);
}

/// The kernel's socket has the application's options again.
pub fn untune(fd: i32, conn: &Conn, slot: &Slot) {
    if conn.has(F_TUNED) {
        conn.set_flag(F_TUNED, false);
        let set = conn.end(slot).give_options_back();
        if set.has_given_back() {
            // Another process was first, and may have set its own since.
            conn.set_lowat(0);
        } else {
            give_options_back(fd, set);
        }
        give_lowat_back(fd, conn);
    }
}

/// `set`: what the application has set.
fn give_options_back(fd: i32, set: EndFlags) {
    if !set.has_nodelay() {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &0i32);
    }
    if set.has_cork() {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, &1i32);
    }
}

/// The socket is about to be fresh again: it is neither end of a connection.
pub fn disconnecting(conn: &Conn) {
    conn.set_flag(F_CLIENT | F_TUNED, false);
}

fn has_high_lowat(fd: i32, conn: &Conn) -> bool {
    kernels_lowat(fd, conn) > 1
}

fn kernels_lowat(fd: i32, conn: &Conn) -> i32 {
    match options::may_be_set(conn, libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        true => sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1),
        false => 1,
    }
}

/// SO_RCVLOWAT is ours from now on: a doorbell is one byte, and has to wake.
fn take_lowat(fd: i32, conn: &Conn) {
    let lowat = kernels_lowat(fd, conn);
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
    liveness::look(conn, slot) == Life::Ended && !conn.peer(slot).flags(Relaxed).reads_nothing()
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
