//! Client and server against each other: every mode, every way to decline, and a pipe that delays,
//! cuts, changes and closes.

mod codes;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use bolero::{check, produce};
use smc_proto::decline::{self, DeclineCode};
use smc_proto::handshake::{Ending, Fallback, Fault, Path};
use smc_proto::ids::{Chid, Eid, SmcdGid};
use smc_proto::list::List;
use smc_proto::wire::clc::{self, FeatureMask, Release};
use support::draw::Draw;
use support::peers::{
    Behind, FROM_CLIENT, FROM_SERVER, Faults, ISM, ISM_CHID, OnMessage, Outcome, Result, Setup,
    able, run,
};

/// A handshake over a pipe that does nothing wrong.
fn handshake(client: &Setup, server: &Setup) -> Result {
    tampered(client, server, &mut |_, _| true)
}

fn tampered(
    client: &Setup,
    server: &Setup,
    clc: &mut dyn FnMut(usize, &mut Vec<u8>) -> bool,
) -> Result {
    run(client, server, Faults { clc: behind(clc), ..Faults::default() })
}

/// What is true where the stream goes on.
fn behind<'f>(mut open: impl FnMut(usize, &mut Vec<u8>) -> bool + 'f) -> OnMessage<'f> {
    Box::new(move |n, bytes| if open(n, bytes) { Behind::Open } else { Behind::Closed })
}

fn fallback(outcome: &Outcome) -> &Fallback {
    match outcome {
        Outcome::Ended(Ending::Fallback(fallback)) => fallback,
        other => panic!("no fallback: {other:?}"),
    }
}

fn path(outcome: &Outcome) -> Path {
    match outcome {
        Outcome::Smc(agreement) => agreement.path,
        other => panic!("no SMC: {other:?}"),
    }
}

const PATHS: [Path; 4] = [Path::Dv2, Path::Dv1, Path::Rv2, Path::Rv1];

fn subsets() -> impl Iterator<Item = Vec<Path>> {
    (0..16).map(|bits| {
        let chosen = PATHS.iter().enumerate().filter(|(n, _)| bits >> n & 1 != 0);
        chosen.map(|(_, path)| *path).collect()
    })
}

/// A client with devices for these paths only.
fn client_with(paths: &[Path]) -> Setup {
    let mut setup = able(1);
    let has = |path| paths.contains(&path);
    if !has(Path::Rv1) {
        setup.devices.smcr_v1 = None;
    }
    if !has(Path::Dv1) {
        setup.devices.smcd_v1 = None;
    }
    if !has(Path::Rv2) {
        setup.devices.smcr_v2 = None;
    }
    if !has(Path::Dv2) {
        setup.devices.smcd_v2 = List::new();
        setup.host.smcd_v2 = false;
    }
    setup
}

fn server_with(paths: &[Path]) -> Setup {
    let mut setup = able(2);
    setup.paths = paths.to_vec();
    if !paths.contains(&Path::Dv2) {
        setup.chids.clear();
    }
    setup
}

#[test]
fn the_best_path_that_both_have_is_chosen_or_tcp() {
    for client_paths in subsets() {
        for server_paths in subsets() {
            for (first, second) in [(true, true), (false, false)] {
                let mut client = client_with(&client_paths);
                let mut server = server_with(&server_paths);
                (client.has_link_group, server.has_link_group) = (!first, !second);
                let result = handshake(&client, &server);
                let best = PATHS
                    .into_iter()
                    .find(|path| client_paths.contains(path) && server_paths.contains(path));
                let Some(best) = best else {
                    intact(&result);
                    continue;
                };
                assert_eq!((path(&result.client), path(&result.server)), (best, best));
                assert_eq!(result.messages, 3);
                assert_eq!(result.took, Duration::ZERO);
                assert_eq!(result.read, [vec![], vec![]]);
                terms_agree(&result, first);
            }
        }
    }
}

fn terms_agree(result: &Result, first: bool) {
    let (Outcome::Smc(client), Outcome::Smc(server)) = (&result.client, &result.server) else {
        panic!("no SMC");
    };
    assert_eq!((client.first_contact, server.first_contact), (first, first));
    assert_eq!(client.eid, server.eid);
    assert_eq!(client.eid.is_some(), !client.path.is_v1());
    if first {
        assert_eq!(client.release, server.release);
        assert_eq!(client.features, server.features);
        assert_eq!(client.max_conns, server.max_conns);
        assert_eq!(client.max_links, server.max_links);
    }
}

