//! The entries of a board: a table of listeners and one of offers, in which both ends of a connection find each other. An ISM
//! directory has a board, and each region has one.
//!
//! An entry's owner is a number of the board's: of a process in a directory, of a peer and a process in a region
//! ([`crate::region::units::Member::owner`]). What an entry says is a hint where to look, and proves nothing.

use crate::sync::Ordering::{AcqRel, Acquire, Relaxed};
use crate::sync::{AtomicU32, AtomicU64};

/// Places that a listener may take from its hash on.
pub const LISTENER_PROBES: usize = 64;
/// Places of one bucket of the offer table. The first places of all buckets lie together, then the second ones, and so on:
/// offers are short-lived, so that the rest is hardly ever touched and takes no memory.
pub const OFFER_WAYS: usize = 16;
/// The owners of entries are below this.
pub const OWNERS: u32 = (1 << 24) - 1;

/// A listening address. `state` is 0 = free or the owner + 1.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Listener {
    /// Owner + 1; 0 free; [`LISTENER_CLAIMED`] while being written.
    pub state: AtomicU32,
    /// Host order.
    pub port: AtomicU32,
    /// Network namespace; in a region 0, as the numbers of other kernels mean nothing.
    pub netns: AtomicU64,
    /// Address, v4-mapped: the halves of a number in network order, the high one first.
    pub addr: [AtomicU64; 2],
    /// When it was last freed by its owner, CLOCK_REALTIME in nanoseconds; 0 = it was not.
    pub left_at: AtomicU64,
    /// The owner's effective user id when it registered.
    pub uid: AtomicU32,
}

/// A place that is being filled.
pub const LISTENER_CLAIMED: u32 = u32::MAX;

/// [`Offer::state`]: phase in bits 0-7, the owner in 8-31, use count in 32-63.
pub mod offer_phase {
    /// Nothing here.
    pub const FREE: u8 = 0;
    /// Its owner is writing it.
    pub const CLAIMED: u8 = 1;
    /// Waits for the acceptor.
    pub const OFFERED: u8 = 2;
    /// The acceptor does not know the segment.
    pub const WANTED: u8 = 3;
    /// The segment is in the acceptor's mailbox.
    pub const PUSHED: u8 = 4;
    /// From here on: a handshake by CLC messages. The client asks whether anybody holds the connection's other end.
    pub const OPEN: u8 = 5;
    /// The acceptor does.
    pub const HELD: u8 = 6;
    /// A Proposal is in the stream, or just about to be.
    pub const PROPOSED: u8 = 7;
    /// The acceptor's answer is.
    pub const ANSWERED: u8 = 8;
    /// The client's Confirm is.
    pub const CONFIRMED: u8 = 9;
    /// The sender of the last message, a Proposal or an answer, does not want one in return any more.
    pub const ABANDONED: u8 = 10;
    /// It came to nothing, and no message is in the stream.
    pub const OVER: u8 = 11;
}

/// One offer.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Offer {
    /// See [`offer_phase`]. 0 = never used, nor are the further places of this bucket.
    pub state: AtomicU64,
    /// The connection: network namespace, the client's address and the server's as their bytes stand, ports.
    pub tuple: [AtomicU64; 6],
    /// Segment identity.
    pub segment: AtomicU64,
    /// Slot.
    pub slot: AtomicU32,
    /// Use of the slot.
    pub usage: AtomicU32,
    /// Owner number of the acceptor that wants the segment, or that holds the connection's other end.
    pub wanted_by: AtomicU32,
    /// Owner number of the client. The owner in `state` is the end that has still to read a message, and changes.
    pub client: AtomicU32,
    /// Where in its direction's stream a CLC message stands, plus one: the client's Proposal, the answer, what the
    /// client says to that. 0 = none.
    pub message_at: [AtomicU64; 3],
}

// 32-bit and 64-bit processes share them.
#[cfg(not(any(loom, shuttle)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Listener>() == 64 && offset_of!(Listener, left_at) == 32);
    assert!(offset_of!(Listener, uid) == 40);
    assert!(size_of::<Offer>() == 128 && offset_of!(Offer, wanted_by) == 72);
    assert!(offset_of!(Offer, client) == 76 && offset_of!(Offer, message_at) == 80);
};

impl Offer {
    /// How it is.
    pub fn seen(&self) -> OfferState {
        // Acquire: pairs with the Release of each step; what its author wrote before is visible.
        self.state.load(Acquire).into()
    }

    /// One step further; false where somebody else was faster with another.
    pub fn step(&self, seen: OfferState, next: OfferState) -> bool {
        // AcqRel: a process that sees the step sees what was written before it.
        self.state.compare_exchange(seen.into(), next.into(), AcqRel, Relaxed).is_ok()
    }
}

/// An offer's state word, unpacked.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct OfferState {
    /// [`offer_phase`].
    pub phase: u8,
    /// Owner.
    pub owner: u32,
    /// Use count.
    pub use_count: u32,
}

impl From<u64> for OfferState {
    fn from(word: u64) -> OfferState {
        OfferState {
            phase: word as u8,
            owner: (word >> 8) as u32 & 0xff_ffff,
            use_count: (word >> 32) as u32,
        }
    }
}

impl From<OfferState> for u64 {
    fn from(s: OfferState) -> u64 {
        s.phase as u64 | ((s.owner & 0xff_ffff) as u64) << 8 | (s.use_count as u64) << 32
    }
}

/// Forgets what the processes have left that have died, as far as `is_dead` knows of an owner.
pub fn forget(listeners: &[Listener], offers: &[Offer], is_dead: impl Fn(u32) -> bool, now: u64) {
    for place in listeners {
        let state = place.state.load(Relaxed);
        if !matches!(state, 0 | LISTENER_CLAIMED) && is_dead(state - 1) {
            place.left_at.store(now, Relaxed);
            let _ = place.state.compare_exchange(state, 0, AcqRel, Relaxed);
        }
    }
    for way in offers.chunks(offers.len().div_ceil(OFFER_WAYS).max(1)) {
        let mut is_used = false;
        for offer in way {
            let seen = offer.seen();
            is_used |= seen != OfferState::default();
            if seen.phase != offer_phase::FREE && is_dead(seen.owner) {
                offer.step(seen, OfferState { phase: offer_phase::FREE, ..seen });
            }
        }
        if !is_used {
            return;
        }
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn what_the_dead_have_left_is_forgotten() {
        let listeners: [Listener; 4] = Default::default();
        let offers: [Offer; 2 * OFFER_WAYS] = Default::default();
        let owners = [0, 7, 8, 7];
        for (place, owner) in listeners.iter().zip(owners) {
            place.state.store(owner, Relaxed);
        }
        listeners[0].state.store(LISTENER_CLAIMED, Relaxed);
        // In the first two ways; whoever owned the free one is forgotten already.
        for (index, owner, phase) in [(0, 6, offer_phase::OPEN), (3, 6, offer_phase::FREE)] {
            let state = OfferState { phase, owner, use_count: 5 };
            offers[index].state.store(state.into(), Relaxed);
        }
        forget(&listeners, &offers, |owner| owner == 6, 99);
        let states = listeners.each_ref().map(|place| place.state.load(Relaxed));
        assert_eq!(states, [LISTENER_CLAIMED, 0, 8, 0]);
        assert_eq!(listeners.each_ref().map(|place| place.left_at.load(Relaxed)), [0, 99, 0, 99]);
        let now = offers[0].seen();
        assert_eq!((now.phase, now.use_count, offers[3].seen().owner), (0, 5, 6));
    }
}
