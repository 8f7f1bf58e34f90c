//! This process and its threads: the cached process id and a word that names the calling thread.

use core::ptr;
use usmc_shm::lock::{self, Found, Refused, Verdict, Wait};
use usmc_shm::sync::Ordering::{AcqRel, Relaxed};
use usmc_shm::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use crate::os::hook::Hook;
use crate::os::path::{Path, each_line};
use crate::os::{kernel_only, owner, real, single, sys};

static PID: AtomicU32 = AtomicU32::new(0);
/// The same number in a page that the kernel wipes in the child of any fork (MADV_WIPEONFORK, Linux 4.14).
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// A child may share our memory, the mark included.
static SHARES_MEMORY: AtomicBool = AtomicBool::new(false);
/// Some of our family may live in another namespace of process ids: their ids mean others here, or nobody.
static SCATTERED: AtomicBool = AtomicBool::new(false);

/// [`namespace`], once it was asked for; 0 = not yet, [`NO_PROC`] = there is no `/proc`.
static NAMESPACE: AtomicU32 = AtomicU32::new(0);
const NO_PROC: u32 = u32::MAX;

/// Re-reads the process id: at start and in a forked child.
pub fn refresh() {
    PID.store(sys::getpid(), Relaxed);
    if !MARK.load(Relaxed).is_null() && sys::getppid() == 0 {
        // A child whose parent is not to be seen.
        SCATTERED.store(true, Relaxed);
        NAMESPACE.store(0, Relaxed);
    }
    if MARK.load(Relaxed).is_null()
        && let Ok(page) = sys::mmap_private(ptr::null_mut(), 4096)
    {
        // SAFETY: our own fresh page.
        if unsafe { sys::madvise(page, 4096, libc::MADV_WIPEONFORK) }.is_ok() {
            MARK.store(page.cast(), Relaxed);
        }
    }
    if let Some(mark) = mark() {
        mark.store(pid(), Relaxed);
    }
}

fn mark() -> Option<&'static AtomicU32> {
    let mark = MARK.load(Relaxed);
    // SAFETY: a page of `refresh`, never unmapped.
    if mark.is_null() { None } else { Some(unsafe { &*mark }) }
}

/// A clone with these flags is about to be made, or unshare(2) or setns(2) are.
pub fn clones(flags: u64) {
    // Otherwise the caller sleeps as long as its memory is shared.
    if flags & (libc::CLONE_VM | libc::CLONE_VFORK) as u64 == libc::CLONE_VM as u64 {
        real::expect_threads();
    }
    if flags & (libc::CLONE_VM | libc::CLONE_THREAD) as u64 == libc::CLONE_VM as u64 {
        SHARES_MEMORY.store(true, Relaxed);
    }
    if flags & libc::CLONE_NEWPID as u64 != 0 {
        SCATTERED.store(true, Relaxed);
    }
    if flags & libc::CLONE_NEWUSER as u64 != 0 {
        owner::moves();
    }
}

/// This process, as of the last fork the library saw.
#[inline(always)]
pub fn pid() -> u32 {
    PID.load(Relaxed)
}

/// True in a child that has not passed through our fork (clone with CLONE_VM, or by a system call of its own):
/// it must not change our tables, they are its parent's. Asks the kernel only where memory cannot tell.
pub fn is_foreign_child() -> bool {
    match mark() {
        Some(mark) if !SHARES_MEMORY.load(Relaxed) => mark.load(Relaxed) != pid(),
        _ => sys::getpid() != pid(),
    }
}

/// A word unique to the calling thread within the process, never 0, of which the lowest six bits are free for marks. glibc
/// aligns what the thread pointer leads to so far; musl does not, but it takes more than 64 bytes.
#[inline(always)]
pub fn thread() -> u64 {
    thread_pointer() & !63
}

const _: () = assert!(MARKS & !63 == 0);

#[inline(always)]
fn thread_pointer() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let tp: u64;
        // SAFETY: fs:0 holds the thread pointer itself (x86-64 ELF TLS ABI).
        unsafe {
            core::arch::asm!("mov {}, fs:[0]", out(reg) tp, options(nostack, readonly, preserves_flags));
        };
        tp
    }
    #[cfg(target_arch = "x86")]
    {
        let tp: u32;
        // SAFETY: gs:0 holds the thread pointer itself (i386 ELF TLS ABI).
        unsafe {
            core::arch::asm!("mov {}, gs:[0]", out(reg) tp, options(nostack, readonly, preserves_flags));
        };
        tp.into()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let tp: u64;
        // SAFETY: reading the thread pointer register has no side effect.
        unsafe { core::arch::asm!("mrs {}, tpidr_el0", out(reg) tp, options(nostack, nomem)) };
        tp
    }
}

