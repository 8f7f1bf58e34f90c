//! The word of this process, by which its peers know that it lives: a robust mutex of libc's that no thread gives back.
//!
//! However the process ends, or becomes another program, the kernel marks the words of its threads' robust lists
//! (get_robust_list(2)) before it closes any descriptor. So the mark is there before a peer's kernel can hear of the end.
//! The thread that took the mutex may end while others live on: the mark then says too much, which costs peers a question
//! to the kernel at each send until another thread takes the mutex ([`keep`]).
//!
//! The word is in a memfd that no process can map for writing any more. Behind its page lies a private one:
//! the mutex straddles both, so that its links to others of the thread's mutexes are seen by nobody. Where in the mutex the
//! word is differs between libcs, so the page says where it is itself.

use core::mem::MaybeUninit;
use core::ptr;
use usmc_shm::layout::VOUCHER_CLAIMED;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicI32, AtomicPtr, AtomicU32};

use crate::host::Voucher;
use crate::os::process::{self, Lock};
use crate::os::{real, sys};

/// What the file's name in /proc says.
pub const NAME: &core::ffi::CStr = c"usmc-life";
/// Bytes of the file: a page, of whatever size.
pub const LEN: usize = if cfg!(target_arch = "aarch64") { 1 << 16 } else { 4096 };
/// What a libc's mutex begins with, which is in the file.
struct Mutex {
    /// Bytes before the links.
    shown: usize,
    /// Offset in bytes of the word.
    word: usize,
}

/// The word, a count, the owner's id, and a count or the kind (`struct __pthread_mutex_s`).
const GLIBC: Mutex = Mutex { shown: 16, word: 0 };
/// The kind, the word, and what else is before `_m_prev` (`struct __pthread_mutex` in musl's `pthread_impl.h`).
const MUSL: Mutex = Mutex { shown: 3 * size_of::<usize>(), word: 4 };

fn mutex() -> &'static Mutex {
    if real::is_musl() { &MUSL } else { &GLIBC }
}

/// The mutex in both pages.
fn mutex_in(page: *mut u8) -> *mut libc::pthread_mutex_t {
    page.wrapping_add(LEN - mutex().shown).cast()
}

/// linux/memfd.h; Linux 5.1.
const F_SEAL_FUTURE_WRITE: libc::c_int = 0x10;
/// Bits of the word (linux/futex.h): the owner's thread id, and that it has ended.
const TID_MASK: u32 = 0x3fff_ffff;
const OWNER_DIED: u32 = 0x4000_0000;

/// `struct robust_list_head` of linux/futex.h.
#[repr(C)]
struct RobustList {
    first: usize,
    offset: isize,
    pending: usize,
}

static LOCK: Lock = Lock::new();
/// Both pages, once the word is in use.
static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static FD: AtomicI32 = AtomicI32::new(-1);
static IDENTITY: AtomicU32 = AtomicU32::new(0);
/// It cannot be had here.
static FAILED: AtomicU32 = AtomicU32::new(0);

/// The word in a mapping of such a file of this process's own.
fn own_word_in(page: *mut u8) -> *mut AtomicU32 {
    mutex_in(page).cast::<u8>().wrapping_add(mutex().word).cast()
}

/// The word in a mapping of such a file, where the page says that it is; `None` where it says nonsense.
///
/// # Safety
/// `page` is mapped for [`LEN`] bytes.
pub unsafe fn word_in(page: *mut u8) -> Option<*mut AtomicU32> {
    // SAFETY: the caller's contract. Read once: it is a peer's memory.
    let at = unsafe { &*offset_in(page) }.load(Relaxed) as usize;
    let is_inside = at.is_multiple_of(4) && at <= LEN - 4;
    is_inside.then(|| page.wrapping_add(at).cast())
}

/// Where the page says how many bytes before the word there are.
fn offset_in(page: *mut u8) -> *mut AtomicU32 {
    page.wrapping_add(4).cast()
}

