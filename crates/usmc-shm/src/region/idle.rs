//! Whether anybody uses a run: its segment's slots say so, also of those that have died without a word.

use super::units::Run;
use super::{Region, UNIT};
use crate::handshake::{self, SlotState, Use};
use crate::layout::{
    ACCEPTOR, CLIENT, Control, End, SLOT_ATTACHED, SLOT_CONFIRMED, SLOT_WITHDRAWN, SegmentHeader,
    near_len,
};
use crate::segment::Segment;
use crate::sync::Ordering::{Relaxed, Release};

/// What stands at the beginning of a run, if it can be the header of a segment in it, and the segment's bytes.
pub fn header_of(region: &Region, run: Run) -> Option<(&SegmentHeader, usize)> {
    // SAFETY: a run has at least the bytes of a header, which stay mapped; atomics accept any bits.
    let header = unsafe { &*region.at(run.first).cast::<SegmentHeader>() };
    let near = near_len(header.slots.load(Relaxed), header.ring_shift.load(Relaxed))?;
    (near <= run.count as usize * UNIT).then_some((header, near))
}

/// The run that has the segment of this identity, if one does.
pub fn run_of(region: &Region, id: u64) -> Option<Run> {
    // Bit 0 is 0, and 31 bits are the run's first unit.
    if id & 1 == 0 { region.words().run_at(id as u32 >> 1) } else { None }
}

/// The peers of both ends of the connection in this slot of a run, the client's first. `None` where the run has another segment by
/// now, or nobody has attached the slot.
pub fn peers_of(region: &Region, run: Run, id: u64, slot: u32) -> Option<[u8; 2]> {
    let (header, _) = header_of(region, run)?;
    if header.id.load(Relaxed) != id {
        return None;
    }
    let map = segment_in(region, run)?;
    let acceptor = map.slot(slot).ok()?.control.attached_peer.load(Relaxed) as u8;
    (acceptor != 0).then_some([run.owner.peer, acceptor])
}

/// The segment of a run's owner; `None` where it died before it had made one.
fn segment_of(region: &Region, run: Run) -> Option<(&SegmentHeader, Segment)> {
    let (header, _) = header_of(region, run)?;
    let owner = header.owner.load(Relaxed);
    let is_its = owner as u32 == u32::from(run.owner.process)
        && run.owner.is_incarnation((owner >> 32) as u32);
    if !is_its {
        return None;
    }
    segment_in(region, run).map(|map| (header, map))
}

/// Whether nobody uses a run whose owner has died. Offers of its are taken back, so that nobody comes to use it.
/// `has_lost_its_holders`: an end that a living peer holds, which [`super::peers::Peers::holder`] names, is known to be nobody's any
/// more.
pub fn is_idle(
    region: &Region,
    run: Run,
    has_lost_its_holders: impl Fn(&End, u32) -> bool,
) -> bool {
    let Some((_, map)) = segment_of(region, run) else { return true };
    let client = region.peers().holder(run.owner.peer);
    (0..map.slots()).all(|index| {
        let Ok(slot) = map.slot(index) else { return true };
        let is_offered = withdraw(&slot.control);
        let acceptor = slot.control.attached_peer.load(Relaxed);
        let is_over = |end: &End, holder: u32| {
            end.refs.load(Relaxed) == 0
                || !region.peers().holds(holder)
                || has_lost_its_holders(end, holder)
        };
        // Its maker died before it had the slot.
        let is_unnamed = slot.end[CLIENT].pid.load(Relaxed) == 0;
        (is_unnamed || is_over(&slot.end[CLIENT], client))
            && (is_offered || is_over(&slot.end[ACCEPTOR], acceptor))
    })
}

/// The segment in a run, if there is one.
pub fn segment_in(region: &Region, run: Run) -> Option<Segment> {
    let (_, near) = header_of(region, run).filter(|_| run.is_whole)?;
    // SAFETY: the run's memory, which stays mapped.
    unsafe { Segment::open(region.at(run.first), near, near) }.ok()
}

/// How many ends of connections in a run these peers hold.
pub fn ends_of(region: &Region, run: Run, is_meant: impl Fn(u8) -> bool) -> usize {
    let Some(map) = segment_in(region, run) else { return 0 };
    let ends = (0..map.slots()).filter_map(|index| map.slot(index).ok()).flat_map(|slot| {
        let acceptor = slot.control.attached_peer.load(Relaxed) as u8;
        // Both are counted from the offer on, and no acceptor may come.
        let has_come = !is_offered(&slot.control);
        [(CLIENT, run.owner.peer, true), (ACCEPTOR, acceptor, has_come)]
            .into_iter()
            .filter(|&(side, _, has_come)| has_come && slot.end[side].refs.load(Relaxed) != 0)
    });
    ends.filter(|&(_, holder, _)| is_meant(holder)).count()
}

