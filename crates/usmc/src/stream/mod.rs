//! One direction of a connection: where its bytes are, how the other end is woken, how it ends, and how it goes back to TCP.

pub mod bells;
pub mod bulk;
pub mod drained;
pub mod due_ear;
pub mod ending;
pub mod fallback;
pub mod hearing;
pub mod peers_socket;
pub mod ready;
pub mod room;
pub mod state;
pub mod unheard;
pub mod unread;
pub mod unseen;
pub mod wait;
