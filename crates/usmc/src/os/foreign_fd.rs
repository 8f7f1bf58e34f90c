//! Descriptors that came from a peer and are not what they should be.
//!
//! To close such a one can harm: with it go this process' locks on that file (fcntl_locking(2)), the device's and the
//! application's, and a file system in user space may let the close last for ever. So only what is known to be
//! harmless is closed. The rest is kept, and after a few nothing more is taken from peers.

use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::path::Path;
use crate::os::sockopt;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};

/// Most that are kept. No correct peer sends any.
const MOST: u32 = 16;
static KEPT: AtomicU32 = AtomicU32::new(0);

/// Whether descriptors may still be taken from peers.
pub fn are_welcome() -> bool {
    KEPT.load(Relaxed) < MOST
}

/// Seals of a memfd that cannot shrink under a mapping, as no file with a name has them.
pub fn is_sealed(fd: i32) -> bool {
    const SEALS: usize = (libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) as usize;
    sys::fcntl(fd, libc::F_GET_SEALS, 0).is_ok_and(|seals| seals & SEALS == SEALS)
}

/// Whether it is memory that cannot shrink, in pages of the usual size: of huge ones neither mappings nor what is given back
/// can have any other length.
pub fn is_memory(fd: i32) -> bool {
    is_sealed(fd) && sys::file_system(fd) == Ok(libc::TMPFS_MAGIC as u64)
}

/// The file system of all memfds, plus one.
static MEMORY: AtomicU64 = AtomicU64::new(0);

fn file_system_of_memory() -> Result<u64, Errno> {
    let known = MEMORY.load(Relaxed);
    if known != 0 {
        return Ok(known - 1);
    }
    let fd = sys::memfd_create(c"usmc-where")?;
    let found = sys::status(fd);
    sys::close(fd);
    let (_, device) = found?;
    MEMORY.store(device + 1, Relaxed);
    Ok(device)
}

/// Opens the memfd that a link in another process' /proc leads to, if its name is right. The name alone proves nothing: a
/// process that has its own root can have any file of that name there, and to open a FIFO, or a file of a file system in
/// user space, may last for ever.
///
/// # Errors
/// The kernel's; EPROTO where it is something else.
pub fn open_memfd(link: &Path, is_named: impl Fn(&[u8]) -> bool, flags: i32) -> Result<i32, Errno> {
    let mut text = [0u8; 64];
    let mut is_it = |link: &Path| {
        let len = sys::readlink(link.c(), &mut text)?;
        if is_named(&text[..len]) { Ok(()) } else { Err(libc::EPROTO) }
    };
    is_it(link)?;
    let memory = file_system_of_memory()?;
    // For nothing but to name it, so that it is the same one in what follows.
    let pointed = sys::open(link.c(), libc::O_PATH, 0)?;
    let same = Path::of(format_args!("/proc/self/fd/{pointed}"));
    let opened = is_it(&same).and_then(|()| match sys::status(pointed)? {
        (mode, device) if mode & libc::S_IFMT == libc::S_IFREG && device == memory => {
            sys::open(same.c(), flags | libc::O_NONBLOCK, 0)
        }
        _ => Err(libc::EPROTO),
    });
    sys::close(pointed);
    opened
}

/// Gets rid of a descriptor that a peer has sent.
pub fn discard(fd: i32) {
    // A socket may let the last close wait for its own peer (SO_LINGER), for as long as it says.
    let none = libc::linger { l_onoff: 0, l_linger: 0 };
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &none);
    let_go(fd);
}

/// The same of one that we have fetched from its owner, which has it still and whose options it keeps.
pub fn let_go(fd: i32) {
    // None of these asks a file system, not even fstat(2) would do.
    let is_harmless = is_sealed(fd)
        || sockopt::int(fd, libc::SOL_SOCKET, libc::SO_TYPE, -1) >= 0
        || sys::fcntl(fd, libc::F_GETPIPE_SZ, 0).is_ok();
    if is_harmless {
        sys::close(fd);
        return;
    }
    table::set(fd, Entry::Internal);
    if KEPT.fetch_add(1, Relaxed) == 0 {
        crate::os::log::warn(format_args!(
            "a peer passed on fd {fd}, which is no segment; it is kept"
        ));
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
        let path = std::env::temp_dir().join(format!("usmc-foreign-fd-{}", std::process::id()));
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

    #[test]
    fn only_memfds_are_opened() {
        let seals = (libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) as usize;
        let memfd = sys::memfd_create(c"test").unwrap();
        sys::fcntl(memfd, libc::F_ADD_SEALS, seals).unwrap();
        assert!(is_memory(memfd));
        let open = |fd: i32| {
            let link = Path::of(format_args!("/proc/self/fd/{fd}"));
            open_memfd(&link, |_| true, libc::O_RDONLY)
        };
        let again = open(memfd).unwrap();
        assert_eq!(sys::fstat(again).unwrap().inode, sys::fstat(memfd).unwrap().inode);
        // Of a FIFO whose other end nobody has the open would wait.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(writer);
        assert_eq!(open(reader.as_raw_fd()), Err(libc::EPROTO));
        let file = File::open("/proc/self/exe").unwrap();
        assert_eq!(open(file.as_raw_fd()), Err(libc::EPROTO));
        sys::close(again);
        sys::close(memfd);
        let flags = libc::MFD_HUGETLB | libc::MFD_ALLOW_SEALING;
        // SAFETY: a valid name.
        let huge = unsafe { libc::memfd_create(c"test".as_ptr(), flags) };
        // Kernels without huge pages have none.
        if huge >= 0 {
            sys::fcntl(huge, libc::F_ADD_SEALS, seals).unwrap();
            assert!(is_sealed(huge) && !is_memory(huge));
            assert_eq!(open(huge), Err(libc::EPROTO));
            sys::close(huge);
        }
    }
}
