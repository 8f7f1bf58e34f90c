//! Another process with this very library in it, as its memory tells: who may ptrace(2) it may read that
//! (process_vm_readv(2)), and no more is asked for here than pidfd_getfd(2) has asked for already.
//!
//! The library's statics are found by its text: where the same file is mapped, they are as far from it as here. Another
//! file (another version, another word size) is not understood, and not looked at.

use core::ffi::CStr;
use core::mem::MaybeUninit;

use crate::os::path::Path;
use crate::os::strangers;
use crate::os::sys::{self, Errno};

/// Such a process. It may end, or become another program, at any moment; then reads fail.
pub struct Remote {
    pid: u32,
    /// Added to an address of the library here.
    distance: usize,
}

impl Remote {
    /// The process of a pidfd. `None` where it has another library or none, or is not to be seen.
    pub fn of(pidfd: i32) -> Option<Remote> {
        let pid = pid_of(pidfd)?;
        // Locks in shared memory name their holders by process id.
        if !shares_pids(pid) {
            return None;
        }
        let here = (Remote::of as *const ()).addr();
        let own = find(&Path::of(format_args!("/proc/self/maps")), |map| map.has(here))?;
        let maps = Path::of(format_args!("/proc/{pid}/maps"));
        let theirs = find(&maps, |map| map.is_same_text(&own))?;
        Some(Remote { pid, distance: theirs.start.wrapping_sub(own.start) })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it has in the place of this static of the library's.
    ///
    /// # Errors
    /// ESRCH where the process has ended; EFAULT where it is another program by now.
    ///
    /// # Safety
    /// As for [`Remote::read`].
    pub unsafe fn read_static<T>(&self, ours: *const T) -> Result<T, Errno> {
        // SAFETY: the caller's contract.
        unsafe { self.read(ours.addr().wrapping_add(self.distance)) }
    }

    /// What it has at one of its addresses.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// Any bytes are a valid `T`, which owns nothing.
    pub unsafe fn read<T>(&self, at: usize) -> Result<T, Errno> {
        let mut value = MaybeUninit::<T>::zeroed();
        // SAFETY: writable for its size.
        let n = unsafe {
            sys::process_vm_read(self.pid, at, value.as_mut_ptr().cast(), size_of::<T>())
        }?;
        // SAFETY: all bytes are there, and any are valid.
        if n == size_of::<T>() { Ok(unsafe { value.assume_init() }) } else { Err(libc::EFAULT) }
    }
}

/// The number of a pidfd's process; `None` once it is gone.
pub fn pid_of(pidfd: i32) -> Option<u32> {
    let mut pid = None;
    each_line(&Path::of(format_args!("/proc/self/fdinfo/{pidfd}")), |line| {
        if let Some(number) = line.strip_prefix("Pid:") {
            pid = number.trim().parse().ok();
        }
        pid.is_some()
    });
    pid
}

/// Whether process ids mean the same there as here.
fn shares_pids(pid: u32) -> bool {
    let namespace_of = |path: Path| {
        let mut name = [0u8; 64];
        let len = sys::readlink(path.c(), &mut name).ok()?;
        Some((name, len))
    };
    let own = namespace_of(Path::of(format_args!("/proc/self/ns/pid")));
    own.is_some() && own == namespace_of(Path::of(format_args!("/proc/{pid}/ns/pid")))
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

/// The first descriptor of another process that is the memfd of this name and of which `is_it` says so; opened anew.
pub fn open_memfd(pid: u32, name: &CStr, is_it: impl Fn(i32) -> bool) -> Option<i32> {
    let dir = Path::of(format_args!("/proc/{pid}/fd"));
    let mut found = None;
    let _ = sys::each_fd_in(dir.c(), pid == sys::getpid(), |fd| {
        let file = Path::of(format_args!("/proc/{pid}/fd/{fd}"));
        let is_named = |link: &[u8]| {
            link.strip_prefix(b"/memfd:").is_some_and(|l| l.starts_with(name.to_bytes()))
        };
        if found.is_none()
            && let Ok(copy) = strangers::open_memfd(&file, is_named, libc::O_RDWR)
        {
            if is_it(copy) {
                found = Some(copy);
            } else {
                strangers::discard(copy);
            }
        }
    });
    found
}

/// A line of /proc/PID/maps.
#[derive(PartialEq)]
struct Map {
    start: usize,
    end: usize,
    is_text: bool,
    offset: u64,
    device: [u32; 2],
    inode: u64,
}

impl Map {
    fn of(line: &str) -> Option<Map> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        let is_text = words.next()?.as_bytes().get(2) == Some(&b'x');
        let offset = u64::from_str_radix(words.next()?, 16).ok()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let number = |text| u32::from_str_radix(text, 16).ok();
        Some(Map {
            start: address(start)?,
            end: address(end)?,
            is_text,
            offset,
            device: [number(major)?, number(minor)?],
            inode: words.next()?.parse().ok()?,
        })
    }

    fn has(&self, address: usize) -> bool {
        self.is_text && self.inode != 0 && (self.start..self.end).contains(&address)
    }

    fn is_same_text(&self, other: &Map) -> bool {
        let len = |map: &Map| map.end - map.start;
        let file = |map: &Map| (map.is_text, map.offset, map.device, map.inode);
        file(self) == file(other) && len(self) == len(other)
    }
}

fn find(maps: &Path, is_it: impl Fn(&Map) -> bool) -> Option<Map> {
    let mut found = None;
    each_line(maps, |line| {
        found = Map::of(line).filter(&is_it);
        found.is_some()
    });
    found
}

/// Calls `each` for the begin of each line of a file, until it says that this was the one.
fn each_line(file: &Path, mut each: impl FnMut(&str) -> bool) {
    let Ok(fd) = sys::open(file.c(), libc::O_RDONLY, 0) else { return };
    let mut chunk = [0u8; 1024];
    // The addresses, permissions and the inode of a mapping; its name may be of any length.
    let (mut line, mut len) = ([0u8; 128], 0);
    'file: loop {
        // SAFETY: writable for its length.
        let read = unsafe { sys::read(fd, chunk.as_mut_ptr().cast(), chunk.len()) };
        let Ok(n @ 1..) = read else { break };
        for &byte in &chunk[..n] {
            if byte != b'\n' {
                line[len.min(127)] = byte;
                len += 1;
                continue;
            }
            let text = str::from_utf8(&line[..len.min(127)]).unwrap_or("");
            if each(text) {
                break 'file;
            }
            len = 0;
        }
    }
    sys::close(fd);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_read() {
        let line = "7f12000-7f15000 r-xp 00001000 fe:0a 4711       /usr/lib/a name.so";
        let map = Map::of(line).unwrap();
        assert!(map.has(0x7f12000) && map.has(0x7f14fff) && !map.has(0x7f15000));
        assert_eq!((map.offset, map.device, map.inode), (0x1000, [0xfe, 0xa], 4711));
        let elsewhere = Map::of(&line.replace("7f12000-7f15000", "12000-15000")).unwrap();
        assert!(elsewhere.is_same_text(&map) && elsewhere != map);
        for other in [("4711", "4712"), ("r-xp", "rw-p"), ("7f15000", "7f16000"), ("0a", "0b")] {
            assert!(!Map::of(&line.replace(other.0, other.1)).unwrap().is_same_text(&map));
        }
        assert!(Map::of("").is_none() && Map::of("7f12000 r-xp").is_none());
    }

