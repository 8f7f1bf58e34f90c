//! Cursors, credits and flags of a connection: against the kernel's CDC messages, and against a
//! queue of bytes under random use, with links that are lost.

mod support;

use std::collections::{HashMap, VecDeque};

use bolero::{check, produce};
use smc_proto::close::Direction;
use smc_proto::connection::{Connection, PeerMisbehaved, Piece, Untold, UrgentMark};
use smc_proto::cursor::{Cursor, CursorError};
use smc_proto::wire::cdc::{self, ProducerFlags, SmcdRepr, SmcrRepr};
use smc_proto::wire::clc;
use support::draw::Draw;
use support::{Frame, captures, frames};

/// The CDC messages of the kernel are what this crate makes when the same bytes are written and
/// read, and what it understands.
#[test]
fn cdc_of_the_kernel_is_reproduced_and_understood() {
    let mut replayed = 0;
    for path in captures() {
        let mut replay = Replay::default();
        for frame in frames(&path) {
            match frame {
                Frame::Clc(bytes) => replay.clc(&bytes),
                Frame::Send { by_server, bytes } if bytes[0] == cdc::TYPE => {
                    let message = SmcrRepr::parse(&bytes).unwrap();
                    replayed += u32::from(replay.cdc(by_server, &message));
                }
                _ => {}
            }
        }
    }
    assert_eq!(replayed, 150 + 74, "CDC messages of connections whose start was captured");
}

#[derive(Default)]
struct Replay {
    server: Option<(u32, u32)>,
    /// By "is the server" and its own alert token: a side, and the token of the other.
    sides: HashMap<(bool, u32), (Connection, u32)>,
}

impl Replay {
    fn clc(&mut self, bytes: &[u8]) {
        let token_and_size = |answer: &clc::Answer| match answer {
            clc::Answer::R(smcr) => Some((smcr.alert_token, smcr.size.bytes())),
            clc::Answer::D(_) => None,
        };
        match clc::Message::parse(bytes).unwrap() {
            clc::Message::Accept(answer) => self.server = token_and_size(&answer),
            clc::Message::Confirm(answer) => {
                let (Some(server), Some(client)) = (self.server, token_and_size(&answer)) else {
                    return;
                };
                for (is_server, own, peer) in [(true, server, client), (false, client, server)] {
                    let mut side = Connection::new(peer.1, own.1, peer.0);
                    side.closing.on_established();
                    self.sides.insert((is_server, own.0), (side, peer.0));
                }
            }
            _ => {}
        }
    }

    /// Replays one message: its sender does what the message says, its receiver reads it.
    fn cdc(&mut self, by_server: bool, message: &SmcrRepr) -> bool {
        let receiver = (!by_server, message.token);
        let Some(&(_, token)) = self.sides.get(&receiver) else { return false };
        let side = &mut self.sides.get_mut(&(by_server, token)).unwrap().0;
        if message.flags.failover_validation {
            // The last number that the sender knew to have arrived is not in the capture.
            side.on_sent(&SmcrRepr { seqno: message.seqno, ..*message });
            assert_eq!(side.emit_validation().unwrap(), *message);
        } else {
            replay_sender(side, message);
        }
        let receiver = &mut self.sides.get_mut(&receiver).unwrap().0;
        receiver.on_smcr(message).unwrap_or_else(|error| panic!("{error:?} in {message:?}"));
        true
    }
}

fn replay_sender(side: &mut Connection, message: &SmcrRepr) {
    let size = 65_536;
    let written = message.producer.since(side.producer.cursor(), size).unwrap();
    if message.flags.urgent_present && written > 0 {
        assert!(side.producer.produce_urgent(written));
    } else {
        assert!(side.producer.produce(written), "{side:?} {message:?}");
    }
    if message.flags.write_blocked {
        side.producer.block();
    }
    let read = message.consumer.since(side.consumer.cursor(), size).unwrap();
    let _ = side.consumer.consume(read);
    let (before, after) = (side.closing.flags(), message.state);
    if after.done_writing && !before.done_writing {
        assert!(side.closing.on_shutdown_write());
    }
    if (after.closed && !before.closed) || (after.aborted && !before.aborted) {
        assert!(side.closing.on_close(after.aborted));
    }
    assert_eq!(side.emit_smcr().unwrap(), *message);
}

