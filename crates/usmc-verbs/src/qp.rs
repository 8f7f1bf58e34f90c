//! Queue pairs of reliable connections (RC), and the states that they go through: reset, init, ready to receive (RTR), ready to send (RTS).
//!
//! The attributes are those that the kernel's SMC-R and rxe were seen to agree on (m0.md, section 1), and each state has all that the
//! standard demands for it.

use std::ptr;
use std::rc::Rc;

use crate::cq::{self, Cq};
use crate::device::{Gid, Mtu};
use crate::error::Error;
use crate::mr::Access;
use crate::pd::{self, Pd};
use crate::sys::*;

/// The largest packet sequence number, and the largest number of a queue pair.
const MAX_24_BITS: u32 = 0xff_ffff;

/// A queue pair. Dropping it destroys it: its requests make no further completions, but those that were not polled may stay in their
/// queues, with its number. The peer is not told.
pub struct Qp {
    pub(crate) raw: *mut ibv_qp,
    pub(crate) domain: Rc<pd::Inner>,
    granted: Caps,
    /// Both queues stay as long as their queue pair.
    _queues: [Rc<cq::Inner>; 2],
}

/// How much a queue pair takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Requests to send that are not completed.
    pub send_requests: u32,
    /// Receives that are posted.
    pub receives: u32,
    /// Pieces of a request to send.
    pub send_pieces: u32,
    /// Pieces of a receive; this crate posts one.
    pub receive_pieces: u32,
    /// Bytes of a request whose data is copied as it is posted; 0 where the device cannot.
    pub inline_bytes: u32,
}

/// What [`Qp::to_init`] sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Init {
    /// The local port, from 1 on.
    pub port: u8,
    /// The index of the partition's key; 0 with RoCE.
    pub pkey_index: u16,
    /// What the peer may do; memory has to allow it as well.
    pub access: Access,
}

/// The way to the peer, over RoCE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// The local port, from 1 on.
    pub port: u8,
    /// The local address, by its place in the port's table.
    pub gid_index: u8,
    /// The peer's address.
    pub peer: Gid,
    /// Routers that a packet passes, and one: 1 on the same network, 64 by way of gateways.
    pub hop_limit: u8,
    /// IPv6's traffic class, or IPv4's type of service.
    pub traffic_class: u8,
    /// The flow label, of 20 bits.
    pub flow_label: u32,
    /// The service level, 0 to 7 with RoCE.
    pub service_level: u8,
}

/// What [`Qp::to_rtr`] sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rtr {
    /// The way to the peer.
    pub path: Path,
    /// The smaller one of both ports' MTUs.
    pub mtu: Mtu,
    /// The number of the peer's queue pair, of 24 bits.
    pub peer_qp_num: u32,
    /// The sequence number that the peer begins with, of 24 bits.
    pub peer_psn: u32,
    /// READs and atomic operations of the peer at a time; 1, as SMC-R has none.
    pub max_peer_reads: u8,
    /// How long the peer waits before it repeats a SEND that found no receive: a code of 0 to 31; 5 is 0.06 ms.
    pub min_rnr_timer: u8,
}

/// What [`Qp::to_rts`] sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rts {
    /// The sequence number to begin with, of 24 bits.
    pub psn: u32,
    /// How long an acknowledgement is waited for: 4.096 µs × 2^timeout; 0 is for ever; 15 is 134 ms. Up to 31.
    pub timeout: u8,
    /// Repetitions without an acknowledgement, 0 to 7. The kernel's SMC-R has 7, with which rxe never ends.
    pub retry_count: u8,
    /// Repetitions while the peer has no receive, 0 to 6; 7 is for ever.
    pub rnr_retry: u8,
    /// READs and atomic operations at a time; 1, as SMC-R has none.
    pub max_reads: u8,
}

/// The state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpState {
    /// New.
    Reset,
    /// Receives can be posted.
    Init,
    /// It receives.
    ReadyToReceive,
    /// It sends as well.
    ReadyToSend,
    /// It does nothing any more, and all requests fail.
    Error,
    /// Another one, by its number in `ibv_qp_state`.
    Other(u32),
}

impl Qp {
    /// A new queue pair in [`QpState::Reset`], which signals those requests only that ask for it.
    ///
    /// # Errors
    ///
    /// [`Error::Call`]; EINVAL or ENOMEM for more than the device takes. [`Error::Invalid`] for queues of another device.
    pub fn new(domain: &Pd, send_queue: &Cq, receive_queue: &Cq, caps: Caps) -> Result<Qp, Error> {
        // A driver takes them for its own structures unseen.
        if [send_queue, receive_queue].iter().any(|queue| !queue.inner.device.is(domain.device())) {
            return Err(Error::Invalid {
                what: "a queue pair and its queues are of one device: open it once",
            });
        }
        let mut attributes = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send_queue.inner.raw,
            recv_cq: receive_queue.inner.raw,
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: caps.send_requests,
                max_recv_wr: caps.receives,
                max_send_sge: caps.send_pieces,
                max_recv_sge: caps.receive_pieces,
                max_inline_data: caps.inline_bytes,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let create = domain.device().functions().ibv_create_qp;
        // SAFETY: The domain and both queues are there, and are kept below.
        let raw = unsafe { create(domain.inner.raw, &raw mut attributes) };
        if raw.is_null() {
            return Err(Error::last("ibv_create_qp"));
        }
        let cap = attributes.cap;
        let granted = Caps {
            send_requests: cap.max_send_wr,
            receives: cap.max_recv_wr,
            send_pieces: cap.max_send_sge,
            receive_pieces: cap.max_recv_sge,
            inline_bytes: cap.max_inline_data,
        };
        let queues = [send_queue.inner.clone(), receive_queue.inner.clone()];
        Ok(Qp { raw, domain: domain.inner.clone(), granted, _queues: queues })
    }

