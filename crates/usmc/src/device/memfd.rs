//! Memfds of one kernel. They are sealed, so that no peer can shrink them, and change hands as descriptors.

use core::ffi::CStr;
use core::mem::offset_of;
use usmc_shm::layout::{
    SLOTS_MAX, SLOTS_OFFSET, SegmentHeader, WINDOW_SHIFT_MAX, far_offset, near_len, segment_len,
};
use usmc_shm::segment::Segment;

use super::{Backing, Device, HandOver, Name, Shape, Size, segment};
use crate::host;
use crate::host::board::Board;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{foreign_fd, memory, table};
use crate::record::near::Near;

/// Slots of the first segment of a listener's; each further one has four times as many.
const FIRST_SLOTS: u32 = 16;
/// Slots of the largest segment.
const MOST_SLOTS: u32 = if cfg!(target_pointer_width = "32") { 64 } else { SLOTS_MAX };

/// What the kernel calls the files.
pub const MEMFD_NAME: &CStr = c"usmc-segment";
/// CHIDs from here on are emulated devices' ("SMC-D emulated": loopback has the last).
const CHID: u16 = 0xffff;

/// The device.
pub static MEMFDS: Memfds = Memfds;

/// See [`MEMFDS`].
pub struct Memfds;

impl Device for Memfds {
    fn gid(&self) -> Option<[u64; 2]> {
        host::current().gid()
    }

    fn chid(&self) -> u16 {
        CHID
    }

    fn near(&self) -> Near {
        Near::HOST
    }

    fn shape(&self, last: u32) -> Shape {
        let slots = if last == 0 { FIRST_SLOTS } else { (last * 4).clamp(FIRST_SLOTS, MOST_SLOTS) };
        let (ring_shift, far_shift) = segment::shifts();
        Shape { slots, ring_shift, far_shift }
    }

    fn is_scarce(&self) -> bool {
        false
    }

    fn allocate(&self, size: Size) -> Result<Backing, Reason> {
        let fd = sys::memfd_create(MEMFD_NAME).map_err(|_| Reason::NoMemory)?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let mapped = sys::ftruncate(fd, size.whole as u64)
            .and_then(|()| sys::fcntl(fd, libc::F_ADD_SEALS, seals as usize))
            .and_then(|_| map(fd, size));
        let Ok((base, len)) = mapped else {
            sys::close(fd);
            return Err(Reason::NoMemory);
        };
        if !memory::take(base, SLOTS_OFFSET) {
            // SAFETY: nobody has seen it.
            unsafe { sys::munmap(base, len) };
            sys::close(fd);
            return Err(Reason::NoMemory);
        }
        Ok(Backing {
            base,
            len,
            whole: size.whole,
            name: Name::Fd(table::keep_fd(fd)),
            is_zero: true,
        })
    }

    fn inspect(&self, name: Name) -> Result<Size, Reason> {
        let Name::Fd(fd) = name else { return Err(Reason::PeerBroken) };
        let whole = size_of_sealed(fd)?;
        Ok(Size { near: near_in(fd).unwrap_or(whole).min(whole), whole })
    }

    fn attach(&self, name: Name, size: Size) -> Result<Backing, Reason> {
        let Name::Fd(fd) = name else { return Err(Reason::PeerBroken) };
        let (base, len) = map(fd, size).map_err(|_| Reason::NoMemory)?;
        Ok(Backing { base, len, whole: size.whole, name: Name::Fd(-1), is_zero: false })
    }

    unsafe fn detach(&self, backing: &Backing) {
        // SAFETY: the caller's contract.
        unsafe { sys::munmap(backing.base, backing.len) };
    }

    unsafe fn free(&self, backing: &Backing, _is_idle: bool) {
        // SAFETY: the caller's contract. A peer that has it mapped keeps it.
        unsafe { self.detach(backing) };
        if let Name::Fd(fd @ 0..) = backing.name {
            table::release_fd(fd);
        }
    }

    fn take(&self, at: *mut u8, len: usize) -> bool {
        memory::take(at, len)
    }

