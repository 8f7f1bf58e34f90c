//! Which processes hold a connection's end: a count, in the slot or, before there is one, in a cell that they share.
//!
//! A connection that still looks for its offer has no slot in which processes could agree. A cell in memory shared with the child
//! counts its holders; only a sole holder attaches. (A fork server's parent closes its copy at once.)

use core::ptr;
use usmc_shm::layout::End;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicPtr, AtomicU32, AtomicU64};

use super::liveness;
use crate::os::{members, process, sys};
use crate::record::conn::{Conn, F_COPIED, F_NONBLOCK, F_SHARED, F_STALE};
use crate::record::{kernel, near};

const CELLS: usize = 1 << 16;
static CELL_BASE: AtomicPtr<Cell> = AtomicPtr::new(ptr::null_mut());
static NEXT_CELL: AtomicU32 = AtomicU32::new(0);

/// What processes agree on about a connection without a slot.
#[repr(C)]
pub struct Cell {
    /// Those that hold it.
    pub holders: AtomicU32,
    /// As [`usmc_shm::layout::End::passed_on`].
    passed_on: AtomicU32,
    /// Whether one of them takes the CLC message out that was in the stream at the fork.
    takes_message: AtomicU32,
    /// As [`usmc_shm::layout::End::members`].
    members: [AtomicU32; 6],
}

fn cell(number: u32) -> Option<&'static Cell> {
    let base = CELL_BASE.load(Acquire);
    if number == 0 || base.is_null() {
        return None;
    }
    // SAFETY: numbers come from `new_cell`: 1..=CELLS; the mapping is never removed.
    Some(unsafe { &*base.add(number as usize - 1) })
}

/// The cell of a connection, if it has one.
pub fn cell_of(conn: &Conn) -> Option<&'static Cell> {
    cell(conn.cell.load(Relaxed))
}

/// The count of the processes that hold a connection, where there may be others.
pub fn holders(conn: &Conn) -> Option<&'static AtomicU32> {
    match conn.family() {
        Some(end) => Some(&end.refs),
        None => Some(&cell_of(conn)?.holders),
    }
}

/// Their ids, as far as they are known ([`members`]).
pub fn members(conn: &Conn) -> Option<&'static [AtomicU32]> {
    match conn.family() {
        Some(end) => Some(&end.members),
        None => Some(&cell_of(conn)?.members),
    }
}

/// Enters this process among the holders: in each slot of the connection, where a sweeper looks for them, or in its cell.
pub fn enter(conn: &Conn) {
    conn.ends().for_each(|end| members::enter(&end.members));
    if conn.family().is_none() {
        cell_of(conn).inspect(|cell| members::enter(&cell.members));
    }
}

/// A process has the connection of which no other will hear.
pub fn count_unknown(conn: &Conn) {
    if let Some(holders) = holders(conn) {
        holders.fetch_add(1, AcqRel);
    }
}

/// [`crate::family::passed_on`] of a connection without a slot.
pub fn passed_on_of(conn: &Conn) -> u32 {
    cell_of(conn).map_or(0, |cell| cell.passed_on.load(Relaxed))
}

/// Sets it, for all processes that hold the connection.
pub fn set_passed_on(conn: &Conn, passed_on: u32) {
    if let Some(cell) = cell_of(conn) {
        cell.passed_on.store(passed_on, Relaxed);
    }
}

/// Whether the caller, and no other process, is to take out the CLC message that was in the stream at the fork.
pub fn claims_message(conn: &Conn) -> bool {
    cell_of(conn).is_none_or(|cell| cell.takes_message.swap(1, AcqRel) == 0)
}

/// A zero cell, or `None` when none is left.
pub fn new_cell() -> Option<u32> {
    if CELL_BASE.load(Acquire).is_null() {
        let base = sys::mmap_family(CELLS * size_of::<Cell>()).ok()?.cast();
        CELL_BASE.store(base, Release);
    }
    let start = NEXT_CELL.load(Relaxed);
    for i in 0..1024 {
        let number = (start + i) % CELLS as u32 + 1;
        let cell = cell(number)?;
        if cell.holders.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            cell.passed_on.store(0, Relaxed);
            cell.takes_message.store(0, Relaxed);
            cell.members.iter().for_each(|id| id.store(0, Relaxed));
            NEXT_CELL.store(number, Relaxed);
            return Some(number);
        }
    }
    None
}

/// One holder more, or less, in each of the connection's slots. False where it has none.
pub fn count_in_slots(conn: &Conn, more: bool) -> bool {
    let mut any = false;
    for end in conn.ends() {
        any = true;
        if more {
            end.refs.fetch_add(1, AcqRel);
        } else {
            end.refs.fetch_sub(1, AcqRel);
        }
    }
    any
}

