//! Demotion: a connection in the ring becomes plain TCP again, because its next user is one that the
//! library cannot serve (another program, libc's own streams), or in a way that only the kernel can (urgent data).
//!
//! One end begins ([`leave`]) and is out of the ring when that returns. What it had not read, its peer sends again by
//! TCP, at its next call on the connection or when it is woken out of one; what it had sent, the peer reads out of
//! the ring first. The peer follows ([`follow`], [`look`]). `usmc_shm::back` has the steps and their models.

mod copies;
mod patience;
mod receiving;
mod sending;
mod stream;

pub use copies::leave_copies;
pub use patience::Patience;
pub use receiving::{finish_rx, finish_rx_at_last};
pub use sending::{Full, end_ring, go_back, go_back_at_last, send_all};
pub use stream::{drop_bells, skip};

use usmc_shm::layout::{ARM_TCP, End, Slot};
use usmc_shm::span::{RxSpan, TxSpan};
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};

use self::receiving::leave_rx;
use self::sending::go_back_locked;
use super::peers_socket::PeersSocket;
use super::{bells, drained};
use crate::family::locks::Family;
use crate::family::{holders, mark};
use crate::handshake::clc::deputy;
use crate::handshake::{syn_option, transition};
use crate::host::ears;
use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::os::{log, process, sys};
use crate::record::conn::{self, Conn, F_DEPUTY, F_SETTLING};
use crate::record::phase::Phase;
use crate::record::{numbers, watched};
use crate::stream::state;
use crate::watch::observer;

/// A call that takes the connection out of the ring, for as long as it lasts.
struct Leaving<'a>(&'a End);

