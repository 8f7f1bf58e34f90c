//! Ends of connections that take one message out of turn: each is made here, step by step.

mod pair;

use std::time::Duration;

use pair::{NOW, Side, begin, clc, close, connect, pass, settle, settle_at, side, step, wish};
use smc_proto::close::Direction;
use smc_proto::decline::DeclineCode;
use smc_proto::handshake::CLC_TIMEOUT;
use smc_proto::ids::PeerId;
use smc_proto::wire::clc::{Decline, Error, Message};
use usmc_rdma::nic::{QpId, RmbId};
use usmc_rdma::{ConnId, Event, RMBS, RefusedWish};

fn decline() -> Message {
    let code = DeclineCode::ERR_RTOK;
    Message::Decline(Decline::new(false, PeerId([9; 8]), code))
}

fn is_reset(side: &Side, conn: ConnId) -> bool {
    let reading = Direction::Reset;
    side.events.iter().any(
        |event| matches!(event, Event::Ending { conn: of, reading: how, .. } if (*of, *how) == (conn, reading)),
    )
}

fn has(side: &Side, wanted: impl Fn(&Event) -> bool) -> bool {
    side.events.iter().any(wanted)
}

#[test]
fn a_decline_after_the_handshake_resets_and_needs_no_answer() {
    let mut sides = [side(1, 1), side(2, 1)];
    connect(&mut sides, 0);
    let ([conn, _], _) = connect(&mut sides, 1);
    let Side { engine, nic, .. } = &mut sides[0];
    engine.handle_clc(conn, Ok(decline()), nic, NOW);
    engine.close(conn, false, nic, NOW);
    // The peer knows nothing of it any more, and says nothing.
    while let Some((qp, ..)) = sides[0].nic.posted.pop_front() {
        let Side { engine, nic, .. } = &mut sides[0];
        engine.handle_sent(qp, nic, NOW);
    }
    settle(&mut sides);
    assert!(is_reset(&sides[0], conn));
    assert!(has(&sides[0], |event| *event == Event::Over { conn }));
}

#[test]
fn a_server_without_a_confirm_takes_its_rmb_back_before_it_ends() {
    let mut sides = [side(1, 1), side(2, 1)];
    connect(&mut sides, 0);
    let (conns, _) = begin(&mut sides, 1);
    clc(&mut sides, 0, conns);
    clc(&mut sides, 1, conns);
    // The client is established; its Confirm never comes.
    assert!(sides[0].engine.poll_clc().is_some());
    let Side { engine, nic, .. } = &mut sides[1];
    engine.handle_clc_closed(conns[1], nic, NOW);
    assert_eq!(sides[1].engine.poll_event(), None, "the client may write there");
    settle(&mut sides);
    assert!(has(
        &sides[1],
        |event| matches!(event, Event::Failed { conn, .. } if *conn == conns[1])
    ));
    assert!(is_reset(&sides[0], conns[0]));
}

/// A withdrawal goes on whose connection has ended meanwhile: nobody has the RMB before its end.
#[test]
fn an_rmb_that_is_being_withdrawn_serves_nobody() {
    let mut sides = [side(1, 1), side(2, 1)];
    connect(&mut sides, 0);
    let (conns, _) = begin(&mut sides, 1);
    clc(&mut sides, 0, conns);
    clc(&mut sides, 1, conns);
    let Side { engine, nic, .. } = &mut sides[1];
    engine.handle_timeout(nic, NOW + CLC_TIMEOUT);
    assert_eq!(nic.posted.len(), 1, "the peer is asked to forget it");
    engine.handle_clc(conns[1], Ok(decline()), nic, NOW + CLC_TIMEOUT);
    let Side { engine, nic, .. } = &mut sides[0];
    engine.close(conns[0], true, nic, NOW);
    // Another client's RMB, and the server's of before.
    let (client, _) = wish(2);
    let (server, _) = wish(1);
    let [one, other] = &mut sides;
    let next = [
        one.engine.connect(client, &mut one.nic, NOW).expect("room"),
        other.engine.accept(server, &mut other.nic, NOW).expect("room"),
    ];
    while sides[0].engine.poll_clc().is_some_and(|(conn, message)| {
        let Side { engine, nic, .. } = &mut sides[1];
        engine.handle_clc(next[usize::from(conn == next[0])], Ok(message), nic, NOW);
        conn != next[0]
    }) {}
    assert!(sides[1].engine.poll_clc().is_none_or(|(conn, _)| conn != next[1]), "it has to wait");
    settle(&mut sides);
    assert!(has(&sides[1], |event| *event == Event::Withdrawn { rmb: RmbId(1) }));
    assert_eq!(sides[1].nic.forgotten, [(QpId(1), RmbId(1))]);
    assert!(sides[1].engine.poll_clc().is_some_and(|(conn, _)| conn == next[1]));
}

