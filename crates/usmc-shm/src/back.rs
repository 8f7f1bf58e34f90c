//! The way back: where a stream leaves the ring for the kernel's TCP again, for good.
//!
//! Either end can begin, and a direction has one author of it, whoever is first:
//!
//! - The *receiver* leaves ([`RxSpan::leave`], [`TXF_LEFT`]): it takes nothing more out of the ring. It makes sure that
//!   no doorbell is in the TCP stream nor comes any more; from then on whoever reads that stream, with the library or
//!   without it, reads the application's bytes. The sender, at its next look, sends by TCP what is unread in the ring.
//!   Or the leaver does it, if it can get at the sender's socket: then nobody waits for the sender's program.
//! - The *sender* goes back ([`TxSpan::try_back`], [`TXF_BACK`]): the receiver reads the ring to its end, then TCP from
//!   the byte `resume` on. What lies before that are doorbells.
//!
//! ```text
//!   TX_TCP ──▶ TX_RING ──▶ TX_BACK      (or stays TX_TCP, RETURNED being set)
//! ```
//!
//! Where the receiver has not even seen the switch yet, the sender leaves the ring on its behalf ([`BY_SENDER`]).
//!
//! A sender that goes back because its direction ends may leave *copies* by TCP of what is unread in the ring
//! ([`Producer::copied`]), for after the FIN nobody could send it again. A receiver that reads the ring to its end skips
//! them. One that leaves instead skips those of what it has read ([`RxSpan::copies`]), and whoever comes next reads
//! the others.
//!
//! [`Producer::copied`]: crate::layout::Producer::copied
//!
//! In [`TX_BACK`] the sender's TCP is the kernel's own affair again; before it, and after [`RETURNED`], nobody sends.
//! Nothing waits in here; a caller that finds something in flight comes again.

use crate::bell::Rung;
use crate::layout::{
    ARM_LEFT, ARM_TCP, BY_SENDER, End, IN_FLIGHT, RETURNED, SWITCHING, Slot, TCP_AGAIN, TX_BACK,
    TX_TCP, TXF_BACK, TXF_COPIED, TXF_ENDS, TXF_LEFT, WINDOW_SHIFT_MAX,
};
use crate::ring::Ring;
use crate::span::{RxSpan, TcpSend, TxSpan, Unmeasured};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::sync::fence;

/// How far a sending direction's way back is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Back {
    /// It is TCP: the receiver knows what to read first.
    Done,
    /// The receiver has left: what the ring ([`Ring::data`]) holds from this cursor on is to be sent by TCP; then
    /// [`TxSpan::is_resent`] ends it.
    Resend(u64),
    /// A doorbell is in flight: come again.
    Busy,
}

/// A doorbell in flight that is sent for the other end, for as long as it lives.
struct BellForPeer<'a>(&'a End);

impl Drop for BellForPeer<'_> {
    fn drop(&mut self) {
        // Release: as at the end of a `TcpSend`.
        self.0.bells_for.fetch_sub(1, Release);
    }
}

impl<'a> TxSpan<'a> {
    /// Rings for those whose arm bits `take` takes, by `send`, which puts one byte into the direction's TCP stream and
    /// says whether it got there. Where the receiver has left, nobody is woken, and what was just published is to be
    /// sent by TCP.
    pub fn ring(&self, take: impl FnOnce() -> u32, send: impl FnOnce() -> bool) -> Rung {
        // AcqRel: begun before the bits are taken, see `RxSpan::leave`.
        let before = self.end.tcp_sends.fetch_add(1, AcqRel);
        // Its end pairs with the Acquire in `try_back` and `is_rung`; the byte is counted by us and by the kernel.
        let _in_flight = TcpSend(self.end);
        self.ring_unless_back(before, take, send)
    }

    /// The same by a process of the other end, which has got hold of this end's socket.
    pub fn ring_for(&self, take: impl FnOnce() -> u32, send: impl FnOnce() -> bool) -> Rung {
        self.end.bells_for.fetch_add(1, AcqRel);
        let _in_flight = BellForPeer(self.end);
        // Pairs with the fence in `try_back`: it sees this bell, or we see that it is too late for it.
        fence(SeqCst);
        let now = self.end.tcp_sends.load(Acquire);
        self.ring_unless_back(now, take, send)
    }

    fn ring_unless_back(
        &self,
        sends: u32,
        take: impl FnOnce() -> u32,
        send: impl FnOnce() -> bool,
    ) -> Rung {
        if sends & RETURNED != 0 {
            return Rung::Back;
        }
        let bits = take();
        // Relaxed: a thread that arms after the leave hands on what made it visible (all of them change the same word).
        if self.producer.flags.load(Relaxed) & TXF_LEFT != 0 {
            return Rung::Back;
        }
        if bits & ARM_TCP == 0 {
            return Rung::Nobody;
        }
        // Counted first: whoever finds a byte finds it counted.
        self.producer.bells_sent.fetch_add(1, AcqRel);
        if !send() {
            self.producer.bells_sent.fetch_sub(1, AcqRel);
        }
        Rung::Rung
    }

