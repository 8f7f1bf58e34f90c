//! How far a ring connection's end has come, as TCP would have it.
//!
//! The kernel's connection ends for the same reasons as the application's, with one exception: a doorbell
//! that reaches a socket after its close, or unread at its close, provokes a RST where TCP would have sent
//! a FIN alone. Flags and cursors in the slot tell the two apart.
//!
//! Three tables decide: [`ending`] what has happened, [`had_fin`] what a receive still finds, [`sending`] what becomes of a send.
//! docs/ending.md shows them, with a test for each cell.

use usmc_shm::layout::{End, Slot};
use usmc_shm::state::{EndState, Rx, Tx, TxFlags};
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::family::liveness;
use crate::os::signals::Woken;
use crate::os::sys::{self, Errno};
use crate::os::{events, sockopt};
use crate::record::conn::{self, Conn, F_COPIED, F_DEPUTY};
use crate::record::kernel;
use crate::record::phase::Phase;
use crate::stream::state;

/// What the kernel can tell of a connection: after a RST or a time-out, or by ICMP (`icmp_err_convert` in net/ipv4/icmp.c).
const ERRORS: [Errno; 16] = [
    libc::ECONNRESET,
    libc::ECONNABORTED,
    libc::EPIPE,
    libc::ETIMEDOUT,
    libc::ENETUNREACH,
    libc::EHOSTUNREACH,
    libc::EHOSTDOWN,
    libc::ENETDOWN,
    libc::ECONNREFUSED,
    libc::ENOPROTOOPT,
    libc::EMSGSIZE,
    libc::EOPNOTSUPP,
    libc::ENONET,
    libc::EACCES,
    libc::EPERM,
    libc::EPROTO,
];

/// The error that another process of this end has noted; 0 = none. A peer can write any number there, and programs know only those of
/// a connection.
fn of_family(noted: u32) -> Errno {
    match noted as Errno {
        errno if errno == 0 || ERRORS.contains(&errno) => errno,
        _ => libc::ECONNRESET,
    }
}

/// What a peer can have done to the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Nothing.
    Alive,
    /// It sends no more; it may or may not read.
    Fin,
    /// The connection was reset.
    Reset,
}

/// What the kernel's socket has told of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kernel {
    /// Nothing; or it was not asked, as nothing is known to have happened.
    Quiet,
    /// A FIN, or the end of the connection without an error.
    Fin,
    /// A RST that answers a doorbell of ours: TCP would have had a FIN at most.
    Answer,
    /// A RST of TCP, or another error, as of a path that is broken.
    Reset,
}

/// What has happened to the connection. Asks the kernel only when something is known to have happened.
pub fn ending(fd: i32, conn: &Conn, slot: &Slot) -> Ending {
    let (said, own) = (conn.peer(slot).flags(Acquire), conn.own(slot).flags(Relaxed));
    let theirs = match said.end() {
        _ if has_died_shut(conn, slot, said) => EndState::Aborted,
        end => end,
    };
    let kernel = match theirs {
        // Its RST may be on its way still.
        EndState::Aborted => Kernel::Quiet,
        _ => heard(fd, conn, slot, theirs, (own | said).is_returning()),
    };
    match (own.was_shut(), theirs, kernel) {
        // A FIN has gone either way: the connection was over, and the RST has found none.
        (true, EndState::Aborted, _) if said.was_shut() => Ending::Fin,
        (_, EndState::Aborted, _) | (_, _, Kernel::Reset) => Ending::Reset,
        (_, _, Kernel::Answer) => Ending::Fin,
        // A FIN that no flag explains is a death. TCP resets when the dead had something unread.
        (_, EndState::Open, Kernel::Fin)
            if state::unread_by_peer(conn, slot) > 0 || conn.has(F_DEPUTY) =>
        {
            // Of a dead agent's connection nothing is known of the end at the other host.
            Ending::Reset
        }
        (_, _, Kernel::Fin) => Ending::Fin,
        // What TCP has still to bring comes before the end, and the kernel tells of it behind that.
        (_, EndState::Shut | EndState::Closed, Kernel::Quiet) if conn.end(slot).reads_ring() => {
            Ending::Fin
        }
        (_, _, Kernel::Quiet) => Ending::Alive,
    }
}

