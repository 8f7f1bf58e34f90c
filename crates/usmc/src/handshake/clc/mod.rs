//! In-band SMC-D: Proposal, Accept and Confirm in the connection's own TCP stream.
//!
//! For peers that the offer table alone does not prove: other users, other network namespaces, other containers that
//! share the ISM directory. Each side's token goes through the TCP stream and nowhere else, so that an end that knows both
//! holds the connection; memory is handed over against them ([`crate::host::Delivery`]).
//!
//! ```text
//! client                          device                     acceptor
//! asks ─────────────────────────▶ Open
//!                                 Held ◀──────────────────── holds this very connection (accept told it)
//! Proposal, in the stream ──────▶ Proposed
//!                                 Answered ◀──────────────── Accept (its token) or Decline, in the stream
//! memory, by mailbox
//! Confirm (its token) ──────────▶ Confirmed
//!                                 free ◀──────────────────── maps the memory, attaches: as with an offer
//! ```
//!
//! Nobody waits for any of it: the application's bytes go by TCP meanwhile, before, between and behind the messages. So
//! each message's place in the stream is announced, and the receiver's calls end before it, take the message out and
//! go on behind it ([`stream`]). A message is sent only after a step on the device that its receiver would have seen
//! before changing its mind, and an end that changes its mind takes that step away first. What stands at the announced place
//! and is no message is the application's.
//!
//! Where both ends have said SMC when the connection was made, the messages stand where RFC 7609 has them ([`first`]).
//!
//! [`F_CLC`]: a message of the peer's may come; all receives are ours, whatever the phase, until it is taken out or
//! cannot come any more.

mod acceptor;
mod client;
pub mod deputy;
pub mod first;
mod machines;
pub mod stream;

use smc_proto::decline::DeclineCode;
use smc_proto::wire::clc::{MAX_LEN, Message as Clc};
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};

use crate::device::{self, segment};
use crate::family::{holders, mark};
use crate::handshake::transition::{self, offer_id as id_of};
use crate::host::board::Board;
use crate::host::ears;
use crate::host::{self, Delivery, DmbRef, Mail, Message, OfferId, Stage};
use crate::os::process::Held;
use crate::os::reason::Reason;
use crate::os::{clock, config, foreign_fd, log, process, sockopt, sys};
use crate::record::clc_state::{State, Step};
use crate::record::conn::{self, Conn, F_CLC, F_CLIENT, F_COPIED, F_HANDSHAKE};
use crate::record::kernel;
use crate::record::phase::Phase;
use crate::record::tuple::{self, Endpoint};

pub use acceptor::{expect, hold_if_asked};
pub use client::{ask, declare};

/// The board on which the connection's handshake is.
fn board(conn: &Conn) -> Board<'static> {
    device::board_of(id_of(conn))
}

/// The handshake is at this step now.
fn enter(conn: &Conn, step: Step) {
    if step != Step::None {
        conn.set_flag(F_HANDSHAKE, true);
    } else if !conn.has(F_HANDSHAKE) {
        return;
    }
    conn.clc.set(step);
}

/// Whether a handshake of this process is under way.
#[inline]
pub fn is_on(conn: &Conn) -> bool {
    conn.has(F_HANDSHAKE) && conn.clc.is_on()
}

/// There is no handshake, or not any more.
pub fn forget(conn: &Conn) {
    deputy::let_go(conn);
    conn.clc.in_syn.store(0, Relaxed);
    enter(conn, Step::None);
    conn.set_flag(F_CLC, false);
}

/// Before the peer's messages may come: whoever gets hold of the socket unseen would read them. False where somebody has.
fn mark(fd: i32, conn: &Conn) -> bool {
    let is_free = mark::enter_ring(fd);
    conn.clc.is_marked.store(is_free.into(), Relaxed);
    is_free
}

/// Small sends do not wait until a message is acknowledged that stands before them.
fn hurry(fd: i32, conn: &Conn) {
    if sockopt::int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1) == 0 {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32);
        conn.clc.hurries.store(1, Relaxed);
    }
}

/// The kernel's socket is as the application knows it, once no message can come any more. In a ring it is not
/// ([`transition::progress`]).
pub fn restore(fd: i32, conn: &Conn) {
    let State { is_marked, hurries, .. } = &conn.clc;
    let is_changed = is_marked.load(Relaxed) != 0 || hurries.load(Relaxed) != 0;
    let is_plain = matches!(conn.phase(), Phase::Early | Phase::Plain);
    if !is_changed || !is_plain || is_on(conn) || conn.has(F_CLC) {
        return;
    }
    if is_marked.swap(0, Relaxed) != 0 {
        mark::leave_ring(fd);
    }
    if hurries.swap(0, Relaxed) != 0 {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &0i32);
    }
}

