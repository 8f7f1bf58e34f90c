//! `usmc linkgroup`: who shares memory with whom, as smcd-linkgroup(8) has it.

use std::ffi::c_int;
use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result, bail};

use crate::groups::{self, End, Group, Who};
use crate::regions::{Host, Regions, short};
use crate::{observed, proc, table};

/// Show link groups
///
/// A link group of SMC-D is a pair of processes that share memory for their connections, or in a region a pair of kernels. Groups of SMC-R are shown once
/// uSMC has an RDMA device; it has none yet.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// show, which may be left out; all, or the LG-ID of one group only
    #[arg(value_name = "show", num_args = ..=2)]
    words: Vec<String>,
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
}

/// Lists the groups.
///
/// # Errors
/// When /proc cannot be read, or there is no such group.
pub fn run(args: &Args) -> Result<c_int> {
    let wanted = match args.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["show"] => "all",
        ["show", id] | [id] => id,
        [_, other, ..] => bail!("there is no {other:?} after an LG-ID; name one group, or all"),
    };
    let scan = proc::scan()?;
    let mut groups = of(&scan);
    if let Some(id) = Some(wanted).filter(|id| *id != "all") {
        groups.retain(|group| group.lg_id.eq_ignore_ascii_case(id));
        if groups.is_empty() {
            bail!("there is no link group {id}");
        }
    }
    let mut out = BufWriter::new(io::stdout().lock());
    print(&mut out, &groups, args.json)
        .and_then(|()| out.flush())
        .context("cannot write the list")?;
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

fn print(out: &mut impl Write, groups: &[Group], json: bool) -> io::Result<()> {
    if json {
        return table::json(out, groups);
    }
    const COLUMNS: [table::Column; 9] = [
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
    let name = |who: &Option<Who>| match who {
        Some(who) => format!("{} ({})", who.pid, who.comm),
        None => "-".to_owned(),
    };
    let rows = groups.iter().map(|g| {
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
    table::print(out, &COLUMNS, rows)
}
