//! The boundary between TCP and the ring: no byte lost, repeated, or out of its sender's order.

use usmc_shm::layout::{ACCEPTOR, CLIENT};
use usmc_shm::span::{Route, RxSpan, Source, Switch, TxSpan, Unmeasured};

use crate::model::sync::atomic::AtomicU64;
use crate::model::sync::atomic::Ordering::Relaxed;
use crate::model::sync::{Arc, Mutex};
use crate::model::thread;
use crate::model::{Link, Tcp, check, consume, produce};

/// A doorbell's byte; data is anything else.
const BELL: u8 = 0xBE;

struct Stream {
    link: Arc<Link>,
    tcp: Tcp,
    tx_lock: Mutex<()>,
}

impl Stream {
    fn new() -> Arc<Stream> {
        Arc::new(Stream { link: Link::grown(), tcp: Tcp::default(), tx_lock: Mutex::new(()) })
    }

    fn tx(&self) -> TxSpan<'_> {
        TxSpan::new(&self.link.slot, CLIENT)
    }

    fn rx(&self) -> RxSpan<'_> {
        RxSpan::new(&self.link.slot, ACCEPTOR)
    }

    fn try_switch(&self) -> Switch {
        self.tx().try_switch(|| self.tcp.sent()).unwrap()
    }

    fn send(&self, byte: u8) {
        if !self.tx().is_ring()
            && let Route::Tcp(_in_flight) = self.tx().begin_tcp_send(|| self.tcp.sent()).unwrap()
        {
            self.tcp.send(byte);
            return;
        }
        let _held = self.tx_lock.lock().unwrap();
        assert_eq!(produce(self.link.ring(CLIENT), &[byte]), 1);
    }

    /// Reads what is there, as the stack does.
    fn receive(&self, into: &mut Vec<u8>) {
        match self.rx().source(|| self.tcp.read()).unwrap() {
            Source::Ring => {
                consume(self.link.ring(CLIENT), 4, into);
            }
            Source::Tcp(most) => {
                let taken = self.tcp.recv(most);
                let what = self.rx().took_tcp(taken.len() as u64, || self.tcp.read()).unwrap();
                assert_eq!(what.more, 0);
                into.extend_from_slice(&taken[..what.data as usize]);
            }
            Source::Bells(_) => unreachable!("nobody goes back"),
        }
    }

    fn receive_all(&self, total: usize) -> Vec<u8> {
        let mut got = Vec::new();
        while got.len() < total {
            let before = got.len();
            self.receive(&mut got);
            if got.len() == before {
                thread::yield_now();
            }
        }
        got
    }

    /// Nothing but doorbells came behind the boundary.
    fn assert_boundary(&self, bells: u64) {
        if let Some(boundary) = self.rx().boundary() {
            assert_eq!(self.tcp.sent(), Some(boundary + bells));
        }
    }
}

#[test]
fn a_receiver_reads_to_the_boundary_and_then_the_ring() {
    check(Some(4), || {
        let stream = Stream::new();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.send(2);
                assert_eq!(stream.try_switch(), Switch::Ring);
                stream.send(3);
                stream.send(4);
            }
        });
        assert_eq!(stream.receive_all(4), [1, 2, 3, 4]);
        sender.join().unwrap();
        stream.assert_boundary(0);
    });
}

#[test]
fn a_doorbell_swallowed_by_a_read_is_not_data() {
    check(Some(4), || {
        let stream = Stream::new();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                assert_eq!(stream.try_switch(), Switch::Ring);
                stream.send(2);
                stream.tcp.send(BELL);
            }
        });
        assert_eq!(stream.receive_all(2), [1, 2]);
        sender.join().unwrap();
        stream.assert_boundary(1);
    });
}

#[test]
fn no_tcp_send_follows_the_boundary() {
    check(None, || {
        let stream = Stream::new();
        let other = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(0x10);
                stream.send(0x11);
            }
        });
        stream.send(0x20);
        stream.try_switch();
        stream.send(0x21);
        other.join().unwrap();
        stream.assert_boundary(0);
        let got = stream.receive_all(4);
        for sender in [0x10, 0x20] {
            let own: Vec<u8> = got.iter().copied().filter(|byte| byte & 0xF0 == sender).collect();
            assert_eq!(own, [sender, sender | 1]);
        }
    });
}

