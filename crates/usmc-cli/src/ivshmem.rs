//! The server of QEMU's ivshmem-doorbell devices: hands the memory of a region and doorbells to virtual machines, and says
//! which of them are dead.
//!
//! [`server`] is the loop. [`view`] decides which message a client is told next, and knows no descriptor. [`memory`] is the region,
//! [`socket`] makes sockets and passes descriptors, [`systemd`] keeps descriptors over a restart, [`kept`] what belongs to
//! them. [`report`] is what a host process can ask.

pub mod kept;
pub mod memory;
pub mod report;
pub mod server;
pub mod socket;
pub mod systemd;
pub mod view;

use std::io::{Write, stderr};

/// Most clients at one time.
pub const CLIENTS: usize = 64;
/// Most vectors of a client.
pub const VECTORS: u8 = 16;

/// Writes a line to standard error, where there is one.
pub fn log(line: impl std::fmt::Display) {
    let _ = writeln!(stderr(), "usmc: {line}");
}
