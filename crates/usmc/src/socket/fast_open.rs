//! TCP Fast Open (RFC 7413) for peers that are configured so (`USMC_FAST_OPEN`): an agent's Proposal goes with the SYN, which saves a round
//! trip. To the application connect(2) is what it was: it ends when the connection is made.
//!
//! TCP_FASTOPEN_CONNECT lets connect(2) succeed at once where the host has a cookie of the server's, and the SYN goes with the first bytes: the
//! Proposal. The connection is made then as ever, by a second connect(2). Without a cookie the first one makes the connection, and the SYN asks
//! for a cookie. (MSG_FASTOPEN would send the Proposal to any server.)

use usmc_shm::sync::Ordering::Relaxed;

use crate::device;
use crate::handshake::clc::deputy::{self, ForSyn, Opened};
use crate::handshake::syn_option;
use crate::os::sys::{self, Errno};
use crate::os::{config, log, sockopt};
use crate::record::conn::{self, Conn};
use crate::record::tuple::{self, Endpoint};
use crate::record::{kernel, numbers};

use super::option::TCP_FASTOPEN_CONNECT;

/// Connections of a listener that are accepted by their SYN and have not answered it yet, at most (tcp(7), TCP_FASTOPEN).
const PENDING: i32 = 256;

/// What a connect(2) takes along.
#[derive(Default)]
pub struct Opening(Option<ForSyn>);

/// Before connect(2).
#[inline]
pub fn connecting(fd: i32, index: u32, server: impl FnOnce() -> Option<Endpoint>) -> Opening {
    match config::get().has_fast_open() {
        true => Opening(prepare(fd, conn::at(index), server())),
        false => Opening(None),
    }
}

#[cold]
fn prepare(fd: i32, conn: &Conn, server: Option<Endpoint>) -> Option<ForSyn> {
    let for_syn = server.filter(|at| is_meant(fd, conn, *at)).and_then(ForSyn::ask);
    let is_on = conn.clc.opens_fast.load(Relaxed) != 0;
    if for_syn.is_some() != is_on {
        // An attempt before this one may have left it on.
        let value = i32::from(for_syn.is_some());
        let set = sys::setsockopt(fd, libc::IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &value);
        conn.clc.opens_fast.store(u32::from(set.is_ok() && value != 0), Relaxed);
        if let Err(errno) = set {
            log::debug(format_args!("fd {fd}: no Fast Open, errno {errno}"));
        }
    }
    for_syn
}

/// Whether the first bytes of this connection may be a Proposal of an agent's.
fn is_meant(fd: i32, conn: &Conn, server: Endpoint) -> bool {
    config::get().opens_fast(|| server.ip(), Some(server.port))
        && syn_option::is_fit(conn, server)
        && !numbers::is_libcs(fd)
        // The agent goes by the routes.
        && tuple::local(fd).is_ok_and(|at| at == Endpoint { addr: at.addr, port: 0 } && at.ip().is_unspecified())
        && !device::all().any(|(_, device)| device.board().is_listening(None, server))
}

/// What has become of the connect(2).
pub enum Opens {
    /// It has done what it does. The record begins so.
    Done(Opened),
    /// The SYN is out with the Proposal: a second connect(2) waits for the connection, or says that it is being made.
    Again(Opened),
    /// The connection cannot be made.
    Fail(Errno),
}

impl Opening {
    /// After connect(2), which has succeeded or not.
    #[inline]
    pub fn connected(self, fd: i32, is_done: bool) -> Opens {
        match self.0 {
            None => Opens::Done(Opened::default()),
            Some(for_syn) => go(&for_syn, fd, is_done),
        }
    }
}

#[cold]
fn go(for_syn: &ForSyn, fd: i32, is_done: bool) -> Opens {
    if !is_done || !kernel::is_put_off(fd) {
        return Opens::Done(for_syn.opened(false));
    }
    match for_syn.send(fd) {
        Ok(went) => Opens::Again(for_syn.opened(went)),
        Err(errno) => {
            deputy::not_opened(for_syn.opened(false));
            Opens::Fail(errno)
        }
    }
}

/// Before listen(2): the listener takes SYNs that bring a Proposal.
#[inline]
pub fn listening(fd: i32, at: Endpoint) {
    if config::get().has_fast_open() {
        accept_fast(fd, at);
    }
}

#[cold]
fn accept_fast(fd: i32, at: Endpoint) {
    let is_meant = config::get().allows(|| at.ip(), at.port);
    // The application may have asked for it itself.
    let is_asked = sockopt::int(fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 0) != 0;
    if is_meant && !is_asked {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, &PENDING);
    }
}
