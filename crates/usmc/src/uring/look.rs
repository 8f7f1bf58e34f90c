//! What becomes of the entries before the kernel takes them.

use core::ffi::c_void;
use core::ptr;

use super::entries::{About, LINK, NOP, Sqe, about};
use super::{is_called, is_idle, stranger};
use crate::handshake::transition;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::os::{errno, log};
use crate::passing::passed;
use crate::record::conn;
use crate::record::phase::Phase;
use crate::socket::{close, leave_all, option};
use crate::stream::fallback;
use crate::watchers::{deferred, epoll_ctl, nested};

/// Entries that a call is about to submit.
pub struct Requests {
    /// `entries` of them, `stride` bytes apart.
    pub sqes: *mut u8,
    /// 64 or 128.
    pub stride: usize,
    /// A power of two.
    pub entries: u32,
    /// The order in which they are taken, by index; null: one after the other.
    pub array: *const u32,
    /// The first one's place in that order.
    pub head: u32,
    /// How many.
    pub count: u32,
    /// Whether the kernel's IORING_OP_NOP takes a result to complete with.
    pub completes: bool,
}

impl Requests {
    fn each(&self, mut act: impl FnMut(*mut Sqe) -> Result<(), Errno>) -> Result<(), Errno> {
        for i in 0..self.count {
            let mut index = self.head.wrapping_add(i) & (self.entries - 1);
            if !self.array.is_null() {
                // SAFETY: within the array, which has `entries` places.
                index = unsafe { self.array.add(index as usize).read_volatile() };
                if index >= self.entries {
                    // The kernel drops it.
                    continue;
                }
            }
            // SAFETY: within the array of entries.
            act(unsafe { self.sqes.add(index as usize * self.stride) }.cast())?;
        }
        Ok(())
    }
}

/// Before the kernel takes them.
///
/// # Errors
/// EBUSY where the whole process has to go back to TCP, and cannot.
pub fn look(requests: &Requests) -> Result<(), Errno> {
    let _errno = errno::keep();
    let mut chain = Chain::default();
    requests.each(|place| {
        // SAFETY: a whole entry of the ring, which only its submitter writes.
        let sqe = unsafe { place.read_volatile() };
        let is_cancelled = chain.next(sqe.flags);
        match about(&sqe) {
            About::Nothing => {}
            About::Files(fds) => {
                for fd in fds {
                    use_by_kernel(fd, place)?;
                }
            }
            About::Message { via, at } => {
                use_by_kernel(via, place)?;
                if !matches!(table::settled(via), Entry::Conn(_)) {
                    // SAFETY: the program gives the kernel this message.
                    let left = unsafe { passed::sending(via, at as usize as *const _, || 0) };
                    if left < 0 {
                        refuse(place);
                    }
                }
            }
            // SAFETY: the program gives the kernel this array.
            About::Registers { at, count } => unsafe {
                if register_all(at as usize as *const i32, count).is_err() {
                    refuse(place);
                }
            },
            About::Close(fd) if !is_cancelled => close_by_kernel(fd, place),
            About::EpollCtl if !is_cancelled => {
                chain.failed |= !epoll_ctl(place, &sqe, requests.completes)?
            }
            About::Close(_) | About::EpollCtl => {}
        }
        Ok(())
    })
}

/// Entries of which each is done if the one before has not failed (IOSQE_IO_LINK).
#[derive(Default)]
struct Chain {
    /// The next entry belongs to it.
    goes_on: bool,
    /// One of those done here has failed, and so the kernel will cancel the rest.
    failed: bool,
}

impl Chain {
    /// The next entry has these flags. Says whether it will be cancelled.
    fn next(&mut self, flags: u8) -> bool {
        let is_cancelled = self.goes_on && self.failed;
        self.failed = is_cancelled;
        self.goes_on = flags & LINK != 0;
        is_cancelled
    }
}

/// Lower addresses are nowhere.
const PAGE: usize = 4096;

