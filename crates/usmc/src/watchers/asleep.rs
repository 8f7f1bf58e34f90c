//! Threads asleep in sets: a thread that sleeps in one sleeps in those inside, too, and is counted there.

use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use crate::os::single;
use crate::watchers::hot::{self, Looks};
use crate::watchers::nested::{self, DEPTH};
use crate::watchers::set::{self, SETS, Set};
use crate::watchers::{deferred, epoll};

/// A thread in the real wait: counted in the set and in the sets inside.
pub struct Asleep<'a> {
    set: &'a Set,
    inside: Counted,
}

impl<'a> Asleep<'a> {
    pub fn enter(set: &'a Set, index: u32) -> Asleep<'a> {
        // SeqCst: see `epoll::add`.
        single::add(&set.sleepers, 1);
        let mut asleep = Asleep { set, inside: Counted::nowhere() };
        nested::each(index, |inner, _| asleep.inside.enter(inner));
        asleep
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        // None is counted where a fork of this thread's own signal handler has forgotten it.
        if self.set.sleepers.load(Relaxed) != 0 {
            single::sub(&self.set.sleepers, 1);
        }
    }
}

/// The sets in which one thread counts as a sleeper, once each, until this is dropped. What comes into one of them
/// meanwhile is none of these.
pub struct Counted {
    /// A bit for each set.
    sets: [u64; SETS / 64],
    is_any: bool,
}

impl Counted {
    pub fn nowhere() -> Counted {
        Counted { sets: [0; SETS / 64], is_any: false }
    }

    /// Counts the thread in a set and in those inside.
    pub fn enter(&mut self, index: u32) {
        let (word, bit) = (&mut self.sets[index as usize / 64], 1 << (index % 64));
        if *word & bit != 0 {
            return;
        }
        *word |= bit;
        self.is_any = true;
        // SeqCst: see `epoll::add`.
        set::set_at(index).sleepers.fetch_add(1, SeqCst);
        deferred::pay(index);
        nested::each(index, |inner, _| self.enter(inner));
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_any {
            return;
        }
        for (number, &word) in self.sets.iter().enumerate() {
            let mut left = word;
            while left != 0 {
                set::woke(set::set_at(number as u32 * 64 + left.trailing_zeros()));
                left &= left - 1;
            }
        }
    }
}

/// Arms the hot entries of a set and of those inside.
pub fn arm_all(index: u32) -> Looks {
    arm_to(index, DEPTH)
}

fn arm_to(index: u32, depth: u32) -> Looks {
    let mut looks = hot::arm(set::set_at(index));
    if depth > 0 {
        // The ear is in the set that is waited for.
        nested::each(index, |inner, _| {
            looks = looks.and(arm_to(inner, depth - 1).without_ear());
        });
    }
    looks
}

/// Takes a connection out of the ring whose room is waited for in vain, in a set or in those inside. Whether there was one.
pub fn leave_stuck(index: u32) -> bool {
    leave_stuck_to(index, DEPTH)
}

fn leave_stuck_to(index: u32, depth: u32) -> bool {
    let mut has_left = hot::leave_stuck(set::set_at(index));
    if depth > 0 {
        nested::each(index, |inner, _| has_left = has_left || leave_stuck_to(inner, depth - 1));
    }
    has_left
}

/// A set has come into `outer`, or is asked for anew: a thread that sleeps there already, or polls it, has to look, to count itself,
/// and to ask for the bells of those that were active. All others ring.
pub fn stir(outer: u32, inner: u32) {
    let set = set::set_at(outer);
    // SeqCst: see `epoll::add`, and `nested::control`.
    if set.sleepers.load(SeqCst) != 0 || set.is_watched.load(SeqCst) == set::POLLED {
        stir_one(inner, DEPTH);
    }
}

/// By any connection that can be kicked.
fn stir_one(index: u32, depth: u32) -> bool {
    let set = set::set_at(index);
    let mut is_done = (0..).map_while(|at| hot::tag_at(set, at)).any(epoll::pass_on);
    if depth > 0 {
        nested::each(index, |inner, _| is_done = is_done || stir_one(inner, depth - 1));
    }
    is_done
}
