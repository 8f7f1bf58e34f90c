//! A peer that writes anything anywhere, at any time: its victim stays inside the ring, never panics, and
//! comes back from every call.
//!
//! The slot and the ring are pages of a sealed memfd, each alone between pages nobody may touch, so one
//! byte outside ends the test by SIGSEGV. The attacker has its own mapping, as a peer process has.
#![cfg(not(any(loom, shuttle)))]

use std::ffi::c_void;
use std::ptr;

use usmc_shm::back::Back;
use usmc_shm::bell::{Bells, Drain};
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{
    ACCEPTOR, ARM_TCP, CLIENT, Slot, WINDOW_SHIFT_MIN, WINDOW_SPLIT, window_word,
};
use usmc_shm::lock::{Verdict, Wait, acquire, release};
use usmc_shm::ring::{Grant, Memory, Ring};
use usmc_shm::span::{Route, RxSpan, Source, Taken, TxSpan};
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicU32, AtomicU64};

const PAGE: usize = 4096;
const RING_SHIFT: u32 = WINDOW_SHIFT_MIN + 1;
const RING_BYTES: usize = 1 << RING_SHIFT;
const FAR_SHIFT: u32 = RING_SHIFT + 1;
const FAR_BYTES: usize = 1 << FAR_SHIFT;
/// What both together hold.
const ALL: usize = RING_BYTES + FAR_BYTES;
/// The memfd: the slot's page, a page for the attacker's counters, one ring (both directions use it) and its far part.
const COUNTERS: usize = PAGE;
const RING: usize = 2 * PAGE;
const FAR: usize = RING + RING_BYTES;
const FILE_BYTES: usize = FAR + FAR_BYTES;
const ROUNDS: u64 = 200_000;

/// Maps `len` bytes of `fd` from `offset`, between two pages without access.
fn map_guarded(fd: i32, offset: usize, len: usize) -> *mut u8 {
    let (none, write) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh reservation, then a fixed mapping inside it.
    unsafe {
        let all = libc::mmap(ptr::null_mut(), len + 2 * PAGE, none, anonymous, -1, 0);
        assert_ne!(all, libc::MAP_FAILED);
        let inside = all.byte_add(PAGE);
        let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
        let mapped = libc::mmap(inside, len, write, fixed, fd, offset as libc::off_t);
        assert_eq!(mapped, inside);
        mapped.cast()
    }
}

