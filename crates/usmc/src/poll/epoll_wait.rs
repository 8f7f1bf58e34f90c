//! Waiting on an epoll set, over the kernel's own.

use core::ffi::c_int;
use core::mem::MaybeUninit;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use super::deadline::{Deadline, at_most};
use super::scan::{Look, Rooms, is_quiet};
use crate::handshake::clc;
use crate::host;
use crate::os::awake::Awake;
use crate::os::errno::{errno, set_errno};
use crate::os::events::{self, READ_BITS, WRITE_BITS};
use crate::os::pointers::is_nowhere;
use crate::os::signals::Signals;
use crate::os::spin::Budget;
use crate::os::unwind::{cancellation_point, keeping};
use crate::os::{clock, real, single, yields};
use crate::poll::{deferred_events, inner};
use crate::record::conn::{self, F_CLC, F_DEPUTY};
use crate::stream::hearing::Hearing;
use crate::stream::{bells, drained, due_ear, ending, ready, room, unheard};
use crate::watch::observer;
use crate::watchers::asleep::{Asleep, arm_all, leave_stuck};
use crate::watchers::entry::{self, E_DEFERRED, E_KICKED, E_KNOWN, E_RING, E_TCP};
use crate::watchers::hot::{self, Looks};
use crate::watchers::set::{self, Set};
use crate::watchers::{agent_ear, deferred, epoll, epoll_ctl, nested, report};

/// The kernel's set is asked at least every so many waits that found something in shared memory.
const KERNEL_TURN: u32 = 8;
/// The kernel is asked at least this often, also while spinning.
pub(super) const KERNEL_SPIN_NS: u64 = 10_000;

