//! The segments this process has mapped: its own, one chain per listener it connects to, and those of
//! clients it accepted.
//!
//! All changes happen under one lock; the data path never comes here. A segment stays mapped while a
//! record uses it, so the rings of a live connection cannot vanish.

use core::mem::offset_of;
use core::ptr;
use usmc_shm::Broken;
use usmc_shm::layout::{
    ACCEPTOR, CLIENT, SHARED, SegmentHeader, Slot, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN, data_offset,
};
use usmc_shm::ring::Ring;
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};
use usmc_shm::sync::{AtomicPtr, AtomicU32, AtomicU64};

use super::{Backing, Device, Index, LOOPBACK, Name, Shape, Size, room_ear};
use crate::host;
use crate::os::free_slots::FreeSlots;
use crate::os::process::{Held, Lock};
use crate::os::reason::Reason;
use crate::os::table::release_fd;
use crate::os::{foreign_fd, sys};
use crate::record::tuple::Tuple;

/// Segments one process can have mapped.
pub(super) const SEGMENTS: usize = 1024;
/// Bytes of address space that all of them may take: the program needs the rest.
pub const SPACE: usize = if cfg!(target_pointer_width = "32") { 512 << 20 } else { usize::MAX };
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Unused = 0,
    /// Made by us; slots are handed out from it.
    Own,
    /// Made by us, no slots are handed out any more (forked child, or too many lost slots).
    Closed,
    /// Made by a client of ours.
    Peer,
}

/// A table entry. Zero bytes are an unused entry.
struct Mapped {
    role: Role,
    device: Index,
    id: u64,
    memory: Backing,
    users: u32,
    owner: u64,
    listener: [u64; 4],
    slots: FreeSlots,
    /// Of a peer's segment that was delivered for one connection ([`crate::handshake::clc`]): which file it is. 0 = none such.
    delivered: u64,
    /// Its place in the table, plus one, where an agent was asked for an ear ([`super::room_ear`]); 0 = none was.
    asked: u32,
}

static LOCK: Lock = Lock::new();
static TABLE: AtomicPtr<Mapped> = AtomicPtr::new(ptr::null_mut());

/// The table, for the holder of the lock.
struct Table<'a> {
    entries: &'a mut [Mapped],
    _held: Held<'a>,
}

fn table() -> Option<Table<'static>> {
    let held = LOCK.enter()?;
    let base = sys::reserve(&TABLE, SEGMENTS)?;
    // SAFETY: SEGMENTS zeroed entries (role Unused is 0, the rest are integers and a null pointer), never
    // unmapped; the lock makes the reference unique.
    let entries = unsafe { core::slice::from_raw_parts_mut(base, SEGMENTS) };
    Some(Table { entries, _held: held })
}

/// Fork: nobody changes the table while it is copied.
pub fn hold() {
    LOCK.hold();
}

/// Fork is over in the parent.
pub fn unhold() {
    LOCK.unhold();
}

/// Fork, in the child: the parent's segments serve the inherited connections and nothing else.
pub fn after_fork() {
    LOCK.reset();
    if TABLE.load(Acquire).is_null() {
        return;
    }
    let Some(table) = table() else { return };
    for m in table.entries.iter_mut().filter(|m| m.role == Role::Own) {
        m.role = Role::Closed;
    }
}

impl Mapped {
    fn segment(&self) -> Result<Segment, Broken> {
        // SAFETY: mapped with `len` bytes by its device, of which no peer can take any away (in a region: no peer that keeps
        // to the rules), and unmapped only by `unmap`, after which the entry is Unused.
        unsafe { Segment::open(self.memory.base, self.memory.len, self.memory.whole) }
    }

