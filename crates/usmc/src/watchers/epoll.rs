//! epoll(7) over the kernel's own epoll set.
//!
//! Every fd stays registered in the real set, so foreign fds, timeouts, signals and nesting are the
//! kernel's. A TCP socket that may leave TCP is registered with data of ours (a tag); once its bytes are
//! in the ring, its kernel registration is edge-triggered and waits for doorbells only.
//!
//! A wait looks at the hot entries (those active of late) in shared memory, now and then at the kernel,
//! spins while that pays, then arms the hot entries, looks once more and sleeps in the real wait. An entry
//! that is not hot is armed: its next byte rings, the kernel reports it, and it is hot again. So the cost
//! follows the active connections and not the open ones.

use usmc_shm::layout::ARM_TCP;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use usmc_shm::sync::fence;

use super::asked::{self, Wake};
use super::entry::Asked;
use super::entry::{
    self, E_ARMED, E_CHANGED, E_COPY, E_DEFERRED, E_DISABLED, E_EDGE, E_HOT, E_KICKED, E_KNOWN,
    E_PARKED, E_RING, E_TCP, Entry,
};
use super::hot;
use super::{agent_ear, deferred, epoll_ctl, nested};
use crate::os::events::{IN, OUT, RDHUP, READ_BITS, WRITE_BITS};
use crate::os::reason::Reason;
use crate::os::single;
use crate::os::sys::{self, Errno};
use crate::record::conn::{self, Conn};
use crate::record::phase::Phase;
use crate::stream::ending::{self, Ending};
use crate::stream::wait::Sleeper;
use crate::stream::{ready, unread};
use crate::watchers::report;
use crate::watchers::set::{
    self, ET, EXCLUSIVE, FREE_SET, NEXT_SET, ONESHOT, SETS_LOCK, Set, can_change, entry_of, fd_of,
    keep_tagged, live_fd, set_at, tag_of,
};

/// One fd of the set was closed.
pub fn closed(index: u32) {
    let set = set_at(index);
    if set.refs.fetch_sub(1, AcqRel) != 1 {
        return;
    }
    if set.tagged.load(Relaxed) > 0 {
        entry::for_each_of(index, unlink);
    }
    let Some(_held) = SETS_LOCK.enter() else { return };
    nested::forget(index);
    {
        let _held = set.lock.enter();
        set.ears.forget();
    }
    set.next_free.store(FREE_SET.load(Relaxed), Relaxed);
    FREE_SET.store(index + 1, Relaxed);
}

/// The registration of `fd` with a set, and its number. The caller keeps the connection's ([`entry::keep`]).
pub fn find(set: u32, fd: i32, conn: &Conn) -> Option<(u32, &'static Entry)> {
    let mut next = conn.watchers.load(Relaxed);
    while next != 0 {
        let entry = entry::at(next - 1)?;
        if entry.set_index() == set && entry.fd.load(Relaxed) == fd as u32 {
            return Some((next - 1, entry));
        }
        next = entry.next.load(Relaxed);
    }
    None
}

/// Takes an entry out of every list and frees it. The caller keeps the connection's registrations ([`entry::keep`]).
pub fn unlink(number: u32, entry: &Entry) {
    let set = set_at(entry.set_index());
    let conn = conn::at(entry.conn.load(Relaxed));
    {
        let _held = set.lock.enter();
        deferred::learn_end(set, entry);
        deferred::forgive(set, entry);
        hot::cool(set, entry);
        disarm(conn, entry);
        agent_ear::unlinked(set, conn);
        // A thread that the kernel has told of it does not put it on a list again.
        entry.set_flag(E_RING, false);
    }
    let mut place = &conn.watchers;
    while let Some(at) = place.load(Relaxed).checked_sub(1) {
        let Some(other) = entry::at(at) else { break };
        if at == number {
            place.store(entry.next.load(Relaxed), Relaxed);
            break;
        }
        place = &other.next;
    }
    single::sub(&set.tagged, 1);
    entry::free(number);
}

/// Whether a set that may be in another has something of this entry to tell now. The caller holds the set's lock.
pub fn would_tell(set: &Set, entry: &Entry) -> bool {
    set.is_watched.load(Relaxed) == set::POLLED && report::take_events(entry, true) != 0
}

