//! A region: a file that processes of several kernels may map, and in which each of them claims runs of units for its segments
//! ([`usmc_shm::region`]). Ends that meet there have memory in common, and nothing else.
//!
//! All of it is in memory from the start, so that there are no far parts, nothing is taken, and nothing is given back. What the
//! dead have left comes back where somebody runs short, and where a process joins. The members trust each other: one that makes
//! the file shorter ends the others by SIGBUS.

pub mod provider;

use core::ptr;
use usmc_shm::layout::{End, Slot, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN};
use usmc_shm::region;
use usmc_shm::region::UNIT;
use usmc_shm::region::idle::{header_of, is_idle, let_go};
use usmc_shm::region::peers::Identity;
use usmc_shm::region::units::{Member, Run};
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};

use super::{Backing, Device, HandOver, Index, Name, REGION, Shape, Size, segment};
use crate::host;
use crate::host::board::{Board, Owners};
use crate::os::process::Lock;
use crate::os::reason::Reason;
use crate::os::sys;
use crate::os::{clock, config, log, procfs};
use crate::record::conn::{self, Conn};
use crate::record::near::{self, Near};

/// CHIDs of emulated devices are 0xff00 to 0xffff; loopback has the last. Regions have the others, by their GIDs.
const CHIDS: u64 = 0xff;
const FIRST_CHID: u16 = 0xff00;

/// Regions that one process can use.
pub const MOST: usize = 4;

/// The regions of this process.
pub static REGIONS: [Region; MOST] =
    [Region::new(0), Region::new(1), Region::new(2), Region::new(3)];

/// Regions that are there: they come first in the list.
static COUNT: AtomicU8 = AtomicU8::new(0);
/// The regions were looked for.
static IS_LOOKED_FOR: AtomicBool = AtomicBool::new(false);
/// Held by the thread that looks. The others wait, as their listeners are to be in all regions.
static LOOK: Lock = Lock::new();

/// How many there are. They are looked for the first time.
pub fn count() -> u8 {
    // Acquire: all regions that were found are counted.
    if !IS_LOOKED_FOR.load(Acquire) {
        look();
    }
    // Acquire: what is counted is mapped.
    COUNT.load(Acquire)
}

#[cold]
fn look() {
    // The thread that maps them does not wait for itself: its own calls and its signal handlers ask, too.
    let Some(_held) = LOOK.enter() else { return };
    if IS_LOOKED_FOR.load(Relaxed) {
        return;
    }
    let configured = config::get().regions();
    provider::each(configured, |path| add(path, provider::is_auto(configured)));
    IS_LOOKED_FOR.store(true, Release);
}

/// Fork, in the child: the thread that looked is its parent's.
pub(super) fn after_fork() {
    LOOK.reset();
    REGIONS.iter().for_each(Region::after_fork);
}

/// One more, if it can be used. Others' devices are no mistake where nobody has named them.
fn add(path: &str, is_found: bool) {
    let count = COUNT.load(Relaxed);
    let Some(region) = REGIONS.get(usize::from(count)) else {
        return log::warn(format_args!("region {path} is not used: there are {MOST} already"));
    };
    let mapped = provider::open(path).and_then(|(fd, _)| {
        region.station.store(provider::station(path), Relaxed);
        let mapped = region.map(fd, |map| region.join(map));
        sys::close(fd);
        mapped
    });
    match mapped {
        Ok(()) => {
            // Release: whoever counts it finds it mapped.
            COUNT.store(count + 1, Release);
            region.sweep();
        }
        Err(reason @ (Reason::RegionForeign | Reason::RegionClosed)) if is_found => {
            log::debug(format_args!("{path}: {}", reason.text()));
        }
        Err(reason) => {
            REFUSAL.store(reason as u8, Relaxed);
            log::warn(format_args!("{path}: {}; see `usmc check`", reason.text()));
        }
    }
}

