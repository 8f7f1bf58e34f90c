//! Demotion: a connection in the ring becomes plain TCP again, because somebody is going to use its socket whom the
//! library cannot serve (another program, libc's own streams), or in a way that only the kernel can (urgent data).
//!
//! One end begins ([`leave`]) and is out of the ring when that returns. What it had not read, its peer sends again by
//! TCP, at its next call on the connection or when it is woken out of one; what it had sent, the peer reads out of
//! the ring first. The peer follows ([`follow`], [`look`]). `usmc_shm::back` has the steps and their models.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use usmc_shm::back::{Back, Leave, Resume};
use usmc_shm::layout::{
    ARM_TCP, CLIENT, END_CORK, END_GIVEN_BACK, END_HANDS_ON, END_NODELAY, END_SENT_AFTER,
    END_SHUT_RD, End, Slot, TXF_ABORT, TXF_BACK, TXF_CLOSED, TXF_DONE, TXF_ENDS, TXF_LEFT,
    TXF_LOOK, TXF_RETURNS,
};
use usmc_shm::ring::Ring;
use usmc_shm::span::{RxSpan, Source, TxSpan};

use super::family::{Family, FamilyPatience};
use super::peers_socket::PeersSocket;
use super::{mark, wait};
use crate::conn::{self, ATTACHED, Conn, EARLY, F_SETTLING, F_TUNED, LISTEN, OFFERED, RING};
use crate::process::SharedLock;
use crate::reason::Reason;
use crate::sys::{self, Errno};
use crate::{clock, fork, kernel, log, observer, poll, process, syn_option, transition};

/// How long a peer's doorbell may be in flight; it is one system call that does not wait.
const BELL_NS: u64 = 1_000_000_000;
/// How long the CPU is only given away for it.
const YIELDING_NS: u64 = 1_000_000;
/// The same for a call that comes again by itself.
const BRIEF_NS: u64 = 20_000_000;
/// How long a thread that was woken may take to look, where nothing tells whether there is one.
const WAKE_NS: u64 = 20_000_000;
/// How long unread bytes may take to find room in the kernel's buffers. They nearly always fit at once.
const RESEND_NS: u64 = 5_000_000_000;
/// How often one call takes doorbells out of the TCP stream; it has buffers for fewer of them. What is left is a peer's that
/// sends without end, and the next call's.
const LOOKS: usize = 4096;

/// Whether a direction with these flags may be on its way back.
#[inline(always)]
pub fn is_due(flags: u32) -> bool {
    flags & TXF_RETURNS != 0
}

/// Whether the peer waits for us to send again what it left unread.
#[inline(always)]
pub fn must_go_back(conn: &Conn, slot: &Slot) -> bool {
    conn.own(slot).flags.load(Acquire) & TXF_LEFT != 0 && !TxSpan::new(slot, conn.side()).is_back()
}

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

/// Whether another thread, perhaps of another process, is about to take the connection out of the ring.
pub fn is_leaving(conn: &Conn, slot: &Slot) -> bool {
    conn.end(slot).leaving.load(SeqCst) > 0
}

