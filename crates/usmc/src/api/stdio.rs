//! stdio on a connection. libc's streams call its own read and write, which no preload sees, so a stream that
//! is made for a tracked descriptor is one of fopencookie(3) and calls ours. All that allocates here is libc.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr;
use libc::{FILE, off64_t, size_t, ssize_t};
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicBool, AtomicU32, AtomicU64};

use super::{fail, std_streams};
use crate::conn::{self, PLAIN};
use crate::socket::{close as closing, control};
use crate::table::{self, Entry};
use crate::{errno, real, set_errno};

/// What a stream calls, `cookie_io_functions_t`. Cookies are descriptors.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Functions {
    read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

const STREAM: Functions = Functions {
    read: Some(read_some),
    write: Some(write_all),
    seek: Some(seek),
    close: Some(close),
};

/// A stream that ends without its descriptor.
const BORROWED: Functions = Functions { close: None, ..STREAM };

fn cookie(fd: c_int) -> *mut c_void {
    fd as usize as *mut c_void
}

fn descriptor(cookie: *mut c_void) -> c_int {
    cookie as usize as c_int
}

unsafe extern "C" fn read_some(cookie: *mut c_void, buf: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: libc passes its buffer.
    unsafe { super::read(descriptor(cookie), buf.cast(), len) }
}

unsafe extern "C" fn write_all(cookie: *mut c_void, buf: *const c_char, len: size_t) -> ssize_t {
    // SAFETY: libc passes its buffer of `len` bytes.
    unsafe { write_whole(descriptor(cookie), buf, len) }
}

/// As libc's streams write: all, or up to an error; how many bytes.
///
/// # Safety
/// A buffer of `len` bytes.
pub(super) unsafe fn write_whole(fd: c_int, buf: *const c_char, len: size_t) -> ssize_t {
    let mut done = 0;
    while done < len {
        // SAFETY: the caller's contract.
        let n = unsafe { super::write(fd, buf.add(done).cast(), len - done) };
        if n < 0 {
            break;
        }
        done += n as usize;
    }
    done as ssize_t
}

unsafe extern "C" fn seek(_cookie: *mut c_void, _at: *mut off64_t, _whence: c_int) -> c_int {
    fail(libc::ESPIPE)
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: no pointers.
    unsafe { super::close(descriptor(cookie)) }
}

/// Whether reads and writes of `fd` may have to go through a ring.
fn is_tracked(fd: c_int) -> bool {
    matches!(table::settled(fd), Entry::Conn(index) if conn::at(index).phase() != PLAIN)
}

/// fopencookie's mode for one of fdopen's; `None` for nonsense.
///
/// # Safety
/// A string.
unsafe fn plain_mode(mode: *const c_char) -> Option<&'static CStr> {
    // SAFETY: the caller's contract.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let both = mode.iter().take(5).any(|c| *c == b'+');
    match (mode.first()?, both) {
        (b'r', false) => Some(c"r"),
        (b'r', true) => Some(c"r+"),
        (b'w', false) => Some(c"w"),
        (b'w', true) => Some(c"w+"),
        (b'a', false) => Some(c"a"),
        (b'a', true) => Some(c"a+"),
        _ => None,
    }
}

