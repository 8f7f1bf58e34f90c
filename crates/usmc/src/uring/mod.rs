//! io_uring: what a program asks of the kernel through a ring is looked at before the kernel takes it.
//!
//! Most programs with a ring use it for files, for timers or to batch epoll_ctl(2), as libuv does. So a ring by itself
//! takes nothing back to TCP. Before a call that submits, the entries between the kernel's head and the program's tail
//! are read (`entries.rs` says what each is about):
//!
//! - A connection that an entry reads, writes, polls or accepts from goes back to TCP for good, and that one only.
//! - epoll_ctl on a set of ours is done here, by the function that does the call of that name, and the entry becomes
//!   IORING_OP_NOP: it completes in its place, with its user data, flags and links, and the kernel's registrations have one
//!   author. An error is given to that operation as its result. Before Linux 6.10 it has none but 0: then an entry that fails
//!   stays as it is, once the kernel knows of the set what the program knows, and the kernel finds the same error.
//! - What closes a number, or passes numbers on, is treated as the call that does.
//! - All else is the kernel's.
//!
//! A ring that cannot be looked into takes the whole process to TCP ([`kernel_only`]): a thread of the kernel's takes the
//! entries (SQPOLL), the memory is the program's own, the kernel is newer than this file, or the ring came from elsewhere.

pub mod entries;
mod look;
mod view;

use core::cell::UnsafeCell;
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};

pub use look::{Requests, look, register, register_all};
pub use view::Params;

use self::view::View;
use crate::os::path::Path;
use crate::os::process::{self, Lock};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::os::{config, kernel_only};
use crate::socket::leave_all;

/// Rings of a process at one time; one more takes it to TCP.
const RINGS: usize = 256;

// include/uapi/linux/io_uring.h
const SETUP_SQPOLL: u32 = 1 << 1;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_NO_MMAP: u32 = 1 << 14;
const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// Up to IORING_SETUP_CQE_MIXED; those behind it are not known here.
const SETUP_KNOWN: u32 = (1 << 19) - 1;
/// The number is an index of what the thread has registered.
const ENTER_REGISTERED_RING: u32 = 1 << 4;

/// The thread that reads the entries of a ring, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Maker {
    /// The program, which maps the memory itself: it is mapped a second time here.
    Program(Params),
    /// liburing, whose functions say where the memory is.
    Liburing,
}

/// A ring of this process.
struct Ring {
    /// Numbers that lead to it; 0 = unused.
    refs: AtomicU32,
    /// Held while entries are looked at. No call that may sleep is made under it but those of going back to TCP.
    lock: Lock,
    maker: UnsafeCell<Maker>,
    /// Where its memory is, from the first call that submits by number.
    view: UnsafeCell<Option<View>>,
}

// SAFETY: `maker` is written before the number leads to the record, `view` under the lock.
unsafe impl Sync for Ring {}

static RECORDS: [Ring; RINGS] = [const {
    Ring {
        refs: AtomicU32::new(0),
        lock: Lock::new(),
        maker: UnsafeCell::new(Maker::Liburing),
        view: UnsafeCell::new(None),
    }
}; RINGS];

/// Whether IORING_OP_NOP takes a result, by the `features` of a ring: it came with IORING_FEAT_RECVSEND_BUNDLE.
pub fn completes(features: u32) -> bool {
    features & (1 << 14) != 0
}

/// Whether this process leaves its rings alone: it has no connections to look after, or nothing may be done for it.
pub fn is_idle() -> bool {
    config::get().off || process::is_foreign_child() || kernel_only::is_sandboxed()
}

/// Whether rings can be looked into that were set up with these flags.
fn can_be_seen(flags: u32, maker: &Maker) -> bool {
    let hidden = match maker {
        Maker::Program(_) => SETUP_SQPOLL | SETUP_NO_MMAP | SETUP_REGISTERED_FD_ONLY,
        Maker::Liburing => SETUP_SQPOLL,
    };
    flags & (hidden | !SETUP_KNOWN) == 0
}

