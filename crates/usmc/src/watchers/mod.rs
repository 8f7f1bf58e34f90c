//! Registrations with epoll sets: what a set is to tell, and what the kernel's set knows of it.

pub mod agent_ear;
pub mod asked;
pub mod asleep;
pub mod deferred;
pub mod entry;
pub mod epoll;
pub mod epoll_ctl;
pub mod habit;
pub mod hot;
pub mod nested;
pub mod report;
pub mod set;
