//! Paths without allocation.

use core::ffi::CStr;
use core::fmt::{self, Write};

/// A path in a fixed buffer, NUL-terminated.
pub struct Path {
    bytes: [u8; 256],
    len: usize,
}

impl Path {
    /// An empty one.
    pub fn new() -> Path {
        Path { bytes: [0; 256], len: 0 }
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
