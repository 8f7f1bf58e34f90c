//! The calls that move bytes.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use libc::{iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec};
use usmc_shm::layout::Slot;
use usmc_shm::sync::Ordering::Relaxed;

use super::{fail, is_nowhere, is_readable, message};
use crate::os::iov::Buffers;
use crate::os::reason::Reason;
use crate::os::table::{self, Entry};
use crate::os::time::Time;
use crate::os::unwind::{cancellation_point, keeping};
use crate::os::{clock, real};
use crate::passing::passed;
use crate::record::phase::Phase;
use crate::record::{conn, order};
use crate::socket::early::{self, Early};
use crate::socket::send::{self, Way};
use crate::socket::{Outcome, option, recv as receiving};
use crate::stream::unseen::Unseen;
use crate::stream::{ending, fallback, unread};
use crate::watch::{capture, observer};

/// Most entries of an iovec array (UIO_MAXIOV).
pub(super) const IOV_MAX: usize = 1024;

/// Whether another thread has made the number mean another connection before the call began on it: which one.
#[inline(always)]
fn is_other(fd: c_int, index: &mut u32) -> bool {
    match table::settled(fd) {
        Entry::Conn(now) if now != *index => {
            *index = now;
            true
        }
        _ => false,
    }
}

/// `None`: the connection is not what it was any more, decide again. `returns`: as for [`Unseen::enter`].
fn unseen(index: u32, returns: u32, kernel: &mut impl FnMut() -> ssize_t) -> Option<ssize_t> {
    let call = Unseen::enter(index, returns)?;
    Some(keeping(call, kernel).1)
}

/// `name(fd, …) |socket, kernel| …;`: for a number that is no TCP socket's a jump to libc's function. What a connection needs
/// is a function of its own, for the registers that it saves would be saved for every number; `kernel` is the real call.
macro_rules! of_connections {
    ($($(#[$doc:meta])* $name:ident($fd:ident $(, $arg:ident: $ty:ty)*) |$socket:ident, $kernel:ident| $body:expr;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub unsafe fn $name($fd: c_int $(, $arg: $ty)*) -> ssize_t {
            #[inline(never)]
            unsafe fn of_connection(index: u32, $fd: c_int $(, $arg: $ty)*) -> ssize_t {
                // SAFETY: the caller's contract, as for all that is done with a connection.
                unsafe {
                    let ($socket, $kernel) = (($fd, index), move || real::$name($fd $(, $arg)*));
                    $body
                }
            }
            // SAFETY: the caller's contract.
            unsafe {
                match table::settled($fd) {
                    Entry::Conn(index) => of_connection(index, $fd $(, $arg)*),
                    _ => real::$name($fd $(, $arg)*),
                }
            }
        }
    )* };
}

of_connections! {
    /// read(2), which does not wait for 0 bytes, unlike recv(2)
    read(fd, buf: *mut c_void, len: size_t) |socket, kernel| {
        if len == 0 { kernel() } else { receive_one(socket, buf, len, 0, kernel) }
    };
    /// recv(2)
    recv(fd, buf: *mut c_void, len: size_t, flags: c_int) |socket, kernel| {
        receive_one(socket, buf, len, flags, kernel)
    };
    /// recvfrom(2)
    recvfrom(fd, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut sockaddr, addr_len: *mut socklen_t)
        |socket, kernel| {
        let mut from_kernel = false;
        let n = receive_one(socket, buf, len, flags, || {
            from_kernel = true;
            kernel()
        });
        // TCP names no sender. What is wrong with the pointer is said once the bytes are taken.
        if !from_kernel && n >= 0 && !addr.is_null() {
            if !is_readable(addr_len) {
                return fail(libc::EFAULT);
            }
            if (*addr_len as c_int) < 0 {
                return fail(libc::EINVAL);
            }
            *addr_len = 0;
        }
        n
    };
    /// readv(2), which does not wait for 0 bytes either
    readv(fd, iov: *const iovec, count: c_int) |socket, kernel| {
        let entries = count as c_uint as usize;
        // The caller's array, if that is what it is.
        if entries > IOV_MAX || is_nowhere(iov) || Buffers::new(iov, entries).left() == 0 {
            return kernel();
        }
        receive_many(socket, iov, entries, 0, kernel)
    };
    /// write(2)
    write(fd, buf: *const c_void, len: size_t) |socket, kernel| send_one(socket, buf, len, 0, kernel);
    /// send(2)
    send(fd, buf: *const c_void, len: size_t, flags: c_int) |socket, kernel| {
        send_one(socket, buf, len, flags, kernel)
    };
    /// sendto(2). Only TCP Fast Open uses the address, and that is the kernel's.
    sendto(fd, buf: *const c_void, len: size_t, flags: c_int, addr: *const sockaddr, addr_len: socklen_t)
        |socket, kernel| {
        if !addr.is_null() && is_bad_name(addr, addr_len as c_int) {
            return kernel();
        }
        send_one(socket, buf, len, flags, kernel)
    };
    /// writev(2), which looks at nothing where there are no bytes, unlike write(2)
    writev(fd, iov: *const iovec, count: c_int) |socket, kernel| {
        if is_empty(iov, count) {
            return send_refused(socket.1, iov, count as c_uint as usize, kernel);
        }
        send_many(socket, iov, count as usize, 0, kernel)
    };
}

