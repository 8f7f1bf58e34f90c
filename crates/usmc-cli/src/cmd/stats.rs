//! `usmc stats`: what connections under uSMC have done, in the words of smcd-stats(8).

use std::ffi::c_int;
use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use usmc::observe::{BUFFERS, State};
use usmc::reason::Reason;

use crate::agent::{self, AgentCounts};
use crate::config::{Config, ConfigArgs};
use crate::groups::Who;
use crate::observed::Reading;
use crate::regions::{device_name, short};
use crate::{machine, observed, proc, table};

/// Show statistics of connections under uSMC
///
/// Counted are all connections of running processes since these began, by device or by process.
#[derive(clap::Args, Debug)]
#[command(after_help = "Processes that have ended are not counted any more.")]
pub struct Args {
    /// show, which may be left out, or json, which is --json
    #[arg(value_name = "show", value_parser = ["show", "json"])]
    verb: Option<String>,
    /// Show more, and by both ends
    #[arg(short, long)]
    details: bool,
    /// Show each process by itself
    #[arg(long)]
    processes: bool,
    /// Show process PID only
    #[arg(short, long, value_name = "PID")]
    pid: Option<u32>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// What a process or several have counted. Bytes and calls of connections in a ring only.
#[derive(Clone, Default, PartialEq, Debug, Serialize)]
struct Stats {
    /// In a ring, now or before.
    smc_connections: Roles,
    /// Never in a ring.
    tcp_fallback: Roles,
    handshake_errors: Roles,
    fallback_reasons: Vec<Fallback>,
    /// The same by whose memory it is or was to be: the ISM directory's first, then regions'.
    by_memory: Vec<OfMemory>,
    rx: Direction,
    tx: Direction,
    /// Rings by size.
    buffers: Vec<Buffers>,
    buffers_reused: u64,
    doorbells_sent: u64,
    doorbells_drained: u64,
    sleeps: u64,
    spins_paid: u64,
    cork: u64,
    nodelay: u64,
    sendpage: u64,
    splice: u64,
    urgent_data: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Debug, Serialize)]
struct Roles {
    client: u64,
    server: u64,
}

impl Roles {
    fn sum(self) -> u64 {
        self.client.saturating_add(self.server)
    }

    fn add(&mut self, is_client: bool, n: u64) {
        more(if is_client { &mut self.client } else { &mut self.server }, n);
    }
}

/// Of [`Stats`], the part of one device's memory. What was begun for no region is the first one's.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct OfMemory {
    device: String,
    smc_connections: Roles,
    rx_bytes: u64,
    tx_bytes: u64,
    /// With handshake errors.
    tcp_fallback: Roles,
    fallback_reasons: Vec<Fallback>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Fallback {
    reason: String,
    client: u64,
    server: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Debug, Serialize)]
