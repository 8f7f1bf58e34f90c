//! What is told of the machine.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Item, lines, lines_of_present, read};
use crate::config::{Config, ConfigArgs};
use crate::machine::entries;
use crate::proc;

/// Settings of the kernel that matter to connections, or to who may see what.
const SYSCTLS: [&str; 34] = [
    "fs/file-max",
    "fs/inotify/max_user_instances",
    "fs/inotify/max_user_watches",
    "fs/nr_open",
    "kernel/io_uring_disabled",
    "kernel/pid_max",
    "kernel/sched_autogroup_enabled",
    "kernel/unprivileged_bpf_disabled",
    "kernel/unprivileged_userns_clone",
    "kernel/yama/ptrace_scope",
    "net/core/bpf_jit_enable",
    "net/core/busy_poll",
    "net/core/busy_read",
    "net/core/netdev_max_backlog",
    "net/core/optmem_max",
    "net/core/rmem_default",
    "net/core/rmem_max",
    "net/core/somaxconn",
    "net/core/wmem_default",
    "net/core/wmem_max",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_fastopen",
    "net/ipv4/tcp_mem",
    "net/ipv4/tcp_moderate_rcvbuf",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_syncookies",
    "net/ipv4/tcp_timestamps",
    "net/ipv4/tcp_tw_reuse",
    "net/ipv4/tcp_wmem",
    "net/mptcp/enabled",
    "vm/max_map_count",
    "vm/nr_hugepages",
    "vm/overcommit_memory",
];

/// How the names of modules begin that have to do with SMC, RDMA or MPTCP.
const MODULES: [&str; 8] = ["smc", "ib_", "rdma", "mlx", "siw", "ism", "irdma", "mptcp"];

/// Limits of a cgroup.
const CGROUP: [&str; 9] = [
    "cgroup.controllers",
    "cpu.max",
    "cpu.weight",
    "cpuset.cpus.effective",
    "memory.current",
    "memory.high",
    "memory.max",
    "memory.swap.max",
    "pids.max",
];

/// What is told of the machine.
pub fn items() -> Vec<Item> {
    let made = |member: &str, from: &str, make: fn() -> String| {
        Item::new(format!("system/{member}"), from, move || Ok(make()))
    };
    vec![
        Item::file("system/os-release", "/etc/os-release"),
        Item::file("system/kernel", "/proc/version"),
        Item::file("system/meminfo", "/proc/meminfo"),
        Item::file("system/loadavg", "/proc/loadavg"),
        Item::file("system/limits", "/proc/self/limits"),
        Item::file("system/pressure-cpu", "/proc/pressure/cpu"),
        Item::file("system/sockstat", "/proc/net/sockstat"),
        made("sysctl.txt", "/proc/sys: TCP, sockets, memory, and who may see what", sysctls),
        made("cpu.txt", "/sys/devices/system/cpu: topology and caches", cpus),
        made("cgroup.txt", "limits of this command's cgroup and those above it", || {
            cgroup(&read(Path::new("/proc/self/cgroup")).unwrap_or_default())
        }),
        made("mounts.txt", "mounts that ISM directories lie in", mounts),
        made("ism-directories.txt", "names, owners and modes in ISM directories", directories),
        Item::new("system/modules.txt", "/proc/modules: SMC, RDMA and MPTCP", modules),
    ]
}

fn sysctls() -> String {
    let known = SYSCTLS.map(|name| format!("/proc/sys/{name}"));
    let smc = entries(Path::new("/proc/sys/net/smc"));
    let smc = smc.into_iter().map(|path| path.display().to_string());
    lines(known.into_iter().filter(|path| Path::new(path).exists()).chain(smc))
}

fn cpus() -> String {
    let dir = "/sys/devices/system/cpu";
    let mut paths: Vec<String> = ["online", "possible", "smt/active", "cpuidle/current_driver"]
        .map(|n| format!("{dir}/{n}"))
        .into();
    for cpu in entries(Path::new(dir)) {
        let name = cpu.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_cpu = name.strip_prefix("cpu").is_some_and(|n| n.parse::<u32>().is_ok());
        if !is_cpu {
            continue;
        }
        let of = |name: &str| cpu.join(name).display().to_string();
        paths.extend(
            ["physical_package_id", "die_id", "core_id", "thread_siblings_list"]
                .map(|name| of(&format!("topology/{name}"))),
        );
        for cache in entries(&cpu.join("cache")) {
            paths.extend(
                ["level", "type", "size", "shared_cpu_list"]
                    .map(|name| cache.join(name).display().to_string()),
            );
        }
    }
    let model = read(Path::new("/proc/cpuinfo")).unwrap_or_default();
    let is_told = |line: &&str| {
        ["model name", "vendor_id", "flags", "Features", "CPU part"]
            .iter()
            .any(|s| line.starts_with(s))
    };
    // One of each: they are alike.
    let told: BTreeSet<&str> = model.lines().filter(is_told).collect();
    let told: String = told.into_iter().map(|line| format!("{line}\n")).collect();
    told + &lines_of_present(paths)
}