/// `fd` is a new ring.
///
/// # Errors
/// EBUSY where the ring cannot be looked into, and a connection cannot go back to TCP ([`leave_all::begins`]).
pub fn made(fd: i32, flags: u32, maker: Maker) -> Result<(), Errno> {
    if is_idle() {
        return Ok(());
    }
    let unused = || {
        RECORDS.iter().position(|ring| {
            ring.refs.load(Relaxed) == 0
            // Acquire: whoever had it is done with it.
            && ring.refs.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
        })
    };
    let index = can_be_seen(flags, &maker).then(unused).flatten();
    let Some(index) = index else { return leave_all::begins(Reason::Uring) };
    // SAFETY: the record is this thread's until the number leads to it.
    unsafe { (*RECORDS[index].maker.get(), *RECORDS[index].view.get()) = (maker, None) };
    if !table::set(fd, Entry::Uring(index as u32)) {
        closed(index as u32);
        return leave_all::begins(Reason::Uring);
    }
    Ok(())
}

/// A duplicate of its number.
pub fn duplicated(index: u32) {
    RECORDS[index as usize].refs.fetch_add(1, AcqRel);
}

/// One of its numbers is closed. Our mapping would keep the ring alive.
pub fn closed(index: u32) {
    let ring = &RECORDS[index as usize];
    if ring.refs.load(SeqCst) == 1 {
        // A signal handler in the middle of its own thread's look leaves the mapping where it is.
        if let Some(_held) = ring.lock.enter()
            // SAFETY: under the lock.
            && let Some(view) = unsafe { (*ring.view.get()).take() }
        {
            // SAFETY: nobody finds it any more.
            unsafe { view.unmap() };
        }
    }
    ring.refs.fetch_sub(1, AcqRel);
}

fn in_use() -> impl Iterator<Item = &'static Ring> {
    RECORDS.iter().filter(|ring| ring.refs.load(Acquire) > 0)
}

/// Before a fork: nobody is in the middle of a look.
pub fn hold() {
    in_use().for_each(|ring| ring.lock.hold());
}

/// Afterwards in the parent.
pub fn unhold() {
    in_use().for_each(|ring| ring.lock.unhold());
}

/// Afterwards in the child, which has the rings and their mappings, too.
pub fn after_fork() {
    in_use().for_each(|ring| ring.lock.reset());
}

/// Whether a number that is not known here is what the kernel calls so.
fn is_called(fd: i32, name: &[u8]) -> bool {
    let mut text = [0; 32];
    let link = Path::of(format_args!("/proc/self/fd/{fd}"));
    sys::readlink(link.c(), &mut text).is_ok_and(|len| text.get(..len) == Some(name))
}

/// A ring that is not known: whatever is done through it is the kernel's.
fn stranger(fd: i32, flags: u32) -> Result<(), Errno> {
    if kernel_only::reason().is_none()
        && (flags & ENTER_REGISTERED_RING != 0 || is_called(fd, b"anon_inode:[io_uring]"))
    {
        return leave_all::begins(Reason::Uring);
    }
    Ok(())
}

/// Before io_uring_enter(2) takes up to `count` entries.
///
/// # Errors
/// As for [`made`].
pub fn before_enter(fd: i32, count: u32, flags: u32) -> Result<(), Errno> {
    if is_idle() || count == 0 {
        return Ok(());
    }
    let Entry::Uring(index) = table::settled(fd) else { return stranger(fd, flags) };
    if flags & ENTER_REGISTERED_RING != 0 {
        return stranger(fd, flags);
    }
    let ring = &RECORDS[index as usize];
    let Some(_held) = ring.lock.enter() else {
        // A signal handler in the middle of its own thread's look: the ring is in no state to be submitted from.
        return Ok(());
    };
    // SAFETY: `view` is under the lock, and `maker` was written before the number led here.
    let (view, maker) = unsafe { (&mut *ring.view.get(), *ring.maker.get()) };
    if let (None, Maker::Program(params)) = (&view, maker) {
        *view = View::map(fd, &params);
    }
    let Some(view) = view else { return leave_all::begins(Reason::Uring) };
    // SAFETY: mapped, and under the lock.
    look(&unsafe { view.requests(count) })
}

/// Before a function of liburing's takes these entries of `fd`.
///
/// # Errors
/// As for [`made`].
pub fn before_submit(fd: i32, flags: u32, requests: &Requests) -> Result<(), Errno> {
    if is_idle() || !can_be_seen(flags, &Maker::Liburing) {
        return Ok(());
    }
    let _held = match table::settled(fd) {
        Entry::Uring(index) => Some(RECORDS[index as usize].lock.enter()),
        // Its number is registered, and closed.
        _ => None,
    };
    look(requests)
}
