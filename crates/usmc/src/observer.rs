//! The writer of [`crate::observe`]: what `usmc ss` sees of this process.
//!
//! Cold fields change with the connection's mode; the two counters are plain stores on the data path.

use core::ptr;
use usmc_shm::layout::TX_TCP;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicI32, AtomicPtr, AtomicU32, fence};

use crate::conn::{self, Conn, F_CLIENT, LISTEN, RING};
use crate::observe::{Header, MAGIC, MEMFD_NAME, Mode, RECORDS_OFFSET, Record, State, VERSION};
use crate::process::{self, Lock};
use crate::reason::Reason;
use crate::tuple::Endpoint;
use crate::{kernel_only, sys, table};

/// Records of one file: a place for each connection, at its index.
const RECORDS: usize = conn::CONNS;
const LEN: usize = RECORDS_OFFSET + RECORDS * size_of::<Record>();

static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static FD: AtomicI32 = AtomicI32::new(-1);
/// In a forked child: the mapping is still the parent's place-holder.
static STALE: AtomicU32 = AtomicU32::new(0);
static LOCK: Lock = Lock::new();

fn header() -> Option<&'static Header> {
    let base = BASE.load(Acquire);
    // SAFETY: set to a mapping of LEN bytes that is never removed; atomics only.
    if base.is_null() { None } else { Some(unsafe { &*base.cast::<Header>() }) }
}

fn record(number: u32) -> Option<&'static Record> {
    let base = BASE.load(Relaxed);
    if number == 0 || number as usize > RECORDS || base.is_null() {
        return None;
    }
    let at = RECORDS_OFFSET + (number as usize - 1) * size_of::<Record>();
    // SAFETY: at + 128 ≤ LEN; see `header`.
    Some(unsafe { &*base.add(at).cast::<Record>() })
}

/// Makes sure that this process has a file of its own.
fn ensure() -> bool {
    if !BASE.load(Acquire).is_null() && STALE.load(Acquire) == 0 {
        return true;
    }
    let Some(_held) = LOCK.enter() else { return false };
    if !BASE.load(Acquire).is_null() && STALE.load(Acquire) == 0 {
        return true;
    }
    let Ok(fd) = sys::memfd_create(MEMFD_NAME) else { return false };
    let base = BASE.load(Acquire);
    let mapped = sys::ftruncate(fd, LEN as u64).and_then(|()| {
        if base.is_null() {
            sys::mmap_shared(fd, LEN)
        } else {
            sys::mmap_shared_at(base, fd, LEN).map(|()| base)
        }
    });
    let Ok(mapped) = mapped else {
        sys::close(fd);
        return false;
    };
    FD.store(table::keep_fd(fd), Relaxed);
    BASE.store(mapped, Release);
    STALE.store(0, Release);
    if let Some(header) = header() {
        header.version.store(VERSION, Relaxed);
        header.record_size.store(size_of::<Record>() as u32, Relaxed);
        header.pid.store(process::pid(), Relaxed);
        header.magic.store(MAGIC, Release);
    }
    true
}

/// The socket's state or mode has changed.
pub fn changed(fd: i32, index: u32) {
    if kernel_only::is_sandboxed() || !ensure() {
        return;
    }
    let conn = conn::at(index);
    let number = index + 1;
    let (Some(header), Some(record)) = (header(), record(number)) else { return };
    if conn.observed.swap(number, Relaxed) == 0 {
        header.high_water.fetch_max(number, Relaxed);
    }
    let seq = record.seq.load(Relaxed) | 1;
    record.seq.store(seq, Relaxed);
    // Readers that see any field below also see the odd number.
    fence(Release);
    write(fd, conn, record);
    record.seq.store(seq.wrapping_add(1).max(2), Release);
}

