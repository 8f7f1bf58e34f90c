//! What an end of a check is, as it tells the other one.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use usmc::observe::DEVICE_VERSION;
use usmc::provider;

use crate::cmd::region::usable;
use crate::config::Config;
use crate::{agent, machine, regions};

/// Entries of each list that are kept.
const MOST: usize = 16;

/// What an end is. Texts are the other end's to say: they are bounded by a line's length, and shown escaped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Facts {
    /// Of uSMC.
    pub version: String,
    /// Of the device's layout.
    pub device_version: u32,
    /// The kernel's boot id: one kernel has one.
    pub boot: String,
    /// The inode of the network namespace.
    pub netns: u64,
    /// The user.
    pub uid: u32,
    /// The host's name.
    pub host: String,
    /// The ISM directory.
    pub directory: String,
    /// Its device's GID, if there is one yet.
    pub gid: Option<String>,
    /// What is in the way there already.
    pub problem: Option<String>,
    /// Ids of the regions that programs would use.
    pub regions: Vec<String>,
    /// Whether an agent of RDMA answers.
    pub has_agent: bool,
    /// That agent's devices, those that are up.
    pub devices: Vec<String>,
}

/// This end's.
pub fn collect(config: &Config, problem: Option<String>) -> Facts {
    let dir = config.ism_dir();
    let gid = machine::gid(&dir.join(machine::device_name()));
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let agents = agent::report(&dir);
    let up = agents.devices.iter().filter(|device| device.is_up());
    let mut ids = Vec::new();
    provider::each(config.text("regions").unwrap_or("auto"), |path| {
        ids.extend(usable::open(path).ok().map(|region| regions::shown(&region).gid));
    });
    Facts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        device_version: DEVICE_VERSION,
        boot: boot.trim().to_owned(),
        netns: fs::metadata("/proc/self/ns/net").map_or(0, |facts| facts.ino()),
        uid: rustix::process::geteuid().as_raw(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        directory: dir.display().to_string(),
        gid: gid.map(|gid| format!("{gid:032x}")),
        problem,
        regions: ids.into_iter().take(MOST).collect(),
        has_agent: !agents.agents.is_empty(),
        devices: up.map(|device| device.name.clone()).take(MOST).collect(),
    }
}

#[cfg(test)]
impl Facts {
    /// Of an end with nothing.
    pub fn example() -> Facts {
        Facts {
            version: "0.1.0".to_owned(),
            device_version: DEVICE_VERSION,
            boot: "b".to_owned(),
            netns: 1,
            uid: 0,
            host: "h".to_owned(),
            directory: "/d".to_owned(),
            gid: Some("1".to_owned()),
            problem: None,
            regions: Vec::new(),
            has_agent: false,
            devices: Vec::new(),
        }
    }
}