    fn device(&self) -> &'static dyn Device {
        super::at(self.device)
    }

    /// A slot taken out of `slots`, with the memory of its smallest rings.
    fn own(&mut self, index: usize, slot: u32, map: Segment) -> Result<OwnSlot, Reason> {
        if !has_memory(self.device(), &map, slot) {
            self.slots.give(slot);
            return Err(Reason::NoMemory);
        }
        self.enter();
        let segment = InUse { index: index as u32, device: self.device, map };
        Ok(OwnSlot { segment, slot, id: self.id })
    }

    fn enter(&mut self) {
        self.users += 1;
        USERS[usize::from(self.device)].fetch_add(1, Relaxed);
    }

    fn leave(&mut self) {
        if self.users > 0 {
            self.users -= 1;
            USERS[usize::from(self.device)].fetch_sub(1, Relaxed);
        }
    }

    fn unmap(&mut self) {
        let mut is_idle = false;
        if let Some(index) = self.asked.checked_sub(1) {
            self.asked = 0;
            room_ear::forget(index);
        }
        if self.role == Role::Own
            && let Ok(map) = self.segment()
        {
            map.header().retired.store(1, Relaxed);
            let device = self.device();
            is_idle = (0..map.slots()).all(|slot| is_let_go(device, &map, slot));
        }
        // SAFETY: no record uses it (`users` is 0 at every caller).
        unsafe {
            match self.role {
                Role::Own | Role::Closed => self.device().free(&self.memory, is_idle),
                Role::Peer | Role::Unused => self.device().detach(&self.memory),
            }
        }
        self.role = Role::Unused;
    }
}

/// The agent whose room it is has answered so to the question for its ear, a descriptor of the library's own.
pub fn keep_ear(index: u32, id: u64, ear: Option<i32>) {
    let mut known = table();
    let entry = known.as_mut().and_then(|table| table.entries.get_mut(index as usize));
    match entry.filter(|m| m.id == id && m.users > 0).map(|m| (m.segment(), m)) {
        Some((Ok(map), m)) => {
            m.asked = index + 1;
            room_ear::keep(index, map.header(), ear);
        }
        _ => _ = ear.inspect(|ear| release_fd(*ear)),
    }
}

fn listener_words(tuple: &Tuple) -> [u64; 4] {
    let w = tuple.words();
    [w[0], w[3], w[4], tuple.server.port as u64]
}

/// A segment that was counted one more user of.
pub struct InUse {
    /// Its place in the table.
    pub index: u32,
    /// Whose memory it is.
    pub device: Index,
    /// The mapping.
    pub map: Segment,
}

/// A slot a client may offer.
pub struct OwnSlot {
    /// The segment.
    pub segment: InUse,
    /// Slot index.
    pub slot: u32,
    /// The segment's identity.
    pub id: u64,
}

/// Takes a slot of that device in the chain of `tuple`'s listener, making a new segment when the chain is full.
///
/// # Errors
/// No memory, no table entry, or no device identity.
pub fn take_slot(device: Index, tuple: &Tuple) -> Result<OwnSlot, Reason> {
    let identity = host::current().own_identity()?;
    let listener = listener_words(tuple);
    let mut table = table().ok_or(Reason::NoMemory)?;
    if !super::at(device).is_open() {
        return Err(Reason::NoDevice);
    }
    give_up_idle(&mut table, device);
    let mut last = 0;
    for index in 0..SEGMENTS {
        let m = &mut table.entries[index];
        if m.role != Role::Own || m.device != device || m.listener != listener {
            continue;
        }
        let Ok(map) = m.segment() else {
            m.role = Role::Closed;
            continue;
        };
        let device = m.device();
        let slot = m.slots.take().or_else(|| {
            m.slots.collect(|slot| is_let_go(device, &map, slot));
            m.slots.take()
        });
        if let Some(slot) = slot {
            return m.own(index, slot, map);
        }
        if m.slots.is_mostly_lost() && device.is_scarce() {
            // It comes back when somebody has found that they have died.
            last = last.max(map.slots() / 4);
        } else if m.slots.is_mostly_lost() {
            // Holders that died without a word: leave the segment to the processes that still use it.
            map.header().retired.store(1, Relaxed);
            m.role = Role::Closed;
            last = last.max(map.slots() / 4);
            if m.users == 0 {
                m.unmap();
            }
        } else {
            last = last.max(map.slots());
        }
    }
    let mut shape = super::at(device).shape(last);
    let index = loop {
        let size = shape.size().ok_or(Reason::NoMemory)?;
        let index = place(&mut table, size.near)?;
        match (
            create(&mut table.entries[index], device, (shape, size), listener, identity),
            shape.smaller(),
        ) {
            (Err(Reason::RegionFull), Some(smaller)) => shape = smaller,
            (made, _) => break made.map(|()| index)?,
        }
    };
    let m = &mut table.entries[index];
    let slot = m.slots.take().ok_or(Reason::NoMemory)?;
    let map = m.segment().map_err(|_| Reason::NoMemory)?;
    m.own(index, slot, map)
}