/// Both ends have written all, and the peer's application keeps its socket: the connection's memory is not kept for that.
#[test]
fn a_close_that_does_not_come_is_not_waited_for_for_ever() {
    for shuts_first in [true, false] {
        let mut sides = [side(1, 1), side(2, 1)];
        let (stays, _) = connect(&mut sides, 0);
        let (conns, _) = connect(&mut sides, 1);
        for shuts in [shuts_first, !shuts_first] {
            let Side { engine, nic, .. } = &mut sides[usize::from(!shuts)];
            match shuts {
                true => engine.shut(conns[0], nic),
                false => engine.close(conns[1], false, nic, NOW),
            }
            settle(&mut sides);
        }
        let is_over = |side: &Side| has(side, |event| *event == Event::Over { conn: conns[1] });
        for seconds in [0, 59, 61] {
            let now = NOW + Duration::from_secs(seconds);
            let Side { engine, nic, .. } = &mut sides[1];
            engine.handle_timeout(nic, now);
            settle_at(now, &mut sides);
            assert_eq!(is_over(&sides[1]), seconds == 61, "after {seconds} s");
        }
        assert!(!is_reset(&sides[0], conns[0]), "its application reads what there is");
        close(&mut sides, [conns[0], stays[1]]);
        assert!(has(&sides[0], |event| *event == Event::Over { conn: conns[0] }));
    }
}

/// A client that is slow, and declines: the application goes on over TCP, as its peer does. What is no message gives no RMB back.
#[test]
fn a_client_that_declines_too_late_stays_tcp() {
    for declines in [false, true] {
        let mut sides = [side(1, 1), side(2, 1)];
        connect(&mut sides, 0);
        let (conns, _) = begin(&mut sides, 1);
        clc(&mut sides, 0, conns);
        clc(&mut sides, 1, conns);
        let late = NOW + CLC_TIMEOUT;
        let Side { engine, nic, .. } = &mut sides[1];
        engine.handle_timeout(nic, late);
        assert_eq!(engine.poll_event(), None, "the client may write there");
        let message =
            if declines { Ok(decline()) } else { Err(Error::Eyecatcher { found: *b"*3\r\n" }) };
        engine.handle_clc(conns[1], message, nic, late);
        let event = engine.poll_event();
        match declines {
            true => assert!(matches!(event, Some(Event::Fallback { .. })), "{event:?}"),
            false => assert_eq!(event, None),
        }
        settle_at(late, &mut sides);
        let is_failure = |event: &Event| matches!(event, Event::Failed { .. });
        assert_eq!(has(&sides[1], is_failure), !declines);
    }
}

/// A client that is done at once closes its TCP, and that end comes before the link's last message.
#[test]
fn the_end_of_tcp_behind_a_confirm_does_not_end_a_first_contact() {
    let mut sides = [side(1, 1), side(2, 1)];
    let (conns, _) = begin(&mut sides, 0);
    for from in [0, 1, 0] {
        clc(&mut sides, from, conns);
    }
    let Side { engine, nic, .. } = &mut sides[1];
    engine.handle_clc_closed(conns[1], nic, NOW);
    settle(&mut sides);
    for (side, own) in sides.iter().zip(conns) {
        assert!(has(
            side,
            |event| matches!(event, Event::Established { conn, .. } if *conn == own)
        ));
    }
}

