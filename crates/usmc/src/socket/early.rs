//! Calls through the kernel's TCP on a connection that has no slot yet: the kernel's own, sleep and errors
//! included. They are counted, for a slot that came meanwhile would not know of them.

use usmc_shm::layout::SWITCHING;
use usmc_shm::sync::AtomicU32;

use super::close::Hold;
use super::ending;
use crate::conn::{self, Conn, EARLY, F_CLC};
use crate::lasting::Call;
use crate::{single, transition};

/// Such a call, for as long as it lasts. Another thread may close the number meanwhile, hence the hold.
pub struct Early {
    calls: &'static AtomicU32,
    _hold: Hold,
}

impl Early {
    /// Before a receive: moves the handshake on. `None` where [`super::recv::receive`] has to do it.
    #[inline]
    pub fn receive(fd: i32, index: u32) -> Option<Early> {
        let conn = conn::at(index);
        if conn.phase() != EARLY {
            return None;
        }
        transition::progress(fd, index, Call::Receive);
        let call = Early::enter(fd, index, conn, &conn.tcp_receives)?;
        // Set while no such call is under way: a message of the peer's is not for the application. And of an error that
        // another process took out in the ring the kernel does not know.
        if conn.has(F_CLC) || ending::is_taken(conn) { None } else { Some(call) }
    }

    /// Before a send. `None` where a slot is being tied to the record or is there.
    #[inline]
    pub fn send(fd: i32, index: u32) -> Option<Early> {
        let conn = conn::at(index);
        Early::enter(fd, index, conn, &conn.tcp_sends)
    }

    fn enter(fd: i32, index: u32, conn: &Conn, calls: &'static AtomicU32) -> Option<Early> {
        if conn.phase() != EARLY {
            return None;
        }
        let hold = Hold::enter(fd, index)?;
        // Pairs with the CAS of `Conn::stop_kernel_calls`; either it sees us or we see the slot.
        if single::add(calls, 1) & SWITCHING == 0 {
            return Some(Early { calls, _hold: hold });
        }
        single::sub(calls, 1);
        None
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        single::sub(self.calls, 1);
    }
}
