//! `usmc ivshmem-server`: gives virtual machines a region as a device with doorbells, and says how that is.

use std::ffi::c_int;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args as ClapArgs, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::region;
use crate::ivshmem::VECTORS;
use crate::ivshmem::memory::Wanted;
use crate::ivshmem::report::{self, Report};
use crate::ivshmem::server::{For, Given, Listener, Server, Settings, fill_standard_descriptors};
use crate::ivshmem::socket::{Place, group};
use crate::ivshmem::systemd::{self, Manager};
use crate::stop;
use crate::table;

/// Share memory between virtual machines
///
/// Serves QEMU's ivshmem-doorbell devices: each virtual machine that connects has the same memory, a region, as a device, and
/// doorbells to the others. What a dead one has left in the region is given back.
#[derive(ClapArgs, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    serve: Serve,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Show the clients and the memory of a server
    Status {
        /// The server's socket for the host's processes
        host_socket: PathBuf,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(ClapArgs, Debug)]
struct Serve {
    /// Where virtual machines connect; not needed where systemd has made the socket
    socket: Option<PathBuf>,
    /// The socket's mode
    #[arg(long, default_value = "0600", value_parser = mode)]
    mode: u32,
    /// The socket's group
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// The memory's size, with K, M or G, a power of two [default: 256M]
    #[arg(long, value_parser = region::size)]
    size: Option<u64>,
    /// Memory of huge pages
    #[arg(long, conflicts_with = "file")]
    hugetlb: bool,
    /// Memory in this file: a region that is there, or a new one
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Interrupts of each virtual machine; QEMU is told the same number
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=i64::from(VECTORS)))]
    vectors: u8,
    /// Where the host's processes get the memory
    #[arg(long, value_name = "PATH")]
    host_socket: Option<PathBuf>,
    /// The mode of the host's socket
    #[arg(long, default_value = "0660", value_parser = mode, value_name = "MODE")]
    host_mode: u32,
    /// The group of the host's socket
    #[arg(long, value_name = "NAME")]
    host_group: Option<String>,
}

fn mode(text: &str) -> Result<u32> {
    let mode = u32::from_str_radix(text, 8).context("an octal number, as 0660")?;
    ensure!(mode <= 0o777, "an octal number up to 0777");
    Ok(mode)
}

/// Serves, or shows how a server is.
///
/// # Errors
/// What is in the way, and what to do.
pub fn run(args: &Args) -> Result<c_int> {
    match &args.what {
        Some(What::Status { host_socket, json }) => show(host_socket, *json)?,
        None => serve(&args.serve)?,
    }
    Ok(0)
}

fn serve(args: &Serve) -> Result<()> {
    let mut given = Given::new(systemd::given());
    fill_standard_descriptors();
    raise_limit();
    let stop = stop::on_signal()?;
    let mut listeners = given.listeners();
    let made = [
        (For::Clients, &args.socket, args.mode, &args.group),
        (For::Visitors, &args.host_socket, args.host_mode, &args.host_group),
    ];
    for (whom, path, mode, name) in made {
        let Some(path) = path else { continue };
        let group = name.as_deref().map(group).transpose()?;
        let (socket, named) = Place { path, mode, group }.listen()?;
        listeners.push(Listener { whom, socket, _named: Some(named) });
    }
    let is_any = listeners.iter().any(|listener| listener.whom == For::Clients);
    ensure!(
        is_any,
        "no socket for virtual machines: name one, as usmc ivshmem-server /run/usmc/ivshmem.sock"
    );
    let wanted = Wanted { size: args.size, file: args.file.clone(), hugetlb: args.hugetlb };
    let settings = Settings { memory: wanted, vectors: args.vectors };
    let mut server = Server::new(&settings, listeners, given, Manager::of_this_process())?;
    // For the program that has started it. There may be nobody to read it.
    let _ = writeln!(io::stdout(), "ready");
    server.serve(&stop)
}

/// Each client has a descriptor for each vector, and each of these may be under way to each client.
fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn show(path: &Path, json: bool) -> Result<()> {
    let report = report::ask(path)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = if json { table::json(&mut out, &report) } else { print(&mut out, &report) };
    printed.and_then(|()| out.flush()).context("cannot write the list")
}

fn print(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let memory = &report.memory;
    let place = memory.file.as_ref().map_or("no file".into(), |file| file.display().to_string());
    writeln!(out, "memory: {} MiB, {place}", memory.bytes >> 20)?;
    if let (Some(gid), Some(units), Some(free)) = (&memory.gid, memory.units, memory.free) {
        writeln!(out, "region {gid}: {free} of {units} units are free")?;
    }
    let columns = [
        ("Client", true),
        ("Vectors", true),
        ("Process", true),
        ("User", true),
        ("Behind", true),
        ("State", false),
        ("Peers", false),
    ];
    let or_none = |number: Option<String>| number.unwrap_or_else(|| "-".into());
    let rows = report.clients.iter().map(|client| {
        let peers: Vec<String> = client.peers.iter().map(u8::to_string).collect();
        [
            client.id.to_string(),
            client.vectors.to_string(),
            or_none(client.pid.map(|pid| pid.to_string())),
            or_none(client.uid.map(|uid| uid.to_string())),
            client.behind.to_string(),
            if client.closed { "closed" } else { "open" }.into(),
            or_none((!peers.is_empty()).then(|| peers.join(","))),
        ]
    });
    table::print(out, &columns, rows)?;
    for id in &report.unproven {
        writeln!(out, "client {id} was closed; nobody knows whether it lives")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("0660").unwrap(), 0o660);
        for text in ["", "8", "rw", "1777"] {
            assert!(mode(text).is_err(), "{text}");
        }
    }
}
