//! `ring`: the ring by itself, between two threads that have a mapping each, and beside it what the machine's shared
//! memory costs: one word there and one back, which no protocol can beat.
#![expect(
    unsafe_code,
    reason = "the ring's memory is mapped and copied here as the library does it"
)]

use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use usmc_shm::layout::{ACCEPTOR, CLIENT, WINDOW_SHIFT_MIN, segment_len};
use usmc_shm::ring::Ring;
use usmc_shm::segment::Segment;

use super::spec::{Done, Spec};
use crate::bench::cpus;

/// 64 KiB, as in the library's own figures (usmc-shm/benches/ring.rs).
const RING_SHIFT: u32 = WINDOW_SHIFT_MIN + 2;
/// Round trips that are timed together, so that the clock costs nothing.
const BATCH: u32 = 100;
/// Bytes between the two words: lines of their own.
const STEP: usize = 256;
/// Looks between two at whether the run is over.
const LOOKS: u32 = 1 << 12;

/// Plays both ends.
pub fn play(spec: &Spec, seconds: f64) -> Result<()> {
    let [here, there] = segments(1, (RING_SHIFT, 0))?;
    super::start(|| Ok(()))?;
    let (cpu, begin) = (super::cpu_time(), Instant::now());
    let over = AtomicBool::new(false);
    let (mut times, mut bare) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            cpus::pin(&spec.cpus[1..]);
            echo(&there, spec.request, &over);
        });
        cpus::pin(&spec.cpus[..1]);
        let mut message = vec![0x55; spec.request];
        measure(seconds / 2.0, &mut times, || {
            send(ring(&here, 0, CLIENT), &message, &over);
            receive(ring(&here, 0, ACCEPTOR), &mut message, &over);
        });
        over.store(true, Ordering::Relaxed);
    });
    over.store(false, Ordering::Relaxed);
    let [forth, back] = words(&here);
    thread::scope(|scope| {
        scope.spawn(|| {
            cpus::pin(&spec.cpus[1..]);
            let [forth, back] = words(&there);
            for i in 1.. {
                if !wait_for(forth, i, &over) {
                    break;
                }
                back.store(i, Ordering::Release);
            }
        });
        let mut i = 0;
        measure(seconds / 2.0, &mut bare, || {
            i += 1;
            forth.store(i, Ordering::Release);
            wait_for(back, i, &over);
        });
        over.store(true, Ordering::Relaxed);
    });
    let done = Done {
        operations: times.len() as u64 * u64::from(BATCH),
        seconds: begin.elapsed().as_secs_f64(),
        cpu_seconds: (super::cpu_time() - cpu).as_secs_f64(),
        one_way_us: median(times),
        further: vec![median(bare)],
    };
    super::say("measured", &())?;
    super::hear()?;
    super::say("done", &done)?;
    super::rest()
}

/// Two mappings of a new segment with so many slots, and rings and far parts of so many bytes (log2).
pub fn segments(slots: u32, shifts: (u32, u32)) -> Result<[Segment; 2]> {
    let len = segment_len(slots, shifts.0, shifts.1).context("rings of this size")?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create(c"usmc-bench", flags).context("memfd_create")?;
    ftruncate(&memory, len as u64).context("ftruncate")?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).context("seals")?;
    let base = map(&memory, len)?;
    // SAFETY: a zeroed mapping of `len` bytes that nobody else has yet and nobody unmaps.
    let here = unsafe { Segment::create(base, slots, shifts, 1, 1) };
    for slot in 0..slots {
        for end in [CLIENT, ACCEPTOR] {
            ring(&here, slot, end).reset();
        }
    }
    // SAFETY: the file is sealed against shrinking and the mapping stays.
    let there = unsafe { Segment::open(map(&memory, len)?, len, len) }.ok().context("a segment")?;
    Ok([here, there])
}

/// One way, in microseconds, of batches.
fn measure(seconds: f64, times: &mut Vec<f64>, mut round: impl FnMut()) {
    let begin = Instant::now();
    // The first batches warm up.
    for batch in 0.. {
        let start = Instant::now();
        (0..BATCH).for_each(|_| round());
        if batch >= 10 {
            times.push(start.elapsed().as_nanos() as f64 / f64::from(BATCH) / 2e3);
            if begin.elapsed().as_secs_f64() > seconds {
                break;
            }
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    let middle = times.len() / 2;
    *times.select_nth_unstable_by(middle, f64::total_cmp).1
}

fn map(memory: &OwnedFd, len: usize) -> Result<*mut u8> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of the whole file.
    let base = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, memory, 0) };
    Ok(base.context("mmap")?.cast())
}

/// The ring of an end of a slot.
#[expect(clippy::expect_used, reason = "the segment was made with this slot")]
pub fn ring(segment: &Segment, slot: u32, sender: usize) -> Ring<'_> {
    segment.ring(slot, sender).expect("the slot exists")
}

/// Two words inside the ring's memory, which is as good as any.
fn words(segment: &Segment) -> [&AtomicU64; 2] {
    let base = ring(segment, 0, ACCEPTOR).meet();
    // SAFETY: aligned words at the start of the ring, which both sides use as atomics only.
    [0, 1].map(|i| unsafe { &*base.add(i * STEP).cast::<AtomicU64>() })
}

/// False if the run is over.
fn wait_for(word: &AtomicU64, value: u64, over: &AtomicBool) -> bool {
    loop {
        for _ in 0..LOOKS {
            if word.load(Ordering::Acquire) == value {
                return true;
            }
            std::hint::spin_loop();
        }
        if over.load(Ordering::Relaxed) {
            return false;
        }
    }
}

fn echo(segment: &Segment, size: usize, over: &AtomicBool) {
    let mut message = vec![0; size];
    while receive(ring(segment, 0, CLIENT), &mut message, over) {
        send(ring(segment, 0, ACCEPTOR), &message, over);
    }
}

/// Sends as the stack does: room, copy, publish, look for sleepers.
fn send(ring: Ring<'_>, bytes: &[u8], over: &AtomicBool) {
    let mut rest = bytes;
    while let (false, Ok(room)) = (rest.is_empty(), ring.room(rest.len())) {
        let len = room.free.min(rest.len());
        if len == 0 {
            std::hint::spin_loop();
            if over.load(Ordering::Relaxed) {
                return;
            }
            continue;
        }
        // SAFETY: len ≤ room.free and ≤ the slice.
        unsafe { ring.copy_in(room.prod, room.place, rest.as_ptr(), len) };
        ring.publish(room.prod + len as u64);
        std::hint::black_box(ring.has_rx_sleepers());
        rest = &rest[len..];
    }
}

/// Fills the buffer; false if the run is over.
fn receive(ring: Ring<'_>, into: &mut [u8], over: &AtomicBool) -> bool {
    let (mut got, mut looks) = (0, 0);
    while got < into.len() {
        let Ok(data) = ring.data() else { return false };
        if data.len == 0 {
            std::hint::spin_loop();
            looks += 1;
            if looks % LOOKS == 0 && over.load(Ordering::Relaxed) {
                return false;
            }
            continue;
        }
        let len = data.len.min(into.len() - got);
        // SAFETY: len ≤ data.len and ≤ what is left of the slice.
        unsafe { ring.copy_out(data.cons, data.place, into[got..].as_mut_ptr(), len) };
        std::hint::black_box(ring.consume_waking(&data, len));
        got += len;
    }
    true
}
