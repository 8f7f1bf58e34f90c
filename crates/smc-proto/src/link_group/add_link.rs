//! A further link: the server offers it, the client agrees or rejects, both name the keys of their
//! RMBs, and CONFIRM_LINK goes both ways over it (RFC 7609 section 4; `smc_llc_srv_add_link`,
//! `smc_llc_cli_add_link`).
//!
//! ```text
//! server                                              client
//!   │── ADD_LINK (v2: with all keys) ─────────────────▶│   over a link that works
//!   │◀──────────────── ADD_LINK response, or rejected ─│
//!   │── ADD_LINK_CONT ────────────────────────────────▶│   v1: two keys at a time, in turn,
//!   │◀────────────────────────── ADD_LINK_CONT ────────│   until neither side has any left
//!   │══ CONFIRM_LINK ═════════════════════════════════▶│   over the new link
//!   │◀════════════════════════ CONFIRM_LINK response ══│
//! ```

use super::{
    CONFIRM_TIMEOUT, Config, Connect, Delayed, Event, Fabric, Flow, LINKS, Link, LinkGroup,
    LinkIndex, Outgoing, Port, Refused, Role, Time, What,
};
use crate::handshake::LLC_TIMEOUT;
use crate::ids::{MtuCode, RoceGid};
use crate::list::List;
use crate::wire::llc::{AddLink, AddLinkCont, Body, DeleteLink, DeleteReason, RkeyUpdate, Version};

/// What the flow waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Server: the client's answer to ADD_LINK.
    Answer,
    /// The queue pair is connected to the peer's; the peer waits.
    Connecting,
    /// Version 1: keys from the peer; so many of this side's RMBs are sent.
    Keys {
        /// How many.
        sent: usize,
    },
    /// CONFIRM_LINK over the new link.
    Confirm,
}

/// Reason of a rejection (`smc_llc.c`).
const NO_ALTERNATE_PATH: u8 = 1;

impl<const RMBS: usize> LinkGroup<RMBS> {
    /// Tries to get a further link: the server offers it, the client asks the server to, naming
    /// the GID of another port if it has one. Nothing more is heard of it if none can be had.
    pub fn add_link(
        &mut self,
        alternate: Option<RoceGid>,
        fabric: &mut impl Fabric,
        now: Time,
    ) -> Result<(), Refused> {
        if !self.has_room() {
            return Err(Refused::Busy);
        }
        self.try_add_link(alternate, fabric, now)
    }

    pub(super) fn try_add_link(
        &mut self,
        alternate: Option<RoceGid>,
        fabric: &mut impl Fabric,
        now: Time,
    ) -> Result<(), Refused> {
        if !self.is_idle() {
            return Err(Refused::Busy);
        }
        // A server that is asked offers another port than that link's: the one of an asymmetric link is to be free for it.
        let stays = self.symmetric().find(|(_, link)| link.active).map(|(index, _)| index);
        let via = stays.or(self.any_link()).ok_or(Refused::NoLink)?;
        if !self.may_add() {
            return Err(Refused::LinksFull);
        }
        match (self.config.role, self.config.version) {
            (Role::Server, _) => self.offer_link(via, fabric, now),
            (Role::Client, Version::V2) => {
                let what = What::Request { gid: alternate };
                self.transmits.push(Outgoing { via, response: false, what });
                self.flow = Flow::Request { deadline: now + LLC_TIMEOUT };
            }
            // A recommendation, of which the server only reads that it is one.
            (Role::Client, Version::V1) => {
                let port = Port { gid: alternate.unwrap_or_default(), ..Port::default() };
                let link = Link::new(port, Port::default(), now);
                self.send(via, false, Body::AddLink(Self::add_link_body(&link)));
            }
        }
        Ok(())
    }

    /// Whether the group may have one more link. An asymmetric one does not count, as the next one replaces it.
    pub fn may_add(&self) -> bool {
        let Config { max_links, .. } = self.config;
        let (all, symmetric) = (self.indexed().count(), self.symmetric().count());
        max_links > 1 && symmetric < usize::from(max_links) && all < LINKS
    }

    /// Whether the group has an asymmetric link.
    pub fn is_asymmetric(&self) -> bool {
        self.asymmetric().is_some()
    }

    /// The asymmetric link, which the next one replaces.
    pub(super) fn asymmetric(&self) -> Option<LinkIndex> {
        self.indexed().find(|(_, link)| link.asymmetric).map(|(index, _)| index)
    }

    /// The links that are not asymmetric.
    fn symmetric(&self) -> impl Iterator<Item = (LinkIndex, &Link)> {
        self.indexed().filter(|(_, link)| !link.asymmetric)
    }

