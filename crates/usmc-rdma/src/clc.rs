//! How a connection gets its place in a link group: the CLC handshake, and what of LLC belongs to it.
//!
//! A server holds a client back while another connection of the same peer makes first contact: one group is enough for both, and the
//! kernel, which has a lock for it, never answers two at a time.

use smc_proto::decline::DeclineCode;
use smc_proto::groups::{Need, Peer, PeerPort};
use smc_proto::handshake::client::{self, Accepted, AcceptedR, Devices, ExpectAccept};
use smc_proto::handshake::server::{
    Choice, ChoiceR, Confirmed, ExpectConfirm, ExpectProposal, Surroundings,
};
use smc_proto::handshake::{
    Agreement, CLC_TIMEOUT, ConfirmingLink, Ending, ExpectDecline, Fault, Finished, Path, SmcrSide,
};
use smc_proto::ids::{Chid, SmcdGid, U24};
use smc_proto::link_group::{self, Connect, Key, LinkGroup, LinkIndex, Port, Role, Time};
use smc_proto::list::List;
use smc_proto::wire::clc::{Answer, Error, Local, Message, Os, Prefix, Smcr, SmcrVersion};
use smc_proto::wire::llc::{DeleteReason, Version};

use crate::buffers::Buffers;
use crate::connection::{ConnId, Data, Seat};
use crate::engine::{Conn, Engine, Wish};
use crate::event::Event;
use crate::groups::{Group, GroupIndex, RMBS};
use crate::link::Link;
use crate::nic::Nic;

/// The first link of a group, at each end.
const FIRST: LinkIndex = LinkGroup::<RMBS>::FIRST;

/// What a connection waits for.
#[derive(Debug)]
pub(crate) enum Stage {
    /// Client: the server's Accept.
    Proposed(ExpectAccept),
    /// Client: the peer's answer to CONFIRM_RKEY, before the Confirm.
    ClientAnnounces(AcceptedR),
    /// Server: the client's Proposal.
    Listens(ExpectProposal),
    /// Server: the end of another connection's first contact.
    Held(ChoiceR),
    /// Server: the peer's answer to CONFIRM_RKEY, before the Accept.
    ServerAnnounces(ChoiceR),
    /// Server: the client's Confirm.
    Accepted(ExpectConfirm),
    /// CONFIRM_LINK over the first link.
    ConfirmsLink(ConfirmingLink),
    /// A Decline that may explain why there was none.
    Declines(ExpectDecline),
    /// Nothing: it is SMC.
    Established,
    /// Nothing: the next stage is being found.
    Between,
}

/// Of RDMA nothing is known but the devices, which the caller has chosen.
struct OnlyRdma;

impl Surroundings for OnlyRdma {
    fn reaches(&self, _: SmcdGid, _: Chid) -> bool {
        false
    }

    fn same_subnet(&self, _: &Prefix) -> bool {
        true
    }

    fn vlan_is_known(&self) -> bool {
        true
    }
}

impl<B: Buffers> Engine<B> {
    /// A client's connection begins.
    pub fn connect(&mut self, wish: Wish<B>, nic: &mut impl Nic, now: Time) -> Option<ConnId> {
        let (circumstances, device) = (wish.circumstances, wish.device);
        let conn = self.begin(wish)?;
        let port = nic.port(device);
        let devices =
            Devices { smcr_v2: Some(port.gid), smcr_v2_mac: port.mac, ..Devices::default() };
        match client::begin(self.config.host.clone(), circumstances, &devices) {
            Ok((expect, proposal)) => {
                self.messages.push_back((conn, proposal));
                self.wait(conn, Stage::Proposed(expect), Some(now + CLC_TIMEOUT));
            }
            Err(ending) => self.end(conn, ending, nic, now),
        }
        Some(conn)
    }

