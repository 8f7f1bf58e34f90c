//! A region: one file that several processes, also of several kernels, map as a whole, and whose memory they hand out
//! among themselves in units. docs/region.md has its layout for others to implement.
//!
//! ```text
//! 0           Header
//! PEERS_AT    256 peers
//! BOARD_AT    1024 listeners, 4096 offers
//! WORDS_AT    one word for each unit
//! units_at    the units, 64 KiB each
//! ```
//!
//! A crash at any instruction leaves words that name a dead owner, and nothing half linked: there are no lists, and no lock that
//! several kernels share. A run of units is an ordinary segment ([`crate::segment`]).

pub mod idle;
pub mod peers;
pub mod units;

use core::slice;

use self::peers::{Life, Peer, Peers};
use self::units::{Member, Run, Words};
use crate::Broken;
use crate::board::{self, Listener, Offer};
use crate::sync::Ordering::{Acquire, Relaxed, Release};
use crate::sync::{AtomicU32, AtomicU64};

/// First eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"uSMC-reg");
/// Changes whenever a field here moves.
pub const VERSION: u32 = 4;
/// log2 of a unit's bytes: pages of all sizes that guests have.
pub const UNIT_SHIFT: u32 = 16;
/// Bytes of a unit.
pub const UNIT: usize = 1 << UNIT_SHIFT;
/// Most units of a region.
pub const UNITS_MOST: usize = 1 << 15;
/// Places for peers, of which the first is not used.
pub const PEERS: usize = 256;
/// Offset of the peers.
pub const PEERS_AT: usize = 4096;
/// Listening sockets.
pub const LISTENERS: usize = 1024;
/// Connections of which both ends are finding each other.
pub const OFFERS: usize = 4096;
/// Offset of the board: the listeners come first.
pub const BOARD_AT: usize = PEERS_AT + PEERS * size_of::<Peer>();
/// Offset of the offers.
const OFFERS_AT: usize = BOARD_AT + LISTENERS * size_of::<Listener>();
/// Offset of the words.
pub const WORDS_AT: usize = OFFERS_AT + OFFERS * size_of::<Offer>();

/// Start of the file.
#[repr(C, align(4096))]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Units of the region.
    pub units: AtomicU32,
    /// The region's id, and its GID: 128 bits, random.
    pub gid: [AtomicU64; 2],
    /// The generation: how often it was said of a peer that it is about to lose the region, or is not after all.
    pub generation: AtomicU64,
}

/// Offset of the first unit.
const fn units_at(units: usize) -> usize {
    (WORDS_AT + units * size_of::<AtomicU64>()).next_multiple_of(UNIT)
}

/// Units of a region of so many bytes.
pub const fn units_in(len: usize) -> usize {
    let mut units = len / UNIT;
    if units > UNITS_MOST {
        units = UNITS_MOST;
    }
    while units > 0 && units_at(units) + units * UNIT > len {
        units -= 1;
    }
    units
}

/// Bytes of a region of so many units.
pub const fn len_for(units: usize) -> usize {
    units_at(units) + units * UNIT
}

/// Why a file is no region that can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// It is none, or shorter or longer than when it was made.
    Foreign,
    /// Another version's.
    Version(u32),
}

impl From<Refused> for Broken {
    fn from(_: Refused) -> Broken {
        Broken
    }
}

/// A mapped region whose geometry has been checked once and is kept in private memory.
#[derive(Clone, Copy)]
pub struct Region {
    base: *mut u8,
    units: usize,
}

