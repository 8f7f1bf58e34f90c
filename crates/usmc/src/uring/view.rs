//! A second mapping of a ring's memory: that of the program's entries, whose lengths the kernel has told.

use core::ptr;

use super::{Requests, SETUP_NO_SQARRAY, entries};
use crate::os::sys;

// include/uapi/linux/io_uring.h
const OFF_SQ_RING: u64 = 0;
const OFF_SQES: u64 = 0x1000_0000;
/// IORING_MAX_ENTRIES (io_uring/io_uring.h)
const MOST_ENTRIES: u32 = 32768;
/// The ring's words lie within the first of its pages (`struct io_rings`).
const MOST_OFFSET: u32 = 4092;

/// `struct io_uring_params` as io_uring_setup(2) has filled it in, up to where the completions begin.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    sq_entries: u32,
    cq_entries: u32,
    /// `IORING_SETUP_*`
    pub flags: u32,
    _sq_thread: [u32; 2],
    features: u32,
    _wq_fd: u32,
    _reserved: [u32; 3],
    head: u32,
    tail: u32,
    _ring: [u32; 2],
    _flags_and_dropped: [u32; 2],
    array: u32,
}

/// Where the entries of a ring are.
#[derive(Clone, Copy)]
pub struct View {
    words: *mut u8,
    words_len: usize,
    sqes: *mut u8,
    sqes_len: usize,
    head: usize,
    tail: usize,
    /// Null: the entries are taken in their order.
    array: usize,
    entries: u32,
    stride: usize,
    completes: bool,
}

impl View {
    /// `None` where the memory cannot be mapped, or is not as it was when this was written.
    pub fn map(fd: i32, params: &Params) -> Option<View> {
        let count = params.sq_entries;
        let are_known = count.is_power_of_two()
            && count <= MOST_ENTRIES
            && params.head <= MOST_OFFSET
            && params.tail <= MOST_OFFSET
            && params.head.is_multiple_of(4)
            && params.tail.is_multiple_of(4)
            && params.array.is_multiple_of(4)
            && params.array < 1 << 30;
        if !are_known {
            return None;
        }
        let array = if params.flags & SETUP_NO_SQARRAY == 0 { params.array as usize } else { 0 };
        let stride = entries::size(params.flags);
        let words_len = match array {
            0 => MOST_OFFSET as usize + 4,
            array => array + 4 * count as usize,
        };
        let sqes_len = stride * count as usize;
        let words = sys::mmap_shared_from(fd, words_len, OFF_SQ_RING).ok()?;
        let Ok(sqes) = sys::mmap_shared_from(fd, sqes_len, OFF_SQES) else {
            // SAFETY: just mapped.
            unsafe { sys::munmap(words, words_len) };
            return None;
        };
        Some(View {
            words,
            words_len,
            sqes,
            sqes_len,
            head: params.head as usize,
            tail: params.tail as usize,
            array,
            entries: count,
            stride,
            completes: super::completes(params.features),
        })
    }

    /// # Safety
    /// The mappings are of [`View::map`], and nobody uses them any more.
    pub unsafe fn unmap(&self) {
        // SAFETY: the caller's contract.
        unsafe {
            sys::munmap(self.words, self.words_len);
            sys::munmap(self.sqes, self.sqes_len);
        }
    }

    /// The next `count` entries that the kernel is going to take, or as many as there are.
    ///
    /// # Safety
    /// Mapped, and as long as the requests are used.
    pub unsafe fn requests(&self, count: u32) -> Requests {
        // SAFETY: aligned words within the mapping ([`View::map`]), which the kernel and the program write.
        let (head, tail) = unsafe {
            (
                self.words.add(self.head).cast::<u32>().read_volatile(),
                self.words.add(self.tail).cast::<u32>().read_volatile(),
            )
        };
        let array = match self.array {
            0 => ptr::null(),
            // SAFETY: within the mapping.
            array => unsafe { self.words.add(array).cast::<u32>().cast_const() },
        };
        Requests {
            sqes: self.sqes,
            stride: self.stride,
            entries: self.entries,
            array,
            head,
            count: tail.wrapping_sub(head).min(count).min(self.entries),
            completes: self.completes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_where_the_kernel_has_them() {
        assert_eq!(core::mem::offset_of!(Params, flags), 8);
        // `sq_off` is at 40.
        assert_eq!(core::mem::offset_of!(Params, head), 40);
        assert_eq!(core::mem::offset_of!(Params, array), 40 + 24);
    }
}
