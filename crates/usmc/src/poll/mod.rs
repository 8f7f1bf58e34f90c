//! Readiness: what poll(2), select(2) and epoll(7) report for a connection whose bytes are in the ring.

pub mod epoll_wait;
pub mod inner;
pub mod owed_events;
pub mod pollfds;
pub mod scan;
