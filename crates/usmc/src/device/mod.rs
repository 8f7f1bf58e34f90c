//! Devices: where the memory lies that both ends of a connection map, and what the ends have in common.
//!
//! A segment with its slots and rings is the same on each device. Once both ends have mapped it they work there, and no call
//! goes to the device. A device is one file of this folder and one line of [`LIST`].

#[cfg(test)]
mod conformance;
pub mod identity;
pub mod memfd;
pub mod region;
pub mod room_ear;
pub mod segment;

use usmc_shm::layout::{Slot, WINDOW_SHIFT_MIN, near_len, segment_len};
use usmc_shm::sync::Ordering::Relaxed;

use crate::host::board::Board;
use crate::host::{self, OfferId};
use crate::os::reason::Reason;
use crate::os::{config, sys};
use crate::record::clc_state;
use crate::record::conn::Conn;
use crate::record::near::Near;

/// What tells a peer which memory is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Name {
    /// A descriptor of this process.
    Fd(i32),
    /// A run of units in a region: the first of them, and a random key that its segment has as well.
    Run(u32, u32),
}

impl Name {
    /// An identity for a new segment that has this name, unlike those of all others. Of a run it says which.
    fn id(self) -> u64 {
        match self {
            Name::Fd(_) => sys::random() | 1,
            Name::Run(first, key) => u64::from(key) << 32 | u64::from(first) << 1,
        }
    }

    /// The name that a segment of this identity has, where that says so.
    fn of(id: u64) -> Option<Name> {
        (id & 1 == 0).then_some(Name::Run(id as u32 >> 1, (id >> 32) as u32))
    }
}

/// The memory of one segment, mapped by this process.
#[derive(Clone, Copy, Debug)]
pub struct Backing {
    /// Where.
    pub base: *mut u8,
    /// Bytes that are mapped.
    pub len: usize,
    /// Bytes of the whole: far parts are left out of `len` where they do not fit.
    pub whole: usize,
    /// By which a peer attaches it.
    pub name: Name,
    /// All of it is zero.
    pub is_zero: bool,
}

/// How much memory stands behind a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// Bytes before the far parts.
    pub near: usize,
    /// All bytes.
    pub whole: usize,
}

/// What a new segment is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Slots.
    pub slots: u32,
    /// log2 of a ring's bytes.
    pub ring_shift: u32,
    /// log2 of the bytes of a ring's far part; 0 = none.
    pub far_shift: u32,
}

impl Shape {
    /// The next smaller one; `None` where there is none.
    pub fn smaller(self) -> Option<Shape> {
        match self {
            Shape { slots: 2.., .. } => Some(Shape { slots: self.slots / 2, ..self }),
            Shape { ring_shift, .. } if ring_shift > WINDOW_SHIFT_MIN => {
                Some(Shape { ring_shift: ring_shift - 1, ..self })
            }
            _ => None,
        }
    }

    /// How much memory it takes; `None` where there is no such segment.
    pub fn size(self) -> Option<Size> {
        let near = near_len(self.slots, self.ring_shift)?;
        let whole = segment_len(self.slots, self.ring_shift, self.far_shift)?;
        Some(Size { near, whole })
    }
}

/// How the acceptor's process gets the memory of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandOver {
    /// By the host's mailboxes.
    Mail,
    /// By its name on the board: a process that shares the device has it anyhow.
    Name,
}

/// What differs between devices. What a peer says of its memory is checked by the device: sealed, of a possible size, in
/// use. What is in it [`usmc_shm::segment::Segment::open`] checks.
pub trait Device: Sync {
    /// What names the device on the wire (RFC 7609, SMC-Dv2: GID and its extension); `None` where it cannot be used.
    fn gid(&self) -> Option<[u64; 2]>;

    /// The channel's id (SMC-Dv2: CHID).
    fn chid(&self) -> u16;

    /// What the processes on it have in common.
    fn near(&self) -> Near;

    /// What the next segment of a listener's is made of. `last`: slots of the one before it; 0 = it is the first.
    fn shape(&self, last: u32) -> Shape;

    /// Whether memory is short: what nobody uses goes back at once.
    fn is_scarce(&self) -> bool;

    /// Memory for a new segment, which a peer cannot take away. A device may give less than the whole: no far parts.
    ///
    /// # Errors
    /// The reason why connections stay TCP.
    fn allocate(&self, size: Size) -> Result<Backing, Reason>;

    /// How much memory a peer has named. Nothing is taken.
    ///
    /// # Errors
    /// [`Reason::PeerBroken`] where no correct peer names it.
    fn inspect(&self, name: Name) -> Result<Size, Reason>;

    /// Maps what a peer has allocated. The name's descriptor stays the caller's.
    ///
    /// # Errors
    /// [`Reason::NoMemory`] where it does not fit.
    fn attach(&self, name: Name, size: Size) -> Result<Backing, Reason>;