/// One side with its ring, which the other writes into.
struct Side {
    state: Connection,
    ring: Vec<u8>,
    /// What this side has written into the other's ring, as its send buffer keeps it.
    written: Vec<u8>,
    /// Sent and not delivered.
    wire: VecDeque<Transfer>,
    /// CDC messages delivered that the sender does not know of.
    unacknowledged: VecDeque<SmcrRepr>,
}

/// What goes over a link, in this order.
enum Transfer {
    /// RDMA WRITE at an offset.
    Write(u32, Vec<u8>),
    Cdc(SmcrRepr),
}

struct Pair {
    sides: [Side; 2],
    /// Bytes written by a side and not read by the other: the oracle.
    queues: [VecDeque<u8>; 2],
    /// How many bytes each has written.
    written: [u32; 2],
    next_byte: u8,
}

impl Pair {
    fn new(sizes: [u32; 2]) -> Pair {
        let side = |own: usize, peer: usize| {
            let mut state = Connection::new(sizes[peer], sizes[own], 7);
            state.closing.on_established();
            let ring = vec![0; sizes[own] as usize];
            let written = vec![0; sizes[peer] as usize];
            let (wire, unacknowledged) = (VecDeque::new(), VecDeque::new());
            Side { state, ring, written, wire, unacknowledged }
        };
        let sides = [side(0, 1), side(1, 0)];
        Pair { sides, queues: Default::default(), written: [0; 2], next_byte: 0 }
    }

    fn write(&mut self, who: usize, len: u32, urgent: bool) {
        let len = len.min(self.sides[who].state.producer.room());
        if len == 0 {
            self.sides[who].state.producer.block();
        }
        self.written[who] += len;
        let pieces = self.sides[who].state.producer.pieces(len);
        assert_eq!(pieces[0].len + pieces[1].len, len);
        for Piece { offset, len } in pieces {
            for at in offset..offset + len {
                self.next_byte = self.next_byte.wrapping_add(1);
                self.sides[who].written[at as usize] = self.next_byte;
                self.queues[who].push_back(self.next_byte);
            }
        }
        self.transfer(who, pieces);
        if urgent && len > 0 {
            assert!(self.sides[who].state.producer.produce_urgent(len));
        } else {
            assert!(self.sides[who].state.producer.produce(len));
        }
        self.send(who);
    }

    fn transfer(&mut self, who: usize, pieces: [Piece; 2]) {
        let side = &mut self.sides[who];
        for Piece { offset, len } in pieces {
            let data = side.written[offset as usize..(offset + len) as usize].to_vec();
            side.wire.push_back(Transfer::Write(offset, data));
        }
    }

    fn send(&mut self, who: usize) {
        let message = self.sides[who].state.emit_smcr().unwrap();
        self.sides[who].wire.push_back(Transfer::Cdc(message));
    }

    fn read(&mut self, who: usize, len: u32) {
        let side = &mut self.sides[who];
        let len = len.min(side.state.consumer.available());
        for Piece { offset, len } in side.state.consumer.pieces(len) {
            for at in offset..offset + len {
                let expected = self.queues[1 - who].pop_front();
                assert_eq!(expected, Some(side.ring[at as usize]), "byte {at}");
            }
        }
        if side.state.consumer.consume(len) {
            self.send(who);
        }
    }

    fn deliver(&mut self, from: usize) {
        let message = match self.sides[from].wire.pop_front() {
            None => return,
            Some(Transfer::Write(offset, data)) => {
                let ring = &mut self.sides[1 - from].ring[offset as usize..];
                return ring[..data.len()].copy_from_slice(&data);
            }
            Some(Transfer::Cdc(message)) => message,
        };
        let news = self.sides[1 - from].state.on_smcr(&message).unwrap();
        self.sides[from].unacknowledged.push_back(message);
        if news.answer {
            self.send(1 - from);
        }
    }

    fn acknowledge(&mut self, who: usize) {
        if let Some(message) = self.sides[who].unacknowledged.pop_front() {
            self.sides[who].state.on_sent(&message);
        }
    }

    /// Whoever was blocked gets on when everything is delivered and read.
    fn finish(&mut self) {
        for _ in 0..3 {
            for who in [0, 1] {
                self.sides[who].state.producer.block();
                self.send(who);
                while !self.sides[who].wire.is_empty() {
                    self.deliver(who);
                }
                self.read(1 - who, u32::MAX);
                assert!(self.queues[who].is_empty());
                while !self.sides[1 - who].wire.is_empty() {
                    self.deliver(1 - who);
                }
                assert!(self.sides[who].state.producer.room() > 0);
            }
        }
    }