/// Asks for a doorbell.
pub fn arm(entry: &Entry) {
    arm_by(entry, ARM_TCP);
}

/// Asks to be woken so (`ARM_*`).
pub fn arm_by(entry: &Entry, bit: u32) {
    let conn = conn::at(entry.conn.load(Relaxed));
    let Some(slot) = conn.slot() else { return };
    let want = entry.events.load(Relaxed);
    if !entry.has(E_ARMED) {
        entry.set_flag(E_ARMED, true);
        count(conn, entry, true);
    }
    ready::arm(live_fd(entry), conn, slot, want & (READ_BITS | WRITE_BITS), bit);
}

/// No doorbell is needed: somebody looks.
pub fn disarm(conn: &Conn, entry: &Entry) {
    if !entry.has(E_ARMED) {
        return;
    }
    entry.set_flag(E_ARMED, false);
    count(conn, entry, false);
    if let Some(slot) = conn.slot()
        && conn.rx_sleepers.load(Relaxed) == 0
        && !conn.has(conn::F_SHARED)
    {
        conn.rx(slot).disarm_rx();
        // SeqCst: a thread that counted itself as a sleeper meanwhile, here or in another set, is armed again.
        fence(SeqCst);
        if conn.rx_sleepers.load(Relaxed) != 0 {
            conn.rx(slot).arm_rx(ARM_TCP);
        }
    }
}

/// A thread that sleeps in the set sleeps on the connection, as forked processes have to know.
fn count(conn: &Conn, entry: &Entry, enter: bool) {
    Sleeper::count(conn, conn.slot(), false, enter);
    if entry.events.load(Relaxed) & OUT != 0 {
        Sleeper::count(conn, conn.slot(), true, enter);
    }
}

/// EPOLL_CTL_DEL. The caller keeps the connection's registrations ([`entry::keep`]).
pub fn delete(epfd: i32, fd: i32, number: u32, entry: &Entry) -> Result<(), Errno> {
    let mut none = libc::epoll_event { events: 0, u64: 0 };
    let done = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &mut none);
    unlink(number, entry);
    done
}

/// [`delete`], where the kernel's registration can be named still.
pub fn end(number: u32, entry: &Entry) -> Result<(), Errno> {
    if !can_change(entry) {
        unlink(number, entry);
        return Ok(());
    }
    delete(fd_of(entry.set_index()), entry.fd.load(Relaxed) as i32, number, entry)
}

/// What the kernel has reported was nothing to report: a one-shot registration of a connection in TCP is to go on, and an
/// edge may have been for what stands behind a message that another thread was taking out.
pub fn watch_again(tag: u64) {
    let Some((_held, number, entry)) = keep_tagged(tag) else { return };
    let want = entry.events.load(Relaxed);
    let has_fired = want & (ONESHOT | libc::EPOLLET as u32) != 0;
    // The thread that armed it again has had the kernel look, too.
    let is_latest = tag_of(number, entry) == tag;
    if has_fired && is_latest && !entry.has(E_RING | E_DISABLED) && can_change(entry) {
        change(entry, tag, want);
    }
}

/// What the kernel is to tell of a registration that it knows. The caller keeps it.
fn change(entry: &Entry, tag: u64, events: u32) {
    let mut event = libc::epoll_event { events, u64: tag };
    let fd = entry.fd.load(Relaxed) as i32;
    let _ = sys::epoll_ctl(fd_of(entry.set_index()), libc::EPOLL_CTL_MOD, fd, &mut event);
}

/// Takes back what has woken a thread ([`asked::calm`]). The caller holds no set's lock, and looks at the entry afterwards.
/// False where it may be asked for still.
pub fn unkick(tag: u64) -> bool {
    let kept = keep_tagged(tag);
    if let Some((_, number, entry)) = &kept {
        asked::calm(*number, entry);
    }
    kept.is_some()
}

/// Something of this set is left for another thread that sleeps in it, or for the next wait. The caller holds no set's
/// lock. False where the registration is over, or the kernel's own by now.
pub fn pass_on(tag: u64) -> bool {
    let Some((_held, number, entry)) = keep_tagged(tag) else { return false };
    entry.has(E_RING) && !entry.has(E_PARKED) && asked::update(number, entry, Wake::Anybody)
}