fn has_memory(device: &dyn Device, map: &Segment, index: u32) -> bool {
    let Ok(slot) = map.slot(index) else { return false };
    const LEN: usize = 1 << WINDOW_SHIFT_MIN;
    // The smallest windows lie on both sides of the place where the rings meet.
    let rings = |meet: *mut u8| device.take(meet.wrapping_sub(LEN), 2 * LEN);
    device.take(ptr::from_ref(slot).cast_mut().cast(), size_of::<Slot>())
        && map.ring(index, CLIENT).is_ok_and(|ring| rings(ring.meet().cast()))
}

/// An unused entry for `len` bytes, if need be by unmapping what nobody uses.
fn place(table: &mut Table<'_>, len: usize) -> Result<usize, Reason> {
    place_within(SPACE, table.entries, len)
}

fn place_within(space: usize, entries: &mut [Mapped], len: usize) -> Result<usize, Reason> {
    if space != usize::MAX {
        let mapped = |is_meant: fn(&Mapped) -> bool| {
            let meant = entries.iter().filter(|m| m.role != Role::Unused && is_meant(m));
            meant.map(|m| m.memory.len).sum::<usize>()
        };
        // What nobody uses may have come just now, for a record that is about to: it goes only where that helps.
        if len > space.saturating_sub(mapped(|m| m.users > 0)) {
            return Err(Reason::NoMemory);
        }
        let mut excess = (mapped(|_| true) + len).saturating_sub(space);
        for m in entries.iter_mut().filter(|m| m.role != Role::Unused && m.users == 0) {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(m.memory.len);
            m.unmap();
        }
    }
    if let Some(index) = entries.iter().position(|m| m.role == Role::Unused) {
        return Ok(index);
    }
    let index = entries.iter().position(|m| m.users == 0).ok_or(Reason::TableFull)?;
    entries[index].unmap();
    Ok(index)
}

fn create(
    m: &mut Mapped,
    device: Index,
    (Shape { slots, ring_shift: shift, far_shift }, size): (Shape, Size),
    listener: [u64; 4],
    identity: u64,
) -> Result<(), Reason> {
    let memory = super::at(device).allocate(size)?;
    if !memory.is_zero {
        // SAFETY: the memory of a new segment, which has at least its slots, and which nobody else uses.
        unsafe { memory.base.write_bytes(0, data_offset(slots)) };
    }
    let far_shift = if memory.whole == size.near { 0 } else { far_shift };
    let id = memory.name.id();
    // SAFETY: a fresh mapping of a segment's bytes, if need be without the far parts, that nobody else has. Header and slots are
    // zero.
    unsafe { Segment::create(memory.base, slots, (shift, far_shift), id, identity) };
    m.role = Role::Own;
    (m.device, m.id, m.memory) = (device, id, memory);
    m.users = 0;
    m.owner = identity;
    m.delivered = 0;
    m.listener = listener;
    m.slots.reset(slots);
    Ok(())
}

/// log2 of the bytes of the rings of segments that we make, and of their far parts; 0 = they have none.
pub fn shifts() -> (u32, u32) {
    let shift = crate::os::config::get().ring_shift;
    (shift, if WINDOW_SHIFT_MAX > shift { WINDOW_SHIFT_MAX } else { 0 })
}

