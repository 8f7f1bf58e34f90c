//! `usmc pnet`: the table of physical networks, with smc_pnet(8)'s options.

use std::ffi::c_int;
use std::io::{self, Write};

use anyhow::{Context, Result, anyhow, bail};
use toml_edit::{ArrayOfTables, Item, Table, value};

use crate::config::edit::{self, Edit};
use crate::config::{Config, ConfigArgs};
use crate::pnet::{self, Entry};
use crate::table;

/// Show and change the table of physical networks
///
/// A pnet id names a physical network: the network devices and the ports of RDMA and ISM devices that belong to it. The
/// table is kept in the configuration file. Without an option it is shown.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The agent reads the table when it starts (usmc-agent(8)), and `usmc device` shows it.\n\
                        Example: usmc pnet -a NET1 -I eth0 -D mlx5_0 -P 1"
)]
pub struct Args {
    /// Add an entry for PNETID, with -I, -D or both
    #[arg(short, long, group = "action", requires = "pnetid")]
    add: bool,
    /// Delete all entries of PNETID
    #[arg(short, long, visible_alias = "del", group = "action", requires = "pnetid")]
    delete: bool,
    /// Show the entries of PNETID
    #[arg(short, long, group = "action")]
    show: bool,
    /// Delete all entries
    #[arg(short, long, group = "action", conflicts_with = "pnetid")]
    flush: bool,
    /// Network device of the entry
    #[arg(short = 'I', long, value_name = "NETDEV", requires = "add", value_parser = pnet::interface)]
    interface: Option<String>,
    /// RDMA or ISM device of the entry
    #[arg(short = 'D', long, value_name = "DEVICE", requires = "add", value_parser = pnet::ibdevice)]
    ibdevice: Option<String>,
    /// Port of the RDMA device, 1 or 2 [default: 1]
    #[arg(short = 'P', long, value_name = "PORT", requires = "ibdevice")]
    ibport: Option<i64>,
    #[command(flatten)]
    target: edit::Target,
    /// Print a JSON array of objects
    #[arg(long, conflicts_with_all = ["add", "delete", "flush"])]
    json: bool,
    /// Name of the physical network: up to 16 letters and digits; small letters become capital ones
    #[arg(value_name = "PNETID", value_parser = pnet::id)]
    pnetid: Option<String>,
}

/// Shows or changes the table.
///
/// # Errors
/// A configuration that is refused, a device that belongs to another network, an entry that is not there.
pub fn run(args: &Args) -> Result<c_int> {
    let config = args.target.config();
    if args.add {
        return add(args, &config);
    }
    if args.delete || args.flush {
        return remove(args, &config);
    }
    let entries = Config::load(&config)?.pnet;
    let entries: Vec<Entry> = entries
        .into_iter()
        .filter(|entry| args.pnetid.as_ref().is_none_or(|id| *id == entry.pnetid))
        .collect();
    if let Some(id) = args.pnetid.as_ref().filter(|_| entries.is_empty()) {
        bail!("there is no pnet id {id}");
    }
    print(&entries, args.json).context("cannot write the table")?;
    if entries.is_empty() && !args.json {
        eprintln!(
            "usmc: there is no pnet id; usmc pnet -a makes one, by which the agent chooses devices (usmc-agent(8))"
        );
    }
    Ok(0)
}

fn print(entries: &[Entry], json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        return table::json(&mut out, entries);
    }
    // As smc_pnet(8): a line for each device, with "n/a" and 255 for the other one.
    for e in entries {
        if let Some(interface) = &e.interface {
            writeln!(out, "{} {interface} n/a {}", e.pnetid, u8::MAX)?;
        }
        if let Some(ibdevice) = &e.ibdevice {
            writeln!(out, "{} n/a {ibdevice} {}", e.pnetid, e.ibport.unwrap_or(1))?;
        }
    }
    out.flush()
}

fn add(args: &Args, config: &ConfigArgs) -> Result<c_int> {
    let Some(pnetid) = args.pnetid.clone() else { bail!("interface or device of what?") };
    if args.interface.is_none() && args.ibdevice.is_none() {
        bail!("interface or device missing; say -I NETDEV, -D DEVICE or both");
    }
    let ibport = args.ibport.map(pnet::ibport).transpose().map_err(|e| anyhow!(e))?;
    let ibport = args.ibdevice.as_ref().map(|_| ibport.unwrap_or(1));
    let (interface, ibdevice) = (args.interface.clone(), args.ibdevice.clone());
    let entry = Entry { pnetid, interface, ibdevice, ibport };
    let mut edit = Edit::begin(&edit::target(config)?)?;
    let known = Config::load(config)?.pnet;
    if let Some((other, device)) =
        known.iter().find_map(|other| Some((other, pnet::clash(&entry, other)?)))
    {
        bail!("{device} has a pnet id already, {}; delete that first", other.pnetid);
    }
    if !edit.document.contains_key("pnet") {
        // The file's table replaces an earlier file's as a whole.
        for other in &known {
            append(&mut edit, other)?;
        }
    }
    append(&mut edit, &entry)?;
    edit.save()?;
    Ok(0)
}

fn append(edit: &mut Edit, entry: &Entry) -> Result<()> {
    let mut table = Table::new();
    table["id"] = value(&entry.pnetid);
    for (key, name) in [("interface", &entry.interface), ("ibdevice", &entry.ibdevice)] {
        if let Some(name) = name {
            table[key] = value(name);
        }
    }
    if let Some(port) = entry.ibport {
        table["ibport"] = value(i64::from(port));
    }
    let tables = edit.document.entry("pnet").or_insert(Item::ArrayOfTables(ArrayOfTables::new()));
    let tables = tables.as_array_of_tables_mut();
    let Some(tables) = tables else {
        bail!("write pnet as tables [[pnet]] first, not in one line")
    };
    tables.push(table);
    Ok(())
}

fn remove(args: &Args, config: &ConfigArgs) -> Result<c_int> {
    let mut edit = Edit::begin(&edit::target(config)?)?;
    let is_meant = |table: &Table| {
        let id = table.get("id").and_then(Item::as_str).map(pnet::id);
        args.flush || id.and_then(Result::ok) == args.pnetid
    };
    let Some(tables) = edit.document.get_mut("pnet").and_then(Item::as_array_of_tables_mut) else {
        return nothing_to_remove(args);
    };
    let before = tables.len();
    tables.retain(|table| !is_meant(table));
    let (removed, left) = (before - tables.len(), tables.len());
    if removed == 0 {
        return nothing_to_remove(args);
    }
    if left == 0 {
        edit.document.remove("pnet");
    }
    edit.save()?;
    Ok(0)
}

fn nothing_to_remove(args: &Args) -> Result<c_int> {
    match &args.pnetid {
        Some(id) => bail!("the file has no pnet id {id}"),
        None => Ok(0),
    }
}
