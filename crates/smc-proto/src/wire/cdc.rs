//! CDC, Connection Data Control: cursors and flags of one connection.
//!
//! With SMC-R it is a 44-byte message sent after the RDMA WRITEs it speaks of (RFC 7609 A.4;
//! `smc_cdc.h`). With SMC-D it is the first 32 bytes of the receiver's DMB, in the byte order of
//! the host, read as two words of 64 bits so that a cursor is never seen half written.

use super::field::{self, Field, bytes, put, u16_be, u32_be};
use super::{NoRoom, zeroed};
use crate::cursor::Cursor;
use crate::ids::BufferSize;

/// The type byte, 0xFE: no LLC message has it.
pub const TYPE: u8 = 0xfe;

/// What the sender of a CDC message says about the data it produces.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ProducerFlags {
    /// The sender has more to write and no room: it waits for a consumer cursor update.
    pub write_blocked: bool,
    /// Urgent data is about to come; the receiver should ask for room.
    pub urgent_pending: bool,
    /// The byte before the producer cursor is urgent.
    pub urgent_present: bool,
    /// The receiver should send its consumer cursor at once.
    pub update_requested: bool,
    /// Sent after a link was lost: `seqno` is the last one known to have arrived. Carries no news.
    pub failover_validation: bool,
}

/// What the sender of a CDC message says about the connection (RFC 7609 section 4).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StateFlags {
    /// Nothing more will be written: shutdown(SHUT_WR).
    pub done_writing: bool,
    /// The socket is closed.
    pub closed: bool,
    /// The connection was aborted, for example with unread data.
    pub aborted: bool,
}

/// CDC of SMC-R.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmcrRepr {
    /// Counts the CDC messages of the connection, from 1, and wraps.
    pub seqno: u16,
    /// The receiver's alert token: which connection of the link group this is about; see
    /// [`SmcrRepr::NOBODY`].
    pub token: u32,
    /// Up to here the sender has written into the receiver's RMBE.
    pub producer: Cursor,
    /// Up to here the sender has consumed its own RMBE.
    pub consumer: Cursor,
    /// About the data.
    pub flags: ProducerFlags,
    /// About the connection.
    pub state: StateFlags,
}

/// CDC of SMC-D.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SmcdRepr {
    /// Up to here the sender has written into the receiver's DMB.
    pub producer: Cursor,
    /// Up to here the sender has consumed its own DMB.
    pub consumer: Cursor,
    /// About the data.
    pub flags: ProducerFlags,
    /// About the connection.
    pub state: StateFlags,
}

/// Why bytes are not a CDC message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// Fewer bytes than the message has.
    Truncated {
        /// Bytes that it needs.
        need: usize,
        /// Bytes there are.
        have: usize,
    },
    /// The type byte is not 0xFE.
    NotCdc {
        /// What it is.
        kind: u8,
    },
    /// The length field of an SMC-R CDC is not 44.
    Length {
        /// What it is.
        length: u8,
    },
}

mod smcr {
    use super::Field;
    pub(super) const SEQNO: Field = 2..4;
    pub(super) const TOKEN: Field = 4..8;
    pub(super) const PRODUCER: Field = 10..16;
    pub(super) const CONSUMER: Field = 18..24;
    pub(super) const FLAGS: usize = 24;
    pub(super) const STATE: usize = 25;
}

impl SmcrRepr {
    /// Length of the message in bytes.
    pub const LEN: usize = 44;

    /// A token that names no connection, and so none may have it. Linux sends it with the abort of a
    /// connection whose handshake was not finished: it is to be ignored, as every token that names
    /// no connection of the link group (any more).
    pub const NOBODY: u32 = 0;

    /// Reads a message as it was received.
    pub fn parse(message: &[u8]) -> Result<SmcrRepr, Error> {
        let message = message
            .get(..Self::LEN)
            .ok_or(Error::Truncated { need: Self::LEN, have: message.len() })?;
        match [message[0], message[1]] {
            [TYPE, 44] => {}
            [TYPE, length] => return Err(Error::Length { length }),
            [kind, _] => return Err(Error::NotCdc { kind }),
        }
        let cursor = |field: Field| Cursor {
            wrap: u16_be(message, field.start..field.start + 2),
            count: u32_be(message, field.start + 2..field.end),
        };
        Ok(SmcrRepr {
            seqno: u16_be(message, smcr::SEQNO),
            token: u32_be(message, smcr::TOKEN),
            producer: cursor(smcr::PRODUCER),
            consumer: cursor(smcr::CONSUMER),
            flags: ProducerFlags::from_bits(message[smcr::FLAGS]),
            state: StateFlags::from_bits(message[smcr::STATE]),
        })
    }