/// As of a program that Linux kills while the link's send queue is full. One that has said that it writes no more has ended its TCP with that.
#[test]
fn a_peer_that_says_nothing_behind_the_end_of_its_tcp_is_gone() {
    let mut sides = [side(1, 1), side(2, 1)];
    let conns = [0, 1, 2].map(|rmb| connect(&mut sides, rmb).0);
    let Side { engine, nic, .. } = &mut sides[0];
    engine.shut(conns[1][0], nic);
    settle(&mut sides);
    let Side { engine, nic, .. } = &mut sides[1];
    // The second one's came in order, and the third one's application has closed.
    engine.close(conns[2][1], false, nic, NOW);
    settle(&mut sides);
    for conn in conns {
        let Side { engine, nic, .. } = &mut sides[1];
        engine.handle_clc_closed(conn[1], nic, NOW);
    }
    for seconds in [9, 11] {
        let Side { engine, nic, .. } = &mut sides[1];
        let now = NOW + Duration::from_secs(seconds);
        engine.handle_timeout(nic, now);
        settle_at(now, &mut sides);
        let gone = conns.map(|conn| is_reset(&sides[1], conn[1]));
        assert_eq!(gone, [seconds == 11, false, seconds == 11], "after {seconds} s");
    }
    let is_over = |side: &Side, of: ConnId| has(side, |event| *event == Event::Over { conn: of });
    assert_eq!(conns.map(|conn| is_over(&sides[1], conn[1])), [false, false, true]);
    let Side { engine, nic, .. } = &mut sides[1];
    engine.close(conns[0][1], false, nic, NOW);
    settle(&mut sides);
    assert_eq!(conns.map(|conn| is_over(&sides[1], conn[1])), [true, false, true]);
    // Were it there after all, it would know.
    assert!(is_reset(&sides[0], conns[0][0]));
}

#[test]
fn a_peer_that_does_not_answer_an_abort_loses_the_rmb_alone() {
    let mut sides = [side(1, 1), side(2, 1)];
    let (stays, _) = connect(&mut sides, 0);
    let (conns, _) = connect(&mut sides, 1);
    let Side { engine, nic, .. } = &mut sides[1];
    // What is no CLC message ends a connection that is established.
    let foreign = Error::Eyecatcher { found: *b"GET " };
    engine.handle_clc(conns[1], Err(foreign), nic, NOW);
    engine.close(conns[1], false, nic, NOW);
    // The abort does not arrive.
    while let Some((qp, ..)) = sides[1].nic.posted.pop_front() {
        let Side { engine, nic, .. } = &mut sides[1];
        engine.handle_sent(qp, nic, NOW);
    }
    let is_over = |side: &Side| has(side, |event| *event == Event::Over { conn: conns[1] });
    let mut late = NOW;
    while !is_over(&sides[1]) {
        let Side { engine, nic, .. } = &mut sides[1];
        late = engine.next_timeout().expect("it waits for something").max(late);
        assert!(late < NOW + Duration::from_secs(90), "it keeps its RMB");
        engine.handle_timeout(nic, late);
        settle_at(late, &mut sides);
    }
    assert!(late > NOW + Duration::from_secs(59), "an answer may come so long");
    assert_eq!(sides[1].nic.forgotten, [(QpId(1), RmbId(1))]);
    assert!(has(&sides[1], |event| *event == Event::Withdrawn { rmb: RmbId(1) }));
    assert_eq!(sides.each_ref().map(|side| side.engine.groups()), [1, 1]);
    close(&mut sides, stays);
    assert!(has(&sides[1], |event| *event == Event::Over { conn: stays[1] }));
}

/// A peer that asks and takes no answer: its link is lost, and no deadline stays behind.
#[test]
fn a_peer_that_takes_no_answers_loses_its_link() {
    let mut sides = [side(1, 1), side(2, 1)];
    let (conns, _) = connect(&mut sides, 0);
    let late = NOW + Duration::from_secs(31);
    let Side { engine, nic, .. } = &mut sides[1];
    engine.handle_timeout(nic, late);
    let (qp, _, test) = nic.posted.pop_front().expect("a TEST_LINK");
    let Side { engine, nic, .. } = &mut sides[0];
    for _ in 0..100 {
        engine.handle_received(qp, &test, nic, NOW);
    }
    engine.handle_timeout(nic, late);
    assert!(engine.next_timeout().is_none_or(|due| due > late), "it would be due for ever");
    assert_eq!(engine.groups(), 0);
    settle(&mut sides);
    let is_end = |event: &Event| matches!(event, Event::Ending { conn, .. } if *conn == conns[0]);
    assert!(has(&sides[0], is_end), "{:?}", sides[0].events);
}

#[test]
fn a_decline_is_not_answered() {
    let mut sides = [side(1, 1), side(2, 1)];
    // The first one's first contact holds the other one back.
    let (first, _) = begin(&mut sides, 0);
    clc(&mut sides, 0, first);
    let (held, _) = begin(&mut sides, 1);
    clc(&mut sides, 0, held);
    let Side { engine, nic, .. } = &mut sides[1];
    engine.handle_clc(held[1], Ok(decline()), nic, NOW);
    let all: Vec<_> = std::iter::from_fn(|| engine.poll_clc()).collect();
    assert!(all.iter().all(|(conn, _)| *conn == first[1]), "{all:?}");
}

