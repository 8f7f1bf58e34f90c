//! Questions to the kernel about one TCP socket: byte counts and pending state.

use core::mem::{self, offset_of};
use usmc_shm::layout::Slot;
use usmc_shm::state::Tx;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::os::{sockopt, sys};
use crate::record::conn::Conn;

/// The first fields of `struct tcp_info` (linux/tcp.h) up to the byte counters.
#[repr(C)]
struct TcpInfo {
    state: u8,
    _bytes: [u8; 7],
    _words: [u32; 24],
    _pacing: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
    _segments: [u32; 2],
    notsent_bytes: u32,
    _more: [u32; 13],
    /// Since Linux 4.19.
    bytes_sent: u64,
}

const _: () = assert!(offset_of!(TcpInfo, bytes_acked) == 120);
const _: () = assert!(offset_of!(TcpInfo, notsent_bytes) == 144);
const _: () = assert!(offset_of!(TcpInfo, bytes_sent) == 200);

const TCP_ESTABLISHED: u8 = 1;
const TCP_SYN_SENT: u8 = 2;
const TCP_SYN_RECV: u8 = 3;
const TCP_CLOSE_WAIT: u8 = 8;
const TCP_LAST_ACK: u8 = 9;
const TCP_CLOSING: u8 = 11;
const TCP_TIME_WAIT: u8 = 6;
const TCP_CLOSE: u8 = 7;

impl TcpInfo {
    /// Whether the peer's FIN has come, of a connection that was not reset.
    fn has_fin(&self) -> bool {
        matches!(self.state, TCP_CLOSE_WAIT | TCP_LAST_ACK | TCP_CLOSING | TCP_TIME_WAIT)
    }
}

fn tcp_info(fd: i32) -> Option<TcpInfo> {
    // SAFETY: integers only.
    let mut info: TcpInfo = unsafe { core::mem::zeroed() };
    let got = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()?;
    // Older kernels know fewer of them.
    (got >= offset_of!(TcpInfo, _segments)).then_some(info)
}

/// Bytes that have ever come, a FIN included.
pub fn tcp_received(fd: i32) -> Option<u64> {
    Some(tcp_info(fd)?.bytes_received)
}

/// Bytes ever handed to this socket's TCP, acknowledged or not. The caller keeps everybody from sending.
///
/// `client`: a connecting end's `bytes_acked` counts its SYN, an accepting end's does not
/// (tcp_rcv_synsent_state_process against tcp_check_req; `tests` below watches it).
pub fn tcp_sent(fd: i32, client: bool) -> Option<u64> {
    for _ in 0..1000 {
        let before = sys::ioctl_int(fd, libc::TIOCOUTQ).ok()?;
        let info = tcp_info(fd)?;
        let after = sys::ioctl_int(fd, libc::TIOCOUTQ).ok()?;
        if info.state == TCP_SYN_RECV {
            // Accepted by Fast Open: the kernel does not count what is queued yet (`tcp_ioctl`).
            return Some(info.bytes_sent + u64::from(info.notsent_bytes));
        }
        if matches!(info.state, TCP_SYN_SENT | TCP_CLOSE) {
            return None;
        }
        // An ACK between the two questions would be counted on neither or both sides.
        if before == after {
            let syn = u64::from(client);
            return Some((info.bytes_acked + after as u64).saturating_sub(syn));
        }
    }
    None
}

/// Whether two sockets' byte counts can be those of one connection's ends.
pub fn may_be_joined(one: i32, other: i32) -> bool {
    // SYN and FIN are counted on some ends only.
    const FLAGS: u64 = 2;
    [(one, other), (other, one)].into_iter().all(|(sender, receiver)| {
        let (Some(before), Some(there)) = (tcp_info(sender), tcp_info(receiver)) else {
            return false;
        };
        let (Some(after), Ok(queued)) = (tcp_info(sender), sys::ioctl_int(sender, libc::TIOCOUTQ))
        else {
            return false;
        };
        // Acknowledged bytes have come; bytes that have come were sent.
        before.bytes_acked <= there.bytes_received + FLAGS
            && there.bytes_received <= after.bytes_acked + queued as u64 + FLAGS
    })
}

