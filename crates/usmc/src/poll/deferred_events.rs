//! What registrations that the kernel has not been told of yet ([`crate::watchers::deferred`]) have to report in a wait.

use core::ffi::c_int;
use core::mem;
use usmc_shm::sync::Ordering::Relaxed;

use super::epoll_wait;
use super::scan::Look;
use crate::os::awake::Awake;
use crate::os::signals::Signals;
use crate::os::sys;
use crate::watchers::deferred::{self, Which};
use crate::watchers::set;

/// Asks for what the set has deferred, and for whether the kernel has something to tell of all others: once, and again while the wait
/// is `awake`; `awake` is over where this has found nothing. A reported registration stays deferred until the next wait, and all others are
/// made. How many events there are.
///
/// # Safety
/// `events` is writable for `max` entries.
pub unsafe fn report(
    look: &Look<'_>,
    events: *mut libc::epoll_event,
    max: c_int,
    awake: &mut Awake,
    signals: &mut Signals,
) -> c_int {
    const FEW: u32 = 16;
    // Most waits have few to ask for, and clearing room for all of them would take longer than that.
    // SAFETY: the caller's contract.
    unsafe {
        match look.set.deferred_count.load(Relaxed) {
            ..=FEW => report_within::<{ FEW as usize + 1 }>(look, events, max, awake, signals),
            _ => report_within::<{ set::DEFERRED + 1 }>(look, events, max, awake, signals),
        }
    }
}

/// [`report`], with room for one registration less than `N`.
unsafe fn report_within<const N: usize>(
    look: &Look<'_>,
    events: *mut libc::epoll_event,
    max: c_int,
    awake: &mut Awake,
    signals: &mut Signals,
) -> c_int {
    const NONE: libc::pollfd = libc::pollfd { fd: -1, events: 0, revents: 0 };
    let &Look { epfd, set, index, round, .. } = look;
    let (mut fds, mut tags) = ([NONE; N], [0; N]);
    let again = awake.looks();
    let mut asked = deferred::collect(set, again, &mut fds[..N - 1], &mut tags);
    if asked < set.deferred_count.load(Relaxed) as usize {
        // What the kernel knows by what it was it must not tell.
        deferred::pay_some(index, Which::NotDue { again });
        asked = deferred::collect(set, again, &mut fds[..N - 1], &mut tags);
    }
    // The last, as nothing comes before what was seen already.
    fds[asked] = libc::pollfd { fd: epfd, events: libc::POLLIN, revents: 0 };
    let owed = set.deferred_count.load(Relaxed);
    // Another thread may owe something else meanwhile.
    let is_same = || set.deferred_count.load(Relaxed) == owed;
    let mut ask = || sys::poll_now(&mut fds[..=asked]) > 0 || !is_same();
    if asked == 0 || !(ask() || mem::replace(awake, Awake::NO).until(signals, ask)) {
        deferred::pay(index);
        return 0;
    }
    let kernels = match fds[asked].revents {
        0 => 0,
        // SAFETY: the caller's contract.
        _ => unsafe { epoll_wait::kernel_now(look, events, max) }.max(0),
    };
    let mut all = kernels;
    for (p, &tag) in fds.iter().zip(&tags).take(asked) {
        let found = u32::from((p.revents & !libc::POLLNVAL).cast_unsigned());
        if found != 0
            && all < max
            && let Some(bits) = deferred::tell((set, index), p.fd, tag, found, round)
        {
            // SAFETY: the caller's contract, and all < max.
            unsafe { events.add(all as usize).write(libc::epoll_event { events: bits, u64: tag }) };
            all += 1;
        }
    }
    // SAFETY: the caller's contract, and kernels ≤ max.
    let ours = unsafe { events.add(kernels as usize) };
    let told = epoll_wait::translate(look, ours, all - kernels, kernels as u32);
    if (told as u32) < set.deferred_count.load(Relaxed) {
        deferred::pay_some(index, Which::NotTold(round));
    }
    kernels + told
}
