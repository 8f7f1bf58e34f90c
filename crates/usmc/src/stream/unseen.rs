//! Calls that the kernel does by itself for a connection that may come back to the ring ([`Conn::returns`]): what such
//! a call moves, the next ring would not know of. So they are counted, and no step towards it is made meanwhile.

use usmc_shm::sync::Ordering::SeqCst;
use usmc_shm::sync::fence;

use crate::record::conn::{self, Conn};
use crate::record::phase::Phase;

/// Such a call, for as long as it lasts.
pub struct Unseen(Option<&'static Conn>);

impl Unseen {
    /// Before the call. `returns`: what it was before the call's way was decided. `None` where the connection has come
    /// back since: decide again.
    #[inline]
    pub fn enter(index: u32, returns: u32) -> Option<Unseen> {
        let conn = conn::at(index);
        if conn.phase() == Phase::Plain && conn.passed_on.load(SeqCst) == 0 {
            return Some(Unseen(None));
        }
        let call = Unseen(Some(conn));
        conn.unseen.fetch_add(1, SeqCst);
        // Either `Conn::leave_slot` is seen here, or this call by the thread that makes the next step.
        fence(SeqCst);
        (conn.returns() == returns).then_some(call)
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        // None is counted where a fork of this thread's own signal handler has forgotten it.
        if let Some(conn) = self.0
            && conn.unseen.load(SeqCst) != 0
        {
            conn.unseen.fetch_sub(1, SeqCst);
        }
    }
}
