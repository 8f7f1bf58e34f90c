//! Something for each pollfd of a call, without an allocation.

use core::slice;

use crate::os::sys;

/// Something for each pollfd, during a real poll. Up to 64 on the stack, more in a temporary mapping.
pub(super) struct Each<T> {
    few: [T; 64],
    count: usize,
    many: *mut T,
}

impl<T: Copy> Each<T> {
    pub(super) fn new(none: T, count: usize) -> Each<T> {
        let mut each = Each { few: [none; 64], count, many: core::ptr::null_mut() };
        if count > each.few.len() {
            let bytes = count * size_of::<T>();
            if let Ok(memory) = sys::mmap_private(core::ptr::null_mut(), bytes) {
                each.many = memory.cast();
                // SAFETY: the mapping holds that many.
                (0..count).for_each(|i| unsafe { each.many.add(i).write(none) });
            }
        }
        each
    }

    /// All of them; the first ones, where there is no memory.
    pub(super) fn all(&mut self) -> &mut [T] {
        if self.many.is_null() {
            let count = self.count.min(self.few.len());
            return &mut self.few[..count];
        }
        // SAFETY: the mapping holds that many, all written.
        unsafe { slice::from_raw_parts_mut(self.many, self.count) }
    }
}

impl<T> Drop for Each<T> {
    fn drop(&mut self) {
        if !self.many.is_null() {
            // SAFETY: nobody else has the mapping.
            unsafe { sys::munmap(self.many.cast(), self.count * size_of::<T>()) };
        }
    }
}
