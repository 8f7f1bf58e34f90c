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

/// What it was, which it is again once this is dropped.
pub struct Kept(c_int);

/// Keeps it as it is now.
#[inline]
pub fn keep() -> Kept {
    Kept(errno())
}

impl Drop for Kept {
    #[inline]
    fn drop(&mut self) {
        set_errno(self.0);
    }
}

/// Does `work`, which may change it, and keeps it.
#[inline]
pub fn apart<T>(work: impl FnOnce() -> T) -> T {
    let _kept = keep();
    work()
}
