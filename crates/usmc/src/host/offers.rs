//! The offer table: 1024 buckets of 16, keyed by the connection's name.

use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::layout::offer_phase::{ABANDONED, HELD};
use super::layout::offer_phase::{
    CLAIMED, CONFIRMED, FREE, OFFERED, OPEN, PROPOSED, PUSHED, WANTED,
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
) -> impl Iterator<Item = (usize, &'a Offer, u64)> + use<'a> {
    // Acquire: pairs with the Release in `leave`.
    let look = |index: usize| (index, &file.offers[index], file.offers[index].state.load(Acquire));
    places(words).map(look).take_while(|(_, _, state)| *state != 0)
}

pub(super) fn is_for(offer: &Offer, words: &[u64; 6]) -> bool {
    // The ports differ most: compare from the end.
    offer.tuple.iter().zip(words).rev().all(|(have, want)| have.load(Relaxed) == *want)
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
    for (_, offer, state) in used(file, &words) {
        let seen = OfferState::from(state).phase;
        if (OFFERED..=HELD).contains(&seen) && is_for(offer, &words) {
            let free = OfferState { phase: FREE, ..OfferState::from(state) };
            let _ = offer.state.compare_exchange(state, free.into(), AcqRel, Relaxed);
        }
    }
    for index in places(&words) {
        let offer = &file.offers[index];
        let old = offer.state.load(Acquire);
        let seen = OfferState::from(old);
        if seen.phase != FREE {
            continue;
        }
        let use_count = seen.use_count.wrapping_add(1);
        let claimed = OfferState { phase: CLAIMED, owner: me, use_count };
        if offer.state.compare_exchange(old, claimed.into(), AcqRel, Relaxed).is_err() {
            continue;
        }
        for (place, word) in offer.tuple.iter().zip(words) {
            place.store(word, Relaxed);
        }
        fill(offer);
        // Release: pairs with the Acquire in `used`.
        offer.state.store(OfferState { phase, ..claimed }.into(), Release);
        return Ok(OfferId { index: index as u32, use_count });
    }
    Err(Reason::OffersFull)
}

/// The offer and its state word, if it is still the same use.
pub(super) fn get(dev: &Ism, id: OfferId) -> Option<(&'static Offer, u64)> {
    let offer = dev.file().ok()?.offers.get(id.index as usize)?;
    let state = offer.state.load(Acquire);
    (OfferState::from(state).use_count == id.use_count).then_some((offer, state))
}

impl Ism {
    /// Takes an offer back or clears an answered one.
    pub fn clear_offer(&self, id: OfferId) {
        while let Some((offer, state)) = get(self, id) {
            let seen = OfferState::from(state);
            let phase = match seen.phase {
                PROPOSED => ABANDONED,
                CONFIRMED | ABANDONED => return,
                _ => FREE,
            };
            let free = OfferState { phase, ..seen };
            if offer.state.compare_exchange(state, free.into(), AcqRel, Relaxed).is_ok() {
                return;
            }
        }
    }

    /// The process that asked for the offered segment, if one did and no process has pushed it yet.
    pub fn wanted_by(&self, id: OfferId) -> Option<PeerProcess> {
        let (offer, state) = get(self, id)?;
        (OfferState::from(state).phase == WANTED)
            .then(|| PeerProcess(offer.wanted_by.load(Relaxed)))
    }
}

/// The segment is on its way.
pub fn mark_pushed(dev: &Ism, id: OfferId) {
    if let Some((offer, state)) = get(dev, id)
        && OfferState::from(state).phase == WANTED
    {
        let pushed = OfferState { phase: PUSHED, ..OfferState::from(state) };
        let _ = offer.state.compare_exchange(state, pushed.into(), AcqRel, Relaxed);
    }
}

impl Ism {
    /// The offer left for this connection.
    pub fn find_offer(&self, words: &[u64; 6]) -> Option<FoundOffer> {
        let file = self.file().ok()?;
        for (index, offer, state) in used(file, words) {
            let seen = OfferState::from(state);
            if !(OFFERED..OPEN).contains(&seen.phase) || !is_for(offer, words) {
                continue;
            }
            let dmb = DmbRef {
                segment: offer.segment.load(Relaxed),
                slot: offer.slot.load(Relaxed),
                usage: offer.usage.load(Relaxed),
            };
            // Re-used while we read it: not ours.
            if OfferState::from(offer.state.load(Acquire)).use_count == seen.use_count {
                let id = OfferId { index: index as u32, use_count: seen.use_count };
                return Some(FoundOffer { id, dmb });
            }
        }
        None
    }
}

/// Asks for the segment. Says whether it was handed over already: to another process, or to this one, which has not kept it.
pub fn want(dev: &Ism, id: OfferId, me: u32) -> bool {
    let Some((offer, state)) = get(dev, id) else { return false };
    let seen = OfferState::from(state);
    if matches!(seen.phase, OFFERED | PUSHED) {
        offer.wanted_by.store(me, Relaxed);
        let wanted = OfferState { phase: WANTED, ..seen };
        let _ = offer.state.compare_exchange(state, wanted.into(), AcqRel, Relaxed);
    }
    seen.phase == PUSHED
}

/// Frees all offers of a process that is gone.
pub fn forget_owner(file: &DeviceFile, index: u32) {
    for way in file.offers.chunks(OFFER_BUCKETS) {
        let mut is_used = false;
        for offer in way {
            let state = offer.state.load(Relaxed);
            is_used |= state != 0;
            let seen = OfferState::from(state);
            if seen.phase != FREE && seen.owner == index {
                let free = OfferState { phase: FREE, ..seen };
                let _ = offer.state.compare_exchange(state, free.into(), AcqRel, Relaxed);
            }
        }
        if !is_used {
            return;
        }
    }
}
