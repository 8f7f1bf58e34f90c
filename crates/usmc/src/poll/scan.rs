//! The look at a set's rings. It costs no system call, but where something in a ring came behind what the kernel has to
//! tell.

use core::cell::Cell;
use core::ffi::c_int;
use core::slice;
use usmc_shm::sync::Ordering::Relaxed;

use usmc_shm::layout::Slot;
use usmc_shm::state::Tx;

use super::epoll_wait::kernel_now;
use crate::os::events::{READ_BITS, WRITE_BITS};
use crate::poll::inner;
use crate::record::conn::{self, Conn};
use crate::record::order;
use crate::watchers::entry::{self, E_DISABLED, E_TCP, Entry};
use crate::watchers::set::{ET, Set};
use crate::watchers::{hot, nested, report};

/// A wait's way of looking.
pub struct Look<'a> {
    /// The set.
    pub epfd: c_int,
    /// Its record.
    pub set: &'a Set,
    /// The record's index.
    pub index: u32,
    /// The wait's number.
    pub round: u32,
    /// Until when the kernel had told all before this wait, in cycles.
    pub told: u64,
    /// The kernel had more to tell than there was room for: now the rings have, whatever came first.
    pub rings_first: bool,
    /// Of what the kernel tells in this wait.
    pub rooms: Rooms,
}

/// When connections in TCP were asked for room, of which the kernel tells. What is true as long as it lasts is told in the
/// order in which it was asked for, and so is room in rings.
pub struct Rooms {
    count: Cell<usize>,
    /// The event's place among those of the kernel, and [`Entry::stamp`].
    asked: [Cell<(u32, u64)>; Rooms::MOST],
}

impl Rooms {
    /// What exceeds them counts as asked for before all rings.
    const MOST: usize = 16;

    /// The kernel has told of nothing yet.
    pub fn new() -> Rooms {
        Rooms { count: Cell::new(0), asked: [const { Cell::new((0, 0)) }; Rooms::MOST] }
    }

    /// The kernel tells something new in this wait.
    pub fn forget(&self) {
        self.count.set(0);
    }

    /// The kernel has told of this entry, at place `at`.
    pub fn note(&self, at: u32, entry: &Entry, bits: u32) {
        if let Some(place) = self.asked.get(self.count.get())
            && has_room(entry, bits)
        {
            place.set((at, entry.stamp.load(Relaxed)));
            self.count.set(self.count.get() + 1);
        }
    }

    /// How many of the kernel's events come before what was asked for then.
    fn before(&self, stamp: u64) -> usize {
        let asked = &self.asked[..self.count.get()];
        let last = asked.iter().rev().map(Cell::get).find(|&(_, earlier)| earlier < stamp);
        last.map_or(0, |(at, _)| at as usize + 1)
    }
}

/// Whether room is told that was there when it was asked for, as far as that is known.
fn has_room(entry: &Entry, bits: u32) -> bool {
    // An edge with data is that of the data.
    bits & WRITE_BITS != 0 && (bits & READ_BITS == 0 || entry.events.load(Relaxed) & ET == 0)
}

impl Look<'_> {
    /// The hot entries and the sets inside. The first `n` events are the kernel's of this wait.
    ///
    /// # Safety
    /// `events` is writable for `max` entries, and the first `n` are filled.
    pub unsafe fn at_all(&self, events: *mut libc::epoll_event, max: c_int, n: c_int) -> c_int {
        // SAFETY: the caller's contract.
        let n = unsafe { self.at_rings(events, max, n) };
        scan_nested(self.index, events, max, n, self.round)
    }

    /// The hot entries alone.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn at_rings(&self, events: *mut libc::epoll_event, max: c_int, n: c_int) -> c_int {
        // What the kernel has told in this wait must not be told twice.
        let in_order = n == 0 && !self.rings_first;
        let told = in_order.then(|| self.set.told.load(Relaxed));
        let (n, has_stopped) = self.scan(events, max, n, told);
        if !has_stopped || n == max {
            return n;
        }
        // SAFETY: the rest of the caller's entries.
        unsafe {
            let rest = events.add(n as usize);
            let got = kernel_now(self, rest, max - n).max(0);
            n + self.scan(rest, max - n, got, None).0
        }
    }
}

/// Reports tracked sets inside this one that are ready, behind the first `n` events.
fn scan_nested(
    index: u32,
    events: *mut libc::epoll_event,
    max: c_int,
    mut n: c_int,
    round: u32,
) -> c_int {
    nested::each(index, |inner, nesting| {
        if n < max
            && let Some(event) = inner::event(nesting, inner, false, round)
        {
            // SAFETY: n < max, and events holds max entries.
            unsafe { events.add(n as usize).write(event) };
            n += 1;
        }
    });
    n
}

