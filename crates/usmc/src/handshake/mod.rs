//! From TCP to the ring: offers, CLC, and the TCP option.

pub mod brief;
pub mod clc;
pub mod syn_option;
pub mod transition;
