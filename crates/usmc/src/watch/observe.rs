//! What `usmc ss`, `usmc stats` and `usmc dump` may read of a process: one fixed record per TCP socket, the counters
//! of those that are gone, and a ring for whoever captures.
//!
//! Every process that holds a tracked socket owns a memfd named [`MEMFD_NAME`]; a process that may ptrace(2) it finds that
//! as `/proc/PID/fd/N` (the link reads `/memfd:usmc-conn (deleted)`) and opens it. The file starts with one
//! [`Header`], then [`Totals`] and [`Capture`]; records follow at [`RECORDS_OFFSET`], and the ring is where the header
//! says. The reader must treat everything in it as hostile bytes. The library acts upon [`Capture`] and
//! [`Record::captured`] alone, and trusts neither. The file is sealed against a change of its size.

use usmc_shm::sync::{AtomicU32, AtomicU64};
use usmc_shm::tap::TapControl;

use crate::host::layout;
use crate::os::process;

/// Begins the name of every file that this version's processes make in the ISM directory.
pub use crate::host::layout::PREFIX as DEVICE_PREFIX;

/// Name given to memfd_create(2).
pub const MEMFD_NAME: &core::ffi::CStr = c"usmc-conn";
/// First eight bytes of the file, native endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"uSMCconn");
/// Layout version of everything here.
pub const VERSION: u32 = 7;
/// Offset in bytes of [`Totals`].
pub const TOTALS_OFFSET: usize = 512;
/// Offset in bytes of [`Capture`].
pub const CAPTURE_OFFSET: usize = 8192;
/// Offset in bytes of record 0.
pub const RECORDS_OFFSET: usize = 12288;

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
    /// Offset in bytes of the capture ring.
    pub ring_offset: AtomicU64,
    /// Its size in bytes, a power of two.
    pub ring_size: AtomicU64,
    /// The ids of the process' regions, by [`DEVICE_SHIFT`]'s numbers from 1 on; 0 = no connection was to be in it yet. The last place
    /// is the agent's.
    pub regions: [[AtomicU64; 2]; PLACES],
}

/// One socket. `seq` is 0 when unused, odd while the cold fields change, even and non-zero otherwise.
///
/// The first half changes with the connection's mode, the second with each call.
#[repr(C, align(128))]
pub struct Record {
    /// Sequence lock over the first half.
    pub seq: AtomicU32,
    /// fd number at the time of the last change.
    pub fd: AtomicU32,
    /// Bits 0-7 [`State`], 8-15 [`Mode`], 16-23 [`crate::os::reason::Reason`], 24-31 address family (4 or 6).
    pub kind: AtomicU32,
    /// Local port in bits 0-15, peer port in bits 16-31, host byte order.
    pub ports: AtomicU32,
    /// Local address, network byte order; IPv4 uses the first four bytes.
    pub local: [AtomicU64; 2],
    /// Peer address, likewise.
    pub peer: [AtomicU64; 2],
    /// What the send ring's window had in bytes when it last grew or the connection changed, 0 in mode TCP.
    pub window: AtomicU32,
    /// Bits 0-15: slot index in its segment. [`CLIENT_END`], [`WAS_SMCD`]. At [`DEVICE_SHIFT`] the device. From [`SYN_OPTION_SHIFT`] on what the TCP
    /// option came to ([`crate::handshake::syn_option::Outcome`]).
    pub slot: AtomicU32,
    /// The segment's random identity, the same at both ends; in mode TCP 0, or the code that goes
    /// with [`crate::os::reason::Reason::Declined`].
    pub segment: AtomicU64,
    /// Bytes the application sent: through TCP up to the boundary, and through the ring. 0 in mode TCP.
    pub tx_bytes: AtomicU64,
    /// Bytes the application received, likewise.
    pub rx_bytes: AtomicU64,
    /// Times something was put into the ring: a send that waits for room in between counts once more.
    pub tx_calls: AtomicU64,
    /// Times something was taken out of it.
    pub rx_calls: AtomicU64,
    /// Sends that the ring could not take as a whole at once.
    pub tx_full: AtomicU32,
    /// Sleeps in a call on this connection alone.
    pub sleeps: AtomicU32,
    /// Spins that made such a sleep unnecessary.
    pub spins: AtomicU32,
    /// Doorbells sent.
    pub bells_sent: AtomicU32,
    /// Doorbells taken out of the TCP stream.
    pub bells_drained: AtomicU32,
    /// [`CAPTURED`] or [`ASK`] while its bytes are copied to the capture ring, else 0; means nothing while
    /// [`Capture::session`] is 0.
    pub captured: AtomicU32,
    /// Bytes of each of the connection's two rings, as its client has them configured; 0 of a library that does not tell. Means
    /// nothing in mode TCP.
    pub ring_size: AtomicU32,
}

