//! The way back from the ring to TCP: what a reader without the library gets is what was sent, and nothing else.

use usmc_shm::back::{Back, Leave, Resume};
use usmc_shm::bell::Rung;
use usmc_shm::layout::{ACCEPTOR, ARM_TCP, CLIENT, TXF_BACK, TXF_LEFT};
use usmc_shm::span::{Route, RxSpan, Source, Switch, TxSpan};

use crate::model::sync::atomic::Ordering::Relaxed;
use crate::model::sync::{Arc, Mutex};
use crate::model::thread;
use crate::model::{Link, Tcp, check, consume, produce};

/// A doorbell's byte; data is anything else.
const BELL: u8 = 0xBE;

/// The direction from the client to the acceptor.
struct Stream {
    link: Arc<Link>,
    tcp: Tcp,
    tx_lock: Mutex<()>,
    back_lock: Mutex<()>,
}

impl Stream {
    fn new() -> Arc<Stream> {
        let (tx_lock, back_lock) = (Mutex::new(()), Mutex::new(()));
        Arc::new(Stream { link: Link::grown(), tcp: Tcp::default(), tx_lock, back_lock })
    }

    fn in_ring() -> Arc<Stream> {
        let stream = Stream::new();
        assert_eq!(stream.tx().try_switch(|| stream.tcp.sent()), Ok(Switch::Ring));
        stream
    }

