//! A link group with its queue pairs and the RMBs that the peer knows of it.

use std::collections::VecDeque;
use std::time::Duration;

use smc_proto::groups::GroupId;
use smc_proto::link_group::{Connect, Fabric, Key, LINKS, LinkGroup, LinkIndex, Port, Time};
use smc_proto::wire::clc::Os;
use smc_proto::wire::llc;

use crate::connection::ConnId;
use crate::link::{Link, Sent};
use crate::nic::{DeviceId, Nic, QpId, RmbId};

/// RMBs that a group can have on each side, as many as the kernel has places for (`smc_core.h`: SMC_RMBS_PER_LGR_MAX). A server leaves
/// one free: a kernel client goes on over TCP where its table is full. A client does as the server says.
pub const RMBS: usize = 255;
/// So many numbers are kept free as long as RMBs are unused. A connection that needs one does not wait for the peer's answer, and the peer,
/// which counts too, finds room for it.
const SPARE: usize = 16;

/// A further link that has not come about is tried again after this time, and then after twice as long each time. Of a peer's flow that is in
/// its way nothing is heard, nor of a cable that is whole again.
const RETRY: Duration = Duration::from_secs(2);
/// The longest such time.
const SLOWEST: Duration = Duration::from_secs(64);

/// Names a link group of an engine until [`crate::Event::GroupDown`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupIndex(pub(crate) u16);

impl GroupIndex {
    pub(crate) fn number(self) -> usize {
        self.0.into()
    }
}

/// One of this side's RMBs for which the peer has a key, or gets one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rmb {
    pub(crate) id: RmbId,
    pub(crate) state: RmbState,
}

/// ```text
///           connection ends             caller asks
///   InUse ◀────────────────▶ Unused ────────────────▶ Asked ◀── InUse: the peer does not answer an abort
///          connection joins    │ numbers are short      │
///                              └──────▶ Leaves ◀────────┘ DELETE_RKEY ◀── InUse: no Confirm comes
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RmbState {
    /// A connection has it.
    InUse,
    /// No connection has it, and the peer keeps its key for the next one.
    Unused { since: u64 },
    /// It is withdrawn as soon as no other flow is under way.
    Asked,
    /// The peer is asked to forget it.
    Leaves,
}

#[derive(Debug)]
pub(crate) struct Group {
    /// Its name among the groups that a connection can join.
    pub(crate) id: GroupId,
    /// Nothing before the peer's end of the first link is known.
    pub(crate) llc: Option<LinkGroup<RMBS>>,
    pub(crate) links: [Option<Link>; LINKS],
    /// Which of this side's RMBs has which number in the group. One stays as long as there are numbers for others, so that its key can be
    /// used again.
    pub(crate) rmbs: Vec<Option<Rmb>>,
    /// Connections that have left: the order in which RMBs became unused.
    departures: u64,
    /// Its connections, and those that are about to be.
    pub(crate) conns: Vec<ConnId>,
    /// Connections whose RMB has to be announced, one after the other.
    pub(crate) announces: VecDeque<ConnId>,
    /// The first link is confirmed.
    pub(crate) is_up: bool,
    /// The peer's system.
    pub(crate) peer_os: Os,
    /// The queue pairs that the engine's table has.
    pub(crate) listed: [Option<QpId>; LINKS],
    /// When the engine looks at it next, at the latest.
    pub(crate) due: Option<Time>,
    /// When a further link is tried again, and how long after that once more.
    retry: Option<Time>,
    patience: Duration,
    /// It ends once its connections have said that they do.
    pub(crate) is_ending: bool,
    /// Messages of links that are gone, which nobody has looked at so far.
    pub(crate) left: Vec<Vec<u8>>,
}

impl Group {
    pub(crate) fn new(id: GroupId, first: Link) -> Group {
        Group {
            id,
            llc: None,
            links: [Some(first), None, None],
            rmbs: Vec::new(),
            departures: 0,
            conns: Vec::new(),
            announces: VecDeque::new(),
            is_up: false,
            peer_os: Os::UNSPECIFIED,
            listed: [None; LINKS],
            due: None,
            retry: None,
            patience: RETRY,
            is_ending: false,
            left: Vec::new(),
        }
    }

