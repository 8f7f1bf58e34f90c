//! The writer of [`crate::watch::observe`]: what `usmc ss` and `usmc stats` see of this process.
//!
//! Cold fields change with the connection's mode; what is counted on the data path are plain stores into one line of
//! the record, by whoever holds the direction's lock. All other counters change where a system call is made anyway.

use core::ptr;
use usmc_shm::layout::{Slot, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN};
use usmc_shm::state::Tx;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, fence};

use crate::device::{self, segment};
use crate::os::process::{self, Lock};
use crate::os::reason::Reason;
use crate::os::table;
use crate::os::{cache, kernel_only, single, sys};
use crate::record::conn::{self, Conn, F_CHILDREN_TCP, F_CLIENT, F_DEPUTY, F_HAD_SLOT, F_UNSHOWN};
use crate::record::numbers;
use crate::record::phase::Phase;
use crate::record::tuple::{Endpoint, Tuple};
use crate::watch::capture;
use crate::watch::observe::{
    AGENT, AGENT_ID, CAPTURE_OFFSET, CLIENT_END, Capture, DEVICE_SHIFT, Header, InRegion, MAGIC,
    MEMFD_NAME, Mode, REASONS, RECORDS_OFFSET, Record, SYN_OPTION_SHIFT, State, TOTALS_OFFSET,
    Totals, VERSION, WAS_SMCD,
};

/// Records of one file: a place for each connection, at its index.
const RECORDS: usize = conn::CONNS;
const RING_OFFSET: usize = RECORDS_OFFSET + RECORDS * size_of::<Record>();
/// Bytes of the capture ring. They take addresses, and memory only once somebody captures.
const RING_SIZE: usize = if cfg!(target_pointer_width = "32") { 1 << 20 } else { 1 << 24 };
const LEN: usize = RING_OFFSET + RING_SIZE;

static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static FD: AtomicI32 = AtomicI32::new(-1);
/// In a forked child: the mapping is still the parent's place-holder.
static STALE: AtomicU32 = AtomicU32::new(0);
static LOCK: Lock = Lock::new();

/// The file's begin.
fn base() -> Option<*mut u8> {
    let base = BASE.load(Acquire);
    (!base.is_null()).then_some(base)
}

fn header() -> Option<&'static Header> {
    // SAFETY: set to a mapping of LEN bytes that is never removed; atomics only.
    base().map(|base| unsafe { &*base.cast::<Header>() })
}

/// What is counted for the process as a whole.
pub fn totals() -> Option<&'static Totals> {
    // SAFETY: as for `header`.
    base().map(|base| unsafe { &*base.add(TOTALS_OFFSET).cast::<Totals>() })
}

/// The capturing process, and the ring for it: its memory and its size.
pub fn capture_ring() -> Option<(&'static Capture, *mut u8, usize)> {
    // SAFETY: as for `header`; the ring lies within the mapping.
    base().map(|base| unsafe {
        (&*base.add(CAPTURE_OFFSET).cast::<Capture>(), base.add(RING_OFFSET), RING_SIZE)
    })
}

/// The file, as this process holds it; -1 = none.
pub fn file() -> i32 {
    FD.load(Relaxed)
}

/// The connection's record.
#[inline(always)]
pub fn record_of(conn: &Conn) -> Option<&'static Record> {
    record(conn.observed.load(Relaxed))
}

#[inline(always)]
fn record(number: u32) -> Option<&'static Record> {
    if number == 0 {
        return None;
    }
    let base = BASE.load(Relaxed);
    debug_assert!(number as usize <= RECORDS && !base.is_null());
    let at = RECORDS_OFFSET + (number as usize - 1) * size_of::<Record>();
    // SAFETY: whoever has a number got it from `changed`: one more than a connection's index, so at + 128 ≤
    // RING_OFFSET; and the file was mapped then, see `header`. A child that cannot keep its place has no numbers.
    Some(unsafe { &*base.add(at).cast::<Record>() })
}

/// Connection `index` is going to change, or to end.
#[inline(always)]
pub fn fetch(index: u32) {
    let base = BASE.load(Relaxed).wrapping_add(RECORDS_OFFSET);
    cache::fetch(base.wrapping_add(index as usize * size_of::<Record>()));
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
    // A process that may open the file could make it shorter, and this one hit its end.
    const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let _ = sys::fcntl(fd, libc::F_ADD_SEALS, SEALS as usize);
    FD.store(table::keep_fd(fd), Relaxed);
    BASE.store(mapped, Release);
    STALE.store(0, Release);
    if let Some(header) = header() {
        header.version.store(VERSION, Relaxed);
        header.record_size.store(size_of::<Record>() as u32, Relaxed);
        header.pid.store(process::pid(), Relaxed);
        header.ring_offset.store(RING_OFFSET as u64, Relaxed);
        header.ring_size.store(RING_SIZE as u64, Relaxed);
        capture::inherit();
        header.magic.store(MAGIC, Release);
    }
    true
}

