//! Requests: WRITEs and SENDs in chains that one call hands to the device, and receives.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::ptr;

use crate::mr::Piece;
use crate::qp::{Caps, Qp};
use crate::sys::*;

/// Requests that one call takes, as they are laid out on the stack: some 1.2 KiB.
pub const MAX_CHAIN: usize = 8;

/// Where a request's bytes come from. Pieces lie one behind the other in the message; there are no more than the queue pair's caps allow.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// The device reads registered memory after the call has returned, and until the request is completed.
    Memory(&'a [Piece<'a>]),
    /// Registered memory that is copied by the call; no more bytes than the caps' `inline_bytes`.
    Inline(&'a [Piece<'a>]),
    /// Any bytes, copied likewise.
    Bytes(&'a [u8]),
}

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Writes into the peer's memory, without its knowledge.
    Write {
        /// The peer's address.
        address: u64,
        /// The peer's key of that memory.
        rkey: u32,
    },
    /// Sends a message into the peer's next receive, behind all that was written before.
    Send {
        /// Whether it wakes a peer that waits for solicited messages only.
        solicited: bool,
    },
}

/// A request to send.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The caller's number, which the completion bears.
    pub wr_id: u64,
    /// What it does.
    pub operation: Operation,
    /// With what.
    pub source: Source<'a>,
    /// Whether it makes a completion if it succeeds. One that fails always does. Most drivers free the places of unsignaled requests only when
    /// the completion of a later one is polled, so every queue needs one now and then.
    pub signaled: bool,
}

/// A receive: a place for one message.
#[derive(Clone, Copy)]
pub struct Receive<'a> {
    /// The caller's number, which the completion bears.
    pub wr_id: u64,
    /// Where the message goes. A longer message ends the queue pair.
    pub piece: Piece<'a>,
}

/// A chain was not taken as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PostError {
    /// Requests from the chain's start on that were taken.
    pub posted: usize,
    /// What errno(3) says: ENOMEM for a full queue; EINVAL for a wrong state, too many pieces or bytes, or a chain of more than
    /// [`MAX_CHAIN`].
    pub errno: c_int,
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.errno {
            libc::ENOMEM => "the queue is full: poll completions, then post again",
            libc::EINVAL => "the queue pair does not take such a request: check its state and caps",
            _ => "the device refuses the request",
        };
        write!(
            f,
            "{what} ({}; {} requests were posted)",
            io::Error::from_raw_os_error(self.errno),
            self.posted
        )
    }
}

impl std::error::Error for PostError {}

const NO_SEND: ibv_send_wr = ibv_send_wr {
    wr_id: 0,
    next: ptr::null_mut(),
    sg_list: ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    remote_addr: 0,
    rkey: 0,
    _rest: [0; 9],
};

const NO_RECEIVE: ibv_recv_wr =
    ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };

