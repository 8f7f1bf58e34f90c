//! Two ends of a link group over simulated cables: every flow, and the loss of a link before every
//! single message of it.

mod support;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bolero::{check, produce};
use smc_proto::handshake::LLC_TIMEOUT;
use smc_proto::ids::{MacAddr, MtuCode, RoceGid, U24};
use smc_proto::link_group::{
    Config, Connect, Event, Fabric, Key, LinkGroup, LinkIndex, LinkInfo, Port, Refused, Role,
    TEST_INTERVAL,
};
use smc_proto::wire::llc::{self, Body, DeleteReason, Message, Version};
use support::draw::Draw;
use support::{Frame, captures, frames};

const RMBS: usize = 6;
type Group = LinkGroup<RMBS>;

/// The verbs of one host: its ports, its queue pairs, and what they are connected to.
struct Verbs {
    who: u8,
    ports: Vec<u8>,
    queue_pairs: BTreeMap<LinkIndex, Port>,
    connected: BTreeMap<LinkIndex, U24>,
    next_qpn: u32,
    connects: Connect,
    pending: Vec<LinkIndex>,
}

impl Verbs {
    fn new(who: u8, ports: u8) -> Verbs {
        Verbs {
            who,
            ports: (0..ports).collect(),
            queue_pairs: BTreeMap::new(),
            connected: BTreeMap::new(),
            next_qpn: 16,
            connects: Connect::Done,
            pending: Vec::new(),
        }
    }

    fn port(&mut self, number: u8) -> Port {
        self.next_qpn += 1;
        Port {
            mac: MacAddr([self.who, number, 0, 0, 0, 1]),
            gid: RoceGid::from_ipv4([10, number, 0, self.who]),
            // Queue pairs of both hosts differ, so that a message finds only its own.
            qpn: U24::truncate(self.next_qpn + (u32::from(self.who) << 16)),
            psn: U24::truncate(self.next_qpn * 7),
            mtu: MtuCode::from_code(3).unwrap(),
            direct: true,
        }
    }

    fn key_of(&self, rmb: usize, qpn: U24) -> Key {
        let rkey = (u32::from(self.who) << 28) | (qpn.value() << 8) | rmb as u32;
        Key { rkey, addr: 0x1000 * (rmb as u64 + 1) }
    }
}

impl Fabric for Verbs {
    fn create(&mut self, index: LinkIndex, used: &[Port]) -> Option<Port> {
        let gid = |port: &u8| RoceGid::from_ipv4([10, *port, 0, self.who]);
        let free = self.ports.iter().copied().find(|port| used.iter().all(|u| u.gid != gid(port)));
        let number = free.or(self.ports.first().copied())?;
        let port = self.port(number);
        self.queue_pairs.insert(index, port);
        Some(port)
    }

    fn connect(&mut self, index: LinkIndex, remote: &Port) -> Connect {
        self.connected.insert(index, remote.qpn);
        if self.connects == Connect::Pending {
            self.pending.push(index);
        }
        self.connects
    }

    fn key(&mut self, rmb: usize, index: LinkIndex) -> Option<Key> {
        Some(self.key_of(rmb, self.queue_pairs.get(&index)?.qpn))
    }

    fn destroy(&mut self, index: LinkIndex) {
        assert!(self.queue_pairs.remove(&index).is_some(), "{index:?} destroyed twice");
        self.connected.remove(&index);
        self.pending.retain(|pending| *pending != index);
    }
}

struct End {
    group: Group,
    verbs: Verbs,
    events: Vec<Event>,
    rmbs: Vec<usize>,
}

/// Both ends, and what is on the cables.
struct Net {
    /// Client, server.
    ends: [End; 2],
    /// To whom, over which of his queue pairs, what.
    wire: VecDeque<(usize, U24, Vec<u8>)>,
    now: Duration,
    newest_link_first: bool,
    names: Vec<String>,
}

impl Net {
    fn new(version: Version, ports: [u8; 2]) -> Net {
        let mut verbs = [Verbs::new(1, ports[0]), Verbs::new(2, ports[1])];
        let first = [verbs[0].port(0), verbs[1].port(0)];
        let mut ends = Vec::new();
        for (who, role) in [(0, Role::Client), (1, Role::Server)] {
            let config = Config {
                role,
                version,
                max_links: 2,
                max_conns: 255,
                id: 0x100,
                test_interval: TEST_INTERVAL,
            };
            let mut verbs = std::mem::replace(&mut verbs[who], Verbs::new(0, 0));
            verbs.queue_pairs.insert(Group::FIRST, first[who]);
            verbs.connect(Group::FIRST, &first[1 - who]);
            let mut group = Group::new(config, first[who], first[1 - who], Duration::ZERO);
            // Accept and Confirm named RMB 0 of both.
            group.rmb_was_named(0);
            ends.push(End { group, verbs, events: Vec::new(), rmbs: vec![0] });
        }
        for who in 0..2 {
            let key = ends[1 - who].verbs.key_of(0, first[1 - who].qpn);
            assert_eq!(ends[who].group.add_peer_rmb(Group::FIRST, key), Some(0));
        }
        let ends = ends.try_into().unwrap_or_else(|_| unreachable!());
        let wire = VecDeque::new();
        Net { ends, wire, now: Duration::ZERO, newest_link_first: false, names: Vec::new() }
    }

    /// A group whose first link is confirmed.
    fn confirmed(version: Version, ports: [u8; 2]) -> Net {
        let mut net = Net::new(version, ports);
        for who in [0, 1] {
            net.ends[who].group.confirm_first_link(Duration::ZERO);
        }
        net.settle();
        for end in &mut net.ends {
            assert!(matches!(end.events[..], [Event::FirstLink(_)]));
            end.events.clear();
        }
        net.names.clear();
        net
    }