/// Whether a handshake has gone so far that the connection is there.
pub fn has_begun(conn: &Conn) -> bool {
    !matches!(conn.clc.step(), Step::None | Step::Declared)
}

/// Whether the listener there was declared to speak SMC, and is not to be had by an offer.
pub fn is_declared(fd: i32, server: Endpoint) -> bool {
    config::get().is_peer(|| server.ip(), Some(server.port))
        && !(config::get().uses_loopback
            && host::current().board().is_listening(Some(tuple::netns(fd)), server))
}

/// One step, where one is due. The caller holds the step's lock; the phase is [`Phase::Early`].
pub fn step(fd: i32, conn: &Conn) {
    match conn.clc.step() {
        Step::None => {}
        Step::Declared => first::begin(fd, conn),
        Step::Asked => client::await_holder(fd, conn),
        Step::Proposed if first::is_agreed(conn) => first::read_answer(fd, conn),
        Step::Proposed => read(fd, conn, client::answered),
        Step::Accepted => client::confirm(fd, conn),
        Step::Expecting => acceptor::read_first(fd, conn),
        Step::Held => read(fd, conn, acceptor::judge),
        Step::Asking => acceptor::answer(fd, conn),
        Step::Answered => read(fd, conn, acceptor::confirmed),
        Step::Confirmed => acceptor::attach(fd, conn),
        Step::Leftover => drop(take_leftover(fd, conn)),
        Step::Refusing => drop(first::refuse_answer(fd, conn)),
        Step::Handing => {}
    }
}

/// Which message of the peer's comes next, the stage that the device is at until then, and that at which it may be in the stream.
fn awaited(conn: &Conn) -> Option<(Message, Stage, Stage)> {
    match conn.clc.step() {
        Step::Held => Some((Message::Proposal, Stage::Held, Stage::Proposed)),
        Step::Proposed => Some((Message::Answer, Stage::Proposed, Stage::Answered)),
        Step::Answered => Some((Message::Confirm, Stage::Answered, Stage::Confirmed)),
        _ => None,
    }
}

/// Takes the awaited message out of the stream, once it is there, and goes on with it.
fn read(fd: i32, conn: &Conn, go_on: fn(i32, &Conn, Clc)) {
    let Some((message, until, _)) = awaited(conn) else { return };
    let (board, id) = (board(conn), id_of(conn));
    if board.stage(id) == until {
        // The client's last word is waited for as long as the connection lasts.
        if message != Message::Confirm && is_spent(fd, conn) && step_back(conn) {
            give_up(conn, if conn.has(F_CLIENT) { Reason::NotHeld } else { Reason::NoOffer });
        }
    } else if in_stream(conn).is_none() {
        give_up(conn, Reason::PeerGone);
    } else {
        match take(fd, conn) {
            Taken::Wait => {}
            Taken::Message(message) => go_on(fd, conn, message),
            Taken::Other => {
                if message == Message::Answer {
                    leave_answered(id)
                } else {
                    board.free(id)
                }
                give_up(conn, Reason::PeerBroken);
            }
        }
    }
}

/// The handshake has come to nothing; no message of the peer's is in the stream.
fn give_up(conn: &Conn, reason: Reason) {
    forget(conn);
    conn.give_up_early(reason);
}

fn declined(conn: &Conn, code: DeclineCode) {
    conn.clc.declined.store(code.0, Relaxed);
    log::warn(format_args!("CLC handshake declined: {code}"));
    give_up(conn, Reason::Declined);
}

/// The connection is not to leave TCP any more: changes our mind where that is still possible, and otherwise takes the
/// peer's message out of the stream once it is read so far. Whether no message is to come.
pub fn wind_up(fd: i32, conn: &Conn) -> bool {
    if !conn.has(F_CLC) {
        restore(fd, conn);
        return true;
    }
    let is_over = wind_up_messages(fd, conn);
    if is_over {
        restore(fd, conn);
    }
    is_over
}

