//! One connection over a pair of rings: cursors, credits, urgent data, and what CDC says of them.
//!
//! Each side produces into the ring (RMBE or DMB) of the other and consumes its own. All that the
//! peer says is checked: a cursor that no correct peer sends is an error, and the connection has to
//! be aborted; nothing else is affected.
//!
//! Over SMC-R a side that writes does this, in one go:
//!
//! 1. It reserves a place for a send. Without one it does nothing, and asks again when a send is
//!    complete: [`Connection::emit_smcr`] counts what it says as said and has no way back.
//! 2. It writes the new bytes where [`Producer::pieces`] says, and calls [`Producer::produce`].
//! 3. If [`Connection::wants_cdc`], it sends [`Connection::emit_smcr`], behind the writes.
//! 4. When that send is complete, it calls [`Connection::on_sent`]; up to there the bytes of its own
//!    send buffer are free.

mod consumer;
mod producer;

pub use consumer::{Consumer, UrgentMark};
pub use producer::{Piece, Producer};

use crate::close::{Closing, State};
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
    /// The peer's alert token, which counts for SMC-R only; none until its memory is known.
    peer_token: Option<u32>,
    /// What the newest CDC message said; none if it may be lost with its link.
    told: Option<Told>,
    /// CDC messages made, and the last one that is known to have arrived; SMC-R only.
    sent_seqno: u16,
    arrived_seqno: u16,
    /// The newest CDC message received.
    received_seqno: u16,
}

/// What the peer was told.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Told {
    producer: Cursor,
    flags: ProducerFlags,
    state: StateFlags,
}

/// What the peer has not been told, each of which is worth a CDC message.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Untold {
    /// Bytes were written into its ring.
    pub data: bool,
    /// A flag is set: no room, urgent data, a wish for its cursor.
    pub flags: bool,
    /// The state is another: done writing, closed, aborted.
    pub state: bool,
    /// Its cursor has to be confirmed: it asked for that, or enough was read.
    pub consumer: bool,
    /// The link was lost over which it was told last.
    pub again: bool,
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
    /// Both sizes are at least 1. For a peer that is known later: [`Connection::expect`].
    pub fn new(peer_size: u32, size: u32, peer_token: u32) -> Connection {
        let mut connection = Connection::expect(size);
        connection.peer(peer_size, peer_token);
        connection
    }

    /// A connection with a ring of `size` bytes (at least 1) on this side, whose peer has not said
    /// yet what it has. CDC may overtake the Accept or Confirm, which travels by TCP: a side
    /// receives from the moment that its own memory is named. What comes counts at once, data and
    /// end included; nothing can be written or emitted before [`Connection::peer`].
    pub fn expect(size: u32) -> Connection {
        Connection {
            producer: Producer::new(0),
            consumer: Consumer::new(size),
            closing: Closing::new(),
            peer_token: None,
            told: Some(Told::default()),
            sent_seqno: 0,
            arrived_seqno: 0,
            received_seqno: 0,
        }
    }

    /// The peer's Accept or Confirm: it has a ring of `peer_size` bytes, at least 1. What is known
    /// already stays.
    pub fn peer(&mut self, peer_size: u32, peer_token: u32) {
        if self.peer_token.is_none() {
            self.peer_token = Some(peer_token);
            self.producer.has_ring(peer_size);
        }
    }

    /// What the peer has not been told; nothing as long as it is not known.
    pub fn untold(&self) -> Untold {
        if self.peer_token.is_none() {
            return Untold::default();
        }
        let (flags, state) = self.flags();
        let told = self.told.unwrap_or_default();
        Untold {
            data: self.producer.cursor() != told.producer,
            // A flag that is no longer set is no news: its cause is.
            flags: flags.bits() & !told.flags.bits() != 0,
            state: state != told.state,
            consumer: self.consumer.is_due(),
            again: self.told.is_none(),
        }
    }

    /// Whether a CDC message has to be sent. That much was read is told by every one, but asks for
    /// one only if [`Consumer::consume`] said so.
    pub fn wants_cdc(&self) -> bool {
        self.untold() != Untold::default()
    }

    /// CDC messages emitted that are not known to have arrived; SMC-R only. Those that a link took
    /// with it count until a later one has arrived.
    pub fn unacknowledged(&self) -> u16 {
        self.sent_seqno.wrapping_sub(self.arrived_seqno)
    }

    /// Whether the connection is over, and the peer was told of it: closed on both sides, aborted
    /// and closed here, or without a link. Its token and its ring are free when besides no send over
    /// a link that works is under way ([`Connection::unacknowledged`]).
    pub fn is_over(&self) -> bool {
        let told = self.closing.links_are_lost() || !(self.untold().state || self.untold().again);
        self.closing.state() == State::Closed && told
    }

    /// The CDC message to send now, over SMC-R; none if the peer is not known. The place for the
    /// send has to be reserved before: the message takes the next number, the consumer cursor in it
    /// counts as confirmed, urgent data as told. After a close it says how much was read, too.
    pub fn emit_smcr(&mut self) -> Option<SmcrRepr> {
        let token = self.peer_token?;
        self.sent_seqno = self.sent_seqno.wrapping_add(1);
        let (flags, state) = self.told_now();
        Some(SmcrRepr {
            seqno: self.sent_seqno,
            token,
            producer: self.producer.cursor(),
            consumer: self.consumer.confirm(),
            flags,
            state,
        })
    }

    /// What to write into the peer's DMB now, over SMC-D. It may overwrite what the peer has not
    /// seen, so urgent data is told of until it is consumed.
    pub fn emit_smcd(&mut self) -> SmcdRepr {
        let (flags, state) = self.flags();
        self.told = Some(Told { producer: self.producer.cursor(), flags, state });
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
    /// None if the peer is not known: nothing was sent to it.
    pub fn emit_validation(&mut self) -> Option<SmcrRepr> {
        let token = self.peer_token?;
        self.producer.untold();
        self.told = None;
        Some(SmcrRepr {
            seqno: self.arrived_seqno,
            token,
            producer: Cursor::default(),
            consumer: Cursor::default(),
            flags: ProducerFlags { failover_validation: true, ..ProducerFlags::default() },
            state: StateFlags::default(),
        })
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
            let answer = cdc.flags.update_requested || (waits && self.consumer.unconfirmed() > 0);
            if answer {
                self.consumer.ask();
            }
            Ok(News { readable, writable, urgent, answer })
        })();
        match result {
            Ok(_) => self.closing.on_received(cdc.state),
            Err(_) => self.closing.abort(),
        }
        result
    }

    /// The flags for a message that is going out.
    fn told_now(&mut self) -> (ProducerFlags, StateFlags) {
        let (flags, state) = self.flags();
        self.producer.told();
        let (producer, flags_left) = (self.producer.cursor(), self.producer.flags());
        self.told = Some(Told { producer, flags: flags_left, state });
        (flags, state)
    }

    fn flags(&self) -> (ProducerFlags, StateFlags) {
        (self.producer.flags(), self.closing.flags())
    }
}

/// Whether sequence number `a` comes after `b`; they wrap (`smc_cdc.c`).
fn is_newer(a: u16, b: u16) -> bool {
    (1..0x8000).contains(&a.wrapping_sub(b))
}
