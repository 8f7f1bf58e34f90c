//! The programs of a run as processes: whether they have ended, their families, their end.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use procfs::process;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

use super::cpus;

/// A program that was asked to end is killed after this time.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at a child.
pub const TICK: Duration = Duration::from_millis(10);

/// A program, printing to a file.
pub struct Program {
    /// Itself, leader of its group.
    pub child: Child,
    /// Its command line.
    pub name: String,
    /// Where it prints.
    pub output: PathBuf,
    /// What ends it well.
    pub stop: Signal,
}

impl Program {
    /// Leaves the ended program as it is, so that it can still be asked for its CPU time.
    pub fn has_ended(&self) -> bool {
        let Some(pid) = Pid::from_raw(self.child.id() as i32) else { return true };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(pid), options), Ok(None))
    }

    /// All that it has printed.
    pub fn printed(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// Ends the whole group: kindly, then not.
    pub fn end(&mut self) {
        let group = Pid::from_raw(self.child.id() as i32);
        let signal = |signal| group.map(|group| kill_process_group(group, signal));
        if !self.has_ended() {
            // Not to the group: a server ends its own children.
            let _ = group.map(|pid| kill_process(pid, self.stop));
            let deadline = Instant::now() + STOP_LIMIT;
            while !self.has_ended() && Instant::now() < deadline {
                thread::sleep(TICK);
            }
        }
        signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Takes the exit statuses of processes that became ours.
pub fn reap() {
    let deadline = Instant::now() + STOP_LIMIT;
    while let Ok(found) = waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        if found.is_none() {
            if Instant::now() > deadline {
                return;
            }
            thread::sleep(TICK);
        }
    }
}

/// Starts something on these CPUs only.
pub fn pinned<T>(only: &[usize], start: impl FnOnce() -> T) -> T {
    let Ok(before) = rustix::thread::sched_getaffinity(None) else { return start() };
    cpus::pin(only);
    let started = start();
    let _ = rustix::thread::sched_setaffinity(None, &before);
    started
}

/// These processes and all that descend from them.
pub fn families(heads: &[u32]) -> Vec<u32> {
    let mut members: BTreeSet<u32> = heads.iter().copied().collect();
    let all = process::all_processes().into_iter().flatten().flatten();
    let mut rest: Vec<(u32, u32)> = all
        .filter_map(|process| process.stat().ok())
        .map(|stat| (stat.pid as u32, stat.ppid as u32))
        .collect();
    loop {
        let before = members.len();
        rest.retain(|(pid, parent)| {
            let is_member = members.contains(parent);
            if is_member {
                members.insert(*pid);
            }
            !is_member
        });
        if members.len() == before {
            return members.into_iter().collect();
        }
    }
}
