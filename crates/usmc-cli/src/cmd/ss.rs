//! `usmc ss`: who runs over what, and why not over shared memory; like ss(8) and smcss(8).

use std::ffi::c_int;
use std::io::{self, BufWriter, IsTerminal, Write};

use anyhow::{Context, Result};
use serde::Serialize;
use usmc::observe::Mode;
use usmc::reason::Reason;
use usmc::syn_option::Outcome;

use crate::regions::{Host, Regions, short};
use crate::sockets::{Life, Look, Program, Seen, address};
use crate::{proc, table};

/// Show sockets of programs under uSMC
///
/// Lists the TCP sockets of running programs under `usmc run`: whether their bytes move through shared
/// memory (SMCD), by RDMA (SMCR) or over TCP, and the reason for TCP.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without -a and -l, connected sockets are shown.\n\
                        Queues are bytes sent and not yet read; - where the other end cannot be seen.")]
pub struct Args {
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
    /// Show all sockets: connected, listening and others
    #[arg(short, long)]
    all: bool,
    /// Show listening sockets only
    #[arg(short, long, conflicts_with = "all")]
    listening: bool,
}

/// One line of output.
#[derive(Serialize, Debug)]
struct Row {
    pid: u32,
    comm: String,
    fd: u32,
    state: &'static str,
    local: String,
    peer: String,
    mode: &'static str,
    device: Option<String>,
    host: Option<Host>,
    fallback_reason: Option<String>,
    remedy: Option<&'static str>,
    tcp_option: Option<&'static str>,
    tx_bytes: Option<u64>,
    rx_bytes: Option<u64>,
    ring_size: Option<u32>,
    window: Option<u32>,
    tx_queued: Option<u64>,
    rx_queued: Option<u64>,
}

/// Lists the sockets.
///
/// # Errors
/// When /proc cannot be read or the output not be written.
pub fn run(args: &Args) -> Result<c_int> {
    let mut look = Look::take()?;
    for remark in &look.remarks {
        eprintln!("usmc: {remark}");
    }
    let mut shown: Vec<Seen> =
        std::mem::take(&mut look.sockets).into_iter().filter(|seen| args.wants(seen)).collect();
    let pid = |seen: &Seen| look.programs[seen.program].pid;
    shown.sort_by_key(|seen| (pid(seen), seen.socket.local, seen.socket.peer, seen.socket.fd));
    let mut regions = Regions::default();
    let rows: Vec<Row> =
        shown.iter().map(|seen| row(seen, &look.programs[seen.program], &mut regions)).collect();
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = if args.json { print_json(&mut out, &rows) } else { print_text(&mut out, &rows) };
    printed.and_then(|()| out.flush()).context("cannot write the list; free the output's disk")?;
    let is_read = !args.json && io::stderr().is_terminal();
    if let Some(hint) = hint(&rows).filter(|_| is_read) {
        eprintln!("{hint}");
    }
    if rows.is_empty() && !args.json {
        eprintln!("usmc: {}", args.nothing(look.programs.len()));
    }
    if look.hidden > 0 {
        let under = match look.hidden_under {
            0 => String::new(),
            n => format!(", {n} of them under uSMC,"),
        };
        eprintln!(
            "usmc: {} processes of other users{under} could not be inspected; run `sudo usmc ss` to see \
             them",
            look.hidden
        );
    }
    Ok(0)
}

/// For people: where it is said what to do.
fn hint(rows: &[Row]) -> Option<String> {
    // What has just begun is as it should be.
    let is_short = |row: &&Row| row.fallback_reason.as_deref() == Some(Reason::Short.text());
    let can_change = |row: &&Row| row.fallback_reason.is_some() && row.remedy.is_some();
    let count = rows.iter().filter(can_change).filter(|row| !is_short(row)).count();
    let sockets = if count == 1 { "1 is" } else { &format!("{count} are") };
    (count > 0).then(|| {
        format!(
            "usmc: {sockets} TCP for a reason that something can be done about: see usmc check --reasons, or docs/it-says-tcp.md"
        )
    })
}

