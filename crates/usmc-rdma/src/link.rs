//! One link of a group: a queue pair, and the SENDs that are under way on it.

use std::collections::VecDeque;

use smc_proto::link_group::Port;
use smc_proto::wire::cdc::SmcrRepr;

use crate::ConnId;
use crate::nic::{DeviceId, Nic, PostFailed, QpId, Write};

/// SENDs that a link has under way at most, unless the [`Nic`] says otherwise: as many as the kernel posts receives for connections
/// (`smc_wr.h`: SMC_WR_BUF_CNT).
pub const SENDS: usize = 16;
/// So many of them are left to LLC, which has deadlines. There are always more.
pub const FOR_LLC: usize = 2;

/// A SEND that is under way.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sent {
    /// A connection's CDC message, and up to where its bytes are written then.
    Cdc { conn: ConnId, cdc: SmcrRepr, upto: u64 },
    /// An LLC message.
    Llc,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) qp: QpId,
    pub(crate) device: DeviceId,
    pub(crate) local: Port,
    /// In the order in which they complete.
    sends: VecDeque<Sent>,
    /// As many as there may be.
    most: usize,
    /// Connections that wait for room.
    waiting: VecDeque<ConnId>,
    /// The port is down: whatever is posted now would kill the queue pair.
    pub(crate) is_held: bool,
    /// Something could not be posted: whatever is behind it would be without it, and so the link is given up.
    pub(crate) is_broken: bool,
}

impl Link {
    pub(crate) fn new(qp: QpId, device: DeviceId, local: Port, nic: &impl Nic) -> Link {
        let most = nic.sends(device).max(FOR_LLC + 1);
        let (sends, waiting) = (VecDeque::with_capacity(most), VecDeque::new());
        Link { qp, device, local, sends, most, waiting, is_held: false, is_broken: false }
    }

    /// Whether a connection may send.
    pub(crate) fn has_room(&self) -> bool {
        !self.is_held && !self.is_broken && self.sends.len() < self.most - FOR_LLC
    }

    /// Whether LLC may.
    pub(crate) fn has_room_for_llc(&self) -> bool {
        self.is_broken || (!self.is_held && self.sends.len() < self.most)
    }

    pub(crate) fn post(
        &mut self,
        nic: &mut impl Nic,
        writes: &[Write],
        message: &[u8],
        what: Sent,
    ) -> Result<(), PostFailed> {
        if self.is_broken {
            return Err(PostFailed);
        }
        let posted = nic.post(self.qp, writes, message);
        match posted {
            Ok(()) => self.sends.push_back(what),
            Err(PostFailed) => self.is_broken = true,
        }
        posted
    }

    /// The oldest SEND is complete.
    pub(crate) fn completed(&mut self) -> Option<Sent> {
        self.sends.pop_front()
    }

    /// This connection sends as soon as there is room.
    pub(crate) fn wait(&mut self, conn: ConnId) {
        self.waiting.push_back(conn);
    }

    /// Whether WRITEs are under way, which read the applications' memory.
    pub(crate) fn has_writes(&self) -> bool {
        self.sends.iter().any(|sent| matches!(sent, Sent::Cdc { .. }))
    }

    /// Whether connections have something to say, and will.
    pub(crate) fn is_talking(&self) -> bool {
        !self.is_held && !self.is_broken && (!self.waiting.is_empty() || self.has_writes())
    }

    /// The connection whose turn it is, if there is room.
    pub(crate) fn next(&mut self) -> Option<ConnId> {
        if self.has_room() { self.waiting.pop_front() } else { None }
    }
}