    /// Takes what both ends have to say.
    fn poll(&mut self) {
        for who in 0..2 {
            let End { group, verbs, events, .. } = &mut self.ends[who];
            let mut buffer = [0; llc::MAX_LEN];
            loop {
                let queue_pairs = verbs.queue_pairs.clone();
                let connected = verbs.connected.clone();
                let Some((via, bytes)) = group.poll_transmit(verbs, &mut buffer) else { break };
                let message = Message::parse(bytes).unwrap();
                let response = if message.is_response() { "'" } else { "" };
                self.names.push(format!("{who}{}{response}", message.body().name()));
                assert!(queue_pairs.contains_key(&via));
                self.wire.push_back((1 - who, connected[&via], bytes.to_vec()));
            }
            while let Some(event) = group.poll_event() {
                if let Event::Terminated = event {
                    assert!(group.is_terminated());
                }
                events.push(event);
            }
        }
    }

    /// Delivers one message; false if there is none.
    fn step(&mut self) -> bool {
        self.poll();
        let next = if self.newest_link_first { self.head_of_newest() } else { 0 };
        let Some((who, qpn, bytes)) = self.wire.remove(next) else { return false };
        let End { group, verbs, .. } = &mut self.ends[who];
        let index = verbs.queue_pairs.iter().find(|(_, port)| port.qpn == qpn).map(|(i, _)| *i);
        if let Some(index) = index {
            group.handle_llc(index, &bytes, verbs, self.now).unwrap();
        }
        self.poll();
        true
    }

    /// A queue pair is connected, or cannot be; false if none is to be.
    fn connected(&mut self, ok: bool) -> bool {
        for End { group, verbs, .. } in &mut self.ends {
            if let Some(index) = verbs.pending.pop() {
                group.on_connected(index, ok, verbs, self.now);
                self.poll();
                return true;
            }
        }
        false
    }

    /// Each link keeps its order; between links there is none. The first message of the queue pair
    /// that was used last.
    fn head_of_newest(&self) -> usize {
        let Some((who, qpn, _)) = self.wire.back() else { return 0 };
        let head = self.wire.iter().position(|(to, over, _)| (to, over) == (who, qpn));
        head.unwrap_or(0)
    }

    /// Until there is nothing to do but to wait.
    fn settle(&mut self) {
        let mut steps = 0;
        while self.step() || self.connected(true) {
            steps += 1;
            assert!(steps < 200, "no end: {:?}", self.names);
        }
    }

    fn next_timeout(&self) -> Option<Duration> {
        self.ends.iter().filter_map(|end| end.group.next_timeout()).min()
    }

    fn pass_time(&mut self) {
        let Some(next) = self.next_timeout() else { return };
        assert!(next > self.now || self.now == Duration::ZERO);
        self.now = next;
        for end in &mut self.ends {
            end.group.handle_timeout(&mut end.verbs, self.now);
        }
        self.poll();
    }

    /// Time passes until no flow is under way and whoever lost a link has noticed.
    fn calm_down(&mut self) {
        for _ in 0..60 {
            self.settle();
            let idle = self.ends.iter().all(|end| end.group.is_idle());
            if idle && self.same_links() && self.all_noticed() {
                return;
            }
            self.pass_time();
        }
        let ends: Vec<_> = self.ends.iter().map(|end| &end.group).collect();
        panic!("no end: {:?} {ends:#?}", self.names);
    }

    fn ids(&self, who: usize) -> Vec<u8> {
        let mut ids: Vec<u8> = self.ends[who].group.active_links().map(|(_, id)| id).collect();
        ids.sort();
        ids
    }

    fn same_links(&self) -> bool {
        self.ids(0) == self.ids(1)
    }

    /// No link that was cut counts as one that works.
    fn all_noticed(&self) -> bool {
        self.ends.iter().all(|end| {
            let mut links = end.group.active_links();
            links.all(|(index, _)| end.verbs.queue_pairs[&index].qpn.value() != 0)
        })
    }

    /// The cable of a link is cut: what is on it is lost, and who sees it is told.
    fn cut(&mut self, id: u8, seen_by: [bool; 2]) {
        for (who, seen) in seen_by.into_iter().enumerate() {
            let End { group, verbs, .. } = &mut self.ends[who];
            let Some(index) = group.active_links().find(|(_, i)| *i == id).map(|(i, _)| i) else {
                continue;
            };
            let qpn = verbs.queue_pairs[&index].qpn;
            self.wire.retain(|(to, over, _)| (*to, *over) != (who, qpn));
            // Nothing will arrive there any more.
            verbs.queue_pairs.get_mut(&index).unwrap().qpn = U24::truncate(0);
            if seen {
                group.handle_link_down(index, verbs, self.now);
            }
        }
        self.poll();
    }

    /// On every link that works, each end knows the key of every RMB that the other announced. Of
    /// one whose answer was lost it may know more (`exactly`: it does not).
    fn check_keys(&self, exactly: bool) {
        for who in 0..2 {
            let (end, peer) = (&self.ends[who], &self.ends[1 - who]);
            if end.group.is_terminated() {
                continue;
            }
            for index in LinkIndex::ALL {
                let works = end.group.active_links().any(|(active, _)| active == index);
                let keys = (0..RMBS).filter_map(|rmb| end.group.peer_rmbs().key(rmb, index));
                assert!(works || keys.count() == 0, "end {who}: keys of a link that is gone");
            }
            for (index, id) in end.group.active_links() {
                let theirs = peer.group.active_links().find(|(_, i)| *i == id).unwrap().0;
                let qpn = peer.verbs.queue_pairs[&theirs].qpn;
                let known: Vec<Key> =
                    (0..RMBS).filter_map(|rmb| end.group.peer_rmbs().key(rmb, index)).collect();
                for &rmb in &peer.rmbs {
                    let key = peer.verbs.key_of(rmb, qpn);
                    assert!(known.contains(&key), "end {who} link {id} RMB {rmb}");
                }
                let more = known.len() - peer.rmbs.len();
                assert!(!exactly || more == 0, "end {who} link {id}");
            }
        }
    }

