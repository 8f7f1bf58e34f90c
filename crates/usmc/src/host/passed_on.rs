//! The table of connections that were passed on: 128 buckets of 8, keyed by the socket's cookie.
//!
//! A place can be taken by another connection at any time; a process that knew it by its former use finds another count of uses,
//! and takes the connection for one of unknown holders.

use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use usmc_shm::sync::{AtomicU32, AtomicU64};

use super::ism::Ism;
use super::layout::{PASSED_ON, PASSED_ON_WAYS, PassedOnCell};
use crate::host::{PassedOn, Receiver};
use crate::os::{members, process, sys};

/// `PassedOnCell::cookie`: a place that is being filled. Cookies of sockets begin later.
const CLAIMED: u64 = 1;
/// So many holders are unknown ones.
const UNKNOWN: u32 = 1 << 16;

/// [`PassedOnCell::state`], unpacked.
#[derive(Clone, Copy)]
struct State {
    /// Counts the uses of the place, modulo 2¹⁵.
    uses: u32,
    client: bool,
    holders: u32,
}

impl From<u64> for State {
    fn from(word: u64) -> State {
        let high = (word >> 32) as u32;
        State { uses: high >> 1 & 0x7fff, client: high & 1 != 0, holders: word as u32 }
    }
}

impl From<State> for u64 {
    fn from(s: State) -> u64 {
        u64::from((s.uses & 0x7fff) << 1 | u32::from(s.client)) << 32 | u64::from(s.holders)
    }
}

fn token(index: usize, uses: u32) -> PassedOn {
    PassedOn((index as u32 + 1) << 16 | uses)
}

