//! The way without packets: a post moves its data itself, to a queue pair of the same process.

use usmc_verbs::sys::*;

use crate::memory;
use crate::nic::Nic;

impl Nic {
    /// The queue pair at the other end, if it is this process's.
    pub(crate) fn peer_of(&self, id: u32) -> Option<u32> {
        let pair = self.pairs.get(&id)?;
        let (number, to) = (pair.attributes.dest_qp_num, pair.to());
        let is_it = |other: &crate::pair::Pair| {
            other.made.number == number
                && other.from == to
                && other.attributes.dest_qp_num == pair.made.number
                && other.to() == pair.from
        };
        self.pairs.iter().find(|(_, other)| is_it(other)).map(|(id, _)| *id)
    }

    /// Does what a queue pair has posted to send, as far as there are receives for it.
    ///
    /// # Safety
    ///
    /// All memory that was posted at both ends is mapped.
    pub(crate) unsafe fn pass(&mut self, id: u32) {
        let Some(peer) = self.peer_of(id) else { return };
        loop {
            let (Some(pair), Some(other)) = (self.pairs.get(&id), self.pairs.get(&peer)) else {
                return;
            };
            let is_receiving = matches!(other.state, IBV_QPS_RTR | IBV_QPS_RTS);
            let Some(work) = pair.requester.work.front() else { return };
            let is_send = work.opcode == IBV_WR_SEND;
            let receive = other.responder.receives.front().filter(|_| is_send);
            if pair.state != IBV_QPS_RTS || !is_receiving || (is_send && receive.is_none()) {
                return;
            }
            let at = [ibv_sge { addr: work.address, length: work.len, lkey: 0 }];
            let into = receive.map_or(&at[..], |receive| &receive.pieces);
            let room: u64 = into.iter().map(|piece| u64::from(piece.length)).sum();
            let memory = &self.core.memory;
            let domain = other.made.domain;
            let may_read = work.inline.is_some()
                || work.pieces.iter().all(|piece| memory.allows(pair.made.domain, piece, 0));
            let may_write = match is_send {
                true => into.iter().all(|at| memory.allows(domain, at, IBV_ACCESS_LOCAL_WRITE)),
                false => memory.allows_peer(domain, work.rkey, work.address, work.len),
            };
            let status = match (may_read, may_write && room >= u64::from(work.len)) {
                (true, true) => IBV_WC_SUCCESS,
                (false, _) => IBV_WC_LOC_PROT_ERR,
                (true, false) => IBV_WC_REM_ACCESS_ERR,
            };
            if status == IBV_WC_SUCCESS {
                let mut gathered = Vec::new();
                if work.inline.is_none() {
                    // SAFETY: The pieces lie in registered memory, which the caller says is mapped.
                    unsafe { memory::gather(&work.pieces, 0, work.len as usize, &mut gathered) };
                }
                let data = work.inline.as_ref().unwrap_or(&gathered);
                // SAFETY: The same of the peer's. There is room for all of it.
                unsafe { memory::scatter(into, 0, data) };
            }
            let (len, is_solicited) = (work.len, work.flags & IBV_SEND_SOLICITED != 0);
            let core = &mut self.core;
            if let Some(other) = self.pairs.get_mut(&peer) {
                if status != IBV_WC_SUCCESS {
                    other.fail(core, None);
                } else if is_send && let Some(receive) = other.responder.receives.pop_front() {
                    other.complete_receive(core, receive.wr_id, status, len, is_solicited);
                }
            }
            if let Some(pair) = self.pairs.get_mut(&id) {
                match status {
                    IBV_WC_SUCCESS => pair.complete_oldest(core, status),
                    _ => pair.fail(core, Some(status)),
                }
            }
        }
    }
}