    fn announce(&mut self, who: usize, rmb: usize) -> Result<(), Refused> {
        let End { group, verbs, .. } = &mut self.ends[who];
        group.announce_rmb(rmb, verbs, self.now)
    }

    /// Announces RMBs and waits until they are known.
    fn announce_all(&mut self, who: usize, rmbs: std::ops::Range<usize>) {
        for rmb in rmbs {
            self.announce(who, rmb).unwrap();
            self.settle();
            assert_eq!(self.ends[who].events.pop(), Some(Event::Announced { rmb, ok: true }));
            self.ends[who].rmbs.push(rmb);
        }
    }

    fn add_link(&mut self, who: usize) -> Result<(), Refused> {
        let End { group, verbs, .. } = &mut self.ends[who];
        group.add_link(None, verbs, self.now)
    }

    /// What both ends counted as RMBs of theirs, from the events.
    fn note_rmbs(&mut self) {
        for end in &mut self.ends {
            for event in end.events.drain(..) {
                match event {
                    Event::Announced { rmb, ok: true } if !end.rmbs.contains(&rmb) => {
                        end.rmbs.push(rmb);
                    }
                    Event::Withdrawn { rmb, .. } => end.rmbs.retain(|known| *known != rmb),
                    _ => {}
                }
            }
        }
    }
}

const VERSIONS: [Version; 2] = [Version::V1, Version::V2];

#[test]
fn a_second_link_comes_about_with_the_keys_of_all_rmbs() {
    for version in VERSIONS {
        for (client_rmbs, server_rmbs) in [(1, 1), (1, 6), (6, 1), (2, 3), (6, 6)] {
            let mut net = Net::confirmed(version, [2, 2]);
            net.announce_all(0, 1..client_rmbs);
            net.announce_all(1, 1..server_rmbs);
            net.names.clear();
            net.add_link(1).unwrap();
            net.settle();
            assert_eq!((net.ids(0), net.ids(1)), (vec![1, 2], vec![1, 2]));
            net.check_keys(true);
            assert_eq!(net.now, Duration::ZERO);
        }
    }
}

#[test]
fn the_messages_of_a_second_link_are_those_that_the_kernel_sends() {
    let second_link: [&[&str]; 2] = [
        &[
            "1ADD_LINK",
            "0ADD_LINK'",
            "1ADD_LINK_CONT",
            "0ADD_LINK_CONT'",
            "1CONFIRM_LINK",
            "0CONFIRM_LINK'",
        ],
        &["1ADD_LINK", "0ADD_LINK'", "1CONFIRM_LINK", "0CONFIRM_LINK'"],
    ];
    let files = ["smcr-v1-two-links-failover.pcap", "smcr-v2-two-links-failover.pcap"];
    for ((version, expected), file) in VERSIONS.into_iter().zip(second_link).zip(files) {
        let mut net = Net::confirmed(version, [2, 2]);
        net.add_link(1).unwrap();
        net.settle();
        assert_eq!(net.names, expected);
        let path = captures().into_iter().find(|path| path.ends_with(file)).unwrap();
        let mut captured = Vec::new();
        for frame in frames(&path) {
            let Frame::Send { by_server, bytes } = frame else { continue };
            if let Ok(message) = Message::parse(&bytes) {
                let response = if message.is_response() { "'" } else { "" };
                let who = u8::from(by_server);
                captured.push(format!("{who}{}{response}", message.body().name()));
            }
        }
        assert_eq!(captured[2..2 + expected.len()], *expected, "{file}");
    }
}

#[test]
fn without_another_port_on_either_side_the_link_is_rejected() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [1, 1]);
        net.add_link(1).unwrap();
        net.settle();
        assert_eq!(net.names, ["1ADD_LINK", "0ADD_LINK'"]);
        assert_eq!((net.ids(0), net.ids(1)), (vec![1], vec![1]));
        assert!(net.ends.iter().all(|end| end.group.is_idle() && end.events.is_empty()));
        assert!(net.ends.iter().all(|end| end.verbs.queue_pairs.len() == 1));
    }
}

/// Older kernels declined then (TIMEOUT_AL) what works: newer ones do not, and
/// neither is it done here; the group goes on with one link.
#[test]
fn a_missing_second_link_is_no_reason_to_decline() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [2, 2]);
        net.add_link(1).unwrap();
        net.poll();
        assert_eq!(net.names, ["1ADD_LINK"]);
        net.wire.clear();
        net.pass_time();
        assert_eq!(net.now, LLC_TIMEOUT);
        assert_eq!((net.ids(0), net.ids(1)), (vec![1], vec![1]));
        assert!(net.ends.iter().all(|end| end.group.is_idle() && !end.group.is_terminated()));
        assert!(net.ends.iter().all(|end| end.verbs.queue_pairs.len() == 1));
        // The link carries what comes after.
        net.announce(0, 1).unwrap();
        net.settle();
        net.check_keys(false);
    }
}