/// Why the last one was refused that cannot be used.
static REFUSAL: AtomicU8 = AtomicU8::new(Reason::None as u8);

/// Why a listener is not found in a region, where none can be used.
pub fn refusal() -> Option<Reason> {
    let refusal = Reason::from_code(REFUSAL.load(Relaxed));
    refusal.filter(|reason| *reason != Reason::None && count() == 0)
}

/// A region that this process has mapped, or not yet.
pub struct Region {
    /// Its number among the devices.
    device: Index,
    /// Held by the thread that joins.
    lock: Lock,
    base: AtomicPtr<u8>,
    len: AtomicUsize,
    /// This process among those that share it ([`Member::word`]); 0 = it came by fork, and has not joined yet.
    member: AtomicU64,
    /// Which machine of an ivshmem server's this is ([`provider::station`]).
    station: AtomicU64,
    /// When it was swept because it was full, in milliseconds; 0 = never.
    swept: AtomicU32,
    /// Its GID as it was mapped.
    gid: [AtomicU64; 2],
    /// The generation ([`region::Region::generation`]) that this process has acted upon.
    generation: AtomicU64,
    /// When its memory was last found there, in milliseconds; 0 = never.
    found: AtomicU32,
}

impl Region {
    /// One that is not mapped.
    pub const fn new(place: u8) -> Region {
        Region {
            device: REGION + place,
            lock: Lock::new(),
            base: AtomicPtr::new(ptr::null_mut()),
            len: AtomicUsize::new(0),
            member: AtomicU64::new(0),
            station: AtomicU64::new(0),
            swept: AtomicU32::new(0),
            gid: [AtomicU64::new(0), AtomicU64::new(0)],
            generation: AtomicU64::new(0),
            found: AtomicU32::new(0),
        }
    }

    /// Maps the file of this descriptor, which stays the caller's; for one thread. `join` says which member this process is.
    ///
    /// # Errors
    /// [`provider::map`]'s; [`Reason::RegionFull`] where this process cannot join.
    pub fn map(
        &self,
        fd: i32,
        join: impl FnOnce(&region::Region) -> Option<Member>,
    ) -> Result<(), Reason> {
        let len = provider::length(fd)?;
        let (base, region) = provider::map(fd, len)?;
        let joined = join(&region).ok_or(Reason::RegionFull);
        let member = joined.inspect_err(|_| {
            // SAFETY: no other thread has seen it.
            unsafe { sys::munmap(base, len) };
        })?;
        self.len.store(len, Relaxed);
        self.member.store(member.word(), Relaxed);
        self.gid.iter().zip(region.gid()).for_each(|(place, word)| place.store(word, Relaxed));
        // This process has no connection yet that an earlier change could concern.
        self.generation.store(region.generation(), Relaxed);
        // Release: a thread that sees the base sees the length.
        self.base.store(base, Release);
        Ok(())
    }

    /// Makes this process one of its members.
    pub(super) fn join(&self, map: &region::Region) -> Option<Member> {
        join(map, self.station.load(Relaxed))
    }

    /// The region. `None` where it is not mapped, or this process has lost it.
    fn get(&self) -> Option<region::Region> {
        let base = self.base.load(Acquire);
        if base.is_null() || !self.is_there(base) {
            return None;
        }
        self.mapped(base)
    }

    fn mapped(&self, base: *mut u8) -> Option<region::Region> {
        // SAFETY: mapped by `map`, and never unmapped. The geometry is checked anew each time.
        let region = unsafe { region::Region::open(base, self.len.load(Relaxed)) }.ok()?;
        let is_it = region.gid() == self.gid.each_ref().map(|word| word.load(Relaxed));
        is_it.then_some(region)
    }

