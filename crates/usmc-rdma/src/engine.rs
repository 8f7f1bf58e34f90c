//! The engine: events in, actions out.
//!
//! - in: [`Engine::connect`] and [`Engine::accept`], [`Engine::handle_clc`]; [`Engine::handle_dirty`], [`Engine::shut`] and
//!   [`Engine::close`], which the application causes; [`Engine::handle_sent`], [`Engine::handle_received`] and
//!   [`Engine::handle_link_down`], which the device's completions cause; [`Engine::handle_port`];
//!   [`Engine::handle_timeout`] at [`Engine::next_timeout`];
//! - out, after each of these, until they are empty: [`Engine::poll_clc`], [`Engine::poll_event`]. What is to be posted goes to the
//!   [`Nic`] at once.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fmt;
use std::time::Duration;

use smc_proto::groups::Groups;
use smc_proto::handshake::{CLC_TIMEOUT, Host};
use smc_proto::link_group::{LinkIndex, Time};
use smc_proto::wire::cdc::{self, SmcrRepr};
use smc_proto::wire::clc::Message;
use smc_proto::wire::llc::DeleteReason;

use crate::buffers::Buffers;
use crate::clc::Stage;
use crate::connection::{Came, ConnId, Data, Memory, Seat};
use crate::event::Event;
use crate::groups::{Group, GroupIndex, RmbState};
use crate::link::Sent;
use crate::nic::{DeviceId, Nic, QpId, RmbId};
use crate::table::Table;
use crate::timers::Timers;

/// Link groups of a host at most.
pub const GROUPS: usize = 1024;

/// How long a peer may take to answer an abort, to forget the RMB then, or to close behind all that both ends have written. A peer that
/// answers nothing at all loses its links sooner.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long behind the end of its TCP the message of a peer's end may come. A RoCE device has repeated all that it repeats by then, and another link
/// has taken over.
const END_TIMEOUT: Duration = Duration::from_secs(10);

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
    /// Where they lie. Where another group's peer has a key for the RMB ([`Engine::holder`]), the handshake waits until it was withdrawn.
    pub memory: Memory,
    /// The device that its TCP connection leads to.
    pub device: DeviceId,
    /// What is true of the TCP connection.
    pub circumstances: smc_proto::handshake::Circumstances,
}

/// Why there is no connection for a [`Wish`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusedWish {
    /// There are as many as tokens can name.
    Full,
    /// This connection has the RMB.
    RmbInUse(ConnId),
}

impl fmt::Display for RefusedWish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RefusedWish::Full => f.write_str("there is no token for one more connection"),
            RefusedWish::RmbInUse(conn) => write!(f, "connection {} has the RMB", conn.token()),
        }
    }
}

impl Error for RefusedWish {}

#[derive(Debug)]
pub(crate) struct Conn<B> {
    pub(crate) data: Data<B>,
    pub(crate) seat: Option<Seat>,
    /// When its handshake has begun.
    pub(crate) begun: Time,
    pub(crate) stage: Stage,
    /// Until when the stage may last, or the peer has time for what is awaited of it.
    pub(crate) deadline: Option<Time>,
    pub(crate) awaits: Awaits,
}

/// What is awaited of the peer of an established connection, until the deadline.
///
/// ```text
/// Nothing ──given up──▶ Answer ──it is late──▶ Withdrawal ──it is late──▶ the group ends
///  │ └──────its TCP ends─┴───────▶ End ──it is late──▶ Nothing
///  └──both ends have written all, and this one has closed──▶ Close ──it is late──▶ (over)
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Awaits {
    /// Nothing; or an abort's answer or a close, for which time begins with the deadline.
    Nothing,
    /// The answer to an abort.
    Answer,
    /// That it forgets the RMB, as it has not answered an abort.
    Withdrawal,
    /// The message of its end.
    End,
    /// That it closes. Linux keeps an orphan of TCP's in FIN_WAIT_2 as long (`tcp_fin_timeout`).
    Close,
}

/// All link groups and connections of a host.
#[derive(Debug)]
pub struct Engine<B> {
    pub(crate) config: Config,
    pub(crate) conns: Table<Conn<B>>,
    pub(crate) known: Box<Groups<GROUPS>>,
    pub(crate) groups: Vec<Option<Box<Group>>>,
    /// The group whose peer has a key for an RMB.
    pub(crate) holders: HashMap<RmbId, GroupIndex>,
    /// RMBs that connections have.
    pub(crate) users: HashMap<RmbId, ConnId>,
    /// Connections that wait for another one's first contact with the same peer, or for their RMB.
    pub(crate) held: VecDeque<ConnId>,
    pub(crate) messages: VecDeque<(ConnId, Message)>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) timers: Timers,
    /// The devices whose port is not down.
    pub(crate) devices: Vec<DeviceId>,
}

