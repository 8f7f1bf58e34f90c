//! What the models share: a slot with its rings, the kernel's side of a TCP stream, and a bell.

use std::collections::VecDeque;

#[cfg(loom)]
pub use loom::{sync, thread};
#[cfg(shuttle)]
pub use shuttle::{sync, thread};
use sync::{Arc, Condvar, Mutex};
use usmc_shm::layout::{Slot, WINDOW_SHIFT_MIN, window_word};
use usmc_shm::ring::{Memory, Ring};
use usmc_shm::sync::Byte;
use usmc_shm::sync::Ordering::Relaxed;

/// log2 of a ring's bytes; `WINDOW_SHIFT_MIN` is 1 under loom.
pub const RING_SHIFT: u32 = 2;
const RING_BYTES: usize = 1 << RING_SHIFT;
/// Bytes of a ring that has a far part.
const FAR_RING: usize = 1 << WINDOW_SHIFT_MIN;

/// A connected slot with both rings.
pub struct Link {
    pub slot: Slot,
    data: Box<[Byte]>,
    /// Where this is not 0, the rings are the smallest ones, and behind them lie far parts of so many bytes (log2).
    far_shift: u32,
}

// SAFETY: the cells are only reached through `Ring`, and loom checks that their accesses are ordered.
unsafe impl Sync for Link {}
// SAFETY: as above.
unsafe impl Send for Link {}

impl Link {
    pub fn new() -> Arc<Link> {
        Link::with(0)
    }

    /// A slot of smaller rings with far parts.
    pub fn far() -> Arc<Link> {
        Link::with(RING_SHIFT)
    }

    /// A link whose far part has marks that lie further apart than the ring is long.
    pub fn very_far() -> Arc<Link> {
        Link::with(RING_SHIFT + 1)
    }

    fn with(far_shift: u32) -> Arc<Link> {
        let bytes = if far_shift > 0 { 2 * FAR_RING + (2 << far_shift) } else { 2 * RING_BYTES };
        let data = (0..bytes).map(|_| Byte::default()).collect();
        let link = Link { slot: Slot::default(), data, far_shift };
        link.ring(0).reset();
        link.ring(1).reset();
        Arc::new(link)
    }

    /// A slot whose windows have grown to the whole ring.
    pub fn grown() -> Arc<Link> {
        let link = Link::new();
        for dir in &link.slot.dir {
            dir.producer.window.store(window_word(0, RING_SHIFT), Relaxed);
        }
        link
    }

    /// The ring that end `sender` writes.
    pub fn ring(&self, sender: usize) -> Ring<'_> {
        let data = self.data.as_ptr().cast_mut();
        // SAFETY: `data` has a ring's cells on each side of `meet` and the far parts behind them, and lives as long as
        // `self`.
        unsafe {
            let (shift, near) = match self.far_shift {
                0 => (RING_SHIFT, RING_BYTES),
                _ => (WINDOW_SHIFT_MIN, FAR_RING),
            };
            let far = if self.far_shift > 0 { data.add(2 * near) } else { core::ptr::null_mut() };
            let far_shift = self.far_shift;
            let memory = Memory { meet: data.add(near), shifts: [shift; 2], far, far_shift };
            Ring::new(&self.slot, sender, memory)
        }
    }
}

/// Puts as much of `bytes` into the ring as fits, and publishes it.
pub fn produce(ring: Ring<'_>, bytes: &[u8]) -> usize {
    let room = ring.room(bytes.len()).expect("a correct peer");
    let len = room.free.min(bytes.len());
    if len > 0 {
        // SAFETY: len ≤ the room's free bytes and the slice's.
        unsafe { ring.copy_in(room.prod, room.place, bytes.as_ptr(), len) };
        ring.publish(room.prod + len as u64);
    }
    len
}