    /// The link is lost: what is on the wire is gone, and so are acknowledgements. Both sides
    /// validate over the other link, write again what may be lost, and send their newest state.
    fn fail_over(&mut self) {
        for who in 0..2 {
            self.sides[who].wire.clear();
            self.sides[who].unacknowledged.clear();
        }
        for who in 0..2 {
            let validation = self.sides[who].state.emit_validation().unwrap();
            self.sides[1 - who].state.on_smcr(&validation).unwrap();
            let again = self.sides[who].state.producer.unconfirmed();
            self.transfer(who, again);
            self.send(who);
        }
    }
}

#[test]
fn no_byte_is_lost_repeated_or_stuck_whatever_happens() {
    let entropy = produce::<Vec<u8>>().with().len(0..=600_usize);
    check!().with_iterations(4_000).with_generator(entropy).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let mut sizes = || [1, 2, 7, 64, 16_384][usize::from(draw.below(5))];
        let mut pair = Pair::new([sizes(), sizes()]);
        while !draw.0.is_empty() {
            let who = usize::from(draw.below(2));
            match draw.below(10) {
                0..=2 => pair.write(who, u32::from(draw.u16()) % 20_000, false),
                3 => pair.write(who, u32::from(draw.u8()), true),
                4..=5 => pair.read(who, u32::from(draw.u16()) % 20_000),
                6..=7 => pair.deliver(who),
                8 => pair.acknowledge(who),
                _ => pair.fail_over(),
            }
        }
        pair.finish();
    });
}

/// The same, before every step of a transfer both ways, once and a second time: partly written,
/// partly delivered, half acknowledged, with urgent bytes in it, wrapping, blocked.
#[test]
fn a_link_may_be_lost_before_every_step_of_a_transfer() {
    const STEPS: u32 = 60;
    let mut runs = 0;
    for sizes in [[1, 1], [5, 16], [16, 7], [40, 40]] {
        for first in 0..=STEPS {
            for second in first..=STEPS {
                let mut pair = Pair::new(sizes);
                for step in 0..STEPS {
                    for lost in [first, second] {
                        if lost == step {
                            pair.fail_over();
                        }
                    }
                    let who = (step % 2) as usize;
                    match step / 2 % 10 {
                        0 | 4 => pair.write(who, 9 + step % 5, false),
                        2 => pair.write(who, 3, true),
                        1 | 3 | 6 | 8 => pair.deliver(who),
                        5 => pair.acknowledge(who),
                        7 => pair.read(who, 2 + step % 7),
                        _ => pair.read(who, u32::MAX),
                    }
                }
                pair.finish();
                assert!(pair.written.iter().all(|written| *written > 0));
                runs += 1;
            }
        }
    }
    assert!(runs > 7_000);
}

#[test]
fn any_cdc_is_either_believed_within_the_ring_or_ends_the_connection() {
    let entropy = produce::<Vec<u8>>().with().len(0..=400_usize);
    check!().with_iterations(8_000).with_generator(entropy).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let mut side = Connection::new(64, 32, 7);
        side.closing.on_established();
        assert!(side.producer.produce(20));
        while !draw.0.is_empty() {
            let mut message = draw.cdc_smcr();
            if draw.flag() {
                message.producer = small(&mut draw);
                message.consumer = small(&mut draw);
            }
            let result = side.on_smcr(&message);
            assert!(side.consumer.available() <= 32 && side.producer.in_flight() <= 64);
            if result.is_err() {
                assert_eq!(side.closing.reading(), Direction::Reset);
                assert!(side.closing.flags().aborted);
            }
            let _ = side.consumer.consume(draw.u8().into());
            let _ = side.producer.produce(draw.u8().into());
        }
    });
}

fn small(draw: &mut Draw<'_>) -> Cursor {
    Cursor { wrap: u16::from(draw.below(3)), count: u32::from(draw.below(70)) }
}

