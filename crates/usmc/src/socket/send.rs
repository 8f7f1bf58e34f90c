//! Sending: TCP until the direction has changed over, then the ring.

use core::mem;
use usmc_shm::Broken;
use usmc_shm::copy::Stores;
use usmc_shm::layout::{Slot, TXF_BACK, TXF_DONE, TXF_LEFT};
use usmc_shm::ring::Room;
use usmc_shm::span::{Route, RxSpan, TcpSend};
use usmc_shm::sync::Ordering::Relaxed;

use super::Outcome;
use super::close;
use super::early::Early;
use crate::family::holders;
use crate::family::liveness::{self, Life};
use crate::family::locks::Family;
use crate::handshake::{clc, transition};
use crate::os::iov::Buffers;
use crate::os::reason::Reason;
use crate::os::signals::{Signals, Woken};
use crate::os::sys::Errno;
use crate::os::table::{self, Entry};
use crate::os::unwind::keeping;
use crate::os::{clock, events, memory, process, real};
use crate::record::change_over::Call;
use crate::record::conn::{self, Conn, F_CLC};
use crate::record::numbers::{self, Hold};
use crate::record::phase::Phase;
use crate::record::{kernel, order};
use crate::stream::unseen::Unseen;
use crate::stream::{bells, bulk, ending, fallback, room, state, wait};
use crate::watch::{capture, observer};
use crate::watchers::epoll;

/// How long (some 100 µs, in cycles) a peer is believed to be there without a question to the kernel: where nobody vouches
/// for it, and where it leaves something unread, for its socket may have been closed by ways that nobody sees.
const ASK_CYCLES: u64 = 1 << 18;

/// The most that one call sends (the kernel's MAX_RW_COUNT).
const MOST: usize = (i32::MAX & !4095) as usize;

/// Of a large message the reader gets such parts while the next one is copied.
pub const PART: usize = 64 << 10;

/// Where the next send goes.
pub enum Way<'a> {
    /// The kernel, unobserved.
    Plain,
    /// Nowhere: the connection has failed, and the kernel's word of it was taken by a look.
    Failed(Errno),
    /// The kernel's TCP, counted: keep the guard until the real call has returned.
    Tcp(Guard<'a>),
    /// The ring.
    Ring(&'a Slot),
}

/// A send that the slot counts, for as long as it lasts.
pub struct InFlight<'a> {
    send: Option<TcpSend<'a>>,
    pid: u32,
    slot: &'a Slot,
    /// Which use of the slot.
    usage: u32,
    /// The record, and by it the slot, outlives a close by another thread.
    hold: Hold,
}

impl<'a> InFlight<'a> {
    fn new(hold: Hold, send: TcpSend<'a>, conn: &Conn, slot: &'a Slot) -> InFlight<'a> {
        let usage = conn.usage.load(Relaxed);
        InFlight { send: Some(send), pid: process::pid(), slot, usage, hold }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let conn = self.hold.conn();
        let is_there = conn.has_slot(self.slot) && conn.usage.load(Relaxed) == self.usage;
        // A signal handler may have forked: the send is the parent's. Or another thread has disconnected the socket, and the
        // slot is somebody else's.
        if self.pid != process::pid() || !is_there {
            mem::forget(self.send.take());
        }
    }
}

/// A TCP send in flight.
pub enum Guard<'a> {
    /// Counted in the slot.
    Slot(#[expect(dead_code, reason = "held for its drop")] InFlight<'a>),
    /// Counted in the record, there being no slot yet.
    Record(#[expect(dead_code, reason = "held for its drop")] Early),
    /// Not counted: the kernel says that this connection is over.
    Over,
}

impl Guard<'_> {
    /// The real call returned `sent` where `wanted` bytes were offered: whether it met a full buffer decides
    /// about a later edge for EPOLLOUT.
    pub fn done(self, fd: i32, index: u32, sent: isize, wanted: usize) -> isize {
        let errno = crate::os::errno::errno();
        if has_met_full_buffer(sent, wanted, errno) {
            conn::at(index).tx_blocks.fetch_add(1, Relaxed);
        }
        if sent < 0 {
            ending::told_by_send(fd, conn::at(index), errno);
        }
        sent
    }
}

