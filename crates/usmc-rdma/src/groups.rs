//! A link group with its queue pairs and the RMBs that the peer knows of it.

use std::collections::VecDeque;

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

/// Names a link group of an engine until [`crate::Event::GroupDown`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupIndex(pub(crate) u16);

impl GroupIndex {
    pub(crate) fn number(self) -> usize {
        self.0.into()
    }
}

#[derive(Debug)]
pub(crate) struct Group {
    /// Its name among the groups that a connection can join.
    pub(crate) id: GroupId,
    /// Nothing before the peer's end of the first link is known.
    pub(crate) llc: Option<LinkGroup<RMBS>>,
    pub(crate) links: [Option<Link>; LINKS],
    /// Which of this side's RMBs has which number in the group. One stays while the group lives, so that its key can be used again.
    pub(crate) rmbs: Vec<RmbId>,
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
    /// It ends once its connections have said that they do.
    pub(crate) is_ending: bool,
}

impl Group {
    pub(crate) fn new(id: GroupId, first: Link) -> Group {
        Group {
            id,
            llc: None,
            links: [Some(first), None, None],
            rmbs: Vec::new(),
            conns: Vec::new(),
            announces: VecDeque::new(),
            is_up: false,
            peer_os: Os::UNSPECIFIED,
            listed: [None; LINKS],
            due: None,
            is_ending: false,
        }
    }

    pub(crate) fn link(&self, index: LinkIndex) -> Option<&Link> {
        self.links.get(index.number())?.as_ref()
    }

    pub(crate) fn link_mut(&mut self, index: LinkIndex) -> Option<&mut Link> {
        self.links.get_mut(index.number())?.as_mut()
    }

    /// The number of an RMB here; a new one gets one, if there is any left.
    pub(crate) fn number_of(&mut self, rmb: RmbId) -> Option<usize> {
        let known = self.rmbs.iter().position(|known| *known == rmb);
        known.or_else(|| {
            if self.rmbs.len() == RMBS {
                return None;
            }
            self.rmbs.push(rmb);
            Some(self.rmbs.len() - 1)
        })
    }

    /// Whether this RMB has a number, or can get one.
    pub(crate) fn has_number_for(&self, rmb: RmbId) -> bool {
        self.rmbs.len() < RMBS || self.rmbs.contains(&rmb)
    }

    /// The flows, and what they need.
    pub(crate) fn flows<'a, N: Nic>(
        &'a mut self,
        nic: &'a mut N,
        devices: &'a [DeviceId],
    ) -> Option<(&'a mut LinkGroup<RMBS>, Verbs<'a, N>)> {
        let Group { llc, links, rmbs, .. } = self;
        let llc = llc.as_mut()?;
        let is_over = llc.is_terminated();
        Some((llc, Verbs { nic, links, rmbs, devices, is_over }))
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
    rmbs: &'a [RmbId],
    /// Those that a further link may use.
    devices: &'a [DeviceId],
    /// The group is: its queue pairs go when all that was said is out ([`Nic::destroy`]), and with the group.
    is_over: bool,
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
        for &device in self.devices {
            let is_used = self.links.iter().flatten().any(|link| link.device == device);
            if is_used && used.len() < self.devices.len() {
                continue;
            }
            if let Some((qp, local)) = self.nic.create(device) {
                *self.links.get_mut(index.number())? = Some(Link::new(qp, device, local));
                return Some(local);
            }
        }
        None
    }

    fn connect(&mut self, index: LinkIndex, remote: &Port) -> Connect {
        self.qp(index).map_or(Connect::Failed, |qp| self.nic.connect(qp, remote))
    }

    fn key(&mut self, rmb: usize, index: LinkIndex) -> Option<Key> {
        self.nic.rmb(self.qp(index)?, *self.rmbs.get(rmb)?)
    }

    fn destroy(&mut self, index: LinkIndex) {
        if self.is_over {
            return;
        }
        if let Some(link) = self.links.get_mut(index.number()).and_then(Option::take) {
            self.nic.cut(link.qp);
        }
    }
}
