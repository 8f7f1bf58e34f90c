//! What the fuzz targets share.

pub mod attacker;
pub mod input;
pub mod memory;
pub mod world;