/// Whether a send by the kernel did, of which `errno` tells where `sent` is negative.
fn has_met_full_buffer(sent: isize, wanted: usize, errno: Errno) -> bool {
    match sent {
        0.. => (sent as usize) < wanted,
        _ => matches!(errno, libc::EAGAIN | libc::EINTR),
    }
}

#[cold]
fn wait_for_thread(attempt: &mut u32) {
    process::give_way(*attempt);
    *attempt += 1;
}

/// Decides the way of a send, moving the handshake on where it is due.
#[inline]
pub fn way(fd: i32, index: u32) -> Way<'static> {
    let conn = conn::at(index);
    let mut attempt = 0;
    loop {
        match conn.phase() {
            Phase::Ring => {}
            Phase::Offered | Phase::Early | Phase::Attached => {
                transition::progress(fd, index, Call::Send);
                if conn.has(F_CLC)
                    && let Err(errno) = clc::first::before_send(fd, index, conn)
                {
                    return Way::Failed(errno);
                }
            }
            Phase::Plain => {
                if conn.has(F_CLC)
                    && let Err(errno) = clc::first::before_send(fd, index, conn)
                {
                    return Way::Failed(errno);
                }
                return ending::untold(conn).map_or(Way::Plain, Way::Failed);
            }
            _ => return ending::untold(conn).map_or(Way::Plain, Way::Failed),
        }
        let Some(slot) = conn.slot() else {
            match conn.phase() {
                Phase::Early => {
                    if let Some(errno) = ending::untold(conn) {
                        return Way::Failed(errno);
                    }
                }
                // A signal handler interrupted its own thread just where the connection comes back.
                Phase::Offered | Phase::Attached | Phase::Ring if conn.tx_lock.is_mine() => {
                    return Way::Failed(libc::EAGAIN);
                }
                Phase::Offered | Phase::Attached | Phase::Ring => {
                    wait_for_thread(&mut attempt);
                    continue;
                }
                _ => return Way::Plain,
            }
            if let Some(call) = Early::send(fd, index) {
                return Way::Tcp(Guard::Record(call));
            }
            if table::get(fd) != Entry::Conn(index) {
                return Way::Plain;
            }
            wait_for_thread(&mut attempt);
            continue;
        };
        match conn.phase() {
            Phase::Offered | Phase::Attached | Phase::Ring => {}
            // Another thread is just tying the slot to the record.
            Phase::Early => {
                wait_for_thread(&mut attempt);
                continue;
            }
            _ => return Way::Plain,
        }
        if transition::tx_is_ring(fd, conn, slot) {
            return Way::Ring(slot);
        }
        if state::is_due(conn.own(slot).flags.load(Relaxed)) {
            fallback::follow(fd, index);
            // Before the ring a flag means nothing, and only a hostile peer sets it.
            if !matches!(conn.phase(), Phase::Offered | Phase::Attached | Phase::Ring) {
                continue;
            }
        }
        if let Some(errno) = ending::untold(conn) {
            return Way::Failed(errno);
        }
        let Some(hold) = Hold::enter(fd, index) else { return Way::Tcp(Guard::Over) };
        let client = conn.has(conn::F_CLIENT);
        let sent = || kernel::tcp_sent(fd, client).filter(|_| hold.fd(fd) == fd);
        match wait::tx_span(conn, slot).begin_tcp_send(sent) {
            Ok(Route::Tcp(send)) => {
                return Way::Tcp(Guard::Slot(InFlight::new(hold, send, conn, slot)));
            }
            Ok(Route::Ring) => return Way::Ring(slot),
            Ok(Route::Back) if fallback::go_back(fd, conn, slot) => return Way::Plain,
            // Nothing is written there any more, but the call may wait.
            Ok(Route::Back) if ends_in_ring(conn, slot) => return Way::Ring(slot),
            Ok(Route::Back) => return Way::Failed(libc::EAGAIN),
            // The kernel tells nothing about a closed socket: it will answer the send itself.
            Err(_) => return Way::Tcp(Guard::Over),
        }
    }
}

