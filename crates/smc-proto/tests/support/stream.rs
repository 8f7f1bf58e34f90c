//! One direction of a TCP connection: the application's bytes, CLC messages among them, and when all
//! of it arrives.

use std::collections::VecDeque;
use std::time::Duration;

/// What was sent and is not read yet.
#[derive(Default)]
pub struct Stream {
    chunks: VecDeque<Chunk>,
    taken: u64,
    written: u64,
    /// Where messages begin that nobody has begun to read.
    places: VecDeque<u64>,
    /// When the reader sees the end.
    end: Option<Duration>,
    /// The path is broken: nothing arrives any more.
    stalled: bool,
}

struct Chunk {
    arrives: Duration,
    bytes: VecDeque<u8>,
}

impl Stream {
    /// Bytes that are sent now and arrive then, not before what was sent before them.
    pub fn write(&mut self, arrives: Duration, bytes: &[u8]) {
        if self.stalled || self.end.is_some() || bytes.is_empty() {
            return;
        }
        let last = self.chunks.back().map_or(Duration::ZERO, |chunk| chunk.arrives);
        let bytes: VecDeque<u8> = bytes.iter().copied().collect();
        self.written += bytes.len() as u64;
        self.chunks.push_back(Chunk { arrives: arrives.max(last), bytes });
    }

    /// A message is going to be written next.
    pub fn announce(&mut self) {
        if !self.stalled && self.end.is_none() {
            self.places.push_back(self.written);
        }
    }

    /// The writer closes: the end comes behind everything.
    pub fn close(&mut self, now: Duration) {
        let last = self.chunks.back().map_or(now, |chunk| chunk.arrives.max(now));
        if !self.stalled {
            self.end.get_or_insert(last);
        }
    }

    /// What is written from now on never arrives.
    pub fn stall(&mut self) {
        self.stalled = true;
    }

    /// How many bytes can be read now.
    pub fn available(&self, now: Duration) -> usize {
        let arrived = self.chunks.iter().take_while(|chunk| chunk.arrives <= now);
        arrived.map(|chunk| chunk.bytes.len()).sum()
    }

    /// How many of them are in front of the next message; all, if none is announced.
    pub fn in_front(&self, now: Duration) -> usize {
        let room = self.places.front().map_or(u64::MAX, |place| place - self.taken);
        self.available(now).min(usize::try_from(room).unwrap_or(usize::MAX))
    }

    /// Reads `n` bytes, at most those that are available.
    pub fn take(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < n {
            let Some(chunk) = self.chunks.front_mut() else { break };
            let now = (n - bytes.len()).min(chunk.bytes.len());
            bytes.extend(chunk.bytes.drain(..now));
            if chunk.bytes.is_empty() {
                self.chunks.pop_front();
            }
        }
        if self.places.front().is_some_and(|place| *place < self.taken + bytes.len() as u64) {
            self.places.pop_front();
        }
        self.taken += bytes.len() as u64;
        bytes
    }

    /// Whether everything was read, and the end is there.
    pub fn is_over(&self, now: Duration) -> bool {
        self.chunks.is_empty() && self.end.is_some_and(|end| end <= now)
    }

    /// When something arrives that is not there yet.
    pub fn next_arrival(&self, now: Duration) -> Option<Duration> {
        let chunks = self.chunks.iter().map(|chunk| chunk.arrives);
        chunks.chain(self.end).find(|arrives| *arrives > now)
    }
}
