//! Keys of RMBs: the peer's on every link, and the flows that keep them known to both sides.

use super::{Event, Fabric, Flow, LINKS, LinkGroup, LinkIndex, Outgoing, Refused, What};
use crate::handshake::LLC_TIMEOUT;
use crate::ids::RoceGid;
use crate::list::List;
use crate::wire::llc::{
    AddLink, AddLinkExt, Body, ConfirmRkey, DeleteRkey, Gids, LinkRkey, Message, ReqAddLink,
    RkeyUpdate, RkeyUpdates, Rkeys, Version,
};

use super::Time;

/// What an RMB is called on one link.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Key {
    /// Key for RDMA WRITEs.
    pub rkey: u32,
    /// Virtual address.
    pub addr: u64,
}

/// An RMB's number has its place in the low bits, and above which one of that place it is: a connection that names an RMB which was
/// withdrawn must not find the next one there.
const PLACE_BITS: u32 = 8;
const PLACES: usize = (1 << PLACE_BITS) - 1;
const BEFORE: usize = 0xff_ffff;
/// Keys that were withdrawn last, and are remembered.
const GONE: usize = 64;

/// The peer's RMBs, with their keys on every link that has them.
#[derive(Debug)]
pub struct PeerRmbs<const RMBS: usize> {
    keys: [[Option<Key>; LINKS]; RMBS],
    /// How many RMBs each place has had before.
    before: [u32; RMBS],
    forgotten: u32,
    /// Keys that were withdrawn, and when; and where the next one goes.
    gone: [Option<(LinkIndex, u32, Time)>; GONE],
    next_gone: usize,
}

impl<const RMBS: usize> PeerRmbs<RMBS> {
    pub(super) fn new() -> PeerRmbs<RMBS> {
        let (keys, gone) = ([[None; LINKS]; RMBS], [None; GONE]);
        PeerRmbs { keys, before: [0; RMBS], forgotten: 0, gone, next_gone: 0 }
    }

    /// Whether the peer has withdrawn the key behind that time, and not announced it since. An Accept that names it, and whose Proposal was
    /// sent before, has come late: its server has given up meanwhile. (Numbers of keys come again.)
    pub fn was_withdrawn(&self, index: LinkIndex, rkey: u32, since: Time) -> bool {
        let is_it =
            |&(of, key, at): &(LinkIndex, u32, Time)| (of, key) == (index, rkey) && at > since;
        self.gone.iter().flatten().any(is_it)
    }

    fn is_gone(&mut self, index: LinkIndex, rkey: u32, now: Time) {
        if let Some(place) = self.gone.get_mut(self.next_gone % GONE) {
            *place = Some((index, rkey, now));
        }
        self.next_gone = self.next_gone.wrapping_add(1);
    }

    /// The peer has announced the key. A Linux server withdraws an RMB with each connection that ends, and announces it to the next client
    /// that gets it (`smcr_buf_unuse`, `smcr_lgr_reg_rmbs`).
    fn is_back(&mut self, index: LinkIndex, rkey: u32) {
        for gone in &mut self.gone {
            *gone = gone.filter(|&(of, key, _)| (of, key) != (index, rkey));
        }
    }

    /// The key of an RMB on a link; none once the peer has withdrawn it, whatever it has in its place.
    pub fn key(&self, rmb: usize, index: LinkIndex) -> Option<Key> {
        let place = self.place(rmb)?;
        *self.keys.get(place)?.get(index.number())?
    }

    /// How many RMBs the peer has withdrawn.
    pub fn forgotten(&self) -> u32 {
        self.forgotten
    }

    fn place(&self, rmb: usize) -> Option<usize> {
        let place = rmb & PLACES;
        (*self.before.get(place)? as usize & BEFORE == rmb >> PLACE_BITS).then_some(place)
    }

