//! Connections to other hosts, which an agent has (`usmc agent`, [`usmc_shm::agent`]). The application's descriptor becomes the
//! **deputy** of its TCP connection: one end of a TCP connection inside this host, whose other end the agent has. To the library the agent
//! is then a peer as any other, and whatever processes do with the descriptor, it is a socket of the kernel's.
//!
//! ```text
//! Declared, Expecting ──an agent is there──▶ Handing ──exchanged──▶ (none: in the ring)
//!         ▲                                     │                      │ the peer declines
//!         └───────────────it cannot be──────────┘                      └──exchanged──▶ (none: plain TCP)
//! ```
//!
//! The connection is in the agent's ring at once, and opens as fast as TCP's: what is written waits there until the peer has agreed. Where it
//! does not, the agent leaves the ring. The application gets its TCP connection back, and what nobody has read in the ring goes by that
//! first ([`is_left`]).
//!
//! Sockets are exchanged without locks of the connection, as epoll's registrations follow ([`crate::record::watched::EXCHANGES`]).

use core::ffi::CStr;

use smc_proto::wire::clc::Proposal;
use usmc_shm::agent::{Answer, LEN, PROPOSAL_MAX, Place, Request, Role};
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::span::TxSpan;
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::device::segment::InUse;
use crate::device::{self, segment};
use crate::family::{holders, liveness, mark};
use crate::handshake::transition;
use crate::host::{self, directory, ears};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::unix::Received;
use crate::os::{foreign_fd, log, owner, pair, sockopt, table, unix};
use crate::record::clc_state::Step;
use crate::record::conn::{self, Conn, F_CLC, F_CLIENT, F_DEPUTY, F_SHARED};
use crate::record::phase::{Event, Phase};
use crate::record::tuple::{Endpoint, Tuple};
use crate::record::{kernel, limit, numbers, options, watched};

/// [`crate::record::clc_state::State::control`]: no agent is to be asked.
///
/// ```text
///    0 ──an agent is reached──▶ descriptor + 1 ──let go──▶ NEVER
///    │                            ▲         │ in a forked child
///    │ none is there              └─reached─┴─▶ FORKED ──none is there──▶ NEVER
///    └──▶ NEVER
/// ```
const NEVER: u32 = u32::MAX;
/// An agent is there, which the parent process has reached, and this forked one has not.
const FORKED: u32 = u32::MAX - 1;
/// Where the agent of a whole host listens.
const SYSTEM: &CStr = c"/run/usmc/agent";
/// How long an agent may take for an answer, which waits for nobody: it may have been stopped.
const ANSWER_MS: i32 = 5000;
/// How long an agent may take to give an ear, without which a connection works as well.
const EAR_MS: i32 = 50;
/// How long a Proposal is kept where another process has the connection, too, in milliseconds: a fork server's parent closes its own at once.
const OTHERS_MS: u32 = 100;

/// Whether the socket behind the number is to be exchanged for a deputy.
#[inline]
pub fn is_due(conn: &Conn) -> bool {
    conn.clc.step() == Step::Handing
}

/// Whether the agent has left the ring: the application has to get its TCP connection back.
#[inline(always)]
pub fn is_left(conn: &Conn) -> bool {
    conn.has(F_DEPUTY) && has_left(conn)
}

fn has_left(conn: &Conn) -> bool {
    let left = |slot| conn.own(slot).flags(Acquire).is_left();
    conn.phase() == Phase::Ring && conn.slot().is_some_and(left)
}

/// The application gets its TCP connection back, if the agent has left it. Without locks of the connection.
#[inline(always)]
pub fn follow(fd: i32, index: u32) {
    if is_left(conn::at(index)) {
        watched::EXCHANGES.call((fd, index));
    }
}

/// The connecting end: whether an agent is going to have the connection, whose server is on no device of this process.
pub fn takes_client(fd: i32, conn: &Conn, server: Endpoint) -> bool {
    kernel::is_established(fd)
        && !device::all().any(|(_, device)| device.board().is_listening(None, server))
        && begin(conn)
}

/// The accepting end, whose client has proposed, and not on a device of this process. An agent is going to have the connection, or may have
/// it once another process has closed it: the Proposal stays in the stream.
pub fn takes_server(conn: &Conn, proposal: &Proposal) -> bool {
    let may_take = proposal.offers_smcr() && has_agent(conn);
    may_take && (begin(conn) || super::waits_ms(conn) < OTHERS_MS)
}

