//! The rooms of all processes. A room is one process', and goes some time after its last connection.
//!
//! ```text
//!   Used ──last connection over──▶ Idle ──IDLE──▶ Leaving ──no peer has a key──▶ (closed)
//!    ▲                              │
//!    └──────────── taken ───────────┘
//! ```

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use usmc_rdma::buffers::SlotBuffers;
use usmc_shm::agent::Place;
use usmc_shm::segment::Segment;

use crate::driver::Driver;
use crate::nic::Adapters;
use crate::rest::Rest;
use crate::room::{Room, SLOTS, Taken};
use crate::sys::Owner;

/// Slots of a process' first room; further ones have four times as many.
const FIRST: u32 = 4;
/// Rooms at most, of all processes.
const ROOMS: usize = 4096;
/// How long a room stays that no connection uses.
pub const IDLE: Duration = Duration::from_secs(5);

/// Names a room. Numbers are not used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct RoomId(u32);

impl RoomId {
    /// The first number of rooms in the set of what wakes.
    pub(crate) const FIRST: u64 = 1 << 62;

    fn number(self) -> u64 {
        RoomId::FIRST | u64::from(self.0)
    }

    fn of(number: u64) -> Option<RoomId> {
        u32::try_from(number ^ RoomId::FIRST).ok().map(RoomId)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// So many connections have a slot.
    Used(u32),
    /// None has, since then.
    Idle(Instant),
    /// Its RMBs are withdrawn where peers have keys.
    Leaving,
}

struct Entry {
    room: Room,
    owner: Owner,
    /// Readable once the process is gone; `None` where it is not known which one it is.
    process: Option<OwnedFd>,
    state: State,
}

/// All rooms.
pub(crate) struct Rooms {
    /// The rings of a slot, as [`usmc_shm::layout::rings_word`] has them.
    rings: u32,
    next: u32,
    all: HashMap<RoomId, Entry>,
    /// Those of processes that are known: only they may have several connections in one.
    of: HashMap<Owner, Vec<RoomId>>,
    /// How many each user has.
    users: HashMap<u32, usize>,
}

impl Rooms {
    /// None yet. `rings`: of a slot, as [`usmc_shm::layout::rings_word`] has them.
    pub(crate) fn new(rings: u32) -> Rooms {
        Rooms { rings, next: 0, all: HashMap::new(), of: HashMap::new(), users: HashMap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// A slot for a process' connection. `None`: there is no memory, or the user has too many rooms.
    pub(crate) fn take(
        &mut self,
        owner: Owner,
        adapters: &mut Adapters,
    ) -> Option<(RoomId, Segment, Taken)> {
        let known = self.of.get(&owner).cloned().unwrap_or_default();
        for id in &known {
            let Some(entry) = self.all.get_mut(id) else { continue };
            if entry.state == State::Leaving {
                continue;
            }
            entry.room.collect();
            // Another process may have the number by now.
            if entry.room.is_full() || entry.is_owner_gone() {
                continue;
            }
            if let Some(taken) = entry.take() {
                return Some((*id, entry.room.segment(), taken));
            }
        }
        let most = known.iter().filter_map(|id| self.all.get(id)).map(|e| e.room.segment().slots());
        let slots = most.max().map_or(FIRST, |slots| (slots * 4).min(SLOTS));
        let id = self.add(owner, slots, adapters)?;
        let entry = self.all.get_mut(&id)?;
        let taken = entry.take()?;
        Some((id, entry.room.segment(), taken))
    }

    fn add(&mut self, owner: Owner, slots: u32, adapters: &mut Adapters) -> Option<RoomId> {
        let has = self.users.get(&owner.uid).copied().unwrap_or(0);
        if !may_have_another(has, self.all.len()) {
            return None;
        }
        let id = RoomId(self.next);
        self.next = self.next.checked_add(1)?;
        let room = Room::new(id.0, slots, self.rings).ok()?;
        room.register(adapters)?;
        let pid = i32::try_from(owner.pid).ok().and_then(Pid::from_raw);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if process.is_some() {
            self.of.entry(owner).or_default().push(id);
        }
        *self.users.entry(owner.uid).or_default() += 1;
        let state = State::Idle(Instant::now());
        self.all.insert(id, Entry { room, owner, process, state });
        Some(id)
    }

    /// What the process gets of a room, and its identity.
    pub(crate) fn memfd(&self, id: RoomId) -> Option<(BorrowedFd<'_>, u64)> {
        self.all.get(&id).map(|entry| (entry.room.memfd(), entry.room.id()))
    }

    /// Another ear of the room, which has at most as many as slots: its number, and what the process gets.
    pub(crate) fn add_ear(&mut self, id: RoomId) -> Option<(u32, OwnedFd)> {
        let room = &mut self.all.get_mut(&id)?.room;
        room.ears.add(room.segment().slots())
    }

    /// The agent's ear of the room, which wakes as that number.
    ///
    /// # Errors
    /// There is none, and cannot be.
    pub(crate) fn own_ear(&mut self, id: RoomId, rest: &Rest) -> io::Result<BorrowedFd<'_>> {
        let entry = self.all.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
        entry.room.ears.own(rest, id.number())
    }

    /// Whether applications wake the agent by its ear of the room.
    pub(crate) fn has_own_ear(&self, id: RoomId) -> bool {
        self.all.get(&id).is_some_and(|entry| entry.room.ears.has_own())
    }

    /// The places of slots in the room of that number that rang by it.
    pub(crate) fn take_rang(&self, number: u64) -> impl Iterator<Item = Place> + '_ {
        let room = RoomId::of(number).and_then(|id| self.all.get(&id));
        room.into_iter().flat_map(|entry| entry.room.take_rang())
    }