#[test]
fn a_client_asks_for_a_link_and_the_server_offers_it() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [2, 2]);
        net.add_link(0).unwrap();
        net.settle();
        assert_eq!((net.ids(0), net.ids(1)), (vec![1, 2], vec![1, 2]));
        assert_eq!(net.add_link(1), Err(Refused::LinksFull));
    }
}

#[test]
fn an_offer_that_came_at_a_bad_time_is_asked_for_again() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [2, 2]);
        net.announce(0, 3).unwrap();
        net.add_link(1).unwrap();
        net.settle();
        net.note_rmbs();
        assert_eq!((net.ids(0), net.ids(1)), (vec![1, 3], vec![1, 3]), "{:?}", net.names);
        net.check_keys(true);
    }
}

type Scenario = (&'static str, fn(&mut Net));

/// The scenarios for the loss of a link at every step.
fn scenarios() -> Vec<Scenario> {
    vec![
        ("server adds a link", |net| net.add_link(1).unwrap()),
        ("client asks for a link", |net| net.add_link(0).unwrap()),
        ("client announces an RMB", |net| net.announce(0, 3).unwrap()),
        ("server announces an RMB", |net| net.announce(1, 3).unwrap()),
        ("both do", |net| {
            net.announce(0, 3).unwrap();
            net.announce(1, 3).unwrap();
        }),
        ("a link is added while an RMB is announced", |net| {
            net.announce(0, 3).unwrap();
            net.add_link(1).unwrap();
        }),
        ("an RMB is withdrawn while a link is added", |net| {
            net.add_link(1).unwrap();
            let End { group, verbs, .. } = &mut net.ends[0];
            group.withdraw_rmb(0, verbs, net.now).unwrap();
        }),
        ("the group ends in order", |net| net.ends[1].group.terminate(DeleteReason::OPERATOR)),
        ("the client ends it", |net| net.ends[0].group.terminate(DeleteReason::PROGRAM)),
    ]
}

#[test]
fn a_link_may_be_lost_before_every_message_of_every_flow() {
    let mut runs = 0;
    for version in VERSIONS {
        for links in [1, 2] {
            for (name, start) in scenarios() {
                if links == 2 && name.contains("link") {
                    continue;
                }
                for lost in 1..=2 {
                    for seen_by in [[true, true], [true, false], [false, true], [false, false]] {
                        for (at, newest_link_first, slow) in (0..14).flat_map(|at| {
                            [(at, false, false), (at, true, false), (at, false, true)]
                        }) {
                            let mut net = Net::confirmed(version, [2, 2]);
                            net.newest_link_first = newest_link_first;
                            if slow {
                                net.ends.iter_mut().for_each(|end| {
                                    end.verbs.connects = Connect::Pending;
                                });
                            }
                            net.announce_all(0, 1..3);
                            net.announce_all(1, 1..2);
                            if links == 2 {
                                net.add_link(1).unwrap();
                                net.settle();
                            }
                            net.ends.iter_mut().for_each(|end| end.events.clear());
                            start(&mut net);
                            net.poll();
                            for _ in 0..at {
                                let _ = net.step() || net.connected(true);
                            }
                            net.cut(lost, seen_by);
                            net.calm_down();
                            net.note_rmbs();
                            let over = net.ends.each_ref().map(|end| end.group.is_terminated());
                            assert_eq!(over[0], over[1], "{name}, link {lost} at {at}");
                            net.check_keys(!name.contains("RMB") && !name.contains("both"));
                            runs += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(runs > 1_000);
}

#[test]
fn after_the_loss_of_a_link_a_new_one_is_tried_and_connections_move() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [2, 2]);
        net.add_link(1).unwrap();
        net.settle();
        net.ends.iter_mut().for_each(|end| end.events.clear());
        net.cut(1, [true, true]);
        net.settle();
        for end in &net.ends {
            let Event::LinkDown { index, to: Some(to) } = end.events[0] else { panic!() };
            let other = end.group.active_links().find(|(_, id)| *id == 2).unwrap().0;
            assert_eq!((index, to), (Group::FIRST, other));
        }
        assert_eq!((net.ids(0), net.ids(1)), (vec![2, 3], vec![2, 3]), "{:?}", net.names);
        net.check_keys(true);
    }
}

#[test]
fn a_link_with_ports_of_its_own_replaces_an_asymmetric_one() {
    for (version, who, asks) in VERSIONS.into_iter().flat_map(|version| {
        [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(who, asks)| (version, who, asks))
    }) {
        let mut net = Net::confirmed(version, [2, 2]);
        net.add_link(1).unwrap();
        net.settle();
        // One end has no other port than that of the second link.
        net.ends[who].verbs.ports = vec![1];
        net.cut(1, [true, true]);
        net.settle();
        assert_eq!((net.ids(0), net.ids(1)), (vec![2, 3], vec![2, 3]), "{:?}", net.names);
        net.check_keys(true);
        net.announce_all(0, 1..2);
        // A second one that shares a port is none better.
        net.names.clear();
        net.add_link(asks).unwrap();
        net.settle();
        assert_eq!((net.ids(0), net.ids(1)), (vec![2, 3], vec![2, 3]), "{:?}", net.names);
        net.calm_down();
        // The port is back.
        net.ends[who].verbs.ports = vec![0, 1];
        net.ends.iter_mut().for_each(|end| end.events.clear());
        net.names.clear();
        net.add_link(asks).unwrap();
        net.calm_down();
        let ids = (net.ids(0), net.ids(1));
        assert!(ids.0 == ids.1 && ids.0.len() == 2 && !ids.0.contains(&3), "{:?}", net.names);
        assert!(net.names.contains(&"1DELETE_LINK".to_owned()), "{:?}", net.names);
        net.check_keys(true);
        for end in &net.ends {
            let gone = |event: &&Event| matches!(event, Event::LinkDown { to: Some(_), .. });
            assert_eq!(end.events.iter().filter(gone).count(), 1, "{:?}", end.events);
            assert_eq!(end.verbs.queue_pairs.len(), 2);
        }
        // What is left is as symmetric as before: neither end gets a third one.
        net.names.clear();
        assert_eq!(net.add_link(asks), Err(Refused::LinksFull));
    }
}

#[test]
fn an_idle_link_is_tested_and_a_dead_one_found() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [2, 2]);
        net.add_link(1).unwrap();
        net.settle();
        net.names.clear();
        net.pass_time();
        assert_eq!(net.now, TEST_INTERVAL);
        net.settle();
        // Both ends test both links, and answer.
        net.names.sort();
        let tests = ["0TEST_LINK", "0TEST_LINK'", "1TEST_LINK", "1TEST_LINK'"];
        assert_eq!(net.names, tests.map(|name| [name; 2]).concat());
        assert_eq!(net.next_timeout(), Some(2 * TEST_INTERVAL));
        net.cut(2, [false, false]);
        net.pass_time();
        net.settle();
        assert_eq!(net.now, 2 * TEST_INTERVAL);
        net.pass_time();
        assert_eq!(net.now, 2 * TEST_INTERVAL + Duration::from_secs(2));
        net.calm_down();
        assert_eq!((net.ids(0), net.ids(1)), (vec![1, 3], vec![1, 3]));
    }
}

#[test]
fn a_full_table_is_answered_negatively_and_unknown_keys_are_counted() {
    for (version, invalid) in [(Version::V1, 0x60), (Version::V2, 2)] {
        let mut net = Net::confirmed(version, [1, 1]);
        net.announce_all(0, 1..RMBS);
        let [client, End { group, verbs, .. }] = &mut net.ends;
        let mut buffer = [0; llc::MAX_LEN];
        let mut ask = |body| {
            let bytes = Message::request(version, body).emit(&mut buffer).unwrap().to_vec();
            group.handle_llc(Group::FIRST, &bytes, verbs, Duration::ZERO).unwrap();
            let (_, answer) = group.poll_transmit(verbs, &mut buffer).unwrap();
            answer.to_vec()
        };
        let one_more = llc::ConfirmRkey {
            rkey: 77,
            addr: 0,
            others: Default::default(),
            negative: false,
            retry: false,
        };
        let answer = ask(Body::ConfirmRkey(one_more));
        let Body::ConfirmRkey(answer) = *Message::parse(&answer).unwrap().body() else { panic!() };
        assert!(answer.negative && answer.retry);
        let known = client.verbs.key_of(0, client.verbs.queue_pairs[&Group::FIRST].qpn);
        let rkeys = [known.rkey.to_be_bytes(), [1; 4], [2; 4]];
        let rkeys = llc::Rkeys::from_wire(&rkeys);
        let answer = ask(Body::DeleteRkey(llc::DeleteRkey { rkeys, invalid: 0, negative: false }));
        let message = Message::parse(&answer).unwrap();
        let Body::DeleteRkey(answer) = *message.body() else { panic!() };
        assert_eq!((answer.invalid, answer.negative, answer.rkeys.len()), (invalid, true, 3));
        assert_eq!(net.ends[1].group.peer_rmbs().count(), RMBS - 1);
    }
}

/// The kernel withdraws an RMB with each connection that ends, and announces it with the same key to the next one that gets it.
#[test]
fn a_key_that_is_announced_again_is_not_withdrawn() {
    let mut net = Net::confirmed(Version::V2, [1, 1]);
    let begun = net.now;
    let [client, End { group, verbs, .. }] = &mut net.ends;
    let qpn = client.verbs.queue_pairs[&Group::FIRST].qpn;
    let [one, other] = [0, 1].map(|rmb| client.verbs.key_of(rmb, qpn));
    let mut ask = |group: &mut Group, body, seconds| {
        let mut buffer = [0; llc::MAX_LEN];
        let bytes = Message::request(Version::V2, body).emit(&mut buffer).unwrap();
        let now = begun + Duration::from_secs(seconds);
        group.handle_llc(Group::FIRST, bytes, verbs, now).unwrap();
    };
    let announce = |Key { rkey, addr }| {
        let others = Default::default();
        Body::ConfirmRkey(llc::ConfirmRkey { rkey, addr, others, negative: false, retry: false })
    };
    for key in [one, other] {
        ask(group, announce(key), 1);
    }
    let rkeys = [one.rkey.to_be_bytes(), other.rkey.to_be_bytes()];
    let rkeys = llc::Rkeys::from_wire(&rkeys);
    ask(group, Body::DeleteRkey(llc::DeleteRkey { rkeys, invalid: 0, negative: false }), 2);
    let gone = |group: &Group| {
        [one, other].map(|key| group.peer_rmbs().was_withdrawn(Group::FIRST, key.rkey, begun))
    };
    assert_eq!(gone(group), [true, true]);
    ask(group, announce(one), 3);
    assert_eq!(gone(group), [false, true]);
}

#[test]
fn without_an_answer_the_first_link_fails_in_time() {
    let mut net = Net::new(Version::V2, [2, 2]);
    net.ends[0].group.confirm_first_link(Duration::ZERO);
    net.pass_time();
    assert_eq!(net.now, Duration::from_secs(4));
    assert_eq!(net.ends[0].events, [Event::FirstLinkFailed]);
    let mut net = Net::new(Version::V2, [2, 2]);
    net.ends[1].group.confirm_first_link(Duration::ZERO);
    net.poll();
    net.wire.clear();
    net.pass_time();
    assert_eq!(net.now, Duration::from_secs(2));
    assert_eq!(net.ends[1].events, [Event::FirstLinkFailed]);
}

#[test]
fn any_llc_from_a_peer_leaves_a_group_that_works_or_is_over() {
    let entropy = produce::<Vec<u8>>().with().len(0..=1_500_usize);
    check!().with_iterations(2_000).with_generator(entropy).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let version = VERSIONS[usize::from(draw.below(2))];
        let mut net = Net::confirmed(version, [2, 2]);
        let who = usize::from(draw.below(2));
        while !draw.0.is_empty() {
            if draw.flag() {
                let _ = net.add_link(who);
            }
            let updates: Vec<[u8; 16]> = (0..draw.below(3)).map(|_| draw.bytes()).collect();
            let rkeys: Vec<[u8; 4]> = (0..draw.below(9)).map(|_| draw.bytes()).collect();
            let message = draw.llc(&updates, &rkeys);
            let mut buffer = [0; llc::MAX_LEN];
            let bytes = message.emit(&mut buffer).unwrap().to_vec();
            let End { group, verbs, .. } = &mut net.ends[who];
            let over = verbs.queue_pairs.keys().nth(draw.below(2).into()).copied();
            if let Some(index) = over {
                group.handle_llc(index, &bytes, verbs, net.now).unwrap();
            }
            while let Some((via, _)) = group.poll_transmit(verbs, &mut buffer) {
                assert!(verbs.queue_pairs.contains_key(&via));
            }
            while group.poll_event().is_some() {}
            if draw.below(8) == 0
                && let Some(next) = group.next_timeout()
            {
                net.now = net.now.max(next);
                group.handle_timeout(verbs, net.now);
            }
            assert!(group.active_links().count() <= 2);
            assert_eq!(group.is_terminated(), group.active_links().count() == 0);
        }
    });
}