/// Waiting for another thread of this process: spin a little, then give the CPU away.
pub struct Patience;

/// How often the CPU is given away before a sleep. sched_yield(2) gives it to nobody of a lower priority (SCHED_FIFO), and the
/// the holder that is waited for may be such a thread.
const YIELDS: u32 = 256;

/// The wait before look number `attempt` at something that another thread is about to do.
#[cold]
pub fn give_way(attempt: u32) {
    if attempt < 64 {
        core::hint::spin_loop();
    } else if attempt.is_multiple_of(YIELDS) && !kernel_only::is_sandboxed() {
        sys::poll1(-1, 0, 1);
    } else {
        sys::sched_yield();
    }
}

impl Wait for Patience {
    fn wait(&mut self, holder: u64, attempt: u32) -> Verdict {
        if holder & !MARKS == thread() {
            // Marked by a handler that has interrupted it.
            return Verdict::GiveUp;
        }
        give_way(attempt);
        Verdict::Again
    }
}

/// The holder word for locks in shared memory: process id and a part of the thread word.
fn shared_word() -> u64 {
    ((pid() as u64) << 40) | ((thread() >> 6) & 0xff_ffff_ffff)
}

/// The process that has a lock in shared memory, as its word says.
pub fn holder(word: u64) -> u32 {
    (word >> 40) as u32
}

/// Whether a thread of this process has a lock in shared memory.
pub fn holds_shared(word: u64) -> bool {
    holder(word) == pid()
}

/// Whether a process of our own user is stopped (SIGSTOP, or by a debugger). Others' may not make us wait: they can have
/// one that is stopped, and name it.
#[cold]
pub fn is_stopped(pid: u32) -> bool {
    if SCATTERED.load(Relaxed) {
        return false;
    }
    let (mut is_own, mut is_stopped) = (false, false);
    each_line(Path::of(format_args!("/proc/{pid}/status")).c(), |line| {
        match line.split_once(':') {
            // Real, effective, …
            Some(("Uid", ids)) => {
                let own = ids.split_whitespace().nth(1).and_then(|id| id.parse().ok());
                is_own = own == Some(sys::geteuid()) && own.is_some_and(owner::is_exact);
            }
            Some(("State", state)) => is_stopped = state.trim_start().starts_with(['T', 't']),
            _ => {}
        }
    });
    is_own && is_stopped
}

/// Whether others may know this process, or it them, by other ids.
pub fn is_scattered() -> bool {
    SCATTERED.load(Relaxed)
}

/// What names our namespace of process ids on this host; `None` where `/proc` does not tell.
pub fn namespace() -> Option<u32> {
    let known = NAMESPACE.load(Relaxed);
    if known != 0 {
        return (known != NO_PROC).then_some(known);
    }
    // Each connection asks for it.
    let no_proc = |errno| {
        if errno == libc::ENOENT {
            NAMESPACE.store(NO_PROC, Relaxed);
        }
    };
    let fd = sys::open(c"/proc/self/ns/pid", libc::O_RDONLY, 0).map_err(no_proc).ok()?;
    let facts = sys::fstat(fd);
    sys::close(fd);
    let number = u32::try_from(facts.ok()?.inode).ok()?;
    NAMESPACE.store(number, Relaxed);
    Some(number)
}

/// Whether a process of our family lives, as far as that can be told; a zombie does not.
pub fn is_alive(pid: u32) -> bool {
    if SCATTERED.load(Relaxed) {
        return true;
    }
    match sys::pidfd_open(pid) {
        Ok(fd) => {
            // A zombie's pidfd is readable: it holds nothing any more.
            let dead = sys::poll1(fd, libc::POLLIN, 0) != 0;
            sys::close(fd);
            !dead
        }
        Err(libc::ESRCH | libc::EINVAL) => false,
        Err(_) => true,
    }
}

/// A lock in shared memory, held.
pub struct SharedLock<'a> {
    word: &'a AtomicU64,
    found: Found,
}

impl<'a> SharedLock<'a> {
    /// Takes it on behalf of this thread.
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline(always)]
    pub fn enter(word: &'a AtomicU64, wait: &mut impl Wait) -> Result<SharedLock<'a>, Refused> {
        Ok(SharedLock { word, found: lock::acquire(word, shared_word(), wait)? })
    }

    /// Whether a process died that held it.
    pub fn was_left(&self) -> bool {
        self.found == Found::Left
    }
}

