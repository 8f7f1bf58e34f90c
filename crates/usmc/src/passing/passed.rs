//! Descriptors in messages (SCM_RIGHTS). The kernel makes a new number for the same socket, as dup does, only
//! later and maybe in another process, which may be without the library. So what is passed on is TCP, or becomes it.

use core::ffi::{c_int, c_uint};
use core::ptr;
use usmc_shm::sync::Ordering::Relaxed;

use super::{adopt, channel};
use crate::family::{holders, passed_on};
use crate::handshake::transition;
use crate::host::{self, PassedOn, Receiver};
use crate::os::errno::{self, set_errno};
use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::os::table::{self, Entry};
use crate::os::{real, sockopt};
use crate::record::conn::{self, F_ADOPTED};
use crate::record::phase::Phase;
use crate::record::tuple::Tuple;
use crate::record::{kernel, numbers};
use crate::socket::control;
use crate::stream::fallback;

/// Makes the call `send` for a message on a socket that is not TCP.
///
/// # Safety
/// `msg` is null or as sendmsg(2) takes it.
pub unsafe fn sending(
    via: i32,
    msg: *const libc::msghdr,
    send: impl FnOnce() -> libc::ssize_t,
) -> libc::ssize_t {
    // SAFETY: the caller's contract.
    let Some(msg) = (unsafe { msg.as_ref() }).filter(|msg| real::length(msg.msg_controllen) > 0)
    else {
        return send();
    };
    // SAFETY: as above.
    if let Err(code) = unsafe { leaving(via, msg) } {
        set_errno(code);
        return -1;
    }
    let sent = send();
    if sent < 0 {
        // SAFETY: as above.
        unsafe { stayed(via, msg) };
    }
    sent
}

/// The same for sendmmsg(2).
///
/// # Safety
/// `msgs` are `count` messages as sendmmsg(2) takes them.
pub unsafe fn sending_many(
    via: i32,
    msgs: *const libc::mmsghdr,
    count: c_uint,
    send: impl FnOnce(c_uint) -> c_int,
) -> c_int {
    for i in 0..count {
        // SAFETY: the caller's contract.
        match unsafe { leaving(via, &(*msgs.add(i as usize)).msg_hdr) } {
            Ok(()) => {}
            Err(code) if i == 0 => {
                set_errno(code);
                return -1;
            }
            // Those before it.
            Err(_) => return send(i),
        }
    }
    send(count)
}

/// What a message passes on becomes TCP.
///
/// # Safety
/// As sendmsg(2) takes it.
unsafe fn leaving(via: i32, msg: &libc::msghdr) -> Result<(), Errno> {
    if real::length(msg.msg_controllen) == 0 {
        return Ok(());
    }
    let _errno = errno::keep();
    let mut all = Ok(());
    let mut to = None;
    // SAFETY: the caller's contract.
    unsafe {
        each_fd(msg, |fd| {
            if let Entry::Conn(index) = table::settled(fd) {
                let conn = conn::at(index);
                let lasts = matches!(
                    conn.phase(),
                    Phase::Early | Phase::Offered | Phase::Attached | Phase::Ring
                ) || conn.passed_on.load(Relaxed) != 0;
                let left = fallback::leave(fd, index, Reason::PassedOn);
                if conn.phase() == Phase::Fresh {
                    // Other processes that have it would not learn of the connection that it becomes.
                    holders::note_copied(conn);
                }
                if left.is_ok() && lasts {
                    passed_on::hand_over(
                        fd,
                        conn,
                        *to.get_or_insert_with(|| channel::to(via, msg)),
                    );
                }
                all = all.and(left);
            }
        });
    }
    all
}

/// The message was not sent. As over TCP, nobody got anything; the connections are TCP all the same.
///
/// # Safety
/// As sendmsg(2) takes it.
unsafe fn stayed(via: i32, msg: &libc::msghdr) {
    let _errno = errno::keep();
    let mut to = None;
    // SAFETY: the caller's contract.
    unsafe {
        each_fd(msg, |fd| {
            if let Entry::Conn(index) = table::settled(fd)
                && conn::at(index).passed_on.load(Relaxed) != 0
            {
                let to = *to.get_or_insert_with(|| channel::to(via, msg));
                passed_on::take_back(conn::at(index), to, false);
            }
        });
    }
}

