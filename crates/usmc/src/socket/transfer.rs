//! sendfile(2) and splice(2) with a ring connection: file and pipe bytes go straight into or out of the
//! ring's memory, one copy made by the kernel.

use core::ffi::c_void;
use usmc_shm::layout::{Slot, TXF_DONE};
use usmc_shm::span::{RxSpan, Source};
use usmc_shm::sync::Ordering::Relaxed;

use super::{Outcome, control, send};
use crate::family::holders;
use crate::family::locks::{Family, Receiving};
use crate::handshake::{clc, transition};
use crate::os::reason::Reason;
use crate::os::signals::{Signals, Woken};
use crate::os::sys::{self, Errno};
use crate::os::{clock, memory, real};
use crate::record::change_over::Call;
use crate::record::phase::Phase;
use crate::record::{conn, kernel, numbers, order};
use crate::stream::wait::{self, Until};
use crate::stream::{bells, ending, fallback, room, state};
use crate::watch::{capture, observer};

/// How often one call looks where the kernel's bytes have gone that it was told of.
const LOOKS: u32 = 256;

/// What POSIX calls so: bytes that a pipe takes at once or not at all.
const PIPE_BUF: usize = 4096;

/// Moves bytes into the send ring: `fill(dst, len)` is one system call that writes to `dst`. The caller holds the
/// connection ([`numbers::Hold`]), here as below.
fn into_ring(
    fd: i32,
    index: u32,
    slot: &Slot,
    count: usize,
    nonblock: bool,
    signals: &mut Signals,
    mut fill: impl FnMut(*mut c_void, usize) -> Result<usize, Errno>,
) -> Outcome {
    let conn = conn::at(index);
    observer::used(fd, index);
    let since = clock::now_ns();
    let mut total = 0;
    while total < count {
        let (mut fd, mut is_held_up) = (fd, false);
        let mut waker = None;
        let step = 'step: {
            let Some(_held) = conn.tx_lock.enter() else { return Outcome::Fail(libc::EAGAIN) };
            fd = numbers::number(fd, index);
            let Some(_family) = Family::sending(fd, conn, slot) else {
                return Outcome::Fail(libc::ECONNRESET);
            };
            if !conn.has_slot(slot) {
                return if total > 0 { Outcome::Done(total) } else { Outcome::Kernel };
            }
            let is_over = send::ends_in_ring(conn, slot);
            if is_over && fallback::go_back_briefly(fd, conn, slot) {
                return if total > 0 { Outcome::Done(total) } else { send::out_of_ring(conn) };
            }
            if is_over {
                is_held_up = true;
                break 'step None;
            }
            if conn.own(slot).flags.load(Relaxed) & TXF_DONE != 0 {
                return match ending::after_shutdown(fd, conn, slot) {
                    _ if total > 0 => Outcome::Done(total),
                    Some(errno) => Outcome::Fail(errno),
                    None => Outcome::Kernel,
                };
            }
            let tx = conn.tx(slot);
            let Ok(room) = tx.room_if(count - total, |at, len| memory::take(at.cast(), len)) else {
                return Outcome::Fail(libc::ECONNRESET);
            };
            let room = room::found(fd, conn, slot, room, count - total);
            let now = clock::tsc();
            if send::may_be_lost(fd, conn, slot, &room, now) {
                match ending::sending(fd, conn, slot, count - total) {
                    // What is lost as well: the file has to be read, and nobody reads the ring.
                    ending::Send::Ring | ending::Send::Lost => {}
                    ending::Send::Fail(errno) if total > 0 => {
                        ending::put_back(conn, errno);
                        return Outcome::Done(total);
                    }
                    ending::Send::Fail(errno) => return Outcome::Fail(errno),
                    _ if total > 0 => return Outcome::Done(total),
                    _ => return Outcome::Kernel,
                }
            }
            let want = room.free.min(count - total);
            if want == 0 {
                None
            } else {
                let (dst, len) = tx.contiguous(room.prod, room.place, want);
                let moved = fill(dst.cast(), len);
                if let Ok(n) = moved {
                    let end = room.prod.wrapping_add(n as u64);
                    order::stamp(conn, conn.own(slot), now);
                    let record = observer::record_of(conn);
                    if capture::wants(record) {
                        capture::sending(fd, conn, slot, room.place, room.prod, end);
                    }
                    tx.publish(end);
                    observer::sent_total(record, conn, slot, end);
                    waker = bells::waker(index, conn, slot);
                }
                Some(moved)
            }
        };
        match step {
            Some(Ok(0)) => break,
            Some(Ok(n)) => {
                total += n;
                if let Some(waker) = waker {
                    waker.wake(fd, slot);
                }
            }
            Some(Err(_)) if total > 0 => break,
            Some(Err(errno)) => return Outcome::Fail(errno),
            None if nonblock && room::grow(fd, conn, slot) => {}
            None if !nonblock
                && !is_held_up
                && room::leave_if_stuck(fd, index, || !signals.let_in(total > 0)) => {}
            None if total > 0 && nonblock => break,
            None if nonblock => {
                send::met_full_ring(index, slot);
                return Outcome::Fail(libc::EAGAIN);
            }
            None => {
                let woken = match is_held_up {
                    true => wait::for_others(fd, since, total > 0, signals),
                    false => wait::for_room(fd, index, since, total > 0, signals),
                };
                if let Woken::Fail(errno) = woken {
                    return if total > 0 { Outcome::Done(total) } else { Outcome::Fail(errno) };
                }
            }
        }
    }
    if total < count && nonblock {
        send::met_full_ring(index, slot);
    }
    Outcome::Done(total)
}

