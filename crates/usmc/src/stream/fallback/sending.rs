//! The sending direction of a way back: the ring ends, and what the peer left unread there is sent again by TCP.

use usmc_shm::back::Back;
use usmc_shm::layout::{CLIENT, Slot};
use usmc_shm::ring::Ring;
use usmc_shm::span::TxSpan;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use super::patience::{BELL_NS, BRIEF_NS, Patience};
use crate::family::holders;
use crate::family::locks::{Family, FamilyPatience};
use crate::handshake::clc::deputy;
use crate::os::process::SharedLock;
use crate::os::sys::{self, Errno};
use crate::os::{clock, log};
use crate::record::conn::{self, Conn, F_DEPUTY};
use crate::record::kernel;
use crate::record::phase::Phase;

/// How long unread bytes may take to find room in the kernel's buffers. They nearly always fit at once.
pub const RESEND_NS: u64 = 5_000_000_000;
/// The same for an end that leaves, and sends in the peer's name: no other thread of it reads meanwhile.
const FULL_NS: u64 = 500_000_000;

/// What becomes of unread bytes for which TCP has no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    /// The sender itself sends the rest at another call.
    GoesOnLater,
    /// The connection is reset, after some seconds in which nobody has read.
    Resets,
}

/// Ends the ring of the sending direction, sending again what the peer left unread. False where it is not over: a
/// signal handler interrupted a send, or the peer is at it and was stopped, or waits for room. A call that has to wait for
/// that comes again.
pub fn go_back(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    if conn.has(F_DEPUTY) {
        deputy::follow(fd, conn::index_of(conn));
        return conn.phase() != Phase::Ring;
    }
    let Some(_held) = conn.tx_lock.enter() else { return false };
    let Some(_family) = Family::sending(fd, conn, slot) else { return false };
    go_back_briefly(fd, conn, slot)
}

/// The same for the holder of the sending locks.
pub(super) fn go_back_briefly(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    go_back_by(fd, conn, slot, FamilyPatience::of(fd, conn).briefly(), BRIEF_NS)
}

/// [`go_back_locked`] of a direction that is about to end, after which nothing could be sent again. Whoever is at it, for
/// us or beside us, is given the time that this may take.
pub fn go_back_at_last(fd: i32, conn: &Conn, slot: &Slot) {
    let start = clock::now_ns();
    while !go_back_locked(fd, conn, slot) && clock::now_ns() - start < RESEND_NS {
        sys::sched_yield();
    }
}

/// The same, waiting for a thread that is at it.
pub fn go_back_locked(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    go_back_by(fd, conn, slot, FamilyPatience::of(fd, conn), BELL_NS)
}

fn go_back_by(
    fd: i32,
    conn: &Conn,
    slot: &Slot,
    mut family: FamilyPatience<'_>,
    bell_ns: u64,
) -> bool {
    let own = conn.own(slot);
    let flags = own.flags(Relaxed);
    if flags.is_done() && !flags.is_left() {
        // No byte follows, and the kernel's count would include the FIN.
        own.go_back_done();
        return true;
    }
    if conn.end(slot).flags().has_sent_after() {
        // Nobody reads there: what is in the ring meets TCP's answer to that.
        own.leave_for_receiver();
    }
    let Ok(_held) = SharedLock::enter(&conn.end(slot).back_lock, &mut family) else { return false };
    let patience = Patience::lasting(bell_ns);
    let done = end_ring(fd, slot, conn.side(), &conn.tx(slot), &patience, Full::Resets);
    if !done && holders::is_alone(conn) && conn.ringing.load(SeqCst) == 0 {
        // A process that was killed in the middle of a doorbell stays counted.
        TxSpan::new(slot, conn.side()).forget_bells();
    }
    done
}

