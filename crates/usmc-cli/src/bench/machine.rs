//! The machine, for whoever reads the figures elsewhere.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cpus;

/// What it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The processor, as it calls itself.
    pub processor: String,
    /// CPUs that are online.
    pub cpus: usize,
    /// Cores that this program may use.
    pub cores: usize,
    /// Whether some of the CPUs share a core.
    pub threads_share_cores: bool,
    /// The hypervisor, if it says so.
    pub virtual_machine: bool,
    /// Bytes.
    pub memory: u64,
    /// System and version.
    pub kernel: String,
    /// The distribution.
    pub distribution: String,
    /// Programs that wanted a CPU in the minute before (proc_loadavg(5)).
    pub load: f64,
    /// Settings of uSMC that are not the default ones, as NAME=VALUE.
    pub settings: Vec<String>,
}

impl Machine {
    /// This one.
    pub fn here() -> Machine {
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let name = rustix::system::uname();
        let shown = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        let memory = read("/proc/meminfo");
        let memory = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
        let release = read("/etc/os-release");
        let release = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        let load = read("/proc/loadavg");
        let cpus = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
        let cores = cpus::usable().len();
        let smt = read("/sys/devices/system/cpu/smt/active");
        let mut settings: Vec<String> = std::env::vars()
            .filter(|(name, _)| name.starts_with("USMC_"))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        settings.sort();
        Machine {
            processor: field("model name").unwrap_or_else(|| shown(name.machine())),
            cpus: cpus.max(cores),
            cores,
            threads_share_cores: smt.trim() == "1",
            virtual_machine: field("flags").is_some_and(|flags| flags.contains("hypervisor")),
            memory: memory.unwrap_or_default() * 1024,
            kernel: format!("{} {}", shown(name.sysname()), shown(name.release())),
            distribution: release.unwrap_or_default().trim_matches('"').to_owned(),
            load: load.split_whitespace().next().and_then(|l| l.parse().ok()).unwrap_or_default(),
            settings,
        }
    }

    /// In a line.
    pub fn shown(&self) -> String {
        let kind = if self.virtual_machine { "virtual machine, " } else { "" };
        let smt = if self.threads_share_cores { ", two threads each" } else { "" };
        format!(
            "{}, {kind}{} CPUs ({} cores to use{smt}), {:.0} GiB, {}, {}",
            self.processor,
            self.cpus,
            self.cores,
            self.memory as f64 / f64::from(1 << 30),
            self.kernel,
            self.distribution
        )
    }

    /// Whether others take part.
    pub fn is_busy(&self) -> bool {
        self.load > self.cores as f64 / 2.0
    }
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