/// sendfile(2) into a ring connection.
///
/// # Safety
/// `offset` is null or valid.
pub unsafe fn sendfile(
    fd: i32,
    index: u32,
    slot: &Slot,
    from: i32,
    offset: *mut libc::off64_t,
    count: usize,
) -> Outcome {
    observer::count_total(|totals| &totals.sendpage);
    let nonblock = holders::is_nonblocking(fd, conn::at(index));
    // SAFETY: the caller's contract.
    let mut at = unsafe { offset.as_ref() }.copied();
    let signals = &mut Signals::new();
    let outcome =
        into_ring(fd, index, slot, count.min(0x7fff_f000), nonblock, signals, |dst, len| {
            // SAFETY: `dst` is `len` bytes of the ring's room.
            let n = unsafe {
                match at {
                    Some(at) => sys::pread(from, dst, len, at),
                    None => sys::read(from, dst, len),
                }
            };
            // A directory has no bytes to send.
            let n = n.map_err(|errno| if errno == libc::EISDIR { libc::EINVAL } else { errno })?;
            at = at.map(|at| at + n as libc::off64_t);
            Ok(n)
        });
    if let (Outcome::Done(_), Some(at)) = (outcome, at) {
        // SAFETY: `at` exists only where `offset` is valid.
        unsafe { *offset = at };
    }
    outcome
}

/// splice(2) from a pipe into a ring connection. `nonblock`: does not wait for the pipe.
pub fn splice_in(
    fd: i32,
    index: u32,
    slot: &Slot,
    from: i32,
    count: usize,
    nonblock: bool,
) -> Outcome {
    observer::count_total(|totals| &totals.splice);
    let room_nonblock = holders::is_nonblocking(fd, conn::at(index));
    let mut signals = Signals::new();
    loop {
        // Like splice: wait for the pipe's first bytes only, then take what is there. Without a lock.
        while !nonblock && sys::poll1(from, libc::POLLIN, 0) == 0 {
            if let Woken::Fail(errno) = signals.tick(false) {
                return Outcome::Fail(errno);
            }
        }
        let mut is_empty = false;
        let outcome = into_ring(fd, index, slot, count, room_nonblock, &mut signals, |dst, len| {
            is_empty = sys::poll1(from, libc::POLLIN, 0) == 0;
            if is_empty {
                return Err(libc::EAGAIN);
            }
            // SAFETY: `dst` is `len` bytes of the ring's room.
            let got = unsafe { sys::read_now(from, dst, len) };
            is_empty = got == Err(libc::EAGAIN);
            got
        });
        match outcome {
            // Another thread was faster.
            Outcome::Fail(_) if is_empty && !nonblock => {}
            outcome => return outcome,
        }
    }
}

