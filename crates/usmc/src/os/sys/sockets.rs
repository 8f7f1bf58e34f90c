//! Sockets and waits on them.

use core::ffi::{c_int, c_long, c_ulong, c_void};

use super::{Errno, check, nr, raw};

/// getsockopt(2) of a plain value; returns how many bytes the kernel filled.
pub fn getsockopt<T>(fd: c_int, level: c_int, name: c_int, value: &mut T) -> Result<usize, Errno> {
    let mut len = size_of::<T>() as u32;
    call!(SYS_getsockopt, fd, level, name, value as *mut T, &raw mut len)?;
    Ok(len as usize)
}

/// setsockopt(2) of a plain value.
pub fn setsockopt<T>(fd: c_int, level: c_int, name: c_int, value: &T) -> Result<(), Errno> {
    call!(SYS_setsockopt, fd, level, name, value as *const T, size_of::<T>()).map(drop)
}

/// getsockname(2).
pub fn getsockname(fd: c_int, addr: &mut libc::sockaddr_storage) -> Result<usize, Errno> {
    let mut len = size_of::<libc::sockaddr_storage>() as u32;
    call!(SYS_getsockname, fd, addr as *mut _, &raw mut len)?;
    Ok(len as usize)
}

/// getpeername(2).
pub fn getpeername(fd: c_int, addr: &mut libc::sockaddr_storage) -> Result<usize, Errno> {
    let mut len = size_of::<libc::sockaddr_storage>() as u32;
    call!(SYS_getpeername, fd, addr as *mut _, &raw mut len)?;
    Ok(len as usize)
}

system_calls! {
    /// getpeername(2) into the application's memory, wherever that is.
    fn give_peer(fd: c_int, addr: *mut libc::sockaddr, len: *mut libc::socklen_t) = SYS_getpeername, fd, addr, len;
    /// send(2) of a few bytes.
    fn send(fd: c_int, buf: &[u8], flags: c_int) -> usize = SYS_sendto, fd, buf.as_ptr(), buf.len(), flags, 0, 0;
    /// shutdown(2).
    fn shutdown(fd: c_int, how: c_int) = SYS_shutdown, fd, how;
    /// socket(2)
    fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int = SYS_socket, family, kind, protocol;
    /// listen(2).
    fn listen(fd: c_int, backlog: c_int) = SYS_listen, fd, backlog;
    /// accept4(2), with SOCK_CLOEXEC and without the peer's name.
    fn accept(fd: c_int) -> c_int = SYS_accept4, fd, 0, 0, libc::SOCK_CLOEXEC;
    /// bind(2).
    ///
    /// # Safety
    /// `addr` is readable for `len` bytes.
    unsafe fn bind(fd: c_int, addr: *const c_void, len: u32) = SYS_bind, fd, addr, len;
    /// bind(2) to a path.
    fn bind_unix(fd: c_int, addr: &libc::sockaddr_un) = SYS_bind, fd, addr as *const _, size_of::<libc::sockaddr_un>();
    /// recv(2) into a raw buffer.
    ///
    /// # Safety
    /// `buf` is writable for `len` bytes.
    unsafe fn recv(fd: c_int, buf: *mut u8, len: usize, flags: c_int) -> usize
        = SYS_recvfrom, fd, buf, len, flags, 0, 0;
    /// send(2) from memory that others may write.
    ///
    /// # Safety
    /// `buf` is readable for `len` bytes.
    unsafe fn send_raw(fd: c_int, buf: *const u8, len: usize, flags: c_int) -> usize
        = SYS_sendto, fd, buf, len, flags, 0, 0;
    /// connect(2).
    ///
    /// # Safety
    /// `addr` is readable for `len` bytes.
    unsafe fn connect(fd: c_int, addr: *const c_void, len: u32) = SYS_connect, fd, addr, len;
    /// sendmsg(2).
    ///
    /// # Safety
    /// `msg` and all it points to is valid.
    unsafe fn sendmsg(fd: c_int, msg: *const libc::msghdr, flags: c_int) -> usize = SYS_sendmsg, fd, msg, flags;
    /// recvmsg(2).
    ///
    /// # Safety
    /// `msg` and all it points to is valid and writable.
    unsafe fn recvmsg(fd: c_int, msg: *mut libc::msghdr, flags: c_int) -> usize = SYS_recvmsg, fd, msg, flags;
}

/// ioctl(2) that stores an int.
pub fn ioctl_int(fd: c_int, request: c_ulong) -> Result<c_int, Errno> {
    let mut v: c_int = 0;
    call!(SYS_ioctl, fd, request, &raw mut v)?;
    Ok(v)
}

/// Takes up to `len` bytes out of a TCP stream without a wait.
pub fn discard(fd: c_int, len: usize) -> Result<usize, Errno> {
    // SAFETY: TCP copies nothing with MSG_TRUNC (tcp(7)), so no buffer is needed.
    unsafe { recv(fd, core::ptr::null_mut(), len, libc::MSG_TRUNC | libc::MSG_DONTWAIT) }
}

/// Resets a connection: connect(2) to AF_UNSPEC.
pub fn disconnect(fd: c_int) {
    let nowhere =
        libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    let _ = call!(SYS_connect, fd, &raw const nowhere, size_of::<libc::sockaddr>());
}

/// poll(2) on one fd.
pub fn poll1(fd: c_int, events: i16, timeout_ms: c_int) -> i16 {
    let mut p = [libc::pollfd { fd, events, revents: 0 }];
    match poll(&mut p, timeout_ms) {
        1 => p[0].revents,
        _ => 0,
    }
}

/// poll(2) on several, without waiting: how many have something to tell.
pub fn poll_now(fds: &mut [libc::pollfd]) -> usize {
    poll(fds, 0)
}

#[inline(always)]
fn poll(fds: &mut [libc::pollfd], timeout_ms: c_int) -> usize {
    let ts = libc::timespec {
        tv_sec: (timeout_ms / 1000) as libc::time_t,
        tv_nsec: (timeout_ms % 1000) as c_long * 1_000_000,
    };
    call!(SYS_ppoll, fds.as_mut_ptr(), fds.len(), &raw const ts, 0, 0).unwrap_or(0)
}

/// Sends a question that holds no pointers, and receives the answer at once: its length in bytes.
pub fn ask<T>(fd: c_int, question: &T, answer: &mut [u32]) -> Result<usize, Errno> {
    // SAFETY: `question` is readable for its size.
    unsafe { send_raw(fd, core::ptr::from_ref(question).cast(), size_of::<T>(), 0) }?;
    // SAFETY: `answer` is writable for its size.
    unsafe { recv(fd, answer.as_mut_ptr().cast(), size_of_val(answer), libc::MSG_DONTWAIT) }
}
