//! Which CPUs a run uses, and how much of them.

use std::fs;

use procfs::process::Process;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Has the calling thread run there only, and the processes it starts; no CPU: leaves it alone. Who may not have the
/// CPU runs elsewhere, which the figures show.
///
pub fn pin(cpus: &[usize]) {
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    let _ = sched_setaffinity(None, &set);
}

/// The CPUs that this thread may use, one of each core.
pub fn usable() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return vec![0] };
    let mut seen = Vec::new();
    let mut cpus = Vec::new();
    for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)) {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let core = fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string());
        if !seen.contains(&core) {
            seen.push(core);
            cpus.push(cpu);
        }
    }
    cpus
}

/// Where two processes can be: on two of these CPUs, if there are two, and on one.
pub fn places(cpus: &[usize]) -> Vec<(&'static str, Vec<usize>)> {
    let mut places = vec![("one-core", vec![cpus[0]])];
    if cpus.len() > 1 {
        places.insert(0, ("two-cores", vec![cpus[0], cpus[cpus.len() - 1]]));
    }
    places
}

/// CPU time, in seconds, that the threads of these processes have had; of those that ended, too, where only
/// `/proc/PID/stat` tells.
pub fn seconds(pids: &[u32]) -> f64 {
    pids.iter().map(|pid| exact(*pid).unwrap_or_else(|| coarse(*pid))).sum()
}

/// To the nanosecond, of the threads that live.
fn exact(pid: u32) -> Option<f64> {
    let mut sum = 0;
    for task in process(pid)?.tasks().ok()?.flatten() {
        sum += task.schedstat().ok()?.sum_exec_runtime;
    }
    (sum > 0).then_some(sum as f64 / 1e9)
}

/// In hundredths of a second, with all threads and all children that were waited for.
pub fn coarse(pid: u32) -> f64 {
    let Some(stat) = process(pid).and_then(|process| process.stat().ok()) else { return 0.0 };
    let of_children = (stat.cutime + stat.cstime) as u64;
    (stat.utime + stat.stime + of_children) as f64 / procfs::ticks_per_second() as f64
}

fn process(pid: u32) -> Option<Process> {
    Process::new(pid as i32).ok()
}

/// Memory, in bytes, that these processes have in RAM; what several share counts once (proc_pid_smaps(5): Pss).
pub fn resident(pids: &[u32]) -> f64 {
    let of = |pid: &u32| {
        let rollup = process(*pid)?.smaps_rollup().ok()?.memory_map_rollup;
        rollup.into_iter().next()?.extension.map.get("Pss").copied()
    };
    pids.iter().filter_map(of).sum::<u64>() as f64
}
