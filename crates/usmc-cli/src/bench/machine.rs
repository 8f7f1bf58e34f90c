//! The machine, for whoever reads the figures elsewhere.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cpus;

/// What it is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The processor, as it calls itself.
    pub processor: String,
    /// CPUs that are online.
    pub cpus: usize,
    /// Cores that this program may use.
    pub cores: usize,
    /// Whether some of the CPUs share a core.
    pub threads_share_cores: bool,
    /// Whether the processor says that there is a hypervisor.
    pub virtual_machine: bool,
    /// Which, as far as it can be told; empty: unknown.
    #[serde(default)]
    pub hypervisor: String,
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
        let processor = field("model name").unwrap_or_else(|| shown(name.machine()));
        Machine {
            hypervisor: hypervisor(&processor, &clocks(), &vendor()).to_owned(),
            processor,
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

    /// In a short line, for a picture: without what its builder has added to the kernel's version.
    pub fn in_brief(&self) -> String {
        let kind = if self.virtual_machine { "virtual machine, " } else { "" };
        let kernel = self.kernel.split('-').next().unwrap_or_default();
        let memory = self.memory as f64 / f64::from(1 << 30);
        format!("{}, {kind}{} CPUs, {memory:.0} GiB, {kernel}", self.processor, self.cpus)
    }

    /// Whether a processor of this one's kind is made by software, as QEMU without KVM does, as far as that can be told.
    pub fn is_emulated(&self) -> bool {
        self.hypervisor == EMULATED
    }

    /// What virtualises it, in words.
    pub fn virtualisation(&self) -> String {
        match (self.virtual_machine, &self.hypervisor[..]) {
            (_, EMULATED) => format!("virtual, {EMULATED}"),
            (true, "") => "virtual, by a hypervisor that does not say its name".to_owned(),
            (true, name) => format!("virtual, by {name}"),
            (false, _) => "not virtual".to_owned(),
        }
    }

    /// Whether others take part.
    pub fn is_busy(&self) -> bool {
        self.load > self.cores as f64 / 2.0
    }
}

const EMULATED: &str = "emulated by QEMU without KVM";

/// By the processor's name, the clocks that a hypervisor offers, and the machine's vendor.
fn hypervisor(processor: &str, clocks: &str, vendor: &str) -> &'static str {
    let clock = |name: &str| clocks.split_whitespace().any(|clock| clock == name);
    let is_qemu = vendor.contains("QEMU") || processor.contains("QEMU");
    match () {
        () if clock("kvm-clock") => "KVM",
        () if clock("xen") => "Xen",
        () if clocks.contains("hyperv") => "Hyper-V",
        () if is_qemu || processor.contains("TCG") => EMULATED,
        () if vendor.contains("VMware") => "VMware",
        () => "",
    }
}

fn clocks() -> String {
    read("/sys/devices/system/clocksource/clocksource0/available_clocksource")
}

fn vendor() -> String {
    read("/sys/class/dmi/id/sys_vendor")
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Machine {
        /// As if QEMU translated its code.
        pub fn set_emulated(&mut self) {
            EMULATED.clone_into(&mut self.hypervisor);
        }
    }

    #[test]
    fn hypervisors_are_told_apart() {
        for (processor, clocks, vendor, name) in [
            ("AMD EPYC", "tsc kvm-clock", "", "KVM"),
            ("QEMU Virtual CPU version 2.5+", "kvm-clock tsc acpi_pm", "QEMU", "KVM"),
            ("QEMU TCG CPU version 2.5+", "tsc hpet acpi_pm", "QEMU", EMULATED),
            ("Intel Xeon", "tsc hpet", "VMware, Inc.", "VMware"),
            ("Intel Xeon", "hyperv_clocksource_tsc_page acpi_pm", "Microsoft", "Hyper-V"),
            ("Intel Xeon", "xen tsc", "", "Xen"),
            ("AMD Ryzen", "tsc hpet acpi_pm", "ASUS", ""),
        ] {
            assert_eq!(hypervisor(processor, clocks, vendor), name, "{processor}");
        }
    }
}
