//! Handshakes at the very start of the stream, client first, as RFC 7609 (section 4.2) and the kernel's SMC have them:
//! where SYN and SYN-ACK have said SMC ([`crate::handshake::syn_option`]). The kind of the other end is not known: a uSMC of this
//! device, one of another, or the kernel's.
//!
//! The client's first bytes are a Proposal, or a Decline where it cannot have what it would propose. It waits for nothing:
//! the application's bytes follow, as they do after a Decline. The server's first bytes are the answer, so that its
//! application may not send before the Proposal has come: an Accept for a client of this device, whose Proposal names its
//! place there, and a Decline for all others, as the kernel's SMC waits in connect(2).
//!
//! A client's Proposal may have gone with the SYN ([`is_proposed`]): an agent's, which gets the connection once it is made. Where the agent is
//! gone by then, the client declines whatever the server answers ([`refuse_answer`]).
//!
//! A client whose SYN-ACK lost the option on the way proposes nothing. It is sent nothing, either, and the application
//! waits for [`HOLD_MS`] at most.

use smc_proto::decline::DeclineCode;
use smc_proto::ids::PeerId;
use smc_proto::wire::clc::{Decline, Message as Clc};
use usmc_shm::sync::Ordering::Relaxed;

use super::stream::{self, Found};
use super::{Taken, acceptor, board, client, declined, deputy, give_up, id_of};
use crate::device;
use crate::family::holders;
use crate::handshake::syn_option::{self, Outcome};
use crate::handshake::transition;
use crate::host::Stage;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{clock, log, process};
use crate::record::change_over::Call;
use crate::record::clc_state::Step;
use crate::record::conn::{Conn, F_ARMED, F_CLC, F_CLIENT, F_SHARED};
use crate::record::kernel;
use crate::record::phase::Phase;
use crate::record::tuple::{Endpoint, Tuple};

/// How long a server's application waits for the client's first message before it sends, in milliseconds. A client sends
/// it in the same moment as the handshake's last ACK; this is for its first retransmission.
pub const HOLD_MS: u32 = 2000;

/// Whether both ends have said SMC, as far as they can know.
pub fn is_agreed(conn: &Conn) -> bool {
    syn_option::outcome(conn) == Outcome::Speaks || is_proposed(conn)
}

/// Whether a Proposal went with the SYN of this connecting end.
pub fn is_proposed(conn: &Conn) -> bool {
    conn.clc.in_syn.load(Relaxed) != 0
}

/// Whether the next that the peer sends is its message, or it sends none.
pub fn is_awaited(conn: &Conn) -> bool {
    match conn.clc.step() {
        Step::Expecting | Step::Handing | Step::Refusing => true,
        Step::Proposed => is_agreed(conn),
        _ => false,
    }
}

/// What the peer's stream begins with, and how long that is. What the application has read from was none.
pub fn look(fd: i32) -> (Found, usize) {
    match kernel::tcp_taken(fd) {
        Some(0) | None => stream::look(fd),
        Some(_) => (Found::Other, 0),
    }
}

/// Says that there will be no SMC, where that can still be the first that is said. `v1`: the peer's message had no part of
/// version 2. Nobody sends meanwhile.
pub fn refuse(fd: i32, conn: &Conn, code: DeclineCode, v1: bool) {
    // No handler's bytes between the question and the message.
    let mask = sys::block_signals();
    if kernel::tcp_sent(fd, conn.has(F_CLIENT)) == Some(0) {
        super::send(fd, conn, &Clc::Decline(Decline::new(v1, PeerId::default(), code)));
    }
    sys::set_signals(mask);
    conn.clc.declined.store(code.0, Relaxed);
}

/// The connecting end, before anything was sent. The caller holds the step's lock.
pub fn begin(fd: i32, conn: &Conn) {
    let server = Endpoint::server_of(&transition::stored_tuple(conn));
    let mut speaks = syn_option::peer_speaks_smc(fd, conn);
    let is_made = speaks.is_some() || kernel::is_established(fd);
    if is_made && speaks.is_none() {
        // It may have been made in between.
        speaks = syn_option::peer_speaks_smc(fd, conn);
    }
    if is_proposed(conn) {
        if is_made {
            begin_proposed(fd, conn, server, speaks);
        }
        return;
    }
    let has_said = speaks == Some(true);
    let is_meant = has_said || super::is_declared(fd, server);
    if is_meant && deputy::takes_client(fd, conn, server) {
        return;
    }
    if has_said {
        propose(fd, conn);
    } else if is_meant {
        client::propose_unasked(fd, conn);
    } else if is_made {
        begin_silently(conn, server);
    }
}