    fn tx(&self) -> TxSpan<'_> {
        TxSpan::new(&self.link.slot, CLIENT)
    }

    fn rx(&self) -> RxSpan<'_> {
        RxSpan::new(&self.link.slot, ACCEPTOR)
    }

    /// Sends one byte, as the stack does.
    fn send(&self, byte: u8) {
        if !self.tx().is_ring() {
            match self.tx().begin_tcp_send(|| self.tcp.sent()).unwrap() {
                Route::Tcp(_in_flight) => return self.tcp.send(byte),
                Route::Back => {
                    self.go_back();
                    return self.tcp.send(byte);
                }
                Route::Ring => {}
            }
        }
        {
            let _held = self.tx_lock.lock().unwrap();
            let flags = self.link.slot.dir[CLIENT].producer.flags.load(Relaxed);
            if flags & (TXF_LEFT | TXF_BACK) == 0 {
                assert_eq!(produce(self.link.ring(CLIENT), &[byte]), 1);
            } else {
                self.go_back_locked();
                return self.tcp.send(byte);
            }
        }
        let ring = self.link.ring(CLIENT);
        let rings = || {
            self.tcp.send(BELL);
            true
        };
        if ring.has_rx_sleepers()
            && self.tx().ring(|| ring.take_rx_sleepers(false), rings) == Rung::Back
        {
            self.go_back();
        }
    }

    fn go_back(&self) {
        let _held = self.tx_lock.lock().unwrap();
        self.go_back_locked();
    }

    /// Also by the peer, without the sending lock.
    fn go_back_locked(&self) {
        let _held = self.back_lock.lock().unwrap();
        let ring = self.link.ring(CLIENT);
        loop {
            match self.tx().try_back(&ring, || self.tcp.sent()).unwrap() {
                Back::Done => break,
                Back::Busy => thread::yield_now(),
                Back::Resend(from) => {
                    let data = ring.data().unwrap();
                    let end = data.cons + data.len as u64;
                    for at in from..end {
                        let mut byte = [0];
                        // SAFETY: within `data`.
                        unsafe { ring.copy_out(at, data.place, byte.as_mut_ptr(), 1) };
                        self.tcp.send(byte[0]);
                    }
                    self.tx().is_resent(end);
                    break;
                }
            }
        }
        assert!(self.tx().is_back());
    }

    /// Reads what is there, as the stack does.
    fn receive(&self, into: &mut Vec<u8>) {
        match self.rx().source(|| self.tcp.read()).unwrap() {
            Source::Tcp(most) => {
                let taken = self.tcp.recv(most);
                let what = self.rx().took_tcp(taken.len() as u64, || self.tcp.read()).unwrap();
                let (data, bells) = (what.data as usize, what.bells as usize);
                assert_eq!(data + bells + what.more as usize, taken.len());
                into.extend_from_slice(&taken[..data]);
                into.extend_from_slice(&taken[data + bells..]);
            }
            Source::Bells(count) => {
                assert!(self.tcp.recv(count).iter().all(|&byte| byte == BELL));
            }
            Source::Ring => {
                // Before the last look at the ring.
                let resume = self.rx().resume();
                if consume(self.link.ring(CLIENT), 4, into) == 0 {
                    self.follow(resume);
                }
            }
        }
    }

    fn follow(&self, resume: Resume) {
        match resume {
            Resume::Not => {}
            Resume::AtOnce => self.rx().to_tcp(),
            Resume::At(at) => {
                let bells = self.tcp.recv(at.saturating_sub(self.tcp.read().unwrap()));
                assert!(bells.iter().all(|&byte| byte == BELL));
                let copies = self.rx().copies(&self.link.ring(CLIENT));
                let at = at + copies.map_or(0, |copies| copies.all);
                self.tcp.recv(at - self.tcp.read().unwrap());
                if self.tcp.read() == Some(at) {
                    self.rx().to_tcp();
                }
            }
        }
    }

    /// Ends the direction, and leaves copies of what is unread.
    fn end(&self) {
        let _held = self.tx_lock.lock().unwrap();
        let ring = self.link.ring(CLIENT);
        let data = ring.data().unwrap();
        self.tx().announce_copies(data.cons);
        self.go_back_locked();
        if self.tx().is_to_copy() {
            for at in data.cons..data.cons + data.len as u64 {
                let mut byte = [0];
                // SAFETY: within `data`, and nobody writes it any more.
                unsafe { ring.copy_out(at, data.place, byte.as_mut_ptr(), 1) };
                self.tcp.send(byte[0]);
            }
            self.tx().has_copied(data.cons + data.len as u64);
        }
    }

    /// The same as [`Stream::leave`], where the sender was first: goes on by its copies.
    fn leave_to_copies(&self) {
        let ring = self.link.ring(CLIENT);
        let until = loop {
            match (self.rx().resume(), self.rx().copies(&ring)) {
                (Resume::At(at), Some(copies)) if copies.is_whole => break at + copies.read,
                _ => thread::yield_now(),
            }
        };
        while self.tcp.read().unwrap() < until {
            self.tcp.recv(until - self.tcp.read().unwrap());
            thread::yield_now();
        }
        self.rx().to_tcp();
    }

    fn receive_all(&self, total: usize, got: &mut Vec<u8>) {
        while got.len() < total {
            let before = got.len();
            self.receive(got);
            if got.len() == before {
                thread::yield_now();
            }
        }
    }

    /// Leaves for a reader that knows nothing of us. Where the sender was first, reads on as before.
    fn leave(&self) -> Leave {
        // Where the sender has left on our behalf, that comes first.
        while let Source::Bells(count) = self.rx().source(|| self.tcp.read()).unwrap() {
            assert!(self.tcp.recv(count).iter().all(|&byte| byte == BELL));
            thread::yield_now();
        }
        if self.rx().is_tcp() {
            return Leave::SenderFirst;
        }
        let left = self.rx().leave(&self.link.ring(CLIENT), &self.link.ring(ACCEPTOR), false);
        if left == Leave::Left {
            while self.rx().is_rung(&self.link.slot, ACCEPTOR) {
                thread::yield_now();
            }
            let bells = self.rx().unheard();
            assert_eq!(self.tcp.recv(bells.into()), vec![BELL; bells as usize]);
        }
        left
    }

    /// Reads TCP as a program without the library does.
    fn receive_plain(&self, total: usize, got: &mut Vec<u8>) {
        while got.len() < total {
            let taken = self.tcp.recv(9);
            if taken.is_empty() {
                thread::yield_now();
            }
            got.extend(taken);
        }
    }
}

