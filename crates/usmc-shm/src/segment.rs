//! A mapping, and checked references into it.

use core::ptr::{self, NonNull};

use crate::Broken;
use crate::handshake::{self, Use};
use crate::layout::{
    ACCEPTOR, ARM_TCP, CLIENT, End, SEGMENT_MAGIC, SEGMENT_VERSION, SLOTS_OFFSET, SegmentHeader,
    Slot, data_offset, far_offset, near_len, ring_shifts, segment_len,
};
use crate::ring::{Memory, Ring};
use crate::sync::Ordering::Relaxed;

/// A mapped segment whose geometry has been checked once and is kept in private memory.
#[derive(Clone, Copy)]
pub struct Segment {
    base: *mut u8,
    slots: u32,
    /// As [`crate::layout::rings_word`] has them.
    rings: u32,
    /// 0 where the far parts are not mapped.
    far_shift: u32,
}

// SAFETY: the mapping is shared memory; everything reached through it is atomic or a raw copy.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Wraps a fresh mapping and writes its header. `rings`: [`crate::layout::rings_word`].
    ///
    /// # Safety
    /// `base` is a zeroed, page-aligned, writable mapping of `segment_len(slots, rings, far_shift)` bytes that
    /// outlives every use of the result and of pairs made of it, and nobody else has it yet.
    pub unsafe fn create(
        base: *mut u8,
        slots: u32,
        (rings, far_shift): (u32, u32),
        id: u64,
        owner: u64,
    ) -> Segment {
        let seg = Segment { base, slots, rings, far_shift };
        let header = seg.header();
        header.version.store(SEGMENT_VERSION, Relaxed);
        header.slots.store(slots, Relaxed);
        header.ring_shift.store(rings, Relaxed);
        header.far_shift.store(far_shift, Relaxed);
        header.id.store(id, Relaxed);
        header.owner.store(owner, Relaxed);
        header.magic.store(SEGMENT_MAGIC, Relaxed);
        seg
    }

    /// Checks a stranger's mapping of the first `len` bytes of `file`: of all, or of what comes before the far parts.
    ///
    /// # Errors
    /// [`Broken`] when the header does not describe exactly this mapping.
    ///
    /// # Safety
    /// `base` is a page-aligned, writable mapping of `len` bytes that cannot shrink (sealed) and outlives
    /// every use of the result and of pairs made of it.
    pub unsafe fn open(base: *mut u8, len: usize, file: usize) -> Result<Segment, Broken> {
        if len < SLOTS_OFFSET {
            return Err(Broken);
        }
        // SAFETY: the header fits in `len` and any bits are valid for atomics.
        let header = unsafe { &*base.cast::<SegmentHeader>() };
        if header.magic.load(Relaxed) != SEGMENT_MAGIC
            || header.version.load(Relaxed) != SEGMENT_VERSION
        {
            return Err(Broken);
        }
        let (slots, rings) = (header.slots.load(Relaxed), header.ring_shift.load(Relaxed));
        let far_shift = header.far_shift.load(Relaxed);
        if segment_len(slots, rings, far_shift) != Some(file) {
            return Err(Broken);
        }
        if len == file {
            return Ok(Segment { base, slots, rings, far_shift });
        }
        if near_len(slots, rings) != Some(len) {
            return Err(Broken);
        }
        Ok(Segment { base, slots, rings, far_shift: 0 })
    }

    /// Start of the mapping.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes of the mapping.
    pub fn len(&self) -> usize {
        segment_len(self.slots, self.rings, self.far_shift).unwrap_or(0)
    }

    /// A segment is never empty.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// log2 of the bytes of the ring that an end writes, the client's first.
    pub fn ring_shifts(&self) -> [u32; 2] {
        ring_shifts(self.rings)
    }

    /// log2 of the bytes of the larger ring, and of a far part; 0 = none is mapped.
    pub fn shifts(&self) -> (u32, u32) {
        let [client, acceptor] = self.ring_shifts();
        (client.max(acceptor), self.far_shift)
    }

    /// log2 of the bytes of one ring's far part; 0 = none is mapped.
    pub fn far_shift(&self) -> u32 {
        self.far_shift
    }

    /// The header.
    pub fn header(&self) -> &SegmentHeader {
        // SAFETY: page 0 of the mapping (constructor invariant); atomics accept any bits.
        unsafe { &*self.base.cast::<SegmentHeader>() }
    }

    /// Slot `index`.
    ///
    /// # Errors
    /// [`Broken`] when there is no such slot.
    pub fn slot(&self, index: u32) -> Result<&Slot, Broken> {
        if index >= self.slots {
            return Err(Broken);
        }
        let offset = SLOTS_OFFSET + index as usize * size_of::<Slot>();
        // SAFETY: index < slots, so the slot lies before `data_offset` of the mapping; SLOTS_OFFSET and
        // the slot's size are multiples of its alignment; atomics accept any bits.
        Ok(unsafe { &*self.base.add(offset).cast::<Slot>() })
    }

    /// The memory of both rings of slot `index`.
    ///
    /// # Errors
    /// [`Broken`] when there is no such slot.
    pub fn memory(&self, index: u32) -> Result<Memory, Broken> {
        if index >= self.slots {
            return Err(Broken);
        }
        let index = index as usize;
        let (shifts, far_shift) = (self.ring_shifts(), self.far_shift);
        let [client, acceptor] = shifts.map(|shift| 1 << shift);
        let before = index * (client + acceptor) + client;
        // SAFETY: index < slots, so the rings' bytes on both sides lie within `len` (near_len).
        let meet = unsafe { self.base.add(data_offset(self.slots) + before) };
        let far = match near_len(self.slots, self.rings) {
            Some(near) if far_shift > 0 => {
                // SAFETY: likewise, 2 << far_shift bytes from there on lie within `len` (segment_len).
                unsafe { self.base.add(far_offset(near) + (index << (far_shift + 1))) }
            }
            _ => ptr::null_mut(),
        };
        Ok(Memory { meet: meet.cast(), shifts, far: far.cast(), far_shift })
    }

    /// The ring of slot `index` that end `sender` writes.
    ///
    /// # Errors
    /// [`Broken`] when there is no such slot.
    pub fn ring(&self, index: u32, sender: usize) -> Result<Ring<'_>, Broken> {
        let (slot, memory) = (self.slot(index)?, self.memory(index)?);
        // SAFETY: as in `memory`; the mapping outlives the result (constructor invariant).
        Ok(unsafe { Ring::new(slot, sender, memory) })
    }

    /// Slot `index` with its rings, for somebody that uses them again and again.
    ///
    /// # Errors
    /// [`Broken`] when there is no such slot.
    pub fn pair(&self, index: u32) -> Result<RingPair, Broken> {
        Ok(RingPair { slot: NonNull::from(self.slot(index)?), memory: self.memory(index)? })
    }

    /// Resets a slot's words for its next connection and opens it for an acceptor. It is of the caller's, and its last use is over at both
    /// ends.
    ///
    /// # Errors
    /// [`Broken`] when there is no such slot.
    pub fn prepare(&self, index: u32) -> Result<Use, Broken> {
        let slot = self.slot(index)?;
        for side in [CLIENT, ACCEPTOR] {
            let ring = self.ring(index, side)?;
            ring.reset();
            // Sleepers of the time before the ring are asleep on the TCP socket.
            ring.arm_rx(ARM_TCP);
            reset_end(&slot.end[side]);
        }
        // Its last use is over whatever the word says.
        let last = slot.control.state.load(Relaxed) >> 8;
        handshake::release(&slot.control, Use::from_bits(last));
        slot.control.attached_peer.store(0, Relaxed);
        slot.control.tokens.iter().for_each(|token| token.store(0, Relaxed));
        handshake::offer(&slot.control)
    }
}

