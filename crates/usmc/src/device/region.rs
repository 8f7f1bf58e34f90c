//! A region: a file that processes of several kernels may map, and in which each of them claims runs of units for its segments
//! ([`usmc_shm::units`]). Ends that meet there have memory in common, and nothing else.
//!
//! All of it is in memory from the start, so that there are no far parts, nothing is taken, and nothing is given back. What an
//! owner has claimed and left behind stays claimed. The members trust each other: one that makes the file shorter ends the others
//! by SIGBUS.

use core::ptr;
use usmc_shm::layout::{SegmentHeader, near_len};
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};
use usmc_shm::units::{self, Run};

use super::{Backing, Device, Name, Size};
use crate::host;
use crate::os::path::Path;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{config, log};
use crate::record::near::Near;

/// CHIDs of emulated devices are 0xff00 to 0xffff; loopback has the last.
const CHID: u16 = 0xfffe;

/// The region of this process, once there is one.
pub static REGION: Region = Region::new();

/// A region that this process has mapped, or not yet.
pub struct Region {
    base: AtomicPtr<u8>,
    len: AtomicUsize,
    /// The number of this process among those that share it; not 0.
    owner: AtomicU32,
    /// The configured file was tried, or is being tried by a thread.
    is_tried: AtomicBool,
}

impl Region {
    /// One that is not mapped.
    pub const fn new() -> Region {
        Region {
            base: AtomicPtr::new(ptr::null_mut()),
            len: AtomicUsize::new(0),
            owner: AtomicU32::new(0),
            is_tried: AtomicBool::new(false),
        }
    }

    /// Maps the file of this descriptor, which stays the caller's; for one thread. `owner` names this process, and is not 0.
    ///
    /// # Errors
    /// EINVAL where it is no region, or one is mapped already; or what mmap(2) says.
    pub fn map(&self, fd: i32, owner: u32) -> Result<(), Errno> {
        let len = usize::try_from(sys::fstat(fd)?.size).map_err(|_| libc::EINVAL)?;
        if owner == 0 || len == 0 || !self.base.load(Acquire).is_null() {
            return Err(libc::EINVAL);
        }
        let base = sys::mmap_shared(fd, len)?;
        // SAFETY: a mapping of `len` bytes of this process' own, which stays.
        if unsafe { units::Region::open(base, len) }.is_err() {
            // SAFETY: no other thread has seen it.
            unsafe { sys::munmap(base, len) };
            return Err(libc::EINVAL);
        }
        self.len.store(len, Relaxed);
        self.owner.store(owner, Relaxed);
        // Release: a thread that sees the base sees the length.
        self.base.store(base, Release);
        Ok(())
    }

    /// Whether this process has one: the configured file is mapped the first time. A file that is no region is not used.
    pub fn is_there(&self) -> bool {
        if !self.base.load(Acquire).is_null() {
            return true;
        }
        let path = config::get().region();
        !path.is_empty() && !self.is_tried.load(Relaxed) && self.open(path)
    }

    #[cold]
    fn open(&self, path: &str) -> bool {
        // One thread maps it: the length belongs to that mapping.
        if self.is_tried.swap(true, AcqRel) {
            return false;
        }
        let owner = host::current().own_identity().map_or(0, |identity| identity as u32 + 1);
        let name = Path::of(format_args!("{path}"));
        let mapped = sys::open(name.c(), libc::O_RDWR, 0).and_then(|fd| {
            let mapped = self.map(fd, owner);
            sys::close(fd);
            mapped
        });
        if let Err(errno) = mapped {
            log::warn(format_args!("region {path} cannot be used (errno {errno})"));
        }
        mapped.is_ok()
    }

    fn units(&self) -> Option<units::Region> {
        let base = self.base.load(Acquire);
        if base.is_null() {
            return None;
        }
        // SAFETY: mapped by `map`, and never unmapped. The geometry is checked anew each time.
        unsafe { units::Region::open(base, self.len.load(Relaxed)) }.ok()
    }
}

impl Default for Region {
    fn default() -> Region {
        Region::new()
    }
}

fn run_of(name: Name) -> Option<Run> {
    match name {
        Name::Run(first, uses) => Some(Run { first, uses: u16::try_from(uses).ok()? }),
        Name::Fd(_) => None,
    }
}

impl Device for Region {
    fn gid(&self) -> Option<[u64; 2]> {
        self.units().map(|units| units.gid())
    }

    fn chid(&self) -> u16 {
        CHID
    }

    fn near(&self) -> Near {
        Near::NOTHING
    }

    fn allocate(&self, size: Size) -> Result<Backing, Reason> {
        let units = self.units().ok_or(Reason::NoDevice)?;
        let run = units.claim(size.near, self.owner.load(Relaxed)).ok_or(Reason::NoMemory)?;
        let name = Name::Run(run.first, run.uses.into());
        let (base, len) = (units.at(run), size.near);
        Ok(Backing { base, len, whole: len, name, is_zero: false })
    }

    fn inspect(&self, name: Name) -> Result<Size, Reason> {
        let units = self.units().ok_or(Reason::NoDevice)?;
        let run = run_of(name).ok_or(Reason::PeerBroken)?;
        let bytes = units.bytes_of(run).ok_or(Reason::PeerBroken)?;
        // SAFETY: a run has at least the bytes of a header; atomics accept any bits.
        let header = unsafe { &*units.at(run).cast::<SegmentHeader>() };
        let near = near_len(header.slots.load(Relaxed), header.ring_shift.load(Relaxed));
        match near {
            Some(near) if near <= bytes => Ok(Size { near, whole: near }),
            _ => Err(Reason::PeerBroken),
        }
    }

    fn attach(&self, name: Name, size: Size) -> Result<Backing, Reason> {
        let units = self.units().ok_or(Reason::NoDevice)?;
        let run = run_of(name).ok_or(Reason::PeerBroken)?;
        if units.bytes_of(run).is_none_or(|bytes| size.near > bytes) {
            return Err(Reason::PeerBroken);
        }
        Ok(Backing { base: units.at(run), len: size.near, whole: size.near, name, is_zero: false })
    }

    unsafe fn detach(&self, _backing: &Backing) {}

    unsafe fn free(&self, backing: &Backing, is_idle: bool) {
        // A peer that has a slot still uses the memory.
        if is_idle && let (Some(units), Some(run)) = (self.units(), run_of(backing.name)) {
            units.release(run, backing.len);
        }
    }

    fn take(&self, _at: *mut u8, _len: usize) -> bool {
        true
    }

    unsafe fn give_back(&self, _at: *mut u8, _len: usize) -> bool {
        false
    }

    fn has_ended(&self, _owner: u64) -> bool {
        false
    }
}
