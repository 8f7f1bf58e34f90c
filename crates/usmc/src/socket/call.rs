//! A call that moves bytes and may sleep for that: what it keeps meanwhile, and what it says where it ends early.

use core::mem::{self, ManuallyDrop};
use libc::MSG_DONTWAIT;

use super::{Outcome, close};
use crate::family::holders;
use crate::os::clock;
use crate::os::signals::Signals;
use crate::os::sys::Errno;
use crate::os::unwind::keeping;
use crate::record::conn;
use crate::record::numbers::{self, Hold};
use crate::stream::ending;

/// One call, from its first step to its end.
pub struct Call {
    fd: i32,
    /// Its connection.
    pub index: u32,
    /// `MSG_*`.
    pub flags: i32,
    /// Keeps the connection, whatever thread closes the number meanwhile.
    hold: ManuallyDrop<Option<Hold>>,
    /// When it began to wait ([`clock::now_ns`]); 0 = it has not.
    pub since: u64,
    /// Those of its thread.
    pub signals: ManuallyDrop<Signals>,
    /// Bytes that it has moved.
    pub total: usize,
}

impl Call {
    /// Before its first step.
    #[inline(always)]
    pub const fn new(fd: i32, index: u32, flags: i32, hold: Option<Hold>) -> Call {
        let (hold, signals) = (ManuallyDrop::new(hold), ManuallyDrop::new(Signals::new()));
        Call { fd, index, flags, hold, since: 0, signals, total: 0 }
    }

    /// The connection's number: the application's, unless that was closed while the call kept the connection.
    #[inline(always)]
    pub fn fd(&self) -> i32 {
        self.hold.as_ref().map_or(self.fd, |hold| hold.fd(self.fd))
    }

    /// Whether it keeps the connection.
    #[inline(always)]
    pub fn is_held(&self) -> bool {
        self.hold.is_some()
    }

    /// Whether it waits. O_NONBLOCK counts where the call begins.
    pub fn waits(&self) -> bool {
        let is_nonblocking = || holders::is_nonblocking(self.fd(), conn::at(self.index));
        self.flags & MSG_DONTWAIT == 0 && (self.since != 0 || !is_nonblocking())
    }

    /// Keeps the connection from now on. False where the number was closed before: see [`Call::closed`].
    pub fn hold(&mut self) -> bool {
        if self.hold.is_none() {
            *self.hold = Hold::enter(self.fd, self.index);
        }
        self.hold.is_some()
    }

    /// The same, before a sleep.
    pub fn begin_sleep(&mut self) -> bool {
        if self.since == 0 {
            self.since = clock::now_ns();
        }
        self.hold()
    }

    /// Whether it was about to sleep before, or has slept.
    pub fn has_slept(&self) -> bool {
        self.since != 0
    }

    /// What becomes of a call that has found its number closed before it kept the connection. `None`: the same again.
    #[cold]
    pub fn closed(&self) -> Option<Outcome> {
        match self.total {
            0 => close::closed_before(self.fd, self.index),
            _ => Some(self.done()),
        }
    }

    /// Does what may never return (see [`keeping`]), by this number of the connection.
    pub fn kept<R>(&mut self, sleep: impl FnOnce(&mut Call, i32) -> R) -> R {
        let hold = self.hold.take();
        let (hold, woken) = keeping(hold, || sleep(self, numbers::number(self.fd, self.index)));
        *self.hold = hold;
        woken
    }

    /// Before something else than one of our sleeps: whether a signal has ended the call.
    pub fn is_interrupted(&mut self) -> bool {
        self.signals.let_in(self.total > 0)
    }

    /// The end of a call that reports its bytes.
    #[inline(always)]
    pub fn done(&self) -> Outcome {
        Outcome::Done(self.total)
    }

    /// The end by an error. A call that has moved bytes reports these, and the next one the error.
    pub fn fail(&self, errno: Errno) -> Outcome {
        if self.total == 0 {
            return Outcome::Fail(errno);
        }
        ending::put_back(conn::at(self.index), errno);
        self.done()
    }

    #[cold]
    fn give_back(&mut self) {
        drop(self.hold.take());
        drop(mem::replace(&mut *self.signals, Signals::new()));
    }
}

impl Drop for Call {
    /// In line: few calls have anything to give back.
    #[inline(always)]
    fn drop(&mut self) {
        if self.hold.is_some() || self.signals.are_kept() {
            self.give_back();
        }
    }
}
