//! Agents and applications that have nothing in common but the slots of a room: each is a thread, and the application has a mapping of its
//! own. Both sleep whenever there is nothing to do.

#[path = "../../usmc-rdma/tests/simulation/application.rs"]
mod application;
mod fake;

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use application::Application;
use fake::{device, fabric, next_test};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use smc_proto::close::Direction;
use smc_proto::handshake::Circumstances;
use usmc_agent::driver::Driver;
use usmc_agent::rest::{Next, Rest, Spin};
use usmc_agent::service::{Place, RoomId, Service};
use usmc_fake_verbs::fabric::Call;
use usmc_rdma::Event;
use usmc_rdma::nic::DeviceId;
use usmc_shm::layout::{ARM_TCP, SLOT_CONFIRMED, SLOT_OFFERED, SLOT_WITHDRAWN};
use usmc_shm::segment::Segment;
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

const SHIFT: u32 = 14;
const SLOTS: u32 = 8;
/// A test takes as long at most.
const LIMIT: Duration = Duration::from_secs(60);

/// What an application is given: its connections are numbered as they come.
struct Given {
    /// The segment, the agent's eventfd, and its own.
    descriptors: [OwnedFd; 3],
    places: Vec<Place>,
}

/// What an agent's thread is told.
enum Order {
    /// Another application comes, with so many connections. It gets a room.
    Begin(Vec<TcpStream>, Sender<Given>),
    /// Applications have taken what they had written out of slots whose connections stay TCP.
    Taken,
    /// So many more connections of the last application.
    More(Vec<TcpStream>, Sender<Given>),
    /// The application of that room is dead.
    Leave(usize),
    /// All connections are over soon: the thread ends then.
    End,
}

/// What an agent's thread has seen.
#[derive(Default, Debug)]
struct Seen {
    established: usize,
    over: usize,
    fallbacks: usize,
    sleeps: usize,
}

struct Agent {
    thread: thread::JoinHandle<Seen>,
    orders: Sender<Order>,
    /// Wakes the thread.
    bell: OwnedFd,
}

impl Agent {
    fn start(test: u8, host: u8) -> Agent {
        let (orders, mut taken) = channel();
        let bell = eventfd();
        let own = bell.try_clone().expect("a descriptor");
        let thread = thread::spawn(move || serve(test, host, &own, &mut taken));
        Agent { thread, orders, bell }
    }

    fn order(&self, order: Order) {
        self.orders.send(order).expect("the agent's thread");
        rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).expect("its eventfd");
    }

    /// For another application, or for the last one.
    fn begin(&self, tcp: Vec<TcpStream>, is_another: bool) -> Given {
        let (given, gets) = channel();
        self.order(if is_another { Order::Begin(tcp, given) } else { Order::More(tcp, given) });
        gets.recv_timeout(LIMIT).expect("a room")
    }

    fn end(self) -> Seen {
        self.order(Order::End);
        self.thread.join().expect("the agent's thread")
    }
}

fn eventfd() -> OwnedFd {
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    rustix::event::eventfd(0, flags).expect("an eventfd")
}