/// epoll_wait, epoll_pwait and epoll_pwait2 on a set with tracked sockets. `None`: the real call serves.
///
/// # Safety
/// `events` is writable for `max` entries; `mask` is null or a valid signal set.
pub unsafe fn epoll_wait(
    epfd: c_int,
    index: u32,
    events: *mut libc::epoll_event,
    max: c_int,
    timeout_ns: i64,
    mask: *const libc::sigset_t,
) -> Option<c_int> {
    /// More the kernel refuses.
    const MOST: c_int = c_int::MAX / size_of::<libc::epoll_event>() as c_int;
    let set = set::set_at(index);
    if !(1..=MOST).contains(&max) {
        return None;
    }
    if is_nowhere(events) {
        deferred::pay(index);
        if has_tracked(set) && nested_ready(index) {
            set_errno(libc::EFAULT);
            return Some(-1);
        }
        return None;
    }
    cancellation_point();
    // Nothing is counted down where nothing is waited for.
    let begun = if timeout_ns == 0 { 0 } else { clock::now_ns() };
    let deadline = Deadline::from(begun, timeout_ns);
    if begun != 0 {
        set.work.ends(begun);
    }
    let budget = Budget::beside(&set.learnt, &set.work);
    let mut is_first = true;
    let mut signals = Signals::new();
    // SAFETY (all raw calls below): the caller's contract.
    loop {
        drained::look();
        let round = single::add(&set.rounds, 1).wrapping_add(1);
        let rings_first = set.filled.load(Relaxed) != 0;
        if rings_first {
            set.filled.store(0, Relaxed);
        }
        let told = set.told.load(Relaxed);
        let look = Look { epfd, set, index, round, told, rings_first, rooms: Rooms::new() };
        let look_behind = |n| {
            if !is_active(set) {
                return n;
            }
            // SAFETY: the caller's contract; `n` events were filled.
            unsafe { look.at_all(events, max, n) }
        };
        let mut has_looked = false;
        let mut awake = match timeout_ns {
            0 => Awake::NO,
            _ => Awake::get(|| deadline.left().unwrap_or(u64::MAX)),
        };
        if deferred::is_any(set) {
            if is_active(set) {
                // Rings have something to tell as well, of which such looks know nothing.
                awake = Awake::NO;
            }
            let before = awake.looks();
            // SAFETY: the caller's contract.
            let n =
                unsafe { deferred_events::report(&look, events, max, &mut awake, &mut signals) };
            if n > 0 {
                return Some(found(set, look_behind(n)));
            }
            has_looked = awake.looks() != before;
        }
        let ours = has_tracked(set);
        // Otherwise the kernel alone has something to tell.
        let active = ours && is_active(set);
        // The sleep asks the kernel, too.
        let sleeps_at_once =
            active && timeout_ns != 0 && !rings_first && budget.get() == 0 && !nested_ready(index);
        if !sleeps_at_once && (active || (ours && timeout_ns == 0)) {
            let mut n = 0;
            let turn = active && !rings_first && is_kernels_turn(set, round);
            if turn {
                // First, so that rings that are always ready do not hide the rest; nor do others hide the rings.
                // SAFETY: see above.
                n = unsafe { kernel_now(&look, events, max) };
                if n == max {
                    set.filled.store(1, Relaxed);
                }
            }
            if n >= 0 {
                n = look_behind(n);
            }
            if n == 0 && !turn {
                // SAFETY: see above.
                n = unsafe { kernel_now(&look, events, max) };
                if n >= 0 {
                    n = look_behind(n);
                }
            }
            if n < 0 {
                return Some(-1);
            }
            if n > 0 || timeout_ns == 0 {
                return Some(found(set, n));
            }
            let most_ns = deadline.left().unwrap_or(u64::MAX);
            if most_ns > 0 && spin(&look, (&budget, most_ns), &mut signals, (events, max), &mut n) {
                set.work.begins(clock::now_ns());
                set.spins.store(set.spins.load(Relaxed).wrapping_add(1), Relaxed);
                if n > 0 {
                    return Some(found(set, n));
                }
                continue;
            }
        }
        if !active && awake.looks() {
            let mut n = 0;
            // With a yield before the first one: among many that are at work more is there then, for one wait.
            awake.until(&mut signals, || {
                // SAFETY: see above.
                n = unsafe { kernel_now(&look, events, max) };
                n != 0 || is_active(set) || deferred::is_any(set)
            });
            if n != 0 {
                return Some(if n < 0 { n } else { found(set, look_behind(n)) });
            }
            has_looked = true;
        }
        // A look takes time.
        is_first &= !has_looked;
        if signals.have_come(mask) {
            set_errno(libc::EINTR);
            return Some(-1);
        }
        agent_ear::get_due(set, index);
        due_ear::get_due();
        let asleep = Asleep::enter(set, index);
        let owes = !deferred::pay(index);
        let mut looks =
            Looks { hearing: if owes { Hearing::Nothing } else { Hearing::Bells }, stuck_ns: None };
        if active {
            looks = looks.and(arm_all(index));
            if looks.hearing == Hearing::Ear && !set::listen(set, index) {
                looks = looks.without_ear();
            }
            if looks.stuck_ns.is_some() && leave_stuck(index) {
                continue;
            }
            // A doorbell that asked for this may have been taken away since the last look.
            if drained::look() {
                continue;
            }
            let n = look_behind(0);
            if n > 0 {
                drop(asleep);
                return Some(found(set, n));
            }
        } else if has_tracked(set) != ours || is_active(set) {
            continue;
        }
        if looks.most_ns().is_some() {
            signals.keep();
        }
        host::own_word::keep();
        unheard::before_sleep();
        let by_itself = at_most(room::sweep(), drained::look_in_ns());
        let most_ns = looks.and(Looks { stuck_ns: by_itself, ..Looks::default() }).most_ns();
        let at_once = is_first && !active && most_ns.is_none();
        let start = if at_once { begun } else { clock::now_ns() };
        is_first = false;
        let at = clock::tsc();
        let left = if at_once { Left::All(timeout_ns) } else { Left::Until(deadline, most_ns) };
        let mut place = MaybeUninit::uninit();
        let mask = signals.mask(mask, &mut place);
        // SAFETY: see above; the real call is the cancellation point and takes the signal mask.
        let (asleep, got) =
            keeping(asleep, || unsafe { sleep(epfd, events, max, left, timeout_ns, mask) });
        let saved = errno();
        drop(asleep);
        hot::disarm(set);
        if got < 0 {
            set_errno(saved);
            return Some(-1);
        }
        if got < max {
            // Of what came at the very moment of waking it is not known.
            set.told.store(at, Relaxed);
        }
        let learns = ours && set.was_hot.load(Relaxed) != 0;
        let now = if learns { clock::now_ns() } else { start };
        look.rooms.forget();
        let kernels = translate(&look, events, got, 0);
        let n = look_behind(kernels);
        if learns {
            // What the kernel had to tell before the sleep ends it at once, and says nothing.
            if !sleeps_at_once || n > kernels || got == 0 {
                budget.slept(now - start);
            }
            set.work.begins(now);
            observer::set_slept(set.spins.swap(0, Relaxed));
        }
        if n > 0 {
            return Some(found(set, n));
        }
        // Also where all that the kernel reported is nothing to report.
        if deadline.left() == Some(0) {
            return Some(look_behind(0));
        }
    }
}

