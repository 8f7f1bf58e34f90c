//! In which order this process has sent by TCP and through rings. Over TCP a program that waits for several connections is told
//! of them in the order in which bytes came. Of what the kernel reports nobody knows when it came, so what is sent
//! through a ring soon after something was sent by TCP says so, and the receiver asks the kernel first.

use core::ptr;
use usmc_shm::layout::{Producer, STAMP_BEHIND};
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicU32, AtomicU64, AtomicUsize};

use crate::os::clock;
use crate::os::reason::Reason;
use crate::record::conn::Conn;
use crate::record::phase::Phase;

/// In cycles, a minute or two: a receiver asks the kernel sooner, unless it does something else for so long (redis in a slow
/// script or with a copy to load).
const SOON: u64 = 1 << 38;

/// When the kernel last took something, in cycles, and of which connection (its record's address); and when before that
/// of another. Threads that write at the same time may mix them up, which costs a question or its answer.
struct Taken {
    at: AtomicU64,
    whose: AtomicUsize,
    before: AtomicU64,
}

impl Taken {
    const fn new() -> Taken {
        Taken { at: AtomicU64::new(0), whose: AtomicUsize::new(0), before: AtomicU64::new(0) }
    }

    fn note(&self, conn: &Conn, now: u64) {
        let whose = ptr::from_ref(conn).addr();
        if self.whose.load(Relaxed) != whose {
            self.before.store(self.at.load(Relaxed), Relaxed);
            self.whose.store(whose, Relaxed);
        }
        self.at.store(now, Relaxed);
    }

    /// Of another connection than `conn`, whose own is for what was sent before.
    #[inline(always)]
    fn by_others(&self, conn: &Conn) -> u64 {
        let is_own = self.whose.load(Relaxed) == ptr::from_ref(conn).addr();
        if is_own { self.before.load(Relaxed) } else { self.at.load(Relaxed) }
    }
}

/// Anything.
static ANY: Taken = Taken::new();
/// What is no doorbell.
static BYTES: Taken = Taken::new();

/// Whether a connection of this process has ever had a slot. Before that there are no stamps, and a program of short
/// connections that has several threads spares its cores the line.
static HAS_RINGS: AtomicU32 = AtomicU32::new(0);

/// A connection is about to have a slot: whatever was sent before counts as sent now.
pub fn begin() {
    if HAS_RINGS.load(Relaxed) == 0 {
        let now = clock::tsc();
        [&ANY, &BYTES].iter().for_each(|taken| taken.at.store(now, Relaxed));
        HAS_RINGS.store(1, Relaxed);
    }
}

/// The kernel has taken something of this connection for the peer, or is about to: bytes, its beginning or its end.
#[inline]
pub fn taken(conn: &Conn) {
    if HAS_RINGS.load(Relaxed) == 0 {
        return;
    }
    let is_strange = || conn.reason.load(Relaxed) == Reason::NotRegistered as u32;
    // A peer without the library has no rings whose order could be compared.
    if conn.phase() != Phase::Plain || !is_strange() {
        let now = clock::tsc();
        ANY.note(conn, now);
        BYTES.note(conn, now);
    }
}

/// The kernel has taken a doorbell of this connection, or is about to.
pub fn rang(conn: &Conn) {
    ANY.note(conn, clock::tsc());
}

/// Something of `conn` is about to be published, at `now` in cycles.
#[inline(always)]
pub fn stamp(conn: &Conn, own: &Producer, now: u64) {
    let taken = ANY.by_others(conn);
    let is_soon = now.wrapping_sub(taken) < SOON;
    if is_soon {
        for (place, at) in [(&own.behind, taken), (&own.behind_bytes, BYTES.by_others(conn))] {
            if place.load(Relaxed) != at {
                place.store(at, Relaxed);
            }
        }
    }
    // Relaxed, as above: it is published with the bytes.
    own.stamp.store(now & !STAMP_BEHIND | u64::from(is_soon), Relaxed);
}

/// Whether what `peer` published with this stamp came behind something that the kernel may not have told until `told`, in
/// cycles. The stamp is given, for it is the peer's memory and read once.
#[inline(always)]
pub fn is_behind(peer: &Producer, stamp: u64, told: u64) -> bool {
    stamp & STAMP_BEHIND != 0 && is_later(peer.behind.load(Relaxed), told)
}

/// The same of bytes that came by TCP, a connection's beginning or its end.
pub fn is_behind_bytes(peer: &Producer, stamp: u64, told: u64) -> bool {
    let at = match peer.behind_bytes.load(Relaxed) {
        0 => peer.behind.load(Relaxed),
        at => at,
    };
    stamp & STAMP_BEHIND != 0 && is_later(at, told)
}

fn is_later(at: u64, told: u64) -> bool {
    at.wrapping_sub(told).cast_signed() > 0
}
