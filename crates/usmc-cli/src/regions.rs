//! Regions as commands show them: their peers, and which of these a connection's ends are.
//!
//! Every byte of a region is another machine's input: names are text of a bounded length, and a number is looked up in tables of a
//! fixed size. Of the regions of running processes parts are copied, so that a file that is made shorter meanwhile is a short read and
//! not SIGBUS. `usmc region` and `usmc check` open those that their user names as programs do.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{ptr, slice};

use procfs::process::{MMPermissions, MMapPath, MemoryMap};
use rustix::fs::{Mode, OFlags, fstatfs, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use serde::Serialize;
use usmc::observe::AGENT_ID;
use usmc::provider;
use usmc_shm::layout::{SLOTS_OFFSET, Slot};
use usmc_shm::region::peers::{Life, NAME};
use usmc_shm::region::{PEERS, PEERS_AT, Region, UNIT, UNITS_MOST, WORDS_AT, idle, len_for};

use crate::observed::Socket;

/// Shared files looked at in one process.
const FILES: usize = 256;
/// SYSFS_MAGIC of linux/magic.h.
const SYSFS: i64 = 0x6265_6572;

/// An id of 128 bits as text.
pub fn hex([high, low]: [u64; 2]) -> String {
    format!("{high:016x}{low:016x}")
}

/// A connection's device, as commands name it: `loopback`, the region's id, or `rdma`.
pub fn device_name(region: Option<u128>) -> String {
    match region {
        None => "loopback".to_owned(),
        Some(AGENT_ID) => "rdma".to_owned(),
        Some(id) => format!("{id:032x}"),
    }
}

/// The same for a table: the first digits tell regions apart.
pub fn short(device: &str) -> String {
    device.get(..8).unwrap_or(device).to_owned()
}

/// A region's tables.
#[derive(Serialize)]
pub struct Shown {
    /// Its id.
    pub gid: String,
    /// Number of units.
    pub units: usize,
    /// Of these, those that nobody has.
    pub free: usize,
    /// Bytes of each.
    pub unit_bytes: usize,
    /// In the order of their numbers.
    pub peers: Vec<Peer>,
}

impl Shown {
    /// How many peers live.
    pub fn alive(&self) -> usize {
        self.peers.iter().filter(|peer| peer.state == "alive").count()
    }
}

/// A peer.
#[derive(Serialize)]
pub struct Peer {
    /// Its place in the table, from 1 on.
    pub number: u8,
    /// The host's, may be empty.
    pub name: String,
    /// `alive`, `drains`, `gone` or `joins`.
    pub state: &'static str,
    /// Units that it has.
    pub units: u32,
    /// The kernel's boot id.
    pub host: String,
    /// The GID of its ISM directory.
    pub directory: String,
}

/// The kernel at the other end of a connection: a peer of a region.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct Host {
    /// Its place in the region's table of peers.
    pub peer: u8,
    /// The host's name, may be empty.
    pub name: String,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() { "?" } else { &self.name };
        write!(f, "{name}/{}", self.peer)
    }
}

/// Reads a region's tables.
pub fn shown(region: &Region) -> Shown {
    let mut units = [0; PEERS];
    for run in region.words().runs() {
        units[usize::from(run.owner.peer)] += run.count;
    }
    let table = region.peers();
    let peers = table.all().map(|(number, peer)| {
        let identity = peer.identity();
        let state = match peer.life() {
            Life::Alive if peer.drains() => "drains",
            Life::Alive => "alive",
            Life::Gone => "gone",
            Life::Claimed | Life::Free => "joins",
        };
        Peer {
            number,
            name: host(region, number).name,
            state,
            units: units[usize::from(number)],
            host: hex(identity.host),
            directory: hex(identity.directory),
        }
    });
    let peers = peers.collect();
    let (free, all) = (region.words().free(), region.units());
    Shown { gid: hex(region.gid()), units: all, free, unit_bytes: UNIT, peers }
}