/// A process of the sender's was killed between count and byte.
#[test]
fn a_bell_that_was_counted_and_never_sent_is_forgotten() {
    for leaves in [true, false] {
        check(Some(0), move || {
            let stream = Stream::in_ring();
            stream.link.ring(CLIENT).arm_rx(ARM_TCP);
            stream.send(1);
            assert_eq!(stream.tx().ring(|| ARM_TCP, || true), Rung::Rung);
            let mut got = Vec::new();
            if leaves {
                let rings = [CLIENT, ACCEPTOR].map(|who| stream.link.ring(who));
                assert_eq!(stream.rx().leave(&rings[0], &rings[1], false), Leave::Left);
                stream.go_back();
                assert_eq!(stream.rx().unheard(), 1);
                assert_eq!(stream.tcp.recv(1), [BELL]);
                stream.tcp.send(2);
                stream.receive_plain(2, &mut got);
            } else {
                stream.go_back();
                stream.tcp.send(2);
                stream.receive_all(2, &mut got);
                assert!(stream.rx().is_tcp());
            }
            assert_eq!(got, [1, 2]);
        });
    }
}

/// A process of the sender's has sent what it had published too late, and was killed before it could say so.
#[test]
fn what_was_published_late_is_sent_once() {
    check(Some(0), || {
        let stream = Stream::in_ring();
        stream.send(1);
        assert_eq!(stream.leave(), Leave::Left);
        stream.go_back_locked();
        // It had looked before the receiver left.
        assert_eq!(produce(stream.link.ring(CLIENT), &[2, 3]), 2);
        let ring = stream.link.ring(CLIENT);
        assert_eq!(stream.tx().try_back(&ring, || stream.tcp.sent()), Ok(Back::Resend(1)));
        stream.tcp.send(2);
        // The next one goes on where it was.
        assert_eq!(stream.tx().try_back(&ring, || stream.tcp.sent()), Ok(Back::Resend(2)));
        stream.tcp.send(3);
        stream.tx().is_resent(3);
        stream.go_back();
        let mut got = Vec::new();
        stream.receive_plain(3, &mut got);
        assert_eq!(got, [1, 2, 3]);
        assert_eq!(stream.tcp.recv(9), []);
        // And what comes later still begins anew.
        assert_eq!(produce(stream.link.ring(CLIENT), &[4]), 1);
        stream.tcp.send(9);
        assert_eq!(stream.tx().try_back(&ring, || stream.tcp.sent()), Ok(Back::Resend(3)));
    });
}

#[test]
fn who_leaves_gets_the_rest_by_tcp() {
    check(Some(3), || {
        let stream = Stream::in_ring();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.send(2);
                stream.send(3);
            }
        });
        let mut got = Vec::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        stream.receive(&mut got);
        assert_eq!(stream.leave(), Leave::Left);
        // The sender may never send again: at its next look it goes back.
        sender.join().unwrap();
        stream.go_back();
        stream.receive_plain(3, &mut got);
        assert_eq!(got, [1, 2, 3]);
    });
}

/// The leaver sends the sender's bytes on its behalf, whatever the sender is at.
#[test]
fn who_leaves_does_not_wait_for_the_sender() {
    check(Some(3), || {
        let stream = Stream::in_ring();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.send(2);
                stream.send(3);
            }
        });
        let mut got = Vec::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        stream.receive(&mut got);
        assert_eq!(stream.leave(), Leave::Left);
        stream.go_back_locked();
        sender.join().unwrap();
        stream.receive_plain(3, &mut got);
        assert_eq!(got, [1, 2, 3]);
        assert_eq!(stream.tcp.recv(9), []);
    });
}

