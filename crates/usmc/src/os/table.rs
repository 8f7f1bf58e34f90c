//! fd → what we know about it. A foreign fd costs one load.
//!
//! One 32-bit word per fd, zero for fds we have nothing to do with: kind in the top 4 bits, index below.
//! dup'ed fds share a record. The words live in .bss, the records in reserved memory, so a program that
//! opens no TCP socket touches neither.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::os::hook::Hook;
use crate::os::{process, single, sys};

/// One more number means this io_uring.
pub static URING_DUPLICATED: Hook<u32> = Hook::new();
/// One number less means it.
pub static URING_CLOSED: Hook<u32> = Hook::new();

/// fds from this number on are never ours.
pub const FDS: usize = 1 << 20;

static TABLE: [AtomicU32; FDS] = [const { AtomicU32::new(0) }; FDS];

const KIND_SHIFT: u32 = 28;
const INDEX_MASK: u32 = (1 << KIND_SHIFT) - 1;
/// The kind of a number that a thread is about to close, or to make another number of; the thread is in the index. To the
/// library it is foreign already, but the kernel may still know it.
const CHANGING: u32 = 4;
/// How often others look whether it has changed, while the kernel knows the number: a second or more. The thread may have been
/// displaced, or a signal handler have come between.
const LOOKS: u32 = 256_000;
/// After so many looks (some ten milliseconds), and again after as many, others ask the kernel whether it knows the number.
const LOOKS_BEFORE_ASKING: u32 = 2560;

fn changing() -> u32 {
    CHANGING << KIND_SHIFT | ((process::thread() >> 6) as u32 & INDEX_MASK)
}

/// The highest number that was ever more than foreign. Limits say nothing: they may be lowered.
static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// What an fd is to us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Nothing.
    Foreign,
    /// A TCP socket with this record.
    Conn(u32),
    /// An epoll set with this record.
    Epoll(u32),
    /// The library's own; the application must not touch it.
    Internal,
    /// An io_uring with this record.
    Uring(u32),
}

impl Entry {
    fn word(self) -> u32 {
        match self {
            Entry::Foreign => 0,
            Entry::Conn(i) => 1 << KIND_SHIFT | i,
            Entry::Epoll(i) => 2 << KIND_SHIFT | i,
            Entry::Internal => 3 << KIND_SHIFT,
            Entry::Uring(i) => 5 << KIND_SHIFT | i,
        }
    }
}

/// What `fd` is.
#[inline(always)]
pub fn get(fd: i32) -> Entry {
    // A negative fd becomes a huge index.
    let Some(place) = TABLE.get(fd as u32 as usize) else { return Entry::Foreign };
    // Acquire: pairs with the Release in `set`; the record is initialised.
    entry(place.load(Acquire))
}

#[inline(always)]
fn entry(word: u32) -> Entry {
    if word == 0 {
        return Entry::Foreign;
    }
    match word >> KIND_SHIFT {
        1 => Entry::Conn(word & INDEX_MASK),
        2 => Entry::Epoll(word & INDEX_MASK),
        3 => Entry::Internal,
        5 => Entry::Uring(word & INDEX_MASK),
        _ => Entry::Foreign,
    }
}

/// The same for a call of the application's. What a number means that another thread is just changing is not decided: waits
/// for that, which takes a system call or two.
#[inline(always)]
pub fn settled(fd: i32) -> Entry {
    let Some(place) = TABLE.get(fd as u32 as usize) else { return Entry::Foreign };
    let word = place.load(Acquire);
    if word == 0 {
        return Entry::Foreign;
    }
    if word >> KIND_SHIFT == CHANGING { settle(fd, place) } else { entry(word) }
}

#[cold]
fn settle(fd: i32, place: &AtomicU32) -> Entry {
    let mut word = place.load(Acquire);
    for look in 0..LOOKS {
        if word >> KIND_SHIFT != CHANGING {
            return entry(word);
        }
        // A handler of the very thread.
        if word == changing() {
            return Entry::Foreign;
        }
        process::give_way(look);
        let asks = look % LOOKS_BEFORE_ASKING == LOOKS_BEFORE_ASKING - 1;
        if asks && sys::fcntl(fd, libc::F_GETFD, 0) == Err(libc::EBADF) {
            break;
        }
        word = place.load(Acquire);
    }
    // The kernel has let go of it, and waits for something else (SO_LINGER); or the thread is no more, or not in this process.
    if word >> KIND_SHIFT == CHANGING {
        let _ = place.compare_exchange(word, 0, SeqCst, Relaxed);
    }
    entry(word)
}

/// The same in one order with [`take`], for a call that has just told that it needs the record ([`crate::record::users`]).
pub fn still(fd: i32) -> Entry {
    TABLE.get(fd as u32 as usize).map_or(Entry::Foreign, |place| entry(place.load(SeqCst)))
}

/// Says what `fd` is from now on. `false` when the number is beyond the table.
pub fn set(fd: i32, entry: Entry) -> bool {
    match TABLE.get(fd as u32 as usize) {
        Some(place) => {
            if entry != Entry::Foreign && fd.cast_unsigned() > HIGHEST.load(Relaxed) {
                HIGHEST.fetch_max(fd.cast_unsigned(), Relaxed);
            }
            place.store(entry.word(), Release);
            true
        }
        None => false,
    }
}

/// Takes the entry away; only one of several racing callers gets it. The number is the kernel's from now on.
pub fn take(fd: i32) -> Entry {
    replace(fd, 0)
}

