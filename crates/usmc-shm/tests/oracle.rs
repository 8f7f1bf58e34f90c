//! The ring against a queue: any sequence of writes, reads and peeks, from any cursor, gives what a
//! `VecDeque` gives, and stays within its window.
#![cfg(not(any(loom, shuttle)))]

use std::collections::VecDeque;

use bolero::{TypeGenerator, check};
use usmc_shm::layout::{
    ACCEPTOR, ARM_TCP, CLIENT, Direction, PAGE, SHARED, SLOTS_OFFSET, Slot, WINDOW_SHIFT_MAX,
    WINDOW_SHIFT_MIN, WINDOW_SPLIT, data_offset, far_offset, near_len, ring_shifts, rings_word,
    segment_len, window_word,
};
use usmc_shm::ring::{Grant, Memory, ROOM_SHIFT, Ring, least_limit, mark};
use usmc_shm::segment::Segment;
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
    /// The far part is so many times as large; 0 = there is none.
    #[generator(0u32..=2)]
    far: u32,
    /// What the sender limits itself to, in the smallest window's halves above the least.
    #[generator(bolero::produce::<Option<u8>>())]
    most: Option<u8>,
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
    SleepForRoom(Option<u8>),
    LeaveFar,
    /// The next bytes go by the far part.
    Stream(Size),
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
    far: Vec<u8>,
    ring_shift: u32,
    far_shift: u32,
    most: usize,
    queue: VecDeque<u8>,
    next: u8,
    window_seen: usize,
    /// Bytes of the far part that may be in memory.
    taken: usize,
    /// Unread from before the window grew.
    old: usize,
    /// Free beside those.
    beside_old: usize,
}

impl Pair {
    fn new(start: u64, ring_shift: u32, sender: usize) -> Pair {
        Pair::with_far(start, ring_shift, 0, sender)
    }

    /// With a far part of `1 << far_shift` bytes, unless that is 0.
    fn with_far(start: u64, ring_shift: u32, far_shift: u32, sender: usize) -> Pair {
        let memory = vec![CANARY; (1 << ring_shift) + 2 * MARGIN];
        let far = match far_shift {
            0 => Vec::new(),
            _ => vec![CANARY; (2 << far_shift) + 2 * MARGIN],
        };
        let mut pair = Pair {
            slot: Box::default(),
            sender,
            memory,
            far,
            ring_shift,
            far_shift,
            most: usize::MAX,
            queue: VecDeque::new(),
            next: 0,
            window_seen: 0,
            taken: 0,
            old: 0,
            beside_old: 0,
        };
        pair.ring().reset();
        pair.dir().producer.prod.store(start, Relaxed);
        pair.dir().producer.limit.store(start, Relaxed);
        pair.dir().consumer.cons.store(start, Relaxed);
        pair
    }

