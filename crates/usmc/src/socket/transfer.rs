//! sendfile(2) and splice(2) with a ring connection: file and pipe bytes go straight into or out of the
//! ring's memory, one copy made by the kernel.

use usmc_shm::layout::Slot;
use usmc_shm::span::{RxSpan, Source};
use usmc_shm::sync::Ordering::Relaxed;

use super::send::{self, ByKernel};
use super::{Outcome, close, control, recv};
use crate::family::holders;
use crate::family::locks::Family;
use crate::handshake::{clc, transition};
use crate::os::errno::errno;
use crate::os::reason::Reason;
use crate::os::signals::{Signals, Woken};
use crate::os::sys::{self, Errno};
use crate::os::unwind::keeping;
use crate::os::{clock, real};
use crate::record::change_over::Call;
use crate::record::conn::{self, Conn};
use crate::record::kernel;
use crate::record::numbers::{self, Hold};
use crate::record::phase::Phase;
use crate::stream::unseen::Unseen;
use crate::stream::wait::{self, Until};
use crate::stream::{ending, fallback};
use crate::watch::{capture, observer};

/// How often one call looks where the kernel's bytes have gone that it was told of.
const LOOKS: u32 = 256;

/// What POSIX calls so: bytes that a pipe takes at once or not at all.
const PIPE_BUF: usize = 4096;

/// What becomes of a call that has found its number closed before it kept the connection.
fn closed(fd: i32, index: u32) -> Outcome {
    close::closed_before(fd, index).unwrap_or(Outcome::Other)
}

/// sendfile(2) into a ring connection. `real`: the real call, where the connection comes out of the ring.
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
    real: &mut dyn FnMut(i32) -> isize,
) -> Outcome {
    observer::count_total(|totals| &totals.sendpage);
    if count == 0 {
        return Outcome::Done(0);
    }
    let mut fill = |dst, len| {
        // SAFETY: `dst` is `len` bytes of the ring's room; the caller's contract.
        let n = unsafe {
            match offset.as_ref() {
                Some(at) => sys::pread(from, dst, len, *at),
                None => sys::read(from, dst, len),
            }
        };
        // A directory has no bytes to send.
        let n = n.map_err(|errno| if errno == libc::EISDIR { libc::EINVAL } else { errno })?;
        // SAFETY: the caller's contract.
        if let Some(at) = unsafe { offset.as_mut() } {
            *at += n as libc::off64_t;
        }
        Ok(n)
    };
    let Some(hold) = Hold::enter(fd, index) else { return closed(fd, index) };
    let mut from = ByKernel { hold: Some(hold), count, fill: &mut fill, real };
    send::through_ring(fd, index, slot, &mut from, 0)
}

/// splice(2) from a pipe into a ring connection. `nonblock`: does not wait for the pipe; `real`: as for [`sendfile`].
pub fn splice_in(
    fd: i32,
    index: u32,
    slot: &Slot,
    from: i32,
    count: usize,
    nonblock: bool,
    real: &mut dyn FnMut(i32) -> isize,
) -> Outcome {
    observer::count_total(|totals| &totals.splice);
    let is_empty = || sys::poll1(from, libc::POLLIN, 0) == 0;
    loop {
        let Some(mut hold) = Hold::enter(fd, index) else { return closed(fd, index) };
        // Like splice: wait for the pipe's first bytes only, then take what is there. Without a lock.
        if !nonblock && is_empty() {
            let woken;
            (hold, woken) = keeping(hold, || {
                let mut signals = Signals::new();
                while is_empty() {
                    if let Woken::Fail(errno) = signals.tick(false) {
                        return Woken::Fail(errno);
                    }
                }
                if signals.let_in(false) { Woken::Fail(libc::EINTR) } else { Woken::Look }
            });
            if let Woken::Fail(errno) = woken {
                return Outcome::Fail(errno);
            }
        }
        let mut was_empty = false;
        let mut fill = |dst, len| {
            // SAFETY: `dst` is `len` bytes of the ring's room.
            let read = || unsafe { sys::read_now(from, dst, len) };
            let got = if is_empty() { Err(libc::EAGAIN) } else { read() };
            was_empty = got == Err(libc::EAGAIN);
            got
        };
        let mut bytes = ByKernel { hold: Some(hold), count, fill: &mut fill, real };
        match send::through_ring(numbers::number(fd, index), index, slot, &mut bytes, 0) {
            // Another thread was faster.
            Outcome::Fail(_) if was_empty && !nonblock => {}
            outcome => return outcome,
        }
    }
}

