//! fork(2): both processes may use every connection.
//!
//! Before the fork all steps in progress are finished (their locks are held), each connection's end
//! counts one more holder, and records are marked as shared: from then on the slot's own locks are used
//! and the kernel is asked for flags that the other process may have changed.
//!
//! libc tells us of its forks through pthread_atfork(3) ([`register`]); makers of processes that it does not
//! tell of are wrapped ([`around`]).
//!
//! A connection that still looks for its offer has no slot in which processes could agree. A cell in
//! memory shared with the child counts its holders; only a sole holder attaches. (A fork server's parent
//! closes its copy at once.)

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::layout::{ACCEPTOR, CLIENT, End, Slot};
use usmc_shm::sync::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64};

use crate::across::{holds, spawn};
use crate::api;
use crate::device::segment;
use crate::family::{custody, life, members};
use crate::handshake::clc;
use crate::host;
use crate::os::errno::errno;
use crate::os::errno::set_errno;
use crate::os::reason::Reason;
use crate::os::remote::Remote;
use crate::os::{process, real, sys};
use crate::record::conn::{
    self, ATTACHED, Conn, EARLY, F_CLIENT, F_COPIED, F_DOWN, F_FORKED, F_HANDED, F_INQ_KNOWN,
    F_NONBLOCK, F_SETTLING, F_SHARED, F_STALE, F_UNSHOWN, LISTEN, OFFERED, RING, There,
};
use crate::record::kernel;
use crate::socket::{close, connect};
use crate::stream::wait;
use crate::uring;
use crate::watch::observer;
use crate::watchers::epoll;

const CELLS: usize = 1 << 16;
static CELL_BASE: AtomicPtr<Cell> = AtomicPtr::new(ptr::null_mut());
static NEXT_CELL: AtomicU32 = AtomicU32::new(0);

/// What processes agree on about a connection without a slot.
#[repr(C)]
pub struct Cell {
    /// Those that hold it.
    pub holders: AtomicU32,
    /// As [`usmc_shm::layout::End::custody`].
    custody: AtomicU32,
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
fn cell_of(conn: &Conn) -> Option<&'static Cell> {
    cell(conn.cell.load(Relaxed))
}

/// The count of the processes that hold a connection, where there may be others.
pub fn holders(conn: &Conn) -> Option<&'static AtomicU32> {
    match conn.family() {
        Some(end) => Some(&end.refs),
        None => Some(&cell_of(conn)?.holders),
    }
}

/// Whether that process holds the connection without others of its family.
pub fn is_alone_there(process: &Remote, there: &There) -> bool {
    if there.flags & F_SHARED == 0 {
        return true;
    }
    let side = if there.flags & F_CLIENT != 0 { CLIENT } else { ACCEPTOR };
    let in_slot = offset_of!(Slot, end) + side * size_of::<End>() + offset_of!(End, refs);
    let count = match (there.family, there.cell) {
        (0, 0) => return false,
        // SAFETY: a pointer's integer.
        (0, cell) => match unsafe { process.read_static((&raw const CELL_BASE).cast::<usize>()) } {
            Ok(base) if base != 0 => {
                base.wrapping_add((cell as usize - 1).wrapping_mul(size_of::<Cell>()))
            }
            _ => return false,
        },
        (slot, _) => slot.wrapping_add(in_slot),
    };
    // SAFETY: an integer; both counts are of 32 bits, a cell's comes first.
    let holders = unsafe { process.read::<u32>(count) };
    holders == Ok(1)
}

/// Their ids, as far as they are known ([`members`]).
pub fn members(conn: &Conn) -> Option<&'static [AtomicU32]> {
    match conn.family() {
        Some(end) => Some(&end.members),
        None => Some(&cell_of(conn)?.members),
    }
}

/// Somebody has the connection of whom nobody will hear.
pub fn count_unknown(conn: &Conn) {
    if let Some(holders) = holders(conn) {
        holders.fetch_add(1, AcqRel);
    }
}

/// [`crate::family::custody`] of a connection without a slot.
pub fn custody_of(conn: &Conn) -> u32 {
    cell_of(conn).map_or(0, |cell| cell.custody.load(Relaxed))
}