    fn ring(&mut self) -> Ring<'_> {
        let before = if self.sender == CLIENT { 1 << self.ring_shift } else { 0 };
        // SAFETY: the memory holds MARGIN bytes, the ring, and MARGIN bytes again; so does that of the far parts.
        unsafe {
            let meet = self.memory.as_mut_ptr().add(MARGIN + before);
            let far = match self.far_shift {
                0 => std::ptr::null_mut(),
                _ => self.far.as_mut_ptr().add(MARGIN),
            };
            let memory =
                Memory { meet, shifts: [self.ring_shift; 2], far, far_shift: self.far_shift };
            Ring::new(&self.slot, self.sender, memory).limited(self.most)
        }
    }

    /// The most that can be unread with a window of so many bytes.
    fn most(&self, window: usize) -> usize {
        let before = if window > 1 << self.ring_shift { 1 << self.ring_shift } else { 0 };
        (window + before).min(self.most.max(least_limit(window)))
    }

    /// What a sleeper for room goes by.
    fn limit(&self, window: usize) -> usize {
        self.most.max(least_limit(window)).min(window)
    }

    fn is_far(&self) -> bool {
        self.window() > 1 << self.ring_shift
    }

    fn dir(&self) -> &Direction {
        &self.slot.dir[self.sender]
    }

    fn write(&mut self, size: &Size) {
        let unread = self.queue.len();
        let want =
            size.of((1 << self.ring_shift.max(self.far_shift)) - unread.min(1 << self.ring_shift));
        let p = &self.dir().producer;
        let looks = p.limit.load(Relaxed).wrapping_sub(p.prod.load(Relaxed)) < want as u64;
        let room = self.ring().room(want).unwrap();
        self.note_taken();
        let ring_bytes = 1 << self.ring_shift;
        let (window, most) = (room.place.window, self.most(room.place.window));
        assert!(window.is_power_of_two() && window <= 1 << self.ring_shift.max(self.far_shift));
        assert!(
            window >= self.window_seen.min(ring_bytes).max(1 << WINDOW_SHIFT_MIN)
                || self.window_seen > ring_bytes,
            "a window shrank"
        );
        assert!(unread == 0 || self.window_seen <= window);
        assert!(
            unread > 0 || !looks || window <= ring_bytes,
            "an empty ring was not left for its near part"
        );
        // The cached cursor may hide room, but only from one who asked for less than there is.
        assert!(room.free + unread <= most.next_multiple_of(SHARED));
        // So may bytes that are unread from before the window grew: the end of what they lie in is not used.
        let is_split = self.dir().producer.window.load(Relaxed) & WINDOW_SPLIT != 0;
        let there = most.saturating_sub(unread);
        assert!(
            is_split || window > ring_bytes || room.free >= want.min(window - unread).min(there)
        );
        assert!(room.free > 0 || !self.ring().is_writable() || want == 0, "woken for nothing");
        let least = want.min(ring_bytes).min(self.most);
        assert!(unread > 0 || !looks || room.free >= least, "an empty ring did not grow");
        self.window_seen = window;

        let len = want.min(room.free);
        let first = self.next;
        let bytes: Vec<u8> = (0..len).map(|i| first.wrapping_add(i as u8)).collect();
        self.next = first.wrapping_add(len as u8);
        let ring = self.ring();
        // SAFETY: len ≤ room.free, and the vector's length.
        unsafe {
            match first % 2 {
                0 => ring.copy_in(room.prod, room.place, bytes.as_ptr(), len),
                _ => ring.copy_past(room.prod, room.place, bytes.as_ptr(), len),
            }
        }
        self.ring().publish(room.prod.wrapping_add(len as u64));
        self.queue.extend(&bytes);
        self.beside_old -= len.min(self.beside_old);
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
        self.old -= len.min(self.old);
        let armed = self.dir().arm.tx.load(Relaxed);
        let woken = self.ring().consume_waking(&data, len);
        let apart = data.place.mark(data.cons);
        let after = data.cons.wrapping_add(len as u64);
        let writable = self.queue.len() <= self.window() - (self.window() >> ROOM_SHIFT);
        let looks = data.cons / apart != after / apart && writable;
        assert_eq!(woken, looks && armed != 0);
        if woken {
            assert_eq!(self.ring().take_tx_sleepers(false), armed);
        }
        // Whoever sleeps for room learns of it before much more than was promised is there.
        let window = self.window();
        let free = self.limit(window).saturating_sub(self.queue.len());
        let enough = (self.limit(window) >> ROOM_SHIFT) + mark(window);
        // One from before a stream went on in the far part: once it has read what was there before, at the latest.
        let is_told = self.dir().arm.tx.load(Relaxed) == 0;
        assert!(self.old > 0 || free < enough || is_told, "a sleeper was forgotten");
    }

    /// The far part is taken from its start on.
    fn note_taken(&mut self) {
        let taken = self.dir().producer.far_pages.load(Relaxed) as usize * PAGE;
        assert!(taken >= self.taken && taken <= 1 << self.far_shift.max(1));
        self.taken = taken;
    }

    /// `part`: what is granted of the far part, in sixteenths, or all.
    fn grow(&mut self, part: Option<u8>) {
        let (window, was_writable) = (self.window(), self.ring().is_writable());
        let could = self.ring().can_grow();
        let mut asked = None;
        let granted = |len: usize| match part {
            Some(part) if part & 1 == 0 => Grant { bytes: len >> (part >> 6), in_memory: len >> 2 },
            _ => Grant::of(len),
        };
        let is_writable = self.ring().grow(|at, len| {
            asked = Some((at.addr(), len));
            granted(len)
        });
        let grown = self.window();
        if grown > window {
            let shared = if grown > 1 << self.ring_shift { 0 } else { window };
            (self.old, self.beside_old) = (self.queue.len(), grown - shared);
        }
        assert_eq!(is_writable, Ok(self.ring().is_writable()));
        assert!(!was_writable || grown == window, "grew without need");
        assert!(could || grown == window, "grew although that was not worth a try");
        assert!(grown == window || is_writable.unwrap());
        self.note_taken();
        if let Some((at, len)) = asked {
            let meet = self.ring().meet().addr();
            let new = match self.sender {
                _ if len > 1 << self.ring_shift => (self.ring_far(), len),
                CLIENT => (meet - len - window, len),
                _ => (meet + window, len),
            };
            assert_eq!((at, len), new);
            assert!(grown == window || grown > 1 << self.ring_shift || grown == window + len);
        }
        self.window_seen = self.window_seen.max(grown);
    }

    /// A look at the room and the change to the far part that follows it.
    fn stream(&mut self, size: &Size) {
        let want = size.of(1 << self.ring_shift).max(1);
        let Ok(found) = self.ring().room(want) else { panic!("broken") };
        self.window_seen = found.place.window;
        self.note_taken();
        let (unread, window) = (self.queue.len(), self.window());
        let mut asked = None;
        let streamed = self.ring().stream(want, |at, len| {
            asked = Some((at.addr(), len));
            Grant::of(len)
        });
        if let Some((at, len)) = asked {
            assert_eq!((at, len), (self.ring_far(), 1 << self.far_shift.min(len.trailing_zeros())));
        }
        assert_eq!(streamed.is_some(), asked.is_some() && self.is_far());
        let Some(room) = streamed else {
            return assert_eq!(self.window(), window);
        };
        assert!(room.free > 0 || unread >= self.most(room.place.window));
        assert!(room.free + unread <= self.most(room.place.window));
        (self.old, self.beside_old) = (unread, self.window());
        self.note_taken();
        self.window_seen = self.window();
    }

    fn leave_far(&mut self) {
        let was_far = self.is_far();
        let left = self.ring().leave_far();
        assert_eq!(left.is_some(), self.far_shift > 0 && (!was_far || self.queue.is_empty()));
        let Some((at, len)) = left else { return };
        assert!(!self.is_far());
        assert_eq!((at.addr(), len), (self.ring_far(), self.taken));
        let from = at.addr() - self.far.as_ptr().addr();
        self.far[from..from + len].fill(CANARY);
        self.ring().left_far();
        self.taken = 0;
        self.window_seen = self.window();
    }

    fn ring_far(&self) -> usize {
        let other = if self.sender == CLIENT { 0 } else { 1 << self.far_shift };
        self.far.as_ptr().addr() + MARGIN + other
    }

    fn window(&self) -> usize {
        1 << self.dir().producer.window_shift()
    }

    fn sleep_for_room(&mut self, part: Option<u8>) {
        self.grow(part);
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
        let window = self.limit(self.window());
        let enough = window >> ROOM_SHIFT;
        let is_free = unread <= window - enough && (self.old == 0 || self.beside_old >= enough);
        assert_eq!(self.ring().is_writable(), is_free);
        let (before, ring) = self.memory.split_at(MARGIN);
        let after = &ring[1 << self.ring_shift..];
        assert!(before.iter().chain(after).all(|byte| *byte == CANARY), "wrote outside the ring");
        if self.far_shift > 0 {
            let from = self.ring_far() - self.far.as_ptr().addr();
            let (before, after) = (&self.far[..from], &self.far[from + self.taken..]);
            let outside = before.iter().chain(after).all(|byte| *byte == CANARY);
            assert!(outside, "wrote where the far part was not taken");
        }
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
        let far_shift = if case.far > 0 { case.ring_shift + case.far } else { 0 };
        let mut pair = Pair::with_far(start, case.ring_shift, far_shift, case.sender);
        if let Some(halves) = case.most {
            pair.most = (1 << WINDOW_SHIFT_MIN) + (usize::from(halves) << (WINDOW_SHIFT_MIN - 1));
        }
        for op in &case.ops {
            match op {
                Op::Write(size) => pair.write(size),
                Op::Read(size) => pair.read(size, false),
                Op::Peek(size) => pair.read(size, true),
                Op::SleepForRoom(part) => pair.sleep_for_room(*part),
                Op::LeaveFar => pair.leave_far(),
                Op::Stream(size) => pair.stream(size),
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
fn who_waits_for_a_reader_gets_all_there_is() {
    const RING: u32 = WINDOW_SHIFT_MIN + 3;
    const MIN: usize = 1 << WINDOW_SHIFT_MIN;
    // The window that was there before it went into the far part counts, too.
    for (far, all) in [(0, 8 * MIN), (RING + 2, 32 * MIN + MIN), (RING + 1, 16 * MIN + MIN)] {
        for sender in [CLIENT, ACCEPTOR] {
            gets_all_there_is(Pair::with_far(0, RING, far, sender), all);
        }
    }
}

fn gets_all_there_is(mut pair: Pair, all: usize) {
    // Again once it was empty, where the ring itself has grown by then.
    for more in [0, if pair.far_shift > 0 { 3 << WINDOW_SHIFT_MIN } else { 0 }] {
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
                pair.grow(None);
            }
            pair.check();
        }
        assert_eq!(before, all + more, "end {}", pair.sender);
        while !pair.queue.is_empty() {
            pair.read(&Size::Any(777), false);
            pair.check();
        }
    }
}

/// The end of the old window may be free long before the new one may use it: a sender that is told of room finds some.
#[test]
fn a_ring_that_has_doubled_is_full_until_the_old_bytes_are_read() {
    const MIN: usize = 1 << WINDOW_SHIFT_MIN;
    for sender in [CLIENT, ACCEPTOR] {
        let mut pair = Pair::new(0, WINDOW_SHIFT_MIN + 1, sender);
        pair.write(&Size::Any(1));
        pair.write(&Size::Any(MIN as u16 - 1));
        pair.grow(None);
        pair.write(&Size::Any(MIN as u16));
        for (read, writable) in [(MIN - 1, false), (1, true)] {
            pair.read(&Size::Any(read as u16), false);
            assert_eq!(pair.ring().is_writable(), writable, "{} are unread", pair.queue.len());
            assert_eq!(pair.ring().room(MIN).unwrap().free > 0, writable);
        }
    }
}

#[test]
fn slots_and_rings_lie_apart_and_inside_the_segment() {
    check!().with_type::<(u32, u32, u32, u32, u32)>().for_each(|&(slots, shift, far, a, b)| {
        let (slots, shift) = (slots % 5000, shift % (WINDOW_SHIFT_MAX + 2));
        let far = far % (WINDOW_SHIFT_MAX + 2);
        let Some(all) = segment_len(slots, shift, far) else { return };
        let Some(len) = near_len(slots, shift) else { panic!("longer than without far parts") };
        if far == 0 {
            assert_eq!(all, len);
        } else {
            assert!(far > shift && far <= WINDOW_SHIFT_MAX && far_offset(len) >= len);
            assert_eq!(all, far_offset(len) + ((slots as usize) << (far + 1)));
        }
        assert!((WINDOW_SHIFT_MIN..=WINDOW_SHIFT_MAX).contains(&shift));
        let ring = |i: u32| data_offset(slots) + ((i % (2 * slots)) as usize) * (1 << shift);
        assert!(SLOTS_OFFSET + slots as usize * 1152 <= data_offset(slots));
        assert!(ring(a) + (1 << shift) <= len);
        let apart = ring(a).abs_diff(ring(b));
        assert!(apart == 0 || apart >= 1 << shift);
        assert_eq!((ring(a | 1) - SHARED) % (2 * SHARED), 0, "they meet in the middle of a page");
    });
}

/// The two rings of a slot may have different sizes: each byte of each ring is its own.
#[test]
fn rings_of_two_sizes_lie_apart() {
    const LEAST: u32 = WINDOW_SHIFT_MIN;
    for shifts in [[LEAST, LEAST + 3], [LEAST + 2, LEAST]] {
        let (slots, rings) = (3, rings_word(shifts));
        assert_eq!(ring_shifts(rings), shifts);
        let larger = shifts[0].max(shifts[1]);
        assert_eq!(segment_len(slots, rings, larger), None, "far parts are larger than rings");
        let len = near_len(slots, rings).expect("a segment");
        let mut memory = vec![0u128; len / 16 + 8];
        let base = memory.as_mut_ptr().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(128));
        // SAFETY: zeroed memory of that length, with room for the alignment, ours alone.
        let made = unsafe { Segment::create(base, slots, (rings, 0), 7, 9) };
        let byte =
            |at: usize, slot: u32, end: usize| (at % 251) as u8 ^ (slot * 2) as u8 ^ end as u8;
        let all = || (0..slots).flat_map(|slot| [CLIENT, ACCEPTOR].map(|end| (slot, end)));
        for (slot, end) in all() {
            let ring = made.ring(slot, end).expect("a slot");
            ring.dir().producer.window.store(window_word(0, shifts[end]), Relaxed);
            let room = ring.room(1 << shifts[end]).expect("no stranger");
            assert_eq!(room.free, 1 << shifts[end], "the whole ring is one window");
            let text: Vec<u8> = (0..room.free).map(|at| byte(at, slot, end)).collect();
            // SAFETY: the text's own bytes.
            unsafe { ring.copy_in(room.prod, room.place, text.as_ptr(), text.len()) };
            ring.publish(room.prod + text.len() as u64);
        }
        // SAFETY: as above.
        let open = unsafe { Segment::open(base, len, len) }.expect("what `create` has made");
        assert_eq!((open.ring_shifts(), open.shifts(), open.len()), (shifts, made.shifts(), len));
        for (slot, end) in all() {
            let ring = open.ring(slot, end).expect("a slot");
            let data = ring.data().expect("no stranger");
            assert_eq!(data.len, 1 << shifts[end]);
            let mut text = vec![0; data.len];
            // SAFETY: as above.
            unsafe { ring.copy_out(data.cons, data.place, text.as_mut_ptr(), text.len()) };
            assert!(
                text.iter().enumerate().all(|(at, b)| *b == byte(at, slot, end)),
                "{slot} {end}"
            );
        }
        // SAFETY: as above.
        assert!(unsafe { Segment::open(base, len - 4096, len - 4096) }.is_err());
    }
}