#[test]
fn the_answer_to_an_announcement_is_nobody_elses() {
    let mut sides = [side(1, 2), side(2, 2)];
    connect(&mut sides, 0);
    // Both wait until the client knows their RMBs.
    let all = [1, 2].map(|rmb| begin(&mut sides, rmb).0);
    all.into_iter().for_each(|conns| clc(&mut sides, 0, conns));
    let Side { engine, nic, .. } = &mut sides[1];
    assert_eq!(nic.posted.len(), 1, "one flow at a time");
    engine.handle_clc_closed(all[0][1], nic, NOW);
    assert!(step(&mut sides, 1) && step(&mut sides, 0));
    assert!(sides[1].engine.poll_clc().is_none(), "its RMB is not known");
    settle(&mut sides);
    clc(&mut sides, 1, all[1]);
}

#[test]
fn a_lost_link_is_cut_and_nothing_is_written_to_who_has_closed() {
    for has_closed in [false, true] {
        let mut sides = [side(1, 2), side(2, 2)];
        let (conns, counters) = connect(&mut sides, 0);
        assert_eq!(sides.each_ref().map(|side| side.engine.links()), [2, 2]);
        if has_closed {
            let Side { engine, nic, .. } = &mut sides[1];
            engine.close(conns[1], false, nic, NOW);
            settle(&mut sides);
        }
        counters[0].written.set(100);
        let Side { engine, nic, .. } = &mut sides[0];
        engine.handle_dirty(conns[0], nic);
        let qp = nic.posted.back().expect("a message").0;
        nic.posted.clear();
        engine.handle_link_down(qp, nic, NOW);
        assert_eq!(nic.cuts, [qp]);
        assert!(nic.posted.iter().all(|posted| posted.0 != qp));
        let bytes: u32 = nic.posted.iter().map(|posted| posted.1).sum();
        assert_eq!(bytes, if has_closed { 0 } else { 100 });
        assert_ne!(qp, QpId(0));
    }
}

#[test]
fn a_group_that_has_had_many_rmbs_takes_connections_with_others() {
    for links in [1, 2] {
        let mut sides = [side(1, links), side(2, links)];
        let first = connect(&mut sides, 0).0;
        for rmb in 1..600 {
            let (conns, _) = connect(&mut sides, rmb);
            close(&mut sides, conns);
            pass(&mut sides);
        }
        assert_eq!(sides.each_ref().map(|side| side.engine.groups()), [1, 1]);
        assert!(sides.iter().all(|side| side.engine.rmbs() < RMBS));
        for Side { engine, nic, .. } in &sides {
            assert!(engine.holder(RmbId(0)).is_some(), "a connection has it");
            let order = nic.forgotten.chunks(links.into()).map(|all| all[0].1);
            assert!(order.eq((1..).map(RmbId).take(600 - engine.rmbs())), "longest unused first");
        }
        close(&mut sides, first);
    }
}

#[test]
fn an_rmb_is_withdrawn_once_the_peer_has_answered() {
    let rmb = RmbId(1);
    let mut sides = [side(1, 1), side(2, 1)];
    connect(&mut sides, 0);
    let (conns, _) = connect(&mut sides, 1);
    let Side { engine, nic, .. } = &mut sides[0];
    assert!(!engine.withdraw(rmb, nic, NOW), "a connection has it");
    close(&mut sides, conns);
    let Side { engine, nic, events } = &mut sides[0];
    events.clear();
    assert!(engine.withdraw(rmb, nic, NOW));
    assert!(engine.holder(rmb).is_some() && engine.poll_event().is_none());
    settle(&mut sides);
    assert_eq!(sides[0].events, [Event::Withdrawn { rmb }]);
    assert_eq!((sides[0].engine.holder(rmb), sides[0].nic.forgotten.len()), (None, 1));
    // The peer's own one is still known.
    assert!(sides[1].engine.holder(rmb).is_some());
    connect(&mut sides, 1);
}

