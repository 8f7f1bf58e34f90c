//! The owner of a host's RDMA: it has the devices, the queue pairs and the link groups, and moves the bytes of applications that know
//! nothing of it but their rings.
//!
//! [`adapter`] finds devices and has their completion queues; `link` is a queue pair with its memory; [`nic`] is what the engine
//! (`usmc_rdma`) sees of both; [`driver`] brings completions, CLC messages and time to the engine. [`rest`] is how its thread waits for them.
//! [`room`] is the memory that an application shares with it, and [`service`] its ends of the connections there.

pub mod adapter;
pub mod driver;
mod link;
pub mod nic;
pub mod rest;
pub mod room;
pub mod service;
