//! The ring against a queue: any sequence of writes, reads and peeks, from any cursor, gives what a
//! `VecDeque` gives, and stays within its window.
#![cfg(not(any(loom, shuttle)))]

use std::collections::VecDeque;

use bolero::{TypeGenerator, check};
use usmc_shm::layout::{
    ACCEPTOR, ARM_TCP, CLIENT, Direction, SHARED, SLOTS_OFFSET, Slot, WINDOW_SHIFT_MAX,
    WINDOW_SHIFT_MIN, WINDOW_SPLIT, data_offset, segment_len,
};
use usmc_shm::region::Segment;
use usmc_shm::ring::{MARK_SHIFT, ROOM_SHIFT, Ring};
use usmc_shm::sync::Ordering::Relaxed;

/// Bytes around the ring that nobody may touch.
const MARGIN: usize = 64;
const CANARY: u8 = 0xC5;

#[derive(Clone, Debug, TypeGenerator)]
struct Case {
    /// Both cursors start here.
    start: Start,
    #[generator(WINDOW_SHIFT_MIN..=WINDOW_SHIFT_MIN + 3)]
    ring_shift: u32,
    #[generator(CLIENT..=ACCEPTOR)]
    sender: usize,
    #[generator(bolero::produce::<Vec<Op>>().with().len(0usize..48))]
    ops: Vec<Op>,
}

#[derive(Clone, Debug, TypeGenerator)]
enum Start {
    Zero,
    Anywhere(u64),
    BeforeTheEnd(u16),
}

#[derive(Clone, Debug, TypeGenerator)]
enum Op {
    Write(Size),
    Read(Size),
    Peek(Size),
    SleepForRoom,
}

#[derive(Clone, Debug, TypeGenerator)]
enum Size {
    Small(u8),
    Any(u16),
    /// More than any ring holds.
    Huge,
    /// All there is, less a little.
    RestLess(u8),
}

impl Size {
    fn of(&self, rest: usize) -> usize {
        match *self {
            Size::Small(size) => size as usize,
            Size::Any(size) => size as usize,
            Size::Huge => usize::MAX,
            Size::RestLess(size) => rest.saturating_sub(size as usize),
        }
    }
}

/// A ring and the queue it must behave like.
struct Pair {
    slot: Box<Slot>,
    sender: usize,
    memory: Vec<u8>,
    ring_shift: u32,
    queue: VecDeque<u8>,
    next: u8,
    window_seen: usize,
}

impl Pair {
    fn new(start: u64, ring_shift: u32, sender: usize) -> Pair {
        let memory = vec![CANARY; (1 << ring_shift) + 2 * MARGIN];
        let (slot, queue) = (Box::default(), VecDeque::new());
        let mut pair = Pair { slot, sender, memory, ring_shift, queue, next: 0, window_seen: 0 };
        pair.ring().reset();
        pair.dir().producer.prod.store(start, Relaxed);
        pair.dir().producer.limit.store(start, Relaxed);
        pair.dir().consumer.cons.store(start, Relaxed);
        pair
    }

