//! What comes in by the agent's socket, what is refused there, and what is left of it.

mod process;

use std::fs;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use process::fake::{fabric, host, next_test};
use process::{
    Agent, LIMIT, agents, alone, ask, assert_whole, descriptors, is_closed, knock, loopback,
    processes, run, say, settle,
};
use usmc_agent::control::Control;
use usmc_agent::driver::Driver;
use usmc_agent::rest::{Rest, Spin};
use usmc_agent::service::Service;
use usmc_shm::agent::{Place, Request, Role};

#[test]
fn what_is_no_request_is_refused_and_leaves_nothing() {
    let _alone = alone();
    let (_, agents) = agents();
    let agent = &agents[0];
    let request = Request::Hand(Role::Client).emit();
    let fetch = Request::Fetch(Place { segment: 1, slot: 0, usage: 1 }).emit();
    let before = descriptors();
    {
        let [tcp, other] = loopback();
        let [deputy, _socket] = loopback();
        let (unix, _unix) = UnixStream::pair().expect("a pair");
        let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let file = fs::File::open("/dev/null").expect("a file");
        let (tcp, deputy, other) = (tcp.as_fd(), deputy.as_fd(), other.as_fd());
        let mut unknown = request;
        unknown[0] ^= 8;
        for (message, descriptors) in [
            (&b"x"[..], &[tcp, deputy][..]),
            (&unknown, &[tcp, deputy]),
            (&[&request[..], b"x"].concat(), &[tcp, deputy]),
            (&request, &[]),
            (&request, &[tcp]),
            (&request, &[tcp, deputy, other]),
            (&request, &[tcp, deputy, other, other]),
            (&request, &[tcp, unix.as_fd()]),
            (&request, &[unix.as_fd(), deputy]),
            (&request, &[tcp, udp.as_fd()]),
            (&request, &[listener.as_fd(), deputy]),
            (&request, &[tcp, file.as_fd()]),
            (&fetch, &[]),
            (&fetch, &[tcp]),
        ] {
            let control = knock(agent);
            say(&control, message, descriptors);
            assert!(is_closed(&control), "{message:?} with {} descriptors", descriptors.len());
        }
        // One that says nothing, and goes.
        drop(knock(agent));
    }
    settle(before);
    let mut both = processes(&agents, 1, 1000);
    run(&mut both);
    assert_whole(&both);
    for agent in agents {
        let _ = agent.end();
    }
}

/// A process that says nothing has five seconds.
#[test]
fn a_silent_process_is_sent_away() {
    let _alone = alone();
    let (_, agents) = agents();
    let begun = Instant::now();
    let control = knock(&agents[0]);
    assert!(is_closed(&control));
    assert!(begun.elapsed() >= Duration::from_secs(4));
    // The oldest goes where there are too many.
    let all: Vec<_> = (0..300).map(|_| knock(&agents[0])).collect();
    assert!(is_closed(&all[0]));
    drop(all);
    for agent in agents {
        let _ = agent.end();
    }
}

/// A process that dies before its answer leaves nothing, be its handshake under way or not.
#[test]
fn a_process_that_gives_up_leaves_nothing() {
    let _alone = alone();
    let (_, agents) = agents();
    // The room comes, and stays for a while.
    let mut both = processes(&agents, 1, 1000);
    run(&mut both);
    drop(both);
    let before = descriptors();
    let (mut peers, mut asked) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        // Nobody answers its handshake.
        let [tcp, peer] = loopback();
        peers.push(peer);
        asked.push(ask(&agents[0], Role::Client, tcp));
    }
    drop(asked);
    drop(peers);
    let is_left = |agent: &Agent| agent.live[0].load(Ordering::Relaxed) > 0;
    let begun = Instant::now();
    while agents.iter().any(is_left) {
        assert!(begun.elapsed() < LIMIT);
        thread::yield_now();
    }
    assert!(descriptors() < before);
    let mut both = processes(&agents, 2, 1000);
    run(&mut both);
    assert_whole(&both);
    for agent in agents {
        let _ = agent.end();
    }
}

/// A room goes some time after its last connection, and devices know nothing of it.
#[test]
fn a_room_goes_after_its_last_connection() {
    let _alone = alone();
    let (_, agents) = agents();
    let mut both = processes(&agents, 6, 10_000);
    run(&mut both);
    assert_whole(&both);
    let begun = Instant::now();
    let live = |agent: &Agent| agent.live.each_ref().map(|count| count.load(Ordering::Relaxed));
    // RMBs are named to the peer as long as its link group is there.
    assert!(agents.iter().all(|agent| live(agent)[1] > 0));
    while agents.iter().any(|agent| live(agent) != [0, 0]) {
        assert!(begun.elapsed() < LIMIT, "{:?}", agents.each_ref().map(live));
        thread::yield_now();
    }
    assert!(begun.elapsed() >= usmc_agent::rooms::IDLE / 2);
    // The next one has its room.
    let mut both = processes(&agents, 1, 10_000);
    run(&mut both);
    assert_whole(&both);
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.rooms, seen.established), (2, 7), "{seen:?}");
    }
}

/// A slot has no other connection before its process has let go of it.
#[test]
fn a_slot_serves_again_once_its_process_has_let_go_of_it() {
    let _alone = alone();
    let (_, agents) = agents();
    let mut slots = Vec::new();
    let mut kept = Vec::new();
    for _ in 0..4 {
        let mut both = processes(&agents, 1, 1000);
        both.iter_mut().flat_map(|process| &mut process.ends).for_each(|end| end.keeps_slot = true);
        run(&mut both);
        assert_whole(&both);
        slots.push(both[0].ends[0].place.slot);
        kept.push(both);
    }
    assert_eq!(slots, [0, 1, 2, 3]);
    kept.iter().flatten().flat_map(|process| &process.ends).for_each(|end| end.let_go());
    let mut both = processes(&agents, 1, 1000);
    assert!(both[0].ends[0].place.slot < 4);
    run(&mut both);
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.rooms), (5, 1), "{seen:?}");
    }
}

#[test]
fn the_socket_is_the_users_and_one_agents() {
    let _alone = alone();
    fabric();
    let test = next_test();
    let agent = Agent::start(test, 0);
    let mode = fs::metadata(&agent.path).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let listen = |path: &Path| {
        let (config, adapters) = host(test, 1);
        let rest = Rest::new(Spin::default()).expect("epoll");
        let driver = Driver::new(config, adapters).expect("epoll");
        let service = Service::new(driver, rest, 14).expect("a service");
        Control::listen(path, &service)
    };
    let error = listen(&agent.path).err().expect("it is another one's");
    assert!(error.to_string().contains("another agent"), "{error}");
    let path = agent.path.clone();
    agent.end();
    assert!(!path.exists());
    // An agent that was killed leaves the file.
    drop(std::os::unix::net::UnixDatagram::bind(&path).expect("a socket"));
    let control = listen(&path).expect("the file of one that is gone");
    drop(control);
    assert!(!path.exists());
    fs::write(&path, "x").expect("a file");
    let error = listen(&path).err().expect("it is no socket");
    assert!(error.to_string().contains("no socket"), "{error}");
    fs::remove_file(&path).expect("a file");
}
