//! socket(2), connect(2), listen(2): where a record begins and takes its part.

use usmc_shm::sync::Ordering::{AcqRel, Relaxed};

use super::fast_open;
use crate::device;
use crate::family::mark;
use crate::handshake::clc::deputy::{self, Opened};
use crate::handshake::{clc, syn_option, transition};
use crate::host;
use crate::os::reason::Reason;
use crate::os::table::{self, Entry};
use crate::os::{awake, config, kernel_only};
use crate::record::conn::{self, Conn, F_ADOPTED, F_NONBLOCK};
use crate::record::options;
use crate::record::order;
use crate::record::phase::{Event, Phase};
use crate::record::tuple::{self, Endpoint, Tuple};
use crate::stream::ending;
use crate::watch::observer;
use crate::watchers::epoll;

/// Whether socket(2) with these arguments makes a TCP socket.
pub fn is_tcp(family: i32, kind: i32, protocol: i32) -> bool {
    let kind = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    matches!(family, libc::AF_INET | libc::AF_INET6)
        && kind == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP)
}

/// A TCP socket that this process has made.
pub fn made(fd: i32, kind: i32) {
    if let Some(index) = created(fd, kind) {
        options::begin(conn::at(index));
    }
}

/// A new TCP socket `fd`: gives it a record. Returns the record's index.
pub fn created(fd: i32, kind: i32) -> Option<u32> {
    if config::get().off || kernel_only::is_sandboxed() {
        return None;
    }
    let index = conn::alloc()?;
    let conn = conn::at(index);
    conn.users.begin();
    if kind & libc::SOCK_NONBLOCK != 0 {
        // Nobody else knows the record yet, which had no flags.
        conn.flags.store(F_NONBLOCK, Relaxed);
    }
    options::doubt(conn);
    conn.go(Event::Made);
    if !table::set(fd, Entry::Conn(index)) {
        conn::free(index);
        return None;
    }
    awake::opened();
    Some(index)
}

/// After a real connect(2): `result` 0, or the errno it failed with.
pub fn connected(fd: i32, index: u32, server: Option<Endpoint>, result: i32, opened: Opened) {
    if !begins(fd, index, server, result, opened) {
        deputy::not_opened(opened);
    }
}

/// Whether a record has begun by it.
fn begins(fd: i32, index: u32, server: Option<Endpoint>, result: i32, opened: Opened) -> bool {
    let conn = conn::at(index);
    // EINTR: the connection goes on being made in the background.
    let is_made = matches!(result, 0 | libc::EINPROGRESS | libc::EINTR);
    if conn.phase() == Phase::Fresh && (is_made || is_answer(result)) {
        // A new attempt forgets what the last connection has left.
        ending::leave(conn, None);
    }
    if !is_made {
        return false;
    }
    order::taken(conn);
    let Some(server) = server else { return false };
    match conn.phase() {
        // The answer to an attempt that has come to more than that since.
        Phase::Early if clc::has_begun(conn) => return false,
        Phase::Fresh | Phase::Early => {}
        Phase::Plain if result == 0 => {
            syn_option::looked(fd, index);
            return false;
        }
        Phase::Offered => {
            // Either the answer to the attempt we know, or a new attempt after a failed one.
            let known = conn.tuple[5].load(Relaxed) >> 16;
            if tuple::local(fd).is_ok_and(|at| u64::from(at.port) == known) {
                return false;
            }
            transition::end(conn);
            conn.go(Event::Disconnects);
        }
        Phase::Plain if conn.slot().is_none() && result != 0 => conn.go(Event::Disconnects),
        _ => return false,
    }
    // That the last attempt has failed may have been seen by a look, and is no end of this one.
    ending::leave(conn, None);
    transition::begin_client(fd, index, server, opened);
    true
}

