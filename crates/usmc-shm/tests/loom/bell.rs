//! Several sleepers of one end share the doorbells in its TCP stream.

use usmc_shm::bell::{Bells, Drain, Rung, Sleepers};
use usmc_shm::layout::{ACCEPTOR, ARM_TCP, CLIENT, Slot};
use usmc_shm::span::TxSpan;

use crate::model::sync::atomic::AtomicU32;
use crate::model::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use crate::model::sync::{Arc, Mutex};
use crate::model::thread;
use crate::model::{Link, Tcp, check, consume, produce};

/// The acceptor's end: two threads of it, and the TCP stream towards it.
struct Ends {
    link: Arc<Link>,
    tcp: Tcp,
    rx_lock: Mutex<()>,
}

impl Ends {
    fn new(link: Arc<Link>) -> Arc<Ends> {
        Arc::new(Ends { link, tcp: Tcp::default(), rx_lock: Mutex::new(()) })
    }

    fn slot(&self) -> &Slot {
        &self.link.slot
    }

    fn bells(&self) -> Bells<'_> {
        let end = &self.slot().end[ACCEPTOR];
        Bells { end, rx: self.link.ring(CLIENT), tx: self.link.ring(ACCEPTOR) }
    }

    fn ring_bell(&self, take: impl FnOnce() -> u32) {
        let send = || {
            self.tcp.send(0);
            true
        };
        assert_ne!(TxSpan::new(self.slot(), CLIENT).ring(take, send), Rung::Back);
    }

    /// The client sends one byte.
    fn send(&self, byte: u8) {
        assert_eq!(produce(self.link.ring(CLIENT), &[byte]), 1);
        let ring = self.link.ring(CLIENT);
        if ring.has_rx_sleepers() {
            self.ring_bell(|| ring.take_rx_sleepers(false));
        }
    }

    /// One blocking read of one byte.
    fn receive(&self) -> u8 {
        let mut got = Vec::new();
        loop {
            let held = self.rx_lock.lock().unwrap();
            if consume(self.link.ring(CLIENT), 1, &mut got) == 1 {
                return got[0];
            }
            let may_sleep = self.drain();
            drop(held);
            if !may_sleep {
                thread::yield_now();
                continue;
            }
            let _asleep = Asleep::enter(&self.slot().end[ACCEPTOR].rx_sleepers);
            self.link.ring(CLIENT).arm_rx(ARM_TCP);
            if !self.link.ring(CLIENT).has_data() {
                self.tcp.poll();
            }
        }
    }

    /// One blocking write of one byte.
    fn write(&self, byte: u8) {
        while produce(self.link.ring(ACCEPTOR), &[byte]) == 0 {
            let held = self.rx_lock.lock().unwrap();
            let may_sleep = self.drain();
            drop(held);
            if !may_sleep {
                thread::yield_now();
                continue;
            }
            let _asleep = Asleep::enter(&self.slot().end[ACCEPTOR].tx_sleepers);
            self.link.ring(ACCEPTOR).arm_tx(ARM_TCP);
            if !self.link.ring(ACCEPTOR).is_writable() {
                self.tcp.poll();
            }
        }
    }

    /// Reads doorbells away as far as that is allowed. Returns whether a sleep can last.
    fn drain(&self) -> bool {
        let (bells, end) = (self.bells(), &self.slot().end[ACCEPTOR]);
        let readers = || end.rx_sleepers.load(Acquire) > 0;
        let writers = || end.tx_sleepers.load(Acquire) > 0;
        match bells.drain(readers, writers) {
            Drain::Data | Drain::Leave => false,
            Drain::Bells(0) => true,
            Drain::Bells(n) => {
                bells.drained(self.tcp.recv(n as u64).len() as u32);
                true
            }
        }
    }
}

struct Asleep<'a>(&'a AtomicU32);

impl<'a> Asleep<'a> {
    fn enter(count: &'a AtomicU32) -> Asleep<'a> {
        count.fetch_add(1, AcqRel);
        Asleep(count)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

#[test]
fn two_sleeping_readers_share_doorbells() {
    check(Some(2), || {
        let ends = Ends::new(Link::grown());
        let readers: Vec<_> = [2, 1]
            .into_iter()
            .map(|count| {
                let ends = ends.clone();
                thread::spawn(move || (0..count).map(|_| ends.receive()).sum::<u8>())
            })
            .collect();
        for byte in [1, 2, 4] {
            ends.send(byte);
        }
        let sum: u8 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert_eq!(sum, 7);
    });
}

/// A process forks while one of its threads goes to sleep, and another wakes up.
#[test]
fn a_fork_beside_sleepers_counts_none_too_few() {
    check(None, || {
        let counts = Arc::new((AtomicU32::new(1), AtomicU32::new(0), AtomicU32::new(0)));
        fn sleepers(counts: &(AtomicU32, AtomicU32, AtomicU32)) -> Sleepers<'_> {
            Sleepers { own: &counts.0, all: Some(&counts.1) }
        }
        let is_shared = |counts: &(AtomicU32, AtomicU32, AtomicU32)| counts.2.load(Relaxed) == 1;
        let begins = thread::spawn({
            let counts = counts.clone();
            move || sleepers(&counts).enter(|| is_shared(&counts))
        });
        let ends = thread::spawn({
            let counts = counts.clone();
            move || sleepers(&counts).leave(|| is_shared(&counts))
        });
        sleepers(&counts).share(|| counts.2.store(1, Relaxed));
        begins.join().unwrap();
        ends.join().unwrap();
        assert_eq!(counts.0.load(Relaxed), 1);
        assert!(counts.1.load(Relaxed) >= 1);
    });
}

/// A process that shares the sending end is killed between the arm bits and the byte: what is sent next wakes the reader,
/// whether others are left that share it or not.
#[test]
fn a_bell_that_never_came_is_rung_by_the_next() {
    for shared in [true, false] {
        check(Some(3), move || {
            let ends = Ends::new(Link::grown());
            let reader = thread::spawn({
                let ends = ends.clone();
                move || ends.receive() + ends.receive()
            });
            let ring = ends.link.ring(CLIENT);
            assert_eq!(produce(ring, &[1]), 1);
            if ring.has_rx_sleepers() {
                ring.take_rx_sleepers(true);
            }
            assert_eq!(produce(ring, &[2]), 1);
            if ring.has_rx_sleepers() {
                ends.ring_bell(|| ring.take_rx_sleepers(shared));
                ring.rang_rx();
            }
            assert_eq!(reader.join().unwrap(), 3);
        });
    }
}

/// The reader finds its ring empty, and the doorbell that was rung for the writer.
#[test]
fn a_reader_leaves_the_writers_doorbell() {
    check(Some(3), || {
        let ends = Ends::new(Link::grown());
        assert_eq!(produce(ends.link.ring(ACCEPTOR), b"full"), 4);
        let writer = thread::spawn({
            let ends = ends.clone();
            move || [5, 6, 7].into_iter().for_each(|byte| ends.write(byte))
        });
        let reader = thread::spawn({
            let ends = ends.clone();
            move || ends.receive()
        });
        // The client reads half of it, twice, and sends nothing before the writer is through.
        let ring = ends.link.ring(ACCEPTOR);
        for _ in 0..2 {
            let data = ring.data().unwrap();
            if ring.consume_waking(&data, 2) {
                ends.ring_bell(|| ring.take_tx_sleepers(false));
            }
        }
        writer.join().unwrap();
        ends.send(7);
        assert_eq!(reader.join().unwrap(), 7);
    });
}