    /// A server's connection begins.
    pub fn accept(&mut self, wish: Wish<B>, nic: &mut impl Nic, now: Time) -> Option<ConnId> {
        let circumstances = wish.circumstances;
        let conn = self.begin(wish)?;
        match ExpectProposal::begin(self.config.host.clone(), circumstances) {
            Ok(expect) => self.wait(conn, Stage::Listens(expect), Some(now + CLC_TIMEOUT)),
            Err(ending) => self.end(conn, ending, nic, now),
        }
        Some(conn)
    }

    fn begin(&mut self, wish: Wish<B>) -> Option<ConnId> {
        let Wish { buffers, memory, device, .. } = wish;
        self.conns.insert(|id| Conn {
            data: Data::new(id, buffers, memory, device),
            seat: None,
            stage: Stage::Between,
            deadline: None,
        })
    }

    fn wait(&mut self, conn: ConnId, stage: Stage, deadline: Option<Time>) {
        if let Some(conn) = self.conns.get_mut(conn) {
            (conn.stage, conn.deadline) = (stage, deadline);
        }
    }

    fn take_stage(&mut self, conn: ConnId) -> Option<Stage> {
        let conn = self.conns.get_mut(conn)?;
        (!matches!(conn.stage, Stage::Established))
            .then(|| std::mem::replace(&mut conn.stage, Stage::Between))
    }

    /// A CLC message has come over the connection's TCP, or what is none. Once the connection is SMC, nothing comes there but the end.
    pub fn handle_clc(
        &mut self,
        conn: ConnId,
        message: Result<Message, Error>,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(stage) = self.take_stage(conn) else { return };
        let message = match message {
            Ok(message) => message,
            Err(error) => return self.end(conn, error.into(), nic, now),
        };
        match stage {
            Stage::Proposed(expect) => match expect.on_message(message) {
                Ok(Accepted::R(accepted)) => self.accepted(conn, accepted, nic, now),
                Ok(Accepted::D(accepted)) => {
                    let ending = accepted.decline(DeclineCode::MODEUNSUPP);
                    self.end(conn, ending, nic, now);
                }
                Err(ending) => self.end(conn, ending, nic, now),
            },
            Stage::Listens(expect) => match expect.on_message(message, &OnlyRdma) {
                Ok(choice) => self.choose(conn, choice, nic, now),
                Err(ending) => self.end(conn, ending, nic, now),
            },
            Stage::Accepted(expect) => match expect.on_message(message) {
                Ok(confirmed) => self.confirmed(conn, confirmed, nic, now),
                Err(ending) => self.end(conn, ending, nic, now),
            },
            Stage::ConfirmsLink(confirming) => {
                self.end(conn, confirming.on_message(&message), nic, now)
            }
            Stage::Declines(expect) => self.end(conn, expect.on_message(&message), nic, now),
            // A Decline, most likely; whatever it is, the peer does not wait for this side any more.
            Stage::ClientAnnounces(accepted) => {
                self.end(conn, accepted.decline(DeclineCode::PEERDECL), nic, now);
            }
            Stage::Held(choice) | Stage::ServerAnnounces(choice) => {
                let ending = choice.decline(DeclineCode::PEERDECL);
                self.end(conn, ending, nic, now);
            }
            Stage::Established | Stage::Between => {}
        }
    }

    /// The peer has closed the connection's TCP before the handshake was over. Afterwards that says nothing.
    pub fn handle_clc_closed(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        if self.take_stage(conn).is_some() {
            self.end(conn, Ending::Failed(Fault::Closed), nic, now);
        }
    }

    pub(crate) fn handshake_timed_out(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        let ending = match self.take_stage(conn) {
            Some(Stage::Proposed(expect)) => expect.on_timeout(),
            Some(Stage::Listens(_) | Stage::Accepted(_)) => Ending::Failed(Fault::TimedOut),
            Some(Stage::ConfirmsLink(confirming)) => {
                let expect = confirming.on_timeout();
                let deadline = Some(now + ExpectDecline::TIMEOUT);
                return self.wait(conn, Stage::Declines(expect), deadline);
            }
            Some(Stage::Declines(expect)) => expect.on_timeout(),
            Some(Stage::ClientAnnounces(accepted)) => accepted.decline(DeclineCode::ERR_REGBUF),
            Some(Stage::Held(choice)) => choice.decline(DeclineCode::TIMEOUT_CL),
            Some(Stage::ServerAnnounces(choice)) => choice.decline(DeclineCode::ERR_REGBUF),
            Some(Stage::Established | Stage::Between) | None => return,
        };
        self.end(conn, ending, nic, now);
    }

