//! The end: close(2) and shutdown(2). The kernel's FIN or RST is the truth; flags in the slot make the
//! common case immediate.

use usmc_shm::layout::Slot;
use usmc_shm::state::{EndState, TxFlags};
use usmc_shm::sync::Ordering::{Acquire, Relaxed, SeqCst};

use super::{Outcome, connect};
use crate::family::holders::{self, Remaining};
use crate::family::passed_on;
use crate::handshake::{brief, clc, transition};
use crate::os::events::HUP;
use crate::os::process::{self, OWES_END, OWES_SHUT_RD, OWES_SHUT_WR};
use crate::os::reason::Reason;
use crate::os::table::{self, Entry};
use crate::os::{clock, errno, sys};
use crate::record::conn::{self, Conn, F_CLC, F_DEPUTY, F_TUNED};
use crate::record::numbers::{self, Hold};
use crate::record::phase::Phase;
use crate::record::users::{CALL, Left};
use crate::record::{kernel, order};
use crate::stream::{bells, fallback, hearing, wait};
use crate::watch::{capture, observer};
use crate::watchers::epoll;

/// How often a doorbell of ours is looked after. It is one system call that does not wait.
const BELL_PATIENCE: u32 = 4_096;

/// To be called just before the kernel closes `fd` (close, dup2 over it, close_range): what the library
/// knows about it ends. The caller makes the real call next, and then says [`table::changed`].
///
/// Returns false when the fd is the library's own and must stay.
pub fn closing(fd: i32) -> bool {
    match table::get(fd) {
        Entry::Foreign => true,
        Entry::Internal => !wait::is_own_process(),
        // A child on our memory (vfork inside libc) closes its own descriptors, not ours.
        _ if !wait::is_own_process() => true,
        Entry::Epoll(index) => {
            if table::take_to_close(fd) != Entry::Foreign {
                epoll::closed(index);
            }
            true
        }
        Entry::Uring(index) => {
            if table::take_to_close(fd) != Entry::Foreign {
                table::URING_CLOSED.call(index);
            }
            true
        }
        Entry::Conn(index) => {
            if conn::at(index).has(F_CLC) {
                clc::first::before_end(fd, index, conn::at(index));
            }
            if table::take_to_close(fd) != Entry::Foreign {
                keep_for_interrupted(conn::at(index));
                keep_for_sleepers(fd, index);
                order::taken(conn::at(index));
                wait_for_bells(conn::at(index));
                drop_ref(fd, index);
            }
            true
        }
    }
}

/// `fd` was closed behind our back and its number means something else by now: forget it without
/// touching the kernel.
pub fn closing_stale(fd: i32) -> bool {
    match table::take(fd) {
        Entry::Epoll(index) => epoll::closed(index),
        Entry::Uring(index) => table::URING_CLOSED.call(index),
        Entry::Conn(index) => {
            let conn = conn::at(index);
            if conn.users.leave() {
                epoll::forget(-1, index);
                let remaining = {
                    let _rx = conn.rx_lock.enter();
                    let _tx = conn.tx_lock.enter();
                    transition::end(conn)
                };
                end_record(index, remaining);
            }
        }
        Entry::Foreign | Entry::Internal => return false,
    }
    true
}

fn drop_ref(fd: i32, index: u32) {
    let conn = conn::at(index);
    if !conn.users.leave() {
        epoll::pay_for(index);
        // Steps that use this number end; those that begin now ask for another one ([`numbers::number_in_step`]).
        drop(conn.rx_lock.enter());
        drop(conn.tx_lock.enter());
        return renumber(fd, index);
    }
    last_left(fd, index);
}

/// The same of doorbells, for which no lock is held: see `bells::ring_bell`.
fn wait_for_bells(conn: &Conn) {
    // A handler may have interrupted its own thread in the middle of one.
    for look in 0..BELL_PATIENCE {
        if conn.ringing.load(SeqCst) == 0 {
            break;
        }
        process::give_way(look);
    }
}