struct Direction {
    bytes: u64,
    requests: u64,
    /// The ring could not take a send as a whole; of TX only.
    #[serde(skip_serializing_if = "Option::is_none")]
    buffer_full: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Buffers {
    size: u64,
    count: u64,
}

/// Each number is another process' word: sums of nonsense are nonsense, and no overflow.
fn more(sum: &mut u64, n: u64) {
    *sum = sum.saturating_add(n);
}

/// Whether a reason means that a handshake was begun and failed.
pub fn is_error(code: u8) -> bool {
    use Reason::{NoMemory, NoSegment, OffersFull, PeerBroken, PeerGone};
    Reason::from_code(code)
        .is_some_and(|r| matches!(r, NoMemory | NoSegment | OffersFull | PeerBroken | PeerGone))
}

impl Stats {
    fn add(&mut self, reading: &Reading) {
        let totals = &reading.totals;
        self.add_counters(&totals.closed);
        for is_client in [false, true] {
            let role = usize::from(is_client);
            self.smc_connections.add(is_client, totals.smcd[role]);
            for (code, n) in totals.fallback[role].iter().enumerate() {
                self.add_fallback(code as u8, is_client, *n);
            }
        }
        self.add_closed_by_memory(reading);
        for socket in &reading.sockets {
            self.add_counters(&socket.counters);
            let memory = self.of_memory(socket.region);
            more(&mut memory.tx_bytes, socket.counters[0]);
            more(&mut memory.rx_bytes, socket.counters[1]);
            if socket.was_smcd {
                memory.smc_connections.add(socket.is_client, 1);
                self.smc_connections.add(socket.is_client, 1);
            } else if !matches!(socket.state, State::Init | State::Listen) {
                memory.add_fallback(socket.reason, socket.is_client, 1);
                self.add_fallback(socket.reason, socket.is_client, 1);
            }
        }
        more(&mut self.sleeps, totals.set_sleeps);
        more(&mut self.spins_paid, totals.set_spins);
        self.buffers.resize(BUFFERS, Buffers { size: 0, count: 0 });
        for (i, n) in totals.buffers.iter().enumerate() {
            self.buffers[i].size = 16_384 << i;
            more(&mut self.buffers[i].count, *n);
        }
        for (sum, n) in [
            (&mut self.buffers_reused, totals.reused),
            (&mut self.cork, totals.cork),
            (&mut self.nodelay, totals.nodelay),
            (&mut self.sendpage, totals.sendpage),
            (&mut self.splice, totals.splice),
            (&mut self.urgent_data, totals.urgent),
        ] {
            more(sum, n);
        }
    }

    /// What is counted of closed connections: of all, and of each region's among them.
    fn add_closed_by_memory(&mut self, reading: &Reading) {
        let totals = &reading.totals;
        let less = |all: u64, of: &dyn Fn(usize) -> u64| {
            (0..totals.regions.len()).fold(all, |rest, i| rest.saturating_sub(of(i)))
        };
        let regions = reading.regions.iter().zip(&totals.regions).filter(|(id, _)| **id != 0);
        for is_client in [false, true] {
            let role = usize::from(is_client);
            for code in 0..=u8::MAX {
                let at = usize::from(code);
                let Some(all) = totals.fallback[role].get(at) else { break };
                let rest = less(*all, &|i| totals.regions[i].fallback[role][at]);
                self.of_memory(None).add_fallback(code, is_client, rest);
                for (id, counted) in regions.clone() {
                    let n = counted.fallback[role][at];
                    self.of_memory(Some(*id)).add_fallback(code, is_client, n);
                }
            }
            let rest = less(totals.smcd[role], &|i| totals.regions[i].smcd[role]);
            self.of_memory(None).smc_connections.add(is_client, rest);
            for (id, counted) in regions.clone() {
                let memory = self.of_memory(Some(*id));
                memory.smc_connections.add(is_client, counted.smcd[role]);
            }
        }
        let [tx, rx] = [0, 1].map(|i| less(totals.closed[i], &|n| totals.regions[n].bytes[i]));
        let rest = self.of_memory(None);
        more(&mut rest.tx_bytes, tx);
        more(&mut rest.rx_bytes, rx);
        for (id, counted) in regions {
            let memory = self.of_memory(Some(*id));
            more(&mut memory.tx_bytes, counted.bytes[0]);
            more(&mut memory.rx_bytes, counted.bytes[1]);
        }
    }

    fn of_memory(&mut self, region: Option<u128>) -> &mut OfMemory {
        let new = |device| OfMemory {
            device,
            smc_connections: Roles::default(),
            rx_bytes: 0,
            tx_bytes: 0,
            tcp_fallback: Roles::default(),
            fallback_reasons: Vec::new(),
        };
        if self.by_memory.is_empty() {
            self.by_memory.push(new(device_name(None)));
        }
        let device = device_name(region);
        let known = self.by_memory.iter().position(|memory| memory.device == device);
        let at = known.unwrap_or_else(|| {
            self.by_memory.push(new(device));
            self.by_memory.len() - 1
        });
        &mut self.by_memory[at]
    }