/// splice(2) from a ring connection into a pipe. `nonblock`: does not wait for the pipe.
pub fn splice_out(fd: i32, index: u32, to: i32, count: usize, nonblock: bool) -> Outcome {
    observer::used(fd, index);
    let mut total = 0;
    loop {
        let fd = if total == 0 { fd } else { numbers::number(fd, index) };
        let (outcome, goes_on) = splice_part(fd, index, to, count - total, nonblock, total > 0);
        match outcome {
            Outcome::Done(n @ 1..) => {
                total += n;
                // A message may be in both spans.
                if total >= count || !goes_on {
                    return Outcome::Done(total);
                }
            }
            _ if total == 0 => return outcome,
            Outcome::Fail(errno) => {
                if !matches!(errno, libc::EAGAIN | libc::EINTR | libc::EPIPE) {
                    ending::put_back(conn::at(index), errno);
                }
                return Outcome::Done(total);
            }
            // What follows is the kernel's alone.
            Outcome::Kernel | Outcome::Other => {
                let fd = numbers::number(fd, index);
                return Outcome::Done(total + sys::splice_now(fd, to, count - total).unwrap_or(0));
            }
            Outcome::Done(0) => return Outcome::Done(total),
        }
    }
}

/// What is in one span. `has_some`: the call has moved bytes, and waits for nothing any more. And whether more may be there, in
/// the next one.
fn splice_part(
    fd: i32,
    index: u32,
    to: i32,
    count: usize,
    nonblock: bool,
    has_some: bool,
) -> (Outcome, bool) {
    let conn = conn::at(index);
    let nonblock = nonblock || has_some;
    let flags = if has_some { libc::MSG_DONTWAIT } else { 0 };
    let look = libc::MSG_PEEK | flags;
    let only = |outcome| (outcome, false);
    for _ in 0..LOOKS {
        let fd = numbers::number(fd, index);
        match conn.phase() {
            Phase::Ring => {}
            Phase::Offered | Phase::Early | Phase::Attached => {
                transition::progress(fd, index, Call::Receive);
                if conn.has(conn::F_CLC) && clc::awaits_first(fd, conn) {
                    if has_some || holders::is_nonblocking(fd, conn) {
                        return only(Outcome::Fail(libc::EAGAIN));
                    }
                    let (now, signals) = (clock::now_ns(), &mut Signals::new());
                    match wait::for_data(fd, index, false, Until::Data, now, signals) {
                        Woken::Look => continue,
                        Woken::Fail(errno) => return only(Outcome::Fail(errno)),
                    }
                }
                // The kernel knows no end before a message of the peer's.
                if conn.has(conn::F_CLC)
                    && fallback::leave(fd, index, Reason::KernelFeature).is_err()
                {
                    if conn.phase() == Phase::Plain {
                        continue;
                    }
                    return only(Outcome::Fail(libc::EAGAIN));
                }
                // Bytes before the boundary are the kernel's; a bounded peek at them decides.
                if conn.phase() != Phase::Ring {
                    match splice_tcp(fd, index, to, count, nonblock, look) {
                        Some(outcome) => return (outcome, true),
                        None => continue,
                    }
                }
            }
            // A message of the peer's may be in the stream still, which a receive leaves out.
            Phase::Plain if !clc::wind_up(fd, conn) => {
                return only(splice_received(fd, index, to, count, nonblock, flags));
            }
            _ => {
                let untold = ending::untold_to_splice(fd, conn);
                return only(untold.map_or(Outcome::Kernel, Outcome::Fail));
            }
        }
        let Some(slot) = conn.slot() else { return only(Outcome::Kernel) };
        let source = {
            let Some(_held) = Receiving::enter(fd, conn, slot) else {
                return only(Outcome::Fail(libc::EAGAIN));
            };
            let fd = numbers::number(fd, index);
            RxSpan::new(slot, conn.side()).source(|| kernel::tcp_read(fd, conn, slot))
        };
        let ends = state::is_due(conn.peer(slot).flags.load(Relaxed));
        if ends && fallback::follow(fd, index) {
            continue;
        }
        // What the peer has left in the ring comes before what follows by TCP.
        let is_in_ring = matches!(source, Ok(Source::Ring)) && (!ends || conn.rx(slot).has_data());
        if !is_in_ring {
            match splice_tcp(fd, index, to, count, nonblock, look) {
                Some(outcome) => return (outcome, true),
                None => continue,
            }
        }
        let room = match pipe_room(to, nonblock) {
            Ok(room) => room,
            Err(errno) => return only(Outcome::Fail(errno)),
        };
        {
            let Some(_held) = Receiving::enter(fd, conn, slot) else {
                return only(Outcome::Fail(libc::EAGAIN));
            };
            let fd = numbers::number(fd, index);
            // While we waited for the pipe, another thread may have taken the connection out of this ring.
            let source = RxSpan::new(slot, conn.side()).source(|| kernel::tcp_read(fd, conn, slot));
            if !conn.is_in_ring_of(slot) || !matches!(source, Ok(Source::Ring)) {
                continue;
            }
            let rx = conn.rx(slot);
            match rx.data() {
                Ok(data) if data.len > 0 => {
                    let most = data.len.min(count).min(room);
                    let (first, len) = rx.contiguous(data.cons, data.place, most);
                    let next = data.cons.wrapping_add(len as u64);
                    let (second, rest) = rx.contiguous(next, data.place, most - len);
                    let both = [
                        libc::iovec { iov_base: first.cast(), iov_len: len },
                        libc::iovec { iov_base: second.cast(), iov_len: rest },
                    ];
                    // SAFETY: both are unread bytes of the ring, the second where the ring begins anew, or empty.
                    match unsafe { sys::writev_now(to, &both) } {
                        Ok(n) => {
                            observer::count_total(|totals| &totals.splice);
                            let end = data.cons.wrapping_add(n as u64);
                            let record = observer::record_of(conn);
                            if capture::wants(record) {
                                capture::receiving(fd, conn, slot, data.place, data.cons, end);
                            }
                            let asleep = rx.consume_waking(&data, n);
                            observer::received_total(record, conn, slot, end);
                            if asleep {
                                bells::wake_writer(fd, conn, slot);
                            }
                            if ends {
                                // No doorbell is left before an urgent byte.
                                fallback::finish_rx(fd, conn, slot);
                            }
                            return (Outcome::Done(n), ends);
                        }
                        // Another thread has filled the pipe.
                        Err(libc::EAGAIN) if !nonblock => continue,
                        Err(errno) => return only(Outcome::Fail(errno)),
                    }
                }
                Ok(_) => (),
                Err(_) => return only(Outcome::Fail(libc::ECONNRESET)),
            }
        };
        // Nothing there: wait, and learn of the end, by the receiving path itself.
        match peek(fd, index, look) {
            Outcome::Done(0) => return only(Outcome::Done(0)),
            Outcome::Done(_) => {}
            // Another thread has closed the number; the call holds the connection.
            Outcome::Fail(libc::EBADF) | Outcome::Kernel | Outcome::Other
                if numbers::number(fd, index) != fd => {}
            other => return only(other),
        }
    }
    (splice_received(fd, index, to, count, nonblock, flags), true)
}

