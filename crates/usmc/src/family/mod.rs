//! Several processes with the same end of a connection: which they are, and what they agree on.

pub mod custody;
pub mod holders;
pub mod life;
pub mod locks;
pub mod mark;