    fn number(&self, place: usize) -> usize {
        let before = self.before.get(place).map_or(0, |before| *before as usize & BEFORE);
        before << PLACE_BITS | place
    }

    fn numbers(&self) -> impl Iterator<Item = usize> {
        (0..RMBS).map(|place| self.number(place))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.keys.iter().filter(|keys| keys.iter().any(Option::is_some)).count()
    }

    /// The RMBs with this key on a link. There are several if the peer has registered them in one
    /// piece: only their addresses tell them apart.
    fn with_rkey(&self, index: LinkIndex, rkey: u32) -> impl Iterator<Item = usize> {
        self.numbers().filter(move |&rmb| self.key(rmb, index).is_some_and(|key| key.rkey == rkey))
    }

    fn set(&mut self, rmb: usize, index: LinkIndex, key: Option<Key>) {
        let Some(place) = self.place(rmb) else { return };
        if let Some(slot) = self.keys.get_mut(place).and_then(|keys| keys.get_mut(index.number())) {
            *slot = key;
        }
    }

    /// Adds an RMB by its key on one link; one that is known by key and address keeps its number
    /// (`smc_rtoken_add`).
    pub(super) fn add(&mut self, index: LinkIndex, key: Key) -> Option<usize> {
        let known = self.numbers().find(|&rmb| self.key(rmb, index) == Some(key));
        let free = || {
            let place = self.keys.iter().position(|keys| keys.iter().all(Option::is_none))?;
            Some(self.number(place))
        };
        let rmb = known.or_else(free)?;
        self.set(rmb, index, Some(key));
        Some(rmb)
    }

    /// Records what an RMB known on `via` is called on `new`. Among several with the same key on
    /// `via` it is the one at the same address, for the same memory has one. If there is none, none
    /// is meant: a WRITE without a key fails, one to another's memory would not.
    pub(super) fn update(&mut self, via: LinkIndex, new: LinkIndex, update: RkeyUpdate) {
        let several = self.with_rkey(via, update.old).nth(1).is_some();
        let is_meant = |&rmb: &usize| {
            !several || self.key(rmb, via).is_some_and(|key| key.addr == update.addr)
        };
        let found = self.with_rkey(via, update.old).find(is_meant);
        if let Some(rmb) = found {
            self.set(rmb, new, Some(Key { rkey: update.new, addr: update.addr }));
        }
    }

    pub(super) fn forget_link(&mut self, index: LinkIndex) {
        for keys in &mut self.keys {
            if let Some(key) = keys.get_mut(index.number()) {
                *key = None;
            }
        }
        for gone in &mut self.gone {
            *gone = gone.filter(|(of, ..)| *of != index);
        }
    }

    /// Forgets all RMBs with this key: it is gone, and with it the way to each of them. False if
    /// there is none.
    fn forget(&mut self, index: LinkIndex, rkey: u32, now: Time) -> bool {
        let mut any = false;
        self.is_gone(index, rkey, now);
        for place in 0..RMBS {
            let (Some(keys), Some(before)) = (self.keys.get_mut(place), self.before.get_mut(place))
            else {
                continue;
            };
            let named = keys.get(index.number()).copied().flatten();
            if named.is_some_and(|key| key.rkey == rkey) {
                any = true;
                *before = before.wrapping_add(1);
                self.forgotten = self.forgotten.wrapping_add(1);
                let all = core::mem::replace(keys, [None; LINKS]);
                for (other, key) in LinkIndex::ALL.into_iter().zip(all) {
                    if let Some(key) = key.filter(|_| other != index) {
                        self.is_gone(other, key.rkey, now);
                    }
                }
            }
        }
        any
    }
}

