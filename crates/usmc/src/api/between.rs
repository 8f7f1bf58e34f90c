//! The calls by which the kernel moves bytes from one descriptor to another.

use core::ffi::{c_int, c_uint};
#[cfg(target_pointer_width = "32")]
use core::ptr;
use libc::{off64_t, size_t, ssize_t};
use usmc_shm::layout::Slot;

use super::bytes::{finish, is_other, unseen};
use super::{fail, is_readable};
use crate::os::table::{self, Entry};
use crate::os::unwind::{cancellation_point, keeping, uncancelled};
use crate::os::{real, sys};
use crate::record::numbers::{self, Hold};
use crate::record::{conn, order};
use crate::socket::early::Early;
use crate::socket::send::{self, Way};
use crate::socket::{Outcome, transfer};
use crate::watch::capture;

/// sendfile(2)
#[cfg(target_pointer_width = "64")]
pub use sendfile64 as sendfile;

/// sendfile(2), which ends where its offset does not hold the file's position any more
#[cfg(target_pointer_width = "32")]
pub unsafe fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut libc::off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the caller's contract, as below.
    unsafe {
        if offset.is_null() {
            return sendfile64(out, from, ptr::null_mut(), count);
        }
        if !is_readable(offset)
            || !matches!(table::settled(out), Entry::Conn(_))
            || !(0..libc::off_t::MAX).contains(&*offset)
        {
            return real::sendfile(out, from, offset, count);
        }
        let mut at = off64_t::from(*offset);
        let most = (libc::off_t::MAX - *offset) as usize;
        let done = sendfile64(out, from, &raw mut at, count.min(most));
        *offset = at as libc::off_t;
        done
    }
}

/// sendfile64(2)
pub unsafe fn sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    let kernel = |out| {
        // SAFETY: the caller's contract.
        unsafe { real::sendfile64(out, from, offset, count) }
    };
    let Entry::Conn(index) = table::settled(out) else {
        let Entry::Conn(index) = table::settled(from) else { return kernel(out) };
        if !offset.is_null() || count == 0 {
            return kernel(out);
        }
        // SAFETY: the caller's contract.
        return uncancelled(|| unsafe {
            to_pipe(from, index, out, count, false, |from| {
                real::sendfile64(out, from, offset, count)
            })
        });
    };
    // Of what has no position (a pipe, another socket) the kernel refuses to send, whatever is there.
    let refused = if offset.is_null() { !sys::is_seekable(from) } else { !is_readable(offset) };
    if refused {
        return kernel(out);
    }
    let kernel = |out| {
        let sent = kernel(out);
        // SAFETY: the caller's contract; null was told apart.
        let position = unsafe { offset.as_ref() }.copied();
        capture::file_sent(out, index, from, position, sent);
        sent
    };
    uncancelled(|| {
        transfer(out, index, count, kernel, |out, index, slot| {
            // SAFETY: the caller's contract.
            unsafe { transfer::sendfile(out, index, slot, from, offset, count) }
        })
    })
}

/// Sends `count` bytes that are not in the application's memory. A call that may wait in the ring keeps the connection,
/// whoever closes the number meanwhile.
fn transfer(
    fd: c_int,
    mut index: u32,
    count: size_t,
    kernel: impl Fn(c_int) -> ssize_t,
    through_ring: impl Fn(c_int, u32, &'static Slot) -> Outcome,
) -> ssize_t {
    let kernel = |fd, index| {
        let sent = kernel(fd);
        order::taken(conn::at(index));
        sent
    };
    let mut hold: Option<Hold> = None;
    loop {
        let fd = hold.as_ref().map_or(fd, |h| h.fd(fd));
        let returns = conn::at(index).returns();
        let done;
        (hold, done) = match send::way(fd, index) {
            Way::Plain if hold.is_none() && is_other(fd, &mut index) => continue,
            Way::Plain => keeping(hold, || unseen(index, returns, &mut || kernel(fd, index))),
            Way::Failed(errno) => (hold, Some(fail(errno))),
            Way::Tcp(guard) => {
                let ((hold, guard), sent) = keeping((hold, guard), || kernel(fd, index));
                (hold, Some(guard.done(fd, index, sent, count)))
            }
            Way::Ring(slot) => {
                let Some(held) = hold.or_else(|| Hold::enter(fd, index)) else {
                    if is_other(fd, &mut index) {
                        hold = None;
                        continue;
                    }
                    return kernel(fd, index);
                };
                let (hold, done) = keeping(held, || {
                    let outcome = through_ring(fd, index, slot);
                    finish(index, returns, outcome, &mut || {
                        kernel(numbers::number(fd, index), index)
                    })
                });
                (Some(hold), done)
            }
        };
        if let Some(n) = done {
            return n;
        }
    }
}

/// From a connection to a pipe; `kernel` is the real call.
fn to_pipe(
    from: c_int,
    mut index: u32,
    to: c_int,
    len: size_t,
    nonblock: bool,
    kernel: impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    let Some(pipe) = sys::pipe_flags(to).filter(|f| f & libc::O_ACCMODE != libc::O_RDONLY) else {
        // The kernel refuses it, and takes nothing.
        return kernel(from);
    };
    let nonblock = nonblock || pipe & libc::O_NONBLOCK != 0;
    cancellation_point();
    let mut hold: Option<Hold> = None;
    loop {
        let from = hold.as_ref().map_or(from, |h| h.fd(from));
        let returns = conn::at(index).returns();
        if let Some(call) = Early::receive(from, index) {
            return keeping((hold, call), || kernel(from)).1;
        }
        let Some(held) = hold.or_else(|| Hold::enter(from, index)) else {
            if is_other(from, &mut index) {
                hold = None;
                continue;
            }
            return kernel(from);
        };
        let (held, done) = keeping(held, || {
            let outcome = transfer::splice_out(from, index, to, len, nonblock);
            finish(index, returns, outcome, &mut || kernel(numbers::number(from, index)))
        });
        if let Some(n) = done {
            return n;
        }
        hold = Some(held);
    }
}

/// splice(2) between a pipe and a socket.
pub unsafe fn splice(
    from: c_int,
    from_off: *mut libc::loff_t,
    to: c_int,
    to_off: *mut libc::loff_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let splice = |from, to| {
        // SAFETY: the caller's contract.
        unsafe { real::splice(from, from_off, to, to_off, len, flags) }
    };
    let kernel = || splice(from, to);
    const FLAGS: c_uint =
        libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
    // Nor does a socket or a pipe have a position.
    if len == 0 || flags & !FLAGS != 0 || !from_off.is_null() || !to_off.is_null() {
        return kernel();
    }
    // Which says nothing about waiting for the socket.
    let nonblock = flags & libc::SPLICE_F_NONBLOCK != 0;
    if let Entry::Conn(index) = table::settled(from) {
        return to_pipe(from, index, to, len, nonblock, |from| splice(from, to));
    }
    let Entry::Conn(index) = table::settled(to) else { return kernel() };
    let Some(pipe) = sys::pipe_flags(from).filter(|f| f & libc::O_ACCMODE != libc::O_WRONLY) else {
        return kernel();
    };
    let nonblock = nonblock || pipe & libc::O_NONBLOCK != 0;
    cancellation_point();
    transfer(
        to,
        index,
        len,
        |to| splice(from, to),
        |to, index, slot| transfer::splice_in(to, index, slot, from, len, nonblock),
    )
}