/// The entry fails, with EBADF.
fn refuse(place: *mut Sqe) {
    // SAFETY: as in `look`.
    unsafe {
        (&raw mut (*place).fd).write_volatile(-1);
        let flags = (&raw const (*place).flags).read_volatile();
        (&raw mut (*place).flags).write_volatile(flags & !super::entries::FIXED_FILE);
    }
}

/// The kernel itself uses this number from now on.
fn leave(fd: i32) -> Result<(), Errno> {
    let Entry::Conn(index) = table::settled(fd) else { return Ok(()) };
    match conn::at(index).phase() {
        Phase::Plain => Ok(()),
        Phase::Fresh | Phase::Listen => option::leave_to_kernel(fd, index),
        _ => fallback::leave(fd, index, Reason::ByUring),
    }
}

fn use_by_kernel(fd: i32, place: *mut Sqe) -> Result<(), Errno> {
    match table::settled(fd) {
        Entry::Conn(_) if leave(fd).is_err() => {
            log::warn(format_args!(
                "fd {fd}: a connection that cannot go back to TCP for io_uring"
            ));
            refuse(place);
        }
        // A poll of a set by the kernel sees doorbells only.
        Entry::Epoll(_) => return leave_all::begins(Reason::Uring),
        // To the application this number is not open.
        Entry::Internal => refuse(place),
        _ => {}
    }
    Ok(())
}

fn close_by_kernel(fd: i32, place: *mut Sqe) {
    if table::settled(fd) == Entry::Foreign {
        return;
    }
    if close::closing(fd) {
        table::changed(fd);
    } else {
        refuse(place);
    }
}

/// epoll_ctl(2) of an entry: done here where the set is ours, and the entry becomes one that does nothing. False if it is
/// known to fail.
fn epoll_ctl(place: *mut Sqe, sqe: &Sqe, completes: bool) -> Result<bool, Errno> {
    let (epfd, fd, op) = (sqe.fd, sqe.off as i32, sqe.len as i32);
    // The kernel refuses these.
    let is_bad = sqe.buf_index != 0 || sqe.other != 0 || sqe.ioprio != 0;
    let has_event = op != libc::EPOLL_CTL_DEL;
    let at = sqe.addr as usize as *const libc::epoll_event;
    if is_bad || (has_event && (at as usize) < PAGE) {
        return Ok(false);
    }
    let known = table::settled(fd);
    let Entry::Epoll(set) = table::settled(epfd) else {
        // The kernel alone reports it.
        let adds = op == libc::EPOLL_CTL_ADD
            && known != Entry::Foreign
            && is_called(epfd, b"anon_inode:[eventpoll]");
        match known {
            Entry::Epoll(inner) if adds => deferred::watch(inner),
            Entry::Conn(index) if adds && !transition::stay_tcp(index) => {
                use_by_kernel(fd, place)?;
            }
            _ => {}
        }
        return Ok(true);
    };
    // SAFETY: the program gives the kernel this event.
    let event = has_event.then(|| unsafe { at.read_unaligned() });
    let done = match known {
        Entry::Conn(index) => epoll_ctl::control(epfd, set, op, fd, index, event),
        Entry::Epoll(inner) => nested::control((epfd, set), (fd, inner), op, event),
        // In the order of the entries, as nobody else looks after these.
        Entry::Foreign | Entry::Internal | Entry::Uring(_) => return Ok(true),
    };
    let kernel = || {
        let mut event = event.unwrap_or(libc::epoll_event { events: 0, u64: 0 });
        sys::epoll_ctl(epfd, op, fd, &mut event)
    };
    let done = match done {
        None => kernel(),
        // The library's tables are full: the registration is the kernel's.
        Some(Err(libc::ENOSPC)) => {
            use_by_kernel(fd, place)?;
            kernel()
        }
        Some(done) => done,
    };
    match done {
        Ok(()) => complete(place, 0),
        Err(code) if completes => complete(place, -code),
        // No such operation, which is what the kernel says to it.
        // SAFETY: as in `look`.
        Err(libc::EINVAL) => unsafe { (&raw mut (*place).len).write_volatile(0) },
        // With what the program knows, the kernel finds the same: unless an entry behind this one changes that.
        Err(_) => epoll_ctl::unpark(set),
    }
    Ok(done.is_ok())
}

