//! What is left to the kernel altogether ([`kernel_only`]).
//!
//! The functions of liburing return -errno, and leave errno alone.

use core::ffi::{CStr, c_int, c_uint, c_void};
use core::mem;

use crate::kernel_only;
use crate::linkmap::{self, Place};
use crate::reason::Reason;

/// `name(entries, ...)` goes to liburing's function of that name.
macro_rules! makers {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name(entries: c_uint, $($arg: $ty),*) -> c_int {
            const NAME: &CStr = $symbol;
            if let Err(errno) = kernel_only::begins(Reason::Uring) {
                return -errno;
            }
            let Some(found) = liburing(NAME) else { return -libc::ENOSYS };
            // SAFETY: liburing's header declares this function with these arguments.
            let make: unsafe extern "C" fn(c_uint, $($ty),*) -> c_int = unsafe { mem::transmute(found) };
            // SAFETY: the caller's contract.
            unsafe { make(entries, $($arg),*) }
        }
    )* };
}

makers! {
    /// io_uring_queue_init(3)
    io_uring_queue_init = c"io_uring_queue_init" (ring: *mut c_void, flags: c_uint);
    /// io_uring_queue_init_params(3)
    io_uring_queue_init_params = c"io_uring_queue_init_params" (ring: *mut c_void, params: *mut c_void);
    /// io_uring_queue_init_mem(3)
    io_uring_queue_init_mem = c"io_uring_queue_init_mem"
        (ring: *mut c_void, params: *mut c_void, buf: *mut c_void, size: usize);
    /// io_uring_setup(2)
    io_uring_setup = c"io_uring_setup" (params: *mut c_void);
}

/// liburing's function of this name: the next one after ours, be it that of a liburing that only a plugin has loaded.
fn liburing(name: &CStr) -> Option<*mut c_void> {
    let found = linkmap::find(Place::BehindUs, name);
    (!found.is_null()).then_some(found)
}