/// Nobody needs the record of `fd` any more, which is -1 where there is no number.
fn last_left(fd: i32, index: u32) {
    let conn = conn::at(index);
    passed_on::look(fd, conn);
    epoll::forget(fd, index);
    if conn.phase() == Phase::Listen {
        connect::no_longer_listening(conn);
    }
    capture::closing(fd, conn);
    if fd >= 0 && clc::is_on(conn) {
        clc::before_close(fd, conn);
    }
    let remaining = {
        // Threads inside a step on this socket finish it first; sleepers find the record changed.
        let _rx = conn.rx_lock.enter();
        let _tx = conn.tx_lock.enter();
        if let Some(slot) = conn.slot()
            && is_live(conn)
            && is_last(fd, conn, slot)
        {
            learn(conn);
            say_goodbye(fd, conn, slot);
        }
        transition::end(conn)
    };
    end_record(index, remaining);
}

/// The peer may have to send for us, by the number that it was told (see [`fallback`]): if that is `fd`, which is about to be
/// closed, it is told another one.
fn renumber(fd: i32, index: u32) {
    let conn = conn::at(index);
    let Some(end) = conn.slot().map(|slot| conn.end(slot)) else { return };
    if end.fd.load(Relaxed) == fd.cast_unsigned()
        && end.pid.load(Relaxed) == process::pid()
        && let Some(number) = numbers::any_number(index)
    {
        end.fd.store(number.cast_unsigned(), Relaxed);
    }
}

/// `remaining`: what [`transition::end`] has told.
fn end_record(index: u32, remaining: Remaining) {
    let conn = conn::at(index);
    if remaining.or(holders::let_go(conn)) != Remaining::Others {
        passed_on::release(conn);
    }
    observer::gone(conn);
    conn::free(index);
}

/// What becomes of a call that has found its number closed before it began its first step. `None`: the same again.
#[cold]
pub fn closed_before(fd: i32, index: u32) -> Option<Outcome> {
    match table::settled(fd) {
        Entry::Conn(now) if now == index => None,
        Entry::Conn(_) => Some(Outcome::Other),
        Entry::Foreign | Entry::Epoll(_) | Entry::Uring(_) => Some(Outcome::Kernel),
        Entry::Internal => Some(Outcome::Fail(libc::EBADF)),
    }
}

/// `fd` is about to be closed: leaves a duplicate to calls that sleep on the connection, which may have to read
/// from the kernel or to take doorbells away, as those would turn its FIN into a RST.
fn keep_for_sleepers(fd: i32, index: u32) {
    let conn = conn::at(index);
    // Before the first ring and the first message the calls that sleep are the kernel's own.
    let ours = conn.slot().is_some() || conn.returns() > 0 || conn.has(F_CLC);
    if conn.users.has_calls()
        && ours
        && let Ok(copy) = table::duplicate(fd)
    {
        if conn.spare.compare_exchange(0, (copy + 1).cast_unsigned(), SeqCst, Relaxed).is_err() {
            table::release_fd(copy);
        } else if !conn.users.keep_spare() {
            // The last has left in this instant, and not seen it.
            numbers::release_spare(index);
        }
    }
}

/// The same where a handler closes the number of its own thread's call, which it has interrupted in the middle of a step: as
/// long as that lasts, it is a call that keeps the record.
fn keep_for_interrupted(conn: &Conn) {
    for lock in [&conn.rx_lock, &conn.tx_lock] {
        // The number that is being closed counts still, so that there is a record to enter.
        if lock.owe(OWES_END) {
            conn.users.enter(CALL);
        }
    }
}

/// The lock at this address was given back, with `owed` (`OWES_*`) left to be done by handlers. The caller may hold the
/// record's other lock.
pub fn after_interruption((lock, owed): (usize, u64)) {
    let Some(index) = conn::around(lock) else { return };
    let _errno = errno::keep();
    let how = match (owed & OWES_SHUT_RD != 0, owed & OWES_SHUT_WR != 0) {
        (false, false) => None,
        (true, false) => Some(libc::SHUT_RD),
        (false, true) => Some(libc::SHUT_WR),
        (true, true) => Some(libc::SHUT_RDWR),
    };
    let fd = how.and_then(|_| numbers::any_number(index));
    if let (Some(how), Some(fd)) = (how, fd) {
        let before = shutting_down(fd, index, how);
        match sys::shutdown(fd, how) {
            Ok(()) => shut_down(fd, index),
            Err(_) => not_shut_down(index, before),
        }
    }
    if owed & OWES_END != 0 {
        drop(Hold::of_call(index));
    }
}

