//! Several processes with the same end of a connection: which they are, and what they agree on.

pub mod holders;
pub mod liveness;
pub mod locks;
pub mod mark;
pub mod passed_on;
