//! Two processes and what goes between them, by usmc-verbs on the fake library.

mod support;

use support::{Process, Stage};

/// The processes of the tests run this; it is no test by itself.
#[test]
fn actor() {
    if std::env::var_os(support::actor::ROLE).is_some() {
        support::actor::run();
    }
}

fn write(id: u32, pieces: &str, to: &Process, offset: u64, flags: &str) -> String {
    format!("write,{id},{pieces},{},{},{flags}", to.facts.address + offset, to.facts.rkey)
}

#[test]
fn ping_pong_of_small_messages() {
    ping_pong(300, 14);
}

#[test]
fn ping_pong_of_messages_of_many_packets() {
    ping_pong(20, 200_000);
}

fn ping_pong(rounds: u32, bytes: u32) {
    let stage = Stage::new();
    let [mut a, mut b] = [stage.process("a"), stage.process("b")];
    let address = a.ask(&format!("serve a {rounds} {bytes}"));
    let report = b.ask(&format!("ping b {address} {rounds} {bytes}"));
    let expected = format!("{rounds} messages of {bytes} bytes each way");
    assert_eq!(report.split(", ").next(), Some(expected.as_str()));
    assert_eq!(a.answer(), expected);
    assert_eq!(stage.sockets().unwrap(), [""; 0]);
}

#[test]
fn processes_of_other_network_namespaces_reach_each_other() {
    if support::is_real() {
        return;
    }
    let stage = Stage::new();
    let [mut a, mut b] = [stage.process("a"), stage.process_apart("b")];
    let facts = [a.ask("open a"), b.ask("open b")];
    a.ask_ok(&format!("peer {} 11 7 7", facts[1]));
    b.ask_ok(&format!("peer {} 11 7 7", facts[0]));
    b.ask_ok("receive 1");
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    assert_eq!(b.ask("await receives 1"), "0:SUCCESS+5");
}

#[test]
fn a_chain_of_two_writes_and_a_send_is_one_post() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.ask_ok("receive 1");
    a.ask_ok("put 0 onetwothree");
    let chain =
        [write(1, "0+3", &b, 100, ""), write(2, "3+3/6+5", &b, 103, ""), "send,3,0+5,sw".into()];
    a.ask_ok(&format!("post {}", chain.join(" ")));
    assert_eq!(b.ask("await receives 1"), "0:SUCCESS+5");
    assert_eq!(b.ask("get 100 12"), "onetwothree.");
    assert_eq!(b.ask("message 0 6"), "onetw.");
    assert_eq!(a.ask("await sends 1"), "3:SUCCESS");
    assert_eq!(a.ask("poll sends"), "");
}

#[test]
fn inline_data_is_copied_by_the_post_and_other_data_read_later() {
    // Nothing cuts a real device.
    if support::is_real() {
        return;
    }
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    stage.cut("a", "b").unwrap();
    a.ask_ok("put 0 first");
    let chain = [write(1, "0+5", &b, 0, "i"), write(2, "0+5", &b, 8, "s")];
    a.ask_ok(&format!("post {}", chain.join(" ")));
    a.ask_ok("put 0 final");
    stage.heal("a", "b").unwrap();
    assert_eq!(a.ask("await sends 1"), "2:SUCCESS");
    assert_eq!(b.ask("get 0 5"), "first");
    assert_eq!(b.ask("get 8 5"), "final");
}

#[test]
fn a_sender_waits_for_a_receive_and_does_not_complete_before() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    a.ask_ok("put 0 hello");
    a.ask_ok(&format!("post {} send,2,0+5,s", write(1, "0+5", &b, 0, "s")));
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    assert_eq!(b.ask("poll receives"), "");
    assert_eq!(a.ask("poll sends"), "");
    b.ask_ok("receive 1");
    assert_eq!(a.ask("await sends 1"), "2:SUCCESS");
    assert_eq!(b.ask("await receives 1"), "0:SUCCESS+5");
}

#[test]
fn waits_for_a_receive_can_be_counted() {
    let stage = Stage::new();
    let [mut a, mut b] = [stage.process("a"), stage.process("b")];
    let facts = [a.ask("open a"), b.ask("open b")];
    a.ask_ok(&format!("peer {} 11 7 2", facts[1]));
    b.ask_ok(&format!("peer {} 11 7 2", facts[0]));
    a.ask_ok("post send,1,0+5, send,2,0+5,");
    assert_eq!(a.ask("await sends 2"), "1:RNR_RETRY_EXCEEDED 2:FLUSHED");
    assert_eq!(a.ask("state"), "Error");
    assert_eq!(b.ask("state"), "ReadyToSend");
}

#[test]
fn a_wrong_key_or_range_ends_both_ends_and_flushes_all() {
    for (offset, rkey_change) in [(0, 1), (1 << 30, 0), (u64::MAX / 2, 0)] {
        let stage = Stage::new();
        let [mut a, mut b] = stage.two(7);
        b.ask_ok("receive 2");
        let (address, rkey) = (b.facts.address + offset, b.facts.rkey ^ rkey_change);
        a.ask_ok("receive 1");
        a.ask_ok(&format!(
            "post send,1,0+5, write,2,0+5,{address},{rkey}, send,3,0+5,s send,4,0+5,"
        ));
        assert_eq!(a.ask("await sends 3"), "2:REMOTE_ACCESS 3:FLUSHED 4:FLUSHED");
        assert_eq!(a.ask("await receives 1"), "0:FLUSHED");
        assert_eq!(b.ask("await receives 2"), "0:SUCCESS+5 1:FLUSHED");
        assert_eq!((a.ask("state"), b.ask("state")), ("Error".into(), "Error".into()));
        // What is posted now fails as well, by completions.
        a.ask_ok("post send,5,0+5,");
        assert_eq!(a.ask("await sends 1"), "5:FLUSHED");
    }
}

