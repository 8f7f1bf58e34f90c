//! Where a stream leaves the kernel's TCP for the ring: exactly after byte `boundary`.
//!
//! The sender closes its direction to TCP sends, asks the kernel how many bytes TCP carries, publishes that
//! number and goes on in the ring ([`TxSpan`]). The receiver reads TCP up to that byte and then the ring
//! ([`RxSpan`]). Bytes that TCP carries beyond the boundary are doorbells, never data.
//!
//! The way back is [`crate::back`].
//!
//! Nobody waits in here. A switch that was begun is finished by whoever comes next, so its author may be
//! killed, stopped, or interrupted by a signal handler that sends on the same socket.

use crate::layout::{
    BY_SENDER, End, IN_FLIGHT, Producer, RETURNED, SWITCHING, Slot, TCP_AGAIN, TX_RING, TX_TCP,
    TXF_LEFT,
};
use crate::sync::Ordering::{Acquire, Relaxed, Release};

/// The kernel did not tell its byte count (the descriptor was closed meanwhile). Nothing was decided; the
/// next caller tries again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unmeasured;

/// The sending direction of one end.
#[derive(Clone, Copy)]
pub struct TxSpan<'a> {
    pub(crate) end: &'a End,
    pub(crate) peer: &'a End,
    pub(crate) producer: &'a Producer,
}

/// How the next bytes are sent.
pub enum Route<'a> {
    /// By a TCP send, during which the guard is kept.
    Tcp(TcpSend<'a>),
    /// Through the ring.
    Ring,
    /// The ring is over or ending ([`crate::back`]).
    Back,
}

/// What became of [`TxSpan::try_switch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Switch {
    /// The ring is the route from now on.
    Ring,
    /// Somebody is inside a TCP send, or the direction is to stay TCP; TCP remains the route.
    Busy,
}

/// A TCP send in flight, or a doorbell: the boundary cannot be drawn while it lives.
///
/// If its thread is killed the direction stays TCP for good, which is always correct.
#[must_use = "keep it until the TCP send has returned"]
pub struct TcpSend<'a>(pub(crate) &'a End);

impl Drop for TcpSend<'_> {
    /// One send or doorbell less, unless it was forgotten ([`TxSpan::forget_bells`]).
    #[inline]
    fn drop(&mut self) {
        let less = |sends: u32| (sends & IN_FLIGHT != 0).then(|| sends - 1);
        // Release: pairs with the Acquire in `try_switch`; the kernel's count includes this send.
        let _ = self.0.tcp_sends.fetch_update(Release, Relaxed, less);
    }
}

impl<'a> TxSpan<'a> {
    /// The direction that end `me` (`CLIENT` or `ACCEPTOR`) sends.
    pub fn new(slot: &'a Slot, me: usize) -> TxSpan<'a> {
        let (end, peer) = (&slot.end[me & 1], &slot.end[!me & 1]);
        TxSpan { end, peer, producer: &slot.dir[me & 1].producer }
    }

    /// Whether the direction has switched; the hot path asks this and nothing else.
    #[inline(always)]
    pub fn is_ring(&self) -> bool {
        // Acquire: pairs with the Release in `finish`; whoever asks for the boundary next finds it.
        self.producer.state.load(Acquire) == TX_RING
    }

    /// Asks for permission to send through TCP. `tcp_sent` is the kernel's count of all bytes ever handed
    /// to this socket's TCP, acknowledged or not; it is asked only when a switch is found unfinished.
    ///
    /// # Errors
    /// [`Unmeasured`] when `tcp_sent` answers `None`.
    #[inline]
    pub fn begin_tcp_send(
        &self,
        tcp_sent: impl FnOnce() -> Option<u64>,
    ) -> Result<Route<'a>, Unmeasured> {
        // Acquire: the send does not start before it is counted.
        let before = self.end.tcp_sends.fetch_add(1, Acquire);
        let guard = TcpSend(self.end);
        if before & SWITCHING == 0 {
            return Ok(Route::Tcp(guard));
        }
        drop(guard);
        if before & RETURNED != 0 {
            return Ok(Route::Back);
        }
        self.finish(tcp_sent)?;
        Ok(Route::Ring)
    }

