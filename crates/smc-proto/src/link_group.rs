//! A link group of SMC-R: up to three links (queue pairs) between two hosts, the keys of the RMBs
//! on each, and the LLC flows that keep both ends of one mind (RFC 7609 section 4; the
//! kernel's `smc_llc.c`).
//!
//! The caller moves bytes and time, and owns the verbs ([`Fabric`]):
//!
//! - events in: [`LinkGroup::handle_llc`], [`LinkGroup::handle_link_down`],
//!   [`LinkGroup::handle_activity`], [`LinkGroup::on_connected`], [`LinkGroup::handle_timeout`] at
//!   [`LinkGroup::next_timeout`];
//! - wishes: [`LinkGroup::confirm_first_link`], [`LinkGroup::add_link`],
//!   [`LinkGroup::announce_rmb`], [`LinkGroup::withdraw_rmb`], [`LinkGroup::terminate`];
//! - out, after each of these, until they are empty: [`LinkGroup::poll_transmit`],
//!   [`LinkGroup::poll_event`].
//!
//! One flow runs at a time; a request of the peer to add or delete a link that comes meanwhile
//! waits for its end. The peer's RMB keys are recorded at once. Messages are only lost when their
//! link is: that ends the flow it carried, on both sides, and no link stays that only one side
//! knows.

mod add_link;
mod delete_link;
mod fabric;
mod keys;
mod queue;

use core::time::Duration;

pub use fabric::{Connect, Fabric, Port};
pub use keys::{Key, PeerRmbs};
use queue::Queue;

use crate::handshake::LLC_TIMEOUT;
use crate::ids::RoceGid;
use crate::list::List;
use crate::wire::clc::Os;
use crate::wire::llc::{Body, ConfirmLink, DeleteLink, DeleteReason, Error, Message, Version};

/// Links that a group can have for a moment: two, and one that replaces another (`smc_core.h`).
pub const LINKS: usize = 3;
/// The kernel's default for [`Config::test_interval`] (`smcr_testlink_time`).
pub const TEST_INTERVAL: Duration = Duration::from_secs(30);
/// How long a peer may take to confirm a further link (`smc_llc.h`: SMC_LLC_WAIT_FIRST_TIME).
pub const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

/// Messages, and events, that can wait to be polled for.
const WAITING: usize = 48;
/// Of these places so many are kept free for what cannot be refused. One call leaves at most 12 of
/// either: three links are lost, each with the flow over it, and what was delayed runs. A call that
/// may be refused has to find that much, and the loss of three links, one by one, and the end of
/// the group behind it.
const RESERVE: usize = 32;

/// A point in time, from an epoch of the caller's choice.
pub type Time = Duration;

/// Which of the places for links, 0 to 2. Each side has its own order: the name that both know is
/// the link's id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkIndex(u8);

/// Which end of the group: the one that opened its first connection is the client. Only the server
/// adds and deletes links; the client asks it to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Asks.
    Client,
    /// Decides.
    Server,
}

/// What a group is.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Which end this is.
    pub role: Role,
    /// Version of all its messages.
    pub version: Version,
    /// Links that were negotiated, 1 or 2.
    pub max_links: u8,
    /// Connections that were negotiated; 0 below release 1.
    pub max_conns: u8,
    /// Names the group in this side's diagnosis; the base of its links' uids.
    pub id: u32,
    /// A link over which nothing has come for this time is tested; zero: none ever is.
    pub test_interval: Duration,
}

/// A link, to be shown or chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkInfo {
    /// Its place here.
    pub index: LinkIndex,
    /// Its name at both ends, given by the server.
    pub id: u8,
    /// Whether connections may use it.
    pub active: bool,
    /// This end.
    pub local: Port,
    /// The other end; zeros as long as it has not said what it is.
    pub remote: Port,
}

