//! Registered memory, and copies out of it and into it.

use std::collections::HashMap;
use std::ptr;

use usmc_verbs::sys::*;

/// A registered region. The local key and the remote key differ, so that a mistake shows.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    pub(crate) domain: u32,
    start: u64,
    len: u64,
    access: u32,
    rkey: u32,
}

#[derive(Default)]
pub(crate) struct Memory {
    /// By the local key.
    regions: HashMap<u32, Region>,
    /// The local key of a remote one.
    remote: HashMap<u32, u32>,
    made: u32,
}

impl Memory {
    /// Local and remote key of a new region. Keys are not used twice, and those of two processes rarely equal each other.
    pub(crate) fn register(
        &mut self,
        domain: u32,
        start: u64,
        len: u64,
        access: u32,
    ) -> (u32, u32) {
        self.made += 1;
        let lkey = self.made << 8 | 0x11;
        let rkey = lkey.wrapping_add(std::process::id() << 12) ^ 0x8000_0088;
        self.regions.insert(lkey, Region { domain, start, len, access, rkey });
        self.remote.insert(rkey, lkey);
        (lkey, rkey)
    }

    pub(crate) fn deregister(&mut self, lkey: u32) {
        if let Some(region) = self.regions.remove(&lkey) {
            self.remote.remove(&region.rkey);
        }
    }

    pub(crate) fn has_domain(&self, domain: u32) -> bool {
        self.regions.values().any(|region| region.domain == domain)
    }

    /// Whether a piece lies in a region of the domain that allows the access.
    pub(crate) fn allows(&self, domain: u32, piece: &ibv_sge, access: u32) -> bool {
        let Some(region) = self.regions.get(&piece.lkey) else { return false };
        region.contains(domain, piece.addr, u64::from(piece.length), access)
    }

    /// Whether a peer may write there by its key.
    pub(crate) fn allows_peer(&self, domain: u32, rkey: u32, address: u64, len: u32) -> bool {
        let Some(region) = self.remote.get(&rkey).and_then(|lkey| self.regions.get(lkey)) else {
            return false;
        };
        region.contains(domain, address, u64::from(len), IBV_ACCESS_REMOTE_WRITE)
    }
}

impl Region {
    fn contains(&self, domain: u32, address: u64, len: u64, access: u32) -> bool {
        let end = address.checked_add(len);
        self.domain == domain
            && self.access & access == access
            && address >= self.start
            && end.is_some_and(|end| end <= self.start + self.len)
    }
}

/// Appends `len` bytes from `offset` on of a list of pieces.
///
/// # Safety
///
/// All pieces are mapped and readable.
pub(crate) unsafe fn gather(pieces: &[ibv_sge], offset: usize, len: usize, into: &mut Vec<u8>) {
    let (mut skip, mut left) = (offset, len);
    for piece in pieces {
        let here = (piece.length as usize).saturating_sub(skip).min(left);
        if here > 0 {
            into.reserve(here);
            let from = (piece.addr + skip as u64) as *const u8;
            // SAFETY: Within the piece, and within what was reserved. A program may write meanwhile, as with a device: bytes are
            // copied and not looked at.
            unsafe {
                ptr::copy_nonoverlapping(from, into.as_mut_ptr().add(into.len()), here);
                into.set_len(into.len() + here);
            }
        }
        skip = skip.saturating_sub(piece.length as usize);
        left -= here;
    }
}

/// Puts data into a list of pieces, from `offset` on.
///
/// # Safety
///
/// All pieces are mapped and writable, and no references but those to atomics exist to them.
pub(crate) unsafe fn scatter(pieces: &[ibv_sge], offset: usize, mut data: &[u8]) {
    let mut skip = offset;
    for piece in pieces {
        let here = (piece.length as usize).saturating_sub(skip).min(data.len());
        let to = (piece.addr + skip as u64) as *mut u8;
        if here > 0 {
            // SAFETY: Within the piece. A program may look meanwhile, as with a device.
            unsafe { ptr::copy_nonoverlapping(data.as_ptr(), to, here) };
        }
        data = &data[here..];
        skip = skip.saturating_sub(piece.length as usize);
    }
}

/// Whether all pages of a range are mapped.
pub(crate) fn is_mapped(start: u64, len: u64) -> bool {
    // SAFETY: No arguments that are followed.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let first = start / page * page;
    let Some(end) = start.checked_add(len) else { return false };
    let pages = (end - first).div_ceil(page);
    let mut resident = vec![0u8; pages as usize];
    // SAFETY: The kernel follows no address; the vector has a byte for each page.
    unsafe { libc::mincore(first as *mut _, (end - first) as usize, resident.as_mut_ptr()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(bytes: &mut [u8]) -> ibv_sge {
        ibv_sge { addr: bytes.as_mut_ptr() as u64, length: bytes.len() as u32, lkey: 0 }
    }

    #[test]
    fn pieces_are_one_message() {
        let (mut a, mut b) = (*b"abc", *b"defgh");
        let pieces = [piece(&mut a), piece(&mut b)];
        let mut out = Vec::new();
        // SAFETY: Two arrays of this function.
        unsafe { gather(&pieces, 2, 4, &mut out) };
        assert_eq!(out, b"cdef");
        // SAFETY: As above.
        unsafe { scatter(&pieces, 1, b"123456") };
        assert_eq!((&a, &b), (b"a12", b"3456h"));
    }

    #[test]
    fn keys_hold_for_their_range_domain_and_access() {
        let mut memory = Memory::default();
        let both = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        let (lkey, rkey) = memory.register(1, 1000, 100, both);
        assert!(memory.allows_peer(1, rkey, 1000, 100));
        assert!(!memory.allows_peer(1, rkey, 1001, 100));
        assert!(!memory.allows_peer(1, rkey, u64::MAX, 1));
        assert!(!memory.allows_peer(2, rkey, 1000, 1));
        assert!(!memory.allows_peer(1, lkey, 1000, 1));
        memory.deregister(lkey);
        assert!(!memory.allows_peer(1, rkey, 1000, 1));
    }
}