/// The identity in it.
pub fn identity_in(page: *mut u8) -> *mut AtomicU32 {
    page.cast()
}

/// Whether a word's owner lives.
pub fn is_alive(word: u32) -> bool {
    word & OWNER_DIED == 0 && word & TID_MASK != 0
}

fn word() -> Option<&'static AtomicU32> {
    let base = BASE.load(Acquire);
    // SAFETY: a mapping of `make` that only a forked child removes, before anybody there can ask.
    if base.is_null() { None } else { Some(unsafe { &*own_word_in(base) }) }
}

/// What tells the death of this process; makes what that takes. `None` where it cannot be had, now or at all.
pub fn voucher() -> Option<Voucher> {
    if FAILED.load(Relaxed) != 0 || process::is_foreign_child() {
        return None;
    }
    if BASE.load(Acquire).is_null() {
        let _held = LOCK.enter()?;
        if BASE.load(Acquire).is_null() {
            make();
        }
    }
    keep();
    word().map(|_| Voucher {
        identity: IDENTITY.load(Relaxed),
        pid: process::pid(),
        fd: FD.load(Relaxed).cast_unsigned(),
    })
}

/// The file, if this is its identity.
pub fn own_file(identity: u32) -> Option<i32> {
    let fd = FD.load(Relaxed);
    (fd >= 0 && IDENTITY.load(Relaxed) == identity).then_some(fd)
}

/// Takes the mutex for this thread if the one that had it has ended. One load where that is not so.
#[inline]
pub fn keep() {
    if word().is_some_and(|word| !is_alive(word.load(Relaxed))) {
        take();
    }
}

#[cold]
fn take() {
    if FAILED.load(Relaxed) != 0 || process::is_foreign_child() {
        return;
    }
    if let Some(_held) = LOCK.try_enter() {
        let base = BASE.load(Relaxed);
        // SAFETY: a mutex that `make` has initialised, and the lock keeps other threads away.
        if !base.is_null() && !unsafe { lock(base) } {
            FAILED.store(1, Relaxed);
        }
    }
}

/// The caller holds the lock.
fn make() {
    const SEALS: libc::c_int =
        libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL | F_SEAL_FUTURE_WRITE;
    let Ok(fd) = sys::memfd_create(NAME) else { return };
    let Ok(base) = sys::mmap_private(ptr::null_mut(), 2 * LEN) else {
        return sys::close(fd);
    };
    // What is mapped before the seal can be written on.
    let mapped = sys::ftruncate(fd, LEN as u64)
        .and_then(|()| sys::mmap_shared_at(base, fd, LEN))
        .and_then(|()| sys::fcntl(fd, libc::F_ADD_SEALS, SEALS as usize));
    // SAFETY: fresh memory that nobody else has.
    if mapped.is_err() || !unsafe { initialise(base) && lock(base) } {
        // Both pages stay: the kernel may know of them.
        FAILED.store(1, Relaxed);
        return sys::close(fd);
    }
    let identity = (sys::random() as u32).max(VOUCHER_CLAIMED + 1);
    // SAFETY: as above.
    unsafe { &*offset_in(base) }.store((own_word_in(base).addr() - base.addr()) as u32, Relaxed);
    // SAFETY: as above.
    unsafe { &*identity_in(base) }.store(identity, Relaxed);
    IDENTITY.store(identity, Relaxed);
    FD.store(crate::os::table::keep_fd(fd), Relaxed);
    BASE.store(base, Release);
}

/// # Safety
/// `base` are two pages of our own.
unsafe fn initialise(base: *mut u8) -> bool {
    let mut kind = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
    // SAFETY: the attributes are initialised before they are used; the mutex fits behind its word.
    unsafe {
        let kind = kind.as_mut_ptr();
        real::pthread_mutexattr_init(kind) == 0
            && real::pthread_mutexattr_setrobust(kind, libc::PTHREAD_MUTEX_ROBUST) == 0
            && real::pthread_mutexattr_setpshared(kind, libc::PTHREAD_PROCESS_SHARED) == 0
            && real::pthread_mutex_init(mutex_in(base), kind) == 0
    }
}

