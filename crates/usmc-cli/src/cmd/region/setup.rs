//! `usmc region setup`: lets a group use the regions of a virtual machine, now and after each boot.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use usmc::provider;
use usmc::reason::Reason;

use super::usable;
use crate::steps::Steps;

const RULES: &str = "/etc/udev/rules.d/70-usmc-region.rules";
const GROUP: &str = "usmc";

/// A device with a region in it.
#[derive(Debug, PartialEq, Eq)]
enum Device {
    /// An ivshmem device, by its PCI address.
    Pci(String),
    /// Persistent memory, by the name of its node.
    Dax(String),
}

impl Device {
    fn of(path: &str) -> Option<Device> {
        let (dir, name) = path.rsplit_once('/')?;
        match dir.rsplit_once('/')? {
            ("/sys/bus/pci/devices", address) => Some(Device::Pci(address.to_owned())),
            _ if dir == "/dev" => Some(Device::Dax(name.to_owned())),
            _ => None,
        }
    }

    /// What is opened.
    fn path(&self) -> PathBuf {
        match self {
            Device::Pci(address) => format!("/sys/bus/pci/devices/{address}/resource2").into(),
            Device::Dax(name) => Path::new("/dev").join(name),
        }
    }

    /// Its registers: programs read there which machine of its server's this is. Whoever could write them could interrupt others.
    fn registers(&self) -> Option<PathBuf> {
        match self {
            Device::Pci(_) => Some(self.path().with_file_name("resource0")),
            Device::Dax(_) => None,
        }
    }

    /// Where the kernel is told to let its memory be read, where it has such a place.
    fn enable(&self) -> Option<PathBuf> {
        match self {
            Device::Pci(_) => Some(self.path().with_file_name("enable")),
            Device::Dax(_) => None,
        }
    }

    /// udev(7)'s rule. GROUP and MODE are for nodes in /dev only, hence the commands.
    fn rule(&self) -> String {
        match self {
            Device::Pci(address) => format!(
                "ACTION!=\"remove\", SUBSYSTEM==\"pci\", KERNEL==\"{address}\", ATTR{{vendor}}==\"0x1af4\", \
                 ATTR{{device}}==\"0x1110\", ATTR{{enable}}=\"1\", \
                 RUN+=\"/bin/chgrp {GROUP} /sys%p/resource2 /sys%p/resource0\", \
                 RUN+=\"/bin/chmod 0660 /sys%p/resource2\", RUN+=\"/bin/chmod 0640 /sys%p/resource0\"\n"
            ),
            Device::Dax(name) => {
                format!(
                    "SUBSYSTEM==\"dax\", KERNEL==\"{name}\", GROUP=\"{GROUP}\", MODE=\"0660\"\n"
                )
            }
        }
    }
}

/// Does it.
///
/// # Errors
/// What is in the way, and what to do.
pub fn run(is_dry: bool, undo: bool) -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "run it as root: it looks into devices");
    let steps = Steps { is_dry };
    if undo { take_back(&steps) } else { set_up(&steps) }
}

fn set_up(steps: &Steps) -> Result<()> {
    let mut devices = Vec::new();
    let mut others = Vec::new();
    for path in candidates() {
        let Some(device) = Device::of(&path) else { continue };
        match look(&device, steps.is_dry) {
            Ok(()) => devices.push(device),
            Err(reason) => others.push((path, reason)),
        }
    }
    for (path, reason) in &others {
        let remedy = usable::remedy(path, *reason, true);
        println!("{path} is left alone: {}\n  -> {remedy}", reason.text());
    }
    if devices.is_empty() {
        bail!(
            "no device here has a region in it; give the machine one (ivshmem) whose file the host has prepared by \
             `usmc region init`, see usmc-region(1)"
        );
    }
    let gid = match group() {
        Some(gid) => gid,
        None => {
            steps.step(&format!("make the group {GROUP}"), make_group)?;
            // In a dry run there is none, and nobody asks.
            group().unwrap_or(0)
        }
    };
    let rules = rules(&devices);
    steps.write(Path::new(RULES), &rules)?;
    for device in &devices {
        if let Some(enable) = device.enable() {
            steps.step(&format!("enable {}", device.path().display()), || {
                fs::write(enable, "1").map_err(Into::into)
            })?;
        }
        give(steps, &device.path(), gid, GROUP, 0o660)?;
        if let Some(registers) = device.registers() {
            give(steps, &registers, gid, GROUP, 0o640)?;
        }
    }
    println!("let a user share memory with other machines: usermod -aG {GROUP} USER");
    Ok(())
}