/// Makes the connection plain TCP, for whoever reads and writes its socket next.
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
    if conn.phase() == LISTEN {
        syn_option::disarm(fd, conn);
    }
    loop {
        if matches!(conn.phase(), EARLY | OFFERED | ATTACHED)
            && !transition::decline(fd, index, reason)
        {
            return Err(libc::EBUSY);
        }
        if conn.phase() != RING {
            return if crate::clc::settle(fd, conn) { Ok(()) } else { Err(libc::EBUSY) };
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

/// Those of ours who sleep for room are woken as the peer would wake them, by the peer's own socket. False where that
/// cannot be had.
fn wake_sleepers(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let (tx, side) = (conn.tx(slot), 1 - conn.side());
    // Outside the ring a byte is no doorbell; there they look by themselves (`wait::must_tick`).
    if !tx.has_tx_sleepers() || !TxSpan::new(slot, side).is_ring() {
        return true;
    }
    PeersSocket::of(fd, conn, slot, side).inspect(|peer| peer.ring(slot, side, &tx)).is_some()
}

/// [`leave`] for another process, of whose connection `conn` is a record for the time being. The caller keeps `slot`.
///
/// # Errors
/// As there. Besides EBUSY where the holder may be asleep in poll(2) or epoll_wait(2) until there is room in the ring, and
/// the peer may not be traced.
pub fn leave_on_behalf(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let patience = Patience::new();
    let _leaving = Leaving::new(conn.end(slot));
    if !conn.tx(slot).is_writable() && conn.tx(slot).has_tx_sleepers() {
        if !wake_sleepers(fd, conn, slot) {
            return Err(libc::EBUSY);
        }
        // Who has woken arms again, if that is not over, and looks by itself as long as somebody leaves.
        let woken = Patience::new();
        while !conn.tx(slot).has_tx_sleepers() && woken.lasted_ns() < WAKE_NS {
            sys::sched_yield();
        }
    }
    loop {
        match leave_unless_sends_sleep(fd, conn, slot, Reason::PassedOn)? {
            Left::Yes | Left::Elsewhere => return Ok(()),
            Left::SendsSleep => drop(wake_sleepers(fd, conn, slot)),
        }
        patience.wait()?;
    }
}

/// Whether a send of this end sleeps for room, where only a doorbell wakes it.
fn sends_sleep(conn: &Conn, slot: &Slot) -> bool {
    let (own, all) = (conn.blocked_sends.load(SeqCst), conn.end(slot).blocked_sends.load(SeqCst));
    // Those who were killed asleep stay counted.
    if all > own && fork::is_alone(conn) { own > 0 } else { all > 0 }
}

/// Gives up after a time in which the peer, if it runs at all, has done its part.
pub struct Patience {
    since: u64,
    most_ns: u64,
}

impl Patience {
    /// From now on, for a second.
    pub fn new() -> Patience {
        Patience { since: clock::now_ns(), most_ns: BELL_NS }
    }

    /// From now on, for what comes again by itself otherwise.
    fn brief() -> Patience {
        Patience { most_ns: BRIEF_NS, ..Patience::new() }
    }

    fn lasted_ns(&self) -> u64 {
        clock::now_ns() - self.since
    }

    /// Gives the CPU away.
    ///
    /// # Errors
    /// EBUSY once it is over.
    pub fn wait(&self) -> Result<(), Errno> {
        if self.lasted_ns() > YIELDING_NS {
            // Who is waited for may be of a lower priority, and have this CPU.
            sys::poll1(-1, 0, 1);
        } else {
            sys::sched_yield();
        }
        if self.lasted_ns() < self.most_ns { Ok(()) } else { Err(libc::EBUSY) }
    }
}

/// The receiving direction of [`leave`].
fn leave_rx(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let span = RxSpan::new(slot, conn.side());
    let rx = conn.rx(slot);
    let patience = Patience::new();
    // Somebody may have taken a doorbell and died before he had counted it; the kernel knows.
    span.recount();
    loop {
        match span.source(|| kernel::tcp_read(fd, conn, slot)).map_err(|_| libc::EBUSY)? {
            Source::Bells(count) => {
                drop_bytes(fd, count);
                patience.wait()?;
            }
            Source::Tcp(_) if span.is_tcp() => return Ok(()),
            _ => break,
        }
    }
    // The peer's socket, to send for it: its program may be anywhere.
    let peer = PeersSocket::of(fd, conn, slot, 1 - conn.side());
    // Before the peer can learn of it: it would send again what is in the ring, and what stands before that is ours.
    let back_lock = &slot.end[1 - conn.side()].back_lock;
    let held = SharedLock::enter(back_lock, &mut FamilyPatience::of_peer(conn));
    let Ok(_held) = held else { return Err(libc::EBUSY) };
    // Bytes of the TCP span before doorbells, which would be read as data by whoever comes next. They can be sent again as
    // long as nothing that follows them was.
    let before_bells = bytes_before_bells(fd, conn, slot).ok_or(libc::EBUSY)?;
    if before_bells > 0 && span.unheard() > 0 && (peer.is_none() || span.is_resumed()) {
        return Err(libc::EBUSY);
    }
    // After a shutdown of both directions the kernel takes no byte any more.
    let shut = conn.own(slot).flags.load(Relaxed) & TXF_DONE != 0
        && conn.end(slot).flags.load(Relaxed) & END_SHUT_RD != 0;
    if shut && (before_bells > 0 || rx.has_data()) {
        return Err(libc::EBUSY);
    }
    match span.leave(&rx, &conn.tx(slot), before_bells > 0) {
        Leave::Unread => return Err(libc::EBUSY),
        Leave::SenderFirst => {
            while !finish_rx(fd, conn, slot) {
                if before_bells > 0 {
                    return Err(libc::EBUSY);
                }
                if rx.has_data() {
                    return leave_to_copies(fd, conn, slot);
                }
                patience.wait()?;
            }
            return Ok(());
        }
        // Whatever becomes of the rest.
        Leave::Left => drop(conn.own(slot).flags.fetch_or(TXF_LOOK, AcqRel)),
    }
    let done = clear_stream(fd, conn, slot, peer.as_ref());
    if done.is_err() {
        // We go on reading around the doorbells ourselves.
        span.to_tcp_around_bells();
    }
    done
}

/// The receiving direction of [`leave`] where its sender has ended it and bytes are unread: it may have left copies of them.
fn leave_to_copies(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let (span, rx) = (RxSpan::new(slot, conn.side()), conn.rx(slot));
    let patience = Patience::new();
    let (start, copies) = loop {
        // Before the copies, which come before it.
        let has_ended = conn.peer(slot).flags.load(Acquire) & TXF_ENDS != 0;
        match (span.resume(), span.copies(&rx)) {
            (Resume::At(start), Some(copies)) if copies.is_whole => break (start, copies),
            (_, copies) => {
                let is_over = copies.is_some_and(|copies| copies.is_over);
                if is_over || has_ended || !span.has_copies() {
                    return Err(libc::EBUSY);
                }
            }
        }
        patience.wait()?;
    };
    // What exceeds the kernel's buffer comes as it is taken.
    while !skip_to(fd, conn, slot, start.saturating_add(copies.read)) {
        patience.wait()?;
    }
    span.to_tcp();
    // Nothing is unread in the ring any more.
    rx.consume(copies.end);
    log::debug(format_args!("fd {fd}: goes on with copies of what was unread"));
    Ok(())
}

/// What is left to do in the TCP stream once this end has left: the doorbells are taken out.
fn clear_stream(
    fd: i32,
    conn: &Conn,
    slot: &Slot,
    peer: Option<&PeersSocket>,
) -> Result<(), Errno> {
    let span = RxSpan::new(slot, conn.side());
    let patience = Patience::new();
    while span.is_rung(slot, conn.side()) {
        patience.wait()?;
    }
    // Asked again: the peer may have switched meanwhile, and rung.
    if span.unheard() > 0 {
        let before = bytes_before_bells(fd, conn, slot).ok_or(libc::EBUSY)?;
        match peer {
            Some(peer) if before > 0 => return peer.send_again(fd, conn, slot, before),
            None if before > 0 => return Err(libc::EBUSY),
            _ => {}
        }
    }
    drop_bells(fd, conn, slot)?;
    if let Some(peer) = peer.filter(|_| conn.rx(slot).has_data()) {
        peer.end_ring(conn, slot);
    }
    Ok(())
}

/// Unread bytes of the TCP span, where it has an end.
fn bytes_before_bells(fd: i32, conn: &Conn, slot: &Slot) -> Option<usize> {
    let Some(boundary) = RxSpan::new(slot, conn.side()).boundary() else { return Some(0) };
    let read = kernel::tcp_read(fd, conn, slot)?;
    usize::try_from(boundary.saturating_sub(read)).ok()
}

/// Takes all doorbells out of the TCP stream; none comes any more.
///
/// # Errors
/// EBUSY where they do not come.
pub fn drop_bells(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let span = RxSpan::new(slot, conn.side());
    let begun = Patience::new();
    let (mut patience, mut looks) = (Patience::new(), 0);
    while span.unheard() > 0 {
        let taken = drop_bytes(fd, span.unheard().into());
        conn.end(slot).bells_drained.fetch_add(taken as u32, Relaxed);
        if taken > 0 {
            looks += 1;
            if looks > LOOKS || begun.lasted_ns() > RESEND_NS {
                return Err(libc::EBUSY);
            }
            patience = Patience::new();
        } else if kernel::has_fin(fd) {
            break;
        } else {
            patience.wait()?;
        }
    }
    Ok(())
}

/// Wakes the peer where it sleeps and has bytes to send again, or waits for room that will not come.
fn wake(fd: i32, conn: &Conn, slot: &Slot) {
    // Release: it finds TXF_LEFT in the other direction.
    conn.own(slot).flags.fetch_or(TXF_LOOK, AcqRel);
    let (rx, tx) = (conn.rx(slot), conn.tx(slot));
    let resends = rx.has_data() && !TxSpan::new(slot, 1 - conn.side()).is_back();
    let waits = (resends && tx.has_rx_sleepers()) || rx.has_tx_sleepers();
    if waits && transition::tx_is_ring(fd, conn, slot) {
        wait::ring_bell(fd, conn, slot, |shared| {
            let asleep = tx.take_rx_sleepers(shared) | rx.take_tx_sleepers(shared);
            if asleep != 0 { ARM_TCP } else { 0 }
        });
    }
}

/// Before the sending direction ends: where the peer may hand its end on to a program that knows nothing of the ring, what it
/// has not read is left by TCP, too. As much as the kernel takes at once; where that is not all, it does without. The caller
/// has the record's sending lock.
pub fn leave_copies(fd: i32, conn: &Conn, slot: &Slot) {
    let hands_on = slot.end[1 - conn.side()].flags.load(Relaxed) & END_HANDS_ON != 0;
    if hands_on && conn.tx(slot).has_data() {
        leave_copies_of_unread(fd, conn, slot);
    }
}

#[cold]
fn leave_copies_of_unread(fd: i32, conn: &Conn, slot: &Slot) {
    let (span, tx) = (TxSpan::new(slot, conn.side()), conn.tx(slot));
    let ended = conn.own(slot).flags.load(Relaxed) & (TXF_ENDS | TXF_BACK | TXF_LEFT) != 0
        || conn.peer(slot).flags.load(Relaxed) & (TXF_CLOSED | TXF_ABORT) != 0;
    if ended || !span.is_ring() {
        return;
    }
    // A killed process might leave them half done, and others go on behind them.
    if !fork::is_alone(conn) {
        return;
    }
    let Some(_family) = Family::sending(fd, conn, slot) else { return };
    let Ok(data) = tx.data() else { return };
    span.announce_copies(data.cons);
    let is_back = go_back_briefly(fd, conn, slot);
    if !span.is_to_copy() || !is_back {
        return;
    }
    let mut sent = 0;
    while sent < data.len {
        let at = data.cons.wrapping_add(sent as u64);
        let (src, len) = tx.contiguous(at, data.place, data.len - sent);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `len` bytes of the ring, which nobody writes any more.
        match unsafe { sys::send_raw(fd, src, len, flags) } {
            Ok(n) => sent += n,
            Err(libc::EINTR) => {}
            Err(_) => break,
        }
    }
    span.has_copied(data.cons.wrapping_add(sent as u64));
    log::debug(format_args!("fd {fd}: {sent} of {} unread bytes copied to TCP", data.len));
}

/// Ends the ring of the sending direction, sending again what the peer left unread. False where it is not over: a
/// signal handler interrupted a send, or the peer is at it and was stopped, or waits for room. A call that has to wait for
/// that comes again.
pub fn go_back(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let Some(_held) = conn.tx_lock.enter() else { return false };
    let Some(_family) = Family::sending(fd, conn, slot) else { return false };
    go_back_briefly(fd, conn, slot)
}

/// The same for the holder of the sending locks.
pub fn go_back_briefly(fd: i32, conn: &Conn, slot: &Slot) -> bool {
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

/// The same, waiting for whoever is at it.
fn go_back_locked(fd: i32, conn: &Conn, slot: &Slot) -> bool {
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
    if own.flags.load(Relaxed) & (TXF_DONE | TXF_LEFT) == TXF_DONE {
        // No byte follows, and the kernel's count would include the FIN.
        own.flags.fetch_or(TXF_BACK, AcqRel);
        return true;
    }
    if conn.end(slot).flags.load(Relaxed) & END_SENT_AFTER != 0 {
        // Nobody reads there: what is in the ring meets TCP's answer to that.
        own.flags.fetch_or(TXF_LEFT, AcqRel);
    }
    let Ok(_held) = SharedLock::enter(&conn.end(slot).back_lock, &mut family) else { return false };
    let patience = Patience { most_ns: bell_ns, ..Patience::new() };
    let done = end_ring(fd, slot, conn.side(), &conn.tx(slot), &patience);
    if !done && fork::is_alone(conn) && conn.ringing.load(SeqCst) == 0 {
        // Who was killed in the middle of a doorbell stays counted.
        TxSpan::new(slot, conn.side()).forget_bells();
    }
    done
}

/// Ends the span of the ring `tx`, which end `side` of the connection sends by the socket `fd`. The caller holds that
/// end's `back_lock`.
pub fn end_ring(fd: i32, slot: &Slot, side: usize, tx: &Ring<'_>, patience: &Patience) -> bool {
    let span = TxSpan::new(slot, side);
    loop {
        match span.try_back(tx, || kernel::tcp_sent(fd, side == CLIENT)) {
            Ok(Back::Done) => return true,
            Ok(Back::Busy) if patience.wait().is_ok() => {}
            Ok(Back::Resend(from)) => {
                let end = resend(fd, tx, from);
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

/// Sends what is in the ring from cursor `from` on by TCP; where that ends.
fn resend(fd: i32, tx: &Ring<'_>, from: u64) -> Option<u64> {
    let data = tx.data().ok()?;
    let end = data.cons.wrapping_add(data.len as u64);
    let mut at = from;
    while at != end {
        let left = end.wrapping_sub(at);
        if left > data.len as u64 {
            return None;
        }
        let (src, len) = tx.contiguous(at, data.place, left as usize);
        // SAFETY: `len` unread bytes of the ring.
        unsafe { send_all(fd, src, len) }.ok()?;
        at = at.wrapping_add(len as u64);
    }
    if end != from {
        let n = end.wrapping_sub(from);
        log::debug(format_args!("fd {fd}: {n} unread bytes sent again by TCP"));
    }
    Some(end)
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
    let start = clock::now_ns();
    let mut sent = 0;
    while sent < len {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the caller's contract.
        match unsafe { sys::send_raw(fd, src.add(sent), len - sent, flags) } {
            Ok(n) => sent += n,
            Err(libc::EAGAIN) if clock::now_ns() - start < RESEND_NS => {
                sys::poll1(fd, libc::POLLOUT, 10);
            }
            Err(libc::EINTR) => {}
            Err(errno) => {
                if errno == libc::EAGAIN {
                    log::warn(format_args!("fd {fd}: no room for what was left unread; reset"));
                    sys::disconnect(fd);
                }
                return Err(errno);
            }
        }
    }
    Ok(())
}

/// Takes some of `count` doorbells away that stand before the bytes that follow the ring. False while there are none;
/// where none will come any more, as the connection ended before them, what follows is TCP's.
pub fn skip(fd: i32, span: &RxSpan<'_>, count: u64) -> bool {
    if drop_bytes(fd, count) > 0 {
        return true;
    }
    if kernel::has_fin(fd) {
        span.to_tcp();
        return true;
    }
    false
}

/// Takes up to `count` bytes out of the TCP stream.
fn drop_bytes(fd: i32, count: u64) -> usize {
    // More the kernel does not have.
    const MOST: u64 = 1 << 30;
    if count == 0 {
        return 0;
    }
    let (len, flags) = (count.min(MOST) as usize, libc::MSG_TRUNC | libc::MSG_DONTWAIT);
    // SAFETY: TCP copies nothing with MSG_TRUNC (tcp(7)), so no buffer is needed.
    unsafe { sys::recv(fd, core::ptr::null_mut(), len, flags) }.unwrap_or(0)
}

/// Whether the receiving direction is TCP's again; goes as far towards it as the ring and the kernel allow. The caller
/// holds the receiving locks.
pub fn finish_rx(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let span = RxSpan::new(slot, conn.side());
    if span.is_tcp() {
        return true;
    }
    let resume = span.resume();
    let peer = conn.peer(slot).flags.load(Acquire);
    let rx = conn.rx(slot);
    if span.is_by_sender() {
        return finish_by_sender(fd, conn, slot);
    }
    // A send of ours that sleeps has to see its doorbell first.
    if rx.has_data() || sends_sleep(conn, slot) {
        return false;
    }
    match resume {
        // It has shut its direction down: nothing follows but the kernel's FIN.
        Resume::Not if peer & TXF_BACK != 0 && peer & TXF_DONE != 0 => {
            if wait::reads_ring(fd, conn, slot) {
                wait::drain_bells(fd, conn, slot);
            }
            if span.unheard() != 0 || !wait::reads_ring(fd, conn, slot) {
                return false;
            }
        }
        Resume::Not => return false,
        Resume::AtOnce => {}
        Resume::At(at) => {
            let copies = span.copies(&rx).map_or(0, |copies| copies.all);
            if !skip_to(fd, conn, slot, at.saturating_add(copies)) {
                return false;
            }
        }
    }
    span.to_tcp();
    true
}

/// The same before a close: copies of what was read in the ring may still be on their way, and would be taken for unread.
pub fn finish_rx_at_last(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let (span, patience) = (RxSpan::new(slot, conn.side()), Patience::brief());
    while !finish_rx(fd, conn, slot) {
        if !span.has_copies() || conn.rx(slot).has_data() || patience.wait().is_err() {
            return false;
        }
    }
    true
}

/// Takes away what stands before byte `at` of the TCP stream, with which TCP goes on. False where that is not over.
fn skip_to(fd: i32, conn: &Conn, slot: &Slot, at: u64) -> bool {
    let span = RxSpan::new(slot, conn.side());
    for _ in 0..LOOKS {
        if !wait::reads_ring(fd, conn, slot) {
            // Bytes of the TCP span come first.
            return false;
        }
        let Some(read) = kernel::tcp_read(fd, conn, slot) else { return false };
        if read >= at {
            return true;
        }
        if !skip(fd, &span, at - read) {
            return false;
        }
        if span.is_tcp() {
            return true;
        }
    }
    false
}

/// [`finish_rx`], where the sender was faster than our first look at the ring.
fn finish_by_sender(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let span = RxSpan::new(slot, conn.side());
    for _ in 0..LOOKS {
        match span.source(|| kernel::tcp_read(fd, conn, slot)) {
            Ok(Source::Bells(count)) if skip(fd, &span, count) => {}
            _ => break,
        }
    }
    span.is_tcp()
}

/// Does what the peer's way back asks of us, but for the phase: some callers hold locks of epoll sets.
#[cold]
pub fn look(fd: i32, conn: &Conn, slot: &Slot) {
    if must_go_back(conn, slot) {
        go_back(fd, conn, slot);
    }
    let rx = RxSpan::new(slot, conn.side());
    if (conn.peer(slot).flags.load(Acquire) & TXF_BACK != 0 || rx.is_by_sender())
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
    let Some(slot) = conn.slot().filter(|_| conn.phase() == RING) else { return false };
    let rx = RxSpan::new(slot, conn.side());
    let before = (is_back(conn, slot), rx.is_tcp());
    look(fd, conn, slot);
    if rx.is_tcp() && !is_back(conn, slot) {
        go_back(fd, conn, slot);
    }
    let now = (is_back(conn, slot), rx.is_tcp());
    if now == (true, true) {
        {
            let (Some(_rx), Some(_tx)) = (conn.rx_lock.enter(), conn.tx_lock.enter()) else {
                return false;
            };
            // Another thread may have done this, and the connection be in the ring again.
            if !conn.is_in_ring_of(slot) {
                return true;
            }
            become_plain(fd, conn, slot, Reason::PeerLeft);
        }
        settle(fd, index);
        return true;
    }
    now != before
}

/// Whether our sends are TCP's again, or there are none any more.
pub fn is_back(conn: &Conn, slot: &Slot) -> bool {
    const ENDED: u32 = TXF_DONE | TXF_BACK;
    TxSpan::new(slot, conn.side()).is_back() || conn.own(slot).flags.load(Acquire) & ENDED == ENDED
}

/// Whether our sends are TCP's again, the peer having left the ring before we could.
#[cold]
pub fn sends_by_tcp(fd: i32, index: u32, reason: Reason) -> bool {
    follow(fd, index);
    let conn = conn::at(index);
    match conn.phase() {
        RING => conn.slot().is_some_and(|slot| is_back(conn, slot)),
        _ => leave(fd, index, reason).is_ok(),
    }
}

/// Both directions are TCP's. The caller holds both locks, and calls [`settle`] without them.
fn become_plain(fd: i32, conn: &Conn, slot: &Slot, reason: Reason) {
    untune(fd, conn, slot);
    mark::leave_ring(fd);
    // Before the phase tells: who is told by it that TCP carries the bytes counts them together with these.
    note_totals(conn, slot);
    conn.set_flag(F_SETTLING, true);
    let returns = matches!(reason, Reason::PeerLeft | Reason::Lent | Reason::Unread);
    if !returns || !transition::begin_again(conn, slot, reason) {
        conn.give_up(reason);
    }
    log::debug(format_args!("fd {fd}: back to TCP, {}", reason.text()));
}

/// The kernel's socket has the application's options again.
pub fn untune(fd: i32, conn: &Conn, slot: &Slot) {
    if conn.has(F_TUNED) {
        conn.set_flag(F_TUNED, false);
        let set = conn.end(slot).flags.fetch_or(END_GIVEN_BACK, Relaxed);
        if set & END_GIVEN_BACK != 0 {
            // Another process was first, and may have set its own since.
            conn.set_lowat(0);
        } else {
            give_options_back(fd, set);
        }
        transition::give_lowat_back(fd, conn);
    }
}

/// `set`: `END_*`.
fn give_options_back(fd: i32, set: u32) {
    if set & END_NODELAY == 0 {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &0i32);
    }
    if set & END_CORK != 0 {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, &1i32);
    }
}

/// For `usmc ss` and `usmc dump`: what went through this ring. The kernel's counts have the doorbells instead.
fn note_totals(conn: &Conn, slot: &Slot) {
    let (tx, rx) = (conn.tx(slot), conn.rx(slot));
    // Copies are in the kernel's counts.
    let copied = TxSpan::new(slot, conn.side()).copied();
    let copies = RxSpan::new(slot, conn.side()).copies(&rx).map_or(0, |copies| copies.all);
    let sent = match conn.own(slot).flags.load(Relaxed) & TXF_LEFT {
        0 => tx.dir().producer.prod.load(Relaxed).wrapping_sub(copied),
        // The rest was sent again.
        _ => tx.dir().consumer.cons.load(Relaxed),
    };
    let read = rx.dir().consumer.cons.load(Relaxed).wrapping_sub(copies);
    let bells = [conn.own(slot), conn.peer(slot)].map(|p| p.bells_sent.load(Relaxed));
    for ((bias, moved), bells) in conn.bias.iter().zip([sent, read]).zip(bells) {
        let more = moved.wrapping_sub(u64::from(bells));
        bias.store(bias.load(Relaxed).wrapping_add(more), Relaxed);
    }
}

/// What hangs on the phase. Without locks of the connection.
fn settle(fd: i32, index: u32) {
    observer::changed(fd, index);
    poll::epoll::left_ring(index);
    conn::at(index).set_flag(F_SETTLING, false);
}

/// Bytes in our ring that the peer has not read, and is to read there.
pub fn unread_by_peer(conn: &Conn, slot: &Slot) -> usize {
    let left = conn.own(slot).flags.load(Relaxed) & TXF_LEFT != 0;
    if left && TxSpan::new(slot, conn.side()).is_back() { 0 } else { conn.tx(slot).unread() }
}

/// Before this process ends: bytes that peers have asked for by TCP.
pub fn before_exit() {
    if process::is_foreign_child() {
        return;
    }
    crate::table::for_each(0, u32::MAX, |fd, entry| {
        if let crate::table::Entry::Conn(index) = entry
            && let Some(slot) = conn::at(index).slot()
            && conn::at(index).phase() == RING
            && conn::at(index).own(slot).flags.load(Acquire) & (TXF_LEFT | TXF_ENDS) == TXF_LEFT
        {
            look(fd, conn::at(index), slot);
        }
    });
}