    /// Whether its memory is still there, of which the kernel is asked now and then: a device of a virtual machine can be taken away at
    /// any time. A process that has no connection in it goes on without it.
    fn is_there(&self, base: *mut u8) -> bool {
        const EACH_MS: u32 = 10;
        let (found, now) = (self.found.load(Relaxed), clock::now_ms() | 1);
        if found != 0 && now.wrapping_sub(found) < EACH_MS {
            return true;
        }
        let is_there = sys::is_there(base.cast());
        if is_there {
            self.found.store(now, Relaxed);
        } else {
            self.lose();
        }
        is_there
    }

    /// It is gone. Zero bytes take its place, so that a late look at it finds nothing, and no signal.
    fn lose(&self) {
        let (base, len) = (self.base.load(Acquire), self.len.load(Relaxed));
        if sys::mmap_private(base, len).is_ok() {
            log::debug(format_args!("a region is gone"));
        }
    }

    /// It goes soon, and no connection of this process moves bytes through it any more. What they were in it stays for this process alone,
    /// in the place of the region; there, their ends are over.
    fn let_go(&self) -> bool {
        let (base, len) = (self.base.load(Acquire), self.len.load(Relaxed));
        let Ok(fresh) = sys::mmap_private(ptr::null_mut(), len) else { return false };
        let mut is_done = false;
        let keep = |from: *const u8, bytes: usize| {
            let at = from.addr() - base.addr();
            for word in (0..bytes).step_by(size_of::<u64>()) {
                // SAFETY: words of a segment in the region, and of the fresh mapping of that size; others may write the first.
                unsafe {
                    let from = &*from.add(word).cast::<AtomicU64>();
                    let to = &*fresh.add(at + word).cast::<AtomicU64>();
                    to.store(from.load(Relaxed), Relaxed);
                }
            }
        };
        segment::lose(self.device, keep, || {
            self.end_all();
            // SAFETY: what is needed of the region is in the fresh mapping.
            is_done = unsafe { sys::mremap_over(fresh, len, base) }.is_ok();
        });
        if is_done {
            log::debug(format_args!("a region is not used any more"));
        } else {
            // SAFETY: nobody has seen it.
            unsafe { sys::munmap(fresh, len) };
        }
        is_done
    }

    /// The ends of connections that this process holds in it are over.
    fn end_all(&self) {
        let end = |end: &End| {
            _ = end.refs.fetch_update(AcqRel, Relaxed, |refs| refs.checked_sub(1));
        };
        let (base, len) = (self.base.load(Acquire).addr(), self.len.load(Relaxed));
        let is_in = |end: &&End| (base..base + len).contains(&ptr::from_ref(*end).addr());
        conn::for_each(|_, conn| conn.ends().filter(is_in).for_each(end));
    }

    /// The region where connections may use it: not where this peer is about to lose it.
    fn usable(&self) -> Option<region::Region> {
        self.get().filter(|region| !self.is_drained(region))
    }

    fn is_drained(&self, region: &region::Region) -> bool {
        Member::of(self.member.load(Relaxed)).is_some_and(|me| region.peers().drains(me.peer))
    }

    /// The generation, if it has changed since this process has acted upon one, and connections of this process use the region.
    #[inline]
    pub(super) fn change(&self) -> Option<u64> {
        if !segment::is_used(self.device) {
            return None;
        }
        let base = self.base.load(Acquire);
        // SAFETY: mapped by `map`, and never unmapped.
        let generation = unsafe { region::Region::generation_at(base) };
        if generation == self.generation.load(Relaxed) { None } else { self.changed(base) }
    }

    #[cold]
    fn changed(&self, base: *mut u8) -> Option<u64> {
        let generation = self.mapped(base)?.generation();
        (generation != self.generation.load(Relaxed)).then_some(generation)
    }

    fn member(&self) -> Option<Member> {
        let known = || Member::of(self.member.load(Acquire));
        known().or_else(|| {
            let _held = self.lock.enter()?;
            known().or_else(|| {
                let joined = self.join(&self.get()?)?;
                // Release: what an earlier process of that number has left is forgotten before this one leaves anything.
                self.member.store(joined.word(), Release);
                Some(joined)
            })
        })
    }

