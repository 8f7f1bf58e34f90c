//! A connection's send buffer and RMB, as the engine sees them: the application's rings, which it shares with a stranger.

use std::cell::Cell;

use smc_proto::ids::BufferSize;
use usmc_shm::Broken;
use usmc_shm::back::Back;
use usmc_shm::layout::{CLIENT, window_word};
use usmc_shm::segment::{RingPair, Segment};
use usmc_shm::span::TxSpan;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::nic::Range;

/// Most contiguous parts of what is unsent: a ring that wraps, in a window that has grown meanwhile.
pub const PARTS: usize = 4;

/// Both buffers. Positions count bytes from the connection's beginning.
pub trait Buffers {
    /// Up to where the application has written.
    ///
    /// # Errors
    /// The application has spoilt its ring.
    fn written(&self) -> Result<u64, Broken>;

    /// Where `len` bytes from `at` on lie, which are written and not released.
    ///
    /// # Errors
    /// As above.
    fn source(&self, at: u64, len: u32) -> Result<[Range; PARTS], Broken>;

    /// All before is sent: the application may write over it. Whether somebody waits for that.
    fn release(&self, upto: u64) -> bool;

    /// Up to where the application has read.
    fn read(&self) -> u64;

    /// The peer has written up to there.
    fn arrived(&self, upto: u64);

    /// What arrives from now on is brought by the kernel: the application finds it there, behind what the ring holds. Its last byte so far is
    /// urgent, which no ring can say.
    fn leave(&self);

    /// The kernel has all before, of what it is to bring ([`Buffers::leave`]).
    fn taken(&self, upto: u64);
}

/// A slot of a segment, of which the application has one end and the engine the other.
pub struct SlotBuffers {
    pair: RingPair,
    /// The engine's end: [`CLIENT`] or [`usmc_shm::layout::ACCEPTOR`].
    end: usize,
    behind: Cell<Option<Behind>>,
}

/// What arrives goes on behind the ring.
#[derive(Clone, Copy, Debug)]
struct Behind {
    /// Where the ring ends.
    ring: u64,
    /// Up to where the kernel has it.
    taken: u64,
}

impl SlotBuffers {
    /// The slot, whose words have just been reset. The ring that the engine writes is one window for good: its positions are those of
    /// the RMB.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn new(segment: Segment, index: u32, end: usize) -> Result<SlotBuffers, Broken> {
        let pair = segment.pair(index)?;
        let shift = segment.ring_shifts()[end & 1];
        pair.ring(end).dir().producer.window.store(window_word(0, shift), Relaxed);
        Ok(SlotBuffers { pair, end, behind: Cell::new(None) })
    }

    /// The RMB: its address, and its size.
    pub fn rmb(&self) -> (u64, BufferSize) {
        let memory = self.pair.memory();
        let bytes = 1_u32 << memory.shifts[self.end & 1];
        let below = if self.end == CLIENT { u64::from(bytes) } else { 0 };
        (memory.meet.addr() as u64 - below, BufferSize::at_least(bytes))
    }
}

impl Buffers for SlotBuffers {
    fn written(&self) -> Result<u64, Broken> {
        let data = self.pair.ring(1 - self.end).data()?;
        Ok(data.cons + data.len as u64)
    }

    fn source(&self, at: u64, len: u32) -> Result<[Range; PARTS], Broken> {
        let ring = self.pair.ring(1 - self.end);
        let data = ring.data()?;
        let (mut at, mut left) = (at, len as usize);
        // The application can write both cursors: whatever they say, the parts lie in the ring.
        let skipped = at.wrapping_sub(data.cons);
        if skipped > data.len as u64 || data.len - (skipped as usize) < left {
            return Err(Broken);
        }
        let mut parts = [Range::default(); PARTS];
        for part in &mut parts {
            let (memory, n) = ring.contiguous(at, data.place, left);
            *part = Range { addr: memory.addr() as u64, len: n as u32 };
            (at, left) = (at + n as u64, left - n);
            if left == 0 {
                return Ok(parts);
            }
        }
        Err(Broken)
    }

    fn release(&self, upto: u64) -> bool {
        let ring = self.pair.ring(1 - self.end);
        ring.consume(upto);
        // Bytes that go by the kernel wait there for room in the ring.
        ring.has_tx_sleepers() || ring.dir().producer.flags(Relaxed).goes_back()
    }

    fn read(&self) -> u64 {
        let read = self.pair.ring(self.end).read();
        // What is behind the ring counts once the ring was read.
        self.behind.get().filter(|behind| read >= behind.ring).map_or(read, |behind| behind.taken)
    }

    fn arrived(&self, upto: u64) {
        if self.behind.get().is_none() {
            self.pair.ring(self.end).publish(upto);
        }
    }

    fn leave(&self) {
        let (slot, ring) = (self.pair.slot(), self.pair.ring(self.end));
        let own = &slot.dir[self.end].producer;
        // Nothing but doorbells was ever sent there.
        let sent = || Some(u64::from(own.bells_sent.load(Relaxed)));
        let is_back = TxSpan::new(slot, self.end).try_back(&ring, sent) == Ok(Back::Done);
        // Otherwise the application has left the ring: all that it has not read is brought by the kernel.
        if is_back && own.flags(Acquire).goes_back() && self.behind.get().is_none() {
            let ring = own.prod.load(Relaxed);
            self.behind.set(Some(Behind { ring, taken: ring }));
        }
    }

    fn taken(&self, upto: u64) {
        self.behind.set(self.behind.get().map(|behind| Behind { taken: upto, ..behind }));
    }
}