fn sealed_memfd() -> i32 {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: plain system calls with valid arguments.
    unsafe {
        let fd =
            libc::memfd_create(c"hostile".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        assert_eq!(libc::ftruncate(fd, FILE_BYTES as libc::off_t), 0);
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        fd
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// The attacker's side of the file.
struct Attacker {
    words: *mut u8,
    /// Words written so far; the victim reads it.
    written: *const AtomicU64,
    /// Set by the victim when it has seen enough.
    stop: *const AtomicU64,
}

// SAFETY: raw pointers into a shared mapping that lives as long as the process.
unsafe impl Send for Attacker {}

impl Attacker {
    fn new(fd: i32) -> Attacker {
        let words = map_guarded(fd, 0, 2 * PAGE);
        // SAFETY: inside the mapping.
        let counters = unsafe { words.add(COUNTERS).cast::<AtomicU64>() };
        Attacker { words, written: counters, stop: counters.wrapping_add(1) }
    }

    /// Writes until told to stop: values that matter, values near others, anything. Async-signal-safe.
    fn run(&self, seed: u64) {
        let mut random = Random(seed);
        // SAFETY: `stop` and `written` are words of this mapping.
        let (stop, written) = unsafe { (&*self.stop, &*self.written) };
        while stop.load(Relaxed) == 0 {
            let value = match random.below(6) {
                0 => random.below(40),
                1 => (RING_BYTES as u64).wrapping_add(random.below(9)).wrapping_sub(4),
                2 => u64::MAX - random.below(4),
                3 => 1 << random.below(64),
                4 => u64::from(WINDOW_SHIFT_MIN) + random.below(3),
                _ => random.next(),
            };
            let place = random.below(size_of::<Slot>() as u64 / 8) as usize * 8;
            // SAFETY: place + 8 ≤ the slot's size, and aligned; both words are atomics on the other side.
            unsafe {
                let word = self.words.add(place);
                match random.below(4) {
                    0 => (*word.cast::<AtomicU32>()).store(value as u32, Relaxed),
                    1 => (*word.add(4).cast::<AtomicU32>()).store(value as u32, Relaxed),
                    2 => (*word.cast::<AtomicU64>()).store(value, Relaxed),
                    // A little off: what range checks are for.
                    _ => _ = (*word.cast::<AtomicU64>()).fetch_add(value & 0xFFFF, Relaxed),
                }
            }
            written.fetch_add(1, Relaxed);
        }
    }
}

/// Gives up after a few looks, as the stack does at the latest after some time.
struct Brief;

impl Wait for Brief {
    fn wait(&mut self, holder: u64, attempt: u32) -> Verdict {
        match attempt {
            0..8 => Verdict::Again,
            _ if holder.is_multiple_of(2) => Verdict::Steal,
            _ => Verdict::GiveUp,
        }
    }
}

struct Victim<'a> {
    slot: &'a Slot,
    ring: Ring<'a>,
    /// Where the ring and its far part begin.
    near: usize,
    far: usize,
    private: Box<[u8; ALL]>,
    random: Random,
    good: u64,
    broken: u64,
}

impl Victim<'_> {
    /// A private buffer's length, 0 to the whole ring.
    fn len(&mut self, most: usize) -> usize {
        let len = self.random.next() as usize % (ALL + 1);
        let len = if self.random.below(2) == 0 { len } else { len % 64 };
        len.min(most)
    }

    fn produce(&mut self) {
        let want = if self.random.below(9) == 0 { usize::MAX } else { self.len(ALL) };
        let Ok(room) = self.ring.room(want) else {
            self.broken += 1;
            return;
        };
        assert!(room.free <= room.place.window && room.place.window <= FAR_BYTES);
        self.good += 1;
        let len = want.min(room.free);
        let src = self.private.as_ptr();
        // SAFETY: len ≤ room.free ≤ ALL, the private buffer's length.
        unsafe { self.ring.copy_in(room.prod, room.place, src, len) };
        self.ring.publish(room.prod.wrapping_add(len as u64));
        if self.ring.has_rx_sleepers() {
            self.ring.take_rx_sleepers(false);
        }
    }

    fn consume(&mut self) {
        let Ok(data) = self.ring.data() else {
            self.broken += 1;
            return;
        };
        assert!(data.len <= ALL && data.place.window <= FAR_BYTES);
        self.good += 1;
        let len = self.len(data.len);
        if len > 0 {
            let dst = self.private.as_mut_ptr();
            // SAFETY: 0 < len ≤ data.len ≤ ALL, the private buffer's length.
            unsafe { self.ring.copy_out(data.cons, data.place, dst, len) };
            let (start, whole) = self.ring.contiguous(data.cons, data.place, len);
            // SAFETY: the ring promises `whole` bytes there; volatile, for the attacker may write them.
            let _ends = unsafe { (start.read_volatile(), start.add(whole - 1).read_volatile()) };
        }
        if self.ring.consume_waking(&data, len) {
            self.ring.take_tx_sleepers(false);
        }
    }

    /// What the sender has done with the far part's memory lies within it.
    fn check_far(&self, at: *mut u8, len: usize) {
        let from = at.addr().wrapping_sub(self.far);
        assert!(from <= FAR_BYTES && len <= FAR_BYTES - from, "beyond the far part");
    }

    fn sleep_and_wake(&mut self) {
        let _ = self.ring.grow(|at, len| {
            if !(self.near..self.near + RING_BYTES).contains(&at.addr()) {
                self.check_far(at, len);
            }
            Grant { bytes: len, in_memory: len / 2 }
        });
        let want = self.len(ALL);
        let streamed = self.ring.stream(want, |at, len| {
            self.check_far(at, len);
            Grant::of(len)
        });
        if let Some(room) = streamed {
            assert!(room.free <= room.place.window && room.place.window <= FAR_BYTES);
        }
        if let Some((at, len)) = self.ring.leave_far() {
            self.check_far(at, len);
            self.ring.left_far();
        }
        self.ring.arm_rx(ARM_TCP);
        self.ring.arm_tx(ARM_TCP);
        let (unread, _writable) = (self.ring.unread(), self.ring.is_writable());
        assert!(unread <= ALL);
        let bells = Bells { end: &self.slot.end[1], rx: self.ring, tx: self.ring };
        if let Drain::Bells(n) = bells.drain(|| true, || true) {
            bells.drained(n);
        }
    }

    fn switch(&mut self) {
        let (tx, rx) = (TxSpan::new(self.slot, 0), RxSpan::new(self.slot, 1));
        let count = self.random.next() >> self.random.below(64);
        if let Ok(Route::Tcp(in_flight)) = tx.begin_tcp_send(|| Some(count)) {
            drop(in_flight);
        }
        let _ = tx.try_switch(|| Some(count));
        if let Ok(Source::Tcp(left)) = rx.source(|| Some(count)) {
            let taken = left.min(100);
            let Taken { data, bells, more } = rx.took_tcp(taken, || Some(count)).unwrap();
            assert_eq!(data + bells + more, taken);
        }
        rx.recount();
    }

    fn go_back(&mut self) {
        let (tx, rx) = (TxSpan::new(self.slot, 0), RxSpan::new(self.slot, 1));
        let count = self.random.next() >> self.random.below(64);
        let _rung = tx.ring(|| self.ring.take_rx_sleepers(false), || true);
        if let Ok(Back::Resend(from)) = tx.try_back(&self.ring, || Some(count)) {
            tx.is_resent(from);
        }
        let _ = (tx.is_back(), rx.leave(&self.ring, &self.ring, true), rx.is_rung(self.slot, 1));
        let _ = (rx.unheard(), rx.resume(), rx.is_tcp());
        rx.to_tcp();
        rx.recount();
    }

    fn shake_hands(&mut self) {
        let control = &self.slot.control;
        let usage = handshake::offer(control).unwrap_or(Use::from_bits(self.random.next() as u32));
        let _phases: [SlotState; 3] = [
            handshake::attach(control, usage, 1, 0),
            handshake::confirm(control, usage),
            handshake::decline(control, usage),
        ];
        let _ = handshake::withdraw(control, usage);
        handshake::release(control, usage);
    }

    fn lock(&self) {
        if acquire(&self.slot.end[0].tx_lock, 7, &mut Brief).is_ok() {
            release(&self.slot.end[0].tx_lock);
        }
    }

    /// Runs until it has done enough under enough fire.
    fn run(&mut self, attacker: &Attacker) {
        // SAFETY: a word of the attacker's mapping, which lives as long as the process.
        let written = unsafe { &*attacker.written };
        let mut rounds = 0;
        while rounds < ROUNDS || written.load(Relaxed) < ROUNDS {
            self.produce();
            self.consume();
            match rounds % 16 {
                0 => self.sleep_and_wake(),
                1 => self.switch(),
                2 => self.shake_hands(),
                3 => self.lock(),
                // A correct peer would start over here.
                4 => self.ring.reset(),
                6 => self.go_back(),
                // On a single core the attacker needs its turn.
                5 if rounds % 1024 == 5 => std::thread::yield_now(),
                _ => {}
            }
            rounds += 1;
        }
        // SAFETY: as above.
        unsafe { &*attacker.stop }.store(1, Relaxed);
    }
}

/// A file with a slot, a ring and its far part, and where ring and far part begin.
fn attacked(direction: usize) -> (i32, &'static Slot, Ring<'static>, [usize; 2]) {
    let fd = sealed_memfd();
    let slot_page = map_guarded(fd, 0, PAGE);
    let data = map_guarded(fd, RING, RING_BYTES);
    // SAFETY: a zeroed page that stays mapped; all fields are atomics.
    let slot = unsafe { &*slot_page.cast::<Slot>() };
    let before = if direction == CLIENT { RING_BYTES } else { 0 };
    let far = map_guarded(fd, FAR, FAR_BYTES);
    // There is no other direction's.
    let first = far.wrapping_sub(if direction == CLIENT { 0 } else { FAR_BYTES });
    let meet = data.wrapping_add(before);
    let memory = Memory { meet, shifts: [RING_SHIFT; 2], far: first, far_shift: FAR_SHIFT };
    // SAFETY: RING_BYTES bytes that stay mapped, on the side of their end where this direction's ring lies, and its far part.
    let ring = unsafe { Ring::new(slot, direction, memory) };
    ring.reset();
    (fd, slot, ring, [data.addr(), far.addr()])
}

fn under_attack(direction: usize, seed: u64, start: impl FnOnce(Attacker) -> Box<dyn FnOnce()>) {
    let (fd, slot, ring, [near, far]) = attacked(direction);
    let (watch, attacker) = (Attacker::new(fd), Attacker::new(fd));
    let (private, random) = (Box::new([0x5A; ALL]), Random(seed));
    let mut victim = Victim { slot, ring, near, far, private, random, good: 0, broken: 0 };
    let finish = start(attacker);
    victim.run(&watch);
    finish();
    assert!(victim.good > 1000 && victim.broken > 1000, "{}, {}", victim.good, victim.broken);
    // SAFETY: a descriptor of this test.
    unsafe { libc::close(fd) };
}

/// A window grows into the far part once. Two windows there would hold more than the whole ring.
#[test]
fn a_window_that_grew_within_the_far_part_is_refused() {
    let (fd, slot, ring, _) = attacked(CLIENT);
    let p = &slot.dir[CLIENT].producer;
    p.window.store(window_word(0, FAR_SHIFT) | WINDOW_SPLIT, Relaxed);
    for (shift, good) in [(RING_SHIFT, true), (FAR_SHIFT, false)] {
        let before = 1 << shift;
        p.window_before.store(window_word(0, shift), Relaxed);
        p.grown_at.store(before, Relaxed);
        p.prod.store(before + FAR_BYTES as u64, Relaxed);
        assert_eq!(ring.data().is_ok(), good, "a window of {before} bytes before");
    }
    // SAFETY: a descriptor of this test.
    unsafe { libc::close(fd) };
}

#[test]
fn a_thread_that_scribbles_harms_nobody() {
    under_attack(CLIENT, 0x9E37_79B9, |attacker| {
        let thread = std::thread::spawn(move || attacker.run(0x2545_F491));
        Box::new(|| thread.join().unwrap())
    });
}

#[test]
fn a_process_that_scribbles_harms_nobody() {
    under_attack(ACCEPTOR, 0xDEAD_BEEF, |attacker| {
        // SAFETY: the child makes only async-signal-safe calls.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: as above; a test that dies takes its attacker with it.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                attacker.run(0x0BAD_CAFE);
                libc::_exit(0);
            }
        }
        Box::new(move || {
            let mut status = 0;
            // SAFETY: our own child.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFEXITED(status));
        })
    });
}

/// The guard pages are what the tests rely on.
#[test]
fn a_byte_beyond_the_ring_is_fatal() {
    let fd = sealed_memfd();
    let data = map_guarded(fd, RING, RING_BYTES);
    // SAFETY: the child touches one byte outside the ring, which is to kill it, and nothing else.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            data.add(RING_BYTES).write_volatile(0);
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
        libc::munmap(data.cast::<c_void>(), RING_BYTES);
        libc::close(fd);
    }
}
