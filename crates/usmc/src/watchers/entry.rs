//! Records of epoll registrations: one per (set, fd) whose readiness may come from a ring.

use core::ptr;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64};

use super::set::{ET, WAKEUP};
use crate::os::events::{IN, OUT, PRI, RDHUP};
use crate::os::process::{self, Held, Lock};
use crate::os::{cache, single, sys};

/// Most registrations of one process.
pub const ENTRIES: usize = if cfg!(target_pointer_width = "32") { 1 << 16 } else { 1 << 18 };

/// The set scans this entry itself.
pub const E_HOT: u32 = 1;
/// A doorbell is asked for; counted as a sleeper.
pub const E_ARMED: u32 = 2;
/// EPOLLONESHOT has fired.
pub const E_DISABLED: u32 = 4;
/// The kernel's registration waits for doorbells only.
pub const E_RING: u32 = 8;
/// Report at the next look even without a new edge.
pub const E_EDGE: u32 = 16;

/// The kernel was asked for EPOLLOUT too, to wake a waiter; the thread that is told of it takes that back.
pub const E_KICKED: u32 = 32;

/// The application has deleted it. The kernel's registration is kept for the next EPOLL_CTL_ADD: many event
/// loops delete and add their sockets with every message.
pub const E_PARKED: u32 = 64;

/// Active since the set's hot entries were sorted out last.
pub const E_ACTIVE: u32 = 128;

/// Made by the parent before a fork: the kernel's registration is the parent's affair.
pub const E_COPY: u32 = 512;

/// The kernel does not know of it yet; with [`E_PARKED`] it still does, with [`E_CHANGED`] by what it was ([`super::deferred`]).
pub const E_DEFERRED: u32 = 1024;
/// See there.
pub const E_CHANGED: u32 = 4096;
/// Edge-triggered, and told in the first wait after it was added.
pub const E_PROMPT: u32 = 8192;
/// Edge-triggered, and told before the kernel knew it: what it tells at first is nothing new where no more has come than
/// `seen_prod`.
pub const E_KNOWN: u32 = 16384;
/// The kernel has told of it, or had nothing to tell when it was first asked.
pub const E_TOLD: u32 = 2048;

/// TCP may hold unread data of the span before the ring; without it, the kernel will report what comes.
pub const E_TCP: u32 = 256;

/// In the flags from here on: what the kernel was last asked for, while the connection is in the ring ([`Asked`]).
const ASKED_SHIFT: u32 = 15;
const ASKED_MASK: u32 = ((1 << Asked::BITS) - 1) << ASKED_SHIFT;
const _: () = assert!(ASKED_SHIFT + Asked::BITS <= ARMINGS_SHIFT);

/// In the flags from here on: how often a one-shot registration was armed, modulo 4096. Part of the tag.
const ARMINGS_SHIFT: u32 = 20;
/// A tag's low half: the record's number, and these from here on.
const NUMBER_BITS: u32 = 18;
const _: () = assert!(ENTRIES <= 1 << NUMBER_BITS && NUMBER_BITS + 32 - ARMINGS_SHIFT < 31);

/// The low half of a tag: the number of a record in it.
#[inline(always)]
pub fn number_in(low: u32) -> u32 {
    low & ((1 << NUMBER_BITS) - 1)
}