    /// Fork, in the child: what it claims is not its parent's.
    fn after_fork(&self) {
        self.lock.reset();
        self.member.store(0, Relaxed);
    }

    /// The process ends in an orderly way: nobody waits for it any more.
    pub(super) fn leave(&self) {
        if let (Some(region), Some(me)) = (self.get(), Member::of(self.member.load(Relaxed))) {
            let is_own = |peer, process| (peer, process) == (me.peer, me.process);
            region.forget(is_own, clock::wall_ns());
        }
    }

    /// The run of that name, and the bytes of its segment's rings and slots.
    fn find(&self, name: Name) -> Result<(region::Region, Run, usize), Reason> {
        let region = self.usable().ok_or(Reason::NoDevice)?;
        let Name::Run(first, _) = name else { return Err(Reason::PeerBroken) };
        let run = region.words().run_at(first).ok_or(Reason::PeerBroken)?;
        let (header, near) = header_of(&region, run).ok_or(Reason::PeerBroken)?;
        // A run of the same place that came later has another key.
        let is_it = header.id.load(Relaxed) == name.id();
        if is_it { Ok((region, run, near)) } else { Err(Reason::PeerBroken) }
    }

    /// The same, unless this process has just done so: each connection of a full region comes here, for several sizes.
    fn sweep_again(&self) -> Option<()> {
        const EACH_MS: u32 = 100;
        let (before, now) = (self.swept.load(Relaxed), clock::now_ms() | 1);
        if before != 0 && now.wrapping_sub(before) < EACH_MS {
            return None;
        }
        self.swept.store(now, Relaxed);
        self.sweep();
        Some(())
    }

    /// Gives back what the dead of this peer, and peers that are gone, have left, and lets go of what the dead of this peer have of others'
    /// memory.
    fn sweep(&self) {
        let (Some(region), Some(me)) = (self.get(), self.member()) else { return };
        let mine = region.peers().holder(me.peer);
        let is_lost = |end: &_, holder| holder == mine && near::has_lost_its_holders(end);
        let _ = host::current().alone(|| {
            region
                .words()
                .runs()
                .filter(|run| run.is_whole)
                .for_each(|run| let_go(&region, run, is_lost));
        });
        // Of other peers' processes nobody here knows whether they live.
        let is_dead =
            |member: Member| member.peer == me.peer && !host::current().has_member(member);
        region.sweep(is_dead, |run| is_idle(&region, run, is_lost));
    }
}

impl Owners for Region {
    fn own(&self) -> Result<u32, Reason> {
        self.member().map(Member::owner).ok_or(Reason::NoDevice)
    }

    fn lives(&self, owner: u32) -> bool {
        let (peer, process) = Member::of_owner(owner);
        if self.member().is_some_and(|me| me.peer == peer) {
            return host::current().lives(process.into());
        }
        self.get().is_some_and(|region| region.peers().is_alive(peer))
    }

    fn stays(&self, owner: u32) -> bool {
        let (peer, _) = Member::of_owner(owner);
        self.get().is_some_and(|region| !region.peers().drains(peer))
    }
}

/// Takes part in a region as a process of this kernel's ISM directory.
fn join(region: &region::Region, station: u64) -> Option<Member> {
    let host = host::current();
    let identity = Identity { host: procfs::boot_id()?, directory: host.gid()?, station };
    let mut name = [0; 65];
    let name = sys::hostname(&mut name);
    // Two processes of a directory are one peer.
    let peer = host.alone(|| region.peers().join(&identity, name.as_bytes()))??;
    let identity = host.own_identity().ok()?;
    let me = Member::new(peer, identity as u32, (identity >> 32) as u32)?;
    // Of other peers' processes nobody here knows whether they live.
    let is_dead = |peer, process| {
        peer == me.peer && (process == me.process || !host.lives(u32::from(process)))
    };
    region.forget(is_dead, clock::wall_ns());
    Some(me)
}

