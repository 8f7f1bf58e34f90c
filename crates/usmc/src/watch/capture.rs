//! The writer of [`crate::watch::observe::Capture`]: what `usmc dump` gets of this process' connections.
//!
//! Bytes are copied where they are sent and received, whoever carries them, each with its place in the stream; the
//! reader puts both directions together, and drops what it was shown by both ends. Without a capture it costs one test
//! of a word beside the counters that the call writes anyway. Nothing waits: what finds no room is counted.
//!
//! The reader got the file by the right to ptrace(2) us, but its words are no more trusted than a peer's: they decide
//! what is copied into memory that is the reader's as well, and nothing else.

use usmc_shm::layout::Slot;
use usmc_shm::ring::{Place, Ring};
use usmc_shm::state::{Rx, Tx};
use usmc_shm::sync::Ordering::{Acquire, Relaxed};
use usmc_shm::sync::{AtomicBool, AtomicU32, AtomicU64};
use usmc_shm::tap::Tap;

use crate::family::holders;
use crate::os::iov::Buffers;
use crate::os::process::{Held, Lock};
use crate::os::{clock, kernel_only, sys};
use crate::record::conn::{self, Conn, F_ADOPTED, F_CLIENT, F_COPIED};
use crate::record::kernel;
use crate::record::phase::Phase;
use crate::record::tuple::{self, Endpoint};
use crate::watch::observe::{
    ASK, CAPTURED, Capture, EVENT_CARRIER_SHIFT, EVENT_CLIENT, EVENT_DATA, EVENT_END, EVENT_OPEN,
    EVENT_SENT, Event, Record, UNPLACED,
};
use crate::watch::observer;

/// Most bytes of the stream in one event.
const PIECE: usize = 1 << 16;
/// So many looks at the lock before what it guards is given up for lost.
const PATIENCE: u32 = 300;
/// Every so many losses it is asked whether the reader is still there.
const LOSSES: u64 = 64;

/// Held while an event is written.
static LOCK: Lock = Lock::new();

/// What a forked child begins with: [`Capture`]'s words of its parent, where they are to be followed.
static INHERITED: AtomicBool = AtomicBool::new(false);
static PORT: AtomicU32 = AtomicU32::new(0);
static ADDR: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Whether the connection's bytes are wanted.
#[inline(always)]
fn is_on(conn: &Conn) -> bool {
    // Asked first: short connections have not had this line of their records in the cache.
    is_asked_for() && wants(observer::record_of(conn))
}

/// Whether anybody captures. Without one a record's mark is an earlier reader's.
#[inline(always)]
fn is_asked_for() -> bool {
    observer::capture_ring().is_some_and(|(capture, ..)| capture.session.load(Relaxed) != 0)
}

/// Whether the bytes of the connection with this record are wanted.
#[inline(always)]
pub fn wants(record: Option<&Record>) -> bool {
    record.is_some_and(|record| record.captured.load(Relaxed) != 0)
}

/// Before `from..to` of the send ring is published. The caller holds the sending lock.
#[cold]
pub fn sending(fd: i32, conn: &Conn, slot: &Slot, place: Place, from: u64, to: u64) {
    let before = observer::before_sent(conn, slot);
    ring(fd, conn, &conn.tx(slot), place, (from, to), (before, EVENT_SENT));
}

/// Before `from..to` of the receive ring is given back. The caller holds the receiving lock.
#[cold]
pub fn receiving(fd: i32, conn: &Conn, slot: &Slot, place: Place, from: u64, to: u64) {
    let before = observer::before_received(conn, slot);
    ring(fd, conn, &conn.rx(slot), place, (from, to), (before, 0));
}

fn ring(
    fd: i32,
    conn: &Conn,
    ring: &Ring<'_>,
    place: Place,
    (from, to): (u64, u64),
    (before, direction): (u64, u32),
) {
    let Some(scene) = Scene::of(fd, conn) else { return };
    let carrier = (observer::device_number(conn) + 1) << EVENT_CARRIER_SHIFT;
    let mut at = from;
    while at != to {
        let left = usize::try_from(to.wrapping_sub(at)).unwrap_or(usize::MAX).min(PIECE);
        let (bytes, len) = ring.contiguous(at, place, left);
        // SAFETY: `len` bytes of the ring.
        unsafe { scene.data(direction | carrier, before.wrapping_add(at), bytes, len) };
        at = at.wrapping_add(len as u64);
    }
}

