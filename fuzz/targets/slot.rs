//! One slot and its rings, each alone between pages without access, and a peer that changes any word of them at any
//! time. The honest end stays inside the ring, and every number it acts upon is in its limits.
#![no_main]

use std::ops::Range;
use std::slice;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use usmc_fuzz::attacker::Attacker;
use usmc_fuzz::input::Input;
use usmc_fuzz::memory::{PAGE, map_guarded, memfd};
use usmc_shm::back::{Back, Leave, Resume};
use usmc_shm::bell::{Bells, Drain};
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{
    ARM_TCP, CLIENT, Slot, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN, WINDOW_SPLIT, window_word,
};
use usmc_shm::lock::{Verdict, Wait, acquire, release};
use usmc_shm::ring::{self, Grant, Ring};
use usmc_shm::span::{Route, RxSpan, Source, TxSpan};

const RING_SHIFT: u32 = WINDOW_SHIFT_MIN + 2;
const RING: usize = 1 << RING_SHIFT;
const FAR_SHIFT: u32 = RING_SHIFT + 1;
const FAR: usize = 1 << FAR_SHIFT;
/// What both together hold.
const ALL: usize = RING + FAR;
/// What the honest end sends.
static OURS: [u8; ALL] = [0x5A; ALL];
/// What stands in the ring it receives from.
static THEIRS: [u8; ALL] = [0x11; ALL];
/// What stands in the honest end's buffers before.
static CANARY: [u8; ALL] = [0xC5; ALL];

struct Memory {
    slot: *mut u8,
    /// Of both directions.
    rings: [*mut u8; 2],
    /// The same.
    far: [*mut u8; 2],
    attacker: Attacker,
}

// SAFETY: there is one thread.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

fn memory() -> &'static Memory {
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY.get_or_init(|| {
        let fd = memfd(PAGE + 2 * ALL, 0);
        let slot = map_guarded(fd, 0, PAGE);
        let rings = [0, 1].map(|i| map_guarded(fd, PAGE + i * RING, RING));
        let far = [0, 1].map(|i| map_guarded(fd, PAGE + 2 * RING + i * FAR, FAR));
        // SAFETY: two mappings of the slot's page, never unmapped.
        let attacker = unsafe { Attacker::new(map_guarded(fd, 0, PAGE), PAGE, slot) };
        Memory { slot, rings, far, attacker }
    })
}

/// Gives up soon, as the stack does at the latest after some time.
struct Brief;

impl Wait for Brief {
    fn wait(&mut self, holder: u64, attempt: u32) -> Verdict {
        match attempt {
            0..4 => Verdict::Again,
            4 if holder.is_multiple_of(2) => Verdict::Steal,
            _ => Verdict::GiveUp,
        }
    }
}

struct Honest {
    slot: &'static Slot,
    side: usize,
    rx: Ring<'static>,
    tx: Ring<'static>,
    usage: Use,
    /// What the kernel would tell of its TCP.
    counts: [u64; 2],
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let memory = memory();
    let side = input.below(2);
    // SAFETY: pages that stay mapped; atomics take any bits, and nobody else accesses the rings now.
    let slot = unsafe {
        memory.slot.write_bytes(0, PAGE);
        memory.rings[side].write_bytes(0, RING);
        memory.rings[1 - side].write_bytes(THEIRS[0], RING);
        memory.far[side].write_bytes(0, FAR);
        memory.far[1 - side].write_bytes(THEIRS[0], FAR);
        &*memory.slot.cast::<Slot>()
    };
    let ring = |from: usize| {
        let before = if from == CLIENT { RING } else { 0 };
        let meet = memory.rings[from].wrapping_add(before);
        // The other direction's is elsewhere.
        let far = memory.far[from].wrapping_sub(if from == CLIENT { 0 } else { FAR });
        let places = ring::Memory { meet, shifts: [RING_SHIFT; 2], far, far_shift: FAR_SHIFT };
        // SAFETY: RING bytes that stay mapped, the client's before this place, the acceptor's behind it, and the far part.
        unsafe { Ring::new(slot, from, places) }
    };
    let (rx, tx) = (ring(1 - side), ring(side));
    let usage = handshake::offer(&slot.control).expect("a free slot");
    rx.reset();
    tx.reset();
    let mut honest = Honest { slot, side, rx, tx, usage, counts: [0; 2] };
    let whole: Range<usize> = 0..size_of::<Slot>();
    let places = slice::from_ref(&whole);
    let (small, whole_ring) = (window_word(0, WINDOW_SHIFT_MIN), window_word(0, RING_SHIFT));
    let far = window_word(0, FAR_SHIFT);
    let known = [
        RING as u64,
        RING as u64 / 2,
        FAR as u64,
        small,
        whole_ring,
        whole_ring | WINDOW_SPLIT,
        far,
        far | WINDOW_SPLIT,
        1,
        2,
    ];
    while !input.is_over() {
        let what = input.u8();
        if what & 1 != 0 {
            memory.attacker.scribble(&mut input, places, &known);
            continue;
        }
        let (a, b) = (input.u16(), input.u8());
        memory.attacker.during(&mut input, places, &known, || honest.act(what >> 1, a, b));
    }
    // SAFETY: as above.
    let theirs = unsafe {
        let far = slice::from_raw_parts(memory.far[1 - side], FAR);
        [slice::from_raw_parts(memory.rings[1 - side], RING), far]
    };
    assert!(theirs.concat() == THEIRS, "sent into the wrong ring");
});

