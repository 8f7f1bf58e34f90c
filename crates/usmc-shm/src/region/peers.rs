//! The peers of a region: each is one ISM directory on one running kernel, whose processes know of each other which of them live.
//!
//! ```text
//! Free ──claim──▶ Claimed ──publish──▶ Alive ──proof of death──▶ Gone ──nothing names it──▶ Free
//!                    └──────────────────proof of death─────────────▲
//! ```
//!
//! A peer is gone on proof only: its host has a new boot id, the server has seen its socket close, or the operator says so. A
//! heartbeat is none: a virtual machine that was paused goes on, and writes.

use crate::sync::AtomicU64;
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Bytes of a peer's name.
pub const NAME: usize = 64;

/// One peer.
#[derive(Default)]
#[repr(C, align(256))]
pub struct Peer {
    /// [`Life`] in the low half, and above it the uses of the place.
    state: AtomicU64,
    /// The kernel that it runs on: its boot id.
    host: [AtomicU64; 2],
    /// The GID of its ISM directory.
    directory: [AtomicU64; 2],
    /// Which virtual machine it is, whatever it has booted; 0 = unknown.
    station: AtomicU64,
    /// The host's name, for people, filled up with zero bytes.
    name: [AtomicU64; NAME / 8],
    /// 1: it is about to lose the region ([`Peer::drains`]).
    drains: AtomicU64,
}

#[cfg(not(any(loom, shuttle)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Peer>() == 256 && offset_of!(Peer, station) == 40);
    assert!(offset_of!(Peer, name) == 48 && offset_of!(Peer, drains) == 112);
};

/// What a place of the table is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// Nobody's.
    Free,
    /// Somebody is writing it, or died when it did.
    Claimed,
    /// A peer's.
    Alive,
    /// It was one's, and what names that has still to be given back.
    Gone,
}

impl Life {
    fn of(state: u64) -> Life {
        match state as u32 {
            0 => Life::Free,
            1 => Life::Claimed,
            2 => Life::Alive,
            // Within the reach of all peers.
            _ => Life::Gone,
        }
    }

    fn state(self, uses: u32) -> u64 {
        u64::from(uses) << 32 | self as u64
    }
}

/// What tells a peer from all others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// [`Peer::host`].
    pub host: [u64; 2],
    /// [`Peer::directory`].
    pub directory: [u64; 2],
    /// [`Peer::station`].
    pub station: u64,
}

fn pair(words: &[AtomicU64; 2]) -> [u64; 2] {
    words.each_ref().map(|word| word.load(Relaxed))
}

fn put(words: &[AtomicU64], values: &[u64]) {
    words.iter().zip(values).for_each(|(word, value)| word.store(*value, Relaxed));
}

impl Peer {
    /// What the place is.
    pub fn life(&self) -> Life {
        // Acquire: pairs with the Release in `publish`.
        Life::of(self.state.load(Acquire))
    }

    /// Uses of the place so far.
    pub fn uses(&self) -> u32 {
        (self.state.load(Relaxed) >> 32) as u32
    }

    /// What tells it from others.
    pub fn identity(&self) -> Identity {
        let (host, directory) = (pair(&self.host), pair(&self.directory));
        Identity { host, directory, station: self.station.load(Relaxed) }
    }

