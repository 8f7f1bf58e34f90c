//! `usmc status`: which services are enabled, whether they have the library, and how many of their connections are in shared
//! memory.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;
use usmc::observe::{Mode, State};

use crate::compose::{self, shell_words};
use crate::kubernetes;
use crate::place::{self, Place};
use crate::units::files::{self, Enabled};
use crate::units::{group, manager};
use crate::{observed, proc, table};

/// Show which services are under uSMC
///
/// Lists services of systemd that `usmc enable` has changed, and containers of projects of docker compose that it has written
/// an override for: whether they run with the library now, and how many of their connections are in shared memory.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
    /// Ask the cluster of Kubernetes that kubectl reaches
    #[arg(long, conflicts_with = "services")]
    kubernetes: bool,
    /// Services of systemd; all that are enabled by default, and containers
    #[arg(value_name = "SERVICE")]
    services: Vec<String>,
}

/// One service or container.
#[derive(Serialize, PartialEq, Eq, Debug)]
struct Row {
    service: String,
    /// `systemd` or `compose`.
    kind: &'static str,
    /// Of systemd: the group of services; of compose: the project.
    group: String,
    /// Its main process; `None`: it does not run.
    pid: Option<u32>,
    /// Whether that has the library; `None`: it does not run, or may not be looked at.
    library: Option<bool>,
    /// Connections in shared memory.
    smcd: usize,
    /// Connections that are not.
    tcp: usize,
    /// What is wrong.
    problem: Option<String>,
}

/// Lists them.
///
/// # Errors
/// A service is not enabled; /proc cannot be read, or the output not be written.
pub fn run(args: &Args) -> Result<c_int> {
    if args.kubernetes {
        return cluster(args.json);
    }
    let mut enabled = files::enabled();
    if !args.services.is_empty() {
        let named = args.services.iter().map(|name| Enabled::of(name, &enabled));
        let wanted = named.map(|unit| Ok(unit?.name)).collect::<Result<HashSet<String>>>()?;
        enabled.retain(|unit| wanted.contains(&unit.name));
    }
    let places = place::all();
    let connections = connections()?;
    let mut rows: Vec<Row> =
        enabled.iter().map(|unit| of_unit(unit, &places, &connections)).collect();
    if args.services.is_empty() {
        rows.extend(
            compose::running()
                .into_iter()
                .map(|container| of_container(container, &places, &connections)),
        );
    }
    let mut out = io::stdout().lock();
    let printed = if args.json { table::json(&mut out, &rows) } else { print(&mut out, &rows) };
    printed.context("cannot write the list; free the output's disk")?;
    Ok(0)
}

/// What is enabled in a cluster.
fn cluster(is_json: bool) -> Result<c_int> {
    let status = kubernetes::status()?;
    let mut out = io::stdout().lock();
    let printed =
        if is_json { table::json(&mut out, &status) } else { print_cluster(&mut out, &status) };
    printed.context("cannot write the list; free the output's disk")?;
    Ok(0)
}

fn print_cluster(out: &mut impl Write, status: &kubernetes::Status) -> io::Result<()> {
    writeln!(out, "uSMC is ready on {} of {} nodes", status.ready, status.nodes)?;
    if status.enabled.is_empty() {
        return writeln!(out, "nothing is enabled; `usmc enable --kubernetes NAMESPACE` does that");
    }
    let columns = [("Namespace", false), ("Kind", false), ("Name", false), ("Enabled", false)];
    let cells = status.enabled.iter().map(|row| {
        let enabled = if row.enabled { "yes" } else { "no" };
        [row.namespace.clone(), row.kind.clone(), row.name.clone(), enabled.to_owned()]
    });
    table::print(out, &columns, cells)
}

/// Connections in shared memory and others, by process.
fn connections() -> Result<HashMap<u32, (usize, usize)>> {
    let mut found: HashMap<u32, (usize, usize)> = HashMap::new();
    for process in proc::scan()?.processes {
        let readings = process.files.iter().filter_map(|file| observed::read(file).ok());
        for socket in readings.flat_map(|reading| reading.sockets) {
            let counts = found.entry(process.pid).or_default();
            match socket.state {
                State::Init | State::Listen => {}
                _ if socket.mode == Mode::Tcp => counts.1 += 1,
                _ => counts.0 += 1,
            }
        }
    }
    Ok(found)
}

