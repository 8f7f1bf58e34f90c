//! Readiness: what poll(2), select(2) and epoll(7) report for a connection whose bytes are in the ring.

pub mod asleep;
pub mod multi;
pub mod pollfds;
pub mod ready;
pub mod report;
pub mod scan;
