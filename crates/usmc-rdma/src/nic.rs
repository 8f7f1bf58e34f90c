//! The seam to the verbs: what the engine needs of RDMA devices.

use smc_proto::link_group::{Connect, Key, Port};

use crate::link::SENDS;

/// An RDMA device's port, by a number of the caller's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceId(pub u8);

/// A queue pair, by a number of the [`Nic`]'s. Small numbers: the engine has a table by them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QpId(pub u32);

/// An RMB: one connection's receive buffer, by a number of the caller's. It is registered as a whole on each link that uses it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RmbId(pub u64);

/// Memory in which send buffers lie, by a number of the caller's. The peer gets no key of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ArenaId(pub u64);

/// A contiguous part of a send buffer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Range {
    /// Where it begins, as the device addresses it.
    pub addr: u64,
    /// Bytes; 0 if there is no such part.
    pub len: u32,
}

/// An RDMA WRITE: at most two parts of the send buffer, one after the other, to one place of the peer's RMB.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Write {
    /// What is written; the second part may be empty.
    pub source: [Range; 2],
    /// The local key of these parts.
    pub lkey: u32,
    /// Where it goes: an address and a key of the peer's.
    pub to: Key,
}

impl Write {
    /// Bytes of both parts.
    pub fn len(&self) -> u32 {
        self.source[0].len + self.source[1].len
    }

    /// Whether it writes nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Nothing was posted: the queue pair is in error, or its queue is full, which the engine's count rules out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PostFailed;

/// RDMA devices. Each queue pair has a protection domain of its own, so that a key works on its link only.
pub trait Nic {
    /// What is known of a device's port: its GID, MAC and path MTU. It has no queue pair.
    fn port(&self, device: DeviceId) -> Port;

    /// Whether both devices are in one physical network: links of one group may be by one and by the other.
    fn are_together(&self, one: DeviceId, other: DeviceId) -> bool;

    /// Creates a reliable queue pair at this device in the state INIT, with receives posted for the peer's messages, and names its end.
    fn create(&mut self, device: DeviceId) -> Option<(QpId, Port)>;

    /// How many SENDs may be under way on a queue pair of this device, [`SENDS`] by default.
    fn sends(&self, device: DeviceId) -> usize {
        let _ = device;
        SENDS
    }

    /// Connects it: it can receive, and then send. That of a group's first link may not be [`Connect::Pending`].
    fn connect(&mut self, qp: QpId, remote: &Port) -> Connect;

    /// Destroys it, once what was posted before is out, if the peer still answers. Its completions do not come any more.
    fn destroy(&mut self, qp: QpId);

    /// Destroys it at once: what was posted before, and is not at the peer by now, never arrives. Its connections go on over another link,
    /// and a WRITE of this one that came late would overwrite what they have written since.
    ///
    /// The queue pair takes no message any more, and those that it has taken are given ([`Nic::taken`]): for the peer they have arrived.
    fn cut(&mut self, qp: QpId) -> Vec<Vec<u8>>;

    /// The messages that have come by the queue pair and were not handed over ([`crate::Engine::handle_received`]), oldest first. They are not
    /// handed over later.
    fn taken(&mut self, qp: QpId) -> Vec<Vec<u8>>;

    /// Registers the RMB for the queue pair's peer to write into, if it is not, and gives its key.
    fn rmb(&mut self, qp: QpId, rmb: RmbId) -> Option<Key>;

    /// The queue pair's peer cannot write into the RMB any more: its key is none.
    fn forget(&mut self, qp: QpId, rmb: RmbId);

    /// Registers memory of send buffers for the queue pair, if it is not, and gives its local key.
    fn arena(&mut self, qp: QpId, arena: ArenaId) -> Option<u32>;

    /// Posts these WRITEs and behind them a SEND of `message`, as one chain. Only the SEND makes a completion
    /// ([`crate::Engine::handle_sent`]).
    ///
    /// # Errors
    /// Nothing of it was posted.
    fn post(&mut self, qp: QpId, writes: &[Write], message: &[u8]) -> Result<(), PostFailed>;
}
