//! io_uring, by liburing and by number: what is submitted is looked at first ([`crate::uring`]).
//!
//! The functions of liburing return -errno, and leave errno alone.

use core::ffi::{CStr, c_int, c_long, c_uint, c_void};
use core::mem;
use core::ptr;
use usmc_shm::sync::AtomicPtr;
use usmc_shm::sync::Ordering::Relaxed;

use super::{apart, fail, is_nowhere};
use crate::os::errno;
use crate::os::linkmap::{self, Place};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::os::{config, real};
use crate::socket::{close, control, leave_all};
use crate::uring::{self, Maker, Params, Requests};

/// `struct io_uring_sq` of liburing 2, as far as programs compiled with any of its headers have it alike.
#[repr(C)]
struct Sq {
    head: *const c_uint,
    _tail: *const c_uint,
    mask: *const c_uint,
    _words: [*const c_uint; 4],
    sqes: *mut u8,
    /// Entries up to here are the kernel's, or were dropped.
    _sqe_head: c_uint,
    /// Entries up to here are handed out.
    sqe_tail: c_uint,
    _size: usize,
    _memory: *mut c_void,
    _more: [c_uint; 4],
}

/// `struct io_uring_cq`
#[repr(C)]
struct Cq {
    _words: [*const c_uint; 7],
    _size: usize,
    _memory: *mut c_void,
    _more: [c_uint; 4],
}

/// `struct io_uring`
#[repr(C)]
pub struct Ring {
    sq: Sq,
    _cq: Cq,
    flags: c_uint,
    fd: c_int,
    features: c_uint,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(mem::offset_of!(Ring, fd) == 196 && mem::offset_of!(Sq, sqe_tail) == 68);

fn is_denied() -> bool {
    config::get().denies_io_uring && !config::get().off
}

/// A ring was made. What cannot be looked into and cannot be left alone either is closed again.
fn made(fd: c_int, flags: u32, maker: Maker) -> Result<(), Errno> {
    apart(|| {
        control::fresh(fd);
        uring::made(fd, flags, maker)
    })
}

/// Before a function of liburing's submits all that `ring` has.
///
/// # Safety
/// The ring is one of liburing's.
unsafe fn submits(ring: *const Ring) -> Result<(), Errno> {
    if is_nowhere(ring) || uring::is_idle() {
        return Ok(());
    }
    // SAFETY: the caller's contract; the kernel writes the head.
    let (fd, flags, requests) = unsafe {
        let sq = &(*ring).sq;
        let (head, entries) = (sq.head.read_volatile(), (*sq.mask).wrapping_add(1));
        let stride = uring::entries::size((*ring).flags);
        let count = sq.sqe_tail.wrapping_sub(head).min(entries);
        let (array, completes) = (ptr::null(), uring::completes((*ring).features));
        let requests = Requests { sqes: sq.sqes, stride, entries, array, head, count, completes };
        ((*ring).fd, (*ring).flags, requests)
    };
    if requests.count == 0 { Ok(()) } else { uring::before_submit(fd, flags, &requests) }
}

/// `name(args)` goes to liburing's function of that name, once what is behind `after` has been done; what is behind `then` makes
/// the result of what that has returned.
macro_rules! liburing {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) after $before:expr $(, then $then:expr)?;)*) => { $(
        $(#[$doc])*
        #[allow(unused_unsafe, reason = "some of what is done before and behind is safe")]
        pub unsafe fn $name($($arg: $ty),*) -> c_int {
            static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            let Some(found) = liburing(&FOUND, concat!(stringify!($name), "\0")) else { return -libc::ENOSYS };
            // SAFETY: the caller's contract, as below.
            if let Err(errno) = unsafe { $before } {
                return -errno;
            }
            // SAFETY: liburing's header declares this function with these arguments.
            let call: unsafe extern "C" fn($($ty),*) -> c_int = unsafe { mem::transmute(found) };
            // SAFETY: the caller's contract.
            let done = unsafe { call($($arg),*) };
            // SAFETY: as above.
            $(let done = unsafe { ($then)(done) };)?
            done
        }
    )* };
}

fn allowed() -> Result<(), Errno> {
    if is_denied() { Err(libc::ENOSYS) } else { Ok(()) }
}

