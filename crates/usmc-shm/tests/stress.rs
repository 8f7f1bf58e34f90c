//! Real threads on a real ring, for what runs the machine's own memory model: plain, ThreadSanitizer, Miri
//! (`tests/sanitize.sh`). The interleavings themselves are loom's work.
#![cfg(not(any(loom, shuttle)))]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use usmc_shm::layout::{ACCEPTOR, ARM_TCP, CLIENT, WINDOW_SHIFT_MIN, segment_len};
use usmc_shm::lock::{Verdict, Wait, acquire, release};
use usmc_shm::ring::{Grant, Ring};
use usmc_shm::segment::Segment;
use usmc_shm::span::{Route, RxSpan, Source, Taken, TxSpan};
use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::{AcqRel, Acquire};

const RING_SHIFT: u32 = WINDOW_SHIFT_MIN + 1;
const FAR_SHIFT: u32 = RING_SHIFT + 2;
/// Bytes of one stream; enough for many wraps, and for a few under Miri.
const TOTAL: usize = if cfg!(miri) { 40_000 } else { 24 << 20 };

/// A segment with one slot, in the memory of this process.
struct Memory {
    segment: Segment,
    layout: Layout,
}

impl Memory {
    fn new() -> Memory {
        Memory::of((RING_SHIFT, FAR_SHIFT))
    }

    /// With rings and far parts of so many bytes (log2).
    fn of(shifts: (u32, u32)) -> Memory {
        let len = segment_len(1, shifts.0, shifts.1).unwrap();
        let layout = Layout::from_size_align(len, 4096).unwrap();
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null());
        // SAFETY: zeroed, aligned memory of that length, freed by the result only.
        let segment = unsafe { Segment::create(base, 1, shifts, 1, 1) };
        let memory = Memory { segment, layout };
        memory.ring(CLIENT).reset();
        memory.ring(ACCEPTOR).reset();
        memory
    }

    fn ring(&self, sender: usize) -> Ring<'_> {
        self.segment.ring(0, sender).unwrap()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; no ring outlives `self`.
        unsafe { dealloc(self.segment.base(), self.layout) };
    }
}

/// An eventfd, as far as the protocol is concerned.
#[derive(Default)]
struct Bell(Mutex<bool>, Condvar);

impl Bell {
    fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }

    fn wait(&self) {
        let most = Duration::from_secs(if cfg!(miri) { 3600 } else { 20 });
        let held = self.0.lock().unwrap();
        let (mut rung, waited) = self.1.wait_timeout_while(held, most, |rung| !*rung).unwrap();
        assert!(!waited.timed_out(), "a sleeper was forgotten");
        *rung = false;
    }
}

/// The stream's byte at `at`, and a length that varies with it.
fn byte(at: usize) -> u8 {
    (at ^ at >> 8 ^ at >> 16) as u8
}

fn some_len(at: usize, most: usize) -> usize {
    (at.wrapping_mul(0x9E37_79B1) >> 7) % most + 1
}

/// Writes at most `bytes.len()` bytes; 0 when the ring is full.
fn produce(ring: Ring<'_>, bytes: &[u8]) -> usize {
    let room = ring.room(bytes.len()).unwrap();
    let len = room.free.min(bytes.len());
    // SAFETY: len ≤ room.free and ≤ the slice.
    unsafe {
        match room.prod % 2 {
            0 => ring.copy_in(room.prod, room.place, bytes.as_ptr(), len),
            _ => ring.copy_past(room.prod, room.place, bytes.as_ptr(), len),
        }
    }
    ring.publish(room.prod + len as u64);
    len
}

/// Reads at most `into.len()` bytes; how many, and whom to wake.
fn consume(ring: Ring<'_>, into: &mut [u8]) -> (usize, u32) {
    let data = ring.data().unwrap();
    let len = data.len.min(into.len());
    if len == 0 {
        return (0, 0);
    }
    // SAFETY: len ≤ data.len and ≤ the slice.
    unsafe { ring.copy_out(data.cons, data.place, into.as_mut_ptr(), len) };
    (len, if ring.consume_waking(&data, len) { ring.take_tx_sleepers(false) } else { 0 })
}