/// The connection is made, and its Proposal is with the server. The caller holds the step's lock.
fn begin_proposed(fd: i32, conn: &Conn, server: Endpoint, speaks: Option<bool>) {
    if speaks == Some(false) {
        // Its application may have read the Proposal as data.
        log::warn(format_args!(
            "fd {fd}: reset: port {} got a Proposal in the SYN, and says no SMC: take it out of fast_open",
            server.port
        ));
        sys::disconnect(fd);
        return give_up(conn, Reason::PeerSilent);
    }
    if !deputy::takes_client(fd, conn, server) {
        super::enter(conn, Step::Refusing);
    }
}

/// Declines the server's answer to a Proposal that nobody goes on with. Whether it is there. The caller holds the step's lock.
pub fn refuse_answer(fd: i32, conn: &Conn) -> bool {
    match take(fd, conn, |_| true) {
        Taken::Wait => return false,
        Taken::Message(Clc::Decline(decline)) => declined(conn, decline.code),
        Taken::Message(_) => {
            let mask = sys::block_signals();
            let code = DeclineCode::NOSMCRDEV;
            super::send(fd, conn, &Clc::Decline(Decline::new(false, PeerId::default(), code)));
            sys::set_signals(mask);
            declined(conn, code);
        }
        Taken::Other => give_up(conn, Reason::PeerGone),
    }
    true
}

/// The peer says no SMC: the device alone decides.
fn begin_silently(conn: &Conn, server: Endpoint) {
    if device::all().any(|(_, device)| device.board().is_listening(None, server)) {
        super::forget(conn);
        conn.reason.store(Reason::Short as u32, Relaxed);
    } else {
        give_up(conn, syn_option::reason_of(conn, Reason::NotRegistered));
    }
}

fn propose(fd: i32, conn: &Conn) {
    if kernel::tcp_sent(fd, true) != Some(0) || kernel::tcp_received(fd) != Some(0) {
        // Another thread was faster, or the server does not wait any more.
        log::debug(format_args!("fd {fd}: too late for a proposal"));
        return give_up(conn, Reason::PeerGone);
    }
    let Ok(tuple) = Tuple::live(fd, true) else { return };
    let Some(_rx) = conn.rx_lock.try_enter() else { return };
    transition::store_tuple(conn, &tuple);
    let proposed = match transition::is_free(fd, conn) {
        Ok(true) if conn.stop_kernel_calls() => {
            let proposed = client::send_proposal(fd, conn, &tuple);
            conn.go_on_with_kernel_calls();
            proposed
        }
        Ok(_) => Err(Reason::Forked),
        Err(reason) => Err(reason),
    };
    if let Err(reason) = proposed {
        refuse(fd, conn, DeclineCode::NOSMCDEV, true);
        give_up(conn, reason);
    }
}

/// The connecting end's, after its Proposal. The caller holds the step's lock.
pub fn read_answer(fd: i32, conn: &Conn) {
    let (board, id) = (board(conn), id_of(conn));
    match take(fd, conn, |_| true) {
        Taken::Wait => return,
        Taken::Message(message)
            if !matches!(message, Clc::Decline(_)) && board.stage(id) == Stage::Answered =>
        {
            return client::answered(fd, conn, message);
        }
        Taken::Message(Clc::Decline(decline)) => declined(conn, decline.code),
        // Not from this device: it accepts what was not offered to it.
        Taken::Message(_) => give_up(conn, Reason::NoCommonDevice),
        Taken::Other => give_up(conn, Reason::PeerGone),
    }
    board.free(id);
}

/// Takes the peer's first message out of the stream, if it is one that is meant.
pub(super) fn take(fd: i32, conn: &Conn, is_meant: impl Fn(&Clc) -> bool) -> Taken {
    match conn.rx_lock.try_enter() {
        Some(_rx) => super::take_found(fd, conn, look(fd), is_agreed(conn), is_meant),
        None => Taken::Wait,
    }
}

