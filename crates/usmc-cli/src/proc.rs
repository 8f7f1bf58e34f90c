//! Finding the processes that run the library: `/proc/PID/fd` links to the file that
//! usmc/src/observe.rs describes.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use procfs::process::StatFlags;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};
use rustix::io::Errno;

use crate::{machine, observed};

/// Files looked at in one process: its own, and one that a vfork'ed parent left in it.
const MAX_FILES: usize = 4;

/// Segments looked at in one process.
const MAX_SEGMENTS: usize = 1024;

/// A process with at least one record file.
#[derive(Debug)]
pub struct Process {
    /// As /proc numbers it.
    pub pid: u32,
    /// `/proc/PID/comm`, harmless to print.
    pub comm: String,
    /// Inode of its network namespace.
    pub netns: Option<u64>,
    /// Its record files.
    pub files: Vec<File>,
    /// fd → inode of its sockets.
    pub sockets: HashMap<u32, u64>,
    /// The directory of its ISM device, as it names it, and the identity of the file in it.
    pub device: Option<(PathBuf, (u64, u64))>,
    /// The memory of connections that it holds, its own and that of peers.
    pub segments: Vec<Segment>,
}

/// The memory of a segment: a file without a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// What tells it from others.
    pub identity: (u64, u64),
    /// Its size in bytes.
    pub size: u64,
    /// Bytes of it that take memory.
    pub resident: u64,
}

/// The outcome of a walk through /proc.
#[derive(Default, Debug)]
pub struct Scan {
    /// In order of pid.
    pub processes: Vec<Process>,
    /// Processes we may not inspect.
    pub hidden: usize,
    /// Of these, those that have an ISM device, and so run under uSMC.
    pub hidden_under: usize,
}

/// Walks through /proc.
///
/// # Errors
/// When /proc cannot be read at all.
pub fn scan() -> Result<Scan> {
    let mut scan = Scan::default();
    let mut hidden = HashSet::new();
    for pid in pids()? {
        match inspect(pid) {
            Ok(Some(process)) => scan.processes.push(process),
            Ok(None) => {}
            Err(Errno::ACCESS | Errno::PERM) if !is_kernel_thread(pid) => {
                hidden.insert(pid);
            }
            // It ended while we looked.
            Err(_) => {}
        }
    }
    drop_duplicates(&mut scan.processes);
    scan.hidden = hidden.len();
    if !hidden.is_empty() {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        scan.hidden_under = device_users(&locks).intersection(&hidden).count();
    }
    Ok(scan)
}

/// All processes, in ascending order.
///
/// # Errors
/// When /proc cannot be read at all.
pub fn pids() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("cannot read /proc; mount it")?;
    let numbers = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    let mut pids: Vec<u32> = numbers.collect();
    pids.sort_unstable();
    Ok(pids)
}

/// The processes that have an ISM device by proc_locks(5), which everybody may read: each has a lock on a byte of its file far behind
/// its end.
fn device_users(locks: &str) -> HashSet<u32> {
    let user = |line: &str| {
        // "1: POSIX  ADVISORY  WRITE 4711 00:1b:301720 1099511627776 1099511627776"
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["POSIX", _, "WRITE", pid, _, first, _] = words.get(1..)? else { return None };
        let first: u64 = first.parse().ok()?;
        usmc::observe::DEVICE_LOCKS.contains(&first).then(|| pid.parse().ok())?
    };
    locks.lines().filter_map(user).collect()
}

/// The network namespace that this process is in.
pub fn own_netns() -> Option<u64> {
    fs::metadata("/proc/self/ns/net").ok().map(|facts| facts.ino())
}

/// When a process began, in ticks after boot: with its number it is like no other's.
pub fn start_of(pid: u32) -> Option<u64> {
    let process = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?;
    Some(process.stat().ok()?.starttime)
}

/// How many of our processes have the library, with or without sockets.
pub fn with_library() -> usize {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let has_it = |entry: &fs::DirEntry| {
        let is_process = entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        is_process
            && fs::read_to_string(entry.path().join("maps"))
                .is_ok_and(|maps| maps.contains("/libusmc_preload"))
    };
    entries.filter(has_it).count()
}

