//! How much of the machine a run may use: some of its CPUs, or a share of one.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::cpus;

/// CPUs that the measured programs and those beside them have together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Cores {
    /// All that the driver may use.
    All,
    /// So many.
    Whole(usize),
    /// So many hundredths of one CPU's time, 1 to 99, by a quota of cpu.max (cgroups(7)).
    Share(u32),
}

impl FromStr for Cores {
    type Err = String;

    /// `all`, a number of CPUs, or a share of one such as `0.5`.
    fn from_str(text: &str) -> Result<Cores, String> {
        if text == "all" {
            return Ok(Cores::All);
        }
        match (text.parse::<usize>(), text.parse::<f64>()) {
            (Ok(n), _) if n > 0 => Ok(Cores::Whole(n)),
            (_, Ok(share)) if (0.01..=0.99).contains(&share) => {
                Ok(Cores::Share((share * 100.0).round() as u32))
            }
            _ => Err("it is neither all, nor a number of CPUs, nor a share of one as 0.5".into()),
        }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cores::All => f.write_str("all CPUs"),
            Cores::Whole(1) => f.write_str("1 CPU"),
            Cores::Whole(n) => write!(f, "{n} CPUs"),
            Cores::Share(percent) => write!(f, "{} CPU", f64::from(*percent) / 100.0),
        }
    }
}

/// The calling thread, and what it starts, has only these CPUs until the value is dropped.
pub struct Confined {
    before: Option<CpuSet>,
    _quota: Option<Quota>,
}

impl Confined {
    /// # Errors
    /// When there are fewer CPUs, or no quota can be set here.
    pub fn enter(cores: Cores) -> Result<Confined> {
        let wanted = match cores {
            Cores::All => return Ok(Confined { before: None, _quota: None }),
            Cores::Whole(n) => n,
            Cores::Share(_) => 1,
        };
        let usable = cpus::usable();
        let cpus = usable.get(..wanted);
        let cpus = cpus.with_context(|| format!("{cores}: there are only {}", usable.len()))?;
        let before = sched_getaffinity(None).context("sched_getaffinity")?;
        let quota = match cores {
            Cores::Share(percent) => Some(Quota::set(percent).with_context(|| {
                format!("{cores}: the CPU's time cannot be limited; try it as root")
            })?),
            _ => None,
        };
        cpus::pin(cpus);
        Ok(Confined { before: Some(before), _quota: quota })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// A group of processes with a limit, which this process is in.
struct Quota {
    group: PathBuf,
    before: PathBuf,
}

/// Microseconds after which a quota starts anew: the kernel's default.
const PERIOD_US: u32 = 100_000;

impl Quota {
    fn set(percent: u32) -> Result<Quota> {
        let groups = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
        let (parent, before, is_v1) = place(&groups).context("no group has the CPU's time")?;
        let group = parent.join(format!("usmc-bench-{}", std::process::id()));
        fs::create_dir(&group).with_context(|| group.display().to_string())?;
        let quota = Quota { group, before };
        let quota_us = PERIOD_US / 100 * percent;
        let limit = match is_v1 {
            true => [
                ("cpu.cfs_period_us", PERIOD_US.to_string()),
                ("cpu.cfs_quota_us", quota_us.to_string()),
            ]
            .to_vec(),
            false => [("cpu.max", format!("{quota_us} {PERIOD_US}"))].to_vec(),
        };
        for (file, text) in limit {
            write(&quota.group.join(file), &text)?;
        }
        write(&quota.group.join("cgroup.procs"), &std::process::id().to_string())?;
        Ok(quota)
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let _ = write(&self.before.join("cgroup.procs"), &std::process::id().to_string());
        let _ = fs::remove_dir(&self.group);
    }
}

/// Where a new group can be, the group of this process, and whether they are of version 1.
fn place(groups: &str) -> Option<(PathBuf, PathBuf, bool)> {
    let root = Path::new("/sys/fs/cgroup");
    let path = |own: &str| own.trim_start_matches('/').to_owned();
    let mut lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let mut v2 = None;
    let v1 = lines.find(|(controllers, own)| {
        if controllers.is_empty() {
            v2 = Some(path(own));
        }
        controllers.split(',').any(|controller| controller == "cpu")
    });
    match (v1, v2) {
        (Some((controllers, own)), _) => {
            let own = root.join(controllers).join(path(own));
            Some((own.clone(), own, true))
        }
        // A group with processes cannot have one with limits in it, but for the root.
        (None, Some(own)) => Some((root.to_owned(), root.join(own), false)),
        (None, None) => None,
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| file.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_all_a_number_or_a_share() {
        let shown = |text: &str| text.parse::<Cores>().map(|cores| cores.to_string());
        for (text, expected) in
            [("all", "all CPUs"), ("1", "1 CPU"), ("2", "2 CPUs"), ("0.5", "0.5 CPU")]
        {
            assert_eq!(shown(text), Ok(expected.to_owned()));
        }
        for text in ["0", "", "1.5", "-1", "half"] {
            assert!(shown(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_group_is_found_in_both_versions() {
        let v1 = "9:name=systemd:/\n4:memory:/a\n2:cpu,cpuacct:/b/c\n0::/\n";
        let own = PathBuf::from("/sys/fs/cgroup/cpu,cpuacct/b/c");
        assert_eq!(place(v1), Some((own.clone(), own, true)));
        let (root, own) = ("/sys/fs/cgroup".into(), "/sys/fs/cgroup/user.slice/x".into());
        assert_eq!(place("0::/user.slice/x\n"), Some((root, own, false)));
        assert_eq!(place("4:memory:/a\n"), None);
    }

    #[test]
    fn one_cpu_is_what_is_left_inside_and_all_come_back() {
        let before = cpus::usable();
        let inside = Confined::enter(Cores::Whole(1)).expect("one CPU");
        assert_eq!(cpus::usable(), before[..1]);
        drop(inside);
        assert_eq!(cpus::usable(), before);
        assert!(Confined::enter(Cores::Whole(1 << 20)).is_err());
    }
}