/// Both sides fell back, and each application read what the other one wrote, nothing else.
fn intact(result: &Result) {
    fallback(&result.client);
    fallback(&result.server);
    assert_eq!(result.read[0], FROM_SERVER);
    assert_eq!(result.read[1], FROM_CLIENT);
}

#[test]
fn releases_features_and_limits_are_the_lower_of_both() {
    for (client_release, server_release) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 7), (7, 1)] {
        for path_wanted in [Path::Dv2, Path::Rv2] {
            let (mut client, mut server) = (client_with(&[path_wanted]), able(2));
            client.host.release = Release::new(client_release).unwrap();
            server.host.release = Release::new(server_release).unwrap();
            client.host.features = FeatureMask(0b0110);
            server.host.features = FeatureMask(0b0011);
            (client.host.max_conns, client.host.max_links) = (100, 2);
            (server.host.max_conns, server.host.max_links) = (200, 1);
            let result = handshake(&client, &server);
            terms_agree(&result, true);
            let Outcome::Smc(agreement) = result.server else { panic!() };
            let release = client_release.min(server_release);
            assert_eq!(agreement.release.number(), release);
            let v2_1 = release >= 1;
            assert_eq!(agreement.features.0, if v2_1 { 0b0010 } else { 0 });
            let limits = (agreement.max_conns, agreement.max_links);
            let lower = v2_1 && path_wanted == Path::Rv2;
            assert_eq!(limits, if lower { (100, 1) } else { (255, 2) });
        }
    }
}

#[test]
fn eids_decide_and_the_seid_comes_first() {
    let eid = |text: &str| Eid::user(text).unwrap();
    let host = |setup: &mut Setup, ueids: &[&str], seid: Option<&str>| {
        let ueids: Vec<Eid> = ueids.iter().map(|text| eid(text)).collect();
        setup.host.ueids = List::from_slice(&ueids).unwrap();
        setup.host.seid = seid.map(eid);
    };
    type Eids<'a> = (&'a [&'a str], Option<&'a str>);
    let cases: &[(Eids<'_>, Eids<'_>, Option<&str>)] = &[
        ((&["A", "B"], None), (&["B", "A"], None), Some("A")),
        ((&["A", "B"], None), (&["C", "B"], None), Some("B")),
        ((&["A"], None), (&["B"], None), None),
        ((&["A"], Some("SEID")), (&["A"], Some("SEID")), Some("SEID")),
        ((&["A"], Some("SEID")), (&["A"], Some("OTHER")), Some("A")),
        ((&["A"], Some("SEID")), (&["A"], None), Some("A")),
        ((&[], Some("SEID")), (&[], Some("SEID")), Some("SEID")),
        ((&[], Some("SEID")), (&[], None), None),
        ((&["A", "B", "C", "D"], None), (&["D"], None), Some("D")),
    ];
    for (client_eids, server_eids, expected) in cases {
        let (mut client, mut server) = (client_with(&[Path::Dv2]), able(2));
        host(&mut client, client_eids.0, client_eids.1);
        host(&mut server, server_eids.0, server_eids.1);
        let result = handshake(&client, &server);
        match expected {
            Some(text) => {
                let Outcome::Smc(agreement) = &result.server else { panic!("{text}") };
                assert_eq!(agreement.eid, Some(eid(text)));
                terms_agree(&result, true);
            }
            None => {
                assert_eq!(fallback(&result.server).reason, DeclineCode::NOSMCDDEV);
                intact(&result);
            }
        }
    }
}

#[test]
fn without_the_option_or_with_fast_open_nothing_is_said() {
    for reason in [DeclineCode::PEERNOSMC, DeclineCode::OPTUNSUPP] {
        let (mut client, mut server) = (able(1), able(2));
        for setup in [&mut client, &mut server] {
            setup.circumstances.peer_says_smc = reason != DeclineCode::PEERNOSMC;
            setup.circumstances.fast_open = reason == DeclineCode::OPTUNSUPP;
        }
        let result = handshake(&client, &server);
        assert_eq!(fallback(&result.client).reason, reason);
        assert_eq!(fallback(&result.server).reason, reason);
        assert_eq!(result.messages, 0);
        intact(&result);
    }
}

#[test]
fn a_link_that_carries_nothing_is_declined() {
    let (client, server) = (client_with(&[Path::Rv2]), able(2));
    let faults = Faults { llc_arrives: Box::new(|_| false), ..Faults::default() };
    let result = run(&client, &server, faults);
    assert_eq!(fallback(&result.server).reason, DeclineCode::TIMEOUT_CL);
    assert_eq!(fallback(&result.client).peer_reason, Some(DeclineCode::TIMEOUT_CL));
    assert_eq!(result.took, Duration::from_secs(3), "2 s for LLC, 1 s for a Decline");
    intact(&result);
}