#[test]
fn links_are_tested_as_often_as_is_configured() {
    for interval in [Duration::from_secs(2), Duration::ZERO] {
        let mut net = Net::confirmed(Version::V2, [1, 1]);
        for (who, role) in [(0, Role::Client), (1, Role::Server)] {
            let end = &mut net.ends[who];
            let config = Config { role, test_interval: interval, ..*end.group.config() };
            let LinkInfo { local, remote, .. } = end.group.links().next().unwrap();
            end.group = Group::new(config, local, remote, Duration::ZERO);
            end.group.confirm_first_link(Duration::ZERO);
        }
        net.settle();
        let expected = (!interval.is_zero()).then_some(interval);
        assert_eq!(net.next_timeout(), expected);
        net.now = Duration::from_secs(9);
        for End { group, verbs, .. } in &mut net.ends {
            group.handle_timeout(verbs, Duration::from_secs(9));
            assert_eq!(group.counters().tests, u64::from(!interval.is_zero()));
        }
    }
}

#[test]
fn announcements_are_left_out_only_where_no_second_link_can_come() {
    use smc_proto::wire::clc::Os;
    for (max_links, os, expected) in [
        (1, Os::LINUX, true),
        (2, Os::LINUX, false),
        (1, Os::UNSPECIFIED, false),
        (1, Os::ZOS, false),
    ] {
        let mut net = Net::new(Version::V2, [2, 2]);
        for end in &mut net.ends {
            let LinkInfo { local, remote, .. } = end.group.links().next().unwrap();
            let config = Config { max_links, ..*end.group.config() };
            end.group = Group::new(config, local, remote, Duration::ZERO);
            assert!(!end.group.may_skip_announce(os), "no link works yet");
            end.group.confirm_first_link(Duration::ZERO);
        }
        net.settle();
        for end in &net.ends {
            assert_eq!(end.group.may_skip_announce(os), expected, "{max_links} {os:?}");
        }
        if max_links == 1 {
            assert_eq!(net.add_link(1), Err(Refused::LinksFull));
        }
        let end = &mut net.ends[0];
        end.group.handle_link_down(Group::FIRST, &mut end.verbs, Duration::ZERO);
        assert!(!end.group.may_skip_announce(os));
    }
}

