//! UNIX sockets: addresses, and messages with descriptors from anybody.

use core::ffi::CStr;
use core::{mem, ptr};

use crate::os::foreign_fd;
use crate::os::sys::{self, Errno};

/// Room for the control messages that anybody may send: as many descriptors as one message can have (SCM_MAX_FD, 253), and the sender's
/// credentials. The kernel itself would close those that find no room, and wait where one of them lingers.
#[repr(C, align(8))]
struct Control([u8; 1088]);

// SAFETY: it only computes.
const _: () = assert!(
    size_of::<Control>()
        >= unsafe { libc::CMSG_SPACE(253 * 4) + libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) }
            as usize
);

/// The address of a path. `None` where it is empty or too long (unix(7)).
pub fn address(path: &CStr) -> Option<libc::sockaddr_un> {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut addr: libc::sockaddr_un = unsafe { mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.to_bytes();
    if bytes.is_empty() || bytes.len() >= addr.sun_path.len() {
        return None;
    }
    for (place, byte) in addr.sun_path.iter_mut().zip(bytes) {
        *place = *byte as libc::c_char;
    }
    Some(addr)
}

/// A message.
pub struct Received {
    /// Bytes of it that were stored.
    pub len: usize,
    /// Its first descriptor; the others are discarded.
    pub fd: Option<i32>,
    /// Its sender's user, where the socket asks for that (SO_PASSCRED).
    pub uid: Option<u32>,
}

/// Takes the next message, without a wait.
///
/// # Errors
/// recvmsg(2)'s.
pub fn receive(socket: i32, bytes: &mut [u8]) -> Result<Received, Errno> {
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 1088]);
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { mem::zeroed() };
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    msg.msg_controllen = control.0.len();
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: msg points to live buffers of the stated sizes.
    let len = unsafe { sys::recvmsg(socket, &mut msg, flags) }?;
    let (fd, uid) = take_control(&msg);
    Ok(Received { len: len.min(bytes.len()), fd, uid })
}

/// Most descriptors of a message that [`send`] sends.
const MOST: usize = 2;

/// Sends a message with at most two descriptors, without a wait and without a signal.
///
/// # Errors
/// sendmsg(2)'s.
pub fn send(socket: i32, bytes: &[u8], fds: &[i32]) -> Result<(), Errno> {
    // SAFETY: it only computes.
    const ROOM: usize = unsafe { libc::CMSG_SPACE((MOST * size_of::<i32>()) as u32) } as usize;
    #[repr(C, align(8))]
    struct Control([u8; ROOM]);
    let bytes_of_fds = size_of_val(fds.get(..MOST).unwrap_or(fds)) as u32;
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; ROOM]);
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { mem::zeroed() };
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: the room is that of so many descriptors; `fds` has them.
    let sent = unsafe {
        msg.msg_controllen = libc::CMSG_SPACE(bytes_of_fds) as _;
        let header = libc::CMSG_FIRSTHDR(&msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes_of_fds) as _;
        let to = libc::CMSG_DATA(header);
        ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), to, bytes_of_fds as usize);
        sys::sendmsg(socket, &raw const msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    sent.map(drop)
}

/// The first fd of the received control messages, and the sender's user; discards any further fds.
fn take_control(msg: &libc::msghdr) -> (Option<i32>, Option<u32>) {
    let (mut first, mut uid) = (None, None);
    // SAFETY: the kernel wrote the control messages and their lengths into our buffer.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(msg);
        while !header.is_null() {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            if kind == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
                let sender = ptr::read_unaligned(libc::CMSG_DATA(header).cast::<libc::ucred>());
                uid = Some(sender.uid);
            }
            if kind == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / 4;
                for i in 0..count {
                    let fd = ptr::read_unaligned(libc::CMSG_DATA(header).cast::<i32>().add(i));
                    if first.is_none() {
                        first = Some(fd);
                    } else {
                        foreign_fd::discard(fd);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(msg, header);
        }
    }
    (first, uid)
}
