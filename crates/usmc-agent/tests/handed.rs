//! An agent without a thread of its own: each turn is the test's, and so nothing comes in between.

mod peer;
mod process;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use peer::{decline, message};
use process::{LIMIT, ask_at, fake, knock_at, loopback, map, receive, say};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt;
use usmc_agent::agent::{Agent, Found, Stage};
use usmc_agent::control::Control;
use usmc_agent::driver::Driver;
use usmc_agent::rest::{Rest, Spin};
use usmc_agent::service::{Handed, Service, Ticket};
use usmc_agent::sys::Owner;
use usmc_rdma::Event;
use usmc_shm::agent::{Answer, Place, Request, Role};
use usmc_shm::back::{Back, Leave};
use usmc_shm::layout::{ACCEPTOR, CLIENT};
use usmc_shm::segment::Segment;
use usmc_shm::span::{RxSpan, Switch, TxSpan};
use usmc_shm::sync::Ordering::Relaxed;

fn service() -> Service {
    service_with(process::SHIFT)
}

/// log2 of a ring's bytes is that.
fn service_with(shift: u32) -> Service {
    fake::fabric();
    let (config, adapters) = fake::host(fake::next_test(), 0);
    let rest = Rest::new(Spin::For(Duration::ZERO)).expect("an epoll set");
    let driver = Driver::new(config, adapters).expect("an epoll set");
    Service::new(driver, rest, shift).expect("a service")
}

/// With a socket.
fn control(name: &str, service: &Service) -> (Control, PathBuf) {
    let name = format!("handed-{}-{name}", std::process::id());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    (Control::listen(&path, service).expect("a socket"), path)
}

/// A client's connection, with the application's end of the deputy, and the peer's end of TCP.
struct Client {
    ticket: Ticket,
    place: Place,
    application: TcpStream,
    peer: TcpStream,
}

fn hand(service: &mut Service) -> Client {
    let [deputy, application] = loopback();
    let (ticket, place, peer) = hand_with(service, deputy.into());
    Client { ticket, place, application, peer }
}

fn hand_with(service: &mut Service, deputy: OwnedFd) -> (Ticket, Place, TcpStream) {
    let [tcp, peer] = loopback();
    // Little room, as over a slow network.
    sockopt::set_socket_send_buffer_size(&tcp, 1).expect("a socket");
    let (ticket, place) = hand_tcp(service, tcp, deputy);
    (ticket, place, peer)
}

fn hand_tcp(service: &mut Service, tcp: TcpStream, deputy: OwnedFd) -> (Ticket, Place) {
    hand_of(service, tcp, deputy, Owner::own())
}

fn hand_of(
    service: &mut Service,
    tcp: TcpStream,
    deputy: OwnedFd,
    owner: Owner,
) -> (Ticket, Place) {
    let ticket = service.hand_over(Handed { role: Role::Client, tcp, deputy, owner });
    let (of, answer) = service.poll_answer().expect("an answer at once");
    let Answer::Ring(place) = answer else { panic!("{answer:?}") };
    assert_eq!(of, ticket);
    // The process has the slot.
    let segment = segment(service, ticket);
    segment.slot(place.slot).expect("a slot").end[ACCEPTOR].refs.store(1, Relaxed);
    service.is_answered(ticket);
    (ticket, place)
}

/// The segment that the process has got.
fn segment(service: &Service, ticket: Ticket) -> Segment {
    let memfd = service.memfd(ticket).expect("a memfd");
    map(&memfd.try_clone_to_owned().expect("a duplicate"))
}

/// The application writes.
fn write(segment: Segment, place: Place, bytes: &[u8]) {
    let ring = segment.ring(place.slot, ACCEPTOR).expect("a slot");
    let room = ring.room(bytes.len()).expect("a ring");
    assert!(room.free >= bytes.len());
    // SAFETY: within the room.
    unsafe { ring.copy_in(room.prod, room.place, bytes.as_ptr(), bytes.len()) };
    ring.publish(room.prod + bytes.len() as u64);
}

/// Until something like that has happened.
fn turn_until(service: &mut Service, is_it: impl Fn(&Event) -> bool) {
    let begun = Instant::now();
    loop {
        service.turn();
        while let Some(event) = service.poll_event() {
            if is_it(&event) {
                return;
            }
        }
        assert!(begun.elapsed() < LIMIT);
    }
}

fn is_fallback(event: &Event) -> bool {
    matches!(event, Event::Fallback { .. })
}