    /// The host's name, as far as it is text.
    pub fn name(&self, to: &mut [u8; NAME]) -> usize {
        for (bytes, word) in to.chunks_exact_mut(8).zip(&self.name) {
            bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        let is_text = |byte: &u8| byte.is_ascii_graphic();
        to.iter().position(|byte| !is_text(byte)).unwrap_or(NAME)
    }

    /// Whether it is about to lose the region: its connections go back to TCP, and none comes.
    pub fn drains(&self) -> bool {
        self.drains.load(Relaxed) != 0
    }

    pub(super) fn set_drains(&self, drains: bool) {
        self.drains.store(drains.into(), Relaxed);
    }

    fn step(&self, from: u64, to: Life, uses: u32) -> bool {
        self.state.compare_exchange(from, to.state(uses), AcqRel, Relaxed).is_ok()
    }

    /// Takes a free place.
    fn claim(&self) -> bool {
        let state = self.state.load(Acquire);
        let uses = ((state >> 32) as u32).wrapping_add(1);
        Life::of(state) == Life::Free && self.step(state, Life::Claimed, uses)
    }

    /// A claimed place is this peer's from now on.
    fn publish(&self, identity: &Identity, name: &[u8]) {
        put(&self.host, &identity.host);
        put(&self.directory, &identity.directory);
        self.station.store(identity.station, Relaxed);
        self.set_drains(false);
        let mut bytes = [0; NAME];
        let len = name.len().min(NAME);
        bytes[..len].copy_from_slice(&name[..len]);
        for (word, part) in self.name.iter().zip(bytes.chunks_exact(8)) {
            word.store(
                part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
                Relaxed,
            );
        }
        let uses = self.uses();
        // Release: a process that sees it alive sees its identity.
        self.state.store(Life::Alive.state(uses), Release);
    }

    /// There is proof that it is dead, or that its place was left half written. False where it is not there.
    pub fn declare_gone(&self) -> bool {
        let state = self.state.load(Acquire);
        matches!(Life::of(state), Life::Alive | Life::Claimed)
            && self.step(state, Life::Gone, (state >> 32) as u32)
    }

    /// There is proof that whatever is of this station is dead. False where the place is not its, or not alive.
    fn declare_gone_with(&self, station: u64) -> bool {
        let state = self.state.load(Acquire);
        // Where the place has changed hands since, its uses have, and nothing is done.
        Life::of(state) == Life::Alive
            && self.identity().station == station
            && self.step(state, Life::Gone, (state >> 32) as u32)
    }

    /// Nothing names it any more.
    pub(super) fn forget(&self) {
        let state = self.state.load(Acquire);
        if Life::of(state) == Life::Gone {
            self.step(state, Life::Free, (state >> 32) as u32);
        }
    }
}

/// The table. Its first place is nobody's, so that no peer has the number 0.
#[derive(Clone, Copy)]
pub struct Peers<'a>(pub &'a [Peer]);