/// Calls `act` with every registration of a connection, in whatever set.
fn each_watcher(index: u32, mut act: impl FnMut(u32, &'static Entry)) {
    let conn = conn::at(index);
    if conn.watchers.load(Acquire) == 0 {
        return;
    }
    let Some(_held) = entry::keep(index) else { return };
    let mut next = conn.watchers.load(Relaxed);
    while let Some(number) = next.checked_sub(1) {
        let Some(entry) = entry::at(number) else { return };
        // First: `act` may take it off the list.
        next = entry.next.load(Relaxed);
        act(number, entry);
    }
}

/// Whether the kernel's registration for the application does for doorbells, too.
fn is_good_for_ring(want: u32) -> bool {
    want & (ET | IN | ONESHOT) == ET | IN
}

/// Whether the kernel may tell of the connection's end by [`IN`] alone: the application did not ask for more.
pub fn may_hide_end(entry: &Entry) -> bool {
    let want = entry.events.load(Relaxed);
    is_good_for_ring(want) && want & RDHUP == 0
}

/// Notes what the kernel has told of the end of a connection, or asks it: by a registration that is there still, as its
/// record may be another connection's otherwise, which has not ended.
pub fn note_end(tag: u64, index: u32, told: Option<u32>) {
    // In a signal handler it is kept below.
    let _held = entry::keep(index);
    let Some((number, entry)) = entry_of(tag) else { return };
    if number == u32::MAX {
        return;
    }
    match told {
        Some(events) => ending::note(live_fd(entry), conn::at(index), events),
        None => ending::look(live_fd(entry), conn::at(index)),
    }
}

/// The connection's phase changed: registrations of a ring connection wait for doorbells from now on.
pub fn phase_changed(index: u32) {
    let conn = conn::at(index);
    if conn.phase() != Phase::Ring {
        return;
    }
    each_watcher(index, |number, entry| {
        if entry.has(E_RING) {
            return;
        }
        let set_index = entry.set_index();
        let set = set_at(set_index);
        if entry.has(E_DEFERRED) && deferred::register(number, entry).is_err() {
            // It is asked for again and again, until the kernel has memory for it.
            return;
        }
        entry.seen_prod.store(0, Relaxed);
        entry.set_flag(E_KNOWN, false);
        // No edge by itself: what TCP has reported so far has been reported, and the ring is empty.
        entry.set_flag(E_RING | E_TCP, true);
        let hot = {
            let _held = set.lock.enter();
            hot::heat(set, number, entry)
        };
        let want = entry.events.load(Relaxed);
        let sleepers = set.sleepers.load(SeqCst) > 0;
        if sleepers {
            arm(entry);
        }
        if (hot && is_good_for_ring(want)) || !can_change(entry) {
            // Changing it would give an edge that TCP does not give.
            asked::record_own(entry);
            return;
        }
        // The parent, whose registration it may be, has perhaps not been told of room.
        let wakes = !hot || ((sleepers || entry.has(E_COPY)) && want & OUT != 0);
        asked::begin(number, entry, wakes);
    });
}

/// The connection is in the ring no more: the kernel knows its readiness again.
pub fn left_ring(index: u32) {
    let conn = conn::at(index);
    each_watcher(index, |number, entry| {
        let set_index = entry.set_index();
        let registered = entry.fd.load(Relaxed) as i32;
        if entry.has(E_PARKED) {
            let _ = end(number, entry);
            return;
        }
        if !entry.has(E_RING) {
            return;
        }
        {
            let set = set_at(set_index);
            let _held = set.lock.enter();
            hot::cool(set, entry);
            disarm(conn, entry);
            entry.set_flag(E_RING | E_EDGE | E_TCP | E_KICKED, false);
            entry.set_asked(Asked::NOTHING);
        }
        if !can_change(entry) {
            return;
        }
        let u64 = tag_of(number, entry);
        // A one-shot registration that has fired stays silent.
        let spent = entry.has(E_DISABLED);
        let events = if spent { ONESHOT } else { entry.events.load(Relaxed) };
        let mut event = libc::epoll_event { events, u64 };
        let mut change = |op| sys::epoll_ctl(fd_of(set_index), op, registered, &mut event);
        let _ = match events & EXCLUSIVE {
            0 => change(libc::EPOLL_CTL_MOD),
            // Which it was not in the ring, and cannot become by a change.
            _ => change(libc::EPOLL_CTL_DEL).and_then(|()| change(libc::EPOLL_CTL_ADD)),
        };
    });
}

/// The kernel's registrations of a connection end, as another socket is about to have its number; [`register_again`] follows. The
/// caller keeps them.
pub fn unregister(index: u32) {
    let conn = conn::at(index);
    let mut next = conn.watchers.load(Relaxed);
    while let Some(number) = next.checked_sub(1) {
        let Some(entry) = entry::at(number) else { return };
        next = entry.next.load(Relaxed);
        if entry.has(E_PARKED) {
            let _ = end(number, entry);
            continue;
        }
        if !entry.has(E_DEFERRED) || deferred::register(number, entry).is_ok() {
            let mut none = libc::epoll_event { events: 0, u64: 0 };
            let (epfd, fd) = (fd_of(entry.set_index()), entry.fd.load(Relaxed) as i32);
            let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &mut none);
        }
        // A thread may have been told of the old socket, and not have looked yet.
        entry.outdate();
    }
}