/// Whether connect(2) fails so once it has tried.
fn is_answer(errno: i32) -> bool {
    matches!(errno, libc::ECONNREFUSED | libc::ECONNRESET | libc::ETIMEDOUT | libc::EHOSTUNREACH)
}

/// Whether this record is past its first connect(2) or accept(2).
pub fn is_connected(index: u32) -> bool {
    conn::at(index).phase() != Phase::Fresh
}

/// Whether we are in a signal handler that has interrupted a step of its own thread: what that works on has to stay.
pub fn is_interrupted(index: u32) -> bool {
    conn::at(index).rx_lock.is_mine() || conn::at(index).tx_lock.is_mine()
}

/// Before connect(2) to AF_UNSPEC: the kernel resets the connection, and the socket is fresh again.
pub fn disconnecting(fd: i32, index: u32) {
    let conn = conn::at(index);
    let _rx = conn.rx_lock.enter();
    let _tx = conn.tx_lock.enter();
    let error = ending::left_by_disconnect(fd, conn);
    if let Some(slot) = conn.slot() {
        // They outlive the connection.
        transition::untune(fd, conn, slot);
        conn.own(slot).close(true);
        // Nor has another process anything to read any more.
        let ring = conn.rx(slot);
        if let Ok(data) = ring.data() {
            ring.consume_waking(&data, data.len);
        }
    }
    // The socket's other holders are not forgotten: `passed_on` is about the socket.
    transition::end(conn);
    ending::leave(conn, error);
    conn.go_on_with_kernel_calls();
    transition::disconnecting(conn);
    conn.go(Event::Disconnects);
}

/// After it.
pub fn disconnected(fd: i32, index: u32) {
    ending::disconnected(fd, conn::at(index));
    epoll::left_ring(index);
}

/// In [`Conn::offer_index`] of a listener: not registered by this process.
const UNREGISTERED: u32 = u32::MAX;
/// Likewise: a thread is about to register it.
const REGISTERING: u32 = u32::MAX - 1;
/// A bit beside the device's number for the registration: made at a fork, and nothing has been accepted since.
const AT_FORK: u32 = 1 << 30;
/// Likewise: this process has accepted.
const HAS_ACCEPTED: u32 = 1 << 29;

/// The device's number for a listener's registration, if this process has made one.
fn registration(conn: &Conn) -> Option<u32> {
    match conn.offer_index.load(Relaxed) {
        UNREGISTERED | REGISTERING => None,
        token => Some(token & !(AT_FORK | HAS_ACCEPTED)),
    }
}

/// In a forked child: the registration is the parent's, which may end before anybody accepts. A parent that accepts
/// itself goes on to, most likely, and its children serve what it has accepted: they are not kept waiting.
pub fn inherited_listener(conn: &Conn) {
    let (netns, at) = listens_at(conn);
    let parents = conn.offer_index.load(Relaxed);
    let accepts = registration(conn).is_some() && parents & HAS_ACCEPTED != 0;
    let token = match accepts || kernel_only::is_sandboxed() {
        true => None,
        false => {
            device::regions().for_each(|region| _ = region.board().register_inherited(0, at));
            host::current().board().register_inherited(netns, at)
        }
    };
    conn.offer_index.store(token.map_or(UNREGISTERED, |token| token | AT_FORK), Relaxed);
}

fn listens_at(conn: &Conn) -> (u64, Endpoint) {
    let words = transition::stored_tuple(conn);
    (words[0], Endpoint::server_of(&words))
}

