//! What this process holds together with others, when it ends or becomes another program without closing it.
//!
//! The kernel closes the sockets, and peers learn of it from the kernel. The family has to learn of it, too: a
//! connection that nobody else holds any more needs no shared locks and no questions about its flags, and its
//! last holder says goodbye. A killed process is counted out by the others ([`crate::os::members`]).

use core::mem;
use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed};

use crate::family::{holders, liveness, passed_on};
use crate::handshake::{clc, syn_option, transition};
use crate::host::Receiver;
use crate::os::process::{self, Lock};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table;
use crate::os::{kernel_only, log, members};
use crate::record::conn::{self, Conn, F_CLC, F_COPIED, F_DOWN, F_HANDED, F_SHARED};
use crate::record::numbers;
use crate::record::phase::Phase;
use crate::socket::close;
use crate::stream::fallback::{self, Patience};

/// Counts us out where somebody else is left. A connection that only we hold ends with the kernel's FIN.
fn put_down(conn: &Conn) -> bool {
    let others = |n: u32| if n > 1 { Some(n - 1) } else { None };
    let list = holders::members(conn);
    list.inspect(|list| members::leave(list));
    // Before we are: our death says nothing about the others then.
    conn.slot().inspect(|slot| liveness::stop_vouching(conn, slot, process::pid()));
    let counted_out =
        holders::holders(conn).is_some_and(|n| n.fetch_update(AcqRel, Relaxed, others).is_ok());
    if !counted_out {
        list.inspect(|list| members::enter(list));
        conn.slot().inspect(|slot| liveness::vouch(conn, slot));
    } else if let Some(end) = conn.family() {
        holders::leave_to_parent(end);
    }
    counted_out
}

/// Counts us in again. False where the others have all closed it, and the peer was told so.
fn pick_up(conn: &Conn) -> bool {
    let open = |n: u32| if n > 0 { Some(n + 1) } else { None };
    let counted =
        holders::holders(conn).is_some_and(|n| n.fetch_update(AcqRel, Acquire, open).is_ok());
    if counted {
        holders::members(conn).inspect(|list| members::enter(list));
    }
    counted
}

/// The process ends now. Other threads are kept away from what is put down.
pub fn end() {
    if process::is_foreign_child() || kernel_only::is_sandboxed() {
        return;
    }
    sys::block_signals();
    end_handshakes();
    let mut any = false;
    conn::for_each(|_, conn| {
        let shared = conn.has(F_SHARED);
        let entrusted = conn.passed_on.load(Relaxed) != 0;
        if (shared || entrusted || matches!(conn.phase(), Phase::Attached | Phase::Ring))
            && keep(&conn.rx_lock)
            && keep(&conn.tx_lock)
            && !(shared && put_down(conn))
        {
            conn.set_flag(F_DOWN, true);
            any = true;
        }
    });
    if !any {
        return;
    }
    // What nobody else holds.
    numbers::for_each(|fd, _, conn| {
        if conn.has(F_DOWN) {
            conn.set_flag(F_DOWN, false);
            close::exiting(fd, conn);
        }
    });
    // And what has no number any more, only sleepers.
    conn::for_each(|_, conn| {
        let spare = conn.spare.load(Relaxed).cast_signed();
        if conn.has(F_DOWN) && spare > 0 {
            close::exiting(spare - 1, conn);
        }
    });
}

/// The process ends, and the kernel closes the sockets: none has a message in it that nobody has read.
pub fn end_handshakes() {
    numbers::for_each(|fd, _, conn| {
        if clc::is_on(conn) {
            clc::before_close(fd, conn);
        }
    });
}

/// Takes a lock for good, unless its holder is stuck or the very thread that a signal handler interrupted.
fn keep(lock: &Lock) -> bool {
    for _ in 0..100 {
        if let Some(held) = lock.try_enter() {
            mem::forget(held);
            return true;
        }
        sys::sched_yield();
    }
    false
}

/// The process ends, and libc may still flush the streams that were made for connections.
pub fn end_but_for_streams() {
    if !crate::os::libc_streams::are_served() {
        conn::for_each(|_, conn| {
            if !(conn.has(F_SHARED) && put_down(conn)) {
                passed_on::release(conn);
            }
        });
    }
}

