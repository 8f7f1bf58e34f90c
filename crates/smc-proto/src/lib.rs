//! SMC (Shared Memory Communications) as a protocol: what its peers say to each other, and what
//! they do upon it. RFC 7609 (SMC-R version 1), SMC version 2 and 2.1 as the Linux kernel speaks
//! them, SMC-D.
//!
//! This crate is sans-IO: bytes and events in, bytes and actions out. It has no file descriptor, no
//! clock, no allocator, no unsafe code and no dependency, so all of it runs in tests with a fake
//! clock and a lossy pipe.
//!
//! In reading order:
//!
//! - [`ids`]: EID, GID, CHID, peer id and the small numbers; [`decline`]: every reason to decline.
//! - [`wire`]: the bytes. CLC, LLC, CDC, the TCP option.
//! - [`handshake`]: client and server of the CLC handshake.
//! - [`groups`]: which link group a connection joins, and when it begins one.
//! - [`link_group`]: the links of SMC-R, the keys of RMBs on them, and the LLC flows.
//! - [`cursor`]: positions in a ring that wraps; [`connection`]: a pair of rings, credits, urgent
//!   data and what CDC says of them; [`close`]: how a connection ends.
#![no_std]
#![forbid(unsafe_code)]

pub mod close;
pub mod connection;
pub mod cursor;
pub mod decline;
pub mod groups;
pub mod handshake;
pub mod ids;
pub mod link_group;
pub mod list;
pub mod wire;

#[cfg(test)]
extern crate std;
