//! poll(2), and select(2) by way of it, over the kernel's own.

use core::ffi::c_int;
use core::mem::{self, MaybeUninit};
use core::slice;
use usmc_shm::layout::{ARM_TCP, Slot};
use usmc_shm::state::Tx;
use usmc_shm::sync::Ordering::Relaxed;

use super::deadline::{Deadline, at_most};
use super::epoll_wait::{has_tracked, nested_ready};
use super::looks::{self, Looked, stay_awake};
use crate::family::locks::Receiving;
use crate::handshake::clc::{self, deputy};
use crate::host::ears::Listening;
use crate::os::errno::{errno, set_errno};
use crate::os::events::{self, READ_BITS, WRITE_BITS};
use crate::os::pointers::{is_nowhere, is_readable};
use crate::os::signals::Signals;
use crate::os::table::{self, Entry as Fd};
use crate::os::time::Time;
use crate::os::unwind::{cancellation_point, keeping};
use crate::os::{clock, real, sys, yields};
use crate::poll::each::Each;
use crate::poll::inner;
use crate::record::conn::{self, F_CLC};
use crate::record::phase::Phase;
use crate::stream::hearing::Hearing;
use crate::stream::wait::Sleeper;
use crate::stream::{bells, drained, due_ear, ending, ready, room, unheard};
use crate::watchers::asleep::{self, arm_all};
use crate::watchers::hot::Looks;
use crate::watchers::{deferred, set};

/// What one fd of a poll or select means to us.
pub(super) enum Watch {
    /// The kernel's alone.
    Kernel,
    /// The kernel's, but for an error that it has told to nobody but us.
    Failed,
    /// A ring connection.
    Ring(u32),
    /// An epoll set with tracked sockets.
    Nested(u32),
}

/// A look that moves handshakes on, too.
pub(super) fn watch(fd: c_int) -> Watch {
    // The kernel is asked of a set, too, and perhaps slept in.
    see(fd, |index| ready::is_kernels(|| fd, index), deferred::watch)
}

/// A look that moves nothing: behind the last one before a sleep.
fn glance(fd: c_int) -> Watch {
    see(fd, ready::is_kernels_so_far, |_| {})
}

#[inline(always)]
fn see(fd: c_int, is_kernels: impl Fn(u32) -> bool, before_set: impl Fn(u32)) -> Watch {
    match table::settled(fd) {
        Fd::Conn(index) if !is_kernels(index) => Watch::Ring(index),
        Fd::Conn(index) if ending::is_untold(conn::at(index)) => Watch::Failed,
        Fd::Epoll(index) => {
            before_set(index);
            if has_tracked(set::set_at(index)) { Watch::Nested(index) } else { Watch::Kernel }
        }
        _ => Watch::Kernel,
    }
}

/// In `revents` before a sleep: the thread is counted as a sleeper of that connection, and its ring is armed.
const ENTERED: i16 = 1;

/// What shared memory says about one pollfd.
pub(super) fn look(p: &libc::pollfd) -> i16 {
    match watch(p.fd) {
        Watch::Kernel | Watch::Failed => 0,
        Watch::Ring(index) => {
            let conn = conn::at(index);
            match conn.slot() {
                Some(slot) => ready::now(p.fd, conn, slot, p.events as u16 as u32) as i16,
                None => 0,
            }
        }
        Watch::Nested(index) => {
            if nested_ready(index) {
                p.events & (libc::POLLIN | libc::POLLRDNORM)
            } else {
                0
            }
        }
    }
}

