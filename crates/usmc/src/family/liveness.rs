//! Whether the peer's process lives, at the cost of two loads.
//!
//! Each process has a word that its kernel marks when the process ends in whatever way, before it closes any descriptor
//! ([`crate::host::own_word::voucher`]). A holder of an end names its word in the slot and so vouches for the end: as long as the
//! word is not marked, the connection has not ended by a death. That is what a send has to know which TCP would refuse, or
//! let go to provoke a RST. A word that is marked, or cannot be had, says nothing: then the kernel is asked for the peer's
//! FIN, as it closes the socket some time after the mark, or not at all if another process holds the end, too.
//!
//! A process that lets go of an end which others hold takes its name back first, and one of the others gives its own.

use usmc_shm::layout::{Slot, VOUCHER_CLAIMED};
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::host::{self, Voucher};
use crate::os::process;
use crate::record::conn::Conn;

/// What is known of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// It had not died when this was asked.
    Lives,
    /// The process that vouched for it has died.
    Ended,
    /// Nobody vouches for it, as far as we can see.
    Unknown,
}

/// Whether the peer had not died. False says nothing; see [`ask`]. The caller holds the sending lock.
#[inline(always)]
pub fn is_vouched_for(conn: &Conn, slot: &Slot) -> bool {
    // Acquire: what was known of the connection before is not newer than this.
    let word = conn.life().load(Acquire);
    conn.peer(slot).voucher.load(Relaxed) == conn.voucher.load(Relaxed)
        && word == conn.life_seen.load(Relaxed)
}

/// Whether the process that has vouched for the peer is known to have ended.
pub fn has_ended(conn: &Conn) -> bool {
    conn.has_life() && !host::own_word::is_alive(conn.life().load(Relaxed))
}

/// The same where that is not so: somebody else vouches by now, or nobody, or another thread of the peer's. The caller
/// holds the sending lock.
#[cold]
pub fn ask(conn: &Conn, slot: &Slot) -> Life {
    let peer = conn.peer(slot);
    // Acquire: pairs with the Release in `vouch`.
    let identity = peer.voucher.load(Acquire);
    if identity != conn.voucher.load(Relaxed) {
        let (pid, fd) = (peer.voucher_pid.load(Relaxed), peer.voucher_fd.load(Relaxed));
        let is_ours = conn.knows_pids_of(&slot.end[1 - conn.side()]);
        let known = match identity > VOUCHER_CLAIMED && is_ours {
            true => host::peer_words::find(Voucher { identity, pid, fd }).map(Some),
            false => Ok(None),
        };
        match known {
            Err(libc::EAGAIN) => return Life::Unknown,
            known => conn.set_life(known.ok().flatten()),
        }
        conn.voucher.store(identity, Relaxed);
    }
    if !conn.has_life() {
        return Life::Unknown;
    }
    let word = conn.life().load(Acquire);
    match host::own_word::is_alive(word) {
        true => {
            conn.life_seen.store(word, Relaxed);
            Life::Lives
        }
        false => Life::Ended,
    }
}

/// The same where nobody sends at the moment; otherwise unknown.
pub fn look(conn: &Conn, slot: &Slot) -> Life {
    conn.tx_lock.try_enter().map_or(Life::Unknown, |_held| ask(conn, slot))
}

/// Whether all holders of the peer's end have ended, which asks the kernel for each by its id: for an end of which no FIN is
/// to come. False says nothing. Without locks.
#[cold]
pub fn have_ended(conn: &Conn, slot: &Slot) -> bool {
    // Where a word of theirs was seen, their ids mean the same here.
    if !conn.has_life() || is_vouched_by_the_living(conn, slot) {
        return false;
    }
    let (peer, end) = (conn.peer(slot), conn.peer_end(slot));
    let count = end.refs.load(Acquire) as usize;
    // Read once: it is the peer's memory.
    let members = end.members.each_ref().map(|id| id.load(Relaxed));
    let ids = || members.into_iter().filter(|id| *id != 0);
    if ids().next().is_some() {
        return ids().count() == count && !ids().any(process::is_alive);
    }
    // A process that has always had it alone is in no list.
    let identity = peer.voucher.load(Acquire);
    let is_known = identity > VOUCHER_CLAIMED && identity == conn.voucher.load(Relaxed);
    count == 1 && is_known && !process::is_alive(peer.voucher_pid.load(Relaxed))
}

/// Whether the word of the process that vouches for the peer is known, and not marked.
fn is_vouched_by_the_living(conn: &Conn, slot: &Slot) -> bool {
    let is_known = conn.peer(slot).voucher.load(Acquire) == conn.voucher.load(Relaxed);
    is_known && host::own_word::is_alive(conn.life().load(Relaxed))
}

/// This process vouches for our end, if nobody does.
pub fn vouch(conn: &Conn, slot: &Slot) {
    let own = conn.own(slot);
    if own.voucher.load(Relaxed) != 0 {
        return;
    }
    let Some(me) = host::own_word::voucher() else { return };
    if own.voucher.compare_exchange(0, VOUCHER_CLAIMED, AcqRel, Relaxed).is_ok() {
        own.voucher_pid.store(me.pid, Relaxed);
        own.voucher_fd.store(me.fd, Relaxed);
        own.voucher.store(me.identity, Release);
    }
}

/// The process of this id does not hold our end any more, or is about to let go.
pub fn stop_vouching(conn: &Conn, slot: &Slot, pid: u32) {
    let own = conn.own(slot);
    if own.voucher.load(Relaxed) > VOUCHER_CLAIMED && own.voucher_pid.load(Relaxed) == pid {
        own.voucher.store(0, Release);
    }
}
