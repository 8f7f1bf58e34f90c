//! What carries a run's bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The three that are compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The kernel's TCP over 127.0.0.1.
    Tcp,
    /// UNIX stream sockets.
    Unix,
    /// The same program and addresses as TCP, started as `usmc run` starts it.
    Usmc,
}

/// How uSMC's connections between two machines may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// By whatever memory both ends have: a region, or their agents'.
    Any,
    /// By RDMA, from one agent to the other.
    Rdma,
}

/// All that can be had.
pub const ALL: &[Mode] = &[Mode::Tcp, Mode::Unix, Mode::Usmc];
/// Where a program has no UNIX sockets, or they would not be the same.
pub const NO_UNIX: &[Mode] = &[Mode::Tcp, Mode::Usmc];

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Mode::Tcp => "TCP",
            Mode::Unix => "UNIX",
            Mode::Usmc => "uSMC",
        })
    }
}
