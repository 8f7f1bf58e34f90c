//! The functions of liburing that make a ring. They return -errno, and leave errno alone.

use core::ffi::{CStr, c_int, c_uint, c_void};
use core::mem;

use crate::uring;

/// `name(entries, ...)` goes to liburing's function of that name.
macro_rules! makers {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name(entries: c_uint, $($arg: $ty),*) -> c_int {
            const NAME: &CStr = $symbol;
            if let Err(errno) = uring::begins() {
                return -errno;
            }
            let Some(found) = uring::liburing(NAME) else { return -libc::ENOSYS };
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