/// poll(2) and ppoll(2). `None`: nothing tracked is among the fds, the real call serves.
///
/// # Safety
/// `fds` is valid for `count` entries; `mask` is null or a valid signal set.
pub unsafe fn poll(
    fds: *mut libc::pollfd,
    count: usize,
    timeout_ns: i64,
    mask: *const libc::sigset_t,
) -> Option<c_int> {
    let is_refused = is_nowhere(fds) || !(mask.is_null() || is_readable(mask));
    if is_refused || count == 0 || count > table::FDS {
        return None;
    }
    // SAFETY: the caller's contract.
    let fds = unsafe { slice::from_raw_parts_mut(fds, count) };
    let deadline = Deadline::after(timeout_ns);
    let mut signals = Signals::new();
    if !any_is_ours(fds) {
        let looked = match timeout_ns {
            0 => Looked::Not,
            _ => stay_awake(fds, deadline, &mut signals),
        };
        let moves = timeout_ns != 0 && fds.iter().any(|p| may_move(p.fd));
        if !moves && looked == Looked::Not {
            return None;
        }
        if looked == Looked::InVain && signals.have_come(mask) {
            set_errno(libc::EINTR);
            return Some(-1);
        }
        // Another thread may have brought one to the ring during the look.
        if !(may_be_exchanged(fds) || looked != Looked::Not && any_is_ours(fds)) {
            let mut place = MaybeUninit::uninit();
            let n = sleep_in_kernel(fds, deadline.left(), signals.mask(mask, &mut place));
            if n <= 0 || !any_is_ours(fds) {
                return Some(n);
            }
            // It has gone to the ring meanwhile: what has woken us may be a doorbell.
        }
    }
    cancellation_point();
    Some(on_a_copy(fds, |fds| poll_until(fds, timeout_ns, deadline, mask, &mut signals)))
}

/// The place of no number.
pub(super) const NOTHING: libc::pollfd = libc::pollfd { fd: -1, events: 0, revents: 0 };

/// Runs `call` with a copy of the application's array, which has its `revents` afterwards and nothing else: another thread
/// may use the same array, or fork, while we ask the kernel for other events. Behind it is a place for the ear.
fn on_a_copy(fds: &mut [libc::pollfd], call: impl FnOnce(&mut [libc::pollfd]) -> c_int) -> c_int {
    const FEW: usize = 8;
    const SOME: usize = 256;
    let count = fds.len();
    if count <= FEW {
        return on(&mut [NOTHING; FEW + 1][..=count], fds, call);
    }
    if count <= SOME {
        return on(&mut [NOTHING; SOME + 1][..=count], fds, call);
    }
    let bytes = mem::size_of_val(fds) + size_of::<libc::pollfd>();
    let Ok(at) = sys::mmap_private(core::ptr::null_mut(), bytes) else {
        set_errno(libc::ENOMEM);
        return -1;
    };
    let mapped = Mapped { at, bytes };
    // SAFETY: a mapping of our own for so many; zero is valid.
    let own = unsafe { slice::from_raw_parts_mut(at.cast(), count + 1) };
    keeping(mapped, || on(own, fds, call)).1
}

fn on(
    own: &mut [libc::pollfd],
    fds: &mut [libc::pollfd],
    call: impl FnOnce(&mut [libc::pollfd]) -> c_int,
) -> c_int {
    let (all, ear) = own.split_at_mut(fds.len());
    all.copy_from_slice(fds);
    ear.fill(NOTHING);
    let done = call(own);
    for (to, from) in fds.iter_mut().zip(own) {
        to.revents = from.revents;
    }
    done
}

/// Memory of our own, for as long as the call lasts.
struct Mapped {
    at: *mut u8,
    bytes: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nobody else has the mapping.
        unsafe { sys::munmap(self.at, self.bytes) };
    }
}

fn any_is_ours(fds: &[libc::pollfd]) -> bool {
    fds.iter().any(|p| p.fd >= 0 && is_ours(p.fd))
}

/// Whether it may become ours while a call sleeps on it: a connection goes to the ring, or is added to a set.
fn may_move(fd: c_int) -> bool {
    match table::settled(fd) {
        Fd::Conn(index) => {
            matches!(conn::at(index).phase(), Phase::Early | Phase::Offered | Phase::Attached)
        }
        Fd::Epoll(_) => true,
        _ => false,
    }
}