fn sum(pids: &[u32], connections: &HashMap<u32, (usize, usize)>) -> (usize, usize) {
    let counts = pids.iter().filter_map(|pid| connections.get(pid));
    counts.fold((0, 0), |(smcd, tcp), (more_smcd, more_tcp)| (smcd + more_smcd, tcp + more_tcp))
}

fn of_unit(
    unit: &Enabled,
    places: &HashMap<Place, Vec<u32>>,
    connections: &HashMap<u32, (usize, usize)>,
) -> Row {
    let mut services: Vec<(&str, &[u32])> = places
        .iter()
        .filter_map(|(place, pids)| match place {
            Place::Service(name) if files::is_of(name, &unit.name) => Some((&**name, &**pids)),
            _ => None,
        })
        .collect();
    // Of a template there may be several instances.
    services.sort_unstable();
    let main = |(name, pids): &(&str, &[u32])| {
        let known = if manager::is_running() { manager::main_pid(name) } else { None };
        known.or(pids.iter().min().copied())
    };
    let pids: Vec<u32> = services.iter().filter_map(main).collect();
    let libraries: Vec<Option<bool>> = pids.iter().map(|pid| place::has_library(*pid)).collect();
    let stale = services.iter().zip(&libraries).filter(|(_, library)| **library == Some(false));
    let stale: Vec<&str> = stale.map(|((name, _), _)| *name).collect();
    let (mut smcd, mut tcp) = (0, 0);
    for (_, pids) in &services {
        let (more_smcd, more_tcp) = sum(pids, connections);
        (smcd, tcp) = (smcd + more_smcd, tcp + more_tcp);
    }
    Row {
        service: unit.name.clone(),
        kind: "systemd",
        group: unit.made.group.clone(),
        pid: pids.first().copied(),
        // What one instance lacks is what is shown.
        library: libraries.into_iter().flatten().min(),
        smcd,
        tcp,
        problem: problem(unit, &stale),
    }
}

/// What is wrong with a unit; `stale`: its services that have no library.
fn problem(unit: &Enabled, stale: &[&str]) -> Option<String> {
    let name = &unit.made.group;
    let file = group::tmpfiles(name);
    if group::gid(name).is_none() || !file.exists() {
        return Some(format!(
            "the group {} or {} is gone: usmc enable --name {name} {}",
            group::unix_name(name),
            file.display(),
            unit.name
        ));
    }
    if !group::is_ready(name) {
        return Some(format!(
            "the ISM directory is missing: systemd-tmpfiles --create {}",
            file.display()
        ));
    }
    let restart = || format!("not started anew: systemctl restart {}", shell_words(stale));
    (!stale.is_empty()).then(restart)
}

fn of_container(
    container: compose::Container,
    places: &HashMap<Place, Vec<u32>>,
    connections: &HashMap<u32, (usize, usize)>,
) -> Row {
    let pids = places.get(&Place::Container(container.id)).cloned().unwrap_or_default();
    let (smcd, tcp) = sum(&pids, connections);
    Row {
        service: container.service,
        kind: "compose",
        group: container.project,
        // 0 while it is started anew.
        pid: Some(container.pid).filter(|pid| *pid != 0),
        library: place::has_library(container.pid),
        smcd,
        tcp,
        problem: None,
    }
}

fn print(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    if rows.is_empty() {
        return writeln!(
            out,
            "no service is enabled; `usmc enable SERVICE` does that, `usmc advise` says for which it pays"
        );
    }
    let columns = [
        ("Service", false),
        ("Group", false),
        ("Pid", true),
        ("Library", false),
        ("SMCD", true),
        ("TCP", true),
        ("Problem", false),
    ];
    let cells = rows.iter().map(|row| {
        let library = match row.library {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        [
            row.service.clone(),
            row.group.clone(),
            row.pid.map_or("-".to_owned(), |pid| pid.to_string()),
            library.to_owned(),
            row.smcd.to_string(),
            row.tcp.to_string(),
            row.problem.clone().unwrap_or("-".to_owned()),
        ]
    });
    table::print(out, &columns, cells)
}