/// What a group has counted since it began.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// LLC messages given to the caller to be sent.
    pub sent: u64,
    /// LLC messages that came.
    pub received: u64,
    /// SENDs that were neither CDC nor LLC.
    pub malformed: u64,
    /// LLC messages that came and were not looked at, because too much waited to be polled for.
    pub dropped: u64,
    /// Messages and events that found no place to wait to be polled for. Always 0: room for them is
    /// kept.
    pub lost: u64,
    /// LLC messages that were not sent: their link had gone, or the caller's buffer was too short.
    pub unsent: u64,
    /// TEST_LINKs that were begun.
    pub tests: u64,
    /// Links that were lost because one was not answered.
    pub tests_failed: u64,
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The first link works: the handshake goes on with the peer's CONFIRM_LINK.
    FirstLink(ConfirmLink),
    /// It does not: the handshake waits for a Decline or declines.
    FirstLinkFailed,
    /// A further link works.
    LinkUp(LinkIndex),
    /// A link is gone. Its connections go on over another one, each after a validation CDC if the
    /// link was lost, not deleted; without another link they are aborted.
    LinkDown {
        /// The link.
        index: LinkIndex,
        /// The other one.
        to: Option<LinkIndex>,
    },
    /// The peer knows the RMB, or it refused or did not answer.
    Announced {
        /// The RMB.
        rmb: usize,
        /// Whether it knows it.
        ok: bool,
    },
    /// The peer forgot the RMB, or it did not know it or did not answer.
    Withdrawn {
        /// The RMB.
        rmb: usize,
        /// Whether it knew it.
        ok: bool,
    },
    /// The group is over: all its connections are aborted.
    Terminated,
}

/// Why something cannot be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Another flow is under way, or too much waits to be polled for; try again after the next event.
    Busy,
    /// No link is up.
    NoLink,
    /// There is no RMB with this number, or it cannot be registered.
    NoRmb,
    /// The group may not have more links.
    LinksFull,
}

/// One end of a link group with up to `RMBS` RMBs on each side (at most 255).
#[derive(Debug)]
pub struct LinkGroup<const RMBS: usize> {
    config: Config,
    links: [Option<Link>; LINKS],
    flow: Flow,
    /// A request that came while a flow was under way.
    delayed: Option<Delayed>,
    /// Which of this side's RMBs the peer knows.
    announced: [bool; RMBS],
    peer_rmbs: PeerRmbs<RMBS>,
    transmits: Queue<Outgoing, WAITING>,
    events: Queue<Event, WAITING>,
    counters: Counters,
    last_link_id: u8,
    terminated: bool,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    id: u8,
    active: bool,
    local: Port,
    remote: Port,
    /// When something came over it last, or a test was sent.
    heard: Time,
    /// A TEST_LINK is not answered yet.
    testing: bool,
    /// It was made beside a link that has one of its ports (RFC 7609, section 2.3): one with two ports of its own replaces it.
    asymmetric: bool,
}

/// What is under way, and until when.
#[derive(Clone, Copy, Debug)]
enum Flow {
    Idle,
    /// CONFIRM_LINK over the first link.
    First {
        deadline: Time,
    },
    /// Server or client: a further link.
    Add {
        via: LinkIndex,
        new: LinkIndex,
        step: add_link::Step,
        deadline: Time,
    },
    /// Client, version 2: asked for a further link.
    Request {
        deadline: Time,
    },
    /// Server: the client is to confirm that a link is deleted.
    Delete {
        via: LinkIndex,
        victim: u8,
        deadline: Time,
    },
    /// The peer is to confirm a new RMB.
    Announce {
        via: LinkIndex,
        rmb: usize,
        deadline: Time,
    },
    /// The peer is to confirm that it forgot an RMB.
    Withdraw {
        via: LinkIndex,
        rmb: usize,
        deadline: Time,
    },
}

#[derive(Clone, Copy, Debug)]
enum Delayed {
    /// Server: the client asked for a link. Client: the server offered one and was turned away; it
    /// is asked to offer it again.
    Add,
    /// The peer asked for the end of a link.
    Delete { via: LinkIndex, request: DeleteLink },
    /// Server: a link is gone, and the client has not been told.
    Tell { request: DeleteLink },
}

