//! A connection's data: what the application has written goes into the peer's RMB, and what it has read is told to the peer.

use std::collections::VecDeque;

use smc_proto::close::{Direction, State};
use smc_proto::connection::{Connection, UrgentMark};
use smc_proto::ids::BufferSize;
use smc_proto::link_group::{Key, LinkIndex};
use smc_proto::wire::cdc::{SmcrRepr, StateFlags};
use usmc_shm::Broken;

use crate::buffers::Buffers;
use crate::event::Event;
use crate::groups::GroupIndex;
use crate::link::{Link, Sent};
use crate::nic::{ArenaId, DeviceId, Nic, RmbId};
use crate::transfer::Writes;

/// Names a connection of an engine until its last event; also what the peer's CDC messages name it by (the alert token). Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(pub(crate) u32);

impl ConnId {
    /// As it stands in CDC messages.
    pub fn token(self) -> u32 {
        self.0
    }
}

/// Bytes of one chain at most, so that the send buffer has room again before all of a large one is sent, and others have their turn.
const BURST: u32 = 128 << 10;

/// Where a connection's buffers lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// The receive buffer.
    pub rmb: RmbId,
    /// Its size.
    pub size: BufferSize,
    /// What the send buffer is part of.
    pub arena: ArenaId,
}

/// A connection's place in a link group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat {
    pub(crate) group: GroupIndex,
    pub(crate) link: LinkIndex,
    /// The peer's RMB, by its number in the group.
    pub(crate) peer_rmb: usize,
    /// Its link was lost before the peer's Confirm came, which names the RMB by its key there.
    pub(crate) is_stale: bool,
    /// The send buffer's key on the link.
    pub(crate) lkey: Option<u32>,
}

impl Seat {
    /// At this link, where the peer has not named its RMB so far.
    pub(crate) fn new(group: GroupIndex, link: LinkIndex) -> Seat {
        Seat { group, link, peer_rmb: usize::MAX, is_stale: false, lkey: None }
    }
}

/// What has come of a peer's bytes: positions from the connection's beginning.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Came {
    /// Up to where.
    pub upto: u64,
    /// Behind the last urgent byte ([`Buffers::leave`]).
    pub urgent: Option<u64>,
}

/// The peer's last urgent byte, by the position behind it.
///
/// ```text
/// None ──it comes──▶ Came ──the reader was woken──▶ Left ──another one comes──▶ Came
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UrgentIn {
    None,
    /// The ring is to be left ([`Connection::leave_ring`]), and gets nothing more.
    Came(u64),
    Left(u64),
}

/// What the application has done with its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Application {
    Writes,
    /// It ends its writing direction: all that it has written is sent first.
    Shuts,
    /// It has closed; likewise.
    Closes {
        unread: bool,
    },
    /// The peer knows, or is about to be told.
    Shut,
    Closed,
}

/// How a connection stands to its link.
///
/// ```text
///            lost link           sent again
///   Runs ──────────────▶ Moved ──────────────▶ Runs        any ──── last link lost ───▶ Lost
///     │ given up           │ given up
///     ▼       lost link    ▼
///  GivenUp ────────────▶ CutOff
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Course {
    /// Bytes go by it.
    Runs,
    /// The link was lost: a validation comes first, and then again what is not known to have arrived.
    Moved,
    /// This side has given up on the connection: until the peer has heard of that, it may write into the RMB.
    GivenUp,
    /// The same with bytes on a lost link: no cursor that could be sent is right.
    CutOff,
    /// No link is left.
    Lost,
}

impl Course {
    fn is_given_up(self) -> bool {
        matches!(self, Course::GivenUp | Course::CutOff)
    }
}

/// What moves a connection's bytes.
#[derive(Debug)]
pub(crate) struct Data<B> {
    pub(crate) id: ConnId,
    pub(crate) buffers: B,
    pub(crate) memory: Memory,
    pub(crate) device: DeviceId,
    pub(crate) proto: Connection,
    /// Positions in the connection's bytes: written into the peer's RMB; written there, and complete; read by the application, as far as
    /// anybody has looked; come.
    sent: u64,
    done: u64,
    read: u64,
    arrived: u64,
    urgent_in: UrgentIn,
    /// Behind the application's.
    urgent_out: Option<u64>,
    application: Application,
    /// A CDC message is due.
    is_due: bool,
    /// The peer was told that the application waits for room.
    is_blocked: bool,
    /// It waits at its link for room.
    waits: bool,
    course: Course,
    /// The peer has closed or aborted.
    peer_is_done: bool,
    /// SENDs under way.
    under_way: u32,
    /// What the application was told of the end: what it reads, what it writes, and whether the peer has closed.
    told: (Direction, Direction, bool),
}

