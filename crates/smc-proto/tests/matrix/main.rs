//! The matrix of handshakes: every pair of versions, every set of devices and of EIDs on both sides,
//! every first and next contact, with the option and without; a Decline at every step by either side;
//! and everything that can happen to a message at every step. Each case is compared with [`oracle`]
//! and [`mishap`]: the mode, the code, and the bytes of both applications.
#![allow(unreachable_pub, reason = "a program")]

mod case;
mod mishap;
mod oracle;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use case::{CONTACTS, Case, Contact, DEVICES, EIDS, EIGHT, Eids, Refusal, Side, VERSIONS, Version};
use mishap::{End, MISHAPS, Mishap, Why};
use oracle::{At, Chosen, Verdict, verdict};
use smc_proto::decline::{self, DeclineCode};
use smc_proto::handshake::{Agreement, Ending, Fallback, Fault, Path};
use smc_proto::wire::clc::{self, Answer, FeatureMask, Kind, Message, Smcd, SmcdVersion};
use support::peers::{Behind, Faults, Outcome, Result, run};

/// Calls `each` for all pairs of hosts with these EIDs.
fn hosts(clients_eids: &[Eids], servers_eids: &[Eids], mut each: impl FnMut(Side, Side)) {
    for (client_version, server_version) in pairs(&VERSIONS, &VERSIONS) {
        for (client_devices, server_devices) in pairs(&DEVICES.collect::<Vec<_>>(), &ALL_DEVICES) {
            for (client_eids, server_eids) in pairs(clients_eids, servers_eids) {
                // Version 1 has none.
                if (client_version == Version::V1 && !client_eids.are_none())
                    || (server_version == Version::V1 && !server_eids.are_none())
                {
                    continue;
                }
                let side = |version, devices, eids| Side { version, devices, eids, option: true };
                let client = side(client_version, client_devices, client_eids);
                each(client, side(server_version, server_devices, server_eids));
            }
        }
    }
}

const ALL_DEVICES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn pairs<A: Copy, B: Copy>(a: &[A], b: &[B]) -> impl Iterator<Item = (A, B)> {
    a.iter().flat_map(move |&a| b.iter().map(move |&b| (a, b)))
}

fn case(client: Side, server: Side, contact: Contact, refusal: Refusal) -> Case {
    Case { client, server, contact, refusal, same_subnet: true }
}

/// All EIDs that a client may send, eight included.
fn clients_eids() -> Vec<Eids> {
    EIDS.into_iter().chain([EIGHT]).collect()
}

#[test]
fn every_combination_ends_in_the_right_mode_with_the_right_code() {
    let mut cases = 0;
    hosts(&clients_eids(), &EIDS, |client, server| {
        for (contact, same_subnet) in pairs(&CONTACTS, &[true, false]) {
            // The subnet is asked for once a version 1 is offered.
            if !same_subnet && client.devices & (case::NATIVE_ISM | case::ROCE_V1) == 0 {
                continue;
            }
            let case = Case { same_subnet, ..case(client, server, contact, Refusal::Nobody) };
            check(&case, cases % 2 != 0);
            cases += 1;
        }
    });
    assert!(cases > 450_000, "{cases}");
}

#[test]
fn a_decline_at_every_step_is_read_and_the_bytes_go_on_by_tcp() {
    let mut codes = decline::ALL.iter().map(|known| known.code).cycle();
    let mut seen = [0; 5];
    hosts(&EIDS[..3], &EIDS[..3], |client, server| {
        for contact in CONTACTS {
            let mut code = || codes.next().unwrap();
            for refusal in [
                Refusal::Client,
                Refusal::Server,
                Refusal::EveryChoice(code()),
                Refusal::OnAccept(code()),
                Refusal::OnConfirm(code()),
                Refusal::OnLink(code()),
            ] {
                for early in [false, true] {
                    let case = case(client, server, contact, refusal);
                    check(&case, early);
                    match verdict(&case) {
                        Verdict::Declined { at: At::Start, .. } => seen[0] += 1,
                        Verdict::Declined { at: At::Proposal, .. } => seen[1] += 1,
                        Verdict::Declined { at: At::Accept, .. } => seen[2] += 1,
                        Verdict::Declined { at: At::Link, .. } => seen[3] += 1,
                        Verdict::Unheard { .. } => seen[4] += 1,
                        _ => {}
                    }
                }
            }
        }
    });
    assert!(seen.iter().all(|times| *times > 1_000), "{seen:?}");
}