    /// Whether a link that stays has one of this one's ports.
    fn shares_port(&self, index: LinkIndex) -> bool {
        let Some(link) = self.link(index) else { return false };
        self.symmetric().any(|(other, has)| {
            other != index
                && (self.same_port(&has.local, &link.local)
                    || self.same_port(&has.remote, &link.remote))
        })
    }

    fn offer_link(&mut self, via: LinkIndex, fabric: &mut impl Fabric, now: Time) {
        let Some((new, alternate)) = self.create_link(fabric, now) else { return };
        if !alternate && self.asymmetric().is_some() {
            // It would replace nothing.
            return self.drop_link(new, fabric);
        }
        self.last_link_id = self.unused_id();
        let id = self.last_link_id;
        if let Some(link) = self.link_mut(new) {
            link.id = id;
        }
        self.transmits.push(Outgoing { via, response: false, what: What::Add { new } });
        self.flow = Flow::Add { via, new, step: Step::Answer, deadline: now + LLC_TIMEOUT };
    }

    fn unused_id(&self) -> u8 {
        let mut id = self.last_link_id;
        loop {
            id = id.wrapping_add(1).max(1);
            if self.by_id(id).is_none() {
                return id;
            }
        }
    }

    /// A queue pair in a free place; true if its port is one that no other link uses, but for one that it replaces.
    fn create_link(&mut self, fabric: &mut impl Fabric, now: Time) -> Option<(LinkIndex, bool)> {
        let index = LinkIndex::ALL.into_iter().find(|&index| self.link(index).is_none())?;
        let mut used = List::<Port, LINKS>::new();
        for (_, link) in self.symmetric() {
            let _ = used.push(link.local);
        }
        let local = fabric.create(index, &used)?;
        let alternate = !used.iter().any(|port| (port.gid, port.mac) == (local.gid, local.mac));
        let link = Link::new(local, Port::default(), now);
        *self.links.get_mut(index.number())? = Some(link);
        Some((index, alternate))
    }

