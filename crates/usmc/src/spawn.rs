//! posix_spawn(3) and its relatives: libc makes the process and starts the program by itself, and nobody sees what its
//! child does with descriptors. What the program will have is told by the file actions and by close-on-exec.

use core::ffi::c_int;
use core::ptr;
use core::slice;
use core::sync::atomic::Ordering::Relaxed;
use libc::posix_spawn_file_actions_t;
use usmc_shm::sync::AtomicU32;

use crate::conn::{self, ATTACHED, EARLY, F_COPIED, FRESH, OFFERED, RING};
use crate::device::Receiver;
use crate::sys::Errno;
use crate::table::{self, Entry};
use crate::{custody, fork, holds, log, process, real, set_errno};

/// `struct __spawn_action` of glibc (posix/spawn_int.h); [`is_layout_known`] looks whether it still is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Action {
    kind: c_int,
    of: Of,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Of {
    _aligned: [usize; 0],
    fd: c_int,
    new: c_int,
    _rest: [usize; 2],
}

const CLOSE: c_int = 0;
const DUP2: c_int = 1;
const OPEN: c_int = 2;
const CLOSE_FROM: c_int = 5;

/// The first fields of `posix_spawn_file_actions_t` (<spawn.h>).
#[repr(C)]
struct List {
    _room: c_int,
    count: c_int,
    first: *const Action,
}

const _: () = assert!(size_of::<List>() <= size_of::<posix_spawn_file_actions_t>());

/// What libc's child will do to descriptors before it becomes the program.
#[derive(Clone, Copy)]
pub enum Plan {
    /// These, in their order.
    Actions(&'static [Action]),
    /// Overwrites this number (popen(3)).
    Overwrites(c_int),
    /// Nobody knows.
    Unknown,
}

impl Plan {
    /// Nothing at all.
    pub const NOTHING: Plan = Plan::Actions(&[]);

    /// # Safety
    /// What posix_spawn(3) takes; it stays as it is while the plan is used.
    pub unsafe fn of(actions: *const posix_spawn_file_actions_t) -> Plan {
        if actions.is_null() {
            return Plan::NOTHING;
        }
        if !is_layout_known() {
            return Plan::Unknown;
        }
        // SAFETY: the caller's contract, and the layout was looked at.
        Plan::Actions(unsafe { entries(actions) })
    }

    /// Where the program's `fd` comes from, as a number of ours, and whether close-on-exec is taken off on the way.
    fn origin(&self, fd: c_int) -> Option<(c_int, bool)> {
        let actions = match *self {
            Plan::Actions(actions) => actions,
            Plan::Overwrites(number) if number == fd => return None,
            Plan::Overwrites(_) => &[],
            // Whatever is done to it.
            Plan::Unknown => return Some((fd, true)),
        };
        let mut at = (fd, false);
        for action in actions.iter().rev() {
            match action.kind {
                CLOSE | OPEN if action.of.fd == at.0 => return None,
                CLOSE_FROM if action.of.fd <= at.0 => return None,
                DUP2 if action.of.new == at.0 => at = (action.of.fd, true),
                _ => {}
            }
        }
        Some(at)
    }

    /// The connection of ours that the program's `fd` will be.
    fn given(&self, fd: c_int) -> Option<Given> {
        let (from, asked_for) = self.origin(fd)?;
        let Entry::Conn(index) = table::get(from) else { return None };
        (asked_for || holds::crosses_exec(from)).then_some(Given { fd: from, index, asked_for })
    }

    /// The numbers that descriptors are duplicated to.
    fn targets(&self) -> impl Iterator<Item = c_int> + use<> {
        let actions = if let Plan::Actions(actions) = *self { actions } else { &[] };
        actions.iter().filter(|action| action.kind == DUP2).map(|action| action.of.new)
    }

    /// Calls `act` once for every connection that the program will have.
    fn for_each(&self, mut act: impl FnMut(Given)) {
        let is = |index| move |other: Option<Given>| other.is_some_and(|o| o.index == index);
        for (number, target) in self.targets().enumerate() {
            let mut before = self.targets().take(number).map(|fd| self.given(fd));
            if let Some(given) = self.given(target)
                && !before.any(is(given.index))
            {
                act(given);
            }
        }
        table::for_each(0, u32::MAX, |fd, _| {
            let Some(given) = self.given(fd) else { return };
            let mut known = self.targets().map(|fd| self.given(fd)).any(is(given.index));
            if !known && conn::at(given.index).refs.load(Relaxed) > 1 && fd > 0 {
                table::for_each(0, fd.cast_unsigned() - 1, |fd, _| {
                    known |= is(given.index)(self.given(fd));
                });
            }
            if !known {
                act(given);
            }
        });
    }
}

/// A connection that the program will have: one of our numbers for it.
#[derive(Clone, Copy)]
struct Given {
    fd: c_int,
    index: u32,
    /// By number, and not because nobody said otherwise.
    asked_for: bool,
}

/// # Safety
/// Initialised, and of the layout above.
unsafe fn entries(actions: *const posix_spawn_file_actions_t) -> &'static [Action] {
    // SAFETY: the caller's contract.
    unsafe {
        let list = &*actions.cast::<List>();
        match usize::try_from(list.count) {
            Ok(count) if count > 0 && !list.first.is_null() => {
                slice::from_raw_parts(list.first, count)
            }
            _ => &[],
        }
    }
}

