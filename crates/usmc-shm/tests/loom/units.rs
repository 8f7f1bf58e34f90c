//! The words of a region's units: no two owners have one, what one has left is over for the next, and a run is named once it
//! is whole.

use usmc_shm::sync::AtomicU64;
use usmc_shm::units::{Run, Words};

use crate::model::sync::Arc;
use crate::model::sync::atomic::AtomicU32;
use crate::model::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::model::{check, thread};

const UNITS: usize = 3;
const COUNT: usize = 2;

/// The words, and what stands in the units: nothing but the words orders its accesses.
struct Memory {
    words: [AtomicU64; UNITS],
    contents: [AtomicU32; UNITS],
}

impl Memory {
    fn new() -> Arc<Memory> {
        Arc::new(Memory {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            contents: std::array::from_fn(|_| AtomicU32::new(0)),
        })
    }

    /// An owner's whole life with a run: it marks the units, finds its marks, takes them away and gives the run back.
    fn live(&self, owner: u32) -> bool {
        let words = Words(&self.words);
        let Some(run) = words.claim(COUNT, owner) else { return false };
        let first = run.first as usize;
        let units = &self.contents[first..first + COUNT];
        for unit in units {
            assert_eq!(unit.load(Relaxed), 0, "another owner's, or not over yet");
            unit.store(owner, Relaxed);
        }
        for unit in units {
            assert_eq!(unit.load(Relaxed), owner, "another owner has it, too");
            unit.store(0, Relaxed);
        }
        words.release(run, COUNT);
        true
    }
}

#[test]
fn owners_do_not_share_a_unit() {
    check(Some(3), || {
        let memory = Memory::new();
        let other = thread::spawn({
            let memory = memory.clone();
            move || memory.live(7)
        });
        let mine = memory.live(9);
        assert!(other.join().unwrap() || mine, "both have given up");
        assert_eq!(Words(&memory.words).free(), UNITS);
    });
}

#[test]
fn a_name_leads_to_a_whole_run_or_nowhere() {
    check(Some(3), || {
        let memory = Memory::new();
        let named = Arc::new(AtomicU32::new(0));
        let owner = thread::spawn({
            let (memory, named) = (memory.clone(), named.clone());
            move || {
                let words = Words(&memory.words);
                let run = words.claim(COUNT, 7).expect("nobody else claims");
                named.store(u32::from(run.uses), Release);
                words.release(run, COUNT);
            }
        });
        // A name that was guessed finds a run that is whole, or none.
        let words = Words(&memory.words);
        let guessed = words.count_of(Run { first: 0, uses: 1 });
        assert!(guessed.is_none_or(|count| count == COUNT));
        let uses = named.load(Acquire) as u16;
        if uses != 0 {
            let found = words.count_of(Run { first: 0, uses });
            assert!(found.is_none_or(|count| count == COUNT));
        }
        owner.join().unwrap();
        assert_eq!(words.count_of(Run { first: 0, uses: 1 }), None, "it was given back");
    });
}