    /// Client: the server's Accept.
    fn accepted(&mut self, conn: ConnId, accepted: AcceptedR, nic: &mut impl Nic, now: Time) {
        let answer = accepted.answer().clone();
        let need =
            need_of(Role::Client, Path::of(&Answer::R(answer.clone())), &answer.local, answer.qpn);
        if accepted.is_first_contact() {
            return self.client_first_contact(conn, accepted, &need, nic, now);
        }
        let seat = self.join(conn, &need, now);
        if seat.is_none() {
            // Not a group of ours: the Decline does not tell the server that its group is out of step.
            return self.end(conn, accepted.out_of_sync(false), nic, now);
        }
        self.add_peer_rmb(conn, &answer);
        if self.has_to_announce(conn) {
            self.announce(conn, Stage::ClientAnnounces(accepted), nic, now);
        } else {
            self.confirm(conn, accepted, nic, now);
        }
    }

    fn client_first_contact(
        &mut self,
        conn: ConnId,
        accepted: AcceptedR,
        need: &Need,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let answer = accepted.answer().clone();
        let (max_conns, max_links) = accepted.limits();
        let Some(group) = self.found(conn, need, max_conns, nic) else {
            let ending = accepted.decline(DeclineCode::MEM);
            return self.end(conn, ending, nic, now);
        };
        let version = version_of(Path::of(&Answer::R(answer.clone())));
        let remote = port_of(&answer);
        let os = answer_os(&answer);
        let config = link_group::Config {
            role: Role::Client,
            version,
            max_links: max_links.min(self.config.host.max_links),
            max_conns,
            ..self.flows_config(group)
        };
        if !self.open(group, config, &remote, os, nic, now) {
            let ending = accepted.decline(DeclineCode::ERR_RDYLNK);
            return self.end(conn, ending, nic, now);
        }
        self.add_peer_rmb(conn, &answer);
        self.confirm(conn, accepted, nic, now);
    }

    /// Client: this side has all that it needs.
    fn confirm(&mut self, conn: ConnId, accepted: AcceptedR, nic: &mut impl Nic, now: Time) {
        let Some(side) = self.side(conn, accepted.is_first_contact(), nic) else {
            let ending = accepted.decline(DeclineCode::MEM);
            return self.end(conn, ending, nic, now);
        };
        match accepted.confirm(&side) {
            Ok((finished, message)) => {
                self.messages.push_back((conn, message));
                self.finish(conn, finished, nic, now);
            }
            Err(ending) => self.end(conn, ending, nic, now),
        }
    }

    /// Server: what of the client's offer can be had.
    fn choose(&mut self, conn: ConnId, choice: Choice, nic: &mut impl Nic, now: Time) {
        let mut choice = choice;
        loop {
            match choice {
                Choice::R(choice) if choice.path() == Path::Rv2 => {
                    return self.serve(conn, choice, nic, now);
                }
                Choice::R(other) => match other.reject(DeclineCode::NOSMCRDEV) {
                    Ok(next) => choice = next,
                    Err(ending) => return self.end(conn, ending, nic, now),
                },
                Choice::D(other) => match other.reject(DeclineCode::NOSMCDDEV) {
                    Ok(next) => choice = next,
                    Err(ending) => return self.end(conn, ending, nic, now),
                },
            }
        }
    }