/// Whether one end's processes are done with a slot.
fn is_let_go_by(end: usize, map: &Segment, slot: u32) -> bool {
    // Acquire: whatever they did with the slot happened before.
    map.slot(slot).is_ok_and(|s| s.end[end].refs.load(Acquire) == 0)
}

/// Whether nobody has the slot: neither the acceptor nor a process that forked with us.
fn is_let_go(device: &dyn Device, map: &Segment, slot: u32) -> bool {
    let is_gone =
        || map.slot(slot).is_ok_and(|s| device.is_gone(s.control.attached_peer.load(Relaxed)));
    is_let_go_by(CLIENT, map, slot) && (is_let_go_by(ACCEPTOR, map, slot) || is_gone())
}

/// A segment's identity, the same at both ends; 0 = none.
pub fn id_of(index: u32) -> u64 {
    table().and_then(|table| table.entries.get(index as usize).map(|m| m.id)).unwrap_or(0)
}

/// The fd of an own segment, to be pushed to an acceptor.
pub fn fd_of(index: u32) -> Option<i32> {
    let table = table()?;
    let m = table.entries.get(index as usize)?;
    match m.memory.name {
        Name::Fd(fd @ 0..) if matches!(m.role, Role::Own | Role::Closed) => Some(fd),
        _ => None,
    }
}

/// A record does not use its segment any more. `slot` was a client's, which may have been the last to hold it. `peer_ended`:
/// the peer's process seems to have ended; if it goes on after all, the segment comes again with its next connection.
pub fn let_go(index: u32, slot: Option<u32>, peer_ended: bool) {
    let Some(mut table) = table() else { return };
    let m = &mut table.entries[index as usize];
    m.leave();
    if m.role == Role::Own
        && let (Some(slot), Ok(map)) = (slot, m.segment())
    {
        if is_let_go_by(CLIENT, &map, slot) {
            give_back_pages(m.device(), &map, slot);
        }
        if is_let_go(m.device(), &map, slot) {
            m.slots.give(slot);
        } else {
            m.slots.lose(slot);
        }
    }
    let is_over = match m.role {
        Role::Closed => true,
        // Otherwise the memory of the last client that has ended would be ours until the next one comes.
        Role::Peer => {
            peer_ended || m.segment().is_ok_and(|map| map.header().retired.load(Relaxed) != 0)
        }
        Role::Own | Role::Unused => false,
    };
    if m.users == 0 && is_over {
        m.unmap();
    }
    let device = m.device;
    give_up_idle(&mut table, device);
}

/// Where memory is short, the segments go that this process has made and nobody uses any more. The acceptor mostly lets go of a slot
/// after the client, so that those are found at another call.
fn give_up_idle(table: &mut Table<'_>, index: Index) {
    let device = super::at(index);
    if !device.is_scarce() {
        return;
    }
    for m in table.entries.iter_mut() {
        let is_idle = |map: Segment| (0..map.slots()).all(|slot| is_let_go(device, &map, slot));
        if m.role == Role::Own
            && m.device == index
            && m.users == 0
            && m.segment().is_ok_and(is_idle)
        {
            m.unmap();
        }
    }
}

/// How many records use a device's segments.
static USERS: [AtomicU32; super::COUNT] = [const { AtomicU32::new(0) }; super::COUNT];

/// Whether a record of this process uses a segment of that device.
pub fn is_used(device: Index) -> bool {
    USERS[usize::from(device)].load(Relaxed) > 0
}

/// Shows the headers and slots of a device's segments, and calls `last` before another record can use one.
pub fn lose(device: Index, mut show: impl FnMut(*const u8, usize), last: impl FnOnce()) {
    let Some(table) = table() else { return };
    for m in table.entries.iter().filter(|m| m.role != Role::Unused && m.device == device) {
        if let Ok(map) = m.segment() {
            show(m.memory.base, data_offset(map.slots()).min(m.memory.len));
        }
    }
    last();
}

