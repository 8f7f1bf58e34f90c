//! What `usmc ss` may read of a process: one fixed record per TCP socket.
//!
//! Every process that holds a tracked socket owns a memfd named [`MEMFD_NAME`]; a reader of the same
//! user finds it as `/proc/PID/fd/N` (the link reads `/memfd:usmc-conn (deleted)`) and maps it
//! read-only. The file starts with one [`Header`], records follow at [`RECORDS_OFFSET`]. The reader
//! must treat everything in it as hostile bytes; the library itself never reads it back.

use usmc_shm::sync::{AtomicU32, AtomicU64};

/// Begins the name of every file that this version's processes make in the ISM directory.
pub use crate::device::loopback::layout::PREFIX as DEVICE_PREFIX;

/// Name given to memfd_create(2).
pub const MEMFD_NAME: &core::ffi::CStr = c"usmc-conn";
/// First eight bytes of the file, native endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"uSMCconn");
/// Layout version of [`Header`] and [`Record`].
pub const VERSION: u32 = 1;
/// Offset in bytes of record 0.
pub const RECORDS_OFFSET: usize = 4096;

/// Start of the file.
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// `size_of::<Record>()`.
    pub record_size: AtomicU32,
    /// Records from this index on were never used (a bound for the reader's scan).
    pub high_water: AtomicU32,
    /// Process that owns the file (its own pid namespace).
    pub pid: AtomicU32,
}

/// One socket. `seq` is 0 when unused, odd while the cold fields change, even and non-zero otherwise.
#[repr(C, align(128))]
pub struct Record {
    /// Sequence lock over everything but the two counters.
    pub seq: AtomicU32,
    /// fd number at the time of the last change.
    pub fd: AtomicU32,
    /// Bits 0-7 [`State`], 8-15 [`Mode`], 16-23 [`crate::reason::Reason`], 24-31 address family (4 or 6).
    pub kind: AtomicU32,
    /// Local port in bits 0-15, peer port in bits 16-31, host byte order.
    pub ports: AtomicU32,
    /// Local address, network byte order; IPv4 uses the first four bytes.
    pub local: [AtomicU64; 2],
    /// Peer address, likewise.
    pub peer: [AtomicU64; 2],
    /// Bytes the application sent: through TCP up to the boundary, and through the ring. 0 in mode TCP.
    pub tx_bytes: AtomicU64,
    /// Bytes the application received, likewise.
    pub rx_bytes: AtomicU64,
    /// Size of the send ring in bytes, 0 in mode TCP.
    pub ring_size: AtomicU32,
    /// Slot index in its segment; tells two rings of one process apart in diagnostics.
    pub slot: AtomicU32,
    /// What the TCP option came to ([`crate::syn_option::Outcome`]); under the sequence lock.
    pub syn_option: AtomicU32,
}

// The same for 32-bit processes, which a 64-bit `usmc ss` reads.
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Record>() == 128 && size_of::<Header>() == 24);
    assert!(offset_of!(Record, local) == 16 && offset_of!(Record, peer) == 32);
    assert!(offset_of!(Record, tx_bytes) == 48 && offset_of!(Record, ring_size) == 64);
};

/// Socket states, with the kernel's SMC names (`smcss`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// Created, neither connected nor listening.
    Init = 1,
    /// listen(2) succeeded.
    Listen = 2,
    /// Connected.
    Active = 3,
    /// The peer closed its sending direction.
    PeerClosed = 4,
    /// We closed our sending direction.
    AppClosed = 5,
}

/// What moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mode {
    /// The kernel's TCP; the reason says why.
    Tcp = 1,
    /// A ring in shared memory, both directions or about to be.
    Smcd = 2,
}