#[test]
fn every_code_comes_over_at_every_step_of_every_path() {
    for (path, contact) in pairs(&[Path::Dv2, Path::Dv1, Path::Rv2, Path::Rv1], &CONTACTS) {
        let (client, server) = hosts_for(path);
        for known in decline::ALL {
            for refusal in [
                Refusal::EveryChoice(known.code),
                Refusal::OnAccept(known.code),
                Refusal::OnConfirm(known.code),
                Refusal::OnLink(known.code),
            ] {
                check(&case(client, server, contact, refusal), contact == Contact::Next);
            }
        }
    }
}

/// Two hosts whose best path is this one.
fn hosts_for(path: Path) -> (Side, Side) {
    let devices = match path {
        Path::Dv2 => case::EMULATED_ISM,
        Path::Dv1 => case::NATIVE_ISM,
        Path::Rv2 => case::ROCE_V2,
        Path::Rv1 => case::ROCE_V1,
    };
    let version = if matches!(path, Path::Dv1 | Path::Rv1) { Version::V1 } else { Version::V2_1 };
    let side = Side { version, devices, eids: EIDS[1], option: true };
    (side, side)
}

#[test]
fn every_mishap_at_every_step_ends_each_side_as_it_has_to() {
    let mut cases = 0;
    hosts(&EIDS[..2], &EIDS[..2], |client, server| {
        for contact in [Contact::First, Contact::Next, Contact::ClientForgot] {
            for refusal in [
                Refusal::Nobody,
                Refusal::OnConfirm(DeclineCode::MEM),
                Refusal::OnLink(DeclineCode::ERR_RDYLNK),
            ] {
                let case = case(client, server, contact, refusal);
                let verdict = verdict(&case);
                // Without a Decline behind the Confirm it is the first case again.
                if refusal != Refusal::Nobody && mishap::script(&verdict).0.len() < 4 {
                    continue;
                }
                for (mishap, n) in
                    pairs(&MISHAPS, &(0..mishap::script(&verdict).0.len()).collect::<Vec<_>>())
                {
                    // Once for all messages.
                    if mishap == Mishap::Bytewise && n > 0 {
                        continue;
                    }
                    mishandle(&case, &verdict, mishap, n, cases % 2 != 0);
                    cases += 1;
                }
            }
        }
    });
    assert!(cases > 50_000, "{cases}");
}

fn mishandle(case: &Case, verdict: &Verdict, mishap: Mishap, n: usize, early: bool) {
    let expected = mishap::ends(verdict, mishap, n, early);
    let [client, server] = case.setups();
    let result = run(&client, &server, mishap::faults(mishap, n, early));
    let about = || format!("{mishap:?} of message {n}, early: {early}, {verdict:?} of {case:#?}");
    let ends = [end(&result.client), end(&result.server)];
    for (who, (end, expected)) in ends.into_iter().zip(expected).enumerate() {
        assert!(is(end, expected), "{who}: {end:?}, not {expected:?}: {}", about());
    }
    assert!(result.took <= Duration::from_secs(6), "{:?}: {}", result.took, about());
    if n == 3 && mishap::loses(mishap) {
        // Both decline without having heard each other, and each other's Decline comes where an
        // application reads. That is so with kernels, and needs a path that holds a Decline up for
        // seconds while both wait for a link.
        return;
    }
    for who in [0, 1] {
        let (mut came, wrote) = (came(&result, who), &result.wrote[1 - who]);
        if mishap == Mishap::Garbage && n == 0 && who == 1 {
            // From a plain client everything is its application's.
            assert!(came.contains(&mishap::GARBAGE), "{}", about());
            came.retain(|byte| *byte != mishap::GARBAGE);
        }
        assert!(wrote.starts_with(&came), "{who} read {came:02x?}: {}", about());
        let both_tcp = matches!(ends, [End::Tcp(..), End::Tcp(..)]) && !mishap::loses(mishap);
        if ends == [End::Smc; 2] || both_tcp {
            assert_eq!(came, *wrote, "{who}: {}", about());
        }
    }
}

