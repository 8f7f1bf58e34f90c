//! In which order this process has sent by TCP and through rings. Over TCP whoever waits for several connections is told
//! of them in the order in which bytes came. Of what the kernel reports nobody knows when it came, so what is sent
//! through a ring soon after something was sent by TCP says so, and the receiver asks the kernel first.

use core::ptr;
use core::sync::atomic::Ordering::Relaxed;
use usmc_shm::layout::{Producer, STAMP_BEHIND};
use usmc_shm::sync::{AtomicU32, AtomicU64, AtomicUsize};

use crate::clock;
use crate::conn::{Conn, PLAIN};
use crate::reason::Reason;

/// In cycles, some 100 ms: after that a receiver that is not busy with something else has been told by the kernel.
const SOON: u64 = 1 << 28;

/// When the kernel last took something, in cycles, and of which connection (its record's address); and when before that
/// of another. Threads that write at the same time may mix them up, which costs a question or its answer.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static WHOSE: AtomicUsize = AtomicUsize::new(0);
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// Whether a connection of this process has ever had a slot. Before that there are no stamps, and a program of short
/// connections that has several threads spares its cores the line.
static HAS_RINGS: AtomicU32 = AtomicU32::new(0);

/// A connection is about to have a slot: whatever was sent before counts as sent now.
pub fn begin() {
    if HAS_RINGS.load(Relaxed) == 0 {
        TAKEN.store(clock::tsc(), Relaxed);
        HAS_RINGS.store(1, Relaxed);
    }
}

/// The kernel has taken something of this connection for the peer, or is about to: bytes, a doorbell, its beginning or its
/// end.
#[inline]
pub fn taken(conn: &Conn) {
    if HAS_RINGS.load(Relaxed) == 0 {
        return;
    }
    let is_strange = || conn.reason.load(Relaxed) == Reason::NotRegistered as u32;
    // A peer without the library has no rings whose order could be compared.
    if conn.phase() != PLAIN || !is_strange() {
        let whose = ptr::from_ref(conn).addr();
        if WHOSE.load(Relaxed) != whose {
            BEFORE.store(TAKEN.load(Relaxed), Relaxed);
            WHOSE.store(whose, Relaxed);
        }
        TAKEN.store(clock::tsc(), Relaxed);
    }
}

/// Something of `conn` is about to be published, at `now` in cycles.
#[inline(always)]
pub fn stamp(conn: &Conn, own: &Producer, now: u64) {
    // Its own doorbells are for what was sent before.
    let is_own = WHOSE.load(Relaxed) == ptr::from_ref(conn).addr();
    let taken = if is_own { BEFORE.load(Relaxed) } else { TAKEN.load(Relaxed) };
    let is_soon = now.wrapping_sub(taken) < SOON;
    if is_soon && own.behind.load(Relaxed) != taken {
        own.behind.store(taken, Relaxed);
    }
    // Relaxed, as above: it is published with the bytes.
    own.stamp.store(now & !STAMP_BEHIND | u64::from(is_soon), Relaxed);
}

/// Whether what `peer` published with this stamp came behind something that the kernel may not have told until `told`, in
/// cycles. The stamp is given, for it is the peer's memory and read once.
#[inline(always)]
pub fn is_behind(peer: &Producer, stamp: u64, told: u64) -> bool {
    stamp & STAMP_BEHIND != 0 && peer.behind.load(Relaxed).wrapping_sub(told).cast_signed() > 0
}
