//! What LLC has to say, and what follows from what it brought.

use smc_proto::decline::DeclineCode;
use smc_proto::groups::PeerPort;
use smc_proto::handshake::{Agreement, CLC_TIMEOUT, ConfirmingLink, Ending, ExpectDecline};
use smc_proto::link_group::{self, LinkIndex, Refused, Role, Time};
use smc_proto::list::List;
use smc_proto::wire::clc::Answer;
use smc_proto::wire::llc::DeleteReason;

use crate::buffers::Buffers;
use crate::clc::Stage;
use crate::connection::ConnId;
use crate::engine::{Conn, Engine};
use crate::event::Event;
use crate::groups::{GroupIndex, RMBS, RmbState};
use crate::nic::Nic;

impl<B: Buffers> Engine<B> {
    /// What LLC has brought, and what it has to say.
    pub(crate) fn run(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        loop {
            let Some(Some(state)) = self.groups.get_mut(group.number()) else { return };
            state.transmit(nic, &self.devices);
            let Some(event) = state.llc.as_mut().and_then(|flows| flows.poll_event()) else {
                break;
            };
            self.handle_llc_event(group, event, nic, now);
        }
        self.announce_next(group, nic, now);
        self.name_links(group);
        if let Some(Some(state)) = self.groups.get_mut(group.number()) {
            state.plan_retry(&self.devices, nic, now);
        }
        self.look_at_group(group);
    }

    /// Which ends of the peer's a connection of the group may name, and for how many more RMBs there is room at both sides.
    pub(crate) fn name_links(&mut self, group: GroupIndex) {
        let Some(Some(state)) = self.groups.get(group.number()) else { return };
        let flows = state.llc.as_ref();
        let mut links: List<PeerPort, { smc_proto::link_group::LINKS }> = List::new();
        for link in flows.iter().flat_map(|flows| flows.links()).filter(|link| link.active) {
            let _ = links.push(PeerPort::from(&link.remote));
        }
        if !links.is_empty() {
            self.known.set_links(state.id, links);
        }
        // A client whose Confirm has not come may name a new one.
        let is_unnamed = |conn: &&ConnId| {
            let seat = self.conns.get(**conn).and_then(|known| known.seat);
            seat.is_some_and(|seat| seat.peer_rmb == usize::MAX)
        };
        let unnamed = state.conns.iter().filter(is_unnamed).count();
        let peers = flows.map_or(0, |flows| flows.peer_rmbs().count()) + unnamed;
        self.known.set_keys_left(state.id, (RMBS - 1).saturating_sub(peers.max(state.named())));
    }

    /// Ends a group and its connections.
    pub(crate) fn end_group(
        &mut self,
        group: GroupIndex,
        reason: DeleteReason,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(state) = self.group_mut(group) else { return };
        match state.llc.as_mut() {
            Some(flows) if !flows.is_terminated() => {
                flows.terminate(reason);
                self.run(group, nic, now);
            }
            _ => self.group_is_down(group, nic, now),
        }
    }