/// The kernel has sent `sent` bytes of these buffers for the application, or as CLC's messages.
///
/// # Safety
/// `iov` is `count` entries, whose buffers are readable.
#[inline(always)]
pub unsafe fn sent_by_kernel(
    fd: i32,
    index: u32,
    iov: *const libc::iovec,
    count: usize,
    sent: isize,
) {
    if sent > 0 && is_on(conn::at(index)) {
        // SAFETY: the caller's contract.
        let from = unsafe { Buffers::new(iov, count) };
        by_kernel(fd, conn::at(index), from, sent as usize, EVENT_SENT);
    }
}

/// The kernel has received `got` bytes into these buffers for the application, or as CLC's messages.
///
/// # Safety
/// `iov` is `count` entries, whose buffers are readable.
#[inline(always)]
pub unsafe fn received_by_kernel(
    fd: i32,
    index: u32,
    iov: *const libc::iovec,
    count: usize,
    got: isize,
    flags: i32,
) {
    const NOT_TAKEN: i32 = libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_OOB | libc::MSG_ERRQUEUE;
    if got >= 0 && flags & NOT_TAKEN == 0 && is_on(conn::at(index)) {
        // SAFETY: the caller's contract.
        let to = unsafe { Buffers::new(iov, count) };
        match got {
            0 if to.left() > 0 => ended(fd, conn::at(index)),
            _ => by_kernel(fd, conn::at(index), to, got as usize, 0),
        }
    }
}

/// `len` bytes were received by TCP into the next of `to`, which has not gone on yet.
#[inline(always)]
pub fn received(fd: i32, conn: &Conn, to: &Buffers, len: usize) {
    if len > 0 && is_on(conn) {
        by_kernel(fd, conn, to.again(), len, 0);
    }
}

#[cold]
fn by_kernel(fd: i32, conn: &Conn, mut bytes: Buffers, len: usize, direction: u32) {
    let Some(scene) = Scene::of(fd, conn) else { return };
    let end = if direction == EVENT_SENT { sent_so_far(fd, conn) } else { read_so_far(fd, conn) };
    let mut at = end.and_then(|end| end.checked_sub(len as u64));
    let mut left = len;
    while left > 0
        && let Some((piece, n)) = bytes.piece(left.min(PIECE))
    {
        // SAFETY: `n` bytes of the application's buffers.
        unsafe { scene.data(direction, at.unwrap_or(UNPLACED), piece, n) };
        at = at.map(|at| at + n as u64);
        bytes.advance(n);
        left -= n;
    }
}

/// The kernel has sent `sent` bytes of a file, which end before `position`, its own by default. What a pipe had is
/// not to be seen any more: the reader finds it missing.
pub fn file_sent(fd: i32, index: u32, file: i32, position: Option<i64>, sent: isize) {
    let conn = conn::at(index);
    if sent <= 0 || !is_on(conn) {
        return;
    }
    let Some(scene) = Scene::of(fd, conn) else { return };
    let behind = position.or_else(|| sys::position(file));
    let (Some(behind), Some(end)) = (behind, sent_so_far(fd, conn)) else { return };
    let mut left = sent as u64;
    let mut bytes = [0u8; 4096];
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(bytes.len()).min(bytes.len());
        let at = behind - left as i64;
        // SAFETY: a buffer on our stack.
        let Ok(n) = (unsafe { sys::pread(file, bytes.as_mut_ptr().cast(), len, at) }) else {
            return;
        };
        if n == 0 {
            return;
        }
        // SAFETY: `n` bytes of it were filled.
        let has_room = unsafe { scene.data(EVENT_SENT, end.wrapping_sub(left), bytes.as_ptr(), n) };
        left -= n as u64;
        if !has_room {
            // Nor will there be soon: the rest need not be read.
            scene.capture.tap.lost[0].fetch_add(left, Relaxed);
            return;
        }
    }
}

/// Bytes of the stream that the application has sent, TCP having carried the last of them.
fn sent_so_far(fd: i32, conn: &Conn) -> Option<u64> {
    if let Some(slot) = conn.slot()
        && !matches!(conn.phase(), Phase::Early | Phase::Plain)
        && conn.own(slot).tx(Acquire) != Tx::Tcp
    {
        return None;
    }
    Some(kernel::tcp_sent(fd, conn.has(F_CLIENT))?.wrapping_add(conn.bias[0].load(Relaxed)))
}

