//! Connections that go from one process to another: exec, spawn, SCM_RIGHTS.

pub mod adopt;
pub mod channel;
pub mod fetch;
pub mod holds;
pub mod passed;
pub mod spawn;