fn is_offered(control: &Control) -> bool {
    let usage = Use::from_bits(control.state.load(Relaxed) >> 8);
    handshake::phase(control, usage) == SlotState::Offered
}

/// Lets go of the slots whose acceptors have died without doing so: the run's owner is another peer's and cannot know. `is_lost`: as for
/// [`is_idle`]. One process at a time may do so for the ends of one peer, as an end that was let go of may be somebody's again.
pub fn let_go(region: &Region, run: Run, is_lost: impl Fn(&End, u32) -> bool) {
    let Some((header, map)) = segment_of(region, run) else { return };
    let id = header.id.load(Relaxed);
    let lost = |index: &u32| {
        map.slot(*index).is_ok_and(|slot| {
            let phase = slot.control.state.load(Relaxed) & 0xff;
            let end = &slot.end[ACCEPTOR];
            matches!(phase, SLOT_ATTACHED | SLOT_CONFIRMED | SLOT_WITHDRAWN)
                && end.refs.load(Relaxed) != 0
                && is_lost(end, slot.control.attached_peer.load(Relaxed))
        })
    };
    let lost =
        (0..map.slots().min(u64::BITS)).filter(lost).fold(0, |all, index| all | 1u64 << index);
    // As long as one of them is not let go of the run stays. What was there before may have been another's bytes.
    if region.words().run_at(run.first) != Some(run) || header.id.load(Relaxed) != id {
        return;
    }
    for index in (0..map.slots().min(u64::BITS)).filter(|index| lost >> index & 1 != 0) {
        if let Ok(slot) = map.slot(index) {
            // Release: whoever finds it let go of comes after all that was done with it.
            slot.end[ACCEPTOR].refs.store(0, Release);
        }
    }
}

/// Takes a slot's offer back, if there is one. Whether no acceptor has the slot.
fn withdraw(control: &Control) -> bool {
    let usage = Use::from_bits(control.state.load(Relaxed) >> 8);
    is_offered(control) && handshake::withdraw(control, usage).is_ok()
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    extern crate std;

    use std::vec;

    use super::*;
    use crate::layout::WINDOW_SHIFT_MIN;
    use crate::region::len_for;
    use crate::region::peers::Identity;
    use crate::region::units::Member;

    #[repr(align(4096))]
    #[derive(Clone)]
    struct Page(#[expect(dead_code, reason = "memory for a region")] [u8; 4096]);

    #[test]
    fn a_run_whose_both_ends_have_died_is_given_back_by_both_peers() {
        let len = len_for(4);
        let mut pages = vec![Page([0; 4096]); len / 4096];
        // SAFETY: zero bytes of this test alone, which outlive the region.
        let region = unsafe { Region::format(pages.as_mut_ptr().cast(), len, [1, 2]) };
        let region = region.expect("room");
        let join = |host| {
            let identity = Identity { host: [host, 0], directory: [host, 0], station: 0 };
            region.peers().join(&identity, b"").expect("a place")
        };
        let (clients, servers) = (join(1), join(2));
        let owner = Member::new(clients, 7, 1).expect("a member");
        let near = near_len(1, WINDOW_SHIFT_MIN).expect("a segment");
        let run = region.claim(near, owner).expect("room");
        // SAFETY: zero bytes that are this test's.
        unsafe { Segment::create(region.at(run.first), 1, (WINDOW_SHIFT_MIN, 0), 9, 7 | 1 << 32) };
        let (_, map) = segment_of(&region, run).expect("a segment");
        let slot = map.slot(0).expect("a slot");
        slot.end.iter().for_each(|end| end.refs.store(1, Relaxed));
        let usage = handshake::offer(&slot.control).expect("a free slot");
        let holder = region.peers().holder(servers);
        assert_eq!(handshake::attach(&slot.control, usage, 1, holder), SlotState::Attached);
        slot.end[CLIENT].pid.store(1, Relaxed);
        let is_of = |peer| move |_: &End, holder: u32| holder as u8 == peer;
        let refs = || slot.end[ACCEPTOR].refs.load(Relaxed);
        // The clients know of their own end alone.
        assert!(!is_idle(&region, run, is_of(clients)));
        let_go(&region, run, is_of(clients));
        assert_eq!(refs(), 1);
        let_go(&region, run, is_of(servers));
        assert_eq!(refs(), 0);
        assert!(is_idle(&region, run, is_of(clients)) && !is_idle(&region, run, |_, _| false));
        // It died before it had the slot.
        slot.end[CLIENT].pid.store(0, Relaxed);
        assert!(is_idle(&region, run, |_, _| false));
    }
}