/// Stores that go past the caches are ordered by a fence of their own only: without it old bytes are read here.
#[test]
fn bytes_that_go_past_the_caches_are_there_when_they_are_published() {
    const LINE: usize = 64;
    let rounds = if cfg!(miri) { 100 } else { 1 << 20 };
    let memory = Memory::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let ring = memory.ring(CLIENT);
            for round in 0..rounds {
                let bytes = [round as u8; LINE];
                let room = loop {
                    let room = ring.room(LINE).unwrap();
                    if room.free >= LINE {
                        break room;
                    }
                    thread::yield_now();
                };
                // SAFETY: the line fits into the room.
                unsafe { ring.copy_past(room.prod, room.place, bytes.as_ptr(), LINE) };
                ring.publish(room.prod + LINE as u64);
            }
        });
        let ring = memory.ring(CLIENT);
        let mut lines = vec![0; 1 << RING_SHIFT];
        let (mut round, mut old) = (0, 0);
        while round < rounds {
            let (len, _) = consume(ring, &mut lines);
            for line in lines[..len].chunks(LINE) {
                old += usize::from(line != [round as u8; LINE]);
                round += 1;
            }
            if len == 0 {
                thread::yield_now();
            }
        }
        assert_eq!(old, 0, "lines with old bytes");
    });
}

/// One stream; an end with nothing to do sleeps, or spins.
fn transfer(sleeping: bool) {
    let memory = Memory::new();
    let (data, room) = (Bell::default(), Bell::default());
    let most = 20_000;
    thread::scope(|scope| {
        scope.spawn(|| {
            let ring = memory.ring(CLIENT);
            let mut sent = 0;
            while sent < TOTAL {
                let len = some_len(sent, most).min(TOTAL - sent);
                let bytes: Vec<u8> = (sent..sent + len).map(byte).collect();
                let len = produce(ring, &bytes);
                sent += len;
                if len > 0 && ring.has_rx_sleepers() && ring.take_rx_sleepers(false) != 0 {
                    data.ring();
                } else if len == 0 && sleeping && !ring.grow(|_, len| Grant::of(len)).unwrap() {
                    ring.arm_tx(ARM_TCP);
                    if !ring.is_writable() {
                        room.wait();
                    }
                } else if len == 0 {
                    thread::yield_now();
                }
            }
        });
        let ring = memory.ring(CLIENT);
        let mut buffer = vec![0; most];
        let mut got = 0;
        while got < TOTAL {
            let (len, writers) = consume(ring, &mut buffer[..some_len(got, most)]);
            assert!((got..got + len).map(byte).eq(buffer[..len].iter().copied()));
            got += len;
            if writers != 0 {
                room.ring();
            }
            if len == 0 && sleeping {
                ring.arm_rx(ARM_TCP);
                if !ring.has_data() {
                    data.wait();
                }
            } else if len == 0 {
                thread::yield_now();
            }
        }
    });
}