/// An RMB that no CONFIRM_RKEY has told of, but the Accept of a later contact.
#[test]
fn an_rmb_that_was_only_named_is_told_of_with_a_further_link() {
    for version in VERSIONS {
        let mut net = Net::confirmed(version, [2, 2]);
        let server_qpn = net.ends[1].verbs.queue_pairs[&Group::FIRST].qpn;
        let key = net.ends[1].verbs.key_of(3, server_qpn);
        assert_eq!(net.ends[0].group.add_peer_rmb(Group::FIRST, key), Some(1));
        net.ends[1].group.rmb_was_named(3);
        net.ends[1].rmbs.push(3);
        net.add_link(1).unwrap();
        net.settle();
        net.check_keys(true);
    }
}

/// A peer may register all its RMBs as one: they have one key, and different addresses.
#[test]
fn rmbs_under_one_key_are_told_apart_by_their_addresses() {
    let mut net = Net::confirmed(Version::V2, [2, 2]);
    let [client, _] = &mut net.ends;
    let group = &mut client.group;
    let start = group.peer_rmbs().count();
    let keys = [0x1000, 0x2000, 0x3000].map(|addr| Key { rkey: 7, addr });
    let numbers = keys.map(|key| group.add_peer_rmb(Group::FIRST, key).unwrap());
    assert_eq!(keys.map(|key| group.add_peer_rmb(Group::FIRST, key).unwrap()), numbers);
    assert_eq!((group.peer_rmbs().count(), group.keys_left()), (start + 3, RMBS - start - 3));
    let updates = keys.map(|Key { addr, .. }| llc::RkeyUpdate { old: 7, new: 9, addr }.to_wire());
    let rkeys = llc::RkeyUpdates::from_wire(&updates);
    let extension = llc::AddLinkExt { direct: true, target_gid: RoceGid::default(), rkeys };
    let add = llc::AddLink {
        mac: MacAddr::default(),
        gid: RoceGid([9; 16]),
        qpn: U24::truncate(9),
        link_id: 2,
        mtu: MtuCode::from_code(3).unwrap(),
        psn: U24::truncate(1),
        rejected: None,
        extension: Some(extension),
    };
    let mut buffer = [0; llc::MAX_LEN];
    let mut ask = |group: &mut Group, verbs: &mut Verbs, body| {
        let bytes = Message::request(Version::V2, body).emit(&mut buffer).unwrap().to_vec();
        group.handle_llc(Group::FIRST, &bytes, verbs, Duration::ZERO).unwrap();
    };
    ask(group, &mut client.verbs, Body::AddLink(add));
    let new = group.links().find(|link| link.id == 2).unwrap().index;
    for (number, key) in numbers.into_iter().zip(keys) {
        let expected = Key { rkey: 9, ..key };
        assert_eq!(group.peer_rmbs().key(number, new), Some(expected));
    }
    // Elsewhere: nobody knows which of them is meant.
    let elsewhere = llc::RkeyUpdate { old: 7, new: 8, addr: 0x9000 }.to_wire();
    let rkeys = llc::RkeyUpdates::from_wire(std::slice::from_ref(&elsewhere));
    ask(
        group,
        &mut client.verbs,
        Body::DeleteLink(llc::DeleteLink {
            link_id: 2,
            reason: DeleteReason::OPERATOR,
            all: false,
            orderly: true,
        }),
    );
    let add = llc::AddLink { extension: Some(llc::AddLinkExt { rkeys, ..extension }), ..add };
    ask(group, &mut client.verbs, Body::AddLink(add));
    let new = group.links().find(|link| link.id == 2).unwrap().index;
    assert!(numbers.iter().all(|&number| group.peer_rmbs().key(number, new).is_none()));
    let rkeys = [7_u32.to_be_bytes()];
    let rkeys = llc::Rkeys::from_wire(&rkeys);
    let delete = llc::DeleteRkey { rkeys, invalid: 0, negative: false };
    ask(group, &mut client.verbs, Body::DeleteRkey(delete));
    assert_eq!(group.peer_rmbs().count(), start, "the key is gone, and all that it opened");
}

