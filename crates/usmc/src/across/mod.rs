//! Connections that go from one process to another: fork(2), exec(2), exit(2), posix_spawn(3).

pub mod exec;
pub mod fork;
pub mod spawn;
