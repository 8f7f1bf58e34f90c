//! The agent's end of a connection inside the host, which stands for one to another host: the slot, and the socket that wakes.
//!
//! To the application the agent is the peer of a slot as any other: doorbells are single bytes on the socket, an end is said by flags in the
//! slot and then by the kernel's FIN or RST, and a death is one of these without flags.
//!
//! How the agent finds out what the application has done with its rings:
//!
//! ```text
//!         work                 idle for a while, or the agent is about to sleep
//!   Hot ◀────── Cold      Hot ──────────▶ Armed ──────────▶ Cold
//!    ▲                                      │   once more
//!    └──────────────── work ────────────────┘
//! ```
//!
//! A hot one is looked at in each turn; how far it has read is looked at where the peer may have to hear of that. An armed one is looked at
//! as well, and the application rings for what it does next. A cold one is not looked at before the application rings, or something comes
//! for it: it costs nothing.

mod relay;

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Instant;

use relay::Relay;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt};
use rustix::thread::sched_getcpu;
use usmc_shm::bell::Rung;
use usmc_shm::handshake::{self, SlotState, Use};
use usmc_shm::layout::{ACCEPTOR, ARM_EAR, ARM_TCP, CLIENT, Slot};
use usmc_shm::ring::Ring;
use usmc_shm::segment::RingPair;
use usmc_shm::span::{RxSpan, TxSpan};
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use crate::rest::{Rest, Watch};
use crate::sys;

/// Bytes that are read at once: doorbells are few.
const BELLS: usize = 256;
/// Reads of one look. A process that sends more has the rest looked at with its next byte.
const READS: usize = 16;

/// Bytes of the largest ring: so many are moved in one look at most, as an application that moves its cursors meanwhile has no end.
const RING: usize = 1 << 22;

/// Bytes that are sent at once.
const CHUNK: usize = 1 << 16;

/// Whether a connection is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Heat {
    /// In each turn. Whether it had work since the last sweep.
    Hot { has_worked: bool },
    /// In each turn, until the next sweep; the application rings.
    Armed,
    /// The application rings.
    Cold,
}

/// What a look at the socket has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Heard {
    /// Doorbells, or nothing.
    Bells,
    /// Bytes that are none.
    Junk,
    /// A FIN.
    End,
    /// A RST, or another error.
    Error,
}

/// How far what an application has left went by TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flushed {
    All,
    /// The kernel has no room for the rest.
    NotAll,
    /// The rest cannot go there: the connection is no more, or the process has spoilt its ring.
    Never,
}

/// What was done to wake what sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rang {
    /// Nothing sleeps that can be woken.
    Nobody,
    /// It has a doorbell.
    Bell,
    /// Its ear is to be rung ([`Deputy::ear`]), or a doorbell where that is none.
    Ear,
}

/// Cursors and flags of the application, as they were at the last look. How far it has read is of the last look at that.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Seen {
    written: u64,
    read: u64,
    flags: u32,
    /// It is on its way out of the ring.
    returns: bool,
}

/// A connection's slot and socket.
pub(crate) struct Deputy {
    pair: RingPair,
    /// `None` once it was reset.
    socket: Option<OwnedFd>,
    watch: Option<Watch>,
    seen: Seen,
    pub(crate) heat: Heat,
    /// Whether the process may have the agent's ear of the room.
    pub(crate) has_ear: bool,
    /// When it is looked at next, of an application that [reads in silence](Deputy::reads_in_silence).
    pub(crate) looked_at: Option<Instant>,
    /// When such an application last did something, or its kernel was last asked whether it is there.
    pub(crate) lived_at: Instant,
    /// What the engine knows of the application's end.
    pub(crate) told: EndState,
    /// What the application knows of the peer's.
    said: EndState,
    relay: Relay,
    /// Whether the socket was given its part of that: not before the process has its answer.
    speaks: bool,
}

impl Deputy {
    /// The slot is the caller's, and was prepared.
    pub(crate) fn new(pair: RingPair, socket: OwnedFd) -> Deputy {
        prepare(&socket);
        Deputy {
            pair,
            socket: Some(socket),
            watch: None,
            seen: Seen::default(),
            heat: Heat::Cold,
            has_ear: false,
            looked_at: None,
            lived_at: Instant::now(),
            relay: Relay::default(),
            told: EndState::Open,
            said: EndState::Open,
            speaks: false,
        }
    }

