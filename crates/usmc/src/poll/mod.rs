//! Readiness: what poll(2), select(2) and epoll(7) report for a connection whose bytes are in the ring.

pub mod deadline;
pub mod deferred_events;
mod each;
pub mod epoll_wait;
pub mod inner;
mod looks;
pub mod pollfds;
pub mod scan;
