//! Where regions come from: a file of the host's, or a device of a virtual machine. How one is found, opened and mapped.
//!
//! | path | length |
//! |---|---|
//! | a file, a memfd | fstat(2) |
//! | the socket of `usmc ivshmem-server` for the host's processes, which gives its memfd to each that connects | fstat(2) |
//! | `/sys/bus/pci/devices/*/resource2`: memory of QEMU's ivshmem device (its docs/specs/ivshmem-spec.rst) | fstat(2) |
//! | `/dev/dax*`: persistent memory of the machine, as it is (Linux' Documentation/ABI/testing/sysfs-bus-dax) | sysfs |
//! | `/dev/kvmfr*`: ivshmem by Looking Glass' driver (its kvmfr.h) | an ioctl |

use core::ffi::{CStr, c_int, c_ulong};
use core::hint::black_box;
use core::{array, ptr};

use usmc_shm::region::{self, Refused};

use crate::os::clock;
use crate::os::path::{self, Path};
pub use crate::os::procfs::boot_id;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::unix;

/// All PCI devices in one file, a line each: bus and function, vendor and device, … in hexadecimal (Linux' drivers/pci/proc.c).
const ALL: &CStr = c"/proc/bus/pci/devices";
/// A link for each of them, named by its address (Linux' Documentation/ABI/testing/sysfs-bus-pci).
const DEVICES: &CStr = c"/sys/bus/pci/devices";
/// Vendor and device of ivshmem (QEMU's docs/specs/pci-ids.rst).
const IVSHMEM: [&str; 2] = ["1af4", "1110"];
/// SYSFS_MAGIC of linux/magic.h.
const SYSFS: u64 = 0x6265_6572;
/// KVMFR_DMABUF_GETSIZE of Looking Glass' kvmfr.h: _IO('u', 0x44).
const KVMFR_SIZE: c_ulong = 0x7544;
/// The largest page of a device-dax node that can be used. Larger ones are mapped as a whole only, and where a program has switched
/// transparent huge pages off, as redis does (PR_SET_THP_DISABLE), a first touch of one is SIGBUS (Linux' drivers/dax/device.c and
/// hugepage_vma_check() of mm/huge_memory.c; seen with 6.1). It may do so at any time, and a forked child touches each anew.
const DAX_PAGE: usize = 4096;

/// Bytes of an ivshmem device's registers, in whole pages, and where IVPosition is among them.
const REGISTERS: usize = 4096;
const POSITION: usize = 8;

/// Loads of a line that are timed together, and how often.
const LOADS: usize = 64;
const ROUNDS: usize = 9;
/// Nanoseconds of a load beyond a load of private memory: more than a cache takes, less than memory itself does where each load
/// goes there.
const CACHED_NS: u64 = 30;

/// Shows the paths of the regions that are configured, one after the other: `auto` or nothing, `none`, or a list with commas.
pub fn each(configured: &str, mut show: impl FnMut(&str)) {
    match configured {
        "" | "auto" => each_device(&mut show),
        "none" => {}
        list => list.split(',').map(str::trim).filter(|path| !path.is_empty()).for_each(show),
    }
}

/// Whether regions are looked for, and not named.
pub fn is_auto(configured: &str) -> bool {
    matches!(configured, "" | "auto")
}

/// Shows the memory of each ivshmem device of the machine. On a machine without PCI that is one system call, and on one without such a
/// device a few.
pub fn each_device(mut show: impl FnMut(&str)) {
    // On other processors the memory of PCI devices is mapped uncached.
    if !cfg!(any(target_arch = "x86_64", target_arch = "x86")) {
        return;
    }
    let mut is_there = false;
    let listed = path::each_line_by::<2048>(ALL, |line| is_there |= is_ivshmem(line));
    // The file does not tell PCI domains apart, so that the devices are named by sysfs.
    if listed.is_none() || !is_there {
        return;
    }
    let _ = sys::each_name_in(DEVICES, |name| {
        let Ok(name) = name.to_str() else { return };
        let has = |file: &str, id: &str| {
            let path = Path::of(format_args!("/sys/bus/pci/devices/{name}/{file}"));
            let mut text = [0; 16];
            path::read(path.c(), &mut text).is_some_and(|text| text.trim() == id)
        };
        if has("vendor", "0x1af4") && has("device", "0x1110") {
            // Never resource2_wc: stores would be combined and reordered.
            show(Path::of(format_args!("/sys/bus/pci/devices/{name}/resource2")).text());
        }
    });
}

