//! The commands, one file each.

pub mod check;
pub mod ebpf;
pub mod probe;
pub mod run;
pub mod ss;
