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

/// What became of [`Fabric::connect`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Connect {
    /// The queue pair can receive and send.
    Done,
    /// It cannot, and never will.
    Failed,
    /// That is not known yet, as long as the way to the port is looked for (up to a second with Linux):
    /// [`LinkGroup::on_connected`](super::LinkGroup::on_connected) will say it.
    Pending,
}

/// The verbs: what the flows need from an RDMA device. All but the connecting takes effect at once:
/// a caller with slow verbs creates queue pairs and registers RMBs before they are needed.
pub trait Fabric {
    /// Creates a queue pair for this place, on another port than `used` if there is one.
    fn create(&mut self, index: LinkIndex, used: &[Port]) -> Option<Port>;

    /// Connects the queue pair. After [`Fabric::destroy`] no late answer may come.
    fn connect(&mut self, index: LinkIndex, remote: &Port) -> Connect;

    /// Registers an RMB on the link, if it is not, and gives its key.
    fn key(&mut self, rmb: usize, index: LinkIndex) -> Option<Key>;

    /// Destroys the queue pair. What was posted last, a DELETE_LINK for example, may still be on its
    /// way: an implementation lets it go out first.
    fn destroy(&mut self, index: LinkIndex);
}