/// Bytes of the stream that the application has received, likewise.
fn read_so_far(fd: i32, conn: &Conn) -> Option<u64> {
    let read = match conn.slot().filter(|_| !matches!(conn.phase(), Phase::Early | Phase::Plain)) {
        // Doorbells may have come with them.
        Some(slot) if conn.peer(slot).tx(Acquire) == Tx::Ring => {
            let boundary = conn.peer(slot).boundary.load(Relaxed);
            // It is one more than that, as 0 stands for none.
            match conn.end(slot).rx() {
                Rx::Span(left) => boundary.checked_sub(left + 1)?,
                Rx::Ring => boundary.checked_sub(1)?,
                Rx::Unmeasured | Rx::BySender | Rx::Tcp => return None,
            }
        }
        Some(slot) if conn.peer(slot).tx(Acquire) != Tx::Tcp => return None,
        _ => kernel::tcp_taken(fd)?,
    };
    Some(read.wrapping_add(conn.bias[1].load(Relaxed)))
}

/// The peer's end was told to the application.
#[inline(always)]
pub fn ended(fd: i32, conn: &Conn) {
    if is_on(conn) {
        end(fd, conn, 0);
    }
}

/// This process closes its last descriptor of the connection, which is its end if no other process has one.
pub fn closing(fd: i32, conn: &Conn) {
    let is_last = match holders::holders(conn) {
        Some(count) => count.load(Relaxed) <= 1,
        None => !conn.has(F_COPIED | F_ADOPTED),
    };
    if is_last {
        ending(fd, conn);
    }
}

/// The application ends its sending direction.
pub fn ending(fd: i32, conn: &Conn) {
    if is_on(conn) && !matches!(conn.phase(), Phase::Listen | Phase::Fresh) {
        end(fd, conn, EVENT_SENT);
    }
}

#[cold]
fn end(fd: i32, conn: &Conn, direction: u32) {
    if let Some(scene) = Scene::of(fd, conn) {
        scene.event(EVENT_END | direction);
    }
}

/// The record was written anew. `connected`: its socket was not connected before.
pub fn changed(fd: i32, conn: &Conn, record: &Record, connected: bool) {
    if !is_asked_for() {
        return;
    }
    record.captured.store(ASK, Relaxed);
    if let Some(scene) = Scene::of(fd, conn)
        && connected
        && !conn.has(F_ADOPTED | F_COPIED)
    {
        scene.event(EVENT_OPEN);
    }
}

/// A connection, and the ring in which it is shown.
struct Scene<'a> {
    header: Event,
    capture: &'a Capture,
    ring: Tap<'a>,
    _held: Held<'a>,
}

