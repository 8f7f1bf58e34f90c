//! libc's errno of this thread.

use core::ffi::c_int;

/// Its value.
#[inline]
pub fn errno() -> c_int {
    // SAFETY: libc's per-thread location is always valid.
    unsafe { *libc::__errno_location() }
}

/// Sets it.
#[inline]
pub fn set_errno(code: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = code }
}
