//! The socket of a connection's other end, used on behalf of the process that has it.

use usmc_shm::layout::{End, Slot};
use usmc_shm::ring::Ring;
use usmc_shm::span::TxSpan;
use usmc_shm::sync::Ordering::Relaxed;

use super::fallback::{self, Full, Patience};
use crate::os::sys::{self, Errno};
use crate::os::{foreign_fd, log};
use crate::record::conn::Conn;
use crate::record::{kernel, tuple};

/// A duplicate of the peer's socket, to send on its behalf what it would have to send again. The kernel gives it to
/// whom it lets debug the peer (ptrace(2), "Ptrace access mode checking").
pub struct PeersSocket(i32);

impl PeersSocket {
    /// That of end `side`, which is the peer of `fd`. `None` where the kernel does not give it.
    pub fn of(fd: i32, conn: &Conn, slot: &Slot, side: usize) -> Option<PeersSocket> {
        let end = &slot.end[side];
        // Of another kernel, or namespace, the same ids are other processes'.
        if !foreign_fd::are_welcome() || !conn.knows_pids_of(end) {
            return None;
        }
        // The process that was last known to have it may have died; in the others of its family it mostly has the same number.
        let holders = [&end.pid].into_iter().chain(&end.members).map(|pid| pid.load(Relaxed));
        holders.filter(|&pid| pid != 0).find_map(|pid| PeersSocket::of_process(pid, fd, conn, end))
    }

    fn of_process(pid: u32, fd: i32, conn: &Conn, end: &End) -> Option<PeersSocket> {
        let pidfd = sys::pidfd_open(pid).ok()?;
        let socket = sys::pidfd_getfd(pidfd, end.fd.load(Relaxed));
        sys::close(pidfd);
        let socket = socket.ok()?;
        // The number may mean anything by now, and its teller may lie.
        // In another network namespace the same names can be another connection's: there its owner must not lie, and
        // the byte counts show what he means.
        let is_near = match (tuple::cookie(socket), tuple::cookie(fd)) {
            (Some(there), Some(here)) => there == here,
            _ => kernel::may_be_joined(fd, socket),
        };
        let is_it = (is_near || (conn.clc.is_with_kin() && kernel::may_be_joined(fd, socket)))
            && tuple::local(socket).is_ok_and(|at| tuple::peer(fd) == Ok(at))
            && tuple::peer(socket).is_ok_and(|at| tuple::local(fd) == Ok(at));
        if is_it {
            return Some(PeersSocket(socket));
        }
        foreign_fd::let_go(socket);
        None
    }

    /// Ends the peer's sending direction, unless TCP stays full: then the peer sends the rest at its next call, or when a
    /// doorbell ends its sleep. The caller holds its `back_lock`, also below.
    pub fn end_ring(&self, conn: &Conn, slot: &Slot) {
        let (side, ring) = (1 - conn.side(), conn.rx(slot));
        fallback::end_ring(self.0, slot, side, &ring, &Patience::new(), Full::GoesOnLater);
    }

    /// The next `count` bytes of TCP, which doorbells follow, once more behind them; then the ring. Where that fails half-way
    /// the connection is reset, which is no silent loss.
    ///
    /// # Errors
    /// EBUSY, then the connection is over; where there is no memory, it is not.
    pub fn send_again(&self, fd: i32, conn: &Conn, slot: &Slot, count: usize) -> Result<(), Errno> {
        let bytes = sys::mmap_private(core::ptr::null_mut(), count)?;
        let moved = (|| {
            let mut patience = Patience::new();
            let mut got = 0;
            while got < count {
                // SAFETY: `count - got` bytes are left in the mapping.
                match unsafe { sys::recv(fd, bytes.add(got), count - got, libc::MSG_DONTWAIT) } {
                    Ok(n @ 1..) => {
                        got += n;
                        patience = Patience::new();
                    }
                    Ok(_) => return Err(libc::EPIPE),
                    Err(_) => patience.wait()?,
                }
            }
            fallback::drop_bells(fd, conn, slot)?;
            // SAFETY: the mapping has `count` bytes.
            unsafe { fallback::send_all(self.0, bytes, count) }
        })();
        // SAFETY: mapped above.
        unsafe { sys::munmap(bytes, count) };
        if let Err(errno) = moved {
            log::warn(format_args!("fd {fd}: {count} bytes not sent again, errno {errno}; reset"));
            sys::disconnect(fd);
            return Err(libc::EBUSY);
        }
        self.end_ring(conn, slot);
        Ok(())
    }

    /// Rings as the peer would for threads of ours that sleep for room.
    pub fn ring(&self, slot: &Slot, side: usize, tx: &Ring<'_>) {
        let ring = || sys::send(self.0, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).is_ok();
        // What the peer has published meanwhile is its own affair.
        let _ = TxSpan::new(slot, side).ring_for(|| tx.take_tx_sleepers(false), ring);
    }
}

impl Drop for PeersSocket {
    fn drop(&mut self) {
        sys::close(self.0);
    }
}