/// Sets it, for all processes that hold the connection.
pub fn set_custody(conn: &Conn, custody: u32) {
    if let Some(cell) = cell_of(conn) {
        cell.custody.store(custody, Relaxed);
    }
}

/// Whether the caller, and no other process, is to take out the CLC message that was in the stream at the fork.
pub fn claims_message(conn: &Conn) -> bool {
    cell_of(conn).is_none_or(|cell| cell.takes_message.swap(1, AcqRel) == 0)
}

/// A zero cell, or `None` when none is left.
fn new_cell() -> Option<u32> {
    if CELL_BASE.load(Acquire).is_null() {
        let base = sys::mmap_family(CELLS * size_of::<Cell>()).ok()?.cast();
        CELL_BASE.store(base, Release);
    }
    let start = NEXT_CELL.load(Relaxed);
    for i in 0..1024 {
        let number = (start + i) % CELLS as u32 + 1;
        let cell = cell(number)?;
        if cell.holders.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            cell.custody.store(0, Relaxed);
            cell.takes_message.store(0, Relaxed);
            cell.members.iter().for_each(|id| id.store(0, Relaxed));
            NEXT_CELL.store(number, Relaxed);
            return Some(number);
        }
    }
    None
}

/// The thread that is between [`prepare`] and [`parent`]; 0 = none. It and the two below are written by the
/// holder of all locks.
static FORKING: AtomicU64 = AtomicU64::new(0);
/// Its signal mask.
static MASK: AtomicU64 = AtomicU64::new(0);
/// Its errno, where libc calls us.
static ERRNO: AtomicI32 = AtomicI32::new(0);
/// Whether it holds the lock of libc's streams.
static STREAMS: AtomicBool = AtomicBool::new(false);

/// Before a process is made, after the application's own handlers of pthread_atfork(3). Signals are blocked
/// until [`parent`] or [`child`], for a handler would meet locks that its own thread holds.
///
/// The order of the locks is that in which others take them; the segments' is taken inside all others.
fn prepare() {
    let mask = sys::block_signals();
    uring::hold();
    epoll::hold();
    conn::for_each(|_, conn| {
        conn.rx_lock.hold();
        conn.tx_lock.hold();
        conn.step_lock.hold();
        conn.set_flag(F_COPIED, true);
        clc::before_fork(conn);
        match conn.phase() {
            _ if conn.slot().is_some() => {
                share_sleepers(conn);
                count_in_slots(conn, true);
                conn.set_flag(F_SHARED | F_FORKED, true);
            }
            _ if count_in_slots(conn, true) => conn.set_flag(F_SHARED | F_FORKED, true),
            EARLY => {
                if conn.cell.load(Relaxed) == 0 {
                    conn.cell.store(new_cell().unwrap_or(0), Relaxed);
                }
                match cell_of(conn) {
                    Some(cell) => {
                        cell.holders.fetch_add(1, AcqRel);
                        conn.set_flag(F_SHARED | F_FORKED, true);
                    }
                    None => conn.give_up(Reason::NoMemory),
                }
            }
            _ => {}
        }
        if conn.has(F_FORKED) {
            members(conn).inspect(|list| members::enter(list));
        }
    });
    // After the marks: who fetches from us looks for them when he has told us.
    custody::before_fork();
    segment::hold();
    MASK.store(mask, Relaxed);
    FORKING.store(process::thread(), Relaxed);
}

/// All sleepers of the end are asked for from now on: those that were killed are still counted among them, and those of
/// this process are not yet.
fn share_sleepers(conn: &Conn) {
    if let Some(slot) = conn.slot()
        && is_alone(conn)
    {
        for for_room in [false, true] {
            wait::sleepers(conn, Some(slot), for_room).share(|| conn.set_flag(F_SHARED, true));
        }
        let own = conn.blocked_sends.load(Relaxed);
        conn.end(slot).blocked_sends.fetch_min(own, Relaxed);
    }
}

/// Whether this thread has called [`prepare`]; it has not in a child that shares its parent's memory.
fn is_prepared() -> bool {
    FORKING.load(Relaxed) == process::thread()
}