    fn ring(&mut self) -> Ring<'_> {
        let before = if self.sender == CLIENT { 1 << self.ring_shift } else { 0 };
        // SAFETY: the memory holds MARGIN bytes, the ring, and MARGIN bytes again.
        unsafe {
            let meet = self.memory.as_mut_ptr().add(MARGIN + before);
            Ring::new(&self.slot, self.sender, meet, self.ring_shift)
        }
    }

    fn dir(&self) -> &Direction {
        &self.slot.dir[self.sender]
    }

    fn write(&mut self, size: &Size) {
        let unread = self.queue.len();
        let want = size.of((1 << self.ring_shift) - unread);
        let room = self.ring().room(want).unwrap();
        let ring_bytes = 1 << self.ring_shift;
        assert!(room.place.window.is_power_of_two() && room.place.window <= ring_bytes);
        assert!(
            room.place.window >= self.window_seen.max(1 << WINDOW_SHIFT_MIN),
            "a window shrank"
        );
        assert!(unread == 0 || self.window_seen <= room.place.window);
        // The cached cursor may hide room, but only from one who asked for less than there is.
        assert!(room.free <= room.place.window - unread);
        // So may bytes that are unread from before the window grew: the end of what they lie in is not used.
        let is_split = self.dir().producer.window.load(Relaxed) & WINDOW_SPLIT != 0;
        assert!(is_split || room.free >= want.min(room.place.window - unread));
        assert!(room.free > 0 || !self.ring().is_writable() || want == 0, "woken for nothing");
        assert!(unread > 0 || room.free >= want.min(ring_bytes), "an empty ring did not grow");
        self.window_seen = room.place.window;

        let len = want.min(room.free);
        let first = self.next;
        let bytes: Vec<u8> = (0..len).map(|i| first.wrapping_add(i as u8)).collect();
        self.next = first.wrapping_add(len as u8);
        // SAFETY: len ≤ room.free, and the vector's length.
        unsafe { self.ring().copy_in(room.prod, room.place, bytes.as_ptr(), len) };
        self.ring().publish(room.prod.wrapping_add(len as u64));
        self.queue.extend(&bytes);
    }

    fn read(&mut self, size: &Size, peek: bool) {
        let data = self.ring().data().unwrap();
        assert_eq!(data.len, self.queue.len());
        let len = size.of(data.len).min(data.len);
        let mut bytes = vec![0; len];
        if len == 0 {
            return;
        }
        // SAFETY: len ≤ data.len, and the vector's length.
        unsafe { self.ring().copy_out(data.cons, data.place, bytes.as_mut_ptr(), len) };
        assert!(bytes.iter().eq(self.queue.iter().take(len)));
        if peek {
            return;
        }
        self.queue.drain(..len);
        let armed = self.dir().arm.tx.load(Relaxed);
        let woken = self.ring().consume_waking(&data, len);
        let mark = (data.place.window >> MARK_SHIFT) as u64;
        let after = data.cons.wrapping_add(len as u64);
        let looks = data.cons / mark != after / mark && self.ring().is_writable();
        assert_eq!(woken, looks && armed != 0);
        if woken {
            assert_eq!(self.ring().take_tx_sleepers(false), armed);
        }
        // Whoever sleeps for room learns of it before much more than was promised is there.
        let free = data.place.window - self.queue.len();
        let enough = (data.place.window >> ROOM_SHIFT) + (data.place.window >> MARK_SHIFT);
        assert!(free < enough || self.dir().arm.tx.load(Relaxed) == 0, "a sleeper was forgotten");
    }

    fn grow(&mut self) {
        let (window, was_writable) = (self.window(), self.ring().is_writable());
        let mut asked = None;
        let is_writable = self.ring().grow(|at, len| asked.replace((at.addr(), len)).is_none());
        let (grown, most) = (self.window(), 1 << self.ring_shift);
        assert_eq!(is_writable, Ok(self.ring().is_writable()));
        assert!(!was_writable || grown == window, "grew without need");
        assert_eq!(grown > window, asked.is_some());
        if let Some((at, len)) = asked {
            let meet = self.ring().meet().addr();
            let new = if self.sender == CLIENT { meet - grown } else { meet + window };
            assert_eq!((at, len, grown), (new, most - window, most));
            assert!(is_writable.unwrap());
        }
        self.window_seen = self.window_seen.max(grown);
    }

    fn window(&self) -> usize {
        1 << self.dir().producer.window_shift()
    }

    fn sleep_for_room(&mut self) {
        self.grow();
        self.ring().arm_tx(ARM_TCP);
        if self.ring().is_writable() {
            self.dir().arm.tx.store(0, Relaxed);
        }
    }

    /// What holds after every step.
    fn check(&mut self) {
        let unread = self.queue.len();
        assert_eq!(self.ring().has_data(), unread > 0);
        assert_eq!(self.ring().unread(), unread);
        let window = self.window();
        assert_eq!(self.ring().is_writable(), window - unread >= window >> ROOM_SHIFT);
        let (before, ring) = self.memory.split_at(MARGIN);
        let after = &ring[1 << self.ring_shift..];
        assert!(before.iter().chain(after).all(|byte| *byte == CANARY), "wrote outside the ring");
    }
}

#[test]
fn a_ring_behaves_like_a_queue() {
    check!().with_type::<Case>().for_each(|case| {
        let start = match case.start {
            Start::Zero => 0,
            Start::Anywhere(cursor) => cursor,
            Start::BeforeTheEnd(bytes) => u64::MAX - bytes as u64,
        };
        let mut pair = Pair::new(start, case.ring_shift, case.sender);
        for op in &case.ops {
            match op {
                Op::Write(size) => pair.write(size),
                Op::Read(size) => pair.read(size, false),
                Op::Peek(size) => pair.read(size, true),
                Op::SleepForRoom => pair.sleep_for_room(),
            }
            pair.check();
        }
    });
}

