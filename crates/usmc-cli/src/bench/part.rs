//! The client and the server of the built-in workloads: this program again, in processes of their own, under the
//! library or not. Hidden from users.
//!
//! A part says lines on its standard output and hears lines on its standard input; [`super::pair`] is at the other
//! end. All calls on sockets are libc's own, because the library sees no others.

mod brief;
mod events;
mod flow;
mod foreign;
mod hold;
mod line;
mod lines;
mod ring;
pub mod spec;

use std::env;
use std::ffi::c_int;
use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde_json::Value;

use super::cpus;
use spec::{Role, Spec};

/// The first argument of a part's command line; the second is its [`Spec`] in JSON.
pub const NAME: &str = "bench-part";

/// Plays a part, if the command line is that of one, which is not for users and so not for clap.
pub fn requested() -> Option<Result<c_int>> {
    let mut args = env::args_os().skip(1);
    if args.next()? != NAME {
        return None;
    }
    let spec = args.next().and_then(|spec| spec.into_string().ok()).unwrap_or_default();
    Some(play(&spec).map(|()| 0))
}

fn play(spec: &str) -> Result<()> {
    let spec: Spec = serde_json::from_str(spec).context("this command is for `usmc bench`")?;
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot follow our parent")?;
    cpus::pin(&spec.cpus);
    // A peer that is gone is an error and no end without words.
    signal_hook::flag::register(signal_hook::consts::SIGPIPE, Arc::default()).context("SIGPIPE")?;
    match &spec.role {
        Role::ServeLines { connections } => lines::serve(&spec, *connections),
        Role::Exchange(exchange) => lines::exchange(&spec, exchange),
        Role::ServeEvents => events::serve(&spec),
        Role::Brief(brief) => brief::play(&spec, brief),
        Role::Hold(hold) => hold::play(&spec, hold),
        Role::Foreign { seconds } => foreign::play(&spec, *seconds),
        Role::Compute => loop {
            std::hint::spin_loop();
        },
        Role::Ring { seconds } => ring::play(&spec, *seconds),
        Role::Flow { streams, seconds } => flow::play(&spec, *streams, *seconds),
    }
}

/// Says a line to the driver.
fn say(word: &str, value: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &(word, value)).context("cannot speak")?;
    out.write_all(b"\n").and_then(|()| out.flush()).context("cannot speak")
}

/// Hears a word from the driver.
fn hear() -> Result<String> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).context("cannot hear")?;
    Ok(line.trim_end().to_owned())
}

/// Stays, with everything open, until the driver says otherwise or is gone.
fn rest() -> Result<()> {
    while !matches!(hear()?.as_str(), "end" | "") {}
    Ok(())
}

/// Says that all is ready and waits for the start; repeats `warm_up` as long as the driver wishes.
fn start(mut warm_up: impl FnMut() -> Result<()>) -> Result<()> {
    loop {
        say("begin", &Value::Null)?;
        match hear()?.as_str() {
            "go" => return Ok(()),
            "more" => warm_up()?,
            other => bail!("the driver says {other:?}"),
        }
    }
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(now).unwrap_or_default()
}