impl Peers<'_> {
    /// All that are in use, with their numbers.
    pub fn all(&self) -> impl Iterator<Item = (u8, &Peer)> {
        let used = |(_, peer): &(u8, &Peer)| peer.life() != Life::Free;
        (0..=u8::MAX).zip(self.0).skip(1).filter(used)
    }

    /// The number of the peer that this is, which is made where there is none. A peer of the same station on another host is
    /// dead: the virtual machine has booted again. `None`: the table is full. The caller keeps the other processes of its
    /// directory away.
    pub fn join(&self, identity: &Identity, name: &[u8]) -> Option<u8> {
        let alive = || self.all().filter(|(_, peer)| peer.life() == Life::Alive);
        let is_me = |peer: &Peer| {
            let there = peer.identity();
            there.host == identity.host && there.directory == identity.directory
        };
        for (_, peer) in alive() {
            let there = peer.identity();
            let is_same_station = there.station != 0 && there.station == identity.station;
            if is_same_station && there.host != identity.host {
                peer.declare_gone();
            }
        }
        if let Some((number, _)) = alive().find(|(_, peer)| is_me(peer)) {
            return Some(number);
        }
        let (number, peer) = (0..=u8::MAX).zip(self.0).skip(1).find(|(_, peer)| peer.claim())?;
        peer.publish(identity, name);
        Some(number)
    }

    /// There is proof that a virtual machine is dead: all its peers are. How many these were.
    pub fn declare_station_gone(&self, station: u64) -> usize {
        // 0 is the station of all that do not know theirs.
        let of_it = |(_, peer): &(u8, &Peer)| station != 0 && peer.declare_gone_with(station);
        self.all().filter(of_it).count()
    }

    /// Whether a place names this station.
    pub fn has_station(&self, station: u64) -> bool {
        self.all().any(|(_, peer)| peer.identity().station == station)
    }

    /// Whether this peer is about to lose the region ([`Peer::drains`]).
    pub fn drains(&self, number: u8) -> bool {
        self.0.get(usize::from(number)).is_some_and(Peer::drains)
    }

    /// As a slot names a peer that holds an end of it: the number in bits 0-7, and above it the uses of its place, so that a peer that
    /// takes the place later does not hold the end.
    pub fn holder(&self, number: u8) -> u32 {
        let uses = self.0.get(usize::from(number)).map_or(0, Peer::uses);
        u32::from(number) | uses << 8
    }

    /// Whether a slot's word names a living peer.
    pub fn holds(&self, word: u32) -> bool {
        self.is_alive(word as u8) && self.holder(word as u8) == word
    }

    /// Whether this is a living peer's number.
    pub fn is_alive(&self, number: u8) -> bool {
        self.0.get(usize::from(number)).is_some_and(|peer| peer.life() == Life::Alive)
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    fn table(count: usize) -> Vec<Peer> {
        (0..count).map(|_| Peer::default()).collect()
    }

    fn identity(host: u64, directory: u64, station: u64) -> Identity {
        Identity { host: [host, 1], directory: [directory, 2], station }
    }

    #[test]
    fn a_directory_on_a_kernel_is_one_peer() {
        let table = table(4);
        let peers = Peers(&table);
        let one = peers.join(&identity(1, 1, 0), b"one");
        assert_eq!(one, Some(1));
        assert_eq!(peers.join(&identity(1, 1, 0), b"one"), one);
        assert_eq!(peers.join(&identity(1, 2, 0), b"another user's"), Some(2));
        assert_eq!(peers.join(&identity(2, 1, 0), b"a copy of the machine"), Some(3));
        assert_eq!(peers.join(&identity(3, 3, 0), b"no place is left"), None);
        let mut name = [0; NAME];
        let len = table[1].name(&mut name);
        assert_eq!((&name[..len], peers.all().count()), (&b"one"[..], 3));
        assert!(!peers.is_alive(0) && peers.is_alive(1) && !peers.is_alive(4));
    }

    #[test]
    fn a_machine_that_has_booted_again_is_the_proof() {
        let table = table(8);
        let peers = Peers(&table);
        let before = [1, 2].map(|directory| peers.join(&identity(1, directory, 9), b"").unwrap());
        let other = peers.join(&identity(1, 3, 8), b"").unwrap();
        let unknown = peers.join(&identity(1, 4, 0), b"").unwrap();
        let again = peers.join(&identity(5, 6, 9), b"").unwrap();
        assert!(before.iter().all(|&number| table[usize::from(number)].life() == Life::Gone));
        assert!([other, unknown, again].iter().all(|&number| peers.is_alive(number)));
        assert_ne!(peers.join(&identity(5, 7, 9), b""), Some(before[0]), "not swept yet");
        let place = &table[usize::from(before[0])];
        place.forget();
        assert_eq!((place.life(), place.uses()), (Life::Free, 1));
        let holder = peers.holder(before[0]);
        assert_eq!(peers.join(&identity(5, 8, 9), b""), Some(before[0]));
        assert!(!peers.holds(holder) && peers.holds(peers.holder(before[0])) && !peers.holds(0));
        assert_eq!(place.uses(), 2);
    }

    #[test]
    fn a_dead_machine_takes_all_its_peers_along() {
        let table = table(8);
        let peers = Peers(&table);
        let its = [1, 2].map(|directory| peers.join(&identity(1, directory, 9), b"").unwrap());
        let other = peers.join(&identity(2, 3, 8), b"").unwrap();
        let unknown = peers.join(&identity(3, 4, 0), b"").unwrap();
        assert_eq!((peers.declare_station_gone(0), peers.declare_station_gone(7)), (0, 0));
        assert_eq!((peers.declare_station_gone(9), peers.declare_station_gone(9)), (2, 0));
        assert!(its.iter().all(|&number| table[usize::from(number)].life() == Life::Gone));
        assert!(peers.is_alive(other) && peers.is_alive(unknown));
        assert!(peers.has_station(9) && peers.has_station(8) && !peers.has_station(7));
        its.iter().for_each(|&number| table[usize::from(number)].forget());
        assert!(!peers.has_station(9));
    }

    #[test]
    fn nonsense_in_a_place_is_no_peer() {
        let table = table(2);
        table[1].state.store(u64::MAX, Relaxed);
        table[1].name.iter().for_each(|word| word.store(u64::MAX, Relaxed));
        assert_eq!(table[1].life(), Life::Gone);
        assert_eq!(table[1].name(&mut [0; NAME]), 0);
        assert!(!table[1].declare_gone());
        assert_eq!(Peers(&table).join(&identity(1, 1, 1), &[7; 300]), None);
    }
}