#[test]
fn two_senders_learn_that_the_receiver_left() {
    check(Some(2), || {
        let stream = Stream::in_ring();
        let other = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(0x10);
                stream.send(0x11);
            }
        });
        let leaver = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.link.ring(CLIENT).arm_rx(ARM_TCP);
                assert_eq!(stream.leave(), Leave::Left);
            }
        });
        stream.send(0x20);
        other.join().unwrap();
        leaver.join().unwrap();
        stream.go_back();
        let mut got = Vec::new();
        stream.receive_plain(3, &mut got);
        let own: Vec<u8> = got.iter().copied().filter(|byte| byte & 0xF0 == 0x10).collect();
        assert_eq!((own, got.len()), (vec![0x10, 0x11], 3));
        assert_eq!(stream.tcp.recv(9), []);
    });
}

#[test]
fn who_goes_back_leaves_the_ring_to_be_read() {
    check(Some(3), || {
        let stream = Stream::in_ring();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.go_back();
                stream.send(2);
            }
        });
        let mut got = Vec::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        stream.receive_all(2, &mut got);
        sender.join().unwrap();
        assert_eq!(got, [1, 2]);
    });
}

#[test]
fn a_direction_that_never_was_in_the_ring_stays_out() {
    check(Some(3), || {
        let stream = Stream::new();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                let _ = stream.tx().try_switch(|| stream.tcp.sent());
                stream.send(2);
            }
        });
        let other = thread::spawn({
            let stream = stream.clone();
            move || stream.go_back()
        });
        let mut got = Vec::new();
        stream.receive_all(2, &mut got);
        sender.join().unwrap();
        other.join().unwrap();
        assert_eq!(got, [1, 2]);
        assert!(stream.tx().is_back());
    });
}

#[test]
fn both_ends_begin_at_once() {
    check(Some(3), || {
        let stream = Stream::in_ring();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.go_back();
                stream.send(2);
            }
        });
        let mut got = Vec::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        match stream.leave() {
            Leave::Left => stream.receive_plain(2, &mut got),
            Leave::SenderFirst => stream.receive_all(2, &mut got),
            Leave::Unread => unreachable!("the sender has not ended its direction"),
        }
        sender.join().unwrap();
        assert_eq!(got, [1, 2]);
    });
}

#[test]
fn copies_of_what_is_read_in_the_ring_are_skipped() {
    check(Some(3), || {
        let stream = Stream::in_ring();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.send(2);
                stream.end();
            }
        });
        let mut got = Vec::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        stream.receive_all(2, &mut got);
        sender.join().unwrap();
        while !stream.rx().is_tcp() {
            stream.receive(&mut got);
        }
        assert_eq!(got, [1, 2]);
        assert_eq!(stream.tcp.recv(9), []);
    });
}

#[test]
fn who_leaves_goes_on_by_the_copies_of_an_ended_sender() {
    check(Some(3), || {
        let stream = Stream::in_ring();
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                stream.send(2);
                stream.end();
            }
        });
        let mut got = Vec::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        stream.receive(&mut got);
        match stream.leave() {
            Leave::Left => {}
            Leave::SenderFirst if stream.rx().is_tcp() => {}
            Leave::SenderFirst => stream.leave_to_copies(),
            Leave::Unread => unreachable!("it ends behind its way back"),
        }
        sender.join().unwrap();
        stream.receive_plain(2, &mut got);
        assert_eq!(got, [1, 2]);
        assert_eq!(stream.tcp.recv(9), []);
    });
}

/// One read of TCP may take bytes from before the ring, doorbells, and bytes from after it.
#[test]
fn a_read_from_before_the_switch_takes_what_follows_the_ring() {
    check(Some(3), || {
        let stream = Stream::new();
        stream.link.ring(CLIENT).arm_rx(ARM_TCP);
        let sender = thread::spawn({
            let stream = stream.clone();
            move || {
                stream.send(1);
                assert_eq!(stream.tx().try_switch(|| stream.tcp.sent()), Ok(Switch::Ring));
                stream.send(2);
                stream.go_back();
                stream.send(3);
            }
        });
        let mut got = Vec::new();
        stream.receive_all(3, &mut got);
        sender.join().unwrap();
        assert_eq!(got, [1, 2, 3]);
    });
}