/// The number has the other socket. `by_events`: as the application asks for it; otherwise a thread is only to be woken by what comes,
/// as from a doorbell.
pub fn register_again(index: u32, by_events: bool) {
    let conn = conn::at(index);
    let mut next = conn.watchers.load(Relaxed);
    while let Some(number) = next.checked_sub(1) {
        let Some(entry) = entry::at(number) else { return };
        next = entry.next.load(Relaxed);
        if entry.has(E_DEFERRED) {
            continue;
        }
        entry.set_flag(E_KNOWN, false);
        let want = entry.events.load(Relaxed);
        let events = match (by_events, entry.has(E_DISABLED)) {
            (true, true) => ONESHOT,
            (true, false) => want,
            (false, _) => asked::needed(want).events() | IN,
        };
        let mut event = libc::epoll_event { events, u64: tag_of(number, entry) };
        let (epfd, fd) = (fd_of(entry.set_index()), entry.fd.load(Relaxed) as i32);
        let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &mut event);
    }
}

/// Something happened to the connection that TCP makes known to edge-triggered waits, whatever its readiness is.
pub fn edge(index: u32) {
    each_watcher(index, |_, entry| {
        if entry.has(E_RING) {
            entry.set_flag(E_EDGE, true);
        }
    });
}

/// Room in the ring is waited for that may not come by itself ([`hot::leave_stuck`]): a thread that waits for it in a set has to look.
pub fn met_full_ring(index: u32) {
    have_look_for_room(index, |entry| !entry.has(E_HOT));
}

/// A sender needs no room any more: each thread that waits for it in a set has to look, be it asleep or not.
pub fn look_for_room(index: u32) {
    have_look_for_room(index, |_| true);
}

fn have_look_for_room(index: u32, has_to: impl Fn(&Entry) -> bool) {
    each_watcher(index, |number, entry| {
        let waits = entry.events.load(Relaxed) & WRITE_BITS != 0;
        if waits && entry.has(E_RING) && has_to(entry) {
            let set_index = entry.set_index();
            let set = set_at(set_index);
            let hot = {
                let _held = set.lock.enter();
                hot::heat(set, number, entry)
            };
            asked::update(number, entry, epoll_ctl::wake(hot));
        }
    });
}

/// SO_RCVLOWAT was set: where enough is there, a waiter is told so once more (tcp_set_rcvlowat).
pub fn mark_moved(fd: i32, index: u32) {
    let conn = conn::at(index);
    // What is readable by a reset or by our own shutdown is not told again. Asked before the locks are taken: it may find
    // that the connection is out of the ring.
    let unread = unread::unread(fd, index).unwrap_or(0);
    let enough = unread >= (conn.lowat() as usize).max(1);
    let Some(slot) = conn.slot() else { return };
    if enough && conn.has(conn::F_SHARED) {
        conn.end(slot).mark_lowat();
    }
    if !enough && ending::for_receiver(fd, conn, slot) != Ending::Fin {
        return;
    }
    each_watcher(index, |number, entry| {
        if entry.has(E_RING) && report::is_for_data(entry) {
            let set_index = entry.set_index();
            let set = set_at(set_index);
            let hot = {
                let _held = set.lock.enter();
                entry.set_flag(E_EDGE, true);
                if would_tell(set, entry) {
                    hot::note_news(set);
                }
                hot::heat(set, number, entry)
            };
            // Not where nobody sleeps: of bytes in TCP the kernel would tell once more.
            asked::update(number, entry, epoll_ctl::wake(hot));
        }
    });
}

