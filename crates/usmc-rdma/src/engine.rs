//! The engine: events in, actions out.
//!
//! - in: [`Engine::connect`] and [`Engine::accept`], [`Engine::handle_clc`]; [`Engine::handle_dirty`], [`Engine::shut`] and
//!   [`Engine::close`], which the application causes; [`Engine::handle_sent`], [`Engine::handle_received`] and
//!   [`Engine::handle_link_down`], which the device's completions cause; [`Engine::handle_port`];
//!   [`Engine::handle_timeout`] at [`Engine::next_timeout`];
//! - out, after each of these, until they are empty: [`Engine::poll_clc`], [`Engine::poll_event`]. What is to be posted goes to the
//!   [`Nic`] at once.

use std::collections::VecDeque;
use std::time::Duration;

use smc_proto::groups::Groups;
use smc_proto::handshake::Host;
use smc_proto::link_group::{LinkIndex, Time};
use smc_proto::wire::cdc::{self, SmcrRepr};
use smc_proto::wire::clc::Message;
use smc_proto::wire::llc::DeleteReason;

use crate::buffers::Buffers;
use crate::clc::Stage;
use crate::connection::{ConnId, Data, Memory, Seat};
use crate::event::Event;
use crate::groups::{Group, GroupIndex};
use crate::link::Sent;
use crate::nic::{DeviceId, Nic, QpId};
use crate::table::Table;

/// Link groups of a host at most.
pub const GROUPS: usize = 1024;

/// What a host is.
#[derive(Clone, Debug)]
pub struct Config {
    /// What it says of itself. Its peer id is another one for each start, and never 0: a kernel keeps the groups of one that
    /// is gone for a while.
    pub host: Host,
    /// The devices that a further link may use.
    pub devices: Vec<DeviceId>,
    /// Where tokens begin: any number.
    pub first_token: u32,
    /// An idle link is tested after this time (`smcr_testlink_time`).
    pub test_interval: Duration,
}

/// A connection that is to be.
#[derive(Debug)]
pub struct Wish<B> {
    /// Its rings.
    pub buffers: B,
    /// Where they lie.
    pub memory: Memory,
    /// The device that its TCP connection leads to.
    pub device: DeviceId,
    /// What is true of the TCP connection.
    pub circumstances: smc_proto::handshake::Circumstances,
}

#[derive(Debug)]
pub(crate) struct Conn<B> {
    pub(crate) data: Data<B>,
    pub(crate) seat: Option<Seat>,
    pub(crate) stage: Stage,
    /// Until when the stage may last.
    pub(crate) deadline: Option<Time>,
}

/// All link groups and connections of a host.
#[derive(Debug)]
pub struct Engine<B> {
    pub(crate) config: Config,
    pub(crate) conns: Table<Conn<B>>,
    pub(crate) known: Box<Groups<GROUPS>>,
    pub(crate) groups: Vec<Option<Group>>,
    /// Servers' connections that wait for another one's first contact with the same peer.
    pub(crate) held: VecDeque<ConnId>,
    pub(crate) messages: VecDeque<(ConnId, Message)>,
    pub(crate) events: VecDeque<Event>,
}

