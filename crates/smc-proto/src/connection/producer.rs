//! The writing side: credits in the peer's ring, and the flags that ask for more.

use crate::cursor::{Cursor, CursorError};
use crate::wire::cdc::ProducerFlags;

/// What this side has written into the peer's ring, and how much of it the peer has consumed.
#[derive(Clone, Debug)]
pub struct Producer {
    size: u32,
    produced: Cursor,
    consumed: Cursor,
    /// Up to where what was written is known to have arrived (SMC-R).
    arrived: Cursor,
    in_flight: u32,
    write_blocked: bool,
    update_requested: bool,
    urgent: Urgent,
}

/// One contiguous part of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Piece {
    /// Offset from the start of the ring, in bytes.
    pub offset: u32,
    /// Length in bytes; 0 if there is no such part.
    pub len: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Urgent {
    None,
    /// There was no room for the urgent byte: the peer is told that it will come.
    Pending,
    /// The byte before the producer cursor is urgent; nothing may be written until the peer has
    /// consumed it, since the mark is the cursor.
    Present,
    /// As before, and a message has said so.
    Told,
}

impl Producer {
    /// `size`: 0 as long as the peer's ring is not known; there is no room in it.
    pub(super) fn new(size: u32) -> Producer {
        Producer {
            size,
            produced: Cursor::default(),
            consumed: Cursor::default(),
            arrived: Cursor::default(),
            in_flight: 0,
            write_blocked: false,
            update_requested: false,
            urgent: Urgent::None,
        }
    }

    /// The peer has a ring of this size: a writer that waited for room has some.
    pub(super) fn has_ring(&mut self, size: u32) {
        (self.size, self.write_blocked) = (size, false);
    }

    /// Bytes that may be written now.
    pub fn room(&self) -> u32 {
        match self.urgent {
            Urgent::Present | Urgent::Told => 0,
            Urgent::None | Urgent::Pending => self.size - self.in_flight,
        }
    }

    /// Bytes that the peer has not consumed.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Up to where this side has written.
    pub fn cursor(&self) -> Cursor {
        self.produced
    }

    /// Where the next `len` bytes go: up to the end of the ring, and on from its start. At most
    /// [`Producer::room`] bytes are given.
    pub fn pieces(&self, len: u32) -> [Piece; 2] {
        pieces(self.produced, len.min(self.room()), self.size)
    }

    /// What has to be written again over another link after one was lost, before the next CDC
    /// message: all that is neither known to have arrived nor consumed.
    pub fn unconfirmed(&self) -> [Piece; 2] {
        match self.produced.since(self.arrived, self.size) {
            Ok(len) if len <= self.in_flight => pieces(self.arrived, len, self.size),
            _ => pieces(self.consumed, self.in_flight, self.size),
        }
    }

    /// `len` bytes stand where [`Producer::pieces`] said. False, and nothing changes, if that is
    /// more than there was room for.
    #[must_use]
    pub fn produce(&mut self, len: u32) -> bool {
        // Without a ring there is no place to advance to.
        if len == 0 || len > self.room() {
            return len == 0;
        }
        self.produced = self.produced.advanced(len, self.size);
        self.in_flight += len;
        self.write_blocked = false;
        true
    }

    /// As [`Producer::produce`], and the last of the bytes is urgent (MSG_OOB). Without room the
    /// next CDC message says that urgent data is to come.
    #[must_use]
    pub fn produce_urgent(&mut self, len: u32) -> bool {
        if len == 0 || !self.produce(len) {
            if self.urgent == Urgent::None {
                self.urgent = Urgent::Pending;
            }
            return false;
        }
        self.urgent = Urgent::Present;
        true
    }

    /// The application has more to write than there is room: the next CDC message says so, and the
    /// peer sends its cursor as soon as it has read.
    pub fn block(&mut self) {
        self.write_blocked = true;
    }

    /// Asks for the peer's cursor, however little it has read since it sent one (RFC 7609 section 4):
    /// every CDC message does, until there is more room or nothing left to read.
    pub fn request_update(&mut self) {
        self.update_requested = self.in_flight > 0;
    }

    /// The flags for a CDC message.
    pub fn flags(&self) -> ProducerFlags {
        ProducerFlags {
            write_blocked: self.write_blocked,
            // The kernel sets "pending" also when the byte is there.
            urgent_pending: matches!(self.urgent, Urgent::Pending | Urgent::Present),
            urgent_present: self.urgent == Urgent::Present,
            update_requested: self.update_requested,
            failover_validation: false,
        }
    }

    /// A message with this cursor, and so all that was written before it, has arrived.
    pub(super) fn on_arrived(&mut self, cursor: Cursor) {
        self.arrived = cursor;
    }

    /// A message with [`Producer::flags`] is on its way: urgent data is told of once.
    pub(super) fn told(&mut self) {
        if self.urgent == Urgent::Present {
            self.urgent = Urgent::Told;
        }
    }

    /// That message may be lost.
    pub(super) fn untold(&mut self) {
        if self.urgent == Urgent::Told {
            self.urgent = Urgent::Present;
        }
    }

    /// The peer's consumer cursor. Gives the bytes that can be written now and could not before.
    pub(super) fn on_consumed(&mut self, cursor: Cursor) -> Result<u32, CursorError> {
        if self.size == 0 && cursor == Cursor::default() {
            // Nothing can have been sent, and so nothing was read.
            return Ok(0);
        }
        let freed = cursor.since(self.consumed, self.size)?;
        let Some(in_flight) = self.in_flight.checked_sub(freed) else {
            let (old, new) = (self.produced, cursor);
            return Err(CursorError::TooFar { old, new, size: self.size });
        };
        let before = self.room();
        self.in_flight = in_flight;
        self.consumed = cursor;
        if freed > 0 || in_flight == 0 {
            self.update_requested = false;
        }
        if in_flight == 0 && matches!(self.urgent, Urgent::Present | Urgent::Told) {
            self.urgent = Urgent::None;
        }
        Ok(self.room() - before)
    }
}

/// The parts of a ring of `size` bytes that `len` bytes from `at` on occupy; `len <= size`.
pub(super) fn pieces(at: Cursor, len: u32, size: u32) -> [Piece; 2] {
    let first = len.min(size - at.count);
    [Piece { offset: at.count, len: first }, Piece { offset: 0, len: len - first }]
}