impl<B: Buffers> Data<B> {
    pub(crate) fn new(id: ConnId, buffers: B, memory: Memory, device: DeviceId) -> Data<B> {
        Data {
            id,
            buffers,
            memory,
            device,
            proto: Connection::expect(memory.size.bytes()),
            sent: 0,
            done: 0,
            read: 0,
            arrived: 0,
            urgent_in: UrgentIn::None,
            urgent_out: None,
            application: Application::Writes,
            is_due: false,
            is_blocked: false,
            waits: false,
            course: Course::Runs,
            peer_is_done: false,
            under_way: 0,
            told: (Direction::Open, Direction::Open, false),
        }
    }

    /// The application ends its writing direction.
    pub(crate) fn shut(&mut self) {
        if self.application == Application::Writes {
            self.application = Application::Shuts;
        }
    }

    /// The application closes, and leaves bytes unread or not.
    pub(crate) fn close(&mut self, unread: bool) {
        if self.course == Course::Lost {
            // Nobody can be told.
            self.application = Application::Closed;
        } else if self.application != Application::Closed {
            self.application = Application::Closes { unread };
        }
    }

    /// Whether an urgent byte has come, for which the ring is to be left ([`Connection::leave_ring`]).
    pub(crate) fn is_to_leave(&self) -> bool {
        matches!(self.urgent_in, UrgentIn::Came(_))
    }

    /// The ring ends before the urgent byte's message. What sleeps for bytes in the ring was woken.
    pub(crate) fn leave_ring(&mut self) {
        if let UrgentIn::Came(upto) = self.urgent_in {
            self.urgent_in = UrgentIn::Left(upto);
            self.buffers.leave();
            self.buffers.arrived(self.arrived);
        }
    }

    /// What has come of the peer's bytes.
    pub(crate) fn came(&self) -> Came {
        let urgent = match self.urgent_in {
            UrgentIn::None => None,
            UrgentIn::Came(upto) | UrgentIn::Left(upto) => Some(upto),
        };
        Came { upto: self.arrived, urgent }
    }

    /// The byte of the application's before that position is urgent. An earlier one that was not sent is so no more, as with TCP.
    pub(crate) fn is_urgent(&mut self, upto: u64) {
        self.urgent_out = Some(upto);
    }

    /// Both ends are done with it, as far as they can be.
    pub(crate) fn is_over(&self) -> bool {
        self.application == Application::Closed
            && self.proto.closing.state() == State::Closed
            && self.under_way == 0
            && !self.is_due
            && self.course != Course::Moved
            && !self.waits_for_answer()
    }

    /// Whether the peer may come to wait for what the application has still to read.
    pub(crate) fn waits_for_reader(&self) -> bool {
        let (unread, consumer) = (self.arrived - self.read, &self.proto.consumer);
        let taken = unread + u64::from(consumer.unconfirmed());
        let is_much = taken > u64::from(self.memory.size.bytes() / 2);
        // A peer sends nothing behind an urgent byte before that was read.
        let is_urgent = consumer.urgent() != UrgentMark::None;
        unread > 0 && (is_much || is_urgent || consumer.peer_waits())
    }

    /// The application has closed it, and the peer is told of an abort.
    pub(crate) fn is_aborted(&self) -> bool {
        self.application == Application::Closed && self.proto.closing.flags().aborted
    }

    /// It was given up, and the peer has not said that it knows.
    pub(crate) fn waits_for_answer(&self) -> bool {
        self.course.is_given_up() && !self.peer_is_done
    }

    /// The peer does not answer an abort. Whether it need not: a kernel that has written all it wants to write does not answer.
    pub(crate) fn waits_no_more(&mut self) -> bool {
        self.peer_is_done |= self.proto.closing.peer_has_written_all();
        self.peer_is_done
    }

    /// Both ends have written all, and the application has closed: nothing is left but that the peer does.
    pub(crate) fn waits_for_close(&self) -> bool {
        let state = self.proto.closing.state();
        self.application == Application::Closed
            && matches!(state, State::PeerCloseWait2 | State::PeerFinCloseWait)
    }