/// Whether a send that comes to the ring finds that it is over, or that the peer wants it to be.
#[inline(always)]
pub fn ends_in_ring(conn: &Conn, slot: &Slot) -> bool {
    conn.own(slot).flags.load(Relaxed) & (TXF_LEFT | TXF_BACK) != 0
}

/// Sends `from` through the ring as send(2) with `flags` does.
pub fn through_ring(fd: i32, index: u32, slot: &Slot, from: &mut Buffers, flags: i32) -> Outcome {
    let conn = conn::at(index);
    let mut left = from.left();
    if left > isize::MAX as usize {
        return Outcome::Fail(libc::EINVAL);
    }
    left = left.min(MOST);
    observer::used(fd, index);
    let mut total = 0;
    let mut since = 0;
    let mut hold: Option<Hold> = None;
    let mut signals = Signals::new();
    let mut is_cramped = false;
    loop {
        let fd = hold.as_ref().map_or(fd, |h| h.fd(fd));
        let mut is_held_up = false;
        match attempt((fd, index, hold.is_some()), slot, from, left, &mut is_cramped) {
            // TCP's buffers take what a small ring would not. Where that cannot be, the ring does for this call.
            Attempt::Cramped if fallback::leave(fd, index, Reason::NoMemory).is_err() => continue,
            Attempt::Kernel if total > 0 => return Outcome::Done(total),
            Attempt::Closed if total > 0 => return Outcome::Done(total),
            Attempt::Closed => match close::closed_before(fd, index) {
                Some(outcome) => return outcome,
                None => continue,
            },
            Attempt::Mine => {
                conn.tx_blocks.fetch_add(1, Relaxed);
                return if total > 0 { Outcome::Done(total) } else { Outcome::Fail(libc::EAGAIN) };
            }
            Attempt::Back if !fallback::go_back(fd, conn, slot) => is_held_up = true,
            Attempt::Back if hold.is_none() && total == 0 => return out_of_ring(conn),
            Attempt::Kernel | Attempt::Back | Attempt::Elsewhere | Attempt::Cramped => {
                if hold.is_some() && signals.let_in(total > 0) {
                    return interrupted(total);
                }
                if hold.is_some() {
                    return keeping(hold, || rest(fd, index, from, flags, total)).1;
                }
                if total == 0 {
                    return Outcome::Kernel;
                }
                // A send that does not wait, of which some was in the ring: the caller would begin it anew.
                return match Hold::enter(fd, index) {
                    Some(hold) => {
                        let flags = flags | libc::MSG_DONTWAIT;
                        keeping(hold, || rest(fd, index, from, flags, total)).1
                    }
                    None => Outcome::Done(total),
                };
            }
            Attempt::Fail(errno) if total > 0 => {
                ending::put_back(conn, errno);
                return Outcome::Done(total);
            }
            Attempt::Fail(errno) => return Outcome::Fail(errno),
            Attempt::Sent(n) => {
                total += n;
                left -= n;
                if left == 0 {
                    return Outcome::Done(total);
                }
            }
        }
        // O_NONBLOCK counts where the call begins.
        let waits = hold.is_some()
            || (flags & libc::MSG_DONTWAIT == 0 && !holders::is_nonblocking(fd, conn));
        if !waits && room::grow(fd, conn, slot) {
            continue;
        }
        if !waits {
            met_full_ring(index, slot);
            return if total > 0 { Outcome::Done(total) } else { Outcome::Fail(libc::EAGAIN) };
        }
        if since == 0 {
            since = clock::now_ns();
        }
        if hold.is_none() {
            hold = Hold::enter(fd, index);
        }
        if hold.is_none() {
            match close::closed_before(fd, index) {
                _ if total > 0 => return Outcome::Done(total),
                Some(outcome) => return outcome,
                None => continue,
            }
        }
        let may_leave = || !signals.let_in(total > 0);
        if room::leave_if_stuck(numbers::number(fd, index), index, may_leave) {
            return keeping(hold, || rest(fd, index, from, flags, total)).1;
        }
        let woken;
        (hold, woken) = keeping(hold, || match is_held_up {
            true => wait::for_others(fd, since, total > 0, &mut signals),
            false => wait::for_room(fd, index, since, total > 0, &mut signals),
        });
        if let Woken::Fail(errno) = woken {
            return if total > 0 { Outcome::Done(total) } else { Outcome::Fail(errno) };
        }
    }
}