/// One registration: a cache line.
#[repr(C, align(64))]
pub struct Entry {
    /// Set's index plus one; 0 = unused.
    pub set: AtomicU16,
    /// Counts the uses of this record; part of the tag.
    pub use_count: AtomicU16,
    /// The registered fd number.
    pub fd: AtomicU32,
    /// Connection.
    pub conn: AtomicU32,
    /// The application's events.
    pub events: AtomicU32,
    /// The application's data.
    pub data: AtomicU64,
    /// `prod` of the receive ring when last reported or found empty; before the ring see `E_KNOWN`.
    pub seen_prod: AtomicU64,
    /// When what it reported came, as far as that is known: the peer's cycle counter, or ours at the kernel's report; when room
    /// was asked for, where that is reported as long as it lasts.
    pub stamp: AtomicU64,
    /// `E_*`, and how often it was armed.
    pub flags: AtomicU32,
    /// Bits last reported, for edges of HUP and the like.
    pub seen_bits: AtomicU32,
    /// `tx_blocks` when EPOLLOUT was last reported.
    pub seen_blocks: AtomicU32,
    /// The wait that reported it last, so that one wait reports it once.
    pub round: AtomicU32,
    /// Its place among the hot ones, while `E_HOT`; among those that are deferred, while `E_DEFERRED`; at first the set's wait
    /// before it was added.
    pub hot_at: AtomicU32,
    /// Next registration of the same connection, plus one; of an unused record the next such.
    pub next: AtomicU32,
}

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// The set's index; `u32::MAX` of an unused record.
    #[inline(always)]
    pub fn set_index(&self) -> u32 {
        u32::from(self.set.load(Relaxed)).wrapping_sub(1)
    }

    /// Whether one of the flags is set.
    #[inline(always)]
    pub fn has(&self, flag: u32) -> bool {
        self.flags.load(Relaxed) & flag != 0
    }

    /// The low half of its tag; `number` is the record's.
    pub fn low_tag(&self, number: u32) -> u32 {
        number | self.flags.load(Relaxed) >> ARMINGS_SHIFT << NUMBER_BITS
    }

    /// A one-shot registration is armed once more, or becomes one: what the kernel has told by the tag of before is not its.
    pub fn arm_anew(&self) {
        single::add(&self.flags, 1 << ARMINGS_SHIFT);
        self.set_flag(E_DISABLED, false);
    }

    /// Whether what the kernel has told by a tag with this low half is to be told. Told `once`, it was; not where it was
    /// armed again meanwhile, by another thread, for which the kernel tells more.
    pub fn takes_turn(&self, low: u32, once: bool) -> bool {
        let mut flags = self.flags.load(Relaxed);
        loop {
            let is_latest = flags >> ARMINGS_SHIFT == low >> NUMBER_BITS;
            if flags & E_PARKED != 0 || (is_latest && flags & E_DISABLED != 0) {
                // Deleted; fired in the ring, which the connection has left.
                return false;
            }
            if !is_latest || !once {
                return true;
            }
            match single::replace_u32(&self.flags, flags, flags | E_DISABLED) {
                Ok(_) => return true,
                Err(now) => flags = now,
            }
        }
    }

    /// What the kernel has told of it so far is over: its tags are others from now on. The caller keeps it, so that nobody else writes.
    pub fn outdate(&self) {
        // Release: pairs with the Acquire in `set::entry_of`.
        self.use_count.store(self.use_count.load(Relaxed).wrapping_add(1), Release);
    }

    /// What the kernel was last asked for.
    pub fn asked(&self) -> Asked {
        Asked::unpack(self.flags.load(Relaxed) >> ASKED_SHIFT)
    }

    /// Records it. The caller keeps the registration ([`keep`]).
    pub fn set_asked(&self, asked: Asked) {
        let (before, now) = (self.flags.load(Relaxed) & ASKED_MASK, asked.pack() << ASKED_SHIFT);
        self.set_flag(now & !before, true);
        self.set_flag(before & !now, false);
    }

    /// Sets or clears flags.
    pub fn set_flag(&self, flag: u32, on: bool) {
        single::put(&self.flags, flag, on);
    }
}

static BASE: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Unused records, in a cache line of their own: the first one plus one, and the lock that guards the list.
#[repr(align(64))]
struct Unused {
    lock: Lock,
    first: AtomicU32,
}

/// A thread uses its own, and the others' where it has none.
static UNUSED: [Unused; process::SHARES] =
    [const { Unused { lock: Lock::new(), first: AtomicU32::new(0) } }; process::SHARES];
/// Guards [`NEXT`].
static MORE: Lock = Lock::new();

/// A lock in a cache line of its own.
#[repr(align(64))]
struct Watchers(Lock);

/// The lists of registrations that hang on connections, and the records in these: each lock guards those of some
/// connections. It is held across epoll_ctl(2), so that what the kernel knows is what the record says; threads that
/// register different sockets at the same moment do not wait for each other. Taken before a set's lock.
static WATCHERS: [Watchers; 64] = [const { Watchers(Lock::new()) }; 64];

/// Keeps the registrations of connection `index` as they are. `None` in a signal handler that interrupted the thread that does.
pub fn keep(index: u32) -> Option<Held<'static>> {
    WATCHERS[index as usize % WATCHERS.len()].0.enter()
}

/// Whether this is such a handler.
pub fn is_kept_below(index: u32) -> bool {
    WATCHERS[index as usize % WATCHERS.len()].0.is_mine()
}

/// Record `index`; `None` when it cannot exist.
#[inline(always)]
pub fn at(index: u32) -> Option<&'static Entry> {
    let base = BASE.load(Acquire);
    if base.is_null() || index as usize >= ENTRIES {
        return None;
    }
    // SAFETY: a mapping of ENTRIES records that is never removed; zero is valid, all fields are atomics.
    Some(unsafe { &*base.add(index as usize) })
}

