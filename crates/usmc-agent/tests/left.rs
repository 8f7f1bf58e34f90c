//! What an application does before the peer has answered, and connections that stay TCP: nothing is lost, and nothing is left.

mod peer;
mod process;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use peer::{decline, message};
use process::application::byte_at;
use process::{
    Agent, End, LIMIT, Process, agents, alone, descriptors, fetch, loopback, processes, run, settle,
};
use smc_proto::decline::DeclineCode;
use smc_proto::wire::clc::Message;
use usmc_shm::agent::Place;

/// The rest of a stream, up to its FIN.
fn rest(peer: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    peer.read_to_end(&mut bytes).expect("a FIN");
    bytes
}

/// As a client's application has written it.
fn written(count: u64) -> Vec<u8> {
    (0..count).map(|at| byte_at(0, at)).collect()
}

/// A client that was handed over, with its peer's TCP. It has written so much.
fn client(agent: &Agent, bytes: u64) -> (Process, TcpStream) {
    let [tcp, peer] = loopback();
    let mut process = Process::default();
    process.hand(agent, 0, tcp, 0, bytes);
    assert_eq!(process.ends[0].application.write(bytes), bytes > 0);
    process.ends[0].wake();
    (process, peer)
}

/// Until no process can fetch it any more.
fn wait_for_end(agent: &Agent, place: Place) {
    let begun = Instant::now();
    while fetch(agent, place).is_some() {
        assert!(begun.elapsed() < LIMIT);
        thread::yield_now();
    }
}

fn end(agents: [Agent; 2]) -> [process::Seen; 2] {
    agents.map(Agent::end)
}

#[test]
fn what_was_written_and_closed_before_the_answer_arrives_whole() {
    let _alone = alone();
    let (_, agents) = agents();
    for bytes in [0, 1, 9000] {
        let (mut process, peer) = client(&agents[0], bytes);
        process.ends[0].close();
        let mut server = Process::default();
        server.hand(&agents[1], 1, peer, 0, 0);
        server.run();
        let application = &server.ends[0].application;
        assert!(application.read == bytes && !application.is_aborted());
    }
    for seen in end(agents) {
        assert_eq!((seen.established, seen.over, seen.fallbacks), (3, 3, 0), "{seen:?}");
    }
    println!("3 of 3 connections by SMC-R");
}

#[test]
fn what_was_written_and_closed_before_a_decline_goes_by_tcp() {
    let _alone = alone();
    let (_, agents) = agents();
    for dies in [false, true] {
        let (mut process, mut peer) = client(&agents[0], 9000);
        match dies {
            true => process.ends[0].die(),
            false => process.ends[0].close(),
        }
        decline(&mut peer, b"");
        assert_eq!(rest(&mut peer), written(9000));
    }
    // A killed process' slot serves again, and so does that of one that has let go.
    let (process, _peer) = client(&agents[0], 0);
    assert_eq!(process.ends[0].place.slot, 0);
    drop(process);
    let [seen, _] = end(agents);
    assert_eq!((seen.fallbacks, seen.established, seen.rooms), (3, 0, 1), "{seen:?}");
    println!("0 of 3 connections by SMC-R");
}

/// A killed process that has ended its writing direction before is found by its kernel's answer to a doorbell.
#[test]
fn a_half_closed_application_that_is_killed_leaves_nothing() {
    let _alone = alone();
    let (_, agents) = agents();
    for is_left in [false, true] {
        let (mut process, mut peer) = client(&agents[0], 3000);
        process.ends[0].shut();
        if is_left {
            decline(&mut peer, b"");
            process.ends[0].wait_for_leave();
            process.ends[0].die();
        } else {
            process.ends[0].die();
            decline(&mut peer, b"");
        }
        assert_eq!(rest(&mut peer), written(3000));
    }
    let [seen, _] = end(agents);
    assert_eq!((seen.fallbacks, seen.failures), (2, 0), "{seen:?}");
    println!("0 of 2 connections by SMC-R");
}

