//! Looks of poll(2) and select(2) before they sleep: at shared memory, and at what is the kernel's alone.

use super::deadline::Deadline;
use super::epoll_wait::KERNEL_SPIN_NS;
use super::pollfds::{NOTHING, Watch, look, poll_now, watch};
use crate::host;
use crate::os::awake::Awake;
use crate::os::signals::Signals;
use crate::os::spin::Budget;
use crate::os::table::{self, Entry as Fd};
use crate::os::{clock, sys};
use crate::record::conn::{self, Conn};
use crate::watch::observer;

/// What a look before a sleep has come to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Looked {
    /// There was none.
    Not,
    /// Something has come.
    Found,
    /// Nothing has.
    InVain,
}

/// Looks for what the kernel has to tell before the call sleeps in it, where looks have proven better.
pub fn stay_awake(fds: &[libc::pollfd], deadline: Deadline, signals: &mut Signals) -> Looked {
    const MOST: usize = 16;
    let awake = Awake::get(|| deadline.left().unwrap_or(u64::MAX));
    let is_tcp = |p: &libc::pollfd| matches!(table::settled(p.fd), Fd::Conn(_));
    if !awake.looks() || fds.len() > MOST || !fds.iter().any(is_tcp) {
        return Looked::Not;
    }
    // Other threads may use the application's array.
    let mut own = [NOTHING; MOST];
    let own = &mut own[..fds.len()];
    own.copy_from_slice(fds);
    let mut is_ready = || sys::poll_now(own) > 0;
    if is_ready() || awake.until(signals, is_ready) { Looked::Found } else { Looked::InVain }
}

/// The connection in a ring that has the budget of the call's spins.
fn spinner(fds: &[libc::pollfd]) -> Option<&'static Conn> {
    fds.iter().find_map(|p| match watch(p.fd) {
        Watch::Ring(index) if p.fd >= 0 => Some(conn::at(index)),
        _ => None,
    })
}

/// What the call's sleeps teach, if there is a ring.
pub fn budget(fds: &[libc::pollfd]) -> Option<Budget<'static>> {
    spinner(fds).map(|conn| Budget::new(&conn.spins))
}

/// Spins on what shared memory may have to tell, and asks the kernel of the rest now and then. Whether there is something.
///
/// # Errors
/// The kernel has ended the call, as errno says.
pub fn spin(
    fds: &mut [libc::pollfd],
    deadline: Deadline,
    signals: &mut Signals,
) -> Result<bool, ()> {
    let Some(conn) = spinner(fds) else { return Ok(false) };
    let Some(slot) = conn.slot() else { return Ok(false) };
    let budget = Budget::new(&conn.spins);
    let peer_cpu = conn.peers_cpu(slot);
    let most_ns = deadline.left().unwrap_or(u64::MAX);
    let (mut kernel_at, mut has_failed) = (0, false);
    let ready = |now| {
        if fds.iter().any(|p| p.fd >= 0 && look(p) != 0) {
            return 1;
        }
        if kernel_at == 0 {
            kernel_at = now + KERNEL_SPIN_NS;
        }
        let is_kernels = |p: &libc::pollfd| p.fd >= 0 && !matches!(watch(p.fd), Watch::Ring(_));
        if now <= kernel_at || !fds.iter().any(is_kernels) {
            return 0;
        }
        let n = poll_now(fds);
        kernel_at = clock::now_ns() + KERNEL_SPIN_NS;
        has_failed = n < 0;
        u32::from(n != 0)
    };
    let cpus = (&conn.own(slot).cpu, peer_cpu);
    let found = budget.spin(most_ns, cpus, signals, host::own_word::keep, ready);
    if has_failed {
        return Err(());
    }
    if found {
        observer::spun(conn);
    }
    Ok(found)
}
