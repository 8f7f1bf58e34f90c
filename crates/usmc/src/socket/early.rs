//! Calls through the kernel's TCP on a connection that has no slot yet: the kernel's own, sleep and errors
//! included. They are counted, for a slot that came meanwhile would not know of them.

use crate::handshake::transition;
use crate::os::awake::Awake;
use crate::os::signals::Signals;
use crate::os::sys::{self, Errno};
use crate::record::change_over::Call;
use crate::record::conn::{self, Conn, F_CLC, F_NONBLOCK};
use crate::record::kernel;
use crate::record::numbers::Hold;
use crate::record::phase::Phase;
use crate::record::users::EARLY_CALL;
use crate::stream::ending;
use crate::stream::wait::time_limit_ms;

/// Before a real call that may sleep until the kernel has something to tell of the socket: looks for that where looks have proven better.
///
/// # Errors
/// EINTR: a signal has come in whose handler ends the call.
#[inline(always)]
pub fn stay_awake(fd: i32, conn: &Conn) -> Result<(), Errno> {
    let awake = Awake::get(|| u64::MAX);
    // Without the flag the kernel is asked: another process may have set O_NONBLOCK.
    if awake.looks() && !conn.has(F_NONBLOCK) { look_while(awake, fd) } else { Ok(()) }
}

#[cold]
fn look_while(awake: Awake, fd: i32) -> Result<(), Errno> {
    let is_ready = || sys::poll1(fd, libc::POLLIN, 0) != 0;
    // A time limit begins with the real call, and any handler ends a call that has one.
    if is_ready() || kernel::is_nonblocking(fd) || time_limit_ms(fd, libc::SO_RCVTIMEO) > 0 {
        return Ok(());
    }
    let mut signals = Signals::new();
    let found = awake.until(&mut signals, is_ready);
    if signals.let_in(false) && !found { Err(libc::EINTR) } else { Ok(()) }
}

/// Such a call, for as long as it lasts. Another thread may close the number meanwhile, hence the hold.
pub struct Early {
    _hold: Hold,
}

impl Early {
    /// Before a receive: moves the handshake on. `None` where [`super::recv::receive`] has to do it.
    #[inline]
    pub fn receive(fd: i32, index: u32) -> Option<Early> {
        let conn = conn::at(index);
        if conn.phase() != Phase::Early {
            return None;
        }
        transition::progress(fd, index, Call::Receive);
        let call = Early::send(fd, index)?;
        // Set while no such call is under way: a message of the peer's is not for the application. And of an error that
        // another process took out in the ring the kernel does not know.
        if conn.has(F_CLC) || ending::is_taken(conn) { None } else { Some(call) }
    }

    /// Before a send. `None` where a slot is being tied to the record or is there.
    #[inline]
    pub fn send(fd: i32, index: u32) -> Option<Early> {
        if conn::at(index).phase() != Phase::Early {
            return None;
        }
        // `Conn::stop_kernel_calls` sees us, or we see that it was there.
        let hold = Hold::of_kind(fd, index, EARLY_CALL)?;
        Some(Early { _hold: hold })
    }
}