/// The fields of `FILE` that differ in a stream of fopencookie(3) (`<bits/types/struct_FILE.h>`).
#[repr(C)]
struct Fields {
    _flags_and_pointers: [usize; 7],
    /// `_IO_buf_base` and `_IO_buf_end`.
    buffer: [usize; 2],
    _before: [usize; 5],
    /// `_fileno`, where fileno(3) looks.
    fileno: c_int,
    _between: [u8; if cfg!(target_pointer_width = "64") { 44 } else { 28 }],
    /// `_wide_data`, which freopen(3) writes to unless it is null, and fgetws(3) and ungetwc(3) look into in any case.
    wide: *mut c_void,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(
    offset_of!(Fields, buffer) == 56
        && offset_of!(Fields, fileno) == 112
        && offset_of!(Fields, wide) == 160
);
#[cfg(target_pointer_width = "32")]
const _: () = assert!(offset_of!(Fields, fileno) == 56 && offset_of!(Fields, wide) == 88);

/// Bytes that a stream of libc's on a socket buffers (`st_blksize`); one of fopencookie(3) has BUFSIZ, which is twice that.
const BUFFER: usize = 4096;

/// What such a stream has there.
const NO_FILENO: c_int = -2;
const NO_WIDE: usize = usize::MAX;

/// As much as a `struct _IO_wide_data` takes, and more: no wide character is there. A stream of fopencookie(3) is one of
/// bytes, whose calls for wide characters fail, all but those that look here first.
static NO_WIDE_CHARACTERS: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn no_wide_characters() -> *mut c_void {
    (&raw const NO_WIDE_CHARACTERS).cast::<c_void>().cast_mut()
}

/// 0 = not known yet, 1 = streams have the layout above, 2 = they have another.
static LAYOUT: AtomicU32 = AtomicU32::new(0);

static ANY: AtomicBool = AtomicBool::new(false);

/// Whether any stream comes to us: such streams may write under libc's own locks.
pub fn has_streams() -> bool {
    ANY.load(Relaxed) || std_streams::are_served()
}

/// The descriptor of a stream.
///
/// # Safety
/// A stream of libc's, whose layout is known.
pub(super) unsafe fn fileno_of(stream: *mut FILE) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { (*stream.cast::<Fields>()).fileno }
}

fn stream(fd: c_int, mode: &CStr, functions: Functions) -> *mut FILE {
    ANY.store(true, Relaxed);
    // SAFETY: the functions take a descriptor for their cookie.
    unsafe { real::fopencookie(cookie(fd), mode.as_ptr(), functions) }
}

/// As [`stream`], with a buffer as large as of libc's own.
fn stream_of_socket(fd: c_int, mode: &CStr, functions: Functions) -> *mut FILE {
    let stream = stream(fd, mode, functions);
    if stream.is_null() || !layout_is_known() {
        return stream;
    }
    // SAFETY: a stream that nobody else has yet. libc makes its buffer now, of which it keeps the length nowhere else.
    unsafe {
        if real::setvbuf(stream, ptr::null_mut(), libc::_IOFBF, 0) == 0 {
            let [base, end] = &mut (*stream.cast::<Fields>()).buffer;
            if *base != 0 && end.wrapping_sub(*base) > BUFFER {
                *end = *base + BUFFER;
            }
        }
    }
    stream
}

fn layout_is_known() -> bool {
    if LAYOUT.load(Relaxed) == 0 {
        let none = Functions { read: None, write: None, seek: None, close: None };
        let probe = stream(0, c"r", none);
        if probe.is_null() {
            return false;
        }
        // SAFETY: a stream of no descriptor, larger than the fields, which is closed again.
        let fits = unsafe {
            let fields = &mut *probe.cast::<Fields>();
            let fits = fields.fileno == NO_FILENO && fields.wide as usize == NO_WIDE && {
                fields.fileno = 12345;
                real::fileno(probe) == 12345
            };
            if fits {
                fields.fileno = NO_FILENO;
            }
            real::fclose(probe);
            fits
        };
        LAYOUT.store(if fits { 1 } else { 2 }, Relaxed);
    }
    LAYOUT.load(Relaxed) == 1
}

/// fdopen(3)
pub unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if is_tracked(fd) && !mode.is_null() && layout_is_known() {
        // SAFETY: the caller's contract.
        if let Some(mode) = unsafe { plain_mode(mode) } {
            let stream = stream_of_socket(fd, mode, STREAM);
            if !stream.is_null() {
                // SAFETY: the layout was looked at, and nobody else has the stream yet.
                unsafe {
                    let fields = &mut *stream.cast::<Fields>();
                    (fields.fileno, fields.wide) = (fd, no_wide_characters());
                }
            }
            return stream;
        }
    }
    control::used_by_libc(fd);
    // SAFETY: the caller's contract.
    unsafe { real::fdopen(fd, mode) }
}

