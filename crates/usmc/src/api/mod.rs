//! One function per interposed libc symbol, with libc's signature and conventions: -1 and `errno`.
//!
//! A function looks the fd up, hands tracked sockets to [`crate::socket`] and [`crate::poll`], and makes the
//! real call for everything else. `errno` is changed only where libc's function would.

/// `name(…) -> ret |kernel(…)| body;`: libc's function of that name does `body`, where `kernel` is the real call. That gets the
/// arguments, but for those in its parentheses, which are given to it.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty
        |$kernel:ident($($given:ident),*)| $body:expr;)*) => {
        calls!(@ $($(#[$doc])* $name by $name($($arg: $ty),*) -> $ret |$kernel($($given),*)| $body;)*);
    };
    (@ $($(#[$doc:meta])* $name:ident by $real:ident($($arg:ident: $ty:ty),*) -> $ret:ty
        |$kernel:ident($($given:ident),*)| $body:expr;)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the caller's contract.
            unsafe {
                let $kernel = move |$($given),*| real::$real($($arg),*);
                $body
            }
        }
    )* };
}

/// The same of calls that take spans of time, `name or name64 by real64`: on a 32-bit machine programs call the second one that are
/// built with 64 bits of time. There `name` means it, too.
macro_rules! timed {
    ($($(#[$doc:meta])* $name:ident or $name64:ident by $real64:ident($($arg:ident: $ty:ty),*) -> $ret:ty
        |$kernel:ident($($given:ident),*)| $body:expr;)*) => {
        calls!(@ $($(#[$doc])* $name by $name($($arg: $ty),*) -> $ret |$kernel($($given),*)| $body;)*);
        #[cfg(target_pointer_width = "32")]
        #[allow(unused_imports, reason = "not all of them need both, nor call each other")]
        mod time64 {
            use super::*;
            use crate::os::time::{Timespec64 as timespec, Timeval64 as timeval};
            $(use $name64 as $name;)*
            calls!(@ $($(#[$doc])* $name64 by $real64($($arg: $ty),*) -> $ret |$kernel($($given),*)| $body;)*);
        }
        #[cfg(target_pointer_width = "32")]
        pub use time64::*;
    };
}

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
