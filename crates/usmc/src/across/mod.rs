//! Connections that go from one process to another: exec, spawn, SCM_RIGHTS.

pub mod fork;
pub mod holds;
pub mod spawn;