/// As [`super::wind_up`], for an end that owes the peer a message, or waits for its first one. The caller holds the step's
/// lock.
pub fn wind_up(fd: i32, conn: &Conn) -> bool {
    let id = id_of(conn);
    match conn.clc.step() {
        Step::Declared if is_proposed(conn) => {
            super::enter(conn, Step::Refusing);
            return false;
        }
        Step::Refusing => return refuse_answer(fd, conn),
        Step::Declared => match syn_option::peer_speaks_smc(fd, conn) {
            Some(true) => refuse(fd, conn, DeclineCode::NOSMCDEV, true),
            None if kernel::is_connecting(fd) => return false,
            _ => {}
        },
        Step::Asking => acceptor::decline(fd, conn, DeclineCode::NOSMCDDEV),
        _ => {
            if matches!(take(fd, conn, |_| true), Taken::Wait) {
                return false;
            }
            // A server of this device sees that nobody goes on.
            board(conn).free(id);
        }
    }
    super::forget(conn);
    true
}

/// Whether a message of ours has to be the first that the peer gets, and can be: it is not known yet which.
fn is_owed(fd: i32, conn: &Conn) -> bool {
    match (conn.clc.step(), is_agreed(conn)) {
        (Step::Declared | Step::Asking, true) => true,
        (Step::Handing | Step::Refusing, _) => true,
        // The kernel would send as soon as the connection is made, which it may have been since the last look.
        (Step::Declared, false) => {
            conn.has(F_ARMED)
                && (kernel::is_connecting(fd) || syn_option::settle(fd, conn) && is_agreed(conn))
        }
        (Step::Expecting, is_agreed) if is_agreed || deputy::is_there(conn) => {
            clock::now_ms().wrapping_sub(conn.clc.since.load(Relaxed)) < HOLD_MS
        }
        _ => false,
    }
}

/// One step towards the message that is owed, by the call that needs it now. Whether it is not owed any more.
fn pay(fd: i32, index: u32, conn: &Conn) -> bool {
    if conn.phase() == Phase::Early {
        transition::progress(fd, index, Call::Look);
        if conn.clc.step() == Step::Asking
            && let Some(_step) = conn.step_lock.try_enter()
            && conn.clc.step() == Step::Asking
        {
            // Not while another process has the connection.
            acceptor::decline(fd, conn, DeclineCode::NOSMCDDEV);
        }
    } else {
        super::wind_up(fd, conn);
    }
    !is_owed(fd, conn)
}

/// Before the application sends by TCP: what we have to say comes first. A client's Proposal is waited for, as far as the
/// socket waits for anything.
///
/// # Errors
/// EAGAIN.
#[cold]
pub fn before_send(fd: i32, index: u32, conn: &Conn) -> Result<(), Errno> {
    while is_owed(fd, conn) && !pay(fd, index, conn) {
        if conn.step_lock.is_mine() || kernel::is_over(fd) {
            break;
        }
        if holders::is_nonblocking(fd, conn) {
            conn.tx_blocks.fetch_add(1, Relaxed);
            return Err(libc::EAGAIN);
        }
        let awaits_room = conn.has(F_CLIENT) && conn.clc.step() != Step::Refusing;
        let event = if awaits_room { libc::POLLOUT } else { libc::POLLIN };
        // What is there of a message does not let us sleep.
        if sys::poll1(fd, event, 1) != 0 {
            sys::sched_yield();
        }
    }
    if is_agreed(conn) && conn.clc.step() == Step::Expecting {
        log::debug(format_args!("fd {fd}: no proposal in time"));
    }
    Ok(())
}

/// Before the application ends its direction, or all: the same, but for what is there already.
#[cold]
pub fn before_end(fd: i32, index: u32, conn: &Conn) {
    // Other holders of the connection go on with it.
    if is_owed(fd, conn) && !conn.has(F_SHARED) && conn.clc.pid.load(Relaxed) == process::pid() {
        pay(fd, index, conn);
    }
}

/// Whether a socket that was reported as writable takes nothing from the application yet.
pub fn hides_output(fd: i32, conn: &Conn) -> bool {
    conn.has(F_CLC) && is_owed(fd, conn)
}
