//! The sets: their records, and the tags by which the kernel's events lead to registrations.

use core::ptr;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use usmc_shm::sync::{AtomicPtr, AtomicU32, AtomicU64};

use super::agent_ear::Ears;
use super::entry::{self, Entry};
use super::habit::Habit;
use crate::host::{PeerProcess, ears};
use crate::os::process::{Held, Lock};
use crate::os::spin::{Learnt, Work};
use crate::os::sys;
use crate::os::table::{self, Entry as Fd};
use crate::record::{conn, numbers};

/// In the place of a registration's number: the ear of this process. It looks like a nesting, and is the place of none.
const EAR: u32 = u32::MAX;
/// Most epoll sets with tracked sockets.
pub const SETS: usize = 1024;
const _: () = assert!(SETS < u16::MAX as usize);

/// Most hot entries of a set. What exceeds them is reported by way of the kernel.
pub const HOT: usize = 16384;
/// Most registrations that a set owes.
pub const DEFERRED: usize = 256;
/// [`Set::is_watched`]: somebody of this process may sleep on the set by other calls than a wait on it.
pub const POLLED: u32 = 2;

/// Edge-triggered.
pub const ET: u32 = libc::EPOLLET as u32;
/// Told once.
pub const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// Wakes one of the sets only.
pub const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// Keeps the machine awake.
pub const WAKEUP: u32 = libc::EPOLLWAKEUP as u32;

/// One epoll set.
#[repr(C)]
pub struct Set {
    /// Guards the hot list.
    pub lock: Lock,
    /// Numbers that mean it.
    pub refs: AtomicU32,
    fd: AtomicU32,
    /// Registrations with our tag.
    pub tagged: AtomicU32,
    /// Tracked sets registered in this one.
    pub nested: AtomicU32,
    /// Threads asleep in the real wait.
    pub sleepers: AtomicU32,
    /// What spins in it have come to.
    pub learnt: Learnt,
    /// What its waiter does between two waits.
    pub work: Work,
    /// Spins that paid since the last sleep.
    pub spins: AtomicU32,
    /// Waits so far, for the kernel's turn.
    pub rounds: AtomicU32,
    /// When the kernel was last asked, CLOCK_MONOTONIC nanoseconds.
    pub kernel_at: AtomicU64,
    /// Until when it has told all that there was to tell, in cycles.
    pub told: AtomicU64,
    /// Nonzero where the kernel's own last filled a wait's array: rings come first in the next.
    pub filled: AtomicU32,
    /// `rounds` when the hot entries were last sorted out.
    pub swept: AtomicU32,
    /// Where this set's waiters run.
    pub cpu: AtomicU32,
    /// Entries in `hot`.
    pub hot_count: AtomicU32,
    /// The hot entries.
    pub hot: [AtomicU32; HOT],
    /// Registrations that the kernel does not know of, or not of their end ([`super::deferred`]).
    pub deferred: [AtomicU32; DEFERRED],
    /// Entries in `deferred`.
    pub deferred_count: AtomicU32,
    /// Whether it pays to owe level-triggered ones.
    pub habit: Habit,
    /// The same of edge-triggered ones.
    pub edges: Habit,
    /// Nonzero where the kernel may tell others of the set's readiness: it is or was in another set or
    /// somebody has polled it ([`POLLED`]), or there was a fork.
    pub is_watched: AtomicU32,
    /// Nonzero where the kernel's set has the ear of the process with this number less one.
    pub ear: AtomicU32,
    /// Its ears, by which agents wake it.
    pub ears: Ears,
    /// Where the next look at the hot entries begins.
    pub hand: AtomicU32,
    /// See [`hot::print`].
    pub print: AtomicU64,
    /// Nonzero once there were hot entries.
    pub was_hot: AtomicU32,
    /// In the list of sets that are not in use.
    pub next_free: AtomicU32,
}

