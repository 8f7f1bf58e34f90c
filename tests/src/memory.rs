//! A memory cgroup of a test's own, of version 1 or 2.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, thread};

use crate::{Fixture, leftovers};

/// A limit of memory for the processes that are started in it.
pub struct MemoryLimit {
    dir: PathBuf,
}

impl MemoryLimit {
    /// `None` where no memory cgroup can be made: we are not root, or are in a container without them.
    pub fn new(bytes: u64) -> Option<MemoryLimit> {
        for parent in parents() {
            leftovers::sweep(&parent);
            let dir = parent.join(leftovers::name());
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let limit = MemoryLimit { dir };
            let file = ["memory.max", "memory.limit_in_bytes"]
                .into_iter()
                .find(|f| limit.dir.join(f).exists());
            if file.is_some_and(|f| fs::write(limit.dir.join(f), bytes.to_string()).is_ok()) {
                return Some(limit);
            }
        }
        None
    }

    /// A command that runs `program` under uSMC within the limit.
    pub fn command(&self, fixture: &Fixture, program: impl AsRef<Path>) -> Command {
        self.enclose(fixture, fixture.command(program))
    }

    /// The same for a command that there is already.
    pub fn enclose(&self, fixture: &Fixture, inner: Command) -> Command {
        let mut command = fixture.plain("sh");
        command.args(["-c", "echo 0 >\"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        command.arg(inner.get_program()).args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    }

    /// Bytes in use, less those of files, which the kernel gives back by itself: they are counted for who reads a file
    /// first, and that may be somebody else.
    ///
    /// # Panics
    /// When the kernel does not tell.
    pub fn usage(&self) -> u64 {
        let read = |f: &str| fs::read_to_string(self.dir.join(f)).ok();
        let all = read("memory.current").or_else(|| read("memory.usage_in_bytes"));
        let all: u64 = all.and_then(|t| t.trim().parse().ok()).expect("the cgroup's usage");
        let stat = read("memory.stat").expect("the cgroup's statistics");
        let fields = stat.lines().filter_map(|line| line.split_once(' '));
        let of_files = fields.filter(|(name, _)| ["active_file", "inactive_file"].contains(name));
        all.saturating_sub(of_files.filter_map(|(_, n)| n.parse::<u64>().ok()).sum())
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // Its processes are ending.
        let until = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.dir).is_err() && self.dir.exists() && Instant::now() < until {
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// Where a cgroup with the memory controller may be made: within our own, or beside it.
fn parents() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut parents = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let mounts: &[&str] = match controllers {
            "" => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
            _ if controllers.split(',').any(|c| c == "memory") => &["/sys/fs/cgroup/memory"],
            _ => continue,
        };
        for mount in mounts {
            let own = Path::new(mount).join(path.trim_start_matches('/'));
            let around = own.ancestors().take_while(|at| at.starts_with(mount));
            parents.extend(around.filter(|at| at.is_dir()).map(Path::to_path_buf));
        }
    }
    parents
}

/// Says that a test could not do its work here.
pub fn is_missing(what: impl AsRef<OsStr>) {
    eprintln!("skipped: no memory cgroup can be made here ({})", what.as_ref().to_string_lossy());
}