/// Whether a peer that had shut its direction, or both, down was killed with something unread in the ring. Its FIN was there
/// before, and of what is in the ring its kernel knows nothing: this is an abort.
fn has_died_shut(conn: &Conn, slot: &Slot, said: TxFlags) -> bool {
    said.was_shut()
        && said.end() != EndState::Aborted
        && state::unread_by_peer(conn, slot) > 0
        && liveness::have_ended(conn, slot)
}

/// What the kernel tells. It is asked where anything is known of an end, or a direction may be on its way back.
fn heard(fd: i32, conn: &Conn, slot: &Slot, theirs: EndState, returns: bool) -> Kernel {
    let known = conn.kernel_events.load(Relaxed);
    let is_shut_rd = conn.end(slot).flags().is_shut_rd();
    if theirs == EndState::Open && known == 0 && !returns && !is_shut_rd {
        return Kernel::Quiet;
    }
    if known & events::HUP == 0 {
        look(fd, conn);
    }
    let is_taken = conn.end(slot).flags().has_taken_error();
    let known = conn.kernel_events.load(Relaxed);
    match taken(conn) {
        0 if !is_taken && known & (events::RDHUP | events::HUP) == 0 => Kernel::Quiet,
        0 if !is_taken => Kernel::Fin,
        0 | libc::ECONNRESET | libc::EPIPE if answers_doorbell(conn, slot, theirs) => {
            Kernel::Answer
        }
        _ => Kernel::Reset,
    }
}

/// The same for a receive: TCP gives the end of the stream, once it was there, even after a reset.
pub fn for_receiver(fd: i32, conn: &Conn, slot: &Slot) -> Ending {
    match ending(fd, conn, slot) {
        Ending::Reset if had_fin(conn, slot) => Ending::Fin,
        ending => ending,
    }
}

/// Whether a FIN came before the RST.
fn had_fin(conn: &Conn, slot: &Slot) -> bool {
    let said = conn.peer(slot).flags(Acquire);
    match said.end() {
        _ if said.was_shut() => true,
        // A peer that sent where nobody read was reset; its close sent nothing.
        EndState::Shut | EndState::Closed => !conn.peer_end(slot).flags().has_sent_after(),
        // Of a death there are no flags: what we sent after it has met its FIN.
        EndState::Open => conn.end(slot).flags().has_sent_after() || answers_tcp(conn, slot),
        EndState::Aborted => false,
    }
}

/// Whether the kernel's error is its answer to bytes of TCP that we sent after the FIN of a death: it says EPIPE then, and
/// had something been unread in its socket, there would have been no FIN.
fn answers_tcp(conn: &Conn, slot: &Slot) -> bool {
    taken(conn) == libc::EPIPE
        && !conn.peer(slot).flags(Acquire).has_ended()
        && state::unread_by_peer(conn, slot) == 0
}

/// Whether the kernel's RST answers a doorbell of ours.
fn answers_doorbell(conn: &Conn, slot: &Slot, theirs: EndState) -> bool {
    let (own, peer) = (conn.own(slot), conn.peer_end(slot));
    // Copies of what it has read in the ring are answered like a doorbell.
    let has_copies = own.flags(Relaxed).has_copied() && peer.rx() != Rx::Tcp;
    let is_back = state::is_back(conn, slot) && !has_copies;
    // One of us has sent where the other did not read any more.
    let sent_after = [conn.end(slot), peer].iter().any(|end| end.flags().has_sent_after());
    if sent_after || is_back {
        return false;
    }
    let bells_read = own.bells_sent.load(Relaxed) == peer.bells_drained.load(Relaxed);
    let resets = peer.flags().resets();
    if theirs == EndState::Closed {
        // Unless its own end was the RST.
        return !(resets && (bells_read || liveness::have_ended(conn, slot)));
    }
    // It was killed, and has left nothing unread but doorbells or copies.
    let all_read = state::unread_by_peer(conn, slot) == 0
        && (own.tx(Relaxed) != Tx::Ring || peer.reads_ring());
    all_read && (!bells_read || has_copies) && !resets
}