/// A listener that came by fork is used here, too: from now on this process shows it.
#[inline]
pub fn inherited(fd: i32, index: u32) {
    if conn::at(index).observed.load(Relaxed) == 0 {
        changed(fd, index);
    }
}

/// A call is about to move bytes through the ring: one that came by fork is shown from now on. Not inside a direction's
/// lock, which a signal handler may want while its thread makes the file.
#[inline(always)]
pub fn used(fd: i32, index: u32) {
    if conn::at(index).has(F_UNSHOWN) {
        show(fd, index);
    }
}

/// The connection came by fork: its first call that moves bytes shows it.
pub fn came_by_fork(conn: &Conn) {
    conn.set_flag(F_UNSHOWN, true);
}

#[cold]
fn show(fd: i32, index: u32) {
    conn::at(index).set_flag(F_UNSHOWN, false);
    changed(fd, index);
}

/// The socket's state or mode has changed.
pub fn changed(fd: i32, index: u32) {
    if kernel_only::is_sandboxed() || !ensure() {
        return;
    }
    let conn = conn::at(index);
    let number = index + 1;
    let (Some(header), Some(record)) = (header(), record(number)) else { return };
    let is_new = conn.observed.load(Relaxed) == 0;
    if is_new {
        conn.observed.store(number, Relaxed);
    }
    if is_new && header.high_water.load(Relaxed) < number {
        header.high_water.fetch_max(number, Relaxed);
    }
    let was_connected = record.kind.load(Relaxed) as u8 == State::Active as u8 && !is_new;
    let seq = record.seq.load(Relaxed) | 1;
    record.seq.store(seq, Relaxed);
    // Readers that see any field below also see the odd number.
    fence(Release);
    write(fd, conn, record);
    record.seq.store(seq.wrapping_add(1).max(2), Release);
    let is_connected = record.kind.load(Relaxed) as u8 == State::Active as u8;
    capture::changed(fd, conn, record, is_connected && !was_connected);
}

fn write(fd: i32, conn: &Conn, record: &Record) {
    let phase = conn.phase();
    let (local, peer) = ends(conn, phase);
    let state = match phase {
        Phase::Listen => State::Listen,
        _ if peer.is_none() => State::Init,
        _ => State::Active,
    };
    let in_ring = matches!(phase, Phase::Ring);
    let mode = match in_ring {
        true if conn.has(F_DEPUTY) => Mode::Smcr,
        true => Mode::Smcd,
        false => Mode::Tcp,
    };
    let reason = match phase {
        Phase::Listen if conn.has(F_CHILDREN_TCP) => Reason::KernelFeature as u32,
        Phase::Listen | Phase::Ring => Reason::None as u32,
        _ => conn.reason.load(Relaxed),
    };
    let peer = peer.unwrap_or_default();
    let v4 = v4_of(if local.port != 0 { local.words() } else { peer.words() }).is_some();
    let family = if v4 { 4 } else { 6 };
    record.fd.store(fd as u32, Relaxed);
    record
        .kind
        .store(state as u32 | (mode as u32) << 8 | (reason & 0xff) << 16 | family << 24, Relaxed);
    record.ports.store(u32::from(local.port) | u32::from(peer.port) << 16, Relaxed);
    for (place, end) in [(&record.local, local), (&record.peer, peer)] {
        let words = if v4 { [v4_of(end.words()).unwrap_or(0), 0] } else { end.words() };
        place[0].store(words[0], Relaxed);
        place[1].store(words[1], Relaxed);
    }
    let declined = reason == Reason::Declined as u32;
    // A connection whose peer has declined never was in a ring that both ends knew.
    let before = record.slot.load(Relaxed);
    let mut place = if declined { 0 } else { before & WAS_SMCD };
    place |= conn.syn_option.load(Relaxed) << SYN_OPTION_SHIFT;
    // A deputy is the accepting end of its connection, whichever end of the other one its application has.
    let is_client = match conn.has(F_DEPUTY) {
        true => conn.clc.has_connected.load(Relaxed) != 0,
        false => conn.has(F_CLIENT),
    };
    if is_client {
        place |= CLIENT_END;
    }
    let was_agents = before >> DEVICE_SHIFT & 7 == AGENT as u32 + 1;
    let is_agents = conn.has(F_DEPUTY) || declined && was_agents;
    place |= device_of(conn, is_agents) << DEVICE_SHIFT;
    // In mode TCP: see there.
    record
        .segment
        .store(if declined { conn.clc.declined.load(Relaxed).into() } else { 0 }, Relaxed);
    if let Some(slot) = conn.slot().filter(|_| in_ring) {
        if place & WAS_SMCD == 0 {
            went_to_ring(conn, place & CLIENT_END != 0);
        }
        place |= WAS_SMCD | conn.slot_index.load(Relaxed) & 0xffff;
        let shift = conn.own(slot).window_shift().min(31);
        record.window.store(1 << shift, Relaxed);
        record.ring_size.store(1 << conn.full_shift().min(31), Relaxed);
        record.segment.store(segment::id_of(conn.segment.load(Relaxed)), Relaxed);
    }
    record.slot.store(place, Relaxed);
}

