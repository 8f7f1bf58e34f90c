//! The calls that make, connect, configure and end sockets.

use core::ffi::{c_int, c_void};
use core::{mem, ptr};
use libc::{sockaddr, sockaddr_storage, socklen_t};

use super::fds::fresh_pair;
use super::{after, apart, fail, is_near, is_nowhere, is_readable};
use crate::handshake::syn_option;
use crate::os::errno::{self, errno};
use crate::os::table::{self, Entry};
use crate::os::{real, sys};
use crate::record::conn;
use crate::record::phase::Phase;
use crate::record::tuple::Endpoint;
use crate::socket::connect::Registration;
use crate::socket::fast_open::{self, Opening, Opens};
use crate::socket::option::{self, Verdict};
use crate::socket::{
    accept as accepting, close as closing, connect as connecting, control, early, made, smc,
    unanswered,
};
use crate::stream::ending;
use crate::watch::observer;

/// socket(2)
pub unsafe fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let request = match smc::requested(family, kind, protocol) {
        Ok(request) => request,
        Err(code) => return fail(code),
    };
    let smc::Request { family, protocol, .. } = request;
    let (fd, is_tcp) = if connecting::is_tcp(family, kind, protocol) {
        made::tcp(family, kind, protocol)
    } else {
        // SAFETY: no pointers.
        (unsafe { real::socket(family, kind, protocol) }, false)
    };
    after(fd, |&fd| {
        control::fresh(fd);
        if fd >= 0 && is_tcp {
            smc::created(fd, &request);
            connecting::made(fd, kind);
        }
    })
}

/// socketpair(2)
pub unsafe fn socketpair(family: c_int, kind: c_int, protocol: c_int, out: *mut c_int) -> c_int {
    let smc::Request { family, protocol, .. } = match smc::requested(family, kind, protocol) {
        Ok(request) => request,
        Err(code) => return fail(code),
    };
    // SAFETY: the caller's contract.
    unsafe { fresh_pair(out, real::socketpair(family, kind, protocol, out)) }
}

/// The address in the caller's memory, if it is one of TCP's.
unsafe fn endpoint(addr: *const sockaddr, len: socklen_t) -> Option<Endpoint> {
    // SAFETY: all-zero is valid.
    let mut storage: sockaddr_storage = unsafe { mem::zeroed() };
    let n = (len as usize).min(size_of::<sockaddr_storage>());
    if is_nowhere(addr) || n < 2 {
        return None;
    }
    // SAFETY: readable for `len` bytes (the kernel has read it already); storage is large enough.
    unsafe { (&raw mut storage).cast::<u8>().copy_from_nonoverlapping(addr.cast(), n) };
    Endpoint::from_sockaddr(&storage, n)
}

/// Whether the address is of the family AF_UNSPEC, which disconnects.
unsafe fn is_unspecified(addr: *const sockaddr, len: socklen_t) -> bool {
    // Of any other length the kernel looks at nothing.
    const LENGTHS: core::ops::RangeInclusive<usize> =
        size_of::<libc::sa_family_t>()..=size_of::<libc::sockaddr_storage>();
    if is_nowhere(addr) || !LENGTHS.contains(&(len as usize)) {
        return false;
    }
    // SAFETY: readable for `len` bytes, if the caller keeps its contract.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    i32::from(family) == libc::AF_UNSPEC
}

/// connect(2)
pub unsafe fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    if let Entry::Conn(index) = table::settled(fd)
        && connecting::is_connected(index)
        // SAFETY: the caller's address of `len` bytes.
        && unsafe { is_unspecified(addr, len) }
    {
        if connecting::is_interrupted(index) {
            return fail(libc::EAGAIN);
        }
        apart(|| connecting::disconnecting(fd, index));
        // SAFETY: the caller's contract.
        return after(unsafe { real::connect(fd, addr, len) }, |_| {
            connecting::disconnected(fd, index)
        });
    }
    if let Entry::Conn(index) = table::settled(fd) {
        // SAFETY: the caller's address of `len` bytes.
        apart(|| syn_option::connecting(fd, index, || unsafe { endpoint(addr, len) }));
    }
    let opening = match table::settled(fd) {
        Entry::Conn(index) => {
            // SAFETY: the caller's address of `len` bytes.
            apart(|| fast_open::connecting(fd, index, || unsafe { endpoint(addr, len) }))
        }
        _ => Opening::default(),
    };
    // SAFETY: the caller's contract.
    let mut done = unsafe { real::connect(fd, addr, len) };
    let opened = match apart(|| opening.connected(fd, done == 0)) {
        Opens::Done(opened) => opened,
        Opens::Again(opened) => {
            // SAFETY: the caller's contract.
            done = unsafe { real::connect(fd, addr, len) };
            if done != 0 && errno() == libc::EALREADY {
                // As the first connect(2) of a socket says it.
                done = fail(libc::EINPROGRESS);
            }
            opened
        }
        Opens::Fail(errno) => return fail(errno),
    };
    let Entry::Conn(index) = table::settled(fd) else { return done };
    after(done, |&done| {
        let result = if done == 0 { 0 } else { errno() };
        // SAFETY: the caller's contract.
        let server = unsafe { endpoint(addr, len) };
        connecting::connected(fd, index, server, result, opened);
    })
}

