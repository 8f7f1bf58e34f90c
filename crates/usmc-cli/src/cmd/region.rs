//! `usmc region`: makes a region, shows its peers, says that one of them is dead for good, and lets a group use it.

mod drain;
mod setup;
pub mod usable;

use std::ffi::c_int;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args as ClapArgs, Subcommand};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::rand::{GetRandomFlags, getrandom};
use usmc::provider;
use usmc::reason::Reason;
use usmc_shm::region::peers::Peer;
use usmc_shm::region::{Refused, Region, UNIT, UNITS_MOST, VERSION, len_for, units_in};

use crate::ivshmem::report;
use crate::regions::{Shown, shown};
use crate::table;

/// Manage memory that virtual machines share
///
/// A region is a file on the host that virtual machines have as a device (ivshmem), and host processes as it is. Whoever can
/// open it can read and change everything in it.
#[derive(ClapArgs, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Make a region out of a new file, or of persistent memory with nothing in it
    Init {
        /// The file, which is not there yet; or a device-dax node, all of which is taken
        path: PathBuf,
        /// The file's size, with K, M or G; an ivshmem device's is a power of two
        #[arg(long, default_value = "256M", value_parser = size)]
        size: u64,
    },
    /// Show the peers of a region, and how much of it each of them has
    Show {
        /// The file, or the socket for the host's processes of `usmc ivshmem-server`
        path: PathBuf,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Say that a peer is dead for good
    ///
    /// The others take back what it has left. Never say so of a virtual machine that is only paused: it goes on, and writes into memory
    /// that is another's by then.
    Evict {
        /// The file, or the socket for the host's processes of `usmc ivshmem-server`
        path: PathBuf,
        /// The peer's number, as show has it
        peer: u8,
    },
    /// Take the connections of this host's programs out of a region, before it is taken away
    ///
    /// To be run in a virtual machine before its device is unplugged or it moves to another host, as root where programs are several
    /// users'. Connections go back to TCP and lose no byte, and new ones stay there. It ends once none is left; only then can the
    /// device be taken away. Programs use the region again once they are started anew, after --undo.
    Drain {
        /// The file, device or socket
        path: PathBuf,
        /// Those of this peer instead, as show has its number: wherever its programs run, they leave as soon as they are awake
        #[arg(long)]
        peer: Vec<u8>,
        /// Say that programs may use it after all
        #[arg(long)]
        undo: bool,
        /// How many seconds to wait
        #[arg(long, default_value_t = 10)]
        wait: u64,
    },
    /// Let the group usmc use the regions of this virtual machine, now and after each boot
    ///
    /// Once, as root: makes the group, writes a rule for udev, and gives it the devices that have a region in them (ivshmem,
    /// device-dax). Others' devices are left alone.
    Setup {
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
        /// Take it back
        #[arg(long)]
        undo: bool,
    },
}

/// Does it.
///
/// # Errors
/// What is wrong with the file, and what to do.
pub fn run(args: &Args) -> Result<c_int> {
    match &args.what {
        What::Init { path, size } => init(path, *size)?,
        What::Show { path, json } => show(path, *json)?,
        What::Evict { path, peer } => evict(path, *peer)?,
        What::Drain { path, peer, undo, wait } => {
            drain::run(path, peer, *undo, Duration::from_secs(*wait))?;
        }
        What::Setup { dry_run, undo } => setup::run(*dry_run, *undo)?,
    }
    Ok(0)
}

/// Bytes, of a number with K, M or G.
///
/// # Errors
/// It is no such number, or too small.
pub fn size(text: &str) -> Result<u64> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().context("a number with K, M or G")?;
    let bytes = number.checked_mul(1 << shift).context("too large")?;
    let least = len_for(1) as u64;
    ensure!(bytes >= least, "a region has at least {least} bytes");
    Ok(bytes)
}

fn init(path: &Path, size: u64) -> Result<()> {
    let is_device = fs::metadata(path).is_ok_and(|meta| meta.file_type().is_char_device());
    let units = if is_device { init_device(path)? } else { init_file(path, size)? };
    println!("{}: {units} units of {} KiB", path.display(), UNIT >> 10);
    println!("let others have it by chgrp and chmod: they can read and change all of it");
    Ok(())
}

fn init_file(path: &Path, size: u64) -> Result<usize> {
    // For its user alone. The administrator says which others may have it.
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    let file = file.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => anyhow::anyhow!(
            "{} exists; a region is made once, before anybody uses it: remove the file, if nobody does",
            path.display()
        ),
        _ => anyhow::Error::new(error).context(format!("cannot make {}", path.display())),
    })?;
    let made = file.set_len(size).context("no file of this size");
    made.and_then(|()| format(&file).map(|region| region.units())).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })
}