static SETS_BASE: AtomicPtr<Set> = AtomicPtr::new(ptr::null_mut());
/// So many were ever in use.
pub static NEXT_SET: AtomicU32 = AtomicU32::new(0);
/// The first set that is not in use, plus one.
pub static FREE_SET: AtomicU32 = AtomicU32::new(0);
/// Guards which sets there are, and which are in others.
pub static SETS_LOCK: Lock = Lock::new();
/// The upper 16 bits of our data; random, so an application's own data does not look like it.
static TAG: AtomicU64 = AtomicU64::new(0);

/// Set `index`.
#[inline(always)]
pub fn set_at(index: u32) -> &'static Set {
    let base = SETS_BASE.load(Acquire);
    // SAFETY: indices come from `created` through the fd table; the mapping is never removed, zero is
    // valid, all fields are atomics.
    unsafe { &*base.add(index as usize) }
}

/// What the kernel is given as data for a registration.
pub fn tag_of(number: u32, entry: &Entry) -> u64 {
    tag(entry.low_tag(number), u32::from(entry.use_count.load(Relaxed)))
}

pub fn tag(index: u32, use_count: u32) -> u64 {
    let mut tag = TAG.load(Relaxed);
    if tag == 0 {
        tag = (sys::random() % 0xfffd + 1) << 48;
        let _ = TAG.compare_exchange(0, tag, AcqRel, Relaxed);
        tag = TAG.load(Relaxed);
    }
    tag | ((use_count & 0xffff) as u64) << 32 | index as u64
}

/// Whether a kernel event's data is ours and not the application's.
pub fn is_tagged(data: u64) -> bool {
    let tag = TAG.load(Relaxed);
    tag != 0 && data >> 48 == tag >> 48
}

/// Whether the ear of this process ([`crate::host::ears`]) ends sleeps in the set from now on. Not where others hear of what is
/// ready in it: nobody takes the ear's events out for them.
pub fn listen(set: &Set, index: u32) -> bool {
    let Ok(PeerProcess(own)) = ears::open() else { return false };
    // SeqCst: see `stop_listening`.
    if set.ear.load(SeqCst) != own + 1 {
        if set.is_watched.load(SeqCst) != 0 || !ears::watch(fd_of(index), tag(EAR, 0)) {
            return false;
        }
        set.ear.store(own + 1, SeqCst);
    }
    if set.is_watched.load(SeqCst) != 0 {
        stop_listening(set, index);
        return false;
    }
    true
}

/// An agent's ear ends sleeps in the set from now on. False where the kernel does not want it.
pub fn watch_ear(index: u32, socket: i32) -> bool {
    let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
    let mut event = libc::epoll_event { events, u64: tag(EAR, 0) };
    sys::epoll_ctl(fd_of(index), libc::EPOLL_CTL_ADD, socket, &mut event).is_ok()
}

/// Others hear of what is ready in the set from now on ([`Set::is_watched`]).
pub fn stop_listening(set: &Set, index: u32) {
    // SeqCst: it sees what `listen` has done, or `listen` sees the others.
    if set.ear.load(SeqCst) != 0 && set.ear.swap(0, SeqCst) != 0 {
        ears::unwatch(fd_of(index));
    }
}

/// The entry a kernel event belongs to, if it is one of ours.
pub fn entry_of(data: u64) -> Option<(u32, &'static Entry)> {
    if !is_tagged(data) {
        return None;
    }
    let number = entry::number_in(data as u32);
    let entry = entry::at(number)?;
    let same = entry.use_count.load(Acquire) == (data >> 32) as u16;
    // A registration that ended while the kernel still reports it has another use count: ours, but over.
    Some((if same { number } else { u32::MAX }, entry))
}

/// Keeps the registration of this tag as it is. `None` where it is over, and in a signal handler ([`entry::keep`]).
pub fn keep_tagged(tag: u64) -> Option<(Held<'static>, u32, &'static Entry)> {
    let held = entry::keep(entry_of(tag)?.1.conn.load(Relaxed))?;
    // It may have ended until then, and the record be another's.
    let (number, entry) = entry_of(tag)?;
    (number != u32::MAX).then_some((held, number, entry))
}

