//! `usmc device`: what SMC could use here, as smcd-device(8) and smcr-device(8) have it.

use std::ffi::c_int;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use usmc::observe::REGIONS;
use usmc::provider;
use usmc_shm::region::Region;

use super::linkgroup;
use super::region::usable;
use crate::config::{Config, ConfigArgs, DirArgs};
use crate::groups::Group;
use crate::machine::{self, Ism, RdmaPort};
use crate::pnet::Entry;
use crate::regions::{Regions, provider_of, short, shown};
use crate::{agent, proc, table};

/// Show devices
///
/// The loopback ISM devices and the regions that running programs use, and those of the configuration; and the machine's RDMA
/// ports, in use where the agent has them (usmc-agent(8)).
#[derive(clap::Args, Debug)]
pub struct Args {
    /// show, which may be left out; all, or netdev NETDEV and ibdev IBDEV, for RDMA ports of these devices only
    #[arg(value_name = "WORD", num_args = 0..=5)]
    words: Vec<String>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    dir: DirArgs,
    /// Memory shared with other machines: auto, none, or files and devices; comma list, repeatable, at most four; see
    /// usmc-region(1) [default: auto]
    #[arg(long = "regions", alias = "region", value_name = "PATHS")]
    regions: Vec<String>,
}

#[derive(Serialize)]
struct SmcD {
    r#type: &'static str,
    gid: Option<String>,
    chid: &'static str,
    in_use: bool,
    processes: Vec<u32>,
    link_groups: usize,
    pnetid: Option<String>,
    dir: String,
}

/// A region that programs use, or would.
#[derive(Serialize)]
struct Shared {
    provider: &'static str,
    path: String,
    gid: Option<String>,
    /// Of all units.
    bytes: Option<u64>,
    units: Option<usize>,
    free: Option<usize>,
    /// Those that live.
    peers: Option<usize>,
    in_use: bool,
    processes: Vec<u32>,
    link_groups: usize,
    state: &'static str,
    remedy: Option<&'static str>,
}

#[derive(Serialize)]
struct SmcR {
    netdev: Option<String>,
    ibdevice: String,
    ibport: u32,
    state: String,
    in_use: bool,
    links: usize,
    pnetid: Option<String>,
}

#[derive(Serialize)]
struct Devices {
    smcd: Vec<SmcD>,
    regions: Vec<Shared>,
    smcr: Vec<SmcR>,
}

/// Lists the devices.
///
/// # Errors
/// A configuration that is refused; when /proc cannot be read.
pub fn run(args: &Args) -> Result<c_int> {
    let wanted = Wanted::parse(&args.words)?;
    let wanted_regions = args.regions.clone();
    let config = Config::load(&ConfigArgs { regions: wanted_regions, ..args.dir.config() })?;
    let scan = proc::scan()?;
    let groups = linkgroup::of(&scan);
    let smcd = machine::isms(&scan.processes, &config.ism_dir()).into_values();
    let smcd = smcd.map(|device| {
        let uses = |pid: u32| device.pids.contains(&pid);
        let groups = groups.iter().filter(|group| {
            [&group.client, &group.server].into_iter().flatten().any(|who| uses(who.pid))
        });
        smc_d(&device, groups.count(), &config.pnet)
    });
    let used = agent::report(&config.ism_dir()).devices;
    let smcr = machine::rdma_ports(Path::new("/sys")).into_iter();
    let smcr = smcr.map(|port| smc_r(port, &config.pnet, &used));
    let smcr = smcr.filter(|port| wanted.has(port)).collect();
    // With a filter there is nothing but what it is about.
    let smcd = smcd.filter(|_| wanted.is_all()).collect();
    let configured = config.text("regions").unwrap_or("auto");
    let regions = if wanted.is_all() { regions(configured, &scan, &groups) } else { Vec::new() };
    let devices = Devices { smcd, regions, smcr };
    let mut out = BufWriter::new(io::stdout().lock());
    let printed =
        if args.json { table::json(&mut out, &devices) } else { print(&mut out, &devices) };
    printed.and_then(|()| out.flush()).context("cannot write the list")?;
    Ok(0)
}

