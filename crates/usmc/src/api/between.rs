//! The calls by which the kernel moves bytes from one descriptor to another.

use core::ffi::{c_int, c_uint};
use core::ptr;
use libc::{off64_t, size_t, ssize_t};

use super::bytes::{receive_by, send_by};
use super::is_readable;
use crate::os::table::{self, Entry};
use crate::os::unwind::{cancellation_point, uncancelled};
use crate::os::{real, sys};
use crate::socket::transfer;
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
        send_by(
            (out, index),
            ptr::null(),
            count,
            || kernel(out),
            |index, slot| {
                // SAFETY: the caller's contract.
                unsafe {
                    transfer::sendfile(out, index, slot, from, offset, count, &mut |out| {
                        kernel(out)
                    })
                }
            },
        )
    })
}

/// From a connection to a pipe; `kernel` is the real call.
fn to_pipe(
    from: c_int,
    index: u32,
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
    receive_by(
        (from, index),
        !nonblock,
        || kernel(from),
        |got, _| got,
        |index| transfer::splice_out(from, index, to, len, nonblock, &mut |from| kernel(from)),
    )
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
    send_by(
        (to, index),
        ptr::null(),
        len,
        || splice(from, to),
        |index, slot| {
            let mut kernel = |to| splice(from, to);
            transfer::splice_in(to, index, slot, from, len, nonblock, &mut kernel)
        },
    )
}