/// What a send says that a signal has ended.
fn interrupted(total: usize) -> Outcome {
    if total > 0 { Outcome::Done(total) } else { Outcome::Fail(libc::EINTR) }
}

/// A send that does not wait has found no room in the ring, and waits for it elsewhere, most likely.
pub fn met_full_ring(index: u32, slot: &Slot) {
    let conn = conn::at(index);
    conn.tx_blocks.fetch_add(1, Relaxed);
    if room::look_in_ns(conn, slot).is_some() {
        epoll::met_full_ring(index);
    }
}

/// What becomes of a send by which the connection has come out of the ring: an error that only we know of is told first.
pub fn out_of_ring(conn: &Conn) -> Outcome {
    ending::untold(conn).map_or(Outcome::Kernel, Outcome::Fail)
}

/// Goes on with a send that has slept, the ring not being the place for it any more: of its bytes `total` are sent. Its
/// number may be closed. Once some bytes are sent, errors are for the next call.
#[cold]
fn rest(fd: i32, index: u32, from: &mut Buffers, flags: i32, mut total: usize) -> Outcome {
    let conn = conn::at(index);
    while from.left() > 0 {
        let fd = numbers::number(fd, index);
        let returns = conn.returns();
        let whole = match way(fd, index) {
            Way::Plain => unseen(fd, index, returns, from, flags, &mut total),
            Way::Tcp(guard) => keeping(guard, || by_kernel(fd, index, from, flags, &mut total)).1,
            Way::Ring(slot) => match through_ring(fd, index, slot, from, flags) {
                Outcome::Done(n) => return Outcome::Done(total + n),
                Outcome::Fail(errno) => Err(errno),
                Outcome::Kernel | Outcome::Other => {
                    unseen(fd, index, returns, from, flags, &mut total)
                }
            },
            Way::Failed(errno) => Err(errno),
        };
        match whole {
            Ok(true) => {}
            Ok(false) => break,
            Err(errno) if total == 0 => return Outcome::Fail(errno),
            Err(errno) => {
                ending::put_back(conn, errno);
                break;
            }
        }
    }
    Outcome::Done(total)
}

/// [`by_kernel`] where nobody counts; `returns`: as for [`Unseen::enter`].
fn unseen(
    fd: i32,
    index: u32,
    returns: u32,
    from: &mut Buffers,
    flags: i32,
    total: &mut usize,
) -> Result<bool, Errno> {
    match Unseen::enter(index, returns) {
        Some(call) => keeping(call, || by_kernel(fd, index, from, flags, total)).1,
        None => Ok(true),
    }
}

