//! Which connections last. One request and its answer are over before shared memory could pay, so that neither
//! end spends a system call or a cache line on the change-over until its application comes back for more; unless the
//! configuration says that they do (`change_over`).

use usmc_shm::sync::Ordering::Relaxed;

use crate::os::config;
use crate::record::conn::Conn;

/// What a call is about to do with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// Send.
    Send,
    /// Receive.
    Receive,
    /// Ask for its state only.
    Look,
}

/// Sends without a receive in between after which a connection lasts: a header and a body are fewer.
const SENDS: u32 = 4;
/// Receives without a send in between: a request or an answer read in pieces, and the end after it. A FastCGI request of 3 KB
/// takes PHP eight, for it reads the head and the body of each record by themselves.
const RECEIVES: u32 = 32;

/// [`Conn::calls`]: it lasts.
const LASTS: u32 = u32::MAX;
/// Likewise, and its client has waited for the acceptor.
const AWAITED: u32 = u32::MAX - 1;
/// It has sent and received afterwards.
const ANSWERED: u32 = 1 << 16;
/// Unit of the sends; the receives are counted in the lowest byte.
const SENT: u32 = 1 << 8;

/// Notes a call. Whether the connection lasts: a second request, or a stream in either direction. Threads that
/// call at the same time may count as one.
pub fn lasts(conn: &Conn, call: Call) -> bool {
    let seen = conn.calls.load(Relaxed);
    if seen >= AWAITED {
        return true;
    }
    let is_at_once = config::get().changes_over_at_once;
    if is_at_once && call == Call::Look {
        return true;
    }
    let now = if is_at_once { LASTS } else { after(seen, call) };
    if now != seen {
        conn.calls.store(now, Relaxed);
    }
    now == LASTS
}

/// Whether the client has not yet waited for its acceptor. It does so once.
pub fn may_await(conn: &Conn) -> bool {
    conn.calls.swap(AWAITED, Relaxed) != AWAITED
}

fn after(seen: u32, call: Call) -> u32 {
    let (receives, sends) = (seen & 0xff, seen >> 8 & 0xff);
    match call {
        Call::Look => seen,
        Call::Send if seen & ANSWERED != 0 || sends + 1 >= SENDS => LASTS,
        Call::Send => seen + SENT,
        Call::Receive if receives + 1 >= RECEIVES => LASTS,
        Call::Receive if sends > 0 => (seen | ANSWERED) + 1,
        Call::Receive => seen + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::Call::{self, Look, Receive, Send};
    use super::{LASTS, after};

    fn lasting_call(calls: &[Call]) -> Option<usize> {
        let mut seen = 0;
        calls.iter().position(|call| {
            seen = after(seen, *call);
            seen == LASTS
        })
    }

    #[test]
    fn a_second_request_lasts() {
        assert_eq!(lasting_call(&[Send, Receive, Send]), Some(2));
        assert_eq!(lasting_call(&[Receive, Send, Look, Receive, Send]), Some(4));
        assert_eq!(lasting_call(&[Send, Send, Receive, Send]), Some(3));
    }

    #[test]
    fn one_request_does_not() {
        assert_eq!(lasting_call(&[Look, Send, Look, Send, Receive, Receive, Receive, Look]), None);
        assert_eq!(lasting_call(&[Receive, Receive, Send, Send, Receive]), None);
    }

    #[test]
    fn a_stream_lasts_in_either_direction() {
        assert_eq!(lasting_call(&[Send; 8]), Some(3));
        assert_eq!(lasting_call(&[Receive; 40]), Some(31));
        assert_eq!(lasting_call(&[Look; 300]), None);
    }
}
