//! What brings completions, CLC messages and time to the engine. It never waits.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use smc_proto::wire::clc::{Error, MAX_LEN, Message, Reception};
use usmc_rdma::buffers::Buffers;
use usmc_rdma::nic::{DeviceId, QpId, RmbId};
use usmc_rdma::{Config, ConnId, Engine, Event, Wish};
use usmc_verbs::{Completion, Error as DeviceError, Event as DeviceEvent, Status};

use crate::adapter::Adapter;
use crate::link::NO_MESSAGE;
use crate::nic::Adapters;

/// Completions that are taken at once.
const BATCH: usize = 32;

/// For so long after the handshake a Decline may come: a kernel's LLC flow waits up to 20 s for another one to end
/// (`smc_llc_flow_initiate`), which is the longest of its deadlines.
const YOUNG: Duration = Duration::from_secs(20);
/// A connection that young is looked at so often: a Decline is rare, and each look is a system call.
const LOOK: Duration = Duration::from_secs(1);

/// A TCP connection in its handshake, or behind it.
struct Handshake {
    tcp: TcpStream,
    /// `None` once the peer has closed: that is found once.
    reception: Option<Reception>,
    /// CLC messages that the kernel has had no room for.
    unsent: Vec<u8>,
}

/// What a look at a TCP connection finds.
enum Found {
    /// Not all of a message so far.
    Nothing,
    Message(Box<Result<Message, Error>>),
    Closed,
}

/// When an established connection is looked at next, and last.
struct Look {
    conn: ConnId,
    at: Duration,
    until: Duration,
}

/// An engine with its devices and the TCP connections.
pub struct Driver<B> {
    /// The link groups and connections.
    pub engine: Engine<B>,
    /// The devices.
    pub adapters: Adapters,
    handshakes: HashMap<ConnId, Handshake>,
    /// Connections that are SMC: TCP stays as long as they do.
    established: HashMap<ConnId, Handshake>,
    /// Those of them that a Decline may come to, in the order of their next looks.
    young: VecDeque<Look>,
    begun: Instant,
    /// What has come out of the engine, with the TCP connection where it is the caller's again.
    events: VecDeque<(Event, Option<TcpStream>)>,
}

impl<B: Buffers> Driver<B> {
    /// No connection yet.
    pub fn new(config: Config, adapters: Adapters) -> Driver<B> {
        Driver {
            engine: Engine::new(config),
            adapters,
            handshakes: HashMap::new(),
            established: HashMap::new(),
            young: VecDeque::new(),
            begun: Instant::now(),
            events: VecDeque::new(),
        }
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// A client's connection, whose TCP is there, begins its handshake.
    ///
    /// # Errors
    /// The TCP connection cannot be read without waiting, or the wish is refused ([`usmc_rdma::RefusedWish`]).
    pub fn connect(&mut self, wish: Wish<B>, tcp: TcpStream) -> io::Result<ConnId> {
        tcp.set_nonblocking(true)?;
        let now = self.now();
        let conn = self.engine.connect(wish, &mut self.adapters, now).map_err(io::Error::other)?;
        self.shake(conn, tcp);
        Ok(conn)
    }

    /// A server's, likewise.
    ///
    /// # Errors
    /// As above.
    pub fn accept(&mut self, wish: Wish<B>, tcp: TcpStream) -> io::Result<ConnId> {
        tcp.set_nonblocking(true)?;
        let now = self.now();
        let conn = self.engine.accept(wish, &mut self.adapters, now).map_err(io::Error::other)?;
        self.shake(conn, tcp);
        Ok(conn)
    }

    fn shake(&mut self, conn: ConnId, tcp: TcpStream) {
        let (reception, unsent) = (Some(Reception::new()), Vec::new());
        self.handshakes.insert(conn, Handshake { tcp, reception, unsent });
        self.flush();
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

    /// Looks at everything once. Whether there was anything.
    pub fn turn(&mut self) -> bool {
        let mut any = false;
        for device in 0..self.adapters.all.len() {
            any |= self.look_at_device(device);
        }
        any |= self.look_at_handshakes();
        self.look_at_young();
        let now = self.now();
        if self.engine.next_timeout().is_some_and(|due| due <= now) {
            self.engine.handle_timeout(&mut self.adapters, now);
            any = true;
        }
        self.flush();
        any
    }

    /// Asks the devices to wake the caller that sleeps: those that `wakes` names are readable then. The caller looks once more before it
    /// sleeps.
    ///
    /// # Errors
    /// A device has failed.
    pub fn arm(&self) -> Result<(), DeviceError> {
        self.adapters.all.iter().try_for_each(Adapter::arm)
    }

    /// What is readable once a device has something, after [`Driver::arm`]: the same ones for good.
    pub fn wakes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.adapters.all.iter().flat_map(Adapter::wakes)
    }

    /// What is readable once a handshake goes on.
    pub fn handshakes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let open = self.handshakes.values().filter(|handshake| handshake.reception.is_some());
        open.map(|handshake| handshake.tcp.as_fd())
    }

