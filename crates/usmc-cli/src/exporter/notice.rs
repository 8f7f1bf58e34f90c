//! When processes under uSMC begin: each opens the file of its ISM device first, which inotify(7) tells of, and has its record file a
//! moment later.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use crate::proc::{self, Process};

/// Where ISM directories are made, and how their names begin there.
const PARENTS: [(&str, &str); 2] = [("/dev/shm", "usmc-"), ("/run/usmc", "")];
/// Directories watched at most.
const MOST: usize = 512;
/// Bytes of events read at once.
const BUFFER: usize = 16 << 10;

/// What the kernel tells of ISM directories.
#[derive(Debug)]
pub struct Notice {
    inotify: OwnedFd,
    /// By their watches: how names of ISM directories begin there.
    parents: Vec<(i32, Vec<Vec<u8>>)>,
    /// Watched directories, by their paths.
    dirs: BTreeSet<PathBuf>,
    configured: Vec<PathBuf>,
}

/// What has happened.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Told {
    /// A process may have begun.
    pub begins: bool,
    /// A directory may have been made.
    pub dirs: bool,
}

impl Notice {
    /// Of these directories, of those where they usually are, and of others that [`Notice::watch`] is told of.
    ///
    /// # Errors
    /// As inotify_init(2).
    pub fn new(configured: Vec<PathBuf>) -> Result<Notice, Errno> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut notice = Notice { inotify, parents: Vec::new(), dirs: BTreeSet::new(), configured };
        let own =
            notice.configured.iter().filter_map(|dir| Some((dir.parent()?, dir.file_name()?)));
        let usual = PARENTS.iter().map(|(parent, start)| (Path::new(*parent), OsStr::new(*start)));
        let mut parents: BTreeMap<&Path, Vec<Vec<u8>>> = BTreeMap::new();
        for (parent, start) in usual.chain(own) {
            parents.entry(parent).or_default().push(start.as_bytes().to_vec());
        }
        let flags = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        for (parent, starts) in parents {
            let watch = inotify::add_watch(&notice.inotify, parent, flags);
            notice.parents.extend(watch.ok().map(|watch| (watch, starts)));
        }
        notice.find();
        Ok(notice)
    }

    /// Watches directories that are there by now.
    pub fn find(&mut self) {
        let mut found = self.configured.clone();
        for (parent, start) in PARENTS {
            let entries = fs::read_dir(parent).into_iter().flatten().flatten();
            let is_one = |name: &OsStr| name.as_bytes().starts_with(start.as_bytes());
            let dirs = entries.filter(|entry| is_one(&entry.file_name()));
            found.extend(dirs.map(|entry| entry.path()).take(MOST));
        }
        found.iter().for_each(|dir| self.watch(dir));
    }

    /// Watches a directory, if there is one.
    pub fn watch(&mut self, dir: &Path) {
        if self.dirs.len() >= MOST || self.dirs.contains(dir) {
            return;
        }
        let flags = WatchFlags::OPEN | WatchFlags::CREATE;
        let flags = flags | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        if inotify::add_watch(&self.inotify, dir, flags).is_ok() {
            self.dirs.insert(dir.to_owned());
        }
    }

    /// What was told since the last call.
    pub fn read(&mut self) -> Told {
        let mut told = Told::default();
        let mut space = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(&self.inotify, &mut space);
        while let Ok(event) = reader.next() {
            let name = event.file_name().map(|name| name.to_bytes()).unwrap_or_default();
            if let Some((_, starts)) = self.parents.iter().find(|(wd, _)| *wd == event.wd()) {
                // Programs make files there without end, which are none of ours.
                let is_one = |start: &Vec<u8>| name.starts_with(start);
                told.dirs |= event.events().contains(ReadFlags::ISDIR) && starts.iter().any(is_one);
            } else if event.events().contains(ReadFlags::IGNORED) {
                // It is gone; one of its name may come.
                told.dirs = true;
                self.dirs.clear();
            } else {
                told.begins |= name.starts_with(usmc::observe::DEVICE_PREFIX.as_bytes());
            }
            told.begins |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
        }
        told
    }
}

impl AsFd for Notice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

/// Finds processes that have begun.
#[derive(Default, Debug)]
pub struct Finder {
    /// Those that were looked at already.
    seen: BTreeSet<u32>,
}

/// What was found.
#[derive(Default, Debug)]
pub struct Found {
    /// Processes with record files.
    pub processes: Vec<Process>,
    /// Others have a device and no record file so far.
    pub is_early: bool,
}

impl Finder {
    /// Looks at processes that were not there the last time, the newest first.
    pub fn pass(&mut self) -> Found {
        let Ok(pids) = proc::pids() else { return Found::default() };
        let mut found = Found::default();
        let mut seen = BTreeSet::new();
        for pid in pids.into_iter().rev() {
            if self.seen.contains(&pid) {
                seen.insert(pid);
                continue;
            }
            match proc::facts(pid) {
                Ok(process) if !process.files.is_empty() => {
                    found.processes.push(process);
                    seen.insert(pid);
                }
                Ok(process) if process.device.is_some() => found.is_early = true,
                // It may be about to become another program.
                Ok(_) | Err(_) => {}
            }
        }
        self.seen = seen;
        found
    }

    /// All processes are about to be looked at: those that are there now are not new then. Those that begin meanwhile are.
    pub fn know_all(&mut self) {
        self.seen = proc::pids().unwrap_or_default().into_iter().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_use_of_a_device_is_told() {
        let parent = std::env::temp_dir().join(format!("usmc-notice-{}", std::process::id()));
        let dir = parent.join("ism");
        fs::create_dir(&parent).expect("a directory");
        let mut notice = Notice::new(vec![dir.clone()]).expect("inotify");
        fs::write(&dir, b"").expect("a file");
        fs::remove_file(&dir).expect("it");
        fs::create_dir(parent.join("another")).expect("a directory");
        assert_eq!(notice.read(), Told::default(), "none of ours");
        fs::create_dir(&dir).expect("a directory");
        let told = notice.read();
        assert!(told.dirs && !told.begins);
        notice.find();
        fs::write(dir.join("another"), b"").expect("a file");
        assert!(!notice.read().begins);
        let device = dir.join(crate::machine::device_name());
        fs::write(&device, b"").expect("a file");
        assert!(notice.read().begins, "made");
        assert!(!notice.read().begins);
        fs::read(&device).expect("the file");
        assert!(notice.read().begins, "opened");
        fs::remove_dir_all(&parent).expect("our own directory");
        assert!(notice.read().dirs);
    }
}
