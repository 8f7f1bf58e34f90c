//! Ears: an agent and a process that sleep wake each other without a byte of TCP, and by one where an ear is of no use.

mod process;

use std::os::fd::{AsFd, OwnedFd};

use process::end::End;
use process::{Agent, LIMIT, Process, agents, alone, knock, loopback, receive, say};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{read, write};
use usmc_shm::agent::{Answer, Place, Request};
use usmc_shm::layout::{ACCEPTOR, ARM_EAR, ARM_TCP, CLIENT};
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::{AcqRel, Relaxed};

const BYTES: usize = 14;
const ROUNDS: u8 = 100;

/// What the agent says to a request.
fn asked(agent: &Agent, request: Request) -> (Answer, Option<OwnedFd>) {
    let control = knock(agent);
    say(&control, &request.emit(), &[]);
    receive(&control).expect("an answer")
}

fn ear(agent: &Agent, place: Place) -> (u32, OwnedFd) {
    match asked(agent, Request::Ear(place)) {
        (Answer::Ear(number), Some(ear)) => (number, ear),
        other => panic!("{other:?}"),
    }
}

fn room_ear(agent: &Agent, place: Place) -> OwnedFd {
    match asked(agent, Request::RoomEar(place)) {
        (Answer::RoomEar, Some(ear)) => ear,
        other => panic!("{other:?}"),
    }
}

fn wait(fd: impl AsFd) {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit));
    assert_eq!(ready, Ok(1), "nothing has woken it");
}

/// Sleeps until there are bytes, to be woken by an ear, and by what wakes then.
fn sleep_by_ear(end: &End, wakes: impl AsFd) {
    let [rx, _] = end.rings();
    rx.arm_rx(ARM_EAR);
    while !rx.has_data() {
        wait(&wakes);
        end.drain();
        let _ = read(&wakes, &mut [0; 64]);
        rx.arm_rx(ARM_EAR);
    }
    rx.disarm_rx();
}

/// Writes a message, and wakes the agent as it asks for that: whether by its ear.
fn send_by_ear(end: &End, segment: Segment, room: &OwnedFd, byte: u8) -> bool {
    let [_, tx] = end.rings();
    end.write_message::<BYTES>(byte);
    if !tx.has_rx_sleepers() {
        return false;
    }
    let bits = tx.take_rx_sleepers(false);
    assert!(bits & (ARM_EAR | ARM_TCP) != 0, "{bits}");
    if bits & ARM_TCP != 0 {
        end.ring_bell();
        return false;
    }
    if segment.header().rang.fetch_or(1 << end.place.slot, AcqRel) == 0 {
        write(room, &1_u64.to_ne_bytes()).expect("the agent's ear");
    }
    true
}

/// A process for each agent, with a connection between them.
fn connected(agents: &[Agent; 2]) -> [Process; 2] {
    let mut both = [Process::default(), Process::default()];
    for (side, tcp) in loopback().into_iter().enumerate() {
        both[side].hand(&agents[side], side, tcp, 0, 0);
    }
    both
}

#[test]
fn a_sleeper_and_its_agent_wake_each_other_by_ears() {
    let _alone = alone();
    let (_, agents) = agents();
    let both = connected(&agents);
    let [client, server] = both.each_ref().map(|process| &process.ends[0]);
    let (number, own) = ear(&agents[0], client.place);
    assert!(client.known().end[ACCEPTOR].hears_by(number));
    let room = room_ear(&agents[0], client.place);
    let segment = both[0].segment();
    // A new slot is armed for doorbells.
    client.rings()[0].disarm_rx();
    let mut by_ear = 0;
    for byte in 0..ROUNDS {
        server.send_message::<BYTES>(byte);
        sleep_by_ear(client, &own);
        client.take_message::<BYTES>(byte);
        by_ear += u8::from(send_by_ear(client, segment, &room, !byte));
        server.wait_for_data();
        server.take_message::<BYTES>(!byte);
    }
    let bells =
        [CLIENT, ACCEPTOR].map(|side| client.known().dir[side].producer.bells_sent.load(Relaxed));
    println!("{by_ear} of {ROUNDS} answers by the agent's ear, doorbells: {bells:?}");
    assert_eq!(bells[0], 0, "of the agent");
    // What the agent had armed before it had an ear.
    assert!(bells[1] <= 1 && by_ear > 0, "{by_ear} by the ear, {bells:?}");
    drop(both);
    agents.into_iter().for_each(|agent| _ = agent.end());
}

#[test]
fn an_ear_that_hears_nothing_is_made_up_for_by_a_doorbell() {
    let _alone = alone();
    let (_, agents) = agents();
    let both = connected(&agents);
    let [client, server] = both.each_ref().map(|process| &process.ends[0]);
    let told = &client.known().end[ACCEPTOR];
    let mut byte = 0;
    let mut is_woken_by_bell = || {
        byte += 1;
        server.send_message::<BYTES>(byte);
        sleep_by_ear(client, client.socket.as_ref().expect("a socket"));
        client.take_message::<BYTES>(byte);
    };
    is_woken_by_bell();
    // Numbers that the agent has not given.
    for number in [0, 7, u32::from(u16::MAX) - 1] {
        assert!(told.hears_by(number) && !told.hears_by(number ^ 1));
        is_woken_by_bell();
        told.forget_ear(number ^ 1);
        told.forget_ear(number);
    }
    // One that the process has closed.
    let (number, own) = ear(&agents[0], client.place);
    assert!(told.hears_by(number));
    drop(own);
    is_woken_by_bell();
    // Slots of nobody, and those that rang for nothing.
    let room = room_ear(&agents[0], client.place);
    for _ in 0..50 {
        both[0].segment().header().rang.store(u64::MAX, Relaxed);
        write(&room, &1_u64.to_ne_bytes()).expect("the agent's ear");
        is_woken_by_bell();
    }
    // The room of a connection that there is not.
    let nobodys = Place { usage: client.place.usage + 1, ..client.place };
    for request in [Request::Ear(nobodys), Request::RoomEar(nobodys)] {
        assert!(matches!(asked(&agents[0], request), (Answer::Tcp { .. }, None)));
    }
    // A room has four slots at first, and no more ears than that.
    let all: Vec<_> = (0..4).map(|_| ear(&agents[0], client.place)).collect();
    assert!(matches!(asked(&agents[0], Request::Ear(client.place)), (Answer::Tcp { .. }, None)));
    drop(all);
    let _ = ear(&agents[0], client.place);
    drop(both);
    agents.into_iter().for_each(|agent| _ = agent.end());
}