/// Which RDMA ports are shown.
#[derive(Default)]
struct Wanted {
    netdev: Option<String>,
    ibdev: Option<String>,
}

impl Wanted {
    /// What smcr-device(8) takes.
    fn parse(words: &[String]) -> Result<Wanted> {
        let mut wanted = Wanted::default();
        let mut words = words.iter().map(String::as_str).peekable();
        words.next_if_eq(&"show");
        if words.next_if_eq(&"all").is_some() && words.peek().is_some() {
            bail!("all devices, or those of a name?");
        }
        while let Some(word) = words.next() {
            let name = match word {
                "netdev" => &mut wanted.netdev,
                "ibdev" => &mut wanted.ibdev,
                other => bail!("{other:?} is none of show, all, netdev and ibdev"),
            };
            *name =
                Some(words.next().with_context(|| format!("{word} of which name?"))?.to_owned());
        }
        Ok(wanted)
    }

    fn is_all(&self) -> bool {
        self.netdev.is_none() && self.ibdev.is_none()
    }

    fn has(&self, port: &SmcR) -> bool {
        let fits = |wanted: &Option<String>, name| wanted.is_none() || wanted.as_deref() == name;
        fits(&self.netdev, port.netdev.as_deref()) && fits(&self.ibdev, Some(&port.ibdevice))
    }
}

fn smc_d(device: &Ism, link_groups: usize, pnet: &[Entry]) -> SmcD {
    let dir = device.dir.display().to_string();
    let name = device.dir.file_name().and_then(|name| name.to_str());
    let is_it = |entry: &&Entry| name.is_some() && entry.ibdevice.as_deref() == name;
    SmcD {
        r#type: "loopback",
        gid: device.gid.map(|gid| format!("{gid:032x}")),
        // SMC_LO_RESERVED_CHID of net/smc.
        chid: "ffff",
        in_use: !device.pids.is_empty(),
        processes: device.pids.clone(),
        link_groups,
        pnetid: pnet.iter().find(is_it).map(|entry| entry.pnetid.clone()),
        dir,
    }
}

/// Those of the configuration, and others that running programs use.
fn regions(configured: &str, scan: &proc::Scan, groups: &[Group]) -> Vec<Shared> {
    let mut found: Vec<Shared> = Vec::new();
    let mut usable = 0;
    let is_auto = provider::is_auto(configured);
    provider::each(configured, |path| {
        found.push(match usable::open(path) {
            Ok(region) => {
                usable += 1;
                let state =
                    if usable > REGIONS { "beyond the four that are used" } else { "usable" };
                shared(Path::new(path), &region, state)
            }
            Err(reason) => Shared {
                state: reason.text(),
                remedy: Some(usable::remedy(path, reason, is_auto)),
                ..unknown(Path::new(path))
            },
        });
    });
    let mut copies = Regions::default();
    for process in &scan.processes {
        for (path, region) in copies.mapped(process.pid) {
            let gid = crate::regions::hex(region.gid());
            let known = found.iter().position(|one| one.gid.as_ref() == Some(&gid));
            let at = known.unwrap_or_else(|| {
                found.push(shared(path, region, "not in this configuration"));
                found.len() - 1
            });
            found[at].in_use = true;
            found[at].processes.push(process.pid);
        }
    }
    for one in &mut found {
        one.link_groups =
            groups.iter().filter(|group| one.gid.as_ref() == Some(&group.device)).count();
    }
    found
}

fn shared(path: &Path, region: &Region, state: &'static str) -> Shared {
    let shown = shown(region);
    Shared {
        peers: Some(shown.alive()),
        bytes: Some((shown.units * shown.unit_bytes) as u64),
        units: Some(shown.units),
        free: Some(shown.free),
        gid: Some(shown.gid),
        state,
        ..unknown(path)
    }
}

/// A region of which nothing but its path is known.
fn unknown(path: &Path) -> Shared {
    Shared {
        provider: provider_of(path),
        // A process' name for it.
        path: path.display().to_string().chars().map(printable).collect(),
        gid: None,
        bytes: None,
        units: None,
        free: None,
        peers: None,
        in_use: false,
        processes: Vec::new(),
        link_groups: 0,
        state: "",
        remedy: None,
    }
}

