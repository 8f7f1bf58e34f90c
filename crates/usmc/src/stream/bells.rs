//! Doorbells: single bytes of the connection's own TCP stream, which wake the threads that sleep there, and how they are taken out again.

use usmc_shm::bell::{Bells, Drain, Rung};
use usmc_shm::layout::{ARM_EAR, ARM_TCP, Slot};
use usmc_shm::span::{RxSpan, Source, TxSpan};
use usmc_shm::state::EndState;
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, SeqCst};
use usmc_shm::sync::fence;

use super::{due_ear, ending, fallback, hearing};
use crate::device::room_ear;
use crate::family::holders;
use crate::family::locks::Receiving;
use crate::handshake::clc::deputy;
use crate::handshake::transition;
use crate::host::ears;
use crate::os::{clock, events, sys};
use crate::record::conn::{self, Conn, F_SHARED};
use crate::record::numbers::{self, Hold};
use crate::record::{kernel, order};
use crate::stream::state;
use crate::watch::observer;

/// Most doorbell bytes taken at once.
const BELLS_MAX: usize = 256;
/// How often a doorbell in flight is looked after. It is one system call without a sleep.
const CUT_PATIENCE: u32 = 10_000;
/// How long the kernel of a dead peer may take to answer a doorbell. A living peer that leaves one unread gets the next
/// after this time.
const ANSWER_NS: u64 = 100_000_000;

/// What wakes the sleepers for the data just published, if there are any. The caller has the sending lock, and gives it
/// back before [`Waker::wake`], for that is a system call: meanwhile others may close the connection.
#[inline(always)]
pub fn waker(index: u32, conn: &Conn, slot: &Slot) -> Option<Waker> {
    if conn.tx(slot).has_rx_sleepers() { Hold::in_step(index).map(Waker) } else { None }
}

/// See [`waker`].
pub struct Waker(Hold);

impl Waker {
    /// Rings.
    #[cold]
    pub fn wake(self, fd: i32, slot: &Slot) {
        let conn = self.0.conn();
        ring_bell(self.0.fd(fd), conn, slot, |shared| conn.tx(slot).take_rx_sleepers(shared));
    }
}

/// Wakes the sleepers for room that `consume_waking` found.
#[cold]
pub fn wake_writer(fd: i32, conn: &Conn, slot: &Slot) {
    // A doorbell must not precede our boundary in the TCP stream. Where our direction cannot change over
    // now, the sleeper looks again by itself (see [`hearing::of_room`]).
    if transition::tx_is_ring(fd, conn, slot) {
        ring_bell(fd, conn, slot, |shared| conn.rx(slot).take_tx_sleepers(shared));
    }
}