/// A message to be written when it is polled for: its lists are filled then.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    via: LinkIndex,
    response: bool,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Plain(Body<'static>),
    /// ADD_LINK with the parameters of this link, and in version 2 all keys on it.
    Add {
        new: LinkIndex,
    },
    /// REQ_ADD_LINK with the GIDs of all links and this one.
    Request {
        gid: Option<RoceGid>,
    },
    /// DELETE_RKEY with this key.
    Withdraw {
        rkey: u32,
    },
    /// The answer to it: version 1 repeats the keys, version 2 sends as many zeros.
    Forgotten {
        rkeys: List<u32, 8>,
        count: u8,
        invalid: u8,
    },
}

impl<const RMBS: usize> LinkGroup<RMBS> {
    /// A group with its first link, whose queue pair is connected. The server gives it the id 1.
    pub fn new(config: Config, local: Port, remote: Port, now: Time) -> LinkGroup<RMBS> {
        const { assert!(RMBS <= 255) }
        let first = Link { id: 1, ..Link::new(local, remote, now) };
        LinkGroup {
            config,
            links: [Some(first), None, None],
            flow: Flow::Idle,
            delayed: None,
            announced: [false; RMBS],
            peer_rmbs: PeerRmbs::new(),
            transmits: Queue::new(),
            events: Queue::new(),
            counters: Counters::default(),
            last_link_id: 1,
            terminated: false,
        }
    }

    /// The place of the first link.
    pub const FIRST: LinkIndex = LinkIndex(0);

    /// The links that work, with their ids; none when the group is over.
    pub fn active_links(&self) -> impl Iterator<Item = (LinkIndex, u8)> {
        let alive = !self.terminated;
        let active = self.indexed().filter(move |(_, link)| alive && link.active);
        active.map(|(index, link)| (index, link.id))
    }

    /// All links, those included that are still being made.
    pub fn links(&self) -> impl Iterator<Item = LinkInfo> {
        self.indexed().map(|(index, link)| {
            let Link { id, active, local, remote, .. } = *link;
            LinkInfo { index, id, active: active && !self.terminated, local, remote }
        })
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        let lost = self.transmits.lost() + self.events.lost();
        Counters { lost, ..self.counters }
    }

    /// What the group was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The first link that works.
    fn any_link(&self) -> Option<LinkIndex> {
        self.active_links().next().map(|(index, _)| index)
    }

    /// The peer's RMBs: where a connection writes, on each link.
    pub fn peer_rmbs(&self) -> &PeerRmbs<RMBS> {
        &self.peer_rmbs
    }

    /// Records the peer's RMB that its Accept or Confirm named, and gives its number here.
    pub fn add_peer_rmb(&mut self, index: LinkIndex, key: Key) -> Option<usize> {
        self.peer_rmbs.add(index, key)
    }

    /// Whether [`LinkGroup::announce_rmb`] and [`LinkGroup::withdraw_rmb`] may be left out. Linux
    /// records the key that the Accept or Confirm of any contact names (`smc_rtoken_add`), and with
    /// one link there is no other key to tell. The same RMB under the same key may then be named
    /// again and again; each new one takes one of the peer's 255 places until it is withdrawn.
    ///
    /// `peer`: the system in the first contact extension; uSMC says that it is Linux. A peer with
    /// another one, or none, gets every announcement. With a second link the peer would write with the key
    /// 0 after a failover, and so it must not be possible: `max_links` 1.
    pub fn may_skip_announce(&self, peer: Os) -> bool {
        peer == Os::LINUX && self.config.max_links == 1 && self.active_links().count() == 1
    }

    /// This side's RMB was named in an Accept or Confirm, of whatever contact, on a group's only
    /// link: the peer knows it, and a further link gets its key. Where there are two links this is
    /// no substitute for [`LinkGroup::announce_rmb`].
    pub fn rmb_was_named(&mut self, rmb: usize) {
        if let Some(announced) = self.announced.get_mut(rmb) {
            *announced = true;
        }
    }

    /// Whether the peer knows this side's RMB.
    pub fn knows_rmb(&self, rmb: usize) -> bool {
        self.announced.get(rmb).copied().unwrap_or(false)
    }

