//! Sending: TCP until the direction has changed over, then the ring.

use core::ffi::c_void;
use core::mem;
use usmc_shm::Broken;
use usmc_shm::copy::Stores;
use usmc_shm::layout::Slot;
use usmc_shm::ring::{Ring, Room};
use usmc_shm::span::{Route, RxSpan, TcpSend};
use usmc_shm::sync::Ordering::Relaxed;

use super::Outcome;
use super::call::Call;
use super::early::Early;
use crate::family::liveness::{self, Life};
use crate::family::locks::Family;
use crate::handshake::{clc, transition};
use crate::os::iov::Buffers;
use crate::os::reason::Reason;
use crate::os::signals::Woken;
use crate::os::sys::Errno;
use crate::os::table::{self, Entry};
use crate::os::unwind::keeping;
use crate::os::{clock, events, memory, process, real};
use crate::record::change_over;
use crate::record::conn::{self, Conn, F_CLC, F_DEPUTY};
use crate::record::numbers::{self, Hold};
use crate::record::phase::Phase;
use crate::record::{kernel, order};
use crate::stream::unseen::Unseen;
use crate::stream::{bells, bulk, drained, ending, fallback, room, unheard, wait};
use crate::watch::{capture, observer};
use crate::watchers::epoll;

/// How long (some 100 µs, in cycles) a peer is believed to be there without a question to the kernel: where nobody vouches
/// for it, and where it leaves something unread, for its socket may have been closed by ways that nobody sees.
const ASK_CYCLES: u64 = 1 << 18;
/// How long (some 10 ms, in cycles) an agent is believed to be there: the agent tells in the slot what it knows of another host, and the kernel
/// tells of nothing but the agent's death. What was sent to another host in that time may be lost over TCP, too.
const ASK_AGENT_CYCLES: u64 = 1 << 25;

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
        note_sent(conn::at(index), sent, wanted, errno);
        if sent < 0 {
            ending::told_by_send(fd, conn::at(index), errno);
        }
        sent
    }
}