#[test]
fn messages_that_are_read_at_once_stay_beside_the_other_ring() {
    for (sender, size) in [(CLIENT, 100), (ACCEPTOR, 100), (CLIENT, SHARED), (ACCEPTOR, SHARED)] {
        let mut pair = Pair::new(0, WINDOW_SHIFT_MIN + 1, sender);
        for _ in 0..1000 {
            pair.write(&Size::Any(size as u16));
            pair.read(&Size::Huge, false);
        }
        let len = pair.memory.len();
        let shared = match sender {
            CLIENT => len - MARGIN - SHARED..len - MARGIN,
            _ => MARGIN..MARGIN + SHARED,
        };
        pair.memory[shared].fill(CANARY);
        assert!(pair.memory.iter().all(|byte| *byte == CANARY), "end {sender}, {size} bytes");
    }
}

#[test]
fn who_waits_for_a_reader_gets_the_whole_ring() {
    for sender in [CLIENT, ACCEPTOR] {
        let mut pair = Pair::new(0, WINDOW_SHIFT_MIN + 3, sender);
        // Not from the window's start on, and over its end.
        for size in [9_000, 3_000, 9_000] {
            pair.write(&Size::Any(size));
            pair.check();
            pair.read(&Size::Any(8_000), false);
        }
        let mut before = 0;
        while pair.queue.len() > before {
            before = pair.queue.len();
            pair.write(&Size::Any(1_000));
            if pair.queue.len() < before + 1_000 {
                pair.grow();
            }
            pair.check();
        }
        assert_eq!(before, 8 << WINDOW_SHIFT_MIN, "end {sender}");
        while !pair.queue.is_empty() {
            pair.read(&Size::Any(777), false);
            pair.check();
        }
    }
}

#[test]
fn slots_and_rings_lie_apart_and_inside_the_segment() {
    check!().with_type::<(u32, u32, u32, u32)>().for_each(|&(slots, shift, a, b)| {
        let (slots, shift) = (slots % 5000, shift % (WINDOW_SHIFT_MAX + 2));
        let Some(len) = segment_len(slots, shift) else { return };
        assert!((WINDOW_SHIFT_MIN..=WINDOW_SHIFT_MAX).contains(&shift));
        let ring = |i: u32| data_offset(slots) + ((i % (2 * slots)) as usize) * (1 << shift);
        assert!(SLOTS_OFFSET + slots as usize * 1152 <= data_offset(slots));
        assert!(ring(a) + (1 << shift) <= len);
        let apart = ring(a).abs_diff(ring(b));
        assert!(apart == 0 || apart >= 1 << shift);
        assert_eq!((ring(a | 1) - SHARED) % (2 * SHARED), 0, "they meet in the middle of a page");
    });
}

#[test]
fn only_a_header_that_fits_the_mapping_is_accepted() {
    let len = segment_len(2, WINDOW_SHIFT_MIN).unwrap();
    let mut memory = vec![0u128; len / 16 + 8];
    let base = memory.as_mut_ptr().cast::<u8>();
    // Atomics with 128-byte alignment.
    let base = base.wrapping_add(base.align_offset(128));
    // SAFETY: zeroed memory of that length, with room for the alignment, ours alone.
    let made = unsafe { Segment::create(base, 2, WINDOW_SHIFT_MIN, 7, 9) };
    let open = |len: usize| {
        // SAFETY: as above; `len` is at most the memory's.
        unsafe { Segment::open(base, len) }.map(|seg| (seg.slots(), seg.ring_shift(), seg.len()))
    };
    assert_eq!(open(len), Ok((2, WINDOW_SHIFT_MIN, len)));
    assert!(open(len - 1).is_err() && open(0).is_err() && open(SLOTS_OFFSET).is_err());
    assert!(made.slot(1).is_ok() && made.slot(2).is_err() && made.ring(2, 0).is_err());
    check!().with_type::<(u8, u32)>().for_each(|&(field, value)| {
        let header = made.header();
        let words = [&header.version, &header.slots, &header.ring_shift];
        let word = words[field as usize % 3];
        let right = word.swap(value, Relaxed);
        assert_eq!(open(len).is_ok(), value == right);
        word.store(right, Relaxed);
    });
    made.header().magic.store(0, Relaxed);
    assert!(open(len).is_err());
}
