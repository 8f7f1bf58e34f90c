//! Room for what the peer does not read. TCP's buffers take some megabytes of it (tcp(7): tcp_wmem, tcp_rmem; SO_SNDBUF,
//! SO_RCVBUF), and programs count on that: both ends send before they read, or one thread has both, or programs in a ring
//! send to the next one before they read from the one before. So a window that is full goes on in the ring's far part, at
//! once, up to what TCP would take. When all is read the sender comes back from there. Once it has not been there for a
//! second, it gives that memory back: at its next send, or where a thread of its process sleeps.
//!
//! Some connections have no far part: a memory limit is near, a program is a 32-bit one, a peer is a stranger and memory is
//! limited. There a sender that sleeps although nothing is read goes back to TCP.

use usmc_shm::layout::{Slot, WINDOW_SHIFT_MAX};
use usmc_shm::ring::{Grant, Ring, Room};
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use super::{bulk, fallback, state};
use crate::device::{self, segment};
use crate::family::locks::Family;
use crate::os::reason::Reason;
use crate::os::{clock, memory};
use crate::record::conn::{self, Conn, F_SHARED, Far};
use crate::record::limit;
use crate::record::phase::Phase;
use crate::watch::observer;

/// How long nothing is read while this end itself has left bytes unread. Long enough for another of its threads to read.
const UNREAD_NS: u64 = 20_000_000;
/// The same otherwise: the reader may wait for the thread that waits here, by ways that no process sees.
const IDLE_NS: u64 = 1_000_000_000;
/// Before the next try, where it could not leave.
const FAILED_NS: u64 = 5_000_000_000;
/// How often a sleeper looks whether SO_SNDBUF was raised, which the kernel would wake it for.
const RAISED_NS: u64 = 10_000_000;
/// How long the memory of a far part that is not in use is kept, in milliseconds.
const KEPT_MS: u32 = 1000;

/// Whether the ring takes more now, having become larger. Waits for no lock: looks at readiness come here with locks, and a sender
/// does it itself.
#[cold]
pub fn grow(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let tx = growing(fd, conn, slot);
    if !tx.can_grow() {
        return false;
    }
    let Some(_held) = conn.tx_lock.try_enter() else { return false };
    if !conn.has_slot(slot) {
        return false;
    }
    let Some(_family) = Family::sending(fd, conn, slot) else { return false };
    let flags = conn.own(slot).flags(Relaxed);
    if flags.ends_ring() || flags.is_done() {
        return false;
    }
    // Where there is no memory for the far part, there may be some for the rest of the ring.
    grow_locked(conn, &tx) || grow_locked(conn, &within_ring(conn, tx))
}

/// The same, with the sending locks.
fn grow_locked(conn: &Conn, tx: &Ring<'_>) -> bool {
    let near = 1 << conn.full_shift();
    let mut went_far = false;
    let has_grown = tx.grow(|at, len| {
        went_far = len > near;
        match went_far {
            true => take_far(conn, at.cast(), len),
            false if memory::take(at.cast(), len) => Grant::of(len),
            false => Grant::NONE,
        }
    }) == Ok(true);
    if has_grown && let Ok(len) = tx.window_len() {
        observer::grown(conn, len);
    }
    if went_far && tx.has_far() {
        // What was taken and cannot be used is given back as if it had been left now.
        let now = if has_grown { Far::InUse } else { Far::Left(clock::now_ms()) };
        conn.set_far_part(now);
    }
    has_grown
}

/// Memory for the far part, unless it has some from the last time.
fn take_far(conn: &Conn, at: *mut u8, len: usize) -> Grant {
    let taken = conn.far_taken.load(Relaxed) as usize;
    if taken > 0 {
        return Grant { bytes: taken, in_memory: taken };
    }
    let grant = memory::take_far(at, len);
    conn.far_taken.store(grant.in_memory as u32, Relaxed);
    grant
}

/// After [`Ring::room_if`] has found `room` for `want` bytes, with the sending locks. Where the ring was empty, the sender is not in
/// the far part any more, and gives back what it has not used for a while. A sender that streams goes on there.
#[inline(always)]
pub fn found(fd: i32, conn: &Conn, slot: &Slot, room: Room, want: usize) -> Room {
    if want >= bulk::STREAM
        && room.place.window <= 1 << conn.full_shift()
        && let Some(room) = stream(fd, conn, slot, want)
    {
        return room;
    }
    let tx = conn.tx(slot);
    if !room.unread && tx.has_far() {
        came_back(conn, &tx);
    }
    room
}

