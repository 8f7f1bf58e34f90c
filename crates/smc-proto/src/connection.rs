//! One connection over a pair of rings: cursors, credits, urgent data, and what CDC says of them.
//!
//! Each side produces into the ring (RMBE or DMB) of the other and consumes its own. All that the
//! peer says is checked: a cursor that no correct peer sends is an error, and the connection has to
//! be aborted; nothing else is affected.

mod consumer;
mod producer;

pub use consumer::{Consumer, UrgentMark};
pub use producer::{Piece, Producer};

use crate::close::Closing;
use crate::cursor::{Cursor, CursorError};
use crate::wire::cdc::{ProducerFlags, SmcdRepr, SmcrRepr, StateFlags};

/// One side of a connection.
#[derive(Clone, Debug)]
pub struct Connection {
    /// What this side writes.
    pub producer: Producer,
    /// What this side reads.
    pub consumer: Consumer,
    /// How it ends.
    pub closing: Closing,
    /// The peer's alert token; SMC-R only.
    peer_token: u32,
    /// CDC messages made, and the last one that is known to have arrived; SMC-R only.
    sent_seqno: u16,
    arrived_seqno: u16,
    /// The newest CDC message received.
    received_seqno: u16,
}

/// What a CDC message brought.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct News {
    /// Bytes that can be read now and could not before.
    pub readable: u32,
    /// Bytes that can be written now and could not before.
    pub writable: u32,
    /// The peer asks for the consumer cursor: send CDC now.
    pub answer: bool,
    /// Urgent data arrived: SIGURG.
    pub urgent: bool,
}

/// What a peer did that no correct peer does. The connection has to be aborted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerMisbehaved {
    /// Its producer cursor cannot be right.
    Producer(CursorError),
    /// Its consumer cursor cannot be right.
    Consumer(CursorError),
    /// After a link was lost, it says that a CDC message has arrived here which has not: data is
    /// missing (`smc_cdc_msg_validate`).
    Lost {
        /// The newest that arrived here.
        received: u16,
        /// The one that it says has arrived.
        claimed: u16,
    },
}

impl Connection {
    /// A connection whose peer has a ring of `peer_size` bytes and this side one of `size` bytes.
    /// Both sizes are at least 1.
    pub fn new(peer_size: u32, size: u32, peer_token: u32) -> Connection {
        Connection {
            producer: Producer::new(peer_size),
            consumer: Consumer::new(size),
            closing: Closing::new(),
            peer_token,
            sent_seqno: 0,
            arrived_seqno: 0,
            received_seqno: 0,
        }
    }

    /// The CDC message to send now, over SMC-R. The consumer cursor in it counts as confirmed.
    pub fn emit_smcr(&mut self) -> SmcrRepr {
        self.sent_seqno = self.sent_seqno.wrapping_add(1);
        let (flags, state) = self.flags();
        self.producer.told();
        SmcrRepr {
            seqno: self.sent_seqno,
            token: self.peer_token,
            producer: self.producer.cursor(),
            consumer: self.consumer.confirm(),
            flags,
            state,
        }
    }

    /// What to write into the peer's DMB now, over SMC-D. It may overwrite what the peer has not
    /// seen, so urgent data is told of until it is consumed.
    pub fn emit_smcd(&mut self) -> SmcdRepr {
        let (flags, state) = self.flags();
        SmcdRepr {
            producer: self.producer.cursor(),
            consumer: self.consumer.confirm(),
            flags,
            state,
        }
    }

    /// The send of this CDC message is complete: the peer's adapter has it, and all that was
    /// written before it.
    pub fn on_sent(&mut self, cdc: &SmcrRepr) {
        if is_newer(cdc.seqno, self.arrived_seqno) {
            self.arrived_seqno = cdc.seqno;
            self.producer.on_arrived(cdc.producer);
        }
    }

    /// The first CDC message over another link, after the one in use was lost. After it comes again
    /// what is not known to have arrived ([`Producer::unconfirmed`]), and a CDC message. Nothing
    /// but the number counts in this one: the kernel leaves the rest 0.
    pub fn emit_validation(&mut self) -> SmcrRepr {
        self.producer.untold();
        SmcrRepr {
            seqno: self.arrived_seqno,
            token: self.peer_token,
            producer: Cursor::default(),
            consumer: Cursor::default(),
            flags: ProducerFlags { failover_validation: true, ..ProducerFlags::default() },
            state: StateFlags::default(),
        }
    }

    /// A CDC message of the peer, over SMC-R. An old one says nothing.
    pub fn on_smcr(&mut self, cdc: &SmcrRepr) -> Result<News, PeerMisbehaved> {
        if cdc.flags.failover_validation {
            if is_newer(cdc.seqno, self.received_seqno) {
                self.closing.abort();
                let (received, claimed) = (self.received_seqno, cdc.seqno);
                return Err(PeerMisbehaved::Lost { received, claimed });
            }
            return Ok(News::default());
        }
        if is_newer(self.received_seqno, cdc.seqno) {
            return Ok(News::default());
        }
        self.received_seqno = cdc.seqno;
        self.on_cdc(&SmcdRepr {
            producer: cdc.producer,
            consumer: cdc.consumer,
            flags: cdc.flags,
            state: cdc.state,
        })
    }

    /// The words at the start of the own DMB, over SMC-D.
    pub fn on_smcd(&mut self, cdc: &SmcdRepr) -> Result<News, PeerMisbehaved> {
        self.on_cdc(cdc)
    }

    fn on_cdc(&mut self, cdc: &SmcdRepr) -> Result<News, PeerMisbehaved> {
        let result = (|| {
            let writable =
                self.producer.on_consumed(cdc.consumer).map_err(PeerMisbehaved::Consumer)?;
            let (readable, urgent) = self
                .consumer
                .on_produced(cdc.producer, cdc.flags)
                .map_err(PeerMisbehaved::Producer)?;
            // A writer of urgent data that is to come has no room for it.
            let waits = cdc.flags.urgent_pending && !cdc.flags.urgent_present;
            let answer = cdc.flags.update_requested || (waits && self.consumer.has_news());
            Ok(News { readable, writable, urgent, answer })
        })();
        match result {
            Ok(_) => self.closing.on_received(cdc.state),
            Err(_) => self.closing.abort(),
        }
        result
    }

    fn flags(&self) -> (ProducerFlags, StateFlags) {
        (self.producer.flags(), self.closing.flags())
    }
}

/// Whether sequence number `a` comes after `b`; they wrap (`smc_cdc.c`).
fn is_newer(a: u16, b: u16) -> bool {
    (1..0x8000).contains(&a.wrapping_sub(b))
}
