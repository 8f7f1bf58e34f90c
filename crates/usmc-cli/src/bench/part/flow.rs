//! `ring/stream`: streams through rings by themselves, one thread that sends and one that receives. The windows are far parts,
//! used in turn. Their size is `USMC_RING_SIZE`, so that a sweep of it is one of these windows, too.
#![expect(
    unsafe_code,
    reason = "bytes are copied into rings and out of them as the library does it"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use usmc_shm::layout::{CLIENT, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN};
use usmc_shm::ring::{Grant, Ring, Room};
use usmc_shm::segment::Segment;

use super::ring::{ring, segments};
use super::spec::{Done, Spec};
use crate::bench::cpus;

/// The smallest rings, so that every window is larger.
const NEAR: u32 = WINDOW_SHIFT_MIN;
/// Bytes of a program's buffer.
const BUFFER: usize = 64 << 10;

/// Plays both ends of so many streams, whose bytes are published in parts of `spec.chunk`, or of the window where that is smaller.
pub fn play(spec: &Spec, streams: u32, seconds: f64) -> Result<()> {
    let window = std::env::var("USMC_RING_SIZE").ok().and_then(|bytes| bytes.parse::<u32>().ok());
    let window = window.map_or(WINDOW_SHIFT_MAX, |bytes| bytes.max(1).next_power_of_two().ilog2());
    let window = window.clamp(NEAR + 1, WINDOW_SHIFT_MAX);
    let part = spec.chunk.min(1 << window);
    let [here, there] = segments(streams, (NEAR, window))?;
    super::start(|| Ok(()))?;
    let (cpu, over) = (super::cpu_time(), AtomicBool::new(false));
    let received = thread::scope(|scope| {
        scope.spawn(|| {
            cpus::pin(&spec.cpus[1..]);
            send(&here, streams, part, &over);
        });
        cpus::pin(&spec.cpus[..1]);
        let received = receive(&there, streams, Duration::from_secs_f64(seconds));
        over.store(true, Ordering::Relaxed);
        received
    });
    let done = Done {
        operations: received,
        seconds,
        cpu_seconds: (super::cpu_time() - cpu).as_secs_f64(),
        ..Done::default()
    };
    super::say("measured", &())?;
    super::hear()?;
    super::say("done", &done)?;
    super::rest()
}

fn send(segment: &Segment, streams: u32, part: usize, over: &AtomicBool) {
    let buffers: Vec<Vec<u8>> = (0..streams).map(|_| vec![0x55; BUFFER.max(part)]).collect();
    while !over.load(Ordering::Relaxed) {
        for (slot, buffer) in (0..streams).zip(&buffers) {
            let ring = ring(segment, slot, CLIENT);
            let Some(room) = room(&ring, part) else { continue };
            if room.free >= part {
                // SAFETY: part ≤ room.free and ≤ the buffer.
                unsafe { ring.copy_in(room.prod, room.place, buffer.as_ptr(), part) };
                ring.publish(room.prod + part as u64);
                std::hint::black_box(ring.has_rx_sleepers());
            }
        }
    }
}

/// In the far part, as a sender that streams has it.
fn room(ring: &Ring<'_>, part: usize) -> Option<Room> {
    let room = ring.room(part).ok()?;
    if room.place.window > 1 << NEAR {
        return Some(room);
    }
    ring.stream(part, |_, len| Grant::of(len))
}

/// Takes what comes, for so long; how many bytes that was.
fn receive(segment: &Segment, streams: u32, run: Duration) -> u64 {
    let mut buffers: Vec<Vec<u8>> = (0..streams).map(|_| vec![0; BUFFER]).collect();
    let (begin, mut sum) = (Instant::now(), 0);
    while begin.elapsed() < run {
        for (slot, buffer) in (0..streams).zip(&mut buffers) {
            let ring = ring(segment, slot, CLIENT);
            let Ok(data) = ring.data() else { return sum };
            let len = data.len.min(buffer.len());
            if len > 0 {
                // SAFETY: len ≤ data.len and ≤ the buffer.
                unsafe { ring.copy_out(data.cons, data.place, buffer.as_mut_ptr(), len) };
                std::hint::black_box(ring.consume_waking(&data, len));
                sum += len as u64;
            }
        }
    }
    sum
}