/// The real poll; `None`: without a time limit.
fn sleep_in_kernel(
    fds: &mut [libc::pollfd],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> c_int {
    let ts = timeout_ns.map(|ns| libc::timespec::from_ns(ns.min(i64::MAX as u64) as i64));
    let ts = ts.as_ref().map_or(core::ptr::null(), |ts| ts);
    // SAFETY: a valid slice; mask is the caller's; the real call is the cancellation point.
    unsafe { real::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, ts, mask) }
}

/// The last of `fds` is a place for the ear.
fn poll_until(
    fds: &mut [libc::pollfd],
    timeout_ns: i64,
    deadline: Deadline,
    mask: *const libc::sigset_t,
    signals: &mut Signals,
) -> c_int {
    let mut first = true;
    // When the first sleep began; 0 = there was none.
    let mut slept_since = 0;
    let mut exchange_ns = TICK_NS;
    loop {
        drained::look();
        let mut n = poll_now(fds);
        if (n > 0 || timeout_ns == 0) && first && may_have_ended(fds, n) {
            sleep_poll(fds, Some(0), core::ptr::null(), false, signals);
            n = poll_now(fds);
        }
        if !first && n > 0 {
            n -= hide_closed(fds);
        }
        first = false;
        if n == 0 && timeout_ns == 0 && !mask.is_null() {
            // The mask counts even then: what is pending and let in ends the call.
            return sleep_in_kernel(&mut [], Some(0), mask);
        }
        if n != 0 || timeout_ns == 0 {
            yields::found(n.max(0) as u32);
            return n;
        }
        match looks::spin(fds, deadline, signals) {
            Err(()) => return -1,
            Ok(found) if found || leave_if_stuck(fds) => continue,
            Ok(_) => {}
        }
        if signals.have_come(mask) {
            set_errno(libc::EINTR);
            return -1;
        }
        let budget = looks::budget(fds);
        due_ear::get_due();
        let mut asleep = Asleep::nowhere(fds.len());
        let mut looks = asleep.enter(fds);
        // A doorbell that asked for this may have been taken away since the last look.
        if drained::look() {
            continue;
        }
        let listening = if looks.hearing == Hearing::Ear { Listening::begin() } else { None };
        if listening.is_none() {
            looks = looks.without_ear();
        }
        let is_listening = listening.is_some();
        if let (Some(ear), Some(listening)) = (fds.last_mut(), &listening) {
            *ear = listening.pollfd();
        }
        let ready = fds.iter().any(|p| p.fd >= 0 && look(p) != 0);
        let (asleep, got) = keeping((asleep, listening), || match ready {
            true => 0,
            false => {
                let look_ns = at_most(looks.most_ns(), stuck_ns(fds));
                let look_ns = at_most(look_ns, may_be_exchanged(fds).then_some(exchange_ns));
                exchange_ns = (exchange_ns * 2).min(EXCHANGE_MAX_NS);
                if look_ns.is_some() {
                    signals.keep();
                }
                unheard::before_sleep();
                let look_ns = at_most(at_most(look_ns, room::sweep()), drained::look_in_ns());
                let most_ns = at_most(deadline.left(), look_ns);
                if slept_since == 0 && budget.is_some() {
                    slept_since = clock::now_ns();
                }
                sleep_poll(fds, most_ns, mask, is_listening, signals)
            }
        });
        let saved = errno();
        drop(asleep);
        if let Some(ear) = fds.last_mut() {
            *ear = NOTHING;
        }
        if got < 0 {
            set_errno(saved);
            return -1;
        }
        let is_over = deadline.left() == Some(0);
        if let Some(budget) = budget.filter(|_| slept_since != 0 && (got > 0 || is_over)) {
            budget.slept(if got == 0 { u64::MAX } else { clock::now_ns() - slept_since });
        }
        // Whatever has ended the sleep: an end that is told already ends each of them.
        if is_over {
            let n = poll_now(fds);
            return n - if n > 0 { hide_closed(fds) } else { 0 };
        }
    }
}