fn write(fd: i32, conn: &Conn, record: &Record) {
    let phase = conn.phase();
    let (local, peer) = ends(conn, phase);
    let state = match phase {
        LISTEN => State::Listen,
        _ if peer.is_none() => State::Init,
        _ => State::Active,
    };
    let in_ring = matches!(phase, RING);
    let mode = if in_ring { Mode::Smcd } else { Mode::Tcp };
    let reason =
        if in_ring || phase == LISTEN { Reason::None as u32 } else { conn.reason.load(Relaxed) };
    let peer = peer.unwrap_or_default();
    let named = if local.port != 0 { local } else { peer };
    let v4 = named.ip().is_ipv4();
    let family = if v4 { 4 } else { 6 };
    record.fd.store(fd as u32, Relaxed);
    record
        .kind
        .store(state as u32 | (mode as u32) << 8 | (reason & 0xff) << 16 | family << 24, Relaxed);
    record.ports.store(u32::from(local.port) | u32::from(peer.port) << 16, Relaxed);
    for (place, end) in [(&record.local, local), (&record.peer, peer)] {
        let mut bytes = [0u8; 16];
        if v4 {
            bytes[..4].copy_from_slice(&end.addr[12..]);
        } else {
            bytes = end.addr;
        }
        let words = u128::from_ne_bytes(bytes);
        place[0].store(words as u64, Relaxed);
        place[1].store((words >> 64) as u64, Relaxed);
    }
    record.syn_option.store(conn.syn_option.load(Relaxed), Relaxed);
    if let Some(slot) = conn.slot().filter(|_| in_ring) {
        record.slot.store(conn.slot_index.load(Relaxed), Relaxed);
        let shift = conn.own(slot).window_shift.load(Relaxed).min(31);
        record.ring_size.store(1 << shift, Relaxed);
    }
}

/// Local end and peer, as far as the record knows them: the kernel is not asked. A client's own end is known
/// from its offer on, and all zero before.
fn ends(conn: &Conn, phase: u32) -> (Endpoint, Option<Endpoint>) {
    let w: [u64; 6] = core::array::from_fn(|i| conn.tuple[i].load(Relaxed));
    let end = |hi: u64, lo: u64, port: u64| {
        let mut addr = [0; 16];
        addr[..8].copy_from_slice(&hi.to_ne_bytes());
        addr[8..].copy_from_slice(&lo.to_ne_bytes());
        Endpoint { addr, port: port as u16 }
    };
    let (client, server) = (end(w[1], w[2], w[5] >> 16), end(w[3], w[4], w[5]));
    match phase {
        LISTEN => (server, None),
        _ if conn.has(F_CLIENT) => (client, Some(server)),
        // Neither accepted nor connected, as far as we know.
        _ if client.port == 0 => (server, None),
        _ => (server, Some(client)),
    }
}

/// The record's socket is gone.
pub fn gone(conn: &Conn) {
    let number = conn.observed.swap(0, Relaxed);
    if let Some(record) = record(number) {
        record.tx_bytes.store(0, Relaxed);
        record.rx_bytes.store(0, Relaxed);
        record.seq.store(0, Release);
    }
}

/// The send ring's cursor is now `prod`.
#[inline(always)]
pub fn sent_total(conn: &Conn, prod: u64) {
    if let Some(record) = record(conn.observed.load(Relaxed))
        && let Some(slot) = conn.slot()
    {
        let boundary = conn.own(slot).boundary.load(Relaxed).saturating_sub(1);
        let before = boundary.wrapping_add(conn.bias[0].load(Relaxed));
        record.tx_bytes.store(before.wrapping_add(prod), Relaxed);
    }
}

/// The receive ring's cursor is now `cons`.
#[inline(always)]
pub fn received_total(conn: &Conn, cons: u64) {
    if let Some(record) = record(conn.observed.load(Relaxed))
        && let Some(slot) = conn.slot()
    {
        let peer = conn.peer(slot);
        let switched = peer.state.load(Relaxed) != TX_TCP;
        let boundary = if switched { peer.boundary.load(Relaxed).saturating_sub(1) } else { 0 };
        let before = boundary.wrapping_add(conn.bias[1].load(Relaxed));
        record.rx_bytes.store(before.wrapping_add(cons), Relaxed);
    }
}

/// `n` bytes of the TCP span were received.
pub fn received(conn: &Conn, n: u64) {
    if let Some(record) = record(conn.observed.load(Relaxed)) {
        record.rx_bytes.fetch_add(n, Relaxed);
    }
}

/// In a forked child: writes must not reach the parent's file. The child gets its own on first need.
pub fn after_fork() {
    LOCK.reset();
    let base = BASE.load(Relaxed);
    let fd = FD.swap(-1, Relaxed);
    if fd >= 0 {
        table::release_fd(fd);
    }
    if !base.is_null() {
        if sys::mmap_private(base, LEN).is_err() {
            BASE.store(ptr::null_mut(), Relaxed);
        }
        STALE.store(1, Relaxed);
    }
    conn::for_each(|_, conn| conn.observed.store(0, Relaxed));
}