    unsafe fn give_back(&self, at: *mut u8, len: usize) -> bool {
        // SAFETY: the caller's contract.
        unsafe { sys::madvise(at, len, libc::MADV_REMOVE) }.is_ok()
    }

    fn board(&'static self) -> Board<'static> {
        host::current().board()
    }

    fn hand_over(&self) -> HandOver {
        HandOver::Mail
    }

    fn is_charged(&self) -> bool {
        true
    }

    fn has_ended(&self, owner: u64) -> bool {
        !host::current().is_identity_alive(owner)
    }
}

/// A segment of other processes, mapped so that its slots can be looked at from outside. What is in it is hostile.
pub struct View {
    segment: Segment,
    len: usize,
}

impl View {
    /// Of its file. The descriptor stays the caller's.
    ///
    /// # Errors
    /// [`Reason::PeerBroken`] where it is no segment of this version, [`Reason::NoMemory`] where it cannot be mapped.
    pub fn of(fd: i32) -> Result<View, Reason> {
        let whole = size_of_sealed(fd)?;
        let len = near_in(fd).filter(|near| *near <= whole).ok_or(Reason::PeerBroken)?;
        let base = sys::mmap_shared(fd, len).map_err(|_| Reason::NoMemory)?;
        // SAFETY: a fresh mapping of that length, of a file that is sealed against a change of its size; it lasts as long as the view.
        let opened = unsafe { Segment::open(base, len, whole) };
        opened.map(|segment| View { segment, len }).map_err(|_| {
            // SAFETY: nobody has seen it.
            unsafe { sys::munmap(base, len) };
            Reason::PeerBroken
        })
    }

    /// Its slots and rings, without their far parts.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`; what refers to it has borrowed the view.
        unsafe { sys::munmap(self.segment.base(), self.len) };
    }
}

/// Maps a segment's file, or what lies before the far parts where these do not fit. How much it is. They are neither locked
/// (mlockall(2)) nor part of core dumps: both would fill them.
fn map(fd: i32, Size { near, whole }: Size) -> Result<(*mut u8, usize), Errno> {
    if super::segment::SPACE != usize::MAX || near == whole {
        return sys::mmap_shared(fd, near).map(|base| (base, near));
    }
    let Ok(base) = sys::mmap_out_of_reach(fd, whole) else {
        return sys::mmap_shared(fd, near).map(|base| (base, near));
    };
    let from = far_offset(near);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: nobody has the mapping yet, and no byte changes.
    let done = unsafe {
        sys::munlock(base.add(from), whole - from)
            .and_then(|()| sys::madvise(base.add(from), whole - from, libc::MADV_DONTDUMP))
            .and_then(|()| sys::mprotect(base, whole, access))
    };
    if let Err(errno) = done {
        // SAFETY: nobody has seen it.
        unsafe { sys::munmap(base, whole) };
        return Err(errno);
    }
    Ok((base, whole))
}

/// Bytes of a segment's file before its far parts, as its header says.
fn near_in(fd: i32) -> Option<usize> {
    let mut words = [0u32; 2];
    let at = offset_of!(SegmentHeader, slots) as i64;
    // SAFETY: eight writable bytes.
    let read = unsafe { sys::pread(fd, words.as_mut_ptr().cast(), size_of_val(&words), at) };
    (read == Ok(size_of_val(&words))).then_some(())?;
    near_len(words[0], words[1])
}

/// Bytes of a peer's memory that cannot shrink.
fn size_of_sealed(fd: i32) -> Result<usize, Reason> {
    // Before the file is asked anything else, see there.
    if !foreign_fd::is_memory(fd) {
        return Err(Reason::PeerBroken);
    }
    let size = sys::fstat(fd).map_err(|_| Reason::PeerBroken)?.size;
    let size = usize::try_from(size).map_err(|_| Reason::NoMemory)?;
    // On 32-bit machines the largest one has no length.
    let most = segment_len(SLOTS_MAX, WINDOW_SHIFT_MAX - 1, WINDOW_SHIFT_MAX);
    let most = most.unwrap_or(isize::MAX as usize);
    if size > most || size < SLOTS_OFFSET {
        return Err(Reason::PeerBroken);
    }
    Ok(size)
}