/// A send by the kernel may have met a full buffer; `errno` tells of that where `sent` is negative.
fn note_sent(conn: &Conn, sent: isize, wanted: usize, errno: Errno) {
    let is_full = match sent {
        0.. => (sent as usize) < wanted,
        _ => matches!(errno, libc::EAGAIN | libc::EINTR),
    };
    if is_full {
        conn.tx_blocks.fetch_add(1, Relaxed);
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
            phase @ (Phase::Offered | Phase::Early | Phase::Attached | Phase::Plain) => {
                if phase != Phase::Plain {
                    transition::progress(fd, index, change_over::Call::Send);
                }
                if conn.has(F_CLC)
                    && let Err(errno) = clc::first::before_send(fd, index, conn)
                {
                    return Way::Failed(errno);
                }
                if phase == Phase::Plain {
                    return ending::untold(conn).map_or(Way::Plain, Way::Failed);
                }
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
        if conn.own(slot).flags(Relaxed).is_returning() {
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
fn ends_in_ring(conn: &Conn, slot: &Slot) -> bool {
    conn.own(slot).flags(Relaxed).ends_ring()
}

/// Where the bytes of a send come from.
pub trait Source {
    /// Whether the kernel moves them: in a step perhaps less than there is room for. What nobody will read it takes as well, for
    /// a file or a pipe goes on behind that.
    const BY_KERNEL: bool = false;

    /// Keeps the connection from the first step on.
    fn hold(&mut self) -> Option<Hold> {
        None
    }

    /// Bytes that are left.
    fn left(&self) -> usize;

    /// Puts up to `left` bytes into the `room` of the ring. Where they end; not all of them are published yet.
    ///
    /// # Errors
    /// Why there are no more bytes; 0 for the end of them.
    fn put(&mut self, to: &Sending<'_>, room: &Room, left: usize) -> Result<u64, Errno>;

    /// Sends some by the kernel, by this number. Whether the call goes on.
    ///
    /// # Errors
    /// How the call ends.
    fn by_kernel(&mut self, fd: i32, call: &mut Call) -> Result<bool, Errno>;
}

/// The ring that a send goes to, with the locks of that direction.
pub struct Sending<'a> {
    conn: &'a Conn,
    slot: &'a Slot,
    tx: Ring<'a>,
    /// The time ([`clock::tsc`]).
    now: u64,
    is_watched: bool,
}

impl Source for Buffers {
    #[inline(always)]
    fn left(&self) -> usize {
        Buffers::left(self)
    }

    #[inline(always)]
    fn put(&mut self, to: &Sending<'_>, room: &Room, left: usize) -> Result<u64, Errno> {
        // The buffers may have more than one call sends.
        let mut free = room.free.min(left);
        if free > 0 {
            order::stamp(to.conn, to.conn.own(to.slot), to.now);
        }
        let stores = bulk::stores(to.conn, room, left, to.now);
        let mut at = room.prod;
        while free > 0
            && let Some((src, len)) = self.piece(free.min(PART))
        {
            // SAFETY: at..at+len lies within `room`; src is the application's buffer of len bytes.
            unsafe {
                match stores {
                    Stores::Cached => to.tx.copy_in(at, room.place, src, len),
                    Stores::Past => to.tx.copy_past(at, room.place, src, len),
                }
            }
            self.advance(len);
            at = at.wrapping_add(len as u64);
            free -= len;
            if len == PART && !to.is_watched {
                // A reader that is awake begins with it; one that is asleep is woken by the last one.
                to.tx.publish(at);
            }
        }
        Ok(at)
    }

    /// One buffer. The call goes on where that was taken, or it waits: O_NONBLOCK, set since it began, does not concern it.
    fn by_kernel(&mut self, fd: i32, call: &mut Call) -> Result<bool, Errno> {
        let Some((src, len)) = self.piece(usize::MAX) else { return Ok(false) };
        // A call that reports bytes gets no signal.
        let silent = if call.total > 0 { libc::MSG_NOSIGNAL } else { 0 };
        // SAFETY: the application's buffer. The real function: a cancellation point, as the application expects.
        let n = unsafe { real::send(fd, src.cast(), len, call.flags | silent) };
        let errno = crate::os::errno::errno();
        let sent = usize::try_from(n).unwrap_or(0);
        let iov = libc::iovec { iov_base: src.cast(), iov_len: len };
        // SAFETY: one entry on our stack, the application's buffer.
        unsafe { capture::sent_by_kernel(fd, call.index, &raw const iov, 1, n) };
        let conn = conn::at(call.index);
        order::taken(conn);
        self.advance(sent);
        call.total += sent;
        note_sent(conn, n, len, errno);
        if n >= 0 && sent == len {
            return Ok(true);
        }
        if n < 0 && errno != libc::EAGAIN && call.total > 0 {
            conn.slot().inspect(|slot| ending::untold_by_send(fd, conn, slot, errno));
            return Ok(false);
        }
        if n < 0 && errno != libc::EAGAIN {
            ending::told_by_send(fd, conn, errno);
            return Err(errno);
        }
        if call.flags & libc::MSG_DONTWAIT == 0 && kernel::is_nonblocking(fd) {
            return match numbers::sleeps_in_poll(fd, call.index, libc::POLLOUT) {
                true => Ok(true),
                false => Err(crate::os::errno::errno()),
            };
        }
        if n < 0 { Err(errno) } else { Ok(false) }
    }
}

/// Bytes that are not in the application's memory. The kernel moves them, into the ring's memory or by TCP.
pub struct ByKernel<'a> {
    /// Keeps the connection.
    pub hold: Option<Hold>,
    /// So many are wanted.
    pub count: usize,
    /// Moves some to this place by one system call. 0: there are no more.
    pub fill: &'a mut dyn FnMut(*mut c_void, usize) -> Result<usize, Errno>,
    /// The application's call, by this number of the connection.
    pub real: &'a mut dyn FnMut(i32) -> isize,
}

impl Source for ByKernel<'_> {
    const BY_KERNEL: bool = true;

    fn hold(&mut self) -> Option<Hold> {
        self.hold.take()
    }

    fn left(&self) -> usize {
        self.count
    }

    fn put(&mut self, to: &Sending<'_>, room: &Room, left: usize) -> Result<u64, Errno> {
        let want = room.free.min(left);
        if want == 0 {
            return Ok(room.prod);
        }
        let (dst, len) = to.tx.contiguous(room.prod, room.place, want);
        match (self.fill)(dst.cast(), len)? {
            0 => Err(0),
            n => {
                order::stamp(to.conn, to.conn.own(to.slot), to.now);
                self.count -= n;
                Ok(room.prod.wrapping_add(n as u64))
            }
        }
    }

    /// The application's call, unless some bytes went through the ring.
    fn by_kernel(&mut self, fd: i32, call: &mut Call) -> Result<bool, Errno> {
        if call.total > 0 {
            return Ok(false);
        }
        let n = (self.real)(fd);
        let (conn, errno) = (conn::at(call.index), crate::os::errno::errno());
        order::taken(conn);
        note_sent(conn, n, self.count, errno);
        let Ok(sent) = usize::try_from(n) else {
            ending::told_by_send(fd, conn, errno);
            return Err(errno);
        };
        call.total = sent;
        Ok(false)
    }
}

/// Sends `from` through the ring as send(2) with `flags` does.
pub fn through_ring<S: Source>(
    fd: i32,
    index: u32,
    slot: &Slot,
    from: &mut S,
    flags: i32,
) -> Outcome {
    let conn = conn::at(index);
    let mut left = from.left();
    if left > isize::MAX as usize {
        return Outcome::Fail(libc::EINVAL);
    }
    left = left.min(MOST);
    observer::used(fd, index);
    let mut call = Call::new(fd, index, flags, from.hold());
    let mut is_cramped = false;
    loop {
        let fd = call.fd();
        let mut is_held_up = false;
        match attempt((fd, index, call.is_held()), slot, from, left, &mut is_cramped) {
            // TCP's buffers take what a small ring would not. Where that cannot be, the ring does for this call.
            Attempt::Cramped if fallback::leave(fd, index, Reason::NoMemory).is_err() => continue,
            Attempt::Kernel if call.total > 0 => return call.done(),
            Attempt::Closed => match call.closed() {
                Some(outcome) => return outcome,
                None => continue,
            },
            Attempt::Mine => {
                conn.tx_blocks.fetch_add(1, Relaxed);
                return call.fail(libc::EAGAIN);
            }
            Attempt::Back if !fallback::go_back(fd, conn, slot) => is_held_up = true,
            Attempt::Back if !call.is_held() && call.total == 0 => return out_of_ring(conn),
            Attempt::Kernel | Attempt::Back | Attempt::Elsewhere | Attempt::Cramped => {
                if call.is_held() && call.is_interrupted() {
                    return call.fail(libc::EINTR);
                }
                if !call.is_held() && call.total == 0 {
                    return Outcome::Kernel;
                }
                // A send that does not wait, of which some was in the ring: the caller would begin it anew.
                call.flags |= if call.is_held() { 0 } else { libc::MSG_DONTWAIT };
                if !call.hold() {
                    return call.done();
                }
                return rest(&mut call, from);
            }
            Attempt::Fail(errno) => return call.fail(errno),
            Attempt::Drained(errno) if call.total == 0 && errno != 0 => {
                return Outcome::Fail(errno);
            }
            Attempt::Drained(_) => {
                if !call.waits() {
                    met_full_ring(index, slot);
                }
                return call.done();
            }
            Attempt::Sent(n) => {
                call.total += n;
                left -= n;
                if left == 0 {
                    return call.done();
                }
                if S::BY_KERNEL && n > 0 {
                    continue;
                }
            }
        }
        let waits = call.waits();
        if !waits && room::grow(fd, conn, slot) {
            continue;
        }
        if !waits {
            if drained::look() || room::leave_if_stuck(fd, index, || true) {
                continue;
            }
            met_full_ring(index, slot);
            return call.fail(libc::EAGAIN);
        }
        if !call.begin_sleep() {
            match call.closed() {
                Some(outcome) => return outcome,
                None => continue,
            }
        }
        if room::leave_if_stuck(call.fd(), index, || !call.is_interrupted()) {
            return rest(&mut call, from);
        }
        let partial = call.total > 0;
        let woken = call.kept(|call, fd| match is_held_up {
            true => wait::for_others(fd, call.since, partial, &mut call.signals),
            false => wait::for_room(fd, index, call.since, partial, &mut call.signals),
        });
        if let Woken::Fail(errno) = woken {
            return call.fail(errno);
        }
    }
}

/// A send that does not wait has found no room in the ring, and waits for it elsewhere, most likely.
fn met_full_ring(index: u32, slot: &Slot) {
    let conn = conn::at(index);
    conn.tx_blocks.fetch_add(1, Relaxed);
    if room::look_in_ns(conn, slot).is_some() {
        epoll::met_full_ring(index);
    }
}

/// What becomes of a send by which the connection has come out of the ring: an error that only we know of is told first.
fn out_of_ring(conn: &Conn) -> Outcome {
    ending::untold(conn).map_or(Outcome::Kernel, Outcome::Fail)
}

/// Goes on with a send that keeps the connection, the ring not being the place for it any more. Its number may be closed. Once
/// some bytes are sent, errors are for the next call.
#[cold]
fn rest<S: Source>(call: &mut Call, from: &mut S) -> Outcome {
    call.kept(|call, mut fd| {
        let index = call.index;
        while from.left() > 0 {
            let returns = conn::at(index).returns();
            let guard = match way(fd, index) {
                Way::Plain => None,
                Way::Tcp(guard) => Some(guard),
                Way::Ring(slot) => match through_ring(fd, index, slot, from, call.flags) {
                    Outcome::Done(n) => return Outcome::Done(call.total + n),
                    Outcome::Fail(errno) => return call.fail(errno),
                    Outcome::Kernel | Outcome::Other => None,
                },
                Way::Failed(errno) => return call.fail(errno),
            };
            let unseen = if guard.is_none() { Unseen::enter(index, returns) } else { None };
            let goes_on = match guard.is_some() || unseen.is_some() {
                true => keeping((guard, unseen), || from.by_kernel(fd, call)).1,
                // It has come back to the ring.
                false => Ok(true),
            };
            match goes_on {
                Ok(true) => fd = numbers::number(fd, index),
                Ok(false) => break,
                Err(errno) => return call.fail(errno),
            }
        }
        call.done()
    })
}

enum Attempt {
    Sent(usize),
    /// The source has no more bytes ([`Source::put`]).
    Drained(Errno),
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
fn attempt<S: Source>(
    (fd, index, is_held): (i32, u32, bool),
    slot: &Slot,
    from: &mut S,
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
    let flags = conn.own(slot).flags(Relaxed);
    if flags.ends_ring() {
        return Attempt::Back;
    }
    if flags.is_done() {
        return match ending::after_shutdown(fd, conn, slot) {
            Some(errno) => Attempt::Fail(errno),
            None => Attempt::Kernel,
        };
    }
    let tx = conn.tx(slot);
    let was_cramped = *is_cramped;
    let room = tx.room_if(left, |at, len| {
        *is_cramped |= !memory::take(at.cast(), len);
        if !*is_cramped {
            observer::grown(conn, len);
        }
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
            ending::Send::Lost if S::BY_KERNEL => {}
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
    let sending = Sending { conn, slot, tx, now, is_watched };
    let at = match from.put(&sending, &room, left) {
        Ok(at) => at,
        Err(errno) => return Attempt::Drained(errno),
    };
    let tx = sending.tx;
    if at != room.prod {
        if is_watched {
            capture::sending(fd, conn, slot, room.place, room.prod, at);
        }
        tx.publish(at);
        observer::sent_total(record, conn, slot, at);
    }
    let mut waker = None;
    if at != room.prod {
        waker = bells::waker(index, conn, slot);
        unheard::sent(fd, index, conn);
    }
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
fn may_be_lost(fd: i32, conn: &Conn, slot: &Slot, room: &Room, now: u64) -> bool {
    let is_due = || now.wrapping_sub(conn.asked.load(Relaxed)) > believed_cycles(conn);
    ending::peer_is_gone(conn, slot)
        || (!liveness::is_vouched_for(conn, slot) && may_have_died(fd, conn, slot, now))
        || (room.unread && is_due() && leaves_unread(fd, conn, slot, now))
}

/// How long, in cycles, the peer is believed to be there.
fn believed_cycles(conn: &Conn) -> u64 {
    if conn.has(F_DEPUTY) { ASK_AGENT_CYCLES } else { ASK_CYCLES }
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
        Life::Unknown if now.wrapping_sub(conn.asked.load(Relaxed)) <= believed_cycles(conn) => {
            false
        }
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
