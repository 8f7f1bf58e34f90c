//! Connections whose descriptors come into a process or leave it: SCM_RIGHTS, pidfd_getfd(2), and what a program is started with.

pub mod adopt;
pub mod channel;
pub mod passed;