// SAFETY: the mapping is shared memory; what is reached through it are atomics and raw pointers.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region out of `len` zero bytes. `None` where not even one unit fits.
    ///
    /// # Safety
    /// `base` is a page-aligned, writable mapping of `len` bytes that outlives the result, and nobody else uses it yet.
    pub unsafe fn format(base: *mut u8, len: usize, gid: [u64; 2]) -> Option<Region> {
        let units = units_in(len);
        if units == 0 {
            return None;
        }
        let region = Region { base, units };
        let header = region.header();
        header.version.store(VERSION, Relaxed);
        header.units.store(units as u32, Relaxed);
        header.gid.iter().zip(gid).for_each(|(place, word)| place.store(word, Relaxed));
        // Release: a process that sees the magic sees the rest.
        header.magic.store(MAGIC, Release);
        Some(region)
    }

    /// Checks a mapping that somebody else has made a region of.
    ///
    /// # Errors
    /// Why it is none.
    ///
    /// # Safety
    /// `base` is a page-aligned, writable mapping of `len` bytes that outlives the result.
    pub unsafe fn open(base: *mut u8, len: usize) -> Result<Region, Refused> {
        let units = units_in(len);
        if units == 0 {
            return Err(Refused::Foreign);
        }
        let region = Region { base, units };
        let header = region.header();
        if header.magic.load(Acquire) != MAGIC {
            return Err(Refused::Foreign);
        }
        match header.version.load(Relaxed) {
            VERSION if header.units.load(Relaxed) as usize == units => Ok(region),
            VERSION => Err(Refused::Foreign),
            version => Err(Refused::Version(version)),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: page 0 of the mapping (constructors' contract); atomics accept any bits.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// The peers.
    pub fn peers(&self) -> Peers<'_> {
        // SAFETY: they lie before the words, within the mapping; atomics accept any bits.
        Peers(unsafe { slice::from_raw_parts(self.base.add(PEERS_AT).cast(), PEERS) })
    }

    /// The listeners of its board.
    pub fn listeners(&self) -> &[Listener] {
        // SAFETY: they lie before the words, within the mapping; atomics accept any bits.
        unsafe { slice::from_raw_parts(self.base.add(BOARD_AT).cast(), LISTENERS) }
    }

    /// The offers of its board.
    pub fn offers(&self) -> &[Offer] {
        // SAFETY: likewise.
        unsafe { slice::from_raw_parts(self.base.add(OFFERS_AT).cast(), OFFERS) }
    }

    /// The units' words.
    pub fn words(&self) -> Words<'_> {
        // SAFETY: `units` words lie before `units_at` of the mapping; atomics accept any bits.
        Words(unsafe { slice::from_raw_parts(self.base.add(WORDS_AT).cast(), self.units) })
    }

    /// The region's GID.
    pub fn gid(&self) -> [u64; 2] {
        self.header().gid.each_ref().map(|word| word.load(Relaxed))
    }

    /// [`Region::generation`] of the region that is mapped there, unchecked: for a look before each wait.
    ///
    /// # Safety
    /// [`Region::open`] has succeeded there once, and it is mapped since.
    #[inline]
    pub unsafe fn generation_at(base: *mut u8) -> u64 {
        // SAFETY: the caller's contract; atomics accept any bits. Acquire: as for `generation`.
        unsafe { &*base.cast::<Header>() }.generation.load(Acquire)
    }

    /// Changes with each call of [`Region::drain`].
    pub fn generation(&self) -> u64 {
        // Acquire: what was said before is seen.
        self.header().generation.load(Acquire)
    }

    /// Says that a peer is about to lose the region, or is not after all: its connections go back to TCP, and none comes. False where
    /// there is no such peer.
    pub fn drain(&self, number: u8, drains: bool) -> bool {
        let peers = self.peers();
        let peer = peers.0.get(usize::from(number)).filter(|_| peers.is_alive(number));
        let Some(peer) = peer else { return false };
        peer.set_drains(drains);
        // Release: pairs with the Acquire in `generation`.
        self.header().generation.fetch_add(1, Release);
        true
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Where a unit lies; the last one instead of one that is not there.
    pub fn at(&self, unit: u32) -> *mut u8 {
        let unit = (unit as usize).min(self.units - 1);
        // SAFETY: a unit of the mapping.
        unsafe { self.base.add(units_at(self.units) + unit * UNIT) }
    }

    /// Claims `len` bytes. Their contents are what an earlier owner has left. `None`: no run is free that is long enough.
    pub fn claim(&self, len: usize, owner: Member) -> Option<Run> {
        self.words().claim(len.div_ceil(UNIT), owner)
    }

    /// Forgets the entries of its board whose owners are known to have died, or whose peers are gone. `now`: CLOCK_REALTIME in
    /// nanoseconds.
    pub fn forget(&self, is_dead: impl Fn(u8, u16) -> bool, now: u64) {
        let peers = self.peers();
        let is_over = |owner| {
            let (peer, process) = Member::of_owner(owner);
            !peers.is_alive(peer) || is_dead(peer, process)
        };
        board::forget(self.listeners(), self.offers(), is_over, now);
    }

    /// Gives back what the dead have left, and the places of peers of which nothing is left. `is_dead`: an owner's process is known to
    /// have died. `is_idle`: nobody uses a whole run of such an owner any more.
    pub fn sweep(&self, is_dead: impl Fn(Member) -> bool, is_idle: impl Fn(Run) -> bool) {
        let (words, peers) = (self.words(), self.peers());
        let is_gone = |peer: u8| !peers.is_alive(peer);
        for run in words.runs() {
            let owner_is_dead = is_gone(run.owner.peer) || is_dead(run.owner);
            if owner_is_dead && (!run.is_whole || is_idle(run)) {
                words.release(run);
            }
        }
        let gone = peers.all().filter(|(_, peer)| peer.life() == Life::Gone);
        for (number, peer) in gone {
            if words.runs().all(|run| run.owner.peer != number) {
                peer.forget();
            }
        }
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;
    use crate::region::peers::Identity;

    #[repr(align(4096))]
    #[derive(Clone)]
    struct Page(#[expect(dead_code, reason = "memory for a region")] [u8; 4096]);

    /// Memory for so many units and the rest of a region.
    fn memory(units: usize) -> (Vec<Page>, usize) {
        let len = len_for(units);
        (std::vec![Page([0; 4096]); len / 4096], len)
    }

    fn region(memory: &mut Vec<Page>, len: usize) -> Region {
        // SAFETY: zero bytes of this test alone, which outlive the region in each test.
        unsafe { Region::format(memory.as_mut_ptr().cast(), len, [1, 2]) }.expect("room")
    }

    #[test]
    fn what_is_no_region_of_ours_is_refused() {
        let (mut pages, len) = memory(4);
        let base = pages.as_mut_ptr().cast::<u8>();
        // SAFETY: memory of this test.
        let open = |len| unsafe { Region::open(base, len) }.map(|region| region.units());
        assert_eq!(open(len), Err(Refused::Foreign));
        let region = region(&mut pages, len);
        assert_eq!((open(len), region.gid()), (Ok(4), [1, 2]));
        for other in [len + UNIT, len - UNIT, 4096, 0] {
            assert_eq!(open(other), Err(Refused::Foreign));
        }
        region.header().version.store(1, Relaxed);
        assert_eq!(open(len), Err(Refused::Version(1)));
    }

    #[test]
    fn every_unit_lies_behind_the_tables() {
        for len in [WORDS_AT, len_for(1), len_for(100) + UNIT / 2, 256 << 20, 16 << 30] {
            let units = units_in(len);
            assert!(units <= UNITS_MOST && len_for(units) <= len.max(len_for(0)));
            assert!(units == UNITS_MOST || len_for(units + 1) > len);
        }
        // The words of more units take another unit's place at most.
        assert!(units_in(256 << 20) >= 4096 - 13);
    }

    fn join(region: &Region, host: u64, directory: u64) -> u8 {
        let identity = Identity { host: [host, 0], directory: [directory, 0], station: 0 };
        region.peers().join(&identity, b"").expect("a place")
    }

    #[test]
    fn a_peer_that_loses_the_region_says_so() {
        let (mut pages, len) = memory(2);
        let region = region(&mut pages, len);
        let (one, other) = (join(&region, 1, 1), join(&region, 2, 2));
        assert_eq!(region.generation(), 0);
        assert!(region.drain(one, true) && !region.drain(0, true) && !region.drain(9, true));
        let drains = || [one, other].map(|peer| region.peers().drains(peer));
        assert_eq!((region.generation(), drains()), (1, [true, false]));
        assert_eq!(join(&region, 1, 1), one, "the same, though it is about to go");
        assert!(region.drain(one, false));
        assert_eq!((region.generation(), drains()), (2, [false; 2]));
        // A place that changes hands begins anew.
        assert!(region.drain(one, true) && region.peers().0[usize::from(one)].declare_gone());
        region.sweep(|_| false, |_| true);
        assert_eq!((join(&region, 3, 3), drains()), (one, [false; 2]));
    }

    #[test]
    fn what_the_dead_leave_comes_back_on_proof() {
        let (mut pages, len) = memory(8);
        let region = region(&mut pages, len);
        let (mine, other) = (join(&region, 1, 1), join(&region, 2, 2));
        let member = |peer, process| Member::new(peer, process, 1).expect("a member");
        let (living, dead, paused) = (member(mine, 1), member(mine, 2), member(other, 2));
        let runs = [living, dead, paused].map(|owner| region.claim(2 * UNIT, owner).expect("room"));
        region.words().0[6].store(dead.word(), Relaxed);
        let free = || region.words().free();
        assert_eq!(free(), 1);
        // Its run is still in use, by the peer's process.
        region.sweep(|member| member == dead, |_| false);
        assert_eq!(free(), 2);
        region.sweep(|member| member == dead, |_| true);
        assert_eq!((free(), region.words().run_at(runs[1].first)), (4, None));
        assert!(region.peers().is_alive(other) && region.words().run_at(runs[2].first).is_some());
        assert!(region.peers().0[usize::from(other)].declare_gone());
        region.sweep(|_| false, |_| false);
        assert_eq!(region.peers().0[usize::from(other)].life(), Life::Gone);
        region.sweep(|_| false, |_| true);
        assert_eq!((free(), region.peers().0[usize::from(other)].life()), (6, Life::Free));
        assert_eq!(region.words().run_at(0).map(|run| run.owner), Some(living));
    }
}