/// listen(2)
pub unsafe fn listen(fd: c_int, backlog: c_int) -> c_int {
    let registration = match table::settled(fd) {
        Entry::Conn(index) => apart(|| connecting::about_to_listen(fd, index)),
        _ => Registration::default(),
    };
    // SAFETY: no pointers.
    after(unsafe { real::listen(fd, backlog) }, |&done| match table::settled(fd) {
        Entry::Conn(index) if done == 0 => connecting::listening(fd, index, registration),
        _ => connecting::not_listening(registration),
    })
}

calls! {
    /// accept(2). The same system call, for a filter may know no other.
    accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int
        |kernel(addr, len)| accept_by(fd, addr, len, 0, kernel);
    /// accept4(2)
    accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int
        |kernel(addr, len)| accept_by(fd, addr, len, flags, kernel);
}

/// # Safety
/// As accept4(2); `real` does that for any address.
unsafe fn accept_by(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
    real: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int,
) -> c_int {
    let Entry::Conn(listener) = table::settled(fd) else {
        return after(real(addr, len), |&fd| control::fresh(fd));
    };
    if conn::at(listener).phase() == Phase::Listen {
        observer::inherited(fd, listener);
    }
    if let Err(code) = unanswered::answer(fd) {
        return fail(code);
    }
    if let Err(code) = early::stay_awake(fd, conn::at(listener)) {
        return fail(code);
    }
    // SAFETY: all-zero is valid.
    let mut peer: sockaddr_storage = unsafe { mem::zeroed() };
    let mut peer_len = size_of::<sockaddr_storage>() as socklen_t;
    // Our own buffers; the application's are filled below as the kernel would.
    let new = real((&raw mut peer).cast(), &raw mut peer_len);
    if new < 0 {
        return new;
    }
    let accept = || {
        let give_name = || {
            // SAFETY: the caller's contract.
            unsafe { name((addr, len), &peer, peer_len, new) }
        };
        if !addr.is_null()
            && let Err(code) = give_name()
        {
            // The kernel has no number for it by then.
            sys::close(new);
            return Err(code);
        }
        control::fresh(new);
        if conn::at(listener).phase() == Phase::Fresh {
            // Another process made it listen.
            connecting::listening(fd, listener, Registration::default());
        }
        if conn::at(listener).phase() == Phase::Listen || conn::at(listener).phase() == Phase::Plain
        {
            accepting::accepted(listener, new, flags, &peer, peer_len as usize);
        }
        Ok(new)
    };
    apart(accept).unwrap_or_else(fail)
}

/// Gives the name of the other end of `new`, cut to the application's room, as the kernel does (`move_addr_to_user` in
/// net/socket.c).
///
/// # Safety
/// As accept(2); pointers that lead nowhere are refused.
unsafe fn name(
    (addr, len): (*mut sockaddr, *mut socklen_t),
    peer: &sockaddr_storage,
    peer_len: socklen_t,
    new: c_int,
) -> Result<(), c_int> {
    if !is_near(addr) || !is_near(len) {
        match sys::give_peer(new, addr, len) {
            // It was reset: the kernel has told the name all the same.
            Err(libc::ENOTCONN) if is_readable(addr) && is_readable(len) => {}
            Err(libc::ENOTCONN) => return Err(libc::EFAULT),
            done => return done,
        }
    }
    // SAFETY: both lead somewhere, and `addr` is writable for `*len` bytes.
    unsafe {
        let room = usize::try_from(*len as c_int).map_err(|_| libc::EINVAL)?;
        let n = room.min(peer_len as usize);
        addr.cast::<u8>().copy_from_nonoverlapping(ptr::from_ref(peer).cast(), n);
        *len = peer_len;
    }
    Ok(())
}

/// shutdown(2)
pub unsafe fn shutdown(fd: c_int, how: c_int) -> c_int {
    let Entry::Conn(index) = table::settled(fd) else {
        // SAFETY: no pointers.
        return unsafe { real::shutdown(fd, how) };
    };
    if closing::shuts_down_later(index, how) {
        return 0;
    }
    let before = apart(|| closing::shutting_down(fd, index, how));
    // SAFETY: no pointers.
    after(unsafe { real::shutdown(fd, how) }, |&done| match done {
        0 => closing::shut_down(fd, index),
        _ => closing::not_shut_down(index, before),
    })
}