fn wind_up_messages(fd: i32, conn: &Conn) -> bool {
    let Some(_step) = conn.step_lock.try_enter() else { return false };
    if conn.phase() == Phase::Early {
        return !conn.has(F_CLC);
    }
    let (board, id) = (board(conn), id_of(conn));
    match conn.clc.step() {
        Step::Expecting => return acceptor::stop_expecting(fd, conn),
        Step::Leftover => return take_leftover(fd, conn),
        Step::Declared | Step::Refusing => return first::wind_up(fd, conn),
        Step::Handing => {
            deputy::put_off(conn);
            return false;
        }
        Step::Asking | Step::Proposed if first::is_agreed(conn) => return first::wind_up(fd, conn),
        _ => {}
    }
    if !step_back(conn) && board.stage(id) != Stage::Over {
        if in_stream(conn).is_none() || matches!(take(fd, conn), Taken::Wait) {
            return false;
        }
        board.free(id);
    }
    forget(conn);
    true
}

/// Takes our last step on the device away. False where there is none, or where the peer has gone on: its message may be in the
/// stream.
fn step_back(conn: &Conn) -> bool {
    let Some((_, until, _)) = awaited(conn) else { return false };
    // Otherwise not over: the client may have yet to read the answer.
    let to = if until == Stage::Held { Stage::Over } else { Stage::Abandoned };
    board(conn).step(id_of(conn), until, to)
}

/// As [`wind_up`], for a user of the socket without this library: waits for a moment, as what is on its way arrives soon. A
/// peer that has said SMC is waited for longer.
pub fn settle(fd: i32, conn: &Conn) -> bool {
    let tries = if first::is_agreed(conn) { first::HOLD_MS } else { ARRIVAL_MS };
    for _ in 0..tries {
        if wind_up(fd, conn) {
            return true;
        }
        sys::poll1(fd, 0, 1);
    }
    // A declared peer may never propose, and a connection that is being made never be made.
    matches!(conn.clc.step(), Step::Expecting | Step::Declared)
}

/// The kernel is about to close the socket: a message that nobody has read would make a RST of its FIN, which also takes away what the
/// peer has not got yet.
pub fn before_close(fd: i32, conn: &Conn) {
    let Some(_step) = conn.step_lock.try_enter() else { return };
    if first::is_agreed(conn) || awaited(conn).is_none() || !is_ours_to_end(conn) {
        return;
    }
    if step_back(conn) {
        return forget(conn);
    }
    for _ in 0..ARRIVAL_MS {
        // Bytes of the application that it has not read make a RST over TCP as well.
        if in_stream(conn).is_none() || before_message(fd, conn) != Some(0) {
            return;
        }
        if !matches!(take(fd, conn), Taken::Wait) {
            call_off(conn);
            return forget(conn);
        }
        sys::poll1(fd, libc::POLLIN, 1);
    }
}

/// How long a message takes at most that its sender has announced, in milliseconds.
const ARRIVAL_MS: u32 = 50;

/// This process' part in the connection is over.
pub fn end(conn: &Conn) {
    if is_ours_to_end(conn) {
        call_off(conn);
    }
    forget(conn);
}

/// Whether no other process may still have to take a message out.
fn is_ours_to_end(conn: &Conn) -> bool {
    let others = conn.has(F_COPIED) && holders::holders(conn).is_some_and(|n| n.load(Relaxed) > 1);
    conn.clc.pid.load(Relaxed) == process::pid() && !others
}

/// Before a fork. Two processes cannot take one message out together, so the handshake ends where none is in the stream.
/// The caller holds all locks.
pub fn before_fork(conn: &Conn) {
    let ended = match conn.clc.step() {
        Step::None | Step::Declared | Step::Refusing | Step::Expecting | Step::Leftover => return,
        // The answer stands at the start, whatever the device says. Each process has the machine that waits for it.
        Step::Proposed if first::is_agreed(conn) => return,
        Step::Handing => return deputy::put_off(conn),
        Step::Held | Step::Proposed | Step::Answered => step_back(conn),
        Step::Asked | Step::Accepted | Step::Asking | Step::Confirmed => {
            call_off(conn);
            true
        }
    };
    match in_stream(conn).filter(|_| !ended) {
        Some(at) => {
            conn.clc.leftover.store(at, Relaxed);
            enter(conn, Step::Leftover);
        }
        None => give_up(conn, Reason::Forked),
    }
}

/// In a forked child, before it uses the connection.
pub fn after_fork(conn: &Conn) {
    deputy::after_fork(conn);
}