/// A ring that grew keeps no memory while its slot is idle.
fn give_back_pages(device: &dyn Device, map: &Segment, slot: u32) {
    for sender in [CLIENT, ACCEPTOR] {
        let Ok(ring) = map.ring(slot, sender) else { continue };
        // The acceptor may still be reading the last bytes.
        if let Ok((start, len)) = ring.memory()
            && len > 4 << WINDOW_SHIFT_MIN
            && ring.unread() == 0
        {
            // Both ends of a ring are in pages that it has in common with another.
            // SAFETY: whole pages of the ring, which is empty: nothing in them is needed.
            let _ = unsafe { device.give_back(start.add(SHARED).cast(), len - 2 * SHARED) };
        }
        if ring.has_far() && ring.unread() == 0 {
            give_back_far(device, &ring);
        }
    }
}

/// Gives back the memory of a ring's far part, if nothing is there. For its sender, or where there is none.
pub fn give_back_far(device: &dyn Device, ring: &Ring<'_>) {
    let Some((start, len)) = ring.leave_far() else { return };
    // SAFETY: pages of the far part alone, of which nothing is needed.
    if unsafe { device.give_back(start.cast(), len) } {
        ring.left_far();
    }
}

/// Finds a peer's segment by identity and counts one more user. Only one of our own user: of others the identity, which
/// everybody can read in the offer table, proves nothing.
pub fn use_peer(id: u64) -> Option<InUse> {
    use_where(|m| m.id == id && m.delivered == 0 && m.device == LOOPBACK)
}

/// Finds the segment that this very file is.
pub fn use_delivered(id: u64, inode: u64) -> Option<InUse> {
    use_where(|m| {
        let is_file = |fd| sys::fstat(fd).is_ok_and(|facts| facts.inode == inode);
        let is_own = || matches!(m.memory.name, Name::Fd(fd @ 0..) if is_file(fd));
        m.id == id
            && m.device == LOOPBACK
            && (m.delivered == inode || (m.delivered == 0 && is_own()))
    })
}

fn use_where(is_it: impl Fn(&Mapped) -> bool) -> Option<InUse> {
    let table = table()?;
    let index = table.entries.iter().position(|m| m.role != Role::Unused && is_it(m))?;
    let m = &mut table.entries[index];
    let map = m.segment().ok()?;
    m.enter();
    Some(InUse { index: index as u32, device: m.device, map })
}

/// One more process holds what this entry's record uses, or a failed attach is undone.
pub fn unuse(index: u32) {
    let_go(index, None, false);
}

/// Maps a segment of our own user that came out of the mailbox; takes the fd. Hostile until proven sealed and sound.
pub fn map_peer(fd: i32) -> Result<(), Reason> {
    map(fd, 0)
}

/// The segment of this identity that was delivered for a connection, with one more user; takes the fd. It is mapped the first time.
pub fn use_file(id: u64, fd: i32) -> Option<InUse> {
    // A kernel's file is known by its number, whatever it says.
    let known = if foreign_fd::is_memory(fd) { sys::fstat(fd).ok() } else { None };
    if let Some(found) = known.and_then(|facts| use_delivered(id, facts.inode)) {
        sys::close(fd);
        return Some(found);
    }
    use_delivered(id, map_delivered(fd).ok()?)
}

/// The same, for one that was delivered for a connection by whoever holds its other end. Which file it is.
pub fn map_delivered(fd: i32) -> Result<u64, Reason> {
    if !foreign_fd::is_memory(fd) {
        foreign_fd::discard(fd);
        return Err(Reason::PeerBroken);
    }
    let inode = sys::fstat(fd).map_or(0, |facts| facts.inode);
    map(fd, inode)?;
    if inode == 0 { Err(Reason::PeerBroken) } else { Ok(inode) }
}

fn map(fd: i32, delivered: u64) -> Result<(), Reason> {
    let attached = attach(LOOPBACK, Name::Fd(fd)).inspect_err(|reason| {
        if *reason == Reason::NoMemory || *reason == Reason::TableFull {
            refuse(fd);
        }
    });
    foreign_fd::discard(fd);
    keep(LOOPBACK, attached?, delivered)
}

