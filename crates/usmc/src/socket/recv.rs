//! Receiving: TCP up to the boundary, then the ring; end of stream and reset as TCP gives them.

mod from_ring;

use usmc_shm::layout::Slot;
use usmc_shm::span::{RxSpan, Source, Taken, Unmeasured};
use usmc_shm::sync::Ordering::Relaxed;

pub use self::from_ring::taken;
use self::from_ring::{from_ring, peek_ring};
use super::Outcome;
use super::call::Call;
use crate::family::locks::Family;
use crate::handshake::{clc, transition};
use crate::os::iov::{Buffers, NO_ENTRIES};
use crate::os::real;
use crate::os::signals::Woken;
use crate::os::sys::{self, Errno};
use crate::record::change_over;
use crate::record::conn::{self, Conn, F_CLC};
use crate::record::kernel;
use crate::record::numbers;
use crate::record::phase::Phase;
use crate::stream::ending::{self, Ending};
use crate::stream::wait::{self, Until};
use crate::stream::{fallback, unread};
use crate::watch::{capture, observer};

/// What one attempt found.
enum Attempt {
    /// This many bytes.
    Got(usize),
    /// Something has changed: look again.
    Again,
    /// A peek has found some bytes, and waits for more. No attempt was made.
    Peeked,
    /// A message of the peer's that is not the application's has begun to come.
    Part,
    /// Nothing yet; `true` when TCP has been read to the boundary.
    Empty(bool),
    /// Nothing in the ring, and the kernel was not asked for the end: a sleep will.
    Unasked,
    /// No byte will follow.
    End,
    /// The connection failed.
    Fail(Errno),
    /// Not ours.
    Kernel,
    /// The number was closed before.
    Closed,
}

