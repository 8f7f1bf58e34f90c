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
    Agreement, CLC_TIMEOUT, Circumstances, ConfirmingLink, Ending, ExpectDecline, Fallback, Fault,
    Finished, Path,
};
use smc_proto::ids::{Chid, SmcdGid, U24};
use smc_proto::link_group::{self, Port, Role, Time};
use smc_proto::wire::clc::{Answer, Error, Local, Message, Os, Prefix, Smcr, SmcrVersion};
use smc_proto::wire::llc::{DeleteReason, Version};

use crate::buffers::Buffers;
use crate::connection::{ConnId, Data};
use crate::engine::{Awaits, Conn, Engine, RefusedWish, Wish};
use crate::event::Event;
use crate::nic::{DeviceId, Nic};
use crate::seats::Joined;

/// What a connection waits for.
#[derive(Debug)]
pub(crate) enum Stage {
    /// Client: the server's Accept.
    Proposed(ExpectAccept),
    /// Client: the peer's answer to CONFIRM_RKEY, before the Confirm.
    ClientAnnounces(AcceptedR),
    /// Server: the client's Proposal.
    Listens(ExpectProposal),
    /// Server: the end of another connection's first contact, or the RMB, which another group's peer is to forget.
    Held(ChoiceR),
    /// Client: the RMB, which another group's peer is to forget.
    ClientHeld(AcceptedR),
    /// Server: the peer's answer to CONFIRM_RKEY, before the Accept.
    ServerAnnounces(ChoiceR),
    /// Server: the client's Confirm.
    Accepted(ExpectConfirm),
    /// Server: the peer's word that it does not write into the RMB any more, after a handshake that failed in the middle.
    Withdraws(Ending),
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

/// What a client has for a connection that leads to that device.
fn devices(device: DeviceId, nic: &impl Nic) -> Devices {
    let port = nic.port(device);
    Devices { smcr_v2: Some(port.gid), smcr_v2_mac: port.mac, ..Devices::default() }
}

impl<B: Buffers> Engine<B> {
    /// A client's connection begins.
    ///
    /// # Errors
    /// Another connection has the RMB, or there are too many connections.
    pub fn connect(
        &mut self,
        wish: Wish<B>,
        nic: &mut impl Nic,
        now: Time,
    ) -> Result<ConnId, RefusedWish> {
        let (circumstances, device) = (wish.circumstances, wish.device);
        let conn = self.begin(wish, now)?;
        match client::begin(self.config.host.clone(), circumstances, &devices(device, nic)) {
            Ok((expect, proposal)) => {
                self.messages.push_back((conn, proposal));
                // The application waits for nothing but what the server sends, and that for as long as TCP does.
                self.wait(conn, Stage::Proposed(expect), None);
            }
            Err(ending) => self.end(conn, ending, nic, now),
        }
        Ok(conn)
    }

    /// The Proposal for a connection that leads to that device, to go with the SYN. None: there is nothing to offer.
    pub fn propose(&self, device: DeviceId, nic: &impl Nic) -> Option<Message> {
        let devices = devices(device, nic);
        let in_syn = client::begin_in_syn(self.config.host.clone(), false, &devices);
        in_syn.map(|(_, proposal)| proposal)
    }

    /// A client's connection begins whose Proposal ([`Engine::propose`]) is with the server already. The device is the same one.
    ///
    /// # Errors
    /// As above.
    pub fn connect_proposed(
        &mut self,
        wish: Wish<B>,
        nic: &mut impl Nic,
        now: Time,
    ) -> Result<ConnId, RefusedWish> {
        let (Circumstances { peer_says_smc, ipsec, .. }, device) =
            (wish.circumstances, wish.device);
        let conn = self.begin(wish, now)?;
        let devices = devices(device, nic);
        let begun = client::begin_in_syn(self.config.host.clone(), ipsec, &devices);
        // Where the host has lost the device meanwhile, the peer waits for what cannot come.
        let begun = begun.ok_or(Ending::Failed(Fault::Closed));
        match begun.and_then(|(in_syn, _)| in_syn.on_syn_ack(peer_says_smc)) {
            Ok(expect) => self.wait(conn, Stage::Proposed(expect), None),
            Err(ending) => self.end(conn, ending, nic, now),
        }
        Ok(conn)
    }