/// The process is about to become another program: puts down what is closed on the way. What crosses becomes TCP,
/// which any program understands, and is still held.
///
/// # Errors
/// See [`fallback::leave`].
pub fn before_exec() -> Result<(), Errno> {
    if process::is_foreign_child() {
        return Ok(());
    }
    let mut crossing = Ok(());
    let mut any = false;
    disarm_listeners();
    numbers::for_each(|fd, index, conn| {
        let lasts =
            matches!(conn.phase(), Phase::Early | Phase::Offered | Phase::Attached | Phase::Ring);
        if (lasts || conn.has(F_CLC)) && crosses_exec(fd) {
            let left = match lasts {
                true => hand_to_next_program(fd, index),
                // A message of a handshake that has ended may still stand in the stream.
                false => fallback::leave(fd, index, Reason::PassedOn),
            };
            match left {
                // What others hold is most likely not meant to be used there.
                Err(_) if is_others_too(conn) && keep_out(fd) => {
                    log::warn(format_args!(
                        "fd {fd}: in the ring, and not taken along to the next program"
                    ));
                }
                left => crossing = crossing.and(left),
            }
        }
    });
    if let Err(errno) = crossing {
        let_cross();
        conn::for_each(|_, conn| {
            if conn.has(F_HANDED) {
                conn.set_flag(F_HANDED, false);
                passed_on::take_back(conn, Receiver::this_program(), false);
            }
        });
        return Err(errno);
    }
    conn::for_each(|_, conn| {
        let down = conn.has(F_SHARED);
        conn.set_flag(F_DOWN, down);
        any |= down || conn.has(F_HANDED);
    });
    if !any {
        return Ok(());
    }
    numbers::for_each(|fd, _, conn| {
        if conn.has(F_DOWN) && !conn.has(F_HANDED) && crosses_exec(fd) {
            // Nobody would count the next program out.
            conn.set_flag(F_DOWN, false);
        }
    });
    conn::for_each(|_, conn| {
        if conn.has(F_DOWN) && !put_down(conn) {
            conn.set_flag(F_DOWN, false);
        }
        // The family ends here, and the next program begins another.
        if conn.has(F_HANDED) && !conn.has(F_DOWN) {
            passed_on::release_own(conn);
        }
    });
    Ok(())
}

/// Whether another process holds it.
fn is_others_too(conn: &Conn) -> bool {
    conn.has(F_SHARED) && !holders::is_sole_holder(conn)
}

/// The next program may be without the library. A forked child's most likely does not accept; its parent goes on to.
fn disarm_listeners() {
    numbers::for_each(|fd, _, conn| {
        if conn.phase() == Phase::Listen && !conn.has(F_COPIED) && crosses_exec(fd) {
            syn_option::disarm(fd, conn);
        }
    });
}

/// Makes it TCP, and tells the directory which process will have it.
fn hand_to_next_program(fd: i32, index: u32) -> Result<(), Errno> {
    let conn = conn::at(index);
    if conn.has(F_HANDED) {
        // By another number.
        return Ok(());
    }
    hand_over(fd, index, Receiver::this_program(), Reason::PassedOn, &Patience::new())
}

/// The same for a program that is started beside this one, which comes back to the ring when it is alone again. `patience`
/// is for all connections that it will have.
///
/// # Errors
/// See [`fallback::leave`].
pub fn lend(fd: i32, index: u32, to: Receiver, patience: &Patience) -> Result<(), Errno> {
    transition::put_off(fd, conn::at(index));
    hand_over(fd, index, to, Reason::Lent, patience)
}

fn hand_over(
    fd: i32,
    index: u32,
    to: Receiver,
    reason: Reason,
    patience: &Patience,
) -> Result<(), Errno> {
    let conn = conn::at(index);
    loop {
        if conn.phase() != Phase::Early || clc::is_on(conn) {
            fallback::leave_within(fd, index, reason, patience)?;
        }
        // Another thread may be at a step of its handshake; none is made once the flag is set.
        let _step = conn.step_lock.enter();
        if !matches!(conn.phase(), Phase::Offered | Phase::Attached | Phase::Ring) {
            let known = passed_on::hand_over(fd, conn, to);
            // Of a program beside this one, the device's count keeps steps away.
            conn.set_flag(F_HANDED, known && reason == Reason::PassedOn);
            if !known && reason == Reason::Lent {
                // The directory has no room to count its holders.
                conn.give_up_early(reason);
            }
            return Ok(());
        }
    }
}

/// Whether the next program will know it by this number.
pub fn crosses_exec(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC as usize == 0)
}

/// Numbers under which the next program gets a socket without a connection: the number plus one, and from bit 32 on where
/// the connection is meanwhile.
static KEPT_OUT: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// The next program does not get this connection, in which it would read doorbells as bytes, and miss those in the ring.
/// False where there is no room to remember it.
fn keep_out(fd: i32) -> bool {
    let Ok(copy) = table::duplicate(fd) else { return false };
    let word = u64::from(copy.cast_unsigned()) << 32 | u64::from(fd.cast_unsigned() + 1);
    let none = sys::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
    let note = |n: &AtomicU64| n.compare_exchange(0, word, Relaxed, Relaxed).is_ok();
    let done = none.is_ok_and(|none| {
        let done = sys::dup2(none, fd).is_ok();
        sys::close(none);
        done && KEPT_OUT.iter().any(note)
    });
    if !done {
        let _ = sys::dup2(copy, fd);
        table::release_fd(copy);
    }
    done
}

/// There is no next program.
pub fn let_cross() {
    for word in &KEPT_OUT {
        let word = word.swap(0, Relaxed);
        if word != 0 {
            let (fd, copy) = ((word as u32 - 1).cast_signed(), (word >> 32) as i32);
            let _ = sys::dup2(copy, fd);
            table::release_fd(copy);
        }
    }
}

/// It has not become one.
pub fn after_failed_exec() {
    if process::is_foreign_child() {
        return;
    }
    let_cross();
    conn::for_each(|_, conn| {
        let (handed, down) = (conn.has(F_HANDED), conn.has(F_DOWN));
        conn.set_flag(F_HANDED | F_DOWN, false);
        if handed {
            passed_on::take_back(conn, Receiver::this_program(), !down);
        }
        if down && !pick_up(conn) {
            conn.forget_slot();
            conn.forget_past();
            conn.give_up(Reason::PeerGone);
        }
    });
}