/// getsockopt(2)
pub unsafe fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if level == smc::SOL_SMC {
        match smc::get(fd, name) {
            Verdict::Kernel => {}
            // SAFETY: the caller's contract.
            Verdict::Value(own) => return unsafe { give(own, value, len) },
            Verdict::Fail(code) => return fail(code),
        }
    }
    // Reads what was received.
    if (level, name) == (libc::IPPROTO_TCP, option::TCP_ZEROCOPY_RECEIVE)
        && let Entry::Conn(index) = table::settled(fd)
        && let Err(code) = apart(|| option::leave_to_kernel(fd, index))
    {
        return fail(code);
    }
    // SAFETY: the caller's contract.
    let done = unsafe { real::getsockopt(fd, level, name, value, len) };
    if done != 0 {
        return done;
    }
    let verdict = match table::settled(fd) {
        _ if smc::is_name(level, name) => smc::named(fd, name),
        Entry::Conn(index) if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) => {
            let _errno = errno::keep();
            // SAFETY: the kernel filled `*len` bytes of `value`.
            let told = unsafe { int_of(value, *len) };
            let error = ending::so_error(fd, index, told);
            syn_option::looked(fd, index);
            Verdict::Value(error)
        }
        Entry::Conn(index) => option::get(index, level, name),
        _ => Verdict::Kernel,
    };
    if let Verdict::Value(own) = verdict {
        // SAFETY: the kernel filled `*len` bytes of `value`, at most an int for these options.
        unsafe {
            let n = (*len as usize).min(4);
            value.cast::<u8>().copy_from_nonoverlapping((&raw const own).cast(), n);
        }
    }
    done
}

/// An int option that the kernel does not have, given as the kernel gives one.
///
/// # Safety
/// As getsockopt(2).
unsafe fn give(own: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
    if is_nowhere(len) {
        return fail(libc::EFAULT);
    }
    // SAFETY: the caller's contract.
    let room = unsafe { *len } as c_int;
    let Ok(room) = usize::try_from(room) else { return fail(libc::EINVAL) };
    let n = room.min(size_of::<c_int>());
    if n > 0 && is_nowhere(value) {
        return fail(libc::EFAULT);
    }
    // SAFETY: writable for `*len` bytes.
    unsafe {
        *len = n as socklen_t;
        value.cast::<u8>().copy_from_nonoverlapping((&raw const own).cast(), n);
    }
    0
}

/// The int in the first `len` bytes at `value`, as the kernel cuts it.
unsafe fn int_of(value: *const c_void, len: socklen_t) -> c_int {
    let mut int = [0u8; 4];
    let n = (len as usize).min(int.len());
    // SAFETY: the caller's contract; `int` holds n bytes.
    unsafe { int.as_mut_ptr().copy_from_nonoverlapping(value.cast(), n) };
    c_int::from_ne_bytes(int)
}

/// setsockopt(2)
pub unsafe fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's contract.
    let kernel = || unsafe { real::setsockopt(fd, level, name, value, len) };
    if level == smc::SOL_SMC {
        let given = || match len as c_int {
            ..4 => Err(libc::EINVAL),
            _ if !is_readable(value) => Err(libc::EFAULT),
            // SAFETY: readable for `len` ≥ 4 bytes.
            _ => Ok(unsafe { value.cast::<c_int>().read_unaligned() }),
        };
        match smc::set(fd, name, given) {
            Verdict::Kernel => {}
            Verdict::Value(_) => return 0,
            Verdict::Fail(code) => return fail(code),
        }
    }
    let Entry::Conn(index) = table::settled(fd) else { return kernel() };
    let is_protocol = (level, name) == (libc::IPPROTO_TCP, option::TCP_ULP);
    if !is_readable(value) || ((len as usize) < 4 && !is_protocol) {
        return kernel();
    }
    // SAFETY: readable for `len` bytes.
    if is_protocol && unsafe { !option::has_protocol(value, len) } {
        return kernel();
    }
    // SAFETY: readable for `len` bytes.
    let int = unsafe { int_of(value, len) };
    match apart(|| option::set(fd, index, level, name, int)) {
        Verdict::Kernel => {
            let done = kernel();
            if done == 0 {
                option::was_set(fd, index, level, name);
            }
            done
        }
        Verdict::Value(_) => 0,
        Verdict::Fail(code) => fail::<i32>(code),
    }
}