/// How long a sleep in the kernel may last.
#[derive(Clone, Copy)]
enum Left {
    /// So many nanoseconds, negative = for ever.
    All(i64),
    /// Until then, or at most so many nanoseconds.
    Until(Deadline, Option<u64>),
}

/// Whether there may be something to report that the kernel does not tell of.
fn is_active(set: &Set) -> bool {
    // SeqCst: a thread that is counted as asleep sees it, or is seen (`epoll::add`).
    set.hot_count.load(SeqCst) != 0 || set.nested.load(SeqCst) != 0
}

/// Whether the set may hold what the kernel alone does not know.
pub(super) fn has_tracked(set: &Set) -> bool {
    // SeqCst: see `epoll::add`.
    set.tagged.load(SeqCst) != 0 || set.nested.load(SeqCst) != 0
}

/// Whether the kernel is asked even where the rings alone have something to report.
fn is_kernels_turn(set: &Set, round: u32) -> bool {
    let now = clock::now_ns();
    let due = now.wrapping_sub(set.kernel_at.load(Relaxed)) > KERNEL_SPIN_NS;
    if due || round.is_multiple_of(KERNEL_TURN) {
        set.kernel_at.store(now, Relaxed);
        return true;
    }
    false
}

/// A wait is about to report `n` events. Another thread that sleeps in this set is woken for what remains.
fn found(set: &Set, n: c_int) -> c_int {
    yields::found(n.max(0) as u32);
    // Another thread may end a registration meanwhile, and there be others.
    const TRIES: u32 = 8;
    for _ in 0..TRIES {
        let is_done =
            n <= 0 || set.sleepers.load(SeqCst) == 0 || first_ready(set).is_none_or(epoll::pass_on);
        if is_done {
            break;
        }
    }
    n
}

/// The real wait. `timeout_ns` is what the application has said.
///
/// # Safety
/// As [`epoll_wait`].
unsafe fn sleep(
    epfd: c_int,
    events: *mut libc::epoll_event,
    max: c_int,
    left: Left,
    timeout_ns: i64,
    mask: *const libc::sigset_t,
) -> c_int {
    let (ns, most_ns) = match left {
        Left::All(ns) => ((ns >= 0).then_some(ns as u64), None),
        Left::Until(deadline, most_ns) => (deadline.left(), most_ns),
    };
    if timeout_ns % 1_000_000 != 0
        && let Some(ns) = ns
        && most_ns.is_none_or(|most| ns < most)
    {
        // Only epoll_pwait2 has such times.
        let time = libc::timespec {
            tv_sec: (ns / 1_000_000_000) as libc::time_t,
            tv_nsec: (ns % 1_000_000_000) as libc::c_long,
        };
        // SAFETY: the caller's contract.
        return unsafe { real::epoll_pwait2(epfd, events, max, &time, mask) };
    }
    // SAFETY: the caller's contract.
    unsafe { real::epoll_pwait(epfd, events, max, in_ms(ns, most_ns), mask) }
}

/// The shorter one of two times in nanoseconds (`None` = for ever) for a call that takes milliseconds, rounded up.
fn in_ms(ns: Option<u64>, most_ns: Option<u64>) -> c_int {
    let ns = match (ns, most_ns) {
        (Some(ns), Some(most)) => Some(ns.min(most)),
        (ns, most) => ns.or(most),
    };
    ns.map_or(-1, |ns| ns.div_ceil(1_000_000).min(i32::MAX as u64) as c_int)
}

/// The tag of a hot entry that has something to report.
fn first_ready(set: &Set) -> Option<u64> {
    let _held = set.lock.enter()?;
    let count = set.hot_count.load(Relaxed) as usize;
    set.hot[..count].iter().find_map(|place| {
        let number = place.load(Relaxed);
        let entry = entry::at(number)?;
        let is_ready = !is_quiet(entry) && report::take_events(entry, true) != 0;
        is_ready.then(|| set::tag_of(number, entry))
    })
}

