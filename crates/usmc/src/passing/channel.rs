//! UNIX sockets by their inode numbers, which name both ends of a channel to both of them.

use core::mem::{offset_of, size_of};

use crate::host::Receiver;
use crate::os::sys;

/// What receives on `via`.
pub fn from(via: i32) -> Receiver {
    match sys::fstat(via) {
        Ok(facts) if facts.mode & libc::S_IFMT == libc::S_IFSOCK => Receiver::Channel(facts.inode),
        _ => Receiver::Unknown,
    }
}

/// What receives `msg`, sent on `via`: whom it is addressed to, or the socket that `via` is connected to.
///
/// # Safety
/// As sendmsg(2) takes it.
pub unsafe fn to(via: i32, msg: &libc::msghdr) -> Receiver {
    if msg.msg_name.is_null() || msg.msg_namelen == 0 {
        return peer(via);
    }
    // Of connected sockets the kernel tells the peer, so one of ours is connected there for a moment: for datagrams that
    // is nothing but a choice of the address, made as sendmsg(2) makes it.
    let Ok(probe) = sys::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) else {
        return Receiver::Unknown;
    };
    // SAFETY: the caller's contract.
    let found = match unsafe { sys::connect(probe, msg.msg_name, msg.msg_namelen) } {
        Ok(()) => peer(probe),
        Err(_) => Receiver::Unknown,
    };
    sys::close(probe);
    found
}

/// What `via` is connected to.
fn peer(via: i32) -> Receiver {
    let Receiver::Channel(own) = from(via) else { return Receiver::Unknown };
    let peer = u32::try_from(own).ok().and_then(peer_of);
    peer.map_or(Receiver::Unknown, |peer| Receiver::Channel(peer.into()))
}

/// linux/unix_diag.h, sock_diag(7): a question about one socket.
#[repr(C)]
struct Question {
    len: u32,
    kind: u16,
    flags: u16,
    seq: u32,
    port: u32,
    family: u8,
    protocol: u8,
    pad: u16,
    states: u32,
    inode: u32,
    show: u32,
    cookie: [u32; 2],
}

/// The answer: the socket, and the one attribute that was asked for.
#[repr(C)]
struct Answer {
    len: u32,
    kind: u16,
    flags: u16,
    seq: u32,
    port: u32,
    family: u8,
    _kind: [u8; 3],
    inode: u32,
    cookie: [u32; 2],
    attribute_len: u16,
    attribute: u16,
    peer: u32,
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NETLINK_SOCK_DIAG: i32 = 4;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;

fn peer_of(inode: u32) -> Option<u32> {
    let netlink =
        sys::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
            .ok()?;
    let question = Question {
        len: size_of::<Question>() as u32,
        kind: SOCK_DIAG_BY_FAMILY,
        flags: libc::NLM_F_REQUEST as u16,
        seq: 1,
        port: 0,
        family: libc::AF_UNIX as u8,
        protocol: 0,
        pad: 0,
        states: u32::MAX,
        inode,
        show: UDIAG_SHOW_PEER,
        cookie: [u32::MAX; 2],
    };
    // Larger than any answer.
    let mut answer = [0u32; 64];
    let got = sys::ask(netlink, &question, &mut answer);
    sys::close(netlink);
    let word = |at: usize| answer[at / 4];
    let attribute = word(offset_of!(Answer, attribute_len));
    let expected = (size_of::<u32>() as u32 + 4) | u32::from(UNIX_DIAG_PEER) << 16;
    let is_it = got.is_ok_and(|n| n >= size_of::<Answer>())
        && word(offset_of!(Answer, kind)) & 0xffff == SOCK_DIAG_BY_FAMILY.into()
        && word(offset_of!(Answer, inode)) == inode
        && attribute == expected;
    is_it.then(|| word(offset_of!(Answer, peer)))
}