    /// A server's connection begins.
    ///
    /// # Errors
    /// As above.
    pub fn accept(
        &mut self,
        wish: Wish<B>,
        nic: &mut impl Nic,
        now: Time,
    ) -> Result<ConnId, RefusedWish> {
        let circumstances = wish.circumstances;
        let conn = self.begin(wish, now)?;
        match ExpectProposal::begin(self.config.host.clone(), circumstances) {
            Ok(expect) => self.wait(conn, Stage::Listens(expect), Some(now + CLC_TIMEOUT)),
            Err(ending) => self.end(conn, ending, nic, now),
        }
        Ok(conn)
    }

    fn begin(&mut self, wish: Wish<B>, now: Time) -> Result<ConnId, RefusedWish> {
        let Wish { buffers, memory, device, .. } = wish;
        if let Some(user) = self.users.get(&memory.rmb) {
            return Err(RefusedWish::RmbInUse(*user));
        }
        let conn = self.conns.insert(|id| Conn {
            data: Data::new(id, buffers, memory, device),
            seat: None,
            begun: now,
            stage: Stage::Between,
            deadline: None,
            awaits: Awaits::Nothing,
        });
        let conn = conn.ok_or(RefusedWish::Full)?;
        self.users.insert(memory.rmb, conn);
        Ok(conn)
    }

    pub(crate) fn wait(&mut self, conn: ConnId, stage: Stage, deadline: Option<Time>) {
        if let Some(known) = self.conns.get_mut(conn) {
            known.stage = stage;
            self.set_deadline(conn, deadline);
        }
    }

    /// As before, until the deadline that it has.
    pub(crate) fn wait_on(&mut self, conn: ConnId, stage: Stage) {
        if let Some(known) = self.conns.get_mut(conn) {
            known.stage = stage;
        }
    }

    pub(crate) fn take_stage(&mut self, conn: ConnId) -> Option<Stage> {
        let conn = self.conns.get_mut(conn)?;
        (!matches!(conn.stage, Stage::Established))
            .then(|| std::mem::replace(&mut conn.stage, Stage::Between))
    }

    /// A CLC message has come over the connection's TCP, or what is none. Once the connection is SMC, nothing comes there but the end,
    /// or a Decline: the peer has given up on the handshake while this side took it for done, and both ends see a reset. Anything else
    /// ends the connection, too, and the RMB is the peer's until it answers that.
    pub fn handle_clc(
        &mut self,
        conn: ConnId,
        message: Result<Message, Error>,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(stage) = self.take_stage(conn) else {
            let Some(known) = self.conns.get_mut(conn) else { return };
            match message {
                Ok(Message::Decline(_)) => known.data.peer_has_left(&mut self.events),
                _ => known.data.give_up(&mut self.events),
            }
            self.pump(conn, nic);
            self.end_if_over(conn, now);
            return;
        };
        let message = match message {
            Ok(message) => message,
            Err(error) if matches!(stage, Stage::Accepted(_)) => {
                return self.take_back(conn, error.into(), nic, now);
            }
            // The RMB is the peer's still.
            Err(error) if matches!(stage, Stage::Withdraws(_)) => {
                return self.wait_on(conn, Stage::Withdraws(error.into()));
            }
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
                Err(ending) => self.take_back(conn, ending, nic, now),
            },
            Stage::ConfirmsLink(confirming) => {
                self.end(conn, confirming.on_message(&message), nic, now)
            }
            Stage::Declines(expect) => self.end(conn, expect.on_message(&message), nic, now),
            // A Decline, most likely. Another one in return would be the application's first bytes at the peer.
            Stage::ClientAnnounces(accepted) | Stage::ClientHeld(accepted) => {
                self.end(conn, accepted.on_message(&message), nic, now);
            }
            Stage::Held(choice) | Stage::ServerAnnounces(choice) => {
                self.end(conn, choice.on_message(&message), nic, now);
            }
            Stage::Withdraws(ending) => match (message, ending) {
                // The client was late, and goes on over TCP. So does the application: the client has had no CLC message since the Accept, and
                // no byte behind its Decline was taken.
                (Message::Decline(decline), Ending::Failed(Fault::TimedOut)) => {
                    self.end(conn, Fallback::by_peer(&decline), nic, now);
                }
                (_, ending) => self.wait_on(conn, Stage::Withdraws(ending)),
            },
            Stage::Established | Stage::Between => {}
        }
    }

