//! A segment that the processes of an application share with the agent: a sealed memfd, and an eventfd for each of the two.
//!
//! An application gets rooms of its own. It can write all of a room, and so spoil its own connections and nobody else's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use usmc_rdma::Memory;
use usmc_rdma::buffers::SlotBuffers;
use usmc_rdma::nic::{ArenaId, RmbId};
use usmc_shm::layout::{ACCEPTOR, CLIENT, SLOT_FREE, SLOT_OFFERED, segment_len};
use usmc_shm::news::SLOTS;
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::{Relaxed, Release};

use crate::nic::Adapters;

/// Who owns a segment that an agent has made: no process of the ISM directory.
const OWNER: u64 = 0;

/// The segment, as the agent has it.
pub struct Room {
    number: u32,
    segment: Segment,
    /// A bit for each slot.
    free: u64,
    memfd: OwnedFd,
    to_agent: OwnedFd,
    to_application: OwnedFd,
}

impl Room {
    /// `slots` slots, at most 64, with rings of `1 << shift` bytes. What it needs of memory it takes as it is used.
    ///
    /// # Errors
    /// memfd_create(2), ftruncate(2), mmap(2), eventfd(2); `EINVAL` outside the limits.
    pub fn new(number: u32, slots: u32, shift: u32) -> io::Result<Room> {
        let len = segment_len(slots, shift, 0).filter(|_| slots <= SLOTS).ok_or(Errno::INVAL)?;
        let memfd = memfd_create("usmc-agent", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memfd, len as u64)?;
        // Nobody takes bytes away under the agent's feet.
        fcntl_add_seals(&memfd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (to_agent, to_application) = (bell()?, bell()?);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of the whole file, at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &memfd, 0) }?;
        let base = base.cast::<u8>();
        // SAFETY: zeroed, page-aligned memory of a segment's bytes that is never unmapped, and of which nobody knows yet.
        let segment =
            unsafe { Segment::create(base, slots, (shift, 0), u64::from(number) + 1, OWNER) };
        Ok(Room {
            number,
            segment,
            free: u64::MAX >> (SLOTS - slots),
            memfd,
            to_agent,
            to_application,
        })
    }

    /// What the application gets: the segment, what wakes the agent, and what wakes the application.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.memfd.as_fd(), self.to_agent.as_fd(), self.to_application.as_fd()]
    }

    /// The segment.
    pub fn segment(&self) -> Segment {
        self.segment
    }

    /// Whether a slot is free.
    pub fn has_room(&self) -> bool {
        self.free != 0
    }

    /// A free slot for a new connection, whose other end is the agent's: [`CLIENT`] where the application is the server. `None`: all are
    /// in use.
    pub fn take(&mut self, end: usize) -> Option<(u32, SlotBuffers, Memory)> {
        let slot = Some(self.free.trailing_zeros()).filter(|slot| *slot < SLOTS)?;
        let (buffers, memory) = self.prepare(slot, end)?;
        self.free &= !(1 << slot);
        Some((slot, buffers, memory))
    }

    fn prepare(&self, slot: u32, end: usize) -> Option<(SlotBuffers, Memory)> {
        for sender in [CLIENT, ACCEPTOR] {
            self.segment.ring(slot, sender).ok()?.reset();
        }
        let buffers = SlotBuffers::new(self.segment, slot, end).ok()?;
        let (_, size) = buffers.rmb().ok()?;
        // Release: the application that finds the slot offered finds it prepared.
        self.segment.slot(slot).ok()?.control.state.store(SLOT_OFFERED, Release);
        Some((buffers, Memory { rmb: self.rmb(slot, end), size, arena: self.arena() }))
    }

    /// The connection is over at both ends.
    pub(crate) fn give_back(&mut self, slot: u32) {
        if let Ok(known) = self.segment.slot(slot) {
            known.control.state.store(SLOT_FREE, Relaxed);
            self.free |= 1 << slot;
        }
    }

    fn arena(&self) -> ArenaId {
        ArenaId(self.number.into())
    }

    /// Of the two rings of a slot the one that the agent writes is the RMB.
    fn rmb(&self, slot: u32, end: usize) -> RmbId {
        RmbId(u64::from(self.number) << 32 | u64::from(slot) << 1 | end as u64)
    }

    /// Lets devices have the room's memory.
    pub fn register(&self, adapters: &mut Adapters) -> Option<()> {
        let (base, len) = (self.segment.base(), self.segment.len());
        // SAFETY: the mapping of the segment, which is never unmapped, and is used by rings only.
        unsafe { adapters.add_arena(self.arena(), base, len) };
        for slot in 0..self.segment.slots() {
            for end in [CLIENT, ACCEPTOR] {
                let (addr, size) = SlotBuffers::new(self.segment, slot, end).ok()?.rmb().ok()?;
                let start =
                    base.wrapping_add(usize::try_from(addr).ok()?.checked_sub(base.addr())?);
                // SAFETY: a ring of the segment; as above.
                unsafe { adapters.add_rmb(self.rmb(slot, end), start, size.bytes() as usize) };
            }
        }
        Some(())
    }

    /// Wakes the application's processes that wait for their eventfd.
    pub(crate) fn wake_application(&self) {
        // It is readable already where the counter is full.
        let _ = rustix::io::write(&self.to_application, &1_u64.to_ne_bytes());
    }

    /// The agent has been woken by it.
    pub(crate) fn has_rung(&self) {
        let _ = rustix::io::read(&self.to_agent, &mut [0; 8]);
    }
}