    /// How long until the next turn, whatever happens; `None`: nothing is due.
    pub fn next_turn(&self) -> Option<Duration> {
        let look = self.young.front().map(|look| look.at);
        let due = self.engine.next_timeout().into_iter().chain(look).min()?;
        Some(due.saturating_sub(self.now()))
    }

    /// What has happened, oldest first; with the TCP connection where it is the caller's again: after a handshake that has failed, or with
    /// the connection's end.
    pub fn poll_event(&mut self) -> Option<(Event, Option<TcpStream>)> {
        self.events.pop_front()
    }

    /// Ports come first: what is posted to one that is down kills its queue pair. Then sends, as behind an error in the queue of receives
    /// there is nothing successful of theirs; and last the failures that no completion tells.
    fn look_at_device(&mut self, device: usize) -> bool {
        let id = DeviceId(device as u8);
        let mut failures = Vec::new();
        let mut any = false;
        while let Some(event) = self.next_event(device) {
            any = true;
            match event {
                DeviceEvent::PortActive { .. } => self.handle_port(id, true),
                DeviceEvent::PortError { .. } => self.handle_port(id, false),
                DeviceEvent::QpFatal { qp_num }
                | DeviceEvent::QpRequestError { qp_num }
                | DeviceEvent::QpAccessError { qp_num } => failures.push(qp_num),
                _ => {}
            }
        }
        let mut completions = [Completion::default(); BATCH];
        for is_sends in [true, false] {
            let Some(adapter) = self.adapters.all.get(device) else { return any };
            let queue = if is_sends { &adapter.sends } else { &adapter.receives };
            // A queue that is broken gives its queue pairs up by asynchronous events.
            let count = queue.poll(&mut completions).unwrap_or(0);
            any |= count > 0;
            for completion in completions.iter().take(count) {
                self.handle(completion, is_sends);
            }
        }
        for qp_num in failures {
            if let Some(qp) = self.adapters.by_number(id, qp_num) {
                self.handle_failure(qp);
            }
        }
        any
    }

    fn next_event(&self, device: usize) -> Option<DeviceEvent> {
        self.adapters.all.get(device)?.device.next_event().ok().flatten()
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
        let (qp, place) = (QpId(completion.wr_id as u32), (completion.wr_id >> 32) as u32);
        let now = self.now();
        // A queue pair that is gone may have left completions, and another one its place.
        if !self.adapters.is_number(qp, completion.qp_num) {
            return;
        }
        if completion.status != Status::SUCCESS {
            self.handle_failure(qp);
        } else if is_send {
            if self.adapters.completed(qp) {
                self.engine.handle_sent(qp, &mut self.adapters, now);
            }
        } else {
            let mut message = NO_MESSAGE;
            if let Some(len) = self.adapters.message(qp, place, completion.byte_len, &mut message) {
                let message = message.get(..len).unwrap_or_default();
                self.engine.handle_received(qp, message, &mut self.adapters, now);
            }
        }
    }