impl<B: Buffers> Engine<B> {
    /// No connection yet.
    pub fn new(config: Config) -> Engine<B> {
        let first = config.first_token;
        Engine {
            config,
            conns: Table::new(first),
            known: Box::default(),
            groups: Vec::new(),
            held: VecDeque::new(),
            messages: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// The next CLC message to send, over this connection's TCP.
    pub fn poll_clc(&mut self) -> Option<(ConnId, Message)> {
        self.messages.pop_front()
    }

    /// What happened, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The application has written or read.
    pub fn handle_dirty(&mut self, conn: ConnId, nic: &mut impl Nic) {
        self.pump(conn, nic);
    }

    /// The application ends its writing direction.
    pub fn shut(&mut self, conn: ConnId, nic: &mut impl Nic) {
        if let Some(conn) = self.conns.get_mut(conn) {
            conn.data.shut();
        }
        self.pump(conn, nic);
    }

    /// The application closes, and leaves bytes unread or not.
    pub fn close(&mut self, conn: ConnId, unread: bool, nic: &mut impl Nic, now: Time) {
        if let Some(conn) = self.conns.get_mut(conn) {
            conn.data.close(unread);
        }
        self.pump(conn, nic);
        self.end_if_over(conn, now);
    }

    /// The oldest SEND on a queue pair is complete. Completions come in the order of posting.
    pub fn handle_sent(&mut self, qp: QpId, nic: &mut impl Nic, now: Time) {
        let Some((group, index)) = self.by_qp(qp) else { return };
        let Some(link) = self.group_mut(group).and_then(|group| group.link_mut(index)) else {
            return;
        };
        if let Some(Sent::Cdc { conn, cdc, upto }) = link.completed() {
            if let Some(conn) = self.conns.get_mut(conn) {
                conn.data.handle_sent(&cdc, upto, &mut self.events);
            }
            self.end_if_over(conn, now);
        }
        self.run(group, nic, now);
        self.give_turns(group, index, nic);
    }

    /// A message has come by a queue pair. What is neither CDC nor LLC is ignored.
    pub fn handle_received(&mut self, qp: QpId, message: &[u8], nic: &mut impl Nic, now: Time) {
        let Some((group, index)) = self.by_qp(qp) else { return };
        if message.first() == Some(&cdc::TYPE) {
            if let Some(flows) = self.group_mut(group).and_then(|group| group.llc.as_mut()) {
                flows.handle_activity(index, now);
            }
            let Ok(cdc) = SmcrRepr::parse(message) else { return };
            // Nobody's token, or one of another group: that connection is not the sender's to speak of.
            let conn = ConnId(cdc.token);
            let Some(known) = self.conns.get_mut(conn) else { return };
            if known.seat.is_none_or(|seat| seat.group != group) {
                return;
            }
            known.data.handle_cdc(&cdc, &mut self.events);
            self.pump(conn, nic);
            self.end_if_over(conn, now);
            return;
        }
        let devices = self.config.devices.clone();
        if let Some((flows, mut verbs)) =
            self.group_mut(group).and_then(|group| group.flows(nic, &devices))
        {
            // What cannot be parsed is ignored, as the kernel does.
            let _ = flows.handle_llc(index, message, &mut verbs, now);
        }
        self.run(group, nic, now);
    }

    /// A queue pair is in error. Its successful completions have been handled.
    pub fn handle_link_down(&mut self, qp: QpId, nic: &mut impl Nic, now: Time) {
        let Some((group, index)) = self.by_qp(qp) else { return };
        let devices = self.config.devices.clone();
        match self.group_mut(group).and_then(|group| group.flows(nic, &devices)) {
            Some((flows, mut verbs)) => flows.handle_link_down(index, &mut verbs, now),
            // The first contact has not come so far: its handshake ends by its own deadline.
            None => return,
        }
        self.run(group, nic, now);
    }

    /// A device's port went down or came up. A link without another one waits for it.
    pub fn handle_port(&mut self, device: DeviceId, is_up: bool, nic: &mut impl Nic, now: Time) {
        let all = (0..self.groups.len() as u16).map(GroupIndex);
        for group in all.collect::<Vec<_>>() {
            let Some(state) = self.group_mut(group) else { continue };
            let is_single = state.llc.as_ref().is_none_or(|llc| llc.active_links().count() < 2);
            let of_device: Vec<(LinkIndex, QpId)> = LinkIndex::ALL
                .into_iter()
                .filter_map(|index| {
                    Some((index, state.link(index).filter(|l| l.device == device)?.qp))
                })
                .collect();
            for (index, qp) in of_device {
                if !is_up && !is_single {
                    self.handle_link_down(qp, nic, now);
                    continue;
                }
                if let Some(link) = self.group_mut(group).and_then(|group| group.link_mut(index)) {
                    link.is_held = !is_up;
                }
                self.run(group, nic, now);
                self.give_turns(group, index, nic);
            }
        }
    }

    /// When [`Engine::handle_timeout`] has to be called next.
    pub fn next_timeout(&self) -> Option<Time> {
        let flows =
            self.groups.iter().flatten().filter_map(|group| group.llc.as_ref()?.next_timeout());
        let handshakes = self.conns.iter().filter_map(|conn| conn.deadline);
        flows.chain(handshakes).chain(self.known.next_timeout()).min()
    }

    /// It is time.
    pub fn handle_timeout(&mut self, nic: &mut impl Nic, now: Time) {
        let is_due = |conn: &&Conn<B>| conn.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<ConnId> = self.conns.iter().filter(is_due).map(|conn| conn.data.id).collect();
        late.into_iter().for_each(|conn| self.handshake_timed_out(conn, nic, now));
        let devices = self.config.devices.clone();
        for group in (0..self.groups.len() as u16).map(GroupIndex) {
            if let Some((flows, mut verbs)) =
                self.group_mut(group).and_then(|group| group.flows(nic, &devices))
                && flows.next_timeout().is_some_and(|due| due <= now)
            {
                flows.handle_timeout(&mut verbs, now);
                self.run(group, nic, now);
            }
        }
        while let Some(id) = self.known.poll_expired(now) {
            let unused = |group: &Option<Group>| group.as_ref().is_some_and(|group| group.id == id);
            if let Some(at) = self.groups.iter().position(unused) {
                self.end_group(GroupIndex(at as u16), DeleteReason::PROGRAM, nic, now);
            }
        }
    }

    /// The host stops: each connection is aborted, and then each group is deleted, so that peers know at once.
    pub fn stop(&mut self, nic: &mut impl Nic, now: Time) {
        let all: Vec<ConnId> = self.conns.iter().map(|conn| conn.data.id).collect();
        for conn in all {
            self.close(conn, true, nic, now);
        }
        for group in (0..self.groups.len() as u16).map(GroupIndex) {
            self.end_group(group, DeleteReason::PROGRAM, nic, now);
        }
    }

    /// Connections that are not over.
    pub fn connections(&self) -> usize {
        self.conns.iter().count()
    }

    /// Link groups.
    pub fn groups(&self) -> usize {
        self.groups.iter().flatten().count()
    }

    /// Links of all groups that work.
    pub fn links(&self) -> usize {
        let flows = self.groups.iter().flatten().filter_map(|group| group.llc.as_ref());
        flows.map(|flows| flows.active_links().count()).sum()
    }

    /// RMBs that peers have been told of.
    pub fn rmbs(&self) -> usize {
        self.groups.iter().flatten().map(|group| group.rmbs.len()).sum()
    }

    pub(crate) fn group_mut(&mut self, group: GroupIndex) -> Option<&mut Group> {
        self.groups.get_mut(group.number())?.as_mut()
    }

    fn by_qp(&self, qp: QpId) -> Option<(GroupIndex, LinkIndex)> {
        let found = |(at, group): (usize, &Option<Group>)| {
            Some((GroupIndex(at as u16), group.as_ref()?.by_qp(qp)?))
        };
        self.groups.iter().enumerate().find_map(found)
    }

    /// Sends what a connection has to send.
    pub(crate) fn pump(&mut self, conn: ConnId, nic: &mut impl Nic) {
        let Engine { conns, groups, events, .. } = self;
        let Some(conn) = conns.get_mut(conn) else { return };
        let Some(Seat { group, link, peer_rmb, .. }) = conn.seat else { return };
        if !matches!(conn.stage, Stage::Established) {
            return;
        }
        let Some(Some(group)) = groups.get_mut(group.number()) else { return };
        let rmb = group.llc.as_ref().and_then(|llc| llc.peer_rmbs().key(peer_rmb, link));
        let Some(link) = group.link_mut(link) else { return };
        let Some(lkey) = nic.arena(link.qp, conn.data.memory.arena) else { return };
        conn.data.pump(link, rmb, lkey, nic, events);
    }

    /// Connections that wait for room at this link have it now.
    fn give_turns(&mut self, group: GroupIndex, index: LinkIndex, nic: &mut impl Nic) {
        while let Some(conn) = self
            .group_mut(group)
            .and_then(|group| group.link_mut(index))
            .and_then(|link| link.next())
        {
            if let Some(conn) = self.conns.get_mut(conn) {
                conn.data.has_turn();
            }
            self.pump(conn, nic);
        }
    }

    /// A connection is over, if it is.
    pub(crate) fn end_if_over(&mut self, conn: ConnId, now: Time) {
        if self.conns.get(conn).is_some_and(|conn| conn.data.is_over()) {
            self.remove(conn, now);
            self.events.push_back(Event::Over { conn });
        }
    }

    /// Forgets a connection, and takes it out of its group.
    pub(crate) fn remove(&mut self, conn: ConnId, now: Time) -> Option<Conn<B>> {
        let gone = self.conns.remove(conn)?;
        self.held.retain(|held| *held != conn);
        if let Some(seat) = gone.seat
            && let Some(group) = self.group_mut(seat.group)
        {
            group.conns.retain(|one| *one != conn);
            group.announces.retain(|one| *one != conn);
            let id = group.id;
            self.known.leave(id, now);
        }
        Some(gone)
    }
}