/// The window holds sixteen times as much as may be unread.
#[test]
#[cfg(not(miri))]
fn a_stream_of_a_sender_with_a_small_limit_arrives_while_both_ends_sleep() {
    const LIMIT: usize = 256 << 10;
    const MESSAGE: usize = 64_000;
    let total = 1500 * MESSAGE;
    let memory = Memory::of((18, 22));
    let (data, room) = (Bell::default(), Bell::default());
    thread::scope(|scope| {
        scope.spawn(|| {
            let ring = memory.ring(CLIENT).limited(LIMIT);
            let (mut sent, mut most) = (0, 0);
            while sent < total {
                let bytes: Vec<u8> = (sent..sent + MESSAGE).map(byte).collect();
                let mut found = ring.room(MESSAGE).unwrap();
                if found.place.window <= 1 << 18 {
                    found = ring.stream(MESSAGE, |_, len| Grant::of(len)).unwrap_or(found);
                }
                let len = found.free.min(MESSAGE);
                // SAFETY: len ≤ free and ≤ the message.
                unsafe { ring.copy_past(found.prod, found.place, bytes.as_ptr(), len) };
                ring.publish(found.prod + len as u64);
                (sent, most) = (sent + len, most.max(found.place.window));
                assert!(ring.unread() <= LIMIT);
                if len > 0 && ring.has_rx_sleepers() && ring.take_rx_sleepers(false) != 0 {
                    data.ring();
                } else if len == 0 {
                    ring.arm_tx(ARM_TCP);
                    if !ring.is_writable() {
                        room.wait();
                    }
                }
            }
            assert_eq!(most, 1 << 22);
        });
        let ring = memory.ring(CLIENT);
        let mut buffer = vec![0; MESSAGE];
        let mut got = 0;
        while got < total {
            let (len, writers) = consume(ring, &mut buffer[..some_len(got, MESSAGE)]);
            assert!((got..got + len).map(byte).eq(buffer[..len].iter().copied()));
            got += len;
            if writers != 0 {
                room.ring();
            }
            if len == 0 {
                ring.arm_rx(ARM_TCP);
                if !ring.has_data() {
                    data.wait();
                }
            }
        }
    });
}

#[test]
fn a_stream_arrives_while_both_ends_spin() {
    transfer(false);
}

#[test]
fn a_stream_arrives_while_both_ends_sleep() {
    transfer(true);
}

struct Yield;

impl Wait for Yield {
    fn wait(&mut self, _holder: u64, _attempt: u32) -> Verdict {
        thread::yield_now();
        Verdict::Again
    }
}

/// TCP stands aside as a counter: what matters is that each byte takes one way only.
#[test]
fn threads_that_share_an_end_lose_nothing_at_the_switch() {
    const SENDERS: u64 = 3;
    let each: u64 = if cfg!(miri) { 20 } else { 3_000 };
    let memory = Memory::new();
    let slot = memory.segment.slot(0).unwrap();
    let tcp = AtomicU64::new(0);
    let sent = || Some(tcp.load(Acquire));
    let send = |me: u64| {
        let span = TxSpan::new(slot, CLIENT);
        for i in 0..each {
            if let Ok(Route::Tcp(_in_flight)) = span.begin_tcp_send(sent) {
                tcp.fetch_add(1, AcqRel);
                continue;
            }
            let word = &slot.end[CLIENT].tx_lock;
            acquire(word, me, &mut Yield).unwrap();
            while produce(memory.ring(CLIENT), &[i as u8]) == 0 {
                thread::yield_now();
            }
            release(word);
        }
    };
    thread::scope(|scope| {
        let send = &send;
        for me in 1..=SENDERS {
            scope.spawn(move || send(me));
        }
        let span = RxSpan::new(slot, ACCEPTOR);
        let (mut in_tcp, mut in_ring) = (0, 0);
        while in_tcp + in_ring < SENDERS * each {
            let _ = TxSpan::new(slot, CLIENT).try_switch(sent);
            match span.source(|| Some(in_tcp)).unwrap() {
                Source::Bells(_) => unreachable!("nobody goes back"),
                Source::Ring => in_ring += consume(memory.ring(CLIENT), &mut [0; 512]).0 as u64,
                Source::Tcp(most) => {
                    let there = (tcp.load(Acquire) - in_tcp).min(most);
                    in_tcp += there;
                    let taken = span.took_tcp(there, || Some(in_tcp));
                    assert_eq!(taken, Ok(Taken { data: there, bells: 0, more: 0 }));
                }
            }
            thread::yield_now();
        }
        if let Some(boundary) = span.boundary() {
            assert_eq!((boundary, boundary), (in_tcp, tcp.load(Acquire)));
        }
    });
}