/// splice(2) from a connection into a pipe. `nonblock`: does not wait for the pipe; `real`: the real call, by this number, where
/// the kernel alone knows the bytes.
pub fn splice_out(
    fd: i32,
    index: u32,
    to: i32,
    count: usize,
    nonblock: bool,
    real: &mut dyn FnMut(i32) -> isize,
) -> Outcome {
    observer::used(fd, index);
    let Some(hold) = Hold::enter(fd, index) else { return closed(fd, index) };
    let splice = || {
        let mut total = 0;
        loop {
            let fd = numbers::number(fd, index);
            let returns = conn::at(index).returns();
            match splice_part(fd, index, to, count - total, nonblock, total > 0) {
                (Outcome::Done(n @ 1..), goes_on) => {
                    total += n;
                    // A message may be in both spans.
                    if total >= count || !goes_on {
                        return Outcome::Done(total);
                    }
                }
                (Outcome::Kernel | Outcome::Other, _) if total == 0 => {
                    let Some(call) = Unseen::enter(index, returns) else { continue };
                    let n = keeping(call, || real(numbers::number(fd, index))).1;
                    return usize::try_from(n)
                        .map_or_else(|_| Outcome::Fail(errno()), Outcome::Done);
                }
                (outcome, _) if total == 0 => return outcome,
                (Outcome::Fail(errno), _) => {
                    if !matches!(errno, libc::EAGAIN | libc::EINTR | libc::EPIPE) {
                        ending::put_back(conn::at(index), errno);
                    }
                    return Outcome::Done(total);
                }
                // What follows is the kernel's alone.
                (Outcome::Kernel | Outcome::Other, _) => {
                    let fd = numbers::number(fd, index);
                    let more = sys::splice_now(fd, to, count - total).unwrap_or(0);
                    return Outcome::Done(total + more);
                }
                (Outcome::Done(0), _) => return Outcome::Done(total),
            }
        }
    };
    keeping(hold, splice).1
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
        let slot = conn.slot().filter(|_| conn.phase() == Phase::Ring);
        let ends = slot.is_some_and(|slot| conn.peer(slot).flags(Relaxed).is_returning());
        if ends && fallback::follow(fd, index) {
            continue;
        }
        let room = match pipe_room(to, nonblock) {
            Ok(room) => room,
            Err(errno) => return only(Outcome::Fail(errno)),
        };
        // What the peer has left in the ring comes before what follows by TCP.
        let ring =
            slot.filter(|slot| conn.end(slot).reads_ring() && (!ends || conn.rx(slot).has_data()));
        // Unlike a receive it does not go on behind an urgent byte.
        if ring.is_none() && control::knows_mark(fd) && kernel::is_at_mark(fd) {
            return only(if let Some(errno) = ending::at_mark(fd, conn) {
                Outcome::Fail(errno)
            } else if holders::is_nonblocking(fd, conn) && !kernel::is_shut_to_reads(fd) {
                Outcome::Fail(libc::EAGAIN)
            } else {
                Outcome::Done(0)
            });
        }
        // Nothing there: wait, and learn of the end, by the receiving path itself.
        if ring.is_none_or(|slot| !conn.rx(slot).has_data()) {
            match peek(fd, index, libc::MSG_PEEK | flags) {
                Outcome::Done(1..) => {}
                // Another thread has closed the number; the call holds the connection.
                Outcome::Fail(libc::EBADF) | Outcome::Kernel | Outcome::Other
                    if numbers::number(fd, index) != fd =>
                {
                    continue;
                }
                other => return only(other),
            }
        }
        match move_some(fd, conn, ring, to, count.min(room)) {
            Ok(0) => {}
            Ok(n) => return (Outcome::Done(n), ring.is_none() || ends),
            // Another thread has filled the pipe.
            Err(libc::EAGAIN) if !nonblock => {}
            Err(errno) => return only(Outcome::Fail(errno)),
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

/// Has the kernel move what is there, in the `ring` or of TCP: what the pipe refuses stays where it is. 0 where nothing is
/// there, or not there any more.
fn move_some(
    fd: i32,
    conn: &Conn,
    ring: Option<&Slot>,
    to: i32,
    count: usize,
) -> Result<usize, Errno> {
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
    let Some(slot) = ring else { return move_tcp(fd, conn, slot, to, count) };
    let source = RxSpan::new(slot, conn.side()).source(|| kernel::tcp_read(fd, conn, slot));
    // While the call waited, another thread may have taken the connection out of this ring.
    if !conn.is_in_ring_of(slot) || !matches!(source, Ok(Source::Ring)) {
        return Ok(0);
    }
    let rx = conn.rx(slot);
    let data = rx.data().map_err(|_| libc::ECONNRESET)?;
    if data.len == 0 {
        return Ok(0);
    }
    let (first, len) = rx.contiguous(data.cons, data.place, data.len.min(count));
    let behind = data.cons.wrapping_add(len as u64);
    let (second, rest) = rx.contiguous(behind, data.place, data.len.min(count) - len);
    let both = [
        libc::iovec { iov_base: first.cast(), iov_len: len },
        libc::iovec { iov_base: second.cast(), iov_len: rest },
    ];
    // SAFETY: both are unread bytes of the ring, the second where the ring begins anew, or empty.
    let n = unsafe { sys::writev_now(to, &both)? };
    observer::count_total(|totals| &totals.splice);
    let record = observer::record_of(conn);
    recv::taken((fd, conn, slot), &rx, &data, n, (record, capture::wants(record)));
    if conn.peer(slot).flags(Relaxed).is_returning() {
        // No doorbell is left before an urgent byte.
        fallback::finish_rx(fd, conn, slot);
    }
    Ok(n)
}

/// The same of TCP, up to where its span ends. The caller has the locks.
fn move_tcp(
    fd: i32,
    conn: &Conn,
    slot: Option<&Slot>,
    to: i32,
    count: usize,
) -> Result<usize, Errno> {
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