impl Honest {
    fn act(&mut self, what: u8, a: u16, b: u8) {
        let len = usize::from(a) * 4 % (ALL + 2);
        match what % 16 {
            0 | 1 => self.send(len),
            2 | 3 => self.receive(len),
            4 => self.peek_straight(len),
            5 => self.sleep(),
            6 => self.drain(b),
            7 => self.switch(b),
            8 => self.take_tcp(a, b),
            9 => self.go_back(),
            10 => self.leave(),
            11 => self.resume(),
            12 => self.shake_hands(b),
            13 => self.lock(b),
            14 => self.counts[usize::from(b & 1)] += u64::from(a),
            _ => RxSpan::new(self.slot, self.side).recount(),
        }
    }

    fn send(&self, want: usize) {
        let Ok(room) = self.tx.room(want) else { return };
        assert!(room.free <= room.place.window && room.place.window <= FAR);
        let len = want.min(room.free);
        // SAFETY: len ≤ room.free ≤ ALL.
        unsafe { self.tx.copy_in(room.prod, room.place, OURS.as_ptr(), len) };
        self.tx.publish(room.prod.wrapping_add(len as u64));
        if self.tx.has_rx_sleepers() {
            let span = TxSpan::new(self.slot, self.side);
            let _ = span.ring(|| self.tx.take_rx_sleepers(false), || len & 1 == 0);
        }
    }

    fn receive(&self, want: usize) {
        let Ok(data) = self.rx.data() else { return };
        assert!(data.len <= ALL && data.place.window <= FAR);
        let len = want.min(data.len);
        let mut buffer = CANARY;
        if len > 0 {
            // SAFETY: 0 < len ≤ data.len ≤ ALL.
            unsafe { self.rx.copy_out(data.cons, data.place, buffer.as_mut_ptr(), len) };
        }
        assert!(buffer[..len] == THEIRS[..len], "bytes from elsewhere");
        assert!(buffer[len..] == CANARY[len..], "more than was asked for");
        if self.rx.consume_waking(&data, len) {
            let span = TxSpan::new(self.slot, self.side);
            let _ = span.ring(|| self.rx.take_tx_sleepers(false), || true);
        }
    }

    /// As splice and the way back look at the ring.
    fn peek_straight(&self, want: usize) {
        let Ok(data) = self.rx.data() else { return };
        let most = want.min(data.len);
        if most == 0 {
            return;
        }
        let (start, len) = self.rx.contiguous(data.cons, data.place, most);
        assert!(0 < len && len <= most);
        // SAFETY: the ring promises `len` bytes there; volatile, for the peer may write them.
        let ends = unsafe { [start.read_volatile(), start.add(len - 1).read_volatile()] };
        assert_eq!(ends, [THEIRS[0]; 2]);
    }