    fn serve(&mut self, conn: ConnId, choice: ChoiceR, nic: &mut impl Nic, now: Time) {
        let need = need_of(Role::Server, choice.path(), choice.peer(), U24::default());
        if self.join(conn, &need, now).is_some() {
            let group = self.group_of(conn);
            if !group.and_then(|group| self.group_mut(group)).is_some_and(|group| group.is_up) {
                self.unseat(conn, now);
                self.held.push_back(conn);
                return self.wait(conn, Stage::Held(choice), Some(now + CLC_TIMEOUT));
            }
            if self.has_to_announce(conn) {
                return self.announce(conn, Stage::ServerAnnounces(choice), nic, now);
            }
            return self.answer(conn, choice, false, nic, now);
        }
        let max_conns = choice.max_conns();
        if self.found(conn, &need, max_conns, nic).is_none() {
            let ending = choice.decline(DeclineCode::MEM);
            return self.end(conn, ending, nic, now);
        }
        self.answer(conn, choice, true, nic, now);
    }

    /// Server: this side has all that it needs.
    fn answer(
        &mut self,
        conn: ConnId,
        choice: ChoiceR,
        first_contact: bool,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(side) = self.side(conn, first_contact, nic) else {
            let ending = choice.decline(DeclineCode::MEM);
            return self.end(conn, ending, nic, now);
        };
        let (expect, message) = choice.accept(&side);
        self.messages.push_back((conn, message));
        // Bytes may come as soon as the client has the Accept, and so before its Confirm.
        self.wait(conn, Stage::Accepted(expect), Some(now + CLC_TIMEOUT));
    }

    /// Server: the client's Confirm.
    fn confirmed(&mut self, conn: ConnId, confirmed: Confirmed, nic: &mut impl Nic, now: Time) {
        let agreement = confirmed.agreement().clone();
        let Answer::R(peer) = &agreement.peer else { return };
        let Some(seat) = self.conns.get(conn).and_then(|conn| conn.seat) else {
            // The group is gone, at the client, too, which sees an abort.
            return self.end(conn, Ending::Failed(Fault::Closed), nic, now);
        };
        if seat.is_stale {
            // Established, and given up at once, as the peer's RMB is not known.
            return self.finish(conn, confirmed.finish(), nic, now);
        }
        if agreement.first_contact {
            let group = seat.group;
            let config = link_group::Config {
                role: Role::Server,
                version: version_of(agreement.path),
                max_links: agreement.max_links,
                max_conns: agreement.max_conns,
                ..self.flows_config(group)
            };
            if !self.open(group, config, &port_of(peer), answer_os(peer), nic, now) {
                let ending = confirmed.decline(DeclineCode::ERR_RDYLNK);
                return self.end(conn, ending, nic, now);
            }
        }
        if !self.add_peer_rmb(conn, peer) {
            let ending = confirmed.decline(DeclineCode::ERR_RTOK);
            return self.end(conn, ending, nic, now);
        }
        self.finish(conn, confirmed.finish(), nic, now);
    }

    fn finish(&mut self, conn: ConnId, finished: Finished, nic: &mut impl Nic, now: Time) {
        match finished {
            Finished::Established(agreement) => self.established(conn, &agreement, nic),
            Finished::ConfirmingLink(confirming) => {
                let Some(group) = self.group_of(conn) else { return };
                // LLC has a deadline of its own.
                self.wait(conn, Stage::ConfirmsLink(confirming), None);
                if let Some(flows) = self.group_mut(group).and_then(|group| group.llc.as_mut()) {
                    flows.confirm_first_link(now);
                }
                self.run(group, nic, now);
            }
        }
    }

    fn established(&mut self, conn: ConnId, agreement: &Agreement, nic: &mut impl Nic) {
        let Some(known) = self.conns.get_mut(conn) else { return };
        let (Answer::R(peer), Some(seat)) = (&agreement.peer, known.seat) else { return };
        known.data.proto.peer(peer.size.bytes(), peer.alert_token);
        known.data.proto.closing.on_established();
        (known.stage, known.deadline) = (Stage::Established, None);
        self.events.push_back(Event::Established {
            conn,
            group: seat.group,
            path: agreement.path,
            eid: agreement.eid,
            first_contact: agreement.first_contact,
        });
        if let Some(known) = self.conns.get_mut(conn) {
            known.data.tell_ending(&mut self.events);
        }
        self.pump(conn, nic);
    }

