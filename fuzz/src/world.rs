//! The honest process: the library in this very process, with an ISM directory of its own, and the attacker's view of
//! it. Not interposed: the honest end calls `usmc::api`, the attacker the C library.

use std::ffi::CString;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use usmc::fuzzing::{self, layout};

use crate::memory;

/// What the attacker knows of the honest process.
pub struct World {
    /// The ISM directory.
    pub dir: PathBuf,
    /// The attacker's mapping of the device file.
    pub device: *mut u8,
    /// Its descriptor there.
    pub device_file: i32,
    /// Where the honest end has it.
    pub device_there: *mut u8,
    /// The honest end's descriptor of it, which the attacker can see in /proc.
    pub device_fd: i32,
    /// The honest process' index on the device.
    pub index: u32,
    /// The first unused descriptor number.
    first_free: AtomicI32,
}

// SAFETY: there is one thread.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

/// Bytes of the device file.
pub const DEVICE: usize = size_of::<layout::DeviceFile>();

/// The world, made at the first call.
pub fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(make)
}

fn make() -> World {
    let dir = std::env::temp_dir().join(format!("usmc-fuzz-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("chmod");
    // SAFETY: there is no other thread yet, also for `init`, which is called once.
    unsafe {
        std::env::set_var("USMC_ISM_DIR", &dir);
        std::env::set_var("USMC_RING_SIZE", "16384");
        std::env::set_var("USMC_BUSY_POLL_US", "0");
        libc::atexit(clean_up);
        usmc::init();
    }
    let identity = fuzzing::device().own_identity().expect("a device");
    let device_there = mapping("/v5.device");
    let file =
        fs::File::options().read(true).write(true).open(dir.join("v5.device")).expect("device");
    let device_fd = own_fd(&dir.join("v5.device"), file.as_raw_fd());
    let device = memory::map_guarded(file.as_raw_fd(), 0, DEVICE);
    let device_file = file.as_raw_fd();
    // To close it would end the honest process' locks on the same file.
    std::mem::forget(file);
    let index = identity as u32;
    let first_free = AtomicI32::new(-1);
    World { dir, device, device_file, device_there, device_fd, index, first_free }
}

extern "C" fn clean_up() {
    let _ = fs::remove_dir_all(std::env::var_os("USMC_ISM_DIR").unwrap_or_default());
}

/// The start of this process' only mapping of a file so named.
pub fn mapping(name: &str) -> *mut u8 {
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let line = maps.lines().find(|line| line.ends_with(name)).expect("a mapping");
    let start = line.split('-').next().expect("an address");
    usize::from_str_radix(start, 16).expect("a number") as *mut u8
}

/// Another descriptor of the file than `but`.
fn own_fd(path: &std::path::Path, but: i32) -> i32 {
    let numbers = fs::read_dir("/proc/self/fd").expect("fds").flatten();
    let mut numbers = numbers.filter(|e| fs::read_link(e.path()).is_ok_and(|to| to == path));
    let number = |e: fs::DirEntry| e.file_name().to_str().and_then(|n| n.parse().ok());
    numbers.find_map(|e| number(e).filter(|&n| n != but)).expect("the library's descriptor")
}

/// The first unused descriptor number.
fn lowest_free() -> i32 {
    // SAFETY: no pointers.
    unsafe {
        let fd = libc::dup(2);
        libc::close(fd);
        fd
    }
}

impl World {
    /// The device file's tables, for the attacker.
    pub fn tables(&self) -> &layout::DeviceFile {
        // SAFETY: a mapping of that size, never unmapped; all fields are atomics.
        unsafe { &*self.device.cast() }
    }

    /// After the attacker set the tables right again: what it cannot have is as it was.
    pub fn check(&self) {
        self.check_lock();
        if fuzzing::forget_strangers() {
            // With some of them the lock has gone by now.
            fuzzing::device().after_fork(false);
            let me = fuzzing::device().own_identity();
            assert_eq!(me.map(|me| me as u32), Ok(self.index));
        }
        assert_eq!(
            lowest_free(),
            self.first_free.load(Relaxed),
            "a descriptor was leaked or closed"
        );
    }

    fn check_lock(&self) {
        // SAFETY: all-zero is valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as libc::c_short;
        lock.l_start = layout::LOCK_BASE + i64::from(self.index);
        lock.l_len = 1;
        // SAFETY: a valid lock; it tells of the process' own locks, too, the file being open a second time.
        let asked = unsafe { libc::fcntl(self.device_file, libc::F_OFD_GETLK, &raw mut lock) };
        assert_eq!(asked, 0, "F_OFD_GETLK");
        assert_ne!(i32::from(lock.l_type), libc::F_UNLCK, "the device takes us for dead");
    }

    /// To be called once the target has made all it keeps open.
    pub fn settle(&self) {
        self.first_free.store(lowest_free(), Relaxed);
    }

    /// The address of a mailbox.
    pub fn mailbox(&self, index: u32) -> libc::sockaddr_un {
        // SAFETY: all-zero is valid.
        let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let path = self.dir.join(format!("v5.m.{index}"));
        let path = CString::new(path.to_str().expect("text")).expect("no NUL");
        let bytes = path.as_bytes_with_nul();
        for (place, byte) in addr.sun_path.iter_mut().zip(bytes) {
            *place = *byte as libc::c_char;
        }
        addr
    }

    /// A mailbox of the attacker's, in the name of process `index`.
    pub fn open_mailbox(&self, index: u32) -> i32 {
        let addr = self.mailbox(index);
        // SAFETY: a valid address.
        unsafe {
            let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
            let fd = libc::socket(libc::AF_UNIX, kind, 0);
            libc::unlink(addr.sun_path.as_ptr());
            let len = size_of::<libc::sockaddr_un>() as u32;
            assert_eq!(libc::bind(fd, (&raw const addr).cast(), len), 0, "bind");
            fd
        }
    }
}

/// Sends `bytes` and descriptors into a mailbox; says whether that was possible.
pub fn mail(from: i32, to: &libc::sockaddr_un, bytes: &[u8], fds: &[i32]) -> bool {
    let mut control = Vec::new();
    if !fds.is_empty() {
        let len = size_of::<libc::cmsghdr>() + size_of_val(fds);
        control.write_all(&len.to_ne_bytes()).expect("memory");
        control.write_all(&libc::SOL_SOCKET.to_ne_bytes()).expect("memory");
        control.write_all(&libc::SCM_RIGHTS.to_ne_bytes()).expect("memory");
        for fd in fds {
            control.write_all(&fd.to_ne_bytes()).expect("memory");
        }
        control.resize(control.len().next_multiple_of(8), 0);
    }
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero is valid; the buffers live until sendmsg returns.
    unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_name = std::ptr::from_ref(to).cast_mut().cast();
        msg.msg_namelen = size_of::<libc::sockaddr_un>() as u32;
        (msg.msg_iov, msg.msg_iovlen) = (&raw mut iov, 1);
        (msg.msg_control, msg.msg_controllen) = (control.as_mut_ptr().cast(), control.len());
        libc::sendmsg(from, &raw const msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) >= 0
    }
}