/// The kernel's poll has no eye for numbers that are closed while it waits. Hides those; how many there are.
fn hide_closed(fds: &mut [libc::pollfd]) -> c_int {
    let closed = fds.iter_mut().filter(|p| p.fd >= 0 && p.revents & libc::POLLNVAL != 0);
    closed
        .map(|p| {
            p.fd |= i32::MIN;
            p.revents = 0;
        })
        .count() as c_int
}

/// How often a sleeper looks that doorbells may not wake.
const TICK_NS: u64 = 1_000_000;
/// How late a sleeper looks for an exchange of its socket at most: after 1 ms, then after twice the time of before.
const EXCHANGE_MAX_NS: u64 = 1_000_000_000;
/// How often a sleeper looks at a connection that has hung up, which it does not mind.
const HUNG_UP_NS: u64 = 20_000_000;

/// Added to the number of a ring connection during a real poll. The application's own negative numbers are hardly
/// as low as that, nor those of [`hide_closed`].
const HIDDEN: c_int = i32::MIN + (table::FDS as c_int) * 2;

fn is_hidden(p: &libc::pollfd) -> bool {
    (HIDDEN..HIDDEN + table::FDS as i32).contains(&p.fd)
}

/// One look at everything: the kernel's fds by a real poll without waiting, ours in shared memory.
pub(super) fn poll_now(fds: &mut [libc::pollfd]) -> c_int {
    // Ring connections are hidden from the real call (negative fds are skipped) so that doorbells and
    // the always writable TCP socket do not show.
    let mut kernels = false;
    for p in fds.iter_mut() {
        p.revents = 0;
        if p.fd >= 0 {
            match watch(p.fd) {
                Watch::Kernel | Watch::Failed | Watch::Nested(_) => kernels = true,
                Watch::Ring(_) => p.fd += HIDDEN,
            }
        }
    }
    let mut n = 0;
    if kernels {
        // SAFETY: a valid slice, whose last is for the ear.
        n = unsafe { real::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t - 1, 0) };
    }
    for p in fds.iter_mut() {
        if is_hidden(p) {
            p.fd -= HIDDEN;
            p.revents = look(p);
            if n >= 0 && p.revents != 0 {
                n += 1;
            }
        } else if p.fd >= 0 && p.revents != 0 && may_hide(p.fd) {
            without_messages(p);
            n -= c_int::from(n > 0 && p.revents == 0);
        } else if p.fd >= 0 {
            match watch(p.fd) {
                Watch::Nested(index) => {
                    let told = p.revents != 0;
                    p.revents = look(p);
                    if told && p.revents == 0 && inner::is_readable(index) {
                        p.revents = p.events & (libc::POLLIN | libc::POLLRDNORM);
                    }
                    if n >= 0 {
                        n += c_int::from(p.revents != 0) - c_int::from(told);
                    }
                }
                // A failed connection always has hung up.
                Watch::Failed if p.revents & libc::POLLHUP != 0 => p.revents |= libc::POLLERR,
                _ => {}
            }
        }
    }
    n
}

/// Whether it is time to ask the kernel for the end of connections, for the sake of threads that never sleep: after some
/// 10 µs (in cycles) without anything to report, after some 100 µs else.
fn may_have_ended(fds: &[libc::pollfd], found: c_int) -> bool {
    const IDLE_CYCLES: u64 = 1 << 15;
    const BUSY_CYCLES: u64 = 1 << 18;
    let first = fds.iter().find_map(|p| match watch(p.fd) {
        Watch::Ring(index) if p.fd >= 0 => Some(conn::at(index)),
        _ => None,
    });
    let Some(conn) = first else { return false };
    let (now, limit) = (clock::tsc(), if found > 0 { BUSY_CYCLES } else { IDLE_CYCLES });
    let due = now.wrapping_sub(conn.polled.load(Relaxed)) > limit;
    if due {
        conn.polled.store(now, Relaxed);
    }
    due
}

