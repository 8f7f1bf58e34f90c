//! What a registration has to report, and which of it is an edge.

use usmc_shm::layout::Slot;
use usmc_shm::state::Tx;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::os::events::{self, HUP, OUT, READ_BITS};
use crate::record::conn::{self, Conn};
use crate::stream::{ending, ready, unread};
use crate::watchers::entry::{E_ACTIVE, E_DISABLED, E_EDGE, E_TCP, Entry};
use crate::watchers::epoll::{arm, disarm};
use crate::watchers::set::{ET, ONESHOT, live_fd, set_at};

/// What an entry has to report now; 0 = nothing. Remembers what it reported. The caller holds the lock
/// of the entry's set.
pub fn take_events(entry: &Entry, peek: bool) -> u32 {
    let conn = conn::at(entry.conn.load(Relaxed));
    let (Some(slot), false) = (conn.slot(), entry.has(E_DISABLED)) else { return 0 };
    let want = entry.events.load(Relaxed);
    let others = set_at(entry.set_index()).sleepers.load(Relaxed) > 0;
    if others && !peek {
        // Whatever comes after this look rings for those that are asleep in this set.
        arm(entry);
    }
    // Before the look: what changes during it is for the next one to tell.
    let prod = conn.peer(slot).prod.load(Acquire);
    let lasts = lasting(entry, conn, slot);
    let in_tcp = !conn.end(slot).reads_ring();
    let shut_rd = conn.end(slot).flags().is_shut_rd();
    // The end of the stream can be read, whether or not the kernel was asked for it.
    let is_over = shut_rd
        || conn.peer(slot).flags(Relaxed).has_ended()
        || conn.kernel_events.load(Relaxed) != 0;
    let idle = in_tcp && !is_over && !entry.has(E_TCP) && conn.peer(slot).tx(Relaxed) == Tx::Tcp;
    let ask = if idle { want & !READ_BITS } else { want };
    let bits = ready::now(live_fd(entry), conn, slot, ask) & (want | events::ERR | HUP);
    if in_tcp && ask & READ_BITS != 0 && bits & READ_BITS == 0 && entry.has(E_TCP) {
        entry.set_flag(E_TCP, false);
    }
    if bits == 0 {
        return 0;
    }
    if want & ET != 0 && !new_edge(conn, slot, entry, bits, lasts) {
        return 0;
    }
    if peek {
        return bits;
    }
    if unread::has_span(live_fd(entry), conn, slot) {
        entry.seen_prod.store(prod, Relaxed);
    }
    if bits & OUT != 0 {
        entry.seen_blocks.store(conn.tx_blocks.load(Relaxed), Relaxed);
    }
    entry.seen_bits.store(lasts, Relaxed);
    if entry.has(E_EDGE) {
        entry.set_flag(E_EDGE, false);
    }
    if !entry.has(E_ACTIVE) {
        entry.set_flag(E_ACTIVE, true);
    }
    if want & ONESHOT != 0 {
        entry.set_flag(E_DISABLED, true);
    }
    if !others {
        disarm(conn, entry);
    }
    bits
}

/// What changes at most a few times in a connection's life; each change is an edge.
fn lasting(entry: &Entry, conn: &Conn, slot: &Slot) -> u32 {
    let ended = ending::ending(live_fd(entry), conn, slot);
    let own = conn.own(slot).flags(Relaxed);
    let end = conn.end(slot).flags();
    // A mark that was set wakes a thread that waits for data.
    let marks = if is_for_data(entry) { end.lowat_marks() } else { 0 };
    ended as u32 | own.end_bits() << 8 | u32::from(end.is_shut_rd()) << 16 | marks << 24
}

/// Whether bytes that come are an edge for this registration: some event is asked for of which the kernel tells then
/// (sock_def_readable).
pub fn is_for_data(entry: &Entry) -> bool {
    const KEY: u32 = READ_BITS & !events::RDHUP;
    entry.events.load(Relaxed) & KEY != 0
}

fn new_edge(conn: &Conn, slot: &Slot, entry: &Entry, bits: u32, lasts: u32) -> bool {
    entry.has(E_EDGE)
        // Bytes that came are an edge for all that is true at the wait, also when they were read meanwhile.
        || (is_for_data(entry)
            && conn.peer(slot).prod.load(Relaxed) != entry.seen_prod.load(Relaxed)
            && unread::has_span(live_fd(entry), conn, slot))
        || (bits & OUT != 0 && conn.tx_blocks.load(Relaxed) != entry.seen_blocks.load(Relaxed))
        || lasts != entry.seen_bits.load(Relaxed)
}
