//! Waiting: spin while it pays, announce, look once more, sleep in the kernel on the connection's own socket.
//!
//! The sleep is a blocking one-byte peek, so timeouts (SO_RCVTIMEO), EINTR with and without SA_RESTART,
//! thread cancellation and the peer's FIN or RST are the kernel's own. The waker sends a doorbell byte.

use core::ffi::c_void;
use usmc_shm::bell::{Drain, Sleepers, less};
use usmc_shm::layout::{ARM_TCP, Slot};
use usmc_shm::span::TxSpan;
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, SeqCst};

use super::bells::{drain_bells, is_cut, reads_ring, watch_over};
use super::hearing::{EAR_LOOK_MS, Hearing};
use super::{drained, due_ear, ending, hearing, room, unheard};
use crate::family::holders;
use crate::family::locks::Receiving;
use crate::host;
use crate::host::ears::Listening;
use crate::os::handlers::Handlers;
use crate::os::signals::{Signals, Woken};
use crate::os::spin::Budget;
use crate::os::time::Time;
use crate::os::unwind::keeping;
use crate::os::{clock, events, process, real, sys, yields};
use crate::record::conn::{self, Conn, F_SHARED};
use crate::record::numbers;
use crate::record::phase::Phase;
use crate::stream::state;
use crate::watch::observer;

/// A call that waits no longer than that has only spun so far, or hardly slept.
const FIRST_SLEEP_NS: u64 = 1_000_000;

/// Registers the caller as a sleeper on this connection.
pub struct Sleeper<'a> {
    conn: &'a Conn,
    slot: Option<&'a Slot>,
    for_room: bool,
}

impl<'a> Sleeper<'a> {
    /// From now on others leave doorbells alone or announce us anew.
    pub fn enter(conn: &'a Conn, slot: Option<&'a Slot>, for_room: bool) -> Sleeper<'a> {
        let me = Sleeper { conn, slot, for_room };
        sleepers(conn, slot, for_room).enter(|| conn.has(F_SHARED));
        me
    }

    /// The same without a guard, for waits on many: counts one in or out.
    pub fn count(conn: &Conn, slot: Option<&Slot>, for_room: bool, enter: bool) {
        if enter {
            core::mem::forget(Sleeper::enter(conn, slot, for_room));
        } else {
            drop(Sleeper { conn, slot, for_room });
        }
    }
}

/// The connection's sleepers for data, or for room. Forked processes know of each other's through the slot.
pub fn sleepers<'a>(conn: &'a Conn, slot: Option<&'a Slot>, for_room: bool) -> Sleepers<'a> {
    let end = slot.map(|slot| conn.end(slot));
    match for_room {
        true => Sleepers { own: &conn.tx_sleepers, all: end.map(|end| &end.tx_sleepers) },
        false => Sleepers { own: &conn.rx_sleepers, all: end.map(|end| &end.rx_sleepers) },
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        sleepers(self.conn, self.slot, self.for_room).leave(|| self.conn.has(F_SHARED));
    }
}

/// What a wait for data is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// A receive that has nothing yet: it goes on after a handler with SA_RESTART.
    Data,
    /// A receive that has some bytes and reports them at any signal.
    DataOrSignal,
    /// A receive of no bytes, which anything ends.
    AnyWakeUp,
}