fn host(region: &Region, number: u8) -> Host {
    let mut name = [0; NAME];
    let len = region.peers().0.get(usize::from(number)).map_or(0, |peer| peer.name(&mut name));
    Host { peer: number, name: String::from_utf8_lossy(&name[..len]).into_owned() }
}

/// The regions of running processes.
#[derive(Default)]
pub struct Regions {
    copies: Vec<Copy>,
    /// By process, where in `copies` those are that it has mapped.
    of_process: HashMap<u32, Vec<usize>>,
}

impl Regions {
    /// The peers that both ends of a process' connection belong to, the client's first. `None`: it is in no region, or the region
    /// cannot be read.
    pub fn ends(&mut self, pid: u32, socket: &Socket) -> Option<[Host; 2]> {
        let id = socket.region.filter(|_| socket.segment != 0)?;
        let copy = self.of(pid).into_iter().find(|at| self.copies[*at].id() == id)?;
        self.copies[copy].ends(socket.segment, socket.slot)
    }

    /// The kernel at the other end of it.
    pub fn other_end(&mut self, pid: u32, socket: &Socket) -> Option<Host> {
        let [client, server] = self.ends(pid, socket)?;
        Some(if socket.is_client { server } else { client })
    }

    /// The regions that a process has mapped, each with its path, as the process names it.
    pub fn mapped(&mut self, pid: u32) -> impl Iterator<Item = (&Path, &Region)> {
        let found = self.of(pid);
        let copies = &self.copies;
        found.into_iter().map(|at| &copies[at]).map(|copy| (copy.path.as_path(), &copy.region))
    }

    fn of(&mut self, pid: u32) -> Vec<usize> {
        if let Some(known) = self.of_process.get(&pid) {
            return known.clone();
        }
        let mut found = Vec::new();
        for map in files(pid) {
            let Some((path, file)) = open_mapped(pid, &map) else { continue };
            let Ok(facts) = file.metadata() else { continue };
            let identity = (facts.dev(), facts.ino());
            let known = self.copies.iter().position(|copy| copy.identity == identity);
            let at = known.or_else(|| {
                self.copies.push(Copy::new(path, identity, file)?);
                Some(self.copies.len() - 1)
            });
            found.extend(at.filter(|at| !found.contains(at)));
        }
        self.of_process.insert(pid, found.clone());
        found
    }
}

/// Whole files that a process shares with others.
fn files(pid: u32) -> Vec<MemoryMap> {
    let wanted = MMPermissions::READ | MMPermissions::WRITE | MMPermissions::SHARED;
    let is_one = |map: &MemoryMap| {
        let len = map.address.1.saturating_sub(map.address.0);
        map.perms.contains(wanted) && map.offset == 0 && map.inode != 0 && len >= len_for(1) as u64
    };
    let maps = i32::try_from(pid).ok().and_then(|pid| procfs::process::Process::new(pid).ok());
    let maps = maps.and_then(|process| process.maps().ok());
    maps.into_iter().flat_map(|maps| maps.0).filter(is_one).take(FILES).collect()
}

/// The name of a server's memory, as /proc has it.
const SERVED: &[u8] = b"/memfd:usmc-region";

/// Opens what a process has mapped, for reading. A file of that name may be another one by now: a device is opened only if it is the one
/// that is mapped, as to open it may be to use it.
fn open_mapped(pid: u32, map: &MemoryMap) -> Option<(PathBuf, File)> {
    let MMapPath::Path(path) = &map.pathname else { return None };
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    if path.as_os_str().as_bytes().starts_with(SERVED) {
        // It has no name in a file system: by the mapping itself (proc_pid_map_files(5)).
        let (from, to) = map.address;
        let file = open(format!("/proc/{pid}/map_files/{from:x}-{to:x}"), flags, Mode::empty());
        return Some((path.clone(), File::from(file.ok()?)));
    }
    if !path.is_absolute() {
        return None;
    }
    let seen = format!("/proc/{pid}/root{}", path.display());
    let found = File::from(open(seen, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?);
    let facts = found.metadata().ok()?;
    let (major, minor) = (rustix::fs::major(facts.dev()), rustix::fs::minor(facts.dev()));
    let is_it = (major.cast_signed(), minor.cast_signed(), facts.ino())
        == (map.dev.0, map.dev.1, map.inode);
    if !(facts.is_file() || facts.file_type().is_char_device() && is_it) {
        return None;
    }
    let file = open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty()).ok()?;
    Some((path.clone(), File::from(file)))
}