    /// What LLC says.
    pub(crate) fn handle_llc_event(
        &mut self,
        group: GroupIndex,
        event: link_group::Event,
        nic: &mut impl Nic,
        now: Time,
    ) {
        match event {
            link_group::Event::FirstLink(confirm) => {
                let Some((conn, confirming)) = self.confirming(group) else { return };
                match confirming.on_confirmed(&confirm) {
                    Ok(agreement) => self.group_is_up(group, conn, &agreement, nic, now),
                    Err(ending) => self.end(conn, ending, nic, now),
                }
            }
            link_group::Event::FirstLinkFailed => {
                let Some((conn, confirming)) = self.confirming(group) else { return };
                let deadline = Some(now + ExpectDecline::TIMEOUT);
                self.wait(conn, Stage::Declines(confirming.on_timeout()), deadline);
            }
            link_group::Event::LinkUp(_) => {}
            link_group::Event::LinkDown { index, to } => {
                self.link_is_down(group, index, to, nic, now)
            }
            link_group::Event::Announced { ok, .. } => self.announced(group, ok, nic, now),
            link_group::Event::Withdrawn { .. } => {}
            link_group::Event::Terminated => self.group_is_down(group, nic, now),
        }
    }

    /// The connection that makes first contact.
    fn confirming(&mut self, group: GroupIndex) -> Option<(ConnId, ConfirmingLink)> {
        let conns = self.group_mut(group)?.conns.clone();
        let is_it = |conn: &ConnId| {
            matches!(self.conns.get(*conn), Some(Conn { stage: Stage::ConfirmsLink(_), .. }))
        };
        let conn = conns.into_iter().find(is_it)?;
        match self.take_stage(conn) {
            Some(Stage::ConfirmsLink(confirming)) => Some((conn, confirming)),
            _ => None,
        }
    }

    fn group_is_up(
        &mut self,
        group: GroupIndex,
        conn: ConnId,
        agreement: &Agreement,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Answer::R(peer) = &agreement.peer else { return };
        let devices = self.config.devices.clone();
        let Some(state) = self.group_mut(group) else { return };
        state.is_up = true;
        self.events.push_back(Event::GroupUp {
            group,
            peer: peer.local.peer_id,
            gid: peer.local.gid,
        });
        if let Some((flows, mut verbs)) =
            self.group_mut(group).and_then(|group| group.flows(nic, &devices))
            && flows.config().role == Role::Server
        {
            // Refused where only one was agreed on.
            let _ = flows.add_link(None, &mut verbs, now);
        }
        self.established(conn, agreement, nic);
        self.release_held(nic, now);
    }

    /// Clients that were held back have their turn.
    pub(crate) fn release_held(&mut self, nic: &mut impl Nic, now: Time) {
        for conn in std::mem::take(&mut self.held) {
            if let Some(Stage::Held(choice)) = self.take_stage(conn) {
                self.serve(conn, choice, nic, now);
            }
        }
    }

    /// Connections of a link go on over another one; without one the group is about to end.
    fn link_is_down(
        &mut self,
        group: GroupIndex,
        index: LinkIndex,
        to: Option<LinkIndex>,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(to) = to else { return };
        let conns = self.group_mut(group).map(|group| group.conns.clone()).unwrap_or_default();
        for conn in conns {
            let Some(known) = self.conns.get_mut(conn) else { continue };
            let Some(seat) = known.seat.as_mut().filter(|seat| seat.link == index) else {
                continue;
            };
            seat.link = to;
            match known.stage {
                Stage::Established => {
                    known.data.moved();
                    self.pump(conn, nic);
                }
                // The server has named its RMB by a key of the link that is gone.
                Stage::ClientAnnounces(_) => {
                    if let Some(Stage::ClientAnnounces(accepted)) = self.take_stage(conn) {
                        self.end(conn, accepted.decline(DeclineCode::ERR_RDYLNK), nic, now);
                    }
                }
                // So will the client; or it has by now, and takes the connection for established.
                Stage::Accepted(_) => seat.is_stale = true,
                _ => {}
            }
        }
    }