/// Waits until data may be there. `in_ring`: TCP has been read to the boundary. `since`: when the call began to wait.
pub fn for_data(
    fd: i32,
    index: u32,
    in_ring: bool,
    until: Until,
    since: u64,
    signals: &mut Signals,
) -> Woken {
    let conn = conn::at(index);
    if drained::look() {
        return Woken::Look;
    }
    let slot = conn.slot();
    let budget = Budget::new(&conn.spins);
    if let Some(slot) = slot.filter(|_| in_ring) {
        let (rx, peer) = (conn.rx(slot), conn.peer(slot));
        let peer_cpu = conn.peers_cpu(slot);
        let ready = |_| (rx.has_data() || peer.flags(Relaxed).is_done()).into();
        let cpus = (&conn.own(slot).cpu, peer_cpu);
        if budget.spin(u64::MAX, cpus, signals, host::own_word::keep, ready) {
            observer::spun(conn);
            yields::found(1);
            signals.spun(until == Until::DataOrSignal);
            if !conn.has_life() && rx.has_data() {
                // What has come while we looked shows that the peer lives: the next send need not ask the kernel.
                conn.asked.store(clock::tsc(), Relaxed);
            }
            return Woken::Look;
        }
    }
    due_ear::get_due();
    // Others have had time to close it, and what follows are looks, not bytes.
    let fd = numbers::number(fd, index);
    let sleeper = Sleeper::enter(conn, slot, false);
    if let Some(slot) = slot {
        let rx = conn.rx(slot);
        rx.arm_rx(ARM_TCP);
        if rx.has_data() || (in_ring && conn.peer(slot).flags(Acquire).is_done()) {
            return Woken::Look;
        }
        if state::must_go_back(conn, slot) {
            // Unless that has come in this instant, others are at it, which may be stopped.
            let ends_by_signal = until == Until::DataOrSignal;
            return keeping(sleeper, || signals.tick(ends_by_signal)).1;
        }
    }
    let start = clock::now_ns();
    let sleep = || match until {
        Until::AnyWakeUp if is_cut(conn) => signals.tick(false),
        Until::AnyWakeUp if signals.let_in(true) => Woken::Look,
        Until::AnyWakeUp => receive_nothing(fd),
        // SO_RCVTIMEO is the kernel's own where the call has not slept yet.
        Until::Data
            if start.saturating_sub(since) < FIRST_SLEEP_NS
                && !is_cut(conn)
                && !holders::is_nonblocking(fd, conn) =>
        {
            match room::keeps_far_ms(conn) {
                Some(ms) => sleep_for_a_while(fd, index, ms, signals),
                None => {
                    let by_any = ends_by_any(fd, signals);
                    peek(fd, index, signals, by_any)
                }
            }
        }
        _ => sleep_for_data(fd, index, until, since, signals),
    };
    observer::count_one(conn, |record| &record.sleeps);
    unheard::before_sleep();
    let (_, woken) = keeping(sleeper, sleep);
    budget.slept(clock::now_ns() - start);
    yields::found(1);
    woken
}

/// The second sleep of a call for data, or one that doorbells cannot end: what is left of SO_RCVTIMEO has to be counted.
fn sleep_for_data(fd: i32, index: u32, until: Until, since: u64, signals: &mut Signals) -> Woken {
    let limit_ms = time_limit_ms(fd, libc::SO_RCVTIMEO);
    let left_ms = limit_ms - ((clock::now_ns() - since) / 1_000_000) as i64;
    if limit_ms > 0 && left_ms <= 0 {
        return Woken::Fail(libc::EAGAIN);
    }
    // A time limit makes any signal that is handled end the call, as bytes do that are there already.
    let ends_by_signal = limit_ms > 0 || until == Until::DataOrSignal;
    match (is_cut(conn::at(index)), ends_by_signal) {
        (true, by_any) => signals.tick(by_any),
        (false, true) => {
            sleep_in_poll(fd, index, if limit_ms > 0 { left_ms } else { -1 }, signals, true)
        }
        (false, false) => peek_anyhow(fd, index, signals),
    }
}

/// The peek of a call that waits without a limit. O_NONBLOCK, set since it began, does not concern it, and would end the
/// peek at once. One that is set while it sleeps counts once a signal has interrupted it, as the kernel's calls begin anew then.
fn peek_anyhow(fd: i32, index: u32, signals: &mut Signals) -> Woken {
    if !holders::is_nonblocking(fd, conn::at(index)) {
        return peek(fd, index, signals, false);
    }
    if signals.let_in(false) {
        return Woken::Fail(libc::EINTR);
    }
    match sleep_in_poll(fd, index, -1, signals, true) {
        // Such a call begins anew, and finds O_NONBLOCK.
        Woken::Fail(libc::EINTR) if Handlers::ask() == Handlers::Restart => {
            Woken::Fail(libc::EAGAIN)
        }
        woken => woken,
    }
}

/// SO_RCVTIMEO or SO_SNDTIMEO in milliseconds; 0 = none.
pub fn time_limit_ms(fd: i32, name: i32) -> i64 {
    let mut limit = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let _ = sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut limit);
    limit.ns().saturating_add(999_999) / 1_000_000
}

