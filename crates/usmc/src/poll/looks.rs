//! Looks of poll(2) and select(2) at what is the kernel's alone, before they sleep in it.

use super::deadline::Deadline;
use super::pollfds::NOTHING;
use crate::os::awake::Awake;
use crate::os::signals::Signals;
use crate::os::sys;
use crate::os::table::{self, Entry as Fd};

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