impl Args {
    fn wants(&self, seen: &Seen) -> bool {
        match seen.life {
            Life::Listen => self.all || self.listening,
            Life::Init if seen.socket.peer.port() == 0 => self.all,
            _ => !self.listening,
        }
    }

    /// What there is where nothing is shown.
    fn nothing(&self, programs: usize) -> String {
        let of = |n: usize| if n == 1 { "1 program".to_owned() } else { format!("{n} programs") };
        match programs {
            0 => match proc::with_library() {
                0 => "no program runs under uSMC; start one by `usmc run -- PROGRAM`".to_owned(),
                n => format!("{} under uSMC, without a TCP socket so far", of(n)),
            },
            n if self.listening => format!("{} under uSMC, nothing listens", of(n)),
            n if self.all => format!("{} under uSMC, without an open TCP socket", of(n)),
            n => format!("{} under uSMC, no connections yet; -a shows listeners", of(n)),
        }
    }
}

fn row(seen: &Seen, program: &Program, regions: &mut Regions) -> Row {
    let s = &seen.socket;
    let ([tx_bytes, rx_bytes], [tx_queued, rx_queued]) = (seen.bytes(), seen.queued());
    let is_in_memory = s.mode == Mode::Smcd;
    Row {
        pid: program.pid,
        comm: program.comm.clone(),
        fd: s.fd,
        state: seen.life.name(),
        local: address(s.local),
        peer: address(s.peer),
        mode: seen.mode_name(),
        device: seen.device.clone(),
        host: is_in_memory.then(|| regions.other_end(program.pid, s)).flatten(),
        fallback_reason: seen.fallback_reason(),
        remedy: seen.remedy(),
        tcp_option: s.syn_option.and_then(option_name),
        tx_bytes,
        rx_bytes,
        ring_size: s.ring_size.filter(|_| s.mode != Mode::Tcp),
        window: (s.mode != Mode::Tcp).then_some(s.window),
        tx_queued,
        rx_queued,
    }
}

/// What the TCP option came to; `None` where it was not asked for, or nothing is known.
fn option_name(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Unarmed => None,
        Outcome::Undecided => Some("undecided"),
        Outcome::Speaks => Some("speaks"),
        Outcome::Silent => Some("silent"),
        Outcome::Echoed => Some("echoed"),
    }
}

fn print_json(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    if rows.is_empty() {
        return out.write_all(b"[]\n");
    }
    // One object a line, so that line tools work on it too.
    out.write_all(b"[")?;
    for (i, row) in rows.iter().enumerate() {
        out.write_all(if i == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *out, row)?;
    }
    out.write_all(b"\n]\n")
}

const COLUMNS: [table::Column; 14] = [
    ("State", false),
    ("Pid", true),
    ("Program", false),
    ("Local Address", false),
    ("Peer Address", false),
    ("Mode", false),
    ("Device", false),
    ("Host", false),
    ("Tx-Bytes", true),
    ("Rx-Bytes", true),
    ("Tx-Queue", true),
    ("Rx-Queue", true),
    ("Ring", true),
    ("Fallback-Reason", false),
];

fn print_text(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
    let cells = rows.iter().map(|r| {
        [
            r.state.to_owned(),
            r.pid.to_string(),
            r.comm.clone(),
            r.local.clone(),
            r.peer.clone(),
            r.mode.to_owned(),
            r.device.as_deref().map_or("-".to_owned(), short),
            r.host.as_ref().map_or("-".to_owned(), |host| proc::harmless(&host.to_string())),
            number(r.tx_bytes),
            number(r.rx_bytes),
            number(r.tx_queued),
            number(r.rx_queued),
            number(r.ring_size.map(u64::from)),
            r.fallback_reason.clone().unwrap_or("-".to_owned()),
        ]
    });
    table::print(out, &COLUMNS, cells)
}