    /// Whether a message of CDC tells of bytes and nothing else: none of its flags is set.
    pub fn is_of_data(message: &[u8]) -> bool {
        let flags = message.get(smcr::FLAGS..=smcr::STATE);
        message.first() == Some(&TYPE) && flags == Some(&[0, 0])
    }

    /// Writes the message; it is always 44 bytes long.
    pub fn emit(self) -> [u8; SmcrRepr::LEN] {
        let mut message = [0; Self::LEN];
        message[0] = TYPE;
        message[1] = Self::LEN as u8;
        put(&mut message, smcr::SEQNO, self.seqno.to_be_bytes());
        put(&mut message, smcr::TOKEN, self.token.to_be_bytes());
        for (field, cursor) in [(smcr::PRODUCER, self.producer), (smcr::CONSUMER, self.consumer)] {
            put(&mut message, field.start..field.start + 2, cursor.wrap.to_be_bytes());
            put(&mut message, field.start + 2..field.end, cursor.count.to_be_bytes());
        }
        message[smcr::FLAGS] = self.flags.bits();
        message[smcr::STATE] = self.state.bits();
        message
    }
}

mod smcd {
    use super::Field;
    pub(super) const PRODUCER: Field = 8..16;
    pub(super) const CONSUMER: Field = 16..24;
    // Inside one of the two words:
    pub(super) const WRAP: Field = 0..2;
    pub(super) const COUNT: Field = 2..6;
    pub(super) const FLAGS: usize = 6;
    pub(super) const STATE: usize = 7;
}

impl SmcdRepr {
    /// Length in bytes; the data ring of a DMB starts behind it.
    pub const LEN: usize = 32;
    /// Length of the ring in a DMB of this size, in bytes.
    pub const fn ring_len(dmb: BufferSize) -> u32 {
        dmb.bytes() - Self::LEN as u32
    }

    /// Where in the DMB the word of the producer cursor stands.
    pub const PRODUCER_AT: usize = smcd::PRODUCER.start;
    /// Where in the DMB the word of the consumer cursor and of all flags stands.
    pub const CONSUMER_AT: usize = smcd::CONSUMER.start;

    /// From the words at [`Self::PRODUCER_AT`] and [`Self::CONSUMER_AT`], each loaded at once.
    pub fn from_words(producer: u64, consumer: u64) -> SmcdRepr {
        let (producer, consumer) = (producer.to_ne_bytes(), consumer.to_ne_bytes());
        let cursor = |word: &[u8; 8]| Cursor {
            wrap: u16::from_ne_bytes(bytes(word, smcd::WRAP)),
            count: u32::from_ne_bytes(bytes(word, smcd::COUNT)),
        };
        SmcdRepr {
            producer: cursor(&producer),
            consumer: cursor(&consumer),
            flags: ProducerFlags::from_bits(consumer[smcd::FLAGS]),
            state: StateFlags::from_bits(consumer[smcd::STATE]),
        }
    }

    /// The two words, each to be stored at once: the producer's first, then the consumer's.
    pub fn to_words(self) -> (u64, u64) {
        let word = |cursor: Cursor, flags: u8, state: u8| {
            let mut word = [0; 8];
            put(&mut word, smcd::WRAP, cursor.wrap.to_ne_bytes());
            put(&mut word, smcd::COUNT, cursor.count.to_ne_bytes());
            word[smcd::FLAGS] = flags;
            word[smcd::STATE] = state;
            u64::from_ne_bytes(word)
        };
        (word(self.producer, 0, 0), word(self.consumer, self.flags.bits(), self.state.bits()))
    }

    /// Reads the start of a DMB that nobody writes to at the same time.
    pub fn parse(message: &[u8]) -> Result<SmcdRepr, Error> {
        let message = message
            .get(..Self::LEN)
            .ok_or(Error::Truncated { need: Self::LEN, have: message.len() })?;
        if message[0] != TYPE {
            return Err(Error::NotCdc { kind: message[0] });
        }
        let word = |field: Field| u64::from_ne_bytes(field::bytes(message, field));
        Ok(SmcdRepr::from_words(word(smcd::PRODUCER), word(smcd::CONSUMER)))
    }