/// Whether libc's lists look as we think: one is made and read. (It allocates, as its callers have done before.)
fn is_layout_known() -> bool {
    /// 0 = not looked yet, 1 = they do, 2 = they do not.
    static LAYOUT: AtomicU32 = AtomicU32::new(0);
    if LAYOUT.load(Relaxed) == 0 {
        // SAFETY: integers and null pointers.
        let mut list: posix_spawn_file_actions_t = unsafe { core::mem::zeroed() };
        let at = &raw mut list;
        // SAFETY: a list of our own, made before it is used, and a string.
        let fits = unsafe {
            real::posix_spawn_file_actions_init(at) == 0 && {
                let made = real::posix_spawn_file_actions_addclose(at, 11) == 0
                    && real::posix_spawn_file_actions_adddup2(at, 12, 13) == 0
                    && real::posix_spawn_file_actions_addopen(at, 14, c"/".as_ptr(), 0, 0) == 0;
                // Since glibc 2.34.
                let closes = real::posix_spawn_file_actions_addclosefrom_np(at, 15) == 0;
                let fits = made && has_fields(&*at.cast::<List>(), closes);
                real::posix_spawn_file_actions_destroy(at);
                fits
            }
        };
        LAYOUT.store(if fits { 1 } else { 2 }, Relaxed);
    }
    LAYOUT.load(Relaxed) == 1
}

fn has_fields(list: &List, closes: bool) -> bool {
    let count = 3 + usize::from(closes);
    if list.count != count as c_int || list.first.is_null() {
        return false;
    }
    let is = |at: usize, kind: c_int, fd: c_int| {
        // SAFETY: byte by byte inside what libc has allocated for so many entries, if they are as small as ours; it
        // allocates eight at a time.
        let action = unsafe { ptr::read_unaligned(list.first.add(at)) };
        action.kind == kind && action.of.fd == fd
    };
    // SAFETY: as above.
    let target = unsafe { ptr::read_unaligned(list.first.add(1)) }.of.new;
    is(0, CLOSE, 11)
        && is(1, DUP2, 12)
        && target == 13
        && is(2, OPEN, 14)
        && (!closes || is(3, CLOSE_FROM, 15))
}

/// The program that libc is about to start.
fn child() -> Receiver {
    Receiver::Child(process::pid())
}

/// Runs `start`, which makes a process and starts a program there. What that program will have of our connections
/// becomes TCP for now. `start` returns what the call returns, and, if a program was started, `Some` with its pid,
/// which is 0 where nobody tells.
///
/// # Errors
/// See [`crate::socket::demote::leave`]: a connection that the program was to be given stays in the ring.
pub fn around<T>(plan: Plan, start: impl FnOnce() -> (T, Option<u32>)) -> Result<T, Errno> {
    if process::is_foreign_child() {
        return Ok(start().0);
    }
    let saved = crate::errno();
    let mut left = Ok(());
    plan.for_each(|given| left = left.and(leave(given)));
    if left.is_err() {
        plan.for_each(call_off);
    }
    set_errno(saved);
    left?;
    let (done, started) = start();
    let saved = crate::errno();
    match started {
        None => plan.for_each(call_off),
        Some(0) => {}
        Some(pid) => plan.for_each(|given| {
            custody::rename(conn::at(given.index), child(), Receiver::Program(pid));
        }),
    }
    set_errno(saved);
    Ok(done)
}

fn leave(given: Given) -> Result<(), Errno> {
    let conn = conn::at(given.index);
    if conn.phase() == FRESH {
        // The program would not learn of the connection that it becomes.
        conn.set_flag(F_COPIED, true);
    }
    if !matches!(conn.phase(), EARLY | OFFERED | ATTACHED | RING) {
        return Ok(());
    }
    match holds::lend(given.fd, given.index, child()) {
        Err(_) if !given.asked_for || !fork::is_sole_holder(conn) => {
            log::warn(format_args!("fd {}: in the ring, and open in a new program", given.fd));
            Ok(())
        }
        done => done,
    }
}

fn call_off(given: Given) {
    let conn = conn::at(given.index);
    if conn.custody.load(Relaxed) != 0 {
        custody::take_back(conn, child(), false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(kind: c_int, fd: c_int, new: c_int) -> Action {
        Action { kind, of: Of { _aligned: [], fd, new, _rest: [0; 2] } }
    }

    #[test]
    fn numbers_are_followed_back_through_the_actions() {
        let actions: &'static [Action] = Box::leak(Box::new([
            action(DUP2, 7, 0),
            action(DUP2, 0, 1),
            action(CLOSE, 7, 0),
            action(OPEN, 2, 0),
            action(DUP2, 9, 9),
            action(CLOSE_FROM, 20, 0),
        ]));
        let plan = Plan::Actions(actions);
        assert_eq!(plan.origin(0), Some((7, true)));
        assert_eq!(plan.origin(1), Some((7, true)));
        assert_eq!(plan.origin(2), None);
        assert_eq!(plan.origin(7), None);
        assert_eq!(plan.origin(8), Some((8, false)));
        assert_eq!(plan.origin(9), Some((9, true)));
        assert_eq!(plan.origin(19), Some((19, false)));
        assert_eq!(plan.origin(20), None);
        assert!(plan.targets().eq([0, 1, 9]));
        assert_eq!(Plan::Overwrites(1).origin(1), None);
        assert_eq!(Plan::Overwrites(1).origin(0), Some((0, false)));
        assert_eq!(Plan::Unknown.origin(5), Some((5, true)));
    }

    #[test]
    fn lists_of_this_libc_are_known() {
        assert!(is_layout_known());
    }
}
