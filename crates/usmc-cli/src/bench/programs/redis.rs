//! redis-server and redis-benchmark.

use anyhow::{Result, bail};

use super::{case, outcome};
use crate::bench::case::{Case, Needs, Outcome, Tier, needs, rate};
use crate::bench::host::{Start, World};
use crate::bench::mode::{ALL, Mode};
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] =
    &[needs("redis-server", "redis-server"), needs("redis-benchmark", "redis-tools")];

/// The three.
pub fn cases() -> Vec<Case> {
    [
        ("c200-d1024", &["-c", "200", "-d", "1024"][..], 100_000.0, Tier::Quick),
        ("c1", &["-c", "1"], 30_000.0, Tier::Standard),
        ("pipelined", &["-c", "50", "-P", "16"], 400_000.0, Tier::Standard),
    ]
    .into_iter()
    .map(|(name, options, requests, tier)| {
        let measures = vec![rate("SET", "k/s"), rate("GET", "k/s")];
        let run = move |world: &mut World, seconds: f64| {
            run(world, options, (requests * seconds.max(1.0)) as u64)
        };
        Case { tier, ..case("redis", name, ALL, measures, NEEDS, run) }
    })
    .collect()
}

/// So many times the requests are made over uSMC: they would be over before anybody could look at the connections.
const FASTER: u64 = 8;

fn run(world: &mut World, options: &[&str], requests: u64) -> Result<Outcome> {
    let requests = if world.mode == Mode::Usmc { requests * FASTER } else { requests };
    let (port, path, dir) = (world.port.to_string(), world.path("redis"), world.path(""));
    let (at, to) = match world.mode {
        Mode::Unix => (["--port", "0", "--unixsocket", &path], vec!["-s", &path]),
        _ => (["--port", &port, "--bind", "127.0.0.1"], vec!["-h", "127.0.0.1", "-p", &port]),
    };
    let quiet = ["--save", "", "--appendonly", "no", "--dir", &dir];
    let server = [&["redis-server"], &at[..], &quiet].concat();
    world.serve(&server, Some(&path), &Start::default())?;
    let count = requests.to_string();
    let what = ["-n", &count, "-t", "set,get", "--csv"];
    let client = [&["redis-benchmark"], &to[..], options, &what].concat();
    let load = world.load(&client, Wanted::Some, &Start::default())?;
    // Without system calls the rates can be so high that one wants to hear it from the server, too.
    let told = world.ask(&[&["redis-cli"], &to[..], &["info", "commandstats"]].concat(), None)?;
    for command in ["set", "get"] {
        if !told.contains(&format!("cmdstat_{command}:calls={requests},")) {
            bail!("redis-server did not count {requests} of {command}.\n{told}");
        }
    }
    let of = |command: &str| -> Option<f64> {
        let line = load.output.lines().find(|line| line.starts_with(&format!("\"{command}\"")))?;
        line.split(',').nth(1)?.trim_matches('"').parse().ok()
    };
    let values = ["SET", "GET"].map(|command| of(command).unwrap_or_default() / 1e3);
    outcome(values.to_vec(), load, 2.0 * requests as f64)
}