/// Takes at most `max` bytes out of the ring.
pub fn consume(ring: Ring<'_>, max: usize, into: &mut Vec<u8>) -> usize {
    let data = ring.data().expect("a correct peer");
    let len = data.len.min(max);
    let mut bytes = [0; RING_BYTES + FAR_RING];
    if len > 0 {
        // SAFETY: len ≤ the data's bytes ≤ those of the ring and its far part.
        unsafe { ring.copy_out(data.cons, data.place, bytes.as_mut_ptr(), len) };
        ring.consume(data.cons + len as u64);
        into.extend_from_slice(&bytes[..len]);
    }
    len
}

/// A wake-up that is remembered until it is taken: an eventfd.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    pub fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_all();
    }

    /// Sleeps until the bell rings; loom reports a deadlock when it never does.
    pub fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.changed.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// One direction of the kernel's TCP stream.
#[derive(Default)]
pub struct Tcp {
    stream: Mutex<Stream>,
    readable: Condvar,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<u8>,
    sent: u64,
    read: u64,
}

impl Tcp {
    pub fn send(&self, byte: u8) {
        let mut stream = self.stream.lock().unwrap();
        stream.queue.push_back(byte);
        stream.sent += 1;
        self.readable.notify_all();
    }

    /// Never blocks, like `MSG_DONTWAIT`.
    pub fn recv(&self, max: u64) -> Vec<u8> {
        let mut stream = self.stream.lock().unwrap();
        let len = stream.queue.len().min(max as usize);
        stream.read += len as u64;
        stream.queue.drain(..len).collect()
    }

    /// `poll` for POLLIN: wakes every sleeper, takes nothing.
    pub fn poll(&self) {
        let mut stream = self.stream.lock().unwrap();
        while stream.queue.is_empty() {
            stream = self.readable.wait(stream).unwrap();
        }
    }

    /// Every byte ever sent, as TCP_INFO tells.
    pub fn sent(&self) -> Option<u64> {
        Some(self.stream.lock().unwrap().sent)
    }

    /// Every byte ever read, as TCP_INFO and SIOCINQ tell.
    pub fn read(&self) -> Option<u64> {
        Some(self.stream.lock().unwrap().read)
    }
}

/// A number that only the holder of a lock may touch.
#[derive(Default)]
pub struct Exclusive(
    #[cfg(loom)] loom::cell::UnsafeCell<u32>,
    #[cfg(shuttle)] core::cell::UnsafeCell<u32>,
);

// SAFETY: the models access it under a lock; whether they do is the question they answer.
unsafe impl Sync for Exclusive {}
// SAFETY: as above.
unsafe impl Send for Exclusive {}

impl Exclusive {
    pub fn increment(&self) {
        #[cfg(loom)]
        // SAFETY: loom stops the model if anybody else has access.
        self.0.with_mut(|number| unsafe { *number += 1 });
        #[cfg(shuttle)]
        // SAFETY: shuttle runs one thread at a time; an access in between is lost, and so found out.
        unsafe {
            let before = *self.0.get();
            thread::yield_now();
            *self.0.get() = before + 1;
        }
    }

    pub fn get(&self) -> u32 {
        #[cfg(loom)]
        // SAFETY: as above.
        return self.0.with(|number| unsafe { *number });
        #[cfg(shuttle)]
        // SAFETY: as above.
        unsafe {
            *self.0.get()
        }
    }
}

/// Explores a model. `preemptions` bounds the involuntary switches of one execution; `None`: no bound.
#[cfg(loom)]
pub fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(preemptions);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Runs a model under random schedules: half of them uniform, half with few, well spread preemptions
/// (PCT), which find deep ones. `SHUTTLE_ITERATIONS` sets how many.
#[cfg(shuttle)]
pub fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};

    let iterations = std::env::var("SHUTTLE_ITERATIONS").ok().and_then(|n| n.parse().ok());
    let iterations = iterations.unwrap_or(20_000);
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    let model = std::sync::Arc::new(model);
    let again = model.clone();
    shuttle::Runner::new(RandomScheduler::new(iterations), config.clone()).run(move || again());
    // PCT refuses a model with a single thread.
    if preemptions != Some(0) {
        shuttle::Runner::new(PctScheduler::new(3, iterations), config).run(move || model());
    }
}