/// Bytes ever read from this connection's TCP. The caller keeps everybody from receiving.
pub fn tcp_read(fd: i32, conn: &Conn, slot: &Slot) -> Option<u64> {
    let peer = conn.peer(slot);
    // Nothing but the span and the doorbells was ever sent; what exceeds them is a FIN.
    let carried = if peer.tx(Acquire) == Tx::Ring {
        let span = peer.boundary.load(Relaxed).saturating_sub(1);
        span.saturating_add(peer.bells_sent.load(Acquire) as u64)
    } else {
        u64::MAX
    };
    // From a peer that has left the ring anything may come: FIONREAD ends at the mark of urgent data.
    let has_returned = || peer.flags(Acquire).is_returning();
    // More may come between the questions, but nobody reads: each round narrows the answer down.
    let (mut least, mut most) = (0, u64::MAX);
    for _ in 0..200_000 {
        let returns = has_returned();
        let before = tcp_info(fd)?;
        let unread = match returns {
            true if before.state != TCP_CLOSE => unread_beyond_mark(fd, before.has_fin())?,
            _ => unread(fd)?,
        };
        let after = tcp_info(fd)?;
        if returns != has_returned() {
            // What was asked may have met a mark.
            continue;
        }
        if before.bytes_received == after.bytes_received && before.state == after.state {
            // A received FIN counts as one byte, and FIONREAD leaves it out.
            let fin = match after.state {
                // The state does not tell any more whether a FIN came before a RST. There is a count that includes a FIN,
                // and what FIONREAD leaves out behind a mark; asking for it where nothing is to be read could take the
                // error.
                TCP_CLOSE if returns && unread > 0 => {
                    peek_inq(fd).map_or(0, |bytes| (bytes - unread).max(0).cast_unsigned().into())
                }
                TCP_CLOSE => u64::from(after.bytes_received > carried),
                _ => after.has_fin().into(),
            };
            return after.bytes_received.checked_sub(fin + unread as u64);
        }
        if !before.has_fin() && !after.has_fin() && after.state != TCP_CLOSE {
            least = least.max(before.bytes_received.saturating_sub(unread as u64));
            most = most.min(after.bytes_received.saturating_sub(unread as u64));
            if least == most {
                return Some(least);
            }
        }
    }
    None
}

/// Bytes ever taken out of this socket, of a connection without a ring. The caller keeps everybody from receiving, or
/// has to live with what others do meanwhile.
pub fn tcp_taken(fd: i32) -> Option<u64> {
    for _ in 0..100 {
        let before = tcp_info(fd)?;
        // Asking for more where nothing is to be read could take an error.
        let left = match unread(fd)? {
            // Accepted by Fast Open: FIONREAD is 0 until the SYN-ACK is acknowledged (`tcp_inq`).
            0 if before.state == TCP_SYN_RECV => peek_inq(fd).unwrap_or(0).max(0) as u64,
            0 => u64::from(before.has_fin()),
            // After a RST as well, a FIN is counted on both sides.
            n => peek_inq(fd).unwrap_or(n + i32::from(before.has_fin())).max(0) as u64,
        };
        let after = tcp_info(fd)?;
        if before.bytes_received == after.bytes_received && before.state == after.state {
            return after.bytes_received.checked_sub(left);
        }
    }
    None
}

fn unread(fd: i32) -> Option<i32> {
    sys::ioctl_int(fd, libc::FIONREAD).ok()
}

/// Unread bytes, whatever urgent data, read or not, is among them.
fn unread_beyond_mark(fd: i32, fin: bool) -> Option<i32> {
    // A FIN is counted there.
    peek_inq(fd).map_or_else(|| unread(fd), |bytes| Some((bytes - i32::from(fin)).max(0)))
}