#[test]
fn only_a_header_that_fits_the_mapping_is_accepted() {
    const SHIFTS: (u32, u32) = (WINDOW_SHIFT_MIN, WINDOW_SHIFT_MIN + 1);
    let len = segment_len(2, SHIFTS.0, SHIFTS.1).unwrap();
    let near = near_len(2, SHIFTS.0).unwrap();
    let mut memory = vec![0u128; len / 16 + 8];
    let base = memory.as_mut_ptr().cast::<u8>();
    // Atomics with 128-byte alignment.
    let base = base.wrapping_add(base.align_offset(128));
    // SAFETY: zeroed memory of that length, with room for the alignment, ours alone.
    let made = unsafe { Segment::create(base, 2, SHIFTS, 7, 9) };
    let open_of = |mapped: usize, file: usize| {
        // SAFETY: as above; `mapped` is at most the memory's.
        unsafe { Segment::open(base, mapped, file) }
            .map(|seg| (seg.slots(), seg.shifts().0, seg.far_shift(), seg.len()))
    };
    let open = |len: usize| open_of(len, len);
    assert_eq!(open(len), Ok((2, SHIFTS.0, SHIFTS.1, len)));
    assert_eq!(open_of(near, len), Ok((2, SHIFTS.0, 0, near)));
    assert!(open(len - 1).is_err() && open(0).is_err() && open(SLOTS_OFFSET).is_err());
    assert!(open(near).is_err() && open_of(near - 1, len).is_err() && open_of(near, near).is_err());
    assert!(made.slot(1).is_ok() && made.slot(2).is_err() && made.ring(2, 0).is_err());
    check!().with_type::<(u8, u32)>().for_each(|&(field, value)| {
        let header = made.header();
        let words = [&header.version, &header.slots, &header.ring_shift, &header.far_shift];
        let word = words[field as usize % 4];
        let right = word.swap(value, Relaxed);
        assert_eq!(open(len).is_ok(), value == right);
        word.store(right, Relaxed);
    });
    made.header().magic.store(0, Relaxed);
    assert!(open(len).is_err());
}