    /// This process does not use a peer's memory any more.
    ///
    /// # Safety
    /// No reference into it is left.
    unsafe fn detach(&self, backing: &Backing);

    /// This process does not use memory any more that it has allocated. `is_idle`: no process has a slot of it.
    ///
    /// # Safety
    /// As for [`Device::detach`].
    unsafe fn free(&self, backing: &Backing, is_idle: bool);

    /// Whether memory is there for these bytes of a segment.
    fn take(&self, at: *mut u8, len: usize) -> bool;

    /// Takes the memory of whole pages away, of which nothing is needed: they are zero afterwards. False where it stays.
    ///
    /// # Safety
    /// The pages are a segment's.
    unsafe fn give_back(&self, at: *mut u8, len: usize) -> bool;

    /// Which of the kernels that share the device this one is; 0 where there is one only.
    fn peer(&self) -> u32 {
        0
    }

    /// Whether connections may come to it.
    fn is_open(&self) -> bool {
        true
    }

    /// Whether the kernel that [`Device::peer`] said to be this is known to be gone.
    fn is_gone(&self, _peer: u32) -> bool {
        false
    }

    /// Where both ends of a connection find each other; an empty one where the device cannot be used.
    fn board(&'static self) -> Board<'static>;

    /// How memory changes hands.
    fn hand_over(&self) -> HandOver;

    /// Whether what a peer writes may take memory of this process', which is limited.
    fn is_charged(&self) -> bool;

    /// Whether the maker of a segment is known to have ended, by its identity in the segment's header.
    fn has_ended(&self, owner: u64) -> bool;

    /// Whether a connection of this process has to leave: one of its ends is about to lose the device.
    fn is_to_leave(&self, _conn: &Conn, _slot: &Slot) -> bool {
        false
    }

    /// No connection has to leave any more because of this change ([`changes`]). Where this process loses the device, it does not use it
    /// from now on. False where that is to be tried again.
    fn acted_upon(&self, _generation: u64) -> bool {
        true
    }

    /// Before what connections have left in its memory long ago is looked at: it may be gone, which nobody has noticed.
    fn check(&self) {}
}

/// A device's place in the list of them.
pub type Index = u8;

/// Memfds that processes of one kernel hand each other (SMC-D's loopback).
pub const LOOPBACK: Index = host::ism::DEVICE;
/// The first of the regions.
pub const REGION: Index = 1;
/// Number of devices.
const COUNT: usize = 1 + region::MOST;
// A client may ask on each of them.
const _: () = assert!(COUNT == clc_state::DEVICES);

/// The device of this number; of an unknown one, the first.
pub fn at(index: Index) -> &'static dyn Device {
    let region =
        index.checked_sub(REGION).and_then(|place| region::REGIONS.get(usize::from(place)));
    region.map_or(&memfd::MEMFDS, |region| region as &dyn Device)
}

/// Those that this process may use, the nearest first.
pub fn all() -> impl Iterator<Item = (Index, &'static dyn Device)> {
    let loopback = config::get().uses_loopback.then_some(LOOPBACK);
    let regions = REGION..REGION + region::count();
    let all = loopback.into_iter().chain(regions).map(|index| (index, at(index)));
    all.filter(|(_, device)| device.is_open())
}

/// The regions that this process may use.
pub fn regions() -> impl Iterator<Item = &'static dyn Device> {
    all().filter(|(index, _)| *index != LOOPBACK).map(|(_, device)| device)
}

/// Why a destination is found on no board.
pub fn not_registered() -> Reason {
    let is_drained = || region::count() > 0 && regions().next().is_none();
    let refusal = region::refusal();
    refusal.or(is_drained().then_some(Reason::RegionDrained)).unwrap_or(Reason::NotRegistered)
}

/// The device of the host's directory: its board has offers, and its memory changes hands by mailboxes.
pub fn of_host() -> Index {
    LOOPBACK
}

/// How the memory of a connection changes hands whose handshake stands there.
pub fn hand_over(id: OfferId) -> HandOver {
    at(id.device).hand_over()
}

/// The board on which this offer stands.
pub fn board_of(id: OfferId) -> Board<'static> {
    at(id.device).board()
}

/// The device whose memory the connection uses.
pub fn of(conn: &Conn) -> &'static dyn Device {
    at(conn.device.load(Relaxed) as Index)
}

/// Devices whose users have changed: one of them may be about to lose it. With the change's number.
#[inline]
pub fn changes() -> impl Iterator<Item = (Index, &'static dyn Device, u64)> {
    (REGION..).zip(&region::REGIONS).filter_map(|(index, region)| {
        let generation = region.change()?;
        Some((index, region as &dyn Device, generation))
    })
}

/// Fork, in the child: what this process is on its devices, its parent was not.
pub fn after_fork() {
    region::after_fork();
}

/// The process ends in an orderly way.
pub fn leave() {
    region::REGIONS.iter().for_each(region::Region::leave);
}
