//! fork(2): both processes may use every connection.
//!
//! Before the fork all steps in progress are finished (their locks are held), each connection's end
//! counts one more holder, and records are marked as shared: from then on the slot's own locks are used
//! and the kernel is asked for flags that the other process may have changed.
//!
//! libc tells us of its forks through pthread_atfork(3) ([`register`]); makers of processes that it does not
//! tell of are wrapped ([`around`]).

use core::ffi::{c_int, c_void};
use core::ptr;
use usmc_shm::sync::Ordering::{AcqRel, Relaxed};
use usmc_shm::sync::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use super::{exec, spawn};
use crate::device::{self, segment};
use crate::family::holders::{self, cell_of, is_alone};
use crate::family::passed_on;
use crate::handshake::clc;
use crate::os::errno::{apart, errno, set_errno};
use crate::os::reason::Reason;
use crate::os::{libc_streams, process, real, sys};
use crate::record::conn::{self, Conn, F_DOWN, F_FORKED, F_HANDED};
use crate::record::near;
use crate::record::phase::Phase;
use crate::socket::{close, connect, unanswered};
use crate::stream::{drained, fallback, unheard, wait};
use crate::watch::observer;
use crate::watchers::epoll;
use crate::{host, uring};

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
        holders::note_copied(conn);
        clc::before_fork(conn);
        match conn.phase() {
            _ if conn.slot().is_some() => {
                share_sleepers(conn);
                holders::count_in_slots(conn, true);
                share(conn);
            }
            _ if holders::count_in_slots(conn, true) => share(conn),
            phase if phase == Phase::Early || clc::is_on(conn) => {
                if conn.cell.load(Relaxed) == 0 {
                    conn.cell.store(holders::new_cell().unwrap_or(0), Relaxed);
                }
                match cell_of(conn) {
                    Some(cell) => {
                        cell.holders.fetch_add(1, AcqRel);
                        share(conn);
                    }
                    None => conn.give_up(Reason::NoMemory),
                }
            }
            _ => {}
        }
        if conn.has(F_FORKED) {
            holders::enter(conn);
        }
    });
    // After the marks: a process that fetches looks for them once it has said so.
    passed_on::before_fork();
    segment::hold();
    MASK.store(mask, Relaxed);
    FORKING.store(process::thread(), Relaxed);
}

/// The child holds the connection, too, and is counted.
fn share(conn: &Conn) {
    holders::share(conn);
    conn.set_flag(F_FORKED, true);
}

/// All sleepers of the end are asked for from now on: those that were killed are still counted among them, and those of
/// this process are not yet.
fn share_sleepers(conn: &Conn) {
    if let Some(slot) = conn.slot()
        && is_alone(conn)
    {
        for for_room in [false, true] {
            wait::sleepers(conn, Some(slot), for_room).share(|| holders::share(conn));
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
            holders::put_down(conn);
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
        if !conn.has(F_FORKED)
            && matches!(conn.phase(), Phase::Offered | Phase::Early | Phase::Attached | Phase::Ring)
        {
            // Made by another thread after `prepare`: not counted, and nobody here knows of it.
            conn.forget_slot();
            conn.forget_past();
            conn.give_up(Reason::Adopted);
        }
        let has_cell = conn.phase() == Phase::Early || clc::is_on(conn);
        if !has_cell || conn.family().is_some() {
            // Of an earlier time: this fork has not counted there.
            conn.cell.store(0, Relaxed);
        }
        if conn.has(F_FORKED) {
            holders::enter(conn);
        }
        clc::after_fork(conn);
        // Often the parent closes its own.
        conn.ends().for_each(near::name_process);
        // An exec that another thread was trying is not tried here.
        conn.set_flag(F_FORKED | F_DOWN | F_HANDED, false);
        fallback::note_settled(conn);
        if conn.slot().is_some() {
            observer::came_by_fork(conn);
        }
        listening |= conn.phase() == Phase::Listen;
    });
    segment::after_fork();
    unheard::after_fork();
    unanswered::after_fork();
    drained::after_fork();
    device::after_fork();
    host::current().after_fork(listening);
    if listening {
        conn::for_each(|_, conn| {
            if conn.phase() == Phase::Listen {
                connect::inherited_listener(conn);
            }
        });
    }
    observer::after_fork();
    epoll::after_fork();
    uring::after_fork();
    conn::for_each(|index, _| close::forget_holds(index));
    exec::let_cross();
    spawn::after_fork();
    sys::set_signals(MASK.load(Relaxed));
}

/// Makes a process by `make`, which runs no handlers of pthread_atfork(3) and returns as fork(2) does.
pub fn around(make: impl FnOnce() -> libc::pid_t) -> libc::pid_t {
    // What a child on our memory makes is the kernel's affair: the tables are its parent's.
    if process::is_foreign_child() {
        return make();
    }
    apart(prepare);
    let pid = make();
    apart(|| if pid == 0 { child() } else { parent(pid < 0) });
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
        let streams = libc_streams::are_served();
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
            exec::end();
        }
        set_errno(if code != 0 { code } else { saved });
    }
}

extern "C" fn on_child() {
    if is_prepared() {
        let saved = ERRNO.load(Relaxed);
        child();
        if STREAMS.load(Relaxed) {
            // SAFETY: no other thread exists here that could have it.
            unsafe { real::_IO_list_resetlock() };
        }
        set_errno(saved);
    }
}
