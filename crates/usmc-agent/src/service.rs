//! The agent's ends of applications' connections: what an application does with its slot goes to the engine, and what comes from there
//! is said in the slot.
//!
//! ```text
//!               its turn        established
//!   Waits ────────────▶ Shakes ─────────────▶ Serves ──over──▶ (gone)
//!     │                    │ it stays TCP
//!     └──it cannot begin───┴──▶ Leaves ──the application is gone, and all that it has left is sent──▶ (gone)
//! ```
//!
//! Where a handshake fails nobody knows what the peer has, and the application's connection is reset.
//!
//! The application has its ring from the start, whatever the peer does: what it writes waits there, and its end does, too.
//!
//! [`crate::control`] brings connections here. An application in the agent's own process may do it itself: [`Service::hand_over`], then the
//! answer by [`Service::poll_answer`], then [`Service::is_answered`].

mod left;
mod looks;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smc_proto::close::Direction;
use smc_proto::handshake::Circumstances;
use smc_proto::wire::clc::Message;
use usmc_rdma::buffers::SlotBuffers;
use usmc_rdma::nic::DeviceId;
use usmc_rdma::{ConnId, Event, Memory, Wish};
use usmc_shm::agent::{Answer, Place, Role};
use usmc_shm::state::EndState;

use crate::deputy::{Deputy, Rang};
use crate::driver::{Driver, Wake};
use crate::lines::Lines;
use crate::rest::Rest;
use crate::room::Taken;
use crate::rooms::{RoomId, Rooms};
use crate::sys::{self, Owner};

use left::Left;

/// Numbers in the set of what wakes that are not this module's.
pub const OTHERS: u64 = 1 << 63;
/// The driver's, by [`Wake`]; smaller ones are tickets.
const WAKES: [(u64, Wake); 3] =
    [(OTHERS - 1, Wake::Handshakes), (OTHERS - 2, Wake::Completions), (OTHERS - 3, Wake::Events)];
const TICKETS: u64 = RoomId::FIRST;

fn number_of(wake: Wake) -> u64 {
    WAKES.into_iter().find(|(_, of)| *of == wake).map_or(OTHERS, |(number, _)| number)
}
/// As Declines have them (RFC 7609, appendix A.2.4): no memory, and no device.
const NO_MEMORY: u32 = 0x0101_0000;
const NO_DEVICE: u32 = 0x0303_0000;

/// A connection that was handed over.
#[derive(Debug)]
pub struct Handed {
    /// Which end of it the process has.
    pub role: Role,
    /// Its end of the TCP connection to another host.
    pub tcp: TcpStream,
    /// The other end of that which the application has instead.
    pub deputy: OwnedFd,
    /// The process.
    pub owner: Owner,
}

/// Names a connection that was handed over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(u64);

enum Stage {
    Waits(Box<Wished>),
    Shakes,
    Serves,
    Leaves(Left),
}

/// A handshake that is about to begin.
struct Wished {
    role: Role,
    tcp: TcpStream,
    device: DeviceId,
    buffers: SlotBuffers,
    memory: Memory,
}

struct Case {
    stage: Stage,
    /// The line in which it waits, or has a place.
    line: Option<IpAddr>,
    owner: Owner,
    /// Once the handshake has begun.
    conn: Option<ConnId>,
    room: RoomId,
    place: Place,
    deputy: Deputy,
    /// The application's processes are gone: nobody has the slot.
    has_died: bool,
}

