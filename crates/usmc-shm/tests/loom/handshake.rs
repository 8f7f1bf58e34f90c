//! The handshake's word: steps race, and an acceptor that comes late meets the slot's next use.

use usmc_shm::handshake::{
    SlotState, Use, attach, confirm, decline, offer, phase, release, withdraw,
};

use crate::model::sync::Arc;
use crate::model::sync::atomic::AtomicU32;
use crate::model::sync::atomic::Ordering::Relaxed;
use crate::model::thread;
use crate::model::{Link, check};

/// The offer table, as weak as can be: the slot's word alone must order what is seen.
const NO_OFFER: u32 = u32::MAX;

fn words(link: &Link) -> [&AtomicU32; 2] {
    [&link.slot.dir[0].producer.cpu, &link.slot.end[0].flags]
}

#[test]
fn an_offer_is_attached_or_withdrawn_never_both() {
    check(None, || {
        let link = Link::new();
        let usage = offer(&link.slot.control).unwrap();
        let acceptor = thread::spawn({
            let link = link.clone();
            move || attach(&link.slot.control, usage, 7, 0)
        });
        let withdrawn = withdraw(&link.slot.control, usage);
        let attached = acceptor.join().unwrap();
        match withdrawn {
            Ok(()) => assert_eq!(attached, SlotState::Gone),
            Err(found) => assert_eq!((found, attached), (SlotState::Attached, SlotState::Attached)),
        }
    });
}

#[test]
fn each_step_sees_what_the_one_before_wrote() {
    check(None, || {
        let link = Link::new();
        let table = Arc::new(AtomicU32::new(NO_OFFER));
        let acceptor = thread::spawn({
            let (link, table) = (link.clone(), table.clone());
            move || {
                let bits = table.load(Relaxed);
                if bits == NO_OFFER {
                    return;
                }
                let usage = Use::from_bits(bits);
                if attach(&link.slot.control, usage, 7, 0) == SlotState::Attached {
                    assert_eq!(words(&link)[0].load(Relaxed), 1);
                    // Loom would not give the client a turn here by itself.
                    thread::yield_now();
                    if phase(&link.slot.control, usage) == SlotState::Confirmed {
                        assert_eq!(words(&link)[1].load(Relaxed), 2);
                    }
                }
            }
        });
        words(&link)[0].store(1, Relaxed);
        let usage = offer(&link.slot.control).unwrap();
        table.store(usage.to_bits(), Relaxed);
        if phase(&link.slot.control, usage) == SlotState::Attached {
            words(&link)[1].store(2, Relaxed);
            assert_eq!(confirm(&link.slot.control, usage), SlotState::Confirmed);
        }
        acceptor.join().unwrap();
    });
}

#[test]
fn nobody_confirms_what_nobody_attached() {
    check(None, || {
        let link = Link::new();
        let usage = offer(&link.slot.control).unwrap();
        let acceptor = thread::spawn({
            let link = link.clone();
            move || attach(&link.slot.control, usage, 7, 0)
        });
        let confirmed = confirm(&link.slot.control, usage);
        assert_eq!(acceptor.join().unwrap(), SlotState::Attached);
        assert!(matches!(confirmed, SlotState::Offered | SlotState::Confirmed));
        assert_eq!(confirm(&link.slot.control, usage), SlotState::Confirmed);
    });
}

#[test]
fn processes_that_share_an_end_may_both_take_its_step() {
    check(None, || {
        let link = Link::new();
        let table = Arc::new(AtomicU32::new(NO_OFFER));
        let attach_what_is_offered = {
            let (link, table) = (link.clone(), table.clone());
            move |process| {
                let bits = table.load(Relaxed);
                if bits != NO_OFFER {
                    let phase = attach(&link.slot.control, Use::from_bits(bits), process, 0);
                    assert_eq!(phase, SlotState::Attached);
                    assert_eq!(words(&link)[0].load(Relaxed), 1);
                }
            }
        };
        let parent = thread::spawn({
            let attach = attach_what_is_offered.clone();
            move || attach(7)
        });
        let child = thread::spawn(move || attach_what_is_offered(8));
        words(&link)[0].store(1, Relaxed);
        let usage = offer(&link.slot.control).unwrap();
        table.store(usage.to_bits(), Relaxed);
        parent.join().unwrap();
        child.join().unwrap();
    });
}

#[test]
fn a_late_acceptor_never_touches_the_next_use() {
    check(None, || {
        let link = Link::new();
        let old = offer(&link.slot.control).unwrap();
        let late = thread::spawn({
            let link = link.clone();
            move || attach(&link.slot.control, old, 7, 0)
        });
        if withdraw(&link.slot.control, old).is_ok() {
            release(&link.slot.control, old);
            let new = offer(&link.slot.control).unwrap();
            assert_ne!(old, new);
            assert_eq!(phase(&link.slot.control, new), SlotState::Offered);
            assert_eq!(phase(&link.slot.control, old), SlotState::Gone);
            assert_eq!(confirm(&link.slot.control, old), SlotState::Gone);
            release(&link.slot.control, old);
            assert_eq!(phase(&link.slot.control, new), SlotState::Offered);
            assert_eq!(late.join().unwrap(), SlotState::Gone);
            assert_eq!(phase(&link.slot.control, new), SlotState::Offered);
        } else {
            assert_eq!(late.join().unwrap(), SlotState::Attached);
        }
    });
}

#[test]
fn a_declined_slot_is_not_the_clients_to_release() {
    check(Some(1), || {
        let link = Link::new();
        let usage = offer(&link.slot.control).unwrap();
        let acceptor = thread::spawn({
            let link = link.clone();
            move || {
                attach(&link.slot.control, usage, 7, 0) == SlotState::Attached
                    && decline(&link.slot.control, usage) == SlotState::Gone
            }
        });
        let withdrawn = withdraw(&link.slot.control, usage);
        let declined = acceptor.join().unwrap();
        assert_eq!(withdrawn.is_err(), declined);
        assert_eq!(phase(&link.slot.control, usage), SlotState::Gone);
    });
}

#[test]
fn a_slot_in_use_is_not_offered_again() {
    check(Some(0), || {
        let link = Link::new();
        let usage = offer(&link.slot.control).unwrap();
        assert!(offer(&link.slot.control).is_err());
        release(&link.slot.control, usage);
        assert!(offer(&link.slot.control).is_ok());
    });
}