impl Drop for SharedLock<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        lock::release(self.word);
    }
}

/// Thread words are aligned addresses, so these bits are free.
const AGAIN: u64 = 1;
/// What a handler that has interrupted the holder leaves to be done when the lock is given back.
const OWED: u64 = 0b1110;
const MARKS: u64 = AGAIN | OWED;

/// In the word of a record's lock: its last number was closed. The holder counts as a call.
pub const OWES_END: u64 = 2;
/// Likewise: shutdown(2) for reading, for writing.
pub const OWES_SHUT_RD: u64 = 4;
/// See there.
pub const OWES_SHUT_WR: u64 = 8;

/// Parts of what threads have for themselves, as far as there are so many.
pub const SHARES: usize = 4;

/// This thread's.
#[inline(always)]
pub fn share() -> usize {
    // Threads lie as far apart as their stacks are large.
    ((thread() >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62) as usize
}

const _: () = assert!(SHARES == 1 << 2);

/// A lock in private memory.
pub struct Lock(AtomicU64);

impl Lock {
    /// Not held.
    pub const fn new() -> Lock {
        Lock(AtomicU64::new(0))
    }

    /// Takes it, or `None` when this very thread holds it already (we are in a signal handler).
    #[inline(always)]
    pub fn enter(&self) -> Option<Held<'_>> {
        if single::is_single() {
            return self.take();
        }
        lock::acquire(&self.0, thread(), &mut Patience).ok()?;
        Some(Held(&self.0))
    }

    /// Takes it if nobody has it.
    #[inline(always)]
    pub fn try_enter(&self) -> Option<Held<'_>> {
        if single::is_single() {
            return self.take();
        }
        use usmc_shm::sync::Ordering::Acquire;
        self.0.compare_exchange(0, thread(), Acquire, Relaxed).ok()?;
        Some(Held(&self.0))
    }

    /// The same where there is one thread: if it is taken, that is by ourselves.
    #[inline(always)]
    fn take(&self) -> Option<Held<'_>> {
        if self.0.load(Relaxed) != 0 {
            return None;
        }
        self.0.store(thread(), Relaxed);
        single::in_order();
        Some(Held(&self.0))
    }

    /// Whether this very thread holds it: we are in a signal handler.
    pub fn is_mine(&self) -> bool {
        self.0.load(Relaxed) & !MARKS == thread()
    }

    /// Leaves something to be done (`OWES_*`) to the call that this handler has interrupted, which holds the lock of a
    /// record: false where it does not, or has it to do already.
    pub fn owe(&self, what: u64) -> bool {
        // Whoever holds it is below us, and goes on only when we are done.
        let word = self.0.load(Relaxed);
        let is_new = word & !MARKS == thread() && word & what != what;
        if is_new {
            self.0.store(word | what, Relaxed);
        }
        is_new
    }

    /// Takes it without a guard, for fork's prepare step, which runs with signals blocked. Where this thread
    /// has it already (a signal handler forks), that is noted in the word's lowest bit.
    pub fn hold(&self) {
        if lock::acquire(&self.0, thread(), &mut Patience).is_err() {
            self.0.fetch_or(AGAIN, Relaxed);
        }
    }

    /// Gives it back after [`Lock::hold`], or to what the signal handler interrupted.
    pub fn unhold(&self) {
        let word = self.0.load(Relaxed);
        if word & AGAIN != 0 {
            self.0.store(word & !AGAIN, Relaxed);
        } else if word == thread() {
            lock::release(&self.0);
        }
    }

    /// The same in the child, where no other holder exists.
    pub fn reset(&self) {
        let word = self.0.load(Relaxed);
        if word & !OWED == thread() | AGAIN {
            self.0.store(word & !AGAIN, Relaxed);
        } else {
            lock::release(&self.0);
        }
    }
}

impl Default for Lock {
    fn default() -> Lock {
        Lock::new()
    }
}

/// A held [`Lock`].
pub struct Held<'a>(&'a AtomicU64);

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if !single::give_back(self.0, thread()) {
            give_back_marked(self.0);
        }
    }
}

/// Does what handlers have left to be done for the record that has the lock at this address (`OWES_*`). The lock was given back.
pub static AFTER_INTERRUPTION: Hook<(usize, u64)> = Hook::new();

/// What handlers have left to be done when this lock of a record is given back.
#[cold]
fn give_back_marked(word: &AtomicU64) {
    let owed = word.swap(0, AcqRel) & OWED;
    if owed != 0 {
        AFTER_INTERRUPTION.call((ptr::from_ref(word).addr(), owed));
    }
}
