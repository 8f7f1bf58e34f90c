//! The locks of an end that several processes share, and how long one waits for them.
//!
//! They lie in memory that the peer can write, too. One of our own user may let us wait, as it may stop or end us anyway.
//! Of another's what it says is looked at: the process that is named as a lock's holder has to have the connection's socket.

use core::ptr;
use usmc_shm::layout::{End, Slot};
use usmc_shm::lock::{Verdict, Wait};
use usmc_shm::span::RxSpan;
use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::Relaxed;

use crate::os::process::{self, Held, SharedLock};
use crate::os::table::{self, Entry};
use crate::os::{clock, procfs, sys};
use crate::record::conn::{self, Conn, F_SCRIBBLED, F_SHARED};

/// A lock in the slot, held where several processes share this end.
pub struct Family<'a>(Option<SharedLock<'a>>);

impl<'a> Family<'a> {
    /// The sending direction's; `None` when the peer made it unusable.
    #[inline(always)]
    pub fn sending(fd: i32, conn: &Conn, slot: &'a Slot) -> Option<Family<'a>> {
        let end = conn.end(slot);
        Family::enter(fd, conn, end, &end.tx_lock)
    }

    /// The receiving direction's, likewise.
    #[inline(always)]
    pub fn receiving(fd: i32, conn: &Conn, slot: &'a Slot) -> Option<Family<'a>> {
        let end = conn.end(slot);
        let family = Family::enter(fd, conn, end, &end.rx_lock)?;
        if family.0.as_ref().is_some_and(SharedLock::was_left) {
            // It may have read bytes that it did not account for.
            RxSpan::new(slot, conn.side()).recount();
        }
        Some(family)
    }

    /// The caller has the record's own lock of that direction.
    #[inline(always)]
    fn enter(fd: i32, conn: &Conn, end: &End, word: &'a AtomicU64) -> Option<Family<'a>> {
        // Another number: a process that this one has not heard of is here as well.
        if !conn.has(F_SHARED) && end.refs.load(Relaxed) == 1 {
            return Some(Family(None));
        }
        let mut patience = FamilyPatience::of(fd, conn);
        Some(Family(Some(SharedLock::enter(word, &mut patience).ok()?)))
    }
}

/// Locks of the record's next ring are waited for, whatever its peer's processes had said of the last one's.
pub fn trust(conn: &Conn) {
    conn.set_flag(F_SCRIBBLED, false);
}

/// Both locks of the receiving direction: this process' threads are kept out, and the processes that share this end.
/// A thread that asks the kernel how much has been read needs them.
pub struct Receiving<'a> {
    _family: Family<'a>,
    _held: Held<'a>,
}

impl<'a> Receiving<'a> {
    /// `None` in a signal handler that has interrupted a receive, or when the peer made the lock unusable.
    pub fn enter(fd: i32, conn: &'a Conn, slot: &'a Slot) -> Option<Receiving<'a>> {
        let held = conn.rx_lock.enter()?;
        Some(Receiving { _family: Family::receiving(fd, conn, slot)?, _held: held })
    }
}

/// Waiting for a process that shares an end with us; takes the lock over when that process has died.
pub struct FamilyPatience<'a> {
    conn: &'a Conn,
    /// The connection's number here; `None` where it is a lock of the peer's end, whose socket we do not have.
    fd: Option<i32>,
    /// Since when the holder has been at it ([`clock::now_ns`]); 0 = hardly at all.
    since: u64,
    /// Comes again where the holder does not run.
    is_brief: bool,
    /// The process that was asked for, and what is known of it.
    known: (u32, Has),
}

/// Whether a process has the connection's socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Has {
    Yes,
    No,
    /// It cannot be told.
    Unknown,
}

impl<'a> FamilyPatience<'a> {
    /// For a lock of our end.
    pub fn of(fd: i32, conn: &'a Conn) -> FamilyPatience<'a> {
        FamilyPatience { fd: Some(fd), ..FamilyPatience::of_peer(conn) }
    }

    /// For one of the peer's.
    pub fn of_peer(conn: &'a Conn) -> FamilyPatience<'a> {
        FamilyPatience { conn, fd: None, since: 0, is_brief: false, known: (0, Has::Unknown) }
    }

    /// The same, unless the holder is stopped or waits for something itself.
    pub fn briefly(self) -> FamilyPatience<'a> {
        FamilyPatience { is_brief: true, ..self }
    }

    #[cold]
    fn decide(&mut self, pid: u32) -> Verdict {
        let now = clock::now_ns();
        if self.since == 0 {
            self.since = now;
        }
        let lasts_ns = now.wrapping_sub(self.since);
        if lasts_ns > BRIEF_NS && self.is_brief {
            return Verdict::GiveUp;
        }
        let is_strange = self.conn.is_with_other_user();
        let has = if is_strange { self.ask(pid, lasts_ns) } else { Has::Yes };
        if has == Has::Yes && lasts_ns > LONG_NS && process::is_stopped(pid) {
            // It goes on where it was, and has its time then.
            sys::poll1(-1, 0, STOPPED_MS);
            self.since = 0;
            return Verdict::Again;
        }
        let most_ns = match has {
            Has::Yes => MOST_NS,
            Has::No => 0,
            Has::Unknown => UNKNOWN_NS,
        };
        if lasts_ns <= most_ns {
            return Verdict::Again;
        }
        // Once for each ring of such a peer's is enough.
        self.conn.set_flag(F_SCRIBBLED, is_strange && self.fd.is_some());
        Verdict::GiveUp
    }

    /// Whether the process that a stranger, or one of our family, has named has the socket.
    fn ask(&mut self, pid: u32, lasts_ns: u64) -> Has {
        if lasts_ns > STRANGE_NS && self.known.0 != pid {
            self.known = (pid, self.fd.map_or(Has::Unknown, |fd| has_socket(pid, fd, self.conn)));
        }
        if self.known.0 == pid { self.known.1 } else { Has::Unknown }
    }
}

impl Wait for FamilyPatience<'_> {
    fn wait(&mut self, holder: u64, attempt: u32) -> Verdict {
        if attempt >= 64 && self.conn.has(F_SCRIBBLED) {
            return Verdict::GiveUp;
        }
        // A call with little patience does not sleep here, where a signal would not end its call.
        process::give_way(if self.is_brief { attempt | 1 } else { attempt });
        if attempt < 64 || !attempt.is_multiple_of(64) {
            return Verdict::Again;
        }
        let pid = process::holder(holder);
        if !process::is_alive(pid) {
            return Verdict::Steal;
        }
        if cfg!(fuzzing) && attempt > 128 {
            return Verdict::GiveUp;
        }
        self.decide(pid)
    }
}