/// Whether the kernel may report a CLC message as something to read.
fn may_hide(fd: c_int) -> bool {
    matches!(table::get(fd), Fd::Conn(index) if conn::at(index).has(F_CLC))
}

/// Takes back that there is something to read, where that is a CLC message alone, and that something can be sent, where a
/// message has to come first.
fn without_messages(p: &mut libc::pollfd) {
    const READ: i16 = libc::POLLIN | libc::POLLRDNORM;
    const WRITE: i16 = libc::POLLOUT | libc::POLLWRNORM;
    let Fd::Conn(index) = table::get(p.fd) else { return };
    let conn = conn::at(index);
    if p.revents & READ != 0 && clc::hides_input(p.fd, conn) {
        p.revents &= !READ;
    }
    if p.revents & WRITE != 0 && clc::first::hides_output(p.fd, conn) {
        p.revents &= !WRITE;
    }
}

/// Takes a connection out of the ring whose room this thread waits for, and may wait in vain.
fn leave_if_stuck(fds: &[libc::pollfd]) -> bool {
    fds.iter().any(|p| match watch(p.fd) {
        Watch::Ring(index) if p.fd >= 0 && p.events as u16 as u32 & WRITE_BITS != 0 => {
            room::leave_if_stuck(p.fd, index, || true)
        }
        Watch::Nested(index) if p.fd >= 0 => asleep::leave_stuck(index),
        _ => false,
    })
}

/// When it has to look at that again.
fn stuck_ns(fds: &[libc::pollfd]) -> Option<u64> {
    let each = fds.iter().filter_map(|p| match glance(p.fd) {
        Watch::Ring(index) if p.fd >= 0 && p.events as u16 as u32 & WRITE_BITS != 0 => {
            let conn = conn::at(index);
            room::look_in_ns(conn, conn.slot()?)
        }
        _ => None,
    });
    each.min()
}

/// Whether an agent may get one of the connections while the call sleeps on the socket of before.
fn may_be_exchanged(fds: &[libc::pollfd]) -> bool {
    let may_come =
        |fd| matches!(table::settled(fd), Fd::Conn(index) if deputy::may_come(conn::at(index)));
    fds.iter().any(|p| p.fd >= 0 && may_come(p.fd))
}

/// As what a call is counted for one pollfd, so that it is counted out as that, whatever becomes of the connection: nothing,
/// or a sleeper of a ring.
#[derive(Clone, Copy)]
struct Count {
    /// The connection plus one; 0 = not counted.
    conn: u32,
    /// Its record's.
    use_count: u16,
    returns: u8,
    /// For data, for room: a bit each.
    what: u8,
}

impl Count {
    const NONE: Count = Count { conn: 0, use_count: 0, returns: 0, what: 0 };

    fn enter(index: u32, slot: &Slot, want: u32) -> Count {
        let conn = conn::at(index);
        let count = Count {
            conn: index + 1,
            use_count: conn.use_count.load(Relaxed) as u16,
            returns: conn.returns() as u8,
            what: u8::from(want & READ_BITS != 0) | u8::from(want & WRITE_BITS != 0) << 1,
        };
        count.each(|for_room| Sleeper::count(conn, Some(slot), for_room, true));
        count
    }

    fn leave(&self) {
        let Some(index) = self.conn.checked_sub(1) else { return };
        let conn = conn::at(index);
        if conn.use_count.load(Relaxed) as u16 != self.use_count {
            // Closed, and all its sleepers forgotten.
            return;
        }
        // In another slot it was never counted, or too often, which does no harm.
        let slot = conn.slot().filter(|_| conn.returns() as u8 == self.returns);
        self.each(|for_room| Sleeper::count(conn, slot, for_room, false));
    }

