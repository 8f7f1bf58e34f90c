//! What brings completions, CLC messages and time to the engine. It never waits.

mod tcp;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use smc_proto::wire::clc::{MAX_LEN, Message, Reception};
use usmc_rdma::buffers::Buffers;
use usmc_rdma::nic::{DeviceId, QpId, RmbId};
use usmc_rdma::{Config, ConnId, Engine, Event, Wish};
use usmc_verbs::{Completion, Error as DeviceError, Event as DeviceEvent, Status};

use crate::adapter::{Adapter, BATCH};
use crate::link::{self, NO_MESSAGE};
use crate::nic::{Adapters, place_of};
use crate::sys;

use tcp::{Found, Handshake, Incoming};

/// What wakes for a TCP connection: each arrival once, as the beginning of what may be no message stays where it is until more has come. Behind
/// the handshake a Decline may come, and the end does.
const ARRIVALS: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

/// What has come along with the last message of a handshake is told by no further arrival: so long after it a connection that goes on is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// So many messages of one handshake are taken in one look: a peer that sends without end has others wait no longer.
const MESSAGES: usize = 8;

/// Completions of sends that nothing waits for are taken after this time at the latest, where nothing else wakes the driver before.
const HARVEST: Duration = Duration::from_millis(10);

/// Why the driver is to have a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// Something has come by a TCP connection.
    Handshakes,
    /// A queue that was armed has a completion.
    Completions,
    /// A device has something to say of itself, its ports or its queue pairs.
    Events,
}

/// What has become of handshakes, since the agent began.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// The connection is by RDMA.
    pub established: u64,
    /// It stays TCP.
    pub fallbacks: u64,
    /// Nobody knows what the peer has: it was reset.
    pub failures: u64,
}

/// An engine with its devices and the TCP connections.
pub struct Driver<B> {
    /// The link groups and connections.
    pub engine: Engine<B>,
    /// The devices.
    pub adapters: Adapters,
    counts: Counts,
    handshakes: HashMap<ConnId, Handshake>,
    /// What has come by the TCP connections: the set knows them by their tokens.
    arrivals: OwnedFd,
    by_token: HashMap<u64, ConnId>,
    /// Connections that are SMC: TCP stays as long as they do.
    established: HashMap<ConnId, Handshake>,
    /// Those of them that are looked at once, and when.
    young: VecDeque<(ConnId, Duration)>,
    /// How long a port settles, and when those have that are doing so.
    port_delay: Duration,
    settling: Vec<(DeviceId, Duration)>,
    begun: Instant,
    /// When the turn under way has begun, since then; or when one shortly before has.
    turned: Duration,
    /// What the next turn looks at, by [`Wake`].
    woken: [bool; 3],
    /// Where completions and messages are taken to.
    taken: Box<([Completion; BATCH], link::Message)>,
    /// What has come out of the engine, with the TCP connection where it is the caller's again.
    events: VecDeque<(Event, Option<TcpStream>)>,
}

