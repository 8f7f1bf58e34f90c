//! Who holds a connection that is passed on, between processes that did not come from one another by fork.
//!
//! A family of processes counts its members in the slot, or in a cell of [`crate::fork`]. Before one of them passes a
//! socket on, the device begins to count families: that of the passer, and one for each [`Receiver`]. Who receives the
//! socket is a holder only if the passer meant it; anybody else is one that nobody knows, and then the connection
//! stays TCP for good. So does a connection of which a holder died without a word. A connection goes to the ring when
//! one process is left that holds it.

use core::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};

use crate::conn::{Conn, F_CLIENT, F_COPIED, F_SHARED};
use crate::device::{self, Custody, Receiver};
use crate::{fork, kernel};

/// The device's number for it, 0 = nobody passed it on. Another process of the family may have done it.
fn of(fd: i32, conn: &Conn) -> u32 {
    let own = conn.custody.load(Relaxed);
    if own != 0 || !conn.has(F_COPIED) {
        return own;
    }
    let told = match conn.family() {
        Some(end) => end.custody.load(Relaxed),
        None => fork::custody_of(conn),
    };
    // The slot is the peer's memory, too.
    if told != 0 && device::current().is_about(Custody(told), kernel::cookie(fd)) {
        conn.custody.store(told, Relaxed);
        return told;
    }
    0
}

/// Before the record of `fd` ends: another process of the family may have passed the connection on.
pub fn look(fd: i32, conn: &Conn) {
    if conn.has(F_COPIED) {
        of(fd, conn);
    }
}

/// Whether only this family holds the connection.
pub fn is_sole(fd: i32, conn: &Conn) -> bool {
    match of(fd, conn) {
        0 => true,
        token => device::current().is_sole(Custody(token)),
    }
}

/// `fd` is going to be passed on. False where its receiver will not be known as a holder.
pub fn hand_over(fd: i32, conn: &Conn, to: Receiver) -> bool {
    let alone = !conn.has(F_SHARED) || fork::is_sole_holder(conn);
    let is_program = matches!(to, Receiver::Program(_) | Receiver::Child(_));
    if !alone && !is_program {
        // The others of this family would have to look for the receiver at each step: they stay TCP.
        fork::count_unknown(conn);
        return false;
    }
    let device = device::current();
    let mut token = of(fd, conn);
    if token == 0 {
        let cookie = kernel::cookie(fd);
        let Some(Custody(new)) = device.entrust(cookie, conn.has(F_CLIENT)) else { return false };
        token = new;
        conn.custody.store(new, Relaxed);
        match conn.family() {
            Some(end) => end.custody.store(new, Relaxed),
            None => fork::set_custody(conn, new),
        }
    }
    device.hand_over(Custody(token), to)
}

/// After [`hand_over`]: this family will not hold it any more. The number is kept for [`take_back`].
pub fn release_own(conn: &Conn) {
    device::current().release(Custody(conn.custody.load(Relaxed)));
}

/// It was not passed on after all. `released`: this family's hold was given up for it.
pub fn take_back(conn: &Conn, from: Receiver, released: bool) {
    let token = Custody(conn.custody.load(Relaxed));
    if device::current().call_off(token, from) && !released {
        device::current().release(token);
    }
}

/// The receiver's name has turned out to be another one.
pub fn rename(conn: &Conn, from: Receiver, to: Receiver) {
    match conn.custody.load(Relaxed) {
        0 => {}
        token => device::current().rename(Custody(token), from, to),
    }
}

/// This family holds the connection no more.
pub fn release(conn: &Conn) {
    if conn.custody.load(Relaxed) == 0 {
        return;
    }
    let token = conn.custody.swap(0, AcqRel);
    // A call that was asleep in it when its number was closed: the process has the socket still.
    if token != 0 && conn.unseen.load(SeqCst) == 0 {
        device::current().release(Custody(token));
    }
}
