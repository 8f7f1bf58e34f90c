//! A segment that a process shares with the agent: a sealed memfd.
//!
//! A process gets rooms of its own. It can write all of a room, and so spoil its own connections and nobody else's. Of the two ends of a slot
//! the agent is the client, and the process the acceptor.
//!
//! ```text
//!   Free ──take──▶ Used ──linger──▶ Lingers ──the process has let go──▶ Free
//!                    └─────────────give back────────────────────────────▲
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use usmc_rdma::Memory;
use usmc_rdma::buffers::SlotBuffers;
use usmc_rdma::nic::{ArenaId, RmbId};
use usmc_shm::agent::Place;
use usmc_shm::handshake::{self, Use};
use usmc_shm::layout::{ACCEPTOR, CLIENT, segment_len};
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::ears::Ears;
use crate::nic::Adapters;
use crate::sys;

/// Slots of a room at most: a bit each in a word.
pub const SLOTS: u32 = u64::BITS;

/// Of no process of the ISM directory.
const OWNER: u64 = 0;

/// The segment, as the agent has it.
pub(crate) struct Room {
    number: u32,
    id: u64,
    segment: Segment,
    /// A bit for each slot.
    free: u64,
    lingering: u64,
    memfd: OwnedFd,
    pub(crate) ears: Ears,
}

/// A slot for a connection.
pub(crate) struct Taken {
    pub(crate) slot: u32,
    pub(crate) usage: Use,
    pub(crate) buffers: SlotBuffers,
    pub(crate) memory: Memory,
}

impl Room {
    /// `slots` slots, at most [`SLOTS`], with rings as [`usmc_shm::layout::rings_word`] has them. What it needs of memory it takes as it is
    /// used.
    ///
    /// # Errors
    /// memfd_create(2), ftruncate(2), mmap(2); `EINVAL` outside the limits.
    pub(crate) fn new(number: u32, slots: u32, rings: u32) -> io::Result<Room> {
        let len = segment_len(slots, rings, 0).filter(|_| slots <= SLOTS).ok_or(Errno::INVAL)?;
        // Never 0, and another one for each start: processes know segments by it.
        let id = u64::from_ne_bytes(sys::random()?) | 1;
        let memfd = memfd_create("usmc-agent", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memfd, len as u64)?;
        // Nobody takes bytes away under the agent's feet.
        fcntl_add_seals(&memfd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of the whole file, at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &memfd, 0) }?;
        let base = base.cast::<u8>();
        // SAFETY: zeroed, page-aligned memory of a segment's bytes that is mapped until `close`, and of which nobody knows yet.
        let segment = unsafe { Segment::create(base, slots, (rings, 0), id, OWNER) };
        let free = u64::MAX >> (SLOTS - slots);
        Ok(Room { number, id, segment, free, lingering: 0, memfd, ears: Ears::default() })
    }

    /// What the process gets.
    pub(crate) fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// Its identity, which also the process knows it by.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The segment: until the room is closed.
    pub(crate) fn segment(&self) -> Segment {
        self.segment
    }

    /// Whether no slot is free.
    pub(crate) fn is_full(&self) -> bool {
        self.free == 0
    }

    /// A free slot for a new connection. `None`: all are in use.
    pub(crate) fn take(&mut self) -> Option<Taken> {
        let slot = Some(self.free.trailing_zeros()).filter(|slot| *slot < SLOTS)?;
        let usage = self.segment.prepare(slot).ok()?;
        let buffers = SlotBuffers::new(self.segment, slot, CLIENT).ok()?;
        let (_, size) = buffers.rmb();
        self.free &= !(1 << slot);
        let memory = Memory { rmb: self.rmb(slot), size, arena: self.arena() };
        Some(Taken { slot, usage, buffers, memory })
    }

    /// The connection is over, and the process never had the slot, or is gone.
    pub(crate) fn give_back(&mut self, slot: u32) {
        if let Ok(known) = self.segment.slot(slot) {
            let usage = Use::from_bits(known.control.state.load(Relaxed) >> 8);
            handshake::release(&known.control, usage);
            self.lingering &= !(1 << slot);
            self.free |= 1 << slot;
        }
    }

    /// The connection is over at the agent's side. The slot is free once the process has let go of it, too.
    pub(crate) fn linger(&mut self, slot: u32) {
        self.lingering |= 1 << slot;
    }

    /// Takes back what processes have let go of meanwhile.
    pub(crate) fn collect(&mut self) {
        let mut left = self.lingering;
        while left != 0 {
            let slot = left.trailing_zeros();
            left &= left - 1;
            // Acquire: all that the process has done with the slot comes before.
            let held = |slot| {
                self.segment.slot(slot).map(|slot| slot.end[ACCEPTOR].refs.load(Acquire) != 0)
            };
            if held(slot) == Ok(false) {
                self.give_back(slot);
            }
        }
    }

    /// Whether a slot waits for its process.
    pub(crate) fn has_lingering(&self) -> bool {
        self.lingering != 0
    }

    /// The places of slots whose process has rung by the agent's ear since the last call.
    pub(crate) fn take_rang(&self) -> impl Iterator<Item = Place> + '_ {
        // Acquire: what a process rang for is found by the look that follows.
        let rang = self.segment.header().rang.swap(0, Acquire);
        let slots = (0..self.segment.slots()).filter(move |slot| rang & 1 << slot != 0);
        slots.filter_map(|slot| {
            let state = self.segment.slot(slot).ok()?.control.state.load(Relaxed);
            Some(Place { segment: self.id, slot, usage: Use::from_bits(state >> 8).to_bits() })
        })
    }

    fn arena(&self) -> ArenaId {
        ArenaId(self.number.into())
    }

    /// Of the two rings of a slot the one that the agent writes is the RMB.
    fn rmb(&self, slot: u32) -> RmbId {
        RmbId(u64::from(self.number) << 32 | u64::from(slot))
    }

    /// All of them.
    pub(crate) fn rmbs(&self) -> impl Iterator<Item = RmbId> + '_ {
        (0..self.segment.slots()).map(|slot| self.rmb(slot))
    }

    /// Lets devices have the room's memory.
    pub(crate) fn register(&self, adapters: &mut Adapters) -> Option<()> {
        let (base, len) = (self.segment.base(), self.segment.len());
        // SAFETY: the mapping of the segment, which stays until `close`, and is used by rings only.
        unsafe { adapters.add_arena(self.arena(), base, len) };
        for slot in 0..self.segment.slots() {
            let (addr, size) = SlotBuffers::new(self.segment, slot, CLIENT).ok()?.rmb();
            let start = base.wrapping_add(usize::try_from(addr).ok()?.checked_sub(base.addr())?);
            // SAFETY: a ring of the segment; as above.
            unsafe { adapters.add_rmb(self.rmb(slot), start, size.bytes() as usize) };
        }
        Some(())
    }

    /// Takes it from the devices, and unmaps it.
    ///
    /// # Safety
    /// Neither a connection nor anything else has the segment any more, and no peer a key.
    pub(crate) unsafe fn close(mut self, adapters: &mut Adapters) {
        self.ears.end();
        self.rmbs().for_each(|rmb| adapters.remove_rmb(rmb));
        adapters.remove_arena(self.arena());
        // SAFETY: the mapping that `new` has made; the caller's contract. A failure leaves it mapped.
        let _ = unsafe { munmap(self.segment.base().cast(), self.segment.len()) };
    }
}