#[test]
fn an_rmb_serves_another_group_once_it_was_withdrawn() {
    let rmb = RmbId(1);
    let mut sides = [side(1, 1), side(2, 1)];
    let (conns, _) = connect(&mut sides, 1);
    let holder = sides[0].engine.holder(rmb).expect("a group");
    let (wish, _) = wish(1);
    let Side { engine, nic, .. } = &mut sides[0];
    let refused = engine.connect(wish, nic, NOW);
    assert_eq!(refused, Err(RefusedWish::RmbInUse(conns[0])));
    close(&mut sides, conns);
    // The first host is the client of the one group, and the server of the other.
    sides.swap(0, 1);
    let (conns, _) = begin(&mut sides, 1);
    clc(&mut sides, 0, conns);
    assert!(sides[1].engine.poll_clc().is_none(), "the peer has a key of the other group");
    settle(&mut sides);
    clc(&mut sides, 1, conns);
    assert!(sides[0].engine.poll_clc().is_none(), "so it has of the client's");
    settle(&mut sides);
    clc(&mut sides, 0, conns);
    settle(&mut sides);
    for Side { engine, nic, events } in &sides {
        assert_eq!((engine.groups(), nic.forgotten.len()), (2, 1));
        assert!(engine.holder(rmb).is_some_and(|group| group != holder));
        let is_up = |event: &&Event| matches!(event, Event::Established { .. });
        assert_eq!(events.iter().filter(is_up).count(), 2);
    }
}

/// The server has given up, and its RMB may be another connection's: a WRITE with its key would cost the link.
#[test]
fn an_accept_that_names_a_withdrawn_rmb_is_declined() {
    for links in [1, 2] {
        let mut sides = [side(1, links), side(2, links)];
        connect(&mut sides, 0);
        let [one, other] = [wish(1).0, wish(1).0];
        let [client, server] = &mut sides;
        let before = NOW - Duration::from_millis(1);
        let conns = [
            client.engine.connect(one, &mut client.nic, before).expect("room"),
            server.engine.accept(other, &mut server.nic, NOW).expect("room"),
        ];
        clc(&mut sides, 0, conns);
        settle(&mut sides);
        let (_, accept) = sides[1].engine.poll_clc().expect("an Accept");
        let Side { engine, nic, .. } = &mut sides[1];
        engine.handle_clc_closed(conns[1], nic, NOW);
        settle(&mut sides);
        let Side { engine, nic, .. } = &mut sides[0];
        engine.handle_clc(conns[0], Ok(accept), nic, NOW);
        let (_, answer) = engine.poll_clc().expect("an answer");
        assert!(
            matches!(&answer, Message::Decline(decline) if decline.code == DeclineCode::ERR_RTOK)
        );
        assert!(matches!(engine.poll_event(), Some(Event::Fallback { .. })));
        // The RMB serves again.
        connect(&mut sides, 1);
    }
}

/// Where nobody waits any more, what was written goes by TCP behind the Decline.
#[test]
fn a_client_that_has_closed_waits_for_its_server_so_long_and_no_longer() {
    let mut client = side(1, 1);
    let Side { engine, nic, .. } = &mut client;
    let conn = engine.connect(wish(0).0, nic, NOW).expect("room");
    assert!(matches!(engine.poll_clc(), Some((_, Message::Proposal(_)))));
    assert_eq!(engine.next_timeout(), None, "an application waits as long as it likes");
    engine.close(conn, false, nic, NOW);
    let due = NOW + CLC_TIMEOUT;
    assert_eq!((engine.next_timeout(), engine.poll_event()), (Some(due), None));
    engine.handle_timeout(nic, due);
    assert!(matches!(engine.poll_clc(), Some((_, Message::Decline(_)))));
    assert!(matches!(engine.poll_event(), Some(Event::Fallback { .. })));
    assert_eq!((engine.connections(), engine.next_timeout()), (0, None));
}

#[test]
fn a_peer_that_begins_with_no_clc_leaves_a_connection_tcp() {
    let mut sides = [side(1, 1), side(2, 1)];
    let (conns, _) = begin(&mut sides, 0);
    for (Side { engine, nic, .. }, conn) in sides.iter_mut().zip(conns) {
        while engine.poll_clc().is_some() {}
        engine.handle_no_clc(conn, nic, NOW);
        let event = engine.poll_event();
        let reason = DeclineCode::PEERNOSMC;
        assert_eq!(event, Some(Event::Fallback { conn, reason, peer_reason: None }));
        assert_eq!((engine.poll_clc(), engine.connections()), (None, 0));
    }
}
