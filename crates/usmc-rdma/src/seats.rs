//! Places in link groups: a connection joins one or begins one, and names its RMB there.

use smc_proto::groups::Need;
use smc_proto::handshake::{CLC_TIMEOUT, SmcrSide};
use smc_proto::link_group::{self, Connect, Key, LinkGroup, LinkIndex, Port, Role, Time};
use smc_proto::list::List;
use smc_proto::wire::clc::{Local, Os, Smcr};
use smc_proto::wire::llc::Version;

use crate::buffers::Buffers;
use crate::clc::Stage;
use crate::connection::{ConnId, Seat};
use crate::engine::Engine;
use crate::groups::{Group, GroupIndex, RMBS, RmbState};
use crate::link::Link;
use crate::nic::{Nic, RmbId};

/// The first link of a group, at each end.
const FIRST: LinkIndex = LinkGroup::<RMBS>::FIRST;

/// What a connection finds that looks for a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Joined {
    At(GroupIndex),
    /// There is one, but another group's peer has a key for its RMB.
    Waits,
    Nowhere,
}

impl<B: Buffers> Engine<B> {
    pub(crate) fn group_of(&self, conn: ConnId) -> Option<GroupIndex> {
        Some(self.conns.get(conn)?.seat?.group)
    }

    /// A place in a group that exists.
    pub(crate) fn join(&mut self, conn: ConnId, need: &Need, now: Time) -> Joined {
        let Some(id) = self.known.join(need) else { return Joined::Nowhere };
        let is_it = |group: &Option<Box<Group>>| group.as_ref().is_some_and(|one| one.id == id);
        let group = self.groups.iter().position(is_it).map(|at| GroupIndex(at as u16));
        let joined = match group {
            Some(group) if !self.may_have_rmb(conn, Some(group)) => Joined::Waits,
            Some(group) if self.sit_down(conn, group, need).is_some() => Joined::At(group),
            _ => Joined::Nowhere,
        };
        if !matches!(joined, Joined::At(_)) {
            self.known.leave(id, now);
        }
        self.look_at_idle();
        joined
    }

    fn sit_down(&mut self, conn: ConnId, at: GroupIndex, need: &Need) -> Option<()> {
        let rmb = self.conns.get(conn)?.data.memory.rmb;
        let group = self.groups.get_mut(at.number())?.as_mut()?;
        let link = match &group.llc {
            Some(flows) if group.is_up => {
                let active = |which| flows.links().filter(|link| link.active).nth(which);
                self.known.link(group.id, need).and_then(active)?.index
            }
            _ => FIRST,
        };
        group.take(rmb)?;
        group.conns.push(conn);
        self.holders.insert(rmb, at);
        self.conns.get_mut(conn)?.seat = Some(Seat::new(at, link));
        self.name_links(at);
        self.look_at_rmbs(at);
        Some(())
    }

    /// Whether the connection's RMB can serve this group, or a new one: no other one's peer can write there.
    pub(crate) fn may_have_rmb(&mut self, conn: ConnId, group: Option<GroupIndex>) -> bool {
        let Some(rmb) = self.conns.get(conn).map(|conn| conn.data.memory.rmb) else { return false };
        let Some(holder) = self.holder(rmb) else { return true };
        let known = self.group_mut(holder).and_then(|holder| holder.rmb_mut(rmb));
        Some(holder) == group && known.is_some_and(|rmb| rmb.state != RmbState::Leaves)
    }

    /// The connection goes on once its RMB was withdrawn.
    pub(crate) fn hold(&mut self, conn: ConnId, stage: Stage, nic: &mut impl Nic, now: Time) {
        let Some(rmb) = self.conns.get(conn).map(|conn| conn.data.memory.rmb) else { return };
        self.wait(conn, stage, Some(now + CLC_TIMEOUT));
        self.held.push_back(conn);
        self.withdraw(rmb, nic, now);
    }

    /// Leaves it again.
    pub(crate) fn unseat(&mut self, conn: ConnId, now: Time) {
        let Some(known) = self.conns.get_mut(conn) else { return };
        let rmb = known.data.memory.rmb;
        if let Some(seat) = known.seat.take() {
            self.leave(conn, seat.group, rmb, now);
        }
    }

    /// A connection has no place in the group any more.
    pub(crate) fn leave(&mut self, conn: ConnId, group: GroupIndex, rmb: RmbId, now: Time) {
        let Some(state) = self.group_mut(group) else { return };
        state.leave(conn, rmb);
        let id = state.id;
        self.known.leave(id, now);
        self.name_links(group);
        self.look_at_idle();
        self.look_at_rmbs(group);
    }

    /// The group whose peer has a key for this RMB, or gets one. A connection of that group can have the RMB at once, without an
    /// announcement; a connection of another group waits until the RMB was withdrawn.
    pub fn holder(&self, rmb: RmbId) -> Option<GroupIndex> {
        self.holders.get(&rmb).copied()
    }

    /// Asks for an RMB back that no connection has: its holder's peer forgets the key, and [`Event::Withdrawn`] follows. False where there is
    /// nothing to wait for: nobody holds it, or a connection has it. A connection that gets it meanwhile ends the wish.
    ///
    /// [`Event::Withdrawn`]: crate::Event::Withdrawn
    pub fn withdraw(&mut self, rmb: RmbId, nic: &mut impl Nic, now: Time) -> bool {
        let Some(group) = self.holder(rmb) else { return false };
        let Some(known) = self.group_mut(group).and_then(|group| group.rmb_mut(rmb)) else {
            return false;
        };
        match known.state {
            RmbState::InUse => return false,
            RmbState::Unused { .. } => known.state = RmbState::Asked,
            RmbState::Asked | RmbState::Leaves => return true,
        }
        self.run(group, nic, now);
        true
    }