/// Slots of a region's largest segment.
const MOST_SLOTS: u32 = 64;

/// A segment takes one in so many of the free bytes at most.
const OF_SEGMENT: usize = 4;
/// A ring takes one in so many of the free bytes at most.
const OF_RING: usize = 256;

/// A region is empty while less than one in so many of its units is in use. A segment of it takes one in twice as many of the free bytes
/// at most.
const EMPTY: usize = 8;

/// What a segment is made of, `free` units of `all` being free. Its memory is in use as soon as it is claimed, so that rings are smaller
/// with each segment that is made, and a segment has about as many slots as the process has in use. In an empty region they are as large
/// as far parts are elsewhere: a stream is faster past the second-level cache, and pages that nobody uses take no memory of the host's.
fn shape(last: u32, wanted: u32, free: usize, all: usize) -> Shape {
    let slots = (last * 2).clamp(1, MOST_SLOTS);
    let bytes = free * UNIT;
    let shift = |ring: usize| ring.checked_ilog2().unwrap_or(0);
    let of_segment = |part: usize| shift(bytes / part / (2 * slots as usize));
    let of_any = wanted.min(of_segment(OF_SEGMENT)).min(shift(bytes / OF_RING));
    let is_empty = all.saturating_sub(free) * EMPTY < all;
    let of_empty = if is_empty { of_segment(2 * EMPTY) } else { 0 };
    let ring_shift = of_any.max(of_empty).clamp(WINDOW_SHIFT_MIN, WINDOW_SHIFT_MAX);
    Shape { slots, ring_shift, far_shift: 0 }
}

impl Device for Region {
    fn gid(&self) -> Option<[u64; 2]> {
        self.get().map(|region| region.gid())
    }

    fn chid(&self) -> u16 {
        let [gid, ext] = self.gid().unwrap_or_default();
        FIRST_CHID + ((gid ^ ext) % CHIDS) as u16
    }

    fn is_open(&self) -> bool {
        self.usable().is_some()
    }

