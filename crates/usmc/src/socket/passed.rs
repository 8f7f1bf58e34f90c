//! Descriptors in messages (SCM_RIGHTS). The kernel makes a new number for the same socket, as dup does, only
//! later and maybe in another process. Within one process it is recognised; another process cannot use the
//! memory of a connection it did not inherit.

use core::ffi::{c_int, c_uint};
use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Relaxed};

use super::control;
use crate::conn::{self, ATTACHED, Conn, EARLY, OFFERED, RING};
use crate::reason::Reason;
use crate::table::{self, Entry};
use crate::tuple::{self, Tuple};
use crate::{errno, kernel, log, set_errno, sys, transition};

/// Makes the call `send` for a message on a socket that is not TCP.
///
/// # Safety
/// `msg` is null or as sendmsg(2) takes it.
pub unsafe fn sending(
    msg: *const libc::msghdr,
    send: impl FnOnce() -> libc::ssize_t,
) -> libc::ssize_t {
    // SAFETY: the caller's contract.
    match unsafe { msg.as_ref() } {
        Some(msg) if msg.msg_controllen > 0 && !msg.msg_control.is_null() => {
            let saved = errno();
            // SAFETY: as above.
            unsafe { each_fd(msg, leaves) };
            set_errno(saved);
            let done = send();
            if done < 0 {
                let saved = errno();
                // SAFETY: as above.
                unsafe { each_fd(msg, stays) };
                set_errno(saved);
            }
            done
        }
        _ => send(),
    }
}

/// The same for sendmmsg(2).
///
/// # Safety
/// `msgs` are `count` messages as sendmmsg(2) takes them.
pub unsafe fn sending_many(
    msgs: *const libc::mmsghdr,
    count: c_uint,
    send: impl FnOnce() -> c_int,
) -> c_int {
    let each = |range: core::ops::Range<c_uint>, act: fn(i32)| {
        let saved = errno();
        for i in range {
            // SAFETY: the caller's contract.
            unsafe { each_fd(&(*msgs.add(i as usize)).msg_hdr, act) };
        }
        set_errno(saved);
    };
    each(0..count, leaves);
    let done = send();
    each(done.max(0) as c_uint..count, stays);
    done
}

/// Makes the call `receive`, which fills in `msg`, on a socket that is not TCP.
///
/// # Safety
/// `msg` is null or as recvmsg(2) takes it.
pub unsafe fn receiving(
    msg: *const libc::msghdr,
    flags: c_int,
    receive: impl FnOnce() -> libc::ssize_t,
) -> libc::ssize_t {
    let done = receive();
    if done >= 0 && !msg.is_null() {
        let saved = errno();
        let peeked = flags & libc::MSG_PEEK != 0;
        // SAFETY: the caller's contract; the kernel wrote the control messages and their lengths.
        unsafe { each_fd(&*msg, |fd| arrived(fd, peeked)) };
        set_errno(saved);
    }
    done
}

/// Calls `act` for every descriptor in a message.
///
/// # Safety
/// The control buffer is readable for its length.
unsafe fn each_fd(msg: &libc::msghdr, mut act: impl FnMut(i32)) {
    if msg.msg_control.is_null() {
        return;
    }
    // SAFETY: CMSG_* and the check of the length stay inside the buffer.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(msg);
        while !header.is_null() {
            let len = (*header).cmsg_len;
            let first = libc::CMSG_LEN(0) as usize;
            if (*header).cmsg_level == libc::SOL_SOCKET
                && (*header).cmsg_type == libc::SCM_RIGHTS
                && (first..=msg.msg_controllen).contains(&len)
            {
                for i in 0..(len - first) / 4 {
                    act(ptr::read_unaligned(libc::CMSG_DATA(header).cast::<i32>().add(i)));
                }
            }
            header = libc::CMSG_NXTHDR(msg, header);
        }
    }
}

/// What is undecided stays TCP, which any receiver understands. A connection in the ring is kept until it
/// arrives, if it ever arrives here: the sender may close its own number meanwhile.
fn leaves(fd: i32) {
    let Entry::Conn(index) = table::get(fd) else { return };
    let conn = conn::at(index);
    match conn.phase() {
        EARLY => conn.give_up(Reason::Adopted),
        OFFERED => transition::take_back(conn, Reason::Adopted),
        _ => {}
    }
    if matches!(conn.phase(), OFFERED | ATTACHED | RING) {
        log::warn(format_args!(
            "fd {fd}: a connection in shared memory was passed on; only this process and its forked \
             children can use it"
        ));
        conn.cookie.store(cookie(fd), Relaxed);
        conn.refs.fetch_add(1, AcqRel);
        conn.in_flight.fetch_add(1, AcqRel);
    }
}

/// The message was not sent after all.
fn stays(fd: i32) {
    if let Entry::Conn(index) = table::get(fd)
        && has_arrived(conn::at(index))
    {
        // Not the last: `fd` is open.
        conn::at(index).refs.fetch_sub(1, AcqRel);
    }
}

/// One that was on its way is not any more. False when none was.
fn has_arrived(conn: &Conn) -> bool {
    conn.in_flight.fetch_update(AcqRel, Relaxed, |n| n.checked_sub(1)).is_ok()
}

/// `fd` is a new number of a socket that may be known here under another one.
/// `peeked`: it will come once more.
pub fn arrived(fd: i32, peeked: bool) {
    control::fresh(fd);
    let Some(index) = known(fd) else { return };
    let conn = conn::at(index);
    // What was kept for it while it was on its way is its own from now on.
    if peeked || !has_arrived(conn) {
        conn.refs.fetch_add(1, AcqRel);
    }
    if !table::set(fd, Entry::Conn(index)) {
        conn.refs.fetch_sub(1, AcqRel);
    }
}

/// The record of the connection that `fd` is, if this process has one that matters.
fn known(fd: i32) -> Option<u32> {
    if kernel::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) != libc::IPPROTO_TCP {
        return None;
    }
    let (local, peer) = (tuple::local(fd).ok()?, tuple::peer(fd).ok()?);
    let netns = tuple::netns(fd);
    let as_client = Tuple { netns, client: local, server: peer }.words();
    let as_server = Tuple { netns, client: peer, server: local }.words();
    let mut found = None;
    conn::for_each(|index, conn| {
        if found.is_none() && matches!(conn.phase(), OFFERED | EARLY | ATTACHED | RING) {
            let words = transition::stored_tuple(conn);
            // Either end may be known in part only, early on.
            let partly = conn.phase() == EARLY
                && [as_client, as_server].iter().any(|own| own[5] as u16 == words[5] as u16);
            let is_named_so = words == as_client || words == as_server;
            if (is_named_so || partly) && is_the_same(fd, index, conn) {
                found = Some(index);
            }
        }
    });
    found
}

/// Whether the record of that name is this very socket, and not one whose number was closed behind our back.
fn is_the_same(fd: i32, index: u32, conn: &Conn) -> bool {
    let wanted = cookie(fd);
    let mut same = conn.cookie.load(Relaxed) == wanted;
    table::for_each(0, u32::MAX, |other, entry| {
        same |= entry == Entry::Conn(index) && cookie(other) == wanted;
    });
    same && wanted != 0
}

/// The kernel's name for the socket, never used again; 0 where it does not tell.
fn cookie(fd: i32) -> u64 {
    let mut cookie = 0u64;
    match sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie) {
        Ok(8) => cookie,
        _ => 0,
    }
}
