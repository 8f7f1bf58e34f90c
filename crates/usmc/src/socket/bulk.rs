//! Which connections stream. A few at once send by the far parts of their rings all the time: a window larger than a core's own
//! caches is handed over in the shared one. More of them would push each other's bytes out of that.

use core::sync::atomic::Ordering::Relaxed;

use usmc_shm::sync::AtomicU64;

use crate::clock;
use crate::conn::{self, Conn};

/// How many at once.
const SEATS: usize = 4;
/// After how many large sends a connection streams.
const SENDS: u32 = 16;
/// A seat is free when it was not used for so long, in milliseconds.
const KEPT_MS: u32 = 100;

/// The connection's record plus one, and in the upper half the millisecond of its last use; 0 = free.
static SEATED: [AtomicU64; SEATS] = [const { AtomicU64::new(0) }; SEATS];

/// A large send has found room in the ring itself, with the sending lock: whether its bytes go by the far part.
pub fn is_seated(conn: &Conn) -> bool {
    let sends = conn.streamed.load(Relaxed);
    if sends < SENDS {
        conn.streamed.store(sends + 1, Relaxed);
        return false;
    }
    let (me, now) = (conn::index_of(conn) + 1, clock::now_ms());
    let mine = u64::from(now) << 32 | u64::from(me);
    if let Some(seat) = SEATED.iter().find(|seat| seat.load(Relaxed) as u32 == me) {
        seat.store(mine, Relaxed);
        return true;
    }
    SEATED.iter().any(|seat| {
        let held = seat.load(Relaxed);
        let is_free = held == 0 || now.wrapping_sub((held >> 32) as u32) > KEPT_MS;
        is_free && seat.compare_exchange(held, mine, Relaxed, Relaxed).is_ok()
    })
}