/// Afterwards in the parent; `failed`: there is no child.
fn parent(failed: bool) {
    // All: one that another thread was about to free is free by now, its locks are held all the same.
    conn::for_all(|_, conn| {
        // Without the flag: made by another thread meanwhile.
        if failed && conn.has(F_FORKED) {
            put_down(conn);
        }
        conn.set_flag(F_FORKED, false);
        conn.step_lock.unhold();
        conn.tx_lock.unhold();
        conn.rx_lock.unhold();
    });
    FORKING.store(0, Relaxed);
    let mask = MASK.load(Relaxed);
    segment::unhold();
    epoll::unhold();
    uring::unhold();
    sys::set_signals(mask);
}

/// Afterwards in the child.
fn child() {
    process::refresh();
    FORKING.store(0, Relaxed);
    let mut listening = false;
    conn::for_all(|_, conn| {
        conn.tx_lock.reset();
        conn.rx_lock.reset();
        conn.step_lock.reset();
        for count in
            [&conn.rx_sleepers, &conn.tx_sleepers, &conn.blocked_sends, &conn.ringing, &conn.unseen]
        {
            count.store(0, Relaxed);
        }
        if !conn.has(F_FORKED) && matches!(conn.phase(), OFFERED | EARLY | ATTACHED | RING) {
            // Made by another thread after `prepare`: not counted, and nobody here knows of it.
            conn.forget_slot();
            conn.forget_past();
            conn.give_up(Reason::Adopted);
        }
        if conn.phase() != EARLY || conn.family().is_some() {
            // Of an earlier time: this fork has not counted there.
            conn.cell.store(0, Relaxed);
        }
        if conn.has(F_FORKED) {
            members(conn).inspect(|list| members::enter(list));
        }
        // An exec that another thread was trying is not tried here.
        conn.set_flag(F_FORKED | F_SETTLING | F_DOWN | F_HANDED, false);
        if let Some(slot) = conn.slot() {
            // Often the parent closes its own.
            conn.end(slot).pid.store(process::pid(), Relaxed);
            conn.set_flag(F_UNSHOWN, true);
        }
        listening |= conn.phase() == LISTEN;
    });
    segment::after_fork();
    host::current().after_fork(listening);
    if listening {
        conn::for_each(|_, conn| {
            if conn.phase() == LISTEN {
                connect::inherited_listener(conn);
            }
        });
    }
    observer::after_fork();
    epoll::after_fork();
    uring::after_fork();
    conn::for_each(|index, _| close::forget_holds(index));
    holds::let_cross();
    spawn::after_fork();
    sys::set_signals(MASK.load(Relaxed));
}