/// One process, if it has a record file.
///
/// # Errors
/// When there is no such process, or we may not inspect it.
pub fn find(pid: u32) -> Result<Option<Process>> {
    match inspect(pid) {
        Ok(found) => Ok(found),
        Err(Errno::ACCESS | Errno::PERM) => {
            Err(anyhow!("process {pid} is another user's; run `sudo usmc` to inspect it"))
        }
        Err(_) => Err(anyhow!("there is no process {pid}")),
    }
}

/// The record files of one process.
pub fn record_files(pid: u32) -> Vec<File> {
    inspect(pid).ok().flatten().map(|process| process.files).unwrap_or_default()
}

/// The process, if it has a record file.
///
/// # Errors
/// As /proc/PID/fd says.
fn inspect(pid: u32) -> Result<Option<Process>, Errno> {
    let found = facts(pid)?;
    Ok((!found.files.is_empty()).then_some(found))
}

/// The process, whether it has a record file or not; without one its name and namespace are not looked up.
///
/// # Errors
/// As /proc/PID/fd says; EMFILE and ENFILE where no descriptor is left for a record file.
pub fn facts(pid: u32) -> Result<Process, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(format!("/proc/{pid}/fd"), flags, Mode::empty())?;
    let mut files = Vec::new();
    let mut sockets = HashMap::new();
    let mut device = None;
    let mut segments = Vec::new();
    let mut link = Vec::new();
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let Some(fd) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(target) = readlinkat(&dir, entry.file_name(), link) else {
            link = Vec::new();
            continue;
        };
        if let Some(inode) = socket_inode(&target) {
            sockets.insert(fd, inode);
        } else if is_record_file(&target)
            && files.len() < MAX_FILES
            && is_writer(&dir, entry.file_name())
        {
            files.extend(open(&dir, entry.file_name())?);
        } else if is_memfd(&target, usmc::memfd::MEMFD_NAME)
            && segments.len() < MAX_SEGMENTS
            && let Ok(facts) = statat(&dir, entry.file_name(), AtFlags::empty())
        {
            segments.push(Segment {
                identity: (facts.st_dev, facts.st_ino),
                size: facts.st_size.cast_unsigned(),
                resident: facts.st_blocks.cast_unsigned().saturating_mul(512),
            });
        } else if let Some(path) = device_dir(&target)
            && device.is_none()
            && let Ok(facts) = statat(&dir, entry.file_name(), AtFlags::empty())
        {
            device = Some((path, (facts.st_dev, facts.st_ino)));
        }
        link = target.into_bytes();
        link.clear();
    }
    // Of all others nobody asks.
    let is_one = !files.is_empty();
    let netns = is_one.then(|| fs::metadata(format!("/proc/{pid}/ns/net")).ok());
    let netns = netns.flatten().map(|m| m.ino());
    let comm = if is_one { comm(pid) } else { String::new() };
    Ok(Process { pid, comm, netns, files, sockets, device, segments })
}

/// The number of the socket that a link in `/proc/PID/fd` names.
pub fn socket_inode(target: &CStr) -> Option<u64> {
    target.to_str().ok()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Of the device file. Another program's file of that name is no harm: its GID is not found.
fn device_dir(target: &CStr) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(target.to_bytes()));
    let is_it = path.is_absolute() && path.file_name()?.to_str()? == machine::device_name();
    is_it.then(|| path.parent().map(Path::to_owned))?
}

fn is_record_file(target: &CStr) -> bool {
    is_memfd(target, usmc::observe::MEMFD_NAME)
}

fn is_memfd(target: &CStr, name: &CStr) -> bool {
    let name = name.to_bytes();
    let rest = target.to_bytes().strip_prefix(b"/memfd:").and_then(|t| t.strip_prefix(name));
    matches!(rest, Some(b"" | b" (deleted)"))
}

/// Whether the descriptor is open for writing, which the mode of its link tells (proc_pid_fd(5)): the
/// library's is, that of another `usmc ss` at its work is not.
fn is_writer(dir: &OwnedFd, name: &CStr) -> bool {
    let link = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    link.is_ok_and(|link| Mode::from_raw_mode(link.st_mode).contains(Mode::WUSR))
}