/// The same before the kernel closes the number. [`changed`] says that it has.
pub fn take_to_close(fd: i32) -> Entry {
    replace(fd, if single::is_single() { 0 } else { changing() })
}

fn replace(fd: i32, by: u32) -> Entry {
    let entry = get(fd);
    if entry == Entry::Foreign || entry == Entry::Internal {
        return entry;
    }
    let place = &TABLE[fd as u32 as usize];
    match single::replace_u32(place, entry.word(), by) {
        Ok(_) => entry,
        Err(_) => Entry::Foreign,
    }
}

/// A foreign number is about to become something else, which [`set`] or [`changed`] says.
pub fn change(fd: i32) {
    if let Some(place) = TABLE.get(fd as u32 as usize).filter(|_| !single::is_single()) {
        let _ = place.compare_exchange(0, changing(), SeqCst, Relaxed);
    }
}

/// The kernel has done what this thread took the entry away for, or will not.
pub fn changed(fd: i32) {
    if let Some(place) = TABLE.get(fd as u32 as usize)
        && place.load(Relaxed) >> KIND_SHIFT == CHANGING
    {
        // By somebody else it may mean something already.
        let _ = place.compare_exchange(changing(), 0, SeqCst, Relaxed);
    }
}

/// The kernel has just given the number to somebody: whatever was changing has changed.
pub fn is_fresh(fd: i32) {
    if let Some(place) = TABLE.get(fd as u32 as usize) {
        let word = place.load(Relaxed);
        if word >> KIND_SHIFT == CHANGING {
            let _ = place.compare_exchange(word, 0, SeqCst, Relaxed);
        }
    }
}

/// The same of all numbers in `first..=last`.
pub fn changed_all(first: u32, last: u32) {
    let end = last.min(HIGHEST.load(Relaxed));
    (first..=end).for_each(|fd| changed(fd.cast_signed()));
}

/// Calls `each` for every known fd in `first..=last`.
pub fn for_each(first: u32, last: u32, mut each: impl FnMut(i32, Entry)) {
    let end = last.min(HIGHEST.load(Relaxed)) as usize;
    // One load per fd: the words are dense, and untouched pages stay copies of the zero page.
    for (fd, word) in TABLE.iter().enumerate().take(end + 1).skip(first as usize) {
        let word = word.load(Relaxed);
        if word != 0 && word >> KIND_SHIFT != CHANGING {
            each(fd as i32, get(fd as i32));
        }
    }
}

/// Moves a library fd out of the way of the application's numbers and marks it.
pub fn keep_fd(fd: i32) -> i32 {
    if let Ok(high) = duplicate(fd) {
        sys::close(fd);
        return high;
    }
    set(fd, Entry::Internal);
    fd
}

/// Where the library's own numbers begin at the latest: fork(2) copies the table of files up to the highest number, which with
/// a limit of a million would be megabytes.
const OWN_FDS: u64 = 4096;

/// A duplicate of the library's own, out of the way of the application's numbers.
pub fn duplicate(fd: i32) -> Result<i32, sys::Errno> {
    let limit = sys::nofile_limit().min(FDS as u64);
    let floor = (limit - limit / 8).min(OWN_FDS) as usize;
    let high = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor)? as i32;
    set(high, Entry::Internal);
    Ok(high)
}

/// Closes a library fd.
pub fn release_fd(fd: i32) {
    set(fd, Entry::Foreign);
    sys::close(fd);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_taken_once() {
        assert!(set(900_000, Entry::Conn(7)));
        assert_eq!(get(900_000), Entry::Conn(7));
        assert_eq!(take(900_000), Entry::Conn(7));
        assert_eq!(take(900_000), Entry::Foreign);
        assert_eq!(settled(900_000), Entry::Foreign);
        assert_eq!(get(-1), Entry::Foreign);
        assert!(!set(-1, Entry::Conn(1)));
    }

    fn read_by_another(fd: i32) -> std::thread::JoinHandle<Entry> {
        std::thread::spawn(move || settled(fd))
    }

    #[test]
    fn what_changes_is_waited_for() {
        const FD: i32 = 900_001;
        assert!(set(FD, Entry::Conn(7)));
        TABLE[FD as usize].store(changing(), SeqCst);
        assert_eq!((get(FD), settled(FD)), (Entry::Foreign, Entry::Foreign), "by a handler");
        let other = read_by_another(FD);
        assert!(set(FD, Entry::Conn(8)));
        assert_eq!(other.join().unwrap(), Entry::Conn(8));
        // Nobody says what has become of it.
        TABLE[FD as usize].store(changing() ^ 1, SeqCst);
        changed(FD);
        assert_ne!(TABLE[FD as usize].load(SeqCst), 0, "another thread's");
        assert_eq!(read_by_another(FD).join().unwrap(), Entry::Foreign);
        assert_eq!(TABLE[FD as usize].load(SeqCst), 0, "waited for twice");
    }

    /// A thread that is about to give a number to another connection, and loses its CPU for long.
    #[test]
    fn what_a_displaced_thread_changes_is_waited_for() {
        let fd = sys::open(c"/dev/null", libc::O_RDONLY, 0).unwrap();
        TABLE[fd as usize].store(changing() ^ 1, SeqCst);
        let other = read_by_another(fd);
        std::thread::sleep(std::time::Duration::from_millis(60));
        assert!(set(fd, Entry::Conn(9)));
        assert_eq!(
            other.join().unwrap(),
            Entry::Conn(9),
            "bytes for TCP, which takes them for doorbells"
        );
        assert!(set(fd, Entry::Foreign));
        sys::close(fd);
    }
}
