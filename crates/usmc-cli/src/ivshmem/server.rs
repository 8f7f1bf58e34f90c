//! The server's loop: one thread, which waits in poll(2) only.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_send_buffer_size, socket_acceptconn};
use rustix::rand::{GetRandomFlags, getrandom};

use super::kept::{self, Kept, KeptClient};
use super::memory::{Memory, Wanted};
use super::report::{self, Report};
use super::socket::{self, Named};
use super::systemd::Manager;
use super::view::{Carries, Present, View, free_id};
use super::{CLIENTS, log};

/// Most of the host's processes that may stay connected.
const VISITORS: usize = 64;
/// Bytes of messages that a client may leave unread, of which each counts some hundreds. The kernel limits the descriptors under way
/// of one user: those of clients that do not read are not to be the rest's.
const UNREAD: usize = 4096;
/// The wait for what has no event: room for descriptors under way (`ETOOMANYREFS`), and free numbers (`EMFILE`).
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Whom a socket is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum For {
    /// Virtual machines.
    Clients,
    /// The host's processes.
    Visitors,
}

/// A socket that listens.
pub struct Listener {
    /// Whom it is for.
    pub whom: For,
    /// The socket.
    pub socket: UnixListener,
    /// Its file, where the server has made it: removed with the socket.
    pub _named: Option<Named>,
}

/// What the server was told to do.
pub struct Settings {
    /// The memory.
    pub memory: Wanted,
    /// Vectors of new clients.
    pub vectors: u8,
}

/// A virtual machine.
struct Client {
    id: u16,
    serial: u64,
    socket: UnixStream,
    doorbells: Vec<OwnedFd>,
    process: Option<OwnedFd>,
    view: View,
}

impl Client {
    fn present(&self) -> Present {
        let vectors = self.doorbells.len() as u8;
        Present { id: self.id, serial: self.serial, vectors }
    }
}

/// A client that was closed while its process lived: it may write to the memory still.
struct Closed {
    id: u16,
    process: OwnedFd,
}

/// What poll(2) waits for.
#[derive(Clone, Copy)]
enum Source {
    Stop,
    Listener(usize),
    Client(u64),
    Closed(u16),
    Visitor(u64),
}

/// The server.
pub struct Server {
    memory: Memory,
    vectors: u8,
    listeners: Vec<Listener>,
    /// In the order of arrival.
    clients: Vec<Client>,
    closed: Vec<Closed>,
    visitors: Vec<(u64, UnixStream)>,
    kept: Kept,
    place: kept::Place,
    manager: Option<Manager>,
    /// No descriptor could be sent. It has to be tried again, and there is no event for that.
    is_held_up: bool,
    /// No connection could be accepted, likewise.
    is_full: bool,
    /// A state that is not written yet.
    is_changed: bool,
}

fn socket_name(id: u16) -> String {
    format!("client-{id}")
}

fn doorbell_name(id: u16, vector: usize) -> String {
    format!("vector-{id}-{vector}")
}

fn process_name(id: u16) -> String {
    format!("process-{id}")
}

const MEMORY: &str = "memory";
const STATE: &str = "state";

/// Descriptors of the service manager's, by name.
pub struct Given(Vec<(String, OwnedFd)>);

impl Given {
    /// All of them.
    pub fn new(all: Vec<(String, OwnedFd)>) -> Given {
        Given(all)
    }

