//! The words of a region's units: whose each of them is.
//!
//! Free units are claimed by compare-and-swap, the first one of a run first, and it alone says how long the run is, once the run
//! is whole. A claimer that dies in between leaves units that name it, and nothing else. Whoever gives units back gives those
//! that name the owner, so that an owner that was taken for dead, and goes on, cannot free another's.

use crate::sync::AtomicU64;
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// A process that shares a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its peer's place in the table; not 0.
    pub peer: u8,
    /// Its number among the peer's processes, below [`Member::PROCESSES`].
    pub process: u16,
    /// Which use of that number, modulo 2^28.
    pub incarnation: u32,
}

const PROCESS_BITS: u32 = 12;
const INCARNATION_BITS: u32 = 28;
const MEMBER_BITS: u32 = 8 + PROCESS_BITS + INCARNATION_BITS;

impl Member {
    /// Most processes of one peer.
    pub const PROCESSES: usize = 1 << PROCESS_BITS;
    const INCARNATION: u32 = (1 << INCARNATION_BITS) - 1;

    /// This process of a peer; `None` where it cannot be told from another one.
    pub fn new(peer: u8, process: u32, incarnation: u32) -> Option<Member> {
        let is_one = peer != 0 && (process as usize) < Member::PROCESSES;
        let incarnation = incarnation & Member::INCARNATION;
        is_one.then_some(Member { peer, process: process as u16, incarnation })
    }

    /// As a word has it: 48 bits, not 0.
    pub fn word(self) -> u64 {
        u64::from(self.peer)
            | u64::from(self.process) << 8
            | u64::from(self.incarnation) << (8 + PROCESS_BITS)
    }

    /// The one that a word names.
    pub fn of(word: u64) -> Option<Member> {
        let process = (word >> 8) as u32 & (Member::PROCESSES as u32 - 1);
        Member::new(word as u8, process, (word >> (8 + PROCESS_BITS)) as u32)
    }

    /// By which a board names it.
    pub fn owner(self) -> u32 {
        u32::from(self.peer) << PROCESS_BITS | u32::from(self.process)
    }

    /// The peer and the process of an owner.
    pub fn of_owner(owner: u32) -> (u8, u16) {
        ((owner >> PROCESS_BITS) as u8, owner as u16 & (Member::PROCESSES as u16 - 1))
    }

    /// Whether it is this use of a number, which counts in 32 bits.
    pub fn is_incarnation(self, incarnation: u32) -> bool {
        self.incarnation == incarnation & Member::INCARNATION
    }
}

/// What a unit's word says: in the first unit of a run its length in bits 48-63, and the owner below; 0 = free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Word {
    run: u16,
    owner: Option<Member>,
}

impl From<u64> for Word {
    fn from(word: u64) -> Word {
        Word { run: (word >> MEMBER_BITS) as u16, owner: Member::of(word) }
    }
}

impl From<Word> for u64 {
    fn from(word: Word) -> u64 {
        word.owner.map_or(0, |owner| u64::from(word.run) << MEMBER_BITS | owner.word())
    }
}

/// Units in a row that are one owner's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// Whose.
    pub owner: Member,
    /// Its owner has claimed all of it. Of others it is known only which member was claiming them.
    pub is_whole: bool,
}

/// The words of a region's units.
#[derive(Clone, Copy)]
pub struct Words<'a>(pub &'a [AtomicU64]);

