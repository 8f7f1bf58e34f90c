//! What this process knows of one socket.

pub mod clc_state;
pub mod conn;
pub mod kernel;
pub mod lasting;
pub mod limit;
pub mod numbers;
pub mod order;
pub mod phase;
pub mod tuple;
pub mod users;
pub mod watched;
