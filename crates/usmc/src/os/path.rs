//! File names, made without memory of the heap, and what short files say.

use core::ffi::CStr;
use core::fmt::{self, Write};

use crate::os::sys;

/// A file's name.
pub struct Path {
    bytes: [u8; 256],
    len: usize,
}

impl Path {
    /// Nothing yet; what does not fit any more is left out with an error.
    pub fn new() -> Path {
        Path { bytes: [0; 256], len: 0 }
    }

    /// These words. Empty where they are too long.
    pub fn of(words: fmt::Arguments<'_>) -> Path {
        let mut path = Path::new();
        match path.write_fmt(words) {
            Ok(()) => path,
            Err(_) => Path::new(),
        }
    }

    /// For system calls.
    pub fn c(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }

    /// For messages.
    pub fn text(&self) -> &str {
        str::from_utf8(&self.bytes[..self.len]).unwrap_or("?")
    }
}

impl Write for Path {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let end = self.len + s.len();
        if end >= self.bytes.len() {
            return Err(fmt::Error);
        }
        self.bytes[self.len..end].copy_from_slice(s.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// The beginning of a file, as far as it is text and `to` is long.
pub fn read<'a>(path: &CStr, to: &'a mut [u8]) -> Option<&'a str> {
    let fd = sys::open(path, libc::O_RDONLY, 0).ok()?;
    // SAFETY: `to` is writable for its length.
    let read = unsafe { sys::read(fd, to.as_mut_ptr().cast(), to.len()) };
    sys::close(fd);
    str::from_utf8(&to[..read.ok()?]).ok()
}
