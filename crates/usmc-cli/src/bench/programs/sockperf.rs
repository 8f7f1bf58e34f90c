//! sockperf: latency and bandwidth of one connection.

use std::fs;

use anyhow::{Context, Result, bail};

use super::{case, number_after, outcome, whole};
use crate::bench::case::{Case, Measure, Needs, Outcome, Tier, cost, needs, rate};
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
            cases.push(ping_pong(&name, &cpus, muxer, Wanted::Some));
        }
    }
    let both = if cpus.len() > 1 { vec![cpus[0], cpus[cpus.len() - 1]] } else { cpus.to_vec() };
    cases.push(throughput(&both, Wanted::Some));
    cases
}

/// Those between two machines.
pub fn between() -> Vec<Case> {
    let one = Wanted::All(1);
    vec![ping_pong("pp-14B", &[], "", one), throughput(&[], one)]
}

/// Where its two ends are, and how the server waits.
#[derive(Clone)]
struct Ends {
    cpus: Vec<usize>,
    muxer: &'static str,
    wanted: Wanted,
}

impl Ends {
    fn start(&self, end: usize) -> Start<'_> {
        let own = self.cpus.get(end).or(self.cpus.last());
        Start { cpus: own.map_or(&[], std::slice::from_ref), ..Start::default() }
    }

    /// Options that lead to the server.
    fn at(&self, world: &World) -> Result<Vec<String>> {
        let (address, port) = (world.address.to_string(), world.port.to_string());
        let feed = world.path("feed");
        if self.muxer.is_empty() {
            return Ok(["--tcp", "-i", &address, "-p", &port].map(str::to_owned).to_vec());
        }
        fs::write(&feed, format!("T:{address}:{port}\n")).context("cannot write")?;
        Ok(["-f", &feed, "-F", self.muxer].map(str::to_owned).to_vec())
    }

    fn serve(&self, world: &mut World) -> Result<Wanted> {
        let at = self.at(world)?;
        let at = at.iter().map(String::as_str);
        let words: Vec<&str> = ["sockperf", "server"].into_iter().chain(at).collect();
        world.serve(&words, None, &self.start(0))?;
        Ok(self.wanted)
    }

    fn load(&self, world: &mut World, words: &[&str]) -> Result<Load> {
        let at = self.at(world)?;
        let at: Vec<&str> = at.iter().map(String::as_str).collect();
        let words = [&["sockperf", words[0]], &at[..], &words[1..]].concat();
        world.load(&words, self.wanted, &self.start(1))
    }
}

fn one(
    name: &str,
    tier: Tier,
    measure: Measure,
    ends: Ends,
    run: impl Fn(&mut World, f64, &Ends) -> Result<Outcome> + 'static,
) -> Case {
    let server = ends.clone();
    Case {
        per: "message",
        tier,
        server: Some(Box::new(move |world| server.serve(world))),
        ..case("sockperf", name, NO_UNIX, vec![measure], NEEDS, move |world, seconds| {
            run(world, seconds, &ends)
        })
    }
}

fn ping_pong(name: &str, cpus: &[usize], muxer: &'static str, wanted: Wanted) -> Case {
    let ends = Ends { cpus: cpus.to_vec(), muxer, wanted };
    let tier = if muxer.is_empty() { Tier::Quick } else { Tier::Standard };
    let way = cost("one way, median", "µs");
    let way = match name {
        "pp-14B/two-cores" => way.in_words("a 14-byte message, two cores"),
        "pp-14B/one-core" => way.in_words("a 14-byte message, one core"),
        _ => way,
    };
    one(name, tier, way, ends, |world, seconds, ends| {
        let length = whole(seconds).to_string();
        let load = ends.load(world, &["ping-pong", "-t", &length, "-m", "14", RATE])?;
        if !load.output.contains("# dropped messages = 0; # duplicated messages = 0") {
            bail!("sockperf lost messages.\n{}", load.output);
        }
        let (median, _) = number_after(&load.output, "percentile 50.000")?;
        let (sent, _) = number_after(&load.output, "SentMessages=")?;
        outcome(vec![median], load, sent * 2.0)
    })
}

fn throughput(cpus: &[usize], wanted: Wanted) -> Case {
    let ends = Ends { cpus: cpus.to_vec(), muxer: "", wanted };
    let measure = rate("bandwidth", "MB/s");
    one("tp-64000B", Tier::Quick, measure, ends, |world, seconds, ends| {
        let (length, size) = (whole(seconds), MESSAGE.to_string());
        let words = ["throughput", "-t", &length.to_string(), "-m", &size];
        let load = ends.load(world, &words)?;
        let (rate, _) = number_after(&load.output, "Message Rate is")?;
        outcome(vec![rate * MESSAGE as f64 / 1e6], load, rate * length)
    })
}
