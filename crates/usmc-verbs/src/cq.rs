//! Completion queues, and channels whose descriptor wakes a thread that waits for completions.
//!
//! Order against a lost wake-up: arm the queue, poll it once more, then sleep. A completion that came before the queue was armed makes
//! no event (m0.md, section 7).

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::rc::Rc;

use crate::device::{Device, set_nonblocking};
use crate::error::Error;
use crate::sys::*;

/// Completions that one call of the library takes, for a buffer on the stack.
const BATCH: usize = 16;

/// What became of a request. The numbers are those of `ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status(pub u32);

/// Associated constants with their names.
macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:ident;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status($value);)*

            /// The name, as in `RETRY_EXCEEDED`; `UNKNOWN` for a number that is not known here.
            pub fn name(self) -> &'static str {
                match self {
                    $(Status::$name => stringify!($name),)*
                    _ => "UNKNOWN",
                }
            }
        }
    };
}

statuses! {
    /// Done.
    SUCCESS = IBV_WC_SUCCESS;
    /// A message is longer than the memory for it, or than the device allows.
    LOCAL_LENGTH = IBV_WC_LOC_LEN_ERR;
    /// The queue pair is not fit for the request.
    LOCAL_QP_OPERATION = IBV_WC_LOC_QP_OP_ERR;
    /// Of reliable datagrams.
    LOCAL_EE_CONTEXT_OPERATION = IBV_WC_LOC_EEC_OP_ERR;
    /// A local key does not fit the address, or does not allow the access.
    LOCAL_PROTECTION = IBV_WC_LOC_PROT_ERR;
    /// The queue pair was in error before the request was done.
    FLUSHED = IBV_WC_WR_FLUSH_ERR;
    /// Of memory windows.
    MEMORY_WINDOW_BIND = IBV_WC_MW_BIND_ERR;
    /// The peer's device answered what is no answer.
    BAD_RESPONSE = IBV_WC_BAD_RESP_ERR;
    /// The peer's access to local memory failed.
    LOCAL_ACCESS = IBV_WC_LOC_ACCESS_ERR;
    /// The peer's device does not take such a request, for instance as its receive is too short.
    REMOTE_INVALID_REQUEST = IBV_WC_REM_INV_REQ_ERR;
    /// The remote key does not fit the address, or does not allow the access.
    REMOTE_ACCESS = IBV_WC_REM_ACCESS_ERR;
    /// The peer could not do it.
    REMOTE_OPERATION = IBV_WC_REM_OP_ERR;
    /// The peer's device has not answered in time, and again.
    RETRY_EXCEEDED = IBV_WC_RETRY_EXC_ERR;
    /// The peer has posted no receive in time, and again.
    RNR_RETRY_EXCEEDED = IBV_WC_RNR_RETRY_EXC_ERR;
    /// Of reliable datagrams.
    LOCAL_RDD_VIOLATION = IBV_WC_LOC_RDD_VIOL_ERR;
    /// Of reliable datagrams.
    REMOTE_INVALID_READ = IBV_WC_REM_INV_RD_REQ_ERR;
    /// The peer's device gave it up.
    REMOTE_ABORTED = IBV_WC_REM_ABORT_ERR;
    /// Of reliable datagrams.
    INVALID_EE_CONTEXT = IBV_WC_INV_EECN_ERR;
    /// Of reliable datagrams.
    INVALID_EE_CONTEXT_STATE = IBV_WC_INV_EEC_STATE_ERR;
    /// The device has failed.
    FATAL = IBV_WC_FATAL_ERR;
    /// No response in time.
    RESPONSE_TIMEOUT = IBV_WC_RESP_TIMEOUT_ERR;
    /// The driver has no better word.
    GENERAL = IBV_WC_GENERAL_ERR;
    /// Of tag matching.
    TAG_MATCHING = IBV_WC_TM_ERR;
    /// Of tag matching.
    TAG_RENDEZVOUS_INCOMPLETE = IBV_WC_TM_RNDV_INCOMPLETE;
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What a completion is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Opcode {
    /// A SEND of ours.
    #[default]
    Send,
    /// A WRITE of ours.
    Write,
    /// A receive of ours.
    Receive,
    /// Something that this crate never posts.
    Other(u32),
}

/// A request that is done, or has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Completion {
    /// The number that the request was posted under.
    pub wr_id: u64,
    /// What became of it.
    pub status: Status,
    /// What it was; without meaning where the status is no success.
    pub opcode: Opcode,
    /// Bytes that were received; 0 but for a receive that succeeded.
    pub byte_len: u32,
    /// The local queue pair.
    pub qp_num: u32,
    /// The driver's own number for an error.
    pub vendor_error: u32,
}