    /// Listens at the socket. False where it was reset.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub(crate) fn watch(&mut self, rest: &Rest, number: u64) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        self.watch = Some(rest.watch_edges(socket, number)?);
        Ok(true)
    }

    /// Whether a byte can reach the application: nothing has ended that direction.
    pub(crate) fn can_ring(&self) -> bool {
        self.socket.is_some() && self.said == EndState::Open
    }

    pub(crate) fn slot(&self) -> &Slot {
        self.pair.slot()
    }

    /// The ring that the application reads, and the one that it writes.
    fn rings(&self) -> [Ring<'_>; 2] {
        [self.pair.ring(CLIENT), self.pair.ring(ACCEPTOR)]
    }

    /// How the application's end is.
    pub(crate) fn end(&self) -> EndState {
        match self.sends_by_kernel() {
            // By the kernel alone.
            true => self.told,
            false => self.slot().dir[ACCEPTOR].producer.flags(Acquire).end(),
        }
    }

    /// Whether the application has written or ended since the last look, or read, where that `is_of_interest`.
    pub(crate) fn has_news(&mut self, is_of_interest: bool) -> bool {
        let slot = self.slot();
        let producer = &slot.dir[ACCEPTOR].producer;
        // Relaxed: the bytes are read, and the end is taken, behind an Acquire.
        let now = Seen {
            written: producer.prod.load(Relaxed),
            read: match is_of_interest {
                true => slot.dir[CLIENT].consumer.cons.load(Relaxed),
                false => self.seen.read,
            },
            flags: producer.flags(Relaxed).end_bits(),
            returns: self.returns(),
        };
        let is_news = now != self.seen;
        self.seen = now;
        is_news
    }

    /// Whether the application reads the ring without a word: no doorbell goes where it has ended its writing direction, or sends by the
    /// kernel.
    pub(crate) fn reads_in_silence(&self) -> bool {
        let sends_by_kernel = self.told == EndState::Open && self.sends_by_kernel();
        self.told == EndState::Shut || (sends_by_kernel && self.reads_ring())
    }

    /// Whether the slot says that the application has closed.
    pub(crate) fn has_closed(&self) -> bool {
        self.slot().dir[ACCEPTOR].producer.flags(Acquire).end() >= EndState::Closed
    }

    /// Whether the application has left bytes unread.
    pub(crate) fn is_unread(&self) -> bool {
        self.pair.ring(CLIENT).has_data()
    }

    /// Asks the application to ring for what it does next; what it reads counts where `waits_for_reader`. A look follows.
    pub(crate) fn arm(&mut self, waits_for_reader: bool) {
        let [out, into] = self.rings();
        let bit = if self.has_ear { ARM_EAR } else { ARM_TCP };
        into.arm_rx(bit);
        if waits_for_reader {
            out.arm_tx(bit);
        }
        self.heat = Heat::Armed;
    }

    /// It has work: the application needs not to ring, as it is looked at. How it was before.
    pub(crate) fn works(&mut self) -> Heat {
        let before = std::mem::replace(&mut self.heat, Heat::Hot { has_worked: true });
        if !matches!(before, Heat::Hot { .. }) {
            // This thread alone arms.
            self.pair.ring(ACCEPTOR).disarm_rx();
        }
        before
    }

    /// Both ends have the slot from the start, and all that the agent sends goes by the ring.
    pub(crate) fn confirm(&self, usage: Use) {
        let slot = self.slot();
        // A process that scribbles finds its slot in whatever state it has made of it.
        let is_attached = handshake::attach(&slot.control, usage, std::process::id(), 0);
        if is_attached == SlotState::Attached {
            let _ = handshake::confirm(&slot.control, usage);
        }
        let _ = TxSpan::new(slot, CLIENT).try_switch(|| Some(0));
        // Nothing is before the application's ring.
        RxSpan::new(slot, CLIENT).note_read();
    }

    /// The process has its answer: what was said meanwhile follows.
    pub(crate) fn begin(&mut self) {
        self.speaks = true;
        self.tell_kernel();
    }

    /// Takes nothing out of the application's ring any more, and wakes its processes.
    pub(crate) fn leave(&self) {
        let (slot, [out, into]) = (self.slot(), self.rings());
        // Also of a direction that has ended: its process finds that there is nothing to be read.
        slot.dir[ACCEPTOR].producer.leave_for_receiver();
        let _ = RxSpan::new(slot, CLIENT).leave(&into, &out, false);
        slot.dir[CLIENT].producer.say_left_other();
        self.ring(|[out, into]| {
            let _ = out.take_rx_sleepers(false) | into.take_tx_sleepers(false);
            ARM_TCP
        });
    }

    /// Sends what the application has written and the agent has not read, as far as the kernel has room for it. Nobody writes any more.
    pub(crate) fn flush(&self, tcp: &TcpStream) -> Flushed {
        let into = self.pair.ring(ACCEPTOR);
        // A process that writes on all the same has no end.
        let mut left = RING;
        loop {
            let Ok(data) = into.data() else { return Flushed::Never };
            if data.len == 0 {
                return Flushed::All;
            }
            if left == 0 {
                return Flushed::NotAll;
            }
            let mut bytes = vec![0; data.len.min(CHUNK).min(left)];
            // SAFETY: so many bytes of what is there. A process that writes there all the same spoils its own.
            unsafe { into.copy_out(data.cons, data.place, bytes.as_mut_ptr(), bytes.len()) };
            match send(tcp, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    left -= sent;
                    into.consume(data.cons.wrapping_add(sent as u64));
                }
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Flushed::NotAll,
                Err(_) => return Flushed::Never,
            }
        }
    }

    /// How far the agent has read.
    pub(crate) fn read(&self) -> u64 {
        self.pair.ring(ACCEPTOR).read()
    }

    /// Wakes what sleeps for bytes.
    pub(crate) fn wake_reader(&self) -> Rang {
        match self.pair.ring(CLIENT).has_rx_sleepers() {
            true => self.ring(|[out, _]| out.take_rx_sleepers(false)),
            false => Rang::Nobody,
        }
    }

    /// Wakes what sleeps for room, where there is room worth waking for.
    pub(crate) fn wake_writer(&self) -> Rang {
        let into = self.pair.ring(ACCEPTOR);
        match into.has_tx_sleepers() && into.is_writable() {
            true => self.ring(|[_, into]| into.take_tx_sleepers(false)),
            false => Rang::Nobody,
        }
    }

    /// The ear of what sleeps, as the process says ([`usmc_shm::agent::Request::Ear`]).
    pub(crate) fn ear(&self) -> Option<u32> {
        self.slot().end[ACCEPTOR].hearer()
    }

    /// Wakes what sleeps by a doorbell, as its ear hears nothing.
    pub(crate) fn ring_bell(&self) {
        self.ring(|_| ARM_TCP);
    }

    /// Makes the kernel of a process that was killed answer, if it has ended its direction before: its FIN is here already. A byte that is
    /// not taken does it, be it an earlier one.
    pub(crate) fn provoke(&self) {
        let slot = self.slot();
        let sent = slot.dir[CLIENT].producer.bells_sent.load(Relaxed);
        if sent == slot.end[ACCEPTOR].bells_drained.load(Relaxed) {
            self.ring(|[out, _]| out.take_rx_sleepers(false) | ARM_TCP);
        }
    }

    fn ring(&self, take: impl FnOnce(&[Ring<'_>; 2]) -> u32) -> Rang {
        // Behind a FIN none can follow. Before the answer the process does not sleep there.
        if !self.speaks || self.said != EndState::Open {
            return Rang::Nobody;
        }
        let Some(socket) = &self.socket else { return Rang::Nobody };
        self.say_processor();
        let byte = || send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok();
        let mut bits = 0;
        let take = || {
            bits = take(&self.rings());
            bits
        };
        match TxSpan::new(self.slot(), CLIENT).ring(take, byte) {
            // A doorbell wakes each set, too.
            Rung::Rung => Rang::Bell,
            Rung::Nobody if bits & ARM_EAR != 0 => Rang::Ear,
            Rung::Nobody | Rung::Back => Rang::Nobody,
        }
    }

    /// Where the agent runs: an application that waits on that processor gives it away at each look.
    pub(crate) fn say_processor(&self) {
        let (cpu, said) = (sched_getcpu() as u32 + 1, &self.slot().dir[CLIENT].producer.cpu);
        if said.load(Relaxed) != cpu {
            said.store(cpu, Relaxed);
        }
    }

    /// Reads what is on the socket. The look at the ring comes behind it: no doorbell is another thread's.
    ///
    /// `ends`: there may be an end behind what is found at first.
    pub(crate) fn listen(&mut self, ends: bool) -> Heard {
        let slot = self.slot();
        let Some(socket) = &self.socket else { return Heard::Bells };
        let (mut heard, mut came) = (Heard::Bells, 0);
        let mut excess = Vec::new();
        for _ in 0..READS {
            // What follows the ring is not read here.
            if slot.dir[ACCEPTOR].producer.flags(Acquire).goes_back() {
                break;
            }
            let mut bytes = [0; BELLS];
            match recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    heard = Heard::End;
                    break;
                }
                Ok((n, _)) => {
                    came += n as u64;
                    // Acquire: what a bell was rung for is found by the look that follows. They are counted before they are sent.
                    let sent = slot.dir[ACCEPTOR].producer.bells_sent.load(Acquire);
                    let drained = &slot.end[CLIENT].bells_drained;
                    let rung = sent.wrapping_sub(drained.load(Relaxed)).min(n as u32);
                    drained.fetch_add(rung, Relaxed);
                    excess.extend_from_slice(bytes.get(rung as usize..n).unwrap_or_default());
                    // What comes behind a short read is told anew.
                    if n < bytes.len() && !ends {
                        break;
                    }
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR) => {}
                Err(_) => {
                    heard = Heard::Error;
                    break;
                }
            }
        }
        self.relay.came += came;
        if !excess.is_empty() && !self.stash(&excess) {
            return Heard::Junk;
        }
        heard
    }

    /// Whether the application was told that the peer has closed, and so nobody reads what it sends.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        self.said == EndState::Closed
    }

    /// Says in the slot how the peer's end is, and then by the kernel. It never goes back.
    pub(crate) fn say(&mut self, end: EndState) {
        if end <= self.said {
            return;
        }
        let own = &self.slot().dir[CLIENT].producer;
        let _ = match end {
            EndState::Open => return,
            EndState::Shut => own.shut(),
            EndState::Closed => own.close(false),
            EndState::Aborted => own.close(true),
        };
        self.said = end;
        self.tell_kernel();
    }

    fn tell_kernel(&mut self) {
        let Some(socket) = &self.socket else { return };
        match self.said {
            _ if !self.speaks => {}
            EndState::Open => {}
            // Behind the last byte ([`Deputy::relay`]).
            EndState::Shut | EndState::Closed if self.is_relayed() => {}
            // The second time it does nothing.
            EndState::Shut | EndState::Closed => _ = shutdown(socket, Shutdown::Write),
            EndState::Aborted => self.reset(),
        }
    }

    /// Ends the socket by a RST.
    pub(crate) fn reset(&mut self) {
        if let Some(socket) = &self.socket {
            let _ = sockopt::set_socket_linger(socket, Some(std::time::Duration::ZERO));
        }
        self.let_go();
    }

    /// Closes the socket, which its process may have kept.
    fn let_go(&mut self) {
        let (socket, watch) = (self.socket.take(), self.watch.take());
        if let (Some(socket), Some(watch)) = (socket, watch) {
            watch.end(socket);
        }
    }
}