    /// A connection has lost its group.
    pub(crate) fn lose(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        let Some(known) = self.conns.get_mut(conn) else { return };
        known.seat = None;
        if matches!(known.stage, Stage::Established) {
            known.data.lost(&mut self.events);
            return self.end_if_over(conn, now);
        }
        let ending = match self.take_stage(conn) {
            Some(Stage::ConfirmsLink(confirming)) => confirming.decline(DeclineCode::ERR_RDYLNK),
            Some(Stage::ClientAnnounces(accepted)) => accepted.decline(DeclineCode::ERR_REGBUF),
            Some(Stage::ServerAnnounces(choice)) => choice.decline(DeclineCode::ERR_REGBUF),
            Some(stage) => {
                // It waits for something else than the group; or for a Confirm, whose client takes the connection for established.
                if let Some(known) = self.conns.get_mut(conn) {
                    known.stage = stage;
                }
                return;
            }
            None => return,
        };
        self.end(conn, ending, nic, now);
    }

    /// The handshake is over, without SMC.
    fn end(&mut self, conn: ConnId, ending: Ending, nic: &mut impl Nic, now: Time) {
        let group = self.group_of(conn);
        let mut is_out_of_sync = false;
        self.remove(conn, now);
        match ending {
            Ending::Fallback(fallback) => {
                is_out_of_sync = fallback.out_of_sync;
                if let Some(decline) = fallback.decline {
                    self.messages.push_back((conn, Message::Decline(decline)));
                }
                let (reason, peer_reason) = (fallback.reason, fallback.peer_reason);
                self.events.push_back(Event::Fallback { conn, reason, peer_reason });
            }
            Ending::Failed(fault) => self.events.push_back(Event::Failed { conn, fault }),
        }
        let Some(group) = group else { return };
        let is_up = self.group_mut(group).is_some_and(|group| group.is_up);
        if !is_up || is_out_of_sync {
            // Its first contact has failed, or both ends think differently of it.
            self.end_group(group, DeleteReason::PROGRAM, nic, now);
        }
    }

    fn group_of(&self, conn: ConnId) -> Option<GroupIndex> {
        Some(self.conns.get(conn)?.seat?.group)
    }

    /// A place in a group that exists.
    fn join(&mut self, conn: ConnId, need: &Need, now: Time) -> Option<GroupIndex> {
        let rmb = self.conns.get(conn)?.data.memory.rmb;
        let id = self.known.join(need)?;
        let at = self
            .groups
            .iter()
            .position(|group| group.as_ref().is_some_and(|group| group.id == id))?;
        let group = self.groups.get_mut(at)?.as_mut()?;
        let link = match &group.llc {
            Some(flows) if group.is_up => {
                let active = |which| flows.links().filter(|link| link.active).nth(which);
                self.known.link(id, need).and_then(active).map(|link| link.index)
            }
            _ => Some(FIRST),
        };
        let Some(link) = link.filter(|_| group.has_number_for(rmb)) else {
            self.known.leave(id, now);
            return None;
        };
        group.number_of(rmb);
        group.conns.push(conn);
        let group = GroupIndex(at as u16);
        self.conns.get_mut(conn)?.seat = Some(Seat::new(group, link));
        Some(group)
    }

    /// Leaves it again.
    fn unseat(&mut self, conn: ConnId, now: Time) {
        let Some(seat) = self.conns.get_mut(conn).and_then(|conn| conn.seat.take()) else { return };
        if let Some(group) = self.group_mut(seat.group) {
            group.conns.retain(|one| *one != conn);
            let id = group.id;
            self.known.leave(id, now);
        }
    }

    /// A new group, whose first link has no peer yet.
    fn found(
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
        let mut state = Group::new(id, Link::new(qp, device, local));
        state.number_of(rmb);
        state.conns.push(conn);
        *self.groups.get_mut(at)? = Some(state);
        self.conns.get_mut(conn)?.seat = Some(Seat::new(group, FIRST));
        Some(group)
    }

