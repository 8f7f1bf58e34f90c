//! The devices that SMC could use here: the loopback ISM devices of running programs, and the machine's RDMA ports.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::proc::Process;

/// What tells a device from others, wherever its directory is mounted.
pub type Identity = (u64, u64);

/// A loopback ISM device.
#[derive(Clone, Debug)]
pub struct Ism {
    /// Its directory, as the processes that use it name it.
    pub dir: PathBuf,
    /// Its GID; `None` if it may not be read.
    pub gid: Option<u128>,
    /// The processes that use it.
    pub pids: Vec<u32>,
}

/// The name of the device's file, which tells its version.
pub fn device_name() -> String {
    format!("v{}.device", usmc::observe::DEVICE_VERSION)
}

/// Those that running processes use, and the one of the configuration.
pub fn isms(processes: &[Process], configured: &Path) -> BTreeMap<Identity, Ism> {
    let mut devices: BTreeMap<Identity, Ism> = BTreeMap::new();
    for process in processes {
        let Some((dir, identity)) = &process.device else { continue };
        let opened = || format!("/proc/{}/root{}", process.pid, dir.join(device_name()).display());
        let new = || Ism { dir: dir.clone(), gid: gid(Path::new(&opened())), pids: Vec::new() };
        devices.entry(*identity).or_insert_with(new).pids.push(process.pid);
    }
    let file = configured.join(device_name());
    if let Ok(facts) = fs::metadata(&file) {
        let new = || Ism { dir: configured.to_owned(), gid: gid(&file), pids: Vec::new() };
        devices.entry((facts.dev(), facts.ino())).or_insert_with(new);
    }
    devices
}

/// The device file's GID, as usmc's loopback device keeps it.
pub fn gid(file: &Path) -> Option<u128> {
    let mut header = [0u8; usmc::observe::DEVICE_GID_OFFSET + 16];
    File::open(file).ok()?.read_exact(&mut header).ok()?;
    let word = |at: usize| header[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
    let at = usmc::observe::DEVICE_GID_OFFSET;
    let is_ours = word(0) == usmc::observe::DEVICE_MAGIC;
    is_ours.then(|| u128::from(word(at)) << 64 | u128::from(word(at + 8)))
}

/// A port of an RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaPort {
    /// The device.
    pub ibdevice: String,
    /// The port, from 1.
    pub port: u32,
    /// Its state, as the kernel names it: ACTIVE, DOWN, …
    pub state: String,
    /// The network device of its first GID.
    pub netdev: Option<String>,
}

/// The machine's RDMA ports, from sysfs(5).
pub fn rdma_ports(sysfs: &Path) -> Vec<RdmaPort> {
    let text = |path: PathBuf| {
        fs::read_to_string(path).ok().map(|s| s.trim().to_owned()).filter(|s| !s.is_empty())
    };
    let mut ports = Vec::new();
    for device in entries(&sysfs.join("class/infiniband")) {
        for port in entries(&device.join("ports")) {
            let name = |path: &Path| path.file_name().map(|n| n.to_string_lossy().into_owned());
            let (Some(ibdevice), Some(Ok(number))) =
                (name(&device), name(&port).map(|n| n.parse()))
            else {
                continue;
            };
            // "4: ACTIVE"
            let state = text(port.join("state")).unwrap_or_default();
            let state = state.split_once(": ").map_or(state.clone(), |(_, name)| name.to_owned());
            let netdev = text(port.join("gid_attrs/ndevs/0"));
            ports.push(RdmaPort { ibdevice, port: number, state, netdev });
        }
    }
    ports
}

/// What is in a directory, by name; nothing where it cannot be read.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_ports_are_found_in_sysfs() {
        let root = std::env::temp_dir().join(format!("usmc-sysfs-{}", std::process::id()));
        let port = root.join("class/infiniband/rxe0/ports/1");
        fs::create_dir_all(port.join("gid_attrs/ndevs")).expect("a directory");
        fs::write(port.join("state"), "4: ACTIVE\n").expect("a file");
        fs::write(port.join("gid_attrs/ndevs/0"), "eth0\n").expect("a file");
        fs::create_dir_all(root.join("class/infiniband/rxe0/ports/2")).expect("a directory");
        let found = rdma_ports(&root);
        fs::remove_dir_all(&root).expect("our own directory");
        let of = |port, state: &str, netdev: Option<&str>| RdmaPort {
            ibdevice: "rxe0".to_owned(),
            port,
            state: state.to_owned(),
            netdev: netdev.map(str::to_owned),
        };
        assert_eq!(found, [of(1, "ACTIVE", Some("eth0")), of(2, "", None)]);
        assert_eq!(rdma_ports(&root), []);
    }
}