impl Drop for Deputy {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Options of the agent's end of a connection inside the host.
fn prepare(socket: &OwnedFd) {
    // An urgent byte has its place among the others; [`Deputy::relay`] looks for the mark.
    let _ = sockopt::set_socket_oobinline(socket, true);
    // A doorbell would wait until the one before is acknowledged, for 40 ms where nothing goes back.
    let _ = sockopt::set_tcp_nodelay(socket, true);
    sys::close_at_once(socket);
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn no_doorbell_waits_for_the_one_before() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let one = TcpStream::connect(listener.local_addr().expect("a port")).expect("TCP");
        let (mut other, _) = listener.accept().expect("TCP");
        let socket = OwnedFd::from(one);
        prepare(&socket);
        other.set_nonblocking(true).expect("a socket");
        let knock = |other: &mut TcpStream, rounds: &str| {
            assert_eq!(send(&socket, &[0], SendFlags::empty()), Ok(1));
            assert_eq!(other.read(&mut [0; 2]).expect("it is there at once"), 1, "{rounds}");
        };
        // The kernel acknowledges late where something went back lately.
        for _ in 0..20 {
            knock(&mut other, "answered");
            other.write_all(&[0]).expect("room");
            assert_eq!(
                recv(&socket, &mut [0; 2], RecvFlags::empty()).map(|(count, _)| count),
                Ok(1)
            );
        }
        (0..3).for_each(|_| knock(&mut other, "not answered"));
    }
}
