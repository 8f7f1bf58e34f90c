//! Agents and applications that have nothing in common but the slots of rooms and a socket inside the host.

mod process;

use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use process::application::byte_at;
use process::{Agent, LIMIT, Process, SHIFT, agents, assert_whole, processes, run};
use rustix::io::Errno;
use rustix::net::sockopt;
use usmc_shm::state::EndState;

#[test]
fn applications_know_nothing_but_their_slots() {
    const COUNT: usize = 20;
    let (_, agents) = agents();
    // More than a room has slots, three times.
    for _ in 0..3 {
        let mut processes = processes(&agents, COUNT, 200_000);
        let sleeps = run(&mut processes);
        assert_whole(&processes);
        assert_eq!(processes[0].ends.len(), COUNT);
        println!("{COUNT} of {COUNT} connections by SMC-R; applications slept {sleeps:?} times");
    }
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.fallbacks), (3 * COUNT, 0), "{seen:?}");
        // 4, 16 and 64 slots: those of ended connections served again.
        assert!(seen.sleeps > 10 && seen.rooms <= 3, "{seen:?}");
    }
}

/// A killed process' connections end as the kernel ends them: by a reset where bytes are unread, and in order otherwise.
#[test]
fn connections_of_a_dead_application_end() {
    for unread in [false, true] {
        let (_, agents) = agents();
        let [mut client, mut server] = processes(&agents, 1, 3000);
        if unread {
            let end = &mut server.ends[0];
            assert!(end.application.write(3000));
            end.wake();
            client.ends[0].wait_for_data();
        }
        // Other connections go on.
        let mut others = processes(&agents, 2, 100_000);
        client.ends[0].die();
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

/// An end is said in the slot, and then by the kernel: a FIN for a close, which answers what is sent behind it by a RST, and a RST for an abort.
#[test]
fn the_kernel_says_the_end_that_the_slot_says() {
    let (_, agents) = agents();
    let [mut client, mut server] = processes(&agents, 2, 1000);
    // The first doorbell is in the way of nothing.
    server.ends[0].close();
    assert_eq!((client.ends[0].hear(), client.ends[0].peer()), (Ok(0), EndState::Closed));
    client.ends[0].knock();
    // A RST behind a FIN.
    assert_eq!(client.ends[0].error(), Some(Errno::PIPE.raw_os_error()));
    client.ends[0].close();
    server.ends[1].abort();
    assert_eq!(client.ends[1].hear(), Err(Errno::CONNRESET));
    assert_eq!(client.ends[1].peer(), EndState::Aborted);
    client.ends[1].close();
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.over), (2, 2), "{seen:?}");
    }
    println!("2 of 2 connections by SMC-R");
}

/// More than half of a ring.
const MUCH: u64 = (1 << SHIFT) * 3 / 4;

/// A client that has shut its direction, and has not read what its server has written.
fn half_closed() -> ([Agent; 2], [Process; 2]) {
    let (_, agents) = agents();
    let [mut client, mut server] = processes(&agents, 1, MUCH);
    client.ends[0].shut();
    let end = &mut server.ends[0];
    while end.application.written < MUCH {
        end.application.write(MUCH);
    }
    end.wake();
    client.ends[0].wait_for_data_of(MUCH);
    (agents, [client, server])
}

/// Both agents end. They have had one connection by SMC-R.
fn assert_one_was_there(agents: [Agent; 2]) {
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.over), (1, 1), "{seen:?}");
    }
    println!("1 of 1 connections by SMC-R");
}

/// The peer may wait for the application to read, which does not put off the question whether it lives.
#[test]
fn a_half_closed_application_that_is_killed_with_a_full_ring_is_found() {
    let (agents, [mut client, mut server]) = half_closed();
    client.ends[0].die();
    let begun = Instant::now();
    while server.ends[0].peer() != EndState::Aborted {
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", server.ends[0].peer());
        thread::yield_now();
    }
    server.ends[0].close();
    assert_one_was_there(agents);
}

/// An agent looks seldom at a reader that pauses, and soon enough at one that goes on.
#[test]
fn a_half_closed_reader_that_pauses_costs_little() {
    let (agents, [mut client, server]) = half_closed();
    let sleeps = || agents[0].sleeps.load(Ordering::Relaxed);
    let before = sleeps();
    thread::sleep(Duration::from_secs(1));
    let during = sleeps() - before;
    assert!(during < 100, "it slept {during} times in a second");
    client.ends[0].application.wants = 0;
    run(&mut [client, server]);
    println!("{during} sleeps in a second");
    assert_one_was_there(agents);
}

/// An application out of the ring that reads slowly: the rest follows as its kernel has room.
#[test]
fn a_slow_reader_out_of_the_ring_gets_all() {
    const BYTES: u64 = 16 << 20;
    let (_, agents) = agents();
    let [client, mut server] = processes(&agents, 1, 0);
    server.ends[0].application.wants = BYTES;
    let end = &client.ends[0];
    let mut socket = end.socket.as_ref().expect("a socket");
    sockopt::set_socket_recv_buffer_size(socket, 1 << 16).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
    end.leave_ring();
    let writer = thread::spawn(move || server.run());
    // Its kernel takes nothing more, nor does the agent's: it sleeps. How much is in the ring then depends on when the peer was told of
    // room, which is not for each byte that the kernel has taken.
    let (begun, mut before) = (Instant::now(), (0, 0));
    loop {
        assert!(begun.elapsed() < LIMIT);
        thread::sleep(Duration::from_millis(100));
        let now = (agents[0].sleeps.load(Ordering::Relaxed), end.has_to_read());
        if now.1 > 0 && now == before {
            break;
        }
        before = now;
    }
    let (mut at, mut bytes) = (0, vec![0; 1 << 16]);
    loop {
        let n = socket.read(&mut bytes).expect("the rest");
        assert!((at..).zip(&bytes[..n]).all(|(at, byte)| *byte == byte_at(1, at)), "{at}");
        at += n as u64;
        if n == 0 {
            break;
        }
    }
    assert_eq!(at, BYTES);
    drop(client);
    writer.join().expect("the peer");
    assert_one_was_there(agents);
}

/// Doorbells are few: an application that says that more of them come than could ever be rung is not waited for.
#[test]
fn an_application_whose_doorbells_have_no_end_is_given_up() {
    let (_, agents) = agents();
    let [client, mut server] = processes(&agents, 1, 1000);
    client.ends[0].leave_ring_behind(1 << 40);
    client.ends[0].knock();
    let begun = Instant::now();
    while server.ends[0].peer() == EndState::Open {
        assert!(begun.elapsed() < Duration::from_secs(30));
        thread::yield_now();
    }
    server.ends[0].close();
    assert_one_was_there(agents);
}

/// A process that writes at random into its room spoils its own connections. Here others of it are in another room of its.
#[test]
fn an_application_that_scribbles_spoils_its_own_connections() {
    let (_, agents) = agents();
    // All slots of the first room.
    let mut vandals = processes(&agents, 4, 100_000);
    let segment = vandals[0].segment();
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
        for end in &vandals[0].ends {
            end.knock();
        }
        run(&mut others);
        assert_whole(&others);
        assert!(others[0].ends.iter().all(|end| end.application.read == 20_000), "{round}");
    }
    for vandal in &mut vandals {
        vandal.ends.iter_mut().for_each(|end| end.die());
    }
    for seen in agents.map(Agent::end) {
        assert_eq!((seen.established, seen.over), (34, 34), "{seen:?}");
    }
    println!("34 of 34 connections by SMC-R, of them 4 of a vandal's");
}