    fn each(&self, act: impl FnMut(bool)) {
        [false, true]
            .into_iter()
            .filter(|&room| self.what & 1 << u8::from(room) != 0)
            .for_each(act);
    }
}

/// A call in the real poll, also one that does not return: when it is dropped, nobody sleeps any more.
struct Asleep {
    counts: Each<Count>,
    sets: asleep::Counted,
}

impl Asleep {
    fn nowhere(count: usize) -> Asleep {
        Asleep { counts: Each::new(Count::NONE, count), sets: asleep::Counted::nowhere() }
    }

    /// Counts this thread as a sleeper of every ring connection in `fds`, and arms these.
    fn enter(&mut self, fds: &mut [libc::pollfd]) -> Looks {
        let mut looks = Looks::default();
        for (i, p) in fds.iter_mut().enumerate().filter(|(_, p)| p.fd >= 0) {
            p.revents = 0;
            match watch(p.fd) {
                Watch::Kernel | Watch::Failed => {}
                Watch::Nested(index) => {
                    self.sets.enter(index);
                    looks = looks.and(arm_all(index).without_ear());
                }
                Watch::Ring(index) => {
                    let conn = conn::at(index);
                    let Some(slot) = conn.slot() else { continue };
                    p.revents = ENTERED;
                    let want = p.events as u16 as u32;
                    match self.counts.all().get_mut(i) {
                        Some(count) => *count = Count::enter(index, slot, want),
                        None => looks.hearing = Hearing::Nothing,
                    }
                    bells::clear_bells(p.fd, conn, slot);
                    ready::arm(p.fd, conn, slot, want, ARM_TCP);
                    let is_deaf = hears_bells(p.events)
                        && (bells::has_bells(conn, slot) || hides_bells(p.fd, conn, p.events));
                    let hearing = match is_deaf {
                        true => Hearing::Nothing,
                        false => ready::hearing(conn, slot, want),
                    };
                    looks.hearing = looks.hearing.max(hearing);
                }
            }
        }
        looks
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        self.counts.all().iter().for_each(Count::leave);
    }
}

/// Whether a doorbell may mean one of `events`. The kernel itself reports the end, errors and urgent data.
fn hears_bells(events: i16) -> bool {
    const BY_THE_KERNEL: i16 = libc::POLLRDHUP | libc::POLLPRI;
    events as u16 as u32 & (READ_BITS | WRITE_BITS) & !(BY_THE_KERNEL as u32) != 0
}

/// Whether the kernel may hold bytes of the stream that are no reason to wake a thread that wants `events`, but would:
/// nobody asks for data, or it is less than SO_RCVLOWAT, of which the kernel does not know.
fn hides_bells(fd: i32, conn: &conn::Conn, events: i16) -> bool {
    let unasked = events & (libc::POLLIN | libc::POLLRDNORM) == 0;
    (unasked || conn.lowat() > 1)
        && conn.slot().is_some_and(|s| {
            // Behind the ring, or before it.
            conn.peer(s).flags(Relaxed).is_returning()
                || (!is_past_tcp(fd, conn, s)
                    && sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|unread| unread > 0))
        })
}

/// Whether TCP has been read to the boundary, be it that nobody has looked since.
fn is_past_tcp(fd: i32, conn: &conn::Conn, slot: &Slot) -> bool {
    conn.end(slot).reads_ring()
        || (conn.peer(slot).tx(Relaxed) == Tx::Ring
            && Receiving::enter(fd, conn, slot)
                .is_some_and(|_held| bells::reads_ring(fd, conn, slot)))
}

