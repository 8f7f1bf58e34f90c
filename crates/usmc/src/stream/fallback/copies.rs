//! Copies: where a peer may hand its end on to a program that knows nothing of the ring, the end of the connection leaves
//! by TCP, too, what is unread in the ring.

use usmc_shm::back::Resume;
use usmc_shm::layout::Slot;
use usmc_shm::span::{RxSpan, TxSpan};
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use super::patience::Patience;
use super::sending::go_back_briefly;
use super::stream::skip_to;
use crate::family::holders;
use crate::family::locks::Family;
use crate::os::log;
use crate::os::sys::{self, Errno};
use crate::record::conn::Conn;

/// Before the sending direction ends: where the peer may hand its end on to a program that knows nothing of the ring, what it
/// has not read is left by TCP, too. As much as the kernel takes at once; where that is not all, it does without. The caller
/// has the record's sending lock.
pub fn leave_copies(fd: i32, conn: &Conn, slot: &Slot) {
    if conn.peer_end(slot).flags().hands_on() && conn.tx(slot).has_data() {
        leave_copies_of_unread(fd, conn, slot);
    }
}

#[cold]
fn leave_copies_of_unread(fd: i32, conn: &Conn, slot: &Slot) {
    let (span, tx) = (TxSpan::new(slot, conn.side()), conn.tx(slot));
    let own = conn.own(slot).flags(Relaxed);
    let ended = own.has_ended() || own.ends_ring();
    if ended || conn.peer(slot).flags(Relaxed).reads_nothing() || !span.is_ring() {
        return;
    }
    // A killed process might leave them half done, and others go on behind them.
    if !holders::is_alone(conn) {
        return;
    }
    let Some(_family) = Family::sending(fd, conn, slot) else { return };
    let Ok(data) = tx.data() else { return };
    span.announce_copies(data.cons);
    let is_back = go_back_briefly(fd, conn, slot);
    if !span.is_to_copy() || !is_back {
        return;
    }
    let mut sent = 0;
    while sent < data.len {
        let at = data.cons.wrapping_add(sent as u64);
        let (src, len) = tx.contiguous(at, data.place, data.len - sent);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `len` bytes of the ring, which nobody writes any more.
        match unsafe { sys::send_raw(fd, src, len, flags) } {
            Ok(n) => sent += n,
            Err(libc::EINTR) => {}
            Err(_) => break,
        }
    }
    span.has_copied(data.cons.wrapping_add(sent as u64));
    log::debug(format_args!("fd {fd}: {sent} of {} unread bytes copied to TCP", data.len));
}

/// The receiving direction of [`leave`](super::leave) where its sender has ended it and bytes are unread: it may have left
/// copies of them.
///
/// # Errors
/// EBUSY where it has not, or they do not come.
pub fn leave_to_copies(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let (span, rx) = (RxSpan::new(slot, conn.side()), conn.rx(slot));
    let patience = Patience::new();
    let (start, copies) = loop {
        // Before the copies, which come before it.
        let has_ended = conn.peer(slot).flags(Acquire).has_ended();
        match (span.resume(), span.copies(&rx)) {
            (Resume::At(start), Some(copies)) if copies.is_whole => break (start, copies),
            (_, copies) => {
                let is_over = copies.is_some_and(|copies| copies.is_over);
                if is_over || has_ended || !span.has_copies() {
                    return Err(libc::EBUSY);
                }
            }
        }
        patience.wait()?;
    };
    // What exceeds the kernel's buffer comes as it is taken.
    while !skip_to(fd, conn, slot, start.saturating_add(copies.read)) {
        patience.wait()?;
    }
    span.to_tcp();
    // Nothing is unread in the ring any more.
    rx.consume(copies.end);
    log::debug(format_args!("fd {fd}: goes on with copies of what was unread"));
    Ok(())
}
