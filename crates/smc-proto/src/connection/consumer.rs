//! The reading side: what the peer has written, and when it has to hear how much was read.

use super::producer::{Piece, pieces};
use crate::cursor::{Cursor, CursorError};
use crate::wire::cdc::ProducerFlags;

/// What the peer has written into this side's ring, and how much of it was consumed.
#[derive(Clone, Debug)]
pub struct Consumer {
    size: u32,
    produced: Cursor,
    consumed: Cursor,
    available: u32,
    /// Bytes consumed that the peer does not know of.
    unconfirmed: u32,
    /// It has to hear of them now.
    due: bool,
    peer_blocked: bool,
    urgent: UrgentMark,
}

/// Urgent data in the ring.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum UrgentMark {
    /// There is none.
    #[default]
    None,
    /// The peer says that it will come.
    Announced,
    /// The urgent byte is the one before this cursor.
    At(Cursor),
}

/// A consumer cursor update is worth a message when this much was read, whatever the ring's size:
/// half of the kernel's least send buffer (`smc_core.h`: SOCK_MIN_SNDBUF / 2).
const UPDATE_MIN: u32 = 2304;

impl Consumer {
    pub(super) fn new(size: u32) -> Consumer {
        Consumer {
            size,
            produced: Cursor::default(),
            consumed: Cursor::default(),
            available: 0,
            unconfirmed: 0,
            due: false,
            peer_blocked: false,
            urgent: UrgentMark::None,
        }
    }

    /// Bytes that can be read now.
    pub fn available(&self) -> u32 {
        self.available
    }

    /// Up to where this side has read.
    pub fn cursor(&self) -> Cursor {
        self.consumed
    }

    /// Where the next `len` bytes to read are, at most [`Consumer::available`].
    pub fn pieces(&self, len: u32) -> [Piece; 2] {
        pieces(self.consumed, len.min(self.available), self.size)
    }

    /// Urgent data, until the byte is consumed.
    pub fn urgent(&self) -> UrgentMark {
        self.urgent
    }

    /// `len` bytes were read; no more are counted than were there. True: send CDC now.
    ///
    /// That is so when enough was read, a tenth of the ring and at least 2304 bytes, and the sender
    /// either waits for room or could use no more than half of the ring (`smc_tx_consumer_update`);
    /// and when the urgent byte was read, for which the sender stands still.
    #[must_use]
    pub fn consume(&mut self, len: u32) -> bool {
        let len = len.min(self.available);
        let urgent_read = match self.urgent {
            UrgentMark::At(mark) => {
                mark.since(self.consumed, self.size).is_ok_and(|distance| distance <= len)
            }
            UrgentMark::None | UrgentMark::Announced => false,
        };
        if urgent_read {
            self.urgent = UrgentMark::None;
        }
        self.consumed = self.consumed.advanced(len, self.size);
        self.available -= len;
        self.unconfirmed += len;
        let enough = self.unconfirmed > self.enough();
        let sender_free = self.size - self.unconfirmed - self.available;
        let update = enough && (self.peer_blocked || sender_free <= self.size / 2);
        // A ring smaller than the limit must not leave its writer waiting for ever.
        let starved = self.peer_blocked && self.available == 0 && sender_free == 0;
        if self.available == 0 {
            self.peer_blocked = false;
        }
        let due = update || urgent_read || (starved && self.unconfirmed > 0);
        self.due |= due;
        due
    }

    /// Bytes read that are worth a message.
    fn enough(&self) -> u32 {
        (self.size / 10).max(UPDATE_MIN)
    }

    /// Whether an update is due or may be, if the application has read all that has come ([`Consumer::consume`]). Otherwise nobody has to know
    /// how much it has read so far.
    pub fn may_be_due(&self) -> bool {
        let waits = self.peer_blocked || self.urgent != UrgentMark::None;
        self.due || waits || self.unconfirmed + self.available > self.enough()
    }

    /// Bytes read that the peer does not know of, as far as they were counted ([`Consumer::consume`]).
    /// The next CDC message tells it, the one of a close as well; the peer's own send buffer and a lingering close do not wait for that (`smc_close.c`).
    pub fn unconfirmed(&self) -> u32 {
        self.unconfirmed
    }

    /// Whether the peer has said that it waits for room.
    pub fn peer_waits(&self) -> bool {
        self.peer_blocked
    }

    /// Whether the peer has to hear now how much was read.
    pub fn is_due(&self) -> bool {
        self.due
    }

    /// The peer asks how much was read.
    pub(super) fn ask(&mut self) {
        self.due = true;
    }

    /// A CDC message with the cursor is about to be sent.
    pub(super) fn confirm(&mut self) -> Cursor {
        (self.unconfirmed, self.due) = (0, false);
        self.consumed
    }

    /// The peer's producer cursor and flags. Gives the bytes that came, and whether the last of
    /// them is urgent.
    pub(super) fn on_produced(
        &mut self,
        cursor: Cursor,
        flags: ProducerFlags,
    ) -> Result<(u32, bool), CursorError> {
        let came = cursor.since(self.produced, self.size)?;
        // The peer may only use the room that it was told of.
        if came > self.size - self.available - self.unconfirmed {
            return Err(CursorError::TooFar { old: self.produced, new: cursor, size: self.size });
        }
        self.produced = cursor;
        self.available += came;
        self.peer_blocked = flags.write_blocked;
        let urgent = came > 0 && flags.urgent_present;
        if urgent {
            self.urgent = UrgentMark::At(cursor);
        } else if came == 0 && flags.urgent_pending && self.urgent == UrgentMark::None {
            self.urgent = UrgentMark::Announced;
        }
        Ok((came, urgent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes come and are read by turns, of many lengths. Where no update may be due, none is, whatever is read.
    #[test]
    fn no_update_is_due_where_none_may_be() {
        let mut sides = [0; 2];
        for (size, blocks) in [(4096, false), (16_384, false), (16_384, true), (1 << 20, false)] {
            let mut consumer = Consumer::new(size);
            let mut produced = Cursor::default();
            for turn in 1..2000_u32 {
                let room = size - consumer.available - consumer.unconfirmed;
                let came = (turn * 7919 % (size / 9)).min(room);
                produced = produced.advanced(came, size);
                let flags = ProducerFlags {
                    write_blocked: blocks && turn % 5 == 0,
                    urgent_present: turn % 97 == 0,
                    ..ProducerFlags::default()
                };
                consumer.on_produced(produced, flags).expect("room");
                if turn % 89 == 0 {
                    consumer.ask();
                }
                let may_be_due = consumer.may_be_due();
                sides[usize::from(may_be_due)] += 1;
                let is_due = consumer.consume(consumer.available * (turn % 4) / 3);
                assert!(may_be_due || !(is_due || consumer.is_due()), "{size} {turn} {consumer:?}");
                if is_due || turn % 3 == 0 {
                    consumer.confirm();
                }
            }
        }
        assert!(sides.iter().all(|turns| *turns > 500), "{sides:?}");
    }
}
