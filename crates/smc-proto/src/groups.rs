//! The link groups of a host: which of them a connection joins, and when it has to begin one (first
//! contact); how many connections each has, and how long one without any is kept (`smc_core.c`).
//!
//! A server asks with the client's Proposal, a client with the server's Accept. Whoever finds none
//! says "first contact" in its side ([`SmcdSide`](crate::handshake::SmcdSide),
//! [`SmcrSide`](crate::handshake::SmcrSide)); a client that the server takes for known and that finds
//! none is out of sync, which the handshake notices.

use core::time::Duration;

use crate::handshake::Path;
use crate::ids::{MacAddr, PeerId, RoceGid, SmcdGid, U24};
use crate::link_group::{LINKS, Port, Role, Time};
use crate::list::{Full, List};

/// How long a server keeps a group that nobody uses (`smc_core.c`: SMC_LGR_FREE_DELAY_SERV).
pub const KEEP_SERVER: Duration = Duration::from_secs(600);
/// How long a client does: a little longer, so that the server is the one to end it.
pub const KEEP_CLIENT: Duration = Duration::from_secs(610);

/// Names a group of [`Groups`], until it is removed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GroupId(usize);

/// The peer's end of a link, as CLC and LLC messages name it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PeerPort {
    /// GID of its RoCE port.
    pub gid: RoceGid,
    /// MAC of its RoCE port.
    pub mac: MacAddr,
    /// Its queue pair.
    pub qpn: U24,
}

/// Who the peer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// Of SMC-R. A server does not know the queue pair yet.
    R {
        /// Its host, as its message names it. A Linux client that offers version 2 alone says 0,
        /// which is an id like any other here.
        id: PeerId,
        /// The port that its message names.
        port: PeerPort,
    },
    /// Of SMC-D.
    D {
        /// The device here.
        device: SmcdGid,
        /// The device there. Of hardware, and in version 1, half of the GID is 0.
        peer: SmcdGid,
    },
}

/// What a connection needs of its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// Mode and version.
    pub path: Path,
    /// Which end this is.
    pub role: Role,
    /// VLAN of the interface, 0 for none. SMC-Dv2 does not ask for it.
    pub vlan: u16,
    /// The peer.
    pub peer: Peer,
}

/// Up to `N` link groups.
#[derive(Debug)]
pub struct Groups<const N: usize> {
    groups: [Option<Group>; N],
}

#[derive(Debug)]
struct Group {
    role: Role,
    vlan: u16,
    peer: GroupPeer,
    connections: u32,
    max_conns: u8,
    /// How many more RMBs can be recorded; [`usize::MAX`] if nobody has said.
    keys_left: usize,
    /// It is out of step with the peer, or comes to its end: nobody joins.
    closed: bool,
    /// When it has been without a connection for long enough.
    expires: Option<Time>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GroupPeer {
    R { id: PeerId, links: List<PeerPort, LINKS> },
    D { device: SmcdGid, peer: SmcdGid },
}

impl<const N: usize> Groups<N> {
    /// None yet.
    pub fn new() -> Groups<N> {
        Groups { groups: [const { None }; N] }
    }

    /// Joins a group that serves, if there is one: it has one connection more.
    pub fn join(&mut self, need: &Need) -> Option<GroupId> {
        let found = |group: &Option<Group>| group.as_ref().is_some_and(|group| group.serves(need));
        let id = self.groups.iter().position(found)?;
        let group = self.groups.get_mut(id)?.as_mut()?;
        group.connections += 1;
        group.expires = None;
        Some(GroupId(id))
    }

    /// Begins a group, with one connection in it. `max_conns`: as many as were negotiated, which
    /// counts for SMC-R only.
    pub fn begin(&mut self, need: &Need, max_conns: u8) -> Result<GroupId, Full> {
        let full = Full { capacity: N };
        let id = self.groups.iter().position(Option::is_none).ok_or(full)?;
        let peer = match need.peer {
            Peer::R { id, port } => {
                GroupPeer::R { id, links: List::from_slice(&[port]).unwrap_or_default() }
            }
            Peer::D { device, peer } => GroupPeer::D { device, peer },
        };
        *self.groups.get_mut(id).ok_or(full)? = Some(Group {
            role: need.role,
            vlan: need.vlan,
            peer,
            connections: 1,
            max_conns,
            keys_left: usize::MAX,
            closed: false,
            expires: None,
        });
        Ok(GroupId(id))
    }

    /// The peer's ends of the links that a group of SMC-R has now, in the order of
    /// [`LinkGroup::links`](crate::link_group::LinkGroup::links) and only those that are active: the
    /// first is known completely with the Confirm, LLC brings others and takes them.
    pub fn set_links(&mut self, id: GroupId, links: List<PeerPort, LINKS>) {
        if let Some(Group { peer: GroupPeer::R { links: known, .. }, .. }) = self.get_mut(id) {
            *known = links;
        }
    }