#[test]
fn a_link_that_loses_its_first_message_or_the_answer_is_declined_in_time() {
    for (path, lost) in pairs(&[Path::Rv2, Path::Rv1], &[0, 1]) {
        let (client, server) = hosts_for(path);
        for early in [false, true] {
            let [client, server] = case(client, server, Contact::First, Refusal::Nobody).setups();
            let llc_arrives = Box::new(move |n| n != lost);
            let result = run(&client, &server, Faults { llc_arrives, early, ..Faults::default() });
            let timeout = oracle::TIMEOUT_CL;
            assert_eq!(end(&result.server), End::Tcp(timeout, None));
            assert_eq!(result.took, Duration::from_secs(3), "2 s for LLC, 1 s for a Decline");
            if lost == 0 {
                assert_eq!(end(&result.client), End::Tcp(oracle::PEERDECL, Some(timeout)));
                assert_eq!(came(&result, 0), result.wrote[1]);
                assert_eq!(came(&result, 1), result.wrote[0]);
            } else {
                // The client is done when it has answered; the link that lost the answer is lost.
                assert_eq!(end(&result.client), End::Smc);
            }
        }
    }
}

const PLAIN: &[u8] = b"GET / HTTP/1.1\r\n\r\n";

#[test]
fn an_option_that_came_over_one_way_only_leaves_tcp_or_an_error() {
    hosts(&EIDS[..3], &EIDS[..2], |client, server| {
        // A plain server whose SYN-ACK repeats the client's option, by a middlebox or by itself.
        let echoed = Side { option: false, ..server };
        let case_of = |client, server| case(client, server, Contact::First, Refusal::Nobody);
        let echo = case_of(client, echoed);
        assert_eq!(verdict(&echo), Verdict::OneSided);
        let [ours, theirs] = echo.setups();
        let result = run(&ours, &theirs, Faults::default());
        assert_eq!(end(&result.server), End::Tcp(oracle::PEERNOSMC, None));
        match verdict(&case_of(client, server)) {
            // The Decline is all that is said; no one can know that it is not understood.
            Verdict::Declined { at: At::Start, code, .. } => {
                assert_eq!(end(&result.client), End::Tcp(code, None));
            }
            _ => assert_eq!(end(&result.client), End::Failed(Why::Malformed)),
        }
        assert!(result.took <= Duration::from_secs(6));

        // A client that has not seen the option of the SYN-ACK: it writes as ever.
        let stripped = case_of(Side { option: false, ..client }, server);
        let [mut theirs, ours] = stripped.setups();
        for piece in [1, 7, usize::MAX] {
            theirs.says = PLAIN;
            let faults = Faults { piece: Box::new(move || piece), ..Faults::default() };
            let result = run(&theirs, &ours, faults);
            let plain = End::Tcp(oracle::PEERNOSMC, None);
            assert_eq!([end(&result.client), end(&result.server)], [plain; 2]);
            assert_eq!((&result.read[1][..], result.messages), (PLAIN, 0));
            assert_eq!(result.read[0], result.wrote[1]);
        }
        // If it waits for the server to speak first, that takes as long as any answer.
        theirs.says = b"";
        let result = run(&theirs, &ours, Faults::default());
        assert_eq!(end(&result.server), End::Failed(Why::Time));
        assert_eq!(result.took, Duration::from_secs(6));
    });
}

#[test]
fn without_the_option_not_a_word_is_said() {
    hosts(&EIDS[..3], &EIDS[..2], |client, server| {
        for refusal in [Refusal::Nobody, Refusal::Client, Refusal::Server] {
            let [client, server] = [client, server].map(|side| Side { option: false, ..side });
            let case = case(client, server, Contact::First, refusal);
            assert_eq!(verdict(&case), Verdict::Silent);
            check(&case, false);
        }
    });
}