/// What a receive with the option TCP_INQ tells beside its bytes.
fn peek_inq(fd: i32) -> Option<i32> {
    const TCP_INQ: i32 = 36;
    let was = sockopt::int(fd, libc::IPPROTO_TCP, TCP_INQ, 0);
    sys::setsockopt(fd, libc::IPPROTO_TCP, TCP_INQ, &1i32).ok()?;
    let told = peek_with_inq(fd);
    let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, TCP_INQ, &was);
    told
}

fn peek_with_inq(fd: i32) -> Option<i32> {
    let mut byte = 0u8;
    let mut control = [0u64; 8];
    let mut iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { mem::zeroed() };
    (msg.msg_iov, msg.msg_iovlen) = (&raw mut iov, 1);
    (msg.msg_control, msg.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    // SAFETY: one writable byte and a control buffer, both on our stack.
    unsafe { sys::recvmsg(fd, &mut msg, libc::MSG_PEEK | libc::MSG_DONTWAIT) }.ok()?;
    // SAFETY: the kernel filled the control buffer; CMSG_* stay inside.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&msg);
        (!header.is_null() && (*header).cmsg_level == libc::IPPROTO_TCP)
            .then(|| libc::CMSG_DATA(header).cast::<i32>().read_unaligned())
    }
}

/// Whether neither side has ended its direction.
pub fn is_established(fd: i32) -> bool {
    tcp_info(fd).is_some_and(|info| info.state == TCP_ESTABLISHED)
}

/// Whether a connect(2) with TCP_FASTOPEN_CONNECT has sent nothing, as there is a cookie: the SYN goes with the first bytes. Of a
/// socket whose connect(2) has succeeded.
pub fn is_put_off(fd: i32) -> bool {
    tcp_info(fd).is_some_and(|info| info.state == TCP_SYN_SENT)
}

/// Whether the connection is being made.
pub fn is_connecting(fd: i32) -> bool {
    tcp_info(fd).is_some_and(|info| matches!(info.state, TCP_SYN_SENT | TCP_SYN_RECV))
}

/// Whether nothing is sent or received any more.
pub fn is_over(fd: i32) -> bool {
    tcp_info(fd).is_none_or(|info| matches!(info.state, TCP_CLOSE | TCP_TIME_WAIT))
}

/// Whether the peer's FIN or RST has arrived.
pub fn has_fin(fd: i32) -> bool {
    tcp_info(fd).is_some_and(|info| info.has_fin() || info.state == TCP_CLOSE)
}

/// Whether a receive gives the end behind what is there: the peer's FIN has arrived, or we have shut that direction down.
pub fn is_shut_to_reads(fd: i32) -> bool {
    sys::poll1(fd, libc::POLLRDHUP, 0) & libc::POLLRDHUP != 0
}

/// Whether O_ASYNC is set.
pub fn has_signals(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_ASYNC as usize != 0)
}

/// Asks whether an urgent byte is next.
pub const SIOCATMARK: libc::c_ulong = 0x8905;

/// Whether an urgent byte is next, as the kernel has it.
pub fn is_at_mark(fd: i32) -> bool {
    sys::ioctl_int(fd, SIOCATMARK).is_ok_and(|at_mark| at_mark != 0)
}

/// Whether the last close is to reset the connection.
pub fn resets(fd: i32) -> bool {
    let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
    let _ = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut linger);
    linger.l_onoff != 0 && linger.l_linger == 0
}

/// The kernel's name for the socket, never used again; 0 where it does not tell.
pub fn cookie(fd: i32) -> u64 {
    let mut cookie = 0u64;
    match sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie) {
        Ok(8) => cookie,
        _ => 0,
    }
}

/// O_NONBLOCK of the open file description.
pub fn is_nonblocking(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK as usize != 0)
}
