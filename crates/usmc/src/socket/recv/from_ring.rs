//! What a receive takes out of the ring, and what an empty ring means.

use usmc_shm::Broken;
use usmc_shm::bell::Drain;
use usmc_shm::layout::Slot;
use usmc_shm::ring::{Data, Ring};
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use super::Attempt;
use crate::os::iov::Buffers;
use crate::os::signals::Woken;
use crate::os::{clock, sys};
use crate::record::conn::{Conn, F_SHARED};
use crate::socket::send::PART;
use crate::stream::ending::{self, Ending};
use crate::stream::{bells, fallback};
use crate::watch::observe::Record;
use crate::watch::{capture, observer};

/// How long an empty ring is believed without asking the kernel whether the peer died.
const KERNEL_CHECK_NS: u64 = 10_000;

/// A call that finds bytes takes more that come meanwhile up to so many, the largest ring.
const MOST_AT_ONCE: usize = 4 << 20;

/// What is there, at most as much as there is room for. `asks`: the kernel may be asked where nothing is.
#[inline(always)]
pub fn from_ring(
    fd: i32,
    conn: &Conn,
    slot: &Slot,
    to: &mut Buffers,
    flags: i32,
    asks: bool,
) -> Attempt {
    let rx = conn.rx(slot);
    let data = match rx.data() {
        Ok(data) => data,
        Err(Broken) => return broken(fd, conn, slot),
    };
    if data.len == 0 {
        return empty(fd, conn, slot, &rx, asks);
    }
    let mut got = take(fd, conn, slot, to, flags, &data);
    if got >= PART && flags & libc::MSG_PEEK == 0 {
        // Of a large message more may have come meanwhile. A sender that keeps up does not keep the call.
        while to.left() > 0
            && got < MOST_AT_ONCE
            && let Ok(data) = rx.data()
            && data.len > 0
        {
            got += take(fd, conn, slot, to, flags, &data);
        }
    }
    Attempt::Got(got)
}

/// Takes what there is room for out of the ring; at least one byte, if there is any.
#[inline(always)]
fn take(fd: i32, conn: &Conn, slot: &Slot, to: &mut Buffers, flags: i32, data: &Data) -> usize {
    let rx = conn.rx(slot);
    let record = observer::record_of(conn);
    let is_watched = capture::wants(record);
    let in_parts = !is_watched && flags & libc::MSG_PEEK == 0;
    let mut at = data.cons;
    let mut unread = data.len;
    while unread > 0
        && let Some((dst, len)) = to.piece(unread.min(PART))
    {
        if flags & libc::MSG_TRUNC == 0 {
            // SAFETY: at..at+len lies within `data`; dst is the application's buffer of len bytes.
            unsafe { rx.copy_out(at, data.place, dst, len) };
        }
        to.advance(len);
        at = at.wrapping_add(len as u64);
        unread -= len;
        if len == PART && in_parts {
            // A sender that is awake goes on; one that is asleep is woken below.
            rx.consume(at);
        }
    }
    let taken_len = data.len - unread;
    if flags & libc::MSG_PEEK == 0 {
        taken((fd, conn, slot), &rx, data, taken_len, (record, is_watched));
    }
    taken_len
}

/// After `len` bytes of `data` have been taken out of the ring: its sender has that room, and is woken if it waits for some.
#[inline(always)]
pub fn taken(
    (fd, conn, slot): (i32, &Conn, &Slot),
    rx: &Ring<'_>,
    data: &Data,
    len: usize,
    (record, is_watched): (Option<&Record>, bool),
) {
    let at = data.cons.wrapping_add(len as u64);
    if is_watched {
        capture::receiving(fd, conn, slot, data.place, data.cons, at);
    }
    let asleep = rx.consume_waking(data, len);
    observer::received_total(record, conn, slot, at);
    if asleep {
        bells::wake_writer(fd, conn, slot);
    }
}

/// Copies unread ring bytes without taking them.
pub fn peek_ring(conn: &Conn, slot: &Slot, to: &mut Buffers) -> usize {
    let rx = conn.rx(slot);
    let Ok(data) = rx.data() else { return 0 };
    let (mut at, mut unread) = (data.cons, data.len);
    while unread > 0
        && let Some((dst, len)) = to.piece(unread)
    {
        // SAFETY: at..at+len lies within `data`; dst is the application's buffer of len bytes.
        unsafe { rx.copy_out(at, data.place, dst, len) };
        to.advance(len);
        at = at.wrapping_add(len as u64);
        unread -= len;
    }
    data.len - unread
}

/// The ring holds nonsense: the connection fails, nothing else does.
fn broken(fd: i32, conn: &Conn, slot: &Slot) -> Attempt {
    crate::os::log::warn(format_args!(
        "fd {fd}: the peer wrote nonsense into shared memory; reset"
    ));
    let _ = ending::note_error(conn, libc::ECONNRESET);
    conn.end(slot).tell_error();
    Attempt::Fail(libc::ECONNRESET)
}

#[cold]
fn empty(fd: i32, conn: &Conn, slot: &Slot, rx: &Ring<'_>, asks: bool) -> Attempt {
    let end = conn.end(slot);
    // Another process of this end has disconnected it.
    if conn.own(slot).flags(Relaxed).end() == EndState::Aborted {
        return Attempt::Kernel;
    }
    // Before the end: bytes of TCP may follow the ring.
    if conn.peer(slot).flags(Acquire).goes_back() && fallback::finish_rx(fd, conn, slot) {
        return Attempt::Again;
    }
    match ending::for_receiver(fd, conn, slot) {
        Ending::Alive => {}
        // What the peer published before its end is visible now.
        _ if rx.has_data() => return Attempt::Again,
        Ending::Fin => return Attempt::End,
        Ending::Reset => {
            return ending::take_error(fd, conn, slot).map_or(Attempt::End, Attempt::Fail);
        }
    }
    if end.flags().is_shut_rd() {
        return Attempt::End;
    }
    if bells::drain_bells(fd, conn, slot) == Drain::Data {
        return Attempt::Again;
    }
    if rx.owes_wake_up(conn.has(F_SHARED)) {
        bells::wake_writer(fd, conn, slot);
    }
    let now = clock::now_ns();
    if now.wrapping_sub(conn.kernel_seen.load(Relaxed)) < KERNEL_CHECK_NS {
        return Attempt::Empty(true);
    }
    if !asks {
        return Attempt::Unasked;
    }
    conn.kernel_seen.store(now, Relaxed);
    let mut byte = 0u8;
    // SAFETY: one writable byte.
    match unsafe { sys::recv(fd, &raw mut byte, 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) } {
        Err(libc::EAGAIN) => Attempt::Empty(true),
        Ok(0) => {
            ending::note_eof(fd, conn);
            match ending::ending(fd, conn, slot) {
                Ending::Alive => Attempt::Empty(true),
                Ending::Fin | Ending::Reset => Attempt::Again,
            }
        }
        Ok(_) => {
            let sent = conn.peer(slot).bells_sent.load(Acquire);
            // What follows the ring is no junk.
            let returns = conn.peer(slot).flags(Acquire).is_returning();
            if sent == end.bells_drained.load(Relaxed) && !returns {
                bells::drain_junk(fd);
            }
            Attempt::Empty(true)
        }
        Err(errno) => match ending::note_error(conn, errno) {
            Woken::Fail(errno) => Attempt::Fail(errno),
            Woken::Look => Attempt::Again,
        },
    }
}