    pub(crate) fn link(&self, index: LinkIndex) -> Option<&Link> {
        self.links.get(index.number())?.as_ref()
    }

    pub(crate) fn link_mut(&mut self, index: LinkIndex) -> Option<&mut Link> {
        self.links.get_mut(index.number())?.as_mut()
    }

    /// The number of an RMB here.
    pub(crate) fn number_of(&self, rmb: RmbId) -> Option<usize> {
        self.rmbs.iter().position(|known| known.is_some_and(|known| known.id == rmb))
    }

    /// A connection has this RMB: a new one gets a number, if there is any left.
    pub(crate) fn take(&mut self, rmb: RmbId) -> Option<usize> {
        let free = || self.rmbs.iter().position(Option::is_none).unwrap_or(self.rmbs.len());
        let number = Some(self.number_of(rmb).unwrap_or_else(free)).filter(|at| *at < RMBS)?;
        if number == self.rmbs.len() {
            self.rmbs.push(None);
        }
        *self.rmbs.get_mut(number)? = Some(Rmb { id: rmb, state: RmbState::InUse });
        Some(number)
    }

    /// A connection leaves, and its RMB has none.
    pub(crate) fn leave(&mut self, conn: ConnId, rmb: RmbId) {
        self.conns.retain(|one| *one != conn);
        self.announces.retain(|one| *one != conn);
        self.departures += 1;
        let since = self.departures;
        if let Some(known) = self.rmb_mut(rmb).filter(|known| known.state == RmbState::InUse) {
            known.state = RmbState::Unused { since };
        }
    }

    /// The peer is being asked to forget the RMB of that number.
    pub(crate) fn leaves(&mut self, number: usize) {
        if let Some(Some(rmb)) = self.rmbs.get_mut(number) {
            rmb.state = RmbState::Leaves;
        }
    }

    pub(crate) fn rmb_mut(&mut self, rmb: RmbId) -> Option<&mut Rmb> {
        self.rmbs.iter_mut().flatten().find(|known| known.id == rmb)
    }

    /// RMBs that have a number.
    pub(crate) fn named(&self) -> usize {
        self.rmbs.iter().flatten().count()
    }

    /// The RMB that is to be withdrawn next: one that was asked for, or, where numbers are short, the one longest unused.
    pub(crate) fn to_withdraw(&self) -> Option<usize> {
        let is_short = self.named() + SPARE >= RMBS;
        let since = |rmb: &Option<Rmb>| match rmb.as_ref()?.state {
            RmbState::Asked => Some(0),
            RmbState::Unused { since } if is_short => Some(since),
            RmbState::Unused { .. } | RmbState::InUse | RmbState::Leaves => None,
        };
        let all = self.rmbs.iter().enumerate().filter_map(|(at, rmb)| Some((since(rmb)?, at)));
        all.min().map(|(_, at)| at).filter(|_| self.is_up && !self.is_ending)
    }

