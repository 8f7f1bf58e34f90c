//! `USMC_LOG`: silent unless asked, one line per event, one write(2) per line.

use core::ffi::CStr;
use core::fmt::{self, Write};
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicI32, AtomicU32, AtomicU64};

use crate::os::sockopt;

static LEVEL: AtomicU32 = AtomicU32::new(0);
static FD: AtomicI32 = AtomicI32::new(2);
/// Which file that was at the start. The program may close it, and the number be of its own then.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        // The last byte is kept for the newline; what is too long is cut.
        let n = s.len().min(self.bytes.len() - 1 - self.len);
        self.bytes[self.len..self.len + n].copy_from_slice(&s.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

/// Reads `USMC_LOG` (`level` or `level:/path`).
///
/// # Safety
/// Called from the constructor, before the environment can change.
pub unsafe fn init() {
    // SAFETY: the caller's contract.
    let value = unsafe { libc::getenv(c"USMC_LOG".as_ptr()) };
    if value.is_null() {
        return;
    }
    // SAFETY: getenv returned a NUL-terminated string.
    let bytes = unsafe { CStr::from_ptr(value) }.to_bytes_with_nul();
    let level_end = bytes.iter().position(|b| matches!(b, b':' | 0)).unwrap_or(0);
    let level = match &bytes[..level_end] {
        b"error" => 1,
        b"warn" => 2,
        b"info" => 3,
        b"debug" => 4,
        _ => 0,
    };
    if bytes[level_end] == b':'
        && let Ok(path) = CStr::from_bytes_until_nul(&bytes[level_end + 1..])
    {
        let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT;
        match crate::os::sys::open(path, flags, 0o600) {
            Ok(fd) => FD.store(crate::os::table::keep_fd(fd), Relaxed),
            Err(_) => return,
        }
    }
    let fd = FD.load(Relaxed);
    let Ok(facts) = crate::os::sys::fstat(fd) else { return };
    if sockopt::int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) == libc::IPPROTO_TCP {
        // A client, as under inetd: nothing is to be said to it, least of all past its ring.
        return;
    }
    DEVICE.store(facts.device, Relaxed);
    INODE.store(facts.inode, Relaxed);
    LEVEL.store(level, Relaxed);
}

fn line(level: u32, name: &str, args: fmt::Arguments<'_>) {
    if LEVEL.load(Relaxed) < level {
        return;
    }
    let fd = FD.load(Relaxed);
    let is_it = |facts: crate::os::sys::FileFacts| {
        facts.device == DEVICE.load(Relaxed) && facts.inode == INODE.load(Relaxed)
    };
    if !crate::os::sys::fstat(fd).is_ok_and(is_it) {
        return;
    }
    let mut line = Line { bytes: [0; 512], len: 0 };
    let _ = write!(line, "usmc[{}] {name}: {args}", crate::os::process::pid());
    line.bytes[line.len] = b'\n';
    crate::os::sys::write(fd, &line.bytes[..=line.len]);
}

/// Something the user should act upon.
pub fn warn(args: fmt::Arguments<'_>) {
    line(2, "warn", args);
}

/// Steps of the handshake.
pub fn debug(args: fmt::Arguments<'_>) {
    line(4, "debug", args);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    #[test]
    fn a_line_for_nobody_is_no_signal() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        // SAFETY: what the test program ignores would end it until it is ignored again.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        crate::os::sys::write(writer.as_raw_fd(), b"x");
        // SAFETY: as it was.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
}
