//! Ears: the second way to wake a process, beside the doorbell. An ear is an eventfd(2) of the process. It wakes a sleeper where a
//! byte of TCP cannot: its peer has shut the direction down, or its own socket is readable for good.
//!
//! A process has one ear for all its sleepers, so that each of them may be woken for nothing. Nobody reads the eventfd: sleepers wait
//! for it by edges, in an epoll set, and each write is an edge for each set. An edge in front of a sleeper's last look is taken
//! out before that look; a later one ends the sleep.
//!
//! A peer gets the ear by mail, from its own user only, and keeps it by the number of its process.

use core::fmt::Write;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicI32, AtomicU32};

use super::mailbox;
use crate::host::{PeerProcess, current};
use crate::os::path::Path;
use crate::os::process::{self, Lock};
use crate::os::reason::Reason;
use crate::os::{foreign_fd, sys, table};

/// Ears of peers that are known at one time.
const PEERS: usize = 64;
/// Calls that can sleep by the ear at one time, beside those in epoll sets of the application's. The others look by themselves.
const SLEEPERS: usize = 8;
/// The ear's events; data is the caller's.
const EDGES: u32 = (libc::EPOLLIN | libc::EPOLLET) as u32;

struct Known {
    /// The process, plus one; 0 = no entry.
    process: AtomicU32,
    fd: AtomicI32,
}

/// An epoll set of the library's own with the ear alone.
struct Watch {
    is_taken: AtomicU32,
    /// -1 = not made yet.
    set: AtomicI32,
}

/// Held for every change of what follows, and while a peer's ear is written to: no thread closes it meanwhile.
static LOCK: Lock = Lock::new();
static OWN: AtomicI32 = AtomicI32::new(-1);
static KNOWN: [Known; PEERS] =
    [const { Known { process: AtomicU32::new(0), fd: AtomicI32::new(-1) } }; PEERS];
/// Where the next ear goes, once all places are taken.
static NEXT: AtomicU32 = AtomicU32::new(0);
static WATCHES: [Watch; SLEEPERS] =
    [const { Watch { is_taken: AtomicU32::new(0), set: AtomicI32::new(-1) } }; SLEEPERS];

/// This process' ear, made the first time; `None` where it cannot be had.
fn own() -> Option<i32> {
    let known = OWN.load(Acquire);
    if known >= 0 || process::is_foreign_child() {
        return (known >= 0).then_some(known);
    }
    let _held = LOCK.enter()?;
    if OWN.load(Relaxed) < 0 {
        let fd = table::keep_fd(sys::eventfd().ok()?);
        // A process that cannot tell one by its name takes none from others either.
        if !is_ear(fd) {
            table::release_fd(fd);
            return None;
        }
        OWN.store(fd, Release);
    }
    Some(OWN.load(Relaxed))
}

/// Whether it is an eventfd.
pub fn is_ear(fd: i32) -> bool {
    let (mut link, mut name) = (Path::new(), [0u8; 32]);
    let _ = write!(link, "/proc/self/fd/{fd}");
    sys::readlink(link.c(), &mut name).is_ok_and(|len| &name[..len] == b"anon_inode:[eventfd]")
}

/// Makes sure that this process can be sent ears. Its number.
///
/// # Errors
/// The reason why it cannot.
pub fn open() -> Result<PeerProcess, Reason> {
    own().ok_or(Reason::NoDevice)?;
    current().open_mailbox()
}

/// Sends this process' ear to another one. This process' number.
///
/// # Errors
/// The errno; EAGAIN means try again later.
pub fn send(to: PeerProcess) -> Result<PeerProcess, sys::Errno> {
    let own_process = open().map_err(|_| libc::ENODEV)?;
    let ear = own().ok_or(libc::ENODEV)?;
    mailbox::push_ear(current(), to, own_process, ear)?;
    Ok(own_process)
}

/// Keeps the ear of a process, which is a descriptor of ours from now on.
///
/// # Errors
/// It is none.
pub fn learn(process: PeerProcess, fd: i32) -> Result<(), Reason> {
    if !is_ear(fd) {
        foreign_fd::discard(fd);
        return Err(Reason::PeerBroken);
    }
    let Some(_held) = LOCK.enter() else {
        sys::close(fd);
        return Ok(());
    };
    let number = process.0.wrapping_add(1);
    let is = |number: u32| move |known: &&Known| known.process.load(Relaxed) == number;
    let next = || &KNOWN[NEXT.fetch_add(1, Relaxed) as usize % PEERS];
    let place =
        KNOWN.iter().find(is(number)).or_else(|| KNOWN.iter().find(is(0))).unwrap_or_else(next);
    place.process.store(number, Relaxed);
    let before = place.fd.swap(table::keep_fd(fd), Relaxed);
    if before >= 0 {
        table::release_fd(before);
    }
    Ok(())
}