/// Receives into one buffer; `kernel` is the real call.
#[inline(always)]
unsafe fn receive_one(
    socket: (c_int, u32),
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    if is_nowhere(buf) && len > 0 && flags & libc::MSG_TRUNC == 0 {
        // SAFETY: the caller's contract.
        return unsafe { receive_nowhere(socket, flags, kernel) };
    }
    let iov = iovec { iov_base: buf, iov_len: len };
    // SAFETY: one entry on our stack, the application's buffer.
    unsafe { receive_into(socket, &raw const iov, 1, flags, kernel) }
}

/// Receives into an array of buffers; `kernel` is the real call.
pub(super) unsafe fn receive_many(
    (fd, index): (c_int, u32),
    iov: *const iovec,
    count: usize,
    flags: c_int,
    mut kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    // SAFETY: the caller's array. With MSG_TRUNC nothing is written.
    let is_bad = count > 0 && is_nowhere(iov)
        || (flags & libc::MSG_TRUNC == 0 && unsafe { has_bad_entry(iov, count) });
    if count > IOV_MAX || (is_bad && is_nowhere(iov)) {
        return kernel();
    }
    if is_bad {
        // SAFETY: the caller's contract.
        return unsafe {
            let good = good_entries(iov, count);
            // What is there is copied as a whole or not at all.
            let fits = || unread::unread_anyhow(fd, index) <= Buffers::new(iov, good).left();
            match good {
                1.. if fits() => receive_many((fd, index), iov, good, flags, kernel),
                _ => receive_nowhere((fd, index), flags, kernel),
            }
        };
    }
    // SAFETY: as above.
    unsafe { receive_into((fd, index), iov, count, flags, kernel) }
}