/// Bit of [`Record::slot`]: the connecting end.
pub const CLIENT_END: u32 = 1 << 16;
/// Bit of [`Record::slot`]: is or was in a ring.
pub const WAS_SMCD: u32 = 1 << 17;
/// The first of three bits of [`Record::slot`] that say which device's memory its ring is or was in, or was to be in: 0 the ISM
/// directory's, or none was found; others places in [`Header::regions`].
pub const DEVICE_SHIFT: u32 = 18;
/// Regions that one process can use.
pub const REGIONS: usize = 4;
/// The place in [`Header::regions`] of connections that an agent has (SMC-R), behind those of the regions.
pub const AGENT: usize = REGIONS;
/// The id in that place, which no region has.
pub const AGENT_ID: u128 = u128::MAX;
/// Places in [`Header::regions`]: the regions' and the agent's.
pub const PLACES: usize = REGIONS + 1;
/// The first bit of the TCP option's outcome in [`Record::slot`].
pub const SYN_OPTION_SHIFT: u32 = 24;
/// [`Record::captured`]: yes.
pub const CAPTURED: u32 = 1;
/// [`Record::captured`]: to be decided by [`Capture`] at the next call; what the reader writes.
pub const ASK: u32 = 2;

// The same for 32-bit processes, which a 64-bit `usmc ss` reads.
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Record>() == 128 && size_of::<Header>() == 120);
    assert!(offset_of!(Record, local) == 16 && offset_of!(Record, segment) == 56);
    assert!(offset_of!(Record, tx_bytes) == 64 && offset_of!(Record, tx_full) == 96);
    assert!(offset_of!(Record, window) == 48 && offset_of!(Record, ring_size) == 120);
    assert!(size_of::<Header>() <= TOTALS_OFFSET);
    assert!(TOTALS_OFFSET + size_of::<Totals>() <= CAPTURE_OFFSET);
    assert!(CAPTURE_OFFSET + size_of::<Capture>() <= RECORDS_OFFSET);
    assert!(size_of::<Capture>() == 256 && offset_of!(Capture, tap) == 128);
    assert!(size_of::<Event>() == 72 && offset_of!(Event, ports) == 56);
};

/// Most reasons that are counted apart ([`crate::os::reason::Reason`]).
pub const REASONS: usize = 48;
/// Ring sizes that are counted apart: 16 KiB, 32 KiB, … 4 MiB.
pub const BUFFERS: usize = 9;

/// Parts of what is counted for every connection; a thread counts in its own, so that threads do not take each other the
/// cache line.
pub const PARTS: usize = process::SHARES;

/// Connections that are closed and were not in a ring: of the accepting end, of the connecting end, by reason.
#[repr(C, align(64))]
pub struct Fallback(pub [[AtomicU64; REASONS]; 2]);

/// Of the connections that [`Totals`] counts, those of one region.
#[repr(C)]
pub struct InRegion {
    /// Bytes sent, received.
    pub bytes: [AtomicU64; 2],
    /// As [`Totals::smcd`].
    pub smcd: [AtomicU64; 2],
    /// Those that a handshake for the region was begun for, and that were not in a ring: of the accepting end, of the connecting end,
    /// by reason.
    pub fallback: [[AtomicU64; REASONS]; 2],
}