impl<B: Buffers> Driver<B> {
    /// No connection yet.
    ///
    /// # Errors
    /// epoll_create1(2).
    pub fn new(config: Config, adapters: Adapters) -> io::Result<Driver<B>> {
        Ok(Driver {
            engine: Engine::new(config),
            adapters,
            counts: Counts::default(),
            handshakes: HashMap::new(),
            arrivals: epoll::create(CreateFlags::CLOEXEC)?,
            by_token: HashMap::new(),
            established: HashMap::new(),
            young: VecDeque::new(),
            port_delay: Duration::ZERO,
            settling: Vec::new(),
            begun: Instant::now(),
            turned: Duration::ZERO,
            woken: [true; 3],
            taken: Box::new(([Completion::default(); BATCH], NO_MESSAGE)),
            events: VecDeque::new(),
        })
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// A client's connection, whose TCP is there, begins its handshake. The flags of the socket stay as they are, as it may be another
    /// process', too; its options are the driver's.
    ///
    /// # Errors
    /// The wish is refused ([`usmc_rdma::RefusedWish`]): TCP as it was.
    pub fn connect(&mut self, wish: Wish<B>, tcp: TcpStream) -> Result<ConnId, TcpStream> {
        let now = self.now();
        let Ok(conn) = self.engine.connect(wish, &mut self.adapters, now) else { return Err(tcp) };
        self.shake(conn, tcp);
        Ok(conn)
    }

    /// The Proposal for a connection that leads to that device, to go with its SYN.
    pub fn propose(&self, device: DeviceId) -> Option<Message> {
        self.engine.propose(device, &self.adapters)
    }

    /// A client's, whose Proposal ([`Driver::propose`]) has gone with the SYN.
    ///
    /// # Errors
    /// As above.
    pub fn connect_proposed(&mut self, wish: Wish<B>, tcp: TcpStream) -> Result<ConnId, TcpStream> {
        let now = self.now();
        match self.engine.connect_proposed(wish, &mut self.adapters, now) {
            Ok(conn) => {
                self.shake(conn, tcp);
                // The answer may be there.
                self.wake(Wake::Handshakes);
                Ok(conn)
            }
            Err(_) => Err(tcp),
        }
    }

    /// A server's, likewise.
    ///
    /// # Errors
    /// As above.
    pub fn accept(&mut self, wish: Wish<B>, tcp: TcpStream) -> Result<ConnId, TcpStream> {
        let now = self.now();
        let Ok(conn) = self.engine.accept(wish, &mut self.adapters, now) else { return Err(tcp) };
        self.shake(conn, tcp);
        // The Proposal is there.
        self.wake(Wake::Handshakes);
        Ok(conn)
    }

    fn shake(&mut self, conn: ConnId, tcp: TcpStream) {
        sys::close_at_once(&tcp);
        sys::hear_each_byte(&tcp);
        let token = u64::from(conn.token());
        let data = EventData::new_u64(token);
        let is_watched = epoll::add(&self.arrivals, &tcp, data, ARRIVALS).is_ok();
        self.by_token.insert(token, conn);
        let ends = tcp.local_addr().and_then(|local| Ok([local, tcp.peer_addr()?])).ok();
        let incoming = Incoming::Messages(Reception::new());
        let handshake = Handshake { tcp, ends, incoming, unsent: Vec::new(), awaits_first: true };
        self.handshakes.insert(conn, handshake);
        if !is_watched {
            // Nothing would ever be found there.
            let now = self.now();
            self.engine.handle_clc_closed(conn, &mut self.adapters, now);
        }
        self.flush();
    }

    /// Nothing is to be found there any more. The socket may be another process', too, so that a close does not end the watch.
    fn unwatch(&mut self, conn: ConnId) {
        self.by_token.remove(&u64::from(conn.token()));
        if let Some(handshake) = self.handshakes.get(&conn).or(self.established.get(&conn)) {
            let _ = epoll::delete(&self.arrivals, &handshake.tcp);
        }
    }

    /// The application has written or read.
    pub fn dirty(&mut self, conn: ConnId) {
        self.engine.handle_dirty(conn, &mut self.adapters);
        self.flush();
    }

    /// It ends its writing direction.
    pub fn shut(&mut self, conn: ConnId) {
        self.engine.shut(conn, &mut self.adapters);
        self.flush();
    }

    /// It closes.
    pub fn close(&mut self, conn: ConnId, unread: bool) {
        let now = self.now();
        self.engine.close(conn, unread, &mut self.adapters, now);
        self.flush();
    }

    /// An RMB that no connection has is asked for ([`Engine::withdraw`]).
    pub fn withdraw(&mut self, rmb: RmbId) -> bool {
        let now = self.now();
        let is_asked = self.engine.withdraw(rmb, &mut self.adapters, now);
        self.flush();
        is_asked
    }

    /// The host stops.
    pub fn stop(&mut self) {
        let now = self.now();
        self.engine.stop(&mut self.adapters, now);
        self.flush();
    }

    /// Looks at everything once, which begins now or has begun shortly after that. Whether there was anything.
    pub fn turn(&mut self, now: Instant) -> bool {
        self.turned = now.duration_since(self.begun);
        let mut any = false;
        let [has_arrivals, has_notices, has_events] = std::mem::take(&mut self.woken);
        for device in 0..self.adapters.all.len() {
            if has_notices {
                self.take_notices(device);
            }
            any |= has_events && self.look_at_events(device);
            any |= self.look_at_device(device);
        }
        any |= has_arrivals && self.look_at_handshakes();
        self.look_at_young();
        self.look_at_settling();
        let now = self.turned;
        if self.engine.next_timeout().is_some_and(|due| due <= now) {
            self.engine.handle_timeout(&mut self.adapters, now);
            any = true;
        }
        self.flush();
        any
    }

    /// The own address and the peer's of a connection that is SMC.
    pub fn ends(&self, conn: ConnId) -> Option<[SocketAddr; 2]> {
        self.established.get(&conn)?.ends
    }

    /// What has become of handshakes.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Those of connections in their handshakes.
    pub fn in_handshake(&self) -> impl Iterator<Item = [SocketAddr; 2]> {
        self.handshakes.values().filter_map(|handshake| handshake.ends)
    }

    /// What [`Driver::wakes`] calls so is readable: the next turn looks at it. It does not do so by itself, as each look is a system call.
    pub fn wake(&mut self, by: Wake) {
        self.woken[by as usize] = true;
    }

    /// Queues that have woken the driver are to be armed again.
    fn take_notices(&mut self, device: usize) {
        let adapter = self.adapters.all.get(device).filter(|adapter| !adapter.is_dead);
        if adapter.is_some_and(|adapter| adapter.take_notices().is_err()) {
            self.lose_device(DeviceId(device as u8));
        }
    }

    /// Asks the devices to wake the caller that sleeps: those that `wakes` names are readable then. The caller looks once more before it
    /// sleeps. A device that fails is given up.
    ///
    /// # Errors
    /// Of the last device that has failed: none is left.
    pub fn arm(&mut self) -> Result<(), DeviceError> {
        // What woke the caller behind its last turn came of queues that are not armed any more.
        if std::mem::take(&mut self.woken[Wake::Completions as usize]) {
            (0..self.adapters.all.len()).for_each(|device| self.take_notices(device));
        }
        let (mut living, mut last) = (self.adapters.all.is_empty(), None);
        let sends = self.adapters.are_sends_awaited();
        for at in 0..self.adapters.all.len() {
            let adapter = self.adapters.all.get(at).filter(|adapter| !adapter.is_dead);
            match adapter.map(|adapter| adapter.arm(sends)) {
                Some(Ok(())) => living = true,
                Some(Err(error)) => {
                    self.lose_device(DeviceId(at as u8));
                    last = Some(error);
                }
                None => {}
            }
        }
        match living {
            true => Ok(()),
            false => Err(last.unwrap_or(DeviceError::Invalid { what: "no device works any more" })),
        }
    }

    /// Whether each send that is waited for wakes the caller, as it was armed. What is posted later may not.
    pub fn hears_sends(&self) -> bool {
        let living = self.adapters.all.iter().filter(|adapter| !adapter.is_dead);
        !self.adapters.are_sends_awaited() || living.into_iter().all(Adapter::hears_sends)
    }

    /// A device has failed: its links are lost, and it gets no connection any more.
    fn lose_device(&mut self, device: DeviceId) {
        let Some(adapter) = self.adapters.all.get_mut(usize::from(device.0)) else { return };
        if std::mem::replace(&mut adapter.is_dead, true) {
            return;
        }
        self.handle_port(device, false);
        for qp in self.adapters.of(device) {
            self.handle_failure(qp);
        }
        self.flush();
    }

    /// What of [`Driver::wakes`] wakes for nothing any more.
    pub fn lost(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.adapters.all.iter().filter(|adapter| adapter.is_dead).flat_map(Adapter::wakes)
    }

    /// What is readable once a handshake goes on, or a device has something, after [`Driver::arm`]: the same ones for good, but for
    /// [`Driver::lost`].
    pub fn wakes(&self) -> impl Iterator<Item = (Wake, BorrowedFd<'_>)> {
        let wakes = [Wake::Completions, Wake::Events];
        let devices =
            self.adapters.all.iter().flat_map(move |one| wakes.into_iter().zip(one.wakes()));
        [(Wake::Handshakes, self.arrivals.as_fd())].into_iter().chain(devices)
    }

    /// How long until the next turn, whatever happens; `None`: nothing is due.
    pub fn next_turn(&self) -> Option<Duration> {
        let look = self.young.front().map(|(_, due)| *due);
        let settled = self.settling.iter().map(|(_, due)| *due);
        let due = self.engine.next_timeout().into_iter().chain(look).chain(settled).min();
        let due = due.map(|due| due.saturating_sub(self.now()));
        let is_left = self.adapters.are_under_way() && !self.adapters.are_sends_awaited();
        due.into_iter().chain(is_left.then_some(HARVEST)).min()
    }

    /// Whether something has happened that was not polled.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// What has happened, oldest first; with the TCP connection where it is the caller's again: after a handshake that has failed, or with
    /// the connection's end.
    pub fn poll_event(&mut self) -> Option<(Event, Option<TcpStream>)> {
        self.events.pop_front()
    }

    /// Ports are used so long after they have come up, also those that are up when the agent begins: a switch may not forward before. No time by
    /// default.
    pub fn set_port_delay(&mut self, delay: Duration) {
        self.port_delay = delay;
        if delay > Duration::ZERO {
            for device in self.adapters.ids() {
                self.handle_port(device, false);
                self.port_is_up(device);
            }
        }
    }

    /// It has come up, and is used once it has settled.
    fn port_is_up(&mut self, device: DeviceId) {
        self.settling.retain(|(other, _)| *other != device);
        let is_settling = self.port_delay > Duration::ZERO;
        if let Some(adapter) = self.adapters.all.get_mut(usize::from(device.0)) {
            adapter.is_settling = is_settling;
        }
        match is_settling {
            true => self.settling.push((device, self.now() + self.port_delay)),
            false => self.handle_port(device, true),
        }
    }

    fn look_at_settling(&mut self) {
        let now = self.turned;
        while let Some(at) = self.settling.iter().position(|(_, due)| *due <= now) {
            let (device, _) = self.settling.swap_remove(at);
            if let Some(adapter) = self.adapters.all.get_mut(usize::from(device.0)) {
                adapter.is_settling = false;
            }
            self.handle_port(device, true);
        }
    }

    /// Ports, and failures that no completion tells.
    fn look_at_events(&mut self, device: usize) -> bool {
        let id = DeviceId(device as u8);
        let mut failures = Vec::new();
        let mut any = false;
        while let Some(event) = self.next_event(device) {
            any = true;
            match event {
                DeviceEvent::PortActive { .. } => self.port_is_up(id),
                DeviceEvent::PortError { .. } => {
                    self.settling.retain(|(device, _)| *device != id);
                    self.handle_port(id, false);
                }
                DeviceEvent::QpFatal { qp_num }
                | DeviceEvent::QpRequestError { qp_num }
                | DeviceEvent::QpAccessError { qp_num } => failures.push(qp_num),
                DeviceEvent::DeviceFatal => self.lose_device(id),
                _ => {}
            }
        }
        if !failures.is_empty() {
            // What was successful before is there.
            any |= self.look_at_device(device);
        }
        for qp_num in failures {
            if let Some(qp) = self.adapters.by_number(id, qp_num) {
                self.handle_failure(qp);
            }
        }
        any
    }

    /// Sends come first, as behind an error in the queue of receives there is nothing successful of theirs.
    fn look_at_device(&mut self, device: usize) -> bool {
        let adapter = self.adapters.all.get(device).filter(|adapter| !adapter.is_dead);
        let Some(adapter) = adapter else { return false };
        // A queue that is broken gives its queue pairs up by asynchronous events.
        let sends = adapter.sends.poll(&mut self.taken.0).unwrap_or(0).min(BATCH);
        for at in 0..sends {
            let completion = self.taken.0[at];
            self.handle(&completion, true);
        }
        let mut receives = 0;
        if let Some(adapter) = self.adapters.all.get_mut(device) {
            adapter.look_at_receives();
        }
        // The end of a link takes its own out of these, and may bring others.
        while let Some(adapter) = self.adapters.all.get_mut(device)
            && let Some(completion) = adapter.come.pop_front()
        {
            receives += 1;
            self.handle(&completion, false);
        }
        sends + receives > 0
    }

    fn next_event(&self, device: usize) -> Option<DeviceEvent> {
        let adapter = self.adapters.all.get(device).filter(|adapter| !adapter.is_dead)?;
        adapter.device.next_event().ok().flatten()
    }

    fn handle_port(&mut self, device: DeviceId, is_up: bool) {
        let now = self.now();
        self.engine.handle_port(device, is_up, &mut self.adapters, now);
    }

    fn handle_failure(&mut self, qp: QpId) {
        let now = self.now();
        if self.adapters.failed(qp) {
            self.engine.handle_link_down(qp, &mut self.adapters, now);
        }
    }

    fn handle(&mut self, completion: &Completion, is_send: bool) {
        let now = self.turned;
        let Some(qp) = self.adapters.of_completion(completion) else { return };
        self.adapters.count(qp, completion, is_send);
        if completion.status != Status::SUCCESS {
            if !is_send {
                self.adapters.has_flushed(qp);
            }
            self.handle_failure(qp);
        } else if is_send {
            if self.adapters.completed(qp) {
                self.engine.handle_sent(qp, &mut self.adapters, now);
            }
        } else {
            let (place, message) = (place_of(completion), &mut self.taken.1);
            if let Some(len) = self.adapters.message(qp, place, completion.byte_len, message) {
                let message = message.get(..len).unwrap_or_default();
                self.engine.handle_received(qp, message, &mut self.adapters, now);
            }
        }
    }

    fn look_at_handshakes(&mut self) -> bool {
        if self.by_token.is_empty() {
            return false;
        }
        let mut found = Vec::with_capacity(BATCH);
        // A failure: the next turn looks again.
        let _ = epoll::wait(&self.arrivals, spare_capacity(&mut found), Some(&Timespec::default()));
        let mut any = false;
        for event in found {
            if let Some(conn) = self.by_token.get(&event.data.u64()).copied() {
                any |= match self.handshakes.contains_key(&conn) {
                    true => self.look_at_handshake(conn, event.flags),
                    false => self.look_at_established(conn),
                };
            }
        }
        any
    }

    /// Takes all that has come, of which the watch tells once, up to the handshake's end. Whether there was anything.
    fn look_at_handshake(&mut self, conn: ConnId, flags: EventFlags) -> bool {
        let (mut any, now) = (false, self.now());
        let mut left = MESSAGES;
        while let Some(handshake) = self.handshakes.get_mut(&conn) {
            if left == 0 {
                // The watch tells of the rest once more.
                let token = EventData::new_u64(conn.token().into());
                let _ = epoll::modify(&self.arrivals, &handshake.tcp, token, ARRIVALS);
                break;
            }
            left -= 1;
            let received = match handshake.receive() {
                // Nothing follows: it is the application's.
                Found::Nothing if handshake.awaits_first && flags.contains(EventFlags::RDHUP) => {
                    Found::Foreign
                }
                received => received,
            };
            if flags.contains(EventFlags::OUT) && handshake.unsent.is_empty() {
                let token = EventData::new_u64(conn.token().into());
                let _ = epoll::modify(&self.arrivals, &handshake.tcp, token, ARRIVALS);
            }
            let is_last = !matches!(received, Found::Message(_));
            match received {
                Found::Nothing => break,
                Found::Message(message) => {
                    self.engine.handle_clc(conn, *message, &mut self.adapters, now);
                }
                Found::Foreign => {
                    self.unwatch(conn);
                    self.engine.handle_no_clc(conn, &mut self.adapters, now);
                }
                Found::Closed | Found::Broken => {
                    self.unwatch(conn);
                    self.engine.handle_clc_closed(conn, &mut self.adapters, now);
                }
            }
            any = true;
            // Nothing of the next message is read for a connection whose handshake is over.
            self.flush();
            if is_last {
                break;
            }
        }
        any
    }

    fn look_at_young(&mut self) {
        while let Some((conn, due)) = self.young.front().copied()
            && due <= self.turned
        {
            self.young.pop_front();
            self.look_at_established(conn);
        }
    }

    /// A Decline may come to a connection that is SMC by now, and the end of its TCP does. An error there says nothing: a network may have
    /// forgotten what does not move.
    fn look_at_established(&mut self, conn: ConnId) -> bool {
        let now = self.now();
        let Some(handshake) = self.established.get_mut(&conn) else { return false };
        match handshake.receive() {
            Found::Nothing | Found::Foreign => return false,
            Found::Broken => self.unwatch(conn),
            Found::Closed => {
                self.unwatch(conn);
                self.engine.handle_clc_closed(conn, &mut self.adapters, now);
            }
            Found::Message(message) => {
                self.engine.handle_clc(conn, *message, &mut self.adapters, now);
            }
        }
        self.flush();
        true
    }

    /// CLC messages go out, and events come.
    fn flush(&mut self) {
        if self.engine.has_to_say() {
            self.flush_all();
        }
    }

    fn flush_all(&mut self) {
        while let Some((conn, message)) = self.engine.poll_clc() {
            let mut bytes = [0; MAX_LEN];
            if let (Some(handshake), Ok(bytes)) =
                (self.handshakes.get_mut(&conn), message.emit(&mut bytes))
            {
                handshake.unsent.extend_from_slice(bytes);
                handshake.send();
                if !handshake.unsent.is_empty() {
                    let room = ARRIVALS | EventFlags::OUT;
                    let token = EventData::new_u64(conn.token().into());
                    let _ = epoll::modify(&self.arrivals, &handshake.tcp, token, room);
                }
            }
        }
        while let Some(event) = self.engine.poll_event() {
            let over = match &event {
                Event::Established { conn, .. } => {
                    self.counts.established += 1;
                    if let Some(handshake) = self.handshakes.remove(conn) {
                        let now = self.now();
                        match handshake.has_closed() {
                            true => self.engine.handle_clc_closed(*conn, &mut self.adapters, now),
                            false => self.young.push_back((*conn, now + LOOK)),
                        }
                        self.established.insert(*conn, handshake);
                    }
                    None
                }
                Event::Fallback { conn, .. } | Event::Failed { conn, .. } => {
                    match &event {
                        Event::Fallback { .. } => self.counts.fallbacks += 1,
                        _ => self.counts.failures += 1,
                    }
                    self.unwatch(*conn);
                    self.handshakes.remove(conn)
                }
                Event::Over { conn } => {
                    self.unwatch(*conn);
                    self.established.remove(conn)
                }
                _ => None,
            };
            self.events.push_back((event, over.map(|handshake| handshake.tcp)));
        }
    }
}