fn printable(c: char) -> char {
    if c.is_control() { '?' } else { c }
}

fn smc_r(port: RdmaPort, pnet: &[Entry], used: &[agent::Device]) -> SmcR {
    let links = |device: &agent::Device| {
        let is_it = device.name == port.ibdevice && device.port == port.port;
        is_it.then_some(device.links)
    };
    let in_use: Vec<usize> = used.iter().filter_map(links).collect();

    let is_it = |entry: &&Entry| {
        let by_port = entry.ibdevice.as_ref() == Some(&port.ibdevice)
            && entry.ibport.map(u32::from) == Some(port.port);
        by_port || (entry.interface.is_some() && entry.interface == port.netdev)
    };
    SmcR {
        pnetid: pnet.iter().find(is_it).map(|entry| entry.pnetid.clone()),
        netdev: port.netdev,
        ibdevice: port.ibdevice,
        ibport: port.port,
        state: port.state,
        in_use: !in_use.is_empty(),
        links: in_use.iter().sum(),
    }
}

fn print(out: &mut impl Write, devices: &Devices) -> io::Result<()> {
    const SMCD: [table::Column; 8] = [
        ("Type", false),
        ("GID", false),
        ("CHID", false),
        ("InUse", false),
        ("#Procs", true),
        ("#LGs", true),
        ("PNET-ID", false),
        ("Directory", false),
    ];
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    // The mark of smcd-device(8) for what users have set; no device here has an id by itself.
    let pnetid = |id: &Option<String>| id.as_ref().map_or("-".to_owned(), |id| format!("*{id}"));
    let yes = |is: bool| if is { "Yes" } else { "No" }.to_owned();
    let rows = devices.smcd.iter().map(|d| {
        [
            d.r#type.to_owned(),
            or_none(&d.gid),
            d.chid.to_owned(),
            yes(d.in_use),
            d.processes.len().to_string(),
            d.link_groups.to_string(),
            pnetid(&d.pnetid),
            d.dir.clone(),
        ]
    });
    table::print(out, &SMCD, rows)?;
    print_regions(out, &devices.regions)?;
    if devices.smcr.is_empty() {
        return Ok(());
    }
    const SMCR: [table::Column; 7] = [
        ("Net-Dev", false),
        ("IB-Dev", false),
        ("IB-P", true),
        ("IB-State", false),
        ("InUse", false),
        ("#Links", true),
        ("PNET-ID", false),
    ];
    let rows = devices.smcr.iter().map(|d| {
        [
            or_none(&d.netdev),
            d.ibdevice.clone(),
            d.ibport.to_string(),
            d.state.clone(),
            yes(d.in_use),
            d.links.to_string(),
            pnetid(&d.pnetid),
        ]
    });
    writeln!(out)?;
    table::print(out, &SMCR, rows)
}

fn print_regions(out: &mut impl Write, regions: &[Shared]) -> io::Result<()> {
    if regions.is_empty() {
        return Ok(());
    }
    const REGION: [table::Column; 10] = [
        ("Provider", false),
        ("Region", false),
        ("Size", true),
        ("Units", true),
        ("Free", true),
        ("#Peers", true),
        ("#Procs", true),
        ("#LGs", true),
        ("Path", false),
        ("State", false),
    ];
    let number = |n: Option<usize>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let rows = regions.iter().map(|r| {
        [
            r.provider.to_owned(),
            r.gid.as_deref().map_or_else(|| "-".to_owned(), short),
            r.bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}M", bytes >> 20)),
            number(r.units),
            number(r.free),
            number(r.peers),
            r.processes.len().to_string(),
            r.link_groups.to_string(),
            r.path.clone(),
            r.state.to_owned(),
        ]
    });
    writeln!(out)?;
    table::print(out, &REGION, rows)?;
    for Shared { path, remedy, .. } in regions {
        if let Some(remedy) = remedy {
            writeln!(out, "{path}: {remedy}")?;
        }
    }
    Ok(())
}
