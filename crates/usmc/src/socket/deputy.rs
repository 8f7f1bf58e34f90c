//! Exchanges the socket behind a number: an agent gets the application's TCP connection, and the number its deputy
//! ([`crate::handshake::clc::deputy`]); or the other way round, where it stays TCP.

use core::ffi::c_int;
use core::ptr;

use usmc_shm::sync::Ordering::Relaxed;

use crate::family::locks::Family;
use crate::handshake::clc::deputy;
use crate::handshake::transition;
use crate::os::sockopt;
use crate::os::table::{self, Entry};
use crate::record::change_over::Call;
use crate::record::conn::{self, Conn, F_DEPUTY};
use crate::record::phase::Phase;
use crate::record::tuple::{Endpoint, Tuple};
use crate::record::watched;
use crate::stream::fallback;
use crate::watch::observer;
use crate::watchers::{entry, epoll};

/// The exchange that is due, if one is. Registrations are kept first, as a fork does that.
pub fn exchange((fd, index): (i32, u32)) {
    let conn = conn::at(index);
    match deputy::is_due(conn) {
        true => begin(fd, index, conn),
        false => end(fd, index, conn),
    }
}

fn begin(fd: i32, index: u32, conn: &Conn) {
    {
        let Some(_kept) = entry::keep(index) else { return };
        let Some(_rx) = conn.rx_lock.enter() else { return };
        let Some(_step) = conn.step_lock.enter() else { return };
        if !deputy::is_due(conn) || !conn.stop_kernel_calls() {
            return;
        }
        match deputy::make(fd, conn) {
            Some(deputy) => {
                epoll::unregister(index);
                deputy::begin_ring(fd, conn, &deputy);
                epoll::register_again(index, false);
            }
            None => conn.go_on_with_kernel_calls(),
        }
    }
    observer::changed(fd, index);
    watched::PHASE_CHANGED.call(index);
    if conn.phase() == Phase::Early {
        // Without an agent, and at once: the peer waits.
        transition::progress(fd, index, Call::Look);
    }
}

/// The agent has left the ring.
fn end(fd: i32, index: u32, conn: &Conn) {
    {
        let Some(_kept) = entry::keep(index) else { return };
        let (Some(_rx), Some(_tx)) = (conn.rx_lock.enter(), conn.tx_lock.enter()) else { return };
        let Some(_step) = conn.step_lock.enter() else { return };
        let Some(slot) = conn.slot().filter(|_| deputy::is_left(conn)) else { return };
        let families = (Family::receiving(fd, conn, slot), Family::sending(fd, conn, slot));
        let (Some(_), Some(_)) = &families else { return };
        // Without one the agent is gone, and the connection ends by that.
        let Some(tcp) = deputy::fetch(fd, conn) else { return };
        epoll::unregister(index);
        deputy::put_back(fd, conn, tcp);
        fallback::leave_agent(fd, conn, slot);
        deputy::is_back(conn);
    }
    fallback::settle(fd, index);
    let Some(_kept) = entry::keep(index) else { return };
    epoll::register_again(index, true);
}

/// The names of a deputy are those of the connection that it stands for.
#[derive(Clone, Copy)]
pub enum Which {
    /// getsockname(2).
    Own,
    /// getpeername(2).
    Peer,
}

/// Gives the name of a deputy's connection. `None`: the number is none.
///
/// # Safety
/// As for getsockname(2).
pub unsafe fn name(
    fd: c_int,
    which: Which,
    addr: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> Option<()> {
    let Entry::Conn(index) = table::get(fd) else { return None };
    let conn = conn::at(index);
    if !conn.has(F_DEPUTY) || addr.is_null() || len.is_null() {
        return None;
    }
    let words = conn.tuple.each_ref().map(|word| word.load(Relaxed));
    let tuple = Tuple::of(&words);
    let end = match which {
        Which::Own => tuple.server,
        Which::Peer => tuple.client,
    };
    let family = sockopt::int(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, libc::AF_INET);
    let (name, whole) = sockaddr(end, family);
    // SAFETY: the caller's contract.
    unsafe {
        let room = (*len as usize).min(whole);
        ptr::copy_nonoverlapping(ptr::from_ref(&name).cast::<u8>(), addr.cast::<u8>(), room);
        *len = whole as libc::socklen_t;
    }
    Some(())
}

/// As a socket of this family has it.
fn sockaddr(end: Endpoint, family: i32) -> (libc::sockaddr_storage, usize) {
    // SAFETY: all-zero is valid.
    let mut name: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    name.ss_family = family as libc::sa_family_t;
    let at = (&raw mut name).cast::<u8>();
    // SAFETY: both lie in a sockaddr_storage.
    let len = unsafe {
        if family == libc::AF_INET {
            let v4 = &mut *at.cast::<libc::sockaddr_in>();
            v4.sin_port = end.port.to_be();
            let [.., a, b, c, d] = end.addr;
            v4.sin_addr.s_addr = u32::from_ne_bytes([a, b, c, d]);
            size_of::<libc::sockaddr_in>()
        } else {
            let v6 = &mut *at.cast::<libc::sockaddr_in6>();
            v6.sin6_port = end.port.to_be();
            v6.sin6_addr.s6_addr = end.addr;
            size_of::<libc::sockaddr_in6>()
        }
    };
    (name, len)
}