/// Fork, in the child: the parent's other threads and their calls do not exist here.
pub fn forget_holds(index: u32) {
    let alone = conn::at(index).users.forget_calls();
    numbers::release_spare(index);
    if alone {
        // Closed already, and kept by such a call alone.
        drop_ref(-1, index);
    }
}

/// A call that held the connection has ended, and needs something done: [`numbers::ENDED`].
pub fn call_ended((index, left): (u32, Left)) {
    let _errno = errno::keep();
    if left == Left::Last {
        last_left(-1, index);
    } else {
        // Before the record can go: with the duplicate goes the socket, if its numbers are closed.
        let spare = conn::at(index).spare.swap(0, SeqCst).cast_signed() - 1;
        wait_for_bells(conn::at(index));
        drop_ref(spare, index);
        if spare >= 0 {
            table::release_fd(spare);
        }
    }
}

/// Whether the peer may use the ring already.
fn is_live(conn: &Conn) -> bool {
    matches!(conn.phase(), Phase::Attached | Phase::Ring)
}

/// The process learns from a connection that ends and that an agent has: how its server's connections are used.
fn learn(conn: &Conn) {
    if conn.has(F_DEPUTY)
        && conn.clc.has_connected.load(Relaxed) != 0
        && let Some(record) = observer::record_of(conn)
    {
        // A deputy is the accepting end of its pair.
        let server = transition::stored(conn).client;
        let calls = [&record.tx_calls, &record.rx_calls].map(|calls| calls.load(Relaxed));
        let bytes = record.tx_bytes.load(Relaxed) + record.rx_bytes.load(Relaxed);
        // The handshake's last step was the hand-over.
        let lasted = clock::now_ms().wrapping_sub(conn.clc.since.load(Relaxed));
        brief::ended(server, brief::Use { calls, bytes, lasted });
    }
}

/// The process ends, and the kernel closes `fd`: the peer is told what a close tells. The caller has both locks.
pub fn exiting(fd: i32, conn: &Conn) {
    if let Some(slot) = conn.slot()
        && is_live(conn)
        && is_last(fd, conn, slot)
        && conn.own(slot).flags(Relaxed).end() != EndState::Aborted
    {
        capture::closing(fd, conn);
        say_goodbye(fd, conn, slot);
    }
    passed_on::release(conn);
}

/// Whether the socket goes with this process' hold on it.
fn is_last(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    conn.end(slot).refs.load(Relaxed) <= 1 && passed_on::is_sole(fd, conn)
}

/// The last holder closes: with unread data TCP would send a RST, otherwise a FIN.
fn say_goodbye(fd: i32, conn: &Conn, slot: &Slot) {
    let reset_asked = match conn.has(F_TUNED) {
        true => conn.end(slot).flags().resets(),
        false => kernel::resets(fd),
    };
    let is_tcp = conn.peer(slot).flags(Acquire).is_returning()
        && fallback::finish_rx_at_last(fd, conn, slot);
    let in_ring = !is_tcp && bells::reads_ring(fd, conn, slot);
    // Before the boundary, what TCP holds is data. An urgent byte that is next is not counted.
    let in_tcp = !in_ring
        && (sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n > 0) || kernel::is_at_mark(fd));
    let unread = in_tcp || (!is_tcp && conn.rx(slot).has_data());
    let aborts = unread || reset_asked;
    if !aborts {
        fallback::leave_copies(fd, conn, slot);
    }
    if conn.own(slot).close(aborts).is_left() {
        fallback::go_back_at_last(fd, conn, slot);
    }
    if unread && !reset_asked {
        let now = libc::linger { l_onoff: 1, l_linger: 0 };
        let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &now);
    } else if in_ring {
        // Doorbells left unread would turn the FIN into a RST.
        bells::drain_bells(fd, conn, slot);
    }
}

