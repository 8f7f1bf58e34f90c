//! What `usmc ss`, `usmc stats` and `usmc dump` read.

pub mod capture;
pub mod observe;
pub mod observer;