/// The segment of this identity on a device where that says where it is, in a region, with one more user. It is mapped the first
/// time.
///
/// # Errors
/// The reason why the connection stays TCP.
pub fn use_named(device: Index, id: u64) -> Result<InUse, Reason> {
    let find = || use_where(|m| m.id == id && m.device == device);
    if let Some(known) = find() {
        return Ok(known);
    }
    let name = Name::of(id).ok_or(Reason::PeerBroken)?;
    keep(device, attach(device, name)?, 0)?;
    find().ok_or(Reason::NoSegment)
}

/// A peer's memory, mapped. The table is swept first.
fn attach(device: Index, name: Name) -> Result<Backing, Reason> {
    let device = super::at(device);
    let size = device.inspect(name)?;
    {
        let mut table = table().ok_or(Reason::NoMemory)?;
        sweep(&mut table);
        place(&mut table, size.near)?;
    }
    device.attach(name, size)
}

/// The mapping becomes an entry of the table, unless that segment has one.
fn keep(index: Index, memory: Backing, delivered: u64) -> Result<(), Reason> {
    let device = super::at(index);
    // SAFETY: nobody has seen it.
    let drop_it = || unsafe { device.detach(&memory) };
    // SAFETY: a mapping of so many bytes, as in `segment`.
    let Ok(map) = (unsafe { Segment::open(memory.base, memory.len, memory.whole) }) else {
        drop_it();
        return Err(Reason::PeerBroken);
    };
    let id = map.header().id.load(Relaxed);
    let owner = map.header().owner.load(Relaxed);
    let Some(mut table) = table() else {
        drop_it();
        return Err(Reason::NoMemory);
    };
    // It may have been lost since.
    if device.gid().is_none() {
        drop_it();
        return Err(Reason::NoDevice);
    }
    let known = table
        .entries
        .iter()
        .any(|m| m.role != Role::Unused && (m.device, m.id, m.delivered) == (index, id, delivered));
    let place = if known { Err(Reason::NoSegment) } else { place(&mut table, memory.len) };
    let Ok(place) = place else {
        drop_it();
        return Ok(());
    };
    let m = &mut table.entries[place];
    m.role = Role::Peer;
    m.delivered = delivered;
    (m.device, m.id, m.owner, m.memory) = (index, id, owner, memory);
    m.users = 0;
    m.slots.reset(0);
    m.listener = [0; 4];
    Ok(())
}

/// Segments that did not fit lately, by identity: waiting for them is in vain.
static REFUSED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];
static REFUSALS: AtomicU32 = AtomicU32::new(0);

fn refuse(fd: i32) {
    if let Some(id) = id_in(fd) {
        let next = REFUSALS.fetch_add(1, Relaxed) as usize % REFUSED.len();
        REFUSED[next].store(id, Relaxed);
    }
}

/// The identity that a segment's file has.
pub fn id_in(fd: i32) -> Option<u64> {
    let mut id = 0u64;
    let at = offset_of!(SegmentHeader, id) as i64;
    // SAFETY: eight writable bytes.
    let read = unsafe { sys::pread(fd, (&raw mut id).cast(), size_of::<u64>(), at) };
    (read == Ok(size_of::<u64>())).then_some(id)
}

/// Whether there was no room for a peer's segment.
pub fn is_refused(id: u64) -> bool {
    REFUSED.iter().any(|refused| refused.load(Relaxed) == id)
}

/// Unmaps what clients have retired or left behind and no connection uses.
fn sweep(table: &mut Table<'_>) {
    for m in table.entries.iter_mut().filter(|m| m.role == Role::Peer && m.users == 0) {
        let retired = m.segment().map_or(true, |s| s.header().retired.load(Relaxed) != 0);
        if retired || m.device().has_ended(m.owner) {
            m.unmap();
        }
    }
}

