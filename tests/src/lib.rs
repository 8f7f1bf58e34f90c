//! Whole processes under test: real programs over loopback, under `usmc run` or over plain TCP.
//!
//! A [`Fixture`] is one test's world: a private ISM directory, its ports, its processes. It starts
//! programs as process groups of their own, bounds every wait, and takes everything down when it goes,
//! also when the test panics. [`Fixture::finish`] asserts that nothing is left. The C programs of
//! `programs/` are built once per run ([`build::program`]); `usmc` and the preload library likewise
//! ([`build::usmc`]).
//!
//! With `USMC_TESTS_PLAIN=1` everything runs over plain TCP, without the library: each test has to pass
//! that way too, or it does not test TCP's semantics.

pub mod api_server;
pub mod build;
pub mod cluster;
pub mod device;
pub mod docker;
pub mod draw;
pub mod fixture;
pub mod ivshmem;
pub mod lan;
pub mod leftovers;
pub mod memory;
pub mod netns;
pub mod network;
pub mod node;
pub mod process;
pub mod procfs;
pub mod qmp;
pub mod rdma;
pub mod region;
pub mod ss;
pub mod storm;
pub mod torture;
pub mod trips;
pub mod vm;

pub use draw::Draw;
pub use fixture::Fixture;
pub use process::Process;

use std::time::Duration;

/// How long a test may take unless it says otherwise.
pub const TEST_LIMIT: Duration = Duration::from_secs(60);

/// Whether everything runs over plain TCP, without the library.
pub fn is_plain() -> bool {
    flag("USMC_TESTS_PLAIN")
}

/// Whether an environment variable is set to something other than `0`.
pub fn flag(name: &str) -> bool {
    std::env::var(name).is_ok_and(|v| !v.is_empty() && v != "0")
}

/// A number from the environment, or its default.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}