/// Runs a case over streams that do nothing wrong, and compares.
fn check(case: &Case, early: bool) {
    let verdict = verdict(case);
    let [client, server] = case.setups();
    let mut messages = Vec::new();
    let record = |_: usize, bytes: &mut Vec<u8>| {
        messages.push(bytes.clone());
        Behind::Open
    };
    let result =
        run(&client, &server, Faults { clc: Box::new(record), early, ..Faults::default() });
    let about = || format!("{verdict:?} of {case:#?}");
    let (script, expected) = mishap::script(&verdict);
    for (outcome, expected) in [&result.client, &result.server].into_iter().zip(expected) {
        assert!(is(end(outcome), expected), "{outcome:?}, not {expected:?}: {}", about());
    }
    let kinds = script.iter().map(|(_, sent)| match sent {
        mishap::Sent::Proposal => Kind::Proposal,
        mishap::Sent::Accept => Kind::Accept,
        mishap::Sent::Confirm => Kind::Confirm,
        mishap::Sent::Decline => Kind::Decline,
    });
    let parsed: Vec<Message> = messages.iter().map(|m| Message::parse(m).unwrap()).collect();
    assert!(kinds.eq(parsed.iter().map(Message::kind)), "{parsed:?}: {}", about());
    assert_eq!(result.took, Duration::ZERO, "{}", about());
    match verdict {
        Verdict::Silent | Verdict::OneSided => {}
        Verdict::Smc(chosen) => agreed(&result, &chosen, &about),
        Verdict::Unheard { chosen, .. } => {
            let Outcome::Smc(agreement) = &result.client else { panic!("{}", about()) };
            holds(agreement, &chosen, 2, &about);
            assert!(result.read[1].len() < result.wrote[0].len(), "{}", about());
            return;
        }
        Verdict::Declined { code, v1_form, .. } => {
            let Some(Message::Decline(decline)) = parsed.last() else { panic!("{}", about()) };
            assert_eq!(decline.code.0, code, "{}", about());
            assert_eq!(decline.v2.is_none(), v1_form, "{}", about());
            let known = decline.code.name().is_some();
            let out_of_sync = decline.code == DeclineCode::SYNCERR;
            assert_eq!((known, decline.out_of_sync), (true, out_of_sync), "{}", about());
        }
    }
    for who in [0, 1] {
        assert_eq!(came(&result, who), result.wrote[1 - who], "to {who}: {}", about());
        assert_eq!(result.left[who], [], "{}", about());
    }
}

/// What one application read, over TCP and then from memory.
fn came(result: &Result, who: usize) -> Vec<u8> {
    [&result.read[who][..], &result.ring[who]].concat()
}

fn agreed(result: &Result, chosen: &Chosen, about: &dyn Fn() -> String) {
    let (Outcome::Smc(client), Outcome::Smc(server)) = (&result.client, &result.server) else {
        panic!("{}", about())
    };
    holds(client, chosen, 2, about);
    holds(server, chosen, 1, about);
    if chosen.first_contact {
        assert_eq!(
            (client.release, client.features, client.max_conns, client.max_links),
            (server.release, server.features, server.max_conns, server.max_links),
        );
    }
}

/// Whether an agreement is the one that was chosen, with the memory of this peer.
fn holds(agreement: &Agreement, chosen: &Chosen, peer: u8, about: &dyn Fn() -> String) {
    assert_eq!(agreement.path, chosen.path, "{}", about());
    assert_eq!(agreement.eid, chosen.eid.map(case::eid), "{}", about());
    assert_eq!(agreement.first_contact, chosen.first_contact, "{}", about());
    let is_v2 = matches!(chosen.path, Path::Dv2 | Path::Rv2);
    if chosen.first_contact && is_v2 {
        assert_eq!(agreement.release.number(), chosen.release, "{}", about());
        let features = if chosen.release == 0 { 0 } else { 1 };
        assert_eq!(agreement.features, FeatureMask(features), "{}", about());
    }
    match &agreement.peer {
        Answer::D(Smcd { link_id, version, .. }) => {
            assert_eq!(*link_id, u32::from(peer), "{}", about());
            if let SmcdVersion::V2 { chid, gid_ext, .. } = version {
                assert_eq!(*chid, case::chid_of(chosen.ism), "{}", about());
                assert_eq!(*gid_ext != 0, chosen.ism == case::EMULATED_ISM, "{}", about());
            }
        }
        Answer::R(clc::Smcr { local, .. }) => {
            assert_eq!(local.peer_id.0, [peer; 8], "{}", about());
        }
    }
}

/// How a side ended, in the oracle's words.
fn end(outcome: &Outcome) -> End {
    match outcome {
        Outcome::Smc(_) => End::Smc,
        Outcome::Ended(Ending::Fallback(Fallback { reason, peer_reason, .. })) => {
            End::Tcp(reason.0, peer_reason.map(|code| code.0))
        }
        Outcome::Ended(Ending::Failed(fault)) => End::Failed(match fault {
            Fault::TimedOut => Why::Time,
            Fault::Closed => Why::Closed,
            Fault::Malformed(_) => Why::Malformed,
            other => panic!("{other:?}"),
        }),
    }
}

fn is(end: End, expected: End) -> bool {
    // Whoever waits no longer hangs up: the other one may see that a moment before its own time is up.
    end == expected || (end, expected) == (End::Failed(Why::Closed), End::Failed(Why::Time))
}