    fn add_counters(&mut self, counters: &[u64; 9]) {
        let [tx, rx, tx_calls, rx_calls, full, sleeps, spins, sent, drained] = counters;
        more(&mut self.tx.bytes, *tx);
        more(&mut self.rx.bytes, *rx);
        more(&mut self.tx.requests, *tx_calls);
        more(&mut self.rx.requests, *rx_calls);
        more(self.tx.buffer_full.get_or_insert(0), *full);
        more(&mut self.sleeps, *sleeps);
        more(&mut self.spins_paid, *spins);
        more(&mut self.doorbells_sent, *sent);
        more(&mut self.doorbells_drained, *drained);
    }

    fn add_fallback(&mut self, code: u8, is_client: bool, n: u64) {
        if n == 0 {
            return;
        }
        if is_error(code) {
            self.handshake_errors.add(is_client, n);
        } else {
            self.tcp_fallback.add(is_client, n);
        }
        add_reason(&mut self.fallback_reasons, code, is_client, n);
    }

    fn special_calls(&self) -> u64 {
        let calls = [self.cork, self.nodelay, self.sendpage, self.splice, self.urgent_data];
        calls.into_iter().fold(0, u64::saturating_add)
    }

    fn average(&self) -> f64 {
        let requests = self.rx.requests.saturating_add(self.tx.requests);
        let requests = requests.saturating_add(self.special_calls());
        match self.smc_connections.sum() {
            0 => 0.0,
            connections => requests as f64 / connections as f64,
        }
    }
}

impl OfMemory {
    fn add_fallback(&mut self, code: u8, is_client: bool, n: u64) {
        if n > 0 {
            self.tcp_fallback.add(is_client, n);
            add_reason(&mut self.fallback_reasons, code, is_client, n);
        }
    }
}

/// So many connections more with this reason.
fn add_reason(reasons: &mut Vec<Fallback>, code: u8, is_client: bool, n: u64) {
    let text = match Reason::from_code(code) {
        Some(Reason::None) => "not decided yet".to_owned(),
        Some(reason) => reason.text().to_owned(),
        None => format!("reason {code}"),
    };
    let mut roles = Roles::default();
    roles.add(is_client, n);
    match reasons.iter_mut().find(|f| f.reason == text) {
        Some(known) => {
            more(&mut known.client, roles.client);
            more(&mut known.server, roles.server);
        }
        None => {
            let Roles { client, server } = roles;
            reasons.push(Fallback { reason: text, client, server });
        }
    }
}

#[derive(Serialize)]
struct Of {
    #[serde(flatten)]
    who: Who,
    #[serde(flatten)]
    stats: Stats,
}

#[derive(Serialize)]
struct Device {
    dir: Option<String>,
    #[serde(flatten)]
    stats: Stats,
    processes: Vec<Of>,
}

#[derive(Serialize)]
struct All<'a> {
    devices: &'a [Device],
    /// Of RDMA, since they began: not where one process is asked for.
    agents: &'a [AgentCounts],
}

