//! `usmc top`: what connections under uSMC do now, as top(1) shows processes.

use std::ffi::c_int;
use std::io::{self, BufWriter, IsTerminal};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::sockets::Look;
use crate::top::app::{App, interval};
use crate::top::draw::Theme;
use crate::top::{batch, live};

/// Show what connections under uSMC do now
///
/// Shows connections and programs with their bytes and messages a second, how much goes through shared memory, and why the
/// rest is on TCP. h shows the keys.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without a terminal, tables are printed as by --batch.")]
pub struct Args {
    /// Time between looks, in seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    delay: Duration,
    /// End after COUNT intervals
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print plain tables, one after each interval
    #[arg(short, long)]
    batch: bool,
    /// Print a JSON object in a line after each interval
    #[arg(long)]
    json: bool,
    /// Begin with programs
    #[arg(short, long)]
    programs: bool,
    /// Show only what is on TCP
    #[arg(short, long)]
    tcp: bool,
    /// Show only rows with TEXT in their program, pid, addresses, mode, device or reason
    #[arg(short, long, value_name = "TEXT")]
    filter: Option<String>,
}

/// Shows until told to end.
///
/// # Errors
/// A terminal or an output that cannot be written, or /proc not read.
pub fn run(args: &Args) -> Result<c_int> {
    let mut app = App::new(args.delay);
    app.begin_with(args.programs, args.tcp, args.filter.as_deref());
    if args.batch || args.json || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return print(args, &mut app);
    }
    let has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    live::run(&mut app, Theme { has_colours }, args.count)?;
    Ok(0)
}

fn print(args: &Args, app: &mut App) -> Result<c_int> {
    let begin = Instant::now();
    let mut next = begin;
    let mut out = BufWriter::new(io::stdout().lock());
    app.model.take(Look::take()?, begin.elapsed());
    let mut done = 0;
    while args.count.is_none_or(|count| done < count) {
        next += args.delay;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        app.model.take(Look::take()?, begin.elapsed());
        let printed = match args.json {
            true => batch::print_json(&mut out, &app.model, &app.wish),
            false => batch::print(&mut out, &app.model, &app.wish),
        };
        printed.context("cannot write what was seen")?;
        done += 1;
    }
    Ok(0)
}
