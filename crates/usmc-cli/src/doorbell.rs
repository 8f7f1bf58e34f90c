//! Doorbells from outside: a process is woken as the other end of its connection would wake it.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::{SendFlags, getpeername, getsockname, send};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use usmc_shm::layout::ARM_TCP;
use usmc_shm::segment::Segment;
use usmc_shm::span::TxSpan;

use crate::observed::Socket;

/// Rings for the peer of process `pid`'s `socket`, whose slot is in `map`, by that socket. `side`: the process' end. `None` where no
/// doorbell can be sent. What the slot says is other processes' word: it says whether to ring, and counts the doorbell.
pub fn ring(map: &Segment, side: usize, pid: u32, socket: &Socket) -> Option<()> {
    let slot = map.slot(socket.slot).ok()?;
    let (tx, rx) = (map.ring(socket.slot, side).ok()?, map.ring(socket.slot, 1 - side).ok()?);
    let span = TxSpan::new(slot, side);
    // Outside the ring a byte is no doorbell.
    if !span.is_ring() {
        return None;
    }
    let tcp = socket_of(pid, socket)?;
    let ring = || send(&tcp, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok();
    let asleep = || tx.take_rx_sleepers(false) | rx.take_tx_sleepers(false) | ARM_TCP;
    let _ = span.ring_for(asleep, ring);
    Some(())
}

/// The socket, if the number still means it.
fn socket_of(pid: u32, socket: &Socket) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid.cast_signed())?, PidfdFlags::empty()).ok()?;
    let fd = socket.fd.cast_signed();
    let tcp = pidfd_getfd(process, fd, PidfdGetfdFlags::empty()).ok()?;
    let of = |addr: rustix::net::SocketAddrAny| -> Option<SocketAddr> {
        let addr = SocketAddr::try_from(addr).ok()?;
        Some(SocketAddr::new(addr.ip().to_canonical(), addr.port()))
    };
    let is_it = of(getsockname(&tcp).ok()?) == Some(socket.local)
        && of(getpeername(&tcp).ok()??) == Some(socket.peer);
    is_it.then_some(tcp)
}
