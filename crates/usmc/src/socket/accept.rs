//! accept(2): the new connection looks for the offer its client may have left.

use usmc_shm::sync::Ordering::Relaxed;

use super::{connect, unanswered};
use crate::handshake::{clc, syn_option, transition};
use crate::os::reason::Reason;
use crate::os::{config, log};
use crate::record::conn::{self, F_CHILDREN_TCP};
use crate::record::numbers;
use crate::record::options;
use crate::record::phase::Phase;
use crate::record::tuple::{Endpoint, Tuple};
use crate::watch::observer;

/// After a real accept: `fd` is the new connection of listener `listener`, `flags` are accept4's.
pub fn accepted(listener: u32, fd: i32, flags: i32, peer: &libc::sockaddr_storage, len: usize) {
    let Some(index) = connect::created(fd, flags) else { return };
    let from = conn::at(listener);
    let conn = conn::at(index);
    // Accepted sockets inherit their listener's buffer sizes.
    conn.snd_buf.store(from.snd_buf.load(Relaxed), Relaxed);
    conn.rcv_buf.store(from.rcv_buf.load(Relaxed), Relaxed);
    options::inherit(conn, from);
    if from.phase() == Phase::Listen {
        connect::still_listening(from);
    }
    syn_option::accepted(fd, conn, from);
    let listener = transition::stored_tuple(from);
    let Some(client) = Endpoint::from_sockaddr(peer, len) else {
        conn.give_up(Reason::NotRegistered);
        return;
    };
    let tuple = Tuple { netns: listener[0], client, server: Endpoint::server_of(&listener) };
    transition::begin_acceptor(index, &tuple);
    log::debug(format_args!("fd {fd}: accepted from port {}", client.port));
    if from.has(F_CHILDREN_TCP) {
        conn.give_up(Reason::KernelFeature);
    } else if from.phase() != Phase::Listen {
        let reason = Reason::from_code(from.reason.load(Relaxed) as u8);
        conn.give_up(reason.unwrap_or(Reason::NoDevice));
    } else if numbers::is_libcs(fd) {
        conn.give_up(Reason::Stdio);
    } else if config::get().is_peer(|| client.ip(), None) {
        clc::expect(conn);
        clc::deputy::expect(conn);
    }
    if clc::first::is_agreed(conn) {
        // Also where it stays TCP: the client has to be told.
        clc::expect(conn);
    }
    transition::begin_at_once(fd, index);
    unanswered::note(fd, index);
    observer::changed(fd, index);
}
