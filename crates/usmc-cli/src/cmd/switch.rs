//! `usmc off` and `usmc on`: programs that run leave shared memory, and come back to it.
//!
//! The switch is a word in the directory's file. Processes look at it before they wait for anything. Those that are asleep are woken by a
//! doorbell of each connection.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use usmc::memfd::{MEMFD_NAME, View};
use usmc::observe::{DEVICE_MAGIC, DEVICE_SWITCH_OFFSET, Mode};
use usmc_shm::layout::{ACCEPTOR, CLIENT};
use usmc_shm::sync::Ordering::Relaxed;

use crate::config::{Config, DirArgs};
use crate::doorbell;
use crate::machine::{self, Identity};
use crate::observed::{self, Socket};
use crate::proc::{self, Scan};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);
/// Looks between two doorbells.
const RING_EACH: u32 = 25;

/// Take all connections back to TCP, and let no new one leave it, until usmc on
///
/// Programs need not be started anew, and no byte is lost. It is for the programs that share an ISM directory, those that start later
/// among them. Connections that an agent has (SMC-R) stay with it, and new ones stay TCP.
#[derive(clap::Args, Debug)]
pub struct OffArgs {
    #[command(flatten)]
    dir: DirArgs,
    /// How many seconds to wait for connections to come back
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
}

/// Let connections leave TCP again
///
/// New ones, and those that were taken back: each at its next requests.
#[derive(clap::Args, Debug)]
pub struct OnArgs {
    #[command(flatten)]
    dir: DirArgs,
}

/// Switches off, and waits until no connection is in shared memory.
///
/// # Errors
/// There is no such directory, or connections are left.
pub fn off(args: &OffArgs) -> Result<c_int> {
    let device = Device::open(&args.dir)?;
    // They may leave faster than they are counted.
    let mut most = ends_in(&proc::scan()?, device.identity).len();
    device.switch(true)?;
    let start = Instant::now();
    for look in 0.. {
        let scan = proc::scan()?;
        let ends = ends_in(&scan, device.identity);
        most = most.max(ends.len());
        if ends.is_empty() {
            println!(
                "off: {} back on TCP; new connections stay there until usmc on",
                connections(most)
            );
            break;
        }
        if start.elapsed() > Duration::from_secs(args.wait) {
            bail!("{}", left(&ends));
        }
        if look % RING_EACH == 0 {
            wake(&scan, &ends);
        }
        thread::sleep(LOOK);
    }
    let hidden = proc::scan()?.hidden;
    if hidden > 0 {
        eprintln!(
            "usmc: {hidden} processes of other users may have more; repeat it by sudo to see them"
        );
    }
    Ok(0)
}

/// Switches on.
///
/// # Errors
/// There is no such directory.
pub fn on(args: &OnArgs) -> Result<c_int> {
    let was_off = Device::open(&args.dir)?.switch(false)?;
    println!(
        "{}",
        if was_off {
            "on: connections leave TCP again, each at its next requests"
        } else {
            "on, as before"
        }
    );
    Ok(0)
}

/// Whether the directory is switched off.
pub fn is_off(dir: &Path) -> bool {
    let file = File::open(dir.join(machine::device_name()));
    file.and_then(|file| word(&file)).is_ok_and(|word| word % 2 == 1)
}

fn word(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, DEVICE_SWITCH_OFFSET as u64)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A directory's file.
struct Device {
    file: File,
    identity: Identity,
}