/// Whether a line of [`ALL`] is an ivshmem device's.
fn is_ivshmem(line: &str) -> bool {
    let ids = line.split_ascii_whitespace().nth(1);
    ids.and_then(|ids| ids.strip_prefix(IVSHMEM[0])) == Some(IVSHMEM[1])
}

/// Opens a region, and says how long it is.
///
/// # Errors
/// Why it cannot be used.
pub fn open(path: &str) -> Result<(c_int, usize), Reason> {
    if path.ends_with("/resource2_wc") {
        return Err(Reason::Uncached);
    }
    let name = Path::of(format_args!("{path}"));
    let fd = match sys::open(name.c(), libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK, 0) {
        // A socket (open(2)).
        Err(libc::ENXIO) => ask_server(&name),
        opened => opened.ok(),
    };
    let fd = fd.ok_or(Reason::RegionClosed)?;
    length(fd).map(|len| (fd, len)).inspect_err(|_| sys::close(fd))
}

/// How long a server is waited for that has accepted, in milliseconds: it does nothing else than to answer.
const ANSWER_MS: i32 = 1000;

/// The memory that a server gives to the host's processes.
fn ask_server(path: &Path) -> Option<c_int> {
    let address = unix::address(path.c())?;
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let socket = sys::socket(libc::AF_UNIX, kind, 0).ok()?;
    // SAFETY: an address of that length.
    let connected =
        unsafe { sys::connect(socket, (&raw const address).cast(), size_of_val(&address) as u32) };
    let has_answer = connected.is_ok() && sys::poll1(socket, libc::POLLIN, ANSWER_MS) != 0;
    let answer = if has_answer { unix::receive(socket, &mut [0; 8]).ok() } else { None };
    sys::close(socket);
    answer?.fd
}

/// Which machine of its ivshmem server's this is: the id that the server has given it, and 1 more; 0 where there is no server, or it
/// cannot be read. Registers are in BAR0, and a device without a server has no BAR1 (QEMU's docs/specs/ivshmem-spec.rst).
pub fn station(path: &str) -> u64 {
    let Some(dir) = path.strip_suffix("/resource2") else { return 0 };
    let open = |file: &str, flags| sys::open(Path::of(format_args!("{dir}/{file}")).c(), flags, 0);
    let Ok(interrupts) = open("resource1", libc::O_PATH) else { return 0 };
    sys::close(interrupts);
    let Ok(registers) = open("resource0", libc::O_RDONLY) else { return 0 };
    let mapped = sys::mmap_readable(registers, REGISTERS);
    sys::close(registers);
    let Ok(base) = mapped else { return 0 };
    // SAFETY: a register of four bytes in a mapping of this function's own, which ends here.
    let position = unsafe {
        let position = ptr::read_volatile(base.cast::<i32>().add(POSITION / 4));
        sys::munmap(base, REGISTERS);
        position
    };
    // It is negative until the server has said so.
    u64::try_from(position).map_or(0, |id| id + 1)
}

/// The length of the region behind a descriptor.
///
/// # Errors
/// [`Reason::RegionForeign`] where it can be none; [`Reason::RegionPages`].
pub fn length(fd: c_int) -> Result<usize, Reason> {
    let facts = sys::fstat(fd).map_err(|_| Reason::RegionForeign)?;
    let len = match facts.mode & libc::S_IFMT {
        libc::S_IFREG => usize::try_from(facts.size).ok(),
        libc::S_IFCHR => match number_of(facts.node, "align") {
            Some(page) if page > DAX_PAGE => return Err(Reason::RegionPages),
            Some(_) => number_of(facts.node, "size"),
            None => sys::ioctl(fd, KVMFR_SIZE).ok(),
        },
        _ => None,
    };
    len.filter(|len| *len > 0).ok_or(Reason::RegionForeign)
}

