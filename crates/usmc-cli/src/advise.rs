//! Which programs of this host talk to each other over TCP, how much, and whether they could do without: `usmc advise`.

mod commands;
mod look;
mod pairs;

pub use look::{Look, look};
pub use pairs::{Pair, Seen, pairs};
