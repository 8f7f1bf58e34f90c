//! stdio on a connection. libc's streams call its own read and write, which no preload sees: once there is a stream for a tracked
//! descriptor, they come to us ([`streams`]). dprintf(3) and perror(3) need none of libc's. All that allocates here is libc.

use core::ffi::{CStr, c_char, c_int, c_void};
use libc::{FILE, size_t, ssize_t};
use usmc_shm::sync::Ordering::Relaxed;

use crate::api::streams::{self, is_ours};
use crate::os::errno::{self, apart, errno, set_errno};
use crate::os::libc_streams;
use crate::os::real::{self, Functions};
use crate::os::table::{self, Entry};
use crate::record::conn;
use crate::socket::{close as closing, control};

/// For writing, and without an end of its descriptor's.
const BORROWED: Functions =
    Functions { read: None, write: Some(write_all), seek: None, close: None };

unsafe extern "C" fn write_all(cookie: *mut c_void, buf: *const c_char, len: size_t) -> ssize_t {
    // SAFETY: libc passes its buffer of `len` bytes.
    let done = unsafe { write_whole(cookie as usize as c_int, buf, len) };
    // glibc takes fewer bytes for an error, musl -1 alone.
    if done.cast_unsigned() < len && real::is_musl() { -1 } else { done }
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

/// fdopen(3)
pub unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    apart(|| {
        if is_ours(fd) && !libc_streams::serve() {
            control::used_by_libc(fd);
        }
    });
    // SAFETY: the caller's contract.
    unsafe { real::fdopen(fd, mode) }
}

/// Makes a call that closes the descriptor of `stream`, perhaps inside libc.
///
/// # Safety
/// A stream of libc's.
unsafe fn closing_inside<T>(stream: *mut FILE, call: impl FnOnce() -> T) -> T {
    // SAFETY: the caller's contract.
    let fd = apart(|| unsafe { real::fileno(stream) });
    let Entry::Conn(index) = table::settled(fd) else { return call() };
    let use_count = conn::at(index).use_count.load(Relaxed);
    let done = call();
    let _errno = errno::keep();
    // Still the same connection: nobody has told us that its number is closed.
    if table::settled(fd) == Entry::Conn(index)
        && conn::at(index).use_count.load(Relaxed) == use_count
    {
        closing::closing_stale(fd);
    }
    done
}

calls! {
    /// fclose(3)
    fclose(stream: *mut FILE) -> c_int |kernel()| closing_inside(stream, kernel);
    /// freopen(3)
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE
        |kernel()| closing_inside(stream, kernel);
    /// freopen64(3)
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE
        |kernel()| closing_inside(stream, kernel);
}

/// dprintf(3), which makes a stream for the one call, as libc's own does. `print` writes into it.
fn print(fd: c_int, print: impl FnOnce(*mut FILE) -> c_int) -> c_int {
    const MODE: &CStr = c"w";
    // SAFETY: the function takes a descriptor for its cookie.
    let stream = unsafe { real::fopencookie(fd as usize as *mut c_void, MODE.as_ptr(), BORROWED) };
    if stream.is_null() {
        return -1;
    }
    let mut done = print(stream);
    // SAFETY: the stream made above; not used afterwards.
    unsafe {
        if done >= 0 && real::fflush(stream) != 0 {
            done = -1;
        }
        apart(|| real::fclose(stream));
    }
    done
}

/// vdprintf(3); a `va_list` is a pointer where it is passed.
pub unsafe fn vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        if !is_ours(fd) {
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
        if !is_ours(fd) {
            return real::__vdprintf_chk(fd, flag, format, list);
        }
        print(fd, |stream| real::__vfprintf_chk(stream, flag, format, list))
    }
}

/// perror(3). libc's writes by a duplicate that it makes of the descriptor, so as not to make stderr a stream of bytes.
pub unsafe fn perror(what: *const c_char) {
    let code = errno();
    let fd = streams::of_stderr();
    if !is_ours(fd) {
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