/// What sysfs says of a character device: of device-dax, its bytes and those of a page of it.
fn number_of(node: u64, file: &str) -> Option<usize> {
    let (major, minor) = (libc::major(node), libc::minor(node));
    let path = Path::of(format_args!("/sys/dev/char/{major}:{minor}/{file}"));
    let mut text = [0; 32];
    number(path::read(path.c(), &mut text)?)
}

fn number(text: &str) -> Option<usize> {
    text.trim().parse().ok()
}

/// Maps a region of this length, which this process joins next.
///
/// # Errors
/// Why it cannot be used. Nothing is mapped then.
pub fn map(fd: c_int, len: usize) -> Result<(*mut u8, region::Region), Reason> {
    let base = sys::mmap_shared(fd, len).map_err(|errno| of_errno(errno, sys::file_system(fd)))?;
    // Loads alone: where memory is not cached the first operation that reads and writes takes the bus.
    // SAFETY: a mapping of `len` bytes of this process' own, which the caller keeps.
    let opened = unsafe { region::Region::open(base, len) }.map_err(of_refusal);
    let usable = opened.and_then(|region| {
        // SAFETY: a region has a header, of which this is the first word.
        let is_cached = unsafe { is_mapped_cached(base.cast()) };
        if is_cached { Ok(region) } else { Err(Reason::Uncached) }
    });
    // SAFETY: no other thread has seen it.
    let usable = usable.inspect_err(|_| unsafe { sys::munmap(base, len) });
    usable.map(|region| (base, region))
}

/// What mmap(2) says of a file in a file system of this kind. Where the kernel is locked down no PCI device is mapped (Linux'
/// drivers/pci/pci-sysfs.c, kernel_lockdown(7)); of other files EPERM speaks of seals.
fn of_errno(errno: Errno, kind: Result<u64, Errno>) -> Reason {
    match errno {
        libc::EPERM if kind == Ok(SYSFS) => Reason::Lockdown,
        libc::EPERM | libc::EACCES => Reason::RegionClosed,
        libc::ENODEV | libc::EINVAL => Reason::RegionForeign,
        _ => Reason::NoMemory,
    }
}

fn of_refusal(refused: Refused) -> Reason {
    match refused {
        Refused::Foreign => Reason::RegionForeign,
        Refused::Version(_) => Reason::RegionVersion,
    }
}

/// Whether loads of a word there come from a cache.
///
/// # Safety
/// The word is mapped.
unsafe fn is_mapped_cached(word: *const u64) -> bool {
    let private = 0;
    // The first time takes the code into the caches, and a machine that translates code does so then.
    // SAFETY: the caller's contract, and a word of the stack.
    let [_, mut shared, mut private] =
        [&raw const private, word, &raw const private].map(|word| unsafe { times(word) });
    is_cached(&mut shared, &mut private)
}

/// Nanoseconds that rounds of loads of one word take, and the clock with them.
///
/// # Safety
/// The word is mapped.
#[inline(never)]
unsafe fn times(word: *const u64) -> [u64; ROUNDS] {
    let load = || {
        for _ in 0..LOADS {
            // SAFETY: the caller's contract.
            black_box(unsafe { ptr::read_volatile(word) });
        }
    };
    // The page comes into memory.
    load();
    array::from_fn(|_| {
        let begun = clock::now_ns();
        load();
        clock::now_ns() - begun
    })
}

