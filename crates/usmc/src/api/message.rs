//! What recvmsg(2) tells beside the bytes, where they did not come from the kernel.

use core::mem;
use core::ptr;
use libc::{cmsghdr, msghdr};

use crate::os::table::{self, Entry};
use crate::os::{errno, real, sys};
use crate::record::{conn, kernel};
use crate::socket::option;
use crate::stream::{ending, unread};

/// The message's header as the kernel has it ([`real::length`]).
///
/// # Safety
/// `msg` can be read.
pub unsafe fn read(msg: *const msghdr) -> msghdr {
    // SAFETY: the caller's contract.
    let mut header = unsafe { *msg };
    header.msg_iovlen = real::length(header.msg_iovlen);
    header.msg_controllen = real::length(header.msg_controllen);
    header
}

/// Makes it so in its place, as musl's own recvmsg(3) does.
///
/// # Safety
/// `msg` is the application's, to be received by.
pub unsafe fn clear_padding(msg: *mut msghdr) {
    if real::is_musl() && !super::is_nowhere(msg) {
        // SAFETY: the caller's contract.
        unsafe { *msg = read(msg) };
    }
}

/// Fills what recvmsg(2) with `flags` gives back in `msg`.
///
/// # Safety
/// `msg` is the application's, as the call demands it.
pub unsafe fn received(fd: i32, msg: &mut msghdr, flags: i32) {
    msg.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    if !msg.msg_name.is_null() {
        // TCP names no sender.
        msg.msg_namelen = 0;
    }
    let room = mem::take(&mut msg.msg_controllen);
    let Entry::Conn(index) = table::settled(fd) else { return };
    if option::tells_unread(fd, conn::at(index)) {
        let _errno = errno::keep();
        // SAFETY: the caller's contract.
        unsafe { put(msg, room, libc::IPPROTO_TCP, option::TCP_INQ, left(fd, index)) };
    }
}

/// Bytes left unread; the end of the stream counts as one more (`tcp_inq_hint` in net/ipv4/tcp.c).
fn left(fd: i32, index: u32) -> i32 {
    let conn = conn::at(index);
    let unread = unread::unread(fd, index);
    let (unread, ended) = match (unread, conn.slot()) {
        (Some(n), Some(slot)) => {
            ending::look(fd, conn);
            (n, ending::ending(fd, conn, slot) != ending::Ending::Alive)
        }
        _ => (sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize, kernel::has_fin(fd)),
    };
    i32::try_from(unread + usize::from(ended)).unwrap_or(i32::MAX)
}

/// A control message with an int, cut to its `room` as the kernel does (`put_cmsg`).
///
/// # Safety
/// `msg.msg_control` is writable for `room` bytes, or null.
unsafe fn put(msg: &mut msghdr, room: usize, level: i32, kind: i32, value: i32) {
    // SAFETY: they only compute.
    let (len, space) = unsafe { (libc::CMSG_LEN(4) as usize, libc::CMSG_SPACE(4) as usize) };
    if msg.msg_control.is_null() || room < size_of::<cmsghdr>() {
        msg.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    if room < len {
        msg.msg_flags |= libc::MSG_CTRUNC;
    }
    // SAFETY: all-zero is a valid cmsghdr.
    let mut header: cmsghdr = unsafe { mem::zeroed() };
    header.cmsg_len = len.min(room) as _;
    header.cmsg_level = level;
    header.cmsg_type = kind;
    let bytes = value.to_ne_bytes();
    let fits = bytes.len().min(room - size_of::<cmsghdr>());
    let to = msg.msg_control.cast::<u8>();
    // SAFETY: the caller's contract; the header fits, and `fits` bytes do behind it.
    unsafe {
        ptr::write_unaligned(to.cast::<cmsghdr>(), header);
        to.add(size_of::<cmsghdr>()).copy_from_nonoverlapping(bytes.as_ptr(), fits);
    }
    msg.msg_controllen = space.min(room) as _;
}