/// SMC-D: the peer overwrites its words at the start of the DMB, and only the newest is ever seen.
#[test]
fn smcd_words_that_are_never_seen_lose_nothing() {
    let entropy = produce::<Vec<u8>>().with().len(0..=200_usize);
    check!().with_iterations(4_000).with_generator(entropy).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let size = [1, 7, 64, 16_352][usize::from(draw.below(4))];
        let (mut a, mut b) = (Connection::new(size, size, 0), Connection::new(size, size, 0));
        a.closing.on_established();
        b.closing.on_established();
        let (mut written, mut came, mut read, mut urgent) = (0_u64, 0_u64, 0_u64, 0);
        let mut words = a.emit_smcd().to_words();
        while !draw.0.is_empty() {
            match draw.below(4) {
                0 => {
                    let len = u32::from(draw.u16()).min(a.producer.room());
                    let is_urgent = draw.flag() && len > 0;
                    let done = match is_urgent {
                        true => a.producer.produce_urgent(len),
                        false => a.producer.produce(len),
                    };
                    assert!(done);
                    urgent += u32::from(is_urgent);
                    written += u64::from(len);
                    words = a.emit_smcd().to_words();
                }
                1 => {
                    let news = b.on_smcd(&SmcdRepr::from_words(words.0, words.1)).unwrap();
                    came += u64::from(news.readable);
                    urgent -= u32::from(news.urgent);
                    assert_eq!(b.consumer.available() as u64, came - read);
                }
                2 => {
                    let len = u32::from(draw.u16()).min(b.consumer.available());
                    let _ = b.consumer.consume(len);
                    read += u64::from(len);
                }
                _ => {
                    let (producer, consumer) = b.emit_smcd().to_words();
                    a.on_smcd(&SmcdRepr::from_words(producer, consumer)).unwrap();
                    assert!(u64::from(a.producer.in_flight()) >= written - read);
                }
            }
        }
        let news = b.on_smcd(&SmcdRepr::from_words(words.0, words.1)).unwrap();
        urgent -= u32::from(news.urgent);
        assert_eq!((came + u64::from(news.readable), urgent), (written, 0));
    });
}

#[test]
fn a_peer_may_not_use_room_that_it_was_not_told_of() {
    let mut side = Connection::new(10, 10, 7);
    let mut cdc = |seqno, producer| {
        side.on_smcr(&SmcrRepr {
            seqno,
            token: 7,
            producer,
            consumer: Cursor::default(),
            flags: ProducerFlags::default(),
            state: Default::default(),
        })
    };
    assert_eq!(cdc(1, Cursor { wrap: 0, count: 8 }).unwrap().readable, 8);
    let (old, new) = (Cursor { wrap: 0, count: 8 }, Cursor { wrap: 1, count: 1 });
    let error = CursorError::TooFar { old, new, size: 10 };
    assert_eq!(cdc(2, new), Err(PeerMisbehaved::Producer(error)));
}

/// What was read is told when it is worth a message, or when the writer asks for it.
#[test]
fn the_writer_gets_the_cursor_when_it_asks_for_it() {
    let (mut a, mut b) = (Connection::new(16_384, 16_384, 1), Connection::new(16_384, 16_384, 2));
    a.producer.request_update();
    assert_eq!(a.emit_smcr().unwrap().flags.bits(), 0, "nothing is on its way");
    assert!(a.producer.produce(1_000));
    assert!(!b.on_smcr(&a.emit_smcr().unwrap()).unwrap().answer);
    assert!(!b.consumer.consume(400), "too little to speak of");
    a.producer.request_update();
    for _ in 0..2 {
        let cdc = a.emit_smcr().unwrap();
        assert_eq!(cdc.flags.bits(), 0x10, "as long as there is no answer");
        assert!(b.on_smcr(&cdc).unwrap().answer);
    }
    let news = a.on_smcr(&b.emit_smcr().unwrap()).unwrap();
    assert_eq!((news.writable, news.answer), (400, false));
    assert_eq!(a.emit_smcr().unwrap().flags.bits(), 0);
    // The same of SMC-D, where a word may be overwritten before it is seen.
    a.producer.request_update();
    let _ = a.emit_smcd();
    assert!(!b.consumer.consume(600));
    assert!(b.on_smcd(&a.emit_smcd()).unwrap().answer);
    assert_eq!(a.on_smcd(&b.emit_smcd()).unwrap().writable, 600);
    assert_eq!(a.emit_smcd().flags.bits(), 0);
}

