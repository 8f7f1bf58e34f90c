//! The receiving direction of a way back: what is unread in the ring comes by TCP, and the doorbells are taken out.

use usmc_shm::back::{Leave, Resume};
use usmc_shm::layout::{ARM_TCP, Slot};
use usmc_shm::span::{RxSpan, Source};
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use super::copies::leave_to_copies;
use super::patience::Patience;
use super::sends_sleep;
use super::stream::{LOOKS, bytes_before_bells, drop_bells, drop_bytes, skip, skip_to};
use crate::family::locks::FamilyPatience;
use crate::handshake::transition;
use crate::os::process::SharedLock;
use crate::os::sys::Errno;
use crate::record::conn::{Conn, F_DEPUTY};
use crate::record::kernel;
use crate::stream::bells;
use crate::stream::peers_socket::PeersSocket;

/// The receiving direction of [`leave`](super::leave).
///
/// # Errors
/// As there.
pub fn leave_rx(fd: i32, conn: &Conn, slot: &Slot) -> Result<(), Errno> {
    let span = RxSpan::new(slot, conn.side());
    let rx = conn.rx(slot);
    let patience = Patience::new();
    // Somebody may have taken a doorbell and died before he had counted it; the kernel knows.
    span.recount();
    loop {
        match span.source(|| kernel::tcp_read(fd, conn, slot)).map_err(|_| libc::EBUSY)? {
            Source::Bells(count) => {
                drop_bytes(fd, count);
                patience.wait()?;
            }
            Source::Tcp(_) if span.is_tcp() => return Ok(()),
            _ => break,
        }
    }
    // The peer's socket, to send for it: its program may be anywhere.
    let peer = PeersSocket::of(fd, conn, slot, 1 - conn.side());
    // Before the peer can learn of it: it would send again what is in the ring, and what stands before that is ours.
    let back_lock = &conn.peer_end(slot).back_lock;
    let held = SharedLock::enter(back_lock, &mut FamilyPatience::of_peer(conn));
    let Ok(_held) = held else { return Err(libc::EBUSY) };
    // Bytes of the TCP span before doorbells, which would be read as data by the next reader. They can be sent again as
    // long as nothing that follows them was.
    let before_bells = bytes_before_bells(fd, conn, slot).ok_or(libc::EBUSY)?;
    if before_bells > 0 && span.unheard() > 0 && (peer.is_none() || span.is_resumed()) {
        return Err(libc::EBUSY);
    }
    // After a shutdown of both directions the kernel takes no byte any more.
    let shut = conn.own(slot).flags(Relaxed).is_done() && conn.end(slot).flags().is_shut_rd();
    if shut && (before_bells > 0 || rx.has_data()) {
        return Err(libc::EBUSY);
    }
    match span.leave(&rx, &conn.tx(slot), before_bells > 0) {
        Leave::Unread => return Err(libc::EBUSY),
        Leave::SenderFirst => {
            while !finish_rx(fd, conn, slot) {
                if before_bells > 0 {
                    return Err(libc::EBUSY);
                }
                if rx.has_data() {
                    return leave_to_copies(fd, conn, slot);
                }
                patience.wait()?;
            }
            return Ok(());
        }
        // Whatever becomes of the rest.
        Leave::Left => conn.own(slot).say_left_other(),
    }
    let done = clear_stream(fd, conn, slot, peer.as_ref());
    if done.is_err() {
        // We go on reading around the doorbells ourselves.
        span.to_tcp_around_bells();
    }
    done
}

/// What is left to do in the TCP stream once this end has left: the doorbells are taken out.
fn clear_stream(
    fd: i32,
    conn: &Conn,
    slot: &Slot,
    peer: Option<&PeersSocket>,
) -> Result<(), Errno> {
    let span = RxSpan::new(slot, conn.side());
    let patience = Patience::new();
    while span.is_rung(slot, conn.side()) {
        patience.wait()?;
    }
    // Asked again: the peer may have switched meanwhile, and rung.
    if span.unheard() > 0 {
        let before = bytes_before_bells(fd, conn, slot).ok_or(libc::EBUSY)?;
        match peer {
            Some(peer) if before > 0 => return peer.send_again(fd, conn, slot, before),
            None if before > 0 => return Err(libc::EBUSY),
            _ => {}
        }
    }
    drop_bells(fd, conn, slot)?;
    if let Some(peer) = peer.filter(|_| conn.rx(slot).has_data()) {
        peer.end_ring(conn, slot);
    }
    Ok(())
}

/// Whether the receiving direction is TCP's again; goes as far towards it as the ring and the kernel allow. The caller
/// holds the receiving locks.
pub fn finish_rx(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let span = RxSpan::new(slot, conn.side());
    if span.is_tcp() {
        return true;
    }
    let resume = span.resume();
    let peer = conn.peer(slot).flags(Acquire);
    let rx = conn.rx(slot);
    if span.is_by_sender() {
        return finish_by_sender(fd, conn, slot);
    }
    // A send of ours that sleeps has to see its doorbell first.
    if rx.has_data() || sends_sleep(conn, slot) {
        return false;
    }
    match resume {
        // It has shut its direction down: nothing follows but the kernel's FIN.
        Resume::Not if peer.goes_back() && peer.is_done() => {
            if bells::reads_ring(fd, conn, slot) {
                bells::drain_bells(fd, conn, slot);
            }
            if span.unheard() != 0 || !bells::reads_ring(fd, conn, slot) {
                return false;
            }
        }
        Resume::Not => return false,
        Resume::AtOnce => {}
        Resume::At(at) => {
            let copies = span.copies(&rx).map_or(0, |copies| copies.all);
            if !skip_to(fd, conn, slot, at.saturating_add(copies)) {
                return false;
            }
        }
    }
    span.to_tcp();
    // An agent has gone back for an urgent byte, and its peer sends nothing before that and all before it was read.
    if conn.has(F_DEPUTY) && rx.has_tx_sleepers() && transition::tx_is_ring(fd, conn, slot) {
        let take = |shared| if rx.take_tx_sleepers(shared) != 0 { ARM_TCP } else { 0 };
        bells::ring_bell(fd, conn, slot, take);
    }
    true
}

/// The same before a close: copies of what was read in the ring may still be on their way, and would be taken for unread.
pub fn finish_rx_at_last(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let (span, patience) = (RxSpan::new(slot, conn.side()), Patience::brief());
    while !finish_rx(fd, conn, slot) {
        if !span.has_copies() || conn.rx(slot).has_data() || patience.wait().is_err() {
            return false;
        }
    }
    true
}

/// [`finish_rx`], where the sender was faster than our first look at the ring.
fn finish_by_sender(fd: i32, conn: &Conn, slot: &Slot) -> bool {
    let span = RxSpan::new(slot, conn.side());
    for _ in 0..LOOKS {
        match span.source(|| kernel::tcp_read(fd, conn, slot)) {
            Ok(Source::Bells(count)) if skip(fd, &span, count) => {}
            _ => break,
        }
    }
    span.is_tcp()
}