    /// The peer has closed the connection's TCP. Before the handshake is over that ends it, but not once the Confirm has come: a peer that is
    /// done already ends its TCP, too, and that may come before the messages of the link. For an established connection these have ten seconds.
    pub fn handle_clc_closed(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        match self.take_stage(conn) {
            Some(Stage::Accepted(expect)) => self.take_back(conn, expect.on_closed(), nic, now),
            Some(stage @ (Stage::Withdraws(_) | Stage::ConfirmsLink(_))) => {
                self.wait_on(conn, stage)
            }
            Some(_) => self.end(conn, Ending::Failed(Fault::Closed), nic, now),
            None => self.tcp_has_ended(conn, now),
        }
    }

    /// The peer has begun with something else than CLC, of which nothing was taken: it knows nothing of SMC, or is a server that sends what
    /// it has to say before it has seen the Proposal. The connection stays TCP.
    pub fn handle_no_clc(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        match self.take_stage(conn) {
            Some(Stage::Proposed(_) | Stage::Listens(_)) => {
                let (reason, decline) = (DeclineCode::PEERNOSMC, None);
                let fallback = Fallback { reason, peer_reason: None, decline, out_of_sync: false };
                self.end(conn, Ending::Fallback(fallback), nic, now);
            }
            Some(stage) => self.wait_on(conn, stage),
            None => {}
        }
    }

    pub(crate) fn handshake_timed_out(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        let ending = match self.take_stage(conn) {
            // The application has closed, and the server has not answered: one that does so later finds the Decline.
            Some(Stage::Proposed(expect)) => expect.decline(DeclineCode::TIMEOUT_CL),
            Some(Stage::Listens(expect)) => expect.on_timeout(),
            Some(Stage::Accepted(expect)) => {
                return self.take_back(conn, expect.on_timeout(), nic, now);
            }
            Some(Stage::Withdraws(ending)) => {
                let group = self.group_of(conn);
                self.end(conn, ending, nic, now);
                // The peer may write into the RMB for ever: there is no other way to get it back.
                return group
                    .into_iter()
                    .for_each(|group| self.end_group(group, DeleteReason::PROTOCOL, nic, now));
            }
            Some(Stage::ConfirmsLink(confirming)) => {
                let expect = confirming.on_timeout();
                let deadline = Some(now + ExpectDecline::TIMEOUT);
                return self.wait(conn, Stage::Declines(expect), deadline);
            }
            Some(Stage::Declines(expect)) => expect.on_timeout(),
            Some(Stage::ClientAnnounces(accepted) | Stage::ClientHeld(accepted)) => {
                accepted.decline(DeclineCode::ERR_REGBUF)
            }
            Some(Stage::Held(choice)) => choice.decline(DeclineCode::TIMEOUT_CL),
            Some(Stage::ServerAnnounces(choice)) => choice.decline(DeclineCode::ERR_REGBUF),
            Some(Stage::Established | Stage::Between) | None => return,
        };
        self.end(conn, ending, nic, now);
    }