/// The number of the connection's device ([`DEVICE_SHIFT`]).
#[inline]
pub fn device_number(conn: &Conn) -> u32 {
    if conn.has(F_DEPUTY) { AGENT as u32 + 1 } else { conn.device.load(Relaxed) }
}

/// The number of the device of a connection, an agent's or not. The header has the id of a device that is no directory's from then on. A
/// handshake that was begun says which device that is.
fn device_of(conn: &Conn, is_agents: bool) -> u32 {
    let note = |place: usize, id: [u64; 2]| {
        if let Some(words) = header().and_then(|header| header.regions.get(place)) {
            words.iter().zip(id).for_each(|(place, word)| place.store(word, Relaxed));
        }
    };
    if is_agents {
        note(AGENT, [AGENT_ID as u64, (AGENT_ID >> 64) as u64]);
        return AGENT as u32 + 1;
    }
    let device = conn.device.load(Relaxed);
    if let Some(place) = device.checked_sub(1)
        && let Some(gid) = device::of(conn).gid()
    {
        note(place as usize, gid);
    }
    device
}

fn went_to_ring(conn: &Conn, client: bool) {
    let Some(totals) = totals() else { return };
    let shift = conn.full_shift().clamp(WINDOW_SHIFT_MIN, WINDOW_SHIFT_MAX) - WINDOW_SHIFT_MIN;
    count(&totals.buffers[shift as usize]);
    // Uses of a slot are numbered from 1.
    if client && conn.usage.load(Relaxed) > 1 {
        count(&totals.reused);
    }
}

/// One more.
pub fn count(counter: &AtomicU64) {
    single::count(counter);
}