    /// Ends the ring span of `ring`, this direction's. The caller holds [`End::back_lock`] and calls again until it is
    /// [`Back::Done`]; it also holds the sending locks, unless it is the peer, which has left and does it for a sender
    /// that is elsewhere. `tcp_sent`: as for [`TxSpan::try_switch`].
    ///
    /// # Errors
    /// [`Unmeasured`] when the kernel did not tell.
    pub fn try_back(
        &self,
        ring: &Ring<'_>,
        tcp_sent: impl Fn() -> Option<u64>,
    ) -> Result<Back, Unmeasured> {
        // AcqRel: no doorbell and no switch begins after this, and what began before is counted.
        let before = self.end.tcp_sends.fetch_or(RETURNED, AcqRel);
        if before & SWITCHING == 0 {
            self.claim();
            return Ok(Back::Done);
        }
        // Acquire: as in `TxSpan::is_ring`.
        if self.producer.state.load(Acquire) == TX_BACK {
            return self.late(ring, tcp_sent);
        }
        self.finish(&tcp_sent)?;
        // Pairs with the fence in `ring_for`.
        fence(SeqCst);
        if is_rung(self.end) {
            return Ok(Back::Busy);
        }
        // A receiver that has not seen the switch may be in a read of TCP that takes what follows, too. Where it is so,
        // the ring is not read at all.
        // Release: pairs with the Acquire in `RxSpan::measure`.
        match self.peer.tcp_left.compare_exchange(0, BY_SENDER, Release, Relaxed) {
            Ok(_) | Err(BY_SENDER) => drop(self.producer.flags.fetch_or(TXF_LEFT, Release)),
            Err(_) => {}
        }
        let left = !self.claim();
        let sent = tcp_sent().ok_or(Unmeasured)?;
        // A process that was killed before its doorbell was in the stream has counted one too many. None is in flight now.
        // (A FIN would be in the kernel's count, too: it never makes them more.)
        if self.producer.resume.load(Relaxed) == 0 {
            let boundary = self.producer.boundary.load(Relaxed).saturating_sub(1);
            let bells = sent.saturating_sub(boundary) as u32;
            let counted = self.producer.bells_sent.load(Relaxed);
            if counted.wrapping_sub(bells).cast_signed() > 0 {
                self.producer.bells_sent.store(bells, Relaxed);
            }
        }
        // Once: another process may have begun, and died while it sent.
        // Release: pairs with the Acquire in `RxSpan::drawn`; the doorbells are counted.
        let known =
            self.producer.resume.compare_exchange(0, sent.saturating_add(1), Release, Relaxed);
        if left {
            let resume = known.map_or_else(|resume| resume - 1, |_| sent);
            let read = ring.dir().consumer.cons.load(Acquire);
            return Ok(Back::Resend(read.wrapping_add(sent.saturating_sub(resume))));
        }
        // Release: pairs with the Acquire in `RxSpan::resume`.
        self.producer.state.store(TX_BACK, Release);
        Ok(Back::Done)
    }

    /// Before [`TxSpan::try_back`]: what is unread from cursor `from` on will be sent by TCP as well, right after it, and
    /// nothing follows. The caller holds the sending locks, and no other process has this end.
    pub fn announce_copies(&self, from: u64) {
        // Relaxed: published by the state.
        self.producer.copied.store(from.saturating_add(1), Relaxed);
    }

    /// After it: whether they are to be sent, [`TxSpan::has_copied`] being called then. Where the receiver was first, what
    /// is unread is sent again anyhow, and where the way back is not over there are none.
    pub fn is_to_copy(&self) -> bool {
        let is_first = self.producer.flags.load(Relaxed) & (TXF_BACK | TXF_LEFT) == TXF_BACK;
        let is_to = is_first && self.producer.state.load(Relaxed) == TX_BACK;
        if !is_to {
            self.producer.copied.store(0, Relaxed);
        }
        is_to
    }

    /// The copies end before cursor `upto`; the sender's kernel has them.
    pub fn has_copied(&self, upto: u64) {
        // Relaxed: published by the flag.
        self.producer.resent.store(upto, Relaxed);
        // Release: pairs with the Acquire in `RxSpan::copies`.
        self.producer.flags.fetch_or(TXF_COPIED, Release);
    }

    /// How many bytes were copied.
    pub fn copied(&self) -> u64 {
        match self.producer.flags.load(Relaxed) & TXF_COPIED {
            0 => 0,
            _ => {
                let from = self.producer.copied.load(Relaxed).saturating_sub(1);
                self.producer.resent.load(Relaxed).wrapping_sub(from)
            }
        }
    }