/// Whether the mutex is on this thread's list, or may be later: not while a signal handler has interrupted the thread in
/// a change of that list. False where this libc does it otherwise than we know.
///
/// # Safety
/// `base` has a mutex of [`initialise`]; the caller keeps other threads away.
unsafe fn lock(base: *mut u8) -> bool {
    let mask = sys::block_signals();
    let list = sys::robust_list().cast::<RobustList>();
    // SAFETY: null, or what this thread has told the kernel.
    let is_known = match unsafe { list.as_ref() } {
        Some(list) if list.pending != 0 => true,
        // A thread that libc has not made; musl tells the kernel of its list with the first mutex in it.
        None if !real::is_musl() => true,
        // SAFETY: the caller's contract.
        _ => unsafe { lock_now(base) },
    };
    sys::set_signals(mask);
    is_known
}

/// # Safety
/// As [`lock`].
unsafe fn lock_now(base: *mut u8) -> bool {
    let (at, mutex) = (own_word_in(base), mutex_in(base));
    // SAFETY: the caller's contract.
    unsafe {
        match real::pthread_mutex_trylock(mutex) {
            0 => {}
            libc::EOWNERDEAD => drop(real::pthread_mutex_consistent(mutex)),
            // Another thread was faster.
            libc::EBUSY => return true,
            _ => return false,
        }
        // What the kernel will do at the thread's end. The lowest bit of a link is a flag.
        let Some(list) = sys::robust_list().cast::<RobustList>().as_ref() else { return false };
        let word = (list.first & !1).wrapping_add_signed(list.offset);
        word == at.addr() && (*at).load(Relaxed) & TID_MASK == sys::gettid()
    }
}

/// Fork, in the child: the word is its parent's.
pub fn after_fork() {
    LOCK.reset();
    IDENTITY.store(0, Relaxed);
    let fd = FD.swap(-1, Relaxed);
    if fd >= 0 {
        crate::os::table::release_fd(fd);
    }
    let base = BASE.swap(ptr::null_mut(), Relaxed);
    if !base.is_null() {
        // Not the private page: a child made by a bare system call has still its parent's list.
        // SAFETY: nothing else of this process uses the word.
        unsafe { sys::munmap(base, LEN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first value that `is_wanted`, which comes within a minute.
    fn until(mut value: impl FnMut() -> u32, is_wanted: impl Fn(u32) -> bool) -> u32 {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let value = value();
            if is_wanted(value) {
                return value;
            }
            assert!(std::time::Instant::now() < end, "still {value:#x}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_word_outlives_the_thread_that_took_it() {
        process::refresh();
        let first = std::thread::spawn(|| voucher().map(|v| v.identity)).join().unwrap();
        assert!(first.is_some());
        let word = word().unwrap();
        // A thread that joins another may be faster than the kernel; and other tests' threads take it too, and end.
        let seen_dead = until(|| word.load(Relaxed), |word| !is_alive(word));
        assert_eq!(seen_dead & OWNER_DIED, OWNER_DIED);
        let kept = || {
            keep();
            word.load(Relaxed)
        };
        until(kept, is_alive);
        assert_eq!(voucher().map(|v| v.identity), first);
    }

    #[test]
    fn nobody_else_can_write_it() {
        process::refresh();
        let fd = voucher().unwrap().fd.cast_signed();
        assert_eq!(sys::mmap_shared(fd, LEN), Err(libc::EPERM));
        assert!(sys::ftruncate(fd, 0).is_err());
        assert!(sys::mmap_readable(fd, LEN).is_ok());
    }
}
