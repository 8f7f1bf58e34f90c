//! Agents, each in a thread, and processes that have nothing in common with them but the slots of rooms: each process is a thread with a
//! mapping of its own, and what it has it got by the agent's socket. All sleep whenever there is nothing to do.

#![allow(dead_code, reason = "each test program needs a part of it")]

#[path = "../../../usmc-rdma/tests/simulation/application.rs"]
pub(crate) mod application;
pub(crate) mod end;
#[path = "../fake/mod.rs"]
pub(crate) mod fake;
pub(crate) mod pair;

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use application::Application;
pub(crate) use end::End;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    recvmsg, sendmsg, socket_with,
};
use smc_proto::close::Direction;
use usmc_agent::agent::{Agent as Program, Stage};
use usmc_agent::control::Control;
use usmc_agent::driver::Driver;
use usmc_agent::rest::{Rest, Spin};
use usmc_agent::service::Service;
use usmc_rdma::Event;
use usmc_shm::agent::{Answer, LEN, Place, Request, Role};
use usmc_shm::handshake::{SlotState, Use, phase};
use usmc_shm::layout::ACCEPTOR;
use usmc_shm::segment::Segment;
use usmc_shm::span::{Switch, TxSpan};
use usmc_shm::sync::Ordering::Relaxed;

/// log2 of a ring's bytes.
pub(crate) const SHIFT: u32 = 14;
/// A wait of a test's takes as long at most. An agent that is not woken looks at everything as late as that.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// An agent runs for as long at most.
const LIFE: Duration = Duration::from_secs(300);

/// Descriptors of this process are counted: one test at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

/// Until so many descriptors are open: the agent's thread closes them in its own time.
pub(crate) fn settle(wanted: usize) {
    let begun = Instant::now();
    while descriptors() != wanted {
        assert!(begun.elapsed() < LIMIT, "{} descriptors instead of {wanted}", descriptors());
        thread::yield_now();
    }
}

/// What an agent's thread has seen.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Seen {
    pub(crate) established: usize,
    pub(crate) over: usize,
    pub(crate) fallbacks: usize,
    pub(crate) failures: usize,
    pub(crate) sleeps: usize,
    /// Rooms that were there at one time, at most.
    pub(crate) rooms: usize,
}

/// An agent's thread.
pub(crate) struct Agent {
    thread: thread::JoinHandle<Seen>,
    pub(crate) path: PathBuf,
    /// Its rooms, and registrations of their memory with devices.
    pub(crate) live: Arc<[AtomicUsize; 2]>,
    /// How often it has slept.
    pub(crate) sleeps: Arc<AtomicUsize>,
    /// Tells it to end.
    bell: OwnedFd,
}

impl Agent {
    pub(crate) fn start(test: u8, host: u8) -> Agent {
        Agent::start_spinning(test, host, Spin::For(Duration::ZERO))
    }

    pub(crate) fn start_spinning(test: u8, host: u8, spin: Spin) -> Agent {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).expect("an eventfd");
        let own = bell.try_clone().expect("a descriptor");
        let name = format!("agent-{}-{test}-{host}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let at = path.clone();
        let live: Arc<[AtomicUsize; 2]> = Arc::default();
        let sleeps: Arc<AtomicUsize> = Arc::default();
        let shared = (live.clone(), sleeps.clone());
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            let (config, adapters) = fake::host(test, host);
            let rest = Rest::new(spin).expect("an epoll set");
            let driver = Driver::new(config, adapters).expect("an epoll set");
            let service = Service::new(driver, rest, SHIFT).expect("a service");
            let control = Control::listen(&at, &service).expect("a socket");
            let agent = Program::new(service, control);
            agent.watch_orders(&own).expect("epoll");
            ready.send(()).expect("the test");
            serve(agent, &own, &shared.0, &shared.1)
        });
        is_ready.recv_timeout(LIMIT).expect("an agent");
        Agent { thread, path, live, sleeps, bell }
    }

    /// All its connections are over soon, and it ends then.
    pub(crate) fn end(self) -> Seen {
        rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).expect("its eventfd");
        self.thread.join().expect("the agent's thread")
    }
}