/// The real sleep: ring connections wait for doorbells and for the end of the connection; where no doorbell reaches one, for the
/// ear, if it `is_listening`.
fn sleep_poll(
    fds: &mut [libc::pollfd],
    mut timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
    is_listening: bool,
    signals: &mut Signals,
) -> c_int {
    // The kernel overwrites `revents`, so the events are remembered in private memory.
    let mut kept = Each::new(0, fds.len());
    kept.all().iter_mut().zip(&*fds).for_each(|(to, p)| *to = p.events);
    for p in fds.iter_mut() {
        if p.fd >= 0
            && let Watch::Ring(index) = glance(p.fd)
        {
            if p.revents != ENTERED {
                // The connection went to the ring behind the last look, which has not seen what is ready there.
                timeout_ns = Some(0);
            }
            let bells =
                conn::at(index).slot().is_some_and(|s| bells::has_bells(conn::at(index), s));
            let conn = conn::at(index);
            let shut = |s: &Slot| conn.end(s).flags().is_shut_rd();
            let ended = conn.kernel_events.load(Relaxed) != 0
                || bells::is_cut(conn)
                || conn.slot().is_some_and(shut);
            // What is there already would end every sleep at once.
            let urgent = p.events & libc::POLLPRI;
            let hidden = bells || hides_bells(p.fd, conn, p.events);
            let deaf = ended || hidden;
            let hung_up = conn.kernel_events.load(Relaxed) & events::HUP != 0;
            let look_ns = match hears_bells(p.events) {
                // It may be so since a moment only, later than our last look: that bell was for us.
                true if hidden || (ended && !is_listening) => Some(TICK_NS),
                // What it waits for can only be our own doing.
                false if hung_up => Some(HUNG_UP_NS),
                _ => None,
            };
            if look_ns.is_some() && timeout_ns != Some(0) {
                signals.keep();
            }
            timeout_ns = at_most(timeout_ns, look_ns);
            p.events = match deaf {
                // A look does not mind what would keep a sleeper awake.
                _ if timeout_ns == Some(0) => libc::POLLRDHUP | urgent,
                true if ended => urgent,
                true => libc::POLLRDHUP | urgent,
                false => libc::POLLIN | libc::POLLRDHUP | urgent,
            };
            if (hung_up || bells::is_cut(conn)) && timeout_ns != Some(0) {
                // The kernel would report it at once, and again and again.
                p.fd += HIDDEN;
            }
        }
    }
    let kept = GivenBack { kept, at: fds.as_mut_ptr(), count: fds.len() };
    let mut at = MaybeUninit::uninit();
    let mask = signals.mask(mask, &mut at);
    // The kernel takes no more of them than RLIMIT_NOFILE.
    let asked = fds.len() - usize::from(!is_listening);
    let (kept, n) = keeping(kept, || sleep_in_kernel(&mut fds[..asked], timeout_ns, mask));
    let saved = errno();
    drop(kept);
    for p in fds.iter().filter(|p| p.fd >= 0) {
        if n > 0
            && let Watch::Ring(index) = watch(p.fd)
        {
            ending::note(p.fd, conn::at(index), p.revents as u32);
        }
    }
    set_errno(saved);
    n
}

/// The application's events, which its array has again when the real poll is over, which needs others.
struct GivenBack {
    kept: Each<i16>,
    at: *mut libc::pollfd,
    count: usize,
}

impl Drop for GivenBack {
    fn drop(&mut self) {
        // SAFETY: the array of `sleep_poll`, which uses it again behind this.
        let fds = unsafe { slice::from_raw_parts_mut(self.at, self.count) };
        fds.iter_mut().filter(|p| is_hidden(p)).for_each(|p| p.fd -= HIDDEN);
        fds.iter_mut().zip(self.kept.all()).for_each(|(p, events)| p.events = *events);
    }
}

/// Whether more than the kernel has to be asked about `fd`; select(2) converts to poll(2) then.
pub fn is_ours(fd: c_int) -> bool {
    // First: the step that `watch` makes may take the message out that the kernel has reported.
    let hides = may_hide(fd);
    hides || !matches!(watch(fd), Watch::Kernel)
}
