//! RDMA verbs.
pub mod sys;
