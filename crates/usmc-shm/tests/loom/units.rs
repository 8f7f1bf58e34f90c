//! The words of a region's units: no two owners have one, what one has left is over for the next, and a run is named once it
//! is whole.

use usmc_shm::region::units::{Member, Words};
use usmc_shm::sync::AtomicU64;

use crate::model::sync::Arc;
use crate::model::sync::atomic::AtomicU32;
use crate::model::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::model::{check, thread};

const UNITS: usize = 3;
const COUNT: usize = 2;

fn member(process: u32) -> Member {
    Member::new(1, process, 1).expect("a member")
}

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
        let Some(run) = words.claim(COUNT, member(owner)) else { return false };
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
        words.release(run);
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
        let owner = thread::spawn({
            let memory = memory.clone();
            move || {
                let words = Words(&memory.words);
                let run = words.claim(COUNT, member(7)).expect("nobody else claims");
                words.release(run);
            }
        });
        let words = Words(&memory.words);
        let found = words.run_at(0);
        assert!(found.is_none_or(|run| run.count as usize == COUNT && run.owner == member(7)));
        owner.join().unwrap();
        assert_eq!(words.run_at(0), None, "it was given back");
    });
}

/// An owner was taken for dead, and goes on: it gives back what is another's by now.
#[test]
fn a_late_release_frees_nothing_of_the_next_owner() {
    check(Some(3), || {
        let memory = Memory::new();
        let words = Words(&memory.words);
        let evicted = words.claim(COUNT, member(7)).expect("room");
        let late = thread::spawn({
            let memory = memory.clone();
            move || Words(&memory.words).release(evicted)
        });
        words.release(evicted);
        let run = words.claim(UNITS, member(9));
        late.join().unwrap();
        if let Some(run) = run {
            assert_eq!(words.run_at(0), Some(run));
            assert_eq!(words.free(), 0);
        }
    });
}