/// A number of the connection is about to be closed, and it lives on by others: the kernel goes on reporting it by the
/// number that it was registered by, so it has to know it.
pub fn pay_for(index: u32) {
    each_watcher(index, |number, entry| {
        if entry.has(E_PARKED) {
            // The last moment for it.
            let _ = delete(fd_of(entry.set_index()), entry.fd.load(Relaxed) as i32, number, entry);
        } else if entry.has(E_DEFERRED) {
            let _ = deferred::register(number, entry);
        }
    });
}

/// Of this connection something is to be told by edges which is no byte: it was shut down, or its mark has moved.
pub fn forget_known(index: u32) {
    each_watcher(index, |_, entry| deferred::forget_known(entry));
}

/// All that any set owes is registered.
pub fn pay_all() {
    for index in 0..NEXT_SET.load(Relaxed) {
        deferred::pay(index);
    }
}

/// The connection's last fd in this process is being closed.
pub fn forget(fd: i32, index: u32) {
    let conn = conn::at(index);
    if conn.watchers.load(Acquire) == 0 {
        return;
    }
    let Some(_held) = entry::keep(index) else { return };
    while let Some(number) = conn.watchers.load(Relaxed).checked_sub(1) {
        let Some(entry) = entry::at(number) else { return };
        if may_stay_open(conn) && fd >= 0 && !entry.has(E_COPY) {
            // Another process (or this one, by a number that came in a message) keeps the socket open, so the kernel goes on
            // reporting it, as it does over TCP; of a ring it knows nothing that could be reported.
            let set_index = entry.set_index();
            let registered = entry.fd.load(Relaxed) as i32;
            let op = match entry {
                // Nobody can ask again for what was to be told once and was.
                _ if entry.has(E_RING | E_DISABLED) => libc::EPOLL_CTL_DEL,
                _ if entry.has(E_DEFERRED) && !entry.has(E_CHANGED) => libc::EPOLL_CTL_ADD,
                _ => libc::EPOLL_CTL_MOD,
            };
            let (events, u64) = (entry.events.load(Relaxed), entry.data.load(Relaxed));
            let mut event = libc::epoll_event { events, u64 };
            let _ = sys::epoll_ctl(fd_of(set_index), op, registered, &mut event);
        }
        unlink(number, entry);
    }
}

/// Whether the socket may be open under numbers that do not mean this record.
fn may_stay_open(conn: &conn::Conn) -> bool {
    conn.has(conn::F_COPIED | conn::F_ADOPTED)
        || conn.passed_on.load(Relaxed) != 0
        || conn.reason.load(Relaxed) == Reason::PassedOn as u32
}

/// Fork: registrations and hot lists stay as they are while they are copied.
pub fn hold() {
    // Before the locks are taken; what others owe meanwhile is found below.
    pay_all();
    SETS_LOCK.hold();
    entry::hold();
    for index in 0..NEXT_SET.load(Relaxed) {
        set_at(index).lock.hold();
        deferred::pay_for_fork(set_at(index));
    }
    asked::forget_all();
}

/// Fork is over in the parent.
pub fn unhold() {
    for index in 0..NEXT_SET.load(Relaxed) {
        set_at(index).lock.unhold();
    }
    entry::unhold();
    SETS_LOCK.unhold();
}

/// Fork, in the child: the parent's sleepers are not ours, and every entry is worth a look.
pub fn after_fork() {
    SETS_LOCK.reset();
    entry::after_fork();
    for index in 0..NEXT_SET.load(Relaxed) {
        set_at(index).lock.reset();
        set_at(index).sleepers.store(0, Relaxed);
    }
    entry::for_each(|number, entry| {
        entry.set_flag(E_ARMED, false);
        entry.set_flag(E_COPY, true);
        if entry.has(E_RING) {
            hot::heat(set_at(entry.set_index()), number, entry);
        }
    });
}
