//! PostgreSQL, a process for each connection, and pgbench -S.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::{case, number_after, outcome, whole};
use crate::bench::case::{Case, Needs, Outcome, Tier, needs, rate};
use crate::bench::host::{Start, World};
use crate::bench::mode::{ALL, Mode};
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] = &[needs("postgres", "postgresql"), needs("pgbench", "postgresql")];
/// The server refuses to run as root.
const USER: &str = "postgres";

/// With one client and with several.
pub fn cases() -> Vec<Case> {
    let transactions = rate("transactions", "k/s");
    let one = transactions.in_words("PostgreSQL, one connection");
    let eight = transactions.in_words("PostgreSQL, 8 connections");
    [("c1", "1", "1", one), ("c8", "8", "2", eight)]
        .into_iter()
        .map(|(name, clients, threads, transactions)| {
            let run = move |world: &mut World, seconds| run(world, seconds, clients, threads);
            let tier = if name == "c8" { Tier::Quick } else { Tier::Standard };
            Case {
                tier,
                per: "transaction",
                ..case("pgbench", name, ALL, vec![transactions], NEEDS, run)
            }
        })
        .collect()
}

/// Where its programs are: in nobody's PATH, by version.
pub fn directory() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let mut found: Vec<PathBuf> = versions.flatten().map(|e| e.path().join("bin")).collect();
    found.retain(|dir| dir.join("postgres").exists());
    found.sort();
    found.pop()
}

fn run(world: &mut World, seconds: f64, clients: &str, threads: &str) -> Result<Outcome> {
    let programs = directory().context("PostgreSQL is not installed")?;
    let program = |name: &str| programs.join(name).display().to_string();
    world.give_to(USER)?;
    let (data, dir, port) = (world.path("data"), world.path(""), world.port.to_string());
    let init = [&program("initdb"), "-A", "trust", "-U", USER, "--no-sync", "-D", &data];
    world.ask(&init, Some(USER))?;
    let server = program("postgres");
    let server = [&server, "-D", &data, "-p", &port, "-h", "127.0.0.1", "-k", &dir, "-F"];
    let start = Start { user: Some(USER), stop: Some(Signal::QUIT), ..Start::default() };
    world.serve(&server, Some(&world.path(&format!(".s.PGSQL.{port}"))), &start)?;
    let host = if world.mode == Mode::Unix { &dir } else { "127.0.0.1" };
    let to = ["-h", host, "-p", &port, "-U", USER];
    // The server listens before it serves.
    let ready = program("pg_isready");
    world.wait_until(&[&[&ready[..]], &to[..], &["-q"]].concat(), Some(USER))?;
    let pgbench = program("pgbench");
    let fill = [&[&pgbench[..]], &to[..], &["-i", "-q", USER]].concat();
    world.ask(&fill, Some(USER))?;
    let length = whole(seconds);
    let words = length.to_string();
    let options = ["-n", "-S", "-c", clients, "-j", threads, "-T", &words, USER];
    let client = [&[&pgbench[..]], &to[..], &options].concat();
    let load = world.load(&client, Wanted::Some, &start)?;
    let (rate, _) = number_after(&load.output, "tps =")?;
    outcome(vec![rate / 1e3], load, rate * length)
}
