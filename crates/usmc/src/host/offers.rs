//! The offer table of a board: buckets of 16, keyed by the connection's name.

use usmc_shm::board::offer_phase::{
    ABANDONED, CLAIMED, CONFIRMED, FREE, HELD, OFFERED, OPEN, PROPOSED, PUSHED, WANTED,
};
use usmc_shm::board::{OFFER_WAYS, Offer, OfferState};
use usmc_shm::sync::Ordering::{Relaxed, Release};

use super::agreements::{memory_of, write_memory};
use super::board::Board;
use crate::host::{DmbRef, FoundOffer, OfferId, PeerProcess};
use crate::os::reason::Reason;
use crate::record::tuple::{self, Tuple};

pub(super) fn is_for(offer: &Offer, words: &[u64; 6]) -> bool {
    // The ports differ most: compare from the end.
    offer.tuple.iter().zip(words).rev().all(|(have, want)| have.load(Relaxed) == *want)
}

impl<'a> Board<'a> {
    /// The places where an offer of this name may be.
    fn places(&self, words: &[u64; 6]) -> impl Iterator<Item = (usize, &'a Offer)> + use<'a> {
        let (buckets, offers) = (self.offers.len() / OFFER_WAYS, self.offers);
        let bucket = if buckets == 0 { 0 } else { tuple::hash(words) as usize % buckets };
        let index = move |way| way * buckets + bucket;
        (0..OFFER_WAYS).map(index).filter_map(|index| Some((index, offers.get(index)?)))
    }

    /// Those that were ever used, with their states.
    pub(super) fn used(
        &self,
        words: &[u64; 6],
    ) -> impl Iterator<Item = (usize, &'a Offer, OfferState)> + use<'a> {
        let look = |(index, offer): (usize, &'a Offer)| (index, offer, offer.seen());
        self.places(words).map(look).take_while(|(.., seen)| *seen != OfferState::default())
    }

    /// The name of a place in this use.
    pub(super) fn id(&self, index: usize, use_count: u32) -> OfferId {
        OfferId { device: self.device, index: index as u32, use_count }
    }

    /// Fills a place of the bucket, in this phase; `fill` writes what is not common to all.
    ///
    /// # Errors
    /// As [`Board::offer`].
    pub(super) fn leave(
        &self,
        words: [u64; 6],
        phase: u8,
        fill: impl Fn(&Offer),
    ) -> Result<OfferId, Reason> {
        let me = self.own()?;
        for (_, offer, seen) in self.used(&words) {
            if (OFFERED..=HELD).contains(&seen.phase) && is_for(offer, &words) {
                offer.step(seen, OfferState { phase: FREE, ..seen });
            }
        }
        for (index, offer) in self.places(&words) {
            let seen = offer.seen();
            let use_count = seen.use_count.wrapping_add(1);
            let claimed = OfferState { phase: CLAIMED, owner: me, use_count };
            if seen.phase != FREE || !offer.step(seen, claimed) {
                continue;
            }
            for (place, word) in offer.tuple.iter().zip(words) {
                place.store(word, Relaxed);
            }
            fill(offer);
            // Release: pairs with the Acquire in `Offer::seen`.
            offer.state.store(OfferState { phase, ..claimed }.into(), Release);
            return Ok(self.id(index, use_count));
        }
        Err(Reason::OffersFull)
    }

    /// The offer and its state, if it is still the same use.
    pub(super) fn get(&self, id: OfferId) -> Option<(&'a Offer, OfferState)> {
        let offer = self.offers.get(id.index as usize)?;
        Some((offer, offer.seen())).filter(|(_, seen)| seen.use_count == id.use_count)
    }

    /// Leaves an offer for the acceptor of `tuple`.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    pub fn offer(&self, tuple: &Tuple, dmb: DmbRef) -> Result<OfferId, Reason> {
        self.leave(tuple.words(), OFFERED, |offer| write_memory(offer, dmb))
    }

    /// Takes an offer back or clears an answered one.
    pub fn clear_offer(&self, id: OfferId) {
        while let Some((offer, seen)) = self.get(id) {
            let phase = match seen.phase {
                PROPOSED => ABANDONED,
                CONFIRMED | ABANDONED => return,
                _ => FREE,
            };
            if offer.step(seen, OfferState { phase, ..seen }) {
                return;
            }
        }
    }

    /// The process that asked for the offered segment, if one did and no process has pushed it yet.
    pub fn wanted_by(&self, id: OfferId) -> Option<PeerProcess> {
        let (offer, seen) = self.get(id)?;
        (seen.phase == WANTED).then(|| PeerProcess(offer.wanted_by.load(Relaxed)))
    }

    /// The offer left for this connection.
    pub fn find_offer(&self, words: &[u64; 6]) -> Option<FoundOffer> {
        for (index, offer, seen) in self.used(words) {
            if !(OFFERED..OPEN).contains(&seen.phase) || !is_for(offer, words) {
                continue;
            }
            let dmb = memory_of(offer);
            // Re-used while we read it: not ours.
            if offer.seen().use_count == seen.use_count {
                return Some(FoundOffer { id: self.id(index, seen.use_count), dmb });
            }
        }
        None
    }

    /// The segment is on its way.
    pub(super) fn mark_pushed(&self, id: OfferId) {
        if let Some((offer, seen)) = self.get(id)
            && seen.phase == WANTED
        {
            offer.step(seen, OfferState { phase: PUSHED, ..seen });
        }
    }

    /// Asks for the segment. Says whether it was handed over already: to another process, or to this one, which has not kept it.
    pub(super) fn want(&self, id: OfferId, me: u32) -> bool {
        let Some((offer, seen)) = self.get(id) else { return false };
        if matches!(seen.phase, OFFERED | PUSHED) {
            offer.wanted_by.store(me, Relaxed);
            offer.step(seen, OfferState { phase: WANTED, ..seen });
        }
        seen.phase == PUSHED
    }
}
