//! Calls that may never return: a signal handler jumps out of them (siglongjmp), or the thread ends in them
//! (pthread_exit in a handler, cancellation). The kernel then lets go of what the call held, and so do we.
//!
//! No destructor runs in either case. libc knows of cleanup buffers on the stack of a thread, by the functions that
//! `pthread_cleanup_push` once was made of, and calls those that it passes on its way, also in longjmp
//! (`__pthread_cleanup_upto` in glibc's nptl).

use core::ffi::{c_int, c_void};
use core::mem::ManuallyDrop;
use core::ptr;

use crate::os::{errno, real};

/// `struct _pthread_cleanup_buffer` of pthread.h.
#[repr(C)]
struct Buffer {
    routine: *mut c_void,
    arg: *mut c_void,
    cancel_type: c_int,
    previous: *mut Buffer,
}

unsafe extern "C" fn let_go<T>(value: *mut c_void) {
    let _errno = errno::keep();
    // SAFETY: `keeping` has pushed this address, and does not use the value any more.
    unsafe { ptr::drop_in_place(value.cast::<T>()) };
}

/// Makes a call that sleeps, and gives back what the caller holds meanwhile; where it does not return, drops that.
#[inline(always)]
pub fn keeping<T, R>(value: T, call: impl FnOnce() -> R) -> (T, R) {
    let mut value = ManuallyDrop::new(value);
    let mut buffer = Buffer {
        routine: ptr::null_mut(),
        arg: ptr::null_mut(),
        cancel_type: 0,
        previous: ptr::null_mut(),
    };
    let at = (&raw mut buffer).cast::<c_void>();
    let routine = let_go::<T> as unsafe extern "C" fn(*mut c_void) as *mut c_void;
    // SAFETY: the buffer and the value stay where they are until it is popped; the routine fits the value.
    unsafe { real::_pthread_cleanup_push(at, routine, (&raw mut value).cast()) };
    let result = call();
    // SAFETY: the thread's innermost buffer, as calls nest.
    unsafe { real::_pthread_cleanup_pop(at, 0) };
    (ManuallyDrop::into_inner(value), result)
}

/// What libc's function does first where it is a cancellation point, for those that may never come to it.
#[inline(always)]
pub fn cancellation_point() {
    // SAFETY: no arguments; nothing is held.
    unsafe { real::pthread_testcancel() };
}

/// The thread's cancellation state, which it gets back.
struct Uncancelled(c_int);

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: no pointers but null.
        unsafe { real::pthread_setcancelstate(self.0, ptr::null_mut()) };
    }
}

/// Makes a call that is no cancellation point out of some that are.
pub fn uncancelled<R>(call: impl FnOnce() -> R) -> R {
    /// As pthread.h has it.
    const PTHREAD_CANCEL_DISABLE: c_int = 1;
    let mut state = 0;
    // SAFETY: an int of ours. The call leaves errno alone.
    unsafe { real::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut state) };
    keeping(Uncancelled(state), call).1
}