/// Writing more than there is room for: the flag, and the answer to it as soon as that is worth it.
#[test]
fn a_blocked_writer_is_told_of_a_tenth_of_the_ring() {
    let size = 65_536;
    let (mut a, mut b) = (Connection::new(size, size, 1), Connection::new(size, size, 2));
    assert!(a.producer.produce(size));
    assert!(!a.producer.produce(1));
    a.producer.block();
    let cdc = a.emit_smcr().unwrap();
    assert_eq!((cdc.flags.bits(), cdc.producer), (0x80, Cursor { wrap: 1, count: 0 }));
    b.on_smcr(&cdc).unwrap();
    assert!(!b.consumer.consume(size / 10), "a tenth is not more than a tenth");
    assert!(b.consumer.consume(1));
    let news = a.on_smcr(&b.emit_smcr().unwrap()).unwrap();
    assert_eq!(news.writable, size / 10 + 1);
    assert!(a.producer.produce(1));
    assert_eq!(a.emit_smcr().unwrap().flags.bits(), 0, "no longer blocked");
}

#[test]
fn urgent_data_is_announced_marked_and_stalls_its_sender() {
    let (mut a, mut b) = (Connection::new(10, 10, 1), Connection::new(10, 10, 2));
    assert!(a.producer.produce(10));
    assert!(!a.producer.produce_urgent(1), "no room");
    let cdc = a.emit_smcr().unwrap();
    assert_eq!(cdc.flags.bits(), 0x40);
    b.on_smcr(&cdc).unwrap();
    b.on_smcr(&a.emit_smcr().unwrap()).unwrap();
    assert_eq!(b.consumer.urgent(), UrgentMark::Announced);
    let _ = b.consumer.consume(4);
    assert!(
        b.on_smcr(&a.emit_smcr().unwrap()).unwrap().answer,
        "there is room that the writer waits for"
    );
    assert_eq!(a.on_smcr(&b.emit_smcr().unwrap()).unwrap().writable, 4);
    assert!(!b.on_smcr(&a.emit_smcr().unwrap()).unwrap().answer, "which it knows now");
    assert!(a.producer.produce_urgent(1));
    assert_eq!(a.producer.room(), 0, "the mark is the cursor, so it must not move");
    let cdc = a.emit_smcr().unwrap();
    assert_eq!(cdc.flags.bits(), 0x60);
    assert_eq!(a.emit_smcr().unwrap().flags.bits(), 0, "told once");
    let _ = a.emit_validation().unwrap();
    let cdc = a.emit_smcr().unwrap();
    assert_eq!(cdc.flags.bits(), 0x60, "until a link is lost");
    assert!(b.on_smcr(&cdc).unwrap().urgent);
    assert_eq!(b.consumer.urgent(), UrgentMark::At(Cursor { wrap: 1, count: 1 }));
    let _ = b.consumer.consume(6);
    assert_ne!(b.consumer.urgent(), UrgentMark::None);
    let _ = b.consumer.consume(1);
    assert_eq!(b.consumer.urgent(), UrgentMark::None);
    a.on_smcr(&b.emit_smcr().unwrap()).unwrap();
    assert_eq!(a.producer.room(), 10);
    assert_eq!(a.emit_smcr().unwrap().flags.bits(), 0);
}

#[test]
fn after_a_failover_missing_data_is_noticed_and_old_news_is_not() {
    let (mut a, mut b) = (Connection::new(10, 10, 1), Connection::new(10, 10, 2));
    a.closing.on_established();
    b.closing.on_established();
    let first = a.emit_smcr().unwrap();
    b.on_smcr(&first).unwrap();
    assert!(a.producer.produce(3));
    let second = a.emit_smcr().unwrap();
    a.on_sent(&first);
    let again = a.producer.unconfirmed();
    assert_eq!(again, [Piece { offset: 0, len: 3 }, Piece::default()]);
    assert_eq!(b.on_smcr(&a.emit_validation().unwrap()).unwrap(), Default::default());
    assert_eq!(b.on_smcr(&second).unwrap().readable, 3);
    assert_eq!(b.on_smcr(&second).unwrap().readable, 0, "sent again, said nothing new");
    assert_eq!(b.on_smcr(&first).unwrap(), Default::default(), "old");
    a.on_sent(&SmcrRepr { seqno: 9, ..second });
    let lost = PeerMisbehaved::Lost { received: 2, claimed: 9 };
    assert_eq!(b.on_smcr(&a.emit_validation().unwrap()), Err(lost));
    assert_eq!(b.closing.reading(), Direction::Reset);
}

