//! The lock of one end: one holder at a time, a known one, and one that may die.

use usmc_shm::lock::{Refused, Verdict, Wait, acquire, release};
use usmc_shm::sync::AtomicU64;

use crate::model::sync::Arc;
use crate::model::thread;
use crate::model::{Exclusive, Link, check, consume, produce};

const DEAD: u64 = 99;

/// Waits for the living and robs the dead.
struct Patience;

impl Wait for Patience {
    fn wait(&mut self, holder: u64, _attempt: u32) -> Verdict {
        if holder == DEAD {
            return Verdict::Steal;
        }
        thread::yield_now();
        Verdict::Again
    }
}

/// Never waits.
struct Haste;

impl Wait for Haste {
    fn wait(&mut self, _holder: u64, _attempt: u32) -> Verdict {
        Verdict::GiveUp
    }
}

struct Guarded {
    word: AtomicU64,
    value: Exclusive,
}

impl Guarded {
    fn new(holder: u64) -> Arc<Guarded> {
        Arc::new(Guarded { word: AtomicU64::new(holder), value: Exclusive::default() })
    }

    fn increment(&self, me: u64) {
        acquire(&self.word, me, &mut Patience).unwrap();
        self.value.increment();
        release(&self.word);
    }
}

fn increments(holder: u64, times: u32) {
    check(Some(4), move || {
        let guarded = Guarded::new(holder);
        let other = thread::spawn({
            let guarded = guarded.clone();
            move || (0..times).for_each(|_| guarded.increment(2))
        });
        guarded.increment(1);
        other.join().unwrap();
        assert_eq!(guarded.value.get(), times + 1);
    });
}

#[test]
fn one_holder_at_a_time() {
    increments(0, 2);
}

#[test]
fn a_dead_holder_is_robbed_by_one_only() {
    increments(DEAD, 2);
}

#[test]
fn a_signal_handler_is_refused_while_its_own_thread_holds_the_lock() {
    check(None, || {
        let guarded = Guarded::new(0);
        let other = thread::spawn({
            let guarded = guarded.clone();
            move || guarded.increment(2)
        });
        acquire(&guarded.word, 1, &mut Patience).unwrap();
        assert_eq!(acquire(&guarded.word, 1, &mut Patience), Err(Refused::Reentered));
        release(&guarded.word);
        other.join().unwrap();
    });
}

#[test]
fn impatience_leaves_the_lock_alone() {
    check(None, || {
        let guarded = Guarded::new(0);
        let other = thread::spawn({
            let guarded = guarded.clone();
            move || guarded.increment(2)
        });
        if acquire(&guarded.word, 1, &mut Haste).is_ok() {
            release(&guarded.word);
        }
        other.join().unwrap();
        guarded.increment(1);
    });
}

/// The lock hands the ring's private words over, too: the cursors each end reads without ordering.
#[test]
fn two_producers_and_the_ring_between_them() {
    check(Some(2), || {
        let link = Link::grown();
        let send = |link: &Link, me: u64, byte: u8| {
            let word = &link.slot.end[0].tx_lock;
            acquire(word, me, &mut Patience).unwrap();
            assert_eq!(produce(link.ring(0), &[byte]), 1);
            release(word);
        };
        let other = thread::spawn({
            let link = link.clone();
            move || send(&link, 2, 0x10)
        });
        send(&link, 1, 0x20);
        send(&link, 1, 0x21);
        other.join().unwrap();
        let mut got = Vec::new();
        consume(link.ring(0), 4, &mut got);
        assert!(got.iter().position(|b| *b == 0x20) < got.iter().position(|b| *b == 0x21));
        got.sort_unstable();
        assert_eq!(got, [0x10, 0x20, 0x21]);
    });
}