    /// The places of slots in all rooms that rang.
    pub(crate) fn take_all_rang(&self) -> impl Iterator<Item = Place> + '_ {
        let rooms = self.all.values().filter(|entry| entry.room.ears.has_own());
        rooms.flat_map(|entry| entry.room.take_rang())
    }

    /// Rings an ear of the room. False where nobody hears it.
    pub(crate) fn ring(&self, id: RoomId, ear: u32) -> bool {
        self.all.get(&id).is_some_and(|entry| entry.room.ears.ring(ear))
    }

    /// Whether the process that the room is for is known to be gone. Others that it has forked may have connections there.
    pub(crate) fn is_owner_gone(&self, id: RoomId) -> bool {
        self.all.get(&id).is_some_and(Entry::is_owner_gone)
    }

    /// A connection is over. `is_let_go`: no process can have the slot any more.
    pub(crate) fn leave(&mut self, id: RoomId, slot: u32, is_let_go: bool) {
        let Some(entry) = self.all.get_mut(&id) else { return };
        match is_let_go {
            true => entry.room.give_back(slot),
            false => entry.room.linger(slot),
        }
        entry.state = match entry.state {
            State::Used(2..) => entry.used(-1),
            State::Used(_) => State::Idle(Instant::now()),
            other => other,
        };
    }

    /// Takes slots back, and lets rooms go. `true`: some are idle, or wait for a process, so that this has to be called again.
    pub(crate) fn tick(&mut self, now: Instant, driver: &mut Driver<SlotBuffers>) -> bool {
        let (mut gone, mut waits) = (Vec::new(), false);
        for (id, entry) in &mut self.all {
            entry.room.collect();
            match entry.state {
                State::Idle(since) if now.duration_since(since) >= IDLE => {
                    entry.state = State::Leaving;
                }
                _ => {}
            }
            if entry.state == State::Leaving && entry.is_withdrawn(driver) {
                gone.push(*id);
            }
            waits |= !matches!(entry.state, State::Used(_)) || entry.room.has_lingering();
        }
        for id in gone {
            if let Some(entry) = self.all.remove(&id) {
                self.users.entry(entry.owner.uid).and_modify(|count| *count -= 1);
                if let Some(of) = self.of.get_mut(&entry.owner) {
                    of.retain(|known| *known != id);
                    if of.is_empty() {
                        self.of.remove(&entry.owner);
                    }
                }
                // SAFETY: no connection has a slot there in this state; no group holds one of its RMBs; and copies of the segment, and pairs of its rings, are with
                // connections only.
                unsafe { entry.room.close(&mut driver.adapters) };
            }
        }
        waits
    }
}

/// Whether a user of that many rooms gets another one, among so many of all: it has no more than are left to others.
fn may_have_another(has: usize, all: usize) -> bool {
    has < ROOMS.saturating_sub(all)
}

impl Entry {
    fn is_owner_gone(&self) -> bool {
        let Some(process) = &self.process else { return false };
        let mut all = [PollFd::new(process, PollFlags::IN)];
        poll(&mut all, Some(&Timespec::default())) == Ok(1)
    }

    fn take(&mut self) -> Option<Taken> {
        let taken = self.room.take()?;
        self.state = self.used(1);
        Some(taken)
    }

    /// The state with so many connections more.
    fn used(&self, more: i32) -> State {
        let before = if let State::Used(count) = self.state { count } else { 0 };
        State::Used(before.saturating_add_signed(more))
    }

    /// Whether no peer has a key for any of its RMBs. They are asked for where one has.
    fn is_withdrawn(&self, driver: &mut Driver<SlotBuffers>) -> bool {
        let mut is_held = false;
        for rmb in self.room.rmbs() {
            if driver.engine.holder(rmb).is_some() {
                is_held = true;
                driver.withdraw(rmb);
            }
        }
        !is_held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_has_all_rooms() {
        let most = |all| (0..).find(|has| !may_have_another(*has, all + has)).expect("a limit");
        let first = most(0);
        let second = most(first);
        assert_eq!((first, second, most(first + second)), (ROOMS / 2, ROOMS / 4, ROOMS / 8));
        assert!(!may_have_another(0, ROOMS));
    }
}