    /// Moves the direction to the ring unless a TCP send is in flight. Called in the handshake's phase
    /// `Confirmed`, as often as the sender likes.
    ///
    /// # Errors
    /// [`Unmeasured`] when `tcp_sent` (see [`TxSpan::begin_tcp_send`]) answers `None`; TCP is closed
    /// then, and the next caller draws the boundary.
    pub fn try_switch(&self, tcp_sent: impl FnOnce() -> Option<u64>) -> Result<Switch, Unmeasured> {
        // Acquire: pairs with the Release at the end of each TCP send. From here on no send begins, since
        // `SWITCHING` is never taken back while the slot is in use.
        match self.end.tcp_sends.compare_exchange(0, SWITCHING, Acquire, Relaxed) {
            Err(sends) if sends & SWITCHING == 0 || sends & RETURNED != 0 => Ok(Switch::Busy),
            _ => self.finish(tcp_sent).map(|()| Switch::Ring),
        }
    }

    /// Draws the boundary. Any number of callers may do so at once: TCP is closed, so all of them measure
    /// the same, except one so late that doorbells already count; hence only the first answer is kept.
    pub(crate) fn finish(&self, tcp_sent: impl FnOnce() -> Option<u64>) -> Result<(), Unmeasured> {
        // Acquire: as in `is_ring`.
        if self.producer.state.load(Acquire) != TX_TCP {
            return Ok(());
        }
        let sent = tcp_sent().ok_or(Unmeasured)?;
        // Relaxed: published by the next line; a failure means that a boundary is there.
        let _ =
            self.producer.boundary.compare_exchange(0, sent.saturating_add(1), Relaxed, Relaxed);
        // Release: pairs with the Acquire in `RxSpan::boundary`. A failure: another was faster, and the direction
        // may be out of the ring again.
        let _ = self.producer.state.compare_exchange(TX_TCP, TX_RING, Release, Relaxed);
        Ok(())
    }
}

/// The receiving direction of one end. One thread at a time: the caller holds the receiving lock.
#[derive(Clone, Copy)]
pub struct RxSpan<'a> {
    pub(crate) end: &'a End,
    pub(crate) producer: &'a Producer,
}

/// Where the next bytes come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Read at most this many bytes from TCP, then call [`RxSpan::took_tcp`].
    Tcp(u64),
    /// TCP has been read to the boundary: the ring.
    Ring,
    /// The ring was over before this end saw it: so many bytes of TCP are doorbells, to be taken away.
    Bells(u64),
}

/// What a read of TCP has brought, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Bytes of the application.
    pub data: u64,
    /// Doorbells.
    pub bells: u64,
    /// Bytes of the application again.
    pub more: u64,
}

