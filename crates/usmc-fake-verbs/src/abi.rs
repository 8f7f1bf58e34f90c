//! The exported functions, with the binary interface of libibverbs (`usmc_verbs::sys`).
//!
//! Objects are the header's structures, some with a number behind them; all else about them is in the `nic`.

mod data;
mod devices;
mod objects;

use std::ffi::c_int;
use std::ptr;

use usmc_verbs::sys::ibv_context;

/// An open device.
#[repr(C)]
pub(crate) struct Context {
    base: ibv_context,
    number: u32,
}

/// # Safety
///
/// The context is one of this library's, and open.
unsafe fn number_of(context: *mut ibv_context) -> u32 {
    // SAFETY: The caller's promise; `base` is the structure's first field.
    unsafe { (*context.cast::<Context>()).number }
}

fn set_errno(errno: c_int) {
    // SAFETY: The place is this thread's.
    unsafe { *libc::__errno_location() = errno };
}

/// The end of a function that returns a pointer.
fn null<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    ptr::null_mut()
}

/// The end of a function that destroys: what is in use stays, and the test's author is told.
fn busy(what: &str) -> c_int {
    eprintln!("usmc-fake-verbs: {what} while it is in use");
    libc::EBUSY
}