/// Ends the span of the ring `tx`, which end `side` of the connection sends by the socket `fd`. The caller holds that
/// end's `back_lock`. False where it is not over.
pub fn end_ring(
    fd: i32,
    slot: &Slot,
    side: usize,
    tx: &Ring<'_>,
    patience: &Patience,
    full: Full,
) -> bool {
    let span = TxSpan::new(slot, side);
    loop {
        match span.try_back(tx, || kernel::tcp_sent(fd, side == CLIENT)) {
            Ok(Back::Done) => return true,
            Ok(Back::Busy) if patience.wait().is_ok() => {}
            Ok(Back::Resend(from)) => {
                let end = match resend(fd, tx, from, full) {
                    Err(libc::EAGAIN) => return false,
                    end => end.ok(),
                };
                if end.is_none() && !kernel::is_over(fd) {
                    // A connection that is over is no silent loss, and the kernel tells the application.
                    log::warn(format_args!("fd {fd}: what was left unread cannot be sent; reset"));
                    sys::disconnect(fd);
                }
                span.is_resent(end.unwrap_or(from));
                return true;
            }
            Err(_) if kernel::is_over(fd) => {
                span.is_resent(tx.dir().producer.prod.load(Relaxed));
                return true;
            }
            Ok(Back::Busy) | Err(_) => return false,
        }
    }
}

/// Sends what is in the ring from cursor `from` on by TCP; where that ends. EAGAIN: there is no room for the rest, and how much
/// was sent the kernel knows.
fn resend(fd: i32, tx: &Ring<'_>, from: u64, full: Full) -> Result<u64, Errno> {
    let data = tx.data().map_err(|_| libc::EIO)?;
    let end = data.cons.wrapping_add(data.len as u64);
    let mut at = from;
    while at != end {
        let left = end.wrapping_sub(at);
        if left > data.len as u64 {
            return Err(libc::EIO);
        }
        let (src, len) = tx.contiguous(at, data.place, left as usize);
        let done = match full {
            // SAFETY: `len` unread bytes of the ring.
            Full::GoesOnLater => unsafe { send_while_read(fd, src, len, FULL_NS) },
            // SAFETY: likewise.
            Full::Resets => unsafe { send_all(fd, src, len) }.map_err(|_| libc::EIO),
        };
        done?;
        at = at.wrapping_add(len as u64);
    }
    if end != from {
        let n = end.wrapping_sub(from);
        log::debug(format_args!("fd {fd}: {n} unread bytes sent again by TCP"));
    }
    Ok(end)
}

/// Sends by TCP what was sent before. Where the kernel does not take it in time, the connection is reset, which is no
/// silent loss; other errors are the connection's, and the kernel tells the application.
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// `src` is readable for `len` bytes; others may write them.
pub unsafe fn send_all(fd: i32, src: *const u8, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller's contract.
    unsafe { send_while_read(fd, src, len, RESEND_NS) }.inspect_err(|errno| {
        if *errno == libc::EAGAIN {
            log::warn(format_args!("fd {fd}: no room for what was left unread; reset"));
            sys::disconnect(fd);
        }
    })
}

/// The same, but for the reset: it is over with EAGAIN once there was no room for so many nanoseconds, or
/// after [`RESEND_NS`] in all.
///
/// # Safety
/// As there.
unsafe fn send_while_read(fd: i32, src: *const u8, len: usize, most_ns: u64) -> Result<(), Errno> {
    let start = clock::now_ns();
    let mut since = start;
    let mut sent = 0;
    while sent < len {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the caller's contract.
        match unsafe { sys::send_raw(fd, src.add(sent), len - sent, flags) } {
            Ok(n) => {
                sent += n;
                since = clock::now_ns();
            }
            // A peer that reads a little now and then must not hold the locks for ever.
            Err(libc::EAGAIN)
                if clock::now_ns() - since < most_ns && clock::now_ns() - start < RESEND_NS =>
            {
                sys::poll1(fd, libc::POLLOUT, 10);
            }
            Err(libc::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