    /// How many more RMBs the two sides can record for a group of SMC-R
    /// ([`LinkGroup::keys_left`](crate::link_group::LinkGroup::keys_left)). Without any, no
    /// connection joins at the server: its next one is a first contact. A Linux client that has no
    /// place left for the server's key declines with
    /// [`ERR_RTOK`](crate::decline::DeclineCode::ERR_RTOK). A client does as the server says.
    pub fn set_keys_left(&mut self, id: GroupId, keys_left: usize) {
        if let Some(group) = self.get_mut(id) {
            group.keys_left = keys_left;
        }
    }

    /// Which of a group's links, as [`Groups::set_links`] named them, the connection uses that has
    /// just joined it: the one that the server names; a server spreads connections over the first
    /// two in turn, as Linux does. None if it has no such link, and for SMC-D.
    pub fn link(&self, id: GroupId, need: &Need) -> Option<usize> {
        let group = self.groups.get(id.0)?.as_ref()?;
        let (GroupPeer::R { links, .. }, Peer::R { port, .. }) = (&group.peer, &need.peer) else {
            return None;
        };
        match need.role {
            Role::Client => links.iter().position(|link| link.serves(port, need)),
            Role::Server => {
                let others = group.connections.saturating_sub(1) as usize;
                links.len().min(2).checked_sub(1).map(|last| others % (last + 1))
            }
        }
    }

    /// A connection is over.
    pub fn leave(&mut self, id: GroupId, now: Time) {
        let Some(group) = self.get_mut(id) else { return };
        group.connections = group.connections.saturating_sub(1);
        if group.connections == 0 {
            let keep = match group.role {
                _ if group.closed => Duration::ZERO,
                Role::Server => KEEP_SERVER,
                Role::Client => KEEP_CLIENT,
            };
            group.expires = Some(now + keep);
        }
    }

    /// Nobody joins any more: the peer is out of sync, or the group is being ended. It is given up
    /// with its last connection.
    pub fn close(&mut self, id: GroupId, now: Time) {
        let Some(group) = self.get_mut(id) else { return };
        group.closed = true;
        if group.connections == 0 {
            group.expires = Some(now);
        }
    }

    /// How many connections a group has.
    pub fn connections(&self, id: GroupId) -> u32 {
        self.groups.get(id.0).and_then(Option::as_ref).map_or(0, |group| group.connections)
    }

    /// When [`Groups::poll_expired`] has to be called next.
    pub fn next_timeout(&self) -> Option<Time> {
        self.groups.iter().flatten().filter_map(|group| group.expires).min()
    }

    /// Removes a group that is not used any more; its caller ends its links.
    pub fn poll_expired(&mut self, now: Time) -> Option<GroupId> {
        let over = |group: &Option<Group>| {
            group.as_ref().and_then(|group| group.expires).is_some_and(|expires| expires <= now)
        };
        let id = self.groups.iter().position(over)?;
        *self.groups.get_mut(id)? = None;
        Some(GroupId(id))
    }

    /// Removes a group that is lost, whatever connections it has.
    pub fn remove(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get_mut(id.0) {
            *group = None;
        }
    }

    fn get_mut(&mut self, id: GroupId) -> Option<&mut Group> {
        self.groups.get_mut(id.0)?.as_mut()
    }
}

impl<const N: usize> Default for Groups<N> {
    fn default() -> Self {
        Groups::new()
    }
}

impl Group {
    /// Whether a connection can join (`smc_conn_create`).
    fn serves(&self, need: &Need) -> bool {
        let same_vlan = need.path == Path::Dv2 || self.vlan == need.vlan;
        if self.closed || self.role != need.role || !same_vlan {
            return false;
        }
        match (&self.peer, &need.peer) {
            (GroupPeer::D { device, peer }, Peer::D { device: here, peer: there }) => {
                (device, peer) == (here, there)
            }
            (GroupPeer::R { id, links }, Peer::R { id: host, port }) => {
                // The limits are the server's to keep.
                let room = self.connections < u32::from(self.max_conns) && self.keys_left > 0;
                let room = room || need.role == Role::Client;
                id == host && room && links.iter().any(|link| link.serves(port, need))
            }
            _ => false,
        }
    }
}

impl From<&Port> for PeerPort {
    fn from(port: &Port) -> PeerPort {
        PeerPort { gid: port.gid, mac: port.mac, qpn: port.qpn }
    }
}

impl PeerPort {
    fn serves(&self, named: &PeerPort, need: &Need) -> bool {
        // Behind a gateway a MAC says nothing, and so it does not count in version 2. The client
        // knows which link the server means by its queue pair.
        self.gid == named.gid
            && (need.path == Path::Rv2 || self.mac == named.mac)
            && (need.role == Role::Server || self.qpn == named.qpn)
    }
}
