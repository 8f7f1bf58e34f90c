//! Tracked epoll sets registered in other sets.
//!
//! The kernel knows of the inner set's doorbells and not of its readiness. So the outer registration carries
//! data of ours, waits on the outer set look into the inner one, and what the kernel reports is checked.

use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicU32, AtomicU64};

use super::epoll::{self, SETS_LOCK};
use super::{multi, owed, ready};
use crate::sys::{self, Errno};

/// Sets registered in other sets at one time; what exceeds it is left to the kernel.
const NESTED: usize = 64;
/// In the low half of the data: not an entry's number but a nesting's.
const NUMBER: u32 = 1 << 31;

const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;

/// A tracked set inside another.
pub struct Nesting {
    /// `outer + 1` in the low half, `inner + 1` in the high half; 0 = unused.
    who: AtomicU64,
    events: AtomicU32,
    /// The application's data.
    data: AtomicU64,
    uses: AtomicU32,
    /// EPOLLONESHOT has fired.
    disabled: AtomicU32,
    /// What was last reported of an edge-triggered one.
    seen: AtomicU64,
    /// The wait that reported it last.
    round: AtomicU32,
}

static NESTINGS: [Nesting; NESTED] = [const {
    Nesting {
        who: AtomicU64::new(0),
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
        // Whoever waits for the outer set hears of the inner one by the kernel.
        owed::watch(inner.1);
    }
    let _held = SETS_LOCK.enter()?;
    let who = name(outer.1, inner.1);
    let known = NESTINGS.iter().position(|n| n.who.load(Relaxed) == who);
    let mut kernel = event.unwrap_or(libc::epoll_event { events: 0, u64: 0 });
    match op {
        libc::EPOLL_CTL_DEL => {
            let done = sys::epoll_ctl(outer.0, op, inner.0, &mut kernel);
            if let (Ok(()), Some(at)) = (done, known) {
                end(at);
            }
            Some(done)
        }
        libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => {
            let event = event?;
            let free = || NESTINGS.iter().position(|n| n.who.load(Relaxed) == 0);
            let at = if op == libc::EPOLL_CTL_ADD { free()? } else { known? };
            let place = &NESTINGS[at];
            kernel.u64 = epoll::tag(at as u32 | NUMBER, place.uses.load(Relaxed));
            let done = sys::epoll_ctl(outer.0, op, inner.0, &mut kernel);
            if done.is_ok() {
                place.events.store(event.events, Relaxed);
                place.data.store(event.u64, Relaxed);
                place.disabled.store(0, Relaxed);
                place.seen.store(0, Relaxed);
                if op == libc::EPOLL_CTL_ADD {
                    // Another set's wait, it may be.
                    place.round.store(0, Relaxed);
                    place.who.store(who, Release);
                    epoll::set_at(outer.1).nested.fetch_add(1, AcqRel);
                }
            }
            Some(done)
        }
        _ => None,
    }
}

fn end(at: usize) {
    let who = NESTINGS[at].who.swap(0, AcqRel);
    NESTINGS[at].uses.fetch_add(1, AcqRel);
    epoll::set_at(who as u32 - 1).nested.fetch_sub(1, AcqRel);
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
    if epoll::set_at(outer).nested.load(Relaxed) == 0 {
        return;
    }
    for place in &NESTINGS {
        let who = place.who.load(Acquire);
        if who as u32 == outer + 1 {
            each((who >> 32) as u32 - 1, place);
        }
    }
}

/// The nesting a kernel event belongs to: `None` if it is not about one, `Some(None)` if it is over.
pub fn of(data: u64) -> Option<Option<(u32, &'static Nesting)>> {
    if !epoll::is_tagged(data) || data as u32 & NUMBER == 0 {
        return None;
    }
    let place = NESTINGS.get((data as u32 & !NUMBER) as usize)?;
    let who = place.who.load(Acquire);
    let same = place.uses.load(Relaxed) & 0xffff == (data >> 32) as u32 & 0xffff;
    Some((same && who != 0).then(|| ((who >> 32) as u32 - 1, place)))
}

impl Nesting {
    /// Whether the outer set wants to hear of data at all.
    pub fn wants_data(&self) -> bool {
        self.events.load(Relaxed) & ready::IN != 0 && self.disabled.load(Relaxed) == 0
    }

    /// The event to report, if the inner set has something to report that was not reported before.
    /// `by_kernel`: the kernel says so, too. `round` is the outer set's wait.
    pub fn event(&self, inner: u32, by_kernel: bool, round: u32) -> Option<libc::epoll_event> {
        let want = self.events.load(Relaxed);
        if !self.wants_data() {
            return None;
        }
        if self.round.load(Relaxed) == round {
            return None;
        }
        let (ready, print) = multi::nested_look(inner);
        let fresh = want & ET == 0 || print != self.seen.load(Relaxed);
        let report = (ready && fresh) || (by_kernel && is_readable(inner));
        if !report {
            return None;
        }
        self.seen.store(print, Relaxed);
        self.round.store(round, Relaxed);
        if want & ONESHOT != 0 {
            self.disabled.store(1, Relaxed);
        }
        Some(libc::epoll_event { events: ready::IN, u64: self.data.load(Relaxed) })
    }
}

/// Whether the kernel finds something in the set once doorbells without a meaning are gone.
pub fn is_readable(inner: u32) -> bool {
    multi::settle(inner);
    sys::poll1(epoll::fd_of(inner), libc::POLLIN, 0) & libc::POLLIN != 0
}
