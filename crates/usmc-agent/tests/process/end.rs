//! A process' end of a connection, and what it does there.

use std::net::TcpStream;
use std::thread;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use smc_proto::close::Direction;
use usmc_shm::agent::Place;
use usmc_shm::back::{Back, Leave};
use usmc_shm::bell::{Bells, Drain};
use usmc_shm::layout::{ACCEPTOR, ARM_TCP, CLIENT, Slot};
use usmc_shm::ring::Ring;
use usmc_shm::segment::RingPair;
use usmc_shm::span::{RxSpan, TxSpan};
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};

use super::application::Application;
use super::{LIMIT, wait, wait_for};

/// A process' end of a connection.
pub(crate) struct End {
    pub(super) pair: RingPair,
    pub(crate) place: Place,
    pub(crate) socket: Option<TcpStream>,
    pub(crate) application: Application,
    /// It does not let go of the slot when it closes.
    pub(crate) keeps_slot: bool,
}

impl End {
    pub(crate) fn known(&self) -> &Slot {
        self.pair.slot()
    }

    /// The ring that it reads, and the one that it writes.
    pub(crate) fn rings(&self) -> [Ring<'_>; 2] {
        [CLIENT, ACCEPTOR].map(|sender| self.pair.ring(sender))
    }

    fn ring(&self, take: impl FnOnce() -> u32) {
        let Some(socket) = &self.socket else { return };
        let byte = || send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok();
        let _ = TxSpan::new(self.known(), ACCEPTOR).ring(take, byte);
    }

    /// Wakes the agent if it sleeps.
    pub(crate) fn wake(&self) {
        let [rx, tx] = self.rings();
        if tx.has_rx_sleepers() {
            self.ring(|| tx.take_rx_sleepers(false));
        }
        if rx.has_tx_sleepers() && rx.is_writable() {
            self.ring(|| rx.take_tx_sleepers(false));
        }
    }

    /// A doorbell.
    pub(crate) fn ring_bell(&self) {
        self.ring(|| ARM_TCP);
    }

    /// Writes a message of that byte, and wakes the agent if it sleeps.
    pub(crate) fn send_message<const BYTES: usize>(&self, byte: u8) {
        self.write_message::<BYTES>(byte);
        self.wake();
    }

    /// Writes a message of that byte.
    pub(crate) fn write_message<const BYTES: usize>(&self, byte: u8) {
        let [_, ring] = self.rings();
        let bytes = [byte; BYTES];
        let room = ring.room(BYTES).expect("a ring in order");
        assert!(room.free >= BYTES);
        // SAFETY: so many bytes within the room.
        unsafe { ring.copy_in(room.prod, room.place, bytes.as_ptr(), BYTES) };
        ring.publish(room.prod + BYTES as u64);
    }

    /// Takes a message that is there, of that byte.
    pub(crate) fn take_message<const BYTES: usize>(&self, byte: u8) {
        let [ring, _] = self.rings();
        let data = ring.data().expect("a ring in order");
        assert!(data.len >= BYTES);
        let mut bytes = [0; BYTES];
        // SAFETY: as many bytes as are there.
        unsafe { ring.copy_out(data.cons, data.place, bytes.as_mut_ptr(), BYTES) };
        ring.consume(data.cons + BYTES as u64);
        assert_eq!(bytes, [byte; BYTES]);
    }

    /// How the peer's end is, by the slot.
    pub(crate) fn peer(&self) -> EndState {
        self.known().dir[CLIENT].producer.flags(Acquire).end()
    }

    /// What the kernel says next on the socket, behind doorbells: so many bytes, or an error.
    pub(crate) fn hear(&self) -> rustix::io::Result<usize> {
        let socket = self.socket.as_ref().expect("a socket");
        loop {
            wait(socket);
            let bells = self.known().dir[CLIENT].producer.bells_sent.load(Acquire);
            let left = bells.wrapping_sub(self.known().end[ACCEPTOR].bells_drained.load(Relaxed));
            // First of all, as an error is told once: a RST takes doorbells along.
            match recv(socket, &mut [0; 16], RecvFlags::DONTWAIT).map(|(n, _)| n) {
                Err(Errno::WOULDBLOCK) => {}
                Ok(n) if n > 0 && n as u64 <= u64::from(left) => self.count(n),
                said => return said,
            }
        }
    }

    /// The socket's error, which comes.
    pub(crate) fn error(&self) -> Option<i32> {
        let socket = self.socket.as_ref().expect("a socket");
        wait_for(socket, PollFlags::empty());
        socket.take_error().expect("a socket").and_then(|error| error.raw_os_error())
    }

    /// As close(2) under the library of a socket with something unread, or with SO_LINGER 0.
    pub(crate) fn abort(&mut self) {
        let _ = self.known().dir[ACCEPTOR].producer.close(true);
        self.die();
        self.let_go();
    }

    /// A byte that nobody has counted.
    pub(crate) fn knock(&self) {
        if let Some(socket) = &self.socket {
            // The agent may have reset it.
            let _ = send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    fn bells(&self) -> Bells<'_> {
        let [rx, tx] = self.rings();
        Bells { end: &self.known().end[ACCEPTOR], rx, tx }
    }

    /// So many doorbells were read.
    fn count(&self, bells: usize) {
        self.bells().drained(bells as u32);
    }

    /// Takes doorbells away.
    pub(crate) fn drain(&self) {
        let bells = self.bells();
        if let Drain::Bells(pending) = bells.drain(|| false, || false)
            && let Some(socket) = &self.socket
        {
            let mut bytes = vec![0; pending as usize];
            let got = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT);
            bells.drained(got.map_or(0, |(n, _)| n) as u32);
        }
    }

