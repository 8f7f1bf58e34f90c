//! The half of a queue pair that receives: packets are checked, put into memory and acknowledged, without the application.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use usmc_verbs::sys::*;

use crate::link::{self, Outbox, PACKET_MAX, Received};
use crate::memory;
use crate::nic::Core;
use crate::pair::Pair;
use crate::wire::{Header, Kind, LAST, PSN_MASK, SOLICITED, psn_after};

/// A receive that is posted.
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) pieces: Vec<ibv_sge>,
}

/// A connection that a peer has made.
pub(crate) struct Incoming {
    pub(crate) socket: OwnedFd,
    /// Answers.
    pub(crate) outbox: Outbox,
}

#[derive(Default)]
pub(crate) struct Responder {
    pub(crate) receives: VecDeque<Receive>,
    /// Places of the receive queue that are taken.
    pub(crate) used: u32,
    /// The sequence number that comes next.
    expected: u32,
    pub(crate) incoming: Vec<Incoming>,
}

/// What the sender is told. Each stands for all before it.
struct Answer {
    kind: Kind,
    code: u32,
    psn: u32,
}

impl Responder {
    pub(crate) fn start(&mut self, psn: u32) {
        self.expected = psn & PSN_MASK;
    }

    pub(crate) fn add(&mut self, socket: OwnedFd) {
        self.incoming.push(Incoming { socket, outbox: Outbox::default() });
    }

    /// The packet that was expected has been taken.
    fn advance(&mut self) -> Answer {
        let psn = self.expected;
        self.expected = (psn + 1) & PSN_MASK;
        Answer { kind: Kind::Ack, code: 0, psn }
    }
}

impl Pair {
    pub(crate) fn respond(
        &mut self,
        core: &mut Core,
        now: Instant,
        is_ready: &dyn Fn(RawFd) -> bool,
    ) {
        // Taken out, so that packets can change the rest.
        let mut connections = std::mem::take(&mut self.responder.incoming);
        connections.retain_mut(|connection| self.serve(core, connection, now, is_ready));
        self.responder.incoming = connections;
    }

    /// All packets of a connection, then the last answer, which stands for those before. Whether the connection is open.
    fn serve(
        &mut self,
        core: &mut Core,
        connection: &mut Incoming,
        now: Instant,
        is_ready: &dyn Fn(RawFd) -> bool,
    ) -> bool {
        let mut packet = [0; PACKET_MAX];
        let (mut answer, mut is_open) = (None, true);
        while is_ready(connection.socket.as_raw_fd()) {
            match link::receive(&connection.socket, &mut packet) {
                Received::Packet(len) => {
                    if let Some((header, data)) = Header::parse(&packet[..len]) {
                        answer = self.take_packet(core, &header, data).or(answer);
                    }
                }
                Received::Nothing => break,
                Received::Closed => {
                    is_open = false;
                    break;
                }
            }
        }
        if let Some(answer) = answer {
            let delay = core.state.delay(self.made.device, &self.to());
            connection.outbox.push(now + Duration::from_micros(delay), self.answer(&answer));
        }
        let fate = core.state.fate(self.made.device, &self.to());
        connection.outbox.flush(Some(&connection.socket), fate, now) && is_open
    }

    fn answer(&self, answer: &Answer) -> Vec<u8> {
        let header = Header {
            kind: answer.kind,
            flags: 0,
            code: answer.code as u8,
            psn: answer.psn,
            from_qp: self.made.number,
            to_qp: self.attributes.dest_qp_num,
            from: self.from,
            to: self.to(),
            address: 0,
            rkey: 0,
            total: 0,
            offset: 0,
        };
        let mut packet = Vec::new();
        header.emit(&mut packet);
        packet
    }

    /// Takes a packet. None of another sender, of another state or from beyond a gap is answered: to its sender it is lost.
    fn take_packet(&mut self, core: &mut Core, header: &Header, data: &[u8]) -> Option<Answer> {
        let is_for_us = header.to_qp == self.made.number
            && header.to == self.from
            && header.from_qp == self.attributes.dest_qp_num
            && header.from == self.to();
        let is_receiving = self.state == IBV_QPS_RTR || self.state == IBV_QPS_RTS;
        if !is_for_us || !is_receiving {
            return None;
        }
        match psn_after(header.psn, self.responder.expected) {
            0 => {}
            1.. => return None,
            // Again: its acknowledgement was lost.
            _ => {
                let psn = self.responder.expected.wrapping_sub(1) & PSN_MASK;
                return Some(Answer { kind: Kind::Ack, code: 0, psn });
            }
        }
        match header.kind {
            Kind::Write => Some(self.take_write(core, header, data)),
            Kind::Send => Some(self.take_send(core, header, data)),
            _ => None,
        }
    }

    fn take_write(&mut self, core: &mut Core, header: &Header, data: &[u8]) -> Answer {
        let is_allowed = self.attributes.qp_access_flags & IBV_ACCESS_REMOTE_WRITE != 0
            && u64::from(header.offset) + data.len() as u64 <= u64::from(header.total)
            && (header.total == 0
                || core.memory.allows_peer(
                    self.made.domain,
                    header.rkey,
                    header.address,
                    header.total,
                ));
        if !is_allowed {
            // Without an asynchronous event, as with rxe; other devices report QP_ACCESS_ERR, which `Fabric::event` can.
            return self.refuse(core, IBV_WC_REM_ACCESS_ERR);
        }
        let address = header.address + u64::from(header.offset);
        let piece = ibv_sge { addr: address, length: data.len() as u32, lkey: 0 };
        // SAFETY: The range is registered for the peer's WRITEs, and the application keeps it mapped.
        unsafe { memory::scatter(&[piece], 0, data) };
        self.responder.advance()
    }

    fn take_send(&mut self, core: &mut Core, header: &Header, data: &[u8]) -> Answer {
        let Some(receive) = self.responder.receives.front() else {
            let (code, psn) = (u32::from(self.attributes.min_rnr_timer), self.responder.expected);
            return Answer { kind: Kind::NotReady, code, psn };
        };
        let room: u64 = receive.pieces.iter().map(|piece| u64::from(piece.length)).sum();
        let may_write =
            |piece: &ibv_sge| core.memory.allows(self.made.domain, piece, IBV_ACCESS_LOCAL_WRITE);
        let fault = if u64::from(header.total) > room {
            Some((IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR))
        } else if !receive.pieces.iter().all(may_write) {
            Some((IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR))
        } else {
            None
        };
        let wr_id = receive.wr_id;
        if let Some((here, there)) = fault {
            self.responder.receives.pop_front();
            self.complete_receive(core, wr_id, here, 0, header.flags & SOLICITED != 0);
            return self.refuse(core, there);
        }
        // SAFETY: The pieces are registered for it, and the application keeps them mapped. There is room for the message.
        unsafe { memory::scatter(&receive.pieces, header.offset as usize, data) };
        if header.flags & LAST != 0 {
            self.responder.receives.pop_front();
            let is_solicited = header.flags & SOLICITED != 0;
            self.complete_receive(core, wr_id, IBV_WC_SUCCESS, header.total, is_solicited);
        }
        self.responder.advance()
    }

    fn refuse(&mut self, core: &mut Core, status: u32) -> Answer {
        let psn = self.responder.expected;
        self.fail(core, None);
        Answer { kind: Kind::Refused, code: status, psn }
    }
}
