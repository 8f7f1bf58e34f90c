//! Memory that a device may reach, and pieces of it that requests name.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ops::BitOr;
use std::ptr;
use std::rc::Rc;

use crate::error::Error;
use crate::pd::{self, Pd};
use crate::sys::*;

/// What a device may do with memory. It may always read it for requests of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access(u32);

impl Access {
    /// Nothing but to read it for own requests.
    pub const LOCAL_READ: Access = Access(0);
    /// To write what own requests receive.
    pub const LOCAL_WRITE: Access = Access(IBV_ACCESS_LOCAL_WRITE);
    /// To write what the peer's WRITEs bring. The standard demands [`Access::LOCAL_WRITE`] with it.
    pub const REMOTE_WRITE: Access = Access(IBV_ACCESS_REMOTE_WRITE);

    pub(crate) fn bits(self) -> u32 {
        self.0
    }
}

impl BitOr for Access {
    type Output = Access;

    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

/// A registered memory region. It stays registered until it is dropped.
pub struct Mr {
    raw: *mut ibv_mr,
    domain: Rc<pd::Inner>,
    /// Behind `raw`: the memory goes after the registration.
    _owned: Option<Mapping>,
}

/// A piece of registered memory, which a request names. It lives no longer than the region is borrowed; the region itself has to stay until
/// the request has completed, or the request fails.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Piece<'a> {
    pub(crate) raw: ibv_sge,
    region: PhantomData<&'a Mr>,
}

impl Piece<'_> {
    /// Bytes of the piece.
    #[allow(clippy::len_without_is_empty, reason = "an empty piece is of no interest")]
    pub fn len(&self) -> u32 {
        self.raw.length
    }
}

impl Mr {
    /// Registers memory that belongs to somebody else, such as a mapping that is shared with other processes.
    ///
    /// # Safety
    ///
    /// All `len` bytes from `start` on stay mapped, readable, and with [`Access::LOCAL_WRITE`] writable, until this is dropped. The device
    /// and its peer write them at any time, so no reference to them exists, save to atomics.
    ///
    /// # Errors
    ///
    /// [`Error::Call`]; ENOMEM is most often RLIMIT_MEMLOCK.
    pub unsafe fn register(
        domain: &Pd,
        start: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, Error> {
        // SAFETY: The caller's promise; the domain is there.
        unsafe { Mr::of(domain, start, len, access, None) }
    }

    /// Registers `len` zeroed bytes of its own, for receives and small messages. They are not shared with forked children.
    ///
    /// # Errors
    ///
    /// As [`Mr::register`]; [`Error::Invalid`] for no bytes.
    pub fn new(domain: &Pd, len: usize, access: Access) -> Result<Mr, Error> {
        let mapping = Mapping::new(len)?;
        let start = mapping.start;
        // SAFETY: The mapping is readable and writable, nobody else knows it, and it goes with the region.
        unsafe { Mr::of(domain, start, len, access, Some(mapping)) }
    }

    /// # Safety
    ///
    /// That of [`Mr::register`].
    unsafe fn of(
        domain: &Pd,
        start: *mut u8,
        len: usize,
        access: Access,
        owned: Option<Mapping>,
    ) -> Result<Mr, Error> {
        let register = domain.device().functions().ibv_reg_mr;
        // SAFETY: The domain is there; the memory is the caller's promise.
        let raw = unsafe { register(domain.inner.raw, start.cast(), len, access.bits() as c_int) };
        if raw.is_null() {
            return Err(Error::last("ibv_reg_mr"));
        }
        Ok(Mr { raw, domain: domain.inner.clone(), _owned: owned })
    }

    /// Where it starts: the address that a peer's WRITEs name, too.
    pub fn address(&self) -> u64 {
        self.start() as u64
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "no region is empty")]
    pub fn len(&self) -> usize {
        // SAFETY: The registration is there. The library does not change it.
        unsafe { (*self.raw).length }
    }

    /// The key by which a peer names it.
    pub fn rkey(&self) -> u32 {
        // SAFETY: As above.
        unsafe { (*self.raw).rkey }
    }

    /// The key by which own requests name it.
    pub fn lkey(&self) -> u32 {
        // SAFETY: As above.
        unsafe { (*self.raw).lkey }
    }

    /// The piece of `len` bytes from `offset` on; `None` if the region has less.
    pub fn piece(&self, offset: usize, len: u32) -> Option<Piece<'_>> {
        self.check(offset, len as usize)?;
        let raw = ibv_sge { addr: self.address() + offset as u64, length: len, lkey: self.lkey() };
        Some(Piece { raw, region: PhantomData })
    }

    /// Copies bytes out, a word after another, while the device may write. `None`, and nothing copied, if the region has less.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Option<()> {
        self.check(offset, to.len())?;
        // SAFETY: Within the region.
        let from = unsafe { self.start().add(offset) };
        let words = if from.cast::<u64>().is_aligned() { to.len() & !7 } else { 0 };
        let (whole, rest) = to.split_at_mut(words);
        for (at, word) in whole.as_chunks_mut().0.iter_mut().enumerate() {
            // SAFETY: Within the region, and aligned. Volatile, as the device writes by itself.
            *word = unsafe { from.cast::<u64>().add(at).read_volatile() }.to_ne_bytes();
        }
        for (at, byte) in rest.iter_mut().enumerate() {
            // SAFETY: As above.
            *byte = unsafe { from.add(words + at).read_volatile() };
        }
        Some(())
    }

    /// Copies bytes in, one after another. `None`, and nothing copied, if the region has less.
    ///
    /// # Panics
    ///
    /// In memory of others that was registered without [`Access::LOCAL_WRITE`] the page may be read-only: this is for own memory, and panics
    /// for other memory.
    pub fn write(&self, offset: usize, from: &[u8]) -> Option<()> {
        assert!(
            self._owned.is_some(),
            "memory that was registered by address is written by its owner"
        );
        self.check(offset, from.len())?;
        for (at, byte) in from.iter().enumerate() {
            // SAFETY: Within the region, which is our own mapping. Volatile, as the device reads by itself.
            unsafe { self.start().add(offset + at).write_volatile(*byte) };
        }
        Some(())
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: As for `len`.
        unsafe { (*self.raw).addr.cast() }
    }

    fn check(&self, offset: usize, len: usize) -> Option<()> {
        (offset.checked_add(len)? <= self.len()).then_some(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: The registration is there and nobody else ends it. Requests that name it fail from now on.
        let _ = unsafe { (self.domain.device.functions().ibv_dereg_mr)(self.raw) };
    }
}

/// Anonymous memory. Shared, so that pages that a device has pinned are not copied in a parent that forks.
struct Mapping {
    start: *mut u8,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Result<Mapping, Error> {
        if len == 0 {
            return Err(Error::Invalid {
                what: "a memory region has at least one byte: ask for more",
            });
        }
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: A new mapping, wherever the kernel puts it.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::last("mmap"));
        }
        let mapping = Mapping { start: start.cast(), len };
        // SAFETY: Advice for our own mapping. A child has no use for it.
        let _ = unsafe { libc::madvise(start, len, libc::MADV_DONTFORK) };
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: Our own mapping, whose registration has ended.
        let _ = unsafe { libc::munmap(self.start.cast::<c_void>(), self.len) };
    }
}