/// CDC may overtake the Confirm that names the peer's memory, data and end included.
#[test]
fn what_comes_before_the_peer_is_known_counts() {
    let (mut a, mut b) = (Connection::new(100, 50, 1), Connection::expect(100));
    a.closing.on_established();
    assert!(a.producer.produce(60));
    a.producer.request_update();
    assert!(a.closing.on_close(false));
    let news = b.on_smcr(&a.emit_smcr().unwrap()).unwrap();
    assert_eq!((news.readable, news.writable, news.answer), (60, 0, true));
    assert_eq!(b.closing.reading(), Direction::Ended);
    assert_eq!((b.consumer.available(), b.producer.room()), (60, 0));
    assert!(!b.wants_cdc(), "there is nobody to tell yet");
    assert_eq!((b.emit_smcr(), b.emit_validation()), (None, None));
    assert!(!b.producer.produce(1) && b.producer.produce(0));
    assert_eq!(b.producer.cursor(), Cursor::default());
    b.producer.block();
    b.peer(50, 1);
    b.peer(7, 9);
    b.closing.on_established();
    assert_eq!(b.producer.room(), 50, "the second word does not count");
    assert!(b.untold().consumer, "the answer waited");
    let answer = b.emit_smcr().unwrap();
    assert_eq!((answer.seqno, answer.token, answer.flags.bits()), (1, 1, 0));
    assert!(!b.wants_cdc());
}

#[test]
fn nothing_can_be_read_that_was_not_sent() {
    for consumer in [Cursor { wrap: 0, count: 1 }, Cursor { wrap: 1, count: 0 }] {
        let mut early = Connection::expect(100);
        let cdc = SmcrRepr { consumer, ..Connection::new(1, 1, 1).emit_smcr().unwrap() };
        assert!(matches!(early.on_smcr(&cdc), Err(PeerMisbehaved::Consumer(_))));
        assert!(early.closing.flags().aborted);
    }
}

#[test]
fn what_is_worth_a_message_is_said_once() {
    let (mut a, mut b) = (Connection::new(20_000, 100, 1), Connection::new(100, 20_000, 2));
    a.closing.on_established();
    b.closing.on_established();
    assert_eq!(a.untold(), Untold::default());
    let tell = |from: &mut Connection, to: &mut Connection, expected: Untold| {
        assert_eq!(from.untold(), expected);
        let cdc = from.emit_smcr().unwrap();
        assert_eq!(from.untold(), Untold::default(), "{cdc:?}");
        to.on_smcr(&cdc).unwrap();
        cdc
    };
    let none = Untold::default();
    assert!(a.producer.produce(20_000));
    a.producer.block();
    tell(&mut a, &mut b, Untold { data: true, flags: true, ..none });
    a.producer.block();
    assert!(!a.wants_cdc(), "said already");
    assert!(!b.consumer.consume(9));
    assert_eq!((b.consumer.unconfirmed(), b.wants_cdc()), (9, false), "not worth a message");
    assert!(b.consumer.consume(10_000));
    tell(&mut b, &mut a, Untold { consumer: true, ..none });
    assert!(a.producer.produce_urgent(1));
    let cdc = tell(&mut a, &mut b, Untold { data: true, flags: true, ..none });
    assert_eq!(cdc.flags.bits(), 0x60);
    assert_eq!(a.unacknowledged(), 2);
    let validation = a.emit_validation().unwrap();
    b.on_smcr(&validation).unwrap();
    let again = Untold { data: true, flags: true, state: false, consumer: false, again: true };
    let cdc = tell(&mut a, &mut b, again);
    a.on_sent(&cdc);
    assert_eq!(a.unacknowledged(), 0);
    // The end: how much was read is told with it.
    let left = b.consumer.available();
    let _ = b.consumer.consume(left);
    let _ = tell(&mut b, &mut a, Untold { consumer: true, ..none });
    assert!(a.closing.on_close(false) && b.closing.on_close(false));
    assert!(!a.is_over() && !b.is_over());
    tell(&mut a, &mut b, Untold { state: true, ..none });
    assert!(!b.is_over(), "closed, and the peer does not know");
    tell(&mut b, &mut a, Untold { state: true, ..none });
    assert!(a.is_over() && b.is_over());
}

/// As after the loss of the link group: nobody can be told, and nobody waits for that.
#[test]
fn without_a_link_a_connection_is_over_though_it_was_not_told() {
    let mut side = Connection::new(10, 10, 1);
    side.closing.on_established();
    assert!(side.producer.produce(3) && side.closing.on_close(true));
    side.closing.on_links_lost();
    assert!(side.is_over() && side.wants_cdc());
}