fn serve(
    mut agent: Program,
    bell: &OwnedFd,
    live: &[AtomicUsize; 2],
    sleeps: &AtomicUsize,
) -> Seen {
    let (started, mut seen) = (Instant::now(), Seen::default());
    while agent.stage() != Stage::Done {
        assert!(started.elapsed() < LIFE, "{seen:?} {:?}", agent.stage());
        let service = agent.service();
        seen.rooms = seen.rooms.max(service.rooms());
        let now = [service.rooms(), service.driver().adapters.registrations()];
        live.iter().zip(now).for_each(|(live, now)| live.store(now, Ordering::Relaxed));
        let found = agent.turn(|event| match event {
            Event::Established { .. } => seen.established += 1,
            Event::Over { .. } => seen.over += 1,
            Event::Fallback { .. } => seen.fallbacks += 1,
            Event::Failed { .. } => seen.failures += 1,
            _ => {}
        });
        let found = found.expect("a device");
        seen.sleeps += usize::from(found.slept);
        sleeps.store(seen.sleeps, Ordering::Relaxed);
        if found.order {
            let _ = rustix::io::read(bell, &mut [0; 8]);
            agent.end();
        }
    }
    seen
}

pub(crate) fn agents() -> (u8, [Agent; 2]) {
    fake::fabric();
    let test = fake::next_test();
    (test, [0, 1].map(|host| Agent::start(test, host)))
}

/// A TCP connection inside the host, the connecting end first.
pub(crate) fn loopback() -> [TcpStream; 2] {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("a port");
    [TcpStream::connect(address).expect("TCP"), listener.accept().expect("TCP").0]
}

/// A connection of an agent's socket.
pub(crate) fn knock(agent: &Agent) -> OwnedFd {
    knock_at(&agent.path)
}

/// The same by the socket's path.
pub(crate) fn knock_at(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.expect("a socket");
    connect(&socket, &SocketAddrUnix::new(path).expect("a path")).expect("the agent");
    socket
}

/// A message with descriptors.
pub(crate) fn say(socket: &OwnedFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL);
    sent.expect("the agent");
}

fn wait(fd: impl AsFd) {
    wait_for(fd, PollFlags::IN);
}

/// An error counts as well.
fn wait_for(fd: impl AsFd, flags: PollFlags) {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let mut all = [PollFd::from_borrowed_fd(fd.as_fd(), flags)];
    assert_eq!(poll(&mut all, Some(&limit)).expect("poll"), 1, "nothing comes");
}

/// Nothing more comes there: the agent has closed it.
pub(crate) fn is_closed(socket: &OwnedFd) -> bool {
    wait(socket);
    recv(socket, &mut [0; LEN], RecvFlags::DONTWAIT).map_or(true, |(n, _)| n == 0)
}

/// A connection that was handed over and has no answer.
pub(crate) struct Asked {
    pub(crate) control: OwnedFd,
    socket: TcpStream,
    /// As a process has it until its answer.
    tcp: TcpStream,
}

/// Hands an end of a connection over.
pub(crate) fn ask(agent: &Agent, role: Role, tcp: TcpStream) -> Asked {
    ask_at(&agent.path, role, tcp)
}

/// The same by the socket's path.
pub(crate) fn ask_at(path: &Path, role: Role, tcp: TcpStream) -> Asked {
    let [deputy, socket] = loopback();
    let control = knock_at(path);
    say(&control, &Request::Hand(role).emit(), &[tcp.as_fd(), deputy.as_fd()]);
    Asked { control, socket, tcp }
}

/// The agent's answer, with a descriptor; `None`: it has closed.
pub(crate) fn receive(control: &OwnedFd) -> Option<(Answer, Option<OwnedFd>)> {
    wait(control);
    let mut bytes = [0; LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(control, &mut parts, &mut ancillary, flags).expect("an answer");
    let mut descriptors = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(part) = part {
            descriptors.extend(part);
        }
    }
    let answer = Answer::parse(&bytes).filter(|_| got.bytes == LEN)?;
    assert!(is_closed(control));
    Some((answer, descriptors.pop()))
}

/// Asks for the TCP connection of a deputy.
pub(crate) fn fetch(agent: &Agent, place: Place) -> Option<(TcpStream, u32)> {
    let control = knock(agent);
    say(&control, &Request::Fetch(place).emit(), &[]);
    match receive(&control)? {
        (Answer::Tcp { code }, Some(tcp)) => Some((tcp.into(), code)),
        other => panic!("{other:?}"),
    }
}

impl Asked {
    /// The answer, and the deputy's other end.
    pub(crate) fn answer(self) -> (Answer, Option<OwnedFd>, TcpStream) {
        let (answer, descriptor) = receive(&self.control).expect("the agent has closed");
        (answer, descriptor, self.socket)
    }
}

/// A process: what it was given, as it sees it.
#[derive(Default)]
pub(crate) struct Process {
    segments: HashMap<u64, Segment>,
    pub(crate) ends: Vec<End>,
}

