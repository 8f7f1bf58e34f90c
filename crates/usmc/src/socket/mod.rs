//! TCP semantics, one verb per file. Each function does what the libc function of that name does to a TCP
//! socket, on whichever span of the stream the connection is.

pub mod accept;
pub mod call;
pub mod close;
pub mod connect;
pub mod control;
pub mod deputy;
pub mod early;
pub mod fast_open;
pub mod leave_all;
pub mod made;
pub mod option;
pub mod recv;
pub mod send;
pub mod smc;
pub mod transfer;
pub mod unanswered;

use crate::os::sys::Errno;

/// How a call on a tracked socket ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Bytes, or 0 for the end of the stream.
    Done(usize),
    /// The errno to report.
    Fail(Errno),
    /// The kernel has to do it: make the real call with the same arguments.
    Kernel,
    /// The number means another connection by now: the same of that.
    Other,
}