/// epoll_create made `fd`.
pub fn created(fd: i32) {
    if crate::os::config::get().off {
        return;
    }
    let Some(_held) = SETS_LOCK.enter() else { return };
    if sys::reserve(&SETS_BASE, SETS).is_none() {
        return;
    }
    let index = if let Some(unused) = take_unused() {
        unused
    } else {
        let next = NEXT_SET.load(Relaxed);
        if next as usize >= SETS {
            return;
        }
        NEXT_SET.store(next + 1, Relaxed);
        next
    };
    let set = set_at(index);
    set.refs.store(1, Relaxed);
    set.learnt.forget();
    set.work.forget();
    set.fd.store(fd as u32, Relaxed);
    for cell in [
        &set.tagged,
        &set.nested,
        &set.spins,
        &set.rounds,
        &set.hot_count,
        &set.was_hot,
        &set.deferred_count,
        &set.is_watched,
        &set.ear,
        &set.filled,
    ] {
        cell.store(0, Relaxed);
    }
    set.habit.forget();
    set.edges.forget();
    set.ears.forget();
    table::set(fd, Fd::Epoll(index));
}

/// Takes a set's record that is not in use, and in which nobody sleeps: a wait goes on when the set is closed. The caller
/// holds [`SETS_LOCK`].
fn take_unused() -> Option<u32> {
    let mut place = &FREE_SET;
    while let Some(index) = place.load(Relaxed).checked_sub(1) {
        let set = set_at(index);
        if set.sleepers.load(SeqCst) == 0 {
            place.store(set.next_free.load(Relaxed), Relaxed);
            return Some(index);
        }
        place = &set.next_free;
    }
    None
}

/// dup of an epoll fd.
pub fn duplicated(index: u32) {
    set_at(index).refs.fetch_add(1, AcqRel);
}

/// Whether the registered number means the entry's connection still. Where it was closed and a duplicate lives on, the
/// registration does, too, but nobody can change it any more (epoll(7)): the number may be another's by now.
pub fn can_change(entry: &Entry) -> bool {
    table::get(entry.fd.load(Relaxed) as i32) == Fd::Conn(entry.conn.load(Relaxed))
}

/// A sleeper of the set is awake. A fork may have forgotten it.
pub fn woke(set: &Set) {
    let _ = set.sleepers.fetch_update(AcqRel, Relaxed, |n| n.checked_sub(1));
}

/// An fd of the set, for epoll_ctl.
pub fn fd_of(set_index: u32) -> i32 {
    let set = set_at(set_index);
    let known = set.fd.load(Relaxed) as i32;
    if table::get(known) == Fd::Epoll(set_index) {
        return known;
    }
    // The number it was created with was closed, a duplicate lives on.
    let mut found = -1;
    table::for_each(0, u32::MAX, |fd, entry| {
        if entry == Fd::Epoll(set_index) {
            found = fd;
        }
    });
    set.fd.store(found as u32, Relaxed);
    found
}

/// A number that means the entry's socket. The registered one may have been closed while a duplicate lives, or a call
/// that sleeps on it: the registration lives on then (epoll(7)). -1 when this process has none.
pub fn live_fd(entry: &Entry) -> i32 {
    let index = entry.conn.load(Relaxed);
    let registered = entry.fd.load(Relaxed) as i32;
    if table::get(registered) == Fd::Conn(index) {
        return registered;
    }
    let hint = &conn::at(index).duplicate;
    if table::get(hint.load(Relaxed) as i32) != Fd::Conn(index) {
        hint.store(-1i32 as u32, Relaxed);
        table::for_each(0, u32::MAX, |fd, entry| {
            if entry == Fd::Conn(index) {
                hint.store(fd as u32, Relaxed);
            }
        });
    }
    match hint.load(Relaxed) as i32 {
        -1 => numbers::number(registered, index),
        duplicate => duplicate,
    }
}
