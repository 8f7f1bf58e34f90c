//! Readiness: what poll(2), select(2) and epoll(7) report for a connection whose bytes are in the ring.

mod asked;
mod asleep;
pub mod control;
pub mod entry;
pub mod epoll;
pub mod hot;
pub mod multi;
pub mod nested;
pub mod owed;
pub mod pollfds;
pub mod ready;
mod report;
mod scan;
