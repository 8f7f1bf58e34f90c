//! The calls that wait for readiness.

use core::ffi::{c_int, c_ulong};
use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use super::{apart, fail, is_nowhere, is_readable};
use crate::handshake::transition;
use crate::os::table::{self, Entry};
use crate::os::time::Time;
use crate::os::{clock, errno, real, sys};
use crate::poll::{epoll_wait, pollfds};
use crate::watchers::{deferred, epoll_ctl, nested};

timed! {
    /// epoll_pwait2(2)
    epoll_pwait2 or epoll_pwait2_time64 by __epoll_pwait2_time64
        (epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int
        |kernel()| wait_in((epfd, events, max), || limit_ns(timeout), mask, kernel);
    /// ppoll(2)
    ppoll or ppoll_time64 by __ppoll64
        (fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int
        |kernel()| ppoll_by(fds, count, timeout, mask, kernel);
    /// select(2)
    select or select_time64 by __select64
        (count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval) -> c_int
        |kernel(count)| select_in(count, [r, w, x], timeout, kernel);
    /// pselect(2)
    pselect or pselect_time64 by __pselect64
        (count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int
        |kernel(count)| pselect_in(count, [r, w, x], timeout, mask, kernel);
}

/// epoll_ctl(2)
pub unsafe fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: the caller's contract, as for all real calls below.
    let kernel = || unsafe { real::epoll_ctl(epfd, op, fd, event) };
    let Entry::Epoll(set) = table::settled(epfd) else {
        let done = kernel();
        return if done == 0 && op == libc::EPOLL_CTL_ADD { unknown_set(epfd, fd) } else { done };
    };
    if op != libc::EPOLL_CTL_DEL && !is_readable(event) {
        return kernel();
    }
    // SAFETY: the caller's contract; DEL does not look at it.
    let copy = (op != libc::EPOLL_CTL_DEL).then(|| unsafe { event.read_unaligned() });
    let finish = |done| match done {
        None => kernel(),
        Some(Ok(())) => 0,
        Some(Err(code)) => fail::<i32>(code),
    };
    match table::settled(fd) {
        Entry::Conn(index) => finish(apart(|| epoll_ctl::control(epfd, set, op, fd, index, copy))),
        Entry::Epoll(inner) => {
            finish(apart(|| nested::control((epfd, set), (fd, inner), op, copy)))
        }
        Entry::Foreign | Entry::Internal | Entry::Uring(_) => kernel(),
    }
}

/// A socket was added to a set that the library does not know (inherited by exec, or one too many): the
/// kernel alone reports it, so it has to stay TCP.
fn unknown_set(epfd: c_int, fd: c_int) -> c_int {
    if let Entry::Epoll(inner) = table::settled(fd) {
        apart(|| deferred::watch(inner));
    }
    let Entry::Conn(index) = table::settled(fd) else { return 0 };
    if apart(|| transition::stay_tcp(index)) {
        return 0;
    }
    let mut none = epoll_event { events: 0, u64: 0 };
    let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &mut none);
    fail::<i32>(libc::ENOSPC)
}

calls! {
    /// epoll_wait(2)
    epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int
        |kernel()| wait_in((epfd, events, max), || Some(ms(timeout)), core::ptr::null(), kernel);
    /// epoll_pwait(2)
    epoll_pwait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int
        |kernel()| wait_in((epfd, events, max), || Some(ms(timeout)), mask, kernel);
    /// poll(2)
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int
        |kernel()| pollfds::poll(fds, count as usize, ms(timeout), core::ptr::null()).unwrap_or_else(kernel);
}

/// Milliseconds in nanoseconds.
fn ms(timeout: c_int) -> i64 {
    i64::from(timeout) * 1_000_000
}

/// Whether a wait that needs no system call may take this for its signals' mask.
fn is_mask(mask: *const sigset_t) -> bool {
    mask.is_null() || is_readable(mask)
}

/// A wait on a set; `kernel` is the real call, and `limit` as [`limit_ns`] has it.
#[inline(always)]
unsafe fn wait_in(
    (epfd, events, max): (c_int, *mut epoll_event, c_int),
    limit: impl FnOnce() -> Option<i64>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> c_int,
) -> c_int {
    if let Entry::Epoll(set) = table::settled(epfd)
        && is_mask(mask)
        && let Some(ns) = limit()
        // SAFETY: the caller's contract.
        && let Some(n) = unsafe { epoll_wait::epoll_wait(epfd, set, events, max, ns, mask) }
    {
        return n;
    }
    kernel()
}

/// In nanoseconds; -1 = none. `None` for times that the kernel refuses: they are left to the kernel.
fn limit_ns<T: Time>(t: *const T) -> Option<i64> {
    // SAFETY: null or valid (the callers' contract).
    match unsafe { t.as_ref() } {
        None => Some(-1),
        Some(t) => t.is_valid().then(|| t.ns()),
    }
}

/// ppoll(2); `kernel` is the real call.
unsafe fn ppoll_by<T: Time>(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const T,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> c_int,
) -> c_int {
    let Some(ns) = limit_ns(timeout) else { return kernel() };
    // SAFETY: the caller's contract.
    unsafe { pollfds::poll(fds, count as usize, ns, mask) }.unwrap_or_else(kernel)
}

const READ: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND;
const WRITE: i16 = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;
const READ_SET: i16 = READ | libc::POLLHUP | libc::POLLERR;
const WRITE_SET: i16 = WRITE | libc::POLLERR;

/// Bits of a word of an fd_set, the kernel's `long`.
const WORD: usize = c_ulong::BITS as usize;

/// The three sets of select(2) as words; programs may use more than FD_SETSIZE bits.
struct Sets {
    sets: [*mut c_ulong; 3],
    count: usize,
}

impl Sets {
    fn lead_somewhere(&self) -> bool {
        self.sets.iter().all(|set| set.is_null() || !is_nowhere(*set))
    }

    fn bit(&self, set: usize, fd: usize) -> bool {
        let base = self.sets[set];
        // SAFETY: fd < count, and a set holds `count` bits (select's contract).
        !base.is_null() && unsafe { base.add(fd / WORD).read() } >> (fd % WORD) & 1 != 0
    }

    fn clear(&self) {
        for base in self.sets.into_iter().filter(|b| !b.is_null()) {
            for word in 0..self.count.div_ceil(WORD) {
                // SAFETY: as above.
                unsafe { base.add(word).write(0) };
            }
        }
    }

    fn put(&self, set: usize, fd: usize) {
        // SAFETY: as above; only called for sets the caller gave.
        unsafe { *self.sets[set].add(fd / WORD) |= 1 << (fd % WORD) };
    }

    fn wanted(&self, fd: usize) -> i16 {
        let mut events = 0;
        for (set, bits) in [(0, READ), (1, WRITE), (2, libc::POLLPRI)] {
            if self.bit(set, fd) {
                events |= bits;
            }
        }
        events
    }

    /// Whether a ring connection (or a set of such) is among the fds.
    fn has_ours(&self) -> bool {
        (0..self.count).any(|fd| self.wanted(fd) != 0 && pollfds::is_ours(fd as c_int))
    }
}

/// The bits of each set that the kernel would look at and write, were the library's own descriptors not there: as many as
/// the process' table of files has places (core_sys_select in fs/select.c, alloc_fdtable in fs/file.c). Programs name
/// large counts with sets that are smaller.
fn as_if_alone(count: c_int) -> c_int {
    if count <= libc::FD_SETSIZE as c_int {
        return count;
    }
    let _errno = errno::keep();
    let mut highest = 0;
    let mut see = |fd: c_int, entry| {
        if entry != Entry::Internal {
            highest = highest.max(fd);
        }
    };
    if sys::each_open_fd(|fd| see(fd, table::settled(fd))).is_err() {
        // No /proc.
        see(libc::FD_SETSIZE as c_int - 1, Entry::Foreign);
        table::for_each(0, u32::MAX, see);
    }
    const STEP: u32 = 1024 / size_of::<usize>() as u32;
    let places = match highest as u32 {
        few if few < c_ulong::BITS => c_ulong::BITS,
        fd => (fd / STEP + 1).next_power_of_two() * STEP,
    };
    count.min(places as c_int)
}

/// select by poll: `None` when nothing of ours is among the fds.
unsafe fn select_by_poll(sets: &Sets, timeout_ns: i64, mask: *const sigset_t) -> Option<c_int> {
    if !sets.lead_somewhere() || !is_mask(mask) || !sets.has_ours() {
        return None;
    }
    let wanted = (0..sets.count).filter(|&fd| sets.wanted(fd) != 0).count();
    let bytes = wanted * size_of::<pollfd>();
    let mut few: [pollfd; 64] = [pollfd { fd: -1, events: 0, revents: 0 }; 64];
    let many = if wanted > few.len() {
        sys::mmap_private(core::ptr::null_mut(), bytes).ok()?.cast::<pollfd>()
    } else {
        few.as_mut_ptr()
    };
    // SAFETY: `wanted` entries on the stack or in a fresh mapping.
    let fds = unsafe { core::slice::from_raw_parts_mut(many, wanted) };
    let interesting = (0..sets.count).filter(|&fd| sets.wanted(fd) != 0);
    for (place, fd) in fds.iter_mut().zip(interesting) {
        *place = pollfd { fd: fd as c_int, events: sets.wanted(fd), revents: 0 };
    }
    // SAFETY: a valid slice; mask is the caller's.
    let mut done = unsafe { pollfds::poll(fds.as_mut_ptr(), wanted, timeout_ns, mask) };
    let deadline = clock::now_ns().saturating_add(timeout_ns.max(0) as u64);
    while let Some(n) = done
        && n > 0
        && leave_out_hangups(fds)
    {
        let left =
            if timeout_ns < 0 { -1 } else { deadline.saturating_sub(clock::now_ns()) as i64 };
        // SAFETY: as above.
        done = Some(unsafe {
            pollfds::poll(fds.as_mut_ptr(), wanted, left, mask).unwrap_or_else(|| {
                let left = (timeout_ns >= 0).then(|| timespec::from_ns(left));
                let left = left.as_ref().map_or(core::ptr::null(), |left| left);
                real::ppoll(fds.as_mut_ptr(), wanted as libc::nfds_t, left, mask)
            })
        });
    }
    let result = done.map(|n| report(sets, fds, n));
    if wanted > few.len() {
        // SAFETY: our own mapping, not used any more.
        unsafe { sys::munmap(many.cast(), bytes) };
    }
    result
}

/// poll(2) reports POLLERR and POLLHUP to everyone, select(2) in some sets only. Where nothing but these is there,
/// drops the fds that have them, and says that it is to be waited on.
fn leave_out_hangups(fds: &mut [pollfd]) -> bool {
    let counts = |p: &pollfd| {
        p.revents & libc::POLLNVAL != 0
            || (p.events & READ != 0 && p.revents & READ_SET != 0)
            || (p.events & WRITE != 0 && p.revents & WRITE_SET != 0)
            || (p.events & libc::POLLPRI != 0 && p.revents & libc::POLLPRI != 0)
    };
    if fds.iter().any(counts) {
        return false;
    }
    fds.iter_mut().filter(|p| p.revents != 0).for_each(|p| (p.fd, p.revents) = (-1, 0));
    true
}

fn report(sets: &Sets, fds: &[pollfd], n: c_int) -> c_int {
    if n < 0 {
        return n;
    }
    if fds.iter().any(|p| p.revents & libc::POLLNVAL != 0) {
        return fail::<i32>(libc::EBADF);
    }
    let mut wanted: [bool; 3];
    let mut total = 0;
    let given = |set: usize| !sets.sets[set].is_null();
    // What was asked for is kept in `events`, so the sets can be cleared first.
    sets.clear();
    for p in fds {
        wanted = [p.events & READ != 0, p.events & WRITE != 0, p.events & libc::POLLPRI != 0];
        for (set, bits) in [(0, READ_SET), (1, WRITE_SET), (2, libc::POLLPRI)] {
            if given(set) && wanted[set] && p.revents & bits != 0 {
                sets.put(set, p.fd as usize);
                total += 1;
            }
        }
    }
    total
}

/// select(2); `kernel` is the real call.
unsafe fn select_in<T: Time>(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut T,
    kernel: impl FnOnce(c_int) -> c_int,
) -> c_int {
    let count = as_if_alone(count);
    let sets = Sets { sets: sets.map(|set| set.cast()), count: count.max(0) as usize };
    // SAFETY: the caller's contract.
    let limit = unsafe { timeout.as_ref() }.copied();
    let ns = limit.map_or(-1, |t| t.ns());
    let start = clock::now_ns();
    // More than a second of microseconds is fine.
    let is_bad = |t: T| t.parts().0 < 0 || t.parts().1 < 0;
    let done = if limit.is_some_and(is_bad) {
        None
    } else {
        // SAFETY: the caller's contract.
        unsafe { select_by_poll(&sets, ns, core::ptr::null()) }
    };
    let Some(n) = done else { return kernel(count) };
    if limit.is_some() && !real::is_musl() {
        // Linux tells the time that is left; musl keeps that from its programs.
        let left = (ns as u64).saturating_sub(clock::now_ns() - start);
        // SAFETY: not null, the caller's contract.
        unsafe { *timeout = T::from_ns(left as i64) };
    }
    n
}

/// pselect(2); `kernel` is the real call.
unsafe fn pselect_in<T: Time>(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *const T,
    mask: *const sigset_t,
    kernel: impl FnOnce(c_int) -> c_int,
) -> c_int {
    let count = as_if_alone(count);
    let sets = Sets { sets: sets.map(|set| set.cast()), count: count.max(0) as usize };
    let Some(ns) = limit_ns(timeout) else { return kernel(count) };
    // SAFETY: the caller's contract.
    unsafe { select_by_poll(&sets, ns, mask) }.unwrap_or_else(|| kernel(count))
}
