//! Faults of the fabric, and ends that do not fit each other.

mod support;

use std::time::{Duration, Instant};

use support::{Facts, Stage};
use usmc_fake_verbs::fabric::Call;
use usmc_verbs::{Status, sys};

/// The processes of the tests run this; it is no test by itself.
#[test]
fn actor() {
    if std::env::var_os(support::actor::ROLE).is_some() {
        support::actor::run();
    }
}

#[test]
fn devices_ports_and_addresses_are_those_of_the_fabric() {
    let stage = Stage::new();
    stage.gid_v1("a", 0, "fe80::1".parse().unwrap(), "7").unwrap();
    let mut a = stage.process("a");
    assert_eq!(a.ask("gids a"), "a 0:fe80::1:RoceV1:7 1:::ffff:10.0.0.1:RoceV2:1");
    assert_eq!(a.ask("open b"), "no RDMA device b: name one of a");
    a.ask("open a");
    let port = "Port { state: Active, mtu: Bytes1024, gid_table_len: 1024, max_message: 8388608, is_ethernet: true }";
    assert_eq!(a.ask("port"), port);
    stage.remove_gid("a", 0).unwrap();
    assert_eq!(a.ask("async 10000"), "Some(GidChange { port: 1 })");
    assert_eq!(a.ask("async 0"), "None");
}

#[test]
fn a_port_that_goes_and_comes_is_told_and_leaves_an_idle_connection_alone() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    stage.port("a", false).unwrap();
    assert_eq!(a.ask("async 10000"), "Some(PortError { port: 1 })");
    assert!(a.ask("port").contains("state: Down"));
    stage.port("a", true).unwrap();
    assert_eq!(a.ask("async 10000"), "Some(PortActive { port: 1 })");
    assert_eq!(b.ask("async 0"), "None");
    b.ask_ok("receive 1");
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
}

#[test]
fn a_request_that_is_posted_while_the_port_is_down_ends_the_queue_pair() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    stage.port("a", false).unwrap();
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:FLUSHED");
    assert_eq!(a.ask("state"), "Error");
    assert_eq!(b.ask("state"), "ReadyToSend");
}

#[test]
fn a_cut_is_silent_and_what_was_lost_is_repeated_once_it_is_healed() {
    // Packets of one test, acknowledgements of the other.
    for (from, to) in [("a", "b"), ("b", "a")] {
        let stage = Stage::new();
        let [mut a, mut b] = stage.two(7);
        b.ask_ok("receive 2");
        stage.cut(from, to).unwrap();
        a.ask_ok("post send,1,0+5,s send,2,0+6,s");
        a.ask_ok("arm sends any");
        assert_eq!(a.ask("event 100"), "None");
        assert_eq!((a.ask("async 0"), b.ask("async 0")), ("None".into(), "None".into()));
        stage.heal(from, to).unwrap();
        assert_eq!(a.ask("await sends 2"), "1:SUCCESS 2:SUCCESS");
        // Each once.
        assert_eq!(b.ask("poll receives"), "0:SUCCESS+5 1:SUCCESS+6");
    }
}

#[test]
fn a_cut_ends_a_queue_pair_that_counts_its_repetitions() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(1);
    stage.cut("a", "*").unwrap();
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:RETRY_EXCEEDED");
    assert_eq!(b.ask("state"), "ReadyToSend");
}

#[test]
fn what_is_held_is_neither_lost_nor_late() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(0);
    b.ask_ok("receive 1");
    stage.hold("a", "b").unwrap();
    a.ask_ok("post send,1,0+5,s");
    a.ask_ok("arm sends any");
    // Many timeouts, of which one would be the end.
    assert_eq!(a.ask("event 100"), "None");
    stage.release("a", "b").unwrap();
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    assert_eq!(b.ask("poll receives"), "0:SUCCESS+5");
}

#[test]
fn a_delay_holds_for_each_way() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.ask_ok("receive 1");
    stage.delay("*", "*", 50_000).unwrap();
    let start = Instant::now();
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
}

