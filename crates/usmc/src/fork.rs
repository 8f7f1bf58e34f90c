//! fork(2): both processes may use every connection.
//!
//! Before the fork all steps in progress are finished (their locks are held), each connection's end
//! counts one more holder, and records are marked as shared: from then on the slot's own locks are used
//! and the kernel is asked for flags that the other process may have changed.
//!
//! A connection that still looks for its offer has no slot in which processes could agree. A cell in
//! memory shared with the child counts its holders; only a sole holder attaches. (A fork server's parent
//! closes its copy at once.)

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicPtr, AtomicU32};

use crate::conn::{self, ATTACHED, Conn, F_NONBLOCK, F_SHARED, LISTEN, LOOKING, OFFERED, RING};
use crate::reason::Reason;
use crate::socket::close;
use crate::{device, kernel, observer, poll, process, segment, sys};

const CELLS: usize = 1 << 16;
static CELL_BASE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
static NEXT_CELL: AtomicU32 = AtomicU32::new(0);

fn cell(number: u32) -> Option<&'static AtomicU32> {
    let base = CELL_BASE.load(Acquire);
    if number == 0 || base.is_null() {
        return None;
    }
    // SAFETY: numbers come from `new_cell`: 1..=CELLS; the mapping is never removed.
    Some(unsafe { &*base.add(number as usize - 1) })
}

/// A zero cell, or `None` when none is left.
fn new_cell() -> Option<u32> {
    if CELL_BASE.load(Acquire).is_null() {
        let base = sys::mmap_family(CELLS * 4).ok()?.cast();
        CELL_BASE.store(base, Release);
    }
    let start = NEXT_CELL.load(Relaxed);
    for i in 0..1024 {
        let number = (start + i) % CELLS as u32 + 1;
        if cell(number)?.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            NEXT_CELL.store(number, Relaxed);
            return Some(number);
        }
    }
    None
}

/// Before fork(2).
pub fn prepare() {
    segment::hold();
    poll::epoll::hold();
    conn::for_each(|_, conn| {
        conn.step_lock.hold();
        conn.rx_lock.hold();
        conn.tx_lock.hold();
        match conn.phase() {
            OFFERED | ATTACHED | RING => {
                conn.set_flag(F_SHARED, true);
                if let Some(slot) = conn.slot() {
                    conn.end(slot).refs.fetch_add(1, AcqRel);
                }
            }
            LOOKING => {
                if conn.cell.load(Relaxed) == 0 {
                    conn.cell.store(new_cell().unwrap_or(0), Relaxed);
                }
                match cell(conn.cell.load(Relaxed)) {
                    Some(holders) => {
                        conn.set_flag(F_SHARED, true);
                        holders.fetch_add(1, AcqRel);
                    }
                    None => conn.give_up(Reason::NoMemory),
                }
            }
            _ => {}
        }
    });
}

/// After fork(2) in the parent; `failed`: there is no child.
pub fn parent(failed: bool) {
    conn::for_each(|_, conn| {
        if failed {
            if let Some(slot) = conn.slot() {
                conn.end(slot).refs.fetch_sub(1, AcqRel);
            }
            if let Some(holders) = cell(conn.cell.load(Relaxed)) {
                holders.fetch_sub(1, AcqRel);
            }
        }
        conn.tx_lock.unhold();
        conn.rx_lock.unhold();
        conn.step_lock.unhold();
    });
    poll::epoll::unhold();
    segment::unhold();
}

/// After fork(2) in the child.
pub fn child() {
    process::refresh();
    let mut listening = false;
    conn::for_each(|_, conn| {
        conn.tx_lock.reset();
        conn.rx_lock.reset();
        conn.step_lock.reset();
        for count in [&conn.rx_sleepers, &conn.tx_sleepers, &conn.blocked_sends] {
            count.store(0, Relaxed);
        }
        listening |= conn.phase() == LISTEN;
        // The registration is the parent's.
        if conn.phase() == LISTEN {
            conn.offer_index.store(u32::MAX, Relaxed);
        }
    });
    segment::after_fork();
    device::current().after_fork(listening);
    observer::after_fork();
    poll::epoll::after_fork();
    conn::for_each(|index, _| close::forget_holds(index));
}

/// Whether no other process holds this connection, as far as is known; remembers it if so.
pub fn is_sole_holder(conn: &Conn) -> bool {
    let sole = match conn.slot() {
        Some(slot) => conn.end(slot).refs.load(Acquire) == 1,
        None => cell(conn.cell.load(Relaxed)).is_some_and(|h| h.load(Acquire) == 1),
    };
    if sole {
        conn.set_flag(F_SHARED, false);
    }
    sole
}

/// O_NONBLOCK of a connection others may hold, too.
pub fn is_nonblocking(fd: i32, conn: &Conn) -> bool {
    let on = kernel::is_nonblocking(fd);
    conn.set_flag(F_NONBLOCK, on);
    is_sole_holder(conn);
    on
}

/// The record ends: this process does not hold the connection any more.
pub fn let_go(conn: &Conn) {
    if let Some(holders) = cell(conn.cell.swap(0, Relaxed)) {
        holders.fetch_sub(1, AcqRel);
    }
}