    /// Whether the group is over.
    pub fn is_terminated(&self) -> bool {
        self.terminated
    }

    /// Whether no flow is under way.
    pub fn is_idle(&self) -> bool {
        matches!(self.flow, Flow::Idle)
    }

    /// The first CONFIRM_LINK: the server sends it, the client waits for it.
    pub fn confirm_first_link(&mut self, now: Time) {
        let patience = match self.config.role {
            Role::Server => {
                self.send_confirm_link(Self::FIRST, false);
                LLC_TIMEOUT
            }
            Role::Client => 2 * LLC_TIMEOUT,
        };
        self.flow = Flow::First { deadline: now + patience };
    }

    /// Ends the group: the peer hears of it over any link that works. A host that stops
    /// ([`DeleteReason::PROGRAM`]) sends CDC with an abort for every connection first, since the
    /// peer gives up what is left and its applications lose what they have not read.
    pub fn terminate(&mut self, reason: DeleteReason) {
        if let Some(via) = self.any_link() {
            let orderly = reason == DeleteReason::OPERATOR;
            let delete = DeleteLink { link_id: 0, reason, all: true, orderly };
            self.send(via, false, Body::DeleteLink(delete));
        }
        self.end();
    }

    /// Something came over the link that is no LLC message (those do it themselves): it is alive.
    pub fn handle_activity(&mut self, index: LinkIndex, now: Time) {
        if let Some(link) = self.link_mut(index) {
            (link.heard, link.testing) = (now, false);
        }
    }

    /// An RDMA SEND that is not CDC. What is no LLC message is ignored, and said. A message that
    /// comes while too much waits to be polled for is dropped and counted: its sender asks again,
    /// or gives up, when its time is over.
    pub fn handle_llc(
        &mut self,
        index: LinkIndex,
        bytes: &[u8],
        fabric: &mut impl Fabric,
        now: Time,
    ) -> Result<(), Error> {
        let message = match Message::parse(bytes) {
            Ok(message) => message,
            Err(error) => {
                self.counters.malformed += 1;
                return Err(error);
            }
        };
        self.counters.received += 1;
        if self.terminated || self.link(index).is_none() {
            return Ok(());
        }
        self.handle_activity(index, now);
        if !self.has_room() {
            self.counters.dropped += 1;
            return Ok(());
        }
        if message.is_response() {
            self.on_response(index, &message, fabric, now);
        } else {
            self.on_request(index, &message, fabric, now);
        }
        self.run_delayed(fabric, now);
        Ok(())
    }

    /// A link is lost: its queue pair went into the error state, or its port is gone.
    pub fn handle_link_down(&mut self, index: LinkIndex, fabric: &mut impl Fabric, now: Time) {
        if self.terminated || self.link(index).is_none() {
            return;
        }
        self.lose_link(index, fabric, now);
        self.run_delayed(fabric, now);
    }

    /// When [`LinkGroup::handle_timeout`] has to be called next.
    pub fn next_timeout(&self) -> Option<Time> {
        if self.terminated {
            return None;
        }
        let active = self.indexed().filter(|(_, link)| link.active);
        let tests = active.filter_map(|(_, link)| link.due(&self.config));
        self.flow.deadline().into_iter().chain(tests).min()
    }

    /// It is time: an answer did not come, or a link was idle. Nothing happens as long as too much
    /// waits to be polled for.
    pub fn handle_timeout(&mut self, fabric: &mut impl Fabric, now: Time) {
        if self.terminated || !self.has_room() {
            return;
        }
        if self.flow.deadline().is_some_and(|deadline| deadline <= now) {
            self.on_flow_timeout(fabric, now);
        }
        for index in LinkIndex::ALL {
            let is_due =
                |link: &&Link| link.active && link.due(&self.config).is_some_and(|due| due <= now);
            match self.link(index).filter(is_due).map(|link| link.testing) {
                None => {}
                Some(true) => {
                    self.counters.tests_failed += 1;
                    self.lose_link(index, fabric, now);
                }
                Some(false) => {
                    self.counters.tests += 1;
                    if let Some(link) = self.link_mut(index) {
                        (link.heard, link.testing) = (now, true);
                    }
                    self.send(index, false, Body::TestLink([0; 16]));
                }
            }
        }
        self.run_delayed(fabric, now);
    }