/// The room in the far part, for a connection that has a seat there. `None`: the sender uses the ring itself.
#[cold]
fn stream(fd: i32, conn: &Conn, slot: &Slot, want: usize) -> Option<Room> {
    let mut room = None;
    if peer_reaches_far(conn, slot) && bulk::is_seated(conn) {
        let tx = growing(fd, conn, slot);
        room = tx.stream(want, |at, len| take_far(conn, at.cast(), len));
        if room.is_some() {
            conn.set_far_part(Far::InUse);
        }
    }
    room
}

#[cold]
fn came_back(conn: &Conn, tx: &Ring<'_>) {
    let now = clock::now_ms();
    match conn.far_part() {
        // An earlier connection of the slot, or another process, may have left it in memory.
        Far::Unused | Far::InUse => conn.set_far_part(Far::Left(now)),
        Far::Left(then) if is_old(then, now) => give_back(conn, tx, now),
        Far::Left(_) => {}
    }
}

fn is_old(then: u32, now: u32) -> bool {
    now.wrapping_sub(then) >= KEPT_MS
}

fn give_back(conn: &Conn, tx: &Ring<'_>, now: u32) {
    segment::give_back_far(device::of(conn), tx);
    conn.set_far_part(if tx.has_far() { Far::Left(now) } else { Far::Unused });
}

/// Before a sleep, without locks: gives back what is in memory of far parts that have not been in use for a while, of all
/// connections of this process. In how many nanoseconds the sleeper has to look again, if it has.
pub fn sweep() -> Option<u64> {
    conn::has_far_parts().then(sweep_due)
}

#[cold]
fn sweep_due() -> u64 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const EACH_MS: u32 = KEPT_MS / 2;
    let (now, next) = (clock::now_ms(), NEXT.load(Relaxed));
    let left = next.wrapping_sub(now);
    if left > 0 && left <= EACH_MS {
        return u64::from(left) * 1_000_000;
    }
    if NEXT.compare_exchange(next, now.wrapping_add(EACH_MS), Relaxed, Relaxed).is_ok() {
        conn::for_each(|_, conn| {
            if conn.far_part() != Far::Unused {
                give_back_idle(conn);
            }
        });
    }
    u64::from(EACH_MS) * 1_000_000
}

/// The same of one connection, before this thread sleeps on it.
pub fn give_back_idle(conn: &Conn) {
    let Some(_held) = conn.tx_lock.try_enter() else { return };
    let slot = conn.slot().filter(|slot| conn.phase() == Phase::Ring && !is_shared(conn, slot));
    let Some(slot) = slot else {
        // Processes that share it give it back at a send, or in the end.
        return conn.set_far_part(Far::Unused);
    };
    let (tx, now) = (conn.tx(slot), clock::now_ms());
    match conn.far_part() {
        // The next send begins in the ring itself.
        Far::InUse if tx.leave_far().is_some() => conn.set_far_part(Far::Left(now)),
        Far::Left(then) if is_old(then, now) => give_back(conn, &tx, now),
        _ => {}
    }
}

fn is_shared(conn: &Conn, slot: &Slot) -> bool {
    conn.has(F_SHARED) || conn.end(slot).refs.load(Relaxed) != 1
}

/// Whether a sleeper on this connection has to give memory back in a while ([`give_back_idle`]). In how many milliseconds.
pub fn keeps_far_ms(conn: &Conn) -> Option<u32> {
    (conn.far_part() != Far::Unused).then_some(KEPT_MS)
}

/// The ring that we send by, without its far part where the peer does not reach that, or has bytes of TCP to read first: a way
/// back would not find that room in TCP's buffers.
fn growing<'a>(fd: i32, conn: &Conn, slot: &'a Slot) -> Ring<'a> {
    if conn.tx_most.load(Relaxed) == 0 {
        limit::set_to_tcps(fd, conn, slot);
    }
    let tx = conn.tx(slot);
    let has_read_tcp = conn.peer_end(slot).reads_ring();
    if has_read_tcp && peer_reaches_far(conn, slot) { tx } else { within_ring(conn, tx) }
}

/// The same without its far part in any case.
fn within_ring<'a>(conn: &Conn, tx: Ring<'a>) -> Ring<'a> {
    tx.limited((1 << conn.full_shift()).min(conn.tx_most.load(Relaxed) as usize))
}

