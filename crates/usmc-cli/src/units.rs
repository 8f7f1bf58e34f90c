//! Units of systemd: where their files are, what these say, and the drop-in that brings the library into a service.

pub mod dropin;
pub mod files;
pub mod group;
pub mod manager;
pub mod reader;
pub mod syscalls;

/// The name of the drop-in.
pub const DROP_IN: &str = "50-usmc.conf";
