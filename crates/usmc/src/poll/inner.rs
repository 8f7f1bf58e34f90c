//! Sets inside sets, as a wait sees them.

use usmc_shm::sync::Ordering::{AcqRel, Relaxed};

use super::epoll_wait;
use crate::os::{events, sys};
use crate::watchers::nested::Nesting;
use crate::watchers::set::{self, ET, ONESHOT};

/// The event to report, if the inner set has something to report that was not reported before.
/// `by_kernel`: the kernel says so, too. `round` is the outer set's wait.
pub fn event(
    nesting: &Nesting,
    inner: u32,
    by_kernel: bool,
    round: u32,
) -> Option<libc::epoll_event> {
    let want = nesting.events.load(Relaxed);
    if !nesting.wants_data() {
        return None;
    }
    if nesting.round.load(Relaxed) == round {
        return None;
    }
    let seen = nesting.seen.load(Relaxed);
    let look = || {
        let (ready, print) = epoll_wait::nested_look(inner);
        (ready && (want & ET == 0 || print != seen), print)
    };
    let (mut by_rings, mut print) = look();
    if !by_rings {
        if !by_kernel {
            return None;
        }
        // What has rung is looked at from now on, and what is over is taken from the kernel.
        epoll_wait::settle(inner);
        (by_rings, print) = look();
        if !by_rings && !kernel_finds(inner) {
            return None;
        }
    }
    // Another thread may look at the same moment: an edge is told to one of them.
    let is_edge = by_rings && want & ET != 0 && !by_kernel;
    if is_edge && nesting.seen.compare_exchange(seen, print, AcqRel, Relaxed).is_err() {
        return None;
    }
    nesting.seen.store(print, Relaxed);
    if want & ONESHOT != 0 && nesting.disabled.swap(1, AcqRel) != 0 {
        return None;
    }
    nesting.round.store(round, Relaxed);
    Some(libc::epoll_event { events: events::IN, u64: nesting.data.load(Relaxed) })
}

/// Whether the kernel finds something in the set once doorbells without a meaning are gone.
pub fn is_readable(inner: u32) -> bool {
    epoll_wait::settle(inner);
    kernel_finds(inner)
}

fn kernel_finds(inner: u32) -> bool {
    sys::poll1(set::fd_of(inner), libc::POLLIN, 0) & libc::POLLIN != 0
}