    /// Writes the 32 bytes at the start of `dmb`.
    pub fn emit(self, dmb: &mut [u8]) -> Result<(), NoRoom> {
        let message = zeroed(dmb, Self::LEN)?;
        let (producer, consumer) = self.to_words();
        message[0] = TYPE;
        put(message, smcd::PRODUCER, producer.to_ne_bytes());
        put(message, smcd::CONSUMER, consumer.to_ne_bytes());
        Ok(())
    }
}

impl ProducerFlags {
    /// From the byte of the wire; bits without a meaning are ignored.
    pub const fn from_bits(bits: u8) -> ProducerFlags {
        ProducerFlags {
            write_blocked: bits & 0x80 != 0,
            urgent_pending: bits & 0x40 != 0,
            urgent_present: bits & 0x20 != 0,
            update_requested: bits & 0x10 != 0,
            failover_validation: bits & 0x08 != 0,
        }
    }

    /// The byte of the wire.
    pub const fn bits(self) -> u8 {
        (self.write_blocked as u8) << 7
            | (self.urgent_pending as u8) << 6
            | (self.urgent_present as u8) << 5
            | (self.update_requested as u8) << 4
            | (self.failover_validation as u8) << 3
    }
}

impl StateFlags {
    /// From the byte of the wire; bits without a meaning are ignored.
    pub const fn from_bits(bits: u8) -> StateFlags {
        StateFlags {
            done_writing: bits & 0x80 != 0,
            closed: bits & 0x40 != 0,
            aborted: bits & 0x20 != 0,
        }
    }

    /// The byte of the wire.
    pub const fn bits(self) -> u8 {
        (self.done_writing as u8) << 7 | (self.closed as u8) << 6 | (self.aborted as u8) << 5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_byte_keeps_its_known_bits() {
        for bits in 0..=u8::MAX {
            assert_eq!(ProducerFlags::from_bits(bits).bits(), bits & 0xf8);
            assert_eq!(StateFlags::from_bits(bits).bits(), bits & 0xe0);
        }
    }

    #[test]
    fn a_message_of_data_has_no_flag() {
        let message = |flags, state| SmcrRepr {
            seqno: 1,
            token: 7,
            producer: Cursor { wrap: 0, count: u32::MAX },
            consumer: Cursor { wrap: u16::MAX, count: 0 },
            flags: ProducerFlags::from_bits(flags),
            state: StateFlags::from_bits(state),
        };
        assert!(SmcrRepr::is_of_data(&message(0, 0).emit()));
        for bit in 0..8 {
            let of = [message(1 << bit, 0), message(0, 1 << bit)];
            let said = of.map(|cdc| SmcrRepr::is_of_data(&cdc.emit()));
            let is_none = of.map(|cdc| cdc == message(0, 0));
            assert_eq!(said, is_none, "{bit}");
        }
        assert!(!SmcrRepr::is_of_data(&[1; 44]) && !SmcrRepr::is_of_data(&[TYPE; 25]));
    }

    #[test]
    fn smcd_flags_stand_only_beside_the_consumer_cursor() {
        let repr = SmcdRepr {
            producer: Cursor { wrap: 0x0102, count: 0x0304_0506 },
            consumer: Cursor { wrap: 0x1112, count: 0x1314_1516 },
            flags: ProducerFlags::from_bits(0xf8),
            state: StateFlags::from_bits(0xe0),
        };
        let mut dmb = [0xaa; 40];
        repr.emit(&mut dmb).unwrap();
        assert_eq!(SmcdRepr::parse(&dmb), Ok(repr));
        assert_eq!([dmb[0], dmb[14], dmb[15], dmb[22], dmb[23]], [0xfe, 0, 0, 0xf8, 0xe0]);
        assert_eq!(dmb[8..10], 0x0102_u16.to_ne_bytes());
        assert_eq!(dmb[10..14], 0x0304_0506_u32.to_ne_bytes());
        assert_eq!(dmb[32..], [0xaa; 8], "the ring is not touched");
        assert_eq!(repr.emit(&mut dmb[..31]), Err(NoRoom { need: 32, have: 31 }));
    }
}