/// Receives into `to` as recv(2) with `flags` does. With an empty `to` it waits for data and returns 0.
pub fn receive(fd: i32, index: u32, to: &mut Buffers, flags: i32) -> Outcome {
    let conn = conn::at(index);
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        fallback::follow(fd, index);
        return Outcome::Kernel;
    }
    observer::used(fd, index);
    let wanted = to.left();
    let least = match conn.lowat() as usize {
        _ if flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0 => wanted,
        lowat => lowat.clamp(1, wanted.max(1)),
    };
    let mut call = Call::new(fd, index, flags, None);
    // What a call that peeks at more than one byte begins anew with, until it takes what is there.
    let peeks = flags & libc::MSG_PEEK != 0;
    let enough = if flags & libc::MSG_WAITALL != 0 { wanted } else { least };
    let mut peek_all =
        (peeks && enough > 1 && call.waits() && !conn.rx_lock.is_mine()).then(|| to.again());
    let mut asks = false;
    loop {
        let fd = call.fd();
        match conn.phase() {
            Phase::Ring => {
                if let Some(slot) = conn.slot()
                    && conn.peer(slot).flags(Relaxed).is_returning()
                    && fallback::follow(fd, index)
                {
                    continue;
                }
            }
            Phase::Offered | Phase::Early | Phase::Attached => {
                transition::progress(fd, index, change_over::Call::Receive)
            }
            Phase::Plain if !clc::wind_up(fd, conn) => {}
            Phase::Plain => {
                transition::give_lowat_back(fd, conn);
                return match ending::untold_to_receiver(fd, conn, wanted) {
                    Some(errno) => call.fail(errno),
                    None if call.total > 0 && stops_in_kernel(fd, conn) => call.done(),
                    // The number may be closed, or some bytes are here already.
                    None if call.is_interrupted() => call.fail(libc::EINTR),
                    None if call.is_held() || call.total > 0 => {
                        // O_NONBLOCK counts where the call begins: one that has waited goes on to.
                        let waits = call.is_held();
                        call.kept(|call, fd| rest_by_kernel((fd, waits), call, to))
                    }
                    None => Outcome::Kernel,
                };
            }
            _ if call.total > 0 => return call.done(),
            _ => return ending::untold_of_plain(conn).map_or(Outcome::Kernel, Outcome::Fail),
        }
        if call.total > 0 && stops_in_kernel(fd, conn) {
            return call.done();
        }
        let has_part = |peek_all: &Option<Buffers>| {
            peek_all.is_some() && (1..enough).contains(&unread::unread_anyhow(fd, index))
        };
        let found = match has_part(&peek_all) {
            true => Attempt::Peeked,
            // Behind a sleep the kernel says what has ended it.
            false => attempt((fd, index, call.is_held()), to, flags, asks || call.has_slept()),
        };
        match found {
            Attempt::Kernel if call.total > 0 => return call.done(),
            // It has become plain in this instant; the number may be closed.
            Attempt::Kernel if call.is_held() && conn.phase() == Phase::Plain => continue,
            Attempt::Kernel => return Outcome::Kernel,
            Attempt::End => {
                if call.total == 0 && wanted > 0 {
                    capture::ended(fd, conn);
                }
                return call.done();
            }
            Attempt::Again => continue,
            Attempt::Fail(errno) => return call.fail(errno),
            // They came after the question above.
            Attempt::Got(n) if n < enough && has_part(&peek_all) => {
                if let Some(begin) = &peek_all {
                    *to = begin.again();
                }
                continue;
            }
            Attempt::Got(n) => {
                call.total += n;
                if call.total >= least || wanted == 0 || flags & libc::MSG_PEEK != 0 {
                    return call.done();
                }
                continue;
            }
            Attempt::Empty(_) | Attempt::Part if !call.waits() => {
                return call.fail(libc::EAGAIN);
            }
            Attempt::Unasked if !call.waits() => {
                asks = true;
                continue;
            }
            Attempt::Closed | Attempt::Peeked | Attempt::Empty(_) => {}
            Attempt::Unasked | Attempt::Part => {}
        }
        if matches!(found, Attempt::Closed) || !call.begin_sleep() {
            match call.closed() {
                Some(outcome) => return outcome,
                None => continue,
            }
        }
        match found {
            Attempt::Peeked => {
                if !call.kept(|call, fd| wait::for_more(fd, index, call.since, &mut call.signals)) {
                    peek_all = None;
                }
            }
            // What is there already would end every sleep at once.
            Attempt::Part => {
                let by_any = call.total > 0;
                if let Woken::Fail(errno) = call.kept(|call, _| call.signals.tick(by_any)) {
                    return call.fail(errno);
                }
            }
            _ => {
                let until = match (wanted, call.total) {
                    (0, _) => Until::AnyWakeUp,
                    (_, 0) => Until::Data,
                    _ => Until::DataOrSignal,
                };
                let in_ring = matches!(found, Attempt::Empty(true) | Attempt::Unasked);
                match call.kept(|call, fd| {
                    wait::for_data(fd, index, in_ring, until, call.since, &mut call.signals)
                }) {
                    // Disconnected while we slept.
                    _ if conn.phase() == Phase::Fresh && call.total == 0 => {
                        return Outcome::Fail(libc::EPIPE);
                    }
                    // One wake-up, whatever it was, ends a receive of nothing.
                    _ if wanted == 0 => return Outcome::Done(0),
                    Woken::Look => {}
                    Woken::Fail(errno) => return call.fail(errno),
                }
            }
        }
    }
}

/// Goes on in the kernel with a receive that has some bytes, or has slept, while the connection became plain TCP. `waits`: it has
/// slept, and O_NONBLOCK, set since, does not concern it.
fn rest_by_kernel((fd, waits): (i32, bool), call: &mut Call, to: &mut Buffers) -> Outcome {
    let (index, flags, conn) = (call.index, call.flags, conn::at(call.index));
    let mut iov = NO_ENTRIES;
    loop {
        let mut msg = to.message(&mut iov, usize::MAX);
        // SAFETY: the iovecs are the application's buffers. The real function: a cancellation point, as it expects.
        let n = unsafe { real::recvmsg(fd, &raw mut msg, flags) };
        let errno = crate::os::errno::errno();
        let got = usize::try_from(n).unwrap_or(0);
        let peeks = flags & libc::MSG_PEEK != 0;
        if got > 0 && !peeks {
            capture::received(fd, conn, to, got);
            to.skip(got);
        }
        call.total += got;
        let all = flags & libc::MSG_WAITALL != 0 && !peeks;
        let lacks = if n < 0 { errno == libc::EAGAIN } else { got > 0 && all && to.left() > 0 };
        let may_wait = waits && lacks && flags & libc::MSG_DONTWAIT == 0 && !kernel::is_at_mark(fd);
        if may_wait
            && kernel::is_nonblocking(fd)
            && numbers::sleeps_in_poll(fd, index, libc::POLLIN)
        {
            continue;
        }
        return if n < 0 { call.fail(errno) } else { call.done() };
    }
}