impl Look<'_> {
    /// Reports hot entries that are ready, at most `max` events in all; the first `n` are the kernel's. What came to rings
    /// before what these tell is put before them, and the rest behind them. With `told` it stops, and says so, at what came
    /// behind something that the kernel has not told until then.
    fn scan(
        &self,
        events: *mut libc::epoll_event,
        max: c_int,
        n: c_int,
        told: Option<u64>,
    ) -> (c_int, bool) {
        let (set, round) = (self.set, self.round);
        if set.hot_count.load(Relaxed) == 0 || n >= max {
            return (n, false);
        }
        let Some(_held) = set.lock.enter() else { return (n, false) };
        hot::sweep_now_and_then(set, round);
        let count = set.hot_count.load(Relaxed) as usize;
        // Start behind the last reported one, so that a busy head does not starve the tail.
        let start = set.hand.load(Relaxed) as usize;
        let (mut all, mut has_stopped) = (n, false);
        for i in 0..count {
            let at = (start + i) % count;
            let number = set.hot[at].load(Relaxed);
            let Some(entry) = entry::at(number) else { continue };
            if is_quiet(entry) || entry.round.load(Relaxed) == round {
                continue;
            }
            if told.is_some_and(|told| came_behind(entry, told)) {
                has_stopped = true;
                break;
            }
            let bits = report::take_events(entry, false);
            if bits == 0 {
                continue;
            }
            entry.round.store(round, Relaxed);
            let event = libc::epoll_event { events: bits, u64: number.into() };
            // SAFETY: all < max, and events holds max entries.
            unsafe { events.add(all as usize).write(event) };
            all += 1;
            if all == max {
                set.hand.store((at + 1) as u32, Relaxed);
                break;
            }
        }
        // SAFETY: these were written, by us or by the kernel.
        let told = unsafe { slice::from_raw_parts_mut(events, all as usize) };
        let (kernels, ours) = told.split_at_mut(n as usize);
        let first = in_order(ours, !kernels.is_empty(), self.told);
        told[..n as usize + first].rotate_left(n as usize);
        put_behind_rooms(told, first, &self.rooms);
        told[first + n as usize..].iter_mut().for_each(give_data);
        (all, has_stopped)
    }
}

/// The first events name their entries, and stand before what the kernel tells. Where it tells of room that was asked for
/// before theirs, they are put behind that. Gives them the application's data.
fn put_behind_rooms(events: &mut [libc::epoll_event], first: usize, rooms: &Rooms) {
    let mut left = first;
    for at in (0..first).rev() {
        let stamp = entry::at(events[at].u64 as u32)
            .filter(|entry| has_room(entry, events[at].events))
            .map_or(0, |entry| entry.stamp.load(Relaxed));
        give_data(&mut events[at]);
        let before = rooms.before(stamp);
        if before > 0 {
            // Those behind it that stay stand before the kernel's, as well.
            let end = (left + before).min(events.len());
            events[at..end].rotate_left(1);
            left -= 1;
        }
    }
}

/// An event that names its entry becomes the application's.
fn give_data(event: &mut libc::epoll_event) {
    if let Some(entry) = entry::at(event.u64 as u32) {
        event.u64 = entry.data.load(Relaxed);
    }
}

/// The connection of a registration, where all that comes goes through the ring.
fn in_ring(entry: &Entry) -> Option<(&'static Conn, &'static Slot)> {
    let conn = conn::at(entry.conn.load(Relaxed));
    let slot = conn.slot()?;
    conn.end(slot).reads_ring().then_some((conn, slot))
}

/// Whether what is unread came behind something that the kernel has not told until `told`.
fn came_behind(entry: &Entry, told: u64) -> bool {
    in_ring(entry).is_some_and(|(conn, slot)| {
        let peer = conn.peer(slot);
        order::is_behind(peer, conn.peers_stamp(slot), told) && conn.rx(slot).has_data()
    })
}

/// Puts events that name their entries in the order in which their peers have sent, or in which room was asked for, as the
/// kernel has them. How many come before what the kernel has told. The caller holds the set's lock.
fn in_order(events: &mut [libc::epoll_event], has_kernels: bool, told: u64) -> usize {
    let mut first = events.len();
    if events.len() > 1 || (has_kernels && first > 0) {
        let entries = || {
            let named =
                |event: &libc::epoll_event| Some((entry::at(event.u64 as u32)?, event.events));
            events.iter().filter_map(named)
        };
        let mut behind = u64::MAX;
        for (entry, bits) in entries() {
            if let Some((conn, slot)) = in_ring(entry)
                && !has_room(entry, bits)
            {
                // Taken once: a peer that changes it meanwhile must not confuse the sorting.
                let stamp = conn.peers_stamp(slot);
                entry.stamp.store(stamp, Relaxed);
                // A doorbell that the kernel tells of is for a ring, which has its own stamp.
                if order::is_behind_bytes(conn.peer(slot), stamp, told) {
                    behind = behind.min(stamp);
                }
            }
        }
        // What stands in TCP the kernel has told. No stamp that says so is 0.
        for (entry, _) in entries().filter(|(entry, _)| in_ring(entry).is_none()) {
            let stamp = entry.stamp.load(Relaxed);
            entry.stamp.store(stamp.min(behind - 1), Relaxed);
        }
        let stamp_of = |event: &libc::epoll_event| {
            entry::at(event.u64 as u32).map_or(0, |entry| entry.stamp.load(Relaxed))
        };
        events.sort_unstable_by_key(stamp_of);
        first = events.partition_point(|event| stamp_of(event) < behind);
    }
    first
}

/// One load tells that an entry which waits for data alone has none.
#[inline(always)]
pub fn is_quiet(entry: &Entry) -> bool {
    if entry.has(E_DISABLED) {
        return true;
    }
    let conn = conn::at(entry.conn.load(Relaxed));
    let Some(slot) = conn.slot() else { return true };
    let no_data = if conn.end(slot).reads_ring() {
        !conn.rx(slot).has_data()
    } else {
        !entry.has(E_TCP) && conn.peer(slot).tx(Relaxed) == Tx::Tcp
    };
    entry.events.load(Relaxed) & WRITE_BITS == 0
        && no_data
        && conn.peer(slot).flags(Relaxed).is_silent()
        && conn.kernel_events.load(Relaxed) == 0
        && !conn.end(slot).flags().is_shut_rd()
}
