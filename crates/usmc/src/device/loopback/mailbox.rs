//! Mailboxes: how a segment's memory gets from the client's process into the acceptor's.
//!
//! One UNIX datagram socket per accepting process, named by its index. Bytes in it are hostile: the
//! receiver takes the fd out, and whoever maps it checks seals, size and header.

use core::mem;
use core::ptr;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::{Loopback, directory};
use crate::device::PeerProcess;
use crate::reason::Reason;
use crate::strangers;
use crate::sys::{self, Errno};

/// Room for the control message of one fd.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// The kind of a mailbox, and of what sends into it.
const KIND: i32 = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

fn address(index: u32) -> Option<libc::sockaddr_un> {
    let path = directory::mailbox(index);
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut addr: libc::sockaddr_un = unsafe { mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.c().to_bytes();
    if bytes.is_empty() || bytes.len() >= addr.sun_path.len() {
        return None;
    }
    for (place, byte) in addr.sun_path.iter_mut().zip(bytes) {
        *place = *byte as libc::c_char;
    }
    Some(addr)
}

/// Opens this process' mailbox if it has none.
///
/// # Errors
/// When the socket cannot be made (rights dropped, path too long).
pub fn ensure(dev: &Loopback, me: u32) -> Result<(), Reason> {
    if dev.mailbox.load(Acquire) >= 0 {
        return Ok(());
    }
    let _held = dev.lock.enter().ok_or(Reason::NoSegment)?;
    if dev.mailbox.load(Acquire) >= 0 {
        return Ok(());
    }
    let addr = address(me).ok_or(Reason::NoSegment)?;
    let fd = sys::socket(libc::AF_UNIX, KIND, 0).map_err(|_| Reason::NoSegment)?;
    // The index is ours, so an existing name is a dead owner's.
    let path = directory::mailbox(me);
    let _ = sys::unlink(path.c());
    if sys::bind_unix(fd, &addr).is_err() {
        sys::close(fd);
        return Err(Reason::NoSegment);
    }
    directory::share_socket(path.c());
    dev.mailbox.store(crate::table::keep_fd(fd), Release);
    Ok(())
}

/// Sends `fd` into the mailbox of process `to`.
///
/// # Errors
/// The errno; EAGAIN when the mailbox is full.
pub fn push(dev: &Loopback, to: PeerProcess, fd: i32) -> Result<(), Errno> {
    let file = dev.file().map_err(|_| libc::ENODEV)?;
    let process = file.processes.get(to.0 as usize).ok_or(libc::EPROTO)?;
    let mut addr = address(to.0).ok_or(libc::ENAMETOOLONG)?;
    let socket = sys::socket(libc::AF_UNIX, KIND, 0)?;
    let mut byte = [1u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 64]);
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { mem::zeroed() };
    msg.msg_name = (&raw mut addr).cast();
    msg.msg_namelen = size_of::<libc::sockaddr_un>() as u32;
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: CMSG_* only compute; the control buffer is larger than one fd's message and aligned.
    let sent = unsafe {
        msg.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        ptr::write_unaligned(libc::CMSG_DATA(header).cast::<i32>(), fd);
        sys::sendmsg(socket, &msg, libc::MSG_NOSIGNAL)
    };
    sys::close(socket);
    sent?;
    process.mail.fetch_add(1, AcqRel);
    Ok(())
}

/// The next fd in the mailbox. Costs one load while the counter says that nothing came.
pub fn receive(dev: &Loopback) -> Option<i32> {
    let mailbox = dev.mailbox.load(Acquire);
    let index = dev.index.load(Relaxed);
    if mailbox < 0 || !strangers::are_welcome() {
        return None;
    }
    let mail = dev.file().ok()?.processes.get(index as usize)?.mail.load(Acquire);
    if mail == dev.mail_seen.load(Relaxed) {
        return None;
    }
    let mut byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 64]);
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { mem::zeroed() };
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    msg.msg_controllen = control.0.len();
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: msg points to live buffers of the stated sizes.
    if unsafe { sys::recvmsg(mailbox, &mut msg, flags) }.is_err() {
        // Empty although counted: a hostile counter, or somebody else of us took it.
        dev.mail_seen.store(mail, Relaxed);
        return None;
    }
    take_fd(&msg)
}

/// The first fd of a received control message; discards any further ones.
fn take_fd(msg: &libc::msghdr) -> Option<i32> {
    let mut first = None;
    // SAFETY: the kernel wrote the control messages and their lengths into our buffer.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(msg);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / 4;
                for i in 0..count {
                    let fd = ptr::read_unaligned(libc::CMSG_DATA(header).cast::<i32>().add(i));
                    if first.is_none() {
                        first = Some(fd);
                    } else {
                        strangers::discard(fd);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(msg, header);
        }
    }
    first
}