/// The agent's thread.
fn serve(test: u8, host: u8, bell: &OwnedFd, orders: &mut Receiver<Order>) -> Seen {
    let (config, adapters) = fake::host(test, host);
    let mut rest = Rest::new(Spin::For(Duration::ZERO)).expect("an epoll set");
    let mut service = Service::new(Driver::new(config, adapters), &rest).expect("a service");
    let (mut seen, mut begun, mut rooms, mut ends) = (Seen::default(), 0, Vec::new(), false);
    let (started, mut withdrawn) = (Instant::now(), Vec::new());
    while !ends || seen.over + seen.fallbacks < begun {
        assert!(started.elapsed() < LIMIT, "{seen:?} of {begun}");
        let mut any = service.turn(|place, event, tcp| match event {
            Event::Established { .. } => seen.established += 1,
            Event::Over { .. } => seen.over += 1,
            Event::Fallback { .. } => {
                assert!(tcp.is_some());
                seen.fallbacks += 1;
                withdrawn.extend(place);
            }
            Event::Failed { .. } => panic!("{event:?}"),
            _ => {}
        });
        for order in orders.try_iter() {
            any = true;
            if let Order::Begin(..) = order {
                rooms.push(service.add_room(SLOTS, SHIFT, &rest).expect("a room"));
            }
            match order {
                Order::Begin(tcp, given) | Order::More(tcp, given) => {
                    let room = *rooms.last().expect("a room");
                    begun += tcp.len();
                    let places = tcp.into_iter().map(|tcp| begin(&mut service, room, host, tcp));
                    let places = places.collect();
                    let own = service.room(room).expect("a room").descriptors();
                    let descriptors = own.map(|fd| fd.try_clone_to_owned().expect("a descriptor"));
                    given.send(Given { descriptors, places }).expect("the application");
                }
                Order::Taken => withdrawn.drain(..).for_each(|place| service.release(place)),
                Order::Leave(room) => service.leave(rooms[room]),
                Order::End => ends = true,
            }
        }
        match rest.next(any) {
            Next::Look => {}
            Next::Arm => service.arm().expect("devices"),
            Next::Sleep => {
                seen.sleeps += 1;
                service.sleep(&rest, &[bell.as_fd()], LIMIT).expect("poll");
                let _ = rustix::io::read(bell, &mut [0; 8]);
            }
        }
    }
    seen
}

/// Host 0 has the clients.
fn begin(service: &mut Service, room: RoomId, host: u8, tcp: TcpStream) -> Place {
    let begun = service.begin(room, host == 0, tcp, DeviceId(0), Circumstances::FINE);
    begun.expect("TCP").expect("a slot")
}

/// An application's end of a slot.
struct End {
    application: Application,
    place: Place,
}

/// An application: what it was given, as it sees it.
struct Process {
    segment: Segment,
    to_agent: OwnedFd,
    own: OwnedFd,
    ends: Vec<End>,
}

impl Process {
    /// Each of its connections sends so many bytes. Streams of both ends are numbered alike.
    fn new(given: Given, host: usize, wants: u64) -> Process {
        let [memfd, to_agent, own] = given.descriptors;
        let len = rustix::fs::fstat(&memfd).expect("a memfd").st_size as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, which stays until the test program ends.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &memfd, 0) };
        // SAFETY: all of it, and it is sealed.
        let segment = unsafe { Segment::open(base.expect("memory").cast(), len, len) };
        let segment = segment.expect("a segment");
        let mut ends = Vec::new();
        for (pair, place) in given.places.into_iter().enumerate() {
            let streams = [2 * pair + host, 2 * pair + 1 - host].map(|stream| stream as u64);
            let application =
                Application::new(segment, place.slot, 1 - place.end, streams, wants + pair as u64);
            ends.push(End { application, place });
        }
        Process { segment, to_agent, own, ends }
    }

    fn state(&self, end: &End) -> u32 {
        self.segment.slot(end.place.slot).expect("a slot").control.state.load(Acquire)
    }

    /// Tells the agent of a slot, and wakes it if it sleeps.
    fn tell(&self, slot: u32) {
        if self.segment.header().news.tell(slot) {
            rustix::io::write(&self.to_agent, &1_u64.to_ne_bytes()).expect("the agent's eventfd");
        }
    }

    /// Sleeps until the agent wakes it.
    fn sleep(&self) {
        let mut all = [PollFd::new(&self.own, PollFlags::IN)];
        let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut all, Some(&limit)).expect("poll"), 1, "nobody wakes it");
        let _ = rustix::io::read(&self.own, &mut [0; 8]);
    }

    /// Until no handshake is under way.
    fn shake(&self) {
        while self.ends.iter().any(|end| self.state(end) == SLOT_OFFERED) {
            self.sleep();
        }
    }

    /// One look at a connection. Whether anything was done.
    fn step(&mut self, at: usize) -> bool {
        let (segment, end) = (self.segment, &mut self.ends[at]);
        let (slot, app) = (end.place.slot, &mut end.application);
        if app.is_closed {
            return false;
        }
        let dirs = &segment.slot(slot).expect("a slot").dir;
        let told = dirs[end.place.end].producer.flags(Acquire).end();
        app.reading = match told {
            EndState::Open => Direction::Open,
            EndState::Shut | EndState::Closed => Direction::Ended,
            EndState::Aborted => Direction::Reset,
        };
        let mut any = app.read(5000);
        any |= app.write(7000);
        if !app.is_shut && app.written == app.wants {
            app.is_shut = true;
            let _ = dirs[1 - end.place.end].producer.shut();
            any = true;
        }
        if app.is_at_end() && (app.is_shut || app.is_aborted()) {
            app.is_closed = true;
            let _ = dirs[1 - end.place.end].producer.close(false);
            any = true;
        }
        if any {
            self.tell(slot);
        }
        any
    }

    /// Announces the sleep to the senders and receivers of all its connections. False where one has something.
    fn arm(&self) -> bool {
        self.ends.iter().filter(|end| !end.application.is_closed).all(|end| {
            let slot = end.place.slot;
            let rx = self.segment.ring(slot, end.place.end).expect("a slot");
            let tx = self.segment.ring(slot, 1 - end.place.end).expect("a slot");
            rx.arm_rx(ARM_TCP);
            tx.arm_tx(ARM_TCP);
            let wants = !end.application.is_shut;
            let reads = rx.dir().producer.flags(Relaxed).end() != EndState::Open
                && end.application.reading == Direction::Open;
            !(rx.has_data() || reads || (wants && tx.is_writable()))
        })
    }

    /// All of its connections to their ends. How often it slept.
    fn run(&mut self) -> usize {
        let (begun, mut sleeps) = (Instant::now(), 0);
        while self.ends.iter().any(|end| !end.application.is_closed) {
            assert!(begun.elapsed() < LIMIT);
            let any = (0..self.ends.len()).fold(false, |any, at| self.step(at) | any);
            if !any && self.arm() {
                sleeps += 1;
                self.sleep();
            }
        }
        sleeps
    }
}

