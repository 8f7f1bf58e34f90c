//! The holders of a connection that is passed on between processes that did not come from one another by fork.
//!
//! A family of processes counts its members in the slot, or in a cell of [`crate::family::holders`]. Before one of them passes a
//! socket on, the device begins to count families: that of the passer, and one for each [`Receiver`]. The receiver of the
//! socket is a holder only if the passer meant it; anybody else is one that nobody knows, and then the connection
//! stays TCP for good. So does a connection of which a family of several processes died without a word; single processes
//! are counted by name, and counted out. A connection goes to the ring when one process is left that holds it.

use usmc_shm::sync::Ordering::{AcqRel, Relaxed, SeqCst};

use crate::family::holders;
use crate::host::{self, PassedOn, Receiver};
use crate::os::process;
use crate::record::conn::{self, Conn, F_CLIENT, F_COPIED, F_SHARED};
use crate::record::kernel;

/// The device's number for it, 0 = no process has passed it on. Another process of the family may have done it.
fn of(fd: i32, conn: &Conn) -> u32 {
    let own = conn.passed_on.load(Relaxed);
    if own != 0 {
        return own;
    }
    let token = by_family(fd, conn).map_or(0, |it| it.0);
    if token != 0 {
        conn.passed_on.store(token, Relaxed);
    }
    token
}

fn by_family(fd: i32, conn: &Conn) -> Option<PassedOn> {
    if !conn.has(F_COPIED) {
        return None;
    }
    let told = match conn.family() {
        Some(end) => end.passed_on.load(Relaxed),
        None => holders::passed_on_of(conn),
    };
    // The slot is the peer's memory, too.
    let is_it = |it: &PassedOn| told != 0 && host::current().is_about(*it, kernel::cookie(fd));
    Some(PassedOn(told)).filter(is_it)
}

/// Before the record of `fd` ends, for what others may have done with the connection unseen.
pub fn look(fd: i32, conn: &Conn) {
    of(fd, conn);
}

/// This process is about to be one of a family. The connections are marked as shared.
pub fn before_fork() {
    conn::for_each(|_, conn| {
        let token = conn.passed_on.load(Relaxed);
        if token != 0 {
            host::current().take_name_back(PassedOn(token));
        }
    });
}

/// It was handed over to us, and `conn` is its record from now on.
pub fn hold(conn: &Conn, token: PassedOn) {
    let device = host::current();
    conn.passed_on.store(token.0, SeqCst);
    device.name_holder(token, process::pid());
    // Another thread may have forked before it could see the name.
    if conn.has(F_COPIED) {
        device.take_name_back(token);
    }
}

/// Whether only this family holds the connection.
pub fn is_sole(fd: i32, conn: &Conn) -> bool {
    match of(fd, conn) {
        0 => true,
        token => host::current().is_sole(PassedOn(token)),
    }
}

/// `fd` is going to be passed on. False where its receiver will not be known as a holder.
pub fn hand_over(fd: i32, conn: &Conn, to: Receiver) -> bool {
    let alone = !conn.has(F_SHARED) || holders::is_sole_holder(conn);
    let is_program = matches!(to, Receiver::Program(_) | Receiver::Child(_));
    if !alone && !is_program {
        // The others of this family would have to look for the receiver at each step: they stay TCP.
        holders::count_unknown(conn);
        return false;
    }
    let device = host::current();
    let mut token = of(fd, conn);
    if token == 0 {
        let cookie = kernel::cookie(fd);
        let this = (!conn.has(F_SHARED)).then(process::pid);
        let Some(PassedOn(new)) = device.entrust(cookie, conn.has(F_CLIENT), this) else {
            return false;
        };
        token = new;
        conn.passed_on.store(new, SeqCst);
        if conn.has(F_SHARED) {
            // As above.
            device.take_name_back(PassedOn(new));
        }
        match conn.family() {
            Some(end) => end.passed_on.store(new, Relaxed),
            None => holders::set_passed_on(conn, new),
        }
    }
    device.hand_over(PassedOn(token), to)
}

/// After [`hand_over`]: this family will not hold it any more. The number is kept for [`take_back`].
pub fn release_own(conn: &Conn) {
    host::current().release(PassedOn(conn.passed_on.load(Relaxed)));
}

/// It was not passed on after all. `released`: this family's hold was given up for it.
pub fn take_back(conn: &Conn, from: Receiver, released: bool) {
    let token = PassedOn(conn.passed_on.load(Relaxed));
    if host::current().call_off(token, from) && !released {
        host::current().release(token);
    }
}

/// The receiver's name has turned out to be another one.
pub fn rename(conn: &Conn, from: Receiver, to: Receiver) {
    match conn.passed_on.load(Relaxed) {
        0 => {}
        token => host::current().rename(PassedOn(token), from, to),
    }
}

/// This family holds the connection no more.
pub fn release(conn: &Conn) {
    if conn.passed_on.load(Relaxed) == 0 {
        return;
    }
    let token = conn.passed_on.swap(0, AcqRel);
    // A call that was asleep in it when its number was closed: the process has the socket still.
    if token != 0 && conn.unseen.load(SeqCst) == 0 {
        host::current().release(PassedOn(token));
    }
}