impl Device {
    fn open(dir: &DirArgs) -> Result<Device> {
        let dir = Config::load(&dir.config())?.ism_dir();
        let path = dir.join(machine::device_name());
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = match OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "no program has used {} yet; usmc check makes it, and --ism-dir names another",
                dir.display()
            ),
            Err(error) => {
                let what =
                    format!("cannot switch {}; be its owner, or in its group", dir.display());
                return Err(error).context(what);
            }
        };
        let facts = file.metadata().context("fstat")?;
        let mut magic = [0; 8];
        let is_it = facts.is_file()
            && file.read_exact_at(&mut magic, 0).is_ok()
            && u64::from_ne_bytes(magic) == DEVICE_MAGIC;
        ensure!(is_it, "{} is not the file of an ISM directory; remove it", path.display());
        Ok(Device { file, identity: (facts.dev(), facts.ino()) })
    }

    /// Whether it was off before. Who switches keeps others from it meanwhile; programs read the word, whose lowest byte alone changes
    /// but for once in 256 times.
    fn switch(&self, off: bool) -> Result<bool> {
        flock(&self.file, FlockOperation::LockExclusive).context("flock")?;
        let before = word(&self.file).context("cannot read the switch")?;
        let was_off = before % 2 == 1;
        if was_off != off {
            let after = before.wrapping_add(1).to_ne_bytes();
            let written = self.file.write_all_at(&after, DEVICE_SWITCH_OFFSET as u64);
            written.context("cannot write the switch")?;
        }
        flock(&self.file, FlockOperation::Unlock).context("flock")?;
        Ok(was_off)
    }
}

/// An end of a connection in shared memory.
struct End<'a> {
    process: &'a proc::Process,
    socket: Socket,
}

/// Those of the directory's programs, in its own memory and in regions.
fn ends_in(scan: &Scan, device: Identity) -> Vec<End<'_>> {
    let is_its = |process: &&proc::Process| {
        process.device.as_ref().is_some_and(|(_, identity)| *identity == device)
    };
    scan.processes.iter().filter(is_its).flat_map(ends_of).collect()
}

fn ends_of(process: &proc::Process) -> Vec<End<'_>> {
    let readings = process.files.iter().filter_map(|file| observed::read(file).ok());
    let sockets = readings.flat_map(|reading| reading.sockets);
    let sockets = sockets.filter(|socket| socket.mode == Mode::Smcd);
    sockets.map(|socket| End { process, socket }).collect()
}

/// Rings at both ends of each connection of the directory's own memory.
fn wake(scan: &Scan, ends: &[End<'_>]) {
    let segments = segments(scan);
    for End { process, socket } in ends {
        let side = if socket.is_client { CLIENT } else { ACCEPTOR };
        if let Some(view) = segments.get(&socket.segment).filter(|_| socket.region.is_none()) {
            doorbell::ring(view.segment(), side, process.pid, socket);
        }
    }
}

/// The segments that these processes have open, by their ids.
fn segments(scan: &Scan) -> HashMap<u64, View> {
    let files = scan.processes.iter().flat_map(|process| segment_files(process.pid));
    let views = files.filter_map(|file| View::of(file.as_raw_fd()).ok());
    views.map(|view| (view.segment().header().id.load(Relaxed), view)).collect()
}

fn segment_files(pid: u32) -> Vec<File> {
    let name = MEMFD_NAME.to_string_lossy();
    let is_segment = |link: &Path| {
        let link = link.to_string_lossy();
        link.strip_prefix("/memfd:").is_some_and(|rest| rest.trim_end_matches(" (deleted)") == name)
    };
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let links = entries.flatten().map(|entry| entry.path());
    let segments = links.filter(|path| fs::read_link(path).is_ok_and(|link| is_segment(&link)));
    let open =
        |path| OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
    segments.filter_map(|path| open(path).ok()).collect()
}

/// Connections are counted by both ends, as far as these are seen.
fn connections(ends: usize) -> String {
    match ends {
        1 => "1 end of a connection is".to_owned(),
        _ => format!("{ends} ends of connections are"),
    }
}

fn left(ends: &[End<'_>]) -> String {
    let mut programs = BTreeMap::new();
    for End { process, .. } in ends {
        *programs.entry(format!("{} ({})", process.comm, process.pid)).or_insert(0) += 1;
    }
    let named = programs.iter().map(|(program, count)| format!("{program}: {count}"));
    format!(
        "off, but {} in shared memory still: {}. They go back when their programs next wait for a socket; repeat usmc off to see whether",
        connections(ends.len()),
        named.collect::<Vec<_>>().join(", ")
    )
}