/// Sums up and prints.
///
/// # Errors
/// When /proc cannot be read, or there is no such process.
pub fn run(args: &Args) -> Result<c_int> {
    let scan = match args.pid {
        None => proc::scan()?,
        Some(pid) => {
            let Some(process) = proc::find(pid)? else {
                bail!("process {pid} has no sockets under uSMC; was it started by usmc run?");
            };
            proc::Scan { processes: vec![process], ..proc::Scan::default() }
        }
    };
    let devices = collect(&scan)?;
    let agents = match args.pid {
        None => agent::report(&Config::load(&ConfigArgs::default())?.ism_dir()).counts,
        Some(_) => Vec::new(),
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = if args.json || args.verb.as_deref() == Some("json") {
        table::json(&mut out, &All { devices: &devices, agents: &agents })
    } else {
        print(&mut out, args, &devices, &agents)
    };
    printed.and_then(|()| out.flush()).context("cannot write the statistics")?;
    if scan.hidden > 0 {
        eprintln!(
            "usmc: {} processes of other users could not be inspected; run `sudo usmc stats`",
            scan.hidden
        );
    }
    Ok(0)
}

fn collect(scan: &proc::Scan) -> Result<Vec<Device>> {
    let configured = Config::load(&ConfigArgs::default())?.ism_dir();
    let isms = machine::isms(&scan.processes, &configured);
    let mut devices: Vec<Device> = Vec::new();
    for process in &scan.processes {
        let mut stats = Stats::default();
        let readings: Vec<Reading> =
            process.files.iter().filter_map(|file| observed::read(file).ok()).collect();
        if readings.is_empty() {
            continue;
        }
        readings.iter().for_each(|reading| stats.add(reading));
        let dir = process.device.as_ref().and_then(|(_, identity)| isms.get(identity));
        let dir = dir.map(|ism| ism.dir.display().to_string());
        let at = devices.iter().position(|device| device.dir == dir).unwrap_or_else(|| {
            let stats = Stats::default();
            devices.push(Device { dir, stats, processes: Vec::new() });
            devices.len() - 1
        });
        readings.iter().for_each(|reading| devices[at].stats.add(reading));
        let who = Who { pid: process.pid, comm: process.comm.clone() };
        devices[at].processes.push(Of { who, stats });
    }
    Ok(devices)
}

fn print(
    out: &mut impl Write,
    args: &Args,
    devices: &[Device],
    agents: &[AgentCounts],
) -> io::Result<()> {
    let mut first = true;
    let mut begin = |out: &mut dyn Write| -> io::Result<()> {
        if !std::mem::take(&mut first) {
            writeln!(out)?;
        }
        Ok(())
    };
    for device in devices {
        let name = match &device.dir {
            Some(dir) => format!("Device {dir}"),
            None => "No device".to_owned(),
        };
        if args.processes || args.pid.is_some() {
            for of in &device.processes {
                begin(out)?;
                writeln!(out, "{name}, process {} ({})", of.who.pid, of.who.comm)?;
                print_one(out, &of.stats, args.details)?;
            }
        } else {
            begin(out)?;
            writeln!(out, "{name}, {} processes", device.processes.len())?;
            print_one(out, &device.stats, args.details)?;
        }
    }
    for agent in agents {
        begin(out)?;
        print_agent(out, agent)?;
    }
    Ok(())
}

fn print_agent(out: &mut impl Write, agent: &AgentCounts) -> io::Result<()> {
    writeln!(out, "Agent {}", agent.socket.display())?;
    writeln!(out, "RDMA Connections")?;
    writeln!(out, "  By RDMA                    {:12}", agent.established)?;
    writeln!(out, "  TCP fallback               {:12}", agent.fallbacks)?;
    writeln!(out, "  Reset                      {:12}", agent.failures)?;
    if let Some(ns) = agent.cpu_ns {
        writeln!(out, "  CPU time (s)               {:14.1}", ns as f64 / 1e9)?;
    }
    for device in &agent.devices {
        writeln!(out, "\nDevice {}", device.ibdevice)?;
        writeln!(out, "  Posts                      {:12}", device.posts)?;
        writeln!(out, "  Requests (WRs)             {:12}", device.requests)?;
        let bytes = device.tx_bytes;
        writeln!(out, "  Data transmitted (Bytes) {bytes:14} ({})", human(bytes))?;
        writeln!(out, "  Completions                {:12}", device.completions)?;
        writeln!(out, "  Messages received          {:12}", device.messages)?;
        writeln!(out, "  Errors                     {:12}", device.errors)?;
    }
    Ok(())
}

fn print_one(out: &mut impl Write, s: &Stats, details: bool) -> io::Result<()> {
    let roles = |r: Roles| match details {
        true => format!("{:12} (client {}, server {})", r.sum(), r.client, r.server),
        false => format!("{:12}", r.sum()),
    };
    let kinds = [s.smc_connections, s.tcp_fallback, s.handshake_errors];
    let total = kinds.into_iter().map(Roles::sum).fold(0, u64::saturating_add);
    writeln!(out, "SMC Connections Summary")?;
    writeln!(out, "  Total connections handled  {total:12}")?;
    writeln!(out, "  SMC connections            {}", roles(s.smc_connections))?;
    writeln!(out, "  Handshake errors           {}", roles(s.handshake_errors))?;
    writeln!(out, "  Avg requests per SMC conn  {:14.1}", s.average())?;
    writeln!(out, "  TCP fallback               {}", roles(s.tcp_fallback))?;
    if details {
        for fallback in &s.fallback_reasons {
            let Fallback { reason, client, server } = fallback;
            let sum = client.saturating_add(*server);
            writeln!(out, "    {reason}: {sum} (client {client}, server {server})")?;
        }
    }
    // Where there is one device, all is its.
    if s.by_memory.len() > 1 {
        print_by_memory(out, &s.by_memory, details)?;
    }
    let most = s.tx.requests.max(1) as f64;
    for (title, d) in [("RX", &s.rx), ("TX", &s.tx)] {
        writeln!(out, "\n{title} Stats")?;
        writeln!(out, "  Data transmitted (Bytes) {:14} ({})", d.bytes, human(d.bytes))?;
        writeln!(out, "  Total requests             {:12}", d.requests)?;
        if let Some(full) = d.buffer_full {
            let part = full as f64 * 100.0 / most;
            writeln!(out, "  Buffer full                {full:12} ({part:.2}%)")?;
        }
    }
    if details {
        writeln!(out, "  Buffer reuses              {:12}", s.buffers_reused)?;
    }
    let sizes: Vec<String> =
        s.buffers.iter().map(|b| format!("{:>7}", format!("{}KB", b.size >> 10))).collect();
    let counts: Vec<String> = s.buffers.iter().map(|b| format!("{:>7}", b.count)).collect();
    writeln!(out, "       {}", sizes.concat())?;
    writeln!(out, "  Bufs {}", counts.concat())?;
    writeln!(out, "\nExtras")?;
    writeln!(out, "  Special socket calls       {:12}", s.special_calls())?;
    if details {
        for (name, n) in [
            ("cork", s.cork),
            ("nodelay", s.nodelay),
            ("sendpage", s.sendpage),
            ("splice", s.splice),
            ("urgent data", s.urgent_data),
        ] {
            writeln!(out, "    {name:<24} {n:12}")?;
        }
    }
    writeln!(out, "  Doorbells sent             {:12}", s.doorbells_sent)?;
    writeln!(out, "  Doorbells drained          {:12}", s.doorbells_drained)?;
    writeln!(out, "  Sleeps                     {:12}", s.sleeps)?;
    writeln!(out, "  Spins that paid            {:12}", s.spins_paid)
}

fn print_by_memory(out: &mut impl Write, memory: &[OfMemory], details: bool) -> io::Result<()> {
    writeln!(out, "\nBy Device      Connections  TCP fallback        RX Bytes        TX Bytes")?;
    for m in memory {
        let (device, [conns, tcp]) =
            (short(&m.device), [m.smc_connections, m.tcp_fallback].map(Roles::sum));
        writeln!(out, "  {device:12} {conns:11} {tcp:13} {:15} {:15}", m.rx_bytes, m.tx_bytes)?;
        for Fallback { reason, client, server } in m.fallback_reasons.iter().filter(|_| details) {
            let sum = client.saturating_add(*server);
            writeln!(out, "    {reason}: {sum} (client {client}, server {server})")?;
        }
    }
    Ok(())
}

/// As people say it: 1.234K, of 1000.
fn human(n: u64) -> String {
    let units = ["", "K", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (n as f64, 0);
    while value >= 1000.0 {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { n.to_string() } else { format!("{value:.3}{}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_are_told_shortly() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1.000K"), (1_234_567, "1.235M")] {
            assert_eq!(human(n), text);
        }
        assert_eq!(human(u64::MAX), "18.447E");
    }
}