impl<'a> RxSpan<'a> {
    /// The direction that end `me` (`CLIENT` or `ACCEPTOR`) receives.
    pub fn new(slot: &'a Slot, me: usize) -> RxSpan<'a> {
        RxSpan { end: &slot.end[me & 1], producer: &slot.dir[!me & 1].producer }
    }

    /// Where the next bytes come from. `tcp_read` is the kernel's count of all bytes ever read from this
    /// socket's TCP; it is asked once, when the switch is first seen.
    ///
    /// After a peek (which takes nothing) ask again: what exceeds the answer is no data.
    ///
    /// # Errors
    /// [`Unmeasured`] when `tcp_read` answers `None`.
    #[inline(always)]
    pub fn source(&self, tcp_read: impl FnOnce() -> Option<u64>) -> Result<Source, Unmeasured> {
        // Relaxed: written under the receiving lock, but for BY_SENDER.
        match self.end.tcp_left.load(Relaxed) {
            0 | BY_SENDER => self.source_slow(tcp_read),
            1 => Ok(Source::Ring),
            left => Ok(Source::Tcp(left - 1)),
        }
    }

    #[cold]
    fn source_slow(&self, tcp_read: impl FnOnce() -> Option<u64>) -> Result<Source, Unmeasured> {
        let Some(boundary) = self.boundary() else { return Ok(Source::Tcp(u64::MAX)) };
        let read = tcp_read().ok_or(Unmeasured)?;
        let left = boundary.saturating_sub(read);
        if self.measure(boundary, read) {
            return Ok(if left == 0 { Source::Ring } else { Source::Tcp(left) });
        }
        Ok(match self.resumed(read) {
            _ if left > 0 => Source::Tcp(left),
            Some(bells) if bells > 0 => Source::Bells(bells),
            Some(_) => Source::Tcp(u64::MAX),
            // The sender is at it.
            None => Source::Bells(0),
        })
    }

    /// Accounts for `taken` bytes just read from TCP and says what they are: a read that began before the switch
    /// may have swallowed doorbells, and even the bytes that follow the ring.
    ///
    /// # Errors
    /// [`Unmeasured`] when `tcp_read` (see [`RxSpan::source`]) answers `None`.
    #[inline]
    pub fn took_tcp(
        &self,
        taken: u64,
        tcp_read: impl FnOnce() -> Option<u64>,
    ) -> Result<Taken, Unmeasured> {
        // Relaxed: as in `source`.
        match self.end.tcp_left.load(Relaxed) {
            TCP_AGAIN => Ok(Taken { data: taken, bells: 0, more: 0 }),
            0 | BY_SENDER => self.took_unknown(taken, tcp_read),
            left => {
                self.end.tcp_left.store(left.saturating_sub(taken).max(1), Relaxed);
                let data = taken.min(left - 1);
                Ok(Taken { data, bells: taken - data, more: 0 })
            }
        }
    }

    fn took_unknown(
        &self,
        taken: u64,
        tcp_read: impl FnOnce() -> Option<u64>,
    ) -> Result<Taken, Unmeasured> {
        let all = Taken { data: taken, bells: 0, more: 0 };
        // A doorbell is sent after the switch, so whoever has read one sees the switch here.
        let Some(boundary) = self.boundary() else { return Ok(all) };
        let read = tcp_read().ok_or(Unmeasured)?;
        let before = boundary.saturating_sub(read.saturating_sub(taken)).min(taken);
        if self.measure(boundary, read) {
            return Ok(Taken { data: before, bells: taken - before, more: 0 });
        }
        self.resumed(read);
        let more = self.drawn().map_or(0, |resume| read.saturating_sub(resume)).min(taken - before);
        Ok(Taken { data: before, bells: taken - before - more, more })
    }

    /// Length of the TCP span, once the sender has switched.
    pub fn boundary(&self) -> Option<u64> {
        // Acquire: pairs with the Release in `TxSpan::finish`; the boundary is visible.
        if self.producer.state.load(Acquire) == TX_TCP {
            return None;
        }
        Some(self.producer.boundary.load(Relaxed).saturating_sub(1))
    }

    /// Makes the next call measure again: to be called by whoever stole the receiving lock, since the dead
    /// holder may have read bytes it did not account for.
    pub fn recount(&self) {
        // Out of the ring there is nothing to be counted.
        let in_span = |left: u64| (left < BY_SENDER).then_some(0);
        let _ = self.end.tcp_left.fetch_update(Relaxed, Relaxed, in_span);
    }

    /// Notes that the span is read to its end, for a reader that did not live to see where that is.
    pub fn note_read(&self) {
        let _ = self.end.tcp_left.compare_exchange(0, 1, Relaxed, Relaxed);
    }

    /// Notes the bytes of the span not read yet, and the doorbells read in their place; false where the ring is not
    /// ours to read. Both follow from the kernel's count alone, so a reader that dies half-way leaves nothing wrong
    /// for the next holder of its lock.
    fn measure(&self, boundary: u64, read: u64) -> bool {
        // Relaxed: set before `tcp_left`, or by ourselves.
        if self.producer.flags.load(Relaxed) & TXF_LEFT != 0 {
            return false;
        }
        let (left, bells) = (boundary.saturating_sub(read), read.saturating_sub(boundary));
        // Acquire: pairs with the Release of the sender that was faster.
        let tcp_left = &self.end.tcp_left;
        if tcp_left.compare_exchange(0, left.saturating_add(1), Relaxed, Acquire).is_err() {
            return false;
        }
        self.end.bells_drained.store(bells as u32, Relaxed);
        true
    }

    /// How many doorbells are left before the bytes that follow the ring, where that is known. Notes it when none is.
    fn resumed(&self, read: u64) -> Option<u64> {
        let bells = self.drawn()?.saturating_sub(read);
        if bells == 0 {
            self.to_tcp();
        }
        Some(bells)
    }

    /// Bytes of the span that are still to be read, once they were measured; `None` where the ring is not in use.
    pub fn left(&self) -> Option<u64> {
        // Relaxed: as in `source`.
        match self.end.tcp_left.load(Relaxed) {
            0 => self.boundary().map(|_| u64::MAX),
            left if left >= BY_SENDER => None,
            left => Some(left - 1),
        }
    }

    /// Whether the sender has left the ring, and bytes that follow it are in TCP.
    pub fn is_resumed(&self) -> bool {
        self.drawn().is_some()
    }

    fn drawn(&self) -> Option<u64> {
        // Acquire: pairs with the Release in `TxSpan::try_back`.
        self.producer.resume.load(Acquire).checked_sub(1)
    }
}