    /// Announces a sleep. False where there is something.
    pub(super) fn may_sleep(&self) -> bool {
        let app = &self.application;
        if app.is_closed {
            return true;
        }
        let [rx, tx] = self.rings();
        // First: a doorbell that is rung behind this is for what is armed now.
        self.drain();
        rx.arm_rx(ARM_TCP);
        tx.arm_tx(ARM_TCP);
        let ended = rx.dir().producer.flags(Relaxed).end() != EndState::Open;
        let wants = !app.is_shut && app.writing == Direction::Open;
        !(rx.has_data() || (ended && app.reading == Direction::Open) || (wants && tx.is_writable()))
    }

    /// Until bytes are there.
    pub(crate) fn wait_for_data(&self) {
        let [rx, _] = self.rings();
        self.drain();
        rx.arm_rx(ARM_TCP);
        while !rx.has_data() {
            wait(self.socket.as_ref().expect("a socket"));
            self.drain();
            rx.arm_rx(ARM_TCP);
        }
    }

    /// Until so many bytes are there, without a word to anybody.
    pub(crate) fn wait_for_data_of(&self, count: u64) {
        let begun = Instant::now();
        while (self.has_to_read() as u64) < count {
            assert!(begun.elapsed() < LIMIT, "{} of {count} bytes", self.has_to_read());
            thread::yield_now();
        }
    }

    /// One look. Whether anything was done.
    pub(super) fn step(&mut self) -> bool {
        let pair = self.pair;
        let producer = &pair.slot().dir[CLIENT].producer;
        let app = &mut self.application;
        if app.is_closed {
            return false;
        }
        let told = producer.flags(Acquire).end();
        app.reading = match told {
            EndState::Open => Direction::Open,
            EndState::Shut | EndState::Closed => Direction::Ended,
            EndState::Aborted => Direction::Reset,
        };
        let mut any = app.read(5000);
        any |= app.write(7000);
        if !app.is_shut && app.written == app.wants {
            app.is_shut = true;
            let own = &self.known().dir[ACCEPTOR].producer;
            let _ = own.shut();
            if let Some(socket) = &self.socket {
                // The peer may have reset it.
                let _ = socket.shutdown(std::net::Shutdown::Write);
            }
            any = true;
        } else if any {
            self.wake();
        }
        let app = &self.application;
        if app.is_at_end() && (app.is_shut || app.is_aborted()) {
            self.close();
            any = true;
        }
        any
    }

    /// As close(2) under the library.
    pub(crate) fn close(&mut self) {
        let _ = self.known().dir[ACCEPTOR].producer.close(false);
        self.drain();
        self.application.is_closed = true;
        self.socket = None;
        if !self.keeps_slot {
            self.let_go();
        }
    }

    /// It goes on by its socket, as the library does where a descriptor is passed on. The agent is not told by a doorbell.
    pub(crate) fn leave_ring(&self) {
        let sent = self.known().dir[ACCEPTOR].producer.bells_sent.load(Relaxed);
        self.leave_ring_behind(sent.into());
    }

    /// It sends by its socket from here on, as the library does once it has sent an urgent byte, and goes on reading the ring.
    pub(crate) fn send_by_kernel(&self) {
        let sent = self.known().dir[ACCEPTOR].producer.bells_sent.load(Relaxed);
        self.send_by_kernel_behind(sent.into());
    }

    fn send_by_kernel_behind(&self, sent: u64) {
        let [_, tx] = self.rings();
        let back = TxSpan::new(self.known(), ACCEPTOR).try_back(&tx, || Some(sent));
        assert_eq!(back, Ok(Back::Done));
    }

    /// The application leaves the ring, and says that it has sent so many bytes before.
    pub(crate) fn leave_ring_behind(&self, sent: u64) {
        self.send_by_kernel_behind(sent);
        let [rx, tx] = self.rings();
        let left = RxSpan::new(self.known(), ACCEPTOR).leave(&rx, &tx, false);
        assert_eq!(left, Leave::Left);
    }

    /// Nothing of it is in the slot any more.
    pub(crate) fn let_go(&self) {
        self.known().end[ACCEPTOR].refs.store(0, Release);
    }

    /// Until the agent has left the ring, of which it tells by a doorbell.
    pub(crate) fn wait_for_leave(&self) {
        let is_left = || self.known().dir[ACCEPTOR].producer.flags(Acquire).is_left();
        while !is_left() {
            wait(self.socket.as_ref().expect("a socket"));
            self.drain();
        }
        assert!(self.known().dir[CLIENT].producer.flags(Acquire).has_left_other());
    }

    /// How much it has not read.
    pub(crate) fn has_to_read(&self) -> usize {
        self.rings()[0].unread()
    }

    /// How much of what it has written was not read.
    pub(crate) fn unread(&self) -> usize {
        self.rings()[1].unread()
    }

    /// Ends its writing direction.
    pub(crate) fn shut(&mut self) {
        self.application.is_shut = true;
        let _ = self.known().dir[ACCEPTOR].producer.shut();
        let socket = self.socket.as_ref().expect("a socket");
        socket.shutdown(std::net::Shutdown::Write).expect("a socket");
    }

    /// As the kernel does it for a killed process.
    pub(crate) fn die(&mut self) {
        self.socket = None;
        self.application.is_closed = true;
    }
}
