//! A thin, safe binding to libibverbs.so.1, which is opened at run time: where it is absent, RDMA is off and nothing else changes.
//!
//! The crate serves `usmc agent`, the one process of a user that owns RDMA devices; applications never load the library. It knows what
//! SMC-R needs: reliable connections (RC), WRITE and SEND, completion channels, asynchronous events. In the order of use:
//!
//! | module | what |
//! |---|---|
//! | [`library`] | opens the library and finds its functions |
//! | [`device`] | lists and opens devices; attributes of ports, the table of GIDs |
//! | [`pd`], [`mr`] | protection domains, and memory that a device may reach |
//! | [`cq`] | completion queues, and channels that wake a thread |
//! | [`qp`], [`post`] | queue pairs and their states; requests to send and to receive |
//! | [`event`] | what a device tells unasked |
//! | [`sys`] | the binary interface itself |
//!
//! An object holds what it depends on, so objects may be dropped in any order. They belong to one thread (they hold an `Rc`).
//! Posting, polling and arming neither allocate nor lock anything of this crate.

pub mod cq;
pub mod device;
pub mod error;
pub mod event;
mod gids;
pub mod library;
pub mod mr;
pub mod pd;
pub mod post;
pub mod qp;
pub mod sys;

pub use cq::{Channel, Completion, Cq, Opcode, Status};
pub use device::{Device, DeviceAttributes, Gid, GidEntry, GidType, Mtu, Port, PortState};
pub use error::Error;
pub use event::Event;
pub use library::Library;
pub use mr::{Access, Mr, Piece};
pub use pd::Pd;
pub use post::{Operation, PostError, Receive, Request, Source};
pub use qp::{Caps, Init, Path, Qp, QpState, Rtr, Rts};