/// What a region is copied from.
enum Source {
    /// A file of the host's.
    File(File),
    /// A device's memory, which cannot become shorter: a mapping of the copy's length, for reading.
    Device(*const u64),
}

/// Private memory of a region's size, of which those parts are filled that are looked at.
struct Copy {
    path: PathBuf,
    identity: (u64, u64),
    source: Source,
    base: *mut u8,
    len: usize,
    /// In that memory.
    region: Region,
}

impl Copy {
    /// `None`: it is no region of this version.
    fn new(path: PathBuf, identity: (u64, u64), file: File) -> Option<Copy> {
        let whole = provider::length(file.as_raw_fd()).ok()?;
        // More than the largest region has is never looked at.
        let len = whole.min(len_for(UNITS_MOST));
        let is_device = file.metadata().ok()?.file_type().is_char_device()
            || fstatfs(&file).is_ok_and(|facts| facts.f_type == SYSFS);
        let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let source = if is_device {
            // SAFETY: a new mapping, at a place of the kernel's.
            #[expect(unsafe_code, reason = "a mapping of a device")]
            let base =
                unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
            Source::Device(base.ok()?.cast::<u64>().cast_const())
        } else {
            Source::File(file)
        };
        // SAFETY: likewise.
        #[expect(unsafe_code, reason = "memory of its own, most of which is never touched")]
        let base =
            unsafe { mmap_anonymous(ptr::null_mut(), len, access, private | MapFlags::NORESERVE) };
        let base = base.ok()?.cast::<u8>();
        copy(&source, base, len, 0, PEERS_AT);
        // SAFETY: private memory, which goes with the result.
        #[expect(unsafe_code, reason = "a copy of a region")]
        let region = unsafe { Region::open(base, len) };
        let Ok(region) = region else {
            unmap(&source, base, len);
            return None;
        };
        let copied = Copy { path, identity, source, base, len, region };
        copied.fill_tables();
        Some(copied)
    }

    fn fill(&self, at: usize, len: usize) {
        copy(&self.source, self.base, self.len, at, len);
    }

    /// Peers and words, and what lies between them.
    fn fill_tables(&self) {
        self.fill(PEERS_AT, WORDS_AT + self.region.units() * size_of::<u64>() - PEERS_AT);
    }

    fn id(&self) -> u128 {
        let [high, low] = self.region.gid();
        u128::from(high) << 64 | u128::from(low)
    }

    /// The peers of a connection's ends. The tables are copied anew where they do not know it yet.
    fn ends(&self, segment: u64, slot: u32) -> Option<[Host; 2]> {
        let known = |[client, server]: [u8; 2]| {
            let is_known =
                |number: &u8| self.region.peers().all().any(|(known, _)| known == *number);
            (is_known(&client) && is_known(&server)).then_some([client, server])
        };
        let found = self.find(segment, slot).and_then(known).or_else(|| {
            self.fill_tables();
            self.find(segment, slot).and_then(known)
        });
        found.map(|ends| ends.map(|number| host(&self.region, number)))
    }