    fn look_at_handshakes(&mut self) -> bool {
        let now = self.now();
        let conns: Vec<ConnId> = self.handshakes.keys().copied().collect();
        let mut any = false;
        for conn in conns {
            let Some(handshake) = self.handshakes.get_mut(&conn) else { continue };
            match handshake.receive() {
                Found::Nothing => continue,
                Found::Message(message) => {
                    self.engine.handle_clc(conn, *message, &mut self.adapters, now);
                }
                Found::Closed => self.engine.handle_clc_closed(conn, &mut self.adapters, now),
            }
            any = true;
            // Nothing of the next message is read for a connection whose handshake is over.
            self.flush();
        }
        any
    }

    /// A Decline may come to a connection that is SMC by now. An end of TCP says nothing: a kernel sends it beside the connection's own.
    fn look_at_young(&mut self) {
        let now = self.now();
        while self.young.front().is_some_and(|look| look.at <= now)
            && let Some(look) = self.young.pop_front()
        {
            let Some(handshake) = self.established.get_mut(&look.conn) else { continue };
            match handshake.receive() {
                Found::Nothing if look.at < look.until => {
                    self.young.push_back(Look { at: now + LOOK, ..look });
                }
                Found::Nothing | Found::Closed => {}
                Found::Message(message) => {
                    self.engine.handle_clc(look.conn, *message, &mut self.adapters, now);
                    self.flush();
                }
            }
        }
    }

    /// CLC messages go out, and events come.
    fn flush(&mut self) {
        while let Some((conn, message)) = self.engine.poll_clc() {
            let mut bytes = [0; MAX_LEN];
            if let (Some(handshake), Ok(bytes)) =
                (self.handshakes.get_mut(&conn), message.emit(&mut bytes))
            {
                handshake.unsent.extend_from_slice(bytes);
                handshake.send();
            }
        }
        while let Some(event) = self.engine.poll_event() {
            let over = match &event {
                Event::Established { conn, .. } => {
                    let now = self.now();
                    self.young.push_back(Look { conn: *conn, at: now + LOOK, until: now + YOUNG });
                    let handshake = self.handshakes.remove(conn);
                    self.established.extend(handshake.map(|handshake| (*conn, handshake)));
                    None
                }
                Event::Fallback { conn, .. } | Event::Failed { conn, .. } => {
                    self.handshakes.remove(conn)
                }
                Event::Over { conn } => self.established.remove(conn),
                _ => None,
            };
            self.events.push_back((event, over.map(|handshake| handshake.tcp)));
        }
    }
}

impl Handshake {
    /// Takes what has come, up to the end of a message.
    fn receive(&mut self) -> Found {
        self.send();
        loop {
            let Some(reception) = &mut self.reception else { return Found::Nothing };
            let mut bytes = [0; MAX_LEN];
            let wanted = reception.wanted();
            match self.tcp.read(bytes.get_mut(..wanted).unwrap_or_default()) {
                Ok(0) => break,
                Ok(n) => match reception.push(bytes.get(..n).unwrap_or_default()) {
                    Ok(None) => {}
                    Ok(Some(message)) => return Found::Message(Box::new(Ok(message))),
                    Err(error) => return Found::Message(Box::new(Err(error))),
                },
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
                {
                    return Found::Nothing;
                }
                Err(_) => break,
            }
        }
        self.reception = None;
        Found::Closed
    }

    /// As much as the kernel has room for: always all, as a handshake's messages are the first that are sent.
    fn send(&mut self) {
        if !self.unsent.is_empty()
            && let Ok(n) = self.tcp.write(&self.unsent)
        {
            self.unsent.drain(..n);
        }
    }
}