    /// The peer's close is not waited for any more: it writes nothing, and was told all.
    pub(crate) fn needs_no_close(&mut self, events: &mut VecDeque<Event>) {
        self.peer_is_done = true;
        self.proto.closing.on_received(StateFlags { closed: true, ..StateFlags::default() });
        self.tell_ending(events);
    }

    /// Whether the peer has said that it writes no more, or is done.
    pub(crate) fn has_peer_ended(&self) -> bool {
        self.peer_is_done || self.proto.closing.peer_has_written_all()
    }

    /// The peer's program is no more, and nothing was said of that: an abort.
    pub(crate) fn peer_is_gone(&mut self, events: &mut VecDeque<Event>) {
        if self.course.is_given_up() {
            // It was told of an abort, and has nobody to answer that.
            self.peer_is_done = true;
        } else if !self.has_peer_ended() {
            self.peer_is_done = true;
            self.proto.closing.on_received(StateFlags { aborted: true, ..StateFlags::default() });
            self.tell_ending(events);
        }
    }

    /// The RMB was taken from the peer, which has not answered an abort.
    pub(crate) fn rmb_is_back(&mut self) {
        self.peer_is_done |= self.course.is_given_up();
    }

    /// The peer goes on over TCP, or thinks that it does: it writes nothing here, and reads nothing.
    pub(crate) fn peer_has_left(&mut self, events: &mut VecDeque<Event>) {
        self.peer_is_done = true;
        self.give_up(events);
    }

    /// It cannot go on: the peer sees a reset.
    pub(crate) fn give_up(&mut self, events: &mut VecDeque<Event>) {
        self.proto.closing.abort();
        self.course = match self.course {
            Course::Runs | Course::GivenUp => Course::GivenUp,
            Course::Moved | Course::CutOff => Course::CutOff,
            Course::Lost => return,
        };
        self.is_due = true;
        self.tell_ending(events);
    }

    /// It has lost its link and goes on over another one.
    pub(crate) fn moved(&mut self) {
        (self.waits, self.under_way) = (false, 0);
        self.course = match self.course {
            Course::Runs | Course::Moved => Course::Moved,
            Course::GivenUp | Course::CutOff => {
                // The peer is told again; the bytes do not matter any more.
                self.is_due = true;
                Course::CutOff
            }
            Course::Lost => Course::Lost,
        };
    }

    /// It has lost its last link.
    pub(crate) fn lost(&mut self, events: &mut VecDeque<Event>) {
        self.proto.closing.on_links_lost();
        self.course = Course::Lost;
        (self.is_due, self.waits, self.under_way) = (false, false, 0);
        if let Application::Closes { .. } = self.application {
            self.application = Application::Closed;
        }
        self.tell_ending(events);
    }

    /// The peer's CDC message.
    pub(crate) fn handle_cdc(&mut self, cdc: &SmcrRepr, events: &mut VecDeque<Event>) {
        self.peer_is_done |= cdc.state.closed || cdc.state.aborted;
        if self.course.is_given_up() {
            return;
        }
        if cdc.flags.urgent_pending {
            // The answer depends on whether anything was read that the peer does not know of.
            self.count_read();
        }
        match self.proto.on_smcr(cdc) {
            Ok(news) => {
                self.is_due |= news.answer;
                if news.writable > 0 {
                    self.is_blocked = false;
                }
                if news.readable > 0 {
                    self.arrived += u64::from(news.readable);
                    if news.urgent {
                        self.urgent_in = UrgentIn::Came(self.arrived);
                    }
                    // The urgent byte's message and what follows are for the kernel.
                    if !self.is_to_leave() {
                        self.buffers.arrived(self.arrived);
                    }
                    if matches!(self.application, Application::Closes { .. } | Application::Closed)
                    {
                        // Nobody reads them, and the peer may wait for ever for room: as with TCP, it sees a reset.
                        self.give_up(events);
                    } else {
                        events.push_back(Event::Data { conn: self.id });
                    }
                }
            }
            Err(how) => {
                events.push_back(Event::Misbehaved { conn: self.id, how });
                self.give_up(events);
            }
        }
        self.tell_ending(events);
    }

