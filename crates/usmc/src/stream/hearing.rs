//! What wakes a sleeper of this end: doorbells, or the ear of this process ([`crate::host::ears`]) where none can reach it.

use usmc_shm::layout::Slot;
use usmc_shm::state::Tx;
use usmc_shm::sync::Ordering::Relaxed;

use crate::handshake::clc;
use crate::host::{PeerProcess, ears};
use crate::record::conn::{Conn, F_SHARED};
use crate::stream::state;

/// What wakes a sleeper.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Hearing {
    /// Doorbells, and what the kernel tells of its socket.
    #[default]
    Bells,
    /// The ear of this process, and the kernel. The sleeper looks every [`EAR_LOOK_MS`] as well: the peer may have lost the ear.
    Ear,
    /// Nothing that can be relied on: the sleeper looks every millisecond.
    Nothing,
}

/// See [`Hearing::Ear`].
pub const EAR_LOOK_MS: u64 = 100;

/// What wakes a sleeper for room. No doorbell does where the peer has shut its TCP direction, or has not changed it over yet, or
/// it may be full of what we have not read, or we have shut it; nor where somebody is about to end the ring.
pub fn of_room(conn: &Conn, slot: &Slot) -> Hearing {
    let peer = conn.peer(slot);
    if conn.own(slot).flags(Relaxed).is_returning() || state::is_leaving(conn, slot) {
        return Hearing::Nothing;
    }
    let is_deaf = peer.tx(Relaxed) != Tx::Ring
        || peer.flags(Relaxed).is_done()
        || conn.kernel_events.load(Relaxed) != 0
        || (!conn.end(slot).reads_ring() && !conn.tx(slot).is_writable())
        // The kernel's socket is readable for good.
        || conn.end(slot).flags().is_shut_rd()
        || conn.end(slot).flags().is_cut();
    if is_deaf { without_bells(conn, slot) } else { Hearing::Bells }
}

/// What wakes a sleeper that no doorbell reaches. Sends the peer our ear, once the peer takes it.
pub fn without_bells(conn: &Conn, slot: &Slot) -> Hearing {
    let taker = conn.peer_end(slot).ear_taker();
    let Some(to) = taker.filter(|_| !conn.has(F_SHARED) && conn.is_on_one_kernel()) else {
        return Hearing::Nothing;
    };
    // By whom and to whom: a process that came by fork has an ear of its own.
    let sent = |own: u32| own << 16 | (to + 1) & 0xffff;
    let own = ears::open().map(|PeerProcess(own)| own);
    if own.is_ok_and(|own| conn.ear_sent.load(Relaxed) == sent(own)) {
        return Hearing::Ear;
    }
    match ears::send(PeerProcess(to)) {
        Ok(PeerProcess(own)) => {
            conn.end(slot).set_hearer(own);
            conn.ear_sent.store(sent(own), Relaxed);
            Hearing::Ear
        }
        Err(_) => Hearing::Nothing,
    }
}

/// This end sends no more bytes, and so no doorbells: it takes the peer's ear, if there is going to be one.
pub fn take_ear(conn: &Conn, slot: &Slot) {
    if !conn.has(F_SHARED)
        && conn.is_on_one_kernel()
        && let Ok(PeerProcess(own)) = ears::open()
    {
        conn.end(slot).set_ear_taker(Some(own));
    }
}

/// Wakes the peer's sleepers by the ear that it has sent, if it has.
pub fn ring_ear(conn: &Conn, slot: &Slot) {
    let Some(hearer) = conn.peer_end(slot).hearer() else { return };
    clc::take_mail();
    if !ears::ring(PeerProcess(hearer)) {
        // The sleeper has to look by itself.
        conn.end(slot).set_ear_taker(None);
    }
}