impl<const RMBS: usize> LinkGroup<RMBS> {
    /// Tells the peer of a new RMB; [`Event::Announced`] says whether it knows it.
    pub fn announce_rmb(
        &mut self,
        rmb: usize,
        fabric: &mut impl Fabric,
        now: Time,
    ) -> Result<(), Refused> {
        let (via, first) = self.ready(rmb, fabric)?;
        let mut others = List::new();
        for (index, link_id) in self.active_links().filter(|&(index, _)| index != via) {
            let Key { rkey, addr } = fabric.key(rmb, index).ok_or(Refused::NoRmb)?;
            let _ = others.push(LinkRkey { link_id, rkey, addr });
        }
        let Key { rkey, addr } = first;
        let confirm = ConfirmRkey { rkey, addr, others, negative: false, retry: false };
        self.send(via, false, Body::ConfirmRkey(confirm));
        self.flow = Flow::Announce { via, rmb, deadline: now + LLC_TIMEOUT };
        Ok(())
    }

    /// How many more RMBs may get a key, whichever side they are on: each side records those of the
    /// other until they are withdrawn, Linux at most 255 of them. A server whose group has none left
    /// begins another ([`Groups::set_keys_left`](crate::groups::Groups::set_keys_left)).
    pub fn keys_left(&self) -> usize {
        RMBS - self.peer_rmbs.count().max(self.announced_rmbs().count())
    }

    /// Tells the peer that an RMB is gone; [`Event::Withdrawn`] says that it will not write there
    /// any more. The message names its key alone: where several RMBs have one, all of them are gone
    /// for the peer.
    pub fn withdraw_rmb(
        &mut self,
        rmb: usize,
        fabric: &mut impl Fabric,
        now: Time,
    ) -> Result<(), Refused> {
        let (via, key) = self.ready(rmb, fabric)?;
        let what = What::Withdraw { rkey: key.rkey };
        self.transmits.push(Outgoing { via, response: false, what });
        self.flow = Flow::Withdraw { via, rmb, deadline: now + LLC_TIMEOUT };
        Ok(())
    }

    fn ready(&self, rmb: usize, fabric: &mut impl Fabric) -> Result<(LinkIndex, Key), Refused> {
        if !self.is_idle() || !self.has_room() {
            return Err(Refused::Busy);
        }
        let via = self.any_link().ok_or(Refused::NoLink)?;
        let key = fabric.key(rmb, via).filter(|_| rmb < RMBS).ok_or(Refused::NoRmb)?;
        Ok((via, key))
    }

    pub(super) fn on_announced(&mut self, ok: bool) {
        if let Flow::Announce { rmb, .. } = self.flow {
            self.flow = Flow::Idle;
            if ok {
                self.rmb_was_named(rmb);
            }
            self.events.push(Event::Announced { rmb, ok });
        }
    }

    pub(super) fn on_withdrawn(&mut self, ok: bool) {
        if let Flow::Withdraw { rmb, .. } = self.flow {
            self.flow = Flow::Idle;
            if let Some(announced) = self.announced.get_mut(rmb) {
                *announced = false;
            }
            self.events.push(Event::Withdrawn { rmb, ok });
        }
    }

    /// The peer has a new RMB.
    pub(super) fn on_peer_rmb(&mut self, via: LinkIndex, request: ConfirmRkey) {
        let added = self.peer_rmbs.add(via, Key { rkey: request.rkey, addr: request.addr });
        self.peer_rmbs.is_back(via, request.rkey);
        if let Some(rmb) = added {
            for other in request.others.iter() {
                if let Some(index) = self.by_id(other.link_id) {
                    let key = Key { rkey: other.rkey, addr: other.addr };
                    self.peer_rmbs.is_back(index, other.rkey);
                    self.peer_rmbs.set(rmb, index, Some(key));
                }
            }
        }
        let full = added.is_none();
        let answer = ConfirmRkey { negative: full, retry: full, ..request };
        self.send(via, true, Body::ConfirmRkey(answer));
    }

