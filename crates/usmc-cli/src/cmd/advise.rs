//! `usmc advise`: which programs of this host talk to each other over TCP, and what brings them into shared memory.

use std::ffi::c_int;
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::advise::{self, Look, Pair, Seen};
use crate::table;

/// Say which programs would gain from uSMC, and how to start them
///
/// Looks twice at the TCP connections of this host whose both ends are here, and changes nothing. For each pair of programs it
/// prints what they moved meanwhile, whether they can leave TCP, and the commands for it.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Wake-ups are an estimate: no more than the segments that arrived, and no more than the receiver's sleeps \
                  (voluntary context switches) meanwhile. Connections that end between the looks are not counted."
)]
pub struct Args {
    /// Time between the looks
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    seconds: f64,
    pairs: &'a [Pair],
    idle_pairs: usize,
    hidden_processes: usize,
    hidden_network_namespaces: usize,
}

/// Looks, waits, looks again, and prints.
///
/// # Errors
/// When the output cannot be written.
pub fn run(args: &Args) -> Result<c_int> {
    let begun = Instant::now();
    let before = advise::look();
    thread::sleep(Duration::from_secs(args.seconds));
    let after = advise::look();
    let between = begun.elapsed();
    let seen = advise::pairs(&before, &after, between);
    let mut out = io::stdout().lock();
    let printed = if args.json {
        let report = Report {
            seconds: between.as_secs_f64(),
            pairs: &seen.pairs,
            idle_pairs: seen.idle,
            hidden_processes: after.hidden,
            hidden_network_namespaces: after.hidden_nets,
        };
        table::json(&mut out, &report)
    } else {
        print(&mut out, &seen, &after)
    };
    printed.context("cannot write the report; free the output's disk")?;
    Ok(0)
}

fn print(out: &mut impl Write, seen: &Seen, look: &Look) -> io::Result<()> {
    for pair in &seen.pairs {
        let connections = if pair.connections == 1 { "connection" } else { "connections" };
        writeln!(
            out,
            "{}, port {} <- {} {connections} of {}",
            pair.server.text(),
            pair.port,
            pair.connections,
            pair.client.text()
        )?;
        writeln!(
            out,
            "    {} segments/s, {} B/s; estimate: at most {} wake-ups/s less",
            pair.segments_per_second, pair.bytes_per_second, pair.wake_ups_per_second_at_most
        )?;
        for line in advice(pair) {
            writeln!(out, "    {line}")?;
        }
    }
    match (seen.pairs.len(), seen.idle) {
        (0, 0) => writeln!(out, "no connection that was seen has both ends on this host")?,
        (_, 0) => {}
        (0, idle) => writeln!(out, "{idle} pairs of programs are connected, and moved nothing")?,
        (_, idle) => writeln!(out, "{idle} more pairs of programs moved nothing")?,
    }
    if look.hidden > 0 || look.hidden_nets > 0 {
        writeln!(
            out,
            "not seen: {} processes of other users, {} network namespaces; run `sudo usmc advise` to see them",
            look.hidden, look.hidden_nets
        )?;
    }
    Ok(())
}

fn advice(pair: &Pair) -> Vec<String> {
    let ends = [&pair.server, &pair.client];
    if let Some((end, why)) = ends.iter().find_map(|end| Some((end, end.obstacle.as_ref()?))) {
        return vec![format!("stays TCP: {}: {why}", end.program)];
    }
    if ends.iter().all(|end| end.library == Some(true)) {
        return vec![
            "both are under uSMC; `usmc ss` says which connections are in shared memory".to_owned(),
        ];
    }
    pair.commands.clone()
}