/// A slot and its rings, of which [`Segment::slot`] and [`Segment::ring`] compute each time where they are.
#[derive(Clone, Copy)]
pub struct RingPair {
    slot: NonNull<Slot>,
    memory: Memory,
}

// SAFETY: as of the segment: shared memory, reached through atomics and raw copies.
unsafe impl Send for RingPair {}
// SAFETY: as above.
unsafe impl Sync for RingPair {}

impl RingPair {
    /// The slot.
    #[inline(always)]
    pub fn slot(&self) -> &Slot {
        // SAFETY: a reference that `Segment::slot` has made; the mapping outlives every use (constructor invariant of the segment).
        unsafe { self.slot.as_ref() }
    }

    /// Where both rings are.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The ring that end `sender` writes.
    #[inline(always)]
    pub fn ring(&self, sender: usize) -> Ring<'_> {
        // SAFETY: `Segment::pair` has made both for one slot; the mapping outlives every use.
        unsafe { Ring::new(self.slot(), sender, self.memory) }
    }
}

fn reset_end(end: &End) {
    let counts = [&end.tcp_sends, &end.rx_sleepers, &end.tx_sleepers, &end.blocked_sends];
    let others = [&end.bells_drained, &end.bells_for, &end.flags, &end.rcvlowat, &end.passed_on];
    for cell in
        counts.into_iter().chain(others).chain([&end.leaving, &end.ears]).chain(&end.members)
    {
        cell.store(0, Relaxed);
    }
    // Until a process has the slot: of what is named by nobody a sweeper knows that its maker died before.
    [&end.pid, &end.pids].iter().for_each(|cell| cell.store(0, Relaxed));
    for cell in [&end.tx_lock, &end.rx_lock, &end.back_lock, &end.tcp_left] {
        cell.store(0, Relaxed);
    }
    // Set for both: the acceptor holds its end from that moment on.
    end.refs.store(1, Relaxed);
}
