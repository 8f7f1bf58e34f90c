//! Socket options whose kernel value is not the application's while a connection is in the ring, and those for which
//! the kernel has to see the bytes.

use usmc_shm::layout::Slot;
use usmc_shm::sync::Ordering::Relaxed;

use crate::handshake::{syn_option, transition};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{clock, sockopt};
use crate::record::conn::{self, Conn, F_TUNED};
use crate::record::limit;
use crate::record::options;
use crate::record::phase::Phase;
use crate::stream::{fallback, room};
use crate::watch::observer;
use crate::watchers::epoll;

// include/uapi/linux/tcp.h
const TCP_REPAIR: i32 = 19;
/// connect(2) leaves the SYN to the first send.
pub const TCP_FASTOPEN_CONNECT: i32 = 30;
/// A protocol in the kernel's connection, such as "tls".
pub const TCP_ULP: i32 = 31;
/// Maps received pages, asked for by getsockopt(2).
pub const TCP_ZEROCOPY_RECEIVE: i32 = 35;
/// A control message with the bytes left unread.
pub const TCP_INQ: i32 = 36;
// include/uapi/asm-generic/socket.h
const SO_ATTACH_FILTER: i32 = 26;
const SO_ATTACH_BPF: i32 = 50;
const SO_ZEROCOPY: i32 = 60;

/// How long a receiver may put an acknowledgement off (TCP_DELACK_MAX, include/net/tcp.h).
const ACK_NS: u64 = 200_000_000;

/// What becomes of a set or get.
pub enum Verdict {
    /// Ask the kernel.
    Kernel,
    /// Done here; for a get this is the value.
    Value(i32),
    /// Refused.
    Fail(Errno),
}

/// setsockopt(2); `value` is the int it begins with.
pub fn set(fd: i32, index: u32, level: i32, name: i32, value: i32) -> Verdict {
    let conn = conn::at(index);
    options::note(conn, level, name);
    if needs_kernel(level, name, value) {
        if let Err(code) = leave_to_kernel(fd, index) {
            return Verdict::Fail(code);
        }
        let start = clock::now_ns();
        // The kernel counts the sends that it stamps from what is acknowledged; a doorbell may not be, for a while.
        while level == libc::SOL_SOCKET
            && sockopt::STAMPS.contains(&name)
            && sys::ioctl_int(fd, libc::TIOCOUTQ).is_ok_and(|n| n > 0)
            && clock::now_ns() - start < ACK_NS
        {
            sys::poll1(fd, 0, 1);
        }
    }
    if (level, name) == (libc::IPPROTO_TCP, TCP_FASTOPEN_CONNECT) && conn.phase() == Phase::Fresh {
        conn.keep_to_kernel();
    }
    if (level, name) == (libc::IPPROTO_TCP, TCP_INQ) {
        // Asked for anew.
        conn.forget_tells_unread();
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        epoll::forget_known(index);
        if conn.phase() == Phase::Attached && !matches!(value, 0 | 1) {
            // A thread that sleeps by now sleeps on the kernel's socket. Where it is in the ring in this instant, it stays there.
            let _ = transition::decline(fd, index, Reason::KernelFeature);
        }
        // Negative is as much as there can be.
        let left = room::leave_for(fd, index, usize::try_from(value).unwrap_or(usize::MAX));
        if !left && has_lowat(conn) {
            conn.set_lowat(u32::try_from(value).unwrap_or(u32::MAX >> 1));
            epoll::mark_moved(fd, index);
            return Verdict::Value(0);
        }
        return Verdict::Kernel;
    }
    let is_nodelay = (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY);
    if is_nodelay && conn.clc.hurries.load(Relaxed) != 0 {
        if value == 0 {
            return Verdict::Value(0);
        }
        conn.clc.hurries.store(0, Relaxed);
    }
    let Some(slot) = kept(conn) else { return Verdict::Kernel };
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => {
            if value != 0 {
                observer::count_total(|totals| &totals.nodelay);
            }
            conn.end(slot).set_nodelay(value != 0);
        }
        (libc::IPPROTO_TCP, libc::TCP_CORK) => {
            if value != 0 {
                observer::count_total(|totals| &totals.cork);
            }
            conn.end(slot).set_cork(value != 0);
        }
        _ => return Verdict::Kernel,
    }
    Verdict::Value(0)
}

/// The kernel has done so.
pub fn was_set(fd: i32, index: u32, level: i32, name: i32) {
    let conn = conn::at(index);
    if level == libc::SOL_SOCKET {
        note_buffer(fd, conn, name);
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER) {
        // Other threads are about to note it, too.
        let _step = conn.step_lock.enter();
        conn.slot().inspect(|slot| transition::note_linger(fd, conn, slot));
    }
}