    /// The first link has its peer.
    fn open(
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
        true
    }

    /// What this side says of itself in an Accept or a Confirm.
    fn side(&mut self, conn: ConnId, first_contact: bool, nic: &mut impl Nic) -> Option<SmcrSide> {
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
    fn add_peer_rmb(&mut self, conn: ConnId, peer: &Smcr) -> bool {
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
        true
    }

    /// Whether the peer has to hear of the connection's RMB by LLC first. On a single link the key in the Accept or Confirm is
    /// enough, and a peer that knows it already needs nothing.
    fn has_to_announce(&mut self, conn: ConnId) -> bool {
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

    fn announce(&mut self, conn: ConnId, stage: Stage, nic: &mut impl Nic, now: Time) {
        self.wait(conn, stage, Some(now + CLC_TIMEOUT));
        let Some(group) = self.group_of(conn) else { return };
        if let Some(state) = self.group_mut(group) {
            state.announces.push_back(conn);
        }
        self.run(group, nic, now);
    }

    /// The next RMB is announced, if no flow is under way.
    pub(crate) fn announce_next(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        let devices = self.config.devices.clone();
        let Some(conn) = self.group_mut(group).and_then(|group| group.announces.front().copied())
        else {
            return;
        };
        let Some(rmb) = self.conns.get(conn).map(|conn| conn.data.memory.rmb) else { return };
        let Some(state) = self.group_mut(group) else { return };
        let Some(number) = state.number_of(rmb) else { return };
        if let Some((flows, mut verbs)) = state.flows(nic, &devices)
            && flows.is_idle()
            && flows.announce_rmb(number, &mut verbs, now).is_ok()
        {
            state.transmit(nic, &devices);
        }
    }

    fn announced(&mut self, group: GroupIndex, ok: bool, nic: &mut impl Nic, now: Time) {
        let Some(conn) = self.group_mut(group).and_then(|group| group.announces.pop_front()) else {
            return;
        };
        match self.take_stage(conn) {
            Some(Stage::ClientAnnounces(accepted)) if ok => self.confirm(conn, accepted, nic, now),
            Some(Stage::ServerAnnounces(choice)) if ok => {
                self.answer(conn, choice, false, nic, now)
            }
            Some(Stage::ClientAnnounces(accepted)) => {
                let ending = accepted.decline(DeclineCode::ERR_REGBUF);
                self.end(conn, ending, nic, now);
            }
            Some(Stage::ServerAnnounces(choice)) => {
                let ending = choice.decline(DeclineCode::ERR_REGBUF);
                self.end(conn, ending, nic, now);
            }
            Some(other) => self.wait(conn, other, None),
            None => {}
        }
    }

    /// What of a group's configuration is the host's.
    fn flows_config(&self, group: GroupIndex) -> link_group::Config {
        link_group::Config {
            role: Role::Server,
            version: Version::V2,
            max_links: 1,
            max_conns: 0,
            id: u32::from(group.0) << 8,
            test_interval: self.config.test_interval,
        }
    }
}

fn need_of(role: Role, path: Path, local: &Local, qpn: U24) -> Need {
    let port = PeerPort { gid: local.gid, mac: local.mac, qpn };
    Need { path, role, vlan: 0, peer: Peer::R { id: local.peer_id, port } }
}

fn version_of(path: Path) -> Version {
    if path.is_v1() { Version::V1 } else { Version::V2 }
}

/// The peer's system, as the first contact says it.
fn answer_os(peer: &Smcr) -> Os {
    match &peer.version {
        SmcrVersion::V2 { first_contact: Some(first), .. } => first.extension.os,
        _ => Os::UNSPECIFIED,
    }
}

/// The peer's end of a link, as its Accept or Confirm names it.
fn port_of(peer: &Smcr) -> Port {
    Port {
        mac: peer.local.mac,
        gid: peer.local.gid,
        qpn: peer.qpn,
        psn: peer.psn,
        mtu: peer.mtu,
        direct: true,
    }
}