    /// Its CDC message has arrived, and so have the bytes up to there.
    pub(crate) fn handle_sent(&mut self, cdc: &SmcrRepr, upto: u64, events: &mut VecDeque<Event>) {
        self.under_way = self.under_way.saturating_sub(1);
        if !cdc.flags.failover_validation {
            self.proto.on_sent(cdc);
        }
        if upto > self.done {
            self.done = upto;
            if self.buffers.release(upto) {
                events.push_back(Event::Room { conn: self.id });
            }
        }
    }

    /// There is room at the link, for which it waited.
    pub(crate) fn has_turn(&mut self) {
        self.waits = false;
    }

    pub(crate) fn tell_ending(&mut self, events: &mut VecDeque<Event>) {
        let (reading, writing) = (self.proto.closing.reading(), self.proto.closing.writing());
        // That this end has shut its own direction is no news.
        let news = if writing == Direction::Ended { Direction::Open } else { writing };
        let closed = self.peer_is_done;
        if (reading, news, closed) != self.told {
            self.told = (reading, news, closed);
            events.push_back(Event::Ending { conn: self.id, reading, writing, closed });
        }
    }

    /// Sends whatever there is to send. `rmb`: the peer's, on this link; `lkey`: the send buffer's. Without one of them nothing but an
    /// abort can be sent.
    pub(crate) fn pump(
        &mut self,
        link: &mut Link,
        rmb: Option<Key>,
        lkey: Option<u32>,
        nic: &mut impl Nic,
        events: &mut VecDeque<Event>,
    ) {
        // Once both ends have closed, the peer may withdraw its RMB before the last message of this side is complete.
        let is_open = self.proto.closing.state() != State::Closed;
        if (rmb.is_none() || lkey.is_none()) && is_open && !self.course.is_given_up() {
            self.give_up(events);
        }
        let (rmb, lkey) = (rmb.unwrap_or_default(), lkey.unwrap_or_default());
        loop {
            match self.step(link, rmb, lkey, nic) {
                Ok(true) => {}
                Ok(false) => break,
                // The application has spoilt its ring.
                Err(Broken) if !self.course.is_given_up() => self.give_up(events),
                Err(Broken) => break,
            }
        }
    }

    /// One message. Whether there may be more.
    fn step(
        &mut self,
        link: &mut Link,
        rmb: Key,
        lkey: u32,
        nic: &mut impl Nic,
    ) -> Result<bool, Broken> {
        if self.waits {
            return Ok(false);
        }
        if self.is_reader_of_interest() {
            self.count_read();
        }
        let is_open = self.proto.closing.writing() == Direction::Open;
        let backlog = if is_open { self.backlog()? } else { 0 };
        let room = self.proto.producer.room();
        // The mark is the cursor of its message: nothing goes with it that is behind the urgent byte.
        let urgent = self.urgent_out.filter(|upto| *upto > self.sent);
        let most = urgent.map_or(backlog, |upto| backlog.min(upto - self.sent));
        let len = most.min(room.into()).min(BURST.into()) as u32;
        let ends = self.ends_behind(backlog - u64::from(len));
        // With nothing to send along, the peer has to hear once that there is more.
        let blocks = backlog > u64::from(len) && room == len && !self.is_blocked;
        let is_moved = self.course == Course::Moved;
        if !(len > 0 || self.is_due || blocks || ends || is_moved) {
            return Ok(false);
        }
        if !link.has_room() {
            self.waits = true;
            link.wait(self.id);
            return Ok(false);
        }
        if is_moved {
            return self.send_again(link, rmb, lkey, nic);
        }
        if self.course == Course::CutOff {
            if ends {
                self.end();
            }
            return self.say_lost(link, nic);
        }
        let pieces = self.proto.producer.pieces(len);
        let source =
            if len > 0 { self.buffers.source(self.sent, len)? } else { Default::default() };
        let writes = Writes::new(&source, lkey, pieces, rmb);
        let is_urgent = urgent.is_some_and(|upto| upto == self.sent + u64::from(len) || room == 0);
        // Without room the message says that the byte will come.
        let is_made = match is_urgent {
            true => self.proto.producer.produce_urgent(len) || len == 0,
            false => self.proto.producer.produce(len),
        };
        if !is_made {
            return Err(Broken);
        }
        if backlog > u64::from(len) && room == len {
            self.proto.producer.block();
            self.is_blocked = true;
        }
        self.sent += u64::from(len);
        if ends {
            self.end();
        }
        Ok(self.post(link, &writes, nic))
    }