fn peer_reaches_far(conn: &Conn, slot: &Slot) -> bool {
    conn.peer_end(slot).flags().reaches_far()
}

/// Somebody waits for so many unread bytes: leaves a ring that does not hold them. Whether it has.
pub fn leave_for(fd: i32, index: u32, bytes: usize) -> bool {
    let conn = conn::at(index);
    let most = match conn.slot() {
        Some(slot) if conn.has_far() && peer_reaches_far(conn, slot) => 1 << WINDOW_SHIFT_MAX,
        _ => 1 << conn.full_shift(),
    };
    conn.phase() == Phase::Ring
        && bytes > most
        && fallback::leave(fd, index, Reason::TooMuch).is_ok()
}

/// How long nothing need be read before whoever waits for room is taken to wait in vain. `None`: there is room, or TCP would
/// have none either.
fn patience_ns(conn: &Conn, slot: &Slot) -> Option<u64> {
    let tx = conn.tx(slot);
    if tx.is_writable() || state::is_back(conn, slot) || is_as_large_as_tcp(conn, slot, &tx) {
        return None;
    }
    Some(if conn.rx(slot).has_data() { UNREAD_NS } else { IDLE_NS })
}

fn is_as_large_as_tcp(conn: &Conn, slot: &Slot, tx: &Ring<'_>) -> bool {
    let most = match conn.tx_most.load(Relaxed) {
        0 => limit::MOST,
        // Small segments: TCP's buffer grows when it is full, to some multiple.
        most if conn.snd_buf.load(Relaxed) == 0 && most < usual_most(conn, slot) / 2 => limit::MOST,
        most => most,
    };
    let most = most.next_power_of_two().min(1 << WINDOW_SHIFT_MAX) as usize;
    tx.window_len().is_ok_and(|len| len >= most)
}

/// What TCP's buffers may grow to.
fn usual_most(conn: &Conn, slot: &Slot) -> u32 {
    let [snd, rcv] = limit::defaults();
    limit::in_buffers(snd, limit::or_usual(limit::peers_rcv_buf(conn, slot), rcv))
}

/// Whether SO_SNDBUF may be raised, for more room.
fn may_be_raised(conn: &Conn, slot: &Slot) -> bool {
    conn.snd_buf.load(Relaxed) > 0
        && conn.tx_most.load(Relaxed) < 1 << WINDOW_SHIFT_MAX
        && !conn.tx(slot).is_writable()
}

/// Whether a thread that sleeps for room may well wait for itself: the peer may wait for our reading, or be this process.
pub fn may_wait_for_itself(conn: &Conn, slot: &Slot) -> bool {
    conn.rx(slot).has_data() || conn.is_own_peer(slot)
}

/// In how many nanoseconds a sleeper for room has to look by itself, to [`leave_if_stuck`] or for more room, if at all.
pub fn look_in_ns(conn: &Conn, slot: &Slot) -> Option<u64> {
    const LEAST: u64 = 1_000_000;
    let Some(patience) = patience_ns(conn, slot) else {
        return may_be_raised(conn, slot).then_some(RAISED_NS);
    };
    let (since, now) = (conn.stuck.load(Relaxed), clock::now_ns());
    let left = match since {
        0 => patience,
        // It could not leave.
        _ if since > now => since - now,
        _ => patience.saturating_sub(now - since),
    };
    Some(left.max(LEAST))
}

/// Before each sleep for room, and where a send that does not wait finds none: sends by TCP from now on if nothing has been read
/// for too long. Whether it does. `may`: asked before that, which takes its time.
pub fn leave_if_stuck(fd: i32, index: u32, may: impl FnOnce() -> bool) -> bool {
    let conn = conn::at(index);
    let Some(slot) = conn.slot() else { return false };
    let Some(patience) = patience_ns(conn, slot) else {
        conn.stuck.store(0, Relaxed);
        return false;
    };
    let (read, now) = (conn.tx(slot).read(), clock::now_ns());
    let since = conn.stuck.load(Relaxed);
    if since == 0 || read != conn.stuck_at.load(Relaxed) {
        conn.stuck_at.store(read, Relaxed);
        conn.stuck.store(now, Relaxed);
        return false;
    }
    if now.saturating_sub(since) < patience || !may() {
        return false;
    }
    let left = fallback::send_by_tcp(fd, index);
    // A hostile peer may undo it: the call that comes here again has not waited then.
    conn.stuck.store(if left { 0 } else { now + FAILED_NS }, Relaxed);
    left
}
