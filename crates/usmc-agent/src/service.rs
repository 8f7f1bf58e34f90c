//! The agent's ends of applications' connections: what an application does with its slot goes to the engine, and what comes from there
//! is said in the slot.
//!
//! An application says its end as every end of a slot does, by the flags of the direction that it sends (`usmc_shm::state`), and tells of
//! it ([`usmc_shm::news`]). The agent answers by those of the other direction. `Control::state` says what has become of the handshake:
//! `SLOT_CONFIRMED`, or `SLOT_WITHDRAWN` where the connection stays TCP.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use smc_proto::close::Direction;
use smc_proto::handshake::Circumstances;
use usmc_rdma::buffers::SlotBuffers;
use usmc_rdma::nic::DeviceId;
use usmc_rdma::{ConnId, Event, Wish};
use usmc_shm::layout::{ACCEPTOR, CLIENT, SLOT_CONFIRMED, SLOT_WITHDRAWN};
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{Acquire, Release};

use crate::driver::Driver;
use crate::rest::Rest;
use crate::room::Room;

/// Names a room of a service.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RoomId(pub usize);

/// Where a connection has its application.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The room.
    pub room: RoomId,
    /// The slot.
    pub slot: u32,
    /// The agent's end of it.
    pub end: usize,
}

struct Served {
    place: Place,
    /// What the engine knows of the application's end.
    told: EndState,
}

/// Rooms of applications, and the driver that moves their bytes.
pub struct Service {
    driver: Driver<SlotBuffers>,
    rooms: Vec<Room>,
    conns: HashMap<ConnId, Served>,
    /// By room and slot.
    slots: HashMap<(RoomId, u32), ConnId>,
}

