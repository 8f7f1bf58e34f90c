//! A region: one file that several processes, also of several kernels, map as a whole, and whose memory they hand out
//! among themselves in units.
//!
//! ```text
//! 0           Header
//! 4096        one word for each unit
//! UNITS_AT    the units, 64 KiB each
//! ```
//!
//! A word says whose the unit is. Free units are claimed by compare-and-swap, the first one of a run first, and it alone says
//! how long the run is, once the run is whole. A claimer that dies in between leaves units that name it, and nothing else.
//! Every word counts its uses, so that a name of an earlier use is known for one.

use core::slice;

use crate::Broken;
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::{AtomicU32, AtomicU64};

/// First eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"uSMC-reg");
/// Changes whenever a field here moves.
pub const VERSION: u32 = 1;
/// log2 of a unit's bytes.
pub const UNIT_SHIFT: u32 = 16;
/// Bytes of a unit.
pub const UNIT: usize = 1 << UNIT_SHIFT;
/// Most units of a region: what a name has room for.
pub const UNITS_MOST: usize = 1 << 15;
/// Offset of the words, one for each unit; 0 = it was never used.
pub const WORDS_AT: usize = 4096;

/// Start of the file.
#[repr(C, align(4096))]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Units of the region.
    pub units: AtomicU32,
    /// The region's GID (128 bits, random).
    pub gid: [AtomicU64; 2],
}

/// Offset of the first unit.
const fn units_at(units: usize) -> usize {
    (WORDS_AT + units * size_of::<AtomicU64>()).next_multiple_of(UNIT)
}

/// Units of a region of so many bytes.
const fn units_in(len: usize) -> usize {
    let mut units = len / UNIT;
    if units > UNITS_MOST {
        units = UNITS_MOST;
    }
    while units > 0 && units_at(units) + units * UNIT > len {
        units -= 1;
    }
    units
}

/// What a unit's word says: uses in bits 48-63, in the first unit of a run its length in bits 32-47, the owner in bits 0-31.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Word {
    uses: u16,
    run: u16,
    owner: u32,
}

impl From<u64> for Word {
    fn from(word: u64) -> Word {
        Word { uses: (word >> 48) as u16, run: (word >> 32) as u16, owner: word as u32 }
    }
}

impl From<Word> for u64 {
    fn from(word: Word) -> u64 {
        u64::from(word.uses) << 48 | u64::from(word.run) << 32 | u64::from(word.owner)
    }
}

/// A run of units, by which a peer finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Its first unit.
    pub first: u32,
    /// Which use of that unit.
    pub uses: u16,
}

/// The words of a region's units.
#[derive(Clone, Copy)]
pub struct Words<'a>(pub &'a [AtomicU64]);

impl Words<'_> {
    /// Claims so many units in a row for `owner`, which is not 0. `None`: no such run is free.
    pub fn claim(&self, count: usize, owner: u32) -> Option<Run> {
        let all = self.0.len();
        if count == 0 || count > all || owner == 0 {
            return None;
        }
        let mut first = 0;
        while first + count <= all {
            match self.claim_from(first, count, owner) {
                Ok(run) => return Some(run),
                Err(taken) => first = taken + 1,
            }
        }
        None
    }

    /// The run that begins at `first`, or a unit of it that another owner has.
    fn claim_from(&self, first: usize, count: usize, owner: u32) -> Result<Run, usize> {
        let words = &self.0[first..first + count];
        let mut uses = 0;
        for (at, word) in words.iter().enumerate() {
            let next = |word: u64| match Word::from(word) {
                Word { uses, owner: 0, .. } => {
                    Some(Word { uses: uses.wrapping_add(1), run: 0, owner }.into())
                }
                _ => None,
            };
            // Acquire: what the last owner did with the unit is over.
            match word.fetch_update(AcqRel, Acquire, next) {
                Ok(before) if at == 0 => uses = Word::from(before).uses.wrapping_add(1),
                Ok(_) => {}
                Err(_) => {
                    words[..at].iter().for_each(release);
                    return Err(first + at);
                }
            }
        }
        // Release: a peer that sees the length sees that all of the run is one.
        words[0].store(Word { uses, run: count as u16, owner }.into(), Release);
        Ok(Run { first: first as u32, uses })
    }

    /// Units of the run that a peer has named; `None` where there is no such run (any more).
    pub fn count_of(&self, run: Run) -> Option<usize> {
        // Acquire: pairs with the Release in `claim_from`.
        let word = Word::from(self.0.get(run.first as usize)?.load(Acquire));
        let count = usize::from(word.run);
        let is_it = word.uses == run.uses && word.owner != 0 && count > 0;
        // The word is in the reach of all peers.
        (is_it && count <= self.0.len() - run.first as usize).then_some(count)
    }

    /// Gives a run back that its owner has claimed, of so many units.
    pub fn release(&self, run: Run, count: usize) {
        let first = run.first as usize;
        let end = first.saturating_add(count).min(self.0.len());
        // The first one first: then there is no such run.
        self.0.get(first..end).unwrap_or(&[]).iter().for_each(release);
    }

    /// Units that nobody has.
    pub fn free(&self) -> usize {
        self.0.iter().filter(|word| Word::from(word.load(Relaxed)).owner == 0).count()
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
    /// [`Broken`] where it is none of this version, or of another length.
    ///
    /// # Safety
    /// `base` is a page-aligned, writable mapping of `len` bytes that outlives the result.
    pub unsafe fn open(base: *mut u8, len: usize) -> Result<Region, Broken> {
        if units_in(len) == 0 {
            return Err(Broken);
        }
        let region = Region { base, units: units_in(len) };
        let header = region.header();
        let is_one = header.magic.load(Acquire) == MAGIC
            && header.version.load(Relaxed) == VERSION
            && header.units.load(Relaxed) as usize == region.units;
        if is_one { Ok(region) } else { Err(Broken) }
    }

    fn header(&self) -> &Header {
        // SAFETY: page 0 of the mapping (constructors' contract); atomics accept any bits.
        unsafe { &*self.base.cast::<Header>() }
    }

    fn words(&self) -> Words<'_> {
        // SAFETY: `units` words lie before `units_at` of the mapping; atomics accept any bits.
        Words(unsafe { slice::from_raw_parts(self.base.add(WORDS_AT).cast(), self.units) })
    }

    /// The region's GID.
    pub fn gid(&self) -> [u64; 2] {
        self.header().gid.each_ref().map(|word| word.load(Relaxed))
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Units that nobody has.
    pub fn free_units(&self) -> usize {
        self.words().free()
    }

    /// Where a run lies. The caller knows its length ([`Region::bytes_of`]).
    pub fn at(&self, run: Run) -> *mut u8 {
        let unit = (run.first as usize).min(self.units - 1);
        // SAFETY: a unit of the mapping.
        unsafe { self.base.add(units_at(self.units) + unit * UNIT) }
    }

    /// Claims `len` bytes for `owner`, which is not 0. Their contents are what an earlier owner has left. `None`: no run is
    /// free that is long enough.
    pub fn claim(&self, len: usize, owner: u32) -> Option<Run> {
        self.words().claim(len.div_ceil(UNIT), owner)
    }

    /// Bytes of the run that a peer has named; `None` where there is no such run (any more).
    pub fn bytes_of(&self, run: Run) -> Option<usize> {
        self.words().count_of(run).map(|count| count * UNIT)
    }

    /// Gives a run back that its owner has claimed, of so many bytes.
    pub fn release(&self, run: Run, len: usize) {
        self.words().release(run, len.div_ceil(UNIT));
    }
}