/// Changes the nth message as a message.
fn changed(
    n: usize,
    change: impl Fn(&mut clc::Message),
) -> impl FnMut(usize, &mut Vec<u8>) -> bool {
    move |message, bytes| {
        if message == n {
            let mut message = clc::Message::parse(bytes).unwrap();
            change(&mut message);
            let mut buffer = [0; clc::MAX_LEN];
            *bytes = message.emit(&mut buffer).unwrap().to_vec();
        }
        true
    }
}

#[test]
fn a_proposal_without_its_smcd_extension_is_declined() {
    let mut drop_extension = changed(0, |message| {
        let clc::Message::Proposal(proposal) = message else { return };
        let clc::Versions::V2 { v2: clc::V2Offer::Whole(v2), .. } = &mut proposal.versions else {
            return;
        };
        v2.modes = clc::V2Modes::D(None);
    });
    let result = tampered(&client_with(&[Path::Dv2]), &able(2), &mut drop_extension);
    assert_eq!(fallback(&result.server).reason, DeclineCode::NOV2DEXT);
    intact(&result);
}

#[test]
fn a_proposal_without_its_v2_extension_is_declined() {
    for paths in [&[Path::Dv2][..], &[Path::Rv2], &[Path::Dv2, Path::Rv2]] {
        let result = tampered(&client_with(paths), &able(2), &mut without_v2_extension());
        assert_eq!(fallback(&result.server).reason, DeclineCode::NOV2EXT, "{paths:?}");
        assert_eq!(fallback(&result.client).peer_reason, Some(DeclineCode::NOV2EXT));
        intact(&result);
    }
    // Version 1 is not touched by what version 2 lacks.
    for path_v1 in [Path::Dv1, Path::Rv1] {
        let client = client_with(&[path_v1, Path::Dv2, Path::Rv2]);
        let result = tampered(&client, &able(2), &mut without_v2_extension());
        assert_eq!((path(&result.client), path(&result.server)), (path_v1, path_v1));
    }
}

fn without_v2_extension() -> impl FnMut(usize, &mut Vec<u8>) -> bool {
    changed(0, |message| {
        let clc::Message::Proposal(proposal) = message else { return };
        let modes = proposal.v2_modes().unwrap();
        let clc::Versions::V2 { v2, .. } = &mut proposal.versions else { return };
        *v2 = clc::V2Offer::Bare(modes);
    })
}

#[test]
fn an_accept_of_what_was_not_offered_is_declined() {
    for offered in PATHS {
        for accepted in PATHS.into_iter().filter(|path| *path != offered) {
            // Another server's Accept in place of this one's.
            let mut other = Vec::new();
            let _ = tampered(&client_with(&[accepted]), &able(2), &mut |n, bytes| {
                if n == 1 {
                    other = bytes.clone();
                }
                true
            });
            let result = tampered(&client_with(&[offered]), &able(2), &mut |n, bytes| {
                if n == 1 {
                    bytes.clone_from(&other);
                }
                true
            });
            // An offer of SMC-Dv1 comes with one of SMC-Dv2 where the server can do it.
            let reason = fallback(&result.client).reason;
            assert_eq!(reason, DeclineCode::MODEUNSUPP, "{accepted:?} for {offered:?}");
            intact(&result);
        }
    }
}

#[test]
fn a_device_that_was_not_offered_is_a_fault() {
    let mut other_chid = changed(1, |message| {
        let clc::Message::Accept(clc::Answer::D(smcd)) = message else { panic!() };
        let clc::SmcdVersion::V2 { chid, .. } = &mut smcd.version else { panic!() };
        *chid = Chid(0x0555);
    });
    let result = tampered(&client_with(&[Path::Dv2]), &able(2), &mut other_chid);
    let fault = Fault::UnknownChid { chid: Chid(0x0555) };
    assert!(matches!(result.client, Outcome::Ended(Ending::Failed(f)) if f == fault));
    assert!(matches!(result.server, Outcome::Ended(Ending::Failed(Fault::Closed))));
}