/// Opens the file anew, for reading; whatever is not a regular file only had the name.
///
/// # Errors
/// No descriptor is left: the process has it all the same.
fn open(dir: &OwnedFd, name: &CStr) -> Result<Option<File>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    match openat(dir.as_fd(), name, flags, Mode::empty()) {
        Ok(file) => {
            let file = File::from(file);
            Ok(file.metadata().is_ok_and(|m| m.is_file()).then_some(file))
        }
        Err(error @ (Errno::MFILE | Errno::NFILE)) => Err(error),
        Err(_) => Ok(None),
    }
}

/// The name of its program, harmless to print.
pub fn comm(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&bytes);
    let name = name.strip_suffix('\n').unwrap_or(&name);
    harmless(name)
}

/// A text of somebody else's without what a terminal takes for an order, or what hides or turns round other characters.
pub fn harmless(text: &str) -> String {
    let is_odd = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    text.chars().map(|c| if is_odd(c) { '?' } else { c }).collect()
}

fn is_kernel_thread(pid: u32) -> bool {
    let stat = procfs::process::Process::new(pid as i32).and_then(|process| process.stat());
    stat.is_ok_and(|stat| stat.flags & StatFlags::PF_KTHREAD.bits() != 0)
}

/// Leaves every file with one process: the one the file names, else the first that has it.
fn drop_duplicates(processes: &mut Vec<Process>) {
    let id = |file: &File| file.metadata().ok().map(|m| (m.dev(), m.ino()));
    let mut holders: HashMap<(u64, u64), Vec<u32>> = HashMap::new();
    for process in processes.iter() {
        for file in &process.files {
            let holders = id(file).map(|id| holders.entry(id).or_default());
            if let Some(holders) = holders.filter(|h| h.last() != Some(&process.pid)) {
                holders.push(process.pid);
            }
        }
    }
    let mut owners: HashMap<(u64, u64), u32> = HashMap::new();
    for process in processes.iter_mut() {
        process.files.retain(|file| {
            let Some(id) = id(file) else { return false };
            if owners.contains_key(&id) {
                return false;
            }
            let holders = &holders[&id];
            let owner = match &holders[..] {
                [only] => *only,
                several => owner(several, observed::claimed_pid(file)),
            };
            let is_owner = owner == process.pid;
            if is_owner {
                owners.insert(id, owner);
            }
            is_owner
        });
    }
    processes.retain(|process| !process.files.is_empty());
}

fn owner(holders: &[u32], claimed: Option<u32>) -> u32 {
    let named = holders.iter().find(|pid| claimed.is_some() && own_pid(**pid) == claimed);
    *named.unwrap_or(&holders[0])
}

/// A process' pid in its own namespace.
fn own_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_a_device_are_known_by_their_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 4711 00:1b:301720 1099511627776 1099511627776\n\
                     2: FLOCK  ADVISORY  WRITE 18729 fe:00:5350401 0 EOF\n\
                     2: -> POSIX ADVISORY WRITE 18730 fe:00:5350401 1099511627777 1099511627777\n\
                     3: POSIX  ADVISORY  READ 4712 00:1b:301720 1099511627777 1099511627777\n\
                     4: POSIX  ADVISORY  WRITE 4713 00:1b:301720 1073741826 1073742335\n\
                     5: POSIX  ADVISORY  WRITE x 00:1b:301720 1099511627779 1099511627779\n\
                     6: POSIX  ADVISORY  WRITE 4714 00:1b:301720 1099511627790 1099511627790\n\
                     7:\n\n";
        assert_eq!(device_users(locks), HashSet::from([4711, 4714]));
        assert_eq!(device_users(""), HashSet::new());
    }

    #[test]
    fn names_do_not_order_a_terminal_about() {
        assert_eq!(harmless("a\u{1b}[31m\n\u{9b}b\u{202e}c\u{200b}"), "a?[31m??b?c?");
        assert_eq!(harmless("redis-server ü 日本"), "redis-server ü 日本");
    }

    #[test]
    fn a_process_begins_once() {
        let own = start_of(std::process::id());
        assert!(own.is_some() && own == start_of(std::process::id()));
        assert_eq!(start_of(u32::MAX), None);
    }
}