/// The process ends in an orderly way: tell acceptors that nothing comes any more, and give back what nobody uses where memory is short.
pub fn leave() {
    if TABLE.load(Acquire).is_null() {
        return;
    }
    let Some(mut table) = table() else { return };
    (0..super::COUNT as Index).for_each(|index| give_up_idle(&mut table, index));
    let is_own = |m: &&mut Mapped| m.role == Role::Own && m.device().is_open();
    for m in table.entries.iter_mut().filter(is_own) {
        if let Ok(map) = m.segment() {
            map.header().retired.store(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use usmc_shm::layout::near_len;

    use super::*;

    /// A segment of this identity as a client makes it, and the number of its file.
    fn foreign(id: u64) -> (i32, u64) {
        let len = near_len(4, WINDOW_SHIFT_MIN).unwrap();
        let fd = sys::memfd_create(c"test").unwrap();
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        sys::ftruncate(fd, len as u64).unwrap();
        sys::fcntl(fd, libc::F_ADD_SEALS, seals as usize).unwrap();
        let base = sys::mmap_shared(fd, len).unwrap();
        // SAFETY: a fresh mapping that nobody else has, and which is gone before it is mapped again.
        unsafe {
            Segment::create(base, 4, (WINDOW_SHIFT_MIN, 0), id, 0);
            sys::munmap(base, len);
        }
        (fd, sys::fstat(fd).unwrap().inode)
    }

    /// A peer's segment of so many bytes.
    fn mapped(len: usize, users: u32) -> Mapped {
        let base = sys::mmap_private(ptr::null_mut(), len).unwrap();
        // SAFETY: zero bytes are an unused entry.
        let unused: Mapped = unsafe { core::mem::zeroed() };
        let name = Name::Fd(-1);
        let memory = Backing { base, len, whole: len, name, is_zero: true };
        Mapped { role: Role::Peer, memory, users, ..unused }
    }

    #[test]
    fn segments_are_given_up_only_where_that_makes_room() {
        const PAGE: usize = 1 << 16;
        // SAFETY: as above.
        let unused: Mapped = unsafe { core::mem::zeroed() };
        let mut entries = [mapped(2 * PAGE, 1), mapped(PAGE, 0), mapped(PAGE, 0), unused];
        let roles = |entries: &[Mapped]| {
            entries.iter().map(|m| m.role == Role::Peer).collect::<Vec<bool>>()
        };
        // Never, for what is in use stays.
        assert_eq!(place_within(8 * PAGE, &mut entries, 7 * PAGE), Err(Reason::NoMemory));
        assert_eq!(place_within(8 * PAGE, &mut entries, 4 * PAGE), Ok(3));
        assert_eq!(roles(&entries), [true, true, true, false]);
        assert_eq!(place_within(8 * PAGE, &mut entries, 5 * PAGE), Ok(1));
        assert_eq!(roles(&entries), [true, false, true, false]);
        assert_eq!(place_within(8 * PAGE, &mut entries, 6 * PAGE), Ok(1));
        assert_eq!(roles(&entries), [true, false, false, false]);
        entries[0].users = 0;
        entries[0].unmap();
    }

    #[test]
    fn a_delivered_segment_is_none_of_our_own_users_whatever_it_calls_itself() {
        const ID: u64 = 0x5e6d_e17e;
        let ((ours, our_file), (theirs, their_file)) = (foreign(ID), foreign(ID));
        assert_eq!(map_delivered(theirs), Ok(their_file));
        // In use at once, for the next one that is mapped sweeps what dead processes have left.
        let delivered = use_delivered(ID, their_file).unwrap();
        assert!(use_peer(ID).is_none(), "the table's word is enough for it");
        assert_eq!(map_peer(ours), Ok(()));
        let own = use_peer(ID).unwrap();
        assert_ne!(own.index, delivered.index);
        assert!(use_delivered(ID, our_file).is_none(), "somebody else's memory by its name");
        assert!(use_delivered(ID + 1, their_file).is_none());
        unuse(own.index);
        unuse(delivered.index);
    }
}