impl Service {
    /// No application yet. `rest`: what the service's thread sleeps by.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub fn new(driver: Driver<SlotBuffers>, rest: &Rest) -> io::Result<Service> {
        driver.wakes().try_for_each(|fd| rest.watch(fd, DEVICES))?;
        Ok(Service { driver, rooms: Vec::new(), conns: HashMap::new(), slots: HashMap::new() })
    }

    /// The driver.
    pub fn driver(&self) -> &Driver<SlotBuffers> {
        &self.driver
    }

    /// A room for an application.
    ///
    /// # Errors
    /// As for [`Room::new`].
    pub fn add_room(&mut self, slots: u32, shift: u32, rest: &Rest) -> io::Result<RoomId> {
        let id = RoomId(self.rooms.len());
        let room = Room::new(id.0 as u32, slots, shift)?;
        let [_, to_agent, _] = room.descriptors();
        rest.watch(to_agent, id.0 as u64)?;
        let registered = room.register(&mut self.driver.adapters);
        registered.ok_or(io::ErrorKind::InvalidData)?;
        self.rooms.push(room);
        Ok(id)
    }

    /// A room.
    pub fn room(&self, id: RoomId) -> Option<&Room> {
        self.rooms.get(id.0)
    }

    /// A TCP connection of an application in that room begins its handshake: its client's or its server's. `None`: there is no slot, and it stays
    /// TCP.
    ///
    /// # Errors
    /// As for [`Driver::connect`].
    pub fn begin(
        &mut self,
        room: RoomId,
        is_client: bool,
        tcp: TcpStream,
        device: DeviceId,
        circumstances: Circumstances,
    ) -> io::Result<Option<Place>> {
        let end = if is_client { ACCEPTOR } else { CLIENT };
        let Some(known) = self.rooms.get_mut(room.0) else { return Ok(None) };
        let Some((slot, buffers, memory)) = known.take(end) else { return Ok(None) };
        let wish = Wish { buffers, memory, device, circumstances };
        let begun =
            if is_client { self.driver.connect(wish, tcp) } else { self.driver.accept(wish, tcp) };
        let conn = begun.inspect_err(|_| known.give_back(slot))?;
        let place = Place { room, slot, end };
        self.conns.insert(conn, Served { place, told: EndState::Open });
        self.slots.insert((room, slot), conn);
        Ok(Some(place))
    }

    /// The processes of an application are gone: its connections end as the kernel ends those of a killed process.
    pub fn leave(&mut self, room: RoomId) {
        let of_room = |(at, _): &(&(RoomId, u32), &ConnId)| at.0 == room;
        let conns: Vec<ConnId> = self.slots.iter().filter(of_room).map(|(_, conn)| *conn).collect();
        for conn in conns {
            let Some(served) = self.conns.get_mut(&conn) else { continue };
            if matches!(served.told, EndState::Open | EndState::Shut) {
                let Place { room, slot, end } = served.place;
                let ring = self
                    .rooms
                    .get(room.0)
                    .map(|room| room.segment().ring(slot, end).map(|ring| ring.has_data()));
                served.told = EndState::Closed;
                self.driver.close(conn, ring == Some(Ok(true)));
            }
        }
    }

    /// Looks at everything once. Whether there was anything. Events that a slot cannot say are handed out.
    pub fn turn(&mut self, mut each: impl FnMut(Option<Place>, Event, Option<TcpStream>)) -> bool {
        let mut any = self.driver.turn();
        for room in 0..self.rooms.len() {
            any |= self.look_at_room(RoomId(room));
        }
        while let Some((event, tcp)) = self.driver.poll_event() {
            any = true;
            let place = self.say(&event);
            each(place, event, tcp);
        }
        any
    }

    fn look_at_room(&mut self, id: RoomId) -> bool {
        let Some(room) = self.rooms.get(id.0) else { return false };
        let mut told = room.segment().header().news.take();
        let any = told != 0;
        while told != 0 {
            let slot = told.trailing_zeros();
            told &= told - 1;
            // The application can tell of any slot.
            if let Some(conn) = self.slots.get(&(id, slot)).copied() {
                self.look_at(conn);
            }
        }
        any
    }

    /// What the application has done with its end.
    fn look_at(&mut self, conn: ConnId) {
        let Some(served) = self.conns.get_mut(&conn) else { return };
        let Place { room, slot, end } = served.place;
        let Some(segment) = self.rooms.get(room.0).map(Room::segment) else { return };
        let Ok(known) = segment.slot(slot) else { return };
        // Acquire: what it has written before.
        let now = known.dir[1 - end].producer.flags(Acquire).end();
        match (served.told, now) {
            (EndState::Closed | EndState::Aborted, _) => {}
            (_, EndState::Closed | EndState::Aborted) => {
                served.told = now;
                self.driver.close(conn, now == EndState::Aborted);
            }
            (EndState::Open, EndState::Shut) => {
                served.told = now;
                self.driver.shut(conn);
            }
            _ => self.driver.dirty(conn),
        }
    }

    /// Says it in the slot, and wakes the application's processes that sleep.
    fn say(&mut self, event: &Event) -> Option<Place> {
        let conn = match event {
            Event::Established { conn, .. }
            | Event::Fallback { conn, .. }
            | Event::Failed { conn, .. }
            | Event::Data { conn }
            | Event::Room { conn }
            | Event::Ending { conn, .. }
            | Event::Misbehaved { conn, .. }
            | Event::Over { conn } => *conn,
            Event::GroupUp { .. } | Event::GroupDown { .. } | Event::Withdrawn { .. } => {
                return None;
            }
        };
        let place = self.conns.get(&conn)?.place;
        let room = self.rooms.get_mut(place.room.0)?;
        let segment = room.segment();
        let (control, own) = {
            let slot = segment.slot(place.slot).ok()?;
            (&slot.control, &slot.dir[place.end].producer)
        };
        let wakes = match event {
            Event::Established { .. } => {
                control.state.store(SLOT_CONFIRMED, Release);
                true
            }
            Event::Fallback { .. } | Event::Failed { .. } => {
                control.state.store(SLOT_WITHDRAWN, Release);
                true
            }
            Event::Data { .. } => {
                let ring = segment.ring(place.slot, place.end).ok()?;
                ring.has_rx_sleepers() && ring.take_rx_sleepers(false) != 0
            }
            Event::Room { .. } => {
                let ring = segment.ring(place.slot, 1 - place.end).ok()?;
                ring.has_tx_sleepers() && ring.take_tx_sleepers(false) != 0
            }
            Event::Ending { reading, writing, .. } => {
                match (reading, writing) {
                    (Direction::Reset | Direction::Aborted, _)
                    | (_, Direction::Reset | Direction::Aborted) => _ = own.close(true),
                    (_, Direction::Ended) => _ = own.close(false),
                    (Direction::Ended, Direction::Open) => _ = own.shut(),
                    (Direction::Open, Direction::Open) => {}
                }
                true
            }
            _ => false,
        };
        if wakes {
            room.wake_application();
        }
        if matches!(event, Event::Fallback { .. } | Event::Failed { .. } | Event::Over { .. }) {
            self.conns.remove(&conn);
            self.slots.remove(&(place.room, place.slot));
            if matches!(event, Event::Over { .. }) {
                room.give_back(place.slot);
            }
        }
        Some(place)
    }

    /// The application has taken what it had written out of the slot of a connection that stays TCP.
    pub fn release(&mut self, place: Place) {
        if !self.slots.contains_key(&(place.room, place.slot))
            && let Some(room) = self.rooms.get_mut(place.room.0)
        {
            room.give_back(place.slot);
        }
    }

    /// Asks all to wake the agent. It looks once more before it sleeps.
    ///
    /// # Errors
    /// A device has failed.
    pub fn arm(&self) -> Result<(), usmc_verbs::Error> {
        for room in &self.rooms {
            // Where there is news the next look finds it.
            let _ = room.segment().header().news.sleep();
        }
        self.driver.arm()
    }

    /// Sleeps behind [`Service::arm`] and one more look, for so long at most.
    ///
    /// # Errors
    /// As for [`Rest::sleep`].
    pub fn sleep(&self, rest: &Rest, others: &[BorrowedFd<'_>], most: Duration) -> io::Result<()> {
        let due = self.driver.next_turn().map_or(most, |due| due.min(most));
        let all: Vec<_> = self.driver.handshakes().chain(others.iter().copied()).collect();
        let has_rung = |number: u64| {
            let room = usize::try_from(number).ok().and_then(|at| self.rooms.get(at));
            room.into_iter().for_each(Room::has_rung);
        };
        let slept = rest.sleep(&all, Some(due), has_rung);
        self.rooms.iter().for_each(|room| room.segment().header().news.wake());
        slept
    }
}

/// What [`Rest`] calls the devices: no room's number.
const DEVICES: u64 = u64::MAX;
