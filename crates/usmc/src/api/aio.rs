//! Calls in which libc or the kernel reads and writes where nobody sees it, by threads of its own or by raw system calls:
//! the connections that they are about are left to the kernel's TCP.

use core::ffi::{c_int, c_long, c_void};
use libc::{aiocb, sigevent};

use super::{apart, fail, is_nowhere};
use crate::os::table::{self, Entry};
use crate::os::{real, sys};
use crate::record::conn;
use crate::record::phase::Phase;
use crate::socket::{control, option};

/// Before a call about `fd`.
///
/// # Errors
/// EAGAIN, with which all of them say that it cannot be done now, where it cannot leave the ring.
fn leave(fd: c_int) -> Result<(), c_int> {
    let Entry::Conn(index) = table::settled(fd) else { return Ok(()) };
    // Of a listener the kernel sees all.
    if conn::at(index).phase() == Phase::Listen {
        return Ok(());
    }
    apart(|| option::leave_to_kernel(fd, index)).map_err(|_| libc::EAGAIN)
}

/// A call about one control block; `kernel` is the real one.
///
/// # Safety
/// A control block; `struct aiocb64` begins as `struct aiocb` does.
unsafe fn one(control: *mut aiocb, kernel: impl FnOnce() -> c_int) -> c_int {
    if !is_nowhere(control)
        // SAFETY: the caller's contract.
        && let Err(code) = leave(unsafe { (*control).aio_fildes })
    {
        return fail(code);
    }
    kernel()
}

/// Before lio_listio(3).
///
/// # Safety
/// An array of `count` control blocks, some of them null.
unsafe fn leave_all(list: *const *mut aiocb, count: c_int) -> Result<(), c_int> {
    if is_nowhere(list) {
        return Ok(());
    }
    (0..count.max(0) as usize).try_for_each(|i| {
        // SAFETY: the caller's contract.
        let control = unsafe { *list.add(i) };
        // SAFETY: as above.
        if is_nowhere(control) || unsafe { (*control).aio_lio_opcode } == libc::LIO_NOP {
            return Ok(());
        }
        // SAFETY: as above.
        leave(unsafe { (*control).aio_fildes })
    })
}

calls! {
    /// aio_read(3)
    aio_read(control: *mut aiocb) -> c_int |kernel()| one(control, kernel);
    /// aio_read64(3)
    aio_read64(control: *mut aiocb) -> c_int |kernel()| one(control, kernel);
    /// aio_write(3)
    aio_write(control: *mut aiocb) -> c_int |kernel()| one(control, kernel);
    /// aio_write64(3)
    aio_write64(control: *mut aiocb) -> c_int |kernel()| one(control, kernel);
    /// lio_listio(3)
    lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int
        |kernel()| leave_all(list, count).map_or_else(fail, |()| kernel());
    /// lio_listio64(3)
    lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int
        |kernel()| leave_all(list, count).map_or_else(fail, |()| kernel());
}

/// The kernel's `struct iocb` (`linux/aio_abi.h`), which is libaio's, too.
#[repr(C)]
struct Iocb {
    _data_and_key: [u32; 4],
    opcode: u16,
    _priority: i16,
    fd: u32,
}

/// Before the kernel takes these requests.
///
/// # Safety
/// An array of `count` requests.
unsafe fn leave_requests(count: c_long, list: *const *const Iocb) -> Result<(), c_int> {
    if is_nowhere(list) {
        return Ok(());
    }
    (0..count.max(0) as usize).try_for_each(|i| {
        // SAFETY: the caller's contract.
        let request = unsafe { *list.add(i) };
        // SAFETY: as above.
        if is_nowhere(request) { Ok(()) } else { leave(unsafe { (*request).fd } as c_int) }
    })
}

/// io_submit(2) by number
pub unsafe fn io_submit_by_number(context: c_long, count: c_long, list: *const c_void) -> c_long {
    // SAFETY: the caller's contract.
    unsafe {
        match leave_requests(count, list.cast()) {
            Ok(()) => real::syscall(libc::SYS_io_submit, context, count, list as c_long, 0, 0, 0),
            Err(code) => fail(code),
        }
    }
}

/// io_submit(3) of libaio, which returns -errno, leaves errno alone, and is the system call otherwise.
pub unsafe fn io_submit(context: *mut c_void, count: c_long, list: *const c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        match leave_requests(count, list.cast()) {
            Ok(()) => {
                let (nr, list) = (libc::SYS_io_submit, list as usize);
                sys::raw(nr, context as usize, count as usize, list, 0, 0, 0) as c_int
            }
            Err(code) => -code,
        }
    }
}

/// backtrace_symbols_fd(3), which may be called where malloc(3) may not.
pub unsafe fn backtrace_symbols_fd(addresses: *const *mut c_void, count: c_int, fd: c_int) {
    apart(|| control::used_by_libc(fd));
    // SAFETY: the caller's contract.
    unsafe { real::backtrace_symbols_fd(addresses, count, fd) };
}

/// What takes over the socket that an ioctl(2) names: the kernel reads and writes it from then on.
///
/// # Safety
/// `arg` is whatever the request takes.
pub(super) unsafe fn leave_to_request(
    fd: c_int,
    request: libc::c_ulong,
    arg: libc::c_ulong,
) -> Result<(), c_int> {
    /// linux/nbd.h
    const NBD_SET_SOCK: libc::c_ulong = 0xab00;
    /// linux/kcm.h: a number that other protocols have, too.
    const SIOCKCMATTACH: libc::c_ulong = 0x89e0;
    const AF_KCM: c_int = 41;
    let socket = match request {
        NBD_SET_SOCK => arg as c_int,
        SIOCKCMATTACH
            if !is_nowhere(arg as *const c_int)
                && crate::os::sockopt::int(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, 0) == AF_KCM =>
        {
            // SAFETY: the caller's `struct kcm_attach` begins with the socket.
            unsafe { *(arg as *const c_int) }
        }
        _ => return Ok(()),
    };
    leave(socket)
}