/// TCP connections, the clients' ends first.
fn connections(count: usize) -> [Vec<TcpStream>; 2] {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("a port");
    let connect =
        |_| (TcpStream::connect(address).expect("TCP"), listener.accept().expect("TCP").0);
    let (clients, servers) = (0..count).map(connect).unzip();
    [clients, servers]
}

fn agents() -> (u8, [Agent; 2]) {
    fabric();
    let test = next_test();
    (test, [0, 1].map(|host| Agent::start(test, host)))
}

/// An application for each agent, with so many connections between them.
fn processes(agents: &[Agent; 2], count: usize, wants: u64) -> [Process; 2] {
    connect(agents, count, wants, true)
}

fn connect(agents: &[Agent; 2], count: usize, wants: u64, is_another: bool) -> [Process; 2] {
    let [clients, servers] = connections(count);
    let given = [agents[0].begin(clients, is_another), agents[1].begin(servers, is_another)];
    let mut host = 0;
    let processes = given.map(|given| {
        host += 1;
        Process::new(given, host - 1, wants)
    });
    processes.iter().for_each(Process::shake);
    processes
}

/// Both run, side by side, and end. How often each slept.
fn run(processes: &mut [Process; 2]) -> [usize; 2] {
    thread::scope(|scope| {
        let threads = processes.each_mut().map(|process| scope.spawn(|| process.run()));
        threads.map(|thread| thread.join().expect("an application"))
    })
}

fn assert_whole(processes: &[Process; 2]) {
    for (one, other) in processes[0].ends.iter().zip(&processes[1].ends) {
        let (one, other) = (&one.application, &other.application);
        assert_eq!((one.read, other.read), (other.wants, one.wants));
        assert!(!one.is_aborted() && !other.is_aborted());
    }
}