impl Qp {
    /// Posts a chain of at most [`MAX_CHAIN`] requests by one call. The device does them in order. On a queue pair in error they
    /// are taken, and fail by completions.
    ///
    /// # Errors
    ///
    /// [`PostError`]: those before the one that was refused are posted; none, where one goes beyond the caps.
    pub fn post_send(&self, chain: &[Request<'_>]) -> Result<(), PostError> {
        let mut raw = [NO_SEND; MAX_CHAIN];
        let mut bytes = [ibv_sge::default(); MAX_CHAIN];
        let (Some(raw), false) = (raw.get_mut(..chain.len()), chain.is_empty()) else {
            return unposted(chain.len());
        };
        for ((to, bytes), request) in raw.iter_mut().zip(&mut bytes).zip(chain) {
            fill(to, bytes, request, &self.caps())
                .map_err(|errno| PostError { posted: 0, errno })?;
        }
        let first = raw.as_mut_ptr();
        for at in 1..chain.len() {
            // SAFETY: Both are in the array. By the pointer that the library gets, so that it may follow the links.
            unsafe { (*first.add(at - 1)).next = first.add(at) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: The queue pair and its context are there. The chain ends in null. Inline bytes are borrowed by the chain, or lie
        // in regions that are registered, hence mapped; the device checks all other addresses by their keys.
        let errno = unsafe {
            match (*(*self.raw).context).ops.post_send {
                Some(post) => post(self.raw, first, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        posted(errno, first, bad, size_of::<ibv_send_wr>())
    }

    /// Posts at most [`MAX_CHAIN`] receives by one call. Messages take them in order.
    ///
    /// # Errors
    ///
    /// [`PostError`]: those before the one that was refused are posted.
    pub fn post_receive(&self, receives: &[Receive<'_>]) -> Result<(), PostError> {
        let mut raw = [NO_RECEIVE; MAX_CHAIN];
        let (Some(raw), false) = (raw.get_mut(..receives.len()), receives.is_empty()) else {
            return unposted(receives.len());
        };
        for (to, receive) in raw.iter_mut().zip(receives) {
            to.wr_id = receive.wr_id;
            // The library reads the list only, whatever its type says.
            to.sg_list = (&raw const receive.piece.raw).cast_mut();
            to.num_sge = 1;
        }
        let first = raw.as_mut_ptr();
        for at in 1..receives.len() {
            // SAFETY: As in `post_send`.
            unsafe { (*first.add(at - 1)).next = first.add(at) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: As in `post_send`; the device checks the addresses by their keys.
        let errno = unsafe {
            match (*(*self.raw).context).ops.post_recv {
                Some(post) => post(self.raw, first, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        posted(errno, first, bad, size_of::<ibv_recv_wr>())
    }
}

/// Puts one request into the library's form; `bytes` is where the list of a request without pieces lies. What goes beyond the caps is
/// refused here, as not every driver looks before it copies.
fn fill(
    to: &mut ibv_send_wr,
    bytes: &mut ibv_sge,
    request: &Request<'_>,
    caps: &Caps,
) -> Result<(), c_int> {
    to.wr_id = request.wr_id;
    if request.signaled {
        to.send_flags |= IBV_SEND_SIGNALED;
    }
    match request.operation {
        Operation::Write { address, rkey } => {
            to.opcode = IBV_WR_RDMA_WRITE;
            to.remote_addr = address;
            to.rkey = rkey;
        }
        Operation::Send { solicited } => {
            to.opcode = IBV_WR_SEND;
            if solicited {
                to.send_flags |= IBV_SEND_SOLICITED;
            }
        }
    }
    if !matches!(request.source, Source::Memory(_)) {
        to.send_flags |= IBV_SEND_INLINE;
    }
    match request.source {
        Source::Memory(pieces) | Source::Inline(pieces) => {
            // A piece is a list's entry and nothing else. The library reads the list only, whatever its type says.
            to.sg_list = pieces.as_ptr().cast::<ibv_sge>().cast_mut();
            to.num_sge = c_int::try_from(pieces.len()).map_err(|_| libc::EINVAL)?;
        }
        Source::Bytes(from) => {
            bytes.addr = from.as_ptr() as u64;
            bytes.length = u32::try_from(from.len()).map_err(|_| libc::EINVAL)?;
            to.sg_list = bytes;
            to.num_sge = 1;
        }
    }
    let inline_len: u64 = match request.source {
        Source::Memory(_) => 0,
        Source::Inline(pieces) => pieces.iter().map(|piece| u64::from(piece.len())).sum(),
        Source::Bytes(from) => from.len() as u64,
    };
    let is_within =
        to.num_sge as u32 <= caps.send_pieces && inline_len <= u64::from(caps.inline_bytes);
    if is_within { Ok(()) } else { Err(libc::EINVAL) }
}

/// The answer for a chain that is empty, or too long.
fn unposted(len: usize) -> Result<(), PostError> {
    if len == 0 { Ok(()) } else { Err(PostError { posted: 0, errno: libc::EINVAL }) }
}

/// What a post has come to: `bad` is the request that was refused, of an array that starts at `first`.
fn posted<T>(errno: c_int, first: *mut T, bad: *mut T, size: usize) -> Result<(), PostError> {
    if errno == 0 {
        return Ok(());
    }
    let posted = (bad as usize).checked_sub(first as usize).map_or(0, |bytes| bytes / size);
    let errno = if errno == -1 {
        io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        errno
    };
    Err(PostError { posted, errno: errno.saturating_abs() })
}