    /// Whether [`LinkGroup::poll_transmit`] or [`LinkGroup::poll_event`] has something to give.
    pub fn has_news(&self) -> bool {
        self.transmits.free() < WAITING || self.events.free() < WAITING
    }

    /// What happened, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop()
    }

    /// The next message to send, and over which link; it is written to the start of `buffer`
    /// ([`crate::wire::llc::MAX_LEN`] bytes are always enough).
    pub fn poll_transmit<'b>(
        &mut self,
        fabric: &mut impl Fabric,
        buffer: &'b mut [u8],
    ) -> Option<(LinkIndex, &'b [u8])> {
        while let Some(outgoing) = self.transmits.pop() {
            // The link may have gone since.
            let via = self.link(outgoing.via).map(|_| outgoing.via);
            match via.and_then(|_| self.write(&outgoing, fabric, buffer)) {
                None => self.counters.unsent += 1,
                Some(len) => {
                    self.counters.sent += 1;
                    return Some((outgoing.via, buffer.get(..len)?));
                }
            }
        }
        if self.terminated {
            for index in LinkIndex::ALL {
                self.drop_link(index, fabric);
            }
        }
        None
    }

    fn on_response(
        &mut self,
        index: LinkIndex,
        message: &Message<'_>,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        match (*message.body(), self.flow) {
            (Body::ConfirmLink(confirm), Flow::First { .. }) => {
                self.on_first_confirm(index, confirm, now);
            }
            (Body::ConfirmLink(_), Flow::Add { .. }) => {
                self.on_new_link_confirmed(index, fabric, now);
            }
            (Body::AddLink(add), Flow::Add { .. }) => {
                self.on_add_response(index, &add, fabric, now);
            }
            (Body::AddLinkCont(cont), Flow::Add { .. }) => {
                self.on_add_cont(index, &cont, fabric, now);
            }
            (Body::DeleteLink(answer), Flow::Delete { victim, .. }) if answer.link_id == victim => {
                self.on_delete_response(fabric, now);
            }
            (Body::ReqAddLink(_), Flow::Request { .. }) => self.flow = Flow::Idle,
            (Body::ConfirmRkey(answer), Flow::Announce { .. }) => {
                self.on_announced(!answer.negative);
            }
            (Body::DeleteRkey(answer), Flow::Withdraw { .. }) => {
                self.on_withdrawn(!answer.negative);
            }
            // TEST_LINK: that it came is all. Others are late, and nobody waits for them.
            _ => {}
        }
    }

    fn on_request(
        &mut self,
        index: LinkIndex,
        message: &Message<'_>,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        match *message.body() {
            Body::TestLink(data) => self.send(index, true, Body::TestLink(data)),
            Body::ConfirmLink(confirm) => match self.flow {
                Flow::First { .. } if self.config.role == Role::Client => {
                    self.on_first_confirm(index, confirm, now);
                }
                Flow::Add { .. } => self.on_new_link_confirm_request(index, now),
                _ => {}
            },
            Body::AddLink(add) => self.on_add_request(index, &add, fabric, now),
            Body::AddLinkCont(cont) => self.on_add_cont(index, &cont, fabric, now),
            Body::ReqAddLink(_) => self.on_add_wish(index, fabric, now),
            Body::DeleteLink(request) => self.on_delete_request(index, &request, fabric, now),
            Body::ConfirmRkey(request) => self.on_peer_rmb(index, request),
            Body::DeleteRkey(request) => self.on_peer_rmb_gone(index, &request, now),
            // Two further links are the most there are.
            Body::ConfirmRkeyCont(_) => {}
        }
    }

    fn on_first_confirm(&mut self, index: LinkIndex, confirm: ConfirmLink, now: Time) {
        self.flow = Flow::Idle;
        if let Some(link) = self.link_mut(index) {
            (link.active, link.heard) = (true, now);
            if let Role::Client = self.config.role {
                // The server assigns the ids.
                if let Some(link) = self.link_mut(index) {
                    link.id = confirm.link_id;
                }
                self.send_confirm_link(index, true);
            }
        }
        self.events.push(Event::FirstLink(confirm));
    }

    fn on_flow_timeout(&mut self, fabric: &mut impl Fabric, now: Time) {
        match self.flow {
            Flow::Idle => {}
            Flow::First { .. } => {
                self.flow = Flow::Idle;
                self.events.push(Event::FirstLinkFailed);
            }
            Flow::Add { .. } => self.abandon_new_link(true, fabric),
            Flow::Request { .. } => self.flow = Flow::Idle,
            Flow::Delete { .. } => self.on_delete_response(fabric, now),
            Flow::Announce { .. } => self.on_announced(false),
            Flow::Withdraw { .. } => self.on_withdrawn(false),
        }
    }

    /// All is over. What is queued still goes out; then the queue pairs are destroyed.
    fn end(&mut self) {
        if !self.terminated {
            self.terminated = true;
            self.flow = Flow::Idle;
            self.delayed = None;
            self.events.push(Event::Terminated);
        }
    }

    /// Whether a call may begin that can leave messages and events.
    fn has_room(&self) -> bool {
        self.transmits.free().min(self.events.free()) >= RESERVE
    }

    fn send(&mut self, via: LinkIndex, response: bool, body: Body<'static>) {
        self.transmits.push(Outgoing { via, response, what: What::Plain(body) });
    }

    fn send_confirm_link(&mut self, index: LinkIndex, response: bool) {
        let Some(link) = self.link(index) else { return };
        let confirm = ConfirmLink {
            mac: link.local.mac,
            gid: link.local.gid,
            qpn: link.local.qpn,
            link_id: link.id,
            link_uid: self.config.id.wrapping_add(link.id.into()).to_be_bytes(),
            max_links: self.config.max_links,
            max_conns: self.config.max_conns,
            no_rmbe_eyecatcher: true,
        };
        self.send(index, response, Body::ConfirmLink(confirm));
    }

    fn link(&self, index: LinkIndex) -> Option<&Link> {
        self.links.get(usize::from(index.0))?.as_ref()
    }

    fn link_mut(&mut self, index: LinkIndex) -> Option<&mut Link> {
        self.links.get_mut(usize::from(index.0))?.as_mut()
    }

    fn take_link(&mut self, index: LinkIndex) -> Option<Link> {
        self.links.get_mut(usize::from(index.0))?.take()
    }

    fn indexed(&self) -> impl Iterator<Item = (LinkIndex, &Link)> {
        LinkIndex::ALL.into_iter().filter_map(|index| Some((index, self.link(index)?)))
    }

    fn by_id(&self, id: u8) -> Option<LinkIndex> {
        self.indexed().find(|(_, link)| link.id == id).map(|(index, _)| index)
    }
}

impl LinkIndex {
    /// All places.
    pub const ALL: [LinkIndex; LINKS] = [LinkIndex(0), LinkIndex(1), LinkIndex(2)];

    /// The place as a number, 0 to 2.
    pub fn number(self) -> usize {
        self.0.into()
    }
}

impl Link {
    fn new(local: Port, remote: Port, now: Time) -> Link {
        Link { id: 0, active: false, local, remote, heard: now, testing: false, asymmetric: false }
    }

    /// When it has to be tested, or when the test has failed.
    fn due(&self, config: &Config) -> Option<Time> {
        let interval = if self.testing { LLC_TIMEOUT } else { config.test_interval };
        (!interval.is_zero()).then(|| self.heard.saturating_add(interval))
    }
}

impl Flow {
    fn deadline(&self) -> Option<Time> {
        match *self {
            Flow::Idle => None,
            Flow::First { deadline }
            | Flow::Request { deadline }
            | Flow::Add { deadline, .. }
            | Flow::Delete { deadline, .. }
            | Flow::Announce { deadline, .. }
            | Flow::Withdraw { deadline, .. } => Some(deadline),
        }
    }
}