fn release(word: &AtomicU64) {
    let now = Word::from(word.load(Relaxed));
    // Release: the owner's use of the unit is over.
    word.store(Word { run: 0, owner: 0, ..now }.into(), Release);
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    #[repr(align(4096))]
    #[derive(Clone)]
    struct Page(#[expect(dead_code, reason = "memory for a region")] [u8; 4096]);

    /// Memory for so many units and the rest of a region.
    fn memory(units: usize) -> (Vec<Page>, usize) {
        let len = units_at(units) + units * UNIT;
        (std::vec![Page([0; 4096]); len / 4096], len)
    }

    fn region(memory: &mut Vec<Page>, len: usize) -> Region {
        // SAFETY: zero bytes of this test alone, which outlive the region in each test.
        unsafe { Region::format(memory.as_mut_ptr().cast(), len, [1, 2]) }.expect("room")
    }

    #[test]
    fn runs_do_not_overlap_and_come_back() {
        let (mut pages, len) = memory(8);
        let region = region(&mut pages, len);
        assert_eq!((region.units(), region.free_units(), region.gid()), (8, 8, [1, 2]));
        let a = region.claim(3 * UNIT, 7).expect("three units");
        let b = region.claim(UNIT + 1, 9).expect("two units");
        assert_eq!((a.first, b.first, region.free_units()), (0, 3, 3));
        assert_eq!(region.bytes_of(b), Some(2 * UNIT));
        assert_eq!(region.claim(4 * UNIT, 7), None);
        region.release(a, 3 * UNIT);
        assert_eq!(region.bytes_of(a), None);
        let c = region.claim(3 * UNIT, 5).expect("the same units");
        assert_eq!((c.first, c.uses), (0, a.uses + 1));
        assert_eq!(region.bytes_of(a), None, "a name of an earlier use");
        assert_eq!(region.bytes_of(c), Some(3 * UNIT));
    }

    #[test]
    fn what_is_no_region_of_ours_is_refused() {
        let (mut pages, len) = memory(4);
        let base = pages.as_mut_ptr().cast::<u8>();
        // SAFETY: memory of this test.
        let open = |len| unsafe { Region::open(base, len) }.is_ok();
        assert!(!open(len));
        region(&mut pages, len);
        assert!(open(len));
        assert!(!open(len + UNIT) && !open(len - UNIT) && !open(4096) && !open(0));
    }

    #[test]
    fn nonsense_in_the_words_names_no_run() {
        let (mut pages, len) = memory(4);
        let region = region(&mut pages, len);
        let run = region.claim(UNIT, 1).expect("a unit");
        for count in [5, u16::MAX] {
            let word = Word { uses: run.uses, run: count, owner: 1 };
            region.words().0[run.first as usize].store(word.into(), Relaxed);
            assert_eq!(region.bytes_of(run), None);
        }
        assert_eq!(region.bytes_of(Run { first: 4, uses: 0 }), None);
        assert_eq!(region.bytes_of(Run { first: u32::MAX, uses: 0 }), None);
        region.release(Run { first: u32::MAX, uses: 0 }, usize::MAX);
    }
}