/// An end whose peer is known to speak SMC: looks for an agent. Whether one is there.
pub fn expect(conn: &Conn) -> bool {
    has_agent(conn)
}

/// Whether an agent is there for the connection.
pub fn is_there(conn: &Conn) -> bool {
    !matches!(conn.clc.control.load(Relaxed), 0 | NEVER)
}

/// Whether the socket behind the number may be exchanged while a call of the kernel's sleeps on it, which stays with the socket of before.
/// The handshake's messages there wake it only where the agent is not the first to read them.
pub fn may_come(conn: &Conn) -> bool {
    // No agent was asked for so far where the peer has said by its SYN alone that it speaks SMC. The flag is set before the agent is let go.
    let may_be_there = is_there(conn)
        || (conn.clc.control.load(Relaxed) == 0 && super::is_on(conn))
        || conn.has(F_DEPUTY);
    conn.phase() == Phase::Early && may_be_there
}

fn has_agent(conn: &Conn) -> bool {
    if !matches!(conn.clc.control.load(Relaxed), 0 | FORKED) {
        return is_there(conn);
    }
    let may_go = conn.returns() == 0 && !host::current().is_off();
    let control = if may_go { reach() } else { None };
    let word = control.map_or(NEVER, |control| table::keep_fd(control).cast_unsigned() + 1);
    conn.clc.control.store(word, Relaxed);
    control.is_some()
}

/// In a forked child. To the agent a connection to it is of the process that has made it.
pub fn after_fork(conn: &Conn) {
    if number(&conn.clc.control).is_some() {
        let_go(conn);
        conn.clc.control.store(FORKED, Relaxed);
    }
}

/// No other process has the connection, and an agent is there.
fn begin(conn: &Conn) -> bool {
    if (conn.has(F_SHARED) && !holders::is_sole_holder(conn)) || !has_agent(conn) {
        return false;
    }
    conn.clc.has_connected.store(conn.has(F_CLIENT).into(), Relaxed);
    conn.reason.store(Reason::Handshake as u32, Relaxed);
    super::enter(conn, Step::Handing);
    conn.set_flag(F_CLC, true);
    true
}

/// A connection to the agent of the ISM directory, or to the host's.
fn reach() -> Option<i32> {
    reach_at(directory::agent().c()).or_else(|| reach_at(SYSTEM))
}

fn reach_at(path: &CStr) -> Option<i32> {
    const KIND: i32 = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let address = unix::address(path)?;
    let control = sys::socket(libc::AF_UNIX, KIND, 0).ok()?;
    let (at, len) = (core::ptr::from_ref(&address).cast(), size_of_val(&address) as u32);
    // SAFETY: an address of so many bytes.
    let is_there = unsafe { sys::connect(control, at, len) }.is_ok();
    // In a directory of several users another one may have put it there.
    let mut agent = libc::ucred { pid: 0, uid: u32::MAX, gid: 0 };
    let known = sys::getsockopt(control, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut agent);
    if is_there && known.is_ok() && (agent.uid == 0 || owner::is_own(agent.uid)) {
        return Some(control);
    }
    sys::close(control);
    None
}

fn number(cell: &AtomicU32) -> Option<i32> {
    let word = cell.load(Relaxed);
    (word < FORKED).then(|| word.checked_sub(1)).flatten().map(u32::cast_signed)
}

/// How a connecting end was opened, where that was not by a SYN alone.
#[derive(Clone, Copy, Default)]
pub struct Opened {
    /// The connection to the agent that was asked for a Proposal.
    control: Option<i32>,
    /// Bytes of its Proposal that went with the SYN.
    in_syn: u32,
}

impl Opened {
    /// Whether a Proposal went with the SYN.
    pub fn is_proposed(self) -> bool {
        self.in_syn != 0
    }
}

/// A Proposal of an agent's for a server.
pub struct ForSyn {
    control: i32,
    room: [u8; LEN + PROPOSAL_MAX],
    len: usize,
}