#[test]
fn calls_are_refused_as_often_as_was_asked_for() {
    let stage = Stage::new();
    stage.refuse("a", Call::CreateQp, 1, libc::ENOMEM).unwrap();
    let [mut a, mut b] = [stage.process("a"), stage.process("b")];
    assert_eq!(a.ask("open a"), "ibv_create_qp: Cannot allocate memory (os error 12)");
    let facts = [a.ask("open a"), b.ask("open b")];
    stage.refuse("a", Call::RegMr, 1, libc::ENOMEM).unwrap();
    let refused = "ibv_reg_mr: Cannot allocate memory (os error 12); raise RLIMIT_MEMLOCK; a systemd unit has \
                   LimitMEMLOCK=infinity";
    assert_eq!(a.ask("register"), refused);
    a.ask_ok("register");
    stage.refuse("a", Call::ModifyQp, 1, libc::EINVAL).unwrap();
    let peer = format!("peer {} 11 7 7", facts[1]);
    assert_eq!(a.ask(&peer), "ibv_modify_qp: Invalid argument (os error 22)");
    a.ask_ok(&peer);
}

#[test]
fn a_request_fails_as_was_asked_for_after_those_before_it() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.ask_ok("receive 2");
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    stage.fail("a", Some(a.facts.qp_num), Status::REMOTE_OPERATION.0).unwrap();
    a.ask_ok("post send,2,0+5,s send,3,0+5,");
    assert_eq!(a.ask("await sends 2"), "2:REMOTE_OPERATION 3:FLUSHED");
    assert_eq!(b.ask("poll receives"), "0:SUCCESS+5");
}

#[test]
fn events_are_reported_as_was_asked_for() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    stage.event("a", sys::IBV_EVENT_DEVICE_FATAL, None).unwrap();
    assert_eq!(a.ask("async 10000"), "Some(DeviceFatal)");
    stage.event("a", sys::IBV_EVENT_QP_FATAL, Some(a.facts.qp_num)).unwrap();
    assert_eq!(a.ask("async 10000"), format!("Some(QpFatal {{ qp_num: {} }})", a.facts.qp_num));
    assert_eq!(a.ask("state"), "Error");
    assert_eq!(b.ask("async 0"), "None");
}

#[test]
fn ends_that_do_not_agree_are_silent_to_each_other() {
    // By how much the peer's number and sequence number are wrong in what a end is told, and whether the address is.
    const RIGHT: (u32, u32, bool) = (0, 0, false);
    let cases = [
        [(1, 0, false), RIGHT],
        [(0, 0, true), RIGHT],
        [RIGHT, (1, 0, false)],
        [RIGHT, (0, 1, false)],
    ];
    for [of_b, of_a] in cases {
        let stage = Stage::new();
        let [mut a, mut b] = [stage.process("a"), stage.process("b")];
        let facts = [a.ask("open a"), b.ask("open b")].map(|facts| Facts::new(&facts));
        let peer = |facts: &Facts, (number, sequence, is_other): (u32, u32, bool)| {
            let gid = if is_other { "::ffff:10.0.0.1" } else { &facts.gid };
            format!("peer {} {} {gid} 0 0 11 2 7", facts.qp_num + number, facts.psn - sequence)
        };
        a.ask_ok(&peer(&facts[1], of_b));
        b.ask_ok(&peer(&facts[0], of_a));
        b.ask_ok("receive 1");
        a.ask_ok("post send,1,0+5,s");
        assert_eq!(a.ask("await sends 1"), "1:RETRY_EXCEEDED");
        assert_eq!((b.ask("poll receives"), b.ask("state")), (String::new(), "ReadyToSend".into()));
    }
}

#[test]
fn an_address_that_nobody_has_is_not_found() {
    let stage = Stage::new();
    let mut a = stage.process("a");
    a.ask("open a");
    let answer = a.ask("peer 17 0 ::ffff:10.0.0.9 0 0 11 7 7");
    assert!(answer.starts_with("ibv_modify_qp: Connection timed out"), "{answer}");
}

#[test]
fn what_a_killed_process_leaves_goes_with_the_next_one() {
    let stage = Stage::new();
    let mut a = stage.process("a");
    a.ask("open a");
    assert_eq!(stage.sockets().unwrap().len(), 1);
    a.kill();
    let mut b = stage.process("b");
    b.ask("gids b");
    assert_eq!(stage.sockets().unwrap(), [""; 0]);
}
