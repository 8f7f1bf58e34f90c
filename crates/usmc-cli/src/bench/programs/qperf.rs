//! qperf: its latency and its bandwidth of TCP.

use anyhow::Result;

use super::{case, number_after, outcome, whole};
use crate::bench::case::{Case, Needs, Outcome, cost, needs, rate};
use crate::bench::host::{Load, Start, World};
use crate::bench::local::free_port;
use crate::bench::mode::NO_UNIX;
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] = &[needs("qperf", "qperf")];
/// Its default size of a message.
const MESSAGE: f64 = 65_536.0;

/// Both.
pub fn cases() -> Vec<Case> {
    let latency = case("qperf", "tcp_lat", NO_UNIX, vec![cost("one way", "µs")], NEEDS, latency);
    let measures = vec![rate("bandwidth", "MB/s")];
    let bandwidth = case("qperf", "tcp_bw", NO_UNIX, measures, NEEDS, bandwidth);
    vec![Case { per: "message", ..latency }, Case { per: "message", ..bandwidth }]
}

/// Its servers talk about the test at one port and run it at another, which is the one that is looked at.
fn run(world: &mut World, seconds: f64, test: &str) -> Result<Load> {
    let data = world.port.to_string();
    world.port = free_port(world.address)?;
    let port = world.port.to_string();
    world.serve(&["qperf", "-lp", &port], None, &Start::default())?;
    world.port = data.parse()?;
    let length = whole(seconds).to_string();
    let client = ["qperf", "-lp", &port, "-ip", &data, "-t", &length, "127.0.0.1", test];
    world.load(&client, Wanted::Some, &Start::default())
}

/// The figure and its unit's factor.
fn figure(output: &str, name: &str, units: &[(&str, f64)]) -> Result<f64> {
    let (number, rest) = number_after(output, name)?;
    let unit = rest.split_whitespace().next().unwrap_or_default();
    let factor = units.iter().find(|(name, _)| *name == unit).map(|(_, factor)| factor);
    Ok(number * factor.ok_or_else(|| anyhow::anyhow!("an unknown unit in:\n{output}"))?)
}

fn latency(world: &mut World, seconds: f64) -> Result<Outcome> {
    let load = run(world, seconds, "tcp_lat")?;
    let units = [("ns", 1e-3), ("us", 1.0), ("ms", 1e3)];
    let one_way = figure(&load.output, "latency", &units)?;
    let messages = whole(seconds) * 1e6 / one_way;
    outcome(vec![one_way], load, messages)
}

fn bandwidth(world: &mut World, seconds: f64) -> Result<Outcome> {
    let load = run(world, seconds, "tcp_bw")?;
    let units = [("KB/sec", 1e-3), ("MB/sec", 1.0), ("GB/sec", 1e3)];
    let rate = figure(&load.output, "bw  =", &units)?;
    let messages = whole(seconds) * rate * 1e6 / MESSAGE;
    outcome(vec![rate], load, messages)
}
