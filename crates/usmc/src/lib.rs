//! The stack: TCP's semantics over rings in shared memory.
//!
//! The folders are layers: each imports only those above it in the list below (`tests/layers.rs`). A byte travels through them from the
//! last to the first: [`api`] has one function for each libc symbol, `poll` and `socket` give a connection TCP's semantics, `stream`
//! knows where its bytes are, `handshake` moves it from TCP to the ring, `host` is where both ends find each other, and `record` is
//! what this process knows of it. The rings themselves are `usmc-shm`'s.
//!
//! No std and no alloc: we run inside other people's functions, also in their signal handlers.
#![cfg_attr(not(test), no_std)]
#![allow(
    unreachable_pub,
    reason = "the folders are private: what is reached from outside is what is `pub` in this file; `fuzzing` opens more"
)]

mod os;

mod record;

mod host;

mod family;

mod device;

mod watch;

mod handshake;

mod stream;

mod watchers;

mod socket;

mod poll;

mod passing;

mod uring;

mod across;

#[allow(
    clippy::missing_safety_doc,
    reason = "each function's contract is that of the libc function it is named after"
)]
pub mod api;

#[cfg(fuzzing)]
pub mod fuzzing;

pub use device::memfd;
pub use device::region::provider;
pub use handshake::syn_option;
pub use os::{real, reason};
pub use usmc_shm::tap;
pub use watch::observe;

use across::{exec, fork};

use os::{config, errno, kernel_only, libc_streams, log, process, table};
use record::{conn, numbers, watched};

/// What the library's constructor does; see the order in `usmc-preload`'s `init.rs`.
///
/// # Safety
/// Called once, before any other thread exists.
pub unsafe fn init() {
    let _errno = errno::keep();
    process::AFTER_INTERRUPTION.set(socket::close::after_interruption);
    numbers::ENDED.set(socket::close::call_ended);
    conn::LIFE_LEFT.set(host::peer_words::let_go);
    watched::EXCHANGES.set(socket::deputy::exchange);
    watched::PHASE_CHANGED.set(watchers::epoll::phase_changed);
    watched::LEFT_RING.set(watchers::epoll::left_ring);
    libc_streams::SERVE.set(api::streams::serve);
    table::URING_DUPLICATED.set(uring::duplicated);
    table::URING_CLOSED.set(uring::closed);
    real::resolve_all();
    process::refresh();
    fork::register();
    // SAFETY: the caller's contract.
    unsafe {
        log::init();
        config::load();
    }
    passing::adopt::inherited();
}

/// What the library's destructor does: leaves the device tidy. A killed process is swept by others.
pub fn exit() {
    if config::get().off || process::is_foreign_child() || kernel_only::is_sandboxed() {
        return;
    }
    exec::end_handshakes();
    stream::fallback::before_exit();
    // An acceptor that lets go of its last connection looks whether the segment is retired.
    device::segment::leave();
    exec::end_but_for_streams();
    device::leave();
    host::current().leave();
}
