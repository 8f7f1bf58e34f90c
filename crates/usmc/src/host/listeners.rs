//! The registry of listeners: addresses where an acceptor is under uSMC.

use usmc_shm::board::{LISTENER_CLAIMED, LISTENER_PROBES, Listener};
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::board::Board;
use crate::os::reason::Reason;
use crate::os::{clock, owner, sys};
use crate::record::tuple::Endpoint;

/// How long a listener still counts whose owner has closed it or ended: its last connection may take a while to its second
/// request, and its heir may just be about to register it, as a forked child or the next program.
const JUST_NS: u64 = 10_000_000_000;

/// Of a family so many processes register a listener: one of them will outlive the others, and there is room for the
/// listeners of others around this port.
const ENOUGH: usize = 8;

fn halves(at: &Endpoint) -> [u64; 2] {
    let bits = u128::from_be_bytes(at.addr);
    [(bits >> 64) as u64, bits as u64]
}

impl<'a> Board<'a> {
    fn listeners_at(&self, port: u16) -> impl Iterator<Item = (usize, &'a Listener)> + use<'a> {
        let (start, all) = ((port as usize).wrapping_mul(0x9e3b) >> 2, self.listeners);
        let index = move |i| (start + i) % all.len();
        let probes = if all.is_empty() { 0 } else { LISTENER_PROBES };
        (0..probes).map(index).map(|at| (at, &all[at]))
    }

    /// Makes a listening address known.
    ///
    /// # Errors
    /// The reason why connections to it stay TCP.
    pub fn register_listener(&self, netns: u64, at: Endpoint) -> Result<u32, Reason> {
        let me = self.own()?;
        // What has just been left is still looked for, if there is anything else.
        let unused = self.listeners_at(at.port).filter(|(_, place)| !has_just_left(place));
        for (index, place) in unused.chain(self.listeners_at(at.port)) {
            if place.state.compare_exchange(0, LISTENER_CLAIMED, AcqRel, Relaxed).is_ok() {
                let addr = halves(&at);
                place.port.store(at.port as u32, Relaxed);
                place.netns.store(netns, Relaxed);
                place.uid.store(sys::geteuid(), Relaxed);
                place.addr[0].store(addr[0], Relaxed);
                place.addr[1].store(addr[1], Relaxed);
                place.state.store(me + 1, Release);
                return Ok(index as u32);
            }
        }
        Err(Reason::TableFull)
    }

    /// The same for a forked child, which has inherited the listener and may be the one that accepts: its parent may end
    /// before anybody has. `None` where this process has registered the address already, or enough others have, or it
    /// cannot be registered.
    pub fn register_inherited(&self, netns: u64, at: Endpoint) -> Option<u32> {
        let me = self.own().ok()?;
        let uid = sys::geteuid();
        let mut owners = [0; ENOUGH];
        let mut count = 0;
        for (_, place) in self.listeners_at(at.port) {
            let state = place.state.load(Acquire);
            let is_same = !matches!(state, 0 | LISTENER_CLAIMED)
                && is_at(place, at)
                && place.netns.load(Relaxed) == netns
                && place.uid.load(Relaxed) == uid;
            if !is_same || owners[..count].contains(&state) {
                continue;
            }
            if state == me + 1 || count == ENOUGH - 1 {
                return None;
            }
            owners[count] = state;
            count += 1;
        }
        self.register_listener(netns, at).ok()
    }

    /// Forgets a listening address registered by this process.
    pub fn unregister_listener(&self, token: u32) {
        let Ok(me) = self.own() else { return };
        if let Some(place) = self.listeners.get(token as usize) {
            place.left_at.store(clock::wall_ns(), Relaxed);
            let _ = place.state.compare_exchange(me + 1, 0, AcqRel, Relaxed);
        }
    }

    /// The same, by its address.
    pub fn unregister(&self, netns: u64, at: Endpoint) {
        let Ok(me) = self.own() else { return };
        let mut places = self.listeners_at(at.port);
        let is_it = |place: &Listener| {
            place.state.load(Acquire) == me + 1
                && is_at(place, at)
                && place.netns.load(Relaxed) == netns
        };
        if let Some((index, _)) = places.find(|(_, place)| is_it(place)) {
            self.unregister_listener(index as u32);
        }
    }

    /// Whether anybody on this device listens there (maybe already dead: harmless): of this user in this network
    /// namespace or, with `None`, of any user in any.
    pub fn is_listening(&self, netns: Option<u64>, at: Endpoint) -> bool {
        is_there(self, netns, at, has_just_left)
    }

    /// Whether a listener is registered there that was not closed.
    pub fn is_registered(&self, netns: u64, at: Endpoint) -> bool {
        is_there(self, Some(netns), at, |_| false)
    }
}

/// Whether that is the place's address and port.
fn is_at(place: &Listener, at: Endpoint) -> bool {
    let addr = place.addr.each_ref().map(|half| half.load(Relaxed));
    place.port.load(Relaxed) == u32::from(at.port) && addr == halves(&at)
}

fn is_there(
    board: &Board<'_>,
    netns: Option<u64>,
    at: Endpoint,
    counts: fn(&Listener) -> bool,
) -> bool {
    let want = halves(&at);
    // Of another user's memory the offer table alone says too little: that is for CLC.
    let uid = netns.map(|_| sys::geteuid());
    if uid.is_some_and(|uid| !owner::is_exact(uid)) {
        return false;
    }
    board.listeners_at(at.port).any(|(_, place)| {
        let state = place.state.load(Acquire);
        if state == LISTENER_CLAIMED || place.port.load(Relaxed) != at.port as u32 {
            return false;
        }
        let counts = if state == 0 { counts(place) } else { board.owners.stays(state - 1) };
        if !counts {
            return false;
        }
        let have = [place.addr[0].load(Relaxed), place.addr[1].load(Relaxed)];
        // :: and 0.0.0.0 (mapped) take every address; an offer nobody attaches harms nobody.
        let wildcard = have[0] == 0 && (have[1] == 0 || have[1] == 0xffff_0000_0000);
        netns.is_none_or(|n| n == place.netns.load(Relaxed))
            && uid.is_none_or(|uid| uid == place.uid.load(Relaxed))
            && (wildcard || have == want)
    })
}

/// A server that serves one connection may close its listener before the client looks for it here.
fn has_just_left(place: &Listener) -> bool {
    let left_at = place.left_at.load(Relaxed);
    left_at != 0 && clock::wall_ns().wrapping_sub(left_at) < JUST_NS
}