/// Whether a call that has bytes leaves what is next in the kernel to the next call: an error that is still to be reported
/// by the kernel itself, or what follows an urgent byte.
fn stops_in_kernel(fd: i32, conn: &Conn) -> bool {
    let in_ring = conn.slot().is_some_and(|s| conn.end(s).reads_ring());
    !in_ring && (sys::poll1(fd, 0, 0) & libc::POLLERR != 0 || kernel::is_at_mark(fd))
}

#[inline]
fn attempt(
    (fd, index, is_held): (i32, u32, bool),
    to: &mut Buffers,
    flags: i32,
    asks: bool,
) -> Attempt {
    let conn = conn::at(index);
    // A signal handler that interrupted a receive on the same socket finds nothing to read, however long it waits.
    let Some(_held) = conn.rx_lock.enter() else { return Attempt::Fail(libc::EAGAIN) };
    let Some(fd) = numbers::number_in_step(fd, index, is_held) else {
        return Attempt::Closed;
    };
    let phase = conn.phase();
    let Some(slot) = conn.slot() else {
        return if conn.has(F_CLC) {
            before_message(fd, conn, to, flags)
        } else if phase == Phase::Early {
            from_tcp(fd, conn, None, to, flags, u64::MAX)
        } else {
            Attempt::Kernel
        };
    };
    if !matches!(phase, Phase::Offered | Phase::Attached | Phase::Ring) {
        return Attempt::Kernel;
    }
    let Some(_family) = Family::receiving(fd, conn, slot) else {
        return Attempt::Fail(libc::ECONNRESET);
    };
    let span = RxSpan::new(slot, conn.side());
    match span.source(|| kernel::tcp_read(fd, conn, slot)) {
        Ok(Source::Ring) => match from_ring(fd, conn, slot, to, flags, asks) {
            Attempt::Got(n) if n > 0 && conn.peer(slot).flags(Relaxed).is_returning() => {
                Attempt::Got(n + behind_ring(fd, conn, slot, to, flags))
            }
            got => got,
        },
        Ok(Source::Tcp(left)) => from_tcp(fd, conn, Some((span, slot)), to, flags, left),
        // Waking up for them is what a sleep does meanwhile.
        Ok(Source::Bells(count)) if fallback::skip(fd, &span, count) => Attempt::Again,
        Ok(Source::Bells(_)) => Attempt::Empty(false),
        // The kernel does not know the socket any more: the number was closed behind our back.
        Err(Unmeasured) => Attempt::Fail(libc::EBADF),
    }
}

/// Reads TCP, at most to where a CLC message of the peer's stands. More may be announced while we read, so that bytes
/// are looked at first and taken afterwards.
#[cold]
fn before_message(fd: i32, conn: &Conn, to: &mut Buffers, flags: i32) -> Attempt {
    let least = usize::try_from(clc::readable_before(fd, conn)).unwrap_or(usize::MAX);
    let mut iov = NO_ENTRIES;
    let mut msg = to.message(&mut iov, least);
    if msg.msg_iovlen == 0 {
        // Where nothing is there, that can be slept for; what is there of a message would end every sleep at once.
        return match least {
            0 if matches!(clc::stream::look(fd).0, clc::stream::Found::Nothing) => {
                Attempt::Empty(false)
            }
            0 => Attempt::Part,
            _ => from_tcp(fd, conn, None, to, flags, u64::MAX),
        };
    }
    let look = (flags & !libc::MSG_WAITALL) | libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: the iovecs are the application's buffers (Buffers::new's contract).
    let seen = match unsafe { sys::recvmsg(fd, &mut msg, look) } {
        Ok(0) => return tcp_ended(fd, conn, None),
        Ok(n) => n,
        Err(libc::EAGAIN) => return Attempt::Empty(false),
        Err(errno) => return tcp_failed(fd, conn, errno),
    };
    let before = usize::try_from(clc::readable_before(fd, conn)).unwrap_or(usize::MAX);
    let n = seen.min(before);
    if n == 0 {
        return Attempt::Again;
    }
    if flags & libc::MSG_PEEK == 0 {
        clc::stream::discard(fd, n);
    }
    to.skip(n);
    Attempt::Got(n)
}