#[test]
fn applications_know_nothing_but_their_slots() {
    let (_, agents) = agents();
    // More than there are slots, one room after the other, and all slots of each.
    for _ in 0..3 {
        let mut processes = processes(&agents, SLOTS as usize, 200_000);
        let confirmed = |end: &End| processes[0].state(end) == SLOT_CONFIRMED;
        assert!(processes[0].ends.iter().all(confirmed));
        let sleeps = run(&mut processes);
        assert_whole(&processes);
        println!("{SLOTS} of {SLOTS} connections by SMC-R; applications slept {sleeps:?} times");
    }
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.fallbacks), (3 * SLOTS as usize, 0), "{seen:?}");
        assert!(seen.sleeps > 10, "{seen:?}");
    }
}

/// A killed process' connections end as the kernel ends them: by a reset where bytes are unread, and in order otherwise.
#[test]
fn connections_of_a_dead_application_end() {
    for unread in [false, true] {
        let (_, agents) = agents();
        let [client, mut server] = processes(&agents, 1, 3000);
        if unread {
            let app = &mut server.ends[0].application;
            assert!(app.write(3000));
            server.tell(server.ends[0].place.slot);
            let rx = client.segment.ring(client.ends[0].place.slot, client.ends[0].place.end);
            let rx = rx.expect("a slot");
            rx.arm_rx(ARM_TCP);
            if !rx.has_data() {
                client.sleep();
            }
            assert!(rx.has_data());
        }
        // Its other connections, which are another room's, go on.
        let mut others = processes(&agents, 2, 100_000);
        agents[0].order(Order::Leave(0));
        run(&mut others);
        assert_whole(&others);
        server.run();
        assert_eq!(server.ends[0].application.is_aborted(), unread);
        for seen in agents.map(Agent::end) {
            assert_eq!((seen.established, seen.over), (3, 3), "{seen:?}");
        }
    }
    println!("6 of 6 connections by SMC-R");
}

/// The slots of connections that stay TCP can have others once the application has taken its bytes.
#[test]
fn a_connection_that_stays_tcp_gives_its_slot_back() {
    let (test, agents) = agents();
    fabric().0.refuse(&device(test, 1), Call::CreateQp, 1, libc::ENOMEM).expect("a line");
    let processes = processes(&agents, 1, 100);
    assert!(processes.iter().all(|process| process.state(&process.ends[0]) == SLOT_WITHDRAWN));
    agents.iter().for_each(|agent| agent.order(Order::Taken));
    let mut all = connect(&agents, SLOTS as usize, 30_000, false);
    run(&mut all);
    assert_whole(&all);
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.fallbacks, seen.established), (1, SLOTS as usize), "{seen:?}");
    }
    println!("{SLOTS} of {} connections by SMC-R", SLOTS + 1);
}

/// An application that writes at random into its room spoils its own connections: the other one's end whole.
#[test]
fn an_application_that_scribbles_spoils_its_own_connections() {
    let (_, agents) = agents();
    let vandals = processes(&agents, 2, 100_000);
    let segment = vandals[0].segment;
    let words = segment.len() / 8;
    let mut seed = 1_u64;
    for round in 0..30 {
        let mut others = processes(&agents, 1, 20_000);
        // Header, slots and the first rings, all but the segment's length.
        for _ in 0..200 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let at = (seed >> 33) as usize % words.min(2048);
            let value = if seed & 1 << 20 == 0 { seed } else { seed % 70_000 };
            // SAFETY: a word of the segment's, which is all atomics and bytes.
            let word = unsafe { AtomicU64::from_ptr(segment.base().cast::<u64>().add(at)) };
            word.store(value, Ordering::Relaxed);
        }
        (0..8).for_each(|slot| vandals[0].tell(slot));
        rustix::io::write(&vandals[0].to_agent, &1_u64.to_ne_bytes()).expect("the eventfd");
        run(&mut others);
        assert_whole(&others);
        assert!(others[0].ends.iter().all(|end| end.application.read == 20_000), "{round}");
    }
    agents.iter().for_each(|agent| agent.order(Order::Leave(0)));
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.over), (32, 32), "{seen:?}");
    }
    println!("32 of 32 connections by SMC-R, of them 2 of a vandal's");
}