#[test]
fn an_accept_with_impossible_limits_is_declined() {
    let cases: [Change; 4] = [
        (|first| first.max_conns = 15, DeclineCode::MAXCONNERR),
        (|first| first.max_links = 0, DeclineCode::MAXLINKERR),
        (|first| first.max_links = 3, DeclineCode::MAXLINKERR),
        (|first| (first.max_conns, first.max_links) = (0, 0), DeclineCode::MAXCONNERR),
    ];
    for (change, code) in cases {
        let mut change = changed(1, |message| {
            let clc::Message::Accept(answer) = message else { panic!() };
            change(extension(answer));
        });
        let result = tampered(&client_with(&[Path::Rv2]), &able(2), &mut change);
        assert_eq!(fallback(&result.client).reason, code);
        intact(&result);
    }
}

type Change = (fn(&mut clc::FirstContact), DeclineCode);

fn extension(answer: &mut clc::Answer) -> &mut clc::FirstContact {
    match answer {
        clc::Answer::R(clc::Smcr {
            version: clc::SmcrVersion::V2 { first_contact: Some(first), .. },
            ..
        }) => &mut first.extension,
        clc::Answer::D(clc::Smcd {
            version: clc::SmcdVersion::V2 { first_contact: Some(first), .. },
            ..
        }) => first,
        other => panic!("no extension: {other:?}"),
    }
}

#[test]
fn a_confirm_with_other_terms_is_declined() {
    let cases: [Change; 3] = [
        (|first| first.release = Release::V2_0, DeclineCode::RELEASEERR),
        (|first| first.max_conns -= 1, DeclineCode::MAXCONNERR),
        (|first| first.max_links += 1, DeclineCode::MAXLINKERR),
    ];
    for (change, code) in cases {
        let mut change = changed(2, |message| {
            let clc::Message::Confirm(answer) = message else { panic!() };
            change(extension(answer));
        });
        let result = tampered(&client_with(&[Path::Rv2]), &able(2), &mut change);
        assert_eq!(fallback(&result.server).reason, code);
        // Of SMC-R only: the client still waits for the link, so it hears of it.
        assert_eq!(fallback(&result.client).peer_reason, Some(code));
        intact(&result);
    }
    let mut more_features = changed(2, |message| {
        let clc::Message::Confirm(answer) = message else { panic!() };
        extension(answer).features = FeatureMask(0xffff);
    });
    let result = tampered(&client_with(&[Path::Rv2]), &able(2), &mut more_features);
    let Outcome::Smc(agreement) = result.server else { panic!() };
    assert_eq!(agreement.features, FeatureMask::EMULATED_ISM, "no more than was offered");
}

#[test]
fn both_ends_agree_on_the_gateway_between_them() {
    for (client_direct, server_direct, agreed) in [
        (true, true, Some(true)),
        // The client's gateway is not asked for where the server needs none.
        (false, true, Some(true)),
        (false, false, Some(false)),
        (true, false, None),
    ] {
        for first in [true, false] {
            let (mut client, mut server) = (client_with(&[Path::Rv2]), able(2));
            (client.direct, server.direct) = (client_direct, server_direct);
            (client.has_link_group, server.has_link_group) = (!first, !first);
            let result = handshake(&client, &server);
            match (result.server, agreed) {
                // Nobody speaks of it in a link group that is there.
                (Outcome::Smc(agreement), _) if !first => {
                    assert_eq!(agreement.peer.first_contact(), None);
                }
                (Outcome::Smc(agreement), Some(agreed)) => {
                    assert_eq!(agreement.peer.first_contact().unwrap().direct, agreed);
                }
                (outcome, None) => {
                    let code = fallback(&outcome).peer_reason;
                    assert_eq!(code, Some(DeclineCode::NOINDIRECT));
                }
                (outcome, _) => panic!("{outcome:?}"),
            }
        }
    }
}

/// A weakness of the standard's three messages, the same with kernels: a client of SMC-D is done
/// when it has sent its Confirm, so a server that cannot use the client's memory tells nobody. Its
/// Decline comes where the client no longer reads.
#[test]
fn an_smcd_server_that_declines_after_the_confirm_is_not_heard() {
    let (client, mut server) = (client_with(&[Path::Dv2]), able(2));
    server.no_link = Some(DeclineCode::MEM);
    let result = handshake(&client, &server);
    assert_eq!(path(&result.client), Path::Dv2);
    assert_eq!(fallback(&result.server).reason, DeclineCode::MEM);
    let Ok(clc::Message::Decline(decline)) = clc::Message::parse(&result.left[0]) else { panic!() };
    assert_eq!(decline.code, DeclineCode::MEM);
}

