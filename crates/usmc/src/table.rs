//! fd → what we know about it. A foreign fd costs one load.
//!
//! One 32-bit word per fd, zero for fds we have nothing to do with: kind in the top 4 bits, index below.
//! dup'ed fds share a record. The words live in .bss, the records in reserved memory, so a program that
//! opens no TCP socket touches neither.

use core::ptr;
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::remote::Remote;
use crate::single;
use crate::sys;

/// fds from this number on are never ours.
pub const FDS: usize = 1 << 20;

static TABLE: [AtomicU32; FDS] = [const { AtomicU32::new(0) }; FDS];

const KIND_SHIFT: u32 = 28;
const INDEX_MASK: u32 = (1 << KIND_SHIFT) - 1;

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
}

impl Entry {
    fn word(self) -> u32 {
        match self {
            Entry::Foreign => 0,
            Entry::Conn(i) => 1 << KIND_SHIFT | i,
            Entry::Epoll(i) => 2 << KIND_SHIFT | i,
            Entry::Internal => 3 << KIND_SHIFT,
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
        _ => Entry::Foreign,
    }
}

/// The same in one order with [`take`], for who has just told that it needs the record ([`crate::users`]).
pub fn still(fd: i32) -> Entry {
    TABLE.get(fd as u32 as usize).map_or(Entry::Foreign, |place| entry(place.load(SeqCst)))
}

/// What `fd` is to another process.
pub fn get_there(process: &Remote, fd: i32) -> Entry {
    let Some(place) = TABLE.get(fd as u32 as usize) else { return Entry::Foreign };
    // SAFETY: an integer.
    entry(unsafe { process.read_static(ptr::from_ref(place).cast::<u32>()) }.unwrap_or(0))
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

/// Takes the entry away; only one of several racing callers gets it.
pub fn take(fd: i32) -> Entry {
    let entry = get(fd);
    if entry == Entry::Foreign || entry == Entry::Internal {
        return entry;
    }
    let place = &TABLE[fd as u32 as usize];
    match single::replace_u32(place, entry.word(), 0) {
        Ok(_) => entry,
        Err(_) => Entry::Foreign,
    }
}

/// Calls `each` for every known fd in `first..=last`.
pub fn for_each(first: u32, last: u32, mut each: impl FnMut(i32, Entry)) {
    let end = last.min(HIGHEST.load(Relaxed)) as usize;
    // One load per fd: the words are dense, and untouched pages stay copies of the zero page.
    for (fd, word) in TABLE.iter().enumerate().take(end + 1).skip(first as usize) {
        if word.load(Relaxed) != 0 {
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
        assert_eq!(get(-1), Entry::Foreign);
        assert!(!set(-1, Entry::Conn(1)));
    }
}
