//! Urgent bytes, which no ring can say.

mod process;

use std::time::{Duration, Instant};

use process::pair::Pair;
use process::{End, LIMIT, alone};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use usmc_shm::layout::{ACCEPTOR, ARM_TCP, CLIENT};
use usmc_shm::span::RxSpan;
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::Relaxed;

/// These agents turn until that is so.
fn turn_until(agents: &mut Pair, hosts: &[usize], what: &str, is_it: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_it() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        hosts.iter().for_each(|host| agents.turn_one(*host));
    }
}

/// What the socket has now.
fn ready(end: &End) -> PollFlags {
    let mut all =
        [PollFd::new(end.socket.as_ref().expect("a socket"), PollFlags::IN | PollFlags::PRI)];
    poll(&mut all, Some(&Timespec::default())).expect("poll");
    all[0].revents()
}

/// The bytes before an urgent one wake a reader that sleeps, also where an agent hears of both at once. The urgent byte itself wakes no
/// read(2), and a peer that waits until it is read sends nothing behind it.
#[test]
fn what_comes_before_an_urgent_byte_wakes() {
    let _alone = alone();
    let (mut agents, ends) = Pair::connected();
    let [client, server] = ends.each_ref().map(|process| &process.ends[0]);
    let [from, to] = [client, server].map(|end| end.socket.as_ref().expect("a socket"));
    // What it sends by its socket from here on is for the peer.
    client.leave_ring();
    let [ring, _] = server.rings();
    // As a process that reads there.
    RxSpan::new(server.known(), ACCEPTOR).note_read();
    assert_eq!(send(from, b"one", SendFlags::empty()), Ok(3));
    turn_until(&mut agents, &[0, 1], "the first bytes", || server.has_to_read() == 3);
    ring.consume(ring.read() + 3);
    server.drain();
    ring.arm_rx(ARM_TCP);
    assert!(!ring.has_data());
    assert_eq!(ready(server), PollFlags::empty());
    let written = &client.known().dir[ACCEPTOR].producer.prod;
    let bells = &server.known().dir[CLIENT].producer.bells_sent;
    let before = bells.load(Relaxed);
    for (bytes, flags, upto) in [(&b"calm"[..], SendFlags::empty(), 7), (b"!", SendFlags::OOB, 8)] {
        assert_eq!(send(from, bytes, flags), Ok(bytes.len()));
        turn_until(&mut agents, &[0], "its agent sends", || {
            written.load(Relaxed) == upto && client.unread() == 0
        });
    }
    turn_until(&mut agents, &[1], "the urgent byte", || ready(server).contains(PollFlags::PRI));
    assert_eq!(server.has_to_read(), 4, "the ring has what was before");
    assert_eq!(bells.load(Relaxed) - before, 1, "no doorbell for that");
    let mut bytes = [0; 8];
    // The doorbell, up to the mark.
    assert_eq!(recv(to, &mut bytes[..], RecvFlags::DONTWAIT).map(|(n, _)| n), Ok(1));
    assert_eq!(recv(to, &mut bytes[..1], RecvFlags::OOB).map(|(n, _)| n), Ok(1));
    assert_eq!(bytes[0], b'!');
}

/// A reader that sends by the kernel cannot ring for what it reads, and its peer sends nothing behind an urgent byte before that was read.
#[test]
fn what_a_reader_out_of_the_ring_has_read_is_seen() {
    let _alone = alone();
    for idle in [Duration::ZERO, Duration::from_millis(20)] {
        let (mut agents, ends) = Pair::connected();
        let [client, server] = ends.each_ref().map(|process| &process.ends[0]);
        let [to, from] = [client, server].map(|end| end.socket.as_ref().expect("a socket"));
        server.leave_ring();
        client.send_by_kernel();
        RxSpan::new(client.known(), ACCEPTOR).note_read();
        let [ring, _] = client.rings();
        assert_eq!(send(from, b"calm", SendFlags::empty()), Ok(4));
        turn_until(&mut agents, &[0, 1], "the first bytes", || client.has_to_read() == 4);
        assert_eq!(send(from, b"!", SendFlags::OOB), Ok(1));
        turn_until(&mut agents, &[0, 1], "the urgent byte", || {
            ready(client).contains(PollFlags::PRI)
        });
        assert_eq!(send(from, b"behind", SendFlags::empty()), Ok(6));
        let begun = Instant::now();
        // An agent does not look any more at what has been idle for so long.
        turn_until(&mut agents, &[0, 1], "what is behind", || {
            server.unread() == 6 && begun.elapsed() >= idle
        });
        ring.consume(ring.read() + 4);
        turn_until(&mut agents, &[0, 1], "what is behind the urgent byte", || {
            // Doorbells come first, and the mark ends a receive.
            let (mut bytes, flags) = ([0; 16], RecvFlags::DONTWAIT);
            recv(to, &mut bytes[..], flags).is_ok_and(|(n, _)| bytes[..n].ends_with(b"behind"))
        });
    }
}

