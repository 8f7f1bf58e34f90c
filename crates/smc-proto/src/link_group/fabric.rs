//! The seam to the verbs.

use super::{Key, LinkIndex};
use crate::ids::{MacAddr, MtuCode, RoceGid, U24};

/// One end of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Port {
    /// MAC of the RoCE port.
    pub mac: MacAddr,
    /// GID of the RoCE port.
    pub gid: RoceGid,
    /// The queue pair.
    pub qpn: U24,
    /// First packet sequence number.
    pub psn: U24,
    /// Path MTU.
    pub mtu: MtuCode,
    /// Version 2: no gateway lies between the peers.
    pub direct: bool,
}

/// The verbs: what the flows need from an RDMA device. All of it takes effect at once.
pub trait Fabric {
    /// Creates a queue pair for this place, on another port than `used` if there is one.
    fn create(&mut self, index: LinkIndex, used: &[Port]) -> Option<Port>;

    /// Connects the queue pair: it can receive and send.
    fn connect(&mut self, index: LinkIndex, remote: &Port) -> bool;

    /// Registers an RMB on the link, if it is not, and gives its key.
    fn key(&mut self, rmb: usize, index: LinkIndex) -> Option<Key>;

    /// Destroys the queue pair. What was posted last, a DELETE_LINK for example, may still be on its
    /// way: an implementation lets it go out first.
    fn destroy(&mut self, index: LinkIndex);
}