    /// Forgets the doorbells in flight of processes that died in the middle of one. No other process has this end, and no
    /// thread of the caller's is in [`TxSpan::ring`].
    pub fn forget_bells(&self) {
        self.end.tcp_sends.fetch_and(!IN_FLIGHT, AcqRel);
    }

    /// What a sender published while the peer ended its span. Another process may have begun to send that, and died in its
    /// send: what the kernel has got since is not sent twice.
    fn late(
        &self,
        ring: &Ring<'_>,
        tcp_sent: impl Fn() -> Option<u64>,
    ) -> Result<Back, Unmeasured> {
        let resent = self.producer.resent.load(Relaxed);
        let left = self.producer.flags.load(Relaxed) & TXF_LEFT != 0;
        // Acquire: the bytes are visible, if another has published them.
        let unsent = ring.dir().producer.prod.load(Acquire).wrapping_sub(resent);
        if !left || unsent == 0 {
            return Ok(Back::Done);
        }
        let sent = tcp_sent().ok_or(Unmeasured)?;
        // The receiver that left reads none of these words. In this order, for the sender may be killed between the two.
        let (place, cursor) = (&self.producer.behind, &self.producer.copied);
        let done = match cursor.load(Acquire).checked_sub(1) {
            Some(begun) if begun == resent => sent.wrapping_sub(place.load(Relaxed)).min(unsent),
            _ => {
                place.store(sent, Relaxed);
                // Release: pairs with the Acquire above.
                cursor.store(resent.saturating_add(1), Release);
                0
            }
        };
        Ok(Back::Resend(resent.wrapping_add(done)))
    }

    /// Everything before cursor `upto` was read or sent by TCP.
    pub fn is_resent(&self, upto: u64) {
        self.producer.resent.store(upto, Relaxed);
        self.producer.state.store(TX_BACK, Release);
    }

    /// Says that the sender was first; false where the receiver was.
    fn claim(&self) -> bool {
        let unless_left = |flags| (flags & TXF_LEFT == 0).then_some(flags | TXF_BACK);
        // Release: pairs with the Acquire in `RxSpan::resume`; RETURNED is visible. Acquire: what the receiver left.
        self.producer.flags.fetch_update(AcqRel, Acquire, unless_left).is_ok()
    }

    /// Whether a byte of this end is on its way into TCP.
    pub fn is_rung(&self) -> bool {
        is_rung(self.end)
    }

    /// Whether the direction's TCP is the kernel's own again.
    pub fn is_back(&self) -> bool {
        let sends = self.end.tcp_sends.load(Acquire);
        sends & RETURNED != 0
            && (sends & SWITCHING == 0 || self.producer.state.load(Acquire) == TX_BACK)
    }
}

/// Whether a doorbell of this end is in flight, or a TCP send.
fn is_rung(end: &End) -> bool {
    // Acquire: pairs with the Release at the end of each doorbell.
    end.tcp_sends.load(Acquire) & IN_FLIGHT != 0 || end.bells_for.load(Acquire) != 0
}

/// What became of [`RxSpan::leave`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leave {
    /// The receiver has left. No doorbell begins any more; see [`RxSpan::is_rung`] for those that did.
    Left,
    /// The sender was first: the ring has to be read to its end.
    SenderFirst,
    /// Something is unread, and its sender has ended its direction: nobody can send it by TCP.
    Unread,
}

/// What a sender that has ended its direction has left by TCP of what stood in the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copies {
    /// How many bytes, at most a ring's.
    pub all: u64,
    /// How many of them were read in the ring.
    pub read: u64,
    /// The ring's end.
    pub end: u64,
    /// Whether the sender's kernel has them.
    pub is_over: bool,
    /// Whether they go to the ring's end: the kernel may not have had room.
    pub is_whole: bool,
}

/// Where the bytes are that follow the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resume {
    /// The sender has not gone back.
    Not,
    /// Behind so many bytes of TCP.
    At(u64),
    /// It never was in the ring: TCP, from the first byte.
    AtOnce,
}