#[test]
fn links_and_what_was_counted_can_be_shown() {
    let mut net = Net::confirmed(Version::V2, [2, 2]);
    net.add_link(1).unwrap();
    net.settle();
    let links: Vec<Vec<LinkInfo>> =
        net.ends.iter().map(|end| end.group.links().collect()).collect();
    for (ours, theirs) in links[0].iter().zip(&links[1]) {
        assert_eq!((ours.id, ours.active, theirs.active), (theirs.id, true, true));
        assert_eq!((ours.local, ours.remote), (theirs.remote, theirs.local));
    }
    let [client, server] = net.ends.each_ref().map(|end| end.group.counters());
    assert_eq!((client.sent, client.received), (server.received, server.sent));
    assert_eq!((client.sent, client.dropped, client.lost, client.unsent), (3, 0, 0, 0));
    let End { group, verbs, .. } = &mut net.ends[0];
    assert!(group.handle_llc(Group::FIRST, &[0x5f; 44], verbs, net.now).is_err());
    assert_eq!(group.counters().malformed, 1);
}

/// The worst: a caller that does not poll, whatever happens. What cannot be handled is refused or
/// dropped, and counted; what has to be told finds its place.
#[test]
fn a_caller_that_never_polls_loses_nothing_without_a_word() {
    let entropy = produce::<Vec<u8>>().with().len(0..=3_000_usize);
    let most_dropped = AtomicU64::new(0);
    check!().with_iterations(2_000).with_generator(entropy).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let version = VERSIONS[usize::from(draw.below(2))];
        let mut net = Net::confirmed(version, [2, 2]);
        let who = usize::from(draw.below(2));
        if draw.flag() {
            net.add_link(1).unwrap();
            net.settle();
        }
        while !draw.0.is_empty() {
            let now = net.now;
            let End { group, verbs, .. } = &mut net.ends[who];
            let over = verbs.queue_pairs.keys().nth(draw.below(2).into()).copied();
            match (draw.below(12), over) {
                (0, _) => drop(group.add_link(None, verbs, now)),
                (1, _) => drop(group.announce_rmb(draw.below(6).into(), verbs, now)),
                (2, _) => drop(group.withdraw_rmb(draw.below(6).into(), verbs, now)),
                (3, _) => {
                    net.now += Duration::from_secs(draw.below(40).into());
                    group.handle_timeout(verbs, net.now);
                }
                (_, Some(index)) => {
                    let updates: Vec<[u8; 16]> = (0..draw.below(3)).map(|_| draw.bytes()).collect();
                    let rkeys: Vec<[u8; 4]> = (0..draw.below(9)).map(|_| draw.bytes()).collect();
                    let mut buffer = [0; llc::MAX_LEN];
                    let bytes = draw.llc(&updates, &rkeys).emit(&mut buffer).unwrap().to_vec();
                    group.handle_llc(index, &bytes, verbs, now).unwrap();
                }
                (_, None) => {}
            }
        }
        let End { group, verbs, .. } = &mut net.ends[who];
        for index in LinkIndex::ALL {
            group.handle_link_down(index, verbs, net.now);
        }
        group.terminate(DeleteReason::PROGRAM);
        assert_eq!(group.counters().lost, 0);
        most_dropped.fetch_max(group.counters().dropped, Ordering::Relaxed);
        let last = std::iter::from_fn(|| group.poll_event()).last();
        assert_eq!(last, Some(Event::Terminated));
    });
    assert!(most_dropped.into_inner() > 0, "it came that far");
}

