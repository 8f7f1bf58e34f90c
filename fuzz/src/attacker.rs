//! A peer that owns shared memory and changes words of it, between the calls of the honest end and in the middle of
//! them: before any of its accesses ([`usmc_shm::sync::watch`]).

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use usmc_shm::sync;

use crate::input::Input;

/// One change of one word.
#[derive(Clone, Copy)]
struct Write {
    /// Accesses of the honest end until then.
    after: u32,
    /// Of the word, in bytes from the start of the memory.
    at: usize,
    wide: bool,
    value: u64,
}

/// The attacker's mapping, and what it is about to do.
#[derive(Clone)]
pub struct Attacker {
    /// Where it has the memory.
    base: *mut u8,
    len: usize,
    /// Where the honest end has it.
    watched: Range<usize>,
    planned: Vec<Write>,
}

thread_local! {
    static NOW: RefCell<Option<Attacker>> = const { RefCell::new(None) };
}

/// Most changes in one call of the honest end.
const MOST: usize = 4;

impl Attacker {
    /// Of `len` bytes at `base`, which the honest end has at `theirs`.
    ///
    /// # Safety
    /// Both are mappings of the same memory, for as long as the attacker is in use.
    pub unsafe fn new(base: *mut u8, len: usize, theirs: *const u8) -> Attacker {
        let watched = theirs.addr()..theirs.addr() + len;
        Attacker { base, len, watched, planned: Vec::new() }
    }

    /// A word of `T`, which is an atomic of `wide` or half width, at `at`.
    fn write(&self, at: usize, wide: bool, value: u64) {
        assert!(at + 8 <= self.len && at.is_multiple_of(4));
        // SAFETY: inside the mapping (above) and aligned; all accesses of others are atomic or of plain bytes that
        // nobody interprets.
        unsafe {
            let place = self.base.add(at);
            if wide && at.is_multiple_of(8) {
                (*place.cast::<AtomicU64>()).store(value, Relaxed);
            } else {
                (*place.cast::<AtomicU32>()).store(value as u32, Relaxed);
            }
        }
    }

    fn read(&self, at: usize, wide: bool) -> u64 {
        assert!(at + 8 <= self.len && at.is_multiple_of(4));
        // SAFETY: as in `write`.
        unsafe {
            let place = self.base.add(at);
            if wide && at.is_multiple_of(8) {
                (*place.cast::<AtomicU64>()).load(Relaxed)
            } else {
                u64::from((*place.cast::<AtomicU32>()).load(Relaxed))
            }
        }
    }

    fn draw(&self, input: &mut Input<'_>, places: &[Range<usize>], known: &[u64]) -> Write {
        let kind = input.u8();
        let place = &places[usize::from(kind >> 2) % places.len()];
        let words = place.len() / 4;
        let word = if words > 256 { usize::from(input.u16()) } else { usize::from(input.u8()) };
        let at = place.start + word % words * 4;
        let wide = kind & 1 != 0 && at.is_multiple_of(8);
        let value = input.word(self.read(at.min(self.len - 8), wide), known);
        let after = if kind & 2 != 0 { input.u8().into() } else { 0 };
        Write { after, at: at.min(self.len - 8), wide, value }
    }

    /// Changes a word of one of `places` (ranges of bytes) now.
    pub fn scribble(&self, input: &mut Input<'_>, places: &[Range<usize>], known: &[u64]) {
        let Write { at, wide, value, .. } = self.draw(input, places, known);
        self.write(at, wide, value);
    }

    /// Makes a call of the honest end, changing some words in the middle of it.
    pub fn during<T>(
        &self,
        input: &mut Input<'_>,
        places: &[Range<usize>],
        known: &[u64],
        call: impl FnOnce() -> T,
    ) -> T {
        let mut busy = self.clone();
        for _ in 0..input.below(MOST + 1) {
            busy.planned.push(self.draw(input, places, known));
        }
        if busy.planned.is_empty() {
            return call();
        }
        NOW.with(|now| *now.borrow_mut() = Some(busy));
        sync::watch(seen);
        let result = call();
        NOW.with(|now| *now.borrow_mut() = None);
        result
    }
}

/// The honest end is about to access the word at `address`.
fn seen(address: usize) {
    NOW.with(|now| {
        let Ok(mut now) = now.try_borrow_mut() else { return };
        let Some(attacker) = now.as_mut() else { return };
        if !attacker.watched.contains(&address) {
            return;
        }
        let mut next = 0;
        while next < attacker.planned.len() {
            match attacker.planned[next].after.checked_sub(1) {
                Some(left) => {
                    attacker.planned[next].after = left;
                    next += 1;
                }
                None => {
                    let Write { at, wide, value, .. } = attacker.planned.swap_remove(next);
                    attacker.write(at, wide, value);
                }
            }
        }
    });
}
