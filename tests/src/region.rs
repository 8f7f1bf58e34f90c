//! A region in a plain file, as processes of several kernels would share it, and hosts that have nothing else in common.

use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use usmc_shm::region::units::Run;
use usmc_shm::region::{Region, UNIT, idle, len_for, units_in};
use usmc_shm::sync::Ordering::Relaxed;

use crate::ss::Socket;
use crate::{Fixture, build};

/// Makes one of so many bytes, most of which are not in memory.
///
/// # Panics
/// Without room.
pub fn create(dir: &Path, len: usize) -> PathBuf {
    let path = dir.join("region");
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.expect("our own file");
    file.set_len(len as u64).expect("a sparse file");
    // Tests run side by side, and commands tell regions apart by their ids.
    let inode = file.metadata().expect("the region").ino();
    // SAFETY: a fresh mapping of the whole file, which nobody else has, and which ends here.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base =
            libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED, "a mapping");
        Region::format(base.cast(), len, [0x7265_6769, inode]).expect("room for a unit");
        libc::munmap(base, len);
    }
    path
}

/// Hosts with an ISM directory each, and a region.
pub struct Hosts {
    region: PathBuf,
    dirs: Vec<PathBuf>,
}

impl Hosts {
    /// So many, and a region of so many bytes.
    ///
    /// # Panics
    /// Without room.
    pub fn new(fixture: &Fixture, count: usize, len: usize) -> Hosts {
        let region = create(fixture.scratch(), len);
        let dirs = (0..count).map(|host| fixture.scratch().join(format!("host{host}")));
        let dirs: Vec<PathBuf> = dirs.collect();
        for dir in &dirs {
            fs::create_dir(dir).expect("our own directory");
            fs::set_permissions(dir, Permissions::from_mode(0o700)).expect("our own directory");
        }
        Hosts { region, dirs }
    }

    /// The region's file.
    pub fn region(&self) -> &Path {
        &self.region
    }

    /// The ISM directory of a host.
    pub fn ism_dir(&self, host: usize) -> &Path {
        &self.dirs[host]
    }

    /// A program is this host's.
    pub fn dress(&self, host: usize, command: &mut Command) {
        command.env("USMC_ISM_DIR", &self.dirs[host]).env("USMC_REGIONS", &self.region);
    }

    /// A program is this host's, and moves its bytes through the region, also to programs of its own host.
    pub fn dress_for_region(&self, host: usize, command: &mut Command) {
        self.dress(host, command);
        command.env("USMC_LOOPBACK", "off");
    }

    /// For users of this group, one for each host.
    ///
    /// # Panics
    /// Where that is not permitted.
    pub fn give_to(&self, group: u32, users: &[u32]) {
        let give = |path: &Path, user, mode| {
            chown(path, user, Some(group)).expect("we are root");
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("our own");
        };
        give(&self.region, None, 0o660);
        self.dirs.iter().zip(users).for_each(|(dir, user)| give(dir, Some(*user), 0o700));
    }

    /// What `usmc region show` says.
    ///
    /// # Panics
    /// When the command fails.
    pub fn shown(&self) -> Value {
        let mut command = Command::new(build::usmc());
        let out = command.args(["region", "show", "--json"]).arg(&self.region).output();
        let out = out.expect("running usmc region show");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).expect("JSON")
    }

    /// Units that nobody has.
    ///
    /// # Panics
    /// When the command fails.
    pub fn free(&self) -> u64 {
        self.shown()["free"].as_u64().expect("a number")
    }

    /// How many of these ends are in the region.
    ///
    /// # Panics
    /// When the command fails.
    pub fn count(&self, ends: &[Socket]) -> usize {
        let shown = self.shown();
        let gid = shown["gid"].as_str().expect("text");
        ends.iter().filter(|end| end.is_smcd() && end.device == gid).count()
    }
}

/// Memory that has not come back.
pub struct Lost {
    /// The slots that somebody holds, with what is written there of the holders, for a message.
    pub text: String,
    /// Units of runs in which an end counts more holders than have entered their ids. A process that is killed in the middle of a fork
    /// leaves one, and nobody can tell it from a child that has yet to enter its own.
    pub of_forks: u64,
}

/// What of a region's memory has not come back.
///
/// # Panics
/// Without the file.
pub fn lost(path: &Path) -> Lost {
    let file = File::options().read(true).write(true).open(path).expect("the region");
    let len = file.metadata().expect("the region").len() as usize;
    // SAFETY: a fresh mapping of the whole file, which ends here; what is read there are atomics.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base =
            libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED, "a mapping");
        let region = Region::open(base.cast(), len).expect("a region");
        let runs: Vec<Run> = region.words().runs().collect();
        let text = runs.iter().map(|run| held_in(&region, *run)).collect();
        let of_forks = runs.iter().filter(|run| is_of_a_fork(&region, **run));
        let of_forks = of_forks.map(|run| u64::from(run.count)).sum();
        libc::munmap(base, len);
        Lost { text, of_forks }
    }
}

fn held_in(region: &Region, run: Run) -> String {
    let mut text = format!("{run:?}\n");
    let Some(segment) = idle::segment_in(region, run) else { return text };
    for index in 0..segment.slots() {
        let slot = segment.slot(index).expect("a slot");
        if slot.end.iter().all(|end| end.refs.load(Relaxed) == 0) {
            continue;
        }
        let (state, peer) = (&slot.control.state, &slot.control.attached_peer);
        let _ = write!(text, "  slot {index} is at {:#x}", state.load(Relaxed));
        let _ = writeln!(text, ", acceptor's peer {:#x}", peer.load(Relaxed));
        for end in &slot.end {
            let members = end.members.each_ref().map(|id| id.load(Relaxed));
            let [refs, pid, fd] = [&end.refs, &end.pid, &end.fd].map(|word| word.load(Relaxed));
            let _ = writeln!(text, "    {refs} hold it: {members:?}, process {pid} fd {fd}");
        }
    }
    text
}

fn is_of_a_fork(region: &Region, run: Run) -> bool {
    let Some(segment) = idle::segment_in(region, run) else { return false };
    let slots = (0..segment.slots()).map(|index| segment.slot(index).expect("a slot"));
    slots.flat_map(|slot| &slot.end).any(|end| {
        let known = end.members.iter().filter(|id| id.load(Relaxed) != 0).count();
        known > 0 && end.refs.load(Relaxed) as usize == known + 1
    })
}

/// Whether anybody has ever had memory of it: there is something in the first unit, whosever that is by now.
///
/// # Panics
/// Without the file.
pub fn was_used(path: &Path) -> bool {
    let mut word = [0; 8];
    let file = File::open(path).expect("the region");
    let units = units_in(file.metadata().expect("the region").len() as usize);
    file.read_exact_at(&mut word, (len_for(units) - units * UNIT) as u64).expect("a unit");
    u64::from_ne_bytes(word) != 0
}
