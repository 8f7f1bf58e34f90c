//! Memory that two parties map.

use std::ptr;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// A memfd of `len` bytes; `seals` as for F_ADD_SEALS.
pub fn memfd(len: usize, seals: i32) -> i32 {
    // SAFETY: plain system calls with valid arguments.
    unsafe {
        let fd = libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0, "memfd_create");
        assert_eq!(libc::ftruncate(fd, len as libc::off_t), 0, "ftruncate");
        if seals != 0 {
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0, "F_ADD_SEALS");
        }
        fd
    }
}

/// Maps `len` bytes of `fd` from `offset`, between two pages without access.
pub fn map_guarded(fd: i32, offset: usize, len: usize) -> *mut u8 {
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let reserved = len.next_multiple_of(PAGE) + 2 * PAGE;
    // SAFETY: a fresh reservation, then a fixed mapping inside it.
    unsafe {
        let all = libc::mmap(ptr::null_mut(), reserved, libc::PROT_NONE, anonymous, -1, 0);
        assert_ne!(all, libc::MAP_FAILED, "mmap");
        let write = libc::PROT_READ | libc::PROT_WRITE;
        let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
        let inside = all.byte_add(PAGE);
        let mapped = libc::mmap(inside, len, write, fixed, fd, offset as libc::off_t);
        assert_eq!(mapped, inside, "mmap");
        mapped.cast()
    }
}