/// As a kernel is told by an owner that stops (m0 "dellink").
#[test]
fn the_end_of_a_group_is_said_as_the_kernel_says_it() {
    let mut net = Net::confirmed(Version::V2, [1, 1]);
    let End { group, verbs, .. } = &mut net.ends[0];
    group.terminate(DeleteReason::PROGRAM);
    let mut buffer = [0; llc::MAX_LEN];
    let (_, bytes) = group.poll_transmit(verbs, &mut buffer).unwrap();
    assert_eq!(bytes[..9], [0x24, 44, 0, 0x40, 0, 0, 3, 0, 0]);
}

/// As above, aimed: the queues as full as they may be when the last call comes that is not refused,
/// with a flow under way, a request delayed, and every link dead.
#[test]
fn the_fullest_queue_has_room_for_the_loss_of_all_links() {
    let delete =
        llc::DeleteLink { link_id: 2, reason: DeleteReason::LOST_PATH, all: false, orderly: true };
    let (mut runs, mut dropped) = (0, 0);
    for version in VERSIONS {
        for who in [0, 1] {
            for (name, start) in scenarios() {
                for (fill, delayed) in (0..40).flat_map(|fill| [(fill, false), (fill, true)]) {
                    let mut net = Net::confirmed(version, [3, 3]);
                    if !name.contains("link") {
                        net.add_link(1).unwrap();
                        net.settle();
                    }
                    start(&mut net);
                    let End { group, verbs, .. } = &mut net.ends[who];
                    let mut tell = |group: &mut Group, body| {
                        let mut buffer = [0; llc::MAX_LEN];
                        let bytes = Message::request(version, body).emit(&mut buffer).unwrap();
                        group.handle_llc(Group::FIRST, bytes, verbs, Duration::ZERO).unwrap();
                    };
                    for _ in 0..fill {
                        tell(group, Body::TestLink([0; 16]));
                    }
                    if delayed {
                        tell(group, Body::DeleteLink(delete));
                    }
                    for secs in [40, 43] {
                        group.handle_timeout(verbs, Duration::from_secs(secs));
                    }
                    for index in LinkIndex::ALL {
                        group.handle_link_down(index, verbs, Duration::from_secs(43));
                    }
                    group.terminate(DeleteReason::PROGRAM);
                    assert_eq!(group.counters().lost, 0, "{name} {fill}");
                    dropped += group.counters().dropped;
                    let last = std::iter::from_fn(|| group.poll_event()).last();
                    assert_eq!(last, Some(Event::Terminated), "{name} {fill}");
                    runs += 1;
                }
            }
        }
    }
    assert!(runs > 2_000 && dropped > 0);
}

/// Looking for the way to the peer's port takes up to a second: the flow waits for it.
#[test]
fn a_link_is_connected_late_or_not_at_all() {
    for version in VERSIONS {
        for (slow, ok, links) in [
            ([true, false], Some(true), 2),
            ([false, true], Some(true), 2),
            ([true, true], Some(true), 2),
            ([true, false], Some(false), 1),
            ([false, true], Some(false), 1),
            ([true, false], None, 1),
            ([false, true], None, 1),
        ] {
            let mut net = Net::confirmed(version, [2, 2]);
            for (end, slow) in net.ends.iter_mut().zip(slow) {
                end.verbs.connects = if slow { Connect::Pending } else { Connect::Done };
            }
            net.add_link(1).unwrap();
            while net.step() {}
            assert!(net.ends.iter().all(|end| end.group.active_links().count() == 1));
            match ok {
                Some(ok) => {
                    net.now += Duration::from_secs(1);
                    while net.connected(ok) {
                        while net.step() {}
                    }
                }
                None => {
                    // Both give up; no late answer comes for a queue pair that is gone.
                    net.pass_time();
                    while net.step() {}
                }
            }
            let found = net.ends.each_ref().map(|end| end.group.active_links().count());
            assert_eq!(found, [links; 2], "{version:?} {slow:?} {ok:?} {:?}", net.names);
            assert!(net.ends.iter().all(|end| end.group.is_idle()));
            assert!(net.ends.iter().all(|end| end.verbs.queue_pairs.len() == links));
            assert!(net.ends.iter().all(|end| end.verbs.pending.is_empty()));
            net.check_keys(true);
        }
    }
}

/// A rejection says what was offered, whenever it comes (m0 "addlink").
#[test]
fn a_late_rejection_has_the_words_of_an_early_one() {
    for version in VERSIONS {
        let answers = [Connect::Failed, Connect::Pending].map(|connects| {
            let mut net = Net::confirmed(version, [2, 2]);
            net.ends[0].verbs.connects = connects;
            net.add_link(1).unwrap();
            net.step();
            net.connected(false);
            net.wire.pop_front().unwrap().2
        });
        assert_eq!(answers[0], answers[1]);
        let message = Message::parse(&answers[0]).unwrap();
        let Body::AddLink(add) = message.body() else { panic!("{message:?}") };
        assert!(message.is_response() && add.rejected.is_some());
    }
}