/// A completion channel: queues that belong to it wake a thread that waits for its descriptor. Copies are the same channel.
#[derive(Clone)]
pub struct Channel {
    inner: Rc<ChannelInner>,
}

struct ChannelInner {
    device: Device,
    raw: *mut ibv_comp_channel,
}

/// A completion queue. Copies are the same queue.
#[derive(Clone)]
pub struct Cq {
    pub(crate) inner: Rc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) device: Device,
    pub(crate) raw: *mut ibv_cq,
    /// Where completions are taken to: devices leave some fields as they are.
    batch: RefCell<[ibv_wc; BATCH]>,
    /// The channel is not destroyed before its queues.
    _channel: Option<Channel>,
}

impl Channel {
    /// A new channel, whose events are read without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn new(device: &Device) -> Result<Channel, Error> {
        // SAFETY: The context is open.
        let raw = unsafe { (device.functions().ibv_create_comp_channel)(device.inner.context) };
        if raw.is_null() {
            return Err(Error::last("ibv_create_comp_channel"));
        }
        let inner = ChannelInner { device: device.clone(), raw };
        // SAFETY: The channel is there.
        set_nonblocking(unsafe { (*raw).fd })?;
        Ok(Channel { inner: Rc::new(inner) })
    }

    /// Takes an event and acknowledges it: the token of the queue that had been armed. `None`: there is none now.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn next_event(&self) -> Result<Option<u64>, Error> {
        let functions = self.inner.device.functions();
        let (mut queue, mut token) = (ptr::null_mut::<ibv_cq>(), ptr::null_mut::<c_void>());
        // SAFETY: The channel is there; both places are locals.
        let returned =
            unsafe { (functions.ibv_get_cq_event)(self.inner.raw, &raw mut queue, &raw mut token) };
        if returned != 0 {
            let error = Error::last("ibv_get_cq_event");
            return if is_nothing(&error) { Ok(None) } else { Err(error) };
        }
        // SAFETY: Destroying a queue removes its events, and this is its thread: the queue is there.
        unsafe { (functions.ibv_ack_cq_events)(queue, 1) };
        Ok(Some(token as u64))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The descriptor is the channel's, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw).fd) }
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: The channel's queues held this and are gone.
        let _ = unsafe { (self.device.functions().ibv_destroy_comp_channel)(self.raw) };
    }
}

