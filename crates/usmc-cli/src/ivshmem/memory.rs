//! The memory that the server hands out: a region, in memory without a name or in a file.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, flock, memfd_create};
use rustix::io::Errno;
use usmc_shm::region::Region;
use usmc_shm::region::idle::is_idle;

use super::log;
use crate::cmd::region;

/// Bytes where nobody says how many.
const SIZE: u64 = 256 << 20;

/// Which memory is wanted.
#[derive(Debug)]
pub struct Wanted {
    /// Bytes, where somebody said how many.
    pub size: Option<u64>,
    /// A file with a name.
    pub file: Option<PathBuf>,
    /// Of huge pages.
    pub hugetlb: bool,
}

/// The region, mapped.
pub struct Memory {
    /// What clients are given.
    pub file: File,
    /// Bytes.
    pub len: u64,
    /// It was made just now: nobody has ever seen an id of its clients.
    pub is_new: bool,
    /// `None`: one of another version, which an earlier server has made. Its clients are served, and their deaths told to nobody.
    region: Option<Region>,
    /// Keeps other servers away. Not the file that clients are given: what they have of it would be locked as long as they live.
    _lock: Option<File>,
}

impl Memory {
    /// Makes the memory, or opens the file.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub fn make(wanted: &Wanted) -> Result<Memory> {
        if let Some(size) = wanted.size {
            check(size)?;
        }
        match &wanted.file {
            Some(path) => named(path, wanted.size),
            None => unnamed(wanted.size.unwrap_or(SIZE), wanted.hugetlb),
        }
    }

    /// Takes over what an earlier server has made.
    ///
    /// # Errors
    /// Another server has its file.
    pub fn take_over(file: File, path: Option<&Path>) -> Result<Memory> {
        let lock = path.map(lock).transpose()?;
        let region = region::of_file(&file, "the memory of the earlier server");
        if let Err(problem) = &region {
            log(format_args!("{problem:#}; what dead clients leave in it does not come back"));
        }
        let len = file.metadata()?.len();
        Ok(Memory { file, len, is_new: false, region: region.ok(), _lock: lock })
    }

    /// The region.
    pub fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// Whether a peer of the region is the client's with this id.
    pub fn names(&self, id: u16) -> bool {
        self.region().is_some_and(|region| region.peers().has_station(station(id)))
    }

    /// Peers of the region that are the client's with this id.
    pub fn peers_of(&self, id: u16) -> Vec<u8> {
        let Some(region) = self.region() else { return Vec::new() };
        let peers = region.peers();
        let all = peers.all().filter(|(_, peer)| peer.identity().station == station(id));
        all.map(|(number, _)| number).collect()
    }

    /// The client with this id is proven to be dead. Says how many peers it had, and how many units came back.
    pub fn bury(&self, id: u16) -> (usize, usize) {
        let Some(region) = self.region() else { return (0, 0) };
        let gone = region.peers().declare_station_gone(station(id));
        if gone == 0 {
            return (0, 0);
        }
        // Before the sweep, by which the peers' places may be another's. Of living peers' processes nobody here knows anything.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        region.forget(|_, _| false, now.as_nanos() as u64);
        let before = region.words().free();
        region.sweep(|_| false, |run| is_idle(region, run, |_, _| false));
        (gone, region.words().free().saturating_sub(before))
    }
}

/// What peers call the virtual machine with this id; 0 is nobody's.
pub fn station(id: u16) -> u64 {
    u64::from(id) + 1
}

fn check(size: u64) -> Result<()> {
    let is_device = size.is_power_of_two();
    ensure!(is_device, "a device's memory is a power of two, not {size} bytes: say --size 256M");
    Ok(())
}

fn unnamed(size: u64, hugetlb: bool) -> Result<Memory> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if hugetlb {
        flags |= MemfdFlags::HUGETLB;
    }
    let [no_size, no_room] = if hugetlb {
        [
            "no such size: it has to be a multiple of a huge page's",
            "too few huge pages: raise vm.nr_hugepages, or leave --hugetlb away",
        ]
    } else {
        ["no memory of this size: say less by --size"; 2]
    };
    let file: File = memfd_create("usmc-region", flags).context(no_room)?.into();
    file.set_len(size).context(no_size)?;
    let region = region::format(&file).context(no_room)?;
    // A client that could shorten it would end the others by SIGBUS.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .context("cannot seal the memory")?;
    Ok(Memory { file, len: size, is_new: true, region: Some(region), _lock: None })
}

fn named(path: &Path, size: Option<u64>) -> Result<Memory> {
    let what = path.display().to_string();
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return new_file(path, size.unwrap_or(SIZE)).with_context(|| what);
        }
        Err(error) => return Err(error).with_context(|| what),
    };
    let lock = lock(path)?;
    let region = region::of_file(&file, &what)?;
    let len = file.metadata()?.len();
    check(len).context(what.clone())?;
    if let Some(size) = size.filter(|&size| size != len) {
        bail!("{what} has {len} bytes, not {size}: leave --size away, or name another file");
    }
    Ok(Memory { file, len, is_new: false, region: Some(region), _lock: Some(lock) })
}

fn new_file(path: &Path, size: u64) -> Result<Memory> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let made = (|| -> Result<_> {
        let lock = lock(path)?;
        file.set_len(size).context("no file of this size")?;
        Ok((lock, region::format(&file)?))
    })();
    let (lock, region) = made.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })?;
    Ok(Memory { file, len: size, is_new: true, region: Some(region), _lock: Some(lock) })
}

fn lock(path: &Path) -> Result<File> {
    let what = path.display();
    let file = File::open(path).with_context(|| what.to_string())?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => {
            bail!("{what} has another server: two would give the same ids to virtual machines")
        }
        Err(error) => Err(error).with_context(|| format!("cannot lock {what}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_sealed_and_a_power_of_two() {
        let wanted = |size| Wanted { size: Some(size), file: None, hugetlb: false };
        assert!(Memory::make(&wanted(3 << 20)).is_err());
        let memory = Memory::make(&wanted(1 << 20)).expect("a region");
        assert!(memory.is_new && memory.region().is_some_and(|region| region.units() > 0));
        assert!(memory.file.set_len(4096).is_err() && memory.file.set_len(1 << 21).is_err());
        assert_eq!(memory.bury(3), (0, 0));
    }
}