    /// The peer's RMBs are gone.
    pub(super) fn on_peer_rmb_gone(&mut self, via: LinkIndex, request: &DeleteRkey<'_>, now: Time) {
        let mut rkeys = List::new();
        let (mut mask, mut invalid) = (0, 0_u8);
        for (n, rkey) in request.rkeys.iter().enumerate() {
            let _ = rkeys.push(rkey);
            if !self.peer_rmbs.forget(via, rkey, now) {
                mask |= 0x80_u8.checked_shr(n as u32).unwrap_or(0);
                invalid = invalid.saturating_add(1);
            }
        }
        let invalid = if self.config.version == Version::V1 { mask } else { invalid };
        let count = request.rkeys.len() as u8;
        let what = What::Forgotten { rkeys, count, invalid };
        self.transmits.push(Outgoing { via, response: true, what });
    }

    /// This side's RMBs that the peer knows.
    pub(super) fn announced_rmbs(&self) -> impl Iterator<Item = usize> {
        self.announced.iter().enumerate().filter(|(_, known)| **known).map(|(rmb, _)| rmb)
    }

    /// What an RMB is called on a further link.
    pub(super) fn update_for(
        rmb: usize,
        via: LinkIndex,
        new: LinkIndex,
        fabric: &mut impl Fabric,
    ) -> Option<RkeyUpdate> {
        let (old, new) = (fabric.key(rmb, via)?, fabric.key(rmb, new)?);
        Some(RkeyUpdate { old: old.rkey, new: new.rkey, addr: new.addr })
    }

    /// Writes a message, with the lists that it has by now, and gives its length.
    pub(super) fn write(
        &self,
        outgoing: &Outgoing,
        fabric: &mut impl Fabric,
        buffer: &mut [u8],
    ) -> Option<usize> {
        let Outgoing { via, response, what } = *outgoing;
        let mut updates = [[0; 16]; 255];
        let mut gids = [[0; 16]; LINKS + 1];
        let mut rkeys = [[0; 4]; 255];
        let body = match what {
            What::Plain(body) => body,
            What::Add { new } => {
                let link = self.link(new)?;
                let mut count = 0;
                for rmb in self.announced_rmbs() {
                    let update = Self::update_for(rmb, via, new, fabric);
                    if let (Some(update), Some(slot)) = (update, updates.get_mut(count)) {
                        *slot = update.to_wire();
                        count += 1;
                    }
                }
                Body::AddLink(AddLink {
                    extension: Some(AddLinkExt {
                        direct: link.local.direct,
                        // Both sides of the kernel name their own GID here.
                        target_gid: link.local.gid,
                        rkeys: RkeyUpdates::from_wire(updates.get(..count)?),
                    }),
                    ..Self::add_link_body(link)
                })
            }
            What::Request { gid } => {
                let links = self.indexed().map(|(_, link)| link.local.gid);
                let mut count = 0;
                for (slot, RoceGid(gid)) in gids.iter_mut().zip(links.chain(gid)) {
                    *slot = gid;
                    count += 1;
                }
                Body::ReqAddLink(ReqAddLink { gids: Gids::from_wire(gids.get(..count)?) })
            }
            What::Withdraw { rkey } => {
                rkeys[0] = rkey.to_be_bytes();
                let rkeys = Rkeys::from_wire(rkeys.get(..1)?);
                Body::DeleteRkey(DeleteRkey { rkeys, invalid: 0, negative: false })
            }
            What::Forgotten { rkeys: known, count, invalid } => {
                if self.config.version == Version::V1 {
                    for (slot, rkey) in rkeys.iter_mut().zip(known.iter()) {
                        *slot = rkey.to_be_bytes();
                    }
                }
                let rkeys = Rkeys::from_wire(rkeys.get(..usize::from(count))?);
                Body::DeleteRkey(DeleteRkey { rkeys, invalid, negative: invalid != 0 })
            }
        };
        let message = match response {
            true => Message::response(self.config.version, body),
            false => Message::request(self.config.version, body),
        };
        Some(message.emit(buffer).ok()?.len())
    }
}