#[test]
fn two_senders_and_a_receiver_agree_on_the_boundary() {
    check(Some(2), || {
        let stream = Stream::new();
        let senders: Vec<_> = [0x10, 0x20]
            .into_iter()
            .map(|sender| {
                let stream = stream.clone();
                thread::spawn(move || {
                    stream.send(sender);
                    stream.try_switch();
                    stream.send(sender | 1);
                })
            })
            .collect();
        let got = stream.receive_all(4);
        for sender in senders {
            sender.join().unwrap();
        }
        stream.assert_boundary(0);
        for sender in [0x10, 0x20] {
            let own: Vec<u8> = got.iter().copied().filter(|byte| byte & 0xF0 == sender).collect();
            assert_eq!(own, [sender, sender | 1]);
        }
    });
}

/// As weak as can be: the kernel's count is ordered by nothing but the protocol.
#[test]
fn the_boundary_counts_every_finished_send() {
    check(None, || {
        let stream = Stream::new();
        let count = Arc::new(AtomicU64::new(0));
        let other = thread::spawn({
            let (stream, count) = (stream.clone(), count.clone());
            move || {
                let sent = || Some(count.load(Relaxed));
                if let Ok(Route::Tcp(_in_flight)) = stream.tx().begin_tcp_send(sent) {
                    count.fetch_add(1, Relaxed);
                }
            }
        });
        let switched = stream.tx().try_switch(|| Some(count.load(Relaxed)));
        other.join().unwrap();
        if switched == Ok(Switch::Ring) {
            assert_eq!(stream.rx().boundary(), Some(count.load(Relaxed)));
        }
    });
}

/// The author of a switch is stopped after it closed TCP. The others finish it, and go so far that
/// doorbells count in TCP before the author gets its own, now wrong, measurement.
#[test]
fn a_switch_is_finished_by_others_and_its_late_author_changes_nothing() {
    check(Some(3), || {
        let stream = Stream::new();
        stream.send(1);
        let author = thread::spawn({
            let stream = stream.clone();
            move || stream.try_switch()
        });
        stream.send(2);
        let bells = stream.tx().is_ring().then(|| stream.tcp.send(BELL)).into_iter().count();
        let switched = author.join().unwrap();
        // Busy: the send of 2 was in flight.
        assert_eq!(stream.tx().is_ring(), switched == Switch::Ring);
        stream.assert_boundary(bells as u64);
        assert_eq!(stream.receive_all(2), [1, 2]);
    });
}

#[test]
fn a_switch_whose_author_could_not_measure_is_finished_later() {
    check(None, || {
        let stream = Stream::new();
        stream.send(1);
        let author = thread::spawn({
            let stream = stream.clone();
            move || {
                let outcome = stream.tx().try_switch(|| None);
                assert!(matches!(outcome, Err(Unmeasured) | Ok(Switch::Busy | Switch::Ring)));
            }
        });
        stream.send(2);
        author.join().unwrap();
        stream.send(3);
        assert_eq!(stream.receive_all(3), [1, 2, 3]);
        stream.assert_boundary(0);
    });
}

/// The receiver dies between a read and its account; the next holder of the lock recounts.
#[test]
fn a_recount_repairs_what_a_dead_receiver_left() {
    check(Some(0), || {
        let stream = Stream::new();
        stream.send(1);
        stream.send(2);
        assert_eq!(stream.try_switch(), Switch::Ring);
        assert_eq!(stream.rx().source(|| stream.tcp.read()), Ok(Source::Tcp(2)));
        assert_eq!(stream.tcp.recv(1), [1]);
        stream.send(3);
        stream.tcp.send(BELL);
        stream.rx().recount();
        assert_eq!(stream.receive_all(2), [2, 3]);
        assert_eq!(stream.tcp.recv(9), [BELL]);
        stream.rx().recount();
        assert_eq!(stream.rx().source(|| stream.tcp.read()), Ok(Source::Ring));
    });
}