/// liburing has filled in `ring`, or failed.
///
/// # Safety
/// The ring is one of liburing's.
unsafe fn filled(ring: *mut Ring, done: c_int) -> c_int {
    if done < 0 {
        return done;
    }
    let _errno = errno::keep();
    // SAFETY: the caller's contract.
    let (fd, flags) = unsafe { ((*ring).fd, (*ring).flags) };
    let known = if is_first_liburing() {
        // Its structure is another one.
        leave_all::begins(Reason::Uring)
    } else {
        made(fd, flags, Maker::Liburing)
    };
    match known {
        Ok(()) => done,
        Err(code) => {
            // SAFETY: as above.
            unsafe { io_uring_queue_exit(ring) };
            -code
        }
    }
}

/// io_uring_setup(2) has returned this.
///
/// # Safety
/// `params` is what it has filled in.
unsafe fn set_up(fd: c_int, params: *const Params) -> Result<c_int, Errno> {
    if fd < 0 {
        return Ok(fd);
    }
    // SAFETY: the caller's contract; the kernel has just written there.
    let params = unsafe { params.read_unaligned() };
    made(fd, params.flags, Maker::Program(params)).map(|()| fd).inspect_err(|_| sys::close(fd))
}

liburing! {
    /// io_uring_queue_init(3)
    io_uring_queue_init(entries: c_uint, ring: *mut Ring, flags: c_uint)
        after allowed(), then |done| filled(ring, done);
    /// io_uring_queue_init_params(3)
    io_uring_queue_init_params(entries: c_uint, ring: *mut Ring, params: *mut c_void)
        after allowed(), then |done| filled(ring, done);
    /// io_uring_queue_init_mem(3)
    io_uring_queue_init_mem(entries: c_uint, ring: *mut Ring, params: *mut c_void, buf: *mut c_void, size: usize)
        after allowed(), then |done| filled(ring, done);
    /// io_uring_setup(2)
    io_uring_setup(entries: c_uint, params: *mut c_void)
        after allowed(), then |done| set_up(done, params.cast()).unwrap_or_else(|code| -code);
    /// io_uring_submit(3)
    io_uring_submit(ring: *mut Ring) after submits(ring);
    /// io_uring_submit_and_wait(3)
    io_uring_submit_and_wait(ring: *mut Ring, count: c_uint) after submits(ring);
    /// io_uring_submit_and_wait_timeout(3)
    io_uring_submit_and_wait_timeout(ring: *mut Ring, cqe: *mut c_void, count: c_uint, time: *mut c_void, mask: *mut c_void)
        after submits(ring);
    /// io_uring_submit_and_wait_min_timeout(3)
    io_uring_submit_and_wait_min_timeout(ring: *mut Ring, cqe: *mut c_void, count: c_uint, time: *mut c_void, least: c_uint, mask: *mut c_void)
        after submits(ring);
    /// io_uring_submit_and_wait_reg(3)
    io_uring_submit_and_wait_reg(ring: *mut Ring, cqe: *mut c_void, count: c_uint, place: c_int) after submits(ring);
    /// io_uring_submit_and_get_events(3)
    io_uring_submit_and_get_events(ring: *mut Ring) after submits(ring);
    /// io_uring_wait_cqes(3), which submits where the kernel takes no time-out with a wait
    io_uring_wait_cqes(ring: *mut Ring, cqe: *mut c_void, count: c_uint, time: *mut c_void, mask: *mut c_void)
        after waits(ring, time);
    /// io_uring_wait_cqe_timeout(3), likewise
    io_uring_wait_cqe_timeout(ring: *mut Ring, cqe: *mut c_void, time: *mut c_void) after waits(ring, time);
    /// io_uring_enter(2)
    io_uring_enter(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, mask: *mut c_void)
        after apart(|| uring::before_enter(fd as c_int, submit, flags));
    /// io_uring_enter2(2)
    io_uring_enter2(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, arg: *mut c_void, size: usize)
        after apart(|| uring::before_enter(fd as c_int, submit, flags));
    /// io_uring_register(2)
    io_uring_register(fd: c_uint, opcode: c_uint, arg: *const c_void, count: c_uint)
        after apart(|| uring::register(fd as c_int, opcode, arg, count));
    /// io_uring_register_files(3)
    io_uring_register_files(ring: *mut Ring, fds: *const c_int, count: c_uint) after uring::register_all(fds, count);
    /// io_uring_register_files_tags(3)
    io_uring_register_files_tags(ring: *mut Ring, fds: *const c_int, tags: *const c_void, count: c_uint)
        after uring::register_all(fds, count);
    /// io_uring_register_files_update(3)
    io_uring_register_files_update(ring: *mut Ring, from: c_uint, fds: *const c_int, count: c_uint)
        after uring::register_all(fds, count);
    /// io_uring_register_files_update_tag(3)
    io_uring_register_files_update_tag(ring: *mut Ring, from: c_uint, fds: *const c_int, tags: *const c_void, count: c_uint)
        after uring::register_all(fds, count);
}