    /// When the group has something to do next.
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let flows = self.llc.as_ref().and_then(|flows| flows.next_timeout());
        flows.into_iter().chain(self.retry).min()
    }

    /// Whether there can be one more link: by a device that no link has, or by a port of the peer's that has come back.
    fn lacks_link(&self, devices: &[DeviceId], nic: &impl Nic) -> bool {
        let links = self.links.iter().flatten();
        let is_free = |device: &DeviceId| {
            let is_it = |link: &Link| link.device == *device;
            self.is_near(*device, nic) && !links.clone().any(is_it)
        };
        let Some(flows) = self.llc.as_ref().filter(|flows| flows.may_add()) else { return false };
        let has_ports = flows.is_asymmetric() || devices.iter().any(is_free);
        self.is_up && !self.is_ending && has_ports
    }

    /// Whether a device is in the physical network of the group's links.
    pub(crate) fn is_near(&self, device: DeviceId, nic: &impl Nic) -> bool {
        self.links.iter().flatten().all(|link| nic.are_together(link.device, device))
    }

    /// A further link that is missing is tried again some time.
    pub(crate) fn plan_retry(&mut self, devices: &[DeviceId], nic: &impl Nic, now: Time) {
        if !self.lacks_link(devices, nic) {
            (self.retry, self.patience) = (None, RETRY);
        } else if self.retry.is_none() {
            self.retry = Some(now + self.patience);
        }
    }

    /// Whether it is time for that.
    pub(crate) fn is_time_to_retry(&mut self, now: Time) -> bool {
        let is_due = self.retry.is_some_and(|at| at <= now);
        if is_due {
            self.patience = SLOWEST.min(2 * self.patience);
            self.retry = Some(now + self.patience);
        }
        is_due
    }

    /// The flows, and what they need.
    pub(crate) fn flows<'a, N: Nic>(
        &'a mut self,
        nic: &'a mut N,
        devices: &'a [DeviceId],
    ) -> Option<(&'a mut LinkGroup<RMBS>, Verbs<'a, N>)> {
        let Group { llc, links, rmbs, left, .. } = self;
        let llc = llc.as_mut()?;
        let is_over = llc.is_terminated();
        Some((llc, Verbs { nic, links, rmbs, devices, is_over, left }))
    }

    /// Sends what LLC has to say, as far as there is room.
    pub(crate) fn transmit(&mut self, nic: &mut impl Nic, devices: &[DeviceId]) {
        let mut buffer = [0; llc::MAX_LEN];
        loop {
            // A message that was polled for has to be sent: no link may be full.
            if self.links.iter().flatten().any(|link| !link.has_room_for_llc()) {
                return;
            }
            let Some((flows, mut verbs)) = self.flows(nic, devices) else { return };
            let Some((index, message)) = flows.poll_transmit(&mut verbs, &mut buffer) else {
                return;
            };
            if let Some(link) = self.link_mut(index) {
                // Where that fails the link is lost, as its completions say.
                let _ = link.post(nic, &[], message, Sent::Llc);
            }
        }
    }
}

/// The verbs, as the flows of a group see them.
pub(crate) struct Verbs<'a, N> {
    nic: &'a mut N,
    links: &'a mut [Option<Link>; LINKS],
    rmbs: &'a [Option<Rmb>],
    /// Those that a further link may use.
    devices: &'a [DeviceId],
    /// The group is: its queue pairs go when all that was said is out ([`Nic::destroy`]), and with the group.
    is_over: bool,
    /// [`Group::left`]
    left: &'a mut Vec<Vec<u8>>,
}

impl<N: Nic> Verbs<'_, N> {
    pub(crate) fn port(&self, device: DeviceId) -> Port {
        self.nic.port(device)
    }

    fn qp(&self, index: LinkIndex) -> Option<QpId> {
        self.links.get(index.number())?.as_ref().map(|link| link.qp)
    }
}

impl<N: Nic> Fabric for Verbs<'_, N> {
    fn create(&mut self, index: LinkIndex, used: &[Port]) -> Option<Port> {
        let is_used =
            |device: &DeviceId| used.iter().any(|port| port.gid == self.nic.port(*device).gid);
        let is_near = |device: &&DeviceId| {
            self.links.iter().flatten().all(|link| self.nic.are_together(link.device, **device))
        };
        let near = self.devices.iter().filter(is_near);
        let (shared, free): (Vec<DeviceId>, Vec<_>) = near.partition(|device| is_used(device));
        for device in free.into_iter().chain(shared) {
            if let Some((qp, local)) = self.nic.create(device) {
                *self.links.get_mut(index.number())? = Some(Link::new(qp, device, local, self.nic));
                return Some(local);
            }
        }
        None
    }

    fn connect(&mut self, index: LinkIndex, remote: &Port) -> Connect {
        self.qp(index).map_or(Connect::Failed, |qp| self.nic.connect(qp, remote))
    }

    fn key(&mut self, rmb: usize, index: LinkIndex) -> Option<Key> {
        self.nic.rmb(self.qp(index)?, self.rmbs.get(rmb)?.as_ref()?.id)
    }

    fn destroy(&mut self, index: LinkIndex) {
        if self.is_over {
            return;
        }
        if let Some(link) = self.links.get_mut(index.number()).and_then(Option::take) {
            let left = self.nic.cut(link.qp);
            self.left.extend(left);
        }
    }
}
