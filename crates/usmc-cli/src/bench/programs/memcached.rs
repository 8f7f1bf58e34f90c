//! memcached and memaslap, which Debian calls memcaslap: nine GETs of 1 KB for each SET.

use anyhow::Result;

use super::{case, number_after, outcome, whole};
use crate::bench::case::{Case, Needs, Outcome, Tier, needs, rate};
use crate::bench::host::{Start, World};
use crate::bench::mode::NO_UNIX;
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] =
    &[needs("memcached", "memcached"), needs("memcaslap", "libmemcached-tools")];

/// With a connection and with several.
pub fn cases() -> Vec<Case> {
    [("c1", "1", "1"), ("c16", "16", "2")]
        .into_iter()
        .map(|(name, clients, threads)| {
            let run = move |world: &mut World, seconds| run(world, seconds, clients, threads);
            let measures = vec![rate("operations", "k/s")];
            let tier = if name == "c16" { Tier::Quick } else { Tier::Standard };
            Case { tier, ..case("memcached", name, NO_UNIX, measures, NEEDS, run) }
        })
        .collect()
}

fn run(world: &mut World, seconds: f64, clients: &str, threads: &str) -> Result<Outcome> {
    let port = world.port.to_string();
    // It does not start as root unless it is told to.
    let user = rustix::process::geteuid().is_root().then_some(["-u", "root"]);
    let user: Vec<&str> = user.into_iter().flatten().collect();
    let server = [&["memcached", "-l", "127.0.0.1", "-p", &port], &user[..]].concat();
    world.serve(&server, None, &Start::default())?;
    let (at, length) = (format!("127.0.0.1:{port}"), whole(seconds));
    let time = format!("{length}s");
    let client = ["memcaslap", "-s", &at, "-c", clients, "-T", threads, "-t", &time];
    let load = world.load(&client, Wanted::Some, &Start::default())?;
    let (rate, _) = number_after(&load.output, "TPS")?;
    outcome(vec![rate / 1e3], load, rate * length)
}