/// Asks the kernel for the peer's FIN or RST and notes what it says.
#[cold]
pub fn look(fd: i32, conn: &Conn) {
    note(fd, conn, sys::poll1(fd, libc::POLLRDHUP, 0) as u32);
}

/// Notes what a poll of the kernel's socket reported of the connection's end.
pub fn note(fd: i32, conn: &Conn, events: u32) {
    let mut ended = events & (events::RDHUP | events::HUP);
    if events & events::ERR != 0 {
        match sockopt::int(fd, libc::SOL_SOCKET, libc::SO_ERROR, 0) {
            0 => {}
            errno => note_errno(conn, errno),
        }
    }
    let shut = || {
        let end = conn.slot().map(|slot| conn.end(slot).flags());
        end.is_some_and(|end| end.is_shut_rd() || end.is_cut())
    };
    if ended != 0 && shut() && !kernel::has_fin(fd) {
        // Our own shutdown looks the same.
        ended = 0;
    }
    if ended & !conn.kernel_events.load(Relaxed) != 0 {
        conn.kernel_events.fetch_or(ended, Relaxed);
    }
}

/// A receive on the kernel's socket found the end of the stream.
pub fn note_eof(fd: i32, conn: &Conn) {
    note(fd, conn, events::RDHUP);
}

/// The same where the receiving direction is TCP still: says whether it is the death of a peer that had not read the ring.
pub fn note_death(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let died = !conn.peer(slot).flags(Acquire).is_done() && state::unread_by_peer(conn, slot) > 0;
    if died {
        note_eof(fd, conn);
    }
    died
}

/// Sorts an error of the kernel socket: what concerns the call, and what concerns the connection.
pub fn note_error(conn: &Conn, errno: Errno) -> Woken {
    match errno {
        libc::EINTR | libc::EAGAIN | libc::EBADF | libc::ENOTSOCK | libc::ENOTCONN => {
            Woken::Fail(errno)
        }
        _ => {
            note_errno(conn, errno);
            Woken::Look
        }
    }
}

/// A call has taken this error by a number that was closed meanwhile: of this connection, or of a socket that got the number
/// before the call began. `fd` is another number of the connection, whose kernel has an error no more where it has told it.
pub fn taken_by_a_closed_number(fd: i32, conn: &Conn, errno: Errno) {
    look(fd, conn);
    if !is_taken(conn) && kernel::is_over(fd) {
        let _ = note_error(conn, errno);
    }
}

/// Reading the error cleared it in the kernel: keep it for the call that reports it, in whatever process.
fn note_errno(conn: &Conn, errno: Errno) {
    conn.kernel_events.fetch_or(events::RDHUP | events::HUP | (errno as u32) << 16, Relaxed);
    if let Some(end) = conn.family() {
        end.take_error(errno as u32);
    }
}

/// The error that was taken out of the kernel's socket, be it by another process that has this end; 0 = none.
fn taken(conn: &Conn) -> Errno {
    let own = (conn.kernel_events.load(Relaxed) >> 16) as Errno;
    match conn.family() {
        Some(end) if own == 0 => of_family(end.flags().errno()),
        _ => own,
    }
}

/// Whether there is such an error. Without processes that share the connection it is in private memory.
#[inline(always)]
pub fn is_taken(conn: &Conn) -> bool {
    conn.kernel_events.load(Relaxed) >> 16 != 0 || (conn.has(F_COPIED) && taken(conn) != 0)
}

/// An error that a peek took out of the kernel while TCP carried the stream; the caller reports it.
pub fn take_noted(conn: &Conn) -> Option<Errno> {
    let errno = taken(conn);
    conn.kernel_events.fetch_and(0xffff, Relaxed);
    if errno == 0 {
        return None;
    }
    conn.family().is_none_or(End::tell_error).then_some(errno)
}