    /// A new group, whose first link has no peer yet.
    pub(crate) fn found(
        &mut self,
        conn: ConnId,
        need: &Need,
        max_conns: u8,
        nic: &mut impl Nic,
    ) -> Option<GroupIndex> {
        let (device, rmb) = {
            let data = &self.conns.get(conn)?.data;
            (data.device, data.memory.rmb)
        };
        let at = match self.groups.iter().position(Option::is_none) {
            Some(at) => at,
            None => {
                self.groups.push(None);
                self.groups.len() - 1
            }
        };
        let group = GroupIndex(u16::try_from(at).ok()?);
        let (qp, local) = nic.create(device)?;
        let Ok(id) = self.known.begin(need, max_conns) else {
            nic.destroy(qp);
            return None;
        };
        let mut state = Group::new(id, Link::new(qp, device, local, nic));
        state.take(rmb);
        state.conns.push(conn);
        *self.groups.get_mut(at)? = Some(Box::new(state));
        self.holders.insert(rmb, group);
        self.conns.get_mut(conn)?.seat = Some(Seat::new(group, FIRST));
        self.look_at_group(group);
        Some(group)
    }

    /// The first link has its peer.
    pub(crate) fn open(
        &mut self,
        group: GroupIndex,
        config: link_group::Config,
        remote: &Port,
        peer_os: Os,
        nic: &mut impl Nic,
        now: Time,
    ) -> bool {
        let Some(state) = self.group_mut(group) else { return false };
        state.peer_os = peer_os;
        let Some((qp, local)) = state.link(FIRST).map(|link| (link.qp, link.local)) else {
            return false;
        };
        if nic.connect(qp, remote) != Connect::Done {
            return false;
        }
        let mut flows = LinkGroup::new(config, local, *remote, now);
        // The RMB of the first connection is named in this side's Accept or Confirm.
        flows.rmb_was_named(0);
        state.llc = Some(flows);
        self.look_at_group(group);
        true
    }

    /// What this side says of itself in an Accept or a Confirm.
    pub(crate) fn side(
        &mut self,
        conn: ConnId,
        first_contact: bool,
        nic: &mut impl Nic,
    ) -> Option<SmcrSide> {
        let known = self.conns.get(conn)?;
        let (seat, memory) = (known.seat?, known.data.memory);
        let link = self.groups.get(seat.group.number())?.as_ref()?.link(seat.link)?;
        let (qp, local) = (link.qp, link.local);
        let key = nic.rmb(qp, memory.rmb)?;
        nic.arena(qp, memory.arena)?;
        let mut gids = List::new();
        let _ = gids.push(local.gid);
        let host = &self.config.host;
        Some(SmcrSide {
            local: Local { peer_id: host.peer_id, gid: local.gid, mac: local.mac },
            qpn: local.qpn,
            rkey: key.rkey,
            alert_token: conn.token(),
            size: memory.size,
            mtu: local.mtu,
            rmb_addr: key.addr,
            psn: local.psn,
            direct: local.direct,
            gids,
            first_contact,
        })
    }

    /// Records the peer's RMB. False where there is no room for one more.
    pub(crate) fn add_peer_rmb(&mut self, conn: ConnId, peer: &Smcr) -> bool {
        let Some(seat) = self.conns.get(conn).and_then(|conn| conn.seat) else { return false };
        // Elements of an RMB are numbered from 1.
        let before = u64::from(peer.rmbe_idx.saturating_sub(1)) * u64::from(peer.size.bytes());
        let key = Key { rkey: peer.rkey, addr: peer.rmb_addr.wrapping_add(before) };
        let flows = self.group_mut(seat.group).and_then(|group| group.llc.as_mut());
        let Some(peer_rmb) = flows.and_then(|flows| flows.add_peer_rmb(seat.link, key)) else {
            return false;
        };
        if let Some(conn) = self.conns.get_mut(conn) {
            conn.seat = Some(Seat { peer_rmb, ..seat });
        }
        self.name_links(seat.group);
        true
    }

    /// Client: whether the server has withdrawn the RMB of its Accept since the Proposal.
    pub(crate) fn has_withdrawn(&mut self, conn: ConnId, peer: &Smcr) -> bool {
        let Some((seat, begun)) = self.conns.get(conn).and_then(|c| Some((c.seat?, c.begun)))
        else {
            return false;
        };
        let flows = self.group_mut(seat.group).and_then(|group| group.llc.as_ref());
        flows.is_some_and(|flows| flows.peer_rmbs().was_withdrawn(seat.link, peer.rkey, begun))
    }

    /// Whether the peer has to hear of the connection's RMB by LLC first. On a single link the key in the Accept or Confirm is
    /// enough, and a peer that knows it already needs nothing.
    pub(crate) fn has_to_announce(&mut self, conn: ConnId) -> bool {
        let Some((seat, rmb)) =
            self.conns.get(conn).and_then(|c| Some((c.seat?, c.data.memory.rmb)))
        else {
            return false;
        };
        let Some(group) = self.group_mut(seat.group) else { return false };
        let Some(number) = group.number_of(rmb) else { return false };
        let os = group.peer_os;
        let Some(flows) = group.llc.as_mut() else { return false };
        if flows.knows_rmb(number) {
            return false;
        }
        if flows.may_skip_announce(os) {
            flows.rmb_was_named(number);
            return false;
        }
        true
    }

    /// What of a group's configuration is the host's.
    pub(crate) fn flows_config(&self, group: GroupIndex) -> link_group::Config {
        link_group::Config {
            role: Role::Server,
            version: Version::V2,
            max_links: 1,
            max_conns: 0,
            id: (u32::from(group.0) + 1) << 8,
            test_interval: self.config.test_interval,
        }
    }
}
