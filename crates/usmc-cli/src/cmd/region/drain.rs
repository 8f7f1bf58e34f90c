//! Before a region is taken away from a kernel: its connections go back to TCP.
//!
//! The region says of a peer that it is about to lose it. Processes look there before they wait for anything, and leave. Those that
//! are asleep are woken by a doorbell: one of this kernel's by the other end, which gets one through the socket of the first.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use usmc::observe::Mode;
use usmc::provider;
use usmc_shm::layout::{ACCEPTOR, CLIENT};
use usmc_shm::region::Region;
use usmc_shm::region::idle::{ends_of, segment_in};
use usmc_shm::region::peers::Life;
use usmc_shm::sync::Ordering::Relaxed;

use crate::doorbell;
use crate::observed::{self, Socket};
use crate::proc::{self, Process};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);
/// Looks between two doorbells.
const RING_EACH: u32 = 25;

/// Says that these peers lose the region, or all of this kernel's, and waits until their connections are TCP. `undo`: that they do not
/// lose it after all.
///
/// # Errors
/// There is no such peer; connections are left after `most`.
pub fn run(path: &Path, peers: &[u8], undo: bool, most: Duration) -> Result<()> {
    let region = super::open(path)?;
    let peers = if peers.is_empty() { own_peers(&region)? } else { peers.to_vec() };
    if peers.is_empty() {
        println!("no program of this host has joined the region");
        return Ok(());
    }
    for &peer in &peers {
        let is_there = region.drain(peer, !undo);
        ensure!(is_there, "there is no living peer {peer}; `usmc region show` lists them");
    }
    if undo {
        println!("programs that start from now on use the region again");
        return Ok(());
    }
    let start = Instant::now();
    for look in 0.. {
        let left = ends(&region, &peers);
        if left == 0 {
            println!("no connection is left in the region: it can be taken away");
            return Ok(());
        }
        if start.elapsed() > most {
            return still(path, &region, left);
        }
        if look % RING_EACH == 0 {
            wake_all(&region, &peers);
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

/// The peers that are directories of this kernel.
fn own_peers(region: &Region) -> Result<Vec<u8>> {
    let host = provider::boot_id().context("cannot read /proc/sys/kernel/random/boot_id")?;
    let peers = region.peers();
    let own = |(_, peer): &(u8, &usmc_shm::region::peers::Peer)| {
        peer.life() == Life::Alive && peer.identity().host == host
    };
    Ok(peers.all().filter(own).map(|(number, _)| number).collect())
}

/// How many ends of connections these peers have in the region.
fn ends(region: &Region, peers: &[u8]) -> usize {
    region.words().runs().map(|run| ends_of(region, run, |peer| peers.contains(&peer))).sum()
}

/// Programs of this host that use the region, and how many connections they have in it.
fn still(path: &Path, region: &Region, left: usize) -> Result<()> {
    let mut programs = BTreeMap::new();
    for pid in mapping(path) {
        programs.insert(pid, 0);
    }
    each_socket(region, |process, _| *programs.entry(process.pid).or_insert(0) += 1);
    let named = programs.iter().map(|(pid, count)| {
        let comm = proc::find(*pid).ok().flatten().map(|process| process.comm);
        format!("{} ({pid}): {count}", comm.as_deref().unwrap_or("-"))
    });
    let named = named.collect::<Vec<_>>().join(", ");
    bail!(
        "ends of connections left in the region: {left}; do not take it away yet. Programs of this host that have it, and their \
         connections in it: {}. Repeat it, as root where they are another user's, or end them",
        if named.is_empty() { "none" } else { &named }
    )
}

/// The processes that have mapped it, as far as this user may know.
fn mapping(path: &Path) -> Vec<u32> {
    let Ok(facts) = fs::metadata(path) else { return Vec::new() };
    let Ok(processes) = procfs::process::all_processes() else { return Vec::new() };
    let has = |process: &procfs::process::Process| {
        let maps = process.maps().map(|maps| maps.into_iter().collect::<Vec<_>>());
        maps.is_ok_and(|maps| maps.iter().any(|map| map.inode == facts.ino() && is_of(map, &facts)))
    };
    let having = processes.flatten().filter(has);
    having.filter_map(|process| u32::try_from(process.pid).ok()).collect()
}

fn is_of(map: &procfs::process::MemoryMap, facts: &fs::Metadata) -> bool {
    let (major, minor) = (libc::major(facts.dev()), libc::minor(facts.dev()));
    map.dev == (major.cast_signed(), minor.cast_signed())
}

fn each_socket(region: &Region, mut each: impl FnMut(&Process, &Socket)) {
    let [high, low] = region.gid().map(u128::from);
    let Ok(scan) = proc::scan() else { return };
    for process in &scan.processes {
        for reading in process.files.iter().filter_map(|file| observed::read(file).ok()) {
            let is_in = |s: &&Socket| s.mode == Mode::Smcd && s.region == Some(high << 64 | low);
            reading.sockets.iter().filter(is_in).for_each(|socket| each(process, socket));
        }
    }
}

/// Rings for the other ends of these peers' connections, as far as they are of this host's processes.
fn wake_all(region: &Region, peers: &[u8]) {
    each_socket(region, |process, socket| _ = wake(region, peers, process.pid, socket));
}

/// As the process itself rings. What stands in the region is other machines' word: it says whether to ring, and counts the doorbell.
fn wake(region: &Region, peers: &[u8], pid: u32, socket: &Socket) -> Option<()> {
    let run = region.words().run_at(socket.segment as u32 >> 1)?;
    let map = segment_in(region, run)?;
    if map.header().id.load(Relaxed) != socket.segment {
        return None;
    }
    let slot = map.slot(socket.slot).ok()?;
    let (side, holder) = match socket.is_client {
        true => (CLIENT, run.owner.peer),
        false => (ACCEPTOR, slot.control.attached_peer.load(Relaxed) as u8),
    };
    if !peers.contains(&holder) {
        return None;
    }
    doorbell::ring(&map, side, pid, socket)
}
