//! accept(2): the new connection looks for the offer its client may have left.

use core::sync::atomic::Ordering::Relaxed;

use super::connect;
use crate::conn::{self, LISTEN};
use crate::reason::Reason;
use crate::tuple::{self, Endpoint, Tuple};
use crate::{observer, transition};

/// After a real accept: `fd` is the new connection of listener `listener`, `flags` are accept4's.
pub fn accepted(listener: u32, fd: i32, flags: i32, peer: &libc::sockaddr_storage, len: usize) {
    let Some(index) = connect::created(fd, flags) else { return };
    let from = conn::at(listener);
    let conn = conn::at(index);
    // Accepted sockets inherit their listener's buffer sizes.
    conn.snd_buf.store(from.snd_buf.load(Relaxed), Relaxed);
    conn.rcv_buf.store(from.rcv_buf.load(Relaxed), Relaxed);
    if from.phase() != LISTEN {
        let reason = Reason::from_code(from.reason.load(Relaxed) as u8);
        conn.give_up(reason.unwrap_or(Reason::NoDevice));
        return observer::changed(fd, index);
    }
    let listener = transition::stored_tuple(from);
    let server = Endpoint::server_of(&listener);
    let server = if server.is_wildcard() { tuple::local(fd) } else { Ok(server) };
    let (Some(client), Ok(server)) = (Endpoint::from_sockaddr(peer, len), server) else {
        conn.give_up(Reason::NotRegistered);
        return;
    };
    let tuple = Tuple { netns: listener[0], client, server };
    transition::look(index, &tuple);
    observer::changed(fd, index);
}