impl<'a> RxSpan<'a> {
    /// The receiver reads nothing more out of `rx`, the ring of this direction. The caller holds the receiving locks and
    /// has read TCP to the boundary, if there is one; `before`: it has not, so that bytes stand before the doorbells,
    /// which have to be sent again behind them. `tx` is the other direction's ring: a sleeper for room there is not
    /// woken any more.
    pub fn leave(&self, rx: &Ring<'_>, tx: &Ring<'_>, before: bool) -> Leave {
        let mut refused = Leave::SenderFirst;
        let left = self.producer.flags.fetch_update(AcqRel, Acquire, |flags| {
            if flags & TXF_BACK != 0 {
                refused = Leave::SenderFirst;
                return None;
            }
            // The end of a direction is published after its last byte, and its last doorbell.
            let unread = || rx.has_data() || (before && self.unheard() > 0);
            if flags & TXF_ENDS != 0 && flags & TXF_LEFT == 0 && unread() {
                refused = Leave::Unread;
                return None;
            }
            Some(flags | TXF_LEFT)
        });
        if left.is_err() {
            return refused;
        }
        self.end.tcp_left.store(TCP_AGAIN, Relaxed);
        // AcqRel: a thread that takes bits after this sees TXF_LEFT; of one that took them before it, the doorbell has begun.
        rx.dir().arm.rx.swap(ARM_LEFT, AcqRel);
        tx.dir().arm.tx.swap(0, AcqRel);
        // Pairs with the fence in `Ring::has_rx_sleepers`: the sender sees ARM_LEFT, or we see its bytes.
        fence(SeqCst);
        Leave::Left
    }

    /// After [`RxSpan::leave`]: whether a doorbell of the sender is in flight. Once none is, none comes any more, and
    /// [`RxSpan::unheard`] bytes are to be taken out of the TCP stream.
    pub fn is_rung(&self, slot: &Slot, me: usize) -> bool {
        let end = &slot.end[!me & 1];
        // Outside the ring these are not doorbells.
        end.tcp_sends.load(Relaxed) & SWITCHING != 0 && is_rung(end)
    }

    /// Doorbells rung and not taken out of the TCP stream.
    pub fn unheard(&self) -> u32 {
        let sent = self.producer.bells_sent.load(Acquire);
        sent.wrapping_sub(self.end.bells_drained.load(Relaxed))
    }

    /// Where the bytes are that follow the ring; asked before the last look at the ring.
    pub fn resume(&self) -> Resume {
        // Acquire: pairs with the Release in `try_back` and `claim`; the ring's last byte and `resume` are visible.
        let flags = self.producer.flags.load(Acquire);
        match self.producer.state.load(Acquire) {
            _ if flags & TXF_BACK == 0 => Resume::Not,
            TX_BACK => Resume::At(self.producer.resume.load(Relaxed).saturating_sub(1)),
            TX_TCP => Resume::AtOnce,
            _ => Resume::Not,
        }
    }

    /// Whether the sender leaves copies, or has left some.
    pub fn has_copies(&self) -> bool {
        self.producer.copied.load(Relaxed) != 0
    }

    /// The bytes of TCP behind [`Resume::At`] that are in the ring `rx` as well. `None` where there are none, or not yet, or
    /// what is there cannot be right.
    pub fn copies(&self, rx: &Ring<'_>) -> Option<Copies> {
        // Acquire: pairs with the Release in `has_copied`.
        let flags = self.producer.flags.load(Acquire);
        // Acquire: pairs with the Release in `try_back`; `copied` is visible, and the ring's last byte.
        let is_back = self.producer.state.load(Acquire) == TX_BACK;
        if flags & (TXF_BACK | TXF_LEFT) != TXF_BACK || !is_back {
            return None;
        }
        let from = self.producer.copied.load(Relaxed).checked_sub(1)?;
        let (read, end) = (rx.read(), self.producer.prod.load(Relaxed));
        // Until the sender says how far it came nothing but copies follows.
        let is_over = flags & TXF_COPIED != 0;
        let upto = if is_over { self.producer.resent.load(Relaxed) } else { end };
        let [most, all] = [end, upto].map(|at| at.wrapping_sub(from));
        let unread = end.wrapping_sub(read);
        let is_right = most <= 2 << WINDOW_SHIFT_MAX && all <= most && unread <= most;
        let is_whole = is_over && upto == end;
        is_right.then(|| Copies { all, read: all.min(most - unread), end, is_over, is_whole })
    }

    /// The next bytes are TCP's, for good: all doorbells are taken out.
    pub fn to_tcp(&self) {
        let sent = self.producer.bells_sent.load(Acquire);
        self.end.bells_drained.store(sent, Relaxed);
        self.end.tcp_left.store(TCP_AGAIN, Relaxed);
    }

    /// The same while doorbells are there: this end looks for them as if the sender had been first to see ([`BY_SENDER`]).
    pub fn to_tcp_around_bells(&self) {
        self.end.tcp_left.store(BY_SENDER, Relaxed);
    }

    /// Whether the sender has left the ring on our behalf, and doorbells (or the TCP span before them) are still there.
    pub fn is_by_sender(&self) -> bool {
        self.end.tcp_left.load(Relaxed) == BY_SENDER
    }

    /// Whether the next bytes are TCP's, for good.
    pub fn is_tcp(&self) -> bool {
        self.end.tcp_left.load(Relaxed) == TCP_AGAIN
    }
}