/// An error that only we know of, for a send through the kernel; of EPIPE the kernel makes its signal, too.
#[inline(always)]
pub fn untold(conn: &Conn) -> Option<Errno> {
    if !is_taken(conn) || taken(conn) == libc::EPIPE { None } else { untold_of_plain(conn) }
}

/// The same on a connection that has become plain TCP: a look before may have taken the error.
#[inline(always)]
pub fn untold_of_plain(conn: &Conn) -> Option<Errno> {
    if is_untold(conn) { take_noted(conn) } else { None }
}

/// Whether the connection has such an error: the kernel's socket does not show it.
pub fn is_untold(conn: &Conn) -> bool {
    is_taken(conn) && conn.family().is_none_or(|end| !end.flags().has_told_error())
}

/// [`untold_of_plain`] for a receive: TCP gives what is unread first, and the end of the stream, once it was there. One
/// that asks for no bytes ends before an unread urgent one, too.
#[inline(always)]
pub fn untold_to_receiver(fd: i32, conn: &Conn, wanted: usize) -> Option<Errno> {
    if !is_taken(conn) || conn.slot().is_some_and(|slot| had_fin(conn, slot)) {
        return None;
    }
    if wanted == 0 && kernel::is_at_mark(fd) {
        return None;
    }
    match has_unread(fd) {
        Ok(true) => None,
        Ok(false) => untold_of_plain(conn),
        // The look has taken it, and it is this call's.
        Err(errno) => {
            let _ = untold_of_plain(conn);
            Some(errno)
        }
    }
}

/// The same for a splice, which tells it before an urgent byte.
pub fn untold_to_splice(fd: i32, conn: &Conn) -> Option<Errno> {
    let had_fin = || conn.slot().is_some_and(|slot| had_fin(conn, slot));
    if is_untold(conn) && !had_fin() && kernel::is_at_mark(fd) {
        return untold_of_plain(conn);
    }
    untold_to_receiver(fd, conn, 1)
}

/// The same for one that has stopped before an urgent byte, wherever the connection is; none after the end.
pub fn at_mark(fd: i32, conn: &Conn) -> Option<Errno> {
    match conn.slot().filter(|_| conn.phase() == Phase::Ring) {
        Some(slot) => match for_receiver(fd, conn, slot) {
            Ending::Reset => take_error(fd, conn, slot),
            Ending::Alive | Ending::Fin => None,
        },
        None => {
            look(fd, conn);
            untold(conn)
        }
    }
}

/// Whether the kernel has something to read. FIONREAD does not count what is behind an urgent byte that is next.
///
/// # Errors
/// The connection's, which the kernel has forgotten now.
fn has_unread(fd: i32) -> Result<bool, Errno> {
    if sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n > 0) {
        return Ok(true);
    }
    let mut byte = 0u8;
    // SAFETY: one writable byte.
    match unsafe { sys::recv(fd, &raw mut byte, 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) } {
        Ok(n) => Ok(n > 0),
        Err(errno @ (libc::ECONNRESET | libc::EPIPE | libc::ETIMEDOUT)) => Err(errno),
        Err(_) => Ok(false),
    }
}

/// A send through the kernel has just failed: where that was the connection's error, it is reported now.
pub fn told_by_send(fd: i32, conn: &Conn, errno: Errno) {
    // Of plain TCP, where no look has taken the error, the kernel itself knows whom it has told, and who has shut it down: by
    // another record, where the socket came back in a message.
    let is_kernels = conn.phase() == Phase::Plain && !conn.has(F_COPIED) && !is_taken(conn);
    if let Some(slot) = conn.slot().filter(|_| !is_kernels)
        && ends(fd, conn, slot, errno)
    {
        note_errno(conn, errno);
        conn.end(slot).tell_error();
    }
}