fn assert_reset(peer: &mut TcpStream) {
    peer.set_read_timeout(Some(LIMIT)).expect("a socket");
    // Doorbells may have come before.
    let error = loop {
        match peer.read(&mut [0; 8]) {
            Ok(0) => panic!("a FIN"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn another_user_gets_nothing() {
    let mut service = service();
    let mut client = hand(&mut service);
    service.turn();
    assert!(service.fetch(Owner::own(), client.place).is_none(), "the peer has not answered");
    decline(&mut client.peer, b"");
    turn_until(&mut service, is_fallback);
    let own = Owner::own();
    let other = Owner { uid: own.uid + 1, ..own };
    assert!(service.fetch(other, client.place).is_none());
    // Another process of the same user does.
    let other = Owner { pid: own.pid + 1, ..own };
    assert_eq!(service.fetch(other, client.place).map(|found| found.0), Some(client.ticket));
}

/// A process that asks and is killed before its answer has got nothing: what it has written goes by TCP.
#[test]
fn a_fetch_that_nobody_waits_for_takes_nothing_along() {
    let mut service = service();
    let (mut control, path) = control("gone", &service);
    let mut client = hand(&mut service);
    write(segment(&service, client.ticket), client.place, b"last");
    decline(&mut client.peer, b"");
    turn_until(&mut service, is_fallback);
    say(&knock_at(&path), &Request::Fetch(client.place).emit(), &[]);
    let (begun, mut was_there) = (Instant::now(), false);
    while !was_there || control.visitors() > 0 {
        service.turn();
        control.turn(&service.take_ready(), &mut service);
        was_there |= control.visitors() > 0;
        assert!(begun.elapsed() < LIMIT);
    }
    drop(client.application);
    while service.connections() > 0 {
        service.turn();
        assert!(begun.elapsed() < LIMIT);
    }
    let mut bytes = Vec::new();
    client.peer.read_to_end(&mut bytes).expect("a FIN");
    assert_eq!(bytes, b"last");
}

/// The kernel has no room for all of it at once, and the peer takes its time.
#[test]
fn what_is_left_goes_by_tcp_as_there_is_room() {
    let mut service = service_with(20);
    let mut client = hand(&mut service);
    let bytes: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_ne_bytes).collect();
    sockopt::set_socket_recv_buffer_size(&client.peer, 1 << 16).expect("a socket");
    let segment = segment(&service, client.ticket);
    write(segment, client.place, &bytes);
    decline(&mut client.peer, b"");
    turn_until(&mut service, is_fallback);
    let producer = &segment.slot(client.place.slot).expect("a slot").dir[ACCEPTOR].producer;
    let _ = producer.close(false);
    drop(client.application);
    let begun = Instant::now();
    // The agent is at it once nobody can have the connection back.
    while service.fetch(Owner::own(), client.place).is_some() {
        service.turn();
        assert!(begun.elapsed() < LIMIT);
    }
    assert_eq!(service.connections(), 1, "there was room for all");
    assert!(!service.has_to_give_back());
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        client.peer.set_read_timeout(Some(LIMIT)).expect("a socket");
        client.peer.read_to_end(&mut all).map(|_| all)
    });
    while service.connections() > 0 {
        service.turn();
        assert!(begun.elapsed() < LIMIT);
    }
    assert!(reader.join().expect("a thread").expect("a FIN") == bytes);
}

/// SO_LINGER is the application's affair: no close of the agent's waits for a peer.
#[test]
fn a_peer_that_takes_nothing_holds_nobody_up() {
    let mut service = service_with(20);
    let [tcp, mut peer] = loopback();
    let [deputy, application] = loopback();
    sockopt::set_socket_recv_buffer_size(&peer, 1 << 16).expect("a socket");
    for socket in [&tcp, &deputy] {
        sockopt::set_socket_send_buffer_size(socket, 1 << 20).expect("a socket");
        sockopt::set_socket_linger(socket, Some(Duration::from_secs(30))).expect("a socket");
    }
    let (ticket, place) = hand_tcp(&mut service, tcp, deputy.into());
    let segment = segment(&service, ticket);
    write(segment, place, &vec![7; 1 << 19]);
    decline(&mut peer, b"");
    turn_until(&mut service, is_fallback);
    let producer = &segment.slot(place.slot).expect("a slot").dir[ACCEPTOR].producer;
    let _ = producer.close(false);
    drop(application);
    let begun = Instant::now();
    while service.connections() > 0 {
        service.turn();
        assert!(begun.elapsed() < LIMIT);
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let mut all = Vec::new();
    sockopt::set_socket_recv_buffer_size(&peer, 1 << 20).expect("a socket");
    peer.set_read_timeout(Some(LIMIT)).expect("a socket");
    peer.read_to_end(&mut all).expect("a FIN");
    assert_eq!(all.len(), 1 << 19);
}

/// SO_RCVLOWAT is the application's affair, too: the agent finds messages of a handshake that are shorter.
#[test]
fn a_socket_that_hears_of_many_bytes_only_is_heard() {
    let mut service = service();
    let [tcp, mut peer] = loopback();
    let [deputy, _application] = loopback();
    let hears = |tcp: &TcpStream, least: libc::c_int| {
        let (at, len) = ((&raw const least).cast(), size_of::<libc::c_int>() as u32);
        let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
        // SAFETY: an integer, and its length.
        unsafe { libc::setsockopt(tcp.as_raw_fd(), level, name, at, len) }
    };
    assert_eq!(hears(&tcp, 4096), 0);
    hand_tcp(&mut service, tcp, deputy.into());
    decline(&mut peer, b"");
    turn_until(&mut service, is_fallback);
}

/// A process that keeps the agent's end of a deputy as well does not wake the agent by that for good.
#[test]
fn a_deputy_that_a_process_keeps_is_watched_no_more() {
    for is_reset in [false, true] {
        let mut service = service();
        let [deputy, mut application] = loopback();
        let kept = deputy.try_clone().expect("a duplicate");
        let (ticket, place, mut peer) = hand_with(&mut service, deputy.into());
        if is_reset {
            drop(peer);
        } else {
            let segment = segment(&service, ticket);
            let producer = &segment.slot(place.slot).expect("a slot").dir[ACCEPTOR].producer;
            let _ = producer.close(false);
            decline(&mut peer, b"");
        }
        let begun = Instant::now();
        // Nothing more is to be done.
        while service.turn() || service.connections() > 0 {
            assert!(begun.elapsed() < LIMIT);
        }
        application.write_all(b"x").expect("TCP inside the host");
        for _ in 0..100 {
            assert!(!service.turn(), "{is_reset}");
        }
        drop(kept);
    }
}

/// The agent cannot watch the deputy's socket. The process lives, and has the slot.
#[test]
fn a_deputy_that_cannot_be_heard_is_reset_and_keeps_its_slot() {
    let mut service = service();
    let file = File::open("/proc/self/exe").expect("a file");
    let (ticket, place, peer) = hand_with(&mut service, file.into());
    let segment = segment(&service, ticket);
    drop(peer);
    turn_until(&mut service, |event| matches!(event, Event::Failed { .. }));
    assert_eq!(service.connections(), 0);
    let other = hand(&mut service);
    assert_eq!((place.slot, other.place.slot), (0, 1));
    segment.slot(0).expect("a slot").end[ACCEPTOR].refs.store(0, Relaxed);
    assert_eq!(hand(&mut service).place.slot, 0);
}

/// A room is one process'. Of some it is not known which one they are, and the number of one that is gone may be another one's.
#[test]
fn processes_that_may_not_be_the_same_have_rooms_of_their_own() {
    let mut service = service();
    let own = Owner::own();
    let mut kept = Vec::new();
    let mut room = |service: &mut Service, pid: u32| {
        let [[tcp, peer], [deputy, application]] = [loopback(), loopback()];
        let owner = Owner { pid, ..own };
        let (_, place) = hand_of(service, tcp, deputy.into(), owner);
        kept.push((peer, application));
        place.segment
    };
    assert_eq!(room(&mut service, own.pid), room(&mut service, own.pid));
    assert_ne!(room(&mut service, 0), room(&mut service, 0));
    let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
    let pid = child.id();
    let [one, other] = [room(&mut service, pid), room(&mut service, pid)];
    child.kill().expect("a process");
    child.wait().expect("a process");
    let again = room(&mut service, pid);
    assert!(one == other && again != one);
}

/// An application that has left its ring comes for no connection, be it noticed or not: the agent looks before it waits for one.
#[test]
fn an_application_that_has_left_unnoticed_is_reset_by_a_decline() {
    let mut service = service();
    let mut client = hand(&mut service);
    let segment = segment(&service, client.ticket);
    let slot = segment.slot(client.place.slot).expect("a slot");
    assert_eq!(TxSpan::new(slot, ACCEPTOR).try_switch(|| Some(0)), Ok(Switch::Ring));
    // It is looked at for as long as it may have work.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(50) {
        service.turn();
    }
    let [rx, tx] = [CLIENT, ACCEPTOR].map(|end| segment.ring(client.place.slot, end).expect("one"));
    assert_eq!(TxSpan::new(slot, ACCEPTOR).try_back(&tx, || Some(0)), Ok(Back::Done));
    assert_eq!(RxSpan::new(slot, ACCEPTOR).leave(&rx, &tx, false), Leave::Left);
    decline(&mut client.peer, b"");
    turn_until(&mut service, is_fallback);
    assert_eq!(service.connections(), 0);
    assert_reset(&mut client.peer);
    assert_reset(&mut client.application);
}

/// What waits, shakes hands, or is TCP again, is reset with the rest.
#[test]
fn a_stop_ends_what_is_not_established() {
    let mut service = service();
    let mut first = hand(&mut service);
    decline(&mut first.peer, b"");
    turn_until(&mut service, is_fallback);
    let mut fetched = hand(&mut service);
    decline(&mut fetched.peer, b"");
    turn_until(&mut service, is_fallback);
    let (ticket, tcp, _) = service.fetch(Owner::own(), fetched.place).expect("TCP");
    let tcp = tcp.try_clone_to_owned().expect("a duplicate");
    service.is_fetched(ticket);
    let mut clients: Vec<Client> = (0..9).map(|_| hand(&mut service)).collect();
    assert!(service.has_to_give_back());
    service.stop();
    assert_eq!((service.connections(), service.has_to_give_back()), (0, false));
    assert_reset(&mut first.peer);
    assert_reset(&mut first.application);
    // Only the ninth has said nothing.
    let mut last = clients.pop().expect("it waits");
    assert_reset(&mut last.peer);
    for client in &mut clients {
        assert!(matches!(message(&mut client.peer), smc_proto::wire::clc::Message::Proposal(_)));
        assert_reset(&mut client.application);
    }
    // What a process has again is its own.
    drop(tcp);
    assert_eq!(fetched.peer.read(&mut [0; 8]).expect("a FIN"), 0);
    fetched.application.read_to_end(&mut Vec::new()).expect("a FIN");
}

/// What a turn with an order has heated is armed before the agent sleeps.
#[test]
fn an_order_is_work() {
    let service = service();
    let (control, _) = control("order", &service);
    let mut agent = Agent::new(service, control);
    let order = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    agent.watch_orders(&order).expect("epoll");
    let mut turn = || agent.turn(|_| ()).expect("no device fails");
    assert_eq!(turn(), Found::default(), "it arms");
    rustix::io::write(&order, &1_u64.to_ne_bytes()).expect("an eventfd");
    assert_eq!(turn(), Found { order: false, slept: true }, "it wakes at once");
    assert_eq!(turn(), Found { order: true, slept: false });
    rustix::io::read(&order, &mut [0; 8]).expect("an eventfd");
    assert_eq!(turn(), Found::default(), "it arms anew");
}

/// Connections that stay TCP can be fetched while the agent drains. None is taken any more.
#[test]
fn an_agent_that_drains_gives_back() {
    let mut service = service();
    let (control, path) = control("drains", &service);
    let mut client = hand(&mut service);
    decline(&mut client.peer, b"");
    turn_until(&mut service, is_fallback);
    let mut agent = Agent::new(service, control);
    agent.end();
    let turn = |agent: &mut Agent, until: &dyn Fn(&Agent) -> bool| {
        let begun = Instant::now();
        while !until(agent) {
            agent.turn(|_| ()).expect("no device fails");
            assert!(begun.elapsed() < LIMIT);
        }
    };
    let has_answer = |socket: &OwnedFd| {
        let mut all = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut all, Some(&Default::default())) == Ok(1)
    };
    let [tcp, _peer] = loopback();
    let asked = ask_at(&path, Role::Client, tcp);
    turn(&mut agent, &|_| has_answer(&asked.control));
    assert_eq!(asked.answer().0, Answer::Tcp { code: 0 });
    let visitor = knock_at(&path);
    say(&visitor, &Request::Fetch(client.place).emit(), &[]);
    turn(&mut agent, &|_| has_answer(&visitor));
    let (answer, tcp) = receive(&visitor).expect("an answer");
    assert!(matches!(answer, Answer::Tcp { code } if code != 0) && tcp.is_some());
    assert_eq!((agent.stage(), path.exists()), (Stage::Drains, true));
    drop(client.application);
    turn(&mut agent, &|agent| agent.stage() == Stage::Done);
    assert!(!path.exists());
    assert!(tcp.as_ref().is_some_and(|tcp| tcp.as_fd().try_clone_to_owned().is_ok()));
}
