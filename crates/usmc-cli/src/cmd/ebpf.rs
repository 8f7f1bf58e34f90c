//! `usmc ebpf`: the programs in the kernel that write and read "I speak SMC" in the headers of TCP.

use std::ffi::c_int;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;
use usmc::syn_option;

use crate::ebpf::{self, Loaded};

/// Say "I speak SMC" when TCP connections are made
///
/// Loads programs into the kernel that write and read TCP option 254/E2D4C3D9 on SYN and SYN-ACK, of those sockets
/// only that ask for it. Needs root once; programs under uSMC need no rights.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Load the programs into the kernel and attach them to a cgroup
    Load(Load),
    /// Take them away again
    Unload(Place),
    /// Show where they are attached, and whether sockets of this process can say SMC
    Status(Status),
}

#[derive(clap::Args, Debug)]
struct Load {
    #[command(flatten)]
    place: Place,
    /// Say what the kernel refuses, and succeed all the same: what comes next does not need them
    #[arg(long)]
    if_allowed: bool,
}

#[derive(clap::Args, Debug)]
struct Place {
    /// Serve the sockets of processes in this cgroup and below [default: the root of the cgroup2 hierarchy]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    cgroup: Option<PathBuf>,
}

impl Place {
    fn path(&self) -> Result<PathBuf> {
        self.cgroup.clone().map_or_else(ebpf::default_cgroup, Ok)
    }
}

#[derive(clap::Args, Debug)]
struct Status {
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Loads, unloads or shows.
///
/// # Errors
/// What the kernel refused.
pub fn run(args: &Args) -> Result<c_int> {
    match &args.action {
        Action::Load(args) => args.place.path().and_then(|path| load(&path)).or_else(|problem| {
            if !args.if_allowed {
                return Err(problem);
            }
            eprintln!("usmc: {problem:#}");
            Ok(0)
        }),
        Action::Unload(place) => unload(&place.path()?),
        Action::Status(status) => show(status),
    }
}

fn load(path: &Path) -> Result<c_int> {
    let (cgroup, name) = (ebpf::open(path)?, path.display());
    println!(
        "{}",
        match ebpf::load(&cgroup)? {
            Loaded::New => format!("loaded at {name}"),
            Loaded::Replaced => format!("loaded at {name} in the place of another version"),
            Loaded::Already => format!("already loaded at {name}"),
        }
    );
    let others = ebpf::others(&cgroup)?;
    if !others.is_empty() {
        eprintln!(
            "usmc: other programs see the same headers ({}); should one of them write TCP options, check with \
             tcpdump that only sockets which ask for it say SMC",
            others.join(", ")
        );
    }
    Ok(0)
}

fn unload(path: &Path) -> Result<c_int> {
    let (cgroup, name) = (ebpf::open(path)?, path.display());
    match ebpf::unload(&cgroup)? {
        true => println!("unloaded from {name}"),
        false => println!("nothing was loaded at {name}"),
    }
    Ok(0)
}

/// A cgroup with programs of ours.
#[derive(Serialize, Debug)]
struct Cgroup {
    path: PathBuf,
    programs: Vec<u32>,
    complete: bool,
}

/// All that `status` says.
#[derive(Serialize, Debug)]
struct Report {
    /// Whether a socket made by this process can be armed.
    here: bool,
    /// `None` where this user may not list them.
    cgroups: Option<Vec<Cgroup>>,
}

fn show(args: &Status) -> Result<c_int> {
    let report = Report { here: syn_option::is_loaded(), cgroups: cgroups() };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(c_int::from(!report.here && report.cgroups.is_none_or(|all| all.is_empty())))
}

fn print(report: &Report) {
    for cgroup in report.cgroups.iter().flatten() {
        let ids: Vec<_> = cgroup.programs.iter().map(u32::to_string).collect();
        let (path, ids) = (cgroup.path.display(), ids.join(", "));
        match cgroup.complete {
            true => println!("loaded at {path}: programs {ids}"),
            false => println!("incomplete at {path}: programs {ids}; load them again"),
        }
    }
    match &report.cgroups {
        Some(all) if all.is_empty() => println!("not loaded"),
        Some(_) => {}
        None => println!("which cgroups have them is for root to see: sudo usmc ebpf status"),
    }
    println!("sockets of this process {} say SMC", if report.here { "can" } else { "cannot" });
}

/// All cgroups that have any of the programs.
fn cgroups() -> Option<Vec<Cgroup>> {
    let mut left = vec![ebpf::default_cgroup().ok()?];
    let mut found = Vec::new();
    while let Some(path) = left.pop() {
        // It may have been removed meanwhile.
        let Ok(cgroup) = ebpf::open(&path) else { continue };
        let attached = ebpf::attached(&cgroup).ok()?;
        let below = fs::read_dir(&path).into_iter().flatten().flatten();
        left.extend(
            below.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()),
        );
        if !attached.is_empty() {
            found.push(Cgroup { programs: attached.ids(), complete: attached.is_complete(), path });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Some(found)
}