/// Takes out what was in the stream at a fork, once it is read so far. Whether that is done, by whichever process; what
/// the device knows of it ends with the one that was there before.
fn take_leftover(fd: i32, conn: &Conn) -> bool {
    let Some(_rx) = conn.rx_lock.try_enter() else { return false };
    let at = conn.clc.leftover.load(Relaxed);
    match kernel::tcp_taken(fd) {
        Some(taken) if taken > at => {}
        Some(taken) if taken == at => match stream::look(fd) {
            // The other process may be at it.
            (stream::Found::Message(_) | stream::Found::Cut, length)
                if holders::claims_message(conn) =>
            {
                stream::discard(fd, length);
            }
            (stream::Found::Message(_) | stream::Found::Cut, _) if !is_too_slow(conn) => {
                return false;
            }
            (stream::Found::Part, _) if !is_too_slow(conn) => {
                stream::let_rest_come(fd);
                return false;
            }
            (stream::Found::Nothing, _) => return false,
            _ => {}
        },
        _ => return false,
    }
    board(conn).free(id_of(conn));
    give_up(conn, Reason::Forked);
    true
}

/// Ends our part on the device.
fn call_off(conn: &Conn) {
    let (board, id) = (board(conn), id_of(conn));
    match conn.clc.step() {
        Step::None | Step::Declared | Step::Refusing | Step::Expecting | Step::Leftover => {}
        Step::Asked => client::stop_asking(conn, None),
        Step::Handing => deputy::let_go(conn),
        // A server that is not on this device would never free it.
        Step::Proposed if first::is_agreed(conn) => board.free(id),
        _ if step_back(conn) => {}
        Step::Proposed | Step::Accepted => leave_answered(id),
        // The client was faster, with its Proposal, its Confirm or its own end.
        Step::Held | Step::Asking | Step::Answered | Step::Confirmed => {
            if !matches!(board.stage(id), Stage::Open | Stage::Over) {
                board.free(id);
            }
        }
    }
}

/// The client's part ends behind the answer. The acceptor may have abandoned the place, and does not come back to it.
fn leave_answered(id: OfferId) {
    let board = device::board_of(id);
    board.clear_offer(id);
    if board.stage(id) == Stage::Abandoned {
        board.free(id);
    }
}

#[expect(clippy::large_enum_variant, reason = "there is no allocator; a call holds one")]
enum Taken {
    /// This message, and it is out of the stream.
    Message(Clc),
    /// Not there yet, or not all of it.
    Wait,
    /// What stands there is the application's.
    Other,
}

/// How long a message may take to come, in milliseconds; after that it is taken for the application's bytes. Its sender
/// has sent it in one call, but a network that loses segments may keep the rest back for some retransmissions.
const PARTIAL: u32 = 10_000;

/// Takes the awaited message out of the stream, if the application has read everything before it.
fn take(fd: i32, conn: &Conn) -> Taken {
    let Some(_rx) = conn.rx_lock.try_enter() else { return Taken::Wait };
    if before_message(fd, conn) != Some(0) {
        return Taken::Wait;
    }
    let taken = take_found(fd, conn, stream::look(fd), true, |_| true);
    if matches!(taken, Taken::Other) {
        log::warn(format_args!("fd {fd}: no CLC message where one was announced; TCP"));
    }
    taken
}

/// Takes a message out of the stream that was found there, if it is one that is meant. `is_promised`: the peer has said that one
/// stands there, so that not even a part of it is for the application.
fn take_found(
    fd: i32,
    conn: &Conn,
    (found, length): (stream::Found, usize),
    is_promised: bool,
    is_meant: impl Fn(&Clc) -> bool,
) -> Taken {
    match found {
        stream::Found::Message(message) if is_meant(&message) => {
            stream::discard(fd, length);
            Taken::Message(message)
        }
        stream::Found::Nothing => Taken::Wait,
        stream::Found::Part if !is_too_slow(conn) => {
            stream::let_rest_come(fd);
            Taken::Wait
        }
        stream::Found::Cut if is_promised => {
            stream::discard(fd, length);
            Taken::Other
        }
        _ => Taken::Other,
    }
}

/// How long a peer that has taken its step is waited for at least, in milliseconds: it may have thousands of bytes to
/// read before our message.
const PATIENCE: u32 = 2000;

/// Whether the peer has had the calls and the time for its next step.
fn is_spent(fd: i32, conn: &Conn) -> bool {
    transition::is_spent(fd, conn)
        && clock::now_ms().wrapping_sub(conn.clc.since.load(Relaxed)) > PATIENCE
}

/// Whether the rest of a message has been waited for long enough.
fn is_too_slow(conn: &Conn) -> bool {
    waits_ms(conn) > PARTIAL
}

