//! The serving end of checks: a process under the library that accepts both connections of each.
//!
//! Each connection has a thread of its own, and there are few. Whoever connects is bounded in what it says, and in how long it takes.

use std::collections::HashMap;
use std::ffi::c_int;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::super::report::{Finding, Report, Style};
use super::facts::Facts;
use super::judge;
use super::trial::{self, End, PATIENCE};
use super::wire::{Answer, Hello, Outcome, PROTOCOL, Request, Side, Talk, Trouble, Wants, Welcome};

/// Connections at once.
const MOST: usize = 32;
/// The longest time that a check takes.
const CHECK: Duration = Duration::from_secs(60);
/// Round trips of a check.
const PINGS: usize = 10_000;
/// How long the end of the connection that was tried is waited for.
const ENDING: Duration = Duration::from_secs(2);

/// What the process that accepts is to do.
#[derive(Serialize, Deserialize, Debug)]
pub struct Plan {
    /// Where it listens.
    pub at: SocketAddr,
    /// Whether it ends with the first check.
    pub once: bool,
    /// `quiet`, `json` or neither.
    pub style: String,
    /// What it is.
    pub facts: Facts,
}

/// How a plan names a style.
pub fn named(style: Style) -> String {
    match style {
        Style::Quiet => "quiet",
        Style::Json => "json",
        Style::Full | Style::Brief => "full",
    }
    .to_owned()
}

fn style(name: &str) -> Style {
    match name {
        "quiet" => Style::Quiet,
        "json" => Style::Json,
        _ => Style::Full,
    }
}

/// What all threads have.
struct Server {
    plan: Plan,
    /// The checks that wait for a connection to try, by their tokens.
    waiting: Mutex<HashMap<String, Sender<Option<End>>>>,
    /// Who prints.
    printing: Mutex<()>,
    connections: AtomicUsize,
}

/// In the process that `usmc check --serve` becomes.
///
/// # Errors
/// As [`serve_here`]; the plan is none.
pub fn host(plan: &str) -> Result<c_int> {
    serve_here(&serde_json::from_str(plan).context("not a plan")?)
}

