//! Where DMBs lie.

pub mod segment;
