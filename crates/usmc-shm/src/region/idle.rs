//! Whether anybody uses a run whose owner has died: its segment's slots say so.

use super::units::Run;
use super::{Region, UNIT};
use crate::handshake::{self, SlotState, Use};
use crate::layout::{ACCEPTOR, CLIENT, Control, End, SegmentHeader, near_len};
use crate::segment::Segment;
use crate::sync::Ordering::Relaxed;

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
    let (header, near) = header_of(region, run)?;
    if header.id.load(Relaxed) != id {
        return None;
    }
    // SAFETY: the run's memory, which stays mapped.
    let map = unsafe { Segment::open(region.at(run.first), near, near) }.ok()?;
    let acceptor = map.slot(slot).ok()?.control.attached_peer.load(Relaxed) as u8;
    (acceptor != 0).then_some([run.owner.peer, acceptor])
}

/// Whether nobody uses a run whose owner has died. Offers of its are taken back, so that nobody comes to use it.
/// `has_lost_its_holders`: an end that a living peer holds is known to be nobody's any more.
pub fn is_idle(region: &Region, run: Run, has_lost_its_holders: impl Fn(&End, u8) -> bool) -> bool {
    let Some((header, _)) = header_of(region, run) else { return true };
    let owner = header.owner.load(Relaxed);
    let is_its = owner as u32 == u32::from(run.owner.process)
        && run.owner.is_incarnation((owner >> 32) as u32);
    if !is_its {
        // It died before it had made a segment.
        return true;
    }
    let Some(map) = segment_in(region, run) else { return true };
    (0..map.slots()).all(|index| {
        let Ok(slot) = map.slot(index) else { return true };
        let is_offered = withdraw(&slot.control);
        let acceptor = slot.control.attached_peer.load(Relaxed) as u8;
        let is_over = |end: &End, holder: u8| {
            end.refs.load(Relaxed) == 0
                || !region.peers().is_alive(holder)
                || has_lost_its_holders(end, holder)
        };
        is_over(&slot.end[CLIENT], run.owner.peer)
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

/// Takes a slot's offer back, if there is one. Whether no acceptor has the slot.
fn withdraw(control: &Control) -> bool {
    let usage = Use::from_bits(control.state.load(Relaxed) >> 8);
    is_offered(control) && handshake::withdraw(control, usage).is_ok()
}