/// By a buffer: where only a receive knows what is the application's, or where it finds bytes again and again that the kernel
/// has not to move. A peer that scribbles makes that so.
#[cold]
fn splice_received(
    fd: i32,
    index: u32,
    to: i32,
    count: usize,
    nonblock: bool,
    flags: i32,
) -> Outcome {
    if let Err(errno) = pipe_room(to, nonblock) {
        return Outcome::Fail(errno);
    }
    let mut bytes = [0u8; PIPE_BUF];
    let iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: count.min(bytes.len()) };
    // SAFETY: a buffer on our stack.
    let mut into = unsafe { crate::os::iov::Buffers::new(&raw const iov, 1) };
    let outcome = super::recv::receive(numbers::number(fd, index), index, &mut into, flags);
    let Outcome::Done(n) = outcome else { return outcome };
    let mut at = 0;
    while at < n {
        let rest = [libc::iovec { iov_base: bytes[at..].as_mut_ptr().cast(), iov_len: n - at }];
        // SAFETY: at..n lies in the buffer.
        let written = unsafe { sys::writev_now(to, &rest) };
        // Another thread has filled the pipe: these bytes are in nobody's hands but ours.
        let waited = match written {
            Ok(m) => {
                at += m;
                Ok(0)
            }
            Err(libc::EAGAIN) => pipe_room(to, false),
            Err(errno) => Err(errno),
        };
        match waited {
            Ok(_) | Err(libc::EINTR) => {}
            Err(errno) => return Outcome::Fail(errno),
        }
    }
    outcome
}