/// One buffer by the kernel. Whether it took all of it, or the call waits on: O_NONBLOCK, set since it began, does not
/// concern it.
fn by_kernel(
    fd: i32,
    index: u32,
    from: &mut Buffers,
    flags: i32,
    total: &mut usize,
) -> Result<bool, Errno> {
    let Some((src, len)) = from.piece(usize::MAX) else { return Ok(false) };
    // A call that reports bytes gets no signal.
    let silent = if *total > 0 { libc::MSG_NOSIGNAL } else { 0 };
    // SAFETY: the application's buffer. The real function: a cancellation point, as the application expects.
    let n = unsafe { real::send(fd, src.cast(), len, flags | silent) };
    let errno = crate::os::errno::errno();
    let sent = usize::try_from(n).unwrap_or(0);
    let iov = libc::iovec { iov_base: src.cast(), iov_len: len };
    // SAFETY: one entry on our stack, the application's buffer.
    unsafe { capture::sent_by_kernel(fd, index, &raw const iov, 1, n) };
    order::taken(conn::at(index));
    from.advance(sent);
    *total += sent;
    if n >= 0 && sent == len {
        return Ok(true);
    }
    let conn = conn::at(index);
    if has_met_full_buffer(n, len, errno) {
        conn.tx_blocks.fetch_add(1, Relaxed);
    }
    if n < 0 && errno != libc::EAGAIN && *total > 0 {
        conn.slot().inspect(|slot| ending::untold_by_send(fd, conn, slot, errno));
        return Ok(false);
    }
    if n < 0 && errno != libc::EAGAIN {
        ending::told_by_send(fd, conn, errno);
        return Err(errno);
    }
    if flags & libc::MSG_DONTWAIT == 0 && kernel::is_nonblocking(fd) {
        let mut p =
            libc::pollfd { fd: numbers::steady(fd, index), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one valid pollfd; the real function is a cancellation point, as send is.
        if unsafe { real::poll(&raw mut p, 1, -1) } > 0 {
            return Ok(true);
        }
        return Err(crate::os::errno::errno());
    }
    if n < 0 { Err(errno) } else { Ok(false) }
}

enum Attempt {
    Sent(usize),
    /// The number was closed before.
    Closed,
    /// We are in a signal handler that has interrupted a step of its own thread.
    Mine,
    /// The ring is over, or the peer wants it to be.
    Back,
    /// Another thread has taken the connection out of this ring: decide anew.
    Elsewhere,
    /// There is no memory for a ring as large as is wanted.
    Cramped,
    Fail(Errno),
    Kernel,
}

#[inline]
fn attempt(
    (fd, index, is_held): (i32, u32, bool),
    slot: &Slot,
    from: &mut Buffers,
    left: usize,
    is_cramped: &mut bool,
) -> Attempt {
    let conn = conn::at(index);
    // A signal handler that interrupted a send on the same socket finds no room, however long it waits.
    let Some(held) = conn.tx_lock.enter() else { return Attempt::Mine };
    let Some(fd) = numbers::number_in_step(fd, index, is_held) else {
        return Attempt::Closed;
    };
    // The flags that tell of the end of an earlier ring are in the peer's reach.
    if !conn.has_slot(slot) {
        return Attempt::Elsewhere;
    }
    let Some(family) = Family::sending(fd, conn, slot) else {
        return Attempt::Fail(libc::ECONNRESET);
    };
    let flags = conn.own(slot).flags.load(Relaxed);
    if flags & (TXF_LEFT | TXF_BACK) != 0 {
        return Attempt::Back;
    }
    if flags & TXF_DONE != 0 {
        return match ending::after_shutdown(fd, conn, slot) {
            Some(errno) => Attempt::Fail(errno),
            None => Attempt::Kernel,
        };
    }
    let tx = conn.tx(slot);
    let was_cramped = *is_cramped;
    let room = tx.room_if(left, |at, len| {
        *is_cramped |= !memory::take(at.cast(), len);
        !*is_cramped
    });
    let room = match room {
        Ok(_) if *is_cramped && !was_cramped => return Attempt::Cramped,
        Ok(room) => room,
        Err(Broken) => return Attempt::Fail(libc::ECONNRESET),
    };
    let room = room::found(fd, conn, slot, room, left);
    let now = clock::tsc();
    if may_be_lost(fd, conn, slot, &room, now) {
        match ending::sending(fd, conn, slot, left) {
            ending::Send::Ring => {}
            ending::Send::Fail(errno) => return Attempt::Fail(errno),
            ending::Send::Lost => return Attempt::Sent(left),
            ending::Send::Kernel => return Attempt::Kernel,
        }
    }
    if room.free < left {
        observer::count_one(conn, |record| &record.tx_full);
    }
    let record = observer::record_of(conn);
    let is_watched = capture::wants(record);
    let mut free = room.free;
    if free > 0 {
        order::stamp(conn, conn.own(slot), now);
    }
    let stores = bulk::stores(conn, &room, left, now);
    let mut at = room.prod;
    while free > 0
        && let Some((src, len)) = from.piece(free.min(PART))
    {
        // SAFETY: at..at+len lies within `room`; src is the application's buffer of len bytes.
        unsafe {
            match stores {
                Stores::Cached => tx.copy_in(at, room.place, src, len),
                Stores::Past => tx.copy_past(at, room.place, src, len),
            }
        }
        from.advance(len);
        at = at.wrapping_add(len as u64);
        free -= len;
        if len == PART && !is_watched {
            // A reader that is awake begins with it; one that is asleep is woken by the last one.
            tx.publish(at);
        }
    }
    if at != room.prod {
        if is_watched {
            capture::sending(fd, conn, slot, room.place, room.prod, at);
        }
        tx.publish(at);
        observer::sent_total(record, conn, slot, at);
    }
    let waker = if at != room.prod { bells::waker(index, conn, slot) } else { None };
    drop(family);
    drop(held);
    if let Some(waker) = waker {
        waker.wake(fd, slot);
    }
    Attempt::Sent((at.wrapping_sub(room.prod)) as usize)
}

/// Whether what we send now may be lost, of which [`ending::sending`] knows more. `now`: [`clock::tsc`]. The caller holds
/// the sending lock.
#[inline(always)]
pub fn may_be_lost(fd: i32, conn: &Conn, slot: &Slot, room: &Room, now: u64) -> bool {
    let is_due = || now.wrapping_sub(conn.asked.load(Relaxed)) > ASK_CYCLES;
    ending::peer_is_gone(conn, slot)
        || (!liveness::is_vouched_for(conn, slot) && may_have_died(fd, conn, slot, now))
        || (room.unread && is_due() && leaves_unread(fd, conn, slot, now))
}

/// Whether the kernel says that a peer has gone which has left something unread.
#[cold]
fn leaves_unread(fd: i32, conn: &Conn, slot: &Slot, now: u64) -> bool {
    if !conn.tx(slot).has_data() {
        conn.asked.store(now, Relaxed);
        return false;
    }
    has_died(fd, conn, slot, now, bells::watch_over)
}

/// Whether a peer has died for which nobody vouches.
#[cold]
fn may_have_died(fd: i32, conn: &Conn, slot: &Slot, now: u64) -> bool {
    match liveness::ask(conn, slot) {
        Life::Lives => false,
        Life::Unknown if now.wrapping_sub(conn.asked.load(Relaxed)) <= ASK_CYCLES => false,
        Life::Unknown => has_died(fd, conn, slot, now, bells::watch_over),
        Life::Ended => {
            note_all_read(fd, conn, slot);
            has_died(fd, conn, slot, now, bells::provoke)
        }
    }
}

/// Before a doorbell provokes the same: a RST for what the dead had not read of TCP would be here by now.
fn note_all_read(fd: i32, conn: &Conn, slot: &Slot) {
    let theirs = RxSpan::new(slot, 1 - conn.side());
    if theirs.boundary().is_some() && liveness::have_ended(conn, slot) {
        ending::look(fd, conn);
        if conn.kernel_events.load(Relaxed) & events::HUP == 0 {
            theirs.note_read();
        }
    }
}

/// Asks the kernel for the peer's FIN or RST; `of_half_closed` sees to it that there will be one of a peer that has shut
/// its direction down before.
#[cold]
fn has_died(
    fd: i32,
    conn: &Conn,
    slot: &Slot,
    now: u64,
    of_half_closed: fn(i32, &Conn, &Slot),
) -> bool {
    conn.asked.store(now, Relaxed);
    of_half_closed(fd, conn, slot);
    ending::look(fd, conn);
    ending::peer_is_gone(conn, slot)
}