/// The same with entries that can be used.
#[inline(always)]
unsafe fn receive_into(
    socket: (c_int, u32),
    iov: *const iovec,
    count: usize,
    flags: c_int,
    kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    let fd = socket.0;
    let captured = move |got: ssize_t, index: u32| {
        // SAFETY: the application's buffers, which the kernel has filled.
        unsafe { capture::received_by_kernel(fd, index, iov, count, got, flags) };
        got
    };
    // Of an urgent byte and of errors there may be none, and the call does not wait for one.
    let may_sleep = flags & (libc::MSG_DONTWAIT | libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0;
    receive_by(socket, may_sleep, kernel, captured, move |index| {
        // SAFETY: the application's array and buffers.
        let mut to = unsafe { Buffers::new(iov, count) };
        receiving::receive(fd, index, &mut to, flags)
    })
}

/// Receives in some way: `kernel` is the real call, which `captured` hears of and `may_sleep` as far as O_NONBLOCK lets it, and `receive`
/// the call where the kernel alone cannot do it.
#[inline(always)]
pub(super) fn receive_by(
    (fd, mut index): (c_int, u32),
    may_sleep: bool,
    mut kernel: impl FnMut() -> ssize_t,
    // Not a closure around `kernel`: that would cost every call something.
    captured: impl Fn(ssize_t, u32) -> ssize_t,
    mut receive: impl FnMut(u32) -> Outcome,
) -> ssize_t {
    let mut is_first = true;
    loop {
        let returns = conn::at(index).returns();
        if let Some(call) = Early::receive(fd, index) {
            // The real call is a cancellation point by itself.
            let receive =
                || match if may_sleep { early::stay_awake(fd, conn::at(index)) } else { Ok(()) } {
                    Ok(()) => kernel(),
                    Err(code) => fail(code),
                };
            return captured(keeping(call, receive).1, index);
        }
        if is_first {
            cancellation_point();
            is_first = false;
        }
        match receive(index) {
            Outcome::Done(n) => return n as ssize_t,
            Outcome::Fail(code) => return fail(code),
            // The record may be of no connection any more.
            Outcome::Other | Outcome::Kernel if is_other(fd, &mut index) => {}
            // It is the same again.
            Outcome::Other => {}
            Outcome::Kernel => {
                if let Some(got) = unseen(index, returns, &mut kernel) {
                    return captured(got, index);
                }
            }
        }
    }
}

/// A receive whose buffer cannot be written to, which is said once there is something to write.
#[cold]
unsafe fn receive_nowhere(
    (fd, index): (c_int, u32),
    flags: c_int,
    kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    let mut byte = 0u8;
    let how = flags & libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: one byte of ours.
    match unsafe { receive_one((fd, index), (&raw mut byte).cast(), 1, how, kernel) } {
        1.. => fail(libc::EFAULT),
        other => other,
    }
}

/// So many entries from the first one on can be used, none where these have no bytes.
unsafe fn good_entries(iov: *const iovec, count: usize) -> usize {
    // SAFETY: the caller's array of `count` entries.
    let entries = unsafe { core::slice::from_raw_parts(iov, count) };
    // SAFETY: as above, one of them.
    let is_good = |entry: &&iovec| !unsafe { has_bad_entry(*entry, 1) };
    let good = entries.iter().take_while(is_good);
    let (number, bytes) =
        good.fold((0, 0usize), |(n, sum), e| (n + 1, sum.saturating_add(e.iov_len)));
    if bytes == 0 { 0 } else { number }
}

/// Arrays the kernel would refuse are left to the kernel.
unsafe fn has_bad_entry(iov: *const iovec, count: usize) -> bool {
    if is_nowhere(iov) {
        return count > 0;
    }
    // SAFETY: the caller's array of `count` entries.
    let entries = unsafe { core::slice::from_raw_parts(iov, count) };
    let bad =
        |e: &iovec| (is_nowhere(e.iov_base) && e.iov_len > 0) || e.iov_len > isize::MAX as usize;
    entries.iter().any(bad)
}

timed! {
    /// recvmsg(2); timestamps among the control messages are the kernel's
    recvmsg or recvmsg_time64 by __recvmsg64(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t |kernel()| {
        message::clear_padding(msg);
        recvmsg_by(fd, msg, flags, kernel)
    };
    /// recvmmsg(2)
    recvmmsg or recvmmsg_time64 by __recvmmsg64
        (fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int
        |kernel()| recvmmsg_by((fd, msgs, count, flags, timeout), kernel, |msg, flags| recvmsg(fd, msg, flags));
}

/// recvmsg(2); `kernel` is the real call.
unsafe fn recvmsg_by(
    fd: c_int,
    msg: *mut msghdr,
    flags: c_int,
    mut kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    // SAFETY: the caller's contract.
    unsafe {
        let Entry::Conn(index) = table::settled(fd) else {
            return passed::receiving(fd, flags, msg, kernel);
        };
        if is_nowhere(msg) || has_bad_name(&*msg, false) {
            return kernel();
        }
        let (iov, count) = ((*msg).msg_iov, (*msg).msg_iovlen);
        let mut from_kernel = false;
        let n = receive_many((fd, index), iov, count, flags, || {
            from_kernel = true;
            kernel()
        });
        if !from_kernel && n >= 0 {
            message::received(fd, &mut *msg, flags);
        }
        n
    }
}

/// recvmmsg(2); `kernel` is the real call, `one` receives one message.
unsafe fn recvmmsg_by<T: Time>(
    (fd, msgs, count, flags, timeout): (c_int, *mut mmsghdr, c_uint, c_int, *mut T),
    kernel: impl FnOnce() -> c_int,
    one: impl Fn(*mut msghdr, c_int) -> ssize_t,
) -> c_int {
    if is_nowhere(msgs) || !matches!(table::settled(fd), Entry::Conn(_)) {
        // SAFETY: the caller's contract.
        return unsafe {
            let done = kernel();
            (0..done.max(0) as usize).for_each(|i| {
                passed::receiving(fd, flags, &raw mut (*msgs.add(i)).msg_hdr, || 0);
            });
            done
        };
    }
    if !timeout.is_null() && !is_readable(timeout) {
        return fail(libc::EFAULT);
    }
    // SAFETY: the caller's contract.
    let limit_ns = match unsafe { timeout.as_ref() } {
        Some(time) if !time.is_valid() => return fail(libc::EINVAL),
        time => time.map(|t| t.ns() as u64),
    };
    // An error is told before any message.
    let mut error: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    let at = (&raw mut error).cast::<c_void>();
    // SAFETY: an int of ours and its size.
    let asked = flags & libc::MSG_ERRQUEUE == 0
        && may_have_failed(fd)
        && unsafe { super::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, at, &raw mut len) }
            == 0;
    if asked && error != 0 {
        return fail(error);
    }
    let start = clock::now_ns();
    let mut done = 0;
    let mut each = flags & !libc::MSG_WAITFORONE;
    while done < count.min(IOV_MAX as c_uint) {
        // SAFETY: done < count entries.
        let n = unsafe {
            let m = msgs.add(done as usize);
            let n = one(&raw mut (*m).msg_hdr, each);
            if n >= 0 {
                (*m).msg_len = n as c_uint;
            }
            n
        };
        if n < 0 {
            if done == 0 {
                return -1;
            }
            // The next call tells it.
            if let Entry::Conn(index) = table::settled(fd) {
                ending::put_back(conn::at(index), crate::os::errno::errno());
            }
            return done as c_int;
        }
        done += 1;
        if flags & libc::MSG_WAITFORONE != 0 {
            each |= libc::MSG_DONTWAIT;
        }
        if let Some(limit) = limit_ns {
            let left = limit.saturating_sub(clock::now_ns() - start);
            // SAFETY: the application's, of which there is a limit.
            unsafe { *timeout = T::from_ns(left as i64) };
            if left == 0 {
                break;
            }
        }
    }
    done as c_int
}

/// Whether SO_ERROR may have something to say: of a connection in the ring only once it has ended.
fn may_have_failed(fd: c_int) -> bool {
    let Entry::Conn(index) = table::settled(fd) else { return true };
    let conn = conn::at(index);
    conn.phase() != Phase::Ring
        || conn.slot().is_none_or(|slot| ending::ending(fd, conn, slot) != ending::Ending::Alive)
}

/// A send of what the kernel would refuse, which it does. But of a bad buffer behind good ones it may send the good part,
/// and that is not its to send on a connection in the ring.
#[cold]
pub(super) unsafe fn send_refused(
    index: u32,
    iov: *const iovec,
    count: usize,
    mut kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    let in_ring = conn::at(index).slot().is_some() && count <= IOV_MAX && !is_nowhere(iov);
    // SAFETY: the caller's array.
    if in_ring && unsafe { has_bad_entry(iov, count) && good_entries(iov, count) > 0 } {
        return fail(libc::EFAULT);
    }
    kernel()
}

/// Sends from an array of buffers; `kernel` is the real call.
#[inline(always)]
pub(super) unsafe fn send_many(
    (fd, index): (c_int, u32),
    iov: *const iovec,
    count: usize,
    flags: c_int,
    mut kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    cancellation_point();
    if flags & (libc::MSG_OOB | libc::MSG_ZEROCOPY) != 0
        && let Err(code) = leave_for(fd, index, flags)
    {
        return fail(code);
    }
    if flags & libc::MSG_FASTOPEN != 0 && conn::at(index).phase() == Phase::Ring {
        // It is connected, or this is not supported: the kernel says so before it looks at the bytes.
        return kernel();
    }
    send_by((fd, index), iov, count, kernel, move |index, slot| {
        // SAFETY: the application's array and buffers.
        let mut from = unsafe { Buffers::new(iov, count) };
        send::through_ring(fd, index, slot, &mut from, flags)
    })
}

/// Sends in some way what is in these buffers, or, where `iov` is null, `count` bytes that are somewhere else: `kernel` is the real
/// call, and `through_ring` the call in the ring.
#[inline(always)]
pub(super) fn send_by(
    (fd, mut index): (c_int, u32),
    iov: *const iovec,
    count: usize,
    mut kernel: impl FnMut() -> ssize_t,
    mut through_ring: impl FnMut(u32, &'static Slot) -> Outcome,
) -> ssize_t {
    let mut kernel = |index: u32| {
        let conn = conn::at(index);
        let use_count = conn.use_count.load(Relaxed);
        let sent = kernel();
        // Another thread may have closed the number while the kernel slept, or before, and the record is another connection's.
        if conn.use_count.load(Relaxed) != use_count || table::settled(fd) != Entry::Conn(index) {
            return sent;
        }
        if !iov.is_null() {
            // SAFETY: the application's buffers, which the kernel has read.
            unsafe { capture::sent_by_kernel(fd, index, iov, count, sent) };
        }
        order::taken(conn);
        if sent < 0 {
            ending::told_by_send(fd, conn, crate::os::errno::errno());
        }
        sent
    };
    loop {
        let returns = conn::at(index).returns();
        let done = match send::way(fd, index) {
            // The record may be of no connection any more.
            Way::Plain if is_other(fd, &mut index) => None,
            Way::Plain => unseen(index, returns, &mut || kernel(index)),
            Way::Failed(errno) => Some(fail(errno)),
            Way::Tcp(guard) => {
                // SAFETY: the application's array.
                let left = || unsafe { Buffers::new(iov, count) }.left();
                let wanted = if iov.is_null() { count } else { left() };
                let (guard, sent) = keeping(guard, || kernel(index));
                Some(guard.done(fd, index, sent, wanted))
            }
            Way::Ring(slot) => match through_ring(index, slot) {
                Outcome::Done(n) => Some(n as ssize_t),
                Outcome::Fail(code) => Some(fail(code)),
                Outcome::Other | Outcome::Kernel if is_other(fd, &mut index) => None,
                // It is the same again.
                Outcome::Other => None,
                Outcome::Kernel => unseen(index, returns, &mut || kernel(index)),
            },
        };
        if let Some(n) = done {
            return n;
        }
    }
}

/// Before a send that the kernel has to see.
#[cold]
fn leave_for(fd: c_int, index: u32, flags: c_int) -> Result<(), c_int> {
    // Urgent data is a mark in TCP's stream.
    let is_urgent = flags & libc::MSG_OOB != 0;
    if is_urgent && conn::at(index).phase() == Phase::Ring {
        observer::count_total(|totals| &totals.urgent);
    }
    if !is_urgent && !option::completes_sends(fd) {
        return Ok(());
    }
    let reason = if is_urgent { Reason::Urgent } else { Reason::KernelFeature };
    // A peer that reads no more answers any send with a RST, and must not get one for what it has not read: that stays
    // where it is.
    if is_urgent && ending::leaves_unread(conn::at(index)) {
        return Ok(());
    }
    match fallback::leave(fd, index, reason) {
        // What is still to be read from the ring of a peer that left it first does not matter to a send.
        Err(_) if fallback::sends_by_tcp(fd, index, reason) => Ok(()),
        // What the kernel says when it has no memory for the notification.
        Err(_) if !is_urgent => Err(libc::ENOBUFS),
        done => done,
    }
}

#[inline(always)]
unsafe fn send_one(
    socket: (c_int, u32),
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    mut kernel: impl FnMut() -> ssize_t,
) -> ssize_t {
    if is_nowhere(buf) && len > 0 {
        return kernel();
    }
    let iov = iovec { iov_base: buf.cast_mut(), iov_len: len };
    // SAFETY: one entry on our stack, the application's buffer; it is only read.
    unsafe { send_many(socket, &raw const iov, 1, flags, kernel) }
}

/// Whether the kernel refuses a destination before it looks at the bytes (`move_addr_to_kernel` in net/socket.c).
fn is_bad_name<T>(name: *const T, len: c_int) -> bool {
    const MOST: usize = size_of::<libc::sockaddr_storage>();
    usize::try_from(len).map_or(true, |len| len > MOST) || (len > 0 && !is_readable(name))
}

/// Whether the kernel refuses a message for its name; it reads that of one that is `sent` (`__copy_msghdr`).
#[inline(always)]
fn has_bad_name(msg: &msghdr, sent: bool) -> bool {
    let (name, len) = (msg.msg_name, msg.msg_namelen as c_int);
    // Longer ones are cut.
    !name.is_null() && (len < 0 || (sent && len > 0 && !is_readable(name)))
}

/// sendmsg(2)
pub unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    let kernel = move || {
        // SAFETY: the caller's contract.
        unsafe { real::sendmsg(fd, msg, flags) }
    };
    // SAFETY: the caller's contract.
    unsafe {
        let Entry::Conn(index) = table::settled(fd) else {
            return passed::sending(fd, msg, kernel);
        };
        if is_nowhere(msg) || has_bad_name(&*msg, true) {
            return kernel();
        }
        let m = message::read(msg);
        if m.msg_iovlen > IOV_MAX || has_bad_entry(m.msg_iov, m.msg_iovlen) {
            return send_refused(index, m.msg_iov, m.msg_iovlen, kernel);
        }
        let may_be_in_ring =
            !matches!(conn::at(index).phase(), Phase::Fresh | Phase::Listen | Phase::Plain);
        if m.msg_controllen > 0 && !m.msg_control.is_null() && may_be_in_ring {
            // What the kernel makes of control messages does not depend on the bytes. (Nor on a connection, but
            // MSG_FASTOPEN would make one of nothing.)
            let probe = msghdr { msg_iov: ptr::null_mut(), msg_iovlen: 0, ..m };
            if real::sendmsg(fd, &probe, flags) < 0 {
                return -1;
            }
        }
        send_many((fd, index), m.msg_iov, m.msg_iovlen, flags, kernel)
    }
}

/// sendmmsg(2)
pub unsafe fn sendmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    // musl makes it of sendmsg(3).
    let is_one_call = !real::is_musl() && !matches!(table::settled(fd), Entry::Conn(_));
    if is_nowhere(msgs) || is_one_call {
        // SAFETY: the caller's contract.
        return unsafe {
            let known = if is_nowhere(msgs) { 0 } else { count.min(IOV_MAX as c_uint) };
            passed::sending_many(fd, msgs, known, |n| {
                real::sendmmsg(fd, msgs, if n == known { count } else { n }, flags)
            })
        };
    }
    let mut done = 0;
    while done < count.min(IOV_MAX as c_uint) {
        // SAFETY: done < count entries.
        let (n, wanted) = unsafe {
            let m = msgs.add(done as usize);
            let wanted = total_len(&message::read(&raw const (*m).msg_hdr));
            let n = sendmsg(fd, &raw const (*m).msg_hdr, flags);
            if n >= 0 {
                (*m).msg_len = n as c_uint;
            }
            (n, wanted)
        };
        if n < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        done += 1;
        // A message sent in part is the last one.
        if n.cast_unsigned() < wanted {
            break;
        }
    }
    done as c_int
}

unsafe fn total_len(msg: &msghdr) -> usize {
    if msg.msg_iov.is_null() {
        return 0;
    }
    // SAFETY: the application's array.
    let entries = unsafe { core::slice::from_raw_parts(msg.msg_iov, msg.msg_iovlen) };
    entries.iter().fold(0, |n, e| n.saturating_add(e.iov_len))
}

/// Whether the array has no bytes, or is none.
pub(super) unsafe fn is_empty(iov: *const iovec, count: c_int) -> bool {
    let count = count as c_uint as usize;
    // SAFETY: the caller's array, if that is what it is.
    unsafe { count > IOV_MAX || has_bad_entry(iov, count) || Buffers::new(iov, count).left() == 0 }
}
