//! The readiness of one connection, in poll(2)'s bits (epoll's are the same numbers).

use usmc_shm::layout::Slot;
use usmc_shm::span::{RxSpan, Source};
use usmc_shm::state::{EndState, TxFlags};
use usmc_shm::sync::Ordering::Relaxed;

use crate::family::locks::Receiving;
use crate::handshake::clc::deputy;
use crate::handshake::transition;
use crate::os::events::{ERR, HUP, IN, OUT, PRI, RDHUP, RDNORM, READ_BITS, WRITE_BITS, WRNORM};
use crate::os::sys;
use crate::record::change_over::Call;
use crate::record::conn::{self, Conn};
use crate::record::phase::Phase;
use crate::record::{kernel, numbers};
use crate::stream::ending::{self, Ending};
use crate::stream::hearing::{self, Hearing};
use crate::stream::{bells, fallback, room, state, unread};

#[cold]
fn move_on(fd: i32, index: u32) {
    transition::progress(fd, index, Call::Look);
    deputy::follow(fd, index);
}

/// Whether the kernel alone knows this connection's readiness. Moves the handshake on.
#[inline(always)]
pub fn is_kernels(fd: impl FnOnce() -> i32, index: u32) -> bool {
    let conn = conn::at(index);
    if transition::is_due(conn, Call::Look) || deputy::is_left(conn) {
        move_on(fd(), index);
    }
    is_kernels_so_far(index)
}

/// [`is_kernels`] without a step of the handshake: nothing may change behind the last look before a sleep.
#[inline(always)]
pub fn is_kernels_so_far(index: u32) -> bool {
    let conn = conn::at(index);
    // Another process may have disconnected what it shares with us.
    conn.phase() != Phase::Ring
        || conn.slot().is_none_or(|s| conn.own(s).flags(Relaxed).end() == EndState::Aborted)
}

/// The readiness of a ring connection, for someone interested in `want`.
pub fn now(fd: i32, conn: &Conn, slot: &Slot, want: u32) -> u32 {
    let returns = (conn.peer(slot).flags(Relaxed) | conn.own(slot).flags(Relaxed)).is_returning();
    if returns {
        fallback::look(fd, conn, slot);
    }
    let ended = ending::ending(fd, conn, slot);
    let own = conn.own(slot).flags(Relaxed);
    let shut_rd = conn.end(slot).flags().is_shut_rd();
    const READ_END: u32 = IN | RDNORM | RDHUP;
    let mut bits = match (ended, shut_rd, own.is_done()) {
        (Ending::Alive, false, _) => 0,
        (Ending::Alive | Ending::Fin, _, false) => READ_END,
        (Ending::Alive | Ending::Fin, _, true) => READ_END | HUP,
        (Ending::Reset, ..) if ending::has_error(conn, slot) => READ_END | HUP | OUT | WRNORM | ERR,
        (Ending::Reset, ..) => READ_END | HUP | OUT | WRNORM,
    };
    if want & READ_BITS != 0 {
        bits |= readable(fd, conn, slot, want);
    }
    // No doorbell of ours has provoked it.
    if returns && conn.kernel_events.load(Relaxed) & HUP != 0 && state::is_back(conn, slot) {
        bits |= HUP;
    }
    if ended != Ending::Reset && want & WRITE_BITS != 0 && writable(fd, conn, slot, own) {
        bits |= OUT | WRNORM;
    }
    bits & (want | ERR | HUP)
}

fn readable(fd: i32, conn: &Conn, slot: &Slot, want: u32) -> u32 {
    let rx = conn.rx(slot);
    let lowat = (conn.lowat() as usize).max(1);
    let enough = |n: usize| n >= lowat;
    if conn.end(slot).reads_ring() {
        let in_ring = if has_in_ring(fd, conn, slot, lowat) { IN | RDNORM } else { 0 };
        return urgent(fd, conn, slot, want) | in_ring;
    }
    let source = match Receiving::enter(fd, conn, slot) {
        Some(_held) if numbers::number_in_step(fd, conn::index_of(conn), false).is_some() => {
            RxSpan::new(slot, conn.side()).source(|| kernel::tcp_read(fd, conn, slot))
        }
        _ => return 0,
    };
    match source {
        Ok(Source::Ring) if has_in_ring(fd, conn, slot, lowat) => IN | RDNORM,
        Ok(Source::Ring) => 0,
        Ok(Source::Bells(_)) => urgent(fd, conn, slot, want),
        _ => {
            let bits = sys::poll1(fd, (want & READ_BITS) as i16, 0) as u32 & READ_BITS;
            // The kernel's SO_RCVLOWAT is 1 by now. With nothing to read it is the end that makes it readable.
            let in_tcp = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
            let in_ring =
                if in_tcp_for_good(conn, slot) { 0 } else { rx.data().map_or(0, |d| d.len) };
            let few = lowat > 1 && in_tcp > 0 && !enough(in_tcp + in_ring);
            if few { bits & !(IN | RDNORM) } else { bits }
        }
    }
}

/// Urgent data goes by TCP, behind what the ring still holds and behind doorbells.
fn urgent(fd: i32, conn: &Conn, slot: &Slot, want: u32) -> u32 {
    match want & PRI != 0 && conn.peer(slot).flags(Relaxed).is_returning() {
        true => sys::poll1(fd, libc::POLLPRI, 0) as u32 & PRI,
        false => 0,
    }
}

/// Whether `lowat` bytes are unread in the ring, together with those that follow it by TCP.
fn has_in_ring(fd: i32, conn: &Conn, slot: &Slot, lowat: usize) -> bool {
    let Ok(data) = conn.rx(slot).data() else { return true };
    if data.len >= lowat || !conn.peer(slot).flags(Relaxed).is_returning() {
        return data.len >= lowat;
    }
    data.len + unread::unread_behind_ring(fd, conn, slot) >= lowat
}

fn in_tcp_for_good(conn: &Conn, slot: &Slot) -> bool {
    RxSpan::new(slot, conn.side()).is_tcp()
}

fn writable(fd: i32, conn: &Conn, slot: &Slot, own: TxFlags) -> bool {
    if own.is_done() || ending::peer_is_gone(conn, slot) {
        return true;
    }
    if !transition::tx_is_ring(fd, conn, slot) {
        return sys::poll1(fd, libc::POLLOUT, 0) & libc::POLLOUT != 0;
    }
    conn.tx(slot).is_writable() || room::grow(fd, conn, slot)
}

/// Announces that somebody interested in `want` is going to sleep in the kernel, and what wakes it (`ARM_*`).
pub fn arm(fd: i32, conn: &Conn, slot: &Slot, want: u32, bit: u32) {
    if want & READ_BITS != 0 {
        conn.rx(slot).arm_rx(bit);
    }
    if want & WRITE_BITS != 0 {
        conn.tx(slot).arm_tx(bit);
        bells::watch_over(fd, conn, slot);
    }
}

/// What wakes a sleeper interested in `want`.
pub fn hearing(conn: &Conn, slot: &Slot, want: u32) -> Hearing {
    if want & WRITE_BITS != 0 {
        hearing::of_room(conn, slot)
    } else if bells::is_cut(conn) {
        hearing::without_bells(conn, slot)
    } else {
        Hearing::Bells
    }
}
