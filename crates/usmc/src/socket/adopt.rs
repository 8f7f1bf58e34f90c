//! Adoption: sockets that were made elsewhere and come by exec (a shell's or systemd's activation, a server that
//! replaces itself), SCM_RIGHTS or pidfd_getfd(2).
//!
//! A listening socket is as good here as where it was made: who accepts is who attaches. A connected one may be in
//! other hands, too, and those could read and write it without the ring: it stays TCP.

use crate::conn::{self, F_ADOPTED};
use crate::table::{self, Entry};
use crate::{config, kernel, sys};

use super::connect;

/// Looks through the sockets that this program was started with.
pub fn inherited() {
    if config::get().off {
        return;
    }
    if sys::each_open_fd(adopt).is_err() {
        // Without /proc. Activation gives the first numbers.
        (0..64).for_each(adopt);
    }
}

/// `fd` is new to this process, and no record knows it.
pub fn adopt(fd: i32) {
    let is_tcp = kernel::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) == libc::IPPROTO_TCP;
    if !is_tcp || table::get(fd) != Entry::Foreign {
        return;
    }
    let listens = kernel::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, 0) != 0;
    if !listens && !kernel::is_over(fd) {
        return;
    }
    let kind = if kernel::is_nonblocking(fd) { libc::SOCK_NONBLOCK } else { 0 };
    let Some(index) = connect::created(fd, kind) else { return };
    conn::at(index).set_flag(F_ADOPTED, true);
    if listens {
        connect::listening(fd, index);
    }
}
