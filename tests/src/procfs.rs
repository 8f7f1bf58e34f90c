//! What /proc says about the test's processes.

use std::fmt::Write;
use std::fs;
use std::time::Duration;

/// Every process whose start environment holds `marker` (`NAME=value`), zombies excluded.
///
/// Found by what they inherited, so a daemon that left its group and session is found too.
pub fn marked(marker: &str) -> Vec<i32> {
    all().filter(|&pid| has_marker(pid, marker)).collect()
}

fn all() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted");
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// Whether the start environment of a process holds `marker`.
pub fn has_marker(pid: i32, marker: &str) -> bool {
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|env| env.split(|&b| b == 0).any(|v| v == marker.as_bytes()))
}

/// The program's name as the kernel has it.
pub fn comm(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Direct children.
pub fn children(pid: i32) -> Vec<i32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let list = fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Processor time used so far, user and system.
pub fn cpu_time(pid: i32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process lives");
    // After the name in parentheses, which may hold anything: state is field 3, utime 14, stime 15.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let ticks: u64 = fields[11..13].iter().map(|f| f.parse::<u64>().unwrap_or(0)).sum();
    Duration::from_millis(ticks * 10)
}

/// Processor time that the calling thread has used so far.
pub fn thread_time() -> Duration {
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes a struct of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut used) };
    Duration::new(used.tv_sec.unsigned_abs(), used.tv_nsec.unsigned_abs() as u32)
}

/// The state letter of a thread, as `ps` shows it; `X` for one that is gone.
pub fn state(pid: i32, tid: i32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('X')
}

/// Whether a process has ended, its files closed: gone, or a zombie without further threads.
pub fn has_ended(pid: i32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads <= 1 && matches!(state(pid, pid), 'X' | 'Z')
}

/// Number of open file descriptors.
pub fn open_fds(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Number of mappings of shared memory that has no name any more (memfds and deleted files).
pub fn shared_mappings(pid: i32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().filter(|l| l.contains("/memfd:")).count()
}

/// Bytes in RAM that are no file's, each process' share of what it has in common with others (proc_pid_smaps(5): Pss).
pub fn resident(pid: i32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process lives");
    let (mut counts, mut sum) = (false, 0);
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.first().is_some_and(|word| word.contains('-') && !word.ends_with(':')) {
            let name = words.get(5).copied().unwrap_or_default();
            counts = ["/memfd:", "/dev/shm/"].iter().any(|start| name.starts_with(start))
                || !name.starts_with('/');
        } else if counts && words.first() == Some(&"Pss:") {
            sum += words[1].parse::<u64>().expect("a number") * 1024;
        }
    }
    sum
}

/// The number of the system call in which a process of one thread sleeps.
pub fn sleeps_in(pid: i32) -> Option<libc::c_long> {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
    (state(pid, pid) == 'S').then(|| call.split(' ').next()?.parse().ok())?
}

/// What each thread of the marked processes is doing, for the message of a test that ran out of time.
pub fn describe(marker: &str) -> String {
    let mut text = String::new();
    for pid in marked(marker) {
        let cmdline = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let cmdline = String::from_utf8_lossy(&cmdline).replace('\0', " ");
        let _ = writeln!(text, "  process {pid}: {cmdline}");
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let stat = read("stat");
            let state = stat.rsplit_once(") ").and_then(|(_, s)| s.chars().next()).unwrap_or('?');
            let _ = writeln!(
                text,
                "    thread {} {state} {} syscall {}",
                task.file_name().to_string_lossy(),
                read("wchan"),
                read("syscall").trim(),
            );
        }
    }
    text
}
