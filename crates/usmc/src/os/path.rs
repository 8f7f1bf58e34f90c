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

/// Shows a file's lines, one after the other, without their ends: it is read in pieces, for the stack may be small. What
/// does not fit into one piece, or is no text, is left out. `None` where the file cannot be read.
pub fn each_line(path: &CStr, show: impl FnMut(&str)) -> Option<()> {
    each_line_by::<512>(path, show)
}

/// The same in pieces of another length.
pub fn each_line_by<const PIECE: usize>(path: &CStr, mut show: impl FnMut(&str)) -> Option<()> {
    let fd = sys::open(path, libc::O_RDONLY, 0).ok()?;
    let mut piece = [0; PIECE];
    let (mut have, mut is_rest) = (0, false);
    loop {
        // SAFETY: what is left of `piece` is writable.
        let read = unsafe { sys::read(fd, piece.as_mut_ptr().add(have).cast(), PIECE - have) };
        let Ok(n @ 1..) = read else { break };
        have += n;
        let mut done = 0;
        while let Some(len) = piece[done..have].iter().position(|byte| *byte == b'\n') {
            let line = &piece[done..done + len];
            if let (false, Ok(line)) = (is_rest, str::from_utf8(line)) {
                show(line);
            }
            (is_rest, done) = (false, done + len + 1);
        }
        if done == 0 && have == PIECE {
            (is_rest, done) = (true, have);
        }
        piece.copy_within(done..have, 0);
        have -= done;
    }
    sys::close(fd);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_longer_than_the_buffer_are_read_line_by_line() {
        let path = std::env::temp_dir().join(format!("usmc-lines-{}", std::process::id()));
        let long = "x".repeat(1500);
        let lines: Vec<String> = (0..400).map(|n| format!("name_{n} {}", n * n)).collect();
        let text = format!("{}\n{long}\n{}\n", lines[..200].join("\n"), lines[200..].join("\n"));
        std::fs::write(&path, text).unwrap();
        let name = Path::of(format_args!("{}", path.display()));
        let mut seen = Vec::new();
        each_line(name.c(), |line| seen.push(line.to_owned())).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(seen, lines);
        assert!(each_line(name.c(), |_| ()).is_none());
    }
}
