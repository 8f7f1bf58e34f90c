//! libc's streams on a connection: those of fdopen(3), and stdin, stdout and stderr of whoever is started with one for these
//! (inetd), or puts one there by dup2(2). They read and write inside libc. What they call for that stands in tables of libc's,
//! one for streams of bytes and one for those that have become wide; in these, read, write and close become ours.
//!
//! The tables are exported, and checked before anything is changed: each of the three places has to lead to the exported
//! function of that name. Where it is otherwise such connections stay TCP.

use core::ffi::{c_int, c_void};
use core::{mem, ptr};
use libc::{FILE, size_t, ssize_t};
use usmc_shm::sync::AtomicPtr;
use usmc_shm::sync::Ordering::Release;

use crate::api::stdio;
use crate::os::process::{self, Lock};
use crate::os::real::{self, tables};
use crate::os::table::{self, Entry};
use crate::os::unwind::uncancelled;
use crate::os::{libc_streams, sys};

type Read = unsafe extern "C" fn(*mut FILE, *mut c_void, ssize_t) -> ssize_t;
type Write = unsafe extern "C" fn(*mut FILE, *const c_void, ssize_t) -> ssize_t;
type Close = unsafe extern "C" fn(*mut FILE) -> c_int;

/// Places in a table (`struct _IO_jump_t` in glibc's libio/libioP.h), in words.
const READ: usize = 14;
const WRITE: usize = 15;
const CLOSE: usize = 17;
/// `_IO_ERR_SEEN` in a stream's `_flags`.
const FAILED: c_int = 0x20;

/// Held while the tables are changed. No other lock is taken inside.
static LOCK: Lock = Lock::new();

/// Has libc's streams come to us, if this libc allows it: [`libc_streams::SERVE`].
pub fn serve(_: ()) {
    // Whoever has the lock may be a thread of the parent's.
    const LOOKS: u32 = 2560;
    let held = || {
        let look = |n| {
            process::give_way(n);
            LOCK.try_enter()
        };
        LOCK.try_enter().or_else(|| (0..LOOKS).find_map(look))
    };
    if let Some(_held) = held()
        && !libc_streams::is_known()
    {
        libc_streams::settle(layout_is_known() && change_all());
    }
}

/// What a `FILE` begins with (`<bits/types/struct_FILE.h>`).
#[repr(C)]
struct Fields {
    flags: c_int,
    _pointers: [usize; 13],
    /// Where fileno(3) looks.
    fileno: c_int,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(mem::offset_of!(Fields, fileno) == 112);
#[cfg(target_pointer_width = "32")]
const _: () = assert!(mem::offset_of!(Fields, fileno) == 56);

/// # Safety
/// A stream of libc's, whose layout is known.
unsafe fn fileno_of(stream: *mut FILE) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { (*stream.cast::<Fields>()).fileno }
}

/// Whether a stream's descriptor stands where we look for it.
fn layout_is_known() -> bool {
    // SAFETY: libc's own streams.
    let fits = |stream: *mut FILE| unsafe { real::fileno(stream) == fileno_of(stream) };
    let all = [tables::_IO_2_1_stdout_(), tables::_IO_2_1_stderr_()];
    all.iter().all(|stream| !stream.is_null() && fits(stream.cast()))
}

/// The descriptor of what is stderr now.
pub(super) fn of_stderr() -> c_int {
    // SAFETY: the program's variable of that name, a stream.
    let stream = unsafe { real::stderr().as_ref() }.map_or(ptr::null_mut(), |stream| *stream);
    // SAFETY: as above.
    if stream.is_null() { -1 } else { unsafe { real::fileno(stream) } }
}

fn change_all() -> bool {
    let functions = [tables::_IO_file_read(), tables::_IO_file_write(), tables::_IO_file_close()];
    let all = [tables::_IO_file_jumps(), tables::_IO_wfile_jumps()];
    if functions.iter().chain(&all).any(|p| p.is_null()) {
        return false;
    }
    let fits = |table: *mut c_void| {
        [READ, WRITE, CLOSE].iter().zip(functions).all(|(&place, function)| {
            // SAFETY: libc's table of that name has these words, which nobody writes but us, later.
            unsafe { table.cast::<*mut c_void>().add(place).read() == function }
        })
    };
    all.iter().all(|table| fits(*table)) && all.iter().all(|table| change(*table).is_ok())
}

/// Where the dynamic linker has made the table read-only it is so again afterwards.
fn change(table: *mut c_void) -> Result<(), sys::Errno> {
    const PAGE: usize = 4096;
    let words = table.cast::<AtomicPtr<c_void>>();
    let start = table.addr() & !(PAGE - 1);
    let end = (table.addr() + (CLOSE + 1) * size_of::<usize>()).next_multiple_of(PAGE);
    let pages = table.with_addr(start).cast::<u8>();
    // SAFETY: a word of the table and the next, which nobody else writes.
    let is_open = unsafe { sys::is_writable(words.add(READ).cast()) };
    if !is_open {
        // SAFETY: pages of libc's data, which stay readable.
        unsafe { sys::mprotect(pages, end - start, libc::PROT_READ | libc::PROT_WRITE)? };
    }
    libc_streams::begin();
    let ours: [(usize, *mut c_void); 3] = [
        (READ, read_some as Read as *mut c_void),
        (WRITE, write_all as Write as *mut c_void),
        (CLOSE, close as Close as *mut c_void),
    ];
    for (place, function) in ours {
        // SAFETY: writable now; whoever calls through the table meanwhile finds the one function or the other.
        unsafe { (*words.add(place)).store(function, Release) };
    }
    if !is_open {
        // SAFETY: as it was.
        let _ = unsafe { sys::mprotect(pages, end - start, libc::PROT_READ) };
    }
    Ok(())
}

/// Whether `fd` is a connection: of one that is TCP, too, we may know what the kernel does not.
pub(super) fn is_ours(fd: c_int) -> bool {
    matches!(table::settled(fd), Entry::Conn(_))
}

unsafe extern "C" fn read_some(stream: *mut FILE, buf: *mut c_void, len: ssize_t) -> ssize_t {
    // SAFETY: libc's stream and its buffer; the functions are those of the table.
    unsafe {
        let fd = fileno_of(stream);
        if is_ours(fd) {
            return crate::api::read(fd, buf, len as size_t);
        }
        mem::transmute::<*mut c_void, Read>(tables::_IO_file_read())(stream, buf, len)
    }
}

/// As libc's: all, or up to an error; how many bytes.
unsafe extern "C" fn write_all(stream: *mut FILE, buf: *const c_void, len: ssize_t) -> ssize_t {
    // SAFETY: as above.
    unsafe {
        let fd = fileno_of(stream);
        if !is_ours(fd) {
            return mem::transmute::<*mut c_void, Write>(tables::_IO_file_write())(
                stream, buf, len,
            );
        }
        let done = stdio::write_whole(fd, buf.cast(), len as size_t);
        if done < len {
            (*stream.cast::<Fields>()).flags |= FAILED;
        }
        done
    }
}

unsafe extern "C" fn close(stream: *mut FILE) -> c_int {
    // SAFETY: as above. libc's is no cancellation point.
    unsafe {
        let fd = fileno_of(stream);
        if is_ours(fd) {
            return uncancelled(|| crate::api::close(fd));
        }
        mem::transmute::<*mut c_void, Close>(tables::_IO_file_close())(stream)
    }
}