impl<'a> Leaving<'a> {
    fn new(end: &'a End) -> Leaving<'a> {
        // SeqCst: either a send that is about to sleep sees it (`wait::for_room`), or we see that it sleeps.
        end.leaving.fetch_add(1, SeqCst);
        Leaving(end)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leaving.fetch_sub(1, Release);
    }
}

/// Makes the connection plain TCP, for the next user of its socket.
///
/// # Errors
/// EBUSY where that cannot be done without loss: bytes are in the ring that only we can read, as the peer has closed or
/// left it or we have shut both directions down, a send of ours sleeps that cannot be woken (the peer may not be traced),
/// or the peer was stopped in the middle of a step.
pub fn leave(fd: i32, index: u32, reason: Reason) -> Result<(), Errno> {
    leave_within(fd, index, reason, &Patience::new())
}

/// The same, waiting for sends that sleep no longer than `patience` lasts.
///
/// # Errors
/// As there.
pub fn leave_within(fd: i32, index: u32, reason: Reason, patience: &Patience) -> Result<(), Errno> {
    let conn = conn::at(index);
    if conn.phase() == Phase::Listen {
        syn_option::disarm(fd, conn);
    }
    deputy::follow(fd, index);
    loop {
        if matches!(conn.phase(), Phase::Early | Phase::Offered | Phase::Attached)
            && !transition::decline(fd, index, reason)
        {
            return Err(libc::EBUSY);
        }
        if conn.phase() != Phase::Ring {
            return if crate::handshake::clc::settle(fd, conn) { Ok(()) } else { Err(libc::EBUSY) };
        }
        let Some(slot) = conn.slot() else {
            if conn.tx_lock.is_mine() {
                // A signal handler interrupted its own thread just where the connection comes back.
                return Err(libc::EBUSY);
            }
            continue;
        };
        let leaving = Leaving::new(conn.end(slot));
        match leave_unless_sends_sleep(fd, conn, slot, reason)? {
            Left::Yes => break,
            Left::Elsewhere => continue,
            Left::SendsSleep => drop(wake_sleepers(fd, conn, slot)),
        }
        patience.wait()?;
        drop(leaving);
    }
    settle(fd, index);
    Ok(())
}

/// What became of one attempt to [`leave`].
enum Left {
    Yes,
    /// A send sleeps, or may be about to; none goes to sleep while we are counted as leaving.
    SendsSleep,
    /// Another thread has followed the peer out of this ring; the connection may be in the next by now.
    Elsewhere,
}

fn leave_unless_sends_sleep(
    fd: i32,
    conn: &Conn,
    slot: &Slot,
    reason: Reason,
) -> Result<Left, Errno> {
    let (Some(_rx), Some(_tx)) = (conn.rx_lock.enter(), conn.tx_lock.enter()) else {
        return Err(libc::EBUSY);
    };
    if !conn.is_in_ring_of(slot) {
        return Ok(Left::Elsewhere);
    }
    let families = (Family::receiving(fd, conn, slot), Family::sending(fd, conn, slot));
    let (Some(_), Some(_)) = &families else { return Err(libc::EBUSY) };
    if sends_sleep(conn, slot) {
        return Ok(Left::SendsSleep);
    }
    leave_rx(fd, conn, slot)?;
    wake(fd, conn, slot);
    if !go_back_locked(fd, conn, slot) {
        return Err(libc::EBUSY);
    }
    become_plain(fd, conn, slot, reason);
    Ok(Left::Yes)
}

/// Threads of ours that sleep for room are woken as the peer would wake them, by the peer's own socket. False where that
/// cannot be had.
fn wake_sleepers(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let (tx, side) = (conn.tx(slot), 1 - conn.side());
    ears::ring_own();
    // Outside the ring a byte is no doorbell; there they look by themselves ([`super::hearing::of_room`]).
    if !tx.has_tx_sleepers() || !TxSpan::new(slot, side).is_ring() {
        return true;
    }
    PeersSocket::of(fd, conn, slot, side).inspect(|peer| peer.ring(slot, side, &tx)).is_some()
}

/// Whether a send of this end sleeps for room, where only a doorbell wakes it.
fn sends_sleep(conn: &Conn, slot: &Slot) -> bool {
    let (own, all) = (conn.blocked_sends.load(SeqCst), conn.end(slot).blocked_sends.load(SeqCst));
    // Threads that were killed asleep stay counted.
    if all > own && holders::is_alone(conn) { own > 0 } else { all > 0 }
}

/// Wakes the peer where it sleeps and has bytes to send again, or waits for room that will not come.
fn wake(fd: i32, conn: &Conn, slot: &Slot) {
    conn.own(slot).say_left_other();
    let (rx, tx) = (conn.rx(slot), conn.tx(slot));
    let resends = rx.has_data() && !TxSpan::new(slot, 1 - conn.side()).is_back();
    let waits = (resends && tx.has_rx_sleepers()) || rx.has_tx_sleepers();
    if waits && transition::tx_is_ring(fd, conn, slot) {
        bells::ring_bell(fd, conn, slot, |shared| {
            let asleep = tx.take_rx_sleepers(shared) | rx.take_tx_sleepers(shared);
            if asleep != 0 { ARM_TCP } else { 0 }
        });
    }
}

/// Does what the peer's way back asks of us, but for the phase: some callers hold locks of epoll sets.
#[cold]
pub fn look(fd: i32, conn: &Conn, slot: &Slot) {
    if stays_with_agent(conn, slot) {
        // Another socket comes behind the number, without any lock.
        return;
    }
    if state::must_go_back(conn, slot) {
        go_back(fd, conn, slot);
    }
    let rx = RxSpan::new(slot, conn.side());
    if (conn.peer(slot).flags(Acquire).goes_back() || rx.is_by_sender())
        && !rx.is_tcp()
        && let Some(_held) = conn.rx_lock.enter()
        && let Some(_family) = Family::receiving(fd, conn, slot)
    {
        finish_rx(fd, conn, slot);
    }
}

/// The same, and the end of it: once both directions are out of the ring, the connection is plain. Says whether
/// anything has changed.
#[cold]
pub fn follow(fd: i32, index: u32) -> bool {
    let conn = conn::at(index);
    if conn.has(F_DEPUTY) {
        deputy::follow(fd, index);
        if conn.phase() != Phase::Ring {
            return true;
        }
    }
    let Some(slot) = conn.slot().filter(|_| conn.phase() == Phase::Ring) else { return false };
    if stays_with_agent(conn, slot) {
        return false;
    }
    let rx = RxSpan::new(slot, conn.side());
    let before = (state::is_back(conn, slot), rx.is_tcp());
    let own = conn.own(slot).flags(Acquire);
    // Or we were first, and had no room.
    let is_ours = before.0 && own.goes_back() && !own.is_left();
    let reason = match is_ours {
        // An agent's ring is left alone for an urgent byte, and there is no way back to it.
        _ if conn.has(F_DEPUTY) => Reason::Urgent,
        true => Reason::Unread,
        false => drained::why(conn, slot).unwrap_or(Reason::PeerLeft),
    };
    look(fd, conn, slot);
    if rx.is_tcp() && !state::is_back(conn, slot) {
        go_back(fd, conn, slot);
    }
    let now = (state::is_back(conn, slot), rx.is_tcp());
    if now == (true, true) {
        {
            let (Some(_rx), Some(_tx)) = (conn.rx_lock.enter(), conn.tx_lock.enter()) else {
                return false;
            };
            // Another thread may have done this, and the connection be in the ring again.
            if !conn.is_in_ring_of(slot) {
                return true;
            }
            become_plain(fd, conn, slot, reason);
        }
        settle(fd, index);
        drained::look_at_last();
        return true;
    }
    now != before
}

/// Whether the agent alone says that a connection leaves its ring. This end may have gone out of it by itself ([`sends_by_tcp`]).
fn stays_with_agent(conn: &Conn, slot: &Slot) -> bool {
    let is_out = || state::is_back(conn, slot) && !conn.own(slot).flags(Relaxed).is_left();
    conn.has(F_DEPUTY) && !is_out()
}

/// Sends go by TCP from now on, behind what the peer is to read in the ring; what it sends is read there as before. Nothing is
/// sent again. False where that cannot be yet ([`go_back`]).
#[cold]
pub fn send_by_tcp(fd: i32, index: u32) -> bool {
    let conn = conn::at(index);
    // A hostile peer's slot may send a handshake's bytes by the ring.
    let has_slot = matches!(conn.phase(), Phase::Offered | Phase::Attached | Phase::Ring);
    let slot = conn.slot().filter(|_| has_slot);
    slot.is_none_or(|slot| go_back(fd, conn, slot))
}

/// Whether our sends are TCP's again, the peer having left the ring before we could. An agent leaves its own direction only: the
/// bytes that it has put into the ring before an urgent one are read there.
#[cold]
pub fn sends_by_tcp(fd: i32, index: u32, reason: Reason) -> bool {
    follow(fd, index);
    let conn = conn::at(index);
    match conn.phase() {
        Phase::Ring => conn.slot().is_some_and(|slot| {
            state::is_back(conn, slot) || (conn.has(F_DEPUTY) && go_back_alone(fd, conn, slot))
        }),
        _ => leave(fd, index, reason).is_ok(),
    }
}

/// Takes the sending direction alone out of an agent's ring. False where that cannot be yet.
fn go_back_alone(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let Some(_tx) = conn.tx_lock.enter() else { return false };
    let Some(_family) = Family::sending(fd, conn, slot) else { return false };
    conn.is_in_ring_of(slot) && go_back_locked(fd, conn, slot)
}

/// Both directions are TCP's. The caller holds both locks, and calls [`settle`] without them.
fn become_plain(fd: i32, conn: &Conn, slot: &Slot, reason: Reason) {
    transition::untune(fd, conn, slot);
    mark::leave_ring(fd);
    // Before the phase tells: a thread that is told by it that TCP carries the bytes counts them together with these.
    note_totals(conn, slot);
    conn.set_flag(F_SETTLING, true);
    let returns =
        matches!(reason, Reason::PeerLeft | Reason::Lent | Reason::Unread | Reason::SwitchedOff);
    if !returns || !transition::begin_again(conn, slot, reason) {
        conn.give_up(reason);
    }
    log::debug(format_args!("fd {fd}: back to TCP, {}", reason.text()));
}

/// For `usmc ss` and `usmc dump`: what went through this ring. The kernel's counts have the doorbells instead.
fn note_totals(conn: &Conn, slot: &Slot) {
    let (tx, rx) = (conn.tx(slot), conn.rx(slot));
    // Copies are in the kernel's counts.
    let copied = TxSpan::new(slot, conn.side()).copied();
    let copies = RxSpan::new(slot, conn.side()).copies(&rx).map_or(0, |copies| copies.all);
    let sent = match conn.own(slot).flags(Relaxed).is_left() {
        false => tx.dir().producer.prod.load(Relaxed).wrapping_sub(copied),
        // The rest was sent again.
        true => tx.dir().consumer.cons.load(Relaxed),
    };
    let read = rx.dir().consumer.cons.load(Relaxed).wrapping_sub(copies);
    let bells = [conn.own(slot), conn.peer(slot)].map(|p| p.bells_sent.load(Relaxed));
    for ((bias, moved), bells) in conn.bias.iter().zip([sent, read]).zip(bells) {
        let more = moved.wrapping_sub(u64::from(bells));
        bias.store(bias.load(Relaxed).wrapping_add(more), Relaxed);
    }
}

/// The number has its TCP connection again: what the agent has not read in the ring goes by that, and the connection is plain. The caller
/// holds both locks, and calls [`settle`] without them.
pub fn leave_agent(fd: i32, conn: &Conn, slot: &Slot) {
    if !sending::go_back_locked(fd, conn, slot) {
        log::warn(format_args!("fd {fd}: what was written cannot be sent; reset"));
        sys::disconnect(fd);
    }
    // Directions that were shut down were so on the deputy's socket.
    let is_shut = (conn.own(slot).flags(Relaxed).was_shut(), conn.end(slot).flags().is_shut_rd());
    let how = match is_shut {
        (false, false) => None,
        (true, false) => Some(libc::SHUT_WR),
        (false, true) => Some(libc::SHUT_RD),
        (true, true) => Some(libc::SHUT_RDWR),
    };
    how.inspect(|how| _ = sys::shutdown(fd, *how));
    become_plain(fd, conn, slot, Reason::Declined);
}

/// What hangs on the phase. Without locks of the connection.
pub fn settle(fd: i32, index: u32) {
    observer::changed(fd, index);
    watched::LEFT_RING.call(index);
    note_settled(conn::at(index));
}

/// The phase is known to all that hangs on it; in the child of a fork, where the thread that was at it does not exist.
pub fn note_settled(conn: &Conn) {
    conn.set_flag(F_SETTLING, false);
}

/// Before this process ends: bytes that peers have asked for by TCP.
pub fn before_exit() {
    if process::is_foreign_child() {
        return;
    }
    numbers::for_each(|fd, index, conn| {
        deputy::follow(fd, index);
        if let Some(slot) = conn.slot()
            && conn.phase() == Phase::Ring
            && let flags = conn.own(slot).flags(Acquire)
            && flags.is_left()
            && !flags.has_ended()
        {
            look(fd, conn, slot);
        }
    });
}