impl ForSyn {
    /// Asks an agent. `None`: there is no agent, or it has nothing for that server.
    #[cold]
    pub fn ask(server: Endpoint) -> Option<ForSyn> {
        let control = reach()?;
        let mut room = [0; LEN + PROPOSAL_MAX];
        let len = match ask_into(control, Request::Propose(server.addr), &[], &mut room, ANSWER_MS)
        {
            Ok((Answer::Proposal(len), None, got)) if got == LEN + len as usize => len as usize,
            Ok((_, other, _)) => {
                other.inspect(|fd| foreign_fd::discard(*fd));
                0
            }
            Err(_) => 0,
        };
        if len == 0 {
            sys::close(control);
            return None;
        }
        Some(ForSyn { control: table::keep_fd(control), room, len })
    }

    /// Sends it by a connect(2) that was put off: the SYN goes. Whether the Proposal is in it.
    ///
    /// # Errors
    /// The SYN could not be sent.
    pub fn send(&self, fd: i32) -> Result<bool, Errno> {
        let proposal = &self.room[LEN..][..self.len];
        match sys::send(fd, proposal, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
            Ok(sent) => Ok(sent == self.len),
            Err(libc::EINPROGRESS) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// The connection begins; `went`: with the Proposal.
    pub fn opened(&self, went: bool) -> Opened {
        Opened { control: Some(self.control), in_syn: if went { self.len as u32 } else { 0 } }
    }
}

/// The record of a connecting end begins so.
pub fn opened(conn: &Conn, Opened { control, in_syn }: Opened) {
    conn.clc.control.store(control.map_or(0, |fd| fd.cast_unsigned() + 1), Relaxed);
    conn.clc.in_syn.store(in_syn, Relaxed);
}

/// It does not come to a record.
pub fn not_opened(opened: Opened) {
    if let Some(control) = opened.control {
        table::release_fd(control);
    }
}

/// This process does not need the connection to the agent any more.
pub fn let_go(conn: &Conn) {
    if let Some(control) = number(&conn.clc.control) {
        conn.clc.control.store(NEVER, Relaxed);
        table::release_fd(control);
    }
}

/// The handshake goes on without an agent. The caller holds the step's lock; the number has the application's socket.
pub fn put_off(conn: &Conn) {
    let_go(conn);
    let is_client = conn.clc.has_connected.load(Relaxed) != 0;
    let step = match is_client {
        true if super::first::is_proposed(conn) => Step::Refusing,
        true => Step::Declared,
        false => Step::Expecting,
    };
    super::enter(conn, step);
}

/// Why there is no answer.
#[derive(Debug)]
enum Unanswered {
    /// The agent has not read the request: it has let go of a process that was silent for too long, or is gone.
    Unread(Errno),
    /// It may have.
    Unknown(Errno),
}

/// Asks the agent, and waits for its answer.
fn ask(
    control: i32,
    request: Request,
    fds: &[i32],
    most_ms: i32,
) -> Result<(Answer, Option<i32>), Unanswered> {
    match ask_into(control, request, fds, &mut [0; LEN], most_ms)? {
        (answer, fd, LEN) => Ok((answer, fd)),
        (_, fd, _) => {
            fd.inspect(|fd| foreign_fd::discard(*fd));
            Err(Unanswered::Unknown(libc::EPROTO))
        }
    }
}

/// As [`ask`], with all that has come in a place of at least [`LEN`] bytes, and how much that is.
fn ask_into(
    control: i32,
    request: Request,
    fds: &[i32],
    bytes: &mut [u8],
    most_ms: i32,
) -> Result<(Answer, Option<i32>, usize), Unanswered> {
    unix::send(control, &request.emit(), fds).map_err(Unanswered::Unread)?;
    let received = loop {
        match unix::receive(control, bytes) {
            Err(libc::EAGAIN) if sys::poll1(control, libc::POLLIN, most_ms) != 0 => {}
            // The end comes as an error where something was left unread (unix(7)).
            Err(libc::ECONNRESET) => return Err(Unanswered::Unread(libc::ECONNRESET)),
            Err(errno) => return Err(Unanswered::Unknown(errno)),
            Ok(received) => break received,
        }
    };
    let Received { len, fd, .. } = received;
    match Answer::parse(bytes.get(..len.min(LEN)).unwrap_or_default()) {
        Some(answer) => Ok((answer, fd, len)),
        None => {
            fd.inspect(|fd| foreign_fd::discard(*fd));
            Err(Unanswered::Unknown(libc::EPROTO))
        }
    }
}

/// A deputy, and the ring that it is for.
pub struct Deputy {
    socket: i32,
    segment: InUse,
    place: Place,
    names: Tuple,
}

/// Makes the deputy, and hands the connection over. `None` where that cannot be: the handshake goes on without an agent, or the connection
/// is of no use any more. The caller holds the step's lock, and lets calls of the kernel's go on afterwards.
pub fn make(fd: i32, conn: &Conn) -> Option<Deputy> {
    let has_connected = conn.clc.has_connected.load(Relaxed) != 0;
    // A message of the handshake is the first that the peer gets.
    let in_syn = u64::from(conn.clc.in_syn.load(Relaxed));
    let is_unused = || kernel::tcp_sent(fd, has_connected) == Some(in_syn);
    let made = match transition::is_free(fd, conn) {
        Ok(true) if is_unused() && !kernel::has_signals(fd) => hand(fd, conn),
        _ => Err(libc::EBUSY),
    };
    if let Err(errno) = made {
        log::debug(format_args!("fd {fd}: not handed to the agent, errno {errno}"));
        if conn.clc.step() == Step::Handing {
            put_off(conn);
        }
    }
    made.ok()
}

fn hand(fd: i32, conn: &Conn) -> Result<Deputy, Errno> {
    let control = number(&conn.clc.control).ok_or(libc::EBUSY)?;
    let has_connected = conn.clc.has_connected.load(Relaxed) != 0;
    let live = Tuple::live(fd, has_connected)?;
    let family = sockopt::int(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, libc::AF_INET);
    let pair = pair::tcp(family)?;
    let role = match has_connected {
        true if super::first::is_proposed(conn) => Role::Proposed,
        true => Role::Client,
        false => Role::Server,
    };
    let asked = hand_by(control, conn, role, &[fd, pair.connected]);
    sys::close(pair.connected);
    let given = match asked {
        Ok((Answer::Ring(place), Some(memory))) => {
            segment::use_file(place.segment, memory).map(|segment| (segment, place))
        }
        Ok((Answer::Tcp { code }, None)) => {
            sys::close(pair.accepted);
            conn.clc.declined.store(code, Relaxed);
            return Err(libc::ENODEV);
        }
        Ok((_, other)) => {
            other.inspect(|fd| foreign_fd::discard(*fd));
            None
        }
        Err(Unanswered::Unread(errno)) => {
            sys::close(pair.accepted);
            return Err(errno);
        }
        Err(Unanswered::Unknown(errno)) => {
            log::warn(format_args!("fd {fd}: no answer of the agent's, errno {errno}"));
            None
        }
    };
    let Some((segment, place)) = given else {
        // The agent may have begun, which cannot be undone.
        sys::close(pair.accepted);
        sys::disconnect(fd);
        let_go(conn);
        super::give_up(conn, Reason::NoMemory);
        return Err(libc::ENOMEM);
    };
    copy_options(fd, pair.accepted, true, conn);
    // Of the deputy's connection this is the accepting end, whichever it is of the other.
    let names = match has_connected {
        true => Tuple { netns: live.netns, client: live.server, server: live.client },
        false => live,
    };
    Ok(Deputy { socket: pair.accepted, segment, place, names })
}

/// Hands the connection over, once more where the agent has let go of this process.
fn hand_by(
    control: i32,
    conn: &Conn,
    role: Role,
    fds: &[i32],
) -> Result<(Answer, Option<i32>), Unanswered> {
    match ask(control, Request::Hand(role), fds, ANSWER_MS) {
        Err(Unanswered::Unread(errno)) => {
            let_go(conn);
            let control = reach().ok_or(Unanswered::Unread(errno))?;
            let asked = ask(control, Request::Hand(role), fds, ANSWER_MS);
            sys::close(control);
            asked
        }
        asked => asked,
    }
}

/// The number becomes the deputy's, which is in the ring. The caller holds the locks of [`make`] and has stopped calls of the kernel's.
pub fn begin_ring(fd: i32, conn: &Conn, deputy: &Deputy) {
    put(fd, conn, deputy.socket);
    sys::close(deputy.socket);
    conn.set_flag(F_CLIENT, false);
    conn.set_flag(F_DEPUTY, true);
    let_go(conn);
    transition::store_tuple(conn, &deputy.names);
    // What the agent says of itself is as good as this user's own word.
    conn.clc.is_own_user.store(1, Relaxed);
    let Place { slot: number, usage, .. } = deputy.place;
    let is_marked = mark::enter_ring(fd);
    let tied = transition::bind_slot(fd, conn, &deputy.segment, number, false).is_ok();
    conn.usage.store(usage, Relaxed);
    let slot = conn.slot().filter(|slot| {
        tied && is_marked
            && handshake::phase(&slot.control, Use::from_bits(usage)) == SlotState::Confirmed
    });
    super::forget(conn);
    conn.clc.room.store(deputy.place.segment, Relaxed);
    if let Some(slot) = slot {
        // Before another thread finds it: nothing of the application's goes by the deputy itself, where bytes are doorbells.
        let _ = TxSpan::new(slot, conn.side()).try_switch(|| Some(0));
    }
    let Some(slot) = slot.filter(|_| conn.leave_early(Event::Attaches)) else {
        log::warn(format_args!("fd {fd}: the agent's slot is of no use"));
        if !tied {
            segment::unuse(deputy.segment.index);
        }
        sys::disconnect(fd);
        conn.give_up(Reason::PeerBroken);
        return;
    };
    liveness::vouch(conn, slot);
    transition::begin_ring(conn);
    transition::tune(fd, conn);
    limit::set(fd, conn, slot);
    log::debug(format_args!("fd {fd}: handed to the agent, slot {number}"));
}

/// Asks for the TCP connection of a deputy whose ring the agent has left.
pub fn fetch(fd: i32, conn: &Conn) -> Option<i32> {
    match ask_about(Request::Fetch(place(conn)), ANSWER_MS) {
        Ok((Answer::Tcp { code }, Some(tcp))) => {
            conn.clc.declined.store(code, Relaxed);
            Some(tcp)
        }
        Ok((_, other)) => {
            other.inspect(|fd| foreign_fd::discard(*fd));
            None
        }
        Err(why) => {
            log::warn(format_args!("fd {fd}: the agent does not give TCP back: {why:?}"));
            None
        }
    }
}

/// Asks for an ear of the connection's room ([`Request::Ear`]): its number there, and the socket; `None`: the agent gives none.
///
/// # Errors
/// The agent has not read the request, or the connection is in another room.
pub fn ear(conn: &Conn, room: u64) -> Result<Option<(u32, i32)>, Errno> {
    let is_socket = |fd| sockopt::int(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, 0) == libc::AF_UNIX;
    Ok(match ask_for_ear(conn, room, Request::Ear)? {
        (Some(Answer::Ear(number)), Some(socket)) if is_socket(socket) => Some((number, socket)),
        (_, other) => {
            other.inspect(|fd| foreign_fd::discard(*fd));
            None
        }
    })
}

/// Asks for the agent's ear of the connection's room ([`Request::RoomEar`]), which is then a descriptor of the library's own; `None`: the
/// agent gives none.
///
/// # Errors
/// As [`ear`].
pub fn room_ear(conn: &Conn, room: u64) -> Result<Option<i32>, Errno> {
    Ok(match ask_for_ear(conn, room, Request::RoomEar)? {
        (Some(Answer::RoomEar), Some(ear)) if ears::is_ear(ear) => Some(table::keep_fd(ear)),
        (_, other) => {
            other.inspect(|fd| foreign_fd::discard(*fd));
            None
        }
    })
}

/// The answer, if the agent gives one in time: one that was stopped gives no ear.
fn ask_for_ear(
    conn: &Conn,
    room: u64,
    request: impl FnOnce(Place) -> Request,
) -> Result<(Option<Answer>, Option<i32>), Errno> {
    let place = place(conn);
    if place.segment != room {
        return Err(libc::ESTALE);
    }
    match ask_about(request(place), EAR_MS) {
        Ok((answer, fd)) => Ok((Some(answer), fd)),
        Err(Unanswered::Unknown(_)) => Ok((None, None)),
        Err(Unanswered::Unread(errno)) => Err(errno),
    }
}

/// The connection's slot.
fn place(conn: &Conn) -> Place {
    let segment = segment::id_of(conn.segment.load(Relaxed));
    Place { segment, slot: conn.slot_index.load(Relaxed), usage: conn.usage.load(Relaxed) }
}

/// Asks the agent by a connection of its own.
fn ask_about(request: Request, most_ms: i32) -> Result<(Answer, Option<i32>), Unanswered> {
    let control = reach().ok_or(Unanswered::Unread(libc::ECONNREFUSED))?;
    let asked = ask(control, request, &[], most_ms);
    sys::close(control);
    asked
}

/// The number becomes that of the TCP connection again. The caller keeps all away that uses it.
pub fn put_back(fd: i32, conn: &Conn, tcp: i32) {
    copy_options(fd, tcp, false, conn);
    put(fd, conn, tcp);
    sys::close(tcp);
    let has_connected = conn.clc.has_connected.load(Relaxed) != 0;
    conn.set_flag(F_DEPUTY, false);
    if let Ok(tuple) = Tuple::live(fd, has_connected) {
        transition::store_tuple(conn, &tuple);
    }
}

/// The connection is plain, and has no slot: it is the end again that it was.
pub fn is_back(conn: &Conn) {
    conn.set_flag(F_CLIENT, conn.clc.has_connected.load(Relaxed) != 0);
}

/// All numbers of the connection mean another socket, with the flags of before.
fn put(fd: i32, conn: &Conn, new: i32) {
    let flags = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0);
    let _ = sys::fcntl(new, libc::F_SETFL, flags);
    let put_at = |fd: i32| {
        let crosses = sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|bits| bits == 0);
        let _ = sys::dup3(new, fd, if crosses { 0 } else { libc::O_CLOEXEC });
    };
    put_at(fd);
    if !conn.users.is_one_fd() {
        let index = conn::index_of(conn);
        numbers::for_each(|other, of, _| {
            if of == index && other != fd {
                put_at(other);
            }
        });
    }
    // Calls that sleep on the other socket are woken by the handshake's messages there, or look again ([`may_come`]).
    if let Some(spare) = number(&conn.spare) {
        let _ = sys::dup3(new, spare, libc::O_CLOEXEC);
    }
}