/// One holder less of a connection's end.
pub fn put_down(conn: &Conn) {
    if !count_in_slots(conn, false)
        && let Some(cell) = cell_of(conn)
    {
        cell.holders.fetch_sub(1, AcqRel);
    }
}

/// We hold this end no more, and others of the family do: the peer is to look for the socket there.
pub fn leave_to_parent(end: &End) {
    near::name_parent(end);
}

/// Whether no other process holds this connection, as far as is known; remembers it if so.
pub fn is_sole_holder(conn: &Conn) -> bool {
    let Some(count) = holders(conn) else { return false };
    if count.load(Acquire) != 1
        && let Some(list) = members(conn)
    {
        members::bury(list, count, |id| stand_in_for(conn, id));
    }
    // A process that died in the middle of a step leaves its lock behind: the next holder of that puts right what was half done.
    let is_left = |lock: &AtomicU64| match lock.load(Acquire) {
        0 => false,
        holder => !process::holds_shared(holder),
    };
    let is_half_done = |end: &End| is_left(&end.rx_lock) || is_left(&end.tx_lock);
    let sole = count.load(Acquire) == 1 && !conn.family().is_some_and(is_half_done);
    if sole && conn.has(F_SHARED) {
        // What others have set from here on is ours to ask for.
        if let Some(end) = conn.family() {
            conn.set_lowat(end.rcvlowat.load(Relaxed));
        }
        conn.forget_tells_unread();
        conn.set_flag(F_STALE, true);
        conn.set_flag(F_SHARED, false);
    }
    sole
}

/// [`is_sole_holder`], asked again only where that may have changed.
pub fn is_alone(conn: &Conn) -> bool {
    let is_known = !conn.has(F_SHARED) && holders(conn).is_none_or(|n| n.load(Acquire) == 1);
    is_known || is_sole_holder(conn)
}

/// A holder of our end has died, which the peer may still look for.
fn stand_in_for(conn: &Conn, id: u32) {
    if let Some(slot) = conn.slot() {
        let _ = conn.end(slot).pid.compare_exchange(id, process::pid(), Relaxed, Relaxed);
        liveness::stop_vouching(conn, slot, id);
        conn.rx(slot).stand_in_for_consumer();
    }
}

/// O_NONBLOCK of a connection others may hold, too, or have held.
#[cold]
fn is_nonblocking_anew(fd: i32, conn: &Conn) -> bool {
    let is_shared = conn.has(F_SHARED);
    conn.set_flag(F_STALE, false);
    let mut on = kernel::is_nonblocking(fd);
    loop {
        conn.set_flag(F_NONBLOCK, on);
        if is_shared {
            break;
        }
        // The last time that it is asked for: another thread of ours may have set it in between.
        match kernel::is_nonblocking(fd) {
            same if same == on => return on,
            other => on = other,
        }
    }
    is_sole_holder(conn);
    // The process that vouched for it may have closed its own.
    conn.slot().inspect(|slot| liveness::vouch(conn, slot));
    on
}

/// O_NONBLOCK was set or cleared by this process.
pub fn note_nonblocking(conn: &Conn, on: bool) {
    conn.set_flag(F_NONBLOCK, on);
}

/// Other holders of before may have set O_NONBLOCK: the kernel is asked for it.
pub fn doubt_nonblocking(conn: &Conn) {
    conn.set_flag(F_STALE, true);
}

/// Another process may get the socket, whatever carries its bytes.
pub fn note_copied(conn: &Conn) {
    conn.set_flag(F_COPIED, true);
}

/// Another process may hold the connection from now on, until [`is_sole_holder`] finds that none does.
pub fn share(conn: &Conn) {
    conn.set_flag(F_SHARED, true);
}

/// The processes that hold a connection once this one has let go of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remaining {
    /// Nothing has counted them.
    Unknown,
    /// There are none.
    Nobody,
    /// There are some.
    Others,
}

impl Remaining {
    /// By their count of before.
    pub fn of(before: u32) -> Remaining {
        if before == 1 { Remaining::Nobody } else { Remaining::Others }
    }

    /// What another count says, where this one says nothing.
    pub fn or(self, other: Remaining) -> Remaining {
        if self == Remaining::Unknown { other } else { self }
    }
}

/// The record ends: this process does not hold the connection any more.
pub fn let_go(conn: &Conn) -> Remaining {
    let Some(cell) = cell(conn.cell.load(Relaxed)) else { return Remaining::Unknown };
    conn.cell.store(0, Relaxed);
    members::leave(&cell.members);
    Remaining::of(cell.holders.fetch_sub(1, AcqRel))
}

/// Whether this thread may block for the application: O_NONBLOCK as cached, or as the kernel says where
/// another process may have changed it.
pub fn is_nonblocking(fd: i32, conn: &Conn) -> bool {
    if conn.has(F_SHARED | F_STALE) {
        return is_nonblocking_anew(fd, conn);
    }
    conn.has(F_NONBLOCK)
}