    pub(super) fn add_link_body(link: &Link) -> AddLink<'static> {
        AddLink {
            mac: link.local.mac,
            gid: link.local.gid,
            qpn: link.local.qpn,
            link_id: link.id,
            // The smaller one where the peer's is known.
            mtu: match link.remote.mtu.code() {
                0 => link.local.mtu,
                _ => link.local.mtu.min(link.remote.mtu),
            },
            psn: link.local.psn,
            rejected: None,
            extension: None,
        }
    }

    /// Client: the server offers a link. Server: the client recommends one.
    pub(super) fn on_add_request(
        &mut self,
        via: LinkIndex,
        add: &AddLink<'_>,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        if self.config.role == Role::Server {
            return self.on_add_wish(via, fabric, now);
        }
        let rejected = Some(NO_ALTERNATE_PATH);
        let rejection = without_lists(AddLink { rejected, ..*add });
        let busy = !matches!(self.flow, Flow::Idle | Flow::Request { .. });
        if busy && self.delayed.is_none() {
            self.delayed = Some(Delayed::Add);
        }
        let remote = Port {
            mac: add.mac,
            gid: add.gid,
            qpn: add.qpn,
            psn: add.psn,
            mtu: add.mtu,
            direct: add.extension.is_some_and(|extension| extension.direct),
        };
        let known = self.symmetric().any(|(_, link)| self.same_port(&link.remote, &remote));
        if busy
            || add.mtu == MtuCode::default()
            || !self.may_add()
            || self.by_id(add.link_id).is_some()
        {
            return self.send(via, true, Body::AddLink(rejection));
        }
        self.flow = Flow::Idle;
        let Some((new, alternate)) = self.create_link(fabric, now) else {
            return self.send(via, true, Body::AddLink(rejection));
        };
        let is_second = self.asymmetric().is_some();
        if let Some(link) = self.link_mut(new) {
            (link.id, link.remote, link.asymmetric) = (add.link_id, remote, known || !alternate);
        }
        // Two links between the same two ports are of no use, nor is a second one that shares a port.
        let connect = match known && !alternate || (known || !alternate) && is_second {
            true => Connect::Failed,
            false => fabric.connect(new, &remote),
        };
        self.learn_keys(via, new, add);
        self.on_connect(connect, via, new, fabric, now);
    }

    /// The answer that [`Connect::Pending`] has promised, about a link that was not destroyed since.
    pub fn on_connected(
        &mut self,
        index: LinkIndex,
        ok: bool,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let Flow::Add { via, new, step: Step::Connecting, .. } = self.flow else { return };
        if index == new {
            let connect = if ok { Connect::Done } else { Connect::Failed };
            self.on_connect(connect, via, new, fabric, now);
            self.run_delayed(fabric, now);
        }
    }

    /// What is to be done with the peer's word, as far as it is known whether the link can be.
    fn on_connect(
        &mut self,
        connect: Connect,
        via: LinkIndex,
        new: LinkIndex,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let (step, deadline) = (Step::Connecting, now + LLC_TIMEOUT);
        self.flow = Flow::Add { via, new, step, deadline };
        match (connect, self.config.role) {
            (Connect::Pending, _) => {}
            (Connect::Done, Role::Client) => self.agree(via, new, now),
            (Connect::Done, Role::Server) => self.exchange_keys(via, new, fabric, now),
            (Connect::Failed, Role::Client) => {
                if let Some(&Link { id, remote, .. }) = self.link(new) {
                    let said = Self::add_link_body(&Link { id, ..Link::new(remote, remote, now) });
                    let rejected = Some(NO_ALTERNATE_PATH);
                    self.send(via, true, Body::AddLink(AddLink { rejected, ..said }));
                }
                self.abandon_new_link(false, fabric);
            }
            (Connect::Failed, Role::Server) => self.abandon_new_link(true, fabric),
        }
    }

    /// Client: the link is wanted, and ready here.
    fn agree(&mut self, via: LinkIndex, new: LinkIndex, now: Time) {
        self.transmits.push(Outgoing { via, response: true, what: What::Add { new } });
        let (step, patience) = match self.config.version {
            Version::V1 => (Step::Keys { sent: 0 }, LLC_TIMEOUT),
            Version::V2 => (Step::Confirm, CONFIRM_TIMEOUT),
        };
        self.flow = Flow::Add { via, new, step, deadline: now + patience };
    }

    fn same_port(&self, a: &Port, b: &Port) -> bool {
        a.gid == b.gid && (self.config.version == Version::V2 || a.mac == b.mac)
    }

    /// Server: the client would like a further link.
    pub(super) fn on_add_wish(&mut self, via: LinkIndex, fabric: &mut impl Fabric, now: Time) {
        if self.config.role == Role::Client {
            return;
        }
        if self.is_idle() && self.may_add() {
            self.offer_link(via, fabric, now);
        } else if !self.is_idle() && self.delayed.is_none() {
            self.delayed = Some(Delayed::Add);
        }
    }

    /// Server: the client's answer.
    pub(super) fn on_add_response(
        &mut self,
        index: LinkIndex,
        add: &AddLink<'_>,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let Flow::Add { via, new, step: Step::Answer, .. } = self.flow else { return };
        if index != via {
            return;
        }
        if add.rejected.is_some() {
            return self.abandon_new_link(false, fabric);
        }
        let remote = Port {
            mac: add.mac,
            gid: add.gid,
            qpn: add.qpn,
            psn: add.psn,
            mtu: add.mtu,
            direct: add.extension.is_some_and(|extension| extension.direct),
        };
        let is_second = self.asymmetric().is_some();
        if let Some(link) = self.link_mut(new) {
            link.remote = remote;
        }
        let shares = self.shares_port(new);
        if let Some(link) = self.link_mut(new) {
            link.asymmetric = shares;
        }
        let connect = match shares && is_second {
            true => Connect::Failed,
            false => fabric.connect(new, &remote),
        };
        self.learn_keys(via, new, add);
        self.on_connect(connect, via, new, fabric, now);
    }

    /// Server: the client agrees, and the link is ready here.
    fn exchange_keys(
        &mut self,
        via: LinkIndex,
        new: LinkIndex,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        match self.config.version {
            Version::V1 => {
                let sent = self.send_keys(via, new, 0, false, fabric);
                let step = Step::Keys { sent };
                self.flow = Flow::Add { via, new, step, deadline: now + LLC_TIMEOUT };
            }
            Version::V2 => self.confirm_new_link(via, new, now),
        }
    }

    fn learn_keys(&mut self, via: LinkIndex, new: LinkIndex, add: &AddLink<'_>) {
        for update in add.extension.iter().flat_map(|extension| extension.rkeys.iter()) {
            self.peer_rmbs.update(via, new, update);
        }
    }

    /// Sends the next two keys at most, and gives how many are sent by now.
    fn send_keys(
        &mut self,
        via: LinkIndex,
        new: LinkIndex,
        sent: usize,
        response: bool,
        fabric: &mut impl Fabric,
    ) -> usize {
        let mut rkeys = List::<RkeyUpdate, 2>::new();
        let total = self.announced_rmbs().count();
        for rmb in self.announced_rmbs().skip(sent).take(2) {
            // One that cannot be registered is named as it is: the link is of no use to it.
            let update = Self::update_for(rmb, via, new, fabric).unwrap_or_default();
            let _ = rkeys.push(update);
        }
        let sent = sent + rkeys.len();
        let more = total.saturating_sub(sent) as u8;
        let link_id = self.link(new).map_or(0, |link| link.id);
        self.send(via, response, Body::AddLinkCont(AddLinkCont { link_id, rkeys, more }));
        sent
    }

    /// Version 1: keys from the peer. The server asks, the client answers, until neither has more.
    pub(super) fn on_add_cont(
        &mut self,
        index: LinkIndex,
        cont: &AddLinkCont,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let Flow::Add { via, new, step: Step::Keys { sent }, .. } = self.flow else { return };
        if index != via {
            return;
        }
        for &update in cont.rkeys.iter() {
            self.peer_rmbs.update(via, new, update);
        }
        let server = self.config.role == Role::Server;
        let total = self.announced_rmbs().count();
        if server && sent >= total && cont.more == 0 {
            return self.confirm_new_link(via, new, now);
        }
        let sent = self.send_keys(via, new, sent, !server, fabric);
        let done = !server && sent >= total && cont.more == 0;
        let (step, patience) = match done {
            true => (Step::Confirm, CONFIRM_TIMEOUT),
            false => (Step::Keys { sent }, LLC_TIMEOUT),
        };
        self.flow = Flow::Add { via, new, step, deadline: now + patience };
    }

    /// Server: the new link is to be confirmed.
    fn confirm_new_link(&mut self, via: LinkIndex, new: LinkIndex, now: Time) {
        self.send_confirm_link(new, false);
        let deadline = now + CONFIRM_TIMEOUT;
        self.flow = Flow::Add { via, new, step: Step::Confirm, deadline };
    }

    /// Client: the server's CONFIRM_LINK came over the new link.
    pub(super) fn on_new_link_confirm_request(&mut self, index: LinkIndex, now: Time) {
        let Flow::Add { new, step, .. } = self.flow else { return };
        if index == new && step == Step::Confirm && self.config.role == Role::Client {
            self.send_confirm_link(new, true);
            self.activate(new, now);
        }
    }

    /// Server: the client's answer came over the new link.
    pub(super) fn on_new_link_confirmed(
        &mut self,
        index: LinkIndex,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let Flow::Add { new, step, .. } = self.flow else { return };
        if index == new && step == Step::Confirm && self.config.role == Role::Server {
            self.activate(new, now);
            self.replace_asymmetric(new, fabric, now);
            self.run_delayed(fabric, now);
        }
    }

    fn activate(&mut self, new: LinkIndex, now: Time) {
        self.flow = Flow::Idle;
        if let Some(link) = self.link_mut(new) {
            (link.active, link.heard) = (true, now);
        }
        self.events.push(Event::LinkUp(new));
    }

    /// The new link does not come about. `tell`: the peer may think that it does.
    pub(super) fn abandon_new_link(&mut self, tell: bool, fabric: &mut impl Fabric) {
        let Flow::Add { via, new, .. } = self.flow else { return };
        self.flow = Flow::Idle;
        let Some(id) = self.link(new).map(|link| link.id) else { return };
        self.drop_link(new, fabric);
        if tell {
            let reason = DeleteReason::LOST_PATH;
            let delete = DeleteLink { link_id: id, reason, all: false, orderly: false };
            self.send(via, false, Body::DeleteLink(delete));
        }
    }

    /// Forgets a link that carries no connection.
    pub(super) fn drop_link(&mut self, index: LinkIndex, fabric: &mut impl Fabric) {
        if self.take_link(index).is_some() {
            self.peer_rmbs.forget_link(index);
            fabric.destroy(index);
        }
        // The one whose port it had may be the one that is gone.
        if let Some(rest) = self.asymmetric().filter(|rest| !self.shares_port(*rest))
            && let Some(link) = self.link_mut(rest)
        {
            link.asymmetric = false;
        }
    }
}

/// An ADD_LINK that outlives the message it came in.
fn without_lists(add: AddLink<'_>) -> AddLink<'static> {
    let AddLink { mac, gid, qpn, link_id, mtu, psn, rejected, .. } = add;
    AddLink { mac, gid, qpn, link_id, mtu, psn, rejected, extension: None }
}