/// What a process counts besides its records. What a record counts is added when its socket is closed.
#[repr(C)]
pub struct Totals {
    /// To be summed up.
    pub fallback: [Fallback; PARTS],
    /// Sums of the records' counters, in their order: bytes sent, received; times sent, received; ring full; sleeps;
    /// spins; doorbells sent, taken.
    pub closed: [AtomicU64; 9],
    /// Connections that are closed and were in a ring: of the accepting end, of the connecting end.
    pub smcd: [AtomicU64; 2],
    /// Sleeps in poll(2), select(2) and epoll_wait(2) over connections in the ring.
    pub set_sleeps: AtomicU64,
    /// Spins that made an epoll_wait's sleep unnecessary; the last few are added with the next sleep.
    pub set_spins: AtomicU64,
    /// Rings by size, of connections that went to one.
    pub buffers: [AtomicU64; BUFFERS],
    /// Of those, as clients: in a slot that an earlier connection has used.
    pub reused: AtomicU64,
    /// TCP_CORK switched on, on connections in the ring.
    pub cork: AtomicU64,
    /// TCP_NODELAY switched on, likewise.
    pub nodelay: AtomicU64,
    /// sendfile(2), likewise.
    pub sendpage: AtomicU64,
    /// splice(2), likewise.
    pub splice: AtomicU64,
    /// Urgent data, likewise.
    pub urgent: AtomicU64,
    /// By [`Header::regions`].
    pub regions: [InRegion; PLACES],
}

/// What is captured; the reader's words but for the ring's.
#[repr(C)]
pub struct Capture {
    /// Nonzero while somebody captures. The reader holds flock(2)'s exclusive lock on the file as long as it lives; the
    /// process clears this word when it finds the ring full and the lock free.
    pub session: AtomicU32,
    /// Port of the accepting end of what is captured; 0 = every connection, from whichever end.
    pub port: AtomicU32,
    /// Its address, network byte order, IPv4 mapped; all zero = any.
    pub addr: [AtomicU64; 2],
    /// Nonzero: children of this process begin with the same words.
    pub follow: AtomicU32,
    _pad: [AtomicU32; 25],
    /// The ring's cursors and losses.
    pub tap: TapControl,
}

/// One message of the capture ring, followed by [`Event::bytes`] of the stream, and bytes without meaning up to
/// [`Event::len`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Event {
    /// Bytes of the message with this header, a multiple of 8.
    pub len: u32,
    /// `EVENT_*` in bits 0-7, and flags above.
    pub kind: u32,
    /// Where in its direction's stream the bytes stand, from 0 at the connection's begin; or [`UNPLACED`].
    pub offset: u64,
    /// CLOCK_REALTIME in nanoseconds.
    pub time_ns: u64,
    /// Own address, network byte order, IPv4 mapped.
    pub local: [u8; 16],
    /// The other end's.
    pub peer: [u8; 16],
    /// Local port in bits 0-15, peer port in bits 16-31, host byte order.
    pub ports: u32,
    /// Bytes of the stream that follow.
    pub bytes: u32,
    /// The process' own number for the connection.
    pub connection: u64,
}

/// [`Event::kind`]: bytes of the stream.
pub const EVENT_DATA: u32 = 1;
/// [`Event::kind`]: the connection begins.
pub const EVENT_OPEN: u32 = 2;
/// [`Event::kind`]: no byte follows in this direction.
pub const EVENT_END: u32 = 3;
/// Flag of [`Event::kind`]: our sending direction.
pub const EVENT_SENT: u32 = 1 << 8;
/// Flag of [`Event::kind`]: we are the connecting end.
pub const EVENT_CLIENT: u32 = 1 << 9;
/// Where in [`Event::kind`] three bits say what carries the bytes: 0 the kernel's TCP, others the memory of the device whose
/// number at [`DEVICE_SHIFT`] is 1 less.
pub const EVENT_CARRIER_SHIFT: u32 = 16;
/// [`Event::offset`]: right behind what came before, as far as is known.
pub const UNPLACED: u64 = u64::MAX;

/// First eight bytes of a loopback device's file.
pub const DEVICE_MAGIC: u64 = layout::MAGIC;
/// Its version, which is in its name.
pub const DEVICE_VERSION: u32 = layout::VERSION;
/// Where its GID is: 128 bits, the higher half first.
pub const DEVICE_GID_OFFSET: usize = core::mem::offset_of!(layout::Header, gid);
/// Where its switch is: 64 bits, odd while the directory's connections are to stay TCP.
pub const DEVICE_SWITCH_OFFSET: usize = core::mem::offset_of!(layout::Header, switch);

/// The bytes of a device's file, far behind its end, that its processes have locks on: one each.
pub const DEVICE_LOCKS: core::ops::Range<u64> =
    layout::LOCK_BASE as u64..layout::LOCK_BASE as u64 + layout::PROCESSES as u64;

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
    /// RDMA: the other end of the ring is an agent's.
    Smcr = 3,
}
