//! The exporter: what `usmc ss` and `usmc stats` know, as metrics for Prometheus, and kept beyond the end of processes.
//!
//! [`tracked`] holds the record file of each process open, so that what it says last can be read once the process is gone; [`notice`]
//! says when processes begin, [`exits`] when they end. [`counts`] is what one process counts, [`ledger`] the sums, [`state`] their file.
//! [`gauges`] is what is open now, [`rdma`] what agents count. [`families`] names all metrics, [`exposition`] writes them, [`http`]
//! serves them, and [`work`] is the loop.

pub mod counts;
pub mod exits;
pub mod exposition;
pub mod families;
pub mod gauges;
pub mod http;
pub mod ledger;
pub mod notice;
pub mod rdma;
pub mod sampled;
pub mod state;
pub mod tracked;
pub mod work;

use std::io::{Write, stderr};

/// Writes a line to standard error, where there is one.
pub fn log(line: impl std::fmt::Display) {
    let _ = writeln!(stderr(), "usmc: {line}");
}