/// What goes by the kernel waits there while the send buffer is full, and goes on once the peer has read.
#[test]
fn a_sender_out_of_the_ring_goes_on_as_its_peer_reads() {
    const BYTES: usize = 1 << 20;
    let _alone = alone();
    let (mut agents, ends) = Pair::connected();
    let [client, server] = ends.each_ref().map(|process| &process.ends[0]);
    client.leave_ring();
    let socket = client.socket.as_ref().expect("a socket");
    let [ring, _] = server.rings();
    let (mut sent, mut read) = (0, 0);
    let mut moved = Instant::now();
    // Agents do not look any more at what has been idle for so long.
    while moved.elapsed() < Duration::from_millis(20) {
        agents.turn();
        if sent < BYTES
            && let Ok(n) = send(socket, &vec![7; BYTES - sent], SendFlags::DONTWAIT)
        {
            (sent, moved) = (sent + n, Instant::now());
        }
    }
    assert!(client.unread() > 0 && server.has_to_read() > 0, "nothing waits");
    let begun = Instant::now();
    while read < BYTES {
        assert!(begun.elapsed() < LIMIT, "{read} of {sent} bytes");
        if sent < BYTES {
            sent += send(socket, &vec![7; BYTES - sent], SendFlags::DONTWAIT).unwrap_or(0);
        }
        let here = server.has_to_read();
        ring.consume(ring.read() + here as u64);
        read += here;
        server.wake();
        agents.turn();
    }
}

/// The kernel says no more than a FIN of a program that sends by it and reads the ring.
#[test]
fn a_close_of_one_that_sends_by_the_kernel_is_seen() {
    let _alone = alone();
    let (mut agents, mut ends) = Pair::connected();
    let [client, server] = ends.each_mut().map(|process| &mut process.ends[0]);
    let end_of = |end: &End| end.known().dir[CLIENT].producer.flags(Relaxed).end();
    client.send_by_kernel();
    let socket = client.socket.as_ref().expect("a socket");
    assert_eq!(send(socket, b"all", SendFlags::empty()), Ok(3));
    turn_until(&mut agents, &[0, 1], "the bytes", || server.has_to_read() == 3);
    client.shut();
    turn_until(&mut agents, &[0, 1], "the client's end", || end_of(server) == EndState::Shut);
    let begun = Instant::now();
    turn_until(&mut agents, &[0, 1], "a while", || begun.elapsed() >= Duration::from_millis(20));
    client.close();
    turn_until(&mut agents, &[0, 1], "the client's close", || end_of(server) == EndState::Closed);
}

/// A client that has ended its writing direction long before closes soon after its peer.
#[test]
fn a_last_close_is_seen_soon() {
    let _alone = alone();
    let (mut agents, mut ends) = Pair::connected();
    let [client, server] = ends.each_mut().map(|process| &mut process.ends[0]);
    let end_of = |end: &End| end.known().dir[CLIENT].producer.flags(Relaxed).end();
    client.shut();
    turn_until(&mut agents, &[0, 1], "the client's end", || end_of(server) == EndState::Shut);
    // The looks at the client are two seconds apart by then.
    let begun = Instant::now();
    turn_until(&mut agents, &[0, 1], "a while", || begun.elapsed() >= Duration::from_millis(2200));
    server.close();
    turn_until(&mut agents, &[0, 1], "the server's end", || end_of(client) == EndState::Closed);
    let begun = Instant::now();
    turn_until(&mut agents, &[0, 1], "a while", || begun.elapsed() >= Duration::from_millis(20));
    client.close();
    let begun = Instant::now();
    turn_until(&mut agents, &[0, 1], "the client's close", || end_of(server) == EndState::Closed);
    assert!(begun.elapsed() < Duration::from_millis(1400), "{:?}", begun.elapsed());
}