    static OURS: u64 = 0x5eed;

    #[test]
    fn this_process_reads_itself() {
        let pidfd = sys::pidfd_open(sys::getpid()).unwrap();
        let remote = Remote::of(pidfd).unwrap();
        assert_eq!((remote.pid(), remote.distance), (sys::getpid(), 0));
        // SAFETY: integers.
        assert_eq!(unsafe { remote.read_static(&raw const OURS) }, Ok(OURS));
        // SAFETY: as above.
        assert_eq!(unsafe { remote.read::<u64>(8) }, Err(libc::EFAULT));
        sys::close(pidfd);
        assert!(Remote::of(-1).is_none());
    }

    #[test]
    fn a_memfd_is_found_by_name_and_contents() {
        let memfds = [0; 2].map(|_| sys::memfd_create(c"usmc-test-remote").unwrap());
        sys::ftruncate(memfds[1], 5).unwrap();
        let is_it = |fd| sys::fstat(fd).is_ok_and(|facts| facts.size == 5);
        let found = open_memfd(sys::getpid(), c"usmc-test-remote", is_it).unwrap();
        assert_eq!(sys::fstat(found).unwrap().inode, sys::fstat(memfds[1]).unwrap().inode);
        assert!(open_memfd(sys::getpid(), c"usmc-test-other", |_| true).is_none());
        for fd in memfds.into_iter().chain([found]) {
            sys::close(fd);
        }
    }
}
