//! Becoming another program, as execvp(3) does it: std's `exec` would reset SIGPIPE, which a wrapper must
//! hand on as it found it.

use std::ffi::{CString, OsStr, OsString, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::ptr;

/// Replaces this process by `argv[0]`, looked up in PATH, with exactly this environment.
///
/// Returns only when that failed, with the reason.
pub fn replace(argv: &[OsString], environment: &[(OsString, OsString)]) -> io::Error {
    let argv: Option<Vec<CString>> =
        argv.iter().map(|arg| CString::new(arg.as_bytes()).ok()).collect();
    let environment: Option<Vec<CString>> =
        environment.iter().map(|(k, v)| variable(k, v)).collect();
    let (Some(argv), Some(environment)) = (argv, environment) else {
        return io::ErrorKind::InvalidInput.into();
    };
    let Some(program) = argv.first() else { return io::ErrorKind::InvalidInput.into() };
    let (argv, environment) = (pointers(&argv), pointers(&environment));
    #[expect(unsafe_code, reason = "std's exec changes SIGPIPE, rustix has no execvpe")]
    // SAFETY: both arrays end with NULL and point to NUL-terminated strings that outlive the call.
    unsafe {
        libc::execvpe(program.as_ptr(), argv.as_ptr(), environment.as_ptr())
    };
    io::Error::last_os_error()
}

fn variable(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}
