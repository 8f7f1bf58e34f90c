//! Mappings.

use core::ffi::c_int;
use core::ptr;
use usmc_shm::sync::AtomicPtr;
use usmc_shm::sync::Ordering::{AcqRel, Acquire};

use super::{Errno, check, close, nr, raw};

const WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;
const FRESH: c_int = libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

system_calls! {
    /// Shared writable mapping of `len` bytes of `fd`.
    fn mmap_shared(fd: c_int, len: usize) -> *mut u8 = SYS_mmap, 0, len, WRITE, libc::MAP_SHARED, fd, 0;
    /// The same, without access for now: nothing of it comes into memory, be it to be locked there (mlockall(2)).
    fn mmap_out_of_reach(fd: c_int, len: usize) -> *mut u8 = SYS_mmap, 0, len, libc::PROT_NONE, libc::MAP_SHARED, fd, 0;
    /// The same, to be read only.
    fn mmap_readable(fd: c_int, len: usize) -> *mut u8 = SYS_mmap, 0, len, libc::PROT_READ, libc::MAP_SHARED, fd, 0;
    /// mmap of `fd` over an existing mapping.
    fn mmap_shared_at(at: *mut u8, fd: c_int, len: usize)
        = SYS_mmap, at, len, WRITE, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0;
    /// Zeroed memory shared with children.
    fn mmap_family(len: usize) -> *mut u8 = SYS_mmap, 0, len, WRITE, libc::MAP_SHARED | FRESH, -1isize, 0;
    /// munlock(2).
    ///
    /// # Safety
    /// The range is mapped.
    unsafe fn munlock(at: *mut u8, len: usize) = SYS_munlock, at, len;
    /// madvise(2).
    ///
    /// # Safety
    /// The advice must not invalidate data that is still needed.
    unsafe fn madvise(at: *mut u8, len: usize, advice: c_int) = SYS_madvise, at, len, advice;
    /// mprotect(2).
    ///
    /// # Safety
    /// Nobody counts on what the range is not any more.
    unsafe fn mprotect(at: *mut u8, len: usize, protection: c_int) = SYS_mprotect, at, len, protection;
}

/// [`mmap_shared`] from some place in it on, which is a page's.
pub fn mmap_shared_from(fd: c_int, len: usize, from: u64) -> Result<*mut u8, Errno> {
    /// What mmap2(2) counts in.
    const UNIT: u64 = if cfg!(target_arch = "x86") { 4096 } else { 1 };
    let from = from / UNIT;
    call!(SYS_mmap, 0, len, WRITE, libc::MAP_SHARED, fd, from).map(|v| v as *mut u8)
}

/// Private zeroed memory, reserved but not committed; `at` fixes the address when not null.
pub fn mmap_private(at: *mut u8, len: usize) -> Result<*mut u8, Errno> {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | FRESH | fixed;
    call!(SYS_mmap, at, len, WRITE, flags, -1isize, 0).map(|v| v as *mut u8)
}

/// Puts a mapping of `len` bytes in the place of the one at `to`, at once.
///
/// # Safety
/// Nobody counts on what was there.
pub unsafe fn mremap_over(from: *mut u8, len: usize, to: *mut u8) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    call!(SYS_mremap, from, len, len, flags, to).map(drop)
}

/// Whether the word at `at` can be read: not where a device behind a mapping is gone, which ends whoever touches it by SIGBUS.
pub fn is_there(at: *const u32) -> bool {
    // The kernel reads the word (futex(2)), and does not wait: for the time is none.
    const WAIT: c_int = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let none = [0usize; 2];
    call!(SYS_futex, at, WAIT, 0, none.as_ptr()) != Err(libc::EFAULT)
}

/// A table of `count` zeroed entries, which is reserved when it is first asked for and never given back.
pub fn reserve<T>(table: &AtomicPtr<T>, count: usize) -> Option<*mut T> {
    let base = table.load(Acquire);
    if !base.is_null() {
        return Some(base);
    }
    let len = count * size_of::<T>();
    let fresh = mmap_private(ptr::null_mut(), len).ok()?.cast();
    match table.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
        Ok(_) => Some(fresh),
        Err(theirs) => {
            // SAFETY: nobody else has seen `fresh`.
            unsafe { munmap(fresh.cast(), len) };
            Some(theirs)
        }
    }
}

/// munmap(2).
///
/// # Safety
/// Nothing refers to the range any more.
pub unsafe fn munmap(at: *mut u8, len: usize) {
    let _ = call!(SYS_munmap, at, len);
}

/// Whether memory can be written: the kernel writes there what is there.
///
/// # Safety
/// Eight readable bytes, not all zero, that nobody else writes.
pub unsafe fn is_writable(at: *mut u64) -> bool {
    const FLAGS: c_int = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;
    // SAFETY: the caller's contract.
    let value = unsafe { at.read_unaligned() };
    let Ok(fd) = call!(SYS_eventfd2, 0, FLAGS) else { return false };
    let is_there = call!(SYS_write, fd, &raw const value, 8).is_ok();
    let done = is_there && call!(SYS_read, fd, at, 8).is_ok();
    close(fd as c_int);
    done
}

/// Whether the process may read at `at`. sigprocmask(2) copies a set from there before it refuses an unknown way to use it; the
/// call neither sleeps nor changes anything.
pub fn can_read(at: *const u8) -> bool {
    const SET: usize = 8;
    const NO_SUCH_WAY: c_int = -1;
    let set = at.map_addr(|at| at & !(SET - 1));
    call!(SYS_rt_sigprocmask, NO_SUCH_WAY, set, 0, SET) != Err(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::super::{ftruncate, memfd_create};
    use super::*;

    #[test]
    fn memory_that_is_gone_is_found_without_a_signal() {
        const LEN: usize = 8192;
        let fd = memfd_create(c"test").unwrap();
        ftruncate(fd, LEN as u64).unwrap();
        let base = mmap_shared(fd, LEN).unwrap();
        assert!(is_there(base.cast()));
        // SAFETY: within the mapping.
        let word = unsafe { base.add(LEN - 4) }.cast::<u32>();
        assert!(is_there(word));
        // SAFETY: as above; the file is long enough.
        unsafe { word.write(7) };
        assert!(is_there(word));
        ftruncate(fd, 0).unwrap();
        assert!(!is_there(base.cast()) && !is_there(word) && !is_there(ptr::null()));
        let private = mmap_private(ptr::null_mut(), LEN).unwrap();
        // SAFETY: two mappings of this test's.
        unsafe { mremap_over(private, LEN, base) }.unwrap();
        assert!(is_there(base.cast()));
        close(fd);
    }
}