    /// Nothing of the group is left.
    pub(crate) fn group_is_down(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        let Some(state) = self.groups.get_mut(group.number()).and_then(Option::take) else {
            return;
        };
        for link in state.links.iter().flatten() {
            // Send buffers serve again from here on.
            match link.has_writes() {
                true => drop(nic.cut(link.qp)),
                false => nic.destroy(link.qp),
            }
        }
        for rmb in state.rmbs.iter().flatten() {
            self.holders.remove(&rmb.id);
            if matches!(rmb.state, RmbState::Asked | RmbState::Leaves) {
                self.events.push_back(Event::Withdrawn { rmb: rmb.id });
            }
        }
        self.known.remove(state.id);
        self.forget_group(group, &state.listed, state.due);
        for conn in state.conns {
            self.lose(conn, nic, now);
        }
        self.events.push_back(Event::GroupDown { group });
        self.release_held(nic, now);
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
            link_group::Event::Announced { rmb, ok } => self.announced(group, rmb, ok, nic, now),
            link_group::Event::Withdrawn { rmb, .. } => self.withdrawn(group, rmb, nic, now),
            link_group::Event::Terminated => self.group_is_down(group, nic, now),
        }
    }

    /// The connection that makes first contact.
    pub(crate) fn confirming(&mut self, group: GroupIndex) -> Option<(ConnId, ConfirmingLink)> {
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

    pub(crate) fn group_is_up(
        &mut self,
        group: GroupIndex,
        conn: ConnId,
        agreement: &Agreement,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Answer::R(peer) = &agreement.peer else { return };
        let Some(state) = self.group_mut(group) else { return };
        state.is_up = true;
        self.events.push_back(Event::GroupUp {
            group,
            peer: peer.local.peer_id,
            gid: peer.local.gid,
        });
        if let Some(Some(known)) = self.groups.get_mut(group.number())
            && let Some((flows, mut verbs)) = known.flows(nic, &self.devices)
            && flows.config().role == Role::Server
        {
            // Refused where only one was agreed on.
            let _ = flows.add_link(None, &mut verbs, now);
        }
        self.established(conn, agreement, nic);
        self.release_held(nic, now);
    }

    /// Connections that were held back have their turn.
    pub(crate) fn release_held(&mut self, nic: &mut impl Nic, now: Time) {
        for conn in std::mem::take(&mut self.held) {
            match self.take_stage(conn) {
                Some(Stage::Held(choice)) => self.serve(conn, choice, nic, now),
                Some(Stage::ClientHeld(accepted)) => self.accepted(conn, accepted, nic, now),
                _ => {}
            }
        }
    }

    /// Connections of a link go on over another one; without one the group is about to end.
    pub(crate) fn link_is_down(
        &mut self,
        group: GroupIndex,
        index: LinkIndex,
        to: Option<LinkIndex>,
        nic: &mut impl Nic,
        now: Time,
    ) {
        self.take_left(group, nic, now);
        let Some(to) = to else { return };
        let conns = self.group_mut(group).map(|group| group.conns.clone()).unwrap_or_default();
        for conn in conns {
            let Some(known) = self.conns.get_mut(conn) else { continue };
            let Some(seat) = known.seat.as_mut().filter(|seat| seat.link == index) else {
                continue;
            };
            (seat.link, seat.lkey) = (to, None);
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
            Some(Stage::Withdraws(ending)) => ending,
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

    pub(crate) fn announce(&mut self, conn: ConnId, stage: Stage, nic: &mut impl Nic, now: Time) {
        self.wait(conn, stage, Some(now + CLC_TIMEOUT));
        let Some(group) = self.group_of(conn) else { return };
        if let Some(state) = self.group_mut(group) {
            state.announces.push_back(conn);
        }
        self.run(group, nic, now);
    }

    /// The next RMB is announced, or withdrawn, if no flow is under way.
    pub(crate) fn announce_next(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        while let Some(Some(state)) = self.groups.get_mut(group.number())
            && let Some(conn) = state.announces.front().copied()
        {
            let Some(known) = self.conns.get(conn) else { return };
            let Some(number) = state.number_of(known.data.memory.rmb) else { return };
            let Some((flows, mut verbs)) = state.flows(nic, &self.devices) else { return };
            if !flows.is_idle() {
                return;
            }
            let withdraws = matches!(known.stage, Stage::Withdraws(_));
            let is_begun = match withdraws {
                true => flows.withdraw_rmb(number, &mut verbs, now),
                false => flows.announce_rmb(number, &mut verbs, now),
            };
            match is_begun {
                Ok(()) if withdraws => {
                    state.leaves(number);
                    return state.transmit(nic, &self.devices);
                }
                Ok(()) => return state.transmit(nic, &self.devices),
                // It cannot be registered.
                Err(Refused::NoRmb) => self.announced(group, number, false, nic, now),
                Err(_) => return,
            }
        }
        self.withdraw_next(group, nic, now);
    }

    /// The next RMB that no connection needs is withdrawn.
    fn withdraw_next(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        let Some(Some(state)) = self.groups.get_mut(group.number()) else { return };
        let Some(number) = state.to_withdraw() else { return };
        let Some((flows, mut verbs)) = state.flows(nic, &self.devices) else { return };
        if flows.withdraw_rmb(number, &mut verbs, now).is_ok() {
            state.leaves(number);
            state.transmit(nic, &self.devices);
        }
    }

    /// The peer knows an RMB, or it does not.
    fn announced(
        &mut self,
        group: GroupIndex,
        rmb: usize,
        ok: bool,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(conn) = self.take_announcing(group, rmb) else { return };
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
            Some(Stage::Withdraws(ending)) => self.end(conn, ending, nic, now),
            Some(other) => self.wait_on(conn, other),
            None => {}
        }
    }

    /// The connection whose RMB it is. It may have ended meanwhile, and then others wait.
    fn take_announcing(&mut self, group: GroupIndex, rmb: usize) -> Option<ConnId> {
        let state = self.groups.get_mut(group.number())?.as_mut()?;
        let rmb = state.rmbs.get(rmb)?.as_ref()?.id;
        let is_it =
            |conn: &ConnId| self.conns.get(*conn).is_some_and(|known| known.data.memory.rmb == rmb);
        let at = state.announces.iter().position(is_it)?;
        state.announces.remove(at)
    }

    /// Server: a handshake fails whose client may have all that it needs to write into the RMB. It is asked not to, and only then the
    /// RMB can serve again; where it takes the connection for established, it learns so that it is not.
    pub(crate) fn take_back(
        &mut self,
        conn: ConnId,
        ending: Ending,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let group = self.group_of(conn).and_then(|group| self.group_mut(group));
        let is_up = group.is_some_and(|group| group.is_up && !group.is_ending);
        if !is_up || matches!(ending, Ending::Fallback(_)) {
            return self.end(conn, ending, nic, now);
        }
        self.announce(conn, Stage::Withdraws(ending), nic, now);
    }

    /// An RMB is withdrawn. A connection may have it still, which has waited for that.
    fn withdrawn(&mut self, group: GroupIndex, rmb: usize, nic: &mut impl Nic, now: Time) {
        let known = self.group_mut(group).and_then(|group| group.rmbs.get(rmb).copied().flatten());
        let Some(known) = known.filter(|known| known.state == RmbState::Leaves) else { return };
        let user = self.users.get(&known.id).copied();
        let ending = user.and_then(|conn| match self.take_stage(conn)? {
            Stage::Withdraws(ending) => Some((conn, ending)),
            // It waits for the RMB (`Engine::hold`).
            other => {
                self.wait_on(conn, other);
                None
            }
        });
        let Some(state) = self.group_mut(group) else { return };
        if let Some((conn, ending)) = ending {
            // The client may have written by another link what has not come so far: its key stays.
            if let Some(rmb) = state.rmb_mut(known.id) {
                rmb.state = RmbState::InUse;
            }
            self.end(conn, ending, nic, now);
            return self.release_held(nic, now);
        }
        if let Some(place) = state.rmbs.get_mut(rmb) {
            *place = None;
        }
        // The peer may have said nothing, or may lie: without the key it cannot write there.
        state.links.iter().flatten().for_each(|link| nic.forget(link.qp, known.id));
        self.holders.remove(&known.id);
        self.events.push_back(Event::Withdrawn { rmb: known.id });
        if let Some(conn) = user {
            if let Some(known) = self.conns.get_mut(conn) {
                known.data.rmb_is_back();
            }
            self.end_if_over(conn, now);
        }
        self.release_held(nic, now);
    }
}