#[test]
fn a_process_gets_its_tcp_back_just_behind_the_decline() {
    let _alone = alone();
    let (_, agents) = agents();
    let agent = &agents[0];
    let (mut process, mut peer) = client(agent, 1000);
    let end: &mut End = &mut process.ends[0];
    let place = end.place;
    assert!(fetch(agent, place).is_none(), "the peer has not answered");
    decline(&mut peer, b"by TCP");
    end.wait_for_leave();
    for wrong in [
        Place { segment: place.segment ^ 2, ..place },
        Place { slot: place.slot + 1, ..place },
        Place { usage: place.usage + 1, ..place },
    ] {
        assert!(fetch(agent, wrong).is_none());
    }
    // A process that has forked may need it twice.
    let (mut tcp, code) = fetch(agent, place).expect("TCP");
    assert_eq!(code, DeclineCode::NOSMCDEV.0);
    drop(fetch(agent, place).expect("TCP"));
    tcp.set_read_timeout(Some(LIMIT)).expect("a socket");
    let mut bytes = [0; 6];
    tcp.read_exact(&mut bytes).expect("TCP");
    // What it had written has gone by itself.
    assert_eq!((&bytes, end.unread()), (b"by TCP", 0));
    // The deputy goes, and the agent has nothing more to do with it.
    end.die();
    wait_for_end(agent, place);
    tcp.write_all(b"all of it").expect("TCP");
    drop(tcp);
    assert_eq!(rest(&mut peer), [&written(1000)[..], b"all of it"].concat());
    // The slot is the process' still.
    let (other, _peer) = client(agent, 0);
    assert_eq!(other.ends[0].place.slot, 1);
    process.ends[0].let_go();
    let (again, _peer) = client(agent, 0);
    assert_eq!(again.ends[0].place.slot, 0);
    assert!(again.ends[0].place.usage != place.usage && fetch(agent, place).is_none());
    drop((other, again));
    let [seen, _] = self::end(agents);
    assert_eq!((seen.fallbacks, seen.rooms), (3, 1), "{seen:?}");
    println!("0 of 3 connections by SMC-R");
}

#[test]
fn an_abort_is_one_by_tcp_too() {
    let _alone = alone();
    let (_, agents) = agents();
    let (mut process, mut peer) = client(&agents[0], 0);
    decline(&mut peer, b"");
    process.ends[0].wait_for_leave();
    process.ends[0].abort();
    let error = peer.read(&mut [0; 8]).expect_err("a RST");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    end(agents);
    println!("0 of 1 connections by SMC-R");
}

/// Of a server that speaks first, and not CLC, nothing is taken.
#[test]
fn a_greeting_is_there_from_its_first_byte() {
    let _alone = alone();
    let (_, agents) = agents();
    for greeting in [&b"220 mail ready\r\n"[..], b"\xe2\xd4x"] {
        let (process, mut peer) = client(&agents[0], 10);
        peer.write_all(greeting).expect("TCP");
        process.ends[0].wait_for_leave();
        let (mut tcp, code) = fetch(&agents[0], process.ends[0].place).expect("TCP");
        assert_eq!(code, DeclineCode::PEERNOSMC.0);
        tcp.set_read_timeout(Some(LIMIT)).expect("a socket");
        let mut bytes = vec![0; greeting.len()];
        tcp.read_exact(&mut bytes).expect("TCP");
        assert_eq!(bytes, greeting);
        assert_eq!(process.ends[0].unread(), 0);
        // Nothing but the Proposal and what was written was sent.
        assert!(matches!(message(&mut peer), Message::Proposal(_)));
        drop((process, tcp));
        assert_eq!(rest(&mut peer), written(10));
    }
    let [seen, _] = end(agents);
    assert_eq!((seen.fallbacks, seen.failures), (2, 0), "{seen:?}");
    println!("0 of 2 connections by SMC-R");
}

/// Handshakes that are not answered make room for others after a second.
#[test]
fn silent_servers_hold_nobody_up() {
    let _alone = alone();
    let (_, agents) = agents();
    let mut silent: Vec<_> = (0..20).map(|_| client(&agents[0], 0)).collect();
    let mut both = processes(&agents, 1, 1000);
    run(&mut both);
    process::assert_whole(&both);
    // They may answer for all that.
    for (process, peer) in &mut silent {
        decline(peer, b"");
        process.ends[0].wait_for_leave();
    }
    drop(silent);
    let [seen, _] = end(agents);
    assert_eq!((seen.fallbacks, seen.established), (20, 1), "{seen:?}");
    println!("1 of 21 connections by SMC-R");
}

/// Wherever its handshake is: behind others, under way, or over without SMC.
#[test]
fn a_killed_application_leaves_nothing() {
    let _alone = alone();
    let (_, agents) = agents();
    let before = descriptors();
    let mut all: Vec<_> = (0..20).map(|_| client(&agents[0], 3000)).collect();
    // The first eight are under way.
    for (process, peer) in &mut all[..2] {
        decline(peer, b"");
        process.ends[0].wait_for_leave();
    }
    let mut peers = Vec::new();
    for (mut process, peer) in all {
        process.ends[0].die();
        peers.push(peer);
    }
    let begun = Instant::now();
    while agents[0].live[0].load(Ordering::Relaxed) > 0 {
        assert!(begun.elapsed() < LIMIT);
        thread::yield_now();
    }
    settle(before + peers.len());
    for (at, peer) in peers.iter_mut().enumerate() {
        if at >= 2 {
            // Its server may answer still, and finds the Decline.
            assert!(matches!(message(peer), Message::Proposal(_)));
            assert!(matches!(message(peer), Message::Decline(_)));
        }
        assert_eq!(rest(peer), written(3000), "{at}");
    }
    drop(peers);
    settle(before);
    let [seen, _] = end(agents);
    assert_eq!((seen.fallbacks, seen.failures), (20, 0), "{seen:?}");
    println!("0 of 20 connections by SMC-R");
}
