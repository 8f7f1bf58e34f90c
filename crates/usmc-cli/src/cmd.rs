//! The commands, one file each.

pub mod bench;
pub mod check;
pub mod probe;
pub mod run;
pub mod ss;
