//! pidfd_getfd(2) of a connection that another process has in the ring, or about to be. Its program does nothing for it
//! and may be anywhere, so whoever fetches it takes it out of the ring on its behalf.
//!
//! Who fetches may ptrace(2) the holder: it reads the holder's record ([`Remote`]), finds the segment among the client's
//! descriptors, and becomes one more process of the end in [`End::refs`]. The holder's threads are kept away by the slot's
//! locks, as those of a forked process are: they take them as soon as they see that they are not alone. One that has not
//! seen it may be in the middle of a step still. Then it has the record's own lock, and that is watched until it is free:
//!
//! ```text
//!     holder:  own lock := thread     us:  refs += 1
//!              refs != 1 ?                 own lock == 0 ?
//! ```
//!
//! Each writes first and reads then, so that one of them sees the other. From there on it is [`demote::leave`], and what the
//! holder finds at its next call is what it finds when a forked process has taken the connection out of the ring.

use core::mem::offset_of;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use core::sync::atomic::fence;
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{
    ACCEPTOR, CLIENT, End, SLOTS_OFFSET, SegmentHeader, Slot, TXF_ABORT, TXF_CLOSED, TXF_SHUT,
};

use crate::device::segment::{self, Visited};
use crate::family::mark;
use crate::family::{custody, holders};
use crate::handshake::transition;
use crate::host::Custody;
use crate::os::log;
use crate::os::remote::{self, Remote};
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::record::conn::{self, Conn, F_CLIENT, There};
use crate::record::phase::Phase;
use crate::record::tuple::{self, Tuple};
use crate::stream::demote::{self, Patience};

/// `fd` is a duplicate of descriptor `number` of the process `pidfd`: it is TCP afterwards. It may go to a ring again, once
/// one process is left that has it, if the answer is what [`custody::join`] has given.
///
/// # Errors
/// EBUSY where that cannot be.
pub fn take(fd: i32, pidfd: i32, number: i32) -> Result<Option<Custody>, Errno> {
    let counted = count_in(fd, pidfd, number);
    let taken = take_out(fd, pidfd, number, counted.is_some());
    if let (Some(token), true) = (counted, taken.is_err()) {
        custody::part(token);
    }
    taken.map(|()| counted)
}

/// Counts both processes among those who hold the connection. Not those who hold it with a family that began before.
fn count_in(fd: i32, pidfd: i32, number: i32) -> Option<Custody> {
    let process = Remote::of(pidfd)?;
    let record = || match table::get_there(&process, number) {
        Entry::Conn(index) => conn::there(&process, index),
        _ => None,
    };
    let lasts = |it: &There| {
        let may_last =
            matches!(it.phase, Phase::Early | Phase::Offered | Phase::Attached | Phase::Ring)
                || it.custody != 0;
        may_last && holders::is_alone_there(&process, it)
    };
    let there = record().filter(lasts)?;
    // The number has meant nothing else meanwhile.
    if !remote::is_socket(process.pid(), number, sys::fstat(fd).ok()?.inode) {
        return None;
    }
    let is_client = side_of(&there) == CLIENT;
    let token = custody::join(fd, process.pid(), there.custody, is_client)?;
    fence(SeqCst);
    // A process that forks now looks for us; of one that has forked before it knows nothing.
    if record().is_some_and(|now| now.at == there.at && lasts(&now)) {
        return Some(token);
    }
    custody::part(token);
    None
}

/// `counted`: see [`mark::take`].
fn take_out(fd: i32, pidfd: i32, number: i32, counted: bool) -> Result<(), Errno> {
    if mark::take(fd, counted) {
        return Ok(());
    }
    // A handler that jumps would leave the holder without its locks.
    let mask = sys::block_signals();
    let patience = Patience::new();
    let taken = loop {
        // What is on its way into the ring, or out of it, has arrived there soon.
        if let Err(why) = attempt(fd, pidfd, number) {
            break Err(why);
        }
        if mark::take(fd, counted) {
            break Ok(());
        }
        if patience.wait().is_err() {
            break Err(Refused("unread, and its sender has left"));
        }
    };
    sys::set_signals(mask);
    taken.map_err(|Refused(why)| {
        log::warn(format_args!("fd {fd}: not taken out of its holder's ring: {why}"));
        libc::EBUSY
    })
}