/// Record `index` is going to be looked at.
#[inline(always)]
pub fn fetch(index: u32) {
    cache::fetch(BASE.load(Relaxed).wrapping_add(index as usize));
}

/// Takes an unused record. `None` where all are used, or this thread is inside already (a signal handler).
pub fn alloc() -> Option<u32> {
    let own = process::share();
    for i in 0..UNUSED.len() {
        let list = &UNUSED[(own + i) % UNUSED.len()];
        if list.first.load(Relaxed) != 0 {
            let _held = list.lock.enter()?;
            let head = list.first.load(Relaxed);
            if head != 0 {
                let next = at(head - 1)?.next.load(Relaxed);
                list.first.store(next, Relaxed);
                fetch(next.wrapping_sub(1));
                return Some(head - 1);
            }
        }
    }
    let _held = MORE.enter()?;
    sys::reserve(&BASE, ENTRIES)?;
    let index = NEXT.load(Relaxed);
    if index as usize >= ENTRIES {
        return None;
    }
    NEXT.store(index + 1, Relaxed);
    Some(index)
}

/// Gives a record back, which is in no list any more.
pub fn free(index: u32) {
    let Some(entry) = at(index) else { return };
    entry.outdate();
    entry.set.store(0, Relaxed);
    entry.flags.store(0, Relaxed);
    // A signal handler that interrupted this very step loses the record.
    let list = &UNUSED[process::share()];
    let Some(_held) = list.lock.enter() else { return };
    entry.next.store(list.first.load(Relaxed), Relaxed);
    list.first.store(index + 1, Relaxed);
}

/// Calls `each` for every registration in use.
pub fn for_each(mut each: impl FnMut(u32, &'static Entry)) {
    for index in 0..NEXT.load(Relaxed) {
        if let Some(entry) = at(index)
            && entry.set.load(Relaxed) != 0
        {
            each(index, entry);
        }
    }
}

/// Calls `each` for every registration with set `set`, keeping it as it is meanwhile.
pub fn for_each_of(set: u32, mut each: impl FnMut(u32, &'static Entry)) {
    for_each(|number, entry| {
        // Acquire: pairs with the Release in `epoll_ctl::add`; the connection is this registration's.
        let is_of = || u32::from(entry.set.load(Acquire)) == set + 1;
        if !is_of() {
            return;
        }
        let conn = entry.conn.load(Relaxed);
        let Some(_held) = keep(conn) else { return };
        // It may have ended, and the record be another connection's by now.
        if is_of() && entry.conn.load(Relaxed) == conn {
            each(number, entry);
        }
    });
}

/// Fork: registrations stay as they are while they are copied.
pub fn hold() {
    WATCHERS.iter().for_each(|lock| lock.0.hold());
    UNUSED.iter().for_each(|list| list.lock.hold());
    MORE.hold();
}

/// Fork is over in the parent.
pub fn unhold() {
    MORE.unhold();
    UNUSED.iter().for_each(|list| list.lock.unhold());
    WATCHERS.iter().for_each(|lock| lock.0.unhold());
}

/// Fork, in the child.
pub fn after_fork() {
    MORE.reset();
    UNUSED.iter().for_each(|list| list.lock.reset());
    WATCHERS.iter().for_each(|lock| lock.0.reset());
}

/// The events that a registration has been asked for, as far as they matter in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked(pub u32);

/// One bit each in a record's flags, in this order.
const EVENTS: [u32; Asked::BITS as usize] = [IN, PRI, OUT, RDHUP, WAKEUP];

impl Asked {
    /// The kernel is asked for nothing that matters, or it is not known what for.
    pub const NOTHING: Asked = Asked(0);
    /// How many bits [`Asked::pack`] takes.
    pub const BITS: u32 = 5;

    /// Of an event mask.
    pub fn of(events: u32) -> Asked {
        Asked(EVENTS.iter().fold(0, |all, event| all | events & event))
    }

    /// The mask that asks for it. By edges: what the rings hold the kernel does not know.
    pub fn events(self) -> u32 {
        self.0 | ET
    }

    /// In [`Asked::BITS`] bits.
    pub fn pack(self) -> u32 {
        let bit = |(at, event): (usize, &u32)| u32::from(self.0 & event != 0) << at;
        EVENTS.iter().enumerate().map(bit).sum()
    }

    /// The reverse; higher bits do not count.
    pub fn unpack(bits: u32) -> Asked {
        let event = |(at, event): (usize, &u32)| if bits >> at & 1 != 0 { *event } else { 0 };
        Asked(EVENTS.iter().enumerate().map(event).sum())
    }
}
