//! Bytes in rings of another kernel that its program may never read. What TCP has sent and nobody acknowledges ends a connection in
//! time (tcp(7): tcp_retries2, TCP_USER_TIMEOUT, and keepalive); a ring has no such word of the other kernel, and a virtual machine
//! that dies sends no FIN. So a thread that is about to sleep sends a doorbell, armed or not, for each connection with unread bytes
//! of this process'. A byte of TCP that is not acknowledged starts the kernel's own timers.
//!
//! A connection is listed by the first send since the last sleep. Between two kernels that are awake nobody sleeps, and nothing goes
//! on the wire.

use usmc_shm::layout::ARM_TCP;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use usmc_shm::sync::{AtomicU32, fence};

use super::bells;
use crate::handshake::transition;
use crate::record::conn::{self, Conn};
use crate::record::numbers::Hold;
use crate::record::phase::Phase;

/// The connection that was listed last, plus one; each knows the one before it.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Bytes were published. The caller has fenced since.
#[inline(always)]
pub fn sent(fd: i32, index: u32, conn: &Conn) {
    if !conn.is_on_one_kernel() && conn.unheard.load(Relaxed) == 0 {
        list(fd, index, conn);
    }
}

#[cold]
fn list(fd: i32, index: u32, conn: &Conn) {
    if conn.unheard.swap(fd.cast_unsigned() + 1, AcqRel) != 0 {
        return;
    }
    let mut last = LAST.load(Relaxed);
    loop {
        conn.unheard_before.store(last, Relaxed);
        // Release: whoever takes the list sees the link.
        match LAST.compare_exchange(last, index + 1, Release, Relaxed) {
            Ok(_) => return,
            Err(now) => last = now,
        }
    }
}

/// A thread is about to sleep. Without locks of a connection.
#[inline(always)]
pub fn before_sleep() {
    if LAST.load(Relaxed) != 0 {
        ring_all();
    }
}

#[cold]
fn ring_all() {
    let mut next = LAST.swap(0, Acquire);
    while let Some(index) = next.checked_sub(1) {
        let Some(conn) = conn::get(index) else { return };
        next = conn.unheard_before.load(Relaxed);
        let fd = conn.unheard.swap(0, AcqRel).wrapping_sub(1).cast_signed();
        // SeqCst: a sender that has seen the connection listed has published before, and its bytes are seen here.
        fence(SeqCst);
        ring(fd, index);
    }
}

fn ring(fd: i32, index: u32) {
    let Some(hold) = Hold::in_step(index) else { return };
    let (conn, fd) = (hold.conn(), hold.fd(fd));
    let Some(slot) = conn.slot().filter(|_| conn.phase() == Phase::Ring) else { return };
    let is_unread = !conn.is_on_one_kernel() && conn.tx(slot).has_data();
    // Also where an earlier byte is unacknowledged: its acknowledgement may be on the way.
    if is_unread && fd >= 0 && transition::tx_is_ring(fd, conn, slot) {
        bells::ring_bell(fd, conn, slot, |shared| conn.tx(slot).take_rx_sleepers(shared) | ARM_TCP);
    }
}

/// Fork, in the child: the parent rings for what it has sent.
pub fn after_fork() {
    let mut next = LAST.swap(0, Relaxed);
    while let Some(conn) = next.checked_sub(1).and_then(conn::get) {
        next = conn.unheard_before.load(Relaxed);
        conn.unheard.store(0, Relaxed);
    }
}
