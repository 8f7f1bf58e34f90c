//! The words of peers ([`super::life`]), mapped to be read: one page for each process.
//!
//! A peer says in shared memory where its word is, as a number of a descriptor of its own. What that leads to has to be
//! such a file, and to have the identity that it told. A liar is believed for its own connections only.

use core::fmt::Write;
use core::ptr;
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicPtr, AtomicU32};

use super::own_word::{self, LEN};
use crate::host::Voucher;
use crate::os::path::Path;
use crate::os::process::Lock;
use crate::os::{foreign_fd, sys};

/// Peers that are known at one time.
const MOST: usize = 1024;

struct Life {
    identity: AtomicU32,
    /// Connections that look at it.
    users: AtomicU32,
    /// Null = no entry.
    page: AtomicPtr<u8>,
    /// In that page.
    word: AtomicPtr<AtomicU32>,
}

static LIVES: [Life; MOST] = [const {
    Life {
        identity: AtomicU32::new(0),
        users: AtomicU32::new(0),
        page: AtomicPtr::new(ptr::null_mut()),
        word: AtomicPtr::new(ptr::null_mut()),
    }
}; MOST];
/// Held for every change.
static LOCK: Lock = Lock::new();

/// Counts one more user of a peer's word. It stays where it is until [`let_go`].
///
/// # Errors
/// EAGAIN to a signal handler that has interrupted this; otherwise the word cannot be had.
pub fn find(voucher: Voucher) -> Result<&'static AtomicU32, sys::Errno> {
    let _held = LOCK.enter().ok_or(libc::EAGAIN)?;
    let known = LIVES
        .iter()
        .find(|l| !l.page.load(Relaxed).is_null() && l.identity.load(Relaxed) == voucher.identity);
    let life = match known {
        Some(life) => life,
        None => map(voucher)?,
    };
    life.users.fetch_add(1, Relaxed);
    Ok(word(life))
}

fn word(life: &Life) -> &'static AtomicU32 {
    // SAFETY: a mapping of `map`, which is not removed while it has users; it is read only.
    unsafe { &*life.word.load(Relaxed) }
}

/// A user of [`find`] less.
pub fn let_go(known: *const AtomicU32) {
    let is_it = |life: &&Life| ptr::eq(life.word.load(Relaxed), known);
    if let Some(life) = LIVES.iter().find(is_it) {
        life.users.fetch_sub(1, Relaxed);
    }
}

/// The caller holds the lock.
fn map(voucher: Voucher) -> Result<&'static Life, sys::Errno> {
    sweep();
    let is_free = |life: &&Life| life.page.load(Relaxed).is_null();
    let place = LIVES.iter().find(is_free).ok_or(libc::ENOSPC)?;
    let page = match own_word::own_file(voucher.identity) {
        Some(file) => sys::mmap_readable(file, LEN)?,
        None => read_of(voucher)?,
    };
    // SAFETY: a mapping of LEN bytes of a file that cannot shrink.
    let word = unsafe {
        let is_it = (*own_word::identity_in(page)).load(Relaxed) == voucher.identity;
        own_word::word_in(page).filter(|_| is_it)
    };
    let Some(word) = word else {
        // SAFETY: nobody else knows of it.
        unsafe { sys::munmap(page, LEN) };
        return Err(libc::EPROTO);
    };
    place.word.store(word, Relaxed);
    place.identity.store(voucher.identity, Relaxed);
    place.users.store(0, Relaxed);
    place.page.store(page, Relaxed);
    Ok(place)
}

fn read_of(voucher: Voucher) -> Result<*mut u8, sys::Errno> {
    let mut link = Path::new();
    let _ = write!(link, "/proc/{}/fd/{}", voucher.pid, voucher.fd);
    let file = foreign_fd::open_memfd(&link, |name| name == NAMED, libc::O_RDONLY)?;
    let is_whole =
        foreign_fd::is_memory(file) && sys::fstat(file).is_ok_and(|facts| facts.size == LEN as u64);
    let page = if is_whole { sys::mmap_readable(file, LEN) } else { Err(libc::EPROTO) };
    sys::close(file);
    page
}

/// Where links in /proc say that they lead to.
const NAMED: &[u8] = b"/memfd:usmc-life (deleted)";

/// Unmaps the words of the dead that nobody looks at any more; of the living as well, if all places are taken.
fn sweep() {
    let is_full = LIVES.iter().all(|life| !life.page.load(Relaxed).is_null());
    for life in &LIVES {
        let page = life.page.load(Relaxed);
        if !page.is_null()
            && life.users.load(Relaxed) == 0
            && (is_full || !own_word::is_alive(word(life).load(Relaxed)))
        {
            life.page.store(ptr::null_mut(), Relaxed);
            life.word.store(ptr::null_mut(), Relaxed);
            // SAFETY: it has no users, and the lock keeps new ones away.
            unsafe { sys::munmap(page, LEN) };
        }
    }
}

/// Fork, in the child.
pub fn after_fork() {
    LOCK.reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_what_its_owner_says_and_nothing_else() {
        crate::os::process::refresh();
        let own = own_word::voucher().unwrap();
        let word = find(own).unwrap();
        // The thread of another test may have had it, and just ended.
        let lives = |_| {
            own_word::keep();
            own_word::is_alive(word.load(Relaxed))
        };
        assert!((0..100).any(lives));
        assert!(ptr::eq(find(own).unwrap(), word));
        let others = [
            Voucher { identity: own.identity ^ 1, ..own },
            // Not a word at all.
            Voucher { identity: own.identity ^ 2, fd: 0, ..own },
            Voucher { identity: own.identity ^ 4, pid: 0, ..own },
        ];
        for other in others {
            assert!(find(other).is_err());
        }
        let_go(word);
        let_go(word);
    }

    #[test]
    fn a_link_is_read_as_proc_has_it() {
        crate::os::process::refresh();
        let own = own_word::voucher().unwrap();
        // As another process reads it.
        let page = read_of(own).unwrap();
        // SAFETY: mapped just now.
        assert_eq!(unsafe { &*own_word::identity_in(page) }.load(Relaxed), own.identity);
        // SAFETY: likewise.
        unsafe { sys::munmap(page, LEN) };
    }
}
