//! The users of a connection's record in this process.

use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use crate::os::single;

/// The users of a record: fds of this process that mean its socket, and calls that may sleep on it
/// ([`crate::record::numbers::Hold`]), some of them through the kernel's TCP while there is no slot
/// ([`crate::socket::early::Early`]). One word, for a short connection changes it at each call. Where there are threads all
/// steps are SeqCst: a call enters before it looks whether its number still means the record, and the thread that takes the number away
/// looks for calls afterwards, so that one of them sees the other.
pub struct Users(AtomicU64);

/// What a call counts as.
#[derive(Clone, Copy)]
pub struct Kind(u64);

/// Any call.
pub const CALL: Kind = Kind(Users::CALL | 1);
/// One through TCP that a slot would not know of.
pub const EARLY_CALL: Kind = Kind(Users::EARLY | Users::CALL | 1);

/// What becomes of the record when a call leaves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// Others need it.
    Needed,
    /// It was the last user.
    Last,
    /// It was the last call, and there is a duplicate for calls, which goes now. The call is a user still.
    LastCall,
}

impl Users {
    /// Fds and calls. There is room for 16 million, and for half a million threads in calls.
    const ALL: u64 = Users::CALL - 1;
    /// Calls are counted from here on.
    const CALL: u64 = 1 << 24;
    const CALLS: u64 = Users::EARLY - Users::CALL;
    /// Those of them that are early, from here on.
    const EARLY: u64 = 1 << 43;
    const EARLIES: u64 = Users::STOPPED - Users::EARLY;
    /// No early call begins.
    const STOPPED: u64 = 1 << 62;
    /// [`crate::record::conn::Conn::spare`] is set.
    const SPARE: u64 = 1 << 63;

    /// One fd.
    pub fn begin(&self) {
        // Nobody knows the record yet.
        self.0.store(1, Relaxed);
    }

    /// One fd more.
    pub fn add(&self) {
        self.0.fetch_add(1, SeqCst);
    }

    /// One user less. Whether it was the last.
    pub fn leave(&self) -> bool {
        self.change(|users| Some(users - 1)).is_some_and(|users| users & Users::ALL == 1)
    }

    /// What was there before, where `next` has something to put in its place.
    #[inline(always)]
    fn change(&self, next: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut users = self.0.load(SeqCst);
        loop {
            match single::replace(&self.0, users, next(users)?) {
                Ok(before) => return Some(before),
                Err(now) => users = now,
            }
        }
    }

    /// A call enters. False where nobody needs the record any more, or early calls are stopped.
    pub fn enter(&self, Kind(call): Kind) -> bool {
        let stops = if call & Users::EARLY != 0 { Users::STOPPED } else { 0 };
        let may = |users: u64| users & Users::ALL != 0 && users & stops == 0;
        self.change(|users| may(users).then_some(users + call)).is_some()
    }

    /// A call leaves. One that a fork of its own signal handler has counted out already changes nothing.
    pub fn leave_call(&self, Kind(call): Kind) -> Left {
        let mut users = self.0.load(SeqCst);
        loop {
            if users & Users::CALLS == 0 {
                return Left::Needed;
            }
            let call = if users & Users::EARLIES == 0 { call & !Users::EARLY } else { call };
            let last_call = users & Users::CALLS == Users::CALL && users & Users::SPARE != 0;
            let (next, left) = match last_call {
                true => ((users - call + 1) & !Users::SPARE, Left::LastCall),
                false if users & Users::ALL == 1 => (users - call, Left::Last),
                false => (users - call, Left::Needed),
            };
            match single::replace(&self.0, users, next) {
                Ok(_) => return left,
                Err(now) => users = now,
            }
        }
    }

    /// Early calls begin no more. False while any is there, or where they were stopped before.
    pub fn stop_early_calls(&self) -> bool {
        const NONE: u64 = Users::EARLIES | Users::STOPPED;
        let stop = |users: u64| (users & NONE == 0).then_some(users | Users::STOPPED);
        self.change(stop).is_some()
    }

    /// They may begin again.
    pub fn let_early_calls_begin(&self) {
        self.change(|users| (users & Users::STOPPED != 0).then_some(users & !Users::STOPPED));
    }

    /// Whether there is one fd, whatever calls there are.
    pub fn is_one_fd(&self) -> bool {
        let users = self.0.load(SeqCst);
        users & Users::ALL == (users & Users::CALLS) / Users::CALL + 1
    }

    /// Whether a call is there.
    pub fn has_calls(&self) -> bool {
        self.0.load(SeqCst) & Users::CALLS != 0
    }

