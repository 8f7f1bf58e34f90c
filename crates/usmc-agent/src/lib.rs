//! The owner of a host's RDMA: it has the devices, the queue pairs and the link groups, and moves the bytes of applications that know
//! nothing of it but their rings.
//!
//! [`adapter`] finds devices and has their completion queues; `link` is a queue pair with its memory; [`nic`] is what the engine
//! (`usmc_rdma`) sees of both; [`driver`] brings completions, CLC messages and time to the engine. [`rest`] is how its thread waits for them.
//! [`room`] is memory that a process shares with it, and `rooms` all of that; `deputy` is its end of one connection there, and [`service`]
//! those of all, with their handshakes, which wait their turn in `lines`. [`control`] is where processes come in, and [`agent`] all of it, with its end.

pub mod adapter;
pub mod agent;
pub mod control;
mod deputy;
pub mod driver;
mod ears;
mod lines;
mod link;
pub mod nic;
pub mod pnet;
pub mod report;
pub mod rest;
pub mod room;
pub mod rooms;
pub mod service;
pub mod sys;