impl Scene<'_> {
    /// `None`: not wanted after all, or another thread is stuck in the ring.
    fn of(fd: i32, conn: &Conn) -> Option<Scene<'static>> {
        let record = observer::record_of(conn)?;
        let (capture, memory, size) = observer::capture_ring()?;
        // A filter may end a program for the questions to be asked.
        if capture.session.load(Relaxed) == 0 || kernel_only::is_sandboxed() {
            record.captured.store(0, Relaxed);
            return None;
        }
        let (local, peer) = ends(fd, conn)?;
        if record.captured.load(Relaxed) == ASK {
            let wanted = is_wanted(capture, conn, local);
            record.captured.store(if wanted { CAPTURED } else { 0 }, Relaxed);
            if !wanted {
                return None;
            }
        }
        // A signal handler that has interrupted its own thread here goes without.
        let held = (0..PATIENCE).find_map(|look| {
            LOCK.try_enter().or_else(|| {
                if look >= 64 {
                    sys::sched_yield();
                }
                None
            })
        });
        // SAFETY: the ring of our own file, mapped for good.
        let ring = unsafe { Tap::new(&capture.tap, memory, size) };
        let Some(held) = held else {
            ring.lose(0);
            return None;
        };
        let client = if conn.has(F_CLIENT) { EVENT_CLIENT } else { 0 };
        let header = Event {
            kind: client,
            offset: UNPLACED,
            time_ns: clock::wall_ns(),
            local: local.addr,
            peer: peer.addr,
            ports: u32::from(local.port) | u32::from(peer.port) << 16,
            connection: u64::from(conn.observed.load(Relaxed))
                | u64::from(conn.use_count.load(Relaxed)) << 32,
            ..Event::default()
        };
        Some(Scene { header, capture, ring, _held: held })
    }

    /// Something without bytes.
    fn event(&self, kind: u32) {
        // SAFETY: no bytes.
        unsafe { self.put(Event { kind: self.header.kind | kind, ..self.header }, [].as_ptr()) };
    }

    /// Bytes of the stream. Whether there was room for them.
    ///
    /// # Safety
    /// `bytes` is readable for `len` bytes; others may be writing there.
    unsafe fn data(&self, direction: u32, offset: u64, bytes: *const u8, len: usize) -> bool {
        let kind = self.header.kind | EVENT_DATA | direction;
        let header = Event { kind, offset, bytes: len as u32, ..self.header };
        // SAFETY: the caller's contract.
        unsafe { self.put(header, bytes) }
    }

    /// # Safety
    /// `bytes` is readable for `header.bytes`.
    unsafe fn put(&self, mut header: Event, bytes: *const u8) -> bool {
        let body = header.bytes as usize;
        let len = (size_of::<Event>() + body).next_multiple_of(8);
        header.len = len as u32;
        let Some(at) = self.ring.reserve(len, body) else {
            self.lost();
            return false;
        };
        // SAFETY: a header on our stack, which has no padding; `bytes` by the caller's contract.
        unsafe {
            let behind = self.ring.put(at, (&raw const header).cast(), size_of::<Event>());
            self.ring.put(behind, bytes, body);
        }
        self.ring.publish(at.wrapping_add(len as u64));
        true
    }

    /// Nobody reads, or not fast enough. Where the reader was killed, its session ends here.
    #[cold]
    fn lost(&self) {
        if self.capture.tap.lost[1].load(Relaxed) % LOSSES == 1
            && sys::flock(observer::file(), libc::LOCK_SH | libc::LOCK_NB).is_ok()
        {
            // Before the next reader can begin.
            self.capture.session.store(0, Relaxed);
            let _ = sys::flock(observer::file(), libc::LOCK_UN);
        }
    }
}

/// Both ends' addresses; of what the record does not know the kernel is asked.
fn ends(fd: i32, conn: &Conn) -> Option<(Endpoint, Endpoint)> {
    let (local, peer) = observer::ends(conn, conn.phase());
    let is_known = |end: Endpoint| end.port != 0 && !end.is_wildcard();
    match peer {
        Some(peer) if is_known(local) && is_known(peer) => Some((local, peer)),
        Some(told) if fd < 0 => Some((local, told)),
        told => {
            let local = tuple::local(fd).unwrap_or(local);
            Some((local, tuple::peer(fd).ok().or(told)?))
        }
    }
}

fn is_wanted(capture: &Capture, conn: &Conn, local: Endpoint) -> bool {
    let port = capture.port.load(Relaxed);
    if port == 0 {
        return true;
    }
    let addr = capture.addr.each_ref().map(|half| half.load(Relaxed));
    let is_addr = addr == [0; 2] || addr == local.words();
    !conn.has(F_CLIENT) && port == u32::from(local.port) && is_addr
}

/// In a forked child, while the parent's words can still be read.
pub fn before_child_forgets() {
    LOCK.reset();
    let Some((capture, ..)) = observer::capture_ring() else { return };
    if is_inherited() {
        // The parent has made no file of its own: what it began with is ours.
        return;
    }
    let follows = capture.session.load(Relaxed) != 0 && capture.follow.load(Relaxed) != 0;
    INHERITED.store(follows, Relaxed);
    PORT.store(capture.port.load(Relaxed), Relaxed);
    for (own, parents) in ADDR.iter().zip(&capture.addr) {
        own.store(parents.load(Relaxed), Relaxed);
    }
}

/// Whether this process is to be captured because its parent is.
pub fn is_inherited() -> bool {
    INHERITED.load(Relaxed)
}

/// The file was made, and nobody has seen it yet.
pub fn inherit() {
    let Some((capture, ..)) = observer::capture_ring() else { return };
    if INHERITED.swap(false, Relaxed) {
        capture.port.store(PORT.load(Relaxed), Relaxed);
        for (own, parents) in capture.addr.iter().zip(&ADDR) {
            own.store(parents.load(Relaxed), Relaxed);
        }
        capture.follow.store(1, Relaxed);
        capture.session.store(1, Relaxed);
    }
}