/// Whether the times of rounds are a cache's, beside those of private memory: what the clock takes, where it is slow, is in both. One
/// round in which the thread was interrupted does not count.
fn is_cached(shared: &mut [u64; ROUNDS], private: &mut [u64; ROUNDS]) -> bool {
    let median = |times: &mut [u64; ROUNDS]| *times.select_nth_unstable(ROUNDS / 2).1;
    let (shared, private) = (median(shared), median(private));
    shared.saturating_sub(private) <= CACHED_NS * LOADS as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs::{self, File};
    use std::os::fd::AsRawFd;

    use usmc_shm::region::{Region, len_for};

    #[test]
    fn named_regions_come_as_they_stand() {
        let named = |text| {
            let mut paths = Vec::new();
            each(text, |path| paths.push(path.to_owned()));
            paths
        };
        assert_eq!(named("/a, /b:1,,/c "), ["/a", "/b:1", "/c"]);
        assert_eq!(named("none"), [""; 0]);
        assert!(is_auto("") && is_auto("auto") && !is_auto("none") && !is_auto("/a"));
    }

    #[test]
    fn devices_are_known_by_their_ids() {
        assert!(is_ivshmem("0018\t1af41110\t0\t  febd1000\t 0"));
        assert!(is_ivshmem("ff18\t1af41110\t10"));
        for line in ["0018\t1af41111\t0", "0018\t80861110\t0", "1af41110", "", "0018 1af4 1110"] {
            assert!(!is_ivshmem(line), "{line}");
        }
    }

    #[test]
    fn numbers_of_sysfs_are_decimal() {
        assert_eq!(number("268435456\n"), Some(256 << 20));
        for text in ["", "0x200000", "-2097152", "memory"] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn memory_is_cached_where_most_rounds_are_fast() {
        let private = [40; ROUNDS];
        let is_cached = |mut shared, mut private| is_cached(&mut shared, &mut private);
        assert!(is_cached([70; ROUNDS], private));
        // Some 200 ns a load.
        assert!(!is_cached([12_800; ROUNDS], private));
        // Interrupted, and beside a slow clock.
        assert!(is_cached([60, 60, 9_000_000, 60, 70, 60, 60, 5_000_000, 60], private));
        assert!(is_cached([9_000; ROUNDS], [8_900; ROUNDS]));
        assert!(!is_cached([9_000 + 12_800; ROUNDS], [8_900; ROUNDS]));
        assert!(is_cached([40; ROUNDS], [9_000; ROUNDS]));
        // SAFETY: a word of this test's.
        assert!(unsafe { is_mapped_cached(&raw const private[0]) });
    }

    fn reason(path: &str) -> Reason {
        let (fd, len) = match open(path) {
            Ok(opened) => opened,
            Err(reason) => return reason,
        };
        let mapped = map(fd, len);
        sys::close(fd);
        mapped.map(drop).err().unwrap_or(Reason::None)
    }

    #[test]
    fn a_socket_that_gives_no_memory_is_not_waited_for() {
        use std::io::Write;
        use std::os::unix::net::UnixListener;
        let path = std::env::temp_dir().join(format!("usmc-server-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let name = path.to_str().unwrap();
        // Nobody accepts.
        assert_eq!(reason(name), Reason::RegionClosed);
        drop(listener.accept());
        let asks = std::thread::spawn({
            let name = name.to_owned();
            move || reason(&name)
        });
        listener.accept().unwrap().0.write_all(&[1]).unwrap();
        assert_eq!(asks.join().unwrap(), Reason::RegionClosed, "a byte without a descriptor");
        drop(listener);
        assert_eq!(reason(name), Reason::RegionClosed, "nobody listens");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_is_a_region_or_says_why_not() {
        let path = std::env::temp_dir().join(format!("usmc-provider-{}", std::process::id()));
        let name = path.to_str().unwrap();
        assert_eq!(reason(name), Reason::RegionClosed);
        let len = len_for(4);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        assert_eq!(reason(name), Reason::RegionForeign);
        file.set_len(len as u64).unwrap();
        assert_eq!(reason(name), Reason::RegionForeign);
        assert_eq!(length(file.as_raw_fd()), Ok(len));
        let base = sys::mmap_shared(file.as_raw_fd(), len).unwrap();
        // SAFETY: a fresh mapping of the whole file, which ends here.
        unsafe {
            Region::format(base, len, [1, 2]).unwrap();
            assert_eq!(reason(name), Reason::None);
            // The version.
            base.cast::<u32>().add(2).write(999);
            assert_eq!(reason(name), Reason::RegionVersion);
            sys::munmap(base, len);
        }
        fs::remove_file(&path).unwrap();
        for other in ["/dev/null", "/tmp", "/proc/self/nothing"] {
            assert!(matches!(reason(other), Reason::RegionForeign | Reason::RegionClosed));
        }
        assert_eq!(reason("/sys/bus/pci/devices/0000:00:03.0/resource2_wc"), Reason::Uncached);
        assert_eq!(of_errno(libc::EPERM, Ok(SYSFS)), Reason::Lockdown);
        assert_eq!(of_errno(libc::EPERM, Ok(0)), Reason::RegionClosed);
    }
}