/// The same of a doorbell, or of the rest of a send, of which nobody hears: the error is still to be reported.
pub fn untold_by_send(fd: i32, conn: &Conn, slot: &Slot, errno: Errno) {
    if ends(fd, conn, slot, errno) {
        note_errno(conn, errno);
    }
}

/// Whether the errno of a send by the kernel is the connection's error, and not the answer to our own shutdown, be it by
/// another record of the same socket, or by another process'.
fn ends(fd: i32, conn: &Conn, slot: &Slot, errno: Errno) -> bool {
    match errno {
        libc::EPIPE => !conn.own(slot).flags(Relaxed).is_done() && kernel::is_over(fd),
        libc::ECONNRESET | libc::ETIMEDOUT => true,
        _ => false,
    }
}

/// An error was taken by a call that had moved bytes already and reports these: the next call reports it.
pub fn put_back(conn: &Conn, errno: Errno) {
    if note_error(conn, errno) == Woken::Look {
        conn.family().inspect(|end| end.untell_error());
    }
}

/// The error of a reset connection, for the first call that asks; the caller reports it. After this the kernel's
/// socket answers sends with EPIPE and a signal.
pub fn take_error(fd: i32, conn: &Conn, slot: &Slot) -> Option<Errno> {
    if !conn.end(slot).tell_error() {
        return None;
    }
    bury(fd, conn, slot);
    Some(error(conn, slot))
}

fn error(conn: &Conn, slot: &Slot) -> Errno {
    let errno = taken(conn);
    let sent_after = conn.end(slot).flags().has_sent_after();
    let shut = conn.peer(slot).flags(Relaxed).was_shut();
    match errno {
        // TCP answers with EPIPE where a FIN came before the RST.
        0 | libc::ECONNRESET | libc::EPIPE if sent_after || shut || answers_tcp(conn, slot) => {
            libc::EPIPE
        }
        // Of what goes by TCP again the kernel itself says so.
        libc::EPIPE if state::is_back(conn, slot) => libc::EPIPE,
        0 | libc::EPIPE => libc::ECONNRESET,
        errno => errno,
    }
}

/// SO_ERROR, of which the kernel's socket has just told (and forgotten) `told`.
pub fn so_error(fd: i32, index: u32, told: Errno) -> Errno {
    let conn = conn::at(index);
    if told != 0 {
        let _ = note_error(conn, told);
    }
    match conn.slot() {
        Some(slot) if conn.phase() == Phase::Ring => {
            // Nobody may have heard of a death yet.
            look(fd, conn);
            match ending(fd, conn, slot) {
                Ending::Reset => take_error(fd, conn, slot).unwrap_or(0),
                Ending::Alive | Ending::Fin => 0,
            }
        }
        // A receive on the kernel's socket has reported it.
        Some(slot) if conn.end(slot).flags().has_told_error() => 0,
        _ => take_noted(conn).unwrap_or(0),
    }
}

/// The error that connect(2) to AF_UNSPEC leaves to be reported, where it is not in the kernel's socket: a look has taken
/// it. The caller has both locks.
pub fn left_by_disconnect(fd: i32, conn: &Conn) -> Option<Errno> {
    match conn.slot().filter(|_| conn.phase() == Phase::Ring) {
        Some(slot) => {
            let is_due = ending(fd, conn, slot) == Ending::Reset && has_error(conn, slot);
            is_due.then(|| error(conn, slot))
        }
        None => is_untold(conn).then(|| taken(conn)),
    }
}

/// The socket is fresh again, and `errno` is still to be reported of it.
pub fn leave(conn: &Conn, errno: Option<Errno>) {
    conn.kernel_events.store(errno.map_or(0, |errno| (errno as u32) << 16), Relaxed);
}

/// After [`leave`] and the real call: the kernel has an error of its own, where the connection was not over to it.
pub fn disconnected(fd: i32, conn: &Conn) {
    if is_taken(conn) && sys::poll1(fd, 0, 0) & libc::POLLERR != 0 {
        conn.kernel_events.store(0, Relaxed);
    }
}

