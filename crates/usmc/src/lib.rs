//! The stack: TCP's semantics over rings in shared memory.
//!
//! Read in the order a byte travels: [`api`] (one function per libc symbol) looks the fd up in [`table`],
//! [`socket`] and [`poll`] give it TCP's semantics, [`conn`] is the connection's record, [`transition`] moves
//! it from TCP to the ring, [`device`] is where both ends find each other. The rings themselves are
//! `usmc-shm`'s.
//!
//! No std and no alloc: we run inside other people's functions, also in their signal handlers.
#![cfg_attr(not(test), no_std)]

#[allow(
    clippy::missing_safety_doc,
    reason = "each function's contract is that of the libc function it is named after"
)]
pub mod api;
mod cache;
mod capture;
mod clc;
mod clock;
mod config;
mod conn;
mod custody;
mod device;
mod fork;
mod free_slots;
#[cfg(fuzzing)]
pub mod fuzzing;
mod holds;
mod kernel;
mod kernel_only;
mod lasting;
mod life;
mod linkmap;
mod log;
mod members;
mod memory;
pub mod observe;
mod observer;
mod order;
mod owner;
mod path;
mod pointers;
mod poll;
mod process;
pub mod real;
pub mod reason;
mod remote;
mod segment;
mod single;
mod socket;
mod spawn;
mod spin;
mod strangers;
pub mod syn_option;
mod sys;
mod table;
mod transition;
mod tuple;
mod unwind;
mod uring;
mod users;
mod yields;

use core::ffi::c_int;

pub use usmc_shm::tap;

/// libc's errno of this thread.
#[inline]
fn errno() -> c_int {
    // SAFETY: libc's per-thread location is always valid.
    unsafe { *libc::__errno_location() }
}

/// Sets libc's errno of this thread.
#[inline]
fn set_errno(code: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = code }
}

/// What the library's constructor does; see the order in `usmc-preload`'s `init.rs`.
///
/// # Safety
/// Called once, before any other thread exists.
pub unsafe fn init() {
    let saved = errno();
    real::resolve_all();
    process::refresh();
    fork::register();
    // SAFETY: the caller's contract.
    unsafe {
        log::init();
        config::load();
    }
    socket::adopt::inherited();
    set_errno(saved);
}

/// What the library's destructor does: leaves the device tidy. A killed process is swept by others.
pub fn exit() {
    if config::get().off || process::is_foreign_child() || kernel_only::is_sandboxed() {
        return;
    }
    socket::demote::before_exit();
    // An acceptor that lets go of its last connection looks whether the segment is retired.
    segment::leave();
    holds::end_but_for_streams();
    device::current().leave();
}
