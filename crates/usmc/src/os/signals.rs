//! Signals of a call that looks again and again, sleeping a moment each time, as nobody can wake it. One that is handled
//! between two of these sleeps would end none of them, and a program that counts on EINTR would wait for ever. So signals are
//! kept away from one sleep to the next, and let in by the sleep alone (ppoll(2)). Looks before a sleep do so, too, and so does a spin that
//! lasts.

use core::mem::{self, MaybeUninit};
use core::ptr;

use super::handlers;
use crate::os::errno::{self, errno};
use crate::os::sys::{self, Errno};
use crate::os::unwind::keeping;
use crate::os::{real, single};

/// What a sleep on the TCP socket ended with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// Something happened: look again.
    Look,
    /// Report this errno (EINTR, EAGAIN after SO_RCVTIMEO, …).
    Fail(Errno),
}

/// What one call knows of its thread's signals. They come in again where it is dropped.
pub struct Signals {
    kept: Option<Kept>,
    /// One that ends the call has come in outside a sleep.
    has_ended: bool,
}

/// Signals that are kept away. Sets of them are the kernel's: a bit each.
struct Kept {
    /// The mask that the thread had.
    before: u64,
    /// Those whose handlers end a call, and those after whose handlers it goes on (SA_RESTART), once that was asked.
    handled: Option<[u64; 2]>,
}

impl Signals {
    /// Nothing is kept away yet.
    pub const fn new() -> Signals {
        Signals { kept: None, has_ended: false }
    }

    /// Whether they are kept away.
    #[inline(always)]
    pub fn are_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Keeps them away from now on.
    pub fn keep(&mut self) {
        if self.kept.is_none() {
            self.kept = Some(Kept { before: sys::block_signals(), handled: None });
        }
    }

    /// Keeps them away, in a spin that goes on; whether one has come since. In a process with threads nothing is kept away: another thread
    /// would run the handler.
    #[cold]
    pub fn watch(&mut self) -> bool {
        if let Some(kept) = &self.kept {
            return sys::pending_signals() & !kept.before != 0;
        }
        if single::is_single() {
            self.keep();
        }
        false
    }

    /// Lets in what a spin has kept away, in a call that goes on without a sleep; `by_any` as for [`Signals::let_in`]. A handler that has
    /// ended the call ends its next sleep.
    #[inline(always)]
    pub fn spun(&mut self, by_any: bool) {
        if self.are_kept() {
            self.let_in(by_any);
        }
    }

    /// Lets them in, before a sleep of another kind or something that takes time. Whether the call has ended by that; any
    /// handler ends it if `by_any`.
    pub fn let_in(&mut self, by_any: bool) -> bool {
        if let Some(kept) = self.kept.take() {
            let pending = sys::pending_signals() & !kept.before;
            if pending != 0 {
                let [ends, goes_on] = handlers::sets();
                self.has_ended |= pending & (ends | if by_any { goes_on } else { 0 }) != 0;
            }
            sys::set_signals(kept.before);
        }
        self.has_ended
    }

    /// After a time without a sleep: whether a signal has come whose handler ends a wait with the mask `callers` (null: the thread's own). The
    /// handler runs where signals are let in. A signal that nobody handles ends no wait, but would end the sleep for which it is pending.
    pub fn have_come(&mut self, callers: *const libc::sigset_t) -> bool {
        let Some(kept) = &self.kept else { return false };
        let pending = sys::pending_signals() & !kept.before & !bits_of(callers);
        if pending == 0 {
            return false;
        }
        let [ends, goes_on] = handlers::sets();
        let is_handled = pending & (ends | goes_on) != 0;
        if !is_handled {
            sys::set_signals(kept.before);
            sys::block_signals();
        }
        is_handled
    }

    /// A millisecond of sleep. A handler with SA_RESTART ends the call only if `by_any`.
    pub fn tick(&mut self, by_any: bool) -> Woken {
        self.keep();
        self.poll(&mut [], 1, by_any)
    }

    /// poll(2). Where they are not kept away every handler ends it.
    pub fn poll(&mut self, fds: &mut [libc::pollfd], timeout_ms: i64, by_any: bool) -> Woken {
        if self.has_ended {
            return Woken::Fail(libc::EINTR);
        }
        let (at, count) = (fds.as_mut_ptr(), fds.len() as libc::nfds_t);
        let timeout_ms = timeout_ms.min(60_000);
        let Some(kept) = &mut self.kept else {
            // SAFETY: a valid slice; the real function is a cancellation point, as send and recv are.
            let n = unsafe { real::poll(at, count, timeout_ms as i32) };
            return if n < 0 { Woken::Fail(errno()) } else { Woken::Look };
        };
        // Where some end the call and others do not, which of them ran nobody tells: the others run afterwards.
        let [ends, goes_on] = match by_any {
            true => [0; 2],
            false => *kept.handled.get_or_insert_with(handlers::sets),
        };
        let later = if ends == 0 { 0 } else { goes_on & !kept.before };
        let mask = set_of(kept.before | later);
        let time = libc::timespec {
            tv_sec: (timeout_ms / 1000) as libc::time_t,
            tv_nsec: (timeout_ms % 1000 * 1_000_000) as libc::c_long,
        };
        let time = if timeout_ms < 0 { ptr::null() } else { &raw const time };
        // SAFETY: a valid slice, a time and a mask of ours; the real function is a cancellation point.
        let sleep = || unsafe { real::ppoll(at, count, time, &raw const mask) };
        let (unblocked, n) = keeping(Unblocked(later), sleep);
        let error = errno();
        mem::forget(unblocked);
        if later != 0 && sys::pending_signals() & later != 0 {
            sys::unblock_signals(later);
            sys::block_signals();
        }
        if n >= 0 {
            return Woken::Look;
        }
        if error == libc::EINTR && !by_any && ends == 0 {
            // They may be others by now.
            let now = handlers::sets();
            kept.handled = Some(now);
            if now[0] == 0 {
                return Woken::Look;
            }
        }
        Woken::Fail(error)
    }
}

impl Signals {
    /// The mask for a sleep of poll(2) or epoll_wait(2), which every handler ends: the caller's own, or the one that lets in what
    /// is kept away, which is put to `at`.
    pub fn mask(
        &self,
        callers: *const libc::sigset_t,
        at: &mut MaybeUninit<libc::sigset_t>,
    ) -> *const libc::sigset_t {
        match &self.kept {
            Some(kept) if callers.is_null() => at.write(set_of(kept.before)),
            _ => callers,
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if let Some(kept) = self.kept.take() {
            // A handler runs here, and may change errno, which is the call's by now.
            let _errno = errno::keep();
            sys::set_signals(kept.before);
        }
    }
}

/// A handler that jumps out of a sleep leaves the thread those signals, too, that the sleep alone kept away.
struct Unblocked(u64);

impl Drop for Unblocked {
    fn drop(&mut self) {
        if self.0 != 0 {
            sys::unblock_signals(self.0);
        }
    }
}

/// The kernel's bits of a set of libc's; none of null.
fn bits_of(set: *const libc::sigset_t) -> u64 {
    // SAFETY: a valid set, of at least the kernel's 64 bits, which stand first.
    if set.is_null() { 0 } else { unsafe { set.cast::<u64>().read_unaligned() } }
}

/// As libc has it.
fn set_of(signals: u64) -> libc::sigset_t {
    // SAFETY: all-zero is a valid set, of at least the kernel's 64 bits, which stand first.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        (&raw mut set).cast::<u64>().write_unaligned(signals);
        set
    }
}