/// The limits of the cgroup in this text (proc_pid_cgroup(5)), and of those above it.
pub fn cgroup(text: &str) -> String {
    let root = Path::new("/sys/fs/cgroup");
    let mut told = text.to_owned();
    let unified = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = root.join(unified.unwrap_or_default());
    for dir in own.ancestors().take_while(|dir| dir.starts_with(root)) {
        let files = CGROUP.map(|name| dir.join(name).display().to_string());
        told.push_str(&lines_of_present(files));
    }
    told
}

/// The ISM directory of the configuration, and those of programs.
fn ism_directories() -> BTreeSet<PathBuf> {
    let config = Config::load(&ConfigArgs::default()).map(|config| config.ism_dir());
    let scan = proc::scan().unwrap_or_default();
    let used = scan.processes.into_iter().filter_map(|process| Some(process.device?.0));
    config.into_iter().chain(used).collect()
}

fn mounts() -> String {
    let Ok(table) = read(Path::new("/proc/self/mountinfo")) else {
        return "cannot read /proc/self/mountinfo\n".to_owned();
    };
    let mut told = BTreeSet::new();
    for dir in ism_directories() {
        let line = mount_of(&table, &dir).unwrap_or("no mount");
        told.insert(format!("{}: {line}\n", dir.display()));
    }
    told.into_iter().collect()
}

/// The line of a mount table (proc_pid_mountinfo(5)) that a path lies in. Of two at one place the later one counts.
fn mount_of<'a>(table: &'a str, path: &Path) -> Option<&'a str> {
    let point = |line: &'a str| line.split(' ').nth(4).map(Path::new);
    let lines = table.lines().filter(|line| point(line).is_some_and(|at| path.starts_with(at)));
    lines.max_by_key(|line| point(line).map_or(0, |at| at.components().count()))
}

fn directories() -> String {
    ism_directories().iter().map(|dir| listing(dir)).collect()
}

fn listing(dir: &Path) -> String {
    let mut text = format!("=== {}\n", dir.display());
    let own = fs::symlink_metadata(dir);
    let line = |name: String, facts: std::io::Result<fs::Metadata>| match facts {
        Ok(facts) => format!(
            "{:06o} {}:{} {} bytes, {} blocks, inode {}: {name}\n",
            facts.mode(),
            facts.uid(),
            facts.gid(),
            facts.len(),
            facts.blocks(),
            facts.ino()
        ),
        Err(error) => format!("{name}: {error}\n"),
    };
    text.push_str(&line(".".to_owned(), own));
    match fs::read_dir(dir) {
        Ok(entries) => {
            let mut found: Vec<_> = entries.flatten().take(10_000).collect();
            found.sort_by_key(fs::DirEntry::file_name);
            for entry in found {
                let name = entry.file_name().to_string_lossy().escape_debug().to_string();
                text.push_str(&line(name, fs::symlink_metadata(entry.path())));
            }
        }
        Err(error) => text.push_str(&format!("cannot list it: {error}\n")),
    }
    text
}

fn modules() -> Result<String, String> {
    let all = read(Path::new("/proc/modules"))?;
    let wanted = all.lines().filter(|line| MODULES.iter().any(|start| line.starts_with(start)));
    let wanted: String = wanted.map(|line| format!("{line}\n")).collect();
    Ok(if wanted.is_empty() { "none\n".to_owned() } else { wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_is_told() {
        let table = "21 1 0:1 / / rw - ext4 /dev/vda rw\n\
                     22 21 0:2 / /dev rw - devtmpfs none rw\n\
                     23 22 0:3 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=64k\n\
                     24 22 0:4 / /dev/shm rw - tmpfs above rw\n";
        let of = |path: &str| mount_of(table, Path::new(path)).expect("a mount");
        assert!(of("/dev/shm/usmc-0").starts_with("24 "), "{}", of("/dev/shm/usmc-0"));
        assert!(of("/dev/shmx").starts_with("22 "));
        assert!(of("/run").starts_with("21 "));
    }

    #[test]
    fn a_directory_is_listed() {
        let dir = std::env::temp_dir().join(format!("usmc-listing-{}", std::process::id()));
        fs::create_dir(&dir).expect("a directory");
        fs::write(dir.join("a\nb"), b"12345").expect("a file");
        let text = listing(&dir);
        fs::remove_dir_all(&dir).expect("our own directory");
        assert!(text.contains("5 bytes") && text.contains(r": a\nb"), "{text}");
        assert!(listing(&dir).contains("cannot list it"));
    }
}
