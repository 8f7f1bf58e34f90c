//! Socket options whose kernel value is not the application's while a connection is in the ring.

use core::sync::atomic::Ordering::Relaxed;
use usmc_shm::layout::{END_CORK, END_NODELAY, Slot};

use crate::conn::{
    self, ATTACHED, Conn, EARLY, F_KERNEL_ONLY, F_TUNED, FRESH, LISTEN, OFFERED, RING,
};
use crate::poll;
use crate::reason::Reason;
use crate::sys::Errno;

const TCP_REPAIR: i32 = 19;
const TCP_ULP: i32 = 31;
const TCP_FASTOPEN_CONNECT: i32 = 30;
const SO_ZEROCOPY: i32 = 60;

/// What becomes of a set or get.
pub enum Verdict {
    /// Ask the kernel.
    Kernel,
    /// Done here; for a get this is the value.
    Value(i32),
    /// Refused.
    Fail(Errno),
}

/// setsockopt(2) with an int value.
pub fn set(index: u32, level: i32, name: i32, value: i32) -> Verdict {
    let conn = conn::at(index);
    if matches!((level, name), (libc::SOL_SOCKET, SO_ZEROCOPY))
        || (level == libc::IPPROTO_TCP
            && matches!(name, TCP_ULP | TCP_REPAIR | TCP_FASTOPEN_CONNECT))
    {
        return kernel_only(conn);
    }
    if level == libc::SOL_SOCKET && value > 0 {
        match name {
            libc::SO_SNDBUF => conn.snd_buf.store(value as u32, Relaxed),
            libc::SO_RCVBUF => conn.rcv_buf.store(value as u32, Relaxed),
            _ => {}
        }
        if let Some(slot) = conn.slot() {
            conn.end(slot).rcv_buf.store(conn.rcv_buf.load(Relaxed), Relaxed);
            conn.limit_window(slot);
        }
    }
    if has_lowat(conn) && (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        // Negative is as much as there can be.
        conn.set_lowat(u32::try_from(value).unwrap_or(u32::MAX >> 1));
        poll::epoll::mark_moved(index);
        return Verdict::Value(0);
    }
    let Some(slot) = conn.slot().filter(|_| conn.has(F_TUNED)) else { return Verdict::Kernel };
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => keep(conn, slot, END_NODELAY, value),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => keep(conn, slot, END_CORK, value),
        _ => Verdict::Kernel,
    }
}

/// Whether SO_RCVLOWAT is ours, and 1 in the kernel.
fn has_lowat(conn: &Conn) -> bool {
    conn.slot().is_some()
        && (conn.phase() == ATTACHED || (conn.phase() == RING && conn.has(F_TUNED)))
}

fn keep(conn: &Conn, slot: &Slot, bit: u32, value: i32) -> Verdict {
    let flags = &conn.end(slot).flags;
    if value != 0 {
        flags.fetch_or(bit, Relaxed);
    } else {
        flags.fetch_and(!bit, Relaxed);
    }
    Verdict::Value(0)
}

/// Options after which the kernel has to see every byte.
fn kernel_only(conn: &Conn) -> Verdict {
    match conn.phase() {
        FRESH | LISTEN => conn.set_flag(F_KERNEL_ONLY, true),
        EARLY | OFFERED => crate::transition::take_back(conn, Reason::KernelFeature),
        _ if conn.slot().is_some() => return Verdict::Fail(libc::ENOPROTOOPT),
        _ => {}
    }
    if conn.slot().is_some() && conn.phase() != conn::PLAIN {
        return Verdict::Fail(libc::ENOPROTOOPT);
    }
    Verdict::Kernel
}

/// getsockopt(2) of an int value.
pub fn get(index: u32, level: i32, name: i32) -> Verdict {
    let conn = conn::at(index);
    if has_lowat(conn) && (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        return Verdict::Value((conn.lowat() as i32).max(1));
    }
    let Some(slot) = conn.slot().filter(|_| conn.has(F_TUNED)) else { return Verdict::Kernel };
    let flags = conn.end(slot).flags.load(Relaxed);
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Verdict::Value((flags & END_NODELAY != 0) as i32),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Verdict::Value((flags & END_CORK != 0) as i32),
        _ => Verdict::Kernel,
    }
}