/// The real set, without waiting.
pub unsafe fn kernel_now(look: &Look<'_>, events: *mut libc::epoll_event, max: c_int) -> c_int {
    let at = clock::tsc();
    look.rooms.forget();
    // SAFETY: the caller's contract.
    let got = unsafe { real::epoll_wait(look.epfd, events, max, 0) };
    if (0..max).contains(&got) {
        look.set.told.store(at, Relaxed);
    }
    if got <= 0 { got } else { translate(look, events, got, 0) }
}

/// Spins over the hot list, looking at the kernel now and then.
fn spin(
    look: &Look<'_>,
    (budget, most_ns): (&Budget<'_>, u64),
    signals: &mut Signals,
    (events, max): (*mut libc::epoll_event, c_int),
    n: &mut c_int,
) -> bool {
    let set = look.set;
    if set.hot_count.load(Relaxed) == 0 || budget.get() == 0 {
        return false;
    }
    let peer_cpu = hot_peer_cpu(set);
    let mut kernel_at = clock::now_ns() + KERNEL_SPIN_NS;
    publish_cpu(set);
    budget.spin(most_ns, (&set.cpu, peer_cpu), signals, host::own_word::keep, |now| {
        // SAFETY: as below.
        *n = unsafe { look.at_rings(events, max, 0) };
        if *n == 0 && now > kernel_at {
            // SAFETY: epoll_wait's contract.
            *n = unsafe { kernel_now(look, events, max) }.max(0);
            // SAFETY: as above.
            *n = unsafe { look.at_rings(events, max, *n) };
            kernel_at = clock::now_ns() + KERNEL_SPIN_NS;
        }
        (*n).max(0) as u32
    })
}

/// Tells the peers of a few hot connections where we run.
fn publish_cpu(set: &Set) {
    let cpu = clock::cpu();
    hot::each(set, 4, |_, entry| {
        let conn = conn::at(entry.conn.load(Relaxed));
        if let Some(slot) = conn.slot()
            && conn.own(slot).cpu.load(Relaxed) != cpu
        {
            conn.own(slot).cpu.store(cpu, Relaxed);
        }
    });
}

/// Where the peers of a few hot connections wait: our own CPU if one of them does.
fn hot_peer_cpu(set: &Set) -> u32 {
    let (cpu, mut found) = (clock::cpu(), 0);
    hot::each(set, 4, |_, entry| {
        let conn = conn::at(entry.conn.load(Relaxed));
        if let Some(slot) = conn.slot() {
            let theirs = conn.peers_cpu(slot);
            found = if theirs == cpu || found == cpu { cpu } else { theirs };
        }
    });
    found
}

/// The records of connections that are reported have often left the caches since their last call, with all that the
/// kernel has done meanwhile. The application is going to make calls on them.
fn fetch_records(events: *mut libc::epoll_event, got: c_int) {
    // SAFETY: the kernel filled these entries.
    let data = |i: c_int| unsafe { events.add(i as usize).read() }.u64;
    for i in 0..got {
        if set::is_tagged(data(i)) {
            entry::fetch(entry::number_in(data(i) as u32));
        }
    }
    for i in 0..got {
        if let Some((_, entry)) = set::entry_of(data(i)) {
            let index = entry.conn.load(Relaxed);
            conn::fetch(index);
            observer::fetch(index);
        }
    }
}

/// Turns the kernel's `got` events into the application's, in place, behind `before` others of the kernel's; returns how many
/// remain.
pub fn translate(
    look: &Look<'_>,
    events: *mut libc::epoll_event,
    got: c_int,
    before: u32,
) -> c_int {
    let (set, round) = (look.set, look.round);
    if got > 1 {
        fetch_records(events, got);
    }
    let mut kept = 0;
    for i in 0..got {
        // SAFETY: the kernel filled these entries.
        let mut event = unsafe { events.add(i as usize).read() };
        if let Some(nesting) = nested::of(event.u64) {
            match nesting.and_then(|(inner, nesting)| inner::event(nesting, inner, true, round)) {
                Some(ours) => event = ours,
                None => {
                    agent_ear::heard(set);
                    continue;
                }
            }
        } else if let Some((number, entry)) = set::entry_of(event.u64) {
            if number == u32::MAX {
                continue;
            }
            let fd = || set::live_fd(entry);
            let index = entry.conn.load(Relaxed);
            // Before the look, which may take out the message that has made it readable.
            let may_hide = conn::at(index).has(F_CLC);
            let bits = if ready::is_kernels(fd, index) {
                if is_over(event.u64) {
                    // It was told of another socket that the number had until this look.
                    continue;
                }
                let want = entry.events.load(Relaxed);
                let conn = conn::at(index);
                let mut hidden = 0;
                if may_hide && event.events & READ_BITS != 0 && clc::hides_input(fd(), conn) {
                    hidden = READ_BITS;
                }
                if may_hide
                    && event.events & WRITE_BITS != 0
                    && clc::first::hides_output(fd(), conn)
                {
                    hidden |= WRITE_BITS;
                }
                if hidden != 0 {
                    event.events &= !hidden;
                    let is_told = event.events & (want | events::ERR | events::HUP) != 0;
                    if !is_told || want & libc::EPOLLONESHOT as u32 == 0 {
                        epoll::watch_again(event.u64);
                    }
                    if !is_told {
                        continue;
                    }
                }
                if entry.has(E_KNOWN) && !deferred::is_news(fd(), entry, event.events) {
                    continue;
                }
                let once = want & libc::EPOLLONESHOT as u32 != 0;
                if !entry.takes_turn(event.u64 as u32, once) {
                    continue;
                }
                if event.events & events::OUT != 0 {
                    let blocks = conn::at(index).tx_blocks.load(Relaxed);
                    entry.seen_blocks.store(blocks, Relaxed);
                }
                // Should it be in the ring in the next instant, this wait has reported it all the same.
                entry.round.store(round, Relaxed);
                deferred::note_told(set, entry, round);
                if event.events & events::OUT != 0 {
                    look.rooms.note(before + kept as u32, entry, event.events);
                    // What lasts is to be told by the next wait, too.
                    set.kernel_at.store(0, Relaxed);
                }
                let untold = event.events & events::HUP != 0 && ending::is_untold(conn::at(index));
                event.events | if untold { events::ERR } else { 0 }
            } else {
                from_ring(set, entry, index, event, round)
            };
            if bits == 0 {
                continue;
            }
            event = libc::epoll_event { events: bits, u64: entry.data.load(Relaxed) };
        }
        // SAFETY: kept ≤ i.
        unsafe { events.add(kept as usize).write(event) };
        kept += 1;
    }
    kept
}

fn is_over(tag: u64) -> bool {
    set::entry_of(tag).is_none_or(|(number, _)| number == u32::MAX)
}

/// The kernel reports a ring connection: a doorbell, bytes of the TCP span, or its end.
fn from_ring(
    set: &Set,
    entry: &entry::Entry,
    index: u32,
    told: libc::epoll_event,
    round: u32,
) -> u32 {
    let (kernel, tag) = (told.events, told.u64);
    let conn = conn::at(index);
    let is_over = kernel & (events::RDHUP | events::HUP | events::ERR) != 0;
    // It does not come again.
    if is_over || (kernel & events::IN != 0 && epoll::may_hide_end(entry)) {
        epoll::note_end(tag, index, is_over.then_some(kernel));
    }
    if !entry.has(E_RING) {
        // Another thread has just brought it to the ring, and is about to do this.
        epoll::phase_changed(index);
    }
    if entry.has(E_DEFERRED) {
        // The kernel has no memory for it: it is asked for once more.
        return 0;
    }
    if conn.has(F_DEPUTY) {
        agent_ear::heard(set);
    }
    let kicked = entry.has(E_KICKED);
    let in_tcp = conn.slot().is_some_and(|s| !conn.end(s).reads_ring());
    if kicked && (!in_tcp || kernel & READ_BITS == 0) {
        // Otherwise the kernel would tell of the same bytes once more.
        epoll::unkick(tag);
    }
    let Some(held) = set.lock.enter() else { return 0 };
    let number = match set::entry_of(tag) {
        Some((number, _)) if number != u32::MAX => number,
        _ => return 0,
    };
    if !entry.has(E_RING) {
        if !entry::is_kept_below(index) {
            // It has ended, or left the ring, which the kernel knows.
            return 0;
        }
        entry.set_flag(E_RING, true);
    }
    let was_hot = entry.has(entry::E_HOT);
    let hot = hot::heat(set, number, entry);
    if !was_hot {
        hot::note_news(set);
    }
    // The ring's cursor tells nothing of bytes that follow it by TCP.
    let follows = conn.slot().is_some_and(|s| conn.peer(s).flags(Relaxed).is_returning());
    if (in_tcp || follows) && kernel & READ_BITS != 0 {
        let edge = if report::is_for_data(entry) { entry::E_EDGE } else { 0 };
        entry.set_flag(edge | E_TCP, true);
    } else if in_tcp && kernel & events::OUT != 0 && !kicked {
        // Bytes came and were read before this wait: they are an edge for what else is true.
        entry.set_flag(entry::E_EDGE, true);
    }
    if kernel & events::PRI != 0 {
        // Urgent data goes by TCP.
        entry.set_flag(entry::E_EDGE, true);
    }
    if in_tcp && kernel & READ_BITS != 0 {
        // Of bytes in TCP only the kernel knows the order: a connection that has some is reported where the kernel does.
        entry.stamp.store(clock::tsc(), Relaxed);
    }
    let is_span = || {
        // The first look at a doorbell finds the end of the span.
        report::take_events(entry, true) != 0
            && conn.slot().is_some_and(|s| !conn.end(s).reads_ring())
    };
    if hot && !(in_tcp && kernel & READ_BITS != 0 && is_span()) {
        // Its turn comes in the look at the hot list that follows.
        return 0;
    }
    let bits = report::take_events(entry, false);
    if hot {
        if bits != 0 {
            entry.round.store(round, Relaxed);
        }
        return bits;
    }
    entry.round.store(round, Relaxed);
    if bits == 0
        && let Some(slot) = conn.slot()
    {
        // A doorbell without a meaning must not look like data to a thread that polls the set itself.
        bells::clear_bells(set::live_fd(entry), conn, slot);
    }
    drop(held);
    if bits != 0 && entry.events.load(Relaxed) & libc::EPOLLET as u32 == 0 {
        // Level-triggered: the next wait has to find it again.
        epoll::pass_on(tag);
    }
    bits
}

/// Whether a tracked epoll set would report something now; for poll, select and outer sets.
pub(super) fn nested_ready(index: u32) -> bool {
    is_ready(index, nested::DEPTH)
}

fn is_ready(index: u32, depth: u32) -> bool {
    let mut ready = first_ready(set::set_at(index)).is_some();
    if depth > 0 {
        nested::each(index, |inner, nesting| {
            ready |= nesting.wants_data() && is_ready(inner, depth - 1);
        });
    }
    ready
}

/// The same, with a number that changes with each arrival.
pub fn nested_look(index: u32) -> (bool, u64) {
    (nested_ready(index), print(index, nested::DEPTH))
}

fn print(index: u32, depth: u32) -> u64 {
    let mut print = 1u64.wrapping_add(hot::print(set::set_at(index)));
    if depth > 0 {
        nested::each(index, |inner, _| print = print.wrapping_add(self::print(inner, depth - 1)));
    }
    print
}

/// Makes the kernel's view of a set true: takes away doorbells whose rings are empty, and kicks.
pub fn settle(index: u32) {
    settle_all(index, nested::DEPTH);
}

fn settle_all(index: u32, depth: u32) {
    epoll_ctl::unpark(index);
    if depth > 0 {
        nested::each(index, |inner, _| settle_all(inner, depth - 1));
    }
    unkick_all(set::set_at(index));
    hot::each(set::set_at(index), set::HOT, |_, entry| {
        let conn = conn::at(entry.conn.load(Relaxed));
        let Some(slot) = conn.slot() else { return };
        if bells::has_bells(conn, slot) {
            bells::clear_bells(set::live_fd(entry), conn, slot);
        }
    });
}

fn unkick_all(set: &Set) {
    const SOME: usize = 32;
    loop {
        let (mut tags, mut count) = ([0; SOME], 0);
        hot::each(set, set::HOT, |number, entry| {
            if entry.has(E_KICKED) && count < SOME {
                tags[count] = set::tag_of(number, entry);
                count += 1;
            }
        });
        // Where one cannot be, there would be no end.
        if !tags[..count].iter().all(|&tag| epoll::unkick(tag)) || count < SOME {
            return;
        }
    }
}