impl<B: Buffers> Engine<B> {
    /// No connection yet.
    pub fn new(config: Config) -> Engine<B> {
        let (first, devices) = (config.first_token, config.devices.clone());
        Engine {
            config,
            timers: Timers::default(),
            devices,
            conns: Table::new(first),
            known: Box::default(),
            groups: Vec::new(),
            holders: HashMap::new(),
            users: HashMap::new(),
            held: VecDeque::new(),
            messages: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Whether there is a message or an event to poll.
    pub fn has_to_say(&self) -> bool {
        !self.messages.is_empty() || !self.events.is_empty()
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
        let waits =
            |conn: &Conn<B>| matches!(conn.stage, Stage::Proposed(_)) && conn.deadline.is_none();
        if self.conns.get(conn).is_some_and(waits) {
            // Nobody waits for the server any more, which may never answer: what the application has written goes by TCP then.
            self.set_deadline(conn, Some(now + CLC_TIMEOUT));
        }
        self.pump(conn, nic);
        self.end_if_over(conn, now);
    }

    /// Whether the application has closed a connection that was aborted: nothing is left but that the peer answers, which it may never do.
    pub fn is_aborted(&self, conn: ConnId) -> bool {
        self.conns.get(conn).is_some_and(|conn| conn.data.is_aborted())
    }

    /// Whether an urgent byte has come, which no ring can say. The caller wakes what sleeps for bytes in the ring, as no doorbell can follow,
    /// and calls [`Engine::leave_ring`].
    pub fn is_to_leave(&self, conn: ConnId) -> bool {
        self.conns.get(conn).is_some_and(|conn| conn.data.is_to_leave())
    }

    /// What has come with the urgent byte or behind it is not in the ring: [`Engine::came`].
    pub fn leave_ring(&mut self, conn: ConnId) {
        if let Some(conn) = self.conns.get_mut(conn) {
            conn.data.leave_ring();
        }
    }

    /// What has come of the peer's bytes. Where one of them was urgent the kernel brings what is behind the ring: the caller sends that, and says
    /// how far the kernel has it ([`Engine::taken`]).
    pub fn came(&self, conn: ConnId) -> Came {
        self.conns.get(conn).map(|conn| conn.data.came()).unwrap_or_default()
    }

    /// The kernel has the peer's bytes up to there. A call of [`Engine::handle_dirty`] follows.
    pub fn taken(&mut self, conn: ConnId, upto: u64) {
        if let Some(conn) = self.conns.get(conn) {
            conn.data.buffers.taken(upto);
        }
    }

    /// The byte of the application's before that position is urgent, and is about to be written or was just written.
    pub fn is_urgent(&mut self, conn: ConnId, upto: u64) {
        if let Some(conn) = self.conns.get_mut(conn) {
            conn.data.is_urgent(upto);
        }
    }

    /// Whether it matters how far the application has read: what comes of that is looked at with [`Engine::handle_dirty`]. Elsewhere the caller need
    /// not look.
    pub fn is_reader_of_interest(&self, conn: ConnId) -> bool {
        self.conns.get(conn).is_some_and(|conn| conn.data.is_reader_of_interest())
    }

    /// Whether the engine has to hear when the application reads ([`Engine::handle_dirty`]): more than half of the RMB is taken, an urgent byte
    /// is unread, or the peer has said that it waits for room. Otherwise it is early enough to look when that comes.
    pub fn waits_for_reader(&self, conn: ConnId) -> bool {
        self.conns.get(conn).is_some_and(|conn| conn.data.waits_for_reader())
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
        let flows = self.group_mut(group).and_then(|group| group.llc.as_ref());
        if flows.is_some_and(|flows| flows.has_news()) {
            self.run(group, nic, now);
        }
        self.give_turns(group, index, nic);
        self.end_if_all_is_said(group, nic, now);
    }

    /// A message has come by a queue pair. What is neither CDC nor LLC is ignored.
    pub fn handle_received(&mut self, qp: QpId, message: &[u8], nic: &mut impl Nic, now: Time) {
        let Some((group, index)) = self.by_qp(qp) else { return };
        let cdc = SmcrRepr::parse(message).ok();
        if cdc.is_none_or(|cdc| cdc.flags.failover_validation) {
            self.look_at_other_links(group, qp, nic, now);
        }
        self.handle_message((group, index), message, cdc, nic, now);
    }

    /// `cdc`: the message, if it is one of CDC.
    fn handle_message(
        &mut self,
        (group, index): (GroupIndex, LinkIndex),
        message: &[u8],
        cdc: Option<SmcrRepr>,
        nic: &mut impl Nic,
        now: Time,
    ) {
        if message.first() == Some(&cdc::TYPE) {
            if let Some(flows) = self.group_mut(group).and_then(|group| group.llc.as_mut()) {
                flows.handle_activity(index, now);
            }
            return cdc.into_iter().for_each(|cdc| self.handle_cdc(group, &cdc, nic, now));
        }
        let mut has_withdrawn = false;
        if let Some(Some(known)) = self.groups.get_mut(group.number())
            && let Some((flows, mut verbs)) = known.flows(nic, &self.devices)
        {
            let before = flows.peer_rmbs().forgotten();
            // What cannot be parsed is ignored, as the kernel does.
            let _ = flows.handle_llc(index, message, &mut verbs, now);
            has_withdrawn = flows.peer_rmbs().forgotten() != before;
        }
        self.run(group, nic, now);
        if has_withdrawn {
            // A connection that has lost the peer's RMB gives up, although it may have nothing to send.
            let conns = self.group_mut(group).map(|group| group.conns.clone()).unwrap_or_default();
            conns.into_iter().for_each(|conn| self.pump(conn, nic));
        }
    }

    fn handle_cdc(&mut self, group: GroupIndex, cdc: &SmcrRepr, nic: &mut impl Nic, now: Time) {
        // Nobody's token, or one of another group: that connection is not the sender's to speak of.
        let conn = ConnId(cdc.token);
        let Some(known) = self.conns.get_mut(conn) else { return };
        if known.seat.is_none_or(|seat| seat.group != group) {
            return;
        }
        known.data.handle_cdc(cdc, &mut self.events);
        self.pump(conn, nic);
        self.end_if_over(conn, now);
    }

    /// The CDC messages of links that are gone: for the peer they have arrived. What LLC had to say there it says again.
    pub(crate) fn take_left(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        let left = self.group_mut(group).map(|group| std::mem::take(&mut group.left));
        for message in left.into_iter().flatten() {
            if let Ok(cdc) = SmcrRepr::parse(&message) {
                self.handle_cdc(group, &cdc, nic, now);
            }
        }
    }

    /// What has come by the group's other links, and was not looked at: the peer knows that it has arrived, and what it says now may follow
    /// from that. A validation counts it, and an RMB is withdrawn behind the last word of its connection.
    fn look_at_other_links(
        &mut self,
        group: GroupIndex,
        this: QpId,
        nic: &mut impl Nic,
        now: Time,
    ) {
        let Some(state) = self.group_mut(group) else { return };
        let links = state.links.iter().flatten().map(|link| link.qp);
        for qp in links.filter(|qp| *qp != this).collect::<Vec<_>>() {
            for message in nic.taken(qp) {
                match (self.by_qp(qp), SmcrRepr::parse(&message).ok()) {
                    (Some(link), cdc) => self.handle_message(link, &message, cdc, nic, now),
                    // An earlier message has ended the link.
                    (None, Some(cdc)) => self.handle_cdc(group, &cdc, nic, now),
                    (None, None) => {}
                }
            }
        }
    }

    /// A queue pair is in error. The successful completions of its sends have been handled; messages that have come are asked for
    /// ([`Nic::cut`]).
    pub fn handle_link_down(&mut self, qp: QpId, nic: &mut impl Nic, now: Time) {
        let Some((group, index)) = self.by_qp(qp) else { return };
        if let Some(Some(known)) = self.groups.get_mut(group.number())
            && let Some((flows, mut verbs)) = known.flows(nic, &self.devices)
        {
            flows.handle_link_down(index, &mut verbs, now);
        }
        // Where the first contact has not come so far, its handshake ends by its own deadline.
        self.run(group, nic, now);
    }

    /// A device's port went down or came up. A link waits for it, unless there is one of another port: then it is lost, and
    /// there can be a second one again once the port is back.
    pub fn handle_port(&mut self, device: DeviceId, is_up: bool, nic: &mut impl Nic, now: Time) {
        self.devices.retain(|known| *known != device);
        if is_up && self.config.devices.contains(&device) {
            self.devices.push(device);
        }
        for group in (0..self.groups.len() as u16).map(GroupIndex) {
            let Some(state) = self.group_mut(group) else { continue };
            let of_device: Vec<QpId> = state
                .links
                .iter_mut()
                .flatten()
                .filter(|l| l.device == device)
                .map(|link| {
                    link.is_held = !is_up;
                    link.qp
                })
                .collect();
            let active = state.llc.iter().flat_map(|llc| llc.active_links());
            let has_other =
                active.filter_map(|(index, _)| state.link(index)).any(|link| !link.is_held);
            for qp in of_device {
                if !is_up && has_other {
                    self.handle_link_down(qp, nic, now);
                } else if let Some((group, index)) = self.by_qp(qp) {
                    self.run(group, nic, now);
                    self.give_turns(group, index, nic);
                }
            }
            if is_up
                && let Some(Some(known)) = self.groups.get_mut(group.number())
                && known.is_up
                && known.is_near(device, nic)
                && let Some((flows, mut verbs)) = known.flows(nic, &self.devices)
            {
                let gid = verbs.port(device).gid;
                // Refused where there are two, or another flow is under way.
                let _ = flows.add_link(Some(gid), &mut verbs, now);
                self.run(group, nic, now);
            }
        }
    }

    /// When [`Engine::handle_timeout`] has to be called next. Ask after each call: it may be at once.
    pub fn next_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// It is time.
    pub fn handle_timeout(&mut self, nic: &mut impl Nic, now: Time) {
        while let Some(qp) = self.timers.pop_broken() {
            // The number may be another link's by now.
            let owner = self.by_qp(qp);
            let link = owner.and_then(|(group, index)| self.group_mut(group)?.link_mut(index));
            if link.is_some_and(|link| link.is_broken) {
                self.handle_link_down(qp, nic, now);
            }
        }
        while let Some(conn) = self.timers.pop_conn(now) {
            if let Some(known) = self.conns.get_mut(conn) {
                known.deadline = None;
            }
            self.is_late(conn, nic, now);
        }
        // Each once: one that can do nothing now is due again at once.
        let mut due = Vec::new();
        while let Some(group) = self.timers.pop_group(now) {
            due.push(group);
        }
        for group in due {
            let Some(Some(known)) = self.groups.get_mut(group.number()) else { continue };
            known.due = None;
            let mut is_stuck = false;
            let is_due = |due: Option<Time>| due.is_some_and(|due| due <= now);
            if let Some((flows, mut verbs)) = known.flows(nic, &self.devices)
                && is_due(flows.next_timeout())
            {
                flows.handle_timeout(&mut verbs, now);
                is_stuck = is_due(flows.next_timeout());
            }
            let retries = known.is_time_to_retry(now);
            if let Some((flows, mut verbs)) = known.flows(nic, &self.devices).filter(|_| retries) {
                // Refused while another flow is under way: the next time, then.
                let _ = flows.add_link(None, &mut verbs, now);
            }
            if is_stuck {
                self.lose_full_links(group, nic, now);
            }
            self.run(group, nic, now);
        }
        while self.timers.is_idle(now)
            && let Some(id) = self.known.poll_expired(now)
        {
            let unused =
                |group: &Option<Box<Group>>| group.as_ref().is_some_and(|group| group.id == id);
            if let Some(at) = self.groups.iter().position(unused) {
                self.end_group(GroupIndex(at as u16), DeleteReason::PROGRAM, nic, now);
            }
            self.look_at_idle();
        }
    }

    /// A deadline has passed, and too much waits to be said for anything to follow from that: the peer takes nothing.
    fn lose_full_links(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        let Some(state) = self.group_mut(group) else { return };
        let full = state.links.iter().flatten().filter(|link| !link.has_room_for_llc());
        let full: Vec<QpId> = full.map(|link| link.qp).collect();
        full.into_iter().for_each(|qp| self.handle_link_down(qp, nic, now));
    }

    fn is_late(&mut self, conn: ConnId, nic: &mut impl Nic, now: Time) {
        let Some(known) = self.conns.get_mut(conn) else { return };
        if !matches!(known.stage, Stage::Established) {
            return self.handshake_timed_out(conn, nic, now);
        }
        let Some(group) = known.seat.map(|seat| seat.group) else { return };
        let awaited = std::mem::replace(&mut known.awaits, Awaits::Nothing);
        if awaited == Awaits::End {
            known.data.peer_is_gone(&mut self.events);
            self.pump(conn, nic);
            return self.end_if_over(conn, now);
        }
        if known.data.waits_for_close() {
            if awaited != Awaits::Close {
                return self.await_until(conn, Awaits::Close, now + ANSWER_TIMEOUT);
            }
            known.data.needs_no_close(&mut self.events);
            return self.end_if_over(conn, now);
        }
        if !known.data.waits_for_answer() {
            return;
        }
        match awaited {
            Awaits::Nothing | Awaits::End | Awaits::Close => {
                self.await_until(conn, Awaits::Answer, now + ANSWER_TIMEOUT);
            }
            Awaits::Answer if known.data.waits_no_more() => self.end_if_over(conn, now),
            // The peer may write into the RMB for ever: without the key it cannot.
            Awaits::Answer => {
                let rmb = known.data.memory.rmb;
                self.await_until(conn, Awaits::Withdrawal, now + ANSWER_TIMEOUT);
                if let Some(rmb) = self.group_mut(group).and_then(|group| group.rmb_mut(rmb)) {
                    rmb.state = RmbState::Asked;
                }
                self.run(group, nic, now);
            }
            Awaits::Withdrawal => self.end_group(group, DeleteReason::PROTOCOL, nic, now),
        }
    }

    fn await_until(&mut self, conn: ConnId, what: Awaits, due: Time) {
        if let Some(known) = self.conns.get_mut(conn) {
            known.awaits = what;
            self.set_deadline(conn, Some(due));
        }
    }

    /// The peer of an established connection has closed its TCP. Linux does so just behind the message that says that it writes no more, or has
    /// closed. Of a program that is killed while the link's send queue is full it sends no such message (`smc_close_final` waits for a place, and a
    /// signal ends that).
    pub(crate) fn tcp_has_ended(&mut self, conn: ConnId, now: Time) {
        if self.conns.get(conn).is_some_and(|known| !known.data.has_peer_ended()) {
            self.await_until(conn, Awaits::End, now + END_TIMEOUT);
        }
    }

    /// The host stops: each connection is aborted, and then its group is deleted, so that peers know at once. Where a link has no room for
    /// all that, it goes on with [`Engine::handle_sent`]; all is said once there is no group left. A connection whose handshake is not
    /// over ends now.
    pub fn stop(&mut self, nic: &mut impl Nic, now: Time) {
        let all: Vec<ConnId> = self.conns.iter().map(|conn| conn.data.id).collect();
        for conn in all {
            let is_it = |conn: &Conn<B>| matches!(conn.stage, Stage::Established);
            if self.conns.get(conn).is_some_and(is_it) {
                self.close(conn, true, nic, now);
            } else {
                // A second time where the first one only waits for a Decline.
                self.handshake_timed_out(conn, nic, now);
                self.handshake_timed_out(conn, nic, now);
            }
        }
        for group in (0..self.groups.len() as u16).map(GroupIndex) {
            if let Some(group) = self.group_mut(group) {
                group.is_ending = true;
            }
            self.end_if_all_is_said(group, nic, now);
        }
    }

    /// Ends a group that is to end, once each connection has said that it does.
    fn end_if_all_is_said(&mut self, group: GroupIndex, nic: &mut impl Nic, now: Time) {
        let Some(state) = self.group_mut(group).filter(|group| group.is_ending) else { return };
        if !state.links.iter().flatten().any(|link| link.is_talking()) {
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
        self.holders.len()
    }

    pub(crate) fn group_mut(&mut self, group: GroupIndex) -> Option<&mut Group> {
        self.groups.get_mut(group.number())?.as_deref_mut()
    }

    /// Sends what a connection has to send.
    pub(crate) fn pump(&mut self, id: ConnId, nic: &mut impl Nic) {
        let Engine { conns, groups, events, timers, .. } = self;
        let Some(conn) = conns.get_mut(id) else { return };
        let Some(seat) = &mut conn.seat else { return };
        if !matches!(conn.stage, Stage::Established) {
            return;
        }
        let Some(Some(group)) = groups.get_mut(seat.group.number()) else { return };
        let peer_rmbs = group.llc.as_ref().map(|llc| llc.peer_rmbs());
        let rmb = peer_rmbs.and_then(|rmbs| rmbs.key(seat.peer_rmb, seat.link));
        let Some(link) = group.link_mut(seat.link) else { return };
        if seat.lkey.is_none() {
            seat.lkey = nic.arena(link.qp, conn.data.memory.arena);
        }
        conn.data.pump(link, rmb, seat.lkey, nic, events);
        if link.is_broken {
            timers.is_broken(link.qp);
        }
        let waits = conn.data.waits_for_answer() || conn.data.waits_for_close();
        if waits && conn.deadline.is_none() {
            // Not known here is what time it is: this one is in the past.
            self.set_deadline(id, Some(Time::ZERO));
        }
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
        self.set_deadline(conn, None);
        let gone = self.conns.remove(conn)?;
        self.users.remove(&gone.data.memory.rmb);
        self.held.retain(|held| *held != conn);
        if let Some(seat) = gone.seat {
            self.leave(conn, seat.group, gone.data.memory.rmb, now);
        }
        Some(gone)
    }
}
