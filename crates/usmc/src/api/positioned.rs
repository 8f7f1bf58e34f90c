//! preadv2(2) and pwritev2(2): offset -1 means the stream position, so a socket can be used by them.

use core::ffi::{c_int, c_uint};
use libc::{iovec, off64_t, ssize_t};
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use super::bytes::{IOV_MAX, is_empty, receive_many, send_many, send_refused};
use super::{apart, fail, is_nowhere};
use crate::os::iov::Buffers;
use crate::os::real;
use crate::os::table::{self, Entry};
use crate::record::conn;
use crate::record::phase::Phase;
use crate::socket::option;

/// preadv2(2)
pub unsafe fn preadv2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: impl Into<off64_t>,
    flags: c_int,
) -> ssize_t {
    let offset = offset.into();
    let kernel = || {
        // SAFETY: the caller's contract.
        unsafe { real::preadv64v2(fd, iov, count, offset, flags) }
    };
    let Entry::Conn(index) = table::settled(fd) else { return kernel() };
    let entries = count as c_uint as usize;
    // SAFETY: the caller's array, if that is what it is. Of no bytes the kernel looks at nothing else.
    unsafe {
        if offset != -1
            || entries > IOV_MAX
            || is_nowhere(iov)
            || Buffers::new(iov, entries).left() == 0
        {
            return kernel();
        }
        match how(index, flags) {
            // It raises no signal anyhow.
            Ok(how) => receive_many((fd, index), iov, entries, how & !libc::MSG_NOSIGNAL, kernel),
            Err(code) => fail(code),
        }
    }
}

/// What preadv2(2)'s and pwritev2(2)'s flags mean for a socket, in flags of recv(2) and send(2); most of them nothing.
///
/// # Errors
/// What the kernel refuses them with; what is not known here as well, for the kernel would look past the ring.
fn how(index: u32, flags: c_int) -> Result<c_int, c_int> {
    const RWF_NOWAIT: c_int = 8;
    const RWF_APPEND: c_int = 0x10;
    // Since 6.9 and 6.18.
    const RWF_NOAPPEND: c_int = 0x20;
    const RWF_NOSIGNAL: c_int = 0x100;
    // RWF_HIPRI, RWF_DSYNC and RWF_SYNC.
    const OLD: c_int = 1 | 2 | 4 | RWF_NOWAIT | RWF_APPEND;
    let meaning = |flag, means| if flags & flag != 0 { means } else { 0 };
    let how = meaning(RWF_NOWAIT, libc::MSG_DONTWAIT) | meaning(RWF_NOSIGNAL, libc::MSG_NOSIGNAL);
    if conn::at(index).phase() == Phase::Plain {
        // The kernel gets them all.
        return Ok(how);
    }
    if flags & !(OLD | RWF_NOAPPEND | RWF_NOSIGNAL) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if [RWF_NOAPPEND, RWF_NOSIGNAL].iter().any(|flag| flags & flag != 0 && !is_known(*flag)) {
        return Err(libc::EOPNOTSUPP);
    }
    if flags & RWF_APPEND != 0 && flags & RWF_NOAPPEND != 0 {
        return Err(libc::EINVAL);
    }
    Ok(how)
}

/// Whether the kernel knows this flag of preadv2(2): asked once, with a socket that is not connected.
fn is_known(flag: c_int) -> bool {
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    static UNKNOWN: AtomicU32 = AtomicU32::new(0);
    let flag_bit = flag as u32;
    if (KNOWN.load(Relaxed) | UNKNOWN.load(Relaxed)) & flag_bit == 0 {
        // Not to be had now is asked for again.
        let Some(known) = apart(|| option::knows_flag(flag)) else { return false };
        if known { &KNOWN } else { &UNKNOWN }.fetch_or(flag_bit, Relaxed);
    }
    KNOWN.load(Relaxed) & flag_bit != 0
}

/// pwritev2(2)
pub unsafe fn pwritev2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: impl Into<off64_t>,
    flags: c_int,
) -> ssize_t {
    let offset = offset.into();
    let kernel = || {
        // SAFETY: the caller's contract.
        unsafe { real::pwritev64v2(fd, iov, count, offset, flags) }
    };
    let Entry::Conn(index) = table::settled(fd) else { return kernel() };
    if offset != -1 {
        return kernel();
    }
    // SAFETY: the caller's contract.
    unsafe {
        let entries = count as c_uint as usize;
        if is_empty(iov, count) {
            return send_refused(index, iov, entries, kernel);
        }
        match how(index, flags) {
            Ok(how) => send_many((fd, index), iov, entries, how, kernel),
            Err(code) => fail(code),
        }
    }
}