/// Before a wait of liburing's.
///
/// # Safety
/// As for [`submits`].
unsafe fn waits(ring: *const Ring, time: *const c_void) -> Result<(), Errno> {
    /// IORING_FEAT_EXT_ARG
    const TIMED: c_uint = 1 << 8;
    // SAFETY: the caller's contract.
    unsafe {
        if is_nowhere(ring) || time.is_null() || (*ring).features & TIMED != 0 {
            return Ok(());
        }
        submits(ring)
    }
}

/// io_uring_queue_exit(3): it closes the ring's number.
pub unsafe fn io_uring_queue_exit(ring: *mut Ring) {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    apart(|| {
        // SAFETY: the caller's ring.
        let fd = if is_nowhere(ring) { -1 } else { unsafe { (*ring).fd } };
        if matches!(table::settled(fd), Entry::Uring(_)) && close::closing(fd) {
            table::changed(fd);
        }
    });
    if let Some(found) = liburing(&FOUND, "io_uring_queue_exit\0") {
        // SAFETY: liburing's header declares this function with this argument.
        let call: unsafe extern "C" fn(*mut Ring) = unsafe { mem::transmute(found) };
        // SAFETY: the caller's contract.
        unsafe { call(ring) };
    }
}

/// io_uring_setup(2) by number
pub(super) unsafe fn io_uring_setup_by_number(entries: c_long, params: *mut c_void) -> c_long {
    if is_denied() {
        return fail::<i32>(libc::ENOSYS) as c_long;
    }
    // SAFETY: the caller's contract.
    unsafe {
        let fd = real::syscall(libc::SYS_io_uring_setup, entries, params as c_long, 0, 0, 0, 0);
        match set_up(fd as c_int, params.cast()) {
            Ok(_) => fd,
            Err(code) => fail::<i32>(code) as c_long,
        }
    }
}

/// io_uring_enter(2) by number
pub(super) unsafe fn io_uring_enter_by_number(
    fd: c_long,
    submit: c_long,
    wait: c_long,
    flags: c_long,
    arg: c_long,
    size: c_long,
) -> c_long {
    let seen = apart(|| uring::before_enter(fd as c_int, submit as u32, flags as u32));
    if let Err(code) = seen {
        return fail::<i32>(code) as c_long;
    }
    // SAFETY: the caller's contract.
    unsafe { real::syscall(libc::SYS_io_uring_enter, fd, submit, wait, flags, arg, size) }
}

/// io_uring_register(2) by number
pub(super) unsafe fn io_uring_register_by_number(
    fd: c_long,
    opcode: c_long,
    arg: c_long,
    count: c_long,
) -> c_long {
    // SAFETY: the caller's contract.
    unsafe {
        let seen = apart(|| {
            uring::register(fd as c_int, opcode as u32, arg as *const c_void, count as u32)
        });
        if let Err(code) = seen {
            return fail::<i32>(code) as c_long;
        }
        real::syscall(libc::SYS_io_uring_register, fd, opcode, arg, count, 0, 0)
    }
}

/// Whether liburing 1 is there, which has other structures.
fn is_first_liburing() -> bool {
    linkmap::is_loaded(c"liburing.so.1")
}

/// liburing's function of this name, which ends with NUL: the next one after ours, be it that of a liburing that only a plugin has
/// loaded.
fn liburing(known: &AtomicPtr<c_void>, name: &str) -> Option<*mut c_void> {
    let mut found = known.load(Relaxed);
    if found.is_null() {
        let name = CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or(c"");
        found = apart(|| linkmap::find(Place::BehindUs, name));
        known.store(found, Relaxed);
    }
    (!found.is_null()).then_some(found)
}