/// Reads TCP, at most to the boundary.
fn from_tcp(
    fd: i32,
    conn: &Conn,
    span: Option<(RxSpan<'_>, &Slot)>,
    to: &mut Buffers,
    flags: i32,
    left: u64,
) -> Attempt {
    let mut iov = NO_ENTRIES;
    let mut msg = to.message(&mut iov, usize::try_from(left).unwrap_or(usize::MAX));
    if msg.msg_iovlen == 0 {
        let mut byte = 0u8;
        // SAFETY: a valid address.
        return match unsafe { sys::recv(fd, &raw mut byte, 0, libc::MSG_DONTWAIT) } {
            Ok(_) if !ending::is_taken(conn) => Attempt::Got(0),
            Ok(_) => tcp_ended(fd, conn, span.map(|(_, slot)| slot)),
            Err(libc::EAGAIN) => Attempt::Empty(false),
            Err(errno) => tcp_failed(fd, conn, errno),
        };
    }
    let kernel_flags = (flags & !libc::MSG_WAITALL) | libc::MSG_DONTWAIT;
    // SAFETY: the iovecs are the application's buffers (Buffers::new's contract).
    let taken = match unsafe { sys::recvmsg(fd, &mut msg, kernel_flags) } {
        Ok(0) if span.is_some_and(|(span, slot)| is_past_tcp(fd, conn, &span, slot)) => {
            return Attempt::Again;
        }
        Ok(0) => return tcp_ended(fd, conn, span.map(|(_, slot)| slot)),
        Ok(n) => n,
        Err(libc::EAGAIN) => return Attempt::Empty(false),
        Err(errno) => return tcp_failed(fd, conn, errno),
    };
    let full = msg.msg_iovlen == iov.len() && iov.iter().map(|i| i.iov_len).sum::<usize>() == taken;
    let Some((span, slot)) = span else {
        if flags & libc::MSG_PEEK == 0 {
            capture::received(fd, conn, to, taken);
        }
        to.skip(taken);
        return more_of_tcp(fd, conn, to, flags, full, taken);
    };
    if flags & libc::MSG_PEEK != 0 {
        return match span.source(|| kernel::tcp_read(fd, conn, slot)) {
            Ok(Source::Tcp(left)) => {
                let n = taken.min(usize::try_from(left).unwrap_or(taken));
                to.skip(n);
                // The span was seen to its end: what follows is in the ring.
                let more = if n as u64 == left { peek_ring(conn, slot, to) } else { 0 };
                Attempt::Got(n + more)
            }
            Ok(Source::Ring | Source::Bells(_)) => Attempt::Again,
            Err(Unmeasured) => Attempt::Got(0),
        };
    }
    match span.took_tcp(taken as u64, || kernel::tcp_read(fd, conn, slot)) {
        Ok(Taken { data, bells, more }) => {
            observer::received(conn, data + more);
            let data = data as usize;
            if more > 0 {
                // The ring was over before this read began to know of it.
                to.pull(data, bells as usize, more as usize);
                capture::received(fd, conn, to, data + more as usize);
                to.skip(data + more as usize);
                return Attempt::Got(data + more as usize);
            }
            capture::received(fd, conn, to, data);
            to.skip(data);
            // One call gives what is there, wherever it is.
            if data > 0
                && to.left() > 0
                && span.source(|| kernel::tcp_read(fd, conn, slot)) == Ok(Source::Ring)
                && conn.rx(slot).has_data()
                && let Attempt::Got(more) = from_ring(fd, conn, slot, to, flags, true)
            {
                let last = match conn.peer(slot).flags(Relaxed).is_returning() {
                    true => behind_ring(fd, conn, slot, to, flags),
                    false => 0,
                };
                return Attempt::Got(data + more + last);
            }
            // Where the boundary has cut the read short, TCP may go on at once.
            let was_bounded = left != u64::MAX;
            if conn.peer(slot).flags(Relaxed).is_returning() && (was_bounded || !span.is_tcp()) {
                return Attempt::Got(data + behind_ring(fd, conn, slot, to, flags));
            }
            more_of_tcp(fd, conn, to, flags, full, data)
        }
        Err(Unmeasured) => {
            to.skip(taken);
            Attempt::Got(taken)
        }
    }
}

/// One call gives what is there, wherever it is: bytes of TCP that follow a ring that was just read to its end, or
/// doorbells that stood for such a ring.
#[cold]
fn behind_ring(fd: i32, conn: &Conn, slot: &Slot, to: &mut Buffers, flags: i32) -> usize {
    let span = RxSpan::new(slot, conn.side());
    // Also where nothing more is wanted: the kernel does not know that an urgent byte is next while a doorbell is before it.
    if flags & libc::MSG_PEEK != 0 || !fallback::finish_rx(fd, conn, slot) || to.left() == 0 {
        return 0;
    }
    // An urgent byte ends a receive that has some bytes.
    if !sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n > 0) || kernel::is_at_mark(fd) {
        return 0;
    }
    match from_tcp(fd, conn, Some((span, slot)), to, flags, u64::MAX) {
        Attempt::Got(n) => n,
        _ => 0,
    }
}