/// The entry does nothing and has this result; one that is not 0 only where the kernel knows how
/// ([`Requests::completes`]).
fn complete(place: *mut Sqe, result: i32) {
    /// IORING_NOP_INJECT_RESULT
    const WITH_RESULT: u32 = 1 << 0;
    // SAFETY: as in `look`. With these the kernel looks at nothing else but flags and user data.
    unsafe {
        (&raw mut (*place).opcode).write_volatile(NOP);
        (&raw mut (*place).op_flags).write_volatile(if result == 0 { 0 } else { WITH_RESULT });
        (&raw mut (*place).len).write_volatile(result.cast_unsigned());
    }
}

/// The array becomes registered files of a ring.
///
/// # Errors
/// EBUSY where a connection, or the process, cannot go back to TCP.
///
/// # Safety
/// `count` numbers.
pub unsafe fn register_all(fds: *const i32, count: u32) -> Result<(), Errno> {
    if is_idle() || (fds as usize) < PAGE {
        // A sparse table.
        return Ok(());
    }
    let _errno = errno::keep();
    (0..count as usize).try_for_each(|i| {
        // SAFETY: the caller's contract.
        let fd = unsafe { fds.add(i).read_unaligned() };
        if matches!(table::settled(fd), Entry::Epoll(_)) {
            return leave_all::begins(Reason::Uring);
        }
        leave(fd).map_err(|_| libc::EBUSY)
    })
}

/// Before io_uring_register(2).
///
/// # Errors
/// EBUSY where a connection, or the process, cannot go back to TCP.
///
/// # Safety
/// The arguments are those of the call.
pub unsafe fn register(fd: i32, opcode: u32, arg: *const c_void, count: u32) -> Result<(), Errno> {
    // include/uapi/linux/io_uring.h
    const FILES: u32 = 2;
    const FILES_UPDATE: u32 = 6;
    const FILES2: u32 = 13;
    const FILES_UPDATE2: u32 = 14;
    const RING_FDS: u32 = 20;
    const RESIZE_RINGS: u32 = 33;
    const USE_REGISTERED_RING: u32 = 1 << 31;
    /// `struct io_uring_rsrc_update2`, which the older `struct io_uring_files_update` begins.
    #[repr(C)]
    struct Update {
        _offset: [u32; 2],
        fds: u64,
        _tags: u64,
        count: u32,
    }
    /// `struct io_uring_rsrc_register`
    #[repr(C)]
    struct Register {
        count: u32,
        _flags: u32,
        _reserved: u64,
        fds: u64,
    }
    if is_idle() {
        return Ok(());
    }
    if opcode & USE_REGISTERED_RING != 0 {
        return stranger(fd, super::ENTER_REGISTERED_RING);
    }
    if matches!(opcode, RING_FDS | RESIZE_RINGS) {
        // What is submitted by an index, or in memory that is elsewhere from now on, is not seen.
        return leave_all::begins(Reason::Uring);
    }
    if (arg as usize) < PAGE {
        return Ok(());
    }
    let at = |fds: u64| fds as usize as *const i32;
    // SAFETY: the caller's contract.
    let (fds, count) = unsafe {
        match opcode {
            FILES => (arg.cast::<i32>(), count),
            FILES_UPDATE => {
                let fds = ptr::read_unaligned((&raw const (*arg.cast::<Update>()).fds).cast());
                (at(fds), count)
            }
            FILES_UPDATE2 if count as usize >= size_of::<Update>() => {
                let update = arg.cast::<Update>().read_unaligned();
                (at(update.fds), update.count)
            }
            FILES2 if count as usize >= size_of::<Register>() => {
                let register = arg.cast::<Register>().read_unaligned();
                (at(register.fds), register.count)
            }
            _ => return Ok(()),
        }
    };
    // SAFETY: the caller's contract.
    unsafe { register_all(fds, count) }
}