/// How long it is since a message of this step was first seen that could not be taken, in milliseconds.
fn waits_ms(conn: &Conn) -> u32 {
    let now = clock::now_ms() | 1;
    let since = match conn.clc.partial.load(Relaxed) {
        0 => {
            conn.clc.partial.store(now, Relaxed);
            now
        }
        since => since,
    };
    now.wrapping_sub(since)
}

/// Bytes of the application that come before the awaited message; `None` while none is announced.
fn before_message(fd: i32, conn: &Conn) -> Option<u64> {
    if conn.clc.step() == Step::Leftover {
        // Behind it where the other process was faster.
        return conn.clc.leftover.load(Relaxed).checked_sub(kernel::tcp_taken(fd)?);
    }
    Some(in_stream(conn)?.saturating_sub(kernel::tcp_taken(fd)?))
}

/// Where the awaited message stands in the stream, if it may be there.
fn in_stream(conn: &Conn) -> Option<u64> {
    let (message, _, stage) = awaited(conn)?;
    let (board, id) = (board(conn), id_of(conn));
    let now = board.stage(id);
    // Its sender may have gone since.
    if now != stage && (now != Stage::Abandoned || stage == Stage::Confirmed) {
        return None;
    }
    board.announced(id, message)
}

/// How many bytes may be read before a message of the peer's stands in the stream.
pub fn readable_before(fd: i32, conn: &Conn) -> u64 {
    if first::is_awaited(conn) {
        // The first bytes are a message, or there is none.
        return match first::look(fd).0 {
            stream::Found::Message(_) | stream::Found::Part => 0,
            stream::Found::Cut if first::is_agreed(conn) => 0,
            _ => u64::MAX,
        };
    }
    before_message(fd, conn).unwrap_or(u64::MAX)
}

/// Whether it is not known yet if the stream begins with a message.
pub fn awaits_first(fd: i32, conn: &Conn) -> bool {
    first::is_awaited(conn) && matches!(first::look(fd).0, stream::Found::Nothing)
}

/// Whether a socket that was reported as readable is so for the sake of a message alone, or was.
pub fn hides_input(fd: i32, conn: &Conn) -> bool {
    if conn.phase() != Phase::Early {
        wind_up(fd, conn);
    }
    if readable_before(fd, conn) == 0 && conn.has(F_CLC) {
        // The end is not hidden.
        return !kernel::has_fin(fd);
    }
    sys::poll1(fd, libc::POLLIN, 0) & libc::POLLIN == 0
}

/// FIONREAD without messages.
pub fn unread(fd: i32, conn: &Conn) -> Option<usize> {
    if conn.phase() != Phase::Early {
        wind_up(fd, conn);
    }
    let inq = sys::ioctl_int(fd, libc::FIONREAD).ok()? as usize;
    let before = readable_before(fd, conn);
    Some(inq.min(usize::try_from(before).unwrap_or(inq)))
}

/// How long the rest of a message may take, where the kernel is short of memory for it.
const REST_NS: u64 = 1_000_000_000;

/// Sends a message at this place of the stream; nobody sends meanwhile. After a part of one the stream is of no use any
/// more: the connection is reset. Where nothing could be sent, what will stand in its place is the application's.
fn send(fd: i32, conn: &Conn, message: &Clc) {
    hurry(fd, conn);
    let mut buffer = [0; MAX_LEN];
    let Ok(bytes) = message.emit(&mut buffer) else { return };
    let start = clock::now_ns();
    let mut sent = 0;
    while sent < bytes.len() {
        match sys::send(fd, &bytes[sent..], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
            Ok(n) => sent += n,
            Err(libc::EAGAIN) if sent > 0 && clock::now_ns() - start < REST_NS => {
                sys::poll1(fd, libc::POLLOUT, 10);
            }
            Err(errno) => {
                log::warn(format_args!(
                    "fd {fd}: a CLC message could not be sent, errno {errno}, after {sent} bytes"
                ));
                if sent > 0 {
                    sys::disconnect(fd);
                }
                return;
            }
        }
    }
}

/// Whether the kernel takes a message at once. A stream's buffer is never empty, and mostly full but for a little: a message needs
/// less than poll(2) wants to be free.
fn has_room(fd: i32) -> bool {
    // The kernel's count is of its own structures, too.
    const NEEDED: u32 = 16 << 10;
    if sys::poll1(fd, libc::POLLOUT, 0) == libc::POLLOUT {
        return true;
    }
    // Where little may be unsent (TCP_NOTSENT_LOWAT), poll(2) knows better.
    let is_limited = sockopt::int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 1) != 0;
    let most = sockopt::meminfo(fd).filter(|_| !is_limited);
    most.is_some_and(|m| m.queued < m.send_buffer.saturating_sub(NEEDED))
}

