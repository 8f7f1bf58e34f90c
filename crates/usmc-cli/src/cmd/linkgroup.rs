//! `usmc linkgroup`: who shares memory with whom, as smcd-linkgroup(8) has it; and the agent's link groups and links, as smcr-linkgroup(8)
//! has them.

use std::ffi::c_int;
use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::config::{Config, DirArgs};
use crate::groups::{self, End, Group, Who};
use crate::regions::{Host, Regions, short};
use crate::{agent, observed, proc, table};

/// Show link groups
///
/// A link group of SMC-D is a pair of processes that share memory for their connections, or in a region a pair of kernels. Those of SMC-R are
/// the agent's (usmc-agent(8)): a pair of hosts, with one link or two.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// show, which may be left out, or link-show: the links of SMC-R; all, or the LG-ID of one group only
    #[arg(value_name = "WORD", num_args = ..=2)]
    words: Vec<String>,
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    dir: DirArgs,
}

/// What is shown of either kind; as JSON in one list.
#[derive(Serialize)]
#[serde(untagged)]
enum Shown<'a> {
    D(&'a Group),
    R(&'a agent::Group),
}

/// Lists the groups.
///
/// # Errors
/// A configuration that is refused; when /proc cannot be read, or there is no such group.
pub fn run(args: &Args) -> Result<c_int> {
    let (links, wanted) = match args.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["show"] => (false, "all"),
        ["link-show"] => (true, "all"),
        ["link-show", id] => (true, id),
        ["show", id] | [id] => (false, id),
        [_, other, ..] => bail!("there is no {other:?} after an LG-ID; name one group, or all"),
    };
    let config = Config::load(&args.dir.config())?;
    let mut smcd = if links { Vec::new() } else { of(&proc::scan()?) };
    let mut smcr = agent::report(&config.ism_dir()).groups;
    if let Some(id) = Some(wanted).filter(|id| *id != "all") {
        smcd.retain(|group| group.lg_id.eq_ignore_ascii_case(id));
        smcr.retain(|group| group.lg_id.eq_ignore_ascii_case(id));
        if smcd.is_empty() && smcr.is_empty() {
            bail!("there is no link group {id}");
        }
    }
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = match (args.json, links) {
        (true, _) => {
            let all = smcd.iter().map(Shown::D).chain(smcr.iter().map(Shown::R));
            table::json(&mut out, &all.collect::<Vec<_>>())
        }
        (false, false) => print(&mut out, &smcd, &smcr),
        (false, true) => print_links(&mut out, &smcr),
    };
    printed.and_then(|()| out.flush()).context("cannot write the list")?;
    Ok(0)
}

/// All groups of running processes.
pub fn of(scan: &proc::Scan) -> Vec<Group> {
    let readings: Vec<_> = scan
        .processes
        .iter()
        .flat_map(|process| process.files.iter().map(move |file| (process, file)))
        .filter_map(|(process, file)| {
            let who = Who { pid: process.pid, comm: process.comm.clone() };
            Some((who, observed::read(file).ok()?))
        })
        .collect();
    let mut regions = Regions::default();
    let ends = readings
        .iter()
        .flat_map(|(who, reading)| reading.sockets.iter().map(move |socket| (who, socket)));
    let ends = ends.map(|(who, socket)| End {
        who: who.clone(),
        socket,
        hosts: regions.ends(who.pid, socket),
    });
    groups::groups(ends)
}

fn print(out: &mut impl Write, smcd: &[Group], smcr: &[agent::Group]) -> io::Result<()> {
    const SMCD: [table::Column; 9] = [
        ("LG-ID", false),
        ("VLAN", true),
        ("#Conns", true),
        ("#Segs", true),
        ("Client", false),
        ("Server", false),
        ("Device", false),
        ("Host", false),
        ("PNET-ID", false),
    ];
    const SMCR: [table::Column; 8] = [
        ("LG-ID", false),
        ("LG-Role", false),
        ("LG-Type", false),
        ("VLAN", true),
        ("#Conns", true),
        ("#RMBs", true),
        ("#Peer-RMBs", true),
        ("PNET-ID", false),
    ];
    let name = |who: &Option<Who>| match who {
        Some(who) => format!("{} ({})", who.pid, who.comm),
        None => "-".to_owned(),
    };
    let rows = smcd.iter().map(|g| {
        [
            g.lg_id.clone(),
            // Neither the loopback device nor a region knows VLANs or physical networks.
            "0".to_owned(),
            g.conns.to_string(),
            g.segments.to_string(),
            name(&g.client),
            name(&g.server),
            short(&g.device),
            g.host.as_ref().map_or("-".to_owned(), Host::to_string),
            "-".to_owned(),
        ]
    });
    table::print(out, &SMCD, rows)?;
    if smcr.is_empty() {
        return Ok(());
    }
    let rows = smcr.iter().map(|g| {
        [
            g.lg_id.clone(),
            g.role.clone(),
            g.r#type.clone(),
            "0".to_owned(),
            g.conns.to_string(),
            g.rmbs.to_string(),
            g.peer_rmbs.to_string(),
            g.pnetid.clone().unwrap_or("-".to_owned()),
        ]
    });
    writeln!(out)?;
    table::print(out, &SMCR, rows)
}

fn print_links(out: &mut impl Write, groups: &[agent::Group]) -> io::Result<()> {
    const COLUMNS: [table::Column; 10] = [
        ("LG-ID", false),
        ("LG-Role", false),
        ("LG-Type", false),
        ("Link", true),
        ("Link-State", false),
        ("#Conns", true),
        ("IB-Dev", false),
        ("IB-P", true),
        ("Local-GID", false),
        ("Peer-GID", false),
    ];
    let links = groups.iter().flat_map(|group| group.links.iter().map(move |link| (group, link)));
    let rows = links.map(|(group, link)| {
        [
            group.lg_id.clone(),
            group.role.clone(),
            group.r#type.clone(),
            link.link_id.to_string(),
            link.state.clone(),
            link.conns.to_string(),
            link.ibdevice.clone(),
            link.ibport.to_string(),
            link.gid.clone(),
            link.peer_gid.clone(),
        ]
    });
    table::print(out, &COLUMNS, rows)
}