    /// The number, by which the peer addresses it, of 24 bits.
    pub fn number(&self) -> u32 {
        // SAFETY: The queue pair is there.
        unsafe { (*self.raw).qp_num }
    }

    /// What the device has granted: what was asked for, or more.
    pub fn caps(&self) -> Caps {
        self.granted
    }

    /// From reset to init. Receives may be posted from then on.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn to_init(&self, init: &Init) -> Result<(), Error> {
        let mut attributes = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: init.pkey_index,
            port_num: init.port,
            qp_access_flags: init.access.bits(),
            ..ibv_qp_attr::default()
        };
        self.modify(
            &mut attributes,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        )
    }

    /// From init to ready to receive. The call lasts as long as the peer's neighbour entry is looked for: a second where nobody answers.
    ///
    /// # Errors
    ///
    /// [`Error::Call`], ETIMEDOUT where the peer's address is not found; [`Error::Invalid`] for numbers of more than 24 bits.
    pub fn to_rtr(&self, rtr: &Rtr) -> Result<(), Error> {
        let path = &rtr.path;
        if rtr.peer_psn > MAX_24_BITS || rtr.peer_qp_num > MAX_24_BITS {
            return Err(Error::Invalid {
                what: "a sequence number and a queue pair's number have 24 bits: give less",
            });
        }
        let mut attributes = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: rtr.mtu as u32,
            dest_qp_num: rtr.peer_qp_num,
            rq_psn: rtr.peer_psn,
            max_dest_rd_atomic: rtr.max_peer_reads,
            min_rnr_timer: rtr.min_rnr_timer,
            ah_attr: ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: ibv_gid { raw: path.peer.0 },
                    flow_label: path.flow_label,
                    sgid_index: path.gid_index,
                    hop_limit: path.hop_limit,
                    traffic_class: path.traffic_class,
                },
                sl: path.service_level,
                is_global: 1,
                port_num: path.port,
                ..ibv_ah_attr::default()
            },
            ..ibv_qp_attr::default()
        };
        let (peer, receive) = (
            IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN,
            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        );
        self.modify(&mut attributes, IBV_QP_STATE | IBV_QP_RQ_PSN | peer | receive)
    }

    /// From ready to receive to ready to send.
    ///
    /// # Errors
    ///
    /// [`Error::Call`]; [`Error::Invalid`] for a sequence number of more than 24 bits.
    pub fn to_rts(&self, rts: &Rts) -> Result<(), Error> {
        if rts.psn > MAX_24_BITS {
            return Err(Error::Invalid { what: "a sequence number has 24 bits: give less" });
        }
        let mut attributes = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: rts.psn,
            timeout: rts.timeout,
            retry_cnt: rts.retry_count,
            rnr_retry: rts.rnr_retry,
            max_rd_atomic: rts.max_reads,
            ..ibv_qp_attr::default()
        };
        let retries = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
        self.modify(
            &mut attributes,
            IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | retries,
        )
    }

    /// From any state to error: all requests that are not done are completed as [`FLUSHED`](crate::Status::FLUSHED).
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn to_error(&self) -> Result<(), Error> {
        let mut attributes = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::default() };
        self.modify(&mut attributes, IBV_QP_STATE)
    }

    /// The state, as the device has it.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn state(&self) -> Result<QpState, Error> {
        let mut attributes = ibv_qp_attr::default();
        // SAFETY: All-zero is a value of the structure.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        let query = self.domain.device.functions().ibv_query_qp;
        // SAFETY: The queue pair is there; both structures are locals.
        let returned = unsafe { query(self.raw, &raw mut attributes, IBV_QP_STATE, &raw mut init) };
        Error::check("ibv_query_qp", returned)?;
        Ok(match attributes.qp_state {
            IBV_QPS_RESET => QpState::Reset,
            IBV_QPS_INIT => QpState::Init,
            IBV_QPS_RTR => QpState::ReadyToReceive,
            IBV_QPS_RTS => QpState::ReadyToSend,
            IBV_QPS_ERR => QpState::Error,
            other => QpState::Other(other),
        })
    }

    fn modify(&self, attributes: &mut ibv_qp_attr, mask: i32) -> Result<(), Error> {
        // SAFETY: The queue pair is there; the mask names fields that are set.
        let returned =
            unsafe { (self.domain.device.functions().ibv_modify_qp)(self.raw, attributes, mask) };
        Error::check("ibv_modify_qp", returned)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: The queue pair is there, and all its asynchronous events are acknowledged, so nothing is waited for.
        let _ = unsafe { (self.domain.device.functions().ibv_destroy_qp)(self.raw) };
    }
}
