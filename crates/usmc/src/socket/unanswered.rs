//! Connections whose peers wait in connect(2), as the kernel's SMC does for six seconds: its Proposal is answered at the application's first
//! call on the connection, and the application may accept others before that. So accept(2) answers for those that it has accepted before.

use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::handshake::{clc, transition};
use crate::os::errno::apart;
use crate::os::signals::{Signals, Woken};
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::record::change_over::Call;
use crate::record::clc_state::Step;
use crate::record::conn;
use crate::record::phase::Phase;

/// So many connections are known at a time: the last ones.
const PLACES: usize = 16;
/// Each place has the number of a connection and its record; 0: the place is free.
static WAITING: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// How many connections were noted; 0: no place is in use.
static NOTED: AtomicU32 = AtomicU32::new(0);

/// The connection behind the number was accepted just now.
pub fn note(fd: i32, index: u32) {
    if is_unanswered((fd, index)) && clc::first::is_agreed(conn::at(index)) {
        let place = NOTED.fetch_add(1, Relaxed) as usize % PLACES;
        let word = (u64::from(fd.cast_unsigned()) + 1) << 32 | u64::from(index);
        WAITING[place].store(word, Relaxed);
    }
}

fn of_word(word: u64) -> Option<(i32, u32)> {
    let fd = u32::try_from((word >> 32).checked_sub(1)?).ok()?;
    Some((fd.cast_signed(), word as u32))
}

/// Whether the number is still that connection's, and nobody has looked for the peer's Proposal.
fn is_unanswered((fd, index): (i32, u32)) -> bool {
    let conn = conn::at(index);
    matches!(table::get(fd), Entry::Conn(now) if now == index)
        && conn.phase() == Phase::Early
        && conn.clc.step() == Step::Expecting
}

/// A forked child has the connections from its parent, which answers for them.
pub fn after_fork() {
    NOTED.store(0, Relaxed);
    WAITING.iter().for_each(|place| place.store(0, Relaxed));
}

/// Answers the peers whose Proposals have come. It is called before accept(2). Where the listener waits, this waits, too, until there is a
/// connection to accept or all peers are answered.
///
/// # Errors
/// EINTR, as accept(2) has it.
#[inline(always)]
pub fn answer(listener: i32) -> Result<(), Errno> {
    if NOTED.load(Relaxed) == 0 { Ok(()) } else { answer_all(listener) }
}

#[cold]
fn answer_all(listener: i32) -> Result<(), Errno> {
    let mut signals = Signals::new();
    loop {
        let mut fds = [libc::pollfd { fd: listener, events: libc::POLLIN, revents: 0 }; 1 + PLACES];
        let mut known = [(0, 0); 1 + PLACES];
        let mut count = 1;
        for place in &WAITING {
            let word = place.load(Relaxed);
            let Some(one) = of_word(word) else { continue };
            if !is_unanswered(one) {
                let _ = place.compare_exchange(word, 0, Relaxed, Relaxed);
                continue;
            }
            (fds[count].fd, known[count]) = (one.0, one);
            count += 1;
        }
        if count == 1 {
            return Ok(());
        }
        let waits = apart(|| waits(listener));
        let fds = &mut fds[..count];
        if waits {
            // A handler with SA_RESTART does not end accept(2).
            signals.keep();
        }
        if let Woken::Fail(errno) = signals.poll(fds, if waits { -1 } else { 0 }, false) {
            return Err(errno);
        }
        // A handshake may take its time.
        if signals.let_in(false) {
            return Err(libc::EINTR);
        }
        for (at, found) in fds.iter().enumerate().skip(1).filter(|(_, found)| found.revents != 0) {
            // Once each: what has come may be no whole message.
            forget(known[at]);
            apart(|| transition::progress(found.fd, known[at].1, Call::Look));
        }
        if fds[0].revents != 0 || !waits {
            return Ok(());
        }
    }
}

fn forget(one: (i32, u32)) {
    for place in &WAITING {
        let word = place.load(Relaxed);
        if of_word(word) == Some(one) {
            let _ = place.compare_exchange(word, 0, Relaxed, Relaxed);
        }
    }
}

/// Whether accept(2) there waits for as long as it takes.
fn waits(listener: i32) -> bool {
    const NONBLOCK: usize = libc::O_NONBLOCK as usize;
    let flags = sys::fcntl(listener, libc::F_GETFL, 0).unwrap_or(NONBLOCK);
    let mut limit = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let known = sys::getsockopt(listener, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &mut limit).is_ok();
    flags & NONBLOCK == 0 && known && (limit.tv_sec, limit.tv_usec) == (0, 0)
}
