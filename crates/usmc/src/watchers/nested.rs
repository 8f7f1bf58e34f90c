//! Tracked epoll sets registered in other sets.
//!
//! The kernel knows of the inner set's doorbells and not of its readiness. So the outer registration carries
//! data of ours, waits on the outer set look into the inner one, and what the kernel reports is checked.

use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use usmc_shm::sync::{AtomicU32, AtomicU64};

use super::deferred;
use super::set::SETS_LOCK;
use crate::os::events;
use crate::os::sys::{self, Errno};
use crate::watchers::{asleep, set};

/// Sets registered in other sets at one time; what exceeds it is left to the kernel.
const NESTED: usize = 64;
/// In the low half of the data: not an entry's number but a nesting's.
const NUMBER: u32 = 1 << 31;

/// Sets within sets that are followed; the kernel allows five in all.
pub const DEPTH: u32 = 5;

/// A tracked set inside another.
pub struct Nesting {
    /// `outer + 1` in the low half, `inner + 1` in the high half; 0 = unused.
    who: AtomicU64,
    /// The inner one's number that it was registered by: another is another registration.
    fd: AtomicU32,
    pub events: AtomicU32,
    /// The application's data.
    pub data: AtomicU64,
    uses: AtomicU32,
    /// EPOLLONESHOT has fired.
    pub disabled: AtomicU32,
    /// What was last reported of an edge-triggered one.
    pub seen: AtomicU64,
    /// The wait that reported it last.
    pub round: AtomicU32,
}

static NESTINGS: [Nesting; NESTED] = [const {
    Nesting {
        who: AtomicU64::new(0),
        fd: AtomicU32::new(0),
        events: AtomicU32::new(0),
        data: AtomicU64::new(0),
        uses: AtomicU32::new(0),
        disabled: AtomicU32::new(0),
        seen: AtomicU64::new(0),
        round: AtomicU32::new(0),
    }
}; NESTED];

fn name(outer: u32, inner: u32) -> u64 {
    (outer + 1) as u64 | ((inner + 1) as u64) << 32
}

/// epoll_ctl(outer, op, inner). `None`: make the real call.
pub fn control(
    outer: (i32, u32),
    inner: (i32, u32),
    op: i32,
    event: Option<libc::epoll_event>,
) -> Option<Result<(), Errno>> {
    if op == libc::EPOLL_CTL_ADD {
        // A thread that waits for the outer set hears of the inner one by the kernel.
        deferred::watch(inner.1);
    }
    let done = {
        let _held = SETS_LOCK.enter()?;
        let who = name(outer.1, inner.1);
        let fd = inner.0.cast_unsigned();
        let is_known = |n: &Nesting| n.who.load(Relaxed) == who && n.fd.load(Relaxed) == fd;
        let known = NESTINGS.iter().position(is_known);
        match (op, event) {
            (libc::EPOLL_CTL_DEL, _) => {
                let mut none = libc::epoll_event { events: 0, u64: 0 };
                let done = sys::epoll_ctl(outer.0, op, inner.0, &mut none);
                if let (Ok(()), Some(at)) = (done, known) {
                    end(at);
                }
                return Some(done);
            }
            (libc::EPOLL_CTL_ADD, Some(event)) => {
                let at = NESTINGS.iter().position(|n| n.who.load(Relaxed) == 0)?;
                let place = &NESTINGS[at];
                place.fd.store(fd, Relaxed);
                place.ask_for(event);
                // Another set's wait, it may be.
                place.round.store(0, Relaxed);
                // Before the kernel can tell of it.
                place.who.store(who, Release);
                // SeqCst: a thread that goes to sleep sees it, or is seen by `stir`.
                set::set_at(outer.1).nested.fetch_add(1, SeqCst);
                let done = register((outer.0, op, inner.0), at, event.events);
                if done.is_err() {
                    end(at);
                }
                done
            }
            (libc::EPOLL_CTL_MOD, Some(event)) => {
                let at = known?;
                let place = &NESTINGS[at];
                let before = place.asked();
                // What the kernel tells of what it was is not for what it is: it looks again.
                place.uses.fetch_add(1, AcqRel);
                place.ask_for(event);
                let done = register((outer.0, op, inner.0), at, event.events);
                if done.is_err() {
                    place.uses.fetch_sub(1, AcqRel);
                    place.ask_for(before.0);
                    place.disabled.store(before.1, Relaxed);
                }
                done
            }
            _ => return None,
        }
    };
    if done.is_ok() {
        asleep::stir(outer.1, inner.1);
    }
    Some(done)
}

/// The kernel is told of a nesting, by its tag.
fn register((outer, op, inner): (i32, i32, i32), at: usize, events: u32) -> Result<(), Errno> {
    let u64 = set::tag(at as u32 | NUMBER, NESTINGS[at].uses.load(Relaxed));
    sys::epoll_ctl(outer, op, inner, &mut libc::epoll_event { events, u64 })
}

fn end(at: usize) {
    let who = NESTINGS[at].who.swap(0, AcqRel);
    NESTINGS[at].uses.fetch_add(1, AcqRel);
    set::set_at(who as u32 - 1).nested.fetch_sub(1, AcqRel);
}

/// The set is gone: so are its nestings. The caller holds SETS_LOCK.
pub fn forget(set: u32) {
    for (at, place) in NESTINGS.iter().enumerate() {
        let who = place.who.load(Relaxed);
        if who as u32 == set + 1 || (who >> 32) as u32 == set + 1 {
            end(at);
        }
    }
}

/// Calls `each` with every tracked set inside `outer`.
pub fn each(outer: u32, mut each: impl FnMut(u32, &'static Nesting)) {
    if set::set_at(outer).nested.load(Relaxed) == 0 {
        return;
    }
    for place in &NESTINGS {
        let who = place.who.load(Acquire);
        if who as u32 == outer + 1 {
            each((who >> 32) as u32 - 1, place);
        }
    }
}

/// The nesting a kernel event belongs to: `None` if it is not about one, `Some(None)` if it is over, or about this process' ear.
pub fn of(data: u64) -> Option<Option<(u32, &'static Nesting)>> {
    if !set::is_tagged(data) || data as u32 & NUMBER == 0 {
        return None;
    }
    let Some(place) = NESTINGS.get((data as u32 & !NUMBER) as usize) else { return Some(None) };
    let who = place.who.load(Acquire);
    let same = place.uses.load(Relaxed) & 0xffff == (data >> 32) as u32 & 0xffff;
    Some((same && who != 0).then(|| ((who >> 32) as u32 - 1, place)))
}

impl Nesting {
    /// From now on the outer set wants this.
    fn ask_for(&self, event: libc::epoll_event) {
        self.events.store(event.events, Relaxed);
        self.data.store(event.u64, Relaxed);
        self.seen.store(0, Relaxed);
        self.disabled.store(0, Release);
    }

    /// What it wants, and whether that was told.
    fn asked(&self) -> (libc::epoll_event, u32) {
        let (events, u64) = (self.events.load(Relaxed), self.data.load(Relaxed));
        (libc::epoll_event { events, u64 }, self.disabled.load(Relaxed))
    }

    /// Whether the outer set wants to hear of data at all.
    pub fn wants_data(&self) -> bool {
        self.events.load(Relaxed) & events::IN != 0 && self.disabled.load(Relaxed) == 0
    }
}