#[test]
fn a_local_error_flushes_what_is_not_done() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    a.ask_ok("receive 2");
    a.ask_ok("post send,1,0+5, send,2,0+5,s");
    a.ask_ok("error");
    assert_eq!(a.ask("await sends 2"), "1:FLUSHED 2:FLUSHED");
    assert_eq!(a.ask("await receives 2"), "0:FLUSHED 1:FLUSHED");
    assert_eq!(b.ask("state"), "ReadyToSend");
}

#[test]
fn a_message_that_is_too_long_fails_at_both_ends() {
    // rxe says LOCAL_QP_OPERATION and REMOTE_OPERATION; the standard says what the fake says.
    if support::is_real() {
        return;
    }
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.ask_ok("receive 1");
    a.ask_ok("post send,1,0+65,");
    assert_eq!(a.ask("await sends 1"), "1:REMOTE_INVALID_REQUEST");
    assert_eq!(b.ask("await receives 1"), "0:LOCAL_LENGTH");
}

#[test]
fn a_killed_peer_is_silence_until_the_repetitions_are_over() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(2);
    b.ask_ok("receive 1");
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    b.kill();
    a.ask_ok("post send,2,0+5, send,3,0+5,s");
    assert_eq!(a.ask("await sends 2"), "2:RETRY_EXCEEDED 3:FLUSHED");
    // Whoever asked for it has removed its name, and both devices can be used anew.
    a.ask_ok("close");
    assert_eq!(stage.sockets().unwrap(), [""; 0]);
    drop((a, b));
    let [mut a, mut b] = stage.two(2);
    b.ask_ok("receive 1");
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
}

#[test]
fn with_seven_repetitions_a_killed_peer_is_silence_for_ever() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.kill();
    a.ask_ok("post send,1,0+5,s");
    a.ask_ok("arm sends any");
    // Eight timeouts are 67 ms.
    assert_eq!(a.ask("event 300"), "None");
    assert_eq!(a.ask("state"), "ReadyToSend");
}

#[test]
fn a_completion_before_the_arm_makes_no_event() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.ask_ok("receive 4");
    a.ask_ok("post send,1,0+5,sw");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    b.ask_ok("arm receives any");
    assert_eq!(b.ask("event 100"), "None");
    assert_eq!(b.ask("poll receives"), "0:SUCCESS+5");
    // The next one does, once.
    a.ask_ok("post send,2,0+5,s send,3,0+5,s");
    assert_eq!(b.ask("event 10000"), "Some(2)");
    assert_eq!(a.ask("await sends 2"), "2:SUCCESS 3:SUCCESS");
    assert_eq!(b.ask("event 0"), "None");
    assert_eq!(b.ask("poll receives"), "1:SUCCESS+5 2:SUCCESS+5");
}

#[test]
fn an_arm_for_solicited_messages_sleeps_through_others() {
    let stage = Stage::new();
    let [mut a, mut b] = stage.two(7);
    b.ask_ok("receive 4");
    b.ask_ok("arm receives solicited");
    a.ask_ok("post send,1,0+5,s");
    assert_eq!(a.ask("await sends 1"), "1:SUCCESS");
    assert_eq!(b.ask("event 0"), "None");
    a.ask_ok("post send,2,0+5,sw");
    assert_eq!(b.ask("event 10000"), "Some(2)");
    assert_eq!(b.ask("poll receives"), "0:SUCCESS+5 1:SUCCESS+5");
    // To the standard a failure is solicited, to rxe a flush is not: who sleeps so has to know by other means.
    b.ask_ok("arm receives solicited");
    b.ask_ok("error");
    assert_eq!(b.ask("event 100"), "None");
    assert_eq!(b.ask("poll receives"), "2:FLUSHED 3:FLUSHED");
}

#[test]
fn places_of_unsignaled_requests_are_free_when_a_later_completion_was_polled() {
    // Real devices grant more than was asked for.
    if support::is_real() {
        return;
    }
    let stage = Stage::new();
    let [mut a, b] = stage.two(7);
    let quiet = write(0, "0+5", &b, 0, "");
    let seven = [quiet.as_str(); 7].join(" ");
    a.ask_ok(&format!("post {seven} {}", write(9, "0+5", &b, 0, "s")));
    a.ask_ok("arm sends any");
    assert_eq!(a.ask(&format!("post {quiet} {quiet}")), "0 posted, errno 12");
    assert_eq!(a.ask("await sends 1"), "9:SUCCESS");
    a.ask_ok(&format!("post {seven}"));
    assert_eq!(a.ask(&format!("post {quiet} {quiet}")), "1 posted, errno 12");
}

#[test]
fn requests_that_the_caps_do_not_allow_are_refused() {
    // As above.
    if support::is_real() {
        return;
    }
    let stage = Stage::new();
    let [mut a, b] = stage.two(7);
    assert_eq!(a.ask(&format!("post {}", write(1, "0+65", &b, 0, "i"))), "0 posted, errno 22");
    assert_eq!(a.ask("post send,1,0+1/1+1/2+1,"), "0 posted, errno 22");
    let mut c = stage.process("a");
    c.ask("open a");
    assert_eq!(c.ask("post send,1,0+5,"), "0 posted, errno 22");
}