    /// What was not known to have arrived when the link was lost, behind a validation.
    fn send_again(
        &mut self,
        link: &mut Link,
        rmb: Key,
        lkey: u32,
        nic: &mut impl Nic,
    ) -> Result<bool, Broken> {
        let validation = self.proto.emit_validation().ok_or(Broken)?;
        let what = Sent::Cdc { conn: self.id, cdc: validation, upto: self.done };
        if link.post(nic, &[], &validation.emit(), what).is_err() {
            return Ok(false);
        }
        self.under_way += 1;
        let mut pieces = self.proto.producer.unconfirmed();
        if self.peer_is_done {
            // Nobody reads it there, and another connection may have the RMB by now: that this side has closed may be known.
            pieces = Default::default();
        }
        let len = pieces[0].len + pieces[1].len;
        // What the peer has consumed has arrived, although no completion has said so.
        let from = self.sent - u64::from(len);
        let source = if len > 0 { self.buffers.source(from, len)? } else { Default::default() };
        self.course = Course::Runs;
        Ok(self.post(link, &Writes::new(&source, lkey, pieces, rmb), nic))
    }

    /// Tells the peer that bytes are missing, which aborts the connection there: a validation that claims more than can have come.
    fn say_lost(&mut self, link: &mut Link, nic: &mut impl Nic) -> Result<bool, Broken> {
        let missing = self.proto.unacknowledged().wrapping_add(1);
        let mut cdc = self.proto.emit_validation().ok_or(Broken)?;
        cdc.seqno = cdc.seqno.wrapping_add(missing);
        let what = Sent::Cdc { conn: self.id, cdc, upto: self.done };
        let is_posted = link.post(nic, &[], &cdc.emit(), what).is_ok();
        self.is_due = !is_posted;
        self.under_way += u32::from(is_posted);
        Ok(is_posted)
    }

    /// WRITEs and the CDC message that tells of them. Where that fails the link is lost, which its completions say, and all is sent
    /// again over another one.
    fn post(&mut self, link: &mut Link, writes: &Writes, nic: &mut impl Nic) -> bool {
        // Before the peer is known nothing is pumped.
        let Some(cdc) = self.proto.emit_smcr() else { return false };
        let what = Sent::Cdc { conn: self.id, cdc, upto: self.sent };
        let is_posted = link.post(nic, writes.as_slice(), &cdc.emit(), what).is_ok();
        self.is_due = !is_posted;
        self.under_way += u32::from(is_posted);
        is_posted
    }

    /// Whether it matters now how far the application has read. The application's processor keeps that word for itself otherwise: where this one
    /// asks for it, what the application writes next comes later.
    pub(crate) fn is_reader_of_interest(&self) -> bool {
        self.proto.consumer.may_be_due() || self.application != Application::Writes
    }

    /// The application has read: the peer may have to hear of it.
    fn count_read(&mut self) {
        let read = self.buffers.read();
        // The application can write this cursor: no more is counted than had come.
        let n = read.saturating_sub(self.read).min(self.arrived - self.read) as u32;
        if n > 0 {
            self.read += u64::from(n);
            self.is_due |= self.proto.consumer.consume(n);
        }
    }

    /// Bytes that wait to be sent.
    fn backlog(&self) -> Result<u64, Broken> {
        let written = self.buffers.written()?;
        written.checked_sub(self.sent).ok_or(Broken)
    }

    /// Whether the application's end is told with what is sent now: with its last byte, or an abort at once.
    fn ends_behind(&self, left: u64) -> bool {
        match self.application {
            Application::Shuts => left == 0,
            Application::Closes { unread } => left == 0 || unread,
            Application::Writes | Application::Shut | Application::Closed => false,
        }
    }

    fn end(&mut self) {
        match self.application {
            Application::Shuts => {
                self.application = Application::Shut;
                // The message that is about to be sent says so.
                let _ = self.proto.closing.on_shutdown_write();
            }
            Application::Closes { unread } => {
                self.application = Application::Closed;
                let _ = self.proto.closing.on_close(unread);
                if self.peer_is_done && !self.proto.closing.has_told_end() {
                    // RFC 7609 has no answer to an abort behind the own shutdown, and the peer waits for one.
                    self.proto.closing.abort();
                }
            }
            Application::Writes | Application::Shut | Application::Closed => {}
        }
    }
}