/// A buffer's size that the application has set, as the kernel took it.
fn note_buffer(fd: i32, conn: &Conn, name: i32) {
    let (cell, name) = match name {
        libc::SO_SNDBUF | libc::SO_SNDBUFFORCE => (&conn.snd_buf, libc::SO_SNDBUF),
        libc::SO_RCVBUF | libc::SO_RCVBUFFORCE => (&conn.rcv_buf, libc::SO_RCVBUF),
        _ => return,
    };
    let bytes = sockopt::int(fd, libc::SOL_SOCKET, name, 0);
    cell.store(u32::try_from(bytes).unwrap_or(0), Relaxed);
    if let Some(slot) = conn.slot() {
        conn.end(slot).rcv_buf.store(conn.rcv_buf.load(Relaxed), Relaxed);
        limit::set(fd, conn, slot);
    }
}

/// Whether SO_RCVLOWAT is ours, and 1 in the kernel.
fn has_lowat(conn: &Conn) -> bool {
    conn.slot().is_some()
        && (conn.phase() == Phase::Attached
            || (conn.phase() == Phase::Ring && kept(conn).is_some()))
}

/// The slot that has what the application has set, where the kernel's socket has not.
fn kept(conn: &Conn) -> Option<&'static Slot> {
    let given_back = |slot: &Slot| conn.end(slot).flags().has_given_back();
    conn.slot().filter(|slot| conn.has(F_TUNED) && !given_back(slot))
}

/// Options with which the kernel has to see every byte: it stamps, drops, encrypts or counts them.
fn needs_kernel(level: i32, name: i32, value: i32) -> bool {
    match (level, name) {
        (libc::SOL_SOCKET, SO_ATTACH_FILTER | SO_ATTACH_BPF) => true,
        // Negative: off.
        (libc::SOL_SOCKET, sockopt::SO_PEEK_OFF) => value >= 0,
        (libc::SOL_SOCKET, name) if sockopt::STAMPS.contains(&name) => value != 0,
        (libc::IPPROTO_TCP, TCP_ULP) => true,
        (libc::IPPROTO_TCP, TCP_REPAIR) => value > 0,
        _ => false,
    }
}

/// The kernel has to see every byte from now on.
///
/// # Errors
/// ENOPROTOOPT, as where the kernel lacks the option: see [`fallback::leave`].
pub fn leave_to_kernel(fd: i32, index: u32) -> Result<(), Errno> {
    let conn = conn::at(index);
    match conn.phase() {
        Phase::Fresh => {
            conn.keep_to_kernel();
            conn.keep_children_to_kernel(true);
        }
        Phase::Listen => {
            conn.keep_children_to_kernel(true);
            syn_option::disarm(fd, conn);
            observer::changed(fd, index);
        }
        Phase::Plain => {}
        _ => {
            return fallback::leave(fd, index, Reason::KernelFeature)
                .map_err(|_| libc::ENOPROTOOPT);
        }
    }
    Ok(())
}

/// Whether the kernel has the protocol that [`TCP_ULP`] asks for: a socket that is not connected is refused for
/// another reason then.
///
/// # Safety
/// `name` is readable for `len` bytes.
pub unsafe fn has_protocol(name: *const core::ffi::c_void, len: libc::socklen_t) -> bool {
    let Ok(probe) = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0) else { return true };
    let (level, option) = (libc::IPPROTO_TCP as usize, TCP_ULP as usize);
    // SAFETY: the caller's contract.
    let done = unsafe {
        let nr = libc::SYS_setsockopt;
        sys::raw(nr, probe as usize, level, option, name as usize, len as usize, 0)
    };
    sys::close(probe);
    done != -(libc::ENOENT as isize)
}

/// Whether the kernel knows this flag of preadv2(2): it looks at the flags before it finds the socket not connected.
/// `None` where there is no socket to ask with.
pub fn knows_flag(flag: i32) -> Option<bool> {
    let probe = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
    let done = sys::preadv2(probe, flag);
    sys::close(probe);
    Some(done != Err(libc::EOPNOTSUPP))
}

/// Whether sends with MSG_ZEROCOPY are to be completed by the error queue.
pub fn completes_sends(fd: i32) -> bool {
    sockopt::int(fd, libc::SOL_SOCKET, SO_ZEROCOPY, 0) != 0
}

/// Whether received messages tell what is left unread ([`TCP_INQ`]).
pub fn tells_unread(fd: i32, conn: &Conn) -> bool {
    conn.tells_unread(|| sockopt::int(fd, libc::IPPROTO_TCP, TCP_INQ, 0) != 0)
}

/// getsockopt(2) of an int value.
pub fn get(index: u32, level: i32, name: i32) -> Verdict {
    let conn = conn::at(index);
    if has_lowat(conn) && (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        return Verdict::Value((conn.lowat() as i32).max(1));
    }
    let is_nodelay = (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY);
    if is_nodelay && conn.clc.hurries.load(Relaxed) != 0 {
        return Verdict::Value(0);
    }
    let Some(slot) = kept(conn) else { return Verdict::Kernel };
    let flags = conn.end(slot).flags();
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Verdict::Value(flags.has_nodelay().into()),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Verdict::Value(flags.has_cork().into()),
        _ => Verdict::Kernel,
    }
}