fn take_back(steps: &Steps) -> Result<()> {
    steps.remove(Path::new(RULES))?;
    let Some(gid) = group() else { return Ok(()) };
    let is_ours = |device: &Device| fs::metadata(device.path()).is_ok_and(|meta| meta.gid() == gid);
    let devices = candidates().into_iter().filter_map(|path| Device::of(&path)).filter(is_ours);
    for device in devices {
        for path in [Some(device.path()), device.registers()].into_iter().flatten() {
            give(steps, &path, 0, "root", 0o600)?;
        }
    }
    println!("the group {GROUP} stays: `groupdel {GROUP}` removes it");
    Ok(())
}

/// The memory of ivshmem devices, and persistent memory as it is.
fn candidates() -> Vec<String> {
    let mut paths = Vec::new();
    provider::each_device(|path| paths.push(path.to_owned()));
    let nodes = fs::read_dir("/dev").into_iter().flatten().flatten();
    let nodes = nodes.filter_map(|node| node.file_name().into_string().ok());
    let mut nodes: Vec<String> = nodes.filter(|name| is_dax(name)).collect();
    nodes.sort();
    paths.extend(nodes.iter().map(|name| format!("/dev/{name}")));
    paths
}

/// `dax0.0`.
fn is_dax(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.strip_prefix("dax").and_then(|name| name.split_once('.'));
    numbers.is_some_and(|(major, minor)| is_number(major) && is_number(minor))
}

/// Whether there is a region in it. A device that no driver has enabled reads as ones, so that it is enabled for the look.
fn look(device: &Device, is_dry: bool) -> Result<(), Reason> {
    let path = device.path();
    let enable = device.enable().filter(|enable| {
        !is_dry && fs::read_to_string(enable).is_ok_and(|text| text.trim() == "0")
    });
    if let Some(enable) = &enable {
        // Where that fails the look does.
        let _ = fs::write(enable, "1");
    }
    let looked = usable::open(&path.to_string_lossy()).map(drop);
    if let (Some(enable), Err(_)) = (&enable, looked) {
        let _ = fs::write(enable, "0");
    }
    looked
}

fn rules(devices: &[Device]) -> String {
    let head = "# Regions that programs under uSMC share with other machines. Made by `usmc region setup`.\n";
    devices.iter().fold(head.to_owned(), |text, device| text + &device.rule())
}

fn give(steps: &Steps, path: &Path, gid: u32, group: &str, mode: u32) -> Result<()> {
    steps.step(&format!("give {} to the group {group}, mode {mode:04o}", path.display()), || {
        chown(path, None, Some(gid))?;
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(Into::into)
    })
}

/// The group's number, if there is such a group.
fn group() -> Option<u32> {
    let named = Command::new("getent").args(["group", GROUP]).output();
    let text = match named {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        // musl has none.
        Err(_) => fs::read_to_string("/etc/group").unwrap_or_default(),
    };
    gid_in(&text)
}

fn gid_in(groups: &str) -> Option<u32> {
    let fields = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    fields.filter(|fields| fields[0] == GROUP).find_map(|fields| fields.get(2)?.parse().ok())
}

fn make_group() -> Result<()> {
    let made = Command::new("groupadd").args(["--system", GROUP]).output();
    let made = made.with_context(|| format!("groupadd; make the group {GROUP} by other means"))?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr).trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_names_one_device() {
        let pci = Device::of("/sys/bus/pci/devices/0000:00:03.0/resource2").unwrap();
        let dax = Device::of("/dev/dax0.1").unwrap();
        assert_eq!(pci.path(), Path::new("/sys/bus/pci/devices/0000:00:03.0/resource2"));
        let text = rules(&[pci, dax]);
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("KERNEL==\"0000:00:03.0\"") && text.contains("ATTR{enable}=\"1\""));
        assert!(text.contains("/sys%p/resource2") && text.contains("KERNEL==\"dax0.1\""));
        assert_eq!(Device::of("/dev/shm/usmc0"), None);
    }

    #[test]
    fn nodes_of_persistent_memory_have_two_numbers() {
        assert!(is_dax("dax0.0") && is_dax("dax12.3"));
        assert!(!["dax", "dax0", "dax0.", "dax_ctl", "daxx.0"].into_iter().any(is_dax));
    }

    #[test]
    fn groups_are_found_by_name() {
        assert_eq!(gid_in("root:x:0:\nusmc:x:998:a,b\n"), Some(998));
        assert_eq!(gid_in("usmc-web:x:7:\n"), None);
        assert_eq!(gid_in("usmc\n"), None);
    }
}