/// Makes a call that closes the descriptor of `stream` inside libc, unless the stream is one of ours.
///
/// # Safety
/// A stream of libc's.
unsafe fn closing_inside<T>(stream: *mut FILE, call: impl FnOnce() -> T) -> T {
    let saved = errno();
    // SAFETY: the caller's contract.
    let fd = unsafe { real::fileno(stream) };
    set_errno(saved);
    let Entry::Conn(index) = table::settled(fd) else { return call() };
    let use_count = conn::at(index).use_count.load(Relaxed);
    let done = call();
    let saved = errno();
    // Still the same connection: nobody has told us that its number is closed.
    if table::settled(fd) == Entry::Conn(index)
        && conn::at(index).use_count.load(Relaxed) == use_count
    {
        closing::closing_stale(fd);
    }
    set_errno(saved);
    done
}

/// fclose(3)
pub unsafe fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { closing_inside(stream, || real::fclose(stream)) }
}

/// Before freopen(3), which makes an ordinary stream of one of ours.
///
/// # Safety
/// A stream of libc's.
unsafe fn reopening(stream: *mut FILE) {
    if LAYOUT.load(Relaxed) == 1 {
        // SAFETY: the caller's contract; the layout was looked at.
        let fields = unsafe { &mut *stream.cast::<Fields>() };
        if fields.wide == no_wide_characters() {
            fields.wide = ptr::null_mut();
        }
    }
}

/// freopen(3)
pub unsafe fn freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
    // SAFETY: the caller's contract.
    unsafe {
        reopening(stream);
        closing_inside(stream, || real::freopen(path, mode, stream))
    }
}

/// freopen64(3)
pub unsafe fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
    // SAFETY: the caller's contract.
    unsafe {
        reopening(stream);
        closing_inside(stream, || real::freopen64(path, mode, stream))
    }
}

/// dprintf(3), which makes a stream for the one call, as libc's own does. `print` writes into it.
fn print(fd: c_int, print: impl FnOnce(*mut FILE) -> c_int) -> c_int {
    let stream = stream_of_socket(fd, c"w", BORROWED);
    if stream.is_null() {
        return -1;
    }
    let mut done = print(stream);
    // SAFETY: the stream made above; not used afterwards.
    unsafe {
        if done >= 0 && real::fflush(stream) != 0 {
            done = -1;
        }
        let saved = errno();
        real::fclose(stream);
        set_errno(saved);
    }
    done
}

/// vdprintf(3); a `va_list` is a pointer where it is passed.
pub unsafe fn vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        if !is_tracked(fd) {
            return real::vdprintf(fd, format, list);
        }
        print(fd, |stream| real::vfprintf(stream, format, list))
    }
}

/// vdprintf(3) as `-D_FORTIFY_SOURCE` calls it.
pub unsafe fn vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    list: *mut c_void,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        if !is_tracked(fd) {
            return real::__vdprintf_chk(fd, flag, format, list);
        }
        print(fd, |stream| real::__vfprintf_chk(stream, flag, format, list))
    }
}

/// perror(3). libc's writes by a duplicate that it makes of the descriptor, so as not to make stderr a stream of bytes.
pub unsafe fn perror(what: *const c_char) {
    let code = errno();
    let fd = std_streams::of_stderr();
    if !is_tracked(fd) {
        set_errno(code);
        // SAFETY: the caller's contract.
        return unsafe { real::perror(what) };
    }
    let mut text: [c_char; 1024] = [0; 1024];
    print(fd, |stream| {
        // SAFETY: strings, room for one, and a stream that is made for this.
        unsafe {
            real::__xpg_strerror_r(code, text.as_mut_ptr(), text.len());
            if !what.is_null() && *what != 0 {
                real::fputs(what, stream);
                real::fputs(c": ".as_ptr(), stream);
            }
            real::fputs(text.as_ptr(), stream);
            real::fputs(c"\n".as_ptr(), stream)
        }
    });
    set_errno(code);
}
