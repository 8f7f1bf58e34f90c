//! What of a stream is unread, and where it stands: in the TCP span, in the ring, or behind it.

use usmc_shm::back::Resume;
use usmc_shm::layout::Slot;
use usmc_shm::ring::Ring;
use usmc_shm::span::{RxSpan, Source, Unmeasured};
use usmc_shm::sync::Ordering::Relaxed;

use super::fallback;
use crate::family::locks::Receiving;
use crate::handshake::{clc, transition};
use crate::os::sys;
use crate::record::change_over::Call;
use crate::record::conn::{self, Conn, F_CLC};
use crate::record::phase::Phase;
use crate::record::{kernel, numbers};

/// Of `inq` bytes of TCP that stand behind the ring, those of the application that are not in the ring `rx` as well.
pub fn behind(span: &RxSpan<'_>, rx: &Ring<'_>, inq: usize) -> usize {
    match span.resume() {
        Resume::Not if !span.is_by_sender() => 0,
        _ => {
            let copies = span.copies(rx).map_or(0, |copies| copies.all as usize);
            inq.saturating_sub(span.unheard() as usize + copies)
        }
    }
}

/// Unread bytes of TCP that follow the ring.
pub fn unread_behind_ring(fd: i32, conn: &Conn, slot: &Slot) -> usize {
    let inq = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
    behind(&RxSpan::new(slot, conn.side()), &conn.rx(slot), inq)
}

/// Whether all of the TCP span has come, so that the ring's bytes can be read: until then they are still on their way.
#[inline(always)]
pub fn has_span(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    conn.end(slot).reads_ring() || has_span_slow(fd, conn, slot)
}

#[cold]
fn has_span_slow(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    match RxSpan::new(slot, conn.side()).left() {
        Some(left) => sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n as u64 >= left),
        // Nothing is in the ring yet, or its bytes come by TCP.
        None => true,
    }
}

/// Whether nothing of the stream is left outside the kernel's TCP.
pub fn is_past_ring(fd: i32, index: u32) -> bool {
    fallback::follow(fd, index);
    let conn = conn::at(index);
    match conn.slot().filter(|_| conn.phase() == Phase::Ring) {
        Some(slot) => RxSpan::new(slot, conn.side()).is_tcp(),
        None => true,
    }
}

/// FIONREAD, wherever the bytes are.
pub fn unread_anyhow(fd: i32, index: u32) -> usize {
    unread(fd, index)
        .unwrap_or_else(|| sys::ioctl_int(fd, libc::FIONREAD).map_or(0, |n| n as usize))
}

/// FIONREAD: unread bytes of the TCP span and of the ring.
pub fn unread(fd: i32, index: u32) -> Option<usize> {
    let conn = conn::at(index);
    if conn.has(F_CLC) && conn.phase() == Phase::Plain {
        return clc::unread(fd, conn);
    }
    let had_messages = conn.has(F_CLC);
    if matches!(conn.phase(), Phase::Offered | Phase::Early | Phase::Attached) {
        transition::progress(fd, index, Call::Look);
    }
    if conn.has(F_CLC) {
        return clc::unread(fd, conn);
    }
    if had_messages && conn.phase() != Phase::Ring {
        // One that was just taken out was among what the kernel has counted before.
        return sys::ioctl_int(fd, libc::FIONREAD).ok().map(|n| n as usize);
    }
    let slot = conn.slot()?;
    if conn.peer(slot).flags(Relaxed).is_returning() {
        fallback::follow(fd, index);
        if conn.phase() != Phase::Ring {
            // Doorbells were among what the kernel has counted before.
            return sys::ioctl_int(fd, libc::FIONREAD).ok().map(|n| n as usize);
        }
    }
    if conn.phase() != Phase::Ring {
        return None;
    }
    let _held = Receiving::enter(fd, conn, slot)?;
    let fd = numbers::number_in_step(fd, index, false)?;
    let span = RxSpan::new(slot, conn.side());
    let in_ring = conn.rx(slot).data().map_or(0, |d| d.len);
    match span.source(|| kernel::tcp_read(fd, conn, slot)) {
        Ok(Source::Ring) if conn.peer(slot).flags(Relaxed).is_returning() => {
            Some(in_ring + unread_behind_ring(fd, conn, slot))
        }
        Ok(Source::Ring) | Err(Unmeasured) => Some(in_ring),
        Ok(Source::Bells(_)) => Some(0),
        Ok(Source::Tcp(left)) => {
            let inq = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
            if span.is_tcp() {
                // The ring's unread bytes come again.
                return Some(inq);
            }
            let first = inq.min(usize::try_from(left).unwrap_or(inq));
            // Where the sender was faster than our look at the ring, its bytes come by TCP. What the kernel has not got yet
            // comes before them.
            let is_reached = first as u64 == left && !span.is_by_sender();
            let in_ring = if is_reached { in_ring } else { 0 };
            Some(first + in_ring + behind(&span, &conn.rx(slot), inq - first))
        }
    }
}
