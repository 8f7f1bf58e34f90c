//! The ring of `usmc dump`: what comes out is what went in, less what was counted as lost, whatever the cursors say.
#![cfg(not(any(loom, shuttle)))]

use std::sync::atomic::Ordering::Relaxed;

use usmc_shm::tap::{Tap, TapControl};

const SIZE: usize = 256;
/// Beyond the ring nothing may change.
const GUARD: usize = 64;

struct Memory {
    control: TapControl,
    bytes: Vec<u8>,
}

impl Memory {
    fn new() -> Memory {
        Memory { control: TapControl::default(), bytes: vec![0xee; GUARD + SIZE + GUARD] }
    }

    /// Writes one message; false where it found no room.
    fn write(&mut self, message: &[u8]) -> bool {
        let data = self.bytes[GUARD..].as_mut_ptr();
        // SAFETY: SIZE bytes and a guard behind them.
        let tap = unsafe { Tap::new(&self.control, data, SIZE) };
        let Some(at) = tap.reserve(message.len(), message.len()) else { return false };
        // SAFETY: the message's own bytes.
        let end = unsafe { tap.put(at, message.as_ptr(), message.len()) };
        tap.publish(end);
        true
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let tail = self.control.tail.load(Relaxed);
        let byte = |i: u64| self.bytes[GUARD + ((tail + i) as usize & (SIZE - 1))];
        let got = (0..len as u64).map(byte).collect();
        self.control.tail.store(tail + len as u64, Relaxed);
        got
    }

    fn is_intact_outside(&self) -> bool {
        let (before, rest) = self.bytes.split_at(GUARD);
        before.iter().chain(&rest[SIZE..]).all(|byte| *byte == 0xee)
    }
}

#[test]
fn messages_come_out_as_they_went_in_and_the_rest_is_counted() {
    let mut memory = Memory::new();
    let mut seed = 7u64;
    let mut draw = move |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let mut queue = std::collections::VecDeque::new();
    let (mut lost, mut times) = (0, 0);
    for round in 0..20_000u64 {
        if draw(2) == 0 {
            let message = vec![round as u8; draw(SIZE as u64 + 8) as usize];
            let used: usize = queue.iter().map(Vec::len).sum();
            let fits = used + message.len() <= SIZE;
            assert_eq!(memory.write(&message), fits);
            if fits {
                queue.push_back(message);
            } else {
                (lost, times) = (lost + message.len() as u64, times + 1);
            }
        } else if let Some(message) = queue.pop_front() {
            assert_eq!(memory.read(message.len()), message);
        }
        assert!(memory.is_intact_outside());
    }
    assert!(times > 100);
    assert_eq!(memory.control.lost.each_ref().map(|n| n.load(Relaxed)), [lost, times]);
}

#[test]
fn cursors_that_a_reader_made_up_harm_nobody() {
    let mut memory = Memory::new();
    let mut seed = 11u64;
    let mut draw = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let word = seed ^ seed >> 29;
        // Far off, near each other, or at the ends of the range.
        match word % 3 {
            0 => word,
            1 => word % 600,
            _ => u64::MAX - word % 600,
        }
    };
    let mut written = 0;
    for _ in 0..20_000 {
        memory.control.head.store(draw(), Relaxed);
        memory.control.tail.store(draw(), Relaxed);
        written += u32::from(memory.write(&vec![1; draw() as usize % (SIZE + 1)]));
        assert!(memory.is_intact_outside());
    }
    assert!(written > 100);
}