/// The place of a token, while it is about that use.
struct Place(&'static PassedOnCell, u32);

impl Place {
    fn of(dev: &Ism, PassedOn(token): PassedOn) -> Option<Place> {
        let index = (token >> 16).checked_sub(1)?;
        let cell = dev.file().ok()?.passed_on.get(index as usize)?;
        Some(Place(cell, token & 0xffff))
    }

    fn state(&self) -> Option<State> {
        // Acquire: pairs with the Release of each step; what its author did before is visible.
        Some(State::from(self.0.state.load(Acquire))).filter(|state| state.uses == self.1)
    }

    /// Puts one expected receiver in the place of another, 0 being none. False where `from` was not expected.
    fn exchange(&self, from: u64, to: u64) -> bool {
        // AcqRel: the count is visible to the claimer; one look by each name, in this order, finds him.
        let put = |cell: &AtomicU64| cell.compare_exchange(from, to, AcqRel, Relaxed).is_ok();
        self.0.pending.iter().any(put)
    }

    fn change(&self, next: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        let mut found = None;
        let step = |word: u64| {
            let state = State::from(word);
            let holders = next(state.holders).filter(|_| state.uses == self.1)?;
            found = Some(holders);
            Some(State { holders, ..state }.into())
        };
        self.0.state.fetch_update(AcqRel, Acquire, step).ok()?;
        found
    }
}

fn bucket(cookie: u64) -> usize {
    let hash = cookie.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    hash as usize % (PASSED_ON / PASSED_ON_WAYS) * PASSED_ON_WAYS
}

/// `PassedOnCell::pending`: kind in the highest two bits, uses of the place below, then the receiver.
fn word(to: Receiver, uses: u32) -> u64 {
    let (kind, who) = match to {
        Receiver::Program(pid) => (1u64, u64::from(pid)),
        Receiver::Channel(inode) => (2, inode & 0xffff_ffff_ffff),
        Receiver::Child(parent) => (3, u64::from(parent)),
        Receiver::Unknown => (0, 0),
    };
    if kind == 0 { 0 } else { kind << 62 | u64::from(uses & 0x3fff) << 48 | who }
}

impl Ism {
    /// Begins to count the holders of the socket with this SO_COOKIE: one, and if that is the process with pid `alone`, without
    /// others of its family, its death counts it out. `client`: it is the connecting end.
    pub fn entrust(&self, cookie: u64, client: bool, alone: Option<u32>) -> Option<PassedOn> {
        let file = self.file().ok()?;
        let first = bucket(cookie);
        let cells = &file.passed_on[first..first + PASSED_ON_WAYS];
        // Somebody else counts, and we are not among them.
        if cookie <= CLAIMED || cells.iter().any(|cell| cell.cookie.load(Relaxed) == cookie) {
            return None;
        }
        // Others may be choosing the same one just now.
        let at = (0..PASSED_ON_WAYS).find_map(|_| {
            let free = cells.iter().position(|cell| cell.cookie.load(Relaxed) == 0);
            let at = free.unwrap_or(sys::random() as usize % PASSED_ON_WAYS);
            let before = if free.is_some() { 0 } else { cells[at].cookie.load(Relaxed) };
            let claimed = before != CLAIMED
                && cells[at].cookie.compare_exchange(before, CLAIMED, AcqRel, Relaxed).is_ok();
            claimed.then_some(at)
        })?;
        let cell = &cells[at];
        let uses = State::from(cell.state.load(Relaxed)).uses.wrapping_add(1) & 0x7fff;
        cell.state.store(State { uses, client, holders: 1 }.into(), Release);
        cell.pending.iter().for_each(|place| place.store(0, Relaxed));
        cell.members.iter().for_each(|id| id.store(0, Relaxed));
        cell.namespace.store(process::namespace().unwrap_or(0), Relaxed);
        alone.inspect(|&pid| members::enter_other(&cell.members, pid));
        // Release: pairs with the Acquire in `claim`.
        cell.cookie.store(cookie, SeqCst);
        Some(token(first + at, uses))
    }

    /// Whether the token is of that socket.
    pub fn is_about(&self, passed_on: PassedOn, cookie: u64) -> bool {
        Place::of(self, passed_on).is_some_and(|place| {
            place.0.cookie.load(Acquire) == cookie && place.state().is_some() && cookie > CLAIMED
        })
    }

    /// One holder more, which will [`Ism::claim`] it; false where that cannot be.
    pub fn hand_over(&self, passed_on: PassedOn, to: Receiver) -> bool {
        let Some(place) = Place::of(self, passed_on) else { return false };
        if place.change(|n| (n < UNKNOWN).then_some(n + 1)).is_none() {
            return false;
        }
        let expected = word(to, place.1);
        // Otherwise nobody will say that he has it: he stays counted.
        expected != 0 && place.exchange(0, expected)
    }

    /// The receiver that was expected by one name is expected by another, if it has not come yet.
    pub fn rename(&self, passed_on: PassedOn, from: Receiver, to: Receiver) {
        let Some(place) = Place::of(self, passed_on) else { return };
        let [from, to] = [from, to].map(|name| word(name, place.1));
        let _ = from != 0 && place.exchange(from, to);
    }

    /// That one is expected no more, though still counted; false where he has claimed it.
    pub fn call_off(&self, passed_on: PassedOn, from: Receiver) -> bool {
        Place::of(self, passed_on).is_some_and(|place| take(&place, from))
    }

    /// A socket has come: its token, and whether it is the connecting end. `None` where nobody was told
    /// of a receiver of these names, looked for one after the other; then nobody counts as the only holder any more.
    pub fn claim(&self, cookie: u64, by: &[Receiver]) -> Option<(PassedOn, bool)> {
        let first = bucket(cookie);
        let cells = &self.file().ok()?.passed_on[first..first + PASSED_ON_WAYS];
        let at = cells.iter().position(|cell| cell.cookie.load(Acquire) == cookie)?;
        let state = State::from(cells[at].state.load(Acquire));
        let place = Place(&cells[at], state.uses);
        if cookie > CLAIMED && by.iter().any(|&name| take(&place, name)) {
            return Some((token(first + at, state.uses), state.client));
        }
        let _ = place.change(|n| Some(n | UNKNOWN));
        None
    }
}

fn take(place: &Place, from: Receiver) -> bool {
    let expected = word(from, place.1);
    expected != 0 && place.exchange(expected, 0)
}

/// Holders by their ids, if these mean the same here.
fn names(place: &Place) -> Option<&'static [AtomicU32]> {
    place.state()?;
    let theirs = place.0.namespace.load(Relaxed);
    (theirs != 0 && process::namespace() == Some(theirs)).then_some(&place.0.members)
}

impl Ism {
    /// Likewise, of another holder.
    pub fn name_holder(&self, passed_on: PassedOn, pid: u32) {
        if let Some(list) = Place::of(self, passed_on).as_ref().and_then(names) {
            members::enter_other(list, pid);
        }
    }

    /// No holder is this process alone any more.
    pub fn take_name_back(&self, passed_on: PassedOn) {
        if let Some(list) = Place::of(self, passed_on).as_ref().and_then(names) {
            members::leave(list);
        }
    }

    /// Whether there is one holder.
    pub fn is_sole(&self, passed_on: PassedOn) -> bool {
        let Some(place) = Place::of(self, passed_on) else { return false };
        let is_sole = || place.state().is_some_and(|state| state.holders == 1);
        if is_sole() {
            return true;
        }
        if let Some(list) = names(&place) {
            members::take_dead(list, |_| {
                let _ = place.change(|n| n.checked_sub(1));
            });
        }
        is_sole()
    }

    /// One holder less.
    pub fn release(&self, passed_on: PassedOn) {
        let Some(place) = Place::of(self, passed_on) else { return };
        let cookie = place.0.cookie.load(Relaxed);
        self.take_name_back(passed_on);
        if place.change(|n| n.checked_sub(1)) == Some(0) {
            let _ = place.0.cookie.compare_exchange(cookie, 0, AcqRel, Relaxed);
        }
    }
}