/// One more of what [`Totals`] counts, found by `which`.
#[cold]
pub fn count_total(which: impl FnOnce(&'static Totals) -> &'static AtomicU64) {
    if let Some(totals) = totals() {
        count(which(totals));
    }
}

/// One more of what [`Record`] counts, found by `which`, where calls are made that cost far more.
#[cold]
pub fn count_one(conn: &Conn, which: impl FnOnce(&'static Record) -> &'static AtomicU32) {
    if let Some(record) = record_of(conn) {
        which(record).fetch_add(1, Relaxed);
    }
}

/// The send ring's window has grown to `len` bytes.
#[cold]
pub fn grown(conn: &Conn, len: usize) {
    if let Some(record) = record_of(conn) {
        record.window.store(u32::try_from(len).unwrap_or(u32::MAX), Relaxed);
    }
}

/// A wait on several connections has slept, after so many spins that paid.
#[cold]
pub fn set_slept(spins: u32) {
    if let Some(totals) = totals() {
        count(&totals.set_sleeps);
        totals.set_spins.fetch_add(spins.into(), Relaxed);
    }
}

/// A spin has paid.
#[inline(always)]
pub fn spun(conn: &Conn) {
    if let Some(record) = record_of(conn) {
        record.spins.store(record.spins.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// Local end and peer, as far as the record knows them: the kernel is not asked. A client's own end is known
/// from its offer on, and all zero before.
pub fn ends(conn: &Conn, phase: Phase) -> (Endpoint, Option<Endpoint>) {
    let words = conn.tuple.each_ref().map(|word| word.load(Relaxed));
    let Tuple { client, server, .. } = Tuple::of(&words);
    match phase {
        Phase::Listen => (server, None),
        _ if conn.has(F_CLIENT) => (client, Some(server)),
        // Neither accepted nor connected, as far as we know.
        _ if client.port == 0 => (server, None),
        _ => (server, Some(client)),
    }
}

/// The bytes of a mapped address, and zeros.
fn v4_of([high, low]: [u64; 2]) -> Option<u64> {
    let [mapped @ .., a, b, c, d] = low.to_ne_bytes();
    let is_mapped = high == 0 && mapped == [0, 0, 0xff, 0xff];
    is_mapped.then_some(u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]))
}

/// The record's socket is gone.
pub fn gone(conn: &Conn) {
    // The record is nobody else's any more.
    let Some(record) = record_of(conn) else { return };
    conn.observed.store(0, Relaxed);
    if conn.has(F_HAD_SLOT) {
        count_in(record);
    }
    count_end(record);
    for cell in [&record.slot, &record.kind] {
        cell.store(0, Relaxed);
    }
    record.seq.store(0, Release);
}

/// What the record has counted becomes part of the totals. Without a slot nothing is counted.
fn count_in(record: &Record) {
    let Some(totals) = totals() else { return };
    let r = record;
    let large = [&r.tx_bytes, &r.rx_bytes, &r.tx_calls, &r.rx_calls].map(|cell| {
        let n = cell.load(Relaxed);
        cell.store(0, Relaxed);
        n
    });
    let small = [&r.tx_full, &r.sleeps, &r.spins, &r.bells_sent, &r.bells_drained].map(|cell| {
        let n = cell.load(Relaxed);
        cell.store(0, Relaxed);
        u64::from(n)
    });
    let of_region = in_region(totals, record).map_or(&[][..], |region| &region.bytes);
    let all = totals.closed.iter().zip(large.into_iter().chain(small));
    for (sum, n) in all.chain(of_region.iter().zip(large)) {
        if n > 0 {
            sum.fetch_add(n, Relaxed);
        }
    }
}

/// What is counted for the region that the record's device is.
fn in_region<'a>(totals: &'a Totals, record: &Record) -> Option<&'a InRegion> {
    let place = (record.slot.load(Relaxed) >> DEVICE_SHIFT & 7).checked_sub(1)?;
    totals.regions.get(place as usize)
}

/// One more that is closed.
fn count_end(record: &Record) {
    let Some(totals) = totals() else { return };
    let [state, _, reason, _] = record.kind.load(Relaxed).to_le_bytes();
    let place = record.slot.load(Relaxed);
    let end = usize::from(place & CLIENT_END != 0);
    let region = in_region(totals, record);
    if place & WAS_SMCD != 0 {
        count(&totals.smcd[end]);
        region.inspect(|region| count(&region.smcd[end]));
    } else if state == State::Active as u8 {
        let reason = usize::from(reason).min(REASONS - 1);
        count(&totals.fallback[process::share()].0[end][reason]);
        region.inspect(|region| count(&region.fallback[end][reason]));
    }
}

/// The send ring's cursor is now `prod`.
#[inline(always)]
pub fn sent_total(record: Option<&Record>, conn: &Conn, slot: &Slot, prod: u64) {
    if let Some(record) = record {
        record.tx_bytes.store(before_sent(conn, slot).wrapping_add(prod), Relaxed);
        record.tx_calls.store(record.tx_calls.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// Bytes that were sent before this ring.
#[inline(always)]
pub fn before_sent(conn: &Conn, slot: &Slot) -> u64 {
    let boundary = conn.own(slot).boundary.load(Relaxed).saturating_sub(1);
    boundary.wrapping_add(conn.bias[0].load(Relaxed))
}

/// The receive ring's cursor is now `cons`.
#[inline(always)]
pub fn received_total(record: Option<&Record>, conn: &Conn, slot: &Slot, cons: u64) {
    if let Some(record) = record {
        record.rx_bytes.store(before_received(conn, slot).wrapping_add(cons), Relaxed);
        record.rx_calls.store(record.rx_calls.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// Bytes that were received before this ring.
#[inline(always)]
pub fn before_received(conn: &Conn, slot: &Slot) -> u64 {
    let peer = conn.peer(slot);
    let switched = peer.tx(Relaxed) != Tx::Tcp;
    let boundary = if switched { peer.boundary.load(Relaxed).saturating_sub(1) } else { 0 };
    boundary.wrapping_add(conn.bias[1].load(Relaxed))
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
    capture::before_child_forgets();
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
    if capture::is_inherited() {
        // They are captured from their first byte on.
        numbers::for_each(|fd, index, _| changed(fd, index));
    }
}
