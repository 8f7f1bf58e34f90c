//! Which of the application's pointers lead somewhere. The kernel says EFAULT of those that do not; what the library reads or
//! writes itself would end the program.
//!
//! Beside the bytes, and on the way of the bytes, only what is certainly no address is told apart: anything more would be a
//! system call for each message.

use crate::os::sys;

/// Whether no program can have mapped anything at `p`: the first page (vm.mmap_min_addr), and the kernel's half.
#[inline(always)]
pub fn is_nowhere<T>(p: *const T) -> bool {
    const FIRST: usize = 4096;
    // On i386 a 64-bit kernel gives all but the last page.
    const END: usize = if cfg!(target_pointer_width = "64") {
        1 << (usize::BITS - 1)
    } else {
        0usize.wrapping_sub(FIRST)
    };
    (p as usize).wrapping_sub(FIRST) >= END - FIRST
}

/// Whether `p` lies in the frames of the callers, where nearly all such pointers lead. The stack of a 32-bit program may end right
/// below the kernel's half.
#[inline(always)]
pub fn is_near<T>(p: *const T) -> bool {
    const FRAMES: usize = 16384;
    let here = 0u8;
    !is_nowhere(p) && (p as usize).wrapping_sub((&raw const here).addr()) < FRAMES
}

/// Whether what is at `p` can be read. A system call, if `p` is not near.
pub fn is_readable<T>(p: *const T) -> bool {
    is_near(p) || !is_nowhere(p) && sys::can_read(p.cast())
}