/// No error is no success: whether the connection is out of the ring its mark tells.
fn attempt(fd: i32, pidfd: i32, number: i32) -> Result<(), Refused> {
    let process = Remote::of(pidfd).ok_or(Refused("another library"))?;
    let Entry::Conn(index) = table::get_there(&process, number) else {
        return Err(Refused("unknown there"));
    };
    let there = conn::there(&process, index).ok_or(Refused("no record"))?;
    if !is_named(fd, &there) {
        return Err(Refused("another connection"));
    }
    if !matches!(there.phase, Phase::Attached | Phase::Ring) {
        return Ok(());
    }
    let visited = open_segment(&process, &there)?;
    let slot = visited.map.slot(there.slot_index).map_err(|_| BROKEN)?;
    let usage = Use::from_bits(there.usage);
    match handshake::decline(&slot.control, usage) {
        // Since our mark is set it goes to no other ring while the holder has it.
        SlotState::Gone => {
            mark::leave_ring(fd);
            return Ok(());
        }
        SlotState::Confirmed => {}
        SlotState::Offered | SlotState::Attached => return Err(BROKEN),
    }
    let guest = Guest::enter(&slot.end[side_of(&there)]).ok_or(Refused("closed"))?;
    if handshake::phase(&slot.control, usage) != SlotState::Confirmed {
        return Ok(());
    }
    wait_for_threads(&process, there.at, guest.0)?;
    let Some(there) = conn::there(&process, index).filter(|now| is_in_same_slot(now, &there))
    else {
        return Ok(());
    };
    let ended = slot.dir[side_of(&there)].producer.flags.load(Acquire);
    if ended & TXF_ABORT != 0 || ended & (TXF_CLOSED | TXF_SHUT) == TXF_CLOSED {
        // In this instant: the peer was told so.
        return Err(Refused("closed"));
    }
    let conn = conn::visiting(there.flags, there.kernel_events);
    // SAFETY: the record ends before the mapping does.
    unsafe { transition::tie(&conn, &visited.map, there.slot_index, true) }.map_err(|_| BROKEN)?;
    // Where it fails, the holder may yet read what its peer, who has left, cannot send again.
    if demote::leave_on_behalf(fd, &conn, slot).is_ok() {
        log::debug(format_args!("fd {fd}: taken out of the ring of process {}", process.pid()));
    }
    Ok(())
}

/// Not to be had, and why.
struct Refused(&'static str);

const BROKEN: Refused = Refused("the segment makes no sense");

fn side_of(there: &There) -> usize {
    if there.flags & F_CLIENT != 0 { CLIENT } else { ACCEPTOR }
}

fn is_in_same_slot(now: &There, before: &There) -> bool {
    matches!(now.phase, Phase::Attached | Phase::Ring)
        && (now.slot, now.usage) == (before.slot, before.usage)
}

/// Whether the record is of the connection that `fd` is.
fn is_named(fd: i32, there: &There) -> bool {
    let (Ok(local), Ok(peer)) = (tuple::local(fd), tuple::peer(fd)) else { return false };
    let (client, server) = if side_of(there) == CLIENT { (local, peer) } else { (peer, local) };
    Tuple { netns: tuple::netns(fd), client, server }.words() == there.tuple
}

/// The memory that the holder has mapped: the client has its file still.
fn open_segment(process: &Remote, there: &There) -> Result<Visited, Refused> {
    let before = SLOTS_OFFSET + there.slot_index as usize * size_of::<Slot>();
    let header = there.slot.checked_sub(before).ok_or(BROKEN)?;
    // SAFETY: an integer.
    let id = unsafe { process.read::<u64>(header + offset_of!(SegmentHeader, id)) };
    let id = id.map_err(|_| BROKEN)?;
    let client = if side_of(there) == CLIENT {
        process.pid()
    } else {
        let pid = offset_of!(Slot, end) + CLIENT * size_of::<End>() + offset_of!(End, pid);
        // SAFETY: an integer.
        unsafe { process.read::<u32>(there.slot + pid) }.map_err(|_| BROKEN)?
    };
    let is_it = |fd| segment::id_in(fd) == Some(id);
    let fd = remote::open_memfd(client, segment::MEMFD_NAME, is_it).ok_or(Refused("no segment"))?;
    Visited::new(fd).map_err(|_| BROKEN)
}

/// One more process of an end.
struct Guest<'a>(&'a End);

impl<'a> Guest<'a> {
    /// `None` where nobody is left.
    fn enter(end: &'a End) -> Option<Guest<'a>> {
        let more = |refs: u32| if refs > 0 { refs.checked_add(1) } else { None };
        end.refs.fetch_update(AcqRel, Relaxed, more).ok()?;
        Some(Guest(end))
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        self.0.refs.fetch_sub(1, AcqRel);
    }
}

/// Returns once no thread of the holder is in a step that it began as the only process of the end.
fn wait_for_threads(process: &Remote, record: usize, end: &End) -> Result<(), Refused> {
    fence(SeqCst);
    // A holder of one thread takes its lock by a plain store, which is to be seen before it looks at the count.
    if sys::barrier_everywhere().is_err() {
        if !cfg!(any(target_arch = "x86_64", target_arch = "x86")) {
            return Err(Refused("no membarrier(2)"));
        }
        // There a store is late by what the CPU holds back, which is no thousandth of this.
        sys::poll1(-1, 0, 1);
    }
    let patience = Patience::new();
    for (own, family) in
        [(offset_of!(Conn, rx_lock), &end.rx_lock), (offset_of!(Conn, tx_lock), &end.tx_lock)]
    {
        loop {
            // SAFETY: an integer.
            match unsafe { process.read::<u64>(record + own) } {
                // It has ended.
                Ok(0) | Err(libc::ESRCH) => break,
                // Who has it has seen us, and has taken the other as well.
                Ok(_) if family.load(Acquire) != 0 => break,
                Ok(_) => patience.wait().map_err(|_| Refused("a thread in a step"))?,
                Err(_) => return Err(Refused("memory not to be read")),
            }
        }
    }
    Ok(())
}