/// A listener that came by fork was accepted from: the process that registered it may have closed its own by now, and this process
/// may be another user's than it was then.
pub fn still_listening(conn: &Conn) {
    let claim = |from, to| conn.offer_index.compare_exchange(from, to, AcqRel, Relaxed).is_ok();
    let before = conn.offer_index.load(Relaxed);
    if before & (AT_FORK | HAS_ACCEPTED) == 0 {
        claim(before, before | HAS_ACCEPTED);
    }
    if before == REGISTERING || before & AT_FORK == 0 || !claim(before, REGISTERING) {
        return;
    }
    let (netns, at) = listens_at(conn);
    let board = host::current().board();
    let kept = if before == UNREGISTERED { UNREGISTERED } else { before & !AT_FORK };
    let token = match board.is_registered(netns, at) {
        true => kept,
        // The other one goes when the process ends.
        false => board.register_listener(netns, at).unwrap_or(kept),
    };
    for region in device::regions().map(|region| region.board()) {
        if !region.is_registered(0, at) {
            let _ = region.register_listener(0, at);
        }
    }
    claim(REGISTERING, if token == UNREGISTERED { token } else { token | HAS_ACCEPTED });
}

/// A listener is closed here.
pub fn no_longer_listening(conn: &Conn) {
    if let Some(token) = registration(conn) {
        unregister(token, listens_at(conn).1);
    }
}

/// What is registered of a listener before it listens.
#[derive(Clone, Copy, Default)]
pub struct Registration(Option<(u32, Endpoint)>);

/// Before a real listen(2): registers the address, if the socket has one yet. A client may connect as soon as the kernel listens, and
/// would find nobody.
pub fn about_to_listen(fd: i32, index: u32) -> Registration {
    let conn = conn::at(index);
    let Some(at) = tuple::local(fd).ok().filter(|_| conn.phase() == Phase::Fresh) else {
        return Registration(None);
    };
    syn_option::listening(fd, conn, at);
    fast_open::listening(fd, at);
    let may_be = at.port != 0 && kernel_only::reason().is_none();
    let is_meant = may_be && config::get().allows(|| at.ip(), at.port);
    let token = is_meant.then(|| register(tuple::netns(fd), at).ok()).flatten();
    Registration(token.map(|token| (token, at)))
}

/// After a real listen(2) that failed.
pub fn not_listening(Registration(made): Registration) {
    if let Some((token, at)) = made {
        unregister(token, at);
    }
}

/// Registers an address on all devices; the token is that of the host's.
fn register(netns: u64, at: Endpoint) -> Result<u32, Reason> {
    let token = host::current().board().register_listener(netns, at)?;
    device::regions().for_each(|region| _ = region.board().register_listener(0, at));
    Ok(token)
}

fn unregister(token: u32, at: Endpoint) {
    host::current().board().unregister_listener(token);
    device::regions().for_each(|region| region.board().unregister(0, at));
}

/// After a real listen(2) that succeeded: registers the address where that was not done before.
pub fn listening(fd: i32, index: u32, made: Registration) {
    let conn = conn::at(index);
    let Some(at) = tuple::local(fd).ok().filter(|_| conn.phase() == Phase::Fresh) else {
        return not_listening(made);
    };
    ending::leave(conn, None);
    match listens(fd, conn, at, made) {
        Ok(token) => {
            conn.offer_index.store(token, Relaxed);
            conn.go(Event::Listens);
        }
        Err(reason) => {
            not_listening(made);
            conn.give_up(reason);
        }
    }
    observer::changed(fd, index);
}

/// The listener's registration.
///
/// # Errors
/// The reason why what it accepts stays TCP.
fn listens(
    fd: i32,
    conn: &Conn,
    at: Endpoint,
    Registration(made): Registration,
) -> Result<u32, Reason> {
    if let Some(why) = kernel_only::reason() {
        return Err(why);
    }
    if conn.has(F_ADOPTED) {
        // What it accepts would have it, too.
        mark::give_back(fd);
    }
    let netns = tuple::netns(fd);
    transition::store_tuple(conn, &Tuple { netns, client: Endpoint::default(), server: at });
    // Those that came from elsewhere.
    syn_option::listening(fd, conn, at);
    if !config::get().allows(|| at.ip(), at.port) {
        return Err(Reason::Excluded);
    }
    made.map_or_else(|| register(netns, at), |(token, _)| Ok(token))
}