/// Makes the call `receive`, which fills in `msg`, on a socket that is not TCP.
///
/// # Safety
/// `msg` is null or as recvmsg(2) takes it.
pub unsafe fn receiving(
    via: i32,
    flags: i32,
    msg: *const libc::msghdr,
    receive: impl FnOnce() -> libc::ssize_t,
) -> libc::ssize_t {
    let done = receive();
    if done >= 0 && !msg.is_null() {
        let _errno = errno::keep();
        // The message is there to be received again, by whomever.
        let peeks = flags & libc::MSG_PEEK != 0;
        // SAFETY: the caller's contract; the kernel wrote the control messages and their lengths.
        unsafe {
            each_fd(&*msg, |fd| {
                let from = [channel::from(via)];
                arrived(fd, if peeks { &[] } else { &from });
            });
        }
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
    let (base, end) = (msg.msg_control.cast::<u8>(), real::length(msg.msg_controllen));
    // SAFETY: it only computes.
    let first = unsafe { libc::CMSG_LEN(0) } as usize;
    let mut at = 0;
    while end - at >= size_of::<libc::cmsghdr>() {
        // SAFETY: a header inside the buffer; the kernel reads it at any address, too.
        let header = unsafe { ptr::read_unaligned(base.add(at).cast::<libc::cmsghdr>()) };
        // As CMSG_NXTHDR(3), which would count the padding in.
        let len = real::length(header.cmsg_len as usize);
        if !(first..=end - at).contains(&len) {
            return;
        }
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            for i in 0..(len - first) / 4 {
                // SAFETY: inside the message, which is inside the buffer.
                act(unsafe { ptr::read_unaligned(base.add(at + first).cast::<i32>().add(i)) });
            }
        }
        at = (at + len.next_multiple_of(align_of::<usize>())).min(end);
    }
}

/// `fd` is a new number of a socket that may be known here under another one.
pub fn arrived(fd: i32, by: &[Receiver]) {
    control::fresh(fd);
    meet(fd, by);
}

/// The same for a number that means nothing yet.
pub fn meet(fd: i32, by: &[Receiver]) {
    let Some(index) = known(fd) else { return adopt::adopt(fd, by) };
    let conn = conn::at(index);
    // This process is counted already.
    let (passed_on, device) = (PassedOn(conn.passed_on.load(Relaxed)), host::current());
    if passed_on.0 != 0 && by.iter().any(|&name| device.call_off(passed_on, name)) {
        device.release(passed_on);
    }
    conn.users.add();
    if !table::set(fd, Entry::Conn(index)) {
        conn.users.leave();
    }
}

/// Whether this process has a record of the connection that `fd` is.
pub fn is_known(fd: i32) -> bool {
    known(fd).is_some()
}

/// The record of the connection that `fd` is, if this process has one that matters.
fn known(fd: i32) -> Option<u32> {
    if sockopt::int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) != libc::IPPROTO_TCP {
        return None;
    }
    let tuple = Tuple::live(fd, true).ok()?;
    let as_client = tuple.words();
    let as_server = Tuple { client: tuple.server, server: tuple.client, ..tuple }.words();
    let mut found = None;
    conn::for_each(|index, conn| {
        let matters = match conn.phase() {
            Phase::Offered | Phase::Early | Phase::Attached | Phase::Ring => true,
            Phase::Plain => conn.has(F_ADOPTED),
            _ => false,
        };
        if found.is_none() && matters {
            let words = transition::stored_tuple(conn);
            // Either end may be known in part only, early on.
            let partly = conn.phase() == Phase::Early
                && [as_client, as_server].iter().any(|own| own[5] as u16 == words[5] as u16);
            let is_named_so = words == as_client || words == as_server;
            if (is_named_so || partly) && is_the_same(fd, index) {
                found = Some(index);
            }
        }
    });
    found
}

/// Whether the record of that name is this very socket, and not one whose number was closed behind our back.
fn is_the_same(fd: i32, index: u32) -> bool {
    let wanted = kernel::cookie(fd);
    let mut same = false;
    numbers::for_each(|other, of, _| same |= of == index && kernel::cookie(other) == wanted);
    same && wanted != 0
}