/// Sleeps for a doorbell or the end of the connection; for signals see [`Signals::poll`].
fn sleep_in_poll(
    fd: i32,
    index: u32,
    timeout_ms: i64,
    signals: &mut Signals,
    by_any: bool,
) -> Woken {
    let fd = numbers::steady(fd, index);
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    if let Woken::Fail(errno) = signals.poll(core::slice::from_mut(&mut p), timeout_ms, by_any) {
        return Woken::Fail(errno);
    }
    let number = fd;
    let fd = numbers::number(fd, index);
    let closed = p.revents & libc::POLLNVAL != 0;
    if closed || fd != number {
        // The number was closed meanwhile, or means another socket, of which the kernel has told, for want of a duplicate.
        p.revents = sys::poll1(fd, libc::POLLIN | libc::POLLRDHUP, 0);
        // What has ended the sleep is not told: a signal, if nothing is there.
        if closed && p.revents == 0 {
            return Woken::Fail(libc::EINTR);
        }
    }
    ending::note(fd, conn::at(index), p.revents as u32);
    Woken::Look
}

/// A receive of no bytes by the kernel.
fn receive_nothing(fd: i32) -> Woken {
    let mut byte = 0u8;
    // SAFETY: a valid address. The real function: a cancellation point, as the application expects.
    unsafe { real::recv(fd, (&raw mut byte).cast::<c_void>(), 0, 0) };
    Woken::Look
}

/// MSG_PEEK with MSG_WAITALL, some bytes being there: waits a moment. False when what is there has to do, because of
/// the peer's end, a signal or SO_RCVTIMEO.
pub fn for_more(fd: i32, index: u32, since: u64, signals: &mut Signals) -> bool {
    let conn = conn::at(index);
    let ended = match conn.slot().filter(|_| conn.phase() == Phase::Ring) {
        Some(slot) => {
            ending::look(fd, conn);
            ending::ending(fd, conn, slot) != ending::Ending::Alive
                || conn.end(slot).flags().is_shut_rd()
        }
        None => sys::poll1(fd, libc::POLLRDHUP, 0) != 0,
    };
    let limit_ms = time_limit_ms(fd, libc::SO_RCVTIMEO);
    if ended || (limit_ms > 0 && clock::now_ns() - since >= limit_ms as u64 * 1_000_000) {
        return false;
    }
    signals.tick(true) == Woken::Look
}

/// [`peek`] of a thread that has memory to give back in so many milliseconds, if signals allow that.
#[cold]
fn sleep_for_a_while(fd: i32, index: u32, ms: u32, signals: &mut Signals) -> Woken {
    room::give_back_idle(conn::at(index));
    if time_limit_ms(fd, libc::SO_RCVTIMEO) > 0 || Handlers::lately() == Handlers::Both {
        let by_any = ends_by_any(fd, signals);
        return peek(fd, index, signals, by_any);
    }
    signals.keep();
    match sleep_in_poll(fd, index, ms.into(), signals, false) {
        Woken::Look => {
            room::give_back_idle(conn::at(index));
            Woken::Look
        }
        woken => woken,
    }
}

/// Whether any handler of a signal that was kept away ends a receive: it has a time limit.
fn ends_by_any(fd: i32, signals: &Signals) -> bool {
    signals.are_kept() && time_limit_ms(fd, libc::SO_RCVTIMEO) > 0
}

/// The blocking one-byte peek. `by_any` as for [`Signals::let_in`].
fn peek(fd: i32, index: u32, signals: &mut Signals, by_any: bool) -> Woken {
    let conn = conn::at(index);
    if signals.let_in(by_any) {
        return Woken::Fail(libc::EINTR);
    }
    let mut byte = 0u8;
    // SAFETY: one writable byte. The real function: a cancellation point, as the application expects.
    let n = unsafe { real::recv(fd, (&raw mut byte).cast::<c_void>(), 1, libc::MSG_PEEK) };
    let errno = crate::os::errno::errno();
    let number = numbers::number(fd, index);
    if number != fd && (n >= 0 || errno != libc::EINTR) {
        // It was closed in the meantime, before the call began or after. Look by another number; only an error is taken.
        if n < 0 {
            ending::taken_by_a_closed_number(number, conn, errno);
        }
        return Woken::Look;
    }
    match n {
        0 => {
            ending::note_eof(fd, conn);
            Woken::Look
        }
        n if n > 0 => Woken::Look,
        _ => ending::note_error(conn, errno),
    }
}