    fn find(&self, segment: u64, slot: u32) -> Option<[u8; 2]> {
        let run = idle::run_of(&self.region, segment)?;
        let at = self.region.at(run.first).addr() - self.base.addr();
        self.fill(at, SLOTS_OFFSET);
        self.fill(at + SLOTS_OFFSET + slot as usize * size_of::<Slot>(), size_of::<Slot>());
        idle::peers_of(&self.region, run, segment, slot)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        unmap(&self.source, self.base, self.len);
    }
}

/// Copies bytes `at..at + len` to their place, as far as there are such. A file that has become shorter leaves the rest as it is.
fn copy(source: &Source, base: *mut u8, whole: usize, at: usize, len: usize) {
    let Some(len) = whole.checked_sub(at).map(|room| room.min(len)) else { return };
    match source {
        Source::File(file) => {
            // SAFETY: a part of the private memory, which no reference reaches meanwhile.
            #[expect(unsafe_code, reason = "a copy of a region")]
            let to = unsafe { slice::from_raw_parts_mut(base.add(at), len) };
            let mut done = 0;
            while let Ok(n @ 1..) = file.read_at(&mut to[done..], (at + done) as u64) {
                done += n;
            }
        }
        Source::Device(from) => {
            // Whole words, as their writers write them.
            for word in at / size_of::<u64>()..(at + len) / size_of::<u64>() {
                // SAFETY: a word of both mappings; other machines may write it, and it is read once.
                #[expect(unsafe_code, reason = "a copy of a region")]
                unsafe {
                    base.cast::<u64>().add(word).write(from.add(word).read_volatile());
                }
            }
        }
    }
}

fn unmap(source: &Source, base: *mut u8, len: usize) {
    // SAFETY: the copy's own mappings, which nothing reaches any more.
    #[expect(unsafe_code, reason = "mappings of its own")]
    unsafe {
        if let Source::Device(from) = source {
            let _ = munmap(from.cast_mut().cast(), len);
        }
        let _ = munmap(base.cast(), len);
    }
}