/// Serves until it is ended, or has served once.
///
/// # Errors
/// The place cannot be listened at, or the output not be written.
pub fn serve_here(plan: &Plan) -> Result<c_int> {
    let listener = listen(plan.at)?;
    let at = listener.local_addr().context("the listener has no address")?;
    let plan = Plan { at, facts: plan.facts.clone(), style: plan.style.clone(), once: plan.once };
    let port = at.port();
    let waits = format!("waits at {at}; in the other place: usmc check --connect HOST:{port}");
    match style(&plan.style) {
        Style::Full | Style::Brief => {
            let mut out = io::stdout().lock();
            writeln!(out, "{waits}").and_then(|()| out.flush()).context("cannot write")?;
        }
        Style::Json => eprintln!("usmc: {waits}"),
        Style::Quiet => {}
    }
    let (waiting, printing) = (Mutex::default(), Mutex::default());
    let server = Arc::new(Server { plan, waiting, printing, connections: AtomicUsize::new(0) });
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // Of the connection, or of a limit that will pass.
            Err(_) => {
                thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        if server.connections.fetch_add(1, Ordering::Relaxed) >= MOST {
            server.connections.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let of_thread = Arc::clone(&server);
        let started = thread::Builder::new().spawn(move || {
            of_thread.receive(stream);
            of_thread.connections.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            server.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// All addresses of both versions of IP, where the kernel has both.
fn listen(at: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(at);
    let is_any = at.ip().is_unspecified() && at.is_ipv6();
    let bound = match bound {
        Err(_) if is_any => TcpListener::bind((Ipv4Addr::UNSPECIFIED, at.port())),
        bound => bound,
    };
    bound.with_context(|| format!("cannot listen at {at}; choose a port that nobody has"))
}

impl Server {
    fn receive(&self, stream: TcpStream) {
        let Ok(peer) = stream.peer_addr() else { return };
        let Ok(local) = stream.local_addr() else { return };
        let Ok(mut talk) = Talk::new(stream) else { return };
        match talk.hear::<Hello>(soon()) {
            Ok(Hello { usmc_check: PROTOCOL, wants }) => match wants {
                Wants::Check(side) => self.check(&mut talk, &side, (local, peer)),
                Wants::Trial(token) => self.try_it(&mut talk, &token),
            },
            Ok(Hello { usmc_check, .. }) => {
                let what = format!("{peer} asks for a check of another version ({usmc_check})");
                self.note(Finding::note(what, "use one version of uSMC at both ends"));
            }
            // As a probe of whether the port is open.
            Err(Trouble::Ended) => {}
            Err(trouble) => {
                let what = format!("{peer} is no `usmc check --connect`: {trouble}");
                self.note(Finding::note(what, "nothing, unless it was to be one"));
            }
        }
    }

    fn note(&self, finding: Finding) {
        let mut out = Vec::new();
        let mut report = Report::new(&mut out, style(&self.plan.style));
        let _ = report.title("Somebody else").and_then(|()| report.add([finding]));
        self.print(&out);
    }

    fn print(&self, text: &[u8]) {
        let _one = self.printing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = io::stdout().lock();
        if out.write_all(text).and_then(|()| out.flush()).is_err() {
            eprintln!("usmc: cannot write the report; free the output's disk");
            process::exit(1);
        }
    }

    /// The connection that is tried, of the check with this token.
    fn try_it(&self, talk: &mut Talk, token: &str) {
        let waiting = self.waiting().remove(token);
        let Some(check) = waiting else { return };
        let dir = PathBuf::from(&self.plan.facts.directory);
        let _ = check.send(trial::serve(talk, &dir, Instant::now() + CHECK));
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, HashMap<String, Sender<Option<End>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, talk: &mut Talk, them: &Side, (local, peer): (SocketAddr, SocketAddr)) {
        let us = Side { facts: self.plan.facts.clone(), local, peer };
        let token = token();
        let (tell, told) = channel();
        self.waiting().insert(token.clone(), tell);
        let concluded = converse(talk, &us, &token, &told);
        self.waiting().remove(&token);
        let mut out = Vec::new();
        let works =
            report(&mut out, style(&self.plan.style), (&us, them), &concluded).unwrap_or(false);
        self.print(&out);
        if self.plan.once {
            process::exit(c_int::from(!works));
        }
    }
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn token() -> String {
    let mut bytes = [0; 16];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    debug_assert_eq!(got, Ok(bytes.len()));
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The conversation up to what both ends have seen: the other end's account, and this end of the connection that was tried.
fn converse(
    talk: &mut Talk,
    us: &Side,
    token: &str,
    told: &Receiver<Option<End>>,
) -> Result<(Outcome, Option<End>), Trouble> {
    let until = Instant::now() + CHECK;
    let welcome = Welcome { usmc_check: PROTOCOL, side: us.clone(), token: token.to_owned() };
    talk.say(&welcome, soon())?;
    for _ in 0..PINGS {
        match talk.hear(until)? {
            Request::Ping(text) => talk.say(&Request::Ping(text), soon())?,
            Request::Done(outcome) => {
                let end = told.recv_timeout(ENDING).ok().flatten();
                talk.say(&Answer { end: end.clone() }, soon())?;
                return Ok((*outcome, end));
            }
        }
    }
    Err(Trouble::Foreign("more than a check has to say".to_owned()))
}

/// What this end prints of a check.
fn report(
    out: &mut Vec<u8>,
    style: Style,
    (us, them): (&Side, &Side),
    concluded: &Result<(Outcome, Option<End>), Trouble>,
) -> io::Result<bool> {
    let mut report = Report::new(out, style);
    report.title(format_args!("Check from {}", us.peer))?;
    report.add(us.facts.problem.as_ref().map(|problem| {
        let fact = format!("this end is not able to leave TCP: {problem}");
        Finding::failure(fact, "see `usmc check`")
    }))?;
    report.add(judge::places(us, them))?;
    let works = match concluded {
        Ok((outcome, end)) => {
            let theirs = outcome.end.as_ref();
            let works = judge::works(end.as_ref(), theirs, outcome);
            report.add(judge::tried(end.as_ref(), theirs, outcome))?;
            report.verdict(judge::verdict(end.as_ref(), works))?;
            works
        }
        Err(trouble) => {
            let fact = format!("the other end did not say what it has seen: {trouble}");
            report.add([Finding::failure(fact, "see what it has printed, and try again")])?;
            report.verdict("Nothing can be said of connections from there.")?;
            false
        }
    };
    report.end(works)?;
    Ok(works)
}