impl Words<'_> {
    /// Claims so many units in a row. `None`: no such run is free.
    pub fn claim(&self, count: usize, owner: Member) -> Option<Run> {
        let all = self.0.len();
        if count == 0 || count > all || count > usize::from(u16::MAX) {
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
    fn claim_from(&self, first: usize, count: usize, owner: Member) -> Result<Run, usize> {
        let claimed = Word { run: 0, owner: Some(owner) }.into();
        let words = &self.0[first..first + count];
        for (at, word) in words.iter().enumerate() {
            // Acquire: what the last owner did with the unit is over.
            if word.compare_exchange(0, claimed, AcqRel, Acquire).is_err() {
                words[..at].iter().for_each(|word| release(word, owner));
                return Err(first + at);
            }
        }
        let whole = Word { run: count as u16, owner: Some(owner) };
        // Release: a peer that sees the length sees that all of the run is one. An owner that was evicted meanwhile has none.
        match words[0].compare_exchange(claimed, whole.into(), Release, Relaxed) {
            Ok(_) => Ok(Run { first: first as u32, count: count as u32, owner, is_whole: true }),
            Err(_) => Err(first),
        }
    }

    /// The whole run that begins at this unit; `None` where there is no such run (any more).
    pub fn run_at(&self, first: u32) -> Option<Run> {
        // Acquire: pairs with the Release in `claim_from`.
        let word = Word::from(self.0.get(first as usize)?.load(Acquire));
        let count = u32::from(word.run);
        // The word is in the reach of all peers.
        let is_inside = count > 0 && count as usize <= self.0.len() - first as usize;
        let owner = word.owner.filter(|_| is_inside)?;
        Some(Run { first, count, owner, is_whole: true })
    }

    /// Gives back what of a run is still its owner's.
    pub fn release(&self, run: Run) {
        let first = run.first as usize;
        let end = first.saturating_add(run.count as usize).min(self.0.len());
        // The first one first: then there is no such run.
        self.0.get(first..end).unwrap_or(&[]).iter().for_each(|word| release(word, run.owner));
    }

    /// Units that nobody has.
    pub fn free(&self) -> usize {
        self.0.iter().filter(|word| word.load(Relaxed) == 0).count()
    }

    /// All runs, and single units that belong to none: their owner is claiming them, or died when it did.
    pub fn runs(&self) -> impl Iterator<Item = Run> {
        let mut at = 0;
        core::iter::from_fn(move || {
            while let Some(word) = self.0.get(at as usize) {
                let (first, owner) = (at, Word::from(word.load(Acquire)).owner);
                let run = self.run_at(first);
                at += run.map_or(1, |run| run.count);
                if let Some(owner) = owner {
                    return run.or(Some(Run { first, count: 1, owner, is_whole: false }));
                }
            }
            None
        })
    }
}

/// Gives a unit back, if it is this owner's.
fn release(word: &AtomicU64, owner: Member) {
    let is_its = |now: u64| (Word::from(now).owner == Some(owner)).then_some(0);
    // Release: the owner's use of the unit is over.
    let _ = word.fetch_update(Release, Relaxed, is_its);
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    fn member(peer: u8, process: u32) -> Member {
        Member::new(peer, process, 0xffff_fff7).expect("a member")
    }

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_member_is_what_its_word_says() {
        for (peer, process, incarnation) in [(1, 0, 0), (255, 4095, u32::MAX), (7, 9, 1 << 28)] {
            let member = Member::new(peer, process, incarnation).expect("a member");
            assert_eq!(Member::of(member.word()), Some(member));
            assert!(member.word() != 0 && member.word() >> MEMBER_BITS == 0);
            assert!(member.is_incarnation(incarnation) && !member.is_incarnation(incarnation ^ 1));
        }
        assert_eq!(Member::new(0, 1, 1), None);
        assert_eq!(Member::new(1, 4096, 1), None);
        assert_eq!(Member::of(0xff00), None);
    }

    #[test]
    fn runs_do_not_overlap_and_come_back() {
        let words = words(8);
        let words = Words(&words);
        let (mine, theirs) = (member(1, 7), member(2, 7));
        let a = words.claim(3, mine).expect("three units");
        let b = words.claim(2, theirs).expect("two units");
        assert_eq!((a.first, b.first, words.free()), (0, 3, 3));
        assert_eq!((words.run_at(3), words.run_at(1), words.run_at(5)), (Some(b), None, None));
        assert_eq!(words.claim(4, mine), None);
        assert_eq!(words.runs().collect::<Vec<_>>(), [a, b]);
        words.release(a);
        assert_eq!((words.run_at(0), words.free()), (None, 6));
        let c = words.claim(3, theirs).expect("the same units");
        // Its owner was taken for dead, and gives back what it had.
        words.release(a);
        assert_eq!((c.first, words.run_at(0), words.free()), (0, Some(c), 3));
    }

    #[test]
    fn what_a_dead_claimer_leaves_is_seen() {
        let words = words(6);
        let (mine, dead) = (member(1, 1), member(1, 2));
        words[1].store(Word { run: 0, owner: Some(dead) }.into(), Relaxed);
        words[2].store(Word { run: 0, owner: Some(dead) }.into(), Relaxed);
        let words = Words(&words);
        let run = words.claim(3, mine).expect("behind them");
        assert_eq!(run.first, 3);
        let left: Vec<Run> = words.runs().filter(|run| run.owner == dead).collect();
        assert!(left.len() == 2 && left.iter().all(|run| run.count == 1 && !run.is_whole));
        left.into_iter().for_each(|run| words.release(run));
        assert_eq!(words.free(), 3);
    }

    #[test]
    fn nonsense_in_the_words_names_no_run() {
        let words = words(4);
        let mine = member(3, 3);
        for count in [5, u16::MAX] {
            words[1].store(Word { run: count, owner: Some(mine) }.into(), Relaxed);
            assert_eq!(Words(&words).run_at(1), None);
        }
        words[1].store(u64::MAX << MEMBER_BITS, Relaxed);
        let words = Words(&words);
        assert_eq!((words.run_at(1), words.run_at(4), words.run_at(u32::MAX)), (None, None, None));
        assert_eq!(words.runs().count(), 0);
        let all = Run { first: u32::MAX, count: u32::MAX, owner: mine, is_whole: true };
        words.release(all);
        assert_eq!(words.claim(usize::MAX, mine), None);
    }
}
