//! System calls the library makes for itself: raw, so that no symbol we interpose is entered, no
//! cancellation point is hit and `errno` stays untouched. Calls made for the application go through
//! [`crate::os::real`] instead.

use core::ffi::{CStr, c_int, c_long, c_ulong, c_void};
use core::ptr;

/// A failed system call's errno (positive).
pub type Errno = c_int;

/// One raw system call.
///
/// # Safety
/// As the call itself demands of its arguments.
#[inline(always)]
pub unsafe fn raw(nr: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    #[cfg(not(target_arch = "x86"))]
    let ret: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the x86-64 Linux convention; rcx and r11 are clobbered, memory may change.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") nr as isize => ret, in("rdi") a, in("rsi") b,
            in("rdx") c, in("r10") d, in("r8") e, in("r9") f, out("rcx") _, out("r11") _,
            options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the arm64 Linux convention; memory may change.
    unsafe {
        core::arch::asm!("svc 0", in("x8") nr, inlateout("x0") a => ret, in("x1") b, in("x2") c,
            in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    // SAFETY: the caller's contract.
    #[cfg(target_arch = "x86")]
    let ret = unsafe { by_vdso(nr, a, b, c, d, e, f) };
    ret
}

/// The i386 Linux convention wants ebp, which inline assembly may not name. gs:16 is the vDSO's entry, where libc
/// itself enters the kernel (`sysinfo` of its thread block).
#[cfg(target_arch = "x86")]
#[unsafe(naked)]
unsafe extern "C" fn by_vdso(
    nr: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    core::arch::naked_asm!(
        "push ebp
         push ebx
         push esi
         push edi
         mov eax, [esp + 20]
         mov ebx, [esp + 24]
         mov ecx, [esp + 28]
         mov edx, [esp + 32]
         mov esi, [esp + 36]
         mov edi, [esp + 40]
         mov ebp, [esp + 44]
         call dword ptr gs:[16]
         pop edi
         pop esi
         pop ebx
         pop ebp
         ret"
    )
}

/// The errno in what a system call returned. Where addresses have 32 bits, one of them may look negative.
#[inline(always)]
pub fn failure(ret: isize) -> Option<Errno> {
    const ERRNO_MAX: isize = 4095;
    (-ERRNO_MAX..0).contains(&ret).then_some(-ret as Errno)
}

#[inline(always)]
fn check(ret: isize) -> Result<usize, Errno> {
    match failure(ret) {
        Some(errno) => Err(errno),
        None => Ok(ret as usize),
    }
}

/// The numbers of system calls. On i386 some lead to calls with the structures of Linux 2.0, which others replace.
#[cfg(not(target_arch = "x86"))]
use libc as nr;
#[cfg(target_arch = "x86")]
mod nr {
    pub use libc::*;
    pub use libc::{
        SYS_fcntl64 as SYS_fcntl, SYS_fstat64 as SYS_fstat, SYS_ftruncate64 as SYS_ftruncate,
        SYS_geteuid32 as SYS_geteuid, SYS_mmap2 as SYS_mmap,
    };
}

/// A 64-bit argument in one register, or its halves in two.
#[cfg(target_pointer_width = "64")]
macro_rules! call_wide {
    ($nr:ident, $($arg:expr),*; $wide:expr) => { call!($nr, $($arg),*, $wide) };
}
#[cfg(target_pointer_width = "32")]
macro_rules! call_wide {
    ($nr:ident, $($arg:expr),*; $wide:expr) => { call!($nr, $($arg),*, $wide, ($wide as u64 >> 32)) };
}

macro_rules! call {
    ($nr:ident) => { call!($nr, 0, 0, 0, 0, 0, 0) };
    ($nr:ident, $a:expr) => { call!($nr, $a, 0, 0, 0, 0, 0) };
    ($nr:ident, $a:expr, $b:expr) => { call!($nr, $a, $b, 0, 0, 0, 0) };
    ($nr:ident, $a:expr, $b:expr, $c:expr) => { call!($nr, $a, $b, $c, 0, 0, 0) };
    ($nr:ident, $a:expr, $b:expr, $c:expr, $d:expr) => { call!($nr, $a, $b, $c, $d, 0, 0) };
    ($nr:ident, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr) => { call!($nr, $a, $b, $c, $d, $e, 0) };
    ($nr:ident, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => {
        // SAFETY: every pointer passed below is to a live object of the size the call expects.
        check(unsafe {
            raw(nr::$nr, $a as usize, $b as usize, $c as usize, $d as usize, $e as usize, $f as usize)
        })
    };
}

/// `fn name(…) -> ret = SYS_name, …;`: what the call returns where it succeeds, or nothing.
macro_rules! system_calls {
    ($($(#[$doc:meta])* $(unsafe $($no:lifetime)?)? fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?
        = $nr:ident $(, $given:expr)*;)*) => { $(
        $(#[$doc])*
        pub $(unsafe $($no)?)? fn $name($($arg: $ty),*) -> Result<system_calls!(@type $($ret)?), Errno> {
            call!($nr $(, $given)*).map(system_calls!(@map $($ret)?))
        }
    )* };
    (@type) => { () };
    (@type $ret:ty) => { $ret };
    (@map) => { drop };
    (@map $ret:ty) => { |told| told as $ret };
}

mod memory;
mod sockets;

pub use memory::*;
pub use sockets::*;

system_calls! {
    /// open(2) with O_CLOEXEC.
    fn open(path: &CStr, flags: c_int, mode: u32) -> c_int
        = SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags | libc::O_CLOEXEC, mode;
    /// mkdir(2).
    fn mkdir(path: &CStr, mode: u32) = SYS_mkdirat, libc::AT_FDCWD, path.as_ptr(), mode;
    /// fchmod(2).
    fn fchmod(fd: c_int, mode: u32) = SYS_fchmod, fd, mode;
    /// chmod(2). Follows symbolic links.
    fn chmod(path: &CStr, mode: u32) = SYS_fchmodat, libc::AT_FDCWD, path.as_ptr(), mode;
    /// Gives an open file, be it for nothing but to name it, to a group.
    fn chgrp(fd: c_int, gid: u32) = SYS_fchownat, fd, c"".as_ptr(), u32::MAX, gid, libc::AT_EMPTY_PATH;
    /// unlink(2).
    fn unlink(path: &CStr) = SYS_unlinkat, libc::AT_FDCWD, path.as_ptr(), 0;
    /// readlink(2): the length of what was written to `text`, cut off at its end.
    fn readlink(path: &CStr, text: &mut [u8]) -> usize
        = SYS_readlinkat, libc::AT_FDCWD, path.as_ptr(), text.as_mut_ptr(), text.len();
    /// linkat(2), with AT_SYMLINK_FOLLOW in `flags` or nothing. Fails with EEXIST when `to` exists.
    fn link(from: &CStr, to: &CStr, flags: c_int)
        = SYS_linkat, libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags;
    /// memfd_create(2), sealable and close-on-exec.
    fn memfd_create(name: &CStr) -> c_int = SYS_memfd_create, name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    /// fcntl(2) with an integer argument.
    fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> usize = SYS_fcntl, fd, cmd, arg;
    /// `new` becomes a duplicate of `fd`, which is another number; it crosses exec(2).
    fn dup2(fd: c_int, new: c_int) = SYS_dup3, fd, new, 0;
    /// `new` becomes a duplicate of `fd`, which is another number; `flags` has O_CLOEXEC or nothing.
    fn dup3(fd: c_int, new: c_int, flags: c_int) = SYS_dup3, fd, new, flags;
    /// epoll_ctl(2).
    fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, event: &mut libc::epoll_event)
        = SYS_epoll_ctl, ep, op, fd, event as *mut _;
    /// pidfd_open(2).
    fn pidfd_open(pid: u32) -> c_int = SYS_pidfd_open, pid, 0;
    /// pidfd_getfd(2): a duplicate of another process' descriptor.
    fn pidfd_getfd(pidfd: c_int, fd: u32) -> c_int = SYS_pidfd_getfd, pidfd, fd, 0;
    /// ioctl(2) of a request that has no argument, and whose answer is a length.
    fn ioctl(fd: c_int, request: c_ulong) -> usize = SYS_ioctl, fd, request, 0;
    /// flock(2).
    fn flock(fd: c_int, operation: c_int) = SYS_flock, fd, operation;
    /// read(2).
    ///
    /// # Safety
    /// `buf` is writable for `len` bytes.
    unsafe fn read(fd: c_int, buf: *mut c_void, len: usize) -> usize = SYS_read, fd, buf, len;
}

/// `name = SYS_name;`: calls that do not fail.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $nr:ident;)*) => { $(
        $(#[$doc])*
        pub fn $name() -> u32 {
            call!($nr).unwrap_or(0) as u32
        }
    )* };
}

numbers! {
    /// getpid(2), not cached.
    getpid = SYS_getpid;
    /// gettid(2).
    gettid = SYS_gettid;
    /// getppid(2).
    getppid = SYS_getppid;
    /// geteuid(2).
    geteuid = SYS_geteuid;
}

/// The head of the list of robust futexes (get_robust_list(2)) that libc has told the kernel for this thread; may be null.
pub fn robust_list() -> *mut c_void {
    let (mut head, mut len) = (ptr::null_mut::<c_void>(), 0usize);
    let _ = call!(SYS_get_robust_list, 0, &raw mut head, &raw mut len);
    head
}

/// CPU time of all threads of this process, in nanoseconds (clock_gettime(2)).
pub fn process_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = call!(SYS_clock_gettime, libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// sched_yield(2).
pub fn sched_yield() {
    // The peer of a fuzz target is in this very thread.
    if !cfg!(fuzzing) {
        let _ = call!(SYS_sched_yield);
    }
}

/// close(2).
pub fn close(fd: c_int) {
    let _ = call!(SYS_close, fd);
}

/// Calls `each` for every open descriptor of this process, as /proc lists them.
///
/// # Errors
/// /proc is not there.
pub fn each_open_fd(each: impl FnMut(c_int)) -> Result<(), Errno> {
    each_fd_in(c"/proc/self/fd", true, each)
}

/// The same for any process' directory in /proc. `own`: it is this one's, and what is opened for the question is none.
///
/// # Errors
/// open(2)'s.
pub fn each_fd_in(path: &CStr, own: bool, mut each: impl FnMut(c_int)) -> Result<(), Errno> {
    each_entry(path, |name, dir| {
        let fd = name.to_str().ok().and_then(|name| name.parse().ok());
        if let Some(fd) = fd.filter(|fd| *fd != dir || !own) {
            each(fd);
        }
    })
}

/// Calls `each` for all names in a directory, also `.` and `..`.
///
/// # Errors
/// open(2)'s.
pub fn each_name_in(path: &CStr, mut each: impl FnMut(&CStr)) -> Result<(), Errno> {
    each_entry(path, |name, _| each(name))
}

/// The same, with the directory's own descriptor.
fn each_entry(path: &CStr, mut each: impl FnMut(&CStr, c_int)) -> Result<(), Errno> {
    let dir = open(path, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
    let mut entries = [0u64; 128];
    let listed = loop {
        match call!(SYS_getdents64, dir, entries.as_mut_ptr(), size_of_val(&entries)) {
            Ok(0) => break Ok(()),
            Ok(len) => each_name(entries.as_ptr().cast(), len, |name| each(name, dir)),
            Err(errno) => break Err(errno),
        }
    };
    close(dir);
    listed
}

/// The names in `len` bytes of struct linux_dirent64.
fn each_name(entries: *const u8, len: usize, mut each: impl FnMut(&CStr)) {
    const NAME: usize = 19;
    let mut at = 0;
    while at + NAME < len {
        // SAFETY: the kernel wrote whole entries: inode, offset, length (at byte 16), type, name.
        let (length, name) = unsafe {
            let entry = entries.add(at);
            (entry.add(16).cast::<u16>().read_unaligned(), CStr::from_ptr(entry.add(NAME).cast()))
        };
        at += usize::from(length);
        each(name);
    }
}

/// access(2) X_OK.
pub fn is_executable(path: &CStr) -> bool {
    call!(SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), libc::X_OK).is_ok()
}

/// What fstat(2) tells that we need.
pub struct FileFacts {
    /// Type and permissions.
    pub mode: u32,
    /// Number in its file system.
    pub inode: u64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Its file system.
    pub device: u64,
    /// Of a device's node: which device.
    pub node: u64,
}

/// fstat(2).
pub fn fstat(fd: c_int) -> Result<FileFacts, Errno> {
    // SAFETY: all-zero is a valid `stat64`.
    let mut st: libc::stat64 = unsafe { core::mem::zeroed() };
    call!(SYS_fstat, fd, &raw mut st)?;
    let (inode, size) = (st.st_ino, st.st_size as u64);
    let (mode, uid, gid) = (st.st_mode, st.st_uid, st.st_gid);
    Ok(FileFacts { mode, inode, uid, gid, size, device: st.st_dev, node: st.st_rdev })
}

/// The type and permissions of a file, and its file system, which is not asked (AT_STATX_DONT_SYNC): a hostile one may not
/// answer. Not comparable with [`FileFacts`].
pub fn status(fd: c_int) -> Result<(u32, u64), Errno> {
    const FLAGS: c_int = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: all-zero is a valid `statx`.
    let mut it: libc::statx = unsafe { core::mem::zeroed() };
    call!(SYS_statx, fd, c"".as_ptr(), FLAGS, libc::STATX_TYPE | libc::STATX_MODE, &raw mut it)?;
    let device = u64::from(it.stx_dev_major) << 32 | u64::from(it.stx_dev_minor);
    Ok((u32::from(it.stx_mode), device))
}

/// The type of a file's file system (fstatfs(2)).
pub fn file_system(fd: c_int) -> Result<u64, Errno> {
    // SAFETY: all-zero is a valid `statfs`.
    let mut it: libc::statfs = unsafe { core::mem::zeroed() };
    call!(SYS_fstatfs, fd, &raw mut it)?;
    Ok(it.f_type as u64)
}

/// ftruncate(2). EFBIG beyond RLIMIT_FSIZE, without the signal that the kernel sends then.
pub fn ftruncate(fd: c_int, len: u64) -> Result<(), Errno> {
    may_be_long(len)?;
    call_wide!(SYS_ftruncate, fd; len).map(drop)
}

fn may_be_long(len: u64) -> Result<(), Errno> {
    if len > limit(libc::RLIMIT_FSIZE, u64::MAX) { Err(libc::EFBIG) } else { Ok(()) }
}

/// fallocate(2) of a new file, whole range, default mode. EFBIG as above.
pub fn fallocate(fd: c_int, len: u64) -> Result<(), Errno> {
    may_be_long(len)?;
    #[cfg(target_pointer_width = "64")]
    return call!(SYS_fallocate, fd, 0, 0, len).map(drop);
    #[cfg(target_pointer_width = "32")]
    call_wide!(SYS_fallocate, fd, 0, 0, 0; len).map(drop)
}

/// Sets a lock on one byte of a file, or asks for it (F_SETLK or F_GETLK); returns the lock's type afterwards.
pub fn lock_byte(fd: c_int, set: bool, kind: c_int, at: i64) -> Result<c_int, Errno> {
    // Those with 64-bit offsets; where there are no others they have no name of their own.
    const F_GETLK64: c_int = if cfg!(target_pointer_width = "32") { 12 } else { libc::F_GETLK };
    const F_SETLK64: c_int = if cfg!(target_pointer_width = "32") { 13 } else { libc::F_SETLK };
    let cmd = if set { F_SETLK64 } else { F_GETLK64 };
    // SAFETY: all-zero is a valid `flock64`.
    let mut lock: libc::flock64 = unsafe { core::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = at;
    lock.l_len = 1;
    call!(SYS_fcntl, fd, cmd, &raw mut lock)?;
    Ok(lock.l_type as c_int)
}

/// MADV_POPULATE_WRITE, which the libc crate does not have for all targets.
pub const POPULATE: c_int = 23;

/// Random bits that nobody can guess. None where the pool is not ready, or a filter refuses getrandom(2).
pub fn secret() -> Option<u64> {
    let mut v = 0u64;
    (call!(SYS_getrandom, &raw mut v, 8, 1) == Ok(8)).then_some(v)
}

/// Bits that are hardly ever the same twice; of the clock where there are no others.
pub fn random() -> u64 {
    secret().unwrap_or_else(|| crate::os::clock::tsc().wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// eventfd2(2) at 0, which nobody waits for at a read or a write.
pub fn eventfd() -> Result<c_int, Errno> {
    call!(SYS_eventfd2, 0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map(|v| v as c_int)
}

/// Adds one to an eventfd, which wakes those that wait for it.
///
/// # Errors
/// EAGAIN where it is full.
pub fn add_one(eventfd: c_int) -> Result<(), Errno> {
    let one = 1u64;
    call!(SYS_write, eventfd, &raw const one, size_of_val(&one)).map(drop)
}

/// An epoll set of the library's own.
pub fn epoll_create() -> Result<c_int, Errno> {
    call!(SYS_epoll_create1, libc::EPOLL_CLOEXEC).map(|v| v as c_int)
}

/// Takes the one event out of such a set, if it is there.
pub fn epoll_forget(ep: c_int) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let _ = call!(SYS_epoll_pwait, ep, &raw mut event, 1, 0, 0, 0);
}

/// This host's name, as uname(2) has it; nothing where it is no text.
pub fn hostname(buffer: &mut [u8; 65]) -> &str {
    // SAFETY: all-zero is a valid utsname, which the call fills.
    let mut names: libc::utsname = unsafe { core::mem::zeroed() };
    if call!(SYS_uname, &raw mut names).is_err() {
        return "";
    }
    for (to, from) in buffer.iter_mut().zip(names.nodename) {
        *to = from as u8;
    }
    let len = buffer.iter().position(|&b| b == 0).unwrap_or(0);
    core::str::from_utf8(&buffer[..len]).unwrap_or("")
}

/// write(2), for the log: of the signals with which the kernel tells a program that its own write failed, none comes.
pub fn write(fd: c_int, bytes: &[u8]) {
    const ITS: u64 = 1 << (libc::SIGPIPE - 1) | 1 << (libc::SIGXFSZ - 1);
    let mask = block_signals();
    let pending = pending_signals();
    if let Err(libc::EPIPE | libc::EFBIG) = call!(SYS_write, fd, bytes.as_ptr(), bytes.len()) {
        // Nothing, in either layout of a time.
        let at_once = [0u64; 2];
        let new = ITS & !pending;
        let _ = call!(SYS_rt_sigtimedwait, &raw const new, 0, &raw const at_once, 8);
    }
    set_signals(mask);
}

/// getrlimit(2) RLIMIT_NOFILE, the soft limit.
pub fn nofile_limit() -> u64 {
    limit(libc::RLIMIT_NOFILE, 1024)
}

/// A soft limit, or `otherwise`.
fn limit(resource: libc::__rlimit_resource_t, otherwise: u64) -> u64 {
    let mut lim = libc::rlimit64 { rlim_cur: otherwise, rlim_max: otherwise };
    let _ = call!(SYS_prlimit64, 0, resource, ptr::null::<c_void>(), &raw mut lim);
    lim.rlim_cur
}

/// Blocks signals and returns the mask there was. Not those that a fault raises, nor libc's own two.
pub fn block_signals() -> u64 {
    let spared = [
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGSEGV,
        libc::SIGSYS,
        32,
        33,
    ];
    let all = spared.iter().fold(!0u64, |set, signal| set & !(1 << (signal - 1)));
    let mut old = 0u64;
    let _ = call!(SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const all, &raw mut old, 8);
    old
}

/// Takes signals out of the mask.
pub fn unblock_signals(set: u64) {
    let _ = call!(SYS_rt_sigprocmask, libc::SIG_UNBLOCK, &raw const set, 0, 8);
}

/// Signals that have come and are blocked.
pub fn pending_signals() -> u64 {
    let mut pending = 0u64;
    let _ = call!(SYS_rt_sigpending, &raw mut pending, 8);
    pending
}

/// Sets the signal mask.
pub fn set_signals(mask: u64) {
    let _ = call!(SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, 0, 8);
}

/// What a signal does to a call that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handling {
    /// Nothing: it has no handler.
    None,
    /// The call ends by EINTR.
    Ends,
    /// The call goes on (SA_RESTART).
    Restarts,
}

/// How this signal is handled.
pub fn handling(signal: c_int) -> Handling {
    /// The kernel's `struct sigaction`, which is not libc's.
    #[repr(C)]
    struct Action {
        handler: usize,
        flags: c_ulong,
        restorer: usize,
        mask: u64,
    }
    let mut now = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
    let _ = call!(SYS_rt_sigaction, signal, 0, &raw mut now, size_of::<u64>());
    match now.handler {
        libc::SIG_DFL | libc::SIG_IGN => Handling::None,
        _ if now.flags & libc::SA_RESTART as c_ulong != 0 => Handling::Restarts,
        _ => Handling::Ends,
    }
}

/// Sends this thread a signal.
pub fn raise(signal: c_int) {
    let thread = call!(SYS_gettid).unwrap_or(0);
    let _ = call!(SYS_tgkill, getpid(), thread, signal);
}

/// The file's position; `None` where it has none.
pub fn position(fd: c_int) -> Option<i64> {
    #[cfg(target_pointer_width = "64")]
    return call!(SYS_lseek, fd, 0, libc::SEEK_CUR).ok().map(|at| at as i64);
    #[cfg(target_pointer_width = "32")]
    {
        let mut at = 0i64;
        call!(SYS__llseek, fd, 0, 0, &raw mut at, libc::SEEK_CUR).ok()?;
        Some(at)
    }
}

/// Whether `fd` has a position.
pub fn is_seekable(fd: c_int) -> bool {
    position(fd).is_some()
}

/// The status flags (F_GETFL) of an end of a pipe; `None` for anything else.
pub fn pipe_flags(fd: c_int) -> Option<c_int> {
    fcntl(fd, libc::F_GETPIPE_SZ, 0).ok()?;
    fcntl(fd, libc::F_GETFL, 0).ok().map(|flags| flags as c_int)
}

/// pread(2).
///
/// # Safety
/// `buf` is writable for `len` bytes.
pub unsafe fn pread(fd: c_int, buf: *mut c_void, len: usize, at: i64) -> Result<usize, Errno> {
    call_wide!(SYS_pread64, fd, buf, len; at)
}

/// preadv2(2) of one byte, at the position of the file, which is lost.
pub fn preadv2(fd: c_int, flags: c_int) -> Result<usize, Errno> {
    let mut byte = 0u8;
    let iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // The offset takes two words, whatever their size.
    call!(SYS_preadv2, fd, &raw const iov, 1, -1isize, -1isize, flags)
}

/// preadv2(2) and pwritev2(2): what can be had without waiting, EAGAIN where that is nothing.
const RWF_NOWAIT: c_int = 8;

/// Reads what a pipe has, as long as another thread does not empty it: where the kernel knows no better (before Linux 6.4)
/// that would wait.
///
/// # Safety
/// `buf` is writable for `len` bytes.
pub unsafe fn read_now(fd: c_int, buf: *mut c_void, len: usize) -> Result<usize, Errno> {
    let iov = libc::iovec { iov_base: buf, iov_len: len };
    // No offset takes two words, whatever their size.
    match call!(SYS_preadv2, fd, &raw const iov, 1, -1isize, -1isize, RWF_NOWAIT) {
        Err(libc::EOPNOTSUPP | libc::ENOSYS) => call!(SYS_read, fd, buf, len),
        done => done,
    }
}

/// Writes what a pipe has room for, likewise.
///
/// # Safety
/// The buffers are readable.
pub unsafe fn writev_now(fd: c_int, iov: &[libc::iovec]) -> Result<usize, Errno> {
    match call!(SYS_pwritev2, fd, iov.as_ptr(), iov.len(), -1isize, -1isize, RWF_NOWAIT) {
        Err(libc::EOPNOTSUPP | libc::ENOSYS) => call!(SYS_writev, fd, iov.as_ptr(), iov.len()),
        done => done,
    }
}

/// splice(2) of what a socket has into a pipe; where the pipe is full it does not wait.
pub fn splice_now(from: c_int, to: c_int, len: usize) -> Result<usize, Errno> {
    let flags = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK;
    call!(SYS_splice, from, 0, to, 0, len, flags)
}