    fn take(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.0.iter().position(|(its, _)| its == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Takes the sockets that listen. One that is called `host` is for the host's processes.
    pub fn listeners(&mut self) -> Vec<Listener> {
        let mut listeners = Vec::new();
        let mut rest = Vec::new();
        for (name, fd) in self.0.drain(..) {
            if !socket_acceptconn(&fd).is_ok_and(|listens| listens) {
                rest.push((name, fd));
                continue;
            }
            let whom = if name == "host" { For::Visitors } else { For::Clients };
            listeners.push(Listener { whom, socket: fd.into(), _named: None });
        }
        self.0 = rest;
        listeners
    }
}

impl Server {
    /// Makes the memory, or takes over what an earlier server has left.
    ///
    /// # Errors
    /// What is wrong with the memory.
    pub fn new(
        settings: &Settings,
        listeners: Vec<Listener>,
        mut given: Given,
        manager: Option<Manager>,
    ) -> Result<Server> {
        for listener in &listeners {
            listener.socket.set_nonblocking(true).context("a socket")?;
        }
        let earlier = given.take(STATE).and_then(|state| {
            let read = kept::Place::take_over(state.into());
            read.inspect_err(|problem| {
                log(format_args!("what the earlier server has left is not readable: {problem:#}"));
            })
            .ok()
        });
        let (place, mut kept) = match earlier {
            Some(earlier) => earlier,
            None => (kept::Place::make()?, Kept { next_id: random_id()?, ..Kept::default() }),
        };
        let memory = match given.take(MEMORY) {
            Some(memory) => Memory::take_over(memory.into(), kept.file.as_deref())?,
            None => {
                let memory = Memory::make(&settings.memory)?;
                let path = settings.memory.file.as_deref();
                let file = path.map(PathBuf::from).map(|path| path.canonicalize().unwrap_or(path));
                // Clients of a server that is gone may live. They have ids that nobody here knows.
                let next_id = if memory.is_new { 0 } else { random_id()? };
                kept = Kept { file, next_id, ..Kept::default() };
                memory
            }
        };
        let mut server = Server {
            memory,
            vectors: settings.vectors,
            listeners,
            clients: Vec::new(),
            closed: Vec::new(),
            visitors: Vec::new(),
            kept,
            place,
            manager,
            is_held_up: false,
            is_full: false,
            is_changed: true,
        };
        server.take_over(&mut given);
        server.write();
        if let Some(manager) = &server.manager {
            manager.store(STATE, server.place.file());
            manager.store(MEMORY, &server.memory.file);
            // Of these nobody knows what they are for.
            given.0.iter().for_each(|(name, _)| manager.remove(name));
        }
        Ok(server)
    }

    /// Clients of the earlier server, and those that it had closed.
    fn take_over(&mut self, given: &mut Given) {
        for kept in std::mem::take(&mut self.kept.clients) {
            let id = kept.id;
            let vectors = 0..usize::from(kept.vectors);
            let doorbells: Option<Vec<_>> =
                vectors.map(|vector| given.take(&doorbell_name(id, vector))).collect();
            let process = given.take(&process_name(id));
            let (socket, doorbells) = match (given.take(&socket_name(id)), doorbells) {
                (Some(socket), Some(doorbells)) => (UnixStream::from(socket), doorbells),
                _ => {
                    log(format_args!("client {id} was lost at the restart"));
                    self.forget(id, kept.vectors);
                    self.outlive(id, process);
                    continue;
                }
            };
            let view = kept.view;
            self.clients.push(Client { id, serial: kept.serial, socket, doorbells, process, view });
        }
        for id in std::mem::take(&mut self.kept.unproven) {
            let process = given.take(&process_name(id));
            self.outlive(id, process);
        }
        if !self.clients.is_empty() {
            log(format_args!("{} clients go on", self.clients.len()));
        }
    }

    /// Serves until there is something to read at `stop`.
    ///
    /// # Errors
    /// poll(2) fails.
    pub fn serve(&mut self, stop: &UnixStream) -> Result<()> {
        if let Some(manager) = &self.manager {
            manager.ready();
        }
        self.say_how_it_is();
        loop {
            self.tell();
            self.write();
            for (source, events) in self.wait(stop)? {
                match source {
                    Source::Stop => {
                        if let Some(manager) = &self.manager {
                            manager.stopping();
                        }
                        return Ok(());
                    }
                    Source::Listener(at) => self.accept(at),
                    // A client has nothing to say.
                    Source::Client(serial) if events != PollFlags::OUT => self.close(serial),
                    Source::Client(_) => {}
                    Source::Closed(id) => self.bury_closed(id),
                    Source::Visitor(number) => self.hear(number),
                }
            }
        }
    }

    /// Waits, and says what is ready.
    fn wait(&mut self, stop: &UnixStream) -> Result<Vec<(Source, PollFlags)>> {
        let input = PollFlags::IN | PollFlags::RDHUP;
        let mut sources: Vec<(Source, BorrowedFd<'_>, PollFlags)> = Vec::new();
        sources.push((Source::Stop, stop.as_fd(), input));
        // One that is ready and cannot be served would be ready at once again.
        if !self.is_full {
            let listeners = self.listeners.iter().enumerate();
            sources.extend(
                listeners.map(|(at, its)| (Source::Listener(at), its.socket.as_fd(), input)),
            );
        }
        let present = self.present();
        for client in &self.clients {
            let is_behind = client.view.next(client.id, &present).is_some();
            let room =
                if is_behind && !self.is_held_up { PollFlags::OUT } else { PollFlags::empty() };
            sources.push((Source::Client(client.serial), client.socket.as_fd(), input | room));
        }
        let closed = self.closed.iter();
        sources.extend(closed.map(|its| (Source::Closed(its.id), its.process.as_fd(), input)));
        let visitors = self.visitors.iter();
        sources.extend(
            visitors.map(|(number, socket)| (Source::Visitor(*number), socket.as_fd(), input)),
        );
        let mut fds: Vec<PollFd<'_>> =
            sources.iter().map(|(_, fd, events)| PollFd::from_borrowed_fd(*fd, *events)).collect();
        match poll(&mut fds, (self.is_held_up || self.is_full).then_some(&RETRY)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error).context("poll"),
        }
        let ready = sources.iter().zip(&fds).map(|((source, ..), fd)| (*source, fd.revents()));
        let ready = ready.filter(|(_, events)| !events.is_empty()).collect();
        (self.is_held_up, self.is_full) = (false, false);
        Ok(ready)
    }

    fn present(&self) -> Vec<Present> {
        self.clients.iter().map(Client::present).collect()
    }

    /// Tells each client as much as it has room for.
    fn tell(&mut self) {
        let present = self.present();
        let mut broken = Vec::new();
        for at in 0..self.clients.len() {
            loop {
                let client = &self.clients[at];
                let Some(message) = client.view.next(client.id, &present) else { break };
                let fd = match message.carries {
                    Carries::Nothing => None,
                    Carries::Memory => Some(self.memory.file.as_fd()),
                    Carries::Doorbell { serial, vector } => {
                        let other = self.clients.iter().find(|client| client.serial == serial);
                        other
                            .and_then(|its| its.doorbells.get(usize::from(vector)))
                            .map(AsFd::as_fd)
                    }
                };
                match socket::send(&client.socket, &message.value.to_le_bytes(), fd) {
                    Ok(()) => {
                        self.clients[at].view.sent(message);
                        self.is_changed = true;
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM | Errno::MFILE) => {
                        self.is_held_up = true;
                        break;
                    }
                    Err(_) => {
                        broken.push(client.serial);
                        break;
                    }
                }
            }
        }
        let is_any_broken = !broken.is_empty();
        broken.into_iter().for_each(|serial| self.close(serial));
        if is_any_broken {
            // The others are to know.
            self.tell();
        }
    }

    fn accept(&mut self, at: usize) {
        let Some(listener) = self.listeners.get(at) else { return };
        let whom = listener.whom;
        match listener.socket.accept() {
            Ok((socket, _)) => {
                let served =
                    socket.set_nonblocking(true).map_err(Into::into).and_then(|()| match whom {
                        For::Clients => self.welcome(socket),
                        For::Visitors => self.receive(socket),
                    });
                if let Err(problem) = served {
                    log(format_args!("a connection was closed: {problem:#}"));
                }
            }
            // It has gone again.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                log(format_args!("cannot accept a connection: {error}"));
                self.is_full = true;
            }
        }
    }

    /// A virtual machine has connected.
    fn welcome(&mut self, socket: UnixStream) -> Result<()> {
        let count = self.clients.len() + self.closed.len();
        anyhow::ensure!(count < CLIENTS, "there are {CLIENTS} clients already");
        let is_taken = |id: u16| {
            self.clients.iter().any(|client| client.id == id || client.view.names(id))
                || self.closed.iter().any(|closed| closed.id == id)
                || self.kept.unproven.contains(&id)
                || self.memory.names(id)
        };
        let id = free_id(self.kept.next_id, is_taken).context("no id is free")?;
        let doorbell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let doorbells: Result<Vec<_>, _> = (0..self.vectors).map(|_| doorbell()).collect();
        let doorbells = doorbells.context("eventfd")?;
        set_socket_send_buffer_size(&socket, UNREAD).context("SO_SNDBUF")?;
        let process = socket::process(&socket);
        let serial = self.kept.next_serial;
        self.kept.next_serial += 1;
        self.kept.next_id = id.wrapping_add(1);
        match socket::maker(&socket) {
            Some((pid, uid)) => log(format_args!("client {id}: process {pid} of user {uid}")),
            None => log(format_args!("client {id}: a process of another namespace")),
        }
        let view = View::default();
        self.clients.push(Client { id, serial, socket, doorbells, process, view });
        self.is_changed = true;
        // What says that there is such a client comes before what belongs to it.
        self.write();
        if let (Some(manager), Some(client)) = (&self.manager, self.clients.last()) {
            manager.store(&socket_name(id), &client.socket);
            for (vector, doorbell) in client.doorbells.iter().enumerate() {
                manager.store(&doorbell_name(id, vector), doorbell);
            }
            if let Some(process) = &client.process {
                manager.store(&process_name(id), process);
            }
        }
        self.say_how_it_is();
        Ok(())
    }

    /// Ends a client. It is dead if its end of the socket is closed; else it may go on, and write.
    fn close(&mut self, serial: u64) {
        let Some(at) = self.clients.iter().position(|client| client.serial == serial) else {
            return;
        };
        let client = self.clients.remove(at);
        let is_dead = socket::is_hung_up(&client.socket);
        let Client { id, doorbells, process, .. } = client;
        self.forget(id, doorbells.len() as u8);
        if is_dead {
            log(format_args!("client {id} has left"));
            if process.is_some() {
                self.remove(&process_name(id));
            }
            self.bury(id);
        } else {
            log(format_args!("client {id} was closed: it does not keep to the protocol"));
            self.outlive(id, process);
        }
        self.say_how_it_is();
    }

    /// A client is no client any more, but not known to be dead.
    fn outlive(&mut self, id: u16, process: Option<OwnedFd>) {
        self.is_changed = true;
        match process {
            Some(process) => self.closed.push(Closed { id, process }),
            None => {
                log(format_args!(
                    "it is not known whether client {id} lives: `usmc region evict` frees what its peers have"
                ));
                self.kept.unproven.push(id);
            }
        }
    }

    /// The process of a closed client has ended.
    fn bury_closed(&mut self, id: u16) {
        self.closed.retain(|closed| closed.id != id);
        self.remove(&process_name(id));
        log(format_args!("the process of client {id} has ended"));
        self.bury(id);
        self.say_how_it_is();
    }

    fn bury(&mut self, id: u16) {
        self.is_changed = true;
        let (peers, units) = self.memory.bury(id);
        if peers > 0 {
            log(format_args!(
                "{peers} peers of client {id} are gone, {units} units are free again"
            ));
        }
    }

    fn remove(&self, name: &str) {
        if let Some(manager) = &self.manager {
            manager.remove(name);
        }
    }

    /// The manager keeps a client's socket and doorbells no longer.
    fn forget(&mut self, id: u16, vectors: u8) {
        self.is_changed = true;
        self.remove(&socket_name(id));
        (0..usize::from(vectors)).for_each(|vector| self.remove(&doorbell_name(id, vector)));
    }

    /// A process of the host has connected.
    fn receive(&mut self, socket: UnixStream) -> Result<()> {
        socket::send(&socket, &[report::GREETING], Some(self.memory.file.as_fd()))?;
        if self.visitors.len() >= VISITORS {
            // It has what it came for.
            self.visitors.remove(0);
        }
        let number = self.visitors.last().map_or(0, |(number, _)| number + 1);
        self.visitors.push((number, socket));
        Ok(())
    }

    /// A process of the host asks, or has gone.
    fn hear(&mut self, number: u64) {
        let Some(at) = self.visitors.iter().position(|(its, _)| *its == number) else { return };
        let (_, mut socket) = self.visitors.remove(at);
        let mut byte = [0];
        if socket.read(&mut byte).is_ok_and(|count| count == 1) && byte == [report::ASK] {
            let text = serde_json::to_vec(&self.report()).unwrap_or_default();
            // Without waiting. What has no room for it does not read.
            let _ = socket.write(&text);
        }
    }

    fn report(&self) -> Report {
        let region = self.memory.region();
        let present = self.present();
        let clients = self.clients.iter().map(|client| {
            let maker = socket::maker(&client.socket);
            report::Client {
                id: client.id,
                vectors: client.doorbells.len() as u8,
                pid: maker.map(|maker| maker.0),
                uid: maker.map(|maker| maker.1),
                behind: client.view.behind(&present),
                closed: false,
                peers: self.memory.peers_of(client.id),
            }
        });
        let closed = self.closed.iter().map(|closed| report::Client {
            id: closed.id,
            vectors: 0,
            pid: None,
            uid: None,
            behind: 0,
            closed: true,
            peers: self.memory.peers_of(closed.id),
        });
        Report {
            pid: std::process::id(),
            memory: report::Memory {
                bytes: self.memory.len,
                file: self.kept.file.clone(),
                gid: region.map(|region| crate::regions::hex(region.gid())),
                units: region.map(|region| region.units()),
                free: region.map(|region| region.words().free()),
            },
            vectors: self.vectors,
            clients: clients.chain(closed).collect(),
            unproven: self.kept.unproven.clone(),
        }
    }

    fn say_how_it_is(&self) {
        if let Some(manager) = &self.manager {
            manager.status(&format!("{} clients", self.clients.len()));
        }
    }

    /// Leaves to the next server what it has to know.
    fn write(&mut self) {
        if !std::mem::take(&mut self.is_changed) || self.manager.is_none() {
            return;
        }
        let clients = self.clients.iter().map(|client| KeptClient {
            id: client.id,
            serial: client.serial,
            vectors: client.doorbells.len() as u8,
            view: client.view.clone(),
        });
        let closed = self.closed.iter().map(|closed| closed.id);
        let unproven = self.kept.unproven.iter().copied();
        let kept = Kept {
            clients: clients.collect(),
            unproven: closed.chain(unproven).collect(),
            ..self.kept.clone()
        };
        if let Err(problem) = self.place.write(&kept) {
            log(format_args!("a restart would lose clients: {problem:#}"));
        }
    }
}

fn random_id() -> Result<u16> {
    let mut bytes = [0; 2];
    getrandom(&mut bytes[..], GetRandomFlags::empty()).context("getrandom")?;
    Ok(u16::from_ne_bytes(bytes))
}

/// Opens the null device for what is closed of the three standard descriptors, so that no socket gets such a number.
pub fn fill_standard_descriptors() {
    for fd in 0..3 {
        // SAFETY: only the number is used, and EBADF is an answer.
        #[expect(unsafe_code, reason = "a number of another program's")]
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        if rustix::io::fcntl_getfd(fd) == Err(Errno::BADF)
            && let Ok(null) = File::options().read(true).write(true).open("/dev/null")
        {
            // It has the lowest free number, which is this one.
            std::mem::forget(null);
        }
    }
}
