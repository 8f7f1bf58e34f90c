//! What this process knows of one socket.

pub mod conn;
pub mod kernel;
pub mod lasting;
pub mod order;
pub mod tuple;
pub mod users;
