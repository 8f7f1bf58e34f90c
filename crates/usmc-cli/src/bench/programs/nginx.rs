//! nginx with one worker, and wrk.

use std::fs;

use anyhow::{Context, Result, bail};

use super::{case, number_after, outcome, whole};
use crate::bench::case::{Case, Needs, Outcome, Tier, needs, rate};
use crate::bench::host::{Start, World};
use crate::bench::mode::NO_UNIX;
use crate::bench::proof::Wanted;

const NEEDS: &[Needs] = &[needs("nginx", "nginx-light"), needs("wrk", "wrk")];
/// Connections at a time, and wrk's threads.
const KEEP_ALIVE: [usize; 4] = [1, 10, 200, 1000];
const CLOSE: [usize; 6] = [1, 2, 5, 10, 200, 2000];
const THREADS: [usize; 3] = [1, 4, 8];
/// Bytes of the page.
const PAGE: usize = 1024;

/// All of them.
pub fn cases() -> Vec<Case> {
    let keep = KEEP_ALIVE.map(|c| (c, 1, false)).into_iter();
    let close = CLOSE.into_iter().flat_map(|c| THREADS.map(|t| (c, t, true)));
    keep.chain(close.filter(|(c, t, _)| t <= c)).map(|(c, t, close)| one(c, t, close)).collect()
}

fn one(connections: usize, threads: usize, close: bool) -> Case {
    let variant = match close {
        true => format!("close/c{connections}-t{threads}"),
        false => format!("keep-alive/c{connections}"),
    };
    let is_quick = matches!((connections, threads, close), (10, 1, false) | (200, 1, true));
    let tier = if is_quick { Tier::Quick } else { Tier::Standard };
    let requests = rate("requests", "k/s");
    let requests = match (connections, threads, close) {
        (200, 1, false) => requests.in_words("nginx, 200 connections"),
        (10, 4, true) => requests.in_words("nginx, a new connection each time"),
        _ => requests,
    };
    let run = move |world: &mut World, seconds| run(world, seconds, connections, threads, close);
    Case { tier, ..case("nginx", &variant, NO_UNIX, vec![requests], NEEDS, run) }
}

fn configuration(world: &World) -> String {
    let (dir, port) = (world.scratch.display(), world.port);
    // Workers that drop root's rights could open neither the ISM directory nor the page.
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let places: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {dir}/{kind};\n"))
        .concat();
    format!(
        "daemon off;\nworker_processes 1;\npid {dir}/nginx.pid;\n{user}\n\
         events {{ worker_connections 8192; }}\n\
         http {{\naccess_log off;\nsendfile on;\nkeepalive_requests 100000000;\n{places}\
         server {{ listen 127.0.0.1:{port} backlog=4096; root {dir}/www; }}\n}}\n"
    )
}

fn run(
    world: &mut World,
    seconds: f64,
    connections: usize,
    threads: usize,
    close: bool,
) -> Result<Outcome> {
    let pages = world.scratch.join("www");
    fs::create_dir(&pages).context("cannot make a directory")?;
    fs::write(pages.join("page"), [b'x'; PAGE]).context("cannot write")?;
    let config = world.path("nginx.conf");
    fs::write(&config, configuration(world)).context("cannot write")?;
    let prefix = world.path("");
    let server = ["nginx", "-e", "stderr", "-p", &prefix, "-c", &config];
    world.serve(&server, None, &Start::default())?;
    let length = whole(seconds);
    let words = [connections.to_string(), threads.to_string(), length.to_string()];
    let url = format!("http://127.0.0.1:{}/page", world.port);
    let mut client = vec!["wrk", "-c", &words[0], "-t", &words[1], "-d", &words[2]];
    if close {
        client.extend(["-H", "Connection: close"]);
    }
    client.push(&url);
    let wanted = if close { Wanted::Ready } else { Wanted::Some };
    let load = world.load(&client, wanted, &Start::default())?;
    let errors = load.output.lines().find(|line| line.contains("Socket errors"));
    // A timeout is a long wait in a queue, and no error of the connection.
    let is_late = |line: &str| line.contains("connect 0, read 0, write 0,");
    if load.output.contains("Non-2xx") || errors.is_some_and(|line| !is_late(line)) {
        bail!("wrk saw errors.\n{}", load.output);
    }
    let (rate, _) = number_after(&load.output, "Requests/sec")?;
    outcome(vec![rate / 1e3], load, rate * length)
}