    /// Client: the server's Accept.
    pub(crate) fn accepted(
        &mut self,
        conn: ConnId,
        accepted: AcceptedR,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let answer = accepted.answer().clone();
        let need =
            need_of(Role::Client, Path::of(&Answer::R(answer.clone())), &answer.local, answer.qpn);
        if accepted.is_first_contact() {
            return self.client_first_contact(conn, accepted, &need, nic, now);
        }
        match self.join(conn, &need, now) {
            Joined::At(_) => {}
            Joined::Waits => return self.hold(conn, Stage::ClientHeld(accepted), nic, now),
            // Not a group of ours: the Decline does not tell the server that its group is out of step.
            Joined::Nowhere => return self.end(conn, accepted.out_of_sync(false), nic, now),
        }
        // A server that has given up meanwhile does not have the RMB for this connection any more.
        if self.has_withdrawn(conn, &answer) || !self.add_peer_rmb(conn, &answer) {
            return self.end(conn, accepted.decline(DeclineCode::ERR_RTOK), nic, now);
        }
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
        if !self.may_have_rmb(conn, None) {
            return self.hold(conn, Stage::ClientHeld(accepted), nic, now);
        }
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
        if !self.add_peer_rmb(conn, &answer) {
            return self.end(conn, accepted.decline(DeclineCode::ERR_RTOK), nic, now);
        }
        self.confirm(conn, accepted, nic, now);
    }

    /// Client: this side has all that it needs.
    pub(crate) fn confirm(
        &mut self,
        conn: ConnId,
        accepted: AcceptedR,
        nic: &mut impl Nic,
        now: Time,
    ) {
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

    pub(crate) fn serve(&mut self, conn: ConnId, choice: ChoiceR, nic: &mut impl Nic, now: Time) {
        let need = need_of(Role::Server, choice.path(), choice.peer(), U24::default());
        let joined = self.join(conn, &need, now);
        if let Joined::At(group) = joined {
            if !self.group_mut(group).is_some_and(|group| group.is_up) {
                self.unseat(conn, now);
                self.held.push_back(conn);
                return self.wait(conn, Stage::Held(choice), Some(now + CLC_TIMEOUT));
            }
            if self.has_to_announce(conn) {
                return self.announce(conn, Stage::ServerAnnounces(choice), nic, now);
            }
            return self.answer(conn, choice, false, nic, now);
        }
        if joined == Joined::Waits || !self.may_have_rmb(conn, None) {
            return self.hold(conn, Stage::Held(choice), nic, now);
        }
        let max_conns = choice.max_conns();
        if self.found(conn, &need, max_conns, nic).is_none() {
            let ending = choice.decline(DeclineCode::MEM);
            return self.end(conn, ending, nic, now);
        }
        self.answer(conn, choice, true, nic, now);
    }

    /// Server: this side has all that it needs.
    pub(crate) fn answer(
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
        // Without the peer's RMB a client that waits for CONFIRM_LINK can go on over TCP. Another one takes the connection for
        // established: it is, and is given up at once.
        if !self.add_peer_rmb(conn, peer) && agreement.first_contact {
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

    pub(crate) fn established(&mut self, conn: ConnId, agreement: &Agreement, nic: &mut impl Nic) {
        let Some(known) = self.conns.get_mut(conn) else { return };
        let (Answer::R(peer), Some(seat)) = (&agreement.peer, known.seat) else { return };
        known.data.proto.peer(peer.size.bytes(), peer.alert_token);
        known.data.proto.closing.on_established();
        known.stage = Stage::Established;
        self.events.push_back(Event::Established {
            conn,
            group: seat.group,
            path: agreement.path,
            eid: agreement.eid,
            first_contact: agreement.first_contact,
        });
        self.set_deadline(conn, None);
        if let Some(known) = self.conns.get_mut(conn) {
            known.data.tell_ending(&mut self.events);
        }
        self.pump(conn, nic);
    }

    /// The handshake is over, without SMC.
    pub(crate) fn end(&mut self, conn: ConnId, ending: Ending, nic: &mut impl Nic, now: Time) {
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