    fn sleep(&self) {
        let _ = self.tx.grow(|at, len| {
            let ours = self.tx.meet().addr().abs_diff(at.addr());
            let is_near = len < RING && ours <= RING;
            assert!(is_near || self.is_far(at, len), "grew beyond the ring");
            Grant { bytes: len, in_memory: len / 2 }
        });
        if let Some((at, len)) = self.tx.leave_far() {
            assert!(self.is_far(at, len), "left what is not the far part");
            self.tx.left_far();
        }
        self.rx.arm_rx(ARM_TCP);
        self.tx.arm_tx(ARM_TCP);
        assert!(self.rx.unread() <= ALL && self.tx.unread() <= ALL);
        let _ = (self.tx.is_writable(), self.rx.has_data(), self.rx.is_rx_armed_by(ARM_TCP));
        self.rx.disarm_rx();
    }

    fn is_far(&self, at: *mut u8, len: usize) -> bool {
        let from = at.addr().wrapping_sub(memory().far[self.side].addr());
        from <= FAR && len <= FAR - from
    }

    fn drain(&self, b: u8) {
        let bells = Bells { end: &self.slot.end[self.side], rx: self.rx, tx: self.tx };
        if let Drain::Bells(count) = bells.drain(|| b & 1 != 0, || b & 2 != 0) {
            bells.drained(count.min(b.into()));
        }
    }

    fn switch(&self, b: u8) {
        let span = TxSpan::new(self.slot, self.side);
        let sent = (b != 0).then_some(self.counts[0]);
        if let Ok(Route::Tcp(in_flight)) = span.begin_tcp_send(|| sent) {
            drop(in_flight);
        }
        let _ = (span.try_switch(|| sent), span.is_ring());
    }

    fn take_tcp(&mut self, a: u16, b: u8) {
        let span = RxSpan::new(self.slot, self.side);
        let read = (b != 0).then_some(self.counts[1]);
        let Ok(source) = span.source(|| read) else { return };
        let taken = match source {
            Source::Tcp(left) => left.min(a.into()),
            Source::Bells(count) => count.min(a.into()),
            Source::Ring => return,
        };
        self.counts[1] += taken;
        if let (Source::Tcp(_), Ok(was)) = (source, span.took_tcp(taken, || Some(self.counts[1]))) {
            assert_eq!(was.data + was.bells + was.more, taken, "{was:?}");
        }
    }

    fn go_back(&self) {
        let span = TxSpan::new(self.slot, self.side);
        span.announce_copies(self.tx.read());
        if let Ok(Back::Resend(from)) = span.try_back(&self.tx, || Some(self.counts[0])) {
            span.is_resent(from);
        }
        if span.is_to_copy() {
            span.has_copied(self.tx.read());
        }
        let _ = (span.is_back(), span.copied(), span.is_to_copy());
    }

    fn leave(&self) {
        let span = RxSpan::new(self.slot, self.side);
        if span.leave(&self.rx, &self.tx, self.counts[0] & 1 == 1) == Leave::Left {
            let _ = (span.is_rung(self.slot, self.side), span.unheard());
        }
    }

    fn resume(&self) {
        let span = RxSpan::new(self.slot, self.side);
        let _ = (span.is_by_sender(), span.is_tcp(), span.boundary());
        if let Some(copies) = span.copies(&self.rx) {
            assert!(copies.all <= 2 << WINDOW_SHIFT_MAX, "more copies than a ring holds");
            assert!(copies.read <= copies.all, "more were read than there are");
        }
        match span.resume() {
            Resume::At(_) | Resume::AtOnce => span.to_tcp(),
            Resume::Not => span.to_tcp_around_bells(),
        }
    }

    fn shake_hands(&mut self, b: u8) {
        let control = &self.slot.control;
        let phase = match b % 6 {
            0 => handshake::attach(control, self.usage, 1, 0),
            1 => handshake::confirm(control, self.usage),
            2 => handshake::decline(control, self.usage),
            3 => handshake::withdraw(control, self.usage).err().unwrap_or(SlotState::Gone),
            4 => {
                handshake::release(control, self.usage);
                return;
            }
            _ => match handshake::offer(control) {
                Ok(usage) => {
                    self.usage = usage;
                    return;
                }
                Err(_) => SlotState::Gone,
            },
        };
        let _ = (phase, handshake::phase(control, self.usage));
    }

    fn lock(&self, b: u8) {
        let end = &self.slot.end[self.side];
        let word = [&end.tx_lock, &end.rx_lock, &end.back_lock][usize::from(b) % 3];
        if acquire(word, 7, &mut Brief).is_ok() {
            release(word);
        }
    }
}
