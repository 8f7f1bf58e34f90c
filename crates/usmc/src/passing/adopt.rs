//! Adoption: sockets that were made elsewhere and come by exec (a shell's or systemd's activation, a server that
//! replaces itself), SCM_RIGHTS or pidfd_getfd(2).
//!
//! A listening socket is as good here as where it was made: the process that accepts also attaches. A connected one may be in
//! other hands, too, and those could read and write it without the ring: it stays TCP unless [`crate::family::passed_on`] knows
//! all of them.

use super::passed;
use crate::family::{mark, passed_on};
use crate::handshake::transition;
use crate::host::{self, Receiver};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::os::{config, log, sockopt};
use crate::record::conn::{self, F_ADOPTED};
use crate::record::{kernel, numbers};
use crate::socket::connect::{self, Registration};
use crate::socket::control;
use crate::watch::observer;

/// Looks through the sockets that this program was started with.
pub fn inherited() {
    if config::get().off {
        return;
    }
    let by = Receiver::started();
    let found = |fd| {
        if table::get(fd) == Entry::Foreign {
            passed::meet(fd, &by);
        }
    };
    if sys::each_open_fd(found).is_err() {
        // Without /proc. Activation gives the first numbers.
        (0..64).for_each(found);
    }
}

/// `fd` is new to this process, and no record knows it.
pub fn adopt(fd: i32, by: &[Receiver]) {
    let is_tcp = sockopt::int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) == libc::IPPROTO_TCP;
    if !is_tcp {
        return;
    }
    let listens = sockopt::int(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, 0) != 0;
    if listens || kernel::is_over(fd) {
        let Some(index) = created(fd) else { return };
        conn::at(index).set_flag(F_ADOPTED, true);
        if listens {
            conn::at(index).keep_children_to_kernel(sockopt::are_kernels(fd));
            connect::listening(fd, index, Registration::default());
        }
        return;
    }
    let by = if numbers::is_libcs(fd) { &[] } else { by };
    let Some((passed_on, client)) = host::current().claim(kernel::cookie(fd), by) else {
        return stays_tcp(fd);
    };
    let made = if kernel::is_established(fd) { created(fd) } else { None };
    let Some(index) = made else {
        // Nobody would say when it is closed: it stays counted.
        return log::debug(format_args!("fd {fd}: came from another process and stays TCP"));
    };
    conn::at(index).set_flag(F_ADOPTED, true);
    passed_on::hold(conn::at(index), passed_on);
    if sockopt::are_kernels(fd) || kernel::has_signals(fd) {
        return conn::at(index).give_up(Reason::KernelFeature);
    }
    transition::begin_adopted(fd, index, client);
}

/// No process that has it knows of this one.
fn stays_tcp(fd: i32) {
    if !mark::take(fd) {
        log::warn(format_args!("fd {fd}: in the ring of another process that does not know of us"));
    }
    // Its flags are the kernel's affair.
    if let Some(index) = connect::created(fd, 0) {
        let why = if numbers::is_libcs(fd) { Reason::Stdio } else { Reason::Adopted };
        transition::name_adopted(fd, index);
        conn::at(index).set_flag(F_ADOPTED, true);
        conn::at(index).give_up(why);
        observer::changed(fd, index);
    }
}

/// pidfd_getfd(2) has duplicated a descriptor of another process here, which its holder has not seen. A connection that the holder has in
/// a ring, or is about to, is closed: doorbells would be read and sent as bytes. Any other one stays TCP for good.
///
/// # Errors
/// EBUSY for one in a ring.
pub fn fetched(fd: i32) -> Result<(), Errno> {
    control::fresh(fd);
    let is = |name, value| sockopt::int(fd, libc::SOL_SOCKET, name, 0) == value;
    // What a listener has is inherited by what it accepts.
    let is_ours = config::get().off
        || !is(libc::SO_PROTOCOL, libc::IPPROTO_TCP)
        || is(libc::SO_ACCEPTCONN, 1)
        || passed::is_known(fd);
    if !is_ours && !mark::take_if_free(fd) {
        sys::close(fd);
        return Err(libc::EBUSY);
    }
    passed::arrived(fd, &[]);
    Ok(())
}

fn created(fd: i32) -> Option<u32> {
    let kind = if kernel::is_nonblocking(fd) { libc::SOCK_NONBLOCK } else { 0 };
    connect::created(fd, kind)
}