/// Rooms of processes, and the driver that moves their bytes.
pub struct Service {
    driver: Driver<SlotBuffers>,
    rest: Rest,
    rooms: Rooms,
    cases: FxHashMap<Ticket, Case>,
    /// Their slots.
    places: FxHashMap<Place, Ticket>,
    next: u64,
    conns: FxHashMap<ConnId, Ticket>,
    lines: Lines<Ticket>,
    /// Those that have a place in a line, and since when.
    begun: VecDeque<(Instant, Ticket)>,
    /// Those that send what their applications have left, how far they were, and when they are looked at next.
    sending: VecDeque<(Instant, Ticket, u64)>,
    answers: VecDeque<(Ticket, Answer)>,
    events: VecDeque<Event>,
    /// Connections that are looked at in each turn.
    hot: Vec<Ticket>,
    /// When those are looked at next that read in silence, and how long after the last look that is.
    half: BinaryHeap<Reverse<(Instant, Ticket, Duration)>>,
    /// Connections whose applications are to be woken by their ears.
    unheard: Vec<Ticket>,
    /// What others watch and is ready.
    ready: Vec<u64>,
    /// When the last turn has begun, or one shortly before.
    turned: Instant,
    /// For how many turns that counts.
    clock: u8,
    /// When sockets were looked at last.
    heard: Instant,
    /// Turns since sockets were looked at.
    deaf: u32,
    swept: Instant,
    ticked: Instant,
    has_to_tick: bool,
}

