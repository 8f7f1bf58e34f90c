//! What the words of a slot's directions say of a connection.

use usmc_shm::layout::Slot;
use usmc_shm::span::TxSpan;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, SeqCst};

use crate::record::conn::Conn;

/// Whether the peer waits for us to send again what it left unread.
#[inline(always)]
pub fn must_go_back(conn: &Conn, slot: &Slot) -> bool {
    conn.own(slot).flags(Acquire).is_left() && !TxSpan::new(slot, conn.side()).is_back()
}

/// Whether another thread, perhaps of another process, is about to take the connection out of the ring.
pub fn is_leaving(conn: &Conn, slot: &Slot) -> bool {
    conn.end(slot).leaving.load(SeqCst) > 0
}

/// Whether our sends are TCP's again, or there are none any more.
pub fn is_back(conn: &Conn, slot: &Slot) -> bool {
    TxSpan::new(slot, conn.side()).is_back() || {
        let own = conn.own(slot).flags(Acquire);
        own.is_done() && own.goes_back()
    }
}

/// Bytes in our ring that the peer has not read, and is to read there.
pub fn unread_by_peer(conn: &Conn, slot: &Slot) -> usize {
    let left = conn.own(slot).flags(Relaxed).is_left();
    if left && TxSpan::new(slot, conn.side()).is_back() { 0 } else { conn.tx(slot).unread() }
}