#[test]
fn whatever_happens_to_the_bytes_both_sides_come_to_an_end() {
    let entropy = produce::<Vec<u8>>().with().len(0..=64_usize);
    check!().with_iterations(20_000).with_generator(entropy).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let paths: Vec<Path> = PATHS.into_iter().filter(|_| draw.flag()).collect();
        let (mut client, mut server) = (client_with(&paths), able(2));
        server.chids.truncate(draw.below(3).into());
        (client.has_link_group, server.has_link_group) = (draw.flag(), draw.flag());
        let llc_arrives = draw.flag();
        let step = usize::from(draw.below(4));
        let mut pieces = Draw(entropy);
        let mut touched = false;
        let result = run(
            &client,
            &server,
            Faults {
                clc: behind(|n, bytes| {
                    if n != step {
                        return true;
                    }
                    touched = true;
                    let at = usize::from(draw.u16()) % bytes.len();
                    match draw.below(5) {
                        0 => bytes.truncate(at),
                        1 => bytes[at] ^= 1 << draw.below(8),
                        2 => bytes[at] = draw.u8(),
                        3 => bytes.insert(at, draw.u8()),
                        _ => touched = false,
                    }
                    draw.below(4) > 0
                }),
                llc_arrives: Box::new(move |_| llc_arrives),
                piece: Box::new(|| usize::from(pieces.u8())),
                ..Faults::default()
            },
        );
        assert!(result.took <= Duration::from_secs(20));
        if !touched && let (Outcome::Smc(c), Outcome::Smc(s)) = (&result.client, &result.server) {
            assert_eq!(c.path, s.path);
        }
    });
}

/// A client whose surroundings are not all known offers what can do without.
#[test]
fn a_client_without_vlan_or_prefix_offers_the_rest() {
    let native_alone = |setup: &mut Setup| {
        setup.devices.smcd_v2 = List::new();
        setup.devices.smcr_v1 = None;
    };
    let mut client = client_with(&[Path::Dv2, Path::Dv1, Path::Rv2, Path::Rv1]);
    client.devices.vlan_unknown = true;
    let result = handshake(&client, &able(2));
    assert_eq!(path(&result.server), Path::Dv2);
    // SMC-Dv2 is the only one left, and no EID fits.
    client.host.ueids = List::from_slice(&[Eid::user("OTHER").unwrap()]).unwrap();
    let result = handshake(&client, &able(2));
    assert_eq!(fallback(&result.server).reason, DeclineCode::NOSMCDDEV);
    intact(&result);
    let mut client = client_with(&[Path::Dv1, Path::Rv2, Path::Rv1]);
    client.devices.vlan_unknown = true;
    let result = handshake(&client, &able(2));
    assert_eq!(fallback(&result.client).reason, DeclineCode::GETVLANERR);
    assert_eq!(fallback(&result.server).peer_reason, Some(DeclineCode::GETVLANERR));
    intact(&result);
    // The native device is named by version 2's list, where there is no version 1.
    for (no_prefix, no_vlan) in [(true, false), (false, true)] {
        let mut client = able(1);
        native_alone(&mut client);
        client.devices.prefix = client.devices.prefix.filter(|_| !no_prefix);
        client.devices.vlan_unknown = no_vlan;
        let mut gids = Vec::new();
        let result = tampered(&client, &able(2), &mut |n, bytes| {
            if n == 0 {
                let Ok(clc::Message::Proposal(proposal)) = clc::Message::parse(bytes) else {
                    panic!("no Proposal")
                };
                assert_eq!(proposal.ism().map(|ism| (ism.gid, ism.chid)), Some((0, Chid::NONE)));
                assert_eq!(proposal.v1(), None);
                let smcd = *proposal.v2().unwrap().modes.smcd().unwrap();
                gids = smcd.devices().collect();
            }
            true
        });
        assert_eq!(gids, [(ISM, ISM_CHID)]);
        assert_eq!(path(&result.client), Path::Dv2);
    }
}

#[test]
fn a_proposal_names_as_many_devices_as_it_has_room_for() {
    let device = |n: u64| (SmcdGid { gid: n, ext: 100 + n }, Chid(0xff00 + n as u16));
    let mut client = client_with(&[Path::Dv2]);
    client.devices.smcd_v2 = List::from_slice(&(0..8).map(device).collect::<Vec<_>>()).unwrap();
    let mut server = able(2);
    for (chid, found) in [(0xff03, true), (0xff04, false)] {
        server.chids = vec![Chid(chid)];
        let result = handshake(&client, &server);
        match found {
            true => assert_eq!(path(&result.server), Path::Dv2),
            false => assert_eq!(fallback(&result.server).reason, DeclineCode::NOSMCD2DEV),
        }
    }
}