/// One byte on the TCP socket, if `take`, which takes arm bits away ([`Ring::take_rx_sleepers`]), finds that somebody
/// sleeps.
///
/// [`Ring::take_rx_sleepers`]: usmc_shm::ring::Ring::take_rx_sleepers
#[cold]
pub fn ring_bell(fd: i32, conn: &Conn, slot: &Slot, take: impl FnOnce(bool) -> u32) {
    let shared = conn.has(F_SHARED);
    let send = || {
        // Pairs with the fence in `cut`: it waits for this doorbell, or we see that there is nobody to hear it.
        fence(SeqCst);
        hearing::ring_ear(conn, slot);
        if conn.peer_end(slot).flags().is_cut() || conn.own(slot).flags(Relaxed).was_shut() {
            return false;
        }
        let Some(fd) = numbers::number_to_ring(fd, conn) else { return false };
        let sent = sys::send(fd, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        order::rang(conn);
        match sent {
            Ok(_) => {
                observer::count_one(conn, |record| &record.bells_sent);
                due_ear::rang(conn);
            }
            Err(errno) => ending::untold_by_send(fd, conn, slot, errno),
        }
        sent.is_ok()
    };
    // SeqCst: before the doorbell counts among all of this end's, and until it does not any more.
    conn.ringing.fetch_add(1, SeqCst);
    let take = || {
        let bits = take(shared);
        let by_ear = bits & (ARM_EAR | ARM_TCP) == ARM_EAR;
        // Of several processes one may be killed in between.
        let at = || (conn.segment.load(Relaxed), conn.slot_index.load(Relaxed));
        let rings = by_ear && (shared || !room_ear::ring(at().0, at().1));
        if rings { bits | ARM_TCP } else { bits }
    };
    let rung = TxSpan::new(slot, conn.side()).ring(take, send);
    if shared {
        conn.tx(slot).rang_rx();
        conn.rx(slot).rang_tx();
    }
    conn.ringing.fetch_sub(1, SeqCst);
    if rung == Rung::Back {
        fallback::go_back(fd, conn, slot);
    }
}

/// Sees to it that the death of a peer is heard that has shut its direction down: its FIN is here already, and of what
/// it leaves unread in the ring the kernel knows nothing. A doorbell unread makes it answer with a RST, as TCP does.
pub fn watch_over(fd: i32, conn: &Conn, slot: &Slot) {
    if conn.tx(slot).has_data() {
        provoke(fd, conn, slot);
    }
}

/// The same of one that may have read everything.
pub fn provoke(fd: i32, conn: &Conn, slot: &Slot) {
    let state = conn.peer(slot).flags(Acquire).end();
    let (own, theirs) = (conn.own(slot), conn.peer_end(slot));
    if state != EndState::Shut
        || own.flags(Relaxed).is_done()
        || conn.kernel_events.load(Relaxed) & events::HUP != 0
    {
        return;
    }
    let now = clock::now_ns();
    // An unread doorbell does it, but a killed process may have taken it, or not have sent it, and not said so.
    if own.bells_sent.load(Relaxed) != theirs.bells_drained.load(Relaxed)
        && now.wrapping_sub(conn.provoked.load(Relaxed)) < ANSWER_NS
    {
        return;
    }
    conn.provoked.store(now, Relaxed);
    if transition::tx_is_ring(fd, conn, slot) {
        ring_bell(fd, conn, slot, |shared| conn.tx(slot).take_rx_sleepers(shared) | ARM_TCP);
    }
}

/// Whether no doorbell can wake this end ([`set_cut`](usmc_shm::layout::End::set_cut)).
pub fn is_cut(conn: &Conn) -> bool {
    conn.slot().is_some_and(|s| conn.end(s).flags().is_cut())
}

/// Makes the kernel's socket readable for good, which wakes the threads that sleep there. Our direction is shut, so that its kernel
/// answers any further byte of the peer's by a RST: what the peer is just sending comes first.
#[cold]
pub fn cut(fd: i32, conn: &Conn, slot: &Slot) {
    conn.end(slot).set_cut();
    fence(SeqCst);
    // One that was stopped or killed in between may never send it.
    let mut patience = CUT_PATIENCE;
    while patience > 0 && TxSpan::new(slot, 1 - conn.side()).is_rung() {
        sys::sched_yield();
        patience -= 1;
    }
    let _ = sys::shutdown(fd, libc::SHUT_RD);
    ears::ring_own();
}

/// Takes doorbell bytes out of the TCP stream, the ring being empty. Returns what is to be done next.
/// The caller holds the receiving lock and has read TCP to the boundary.
pub fn drain_bells(fd: i32, conn: &Conn, slot: &Slot) -> Drain {
    let bells = Bells { end: conn.end(slot), rx: conn.rx(slot), tx: conn.tx(slot) };
    // Threads that were killed asleep stay counted.
    let others = |all: &AtomicU32| all.load(Acquire) != 0 && !holders::is_alone(conn);
    let readers = || conn.rx_sleepers.load(Acquire) != 0 || others(&bells.end.rx_sleepers);
    let writers = || conn.tx_sleepers.load(Acquire) != 0 || others(&bells.end.tx_sleepers);
    let verdict = bells.drain(readers, writers);
    if let Drain::Bells(pending) = verdict
        && pending > 0
    {
        // Behind the count: what one of them was rung for is seen now.
        let own = conn.own(slot).flags(Acquire);
        if (state::is_leaving(conn, slot) || own.is_returning()) && writers() {
            // It has to hear that no room will come.
            return Drain::Leave;
        }
        if deputy::is_left(conn) && own.end() < EndState::Closed {
            // The byte stays for the kernel to tell of: by that the application gets its TCP connection back.
            return Drain::Leave;
        }
        let mut scratch = [0u8; BELLS_MAX];
        let len = (pending as usize).min(BELLS_MAX);
        // SAFETY: scratch is writable for `len` bytes.
        if let Ok(n) = unsafe { sys::recv(fd, scratch.as_mut_ptr(), len, libc::MSG_DONTWAIT) } {
            bells.drained(n as u32);
            if let Some(record) = observer::record_of(conn) {
                record.bells_drained.fetch_add(n as u32, Relaxed);
            }
        }
    }
    verdict
}

/// Whether TCP has been read to the boundary. The caller holds the receiving lock.
pub fn reads_ring(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    matches!(
        RxSpan::new(slot, conn.side()).source(|| kernel::tcp_read(fd, conn, slot)),
        Ok(Source::Ring)
    )
}

/// Whether doorbells are (or may be) in the TCP stream.
pub fn has_bells(conn: &Conn, slot: &Slot) -> bool {
    conn.peer(slot).bells_sent.load(Acquire) != conn.end(slot).bells_drained.load(Relaxed)
}

/// Whether the kernel may keep the ACK of so many doorbells back, for 40 ms, that the peer's next one has to wait for it:
/// each is a packet, and the congestion window may be four of them. Two that are read are acknowledged at once.
pub fn owes_ack(conn: &Conn, slot: &Slot) -> bool {
    let drained = conn.end(slot).bells_drained.load(Relaxed);
    conn.peer(slot).bells_sent.load(Relaxed).wrapping_sub(drained) >= 2
}

/// Takes doorbells away before a sleep that they would end at once, if the ring is empty.
pub fn clear_bells(fd: i32, conn: &Conn, slot: &Slot) {
    let Some(_held) = Receiving::enter(fd, conn, slot) else { return };
    if numbers::number_in_step(fd, conn::index_of(conn), false).is_none() {
        return;
    }
    if has_bells(conn, slot) && reads_ring(fd, conn, slot) && !conn.rx(slot).has_data() {
        drain_bells(fd, conn, slot);
    }
}

/// Bytes beyond every count can only come from a broken peer; they must not keep us awake.
pub fn drain_junk(fd: i32) {
    let mut scratch = [0u8; BELLS_MAX];
    // SAFETY: scratch is writable for its length.
    let _ = unsafe { sys::recv(fd, scratch.as_mut_ptr(), scratch.len(), libc::MSG_DONTWAIT) };
}
