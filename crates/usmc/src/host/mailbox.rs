//! Mailboxes: how a segment's memory gets from the client's process into the acceptor's.
//!
//! One UNIX datagram socket per accepting process, named by its index. Bytes in it are hostile: the
//! receiver takes the fd out, and checks seals, size and header before it maps it. The kernel names the sender: what
//! comes without tokens has to come from our own user, and goes to our own user only.

use core::mem;
use core::ptr;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::{directory, ism::Ism};
use crate::host::{Delivery, DmbRef, Mail, PeerProcess};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::unix::{self, Received};
use crate::os::{foreign_fd, owner};

/// Room for the control messages of one fd and of the sender's credentials.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// What goes with a segment: nothing but this byte, where the offer table says the rest.
const PLAIN: [u8; 1] = [1];
/// A [`Delivery`]: so many bytes.
const DELIVERY: usize = size_of::<[u64; 5]>();

/// An ear: the number of its process.
const EAR: usize = size_of::<u32>();

/// How many messages that are none one call discards: their sender must not keep it busy.
const AT_ONCE: usize = 4;

/// The kind of a mailbox, and of what sends into it.
const KIND: i32 = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

fn address(index: u32) -> Option<libc::sockaddr_un> {
    unix::address(directory::mailbox(index).c())
}

/// Opens this process' mailbox if it has none.
///
/// # Errors
/// When the socket cannot be made (rights dropped, path too long).
pub fn ensure(dev: &Ism, me: u32) -> Result<(), Reason> {
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
    // Before a process can send: each message tells its sender.
    if sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32).is_err()
        || sys::bind_unix(fd, &addr).is_err()
    {
        sys::close(fd);
        return Err(Reason::NoSegment);
    }
    directory::share_socket(path.c());
    dev.mailbox.store(crate::os::table::keep_fd(fd), Release);
    Ok(())
}

/// Sends `fd` into the mailbox of process `to`, of this user.
///
/// # Errors
/// The errno; EAGAIN when the mailbox is full, EACCES when it may be another user's.
pub fn push(dev: &Ism, to: PeerProcess, fd: i32) -> Result<(), Errno> {
    send(dev, to, &PLAIN, fd, is_own_file)
}

/// Sends the ear of process `own` into the mailbox of process `to`, of this user.
///
/// # Errors
/// As [`push`].
pub fn push_ear(dev: &Ism, to: PeerProcess, own: PeerProcess, fd: i32) -> Result<(), Errno> {
    send(dev, to, &own.0.to_ne_bytes(), fd, is_own_file)
}

fn is_own_file(file: i32) -> bool {
    sys::fstat(file).is_ok_and(|facts| owner::is_own(facts.uid))
}

impl Ism {
    /// Hands memory over.
    ///
    /// # Errors
    /// The errno; EAGAIN means try again later.
    pub fn deliver(&self, to: PeerProcess, mailbox: u64, what: &Delivery) -> Result<(), Errno> {
        let dmb = what.dmb;
        let place = u64::from(dmb.slot) << 32 | u64::from(dmb.usage);
        let words = [dmb.segment, place, what.to, what.from, 0];
        let mut bytes = [0; DELIVERY];
        for (part, word) in bytes.chunks_exact_mut(8).zip(words) {
            part.copy_from_slice(&word.to_ne_bytes());
        }
        send(self, to, &bytes, what.fd, |file| {
            directory::is_trustworthy(file) && inode(file) == Some(mailbox)
        })
    }
}

/// Which file the mailbox of a process is now. The next process in a dead one's place has another.
pub fn identity(process: PeerProcess) -> Option<u64> {
    let mailbox = directory::point_at(&directory::mailbox(process.0)).ok()?;
    let inode = inode(mailbox);
    sys::close(mailbox);
    inode
}

/// Whether the mailbox of a process belongs to our own user.
pub fn is_own(process: PeerProcess) -> bool {
    let Ok(mailbox) = directory::point_at(&directory::mailbox(process.0)) else { return false };
    let is_own = is_own_file(mailbox);
    sys::close(mailbox);
    is_own
}

fn inode(file: i32) -> Option<u64> {
    Some(sys::fstat(file).ok()?.inode)
}

fn send(
    dev: &Ism,
    to: PeerProcess,
    bytes: &[u8],
    fd: i32,
    may_have_it: impl Fn(i32) -> bool,
) -> Result<(), Errno> {
    let file = dev.file().map_err(|_| libc::ENODEV)?;
    let process = file.processes.get(to.0 as usize).ok_or(libc::EPROTO)?;
    // The checked process has to be the one that gets it.
    let mailbox = directory::point_at(&directory::mailbox(to.0))?;
    let sent = match may_have_it(mailbox) {
        true => send_to(mailbox, bytes, fd),
        false => Err(libc::EACCES),
    };
    sys::close(mailbox);
    sent?;
    process.mail.fetch_add(1, AcqRel);
    Ok(())
}

fn send_to(mailbox: i32, bytes: &[u8], fd: i32) -> Result<(), Errno> {
    let mut addr = unix::address(directory::link_to(mailbox).c()).ok_or(libc::ENAMETOOLONG)?;
    let socket = sys::socket(libc::AF_UNIX, KIND, 0)?;
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
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
    sent.map(drop)
}

impl Ism {
    /// What was sent to this process next.
    pub fn receive(&self) -> Option<Mail> {
        let mailbox = self.mailbox.load(Acquire);
        let index = self.index.load(Relaxed);
        if mailbox < 0 {
            return None;
        }
        let mail = self.file().ok()?.processes.get(index as usize)?.mail.load(Acquire);
        if mail == self.mail_seen.load(Relaxed) {
            return None;
        }
        for _ in 0..AT_ONCE {
            if !foreign_fd::are_welcome() {
                return None;
            }
            let mut bytes = [0u8; DELIVERY + 1];
            let Ok(Received { len, fd, uid }) = unix::receive(mailbox, &mut bytes) else {
                // Empty although counted: a hostile counter, or somebody else of us took it.
                self.mail_seen.store(mail, Relaxed);
                return None;
            };
            let Some(fd) = fd else { continue };
            match read(&bytes[..len], fd, uid) {
                Some(mail) => return Some(mail),
                None => foreign_fd::discard(fd),
            }
        }
        None
    }
}

/// What a message with this segment says, sent by this user.
fn read(bytes: &[u8], fd: i32, uid: Option<u32>) -> Option<Mail> {
    if bytes == PLAIN {
        // The offer table, where it belongs, can be written by every process that shares the device.
        return uid.is_some_and(owner::is_own).then_some(Mail::Segment(fd));
    }
    if bytes.len() == EAR {
        let process = PeerProcess(u32::from_ne_bytes(bytes.try_into().ok()?));
        return uid.is_some_and(owner::is_own).then_some(Mail::Ear(process, fd));
    }
    if bytes.len() != DELIVERY {
        return None;
    }
    let mut words = [0u64; DELIVERY / 8];
    for (word, part) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(part.try_into().ok()?);
    }
    let [segment, place, to, from, _] = words;
    let dmb = DmbRef { segment, slot: (place >> 32) as u32, usage: place as u32 };
    let is_own_user = uid.is_some_and(owner::is_own);
    Some(Mail::Delivery(Delivery { fd, dmb, to, from, is_own_user }))
}