/// Bytes that a write to the pipe takes at once; waits for room unless told not to.
fn pipe_room(pipe: i32, nonblock: bool) -> Result<usize, Errno> {
    let mut is = sys::poll1(pipe, libc::POLLOUT, 0);
    if is & (libc::POLLOUT | libc::POLLERR) == 0 {
        if nonblock {
            return Err(libc::EAGAIN);
        }
        let mut p = libc::pollfd { fd: pipe, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one valid pollfd; the real function is a cancellation point, as splice is.
        if unsafe { real::poll(&raw mut p, 1, -1) } < 0 {
            return Err(crate::os::errno::errno());
        }
        is = p.revents;
    }
    // Nobody reads it.
    if is & libc::POLLERR != 0 {
        sys::raise(libc::SIGPIPE);
        return Err(libc::EPIPE);
    }
    if sys::ioctl_int(pipe, libc::FIONREAD) == Ok(0) {
        return Ok(sys::fcntl(pipe, libc::F_GETPIPE_SZ, 0).unwrap_or(PIPE_BUF));
    }
    // A pipe that is writable takes so many at once.
    Ok(PIPE_BUF)
}

fn peek(fd: i32, index: u32, flags: i32) -> Outcome {
    let mut byte = 0u8;
    let iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: one byte on our stack.
    let mut to = unsafe { crate::os::iov::Buffers::new(&raw const iov, 1) };
    super::recv::receive(fd, index, &mut to, flags)
}

/// Bytes of the TCP span, of which only we know where it ends, a few at a time. `None`: they are elsewhere by now.
/// `look`: flags for a look at it.
fn splice_tcp(
    fd: i32,
    index: u32,
    to: i32,
    count: usize,
    nonblock: bool,
    look: i32,
) -> Option<Outcome> {
    if let Err(errno) = pipe_room(to, nonblock) {
        return Some(Outcome::Fail(errno));
    }
    // Unlike a receive it does not go on behind an urgent byte.
    if control::knows_mark(fd) && kernel::is_at_mark(fd) {
        return Some(if let Some(errno) = ending::at_mark(fd, conn::at(index)) {
            Outcome::Fail(errno)
        } else if holders::is_nonblocking(fd, conn::at(index)) && !kernel::is_shut_to_reads(fd) {
            Outcome::Fail(libc::EAGAIN)
        } else {
            Outcome::Done(0)
        });
    }
    match peek(fd, index, look) {
        Outcome::Done(1..) => {}
        Outcome::Fail(libc::EBADF) | Outcome::Kernel | Outcome::Other
            if numbers::number(fd, index) != fd =>
        {
            return None;
        }
        other => return Some(other),
    }
    match move_span(numbers::number(fd, index), conn::at(index), to, count) {
        // Another thread has filled the pipe.
        Err(libc::EAGAIN) if !nonblock => None,
        Err(errno) => Some(Outcome::Fail(errno)),
        Ok(0) => None,
        Ok(n) => Some(Outcome::Done(n)),
    }
}

/// Has the kernel move what is there, up to where the span ends: what the pipe refuses stays in the socket. 0 where that is
/// nothing.
fn move_span(fd: i32, conn: &conn::Conn, to: i32, count: usize) -> Result<usize, Errno> {
    let Some(_held) = conn.rx_lock.enter() else { return Err(libc::EAGAIN) };
    let fd = numbers::number(fd, conn::index_of(conn));
    let (phase, slot) = (conn.phase(), conn.slot());
    let is_ours = match slot {
        Some(_) => matches!(phase, Phase::Offered | Phase::Attached | Phase::Ring),
        None => phase == Phase::Early && !conn.has(conn::F_CLC),
    };
    if !is_ours {
        return Ok(0);
    }
    let family = slot.map(|slot| Family::receiving(fd, conn, slot).ok_or(libc::ECONNRESET));
    let _family = family.transpose()?;
    let span = slot.map(|slot| (RxSpan::new(slot, conn.side()), slot));
    let left = || match span {
        None => usize::MAX,
        Some((span, slot)) => match span.source(|| kernel::tcp_read(fd, conn, slot)) {
            Ok(Source::Tcp(left)) => usize::try_from(left).unwrap_or(usize::MAX),
            _ => 0,
        },
    };
    let mut bytes = [0u8; PIPE_BUF];
    let most = count.min(bytes.len()).min(left());
    let look = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: `most` bytes of a buffer on our stack.
    let Ok(there) = (unsafe { sys::recv(fd, bytes.as_mut_ptr(), most, look) }) else {
        return Ok(0);
    };
    // Asked again, as after any peek: the span may have got its end, and doorbells be behind it.
    let most = there.min(left());
    if most == 0 {
        return Ok(0);
    }
    let moved = sys::splice_now(fd, to, most)?;
    if let Some((span, slot)) = span {
        let _ = span.took_tcp(moved as u64, || kernel::tcp_read(fd, conn, slot));
        observer::received(conn, moved as u64);
    }
    let iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: moved };
    // SAFETY: a buffer on our stack, which has what was moved.
    capture::received(fd, conn, &unsafe { crate::os::iov::Buffers::new(&raw const iov, 1) }, moved);
    Ok(moved)
}