impl Cq {
    /// A queue for at least `capacity` completions that have not been polled. With a channel its events bear `token`, of which a
    /// 32-bit process keeps the lower half only.
    ///
    /// # Errors
    ///
    /// [`Error::Call`]; EINVAL for a capacity of 0, or of more than the device has. [`Error::Invalid`] for a channel of another device.
    pub fn new(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        token: u64,
    ) -> Result<Cq, Error> {
        if channel.is_some_and(|channel| !channel.inner.device.is(device)) {
            return Err(Error::Invalid {
                what: "a queue and its channel are of one device: open it once",
            });
        }
        let capacity = c_int::try_from(capacity).unwrap_or(c_int::MAX);
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.inner.raw);
        let create = device.functions().ibv_create_cq;
        // SAFETY: The context is open and the channel is of it; the token is not followed.
        let raw = unsafe {
            create(device.inner.context, capacity, token as usize as *mut c_void, raw_channel, 0)
        };
        if raw.is_null() {
            return Err(Error::last("ibv_create_cq"));
        }
        let batch = RefCell::new([ibv_wc::default(); BATCH]);
        let inner = Inner { device: device.clone(), raw, batch, _channel: channel.cloned() };
        Ok(Cq { inner: Rc::new(inner) })
    }

    /// Completions that the queue has room for: what was asked for, or more.
    pub fn capacity(&self) -> u32 {
        // SAFETY: The queue is there.
        u32::try_from(unsafe { (*self.inner.raw).cqe }).unwrap_or(0)
    }

    /// Takes as many completions as there are, and `into` has room for. No system call on most devices.
    ///
    /// # Errors
    ///
    /// [`Error::Call`]: the queue is broken. Those that were taken before are lost, so the caller gives its queue pairs up.
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, Error> {
        let mut batch = self.inner.batch.borrow_mut();
        let mut taken = 0;
        while taken < into.len() {
            let wanted = (into.len() - taken).min(BATCH);
            // SAFETY: The context and the queue are there; the batch has room for what is wanted.
            let found = unsafe {
                let Some(poll) = (*self.inner.device.inner.context).ops.poll_cq else {
                    return Err(Error::Call { name: "poll_cq", errno: libc::EOPNOTSUPP });
                };
                poll(self.inner.raw, wanted as c_int, batch.as_mut_ptr())
            };
            let Ok(found) = usize::try_from(found) else {
                return Err(Error::Call { name: "ibv_poll_cq", errno: found.saturating_abs() });
            };
            for raw in batch.iter().take(found.min(wanted)) {
                into[taken] = completion(raw);
                taken += 1;
            }
            if found < wanted {
                break;
            }
        }
        Ok(taken)
    }

    /// Asks for one event with the next completion, or with the next that the peer has marked as solicited.
    /// See this module's first lines for the order.
    ///
    /// To the standard a failure counts as solicited; rxe (Linux 6.12) makes no event for one that is flushed. So the queue of
    /// sends, which tells of failures first, is armed for all.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn arm(&self, solicited_only: bool) -> Result<(), Error> {
        // SAFETY: The context and the queue are there.
        let returned = unsafe {
            let Some(arm) = (*self.inner.device.inner.context).ops.req_notify_cq else {
                return Err(Error::Call { name: "req_notify_cq", errno: libc::EOPNOTSUPP });
            };
            arm(self.inner.raw, c_int::from(solicited_only))
        };
        Error::check("ibv_req_notify_cq", returned)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: Queue pairs of the queue held this and are gone; all its events are acknowledged, so nothing is waited for.
        let _ = unsafe { (self.device.functions().ibv_destroy_cq)(self.raw) };
    }
}

fn completion(raw: &ibv_wc) -> Completion {
    let is_receive = raw.opcode == IBV_WC_RECV && raw.status == IBV_WC_SUCCESS;
    Completion {
        wr_id: raw.wr_id,
        status: Status(raw.status),
        opcode: match raw.opcode {
            IBV_WC_SEND => Opcode::Send,
            IBV_WC_RDMA_WRITE => Opcode::Write,
            IBV_WC_RECV => Opcode::Receive,
            other => Opcode::Other(other),
        },
        // rxe tells a length of what was sent, too, and other drivers leave what was there.
        byte_len: if is_receive { raw.byte_len } else { 0 },
        qp_num: raw.qp_num,
        vendor_error: raw.vendor_err,
    }
}

/// Whether a read without waiting has found nothing.
pub(crate) fn is_nothing(error: &Error) -> bool {
    error.errno().is_some_and(|errno| errno == libc::EAGAIN || errno == libc::EINTR)
}