/// Of a device nobody knows whether it is new, but for what is in it.
fn init_device(path: &Path) -> Result<usize> {
    let what = || path.display().to_string();
    let file = OpenOptions::new().read(true).write(true).open(path).with_context(what)?;
    let map = Map::of(&file).with_context(what)?;
    ensure!(
        map.is_blank(),
        "{} is not empty: a region is made once, of memory with nothing in it; see ndctl-create-namespace(1)",
        what()
    );
    format_map(&map).map(|region| region.units())
}

/// Makes a region out of a file of zero bytes, which nobody uses yet.
///
/// # Errors
/// It cannot be mapped, or is too short.
pub fn format(file: &File) -> Result<Region> {
    format_map(&Map::of(file)?)
}

fn format_map(map: &Map) -> Result<Region> {
    let mut bytes = [0; 16];
    getrandom(&mut bytes[..], GetRandomFlags::empty()).context("getrandom")?;
    let bits = u128::from_ne_bytes(bytes);
    let gid = [(bits >> 64) as u64, bits as u64];
    // SAFETY: a mapping with zero bytes where the tables come, which lasts as long as this process.
    #[expect(unsafe_code, reason = "a mapping of a file")]
    let region = unsafe { Region::format(map.base, map.len, gid) };
    region.context("no room for a unit")
}

/// A mapping of a whole file, which lasts as long as this process.
struct Map {
    base: *mut u8,
    len: usize,
}

impl Map {
    fn of(file: &File) -> Result<Map> {
        let len = provider::length(file.as_raw_fd()).unwrap_or(0);
        ensure!(units_in(len) > 0, "it is too short for a region, or no file that could be one");
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at a place of the kernel's.
        #[expect(unsafe_code, reason = "a mapping of a file")]
        let base = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) };
        let base = base.map_err(|error| match error {
            Errno::PERM => anyhow::anyhow!("{}; see kernel_lockdown(7)", Reason::Lockdown.text()),
            error => anyhow::Error::new(error).context("mmap"),
        })?;
        Ok(Map { base: base.cast(), len })
    }

    /// Whether there is nothing where a region's tables come, and before the first units' end.
    fn is_blank(&self) -> bool {
        let words = self.len.min(len_for(1) + UNITS_MOST * size_of::<u64>()) / size_of::<u64>();
        let base = self.base.cast::<u64>();
        // SAFETY: words of the mapping, which another process may write: each is read once.
        #[expect(unsafe_code, reason = "a mapping of a file")]
        (0..words).all(|at| unsafe { base.add(at).read_volatile() } == 0)
    }
}

fn open(path: &Path) -> Result<Region> {
    let what = path.display().to_string();
    let is_socket = fs::metadata(path).is_ok_and(|facts| facts.file_type().is_socket());
    let file = if is_socket {
        report::region(path)?.into()
    } else {
        let file = OpenOptions::new().read(true).write(true).open(path);
        file.with_context(|| what.clone())?
    };
    of_file(&file, &what)
}

/// The region in this file, which is called `what`.
///
/// # Errors
/// It is none, or one of another version.
pub fn of_file(file: &File, what: &str) -> Result<Region> {
    let map = Map::of(file).with_context(|| what.to_owned())?;
    // SAFETY: the mapping lasts as long as this process.
    #[expect(unsafe_code, reason = "a mapping of a file")]
    match unsafe { Region::open(map.base, map.len) } {
        Ok(region) => Ok(region),
        Err(Refused::Foreign) => bail!("{what}: no region; `usmc region init` makes one"),
        Err(Refused::Version(version)) => bail!(
            "{what}: a region of version {version}; this usmc has version {VERSION}: use one uSMC everywhere"
        ),
    }
}

fn show(path: &Path, json: bool) -> Result<()> {
    let shown = shown(&open(path)?);
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = if json { table::json(&mut out, &shown) } else { print(&mut out, &shown) };
    printed.and_then(|()| out.flush()).context("cannot write the list")
}

fn print(out: &mut impl Write, shown: &Shown) -> io::Result<()> {
    let (free, all, kib) = (shown.free, shown.units, shown.unit_bytes >> 10);
    writeln!(out, "region {}: {free} of {all} units of {kib} KiB are free", shown.gid)?;
    let columns = [("Peer", true), ("Host", false), ("State", false), ("Units", true)];
    let rows = shown.peers.iter().map(|peer| {
        let name = if peer.name.is_empty() { "-" } else { &peer.name };
        [peer.number.to_string(), name.into(), peer.state.into(), peer.units.to_string()]
    });
    table::print(out, &columns, rows)
}

fn evict(path: &Path, number: u8) -> Result<()> {
    let region = open(path)?;
    let peer = region.peers().0.get(usize::from(number)).filter(|_| number != 0);
    let is_there = peer.is_some_and(Peer::declare_gone);
    ensure!(is_there, "there is no peer {number}; `usmc region show` lists them");
    println!("peer {number} is gone; its units come back once others need them");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(size("256M").unwrap(), 256 << 20);
        assert_eq!(size("2g").unwrap(), 2 << 30);
        assert_eq!(size("1048576").unwrap(), 1 << 20);
        for text in ["", "M", "1.5G", "64K", "99999999999G", "-1M"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
