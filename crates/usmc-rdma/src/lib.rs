//! SMC-R as an engine: link groups, RMBs and connections of one host (RFC 7609, and SMC version 2 as the Linux kernel speaks it).
//!
//! It is sans-IO. It has no thread, no clock, no socket and no verbs: its caller moves CLC messages, completions and time, and
//! owns the RDMA devices behind [`nic::Nic`]. So all of it runs in tests with devices that lose links and reorder queue pairs.
//!
//! To an application the engine is the peer of a slot: the ring that it writes is the send buffer, the ring that it reads is the RMB
//! ([`buffers`]). Its bytes go by RDMA WRITE from the one into the peer's, and a CDC message behind them tells of it.
//!
//! In reading order: [`engine`] has the events that come in and go out; `clc` brings a connection to its place in a
//! link group; `seats`, `groups` and `link` are that place, and `llc` keeps it; `connection` moves the bytes, by the WRITEs of [`transfer`].
#![forbid(unsafe_code)]

pub mod buffers;
mod clc;
mod connection;
pub mod engine;
mod event;
mod groups;
mod link;
mod llc;
pub mod nic;
mod seats;
mod table;
mod timers;
pub mod transfer;
pub mod view;

pub use connection::{Came, ConnId, Memory};
pub use engine::{Config, Engine, RefusedWish, Wish};
pub use event::Event;
pub use groups::{GroupIndex, RMBS};
pub use link::{FOR_LLC, SENDS};