/// Waits until room may be there. `since`: when the send began ([`clock::now_ns`]), for SO_SNDTIMEO. `partial`:
/// some bytes are sent, and any signal ends the call.
pub fn for_room(fd: i32, index: u32, since: u64, partial: bool, signals: &mut Signals) -> Woken {
    let conn = conn::at(index);
    if drained::look() {
        return Woken::Look;
    }
    let Some(slot) = conn.slot() else { return Woken::Look };
    let (tx, peer) = (conn.tx(slot), conn.peer(slot));
    let gone = || peer.flags(Relaxed).reads_nothing();
    let has_room = || tx.is_writable();
    let budget = Budget::new(&conn.spins);
    let peer_cpu = conn.peers_cpu(slot);
    let cpus = (&conn.own(slot).cpu, peer_cpu);
    if budget.spin(u64::MAX, cpus, signals, host::own_word::keep, |_| (gone() || has_room()).into())
    {
        observer::spun(conn);
        yields::found(1);
        signals.spun(partial);
        return Woken::Look;
    }
    if room::grow(fd, conn, slot) {
        return Woken::Look;
    }
    let sleeper = Sleeper::enter(conn, Some(slot), true);
    tx.arm_tx(ARM_TCP);
    if gone() || has_room() || state::must_go_back(conn, slot) {
        return Woken::Look;
    }
    if state::is_leaving(conn, slot) {
        // As soon as nobody sleeps here. Not at once: the count is in the peer's reach, and a leaver may be killed.
        return keeping(sleeper, || signals.tick(partial)).1;
    }
    let start = clock::now_ns();
    let counts = [&conn.blocked_sends, &conn.end(slot).blocked_sends];
    // SeqCst: `shutting_down` and `fallback::leave` see us, or we see their flags.
    counts.iter().for_each(|count| {
        count.fetch_add(1, SeqCst);
    });
    let blocked = Blocked(counts);
    observer::count_one(conn, |record| &record.sleeps);
    unheard::before_sleep();
    let flags = conn.own(slot).flags(SeqCst);
    let (_, woken) = keeping((blocked, sleeper), || {
        if flags.is_done() || flags.has_left_other() || state::is_leaving(conn, slot) {
            Woken::Look
        } else {
            sleep_for_room(fd, index, slot, since, partial, signals)
        }
    });
    budget.slept(clock::now_ns() - start);
    yields::found(1);
    woken
}

/// A thread asleep in a send, counted.
struct Blocked<'a>([&'a AtomicU32; 2]);

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        // Our own first. None is left where a fork of this thread's own signal handler has forgotten it here.
        if self.0[0].load(Relaxed) != 0 {
            self.0.iter().for_each(|count| less(count));
        }
    }
}

