//! iperf3: a stream.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{case, outcome, whole};
use crate::bench::case::{Case, Needs, Outcome, needs, rate};
use crate::bench::host::{Start, World};
use crate::bench::mode::NO_UNIX;
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] = &[needs("iperf3", "iperf3")];

/// One stream.
pub fn cases() -> Vec<Case> {
    let measures = vec![rate("bandwidth", "MB/s").in_words("iperf3, a stream of bytes")];
    vec![Case { per: "KB", ..case("iperf3", "", NO_UNIX, measures, NEEDS, run) }]
}

fn run(world: &mut World, seconds: f64) -> Result<Outcome> {
    let (port, length) = (world.port.to_string(), whole(seconds).to_string());
    world.serve(&["iperf3", "-s", "-p", &port], None, &Start::default())?;
    let client = ["iperf3", "-c", "127.0.0.1", "-p", &port, "-t", &length, "-J"];
    let load = world.load(&client, Wanted::Some, &Start::default())?;
    let told: Value = serde_json::from_str(&load.output).context("iperf3 prints no JSON")?;
    let received = &told["end"]["sum_received"];
    let rate = received["bits_per_second"].as_f64().unwrap_or_default() / 8e6;
    let bytes = received["bytes"].as_f64().unwrap_or_default();
    outcome(vec![rate], load, bytes / 1e3)
}