/// Stops the calls of the kernel to send a message, if there is room for one. Nobody receives meanwhile.
fn stop_calls(fd: i32, conn: &Conn) -> Option<Held<'_>> {
    let rx = if has_room(fd) { conn.rx_lock.try_enter()? } else { return None };
    if !conn.stop_kernel_calls() {
        return None;
    }
    // The sender may have filled it.
    if !has_room(fd) {
        conn.go_on_with_kernel_calls();
        return None;
    }
    Some(rx)
}

/// Announces a message, takes the step that lets it into the stream, and sends it. The caller has stopped the calls of
/// the kernel. False where the peer has changed its mind: nothing was sent.
fn say(fd: i32, conn: &Conn, message: Message, steps: [Stage; 2], what: &Clc) -> bool {
    // A handler's own bytes would come before the message, behind its announcement.
    let mask = sys::block_signals();
    let (board, id) = (board(conn), id_of(conn));
    let said = kernel::tcp_sent(fd, conn.has(F_CLIENT)).is_some_and(|at| {
        board.announce(id, message, at);
        board.step(id, steps[0], steps[1])
    });
    if said {
        send(fd, conn, what);
    }
    sys::set_signals(mask);
    said
}

/// Messages that one call takes out of the mailbox, which anybody can fill; the next call goes on.
const MAIL_AT_ONCE: usize = 8;

/// Maps what came by mail, and notes what was delivered for which connection.
pub fn take_mail() {
    for _ in 0..MAIL_AT_ONCE {
        let Some(mail) = host::current().receive() else { return };
        let mapped = match mail {
            Mail::Segment(fd) => segment::map_peer(fd),
            Mail::Ear(process, fd) => ears::learn(process, fd),
            Mail::Delivery(what) => match addressee(what.to) {
                Some(conn) => segment::map_delivered(what.fd).map(|file| note(conn, &what, file)),
                None => {
                    foreign_fd::discard(what.fd);
                    Err(Reason::PeerBroken)
                }
            },
        };
        if let Err(reason) = mapped {
            log::warn(format_args!("a pushed segment was refused: {}", reason.text()));
        }
    }
}

/// Bits of a token that name the record.
const INDEX_BITS: u32 = conn::CONNS.trailing_zeros();

/// A token for one connection of this process: random but for the record's index. None where it could be guessed: whoever guesses both
/// of a connection's can hand it memory.
fn new_token(index: u32) -> Option<u64> {
    Some(sys::secret()? << INDEX_BITS | u64::from(index))
}

/// The connection whose token this is.
fn addressee(token: u64) -> Option<&'static Conn> {
    let index = (token & (conn::CONNS as u64 - 1)) as u32;
    let conn = conn::get(index)?;
    let waits = matches!(conn.clc.step(), Step::Answered | Step::Confirmed);
    (waits && conn.clc.own.load(Relaxed) == token).then_some(conn)
}

fn note_memory(conn: &Conn, dmb: DmbRef) {
    let place = u64::from(dmb.slot) << 32 | u64::from(dmb.usage);
    conn.clc.given[1].store(dmb.segment, Relaxed);
    conn.clc.given[2].store(place, Relaxed);
}

fn noted_memory(conn: &Conn) -> DmbRef {
    let place = conn.clc.given[2].load(Relaxed);
    let segment = conn.clc.given[1].load(Relaxed);
    DmbRef { segment, slot: (place >> 32) as u32, usage: place as u32 }
}

fn note(conn: &Conn, what: &Delivery, file: u64) {
    note_memory(conn, what.dmb);
    conn.clc.given[3].store(file, Relaxed);
    conn.clc.is_own_user.store(what.is_own_user.into(), Relaxed);
    conn.clc.given[0].store(what.from, Release);
}

/// What was delivered with the token that the peer's Confirm has named, and which file it is in.
fn delivered(conn: &Conn) -> Option<(DmbRef, u64)> {
    let from = conn.clc.given[0].load(Acquire);
    if from == 0 || from != conn.clc.peer.load(Relaxed) {
        return None;
    }
    Some((noted_memory(conn), conn.clc.given[3].load(Relaxed)))
}
