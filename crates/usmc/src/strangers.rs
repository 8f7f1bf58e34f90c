//! Descriptors that came from a peer and are not what they should be.
//!
//! To close such a one can harm: with it go this process' locks on that file (fcntl_locking(2)), the device's and the
//! application's, and a file system in user space may let the close last for ever. So only what is known to be
//! harmless is closed. The rest is kept, and after a few nothing more is taken from peers.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use crate::table::{self, Entry};
use crate::{kernel, sys};

/// Most that are kept. No correct peer sends any.
const MOST: u32 = 16;
static KEPT: AtomicU32 = AtomicU32::new(0);

/// Whether descriptors may still be taken from peers.
pub fn are_welcome() -> bool {
    KEPT.load(Relaxed) < MOST
}

/// Seals of a memfd that cannot shrink under who maps it, as no file with a name has them.
pub fn is_sealed(fd: i32) -> bool {
    const SEALS: usize = (libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) as usize;
    sys::fcntl(fd, libc::F_GET_SEALS, 0).is_ok_and(|seals| seals & SEALS == SEALS)
}

/// Gets rid of a descriptor that a peer has sent.
pub fn discard(fd: i32) {
    // A socket may let the last close wait for its own peer (SO_LINGER), for as long as it says.
    let none = libc::linger { l_onoff: 0, l_linger: 0 };
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &none);
    let_go(fd);
}

/// The same of one that we have fetched from its owner, who has it still and whose options it keeps.
pub fn let_go(fd: i32) {
    // None of these asks a file system, not even fstat(2) would do.
    let is_harmless = is_sealed(fd)
        || kernel::option(fd, libc::SOL_SOCKET, libc::SO_TYPE, -1) >= 0
        || sys::fcntl(fd, libc::F_GETPIPE_SZ, 0).is_ok();
    if is_harmless {
        sys::close(fd);
        return;
    }
    table::set(fd, Entry::Internal);
    if KEPT.fetch_add(1, Relaxed) == 0 {
        crate::log::warn(format_args!("a peer passed on fd {fd}, which is no segment; it is kept"));
    }
}

/// Closes all the same what was kept among the first numbers, for the next fuzz input; says whether there was any.
#[cfg(fuzzing)]
pub fn forget() -> bool {
    if KEPT.swap(0, Relaxed) == 0 {
        return false;
    }
    (0..256).filter(|&fd| table::get(fd) == Entry::Internal).for_each(table::release_fd);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, IntoRawFd};

    fn is_open(fd: i32) -> bool {
        sys::fcntl(fd, libc::F_GETFD, 0).is_ok()
    }

    /// Our lock on the first byte, as another open file description sees it.
    fn is_locked(file: &File) -> bool {
        // SAFETY: all-zero is a valid `flock`, and F_OFD_GETLK writes into it.
        unsafe {
            let mut lock: libc::flock = core::mem::zeroed();
            (lock.l_type, lock.l_len) = (libc::F_WRLCK as libc::c_short, 1);
            assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock), 0);
            i32::from(lock.l_type) != libc::F_UNLCK
        }
    }

    #[test]
    fn a_peers_descriptor_ends_no_lock_of_ours() {
        let path = std::env::temp_dir().join(format!("usmc-strangers-{}", std::process::id()));
        let open = || {
            File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap()
        };
        let (ours, theirs, watch) = (open(), open().into_raw_fd(), open());
        std::fs::remove_file(&path).unwrap();
        sys::lock_byte(ours.as_raw_fd(), true, libc::F_WRLCK, 0).unwrap();
        assert!(is_locked(&watch));
        discard(theirs);
        assert!(is_locked(&watch) && is_open(theirs));
        assert_eq!(table::get(theirs), Entry::Internal);
        sys::close(theirs);
        table::set(theirs, Entry::Foreign);
        assert!(!is_locked(&watch), "what it is about");
    }

    #[test]
    fn harmless_ones_are_closed() {
        let memfd = sys::memfd_create(c"test").unwrap();
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        sys::fcntl(memfd, libc::F_ADD_SEALS, seals as usize).unwrap();
        let socket = sys::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        for fd in [memfd, socket] {
            discard(fd);
            assert!(!is_open(fd));
        }
    }

    #[test]
    fn lingering_sockets_are_closed_at_once() {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _reader = listener.accept().unwrap();
        theirs.set_nonblocking(true).unwrap();
        while theirs.write(&[0; 65536]).is_ok() {}
        let theirs = theirs.into_raw_fd();
        let linger = libc::linger { l_onoff: 1, l_linger: 30 };
        sys::setsockopt(theirs, libc::SOL_SOCKET, libc::SO_LINGER, &linger).unwrap();
        let start = std::time::Instant::now();
        discard(theirs);
        assert!(start.elapsed().as_secs() < 15);
    }
}
