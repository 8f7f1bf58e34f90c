//! Other processes, and this kernel's boot, as proc(5) shows them.

use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::Relaxed;

use crate::os::path::{self, Path, each_line};
use crate::os::sys::{self, Errno};

/// The number of a pidfd's process; `None` once it is gone.
pub fn pid_of(pidfd: i32) -> Option<u32> {
    let mut pid = None;
    each_line(Path::of(format_args!("/proc/self/fdinfo/{pidfd}")).c(), |line| {
        if let Some(number) = line.strip_prefix("Pid:") {
            pid = number.trim().parse().ok();
        }
    })?;
    pid
}

/// Whether a number of another process is the socket with this inode number.
pub fn is_socket(pid: u32, number: i32, inode: u64) -> bool {
    let mut link = [0u8; 64];
    let file = Path::of(format_args!("/proc/{pid}/fd/{number}"));
    let len = sys::readlink(file.c(), &mut link).unwrap_or(0);
    let name = str::from_utf8(&link[..len]).unwrap_or("");
    let number = name.strip_prefix("socket:[").and_then(|name| name.strip_suffix(']'));
    number.and_then(|digits| digits.parse().ok()) == Some(inode)
}

/// Whether another process has the socket with this inode number.
///
/// # Errors
/// Its descriptors are not to be seen.
pub fn has_socket(pid: u32, inode: u64) -> Result<bool, Errno> {
    let mut has = false;
    let dir = Path::of(format_args!("/proc/{pid}/fd"));
    sys::each_fd_in(dir.c(), false, |fd| has = has || is_socket(pid, fd, inode))?;
    Ok(has)
}

/// Which time this kernel has been booted: no other machine has this number.
pub fn boot_id() -> Option<[u64; 2]> {
    let mut digits = [0u8; 64];
    let text = path::read(c"/proc/sys/kernel/random/boot_id", &mut digits)?;
    let digits = text.trim().chars().filter(|digit| *digit != '-');
    let id = digits
        .map(|digit| digit.to_digit(16))
        .try_fold(0u128, |id, digit| digit.map(|digit| id << 4 | u128::from(digit)))?;
    (id != 0).then_some([(id >> 64) as u64, id as u64])
}

/// Half of [`boot_id`], read once; not 0. A random number where `/proc` does not tell, so that no other process has the same.
pub fn boot() -> u64 {
    static BOOT: AtomicU64 = AtomicU64::new(0);
    match BOOT.load(Relaxed) {
        0 => {
            let boot = boot_id().map_or_else(sys::random, |[half, _]| half) | 1;
            BOOT.store(boot, Relaxed);
            boot
        }
        boot => boot,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    #[test]
    fn this_process_and_its_sockets_are_found() {
        let own = sys::getpid();
        let pidfd = sys::pidfd_open(own).unwrap();
        assert_eq!(pid_of(pidfd), Some(own));
        assert_eq!(pid_of(-1), None);
        sys::close(pidfd);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let inode = sys::fstat(socket.as_raw_fd()).unwrap().inode;
        assert!(is_socket(own, socket.as_raw_fd(), inode) && !is_socket(own, -1, inode));
        assert_eq!(has_socket(own, inode), Ok(true));
        assert_eq!(has_socket(own, u64::MAX), Ok(false));
    }
}
