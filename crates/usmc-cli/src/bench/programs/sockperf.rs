//! sockperf: latency and bandwidth of one connection.

use std::fs;

use anyhow::{Context, Result, bail};

use super::{case, number_after, outcome, whole};
use crate::bench::case::{Case, Needs, Outcome, Tier, cost, needs, rate};
use crate::bench::cpus::places;
use crate::bench::host::{Load, Start, World};
use crate::bench::mode::NO_UNIX;
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] = &[needs("sockperf", "sockperf")];
/// The largest round payload that it takes; the issue's.
const MESSAGE: usize = 64_000;
/// It reserves records by this rate and aborts beyond; its own maximum is too low for uSMC.
const RATE: &str = "--mps=4000000";

/// All of them.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (cores, cpus) in places(cpus) {
        for muxer in ["", "epoll"] {
            let name = format!("pp-14B/{}{cores}", if muxer.is_empty() { "" } else { "epoll/" });
            let own = cpus.clone();
            let measures = vec![cost("one way, median", "µs")];
            cases.push(Case {
                per: "message",
                tier: if muxer.is_empty() { Tier::Quick } else { Tier::Standard },
                ..case("sockperf", &name, NO_UNIX, measures, NEEDS, move |world, seconds| {
                    ping_pong(world, seconds, &own, muxer)
                })
            });
        }
    }
    let both = if cpus.len() > 1 { vec![cpus[0], cpus[cpus.len() - 1]] } else { cpus.to_vec() };
    let measures = vec![rate("bandwidth", "MB/s")];
    let run = move |world: &mut World, seconds| throughput(world, seconds, &both);
    cases.push(Case {
        per: "message",
        tier: Tier::Quick,
        ..case("sockperf", "tp-64000B", NO_UNIX, measures, NEEDS, run)
    });
    cases
}

fn run(world: &mut World, words: &[&str], cpus: &[usize], muxer: &str) -> Result<Load> {
    let port = world.port.to_string();
    let feed = world.path("feed");
    let at: Vec<&str> = if muxer.is_empty() {
        vec!["--tcp", "-i", "127.0.0.1", "-p", &port]
    } else {
        fs::write(&feed, format!("T:127.0.0.1:{port}\n")).context("cannot write")?;
        vec!["-f", &feed, "-F", muxer]
    };
    let ends =
        |end: usize| Start { cpus: &cpus[end.min(cpus.len() - 1)..][..1], ..Start::default() };
    world.serve(&[&["sockperf", "server"], &at[..]].concat(), None, &ends(0))?;
    let words = [&["sockperf", words[0]], &at[..], &words[1..]].concat();
    let load = world.load(&words, Wanted::Some, &ends(1))?;
    Ok(load)
}

fn ping_pong(world: &mut World, seconds: f64, cpus: &[usize], muxer: &str) -> Result<Outcome> {
    let length = whole(seconds).to_string();
    let load = run(world, &["ping-pong", "-t", &length, "-m", "14", RATE], cpus, muxer)?;
    if !load.output.contains("# dropped messages = 0; # duplicated messages = 0") {
        bail!("sockperf lost messages.\n{}", load.output);
    }
    let (median, _) = number_after(&load.output, "percentile 50.000")?;
    let (sent, _) = number_after(&load.output, "SentMessages=")?;
    outcome(vec![median], load, sent * 2.0)
}

fn throughput(world: &mut World, seconds: f64, cpus: &[usize]) -> Result<Outcome> {
    let (length, size) = (whole(seconds), MESSAGE.to_string());
    let words = ["throughput", "-t", &length.to_string(), "-m", &size];
    let load = run(world, &words, cpus, "")?;
    let (rate, _) = number_after(&load.output, "Message Rate is")?;
    outcome(vec![rate * MESSAGE as f64 / 1e6], load, rate * length)
}