/// Whether the error is still to be reported: POLLERR.
pub fn has_error(conn: &Conn, slot: &Slot) -> bool {
    !conn.end(slot).flags().has_told_error()
}

/// Waits for the RST that the peer has announced, so that what follows on the kernel's socket is what
/// follows a reset; a peer that died instead is treated as if it had sent one.
fn bury(fd: i32, conn: &Conn, slot: &Slot) {
    const LOOKS: u32 = if cfg!(fuzzing) { 50 } else { 10_000 };
    let announced = conn.peer(slot).flags(Relaxed).end() == EndState::Aborted;
    for _ in 0..if announced { LOOKS } else { 1 } {
        look(fd, conn);
        if conn.kernel_events.load(Relaxed) & events::HUP != 0 {
            return;
        }
        sys::sched_yield();
    }
    let _ = sys::shutdown(fd, libc::SHUT_RDWR);
    conn.kernel_events.fetch_or(events::RDHUP | events::HUP, Relaxed);
}

/// Whether the peer of a ring connection has closed it, or shut both directions down, and not read all that is in the ring.
pub fn leaves_unread(conn: &Conn) -> bool {
    let is_left = |slot| {
        conn.peer(slot).flags(Acquire).reads_nothing() && state::unread_by_peer(conn, slot) > 0
    };
    conn.phase() == Phase::Ring && conn.slot().is_some_and(is_left)
}

/// What a send does once the peer does not read any more.
pub enum Send {
    /// The ring: the peer reads.
    Ring,
    /// Report this.
    Fail(Errno),
    /// TCP would take the bytes, and learn from a RST that nobody wants them.
    Lost,
    /// The kernel's socket knows the errno and sends the signal, or takes the bytes and gets the RST.
    Kernel,
}

/// Decides about a send of `len` bytes on a connection that is, perhaps, ending.
#[cold]
pub fn sending(fd: i32, conn: &Conn, slot: &Slot, len: usize) -> Send {
    let theirs = conn.peer(slot).flags(Acquire).end();
    match (ending(fd, conn, slot), theirs, has_failed(conn, slot)) {
        (Ending::Alive, ..) => Send::Ring,
        (Ending::Reset, ..) => match take_error(fd, conn, slot) {
            // With its signal.
            None | Some(libc::EPIPE) => Send::Kernel,
            Some(errno) => Send::Fail(errno),
        },
        // It has only stopped to send.
        (Ending::Fin, EndState::Shut, false) => Send::Ring,
        // Nothing is sent, so that nothing answers.
        (Ending::Fin, ..) if len == 0 => Send::Lost,
        (Ending::Fin, _, failed) => {
            conn.end(slot).set_sent_after();
            if failed { Send::Lost } else { Send::Kernel }
        }
    }
}

/// The errno of a send after our own shutdown, if the connection's error is still to be told; otherwise the kernel
/// knows what to do.
#[cold]
pub fn after_shutdown(fd: i32, conn: &Conn, slot: &Slot) -> Option<Errno> {
    // What a doorbell that nobody read has done to the kernel's socket is not to be told.
    look(fd, conn);
    if ending(fd, conn, slot) != Ending::Reset {
        return None;
    }
    take_error(fd, conn, slot).filter(|&errno| errno != libc::EPIPE)
}

fn has_failed(conn: &Conn, slot: &Slot) -> bool {
    conn.end(slot).flags().has_taken_error() || is_taken(conn)
}

/// Whether the peer is known to have closed or died.
#[inline(always)]
pub fn peer_is_gone(conn: &Conn, slot: &Slot) -> bool {
    let theirs = conn.peer(slot).flags(Acquire);
    let known = conn.kernel_events.load(Relaxed);
    // A FIN that a shutdown explains does not say that the peer does not read.
    theirs.reads_nothing()
        || known & !(libc::POLLRDHUP as u32) != 0
        || (known != 0 && !theirs.is_done())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_a_peer_has_written_is_a_reset() {
        assert_eq!([0, 110, 59, 133, 255].map(of_family), [0, 110, 104, 104, 104]);
    }
}
