//! A queue pair: its states, and what both of its halves have in common.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

use usmc_verbs::sys::*;

use crate::link;
use crate::nic::Core;
use crate::queues::{Asynchronous, Entry};
use crate::request::Requester;
use crate::respond::Responder;

/// What a queue pair is made with.
#[derive(Clone, Copy)]
pub(crate) struct Made {
    /// Its own number in this process.
    pub(crate) id: u32,
    /// The application's `ibv_qp`.
    pub(crate) raw: usize,
    pub(crate) context: u32,
    pub(crate) device: usize,
    pub(crate) domain: u32,
    pub(crate) send_queue: u32,
    pub(crate) receive_queue: u32,
    pub(crate) caps: ibv_qp_cap,
    pub(crate) signals_all: bool,
    /// The number in the fabric.
    pub(crate) number: u32,
}

pub(crate) struct Pair {
    pub(crate) made: Made,
    pub(crate) state: u32,
    /// What modify has set, together.
    pub(crate) attributes: ibv_qp_attr,
    /// The own address.
    pub(crate) from: [u8; 16],
    pub(crate) listener: OwnedFd,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
}

const TO_INIT: i32 = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
const TO_RTR: i32 = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_DEST_QPN
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER;
const TO_RTS: i32 = IBV_QP_STATE
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_SQ_PSN
    | IBV_QP_MAX_QP_RD_ATOMIC;

impl Pair {
    pub(crate) fn new(made: Made, listener: OwnedFd) -> Pair {
        let attributes = ibv_qp_attr { cap: made.caps, ..ibv_qp_attr::default() };
        Pair {
            made,
            state: IBV_QPS_RESET,
            attributes,
            from: [0; 16],
            listener,
            requester: Requester::default(),
            responder: Responder::default(),
        }
    }

    /// The peer's address.
    pub(crate) fn to(&self) -> [u8; 16] {
        self.attributes.ah_attr.grh.dgid.raw
    }