/// After a real shutdown(2). Where it was for writing, threads of ours that wait for room sleep on the kernel's socket until
/// something can be read there, which this alone does not end.
pub fn shut_down(fd: i32, index: u32) {
    let conn = conn::at(index);
    let Some(slot) = conn.slot() else { return };
    if conn.phase() != Phase::Ring || !conn.own(slot).flags(SeqCst).is_done() {
        return;
    }
    if !conn.end(slot).flags().is_shut_rd() {
        hearing::take_ear(conn, slot);
    }
    if !conn.tx(slot).is_writable() {
        epoll::look_for_room(index);
    }
    if conn.blocked_sends.load(SeqCst) > 0 || conn.tx_sleepers.load(SeqCst) > 0 {
        bells::cut(fd, conn, slot);
    }
}

/// Whether shutdown(2) is left to the call that this handler has interrupted in the middle of a send: what that has copied
/// comes before the end.
pub fn shuts_down_later(index: u32, how: i32) -> bool {
    let lock = &conn::at(index).tx_lock;
    let owed = match how {
        libc::SHUT_WR => OWES_SHUT_WR,
        libc::SHUT_RDWR => OWES_SHUT_RD | OWES_SHUT_WR,
        _ => return false,
    };
    lock.is_mine() && {
        lock.owe(owed);
        true
    }
}

/// What a shutdown(2) has found in the slot, for the case that the kernel refuses it.
#[derive(Clone, Copy)]
pub struct Before {
    own: TxFlags,
    is_shut_rd: bool,
}

/// To be called before the real shutdown(2). The result is for [`not_shut_down`]; `None`: the slot was not told.
pub fn shutting_down(fd: i32, index: u32, how: i32) -> Option<Before> {
    let conn = conn::at(index);
    if how != libc::SHUT_RD {
        order::taken(conn);
        capture::ending(fd, conn);
        if conn.has(F_CLC) {
            clc::first::before_end(fd, index, conn);
        }
        clc::deputy::follow(fd, index);
    }
    // Keeps the connection where it is: in this ring, or out of any. Registrations are not looked at meanwhile: a fork takes
    // their locks first.
    let (tx, slot) = loop {
        // Before the change-over it is not worth the trouble, and the kernel knows best.
        if matches!(conn.phase(), Phase::Early | Phase::Offered) {
            transition::take_back(conn, Reason::ShutDown);
        }
        let held = conn.tx_lock.enter();
        match conn.slot() {
            Some(slot) => break (held, slot),
            // It has just come back.
            None if conn.phase() == Phase::Early => {}
            None => {
                drop(held);
                epoll::forget_known(index);
                return None;
            }
        }
    };
    if conn.kernel_events.load(Relaxed) & HUP != 0 && kernel::is_over(fd) {
        // The real call fails, and wakes the waiters. What is seen by those meanwhile must not come and go.
        drop(tx);
        epoll::edge(index);
        return None;
    }
    let (own, end) = (conn.own(slot), conn.end(slot));
    let before = Before { own: own.flags(Relaxed), is_shut_rd: end.flags().is_shut_rd() };
    if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
        end.set_shut_rd(true);
    }
    if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
        fallback::leave_copies(fd, conn, slot);
        // A send that sleeps for room looks at this: `wait::for_room`.
        if own.shut().is_left() {
            fallback::go_back_at_last(fd, conn, slot);
        }
    }
    // Once both directions are shut, TCP resets at the next byte that comes: nobody reads, as after a close.
    if end.flags().is_shut_rd() && own.flags(Relaxed).was_shut() {
        own.shut_both();
    }
    drop(tx);
    // The real call wakes the waiters, even where it fails.
    epoll::edge(index);
    Some(before)
}

/// The real shutdown(2) failed, as it does on a connection that was reset: no FIN went out.
pub fn not_shut_down(index: u32, before: Option<Before>) {
    let conn = conn::at(index);
    let (Some(slot), Some(before)) = (conn.slot(), before) else { return };
    conn.own(slot).take_shut_back(before.own);
    if !before.is_shut_rd {
        conn.end(slot).set_shut_rd(false);
    }
}