    fn board(&'static self) -> Board<'static> {
        let Some(region) = self.get() else { return Board::none(self.device) };
        // SAFETY: the tables are in the mapping, which stays (`map`).
        let (listeners, offers) =
            unsafe { (&*ptr::from_ref(region.listeners()), &*ptr::from_ref(region.offers())) };
        Board { device: self.device, listeners, offers, owners: self }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::Name
    }

    fn is_charged(&self) -> bool {
        false
    }

    fn near(&self) -> Near {
        Near::NOTHING
    }

    fn peer(&self) -> u32 {
        let known = self.get().zip(self.member());
        known.map_or(0, |(region, me)| region.peers().holder(me.peer))
    }

    fn is_gone(&self, peer: u32) -> bool {
        peer != 0 && self.get().is_some_and(|region| !region.peers().holds(peer))
    }

    fn shape(&self, last: u32) -> Shape {
        let (free, all) =
            self.get().map_or((0, 1), |region| (region.words().free(), region.units()));
        shape(last, segment::shifts().0, free, all)
    }

    fn is_scarce(&self) -> bool {
        true
    }

    fn allocate(&self, size: Size) -> Result<Backing, Reason> {
        let (Some(region), Some(owner)) = (self.usable(), self.member()) else {
            return Err(Reason::NoDevice);
        };
        let claim = || region.claim(size.near, owner);
        let run = claim().or_else(|| {
            self.sweep_again()?;
            claim()
        });
        let run = run.ok_or(Reason::RegionFull)?;
        let name = Name::Run(run.first, sys::random() as u32);
        let (base, len) = (region.at(run.first), size.near);
        Ok(Backing { base, len, whole: len, name, is_zero: false })
    }

    fn inspect(&self, name: Name) -> Result<Size, Reason> {
        let (_, _, near) = self.find(name)?;
        Ok(Size { near, whole: near })
    }

    fn attach(&self, name: Name, size: Size) -> Result<Backing, Reason> {
        let (region, run, near) = self.find(name)?;
        if size.near > near {
            return Err(Reason::PeerBroken);
        }
        let base = region.at(run.first);
        Ok(Backing { base, len: size.near, whole: size.near, name, is_zero: false })
    }

    unsafe fn detach(&self, _backing: &Backing) {}

    unsafe fn free(&self, backing: &Backing, is_idle: bool) {
        // A peer that has a slot still uses the memory. It comes back when this process has ended.
        if let (true, Some(region), Name::Run(first, _)) = (is_idle, self.get(), backing.name)
            && let Some(run) = region.words().run_at(first)
            && Some(run.owner) == self.member()
        {
            region.words().release(run);
        }
    }

    fn take(&self, _at: *mut u8, _len: usize) -> bool {
        true
    }

    unsafe fn give_back(&self, _at: *mut u8, _len: usize) -> bool {
        false
    }

    fn has_ended(&self, _owner: u64) -> bool {
        false
    }

    fn is_to_leave(&self, conn: &Conn, slot: &Slot) -> bool {
        let Some(region) = self.get() else { return true };
        let name = Name::of(segment::id_of(conn.segment.load(Relaxed)));
        let client = match name {
            Some(Name::Run(first, _)) => region.words().run_at(first).map(|run| run.owner.peer),
            _ => None,
        };
        let acceptor = slot.control.attached_peer.load(Relaxed) as u8;
        let drains = |peer| region.peers().drains(peer);
        self.is_drained(&region) || client.is_some_and(drains) || drains(acceptor)
    }

    fn acted_upon(&self, generation: u64) -> bool {
        let is_drained = self.get().is_some_and(|region| self.is_drained(&region));
        let is_done = !is_drained || self.let_go();
        if is_done {
            self.generation.store(generation, Relaxed);
        }
        is_done
    }

    fn check(&self) {
        self.get();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_small_where_a_region_is_full() {
        let rings = |free| shape(0, 18, free, 1000).ring_shift;
        assert_eq!([1000, 876, 875, 500, 250, 0].map(rings), [20, 20, 17, 16, 15, 14]);
        assert_eq!(shape(0, 15, 400, 1000).ring_shift, 15, "no more than is wanted");
        assert_eq!([0, 1, 2, 32, 64].map(|last| shape(last, 18, 9, 9).slots), [1, 2, 4, 64, 64]);
        // 256 MB.
        let of_empty = |last| shape(last, 18, 4000, 4096).ring_shift;
        assert_eq!([0, 1, 2, 4, 16, 64].map(of_empty), [22, 21, 20, 19, 18, 18]);
        assert_eq!(shape(0, 14, 9, 9).ring_shift, 14, "a small region");
        assert_eq!(shape(0, 18, 0, 0).slots, 1);
        // One connection takes one unit where little is left.
        let least = shape(0, 18, 1, 1000);
        assert!(least.size().expect("a segment").near <= UNIT && least.smaller().is_none());
    }

    /// How many connections have room in so many units, where each process has at most so many.
    fn room(units: usize, of_process: u32) -> u32 {
        let (mut free, mut all, mut last, mut own) = (units, 0, 0, 0);
        let mut next = Some(shape(last, 18, free, units));
        while let Some(shaped) = next {
            let near = shaped.size().expect("a segment").near.div_ceil(UNIT);
            if near > free {
                next = shaped.smaller();
                continue;
            }
            free -= near;
            (own, all) = (own + shaped.slots, all + shaped.slots);
            last = shaped.slots;
            if own >= of_process {
                (own, last) = (0, 0);
            }
            next = Some(shape(last, 18, free, units));
        }
        all
    }

    #[test]
    fn a_region_has_room_for_crowds() {
        // 64 MB.
        for (of_process, least) in [(1, 350), (16, 500), (u32::MAX, 800)] {
            let room = room(1013, of_process);
            assert!(room >= least, "{room} connections, {of_process} of a process");
        }
    }
}
