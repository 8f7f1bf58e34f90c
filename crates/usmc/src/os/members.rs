//! The processes that hold an end together, by their ids, so that one that was killed can be counted out.
//!
//! Each enters its own id: the parent before a fork, the child in it. A process that lets go leaves first and is counted out by
//! itself then. Ids may be those of somebody else by now, and lists may be full: then a dead process stays counted, which
//! costs shared locks and nothing else. No living process is counted out.

use usmc_shm::sync::Ordering::{AcqRel, Relaxed};
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::{clock, process};

/// How long (some 5 ms, in cycles) a process is believed to live.
const BELIEVED: u64 = 1 << 24;

/// This process holds it.
pub fn enter(list: &[AtomicU32]) {
    enter_other(list, process::pid());
}

/// That process does, whose id we know.
pub fn enter_other(list: &[AtomicU32], id: u32) {
    // Under such an id others would take us for dead, and we them.
    if process::is_scattered() || list.iter().any(|place| place.load(Relaxed) == id) {
        return;
    }
    let put = |place: &AtomicU32| place.compare_exchange(0, id, AcqRel, Relaxed).is_ok();
    let _ = list.iter().any(put);
}

/// It is about to let go.
pub fn leave(list: &[AtomicU32]) {
    let me = process::pid();
    let take = |id: &AtomicU32| id.compare_exchange(me, 0, AcqRel, Relaxed).is_ok();
    let _ = list.iter().any(take);
}

/// Counts those out of `holders` that have died; `each` hears of them. The last one stays: the caller has let go already, and it is for
/// whoever sweeps to find that nobody is left.
#[cold]
pub fn bury(list: &[AtomicU32], holders: &AtomicU32, mut each: impl FnMut(u32)) {
    take_dead(list, |id| {
        let others = |n: u32| if n > 1 { Some(n - 1) } else { None };
        match holders.fetch_update(AcqRel, Relaxed, others) {
            Ok(_) => each(id),
            Err(_) => enter_other(list, id),
        }
    });
}

/// Takes those from the list that have died. The caller counts them out.
#[cold]
pub fn take_dead(list: &[AtomicU32], mut each: impl FnMut(u32)) {
    let me = process::pid();
    for place in list {
        let id = place.load(Relaxed);
        if id != 0
            && id != me
            && has_died(id)
            && place.compare_exchange(id, 0, AcqRel, Relaxed).is_ok()
        {
            each(id);
        }
    }
}

/// A process, and when it was last known to live.
struct Seen {
    id: AtomicU32,
    at: AtomicU64,
}

/// Many connections are held by the same few.
static SEEN: [Seen; 8] = [const { Seen { id: AtomicU32::new(0), at: AtomicU64::new(0) } }; 8];

fn has_died(id: u32) -> bool {
    let (seen, now) = (&SEEN[id as usize % SEEN.len()], clock::tsc());
    if seen.id.load(Relaxed) == id && now.wrapping_sub(seen.at.load(Relaxed)) < BELIEVED {
        return false;
    }
    if !process::is_alive(id) {
        return true;
    }
    seen.at.store(now, Relaxed);
    seen.id.store(id, Relaxed);
    false
}