    /// Goes to the state that is asked for, with the attributes that the standard demands for it, or returns an error number.
    pub(crate) fn modify(
        &mut self,
        core: &mut Core,
        new: &ibv_qp_attr,
        mask: i32,
    ) -> Result<(), i32> {
        if mask & IBV_QP_STATE == 0 {
            return Err(libc::EINVAL);
        }
        match (self.state, new.qp_state) {
            (_, IBV_QPS_ERR) => self.fail(core, None),
            (_, IBV_QPS_RESET) => {
                (self.requester, self.responder) = (Requester::default(), Responder::default());
                self.state = IBV_QPS_RESET;
            }
            (IBV_QPS_RESET, IBV_QPS_INIT) if mask == TO_INIT => {
                let both =
                    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
                if new.port_num != 1 || new.qp_access_flags & !both != 0 {
                    return Err(libc::EINVAL);
                }
                self.attributes.port_num = 1;
                self.attributes.pkey_index = new.pkey_index;
                self.attributes.qp_access_flags = new.qp_access_flags;
                self.state = IBV_QPS_INIT;
            }
            (IBV_QPS_INIT, IBV_QPS_RTR) if mask == TO_RTR => self.begin_to_receive(core, new)?,
            (IBV_QPS_RTR, IBV_QPS_RTS) if mask == TO_RTS => {
                if new.timeout > 31 || new.retry_cnt > 7 || new.rnr_retry > 7 {
                    return Err(libc::EINVAL);
                }
                self.attributes.sq_psn = new.sq_psn;
                self.attributes.timeout = new.timeout;
                self.attributes.retry_cnt = new.retry_cnt;
                self.attributes.rnr_retry = new.rnr_retry;
                self.attributes.max_rd_atomic = new.max_rd_atomic;
                self.requester.start(new.sq_psn);
                self.state = IBV_QPS_RTS;
            }
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }

    fn begin_to_receive(&mut self, core: &Core, new: &ibv_qp_attr) -> Result<(), i32> {
        let device = &core.state.devices[self.made.device];
        let (way, route) = (&new.ah_attr, &new.ah_attr.grh);
        let own = device.gids.iter().find(|(index, _)| *index == u32::from(route.sgid_index));
        let is_valid = way.is_global == 1
            && way.port_num == 1
            && (1..=device.mtu).contains(&new.path_mtu)
            && new.min_rnr_timer <= 31;
        let (Some((_, own)), true) = (own, is_valid) else { return Err(libc::EINVAL) };
        // Nobody answers for the address: what the kernel says when it has looked for a neighbour.
        if core.state.owner(&route.dgid.raw).is_none() {
            return Err(libc::ETIMEDOUT);
        }
        self.from = own.address;
        self.attributes.ah_attr = new.ah_attr;
        self.attributes.path_mtu = new.path_mtu;
        self.attributes.dest_qp_num = new.dest_qp_num;
        self.attributes.rq_psn = new.rq_psn;
        self.attributes.max_dest_rd_atomic = new.max_dest_rd_atomic;
        self.attributes.min_rnr_timer = new.min_rnr_timer;
        self.responder.start(new.rq_psn);
        self.state = IBV_QPS_RTR;
        Ok(())
    }

    /// Into error: the oldest request to send fails with that status, if one is given, and all others are flushed.
    pub(crate) fn fail(&mut self, core: &mut Core, mut status: Option<u32>) {
        self.state = IBV_QPS_ERR;
        while !self.requester.work.is_empty() {
            self.complete_oldest(core, status.take().unwrap_or(IBV_WC_WR_FLUSH_ERR));
        }
        self.requester.stop();
        while let Some(receive) = self.responder.receives.pop_front() {
            self.complete_receive(core, receive.wr_id, IBV_WC_WR_FLUSH_ERR, 0, false);
        }
    }

    pub(crate) fn complete_receive(
        &self,
        core: &mut Core,
        wr_id: u64,
        status: u32,
        len: u32,
        is_solicited: bool,
    ) {
        let completion = self.completion(wr_id, status, IBV_WC_RECV, len);
        let entry = Entry { completion, pair: self.made.id, freed: 1 };
        core.queues.complete(self.made.receive_queue, entry, is_solicited);
    }

    pub(crate) fn completion(&self, wr_id: u64, status: u32, opcode: u32, byte_len: u32) -> ibv_wc {
        let vendor_err = if status == IBV_WC_SUCCESS { 0 } else { 0xfa4e_0000 | status };
        let qp_num = self.made.number;
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, qp_num, ..ibv_wc::default() }
    }

    pub(crate) fn report(&self, core: &mut Core, kind: u32) {
        core.queues.report(self.made.context, Asynchronous { kind, element: self.made.raw });
    }

    /// One turn: what has come is taken, what is due is sent. `is_ready` says which descriptors had something.
    pub(crate) fn turn(&mut self, core: &mut Core, now: Instant, is_ready: &dyn Fn(RawFd) -> bool) {
        if is_ready(self.listener.as_raw_fd()) {
            while let Some(socket) = link::accept(&self.listener) {
                self.responder.add(socket);
            }
        }
        self.respond(core, now, is_ready);
        self.take_answers(core, now, is_ready);
        self.repeat(core, now);
        self.transmit(core, now);
    }

    /// Descriptors to wait for, and until when at most.
    pub(crate) fn waits(&self, core: &Core, fds: &mut Vec<libc::pollfd>) -> Option<Instant> {
        let mut wait = |fd: RawFd, is_blocked: bool| {
            let events = if is_blocked { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
            fds.push(libc::pollfd { fd, events, revents: 0 });
        };
        wait(self.listener.as_raw_fd(), false);
        let mut due = self.requester_due(core);
        if let Some(link) = &self.requester.link {
            wait(link.as_raw_fd(), self.requester.outbox.is_blocked);
        }
        for incoming in &self.responder.incoming {
            wait(incoming.socket.as_raw_fd(), incoming.outbox.is_blocked);
            let fate = core.state.fate(self.made.device, &self.to());
            due = due.into_iter().chain(incoming.outbox.due(fate)).min();
        }
        due
    }
}
