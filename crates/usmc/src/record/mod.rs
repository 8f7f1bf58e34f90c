//! What this process knows of one socket.

pub mod change_over;
pub mod clc_state;
pub mod conn;
pub mod kernel;
pub mod limit;
pub mod near;
pub mod numbers;
pub mod options;
pub mod order;
pub mod phase;
pub mod tuple;
pub mod users;
pub mod watched;