impl Process {
    /// Hands over its end of a connection, the client's for 0, which sends so many bytes.
    pub(crate) fn hand(
        &mut self,
        agent: &Agent,
        side: usize,
        tcp: TcpStream,
        pair: u64,
        wants: u64,
    ) {
        let role = if side == 0 { Role::Client } else { Role::Server };
        let streams = [2 * pair + side as u64, 2 * pair + 1 - side as u64];
        self.take(ask(agent, role, tcp), streams, wants);
    }

    /// The answer to one of its connections, whose streams are numbered. It sends so many bytes.
    pub(crate) fn take(&mut self, asked: Asked, streams: [u64; 2], wants: u64) {
        let (answer, memfd, socket) = asked.answer();
        let Answer::Ring(place) = answer else { panic!("{answer:?}") };
        let memfd = memfd.expect("a memfd");
        let segment = *self.segments.entry(place.segment).or_insert_with(|| map(&memfd));
        assert_eq!(segment.header().id.load(Relaxed), place.segment);
        let known = segment.slot(place.slot).expect("a slot");
        assert_eq!(phase(&known.control, Use::from_bits(place.usage)), SlotState::Confirmed);
        // As a process that has the slot.
        known.end[ACCEPTOR].refs.store(1, Relaxed);
        assert_eq!(TxSpan::new(known, ACCEPTOR).try_switch(|| Some(0)), Ok(Switch::Ring));
        let application = Application::new(segment, place.slot, ACCEPTOR, streams, wants);
        let socket = Some(socket);
        let pair = segment.pair(place.slot).expect("a slot");
        self.ends.push(End { pair, place, socket, application, keeps_slot: false });
    }

    pub(crate) fn segment(&self) -> Segment {
        *self.segments.values().next().expect("a segment")
    }

    /// Sleeps until a socket has something. One that has ended tells nothing any more.
    fn sleep(&self) {
        let live = self.ends.iter().filter(|end| end.application.reading == Direction::Open);
        let mut all: Vec<PollFd<'_>> = live
            .filter_map(|end| end.socket.as_ref())
            .map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN))
            .collect();
        // Behind a FIN no doorbell comes: a writer looks by itself.
        let looks = self.ends.iter().any(|end| {
            let app = &end.application;
            app.reading != Direction::Open && !app.is_closed
        });
        let limit = if looks { Duration::from_millis(5) } else { LIMIT };
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let woken = poll(&mut all, Some(&limit)).expect("poll");
        assert!(woken > 0 || looks, "nobody wakes it");
    }

    /// All of its connections to their ends. How often it slept.
    pub(crate) fn run(&mut self) -> usize {
        let (begun, mut sleeps) = (Instant::now(), 0);
        while self.ends.iter().any(|end| !end.application.is_closed) {
            assert!(begun.elapsed() < LIMIT);
            let any = self.ends.iter_mut().fold(false, |any, end| end.step() | any);
            if !any && self.ends.iter().all(End::may_sleep) {
                sleeps += 1;
                self.sleep();
            }
        }
        sleeps
    }
}

pub(crate) fn map(memfd: &OwnedFd) -> Segment {
    let len = rustix::fs::fstat(memfd).expect("a memfd").st_size as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping, which stays until the test program ends.
    let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, memfd, 0) };
    // SAFETY: all of it, and it is sealed.
    let segment = unsafe { Segment::open(base.expect("memory").cast(), len, len) };
    segment.expect("a segment")
}

/// A process for each agent, with so many connections between them, which send so many bytes each and one more than the one before.
pub(crate) fn processes(agents: &[Agent; 2], count: usize, wants: u64) -> [Process; 2] {
    let mut both = [Process::default(), Process::default()];
    for pair in 0..count as u64 {
        let [client, server] = loopback();
        let both = both.each_mut();
        for (host, (process, tcp)) in both.into_iter().zip([client, server]).enumerate() {
            process.hand(&agents[host], host, tcp, pair, wants + pair);
        }
    }
    both
}

/// Both run, side by side, and end. How often each slept.
pub(crate) fn run(processes: &mut [Process; 2]) -> [usize; 2] {
    thread::scope(|scope| {
        let threads = processes.each_mut().map(|process| scope.spawn(|| process.run()));
        threads.map(|thread| thread.join().expect("an application"))
    })
}

pub(crate) fn assert_whole(processes: &[Process; 2]) {
    assert_eq!(processes[0].ends.len(), processes[1].ends.len());
    for (one, other) in processes[0].ends.iter().zip(&processes[1].ends) {
        let (one, other) = (&one.application, &other.application);
        assert_eq!((one.read, other.read), (other.wants, one.wants));
        assert!(!one.is_aborted() && !other.is_aborted());
    }
}