/// A caller that would rather come again waits no longer.
const BRIEF_NS: u64 = 2_000_000;
/// A live holder keeps a lock for microseconds, if it runs: after this time it is asked whether it does.
const LONG_NS: u64 = 20_000_000;
/// The same, where a stranger may have named it: whether it can be the holder at all.
const STRANGE_NS: u64 = 2_000_000;
/// A longer wait is one for a peer that scribbles.
const MOST_NS: u64 = 5_000_000_000;
/// The same, where a stranger may have named a process that is not to be seen.
const UNKNOWN_NS: u64 = 1_000_000_000;
/// How often a thread that waits for a stopped process looks.
const STOPPED_MS: i32 = 50;

/// Whether a process has the socket that is `fd` here, as far as `/proc` tells.
#[cold]
fn has_socket(pid: u32, fd: i32, conn: &Conn) -> Has {
    if pid == process::pid() {
        // Our threads have the record's own lock as well, which is the caller's.
        return Has::No;
    }
    // Another thread may have closed the number meanwhile.
    let is_ours = match table::get(fd) {
        Entry::Conn(index) => ptr::eq(conn::at(index), conn),
        _ => true,
    };
    let Ok(facts) = sys::fstat(fd) else { return Has::Unknown };
    // Where process ids mean others there than here, or nobody, it is not even ours that we find.
    let is_found = procfs::is_socket(process::pid(), fd, facts.inode);
    if !is_ours || !is_found || process::is_scattered() {
        return Has::Unknown;
    }
    match procfs::has_socket(pid, facts.inode) {
        Ok(true) => Has::Yes,
        Ok(false) => Has::No,
        Err(_) => Has::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::conn::F_HANDSHAKE;
    use std::net::UdpSocket;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::process::{Child, Command, Stdio};

    fn sleeper(input: Stdio) -> Child {
        Command::new("sleep").arg("1000").stdin(input).spawn().unwrap()
    }

    fn stop(child: &Child) {
        // SAFETY: our own child; until it has stopped, and it stays a child.
        unsafe {
            assert_eq!(libc::kill(child.id() as i32, libc::SIGSTOP), 0);
            let mut status = 0;
            libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED);
            assert!(libc::WIFSTOPPED(status));
        }
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A waiter that has waited for that long already, for a process of this id.
    fn verdict(fd: i32, conn: &Conn, pid: u32, waited_ns: u64) -> Verdict {
        let since = clock::now_ns() - waited_ns;
        let mut patience = FamilyPatience { since, ..FamilyPatience::of(fd, conn) };
        patience.wait(u64::from(pid) << 40 | 1, 128)
    }

    #[test]
    fn a_stopped_holder_is_waited_for_and_a_dead_one_is_not() {
        let conn = conn::loose(0);
        let mut child = sleeper(Stdio::null());
        let verdict = |child: &Child, ns| verdict(-1, &conn, child.id(), ns);
        assert_eq!(verdict(&child, MOST_NS / 2), Verdict::Again);
        assert_eq!(verdict(&child, 2 * MOST_NS), Verdict::GiveUp);
        stop(&child);
        assert_eq!(verdict(&child, 2 * MOST_NS), Verdict::Again);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(verdict(&child, MOST_NS / 2), Verdict::Steal);
    }

    #[test]
    fn of_those_whom_a_stranger_names_only_holders_are_waited_for() {
        process::refresh();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_raw_fd();
        let holder = sleeper(OwnedFd::from(socket.try_clone().unwrap()).into());
        let other = sleeper(Stdio::null());
        let strange = || conn::loose(F_HANDSHAKE);
        let conn = strange();
        assert_eq!(verdict(fd, &conn, other.id(), 0), Verdict::Again);
        assert!(!conn.has(F_SCRIBBLED));
        // What runs, what is stopped, and ourselves.
        assert_eq!(verdict(fd, &conn, other.id(), 2 * STRANGE_NS), Verdict::GiveUp);
        assert_eq!(verdict(fd, &strange(), process::pid(), 2 * STRANGE_NS), Verdict::GiveUp);
        stop(&other);
        assert_eq!(verdict(fd, &strange(), other.id(), 2 * MOST_NS), Verdict::GiveUp);
        // Not another time.
        assert_eq!(verdict(fd, &conn, holder.id(), 0), Verdict::GiveUp);
        stop(&holder);
        assert_eq!(verdict(fd, &strange(), holder.id(), 2 * MOST_NS), Verdict::Again);
        // Of a socket that we cannot see in there nothing is known.
        assert_eq!(verdict(-1, &strange(), other.id(), UNKNOWN_NS / 2), Verdict::Again);
        assert_eq!(verdict(-1, &strange(), other.id(), 2 * UNKNOWN_NS), Verdict::GiveUp);
        end(holder);
        end(other);
    }
}