/// Whether the bytes of TCP are read. The sender may have gone over to the ring, filled it and ended since the caller asked where the next
/// bytes come from: the kernel's end stands behind the bytes of the ring, too.
#[cold]
fn is_past_tcp(fd: i32, conn: &Conn, span: &RxSpan<'_>, slot: &Slot) -> bool {
    let source = span.source(|| kernel::tcp_read(fd, conn, slot));
    matches!(source, Ok(Source::Ring | Source::Bells(_)))
}

/// The kernel has no more bytes. A look may have taken the error that belongs here, or the peer was killed with something
/// unread in the ring, of which the kernel knows nothing.
fn tcp_ended(fd: i32, conn: &Conn, slot: Option<&Slot>) -> Attempt {
    let errno = match slot {
        Some(slot)
            if (ending::is_taken(conn) || ending::note_death(fd, conn, slot))
                && ending::for_receiver(fd, conn, slot) == Ending::Reset =>
        {
            ending::take_error(fd, conn, slot)
        }
        Some(_) => None,
        None => ending::take_noted(conn),
    };
    errno.map_or(Attempt::End, Attempt::Fail)
}

/// The kernel reported an error, which concerns this call or is TCP's word on the connection.
fn tcp_failed(fd: i32, conn: &Conn, errno: Errno) -> Attempt {
    if ending::note_error(conn, errno) == Woken::Look {
        match conn.slot() {
            Some(slot) if is_past_tcp(fd, conn, &RxSpan::new(slot, conn.side()), slot) => {
                return Attempt::Again;
            }
            // The peer was killed before it read a doorbell of ours; its own direction never left TCP.
            Some(slot)
                if conn.phase() == Phase::Ring
                    && ending::for_receiver(fd, conn, slot) == Ending::Fin =>
            {
                return Attempt::End;
            }
            Some(slot) => {
                conn.end(slot).tell_error();
            }
            None => drop(ending::take_noted(conn)),
        }
    }
    Attempt::Fail(errno)
}

/// One system call took as many buffers as it could (`full`): goes on while there is something.
fn more_of_tcp(
    fd: i32,
    conn: &Conn,
    to: &mut Buffers,
    flags: i32,
    full: bool,
    taken: usize,
) -> Attempt {
    if !full || flags & libc::MSG_PEEK != 0 || to.left() == 0 {
        return Attempt::Got(taken);
    }
    // Nothing to read, or an end that belongs to the next call.
    if !sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n > 0) {
        return Attempt::Got(taken);
    }
    let more = match conn.slot() {
        None => from_tcp(fd, conn, None, to, flags, u64::MAX),
        Some(slot) => {
            let span = RxSpan::new(slot, conn.side());
            match span.source(|| kernel::tcp_read(fd, conn, slot)) {
                Ok(Source::Tcp(left)) => from_tcp(fd, conn, Some((span, slot)), to, flags, left),
                _ => return Attempt::Got(taken),
            }
        }
    };
    match more {
        Attempt::Got(n) => Attempt::Got(taken + n),
        _ => Attempt::Got(taken),
    }
}