fn sleep_for_room(
    mut fd: i32,
    index: u32,
    slot: &Slot,
    since: u64,
    partial: bool,
    signals: &mut Signals,
) -> Woken {
    let conn = conn::at(index);
    fd = numbers::number(fd, index);
    let limit_ms = time_limit_ms(fd, libc::SO_SNDTIMEO);
    let used_ms = ((clock::now_ns() - since) / 1_000_000) as i64;
    if limit_ms > 0 && used_ms >= limit_ms {
        return Woken::Fail(libc::EAGAIN);
    }
    let hearing = hearing::of_room(conn, slot);
    // Doorbells already in the stream would end every sleep at once.
    let clear = {
        let held = Receiving::enter(fd, conn, slot);
        fd = numbers::number(fd, index);
        held.is_some()
            && !conn.rx(slot).has_data()
            && reads_ring(fd, conn, slot)
            && matches!(drain_bells(fd, conn, slot), Drain::Bells(_))
    };
    // The doorbell of `fallback::wake_sleepers` may have been among those.
    if state::is_leaving(conn, slot) || state::must_go_back(conn, slot) {
        return Woken::Look;
    }
    // Whether any signal that is handled ends the call, SA_RESTART or not.
    let ends_by_signal = limit_ms > 0 || partial;
    if hearing != Hearing::Bells || !clear {
        watch_over(fd, conn, slot);
        ending::look(fd, conn);
        // Unread data keeps the socket readable, and a half-closed peer cannot ring.
        let listening = if hearing == Hearing::Ear { Listening::begin() } else { None };
        let Some(listening) = listening else { return signals.tick(ends_by_signal) };
        if conn.tx(slot).is_writable() || conn.peer(slot).flags(Relaxed).reads_nothing() {
            return Woken::Look;
        }
        let left_ms = if limit_ms > 0 { limit_ms - used_ms } else { i64::MAX };
        let most_ms = left_ms.min(EAR_LOOK_MS as i64);
        return listen((fd, index), listening, most_ms, ends_by_signal, signals);
    }
    let mut look_ms = room::look_in_ns(conn, slot).map(|ns| ns.div_ceil(1_000_000) as i64);
    // SO_RCVTIMEO has nothing to say about sending: neither its end, nor that any signal ends a receive by then.
    let receives_in_time = || time_limit_ms(fd, libc::SO_RCVTIMEO) > 0;
    // Sleeps with a limit end by any signal, and nobody tells by which.
    let mut handlers = Handlers::Restart;
    if !ends_by_signal && (look_ms.is_some() || receives_in_time()) {
        handlers = Handlers::now();
        if handlers == Handlers::Both {
            if receives_in_time() || room::may_wait_for_itself(conn, slot) {
                return signals.tick(false);
            }
            look_ms = None;
        }
    }
    // Asked again: a handler may have been set a moment before the call.
    let restarts =
        || !ends_by_signal && handlers == Handlers::Restart && Handlers::ask() == Handlers::Restart;
    if let Some(look_ms) = look_ms {
        let most_ms = if limit_ms > 0 { look_ms.min(limit_ms - used_ms) } else { look_ms };
        signals.keep();
        return sleep_in_poll(fd, index, most_ms, signals, ends_by_signal);
    }
    if !ends_by_signal {
        return match peek_anyhow(fd, index, signals) {
            Woken::Fail(libc::EAGAIN) if receives_in_time() => Woken::Look,
            Woken::Fail(libc::EINTR) if receives_in_time() && restarts() => Woken::Look,
            other => other,
        };
    }
    let left_ms = if limit_ms > 0 { limit_ms - used_ms } else { -1 };
    sleep_in_poll(fd, index, left_ms, signals, true)
}

/// Sleeps until the ear of this process is rung, or the kernel's socket is over; for signals see [`Signals::tick`].
#[cold]
fn listen(
    (fd, index): (i32, u32),
    listening: Listening,
    most_ms: i64,
    by_any: bool,
    signals: &mut Signals,
) -> Woken {
    let conn = conn::at(index);
    let is_over = conn.kernel_events.load(Relaxed) & (events::HUP | events::ERR) != 0;
    let fd = if is_over || is_cut(conn) { -1 } else { numbers::steady(fd, index) };
    let mut fds = [libc::pollfd { fd, events: 0, revents: 0 }, listening.pollfd()];
    signals.keep();
    keeping(listening, || signals.poll(&mut fds, most_ms, by_any)).1
}

/// A moment of a send that has to wait for others in the middle of a step, which may be stopped. The rest as for
/// [`for_room`].
#[cold]
pub fn for_others(fd: i32, since: u64, partial: bool, signals: &mut Signals) -> Woken {
    let limit_ms = time_limit_ms(fd, libc::SO_SNDTIMEO);
    if limit_ms > 0 && clock::now_ns() - since >= limit_ms as u64 * 1_000_000 {
        return Woken::Fail(libc::EAGAIN);
    }
    signals.tick(limit_ms > 0 || partial)
}

/// The sending direction's span.
pub fn tx_span<'a>(conn: &Conn, slot: &'a Slot) -> TxSpan<'a> {
    TxSpan::new(slot, conn.side())
}

/// The pid check of rare paths.
pub fn is_own_process() -> bool {
    !process::is_foreign_child()
}
