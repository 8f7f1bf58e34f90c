//! Handshakes by CLC on a board: does a process of this device hold the other end of this connection, and which end may
//! still put a message into its stream?
//!
//! A connection between network namespaces has the same pair of addresses on both sides unless there is NAT between
//! them, but no common cookie: [`ANY`] stands in its place. Only a connection to a loopback address has both ends in one namespace, of one
//! kernel, and others of its names are likely in others: it is asked for there. The state word decides every race between a message and a
//! change of mind, so that nobody has to wait for a message that does not come, nor takes one for the application's.
//! Every process that shares the device can write here: what is said is a hint where to look, never a proof.

use usmc_shm::board::{Offer, OfferState, offer_phase};
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use super::board::Board;
use super::offers::is_for;
use crate::host::{DmbRef, Message, OfferId, Stage};
use crate::os::procfs;
use crate::os::reason::Reason;
use crate::record::tuple::Tuple;

/// In the place of the network namespace.
const ANY: u64 = u64::MAX;

fn words_of(tuple: &Tuple) -> [u64; 6] {
    let netns = if tuple.server.is_loopback() { tuple.netns ^ procfs::boot() } else { ANY };
    Tuple { netns, ..*tuple }.words()
}

/// The stages, and how the table has them.
const STAGES: [(Stage, u8); 7] = [
    (Stage::Open, offer_phase::OPEN),
    (Stage::Held, offer_phase::HELD),
    (Stage::Proposed, offer_phase::PROPOSED),
    (Stage::Answered, offer_phase::ANSWERED),
    (Stage::Confirmed, offer_phase::CONFIRMED),
    (Stage::Abandoned, offer_phase::ABANDONED),
    (Stage::Over, offer_phase::OVER),
];

fn phase_of(wanted: Stage) -> u8 {
    let known = STAGES.iter().find(|(stage, _)| *stage == wanted);
    known.map_or(offer_phase::OVER, |(_, phase)| *phase)
}

impl Board<'_> {
    /// Asks for the holder of the accepting end of this connection, whatever the network namespace.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    pub fn ask_for_holder(&self, tuple: &Tuple) -> Result<OfferId, Reason> {
        let me = self.own()?;
        let words = words_of(tuple);
        for (_, offer, seen) in self.used(&words) {
            if (offer_phase::OPEN..=offer_phase::HELD).contains(&seen.phase)
                && is_for(offer, &words)
                && seen.owner != me
                && self.owners.lives(seen.owner)
            {
                // Which of the two does the acceptor hold?
                offer.step(seen, OfferState { phase: offer_phase::OVER, ..seen });
                return Err(Reason::NotHeld);
            }
        }
        self.leave(words, offer_phase::OPEN, |offer| {
            offer.client.store(me, Relaxed);
            offer.message_at.iter().for_each(|at| at.store(0, Relaxed));
        })
    }

    /// Notes that a Proposal is about to be sent that nobody was asked about, as the first bytes of a stream.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    pub fn propose_unasked(&self, tuple: &Tuple) -> Result<OfferId, Reason> {
        let me = self.own()?;
        self.leave(words_of(tuple), offer_phase::PROPOSED, |offer| {
            offer.client.store(me, Relaxed);
            offer.wanted_by.store(me, Relaxed);
            offer.message_at.iter().for_each(|at| at.store(0, Relaxed));
            offer.message_at[Message::Proposal as usize].store(1, Relaxed);
        })
    }

    /// Whether this connection's client asks. The caller holds the accepting end.
    pub fn find_question(&self, tuple: &Tuple) -> Option<OfferId> {
        let words = words_of(tuple);
        self.used(&words).find_map(|(index, offer, seen)| {
            let id = self.id(index, seen.use_count);
            (seen.phase == offer_phase::OPEN && is_for(offer, &words)).then_some(id)
        })
    }

    /// How far the handshake is.
    pub fn stage(&self, id: OfferId) -> Stage {
        let Some((_, seen)) = self.get(id) else { return Stage::Over };
        let known = STAGES.iter().find(|(_, phase)| *phase == seen.phase);
        known.map_or(Stage::Over, |(stage, _)| *stage)
    }

    /// Goes on with it; false where the other side was faster with another step.
    pub fn step(&self, id: OfferId, from: Stage, to: Stage) -> bool {
        let Ok(me) = self.own() else { return false };
        let Some((offer, seen)) = self.get(id) else { return false };
        if seen.phase != phase_of(from) {
            return false;
        }
        let owner = match to {
            Stage::Held => {
                offer.wanted_by.store(me, Relaxed);
                seen.owner
            }
            Stage::Proposed | Stage::Confirmed => offer.wanted_by.load(Relaxed),
            Stage::Answered => {
                offer.wanted_by.store(me, Relaxed);
                offer.client.load(Relaxed)
            }
            _ => seen.owner,
        };
        offer.step(seen, OfferState { phase: phase_of(to), owner, ..seen })
    }

    /// Nobody will need it any more.
    pub fn free(&self, id: OfferId) {
        while let Some((offer, seen)) = self.get(id) {
            if offer.step(seen, OfferState { phase: offer_phase::FREE, ..seen }) {
                return;
            }
        }
    }

    /// Says how many bytes of its direction are before a message that the next step lets into the stream.
    pub fn announce(&self, id: OfferId, message: Message, at: u64) {
        if let Some((offer, _)) = self.get(id) {
            offer.message_at[message as usize].store(at.saturating_add(1), Relaxed);
        }
    }

    /// The same, read.
    pub fn announced(&self, id: OfferId, message: Message) -> Option<u64> {
        let (offer, _) = self.get(id)?;
        offer.message_at[message as usize].load(Acquire).checked_sub(1)
    }

    /// Names the memory of a handshake that is about to be confirmed: of a device whose memory no mailbox hands over.
    pub fn name_memory(&self, id: OfferId, dmb: DmbRef) {
        if let Some((offer, _)) = self.get(id) {
            write_memory(offer, dmb);
        }
    }

    /// The same, read.
    pub fn memory(&self, id: OfferId) -> Option<DmbRef> {
        self.get(id).map(|(offer, _)| memory_of(offer))
    }
}

/// What an offer says of memory.
pub fn memory_of(offer: &Offer) -> DmbRef {
    DmbRef {
        segment: offer.segment.load(Relaxed),
        slot: offer.slot.load(Relaxed),
        usage: offer.usage.load(Relaxed),
    }
}

/// Says it.
pub fn write_memory(offer: &Offer, dmb: DmbRef) {
    offer.segment.store(dmb.segment, Relaxed);
    offer.slot.store(dmb.slot, Relaxed);
    offer.usage.store(dmb.usage, Relaxed);
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use super::*;
    use crate::record::tuple::Endpoint;

    #[test]
    fn loopback_addresses_are_of_one_namespace() {
        let named = |netns: u64, ip: [u8; 4]| {
            let end = |port| Endpoint { addr: Ipv4Addr::from(ip).to_ipv6_mapped().octets(), port };
            words_of(&Tuple { netns, client: end(40000), server: end(6379) })
        };
        assert_eq!(named(1, [10, 0, 0, 1]), named(2, [10, 0, 0, 1]));
        assert_eq!(named(1, [127, 0, 0, 1]), named(1, [127, 0, 0, 1]));
        assert_ne!(named(1, [127, 0, 0, 1]), named(2, [127, 0, 0, 1]));
        // A namespace of the same number on another machine.
        assert_ne!(named(1, [127, 0, 0, 1])[0], 1);
    }
}