impl Service {
    /// No application yet. `rings`: log2 of the bytes of each ring, 14 to 22; or of the RMB and of the send buffer, as
    /// [`usmc_shm::layout::rings_word`] has them.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub fn new(driver: Driver<SlotBuffers>, rest: Rest, rings: u32) -> io::Result<Service> {
        driver.wakes().try_for_each(|(wake, fd)| rest.watch(fd, number_of(wake)))?;
        let now = Instant::now();
        Ok(Service {
            driver,
            rest,
            rooms: Rooms::new(rings),
            cases: FxHashMap::default(),
            places: FxHashMap::default(),
            next: 0,
            conns: FxHashMap::default(),
            lines: Lines::new(),
            begun: VecDeque::new(),
            sending: VecDeque::new(),
            answers: VecDeque::new(),
            events: VecDeque::new(),
            hot: Vec::new(),
            half: BinaryHeap::new(),
            unheard: Vec::new(),
            ready: Vec::new(),
            turned: now,
            clock: 0,
            heard: now,
            deaf: 0,
            swept: now,
            ticked: now,
            has_to_tick: false,
        })
    }

    /// When the last turn has begun, or one shortly before.
    pub fn turned(&self) -> Instant {
        self.turned
    }

    /// The driver.
    pub fn driver(&self) -> &Driver<SlotBuffers> {
        &self.driver
    }

    /// What wakes the service. Numbers of others have [`OTHERS`] set, and come back by [`Service::take_ready`].
    pub fn rest(&self) -> &Rest {
        &self.rest
    }

    /// Connections that were handed over and are not over.
    pub fn connections(&self) -> usize {
        self.cases.len()
    }

    /// Whether a connection is still of use to its application, or to its peer. One that was aborted is of use to nobody, and its peer may never
    /// answer: a kernel says nothing of a program that is killed while its send queue is full.
    pub fn is_in_use(&self) -> bool {
        let is_aborted = |conn| self.driver.engine.is_aborted(conn);
        self.cases.values().any(|case| !case.conn.is_some_and(is_aborted))
    }

    /// Rooms that are there.
    pub fn rooms(&self) -> usize {
        self.rooms.len()
    }

    /// What of others' is ready, since the last call.
    pub fn take_ready(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ready)
    }

    /// A process hands a connection over. The answer comes by [`Service::poll_answer`].
    pub fn hand_over(&mut self, handed: Handed) -> Ticket {
        let ticket = Ticket(self.next);
        self.next = (self.next + 1) % TICKETS;
        let answer = match self.seat(ticket, handed) {
            Ok(place) => Answer::Ring(place),
            Err(code) => Answer::Tcp { code },
        };
        self.answers.push_back((ticket, answer));
        ticket
    }

    /// The Proposal for a server at that address, which goes with the SYN.
    ///
    /// # Errors
    /// As a Decline has it: no device leads there.
    pub fn propose(&self, server: IpAddr) -> Result<Message, u32> {
        let device = sys::source_of(server).and_then(|ip| self.driver.adapters.device_for(ip));
        device.and_then(|device| self.driver.propose(device)).ok_or(NO_DEVICE)
    }

    /// It gets a slot, and waits for its turn.
    fn seat(&mut self, ticket: Ticket, handed: Handed) -> Result<Place, u32> {
        let Handed { role, tcp, deputy, owner } = handed;
        let device = tcp.local_addr().ok().map(|at| at.ip());
        let device = device.and_then(|ip| self.driver.adapters.device_for(ip)).ok_or(NO_DEVICE)?;
        let taken = self.rooms.take(owner, &mut self.driver.adapters).ok_or(NO_MEMORY)?;
        let (room, segment, Taken { slot, usage, buffers, memory }) = taken;
        let (_, id) = self.rooms.memfd(room).ok_or(NO_MEMORY)?;
        let mut deputy = Deputy::new(segment.pair(slot).map_err(|_| NO_MEMORY)?, deputy);
        deputy.has_ear = self.rooms.has_own_ear(room);
        deputy.confirm(usage);
        let place = Place { segment: id, slot, usage: usage.to_bits() };
        // A server has a Proposal that was sent, and waits.
        let line = tcp.peer_addr().ok().map(|at| at.ip()).filter(|_| role == Role::Client);
        let wished = Wished { role, tcp, device, buffers, memory };
        let stage = Stage::Waits(Box::new(wished));
        let case = Case { stage, line, owner, conn: None, room, place, deputy, has_died: false };
        self.cases.insert(ticket, case);
        self.places.insert(place, ticket);
        if line.is_none_or(|peer| self.lines.join(peer, ticket)) && self.begin(ticket).is_err() {
            // Nothing was said by TCP, and no process has the slot.
            self.next_in_line(ticket);
            self.is_let_go(ticket);
            self.forget(ticket);
            return Err(NO_MEMORY);
        }
        Ok(place)
    }

    /// Its handshake begins.
    ///
    /// # Errors
    /// It cannot: TCP as it was.
    fn begin(&mut self, ticket: Ticket) -> Result<(), TcpStream> {
        let Some(case) = self.cases.get_mut(&ticket) else { return Ok(()) };
        let wished = match std::mem::replace(&mut case.stage, Stage::Shakes) {
            Stage::Waits(wished) => *wished,
            other => {
                case.stage = other;
                return Ok(());
            }
        };
        let Wished { role, tcp, device, buffers, memory } = wished;
        let circumstances = Circumstances { peer_says_smc: true, ..Circumstances::FINE };
        let wish = Wish { buffers, memory, device, circumstances };
        let conn = match role {
            Role::Client => self.driver.connect(wish, tcp),
            Role::Proposed => self.driver.connect_proposed(wish, tcp),
            Role::Server => self.driver.accept(wish, tcp),
        }?;
        case.conn = Some(conn);
        self.conns.insert(conn, ticket);
        if case.line.is_some() {
            self.begun.push_back((Instant::now(), ticket));
        }
        // What the application has done meanwhile.
        match case.deputy.told {
            EndState::Open => {}
            EndState::Shut => self.driver.shut(conn),
            EndState::Closed | EndState::Aborted => {
                self.driver.close(conn, case.deputy.told == EndState::Aborted);
            }
        }
        Ok(())
    }

    /// The next answer, for the process that has handed that connection over.
    pub fn poll_answer(&mut self) -> Option<(Ticket, Answer)> {
        self.answers.pop_front()
    }

    /// What goes along with [`Answer::Ring`].
    pub fn memfd(&self, ticket: Ticket) -> Option<BorrowedFd<'_>> {
        let room = self.cases.get(&ticket)?.room;
        self.rooms.memfd(room).map(|(memfd, _)| memfd)
    }

    /// The process has its answer.
    pub fn is_answered(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        case.deputy.begin();
        match case.deputy.watch(&self.rest, ticket.0) {
            Ok(true) => _ = self.heat(ticket),
            // Its peer has reset it meanwhile.
            Ok(false) => self.is_gone(ticket, false),
            // It would never be heard. Its process lives, and has the slot.
            Err(_) => self.abort(ticket),
        }
    }

    /// The process cannot have its answer: it is gone.
    pub fn abandon(&mut self, ticket: Ticket) {
        self.answers.retain(|(other, _)| *other != ticket);
        self.is_gone(ticket, true);
    }

    /// What has happened, oldest first; without [`Event::Data`] and [`Event::Room`].
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The host stops: all connections are aborted, also those that are to be.
    pub fn stop(&mut self) {
        // Before others end, as their places in lines would be given to these.
        self.abort_all_that(|stage| matches!(stage, Stage::Waits(_)));
        self.driver.stop();
        self.take_events();
        self.abort_all_that(|stage| matches!(stage, Stage::Leaves(_)));
    }

    /// Takes what the engine says. Whether there was anything.
    fn take_events(&mut self) -> bool {
        let any = self.driver.has_events();
        while let Some((event, tcp)) = self.driver.poll_event() {
            self.handle(&event, tcp);
            if !matches!(event, Event::Data { .. } | Event::Room { .. }) {
                self.events.push_back(event);
            }
        }
        any
    }

    fn handle(&mut self, event: &Event, tcp: Option<TcpStream>) {
        let conn = match event {
            Event::Established { conn, .. }
            | Event::Fallback { conn, .. }
            | Event::Failed { conn, .. }
            | Event::Data { conn }
            | Event::Room { conn }
            | Event::Ending { conn, .. }
            | Event::Misbehaved { conn, .. }
            | Event::Over { conn } => *conn,
            Event::Withdrawn { .. } | Event::GroupUp { .. } | Event::GroupDown { .. } => return,
        };
        let Some(ticket) = self.conns.get(&conn).copied() else { return };
        match event {
            Event::Data { .. } => {
                self.relay(ticket);
                if let Some(deputy) = self.heat(ticket) {
                    let (rang, is_silent) = (deputy.wake_reader(), deputy.reads_in_silence());
                    self.has_rung(ticket, rang);
                    self.rest.brings();
                    if is_silent {
                        self.watch_reader(ticket);
                    }
                }
            }
            Event::Room { .. } => {
                self.relay(ticket);
                let rang = self.heat(ticket).map_or(Rang::Nobody, |deputy| deputy.wake_writer());
                if rang != Rang::Nobody {
                    self.has_rung(ticket, rang);
                    self.rest.brings();
                }
            }
            Event::Established { .. } => {
                self.next_in_line(ticket);
                if let Some(case) = self.cases.get_mut(&ticket) {
                    case.stage = Stage::Serves;
                    // What it has written so far, by the ring or out of it.
                    self.relay(ticket);
                    self.driver.dirty(conn);
                }
            }
            Event::Fallback { reason, peer_reason, .. } => {
                self.conns.remove(&conn);
                match tcp {
                    Some(tcp) => self.stays(ticket, tcp, peer_reason.unwrap_or(*reason).0),
                    None => self.fails(ticket),
                }
            }
            Event::Failed { .. } => {
                self.conns.remove(&conn);
                self.fails(ticket);
            }
            Event::Ending { reading, writing, closed, .. } => {
                let is_reset = |end| matches!(end, Direction::Reset | Direction::Aborted);
                let end = match reading {
                    _ if is_reset(*reading) || is_reset(*writing) => EndState::Aborted,
                    _ if *closed => EndState::Closed,
                    Direction::Ended => EndState::Shut,
                    _ => EndState::Open,
                };
                self.say(ticket, end);
            }
            Event::Over { .. } => self.is_over(conn, ticket),
            _ => {}
        }
    }

    /// An ear is rung once for all that its set has to hear, when all of that is there ([`Service::ring_ears`]).
    pub(super) fn has_rung(&mut self, ticket: Ticket, rang: Rang) {
        if rang == Rang::Ear {
            self.unheard.push(ticket);
        }
    }

    /// Rings the ears of what the turn has brought.
    pub(super) fn ring_ears(&mut self) {
        if self.unheard.is_empty() {
            return;
        }
        let mut last = None;
        for ticket in self.unheard.drain(..) {
            let Some(case) = self.cases.get(&ticket) else { continue };
            let ear = case.deputy.ear().map(|ear| (case.room, ear));
            if ear.is_some() && ear == last {
                continue;
            }
            match ear {
                Some((room, number)) if self.rooms.ring(room, number) => last = ear,
                _ => case.deputy.ring_bell(),
            }
        }
    }

    /// A process asks for the agent's ear of the room of a connection of its user's.
    pub fn own_ear(&mut self, owner: Owner, place: Place) -> Option<BorrowedFd<'_>> {
        let room = self.room_of(owner, place)?;
        let ear = self.rooms.own_ear(room, &self.rest).ok()?;
        self.cases
            .values_mut()
            .filter(|case| case.room == room)
            .for_each(|case| case.deputy.has_ear = true);
        Some(ear)
    }

    /// The room of a connection of the user's.
    fn room_of(&self, owner: Owner, place: Place) -> Option<RoomId> {
        let case = self.cases.get(self.places.get(&place)?)?;
        (case.owner.uid == owner.uid).then_some(case.room)
    }

    /// A process asks for an ear, for the room of a connection of its user's.
    pub fn ear(&mut self, owner: Owner, place: Place) -> Option<(u32, OwnedFd)> {
        self.rooms.add_ear(self.room_of(owner, place)?)
    }

    /// Nobody knows what the peer has: the application's connection is reset.
    fn fails(&mut self, ticket: Ticket) {
        self.next_in_line(ticket);
        if let Some(case) = self.cases.get_mut(&ticket) {
            case.deputy.say(EndState::Aborted);
            self.forget(ticket);
        }
    }

    /// The agent cannot go on with it: it is reset at both ends.
    pub(super) fn abort(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        case.deputy.say(EndState::Aborted);
        case.deputy.told = EndState::Aborted;
        case.conn.into_iter().for_each(|conn| self.driver.close(conn, true));
        self.end_if_left(ticket);
    }

    /// No process has the slot.
    fn is_let_go(&mut self, ticket: Ticket) {
        if let Some(case) = self.cases.get_mut(&ticket) {
            case.has_died = true;
        }
    }

    /// It is over for the agent. The slot may have its process still.
    fn forget(&mut self, ticket: Ticket) {
        self.next_in_line(ticket);
        let Some(case) = self.cases.remove(&ticket) else { return };
        self.places.remove(&case.place);
        // A process that has its TCP connection again lets go of the slot behind that.
        let is_fetched = matches!(&case.stage, Stage::Leaves(left) if left.is_fetched);
        self.rooms.leave(case.room, case.place.slot, case.has_died && !is_fetched);
        self.has_to_tick = true;
    }

    /// It needs its place in the line no more: another one may begin.
    fn next_in_line(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        let Some(peer) = case.line.take() else { return };
        if matches!(case.stage, Stage::Waits(_)) {
            return self.lines.give_up(peer, ticket);
        }
        while let Some(next) = self.lines.leave(peer) {
            let Err(tcp) = self.begin(next) else { return };
            // The place is given on.
            if let Some(case) = self.cases.get_mut(&next) {
                case.line = None;
            }
            self.is_left(next, tcp, NO_MEMORY);
        }
    }

    /// How the peer's end is.
    fn say(&mut self, ticket: Ticket, end: EndState) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        case.deputy.say(end);
        if end == EndState::Aborted {
            // The application finds all that has come in its ring. What it does from now on concerns nobody.
            self.is_gone(ticket, false);
        } else {
            self.relay(ticket);
            self.heat(ticket);
            self.watch_last_close(ticket);
        }
    }

    /// The connection is over at both ends.
    fn is_over(&mut self, conn: ConnId, ticket: Ticket) {
        self.conns.remove(&conn);
        self.forget(ticket);
    }
}