/// One holder more, or less, in each of the connection's slots. False where it has none.
fn count_in_slots(conn: &Conn, more: bool) -> bool {
    let present = conn.slot().map(|slot| &slot.end[conn.side()]);
    let mut any = false;
    for end in conn.past_ends().map(|(end, ..)| end).chain(present) {
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
fn put_down(conn: &Conn) {
    if !count_in_slots(conn, false)
        && let Some(cell) = cell_of(conn)
    {
        cell.holders.fetch_sub(1, AcqRel);
    }
}

/// Makes a process by `make`, which runs no handlers of pthread_atfork(3) and returns as fork(2) does.
pub fn around(make: impl FnOnce() -> libc::pid_t) -> libc::pid_t {
    // What a child on our memory makes is the kernel's affair: the tables are its parent's.
    if process::is_foreign_child() {
        return make();
    }
    let saved = errno();
    prepare();
    set_errno(saved);
    let pid = make();
    let saved = errno();
    if pid == 0 {
        child();
    } else {
        parent(pid < 0);
    }
    set_errno(saved);
    pid
}

/// In the child of a clone(3), which does not return where it was called, [`around`] ends here.
pub fn cloned() {
    child();
}

/// Has libc call us at every fork(3), its own (in daemon, forkpty) included. Handlers run before a fork from
/// the last to the first and after it from the first to the last: being the first, ours are the innermost.
pub fn register() {
    static ONCE: AtomicU32 = AtomicU32::new(0);
    if ONCE.swap(1, Relaxed) == 0 {
        let handlers = [on_prepare, on_parent, on_child].map(|h: extern "C" fn()| h as *mut c_void);
        // SAFETY: functions of that signature that are never unloaded; no library is named as their owner.
        unsafe { have_called(handlers[0], handlers[1], handlers[2]) };
    }
}

/// pthread_atfork(3), which glibc has in programs and not in itself.
///
/// # Safety
/// As the function itself.
pub unsafe fn have_called(prepare: *mut c_void, parent: *mut c_void, child: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        match real::is_musl() {
            true => real::pthread_atfork(prepare, parent, child),
            false => real::__register_atfork(prepare, parent, child, ptr::null_mut()),
        }
    }
}

/// The thread whose fork ends the parent.
static ENDING: AtomicU64 = AtomicU64::new(0);

/// Runs `daemon`, which is daemon(3) or the like: its fork leaves nothing but the child.
pub fn parent_ends(daemon: impl FnOnce() -> i32) -> i32 {
    ENDING.store(process::thread(), Relaxed);
    let done = daemon();
    ENDING.store(0, Relaxed);
    done
}

extern "C" fn on_prepare() {
    if !process::is_foreign_child() {
        let saved = errno();
        // libc takes this next, and another thread that has it may be writing to a stream of ours.
        let streams = api::streams::are_served();
        if streams {
            // SAFETY: no arguments; a lock that counts.
            unsafe { real::_IO_list_lock() };
        }
        prepare();
        STREAMS.store(streams, Relaxed);
        ERRNO.store(saved, Relaxed);
        // libc does not tell whether it failed, but sets errno then.
        set_errno(0);
    }
}

extern "C" fn on_parent() {
    if is_prepared() {
        let (code, saved) = (errno(), ERRNO.load(Relaxed));
        let streams = STREAMS.load(Relaxed);
        parent(code != 0);
        if streams {
            // SAFETY: this thread locked it in `on_prepare`.
            unsafe { real::_IO_list_unlock() };
        }
        if code == 0 && ENDING.load(Relaxed) == process::thread() {
            holds::end();
        }
        set_errno(if code != 0 { code } else { saved });
    }
}

extern "C" fn on_child() {
    if is_prepared() {
        let saved = ERRNO.load(Relaxed);
        child();
        if STREAMS.load(Relaxed) {
            // SAFETY: nobody else exists here who could have it.
            unsafe { real::_IO_list_resetlock() };
        }
        set_errno(saved);
    }
}

/// We hold this end no more, and others of the family do: the peer is to look for the socket there.
pub fn leave_to_parent(end: &End) {
    if end.pid.load(Relaxed) == process::pid() {
        end.pid.store(sys::getppid(), Relaxed);
    }
}

/// Whether no other process holds this connection, as far as is known; remembers it if so.
pub fn is_sole_holder(conn: &Conn) -> bool {
    let Some(count) = holders(conn) else { return false };
    if count.load(Acquire) != 1
        && let Some(list) = members(conn)
    {
        members::bury(list, count, |id| stand_in_for(conn, id));
    }
    // Who died in the middle of a step leaves its lock behind: whoever takes that puts right what was half done.
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
        conn.set_flag(F_INQ_KNOWN, false);
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

/// A holder of our end has died, whom the peer may still look for.
fn stand_in_for(conn: &Conn, id: u32) {
    if let Some(slot) = conn.slot() {
        let _ = conn.end(slot).pid.compare_exchange(id, process::pid(), Relaxed, Relaxed);
        life::stop_vouching(conn, slot, id);
        conn.rx(slot).stand_in_for_consumer();
    }
}

/// O_NONBLOCK of a connection others may hold, too, or have held.
pub fn is_nonblocking(fd: i32, conn: &Conn) -> bool {
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
    // Who vouched for it may have closed his.
    conn.slot().inspect(|slot| life::vouch(conn, slot));
    on
}

/// The record ends: this process does not hold the connection any more. Whether no other does.
pub fn let_go(conn: &Conn) -> Option<bool> {
    let cell = cell(conn.cell.load(Relaxed))?;
    conn.cell.store(0, Relaxed);
    members::leave(&cell.members);
    Some(cell.holders.fetch_sub(1, AcqRel) == 1)
}
