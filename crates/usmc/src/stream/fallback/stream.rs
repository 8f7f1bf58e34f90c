//! What stands in the TCP stream before that with which TCP goes on: bytes of its span, doorbells, copies.

use usmc_shm::layout::Slot;
use usmc_shm::span::RxSpan;
use usmc_shm::sync::Ordering::Relaxed;

use super::patience::Patience;
use super::sending::RESEND_NS;
use crate::os::sys::{self, Errno};
use crate::record::conn::Conn;
use crate::record::kernel;
use crate::stream::bells;

/// How often one call takes doorbells out of the TCP stream; it has buffers for fewer of them. What is left is a peer's that
/// sends without end, and the next call's.
pub const LOOKS: usize = 4096;

/// Unread bytes of the TCP span, where it has an end.
pub fn bytes_before_bells(fd: i32, conn: &Conn, slot: &Slot) -> Option<usize> {
    let Some(boundary) = RxSpan::new(slot, conn.side()).boundary() else { return Some(0) };
    let read = kernel::tcp_read(fd, conn, slot)?;
    usize::try_from(boundary.saturating_sub(read)).ok()
}

/// Takes all doorbells out of the TCP stream; none comes any more.
///
/// # Errors
/// EBUSY where they do not come.
pub fn drop_bells(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let span = RxSpan::new(slot, conn.side());
    let begun = Patience::new();
    let (mut patience, mut looks) = (Patience::new(), 0);
    while span.unheard() > 0 {
        let taken = drop_bytes(fd, span.unheard().into());
        conn.end(slot).bells_drained.fetch_add(taken as u32, Relaxed);
        if taken > 0 {
            looks += 1;
            if looks > LOOKS || begun.lasted_ns() > RESEND_NS {
                return Err(libc::EBUSY);
            }
            patience = Patience::new();
        } else if kernel::has_fin(fd) {
            break;
        } else {
            patience.wait()?;
        }
    }
    Ok(())
}

/// Takes some of `count` doorbells away that stand before the bytes that follow the ring. False while there are none;
/// where none will come any more, as the connection ended before them, what follows is TCP's.
pub fn skip(fd: i32, span: &RxSpan<'_>, count: u64) -> bool {
    if drop_bytes(fd, count) > 0 {
        return true;
    }
    if kernel::has_fin(fd) {
        span.to_tcp();
        return true;
    }
    false
}

/// Takes away what stands before byte `at` of the TCP stream, with which TCP goes on. False where that is not over.
pub fn skip_to(fd: i32, conn: &Conn, slot: &Slot, at: u64) -> bool {
    let span = RxSpan::new(slot, conn.side());
    for _ in 0..LOOKS {
        if !bells::reads_ring(fd, conn, slot) {
            // Bytes of the TCP span come first.
            return false;
        }
        let Some(read) = kernel::tcp_read(fd, conn, slot) else { return false };
        if read >= at {
            return true;
        }
        if !skip(fd, &span, at - read) {
            return false;
        }
        if span.is_tcp() {
            return true;
        }
    }
    false
}

/// Takes up to `count` bytes out of the TCP stream.
pub fn drop_bytes(fd: i32, count: u64) -> usize {
    // More the kernel does not have.
    const MOST: u64 = 1 << 30;
    if count == 0 { 0 } else { sys::discard(fd, count.min(MOST) as usize).unwrap_or(0) }
}