/// What provides a region, by its path: `ivshmem`, `dax`, `kvmfr`, `server`, or `file`.
pub fn provider_of(path: &Path) -> &'static str {
    let starts = |with: &str| path.to_str().is_some_and(|path| path.starts_with(with));
    match () {
        () if starts("/sys/bus/pci/") || starts("/sys/devices/pci") => "ivshmem",
        () if starts("/dev/dax") => "dax",
        () if starts("/dev/kvmfr") => "kvmfr",
        () if path.as_os_str().as_bytes().starts_with(SERVED) => "server",
        () if path.metadata().is_ok_and(|facts| facts.file_type().is_socket()) => "server",
        () => "file",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::Ordering::Relaxed;

    use usmc_shm::region::peers::Identity;
    use usmc_shm::region::units::Member;
    use usmc_shm::segment::Segment;

    use super::*;

    const GID: [u64; 2] = [0x7265, 0x6769];
    const UNITS: usize = 8;

    /// A region that this process has mapped.
    struct Mapped {
        path: PathBuf,
        file: File,
        base: *mut u8,
        region: Region,
    }

    impl Mapped {
        fn new(name: &str) -> Mapped {
            let name = format!("usmc-regions-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let file = File::options().read(true).write(true).create_new(true).open(&path);
            let (file, len) = (file.expect("our own file"), len_for(UNITS));
            file.set_len(len as u64).expect("a sparse file");
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a fresh mapping of a fresh file, which stays as long as this test.
            #[expect(unsafe_code, reason = "a region of the test's")]
            let (base, region) = unsafe {
                let base = mmap(ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0);
                let base = base.expect("a mapping").cast::<u8>();
                (base, Region::format(base, len, GID).expect("room"))
            };
            Mapped { path, file, base, region }
        }

        fn join(&self, host: u64, name: &[u8]) -> u8 {
            let identity = Identity { host: [host, 1], directory: [host, 2], station: 0 };
            self.region.peers().join(&identity, name).expect("a place")
        }

        /// A segment of the client's, whose first slot the acceptor has.
        fn connect(&self, client: u8, acceptor: u8) -> u64 {
            let owner = Member::new(client, 1, 1).expect("a member");
            let run = self.region.claim(UNIT, owner).expect("a unit");
            let id = 0xabcd << 32 | u64::from(run.first) << 1;
            // SAFETY: a run of the test's, which is zero.
            #[expect(unsafe_code, reason = "a segment of the test's")]
            let segment = unsafe { Segment::create(self.region.at(run.first), 1, (14, 0), id, 1) };
            let slot = segment.slot(0).expect("a slot");
            slot.control.attached_peer.store(acceptor.into(), Relaxed);
            id
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: the test's own mapping.
            #[expect(unsafe_code, reason = "a region of the test's")]
            let _ = unsafe { munmap(self.base.cast(), len_for(UNITS)) };
            let _ = fs::remove_file(&self.path);
        }
    }

    fn copy_of(mapped: &Mapped, regions: &mut Regions) -> usize {
        let found = regions.of(std::process::id());
        let mut of_it = found.into_iter().filter(|at| regions.copies[*at].path == mapped.path);
        of_it.next().expect("what this process has mapped")
    }

    #[test]
    fn the_kernels_of_both_ends_are_found() {
        let mapped = Mapped::new("ends");
        let mut regions = Regions::default();
        let at = copy_of(&mapped, &mut regions);
        assert_eq!(device_name(Some(regions.copies[at].id())), hex(GID));
        // Hosts that have joined since then, one of them with a name that is no text.
        let (client, server) = (mapped.join(1, b"vm1"), mapped.join(2, b"vm2\x1b[31m\nvm3"));
        let id = mapped.connect(client, server);
        let named = |id, slot| {
            let ends = regions.copies[at].ends(id, slot);
            ends.map(|ends| ends.map(|host| host.to_string()))
        };
        assert_eq!(named(id, 0), Some(["vm1/1".to_owned(), "vm2/2".to_owned()]));
        // No such slot, another segment's key, another run, and none that a region has.
        for (id, slot) in [(id, 1), (id, u32::MAX), (id ^ 1 << 40, 0), (id + 2, 0), (id | 1, 0)] {
            assert_eq!(named(id, slot), None, "{id:x} {slot}");
        }
        // An acceptor that nobody is.
        let strange = mapped.connect(client, 77);
        assert_eq!(named(strange, 0), None);
        let shown = shown(&mapped.region);
        assert_eq!((shown.alive(), shown.peers[1].name.as_str()), (2, "vm2"));
        assert_eq!((shown.units, shown.free, shown.peers[0].units), (UNITS, UNITS - 2, 2));
    }

    #[test]
    fn a_region_that_becomes_shorter_ends_no_reader() {
        let mapped = Mapped::new("shorter");
        let mut regions = Regions::default();
        let at = copy_of(&mapped, &mut regions);
        let (client, server) = (mapped.join(1, b"a"), mapped.join(2, b"b"));
        let id = mapped.connect(client, server);
        mapped.file.set_len(0).expect("a shorter file");
        assert_eq!(regions.copies[at].ends(id, 0), None);
        assert!(Regions::default().of(std::process::id()).len() <= regions.copies.len());
        mapped.file.set_len(len_for(UNITS) as u64).expect("its length");
    }

    #[test]
    fn providers_are_known_by_their_paths() {
        for (path, provider) in [
            ("/sys/bus/pci/devices/0000:00:03.0/resource2", "ivshmem"),
            ("/sys/devices/pci0000:00/0000:00:03.0/resource2", "ivshmem"),
            ("/dev/dax0.0", "dax"),
            ("/dev/kvmfr0", "kvmfr"),
            ("/memfd:usmc-region (deleted)", "server"),
            ("/dev/shm/usmc0", "file"),
        ] {
            assert_eq!(provider_of(Path::new(path)), provider, "{path}");
        }
    }
}