    /// There is a duplicate now, which the last call gives back. False where it has left already.
    pub fn keep_spare(&self) -> bool {
        let spare = |users: u64| (users & Users::CALLS != 0).then_some(users | Users::SPARE);
        self.0.fetch_update(SeqCst, SeqCst, spare).is_ok()
    }

    /// Fork, in the child: no call exists here. Whether calls were all that needed the record; one user is left then.
    pub fn forget_calls(&self) -> bool {
        let users = self.0.load(SeqCst);
        let calls = (users & Users::CALLS) / Users::CALL;
        let fds = (users & Users::ALL) - calls;
        let alone = calls > 0 && fds == 0;
        self.0.store(if alone { 1 } else { fds } | users & Users::STOPPED, SeqCst);
        alone
    }

    /// Nobody.
    pub fn clear(&self) {
        self.0.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{CALL, EARLY_CALL, Left, Users};
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::thread;

    fn one() -> Users {
        let users = Users(super::AtomicU64::new(0));
        users.begin();
        users
    }

    #[test]
    fn a_call_keeps_the_record() {
        let users = one();
        assert!(users.enter(CALL) && users.has_calls());
        assert!(!users.leave());
        assert_eq!(users.leave_call(CALL), Left::Last);
        assert!(!users.enter(CALL), "nobody needs it");
    }

    #[test]
    fn the_last_call_gives_the_duplicate_back() {
        let users = one();
        assert!(!users.keep_spare(), "for no call");
        assert!(users.enter(CALL) && users.enter(CALL) && users.keep_spare());
        assert!(!users.leave());
        assert_eq!(users.leave_call(CALL), Left::Needed);
        assert_eq!(users.leave_call(CALL), Left::LastCall);
        assert!(users.leave(), "it was a user still");
    }

    #[test]
    fn early_calls_are_stopped_between_two_of_them() {
        let users = one();
        assert!(users.enter(EARLY_CALL) && users.has_calls());
        assert!(!users.stop_early_calls(), "one is there");
        assert!(users.enter(EARLY_CALL) && users.keep_spare());
        assert_eq!(users.leave_call(EARLY_CALL), Left::Needed);
        assert_eq!(users.leave_call(EARLY_CALL), Left::LastCall);
        assert!(!users.leave());
        assert!(users.stop_early_calls() && !users.stop_early_calls());
        assert!(!users.enter(EARLY_CALL) && users.enter(CALL));
        users.let_early_calls_begin();
        assert!(users.enter(EARLY_CALL));
        assert_eq!(users.leave_call(CALL), Left::Needed);
        assert!(!users.leave(), "the call needs it");
        assert_eq!(users.leave_call(EARLY_CALL), Left::Last);
    }

    #[test]
    fn a_call_that_was_forgotten_may_leave_all_the_same() {
        for kind in [CALL, EARLY_CALL] {
            let users = one();
            assert!(users.enter(kind));
            assert!(!users.forget_calls());
            assert_eq!(users.leave_call(kind), Left::Needed);
            assert!(users.enter(CALL));
            assert!(users.stop_early_calls(), "none is there");
            assert_eq!(users.leave_call(CALL), Left::Needed);
            assert!(users.leave());
        }
    }

    #[test]
    fn a_forked_child_has_no_calls() {
        let users = one();
        users.add();
        assert!(users.enter(CALL) && users.keep_spare());
        assert!(!users.forget_calls() && !users.has_calls());
        assert!(!users.leave() && users.leave());
        let users = one();
        assert!(users.enter(EARLY_CALL) && !users.leave());
        assert!(users.forget_calls() && users.stop_early_calls());
        assert!(users.leave());
    }

    /// However calls, closes and duplicates meet: each duplicate is given back once, and one user is the last.
    #[test]
    fn one_is_the_last() {
        for _ in 0..2000 {
            let (users, spares, ends) = (one(), AtomicU32::new(0), AtomicU32::new(0));
            let call = || {
                if users.enter(CALL) {
                    match users.leave_call(CALL) {
                        Left::Needed => {}
                        Left::Last => drop(ends.fetch_add(1, SeqCst)),
                        Left::LastCall => {
                            spares.fetch_sub(1, SeqCst);
                            if users.leave() {
                                ends.fetch_add(1, SeqCst);
                            }
                        }
                    }
                }
            };
            let close = || {
                if users.has_calls() {
                    spares.fetch_add(1, SeqCst);
                    if !users.keep_spare() {
                        spares.fetch_sub(1, SeqCst);
                    }
                }
                if users.leave() {
                    ends.fetch_add(1, SeqCst);
                }
            };
            thread::scope(|scope| {
                scope.spawn(call);
                scope.spawn(call);
                scope.spawn(close);
            });
            assert_eq!((spares.into_inner(), ends.into_inner()), (0, 1));
        }
    }
}
