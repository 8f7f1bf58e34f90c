//! redis-server and redis-benchmark.

use std::cell::Cell;

use anyhow::{Context, Result, bail};

use super::{case, outcome};
use crate::bench::case::{Case, End, Needs, Outcome, Tier, needs, rate};
use crate::bench::host::{Start, World};
use crate::bench::mode::{ALL, Mode, NO_UNIX};
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] = &[
    needs("redis-server", "redis-server").at(End::Server),
    needs("redis-benchmark", "redis-tools").at(End::Client),
    needs("redis-cli", "redis-tools").at(End::Client),
];

/// The three.
pub fn cases() -> Vec<Case> {
    let get = rate("GET", "k/s");
    [
        (
            "c200-d1024",
            &["-c", "200", "-d", "1024"][..],
            100_000.0,
            Tier::Quick,
            get.in_words("redis GET, 200 connections"),
        ),
        ("c1", &["-c", "1"], 30_000.0, Tier::Standard, get.in_words("redis GET, one connection")),
        ("pipelined", &["-c", "50", "-P", "16"], 400_000.0, Tier::Standard, get),
    ]
    .into_iter()
    .map(|(name, options, requests, tier, get)| {
        let count = move |_: &World, seconds: f64| Ok((requests * seconds.max(1.0)) as u64);
        let measures = vec![rate("SET", "k/s"), get];
        Case { tier, modes: ALL, measures, ..one(name, options, Wanted::Some, count) }
    })
    .collect()
}

/// Those between two machines, of which some are a hundred times slower than others: what TCP does there says how many requests are
/// made.
pub fn between() -> Vec<Case> {
    [("c50", &["-c", "50"], 50), ("c1", &["-c", "1"], 1)]
        .into_iter()
        .map(|(name, options, connections)| {
            let known = Cell::new(None);
            let count = move |world: &World, seconds: f64| {
                let rate = match known.get() {
                    Some(rate) => rate,
                    None => tcp_rate(world, options)?,
                };
                known.set(Some(rate));
                Ok(((rate * seconds) as u64).max(LEAST))
            };
            let tier = Tier::Quick;
            Case { tier, ..one(name, options, Wanted::All(connections), count) }
        })
        .collect()
}

/// So many times the requests are made over uSMC: they would be over before anybody could look at the connections.
const FASTER: u64 = 8;
/// And by RDMA, which is faster than TCP in some places and slower in others.
const FASTER_BY_RDMA: u64 = 2;
/// Requests that tell the rate, and those that a run makes at least.
const TRIAL: u64 = 1000;
const LEAST: u64 = 500;

/// A case of so many requests as `count` says.
fn one(
    name: &str,
    options: &'static [&'static str],
    wanted: Wanted,
    count: impl Fn(&World, f64) -> Result<u64> + 'static,
) -> Case {
    let measures = vec![rate("SET", "k/s"), rate("GET", "k/s")];
    let load = move |world: &mut World, seconds: f64| {
        let requests = count(world, seconds)?;
        run(world, options, requests, wanted)
    };
    let server = move |world: &mut World| serve(world).map(|()| wanted);
    Case { server: Some(Box::new(server)), ..case("redis", name, NO_UNIX, measures, NEEDS, load) }
}

fn serve(world: &mut World) -> Result<()> {
    let (port, address) = (world.port.to_string(), world.address.to_string());
    let (path, dir) = (world.path("redis"), world.path(""));
    let at = match world.mode {
        Mode::Unix => ["--port", "0", "--unixsocket", &path],
        _ => ["--port", &port, "--bind", &address],
    };
    let quiet = ["--save", "", "--appendonly", "no", "--dir", &dir];
    // Without a password it talks to its own machine only, and whoever is let in can have it write files.
    let password = world.password.clone();
    let asks = ["--requirepass", &password];
    let asks = if password.is_empty() { &[] } else { &asks[..] };
    let server = [&["redis-server"], &at[..], &quiet, asks].concat();
    world.serve(&server, Some(&path), &Start::default())
}

/// The options that lead redis' clients to the server.
fn to(world: &World) -> Vec<String> {
    if world.mode == Mode::Unix {
        return vec!["-s".to_owned(), world.path("redis")];
    }
    let (address, port) = (world.address.to_string(), world.port.to_string());
    let mut words = ["-h", &address, "-p", &port].map(str::to_owned).to_vec();
    if !world.password.is_empty() {
        words.extend(["-a".to_owned(), world.password.clone()]);
    }
    words
}

/// Requests in a second that a client without the library makes.
fn tcp_rate(world: &World, options: &[&str]) -> Result<f64> {
    let (to, trial) = (to(world), TRIAL.to_string());
    let to: Vec<&str> = to.iter().map(String::as_str).collect();
    let what = ["-n", &trial, "-t", "get", "--csv"];
    let said = world.ask(&[&["redis-benchmark"], &to[..], options, &what].concat(), None)?;
    world.ask(&[&["redis-cli"], &to[..], &["config", "resetstat"]].concat(), None)?;
    figure(&said, "GET").with_context(|| format!("no rate in:\n{said}"))
}

/// A line of redis-benchmark's table.
fn figure(table: &str, command: &str) -> Option<f64> {
    let line = table.lines().find(|line| line.starts_with(&format!("\"{command}\"")))?;
    line.split(',').nth(1)?.trim_matches('"').parse().ok()
}

fn run(world: &mut World, options: &[&str], requests: u64, wanted: Wanted) -> Result<Outcome> {
    let requests = match world.mode {
        Mode::Usmc if world.is_by_rdma() => requests * FASTER_BY_RDMA,
        Mode::Usmc => requests * FASTER,
        _ => requests,
    };
    let to = to(world);
    let to: Vec<&str> = to.iter().map(String::as_str).collect();
    let count = requests.to_string();
    let what = ["-n", &count, "-t", "set,get", "--csv"];
    let client = [&["redis-benchmark"], &to[..], options, &what].concat();
    let load = world.load(&client, wanted, &Start::default())?;
    // Without system calls the rates can be so high that one wants to hear it from the server, too.
    let told = world.ask(&[&["redis-cli"], &to[..], &["info", "commandstats"]].concat(), None)?;
    for command in ["set", "get"] {
        if !told.contains(&format!("cmdstat_{command}:calls={requests},")) {
            bail!("redis-server did not count {requests} of {command}.\n{told}");
        }
    }
    let of = |command: &str| figure(&load.output, command).unwrap_or_default() / 1e3;
    outcome(["SET", "GET"].map(of).to_vec(), load, 2.0 * requests as f64)
}
