//! Link groups and links, to be shown.

use smc_proto::link_group::{Port, Role};
use smc_proto::wire::llc::Version;

use crate::nic::DeviceId;
use crate::{ConnId, Engine};

/// A link group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Its name, which no two groups have at a time; the base of its links' uids.
    pub id: u32,
    /// Which end this host is.
    pub role: Role,
    /// Of its messages.
    pub version: Version,
    /// Connections, and those that are about to be.
    pub conns: usize,
    /// RMBs of this host for which the peer has a key, or gets one.
    pub rmbs: usize,
    /// RMBs of the peer's.
    pub peer_rmbs: usize,
    /// Its links, those included that are being made.
    pub links: Vec<Link>,
}

/// A link of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Its name at both ends, given by the server.
    pub id: u8,
    /// The device that it goes by.
    pub device: Option<DeviceId>,
    /// Whether connections may use it.
    pub is_active: bool,
    /// Connections that use it.
    pub conns: Vec<ConnId>,
    /// This end.
    pub local: Port,
    /// The peer's end.
    pub remote: Port,
}

impl<B> Engine<B> {
    /// All link groups whose first link is known.
    pub fn view(&self) -> Vec<Group> {
        let groups = self.groups.iter().flatten();
        let shown = groups.filter_map(|group| {
            let flows = group.llc.as_ref()?;
            let config = flows.config();
            let links = flows.links().map(|link| {
                let is_on = |conn: &ConnId| {
                    let seat = self.conns.get(*conn).and_then(|conn| conn.seat);
                    seat.is_some_and(|seat| seat.link == link.index)
                };
                Link {
                    id: link.id,
                    device: group.link(link.index).map(|link| link.device),
                    is_active: link.active,
                    conns: group.conns.iter().copied().filter(is_on).collect(),
                    local: link.local,
                    remote: link.remote,
                }
            });
            Some(Group {
                id: config.id,
                role: config.role,
                version: config.version,
                conns: group.conns.len(),
                rmbs: group.rmbs.iter().flatten().count(),
                peer_rmbs: flows.peer_rmbs().count(),
                links: links.collect(),
            })
        });
        shown.collect()
    }
}