/// `linux/fcntl.h`; the crate has no names for these, which ask for and set a `struct f_owner_ex` of two integers.
const F_GETOWN_EX: i32 = 16;
const F_SETOWN_EX: i32 = 15;

/// Sets a socket's options as another one's are. `is_new`: the socket has those that every socket begins with.
fn copy_options(from: i32, to: i32, is_new: bool, conn: &Conn) {
    // Each with the value that a socket begins with.
    const INTEGERS: [(i32, i32, i32); 6] = [
        (libc::SOL_SOCKET, libc::SO_OOBINLINE, 0),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0),
        (libc::SOL_SOCKET, libc::SO_PRIORITY, 0),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 0),
        (libc::IPPROTO_TCP, libc::TCP_CORK, 0),
    ];
    // A new socket has the same value of each option that nobody has set.
    let is_all = !is_new || conn.clc.hurries.load(Relaxed) != 0;
    let is_due = |level, name| is_all || options::may_be_set(conn, level, name);
    for (level, name, first) in INTEGERS.into_iter().filter(|(l, n, _)| is_due(*l, *n)) {
        let value = sockopt::int(from, level, name, first);
        if !is_new || value != first {
            let _ = sys::setsockopt(to, level, name, &value);
        }
    }
    let is_due = |name: &i32| is_due(libc::SOL_SOCKET, *name);
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO].into_iter().filter(is_due) {
        let mut limit = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let known = sys::getsockopt(from, libc::SOL_SOCKET, name, &mut limit).is_ok();
        if known && (!is_new || (limit.tv_sec, limit.tv_usec) != (0, 0)) {
            let _ = sys::setsockopt(to, libc::SOL_SOCKET, name, &limit);
        }
    }
    let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
    if is_due(&libc::SO_LINGER)
        && sys::getsockopt(from, libc::SOL_SOCKET, libc::SO_LINGER, &mut linger).is_ok()
        && (!is_new || (linger.l_onoff, linger.l_linger) != (0, 0))
    {
        let _ = sys::setsockopt(to, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    }
    // The owner, which SIGURG goes to: its kind and its id.
    let mut owner = [0_i32; 2];
    let known = sys::fcntl(from, F_GETOWN_EX, (&raw mut owner) as usize).is_ok();
    if known && owner[1] != 0 {
        let _ = sys::fcntl(to, F_SETOWN_EX, (&raw const owner) as usize);
    }
    for (known, name) in [(&conn.snd_buf, libc::SO_SNDBUF), (&conn.rcv_buf, libc::SO_RCVBUF)] {
        // The kernel doubles what it is given (socket(7)).
        match known.load(Relaxed) {
            0 => {}
            bytes => _ = sys::setsockopt(to, libc::SOL_SOCKET, name, &(bytes / 2)),
        }
    }
}