/// Wakes the sleepers of a process. False where its ear is not known.
pub fn ring(process: PeerProcess) -> bool {
    let Some(_held) = LOCK.enter() else { return false };
    let number = process.0.wrapping_add(1);
    let known = KNOWN.iter().find(|known| known.process.load(Relaxed) == number && number != 0);
    // One that is full has been written to by a process that means no good.
    known.is_some_and(|known| sys::add_one(known.fd.load(Relaxed)).is_ok())
}

/// Wakes the sleepers of this process.
pub fn ring_own() {
    let own = OWN.load(Acquire);
    if own >= 0 {
        let _ = sys::add_one(own);
    }
}

/// Registers the ear in an epoll set. False where that cannot be.
pub fn watch(epfd: i32, data: u64) -> bool {
    let mut event = libc::epoll_event { events: EDGES, u64: data };
    own().is_some_and(|ear| {
        matches!(
            sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, ear, &mut event),
            Ok(()) | Err(libc::EEXIST)
        )
    })
}

/// Takes it out again.
pub fn unwatch(epfd: i32) {
    let mut none = libc::epoll_event { events: 0, u64: 0 };
    let ear = OWN.load(Acquire);
    let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, ear, &mut none);
}

/// A sleep that the ear ends.
pub struct Listening(&'static Watch);

impl Listening {
    /// From now on what the ear hears ends the sleep. The caller looks once more before it. `None`: it has to look by itself.
    pub fn begin() -> Option<Listening> {
        let take = |watch: &&Watch| watch.is_taken.compare_exchange(0, 1, AcqRel, Relaxed).is_ok();
        own()?;
        let listening = Listening(WATCHES.iter().find(take)?);
        let set = &listening.0.set;
        if set.load(Relaxed) < 0 {
            let made = table::keep_fd(sys::epoll_create().ok()?);
            if !watch(made, 0) {
                table::release_fd(made);
                return None;
            }
            set.store(made, Relaxed);
        }
        sys::epoll_forget(set.load(Relaxed));
        Some(listening)
    }

    /// What to wait for beside other descriptors, by poll(2).
    pub fn pollfd(&self) -> libc::pollfd {
        libc::pollfd { fd: self.0.set.load(Relaxed), events: libc::POLLIN, revents: 0 }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.is_taken.store(0, Release);
    }
}

/// Fork, in the child: the parent's ear hears for the parent, and its epoll sets are the parent's.
pub fn after_fork() {
    LOCK.reset();
    let forget = |cell: &AtomicI32| {
        let fd = cell.swap(-1, Relaxed);
        if fd >= 0 {
            table::release_fd(fd);
        }
    };
    forget(&OWN);
    for watch in &WATCHES {
        forget(&watch.set);
        watch.is_taken.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(listening: &Listening) -> bool {
        let p = listening.pollfd();
        sys::poll1(p.fd, p.events, 0) != 0
    }

    #[test]
    fn each_ring_ends_each_sleep() {
        process::refresh();
        let process = PeerProcess(PEERS as u32 * 3);
        assert!(!ring(process));
        learn(process, sys::fcntl(own().unwrap(), libc::F_DUPFD_CLOEXEC, 0).unwrap() as i32)
            .unwrap();
        let [one, other] = [(); 2].map(|()| Listening::begin().unwrap());
        assert!(!is_readable(&one) && !is_readable(&other));
        assert!(ring(process));
        assert!(is_readable(&one) && is_readable(&other));
        drop(one);
        // What came before a sleep does not end it.
        let one = Listening::begin().unwrap();
        assert!(!is_readable(&one) && is_readable(&other));
        assert!(ring(process));
        assert!(is_readable(&one));
        // The last ones are kept.
        let last = process.0 + PEERS as u32 + 8;
        for number in process.0..=last {
            learn(PeerProcess(number), sys::eventfd().unwrap()).unwrap();
        }
        assert!(ring(PeerProcess(last)) && !ring(process));
    }

    #[test]
    fn what_is_no_ear_is_refused() {
        process::refresh();
        let socket = sys::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        assert_eq!(learn(PeerProcess(1), socket), Err(Reason::PeerBroken));
        assert!(!ring(PeerProcess(1)));
    }
}
