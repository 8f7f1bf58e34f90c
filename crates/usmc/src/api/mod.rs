//! One function per interposed libc symbol, with libc's signature and conventions: -1 and `errno`.
//!
//! A function looks the fd up, hands tracked sockets to [`crate::socket`] and [`crate::poll`], and makes the
//! real call for everything else. `errno` is changed only where libc's function would.

mod aio;
mod between;
mod bytes;
mod fds;
mod message;
mod plain;
mod positioned;
mod processes;
mod sockets;
mod spawn;
mod stdio;
pub mod streams;
#[cfg(target_pointer_width = "32")]
mod time64;
mod uring;
mod waits;

pub use crate::os::time;
pub use crate::os::time::{Timespec64, Timeval64};
pub use aio::*;
pub use between::*;
pub use bytes::*;
pub use fds::*;
pub use plain::*;
pub use positioned::*;
pub use processes::*;
pub use sockets::*;
pub use spawn::*;
pub use stdio::*;
#[cfg(target_pointer_width = "32")]
pub use time64::*;
pub use uring::Ring as UringOfLiburing;
pub use uring::*;
pub use waits::*;

use core::ffi::c_int;

use crate::os::errno::{apart, set_errno};
use crate::os::pointers::{is_near, is_nowhere, is_readable};

/// -1 with `errno`.
fn fail<T: From<i8>>(code: c_int) -> T {
    set_errno(code);
    T::from(-1)
}

/// Runs library work after a real call without disturbing the `errno` that call left.
fn after<T>(result: T, work: impl FnOnce(&T)) -> T {
    apart(|| work(&result));
    result
}
