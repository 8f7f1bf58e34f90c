//! The offer table: 1024 buckets of 16, keyed by the connection's name.

use usmc_shm::sync::Ordering::{Relaxed, Release};

use super::layout::offer_phase::{
    ABANDONED, CLAIMED, CONFIRMED, FREE, HELD, OFFERED, OPEN, PROPOSED, PUSHED, WANTED,
};
use super::layout::{DeviceFile, OFFER_BUCKETS, OFFER_WAYS, Offer, OfferState};
use super::{ism::Ism, processes};
use crate::host::{DmbRef, FoundOffer, OfferId, PeerProcess};
use crate::os::reason::Reason;
use crate::record::tuple::{self, Tuple};

/// The places where an offer of this name may be.
fn places(words: &[u64; 6]) -> impl Iterator<Item = usize> + use<> {
    let bucket = tuple::hash(words) as usize % OFFER_BUCKETS;
    (0..OFFER_WAYS).map(move |way| way * OFFER_BUCKETS + bucket)
}

/// Those that were ever used, with their states.
pub(super) fn used<'a>(
    file: &'a DeviceFile,
    words: &[u64; 6],
) -> impl Iterator<Item = (usize, &'a Offer, OfferState)> + use<'a> {
    let look = |index: usize| (index, &file.offers[index], file.offers[index].seen());
    places(words).map(look).take_while(|(.., seen)| *seen != OfferState::default())
}

pub(super) fn is_for(offer: &Offer, words: &[u64; 6]) -> bool {
    // The ports differ most: compare from the end.
    offer.tuple.iter().zip(words).rev().all(|(have, want)| have.load(Relaxed) == *want)
}

/// Fills a place of the bucket, in this phase; `fill` writes what is not common to all.
///
/// # Errors
/// As [`offer`].
pub(super) fn leave(
    dev: &Ism,
    words: [u64; 6],
    phase: u8,
    fill: impl Fn(&Offer),
) -> Result<OfferId, Reason> {
    let file = dev.file()?;
    let me = processes::index(dev)?;
    for (_, offer, seen) in used(file, &words) {
        if (OFFERED..=HELD).contains(&seen.phase) && is_for(offer, &words) {
            offer.step(seen, OfferState { phase: FREE, ..seen });
        }
    }
    for index in places(&words) {
        let offer = &file.offers[index];
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
        return Ok(OfferId { index: index as u32, use_count });
    }
    Err(Reason::OffersFull)
}

/// The offer and its state, if it is still the same use.
pub(super) fn get(dev: &Ism, id: OfferId) -> Option<(&'static Offer, OfferState)> {
    let offer = dev.file().ok()?.offers.get(id.index as usize)?;
    Some((offer, offer.seen())).filter(|(_, seen)| seen.use_count == id.use_count)
}

impl Ism {
    /// Leaves an offer for the acceptor of `tuple`.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    pub fn offer(&self, tuple: &Tuple, dmb: DmbRef) -> Result<OfferId, Reason> {
        leave(self, tuple.words(), OFFERED, |offer| {
            offer.segment.store(dmb.segment, Relaxed);
            offer.slot.store(dmb.slot, Relaxed);
            offer.usage.store(dmb.usage, Relaxed);
        })
    }

    /// Takes an offer back or clears an answered one.
    pub fn clear_offer(&self, id: OfferId) {
        while let Some((offer, seen)) = get(self, id) {
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
        let (offer, seen) = get(self, id)?;
        (seen.phase == WANTED).then(|| PeerProcess(offer.wanted_by.load(Relaxed)))
    }

    /// The offer left for this connection.
    pub fn find_offer(&self, words: &[u64; 6]) -> Option<FoundOffer> {
        let file = self.file().ok()?;
        for (index, offer, seen) in used(file, words) {
            if !(OFFERED..OPEN).contains(&seen.phase) || !is_for(offer, words) {
                continue;
            }
            let dmb = DmbRef {
                segment: offer.segment.load(Relaxed),
                slot: offer.slot.load(Relaxed),
                usage: offer.usage.load(Relaxed),
            };
            // Re-used while we read it: not ours.
            if offer.seen().use_count == seen.use_count {
                let id = OfferId { index: index as u32, use_count: seen.use_count };
                return Some(FoundOffer { id, dmb });
            }
        }
        None
    }
}

/// The segment is on its way.
pub fn mark_pushed(dev: &Ism, id: OfferId) {
    if let Some((offer, seen)) = get(dev, id)
        && seen.phase == WANTED
    {
        offer.step(seen, OfferState { phase: PUSHED, ..seen });
    }
}

/// Asks for the segment. Says whether it was handed over already: to another process, or to this one, which has not kept it.
pub fn want(dev: &Ism, id: OfferId, me: u32) -> bool {
    let Some((offer, seen)) = get(dev, id) else { return false };
    if matches!(seen.phase, OFFERED | PUSHED) {
        offer.wanted_by.store(me, Relaxed);
        offer.step(seen, OfferState { phase: WANTED, ..seen });
    }
    seen.phase == PUSHED
}

/// Frees all offers of a process that is gone.
pub fn forget_owner(file: &DeviceFile, index: u32) {
    for way in file.offers.chunks(OFFER_BUCKETS) {
        let mut is_used = false;
        for offer in way {
            let seen = offer.seen();
            is_used |= seen != OfferState::default();
            if seen.phase != FREE && seen.owner == index {
                offer.step(seen, OfferState { phase: FREE, ..seen });
            }
        }
        if !is_used {
            return;
        }
    }
}
