//! A libibverbs.so.1 without hardware, for tests on one host.
//!
//! A directory is "the fabric": `USMC_FAKE_VERBS` names it, and processes that share it reach each other, whatever their network
//! namespaces. Its file `fabric` says which devices there are and which faults hold ([`fabric::Fabric`] writes it). Each process has one thread
//! that is its device: it moves data and acknowledges it without the application, by UNIX sockets in the directory.
//!
//! What is as in a reliable connection of real devices: packets with sequence numbers, acknowledgements, repetition after a timeout, waits for
//! receives, keys, states, errors that flush both queues, completion events and asynchronous events. Data is read when it is sent, not
//! when it is posted, and places in a send queue are free when a completion has been polled.
//!
//! What is not: timing; and a process that stands still does not acknowledge, where a device would. It is no proof of what goes over a
//! wire. Losses are made by `fabric` only.
//!
//! | module | what |
//! |---|---|
//! | [`fabric`] | what tests write into the directory |
//! | `state` | what a process reads there |
//! | `wire`, `link` | packets, and the sockets that they go by |
//! | `memory`, `queues` | registered memory; completion queues, channels, asynchronous events |
//! | `pair`, `request`, `respond` | a queue pair: its states, what it sends, what it receives |
//! | `direct` | the way without packets, to measure what the rest costs |
//! | `nic` | all of a process, and its thread |
//! | `abi` | the exported functions |

mod abi;
mod direct;
pub mod fabric;
mod link;
mod memory;
mod nic;
mod pair;
mod queues;
mod request;
mod respond;
mod state;
mod wire;
