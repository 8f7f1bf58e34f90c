//! The bits of poll(2); those of epoll(7) are the same numbers.

/// EPOLLIN / POLLIN.
pub const IN: u32 = libc::POLLIN as u32;
/// POLLOUT.
pub const OUT: u32 = libc::POLLOUT as u32;
/// POLLERR.
pub const ERR: u32 = libc::POLLERR as u32;
/// POLLHUP.
pub const HUP: u32 = libc::POLLHUP as u32;
/// POLLRDHUP.
pub const RDHUP: u32 = libc::POLLRDHUP as u32;
/// POLLPRI.
pub const PRI: u32 = libc::POLLPRI as u32;
/// POLLRDNORM.
pub const RDNORM: u32 = libc::POLLRDNORM as u32;
/// POLLWRNORM.
pub const WRNORM: u32 = libc::POLLWRNORM as u32;
/// All bits that mean "may be read".
pub const READ_BITS: u32 = IN | RDNORM | RDHUP | libc::POLLPRI as u32 | libc::POLLRDBAND as u32;
/// All bits that mean "may be written".
pub const WRITE_BITS: u32 = OUT | WRNORM | libc::POLLWRBAND as u32;
