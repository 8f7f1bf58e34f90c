//! What an SMC-R engine in user space needs of the handshake: whom a Decline hits, how many links
//! are offered, who a host says it is, and the Proposal in the SYN.

mod support;

use smc_proto::decline::DeclineCode;
use smc_proto::handshake::client::{self, Accepted, AcceptedR, ExpectAccept};
use smc_proto::handshake::server::{Choice, ChoiceR, ExpectConfirm, ExpectProposal};
use smc_proto::handshake::{
    Circumstances, Ending, Fallback, Fault, Finished, Host, Path, SmcrSide,
};
use smc_proto::ids::{BufferSize, MacAddr, MtuCode, PeerId, RoceGid, U24};
use smc_proto::list::List;
use smc_proto::wire::clc::{self, Answer, FirstContact, Local, Message, Proposal, Release};
use support::peers::{Setup, able};

const ID: PeerId = PeerId([0xab, 0xcd, 2, 0xaa, 0xbb, 0xcc, 0xdd, 0xee]);

/// A host whose only device is a RoCEv2 port.
fn host(setup: &Setup) -> Host {
    Host { peer_id: ID, smcd_v2: false, ..setup.host.clone() }
}

fn devices() -> client::Devices {
    client::Devices {
        smcr_v2: Some(RoceGid::from_ipv4([10, 9, 0, 1])),
        smcr_v2_mac: MacAddr([1; 6]),
        ..Default::default()
    }
}

fn side(first_contact: bool) -> SmcrSide {
    SmcrSide {
        local: Local { peer_id: ID, ..Local::default() },
        qpn: U24::truncate(17),
        rkey: 7,
        alert_token: 8,
        size: BufferSize::from_code(2).unwrap(),
        mtu: MtuCode::from_code(3).unwrap(),
        rmb_addr: 0x1000,
        psn: U24::truncate(9),
        direct: true,
        gids: List::new(),
        first_contact,
    }
}

fn propose(host: Host) -> (ExpectAccept, Proposal) {
    let (state, message) = client::begin(host, Circumstances::FINE, &devices()).unwrap();
    let Message::Proposal(proposal) = message else { panic!("{message:?}") };
    (state, proposal)
}

fn choose(host: Host, proposal: Proposal) -> ChoiceR {
    let server = ExpectProposal::begin(host, Circumstances::FINE).unwrap();
    match server.on_message(Message::Proposal(proposal), &able(2)).unwrap() {
        Choice::R(choice) => choice,
        Choice::D(choice) => panic!("{choice:?}"),
    }
}

/// A handshake up to the Accept.
fn accepted(
    client: Host,
    server: Host,
    first_contact: bool,
    single_link: bool,
) -> (AcceptedR, ExpectConfirm) {
    let (state, proposal) = propose(client);
    let mut choice = choose(server, proposal);
    if single_link {
        choice = choice.single_link();
    }
    let (expect_confirm, accept) = choice.accept(&side(first_contact));
    match state.on_message(accept).unwrap() {
        Accepted::R(accepted) => (accepted, expect_confirm),
        Accepted::D(accepted) => panic!("{accepted:?}"),
    }
}

fn fallback(ending: Ending) -> Fallback {
    match ending {
        Ending::Fallback(fallback) => fallback,
        Ending::Failed(fault) => panic!("{fault:?}"),
    }
}

fn bytes(fallback: &Fallback) -> Vec<u8> {
    let mut buffer = [0; clc::MAX_LEN];
    Message::Decline(fallback.decline.unwrap()).emit(&mut buffer).unwrap().to_vec()
}

/// The Decline with the bit ended all connections of whoever had the link group, the one without
/// it none (m0 S4; the first one is the captured one).
#[test]
fn a_link_group_of_somebody_else_is_not_told_to_end() {
    let expected = |kind: u8| {
        let mut expected = vec![0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 44, kind];
        expected.extend(ID.0);
        expected.extend([4, 0, 0, 0, 0x20]);
        expected.resize(40, 0);
        expected.extend([0xe2, 0xd4, 0xc3, 0xd9]);
        expected
    };
    let setup = able(1);
    let next_contact = || accepted(host(&setup), host(&setup), false, false).0;
    let lost = fallback(next_contact().out_of_sync(true));
    assert_eq!((bytes(&lost), lost.out_of_sync), (expected(0x28), true));
    let never_had = [
        fallback(next_contact().out_of_sync(false)),
        fallback(next_contact().confirm(&side(true)).unwrap_err()),
    ];
    for ending in never_had {
        assert_eq!((bytes(&ending), ending.out_of_sync), (expected(0x20), false));
        assert_eq!(ending.reason, DeclineCode::SYNCERR);
    }
}

fn stated(answer: &Answer) -> FirstContact {
    *answer.first_contact().unwrap()
}

#[test]
fn one_link_is_said_and_repeated() {
    for (client_links, server_links, single_link) in
        [(1, 2, false), (2, 1, false), (2, 2, true), (2, 2, false)]
    {
        let links = |setup: &Setup, max_links| Host { max_links, max_conns: 99, ..host(setup) };
        let (client, server) = (links(&able(1), client_links), links(&able(2), server_links));
        assert_eq!(propose(client.clone()).1.v2().unwrap().max_links, client_links);
        let (accepted, expect_confirm) = accepted(client, server, true, single_link);
        let accept = stated(&Answer::R(accepted.answer().clone()));
        let expected = if client_links.min(server_links) == 1 || single_link { 1 } else { 2 };
        assert_eq!((accept.max_links, accept.max_conns), (expected, 99));
        let (finished, message) = accepted.confirm(&side(true)).unwrap();
        let Message::Confirm(confirm) = &message else { panic!("{message:?}") };
        let confirm = stated(confirm);
        assert_eq!((confirm.max_links, confirm.max_conns), (expected, 99));
        let server = expect_confirm.on_message(message).unwrap().finish();
        for side in [finished, server] {
            let Finished::ConfirmingLink(link) = side else { panic!("{side:?}") };
            assert_eq!((link.agreement().max_links, link.agreement().max_conns), (expected, 99));
        }
    }
}

/// With the id 0 a Linux server gives a host the link groups of its own kernel.
#[test]
fn a_host_says_who_it_is_or_has_no_smcr() {
    let (_, proposal) = propose(host(&able(1)));
    let gid = RoceGid::from_ipv4([10, 9, 0, 1]);
    assert_eq!(proposal.local, Local { peer_id: ID, gid, mac: MacAddr([1; 6]) });
    let nobody = Host { peer_id: PeerId::NONE, ..host(&able(1)) };
    let ending = client::begin(nobody.clone(), Circumstances::FINE, &devices()).unwrap_err();
    assert_eq!(fallback(ending).reason, DeclineCode::NOSMCDEV);
    let v1 = client::Devices { smcr_v1: Some(Local::default()), ..able(1).devices };
    let v1 = client::Devices { smcd_v1: None, smcd_v2: List::new(), ..v1 };
    let ending = client::begin(nobody.clone(), Circumstances::FINE, &v1).unwrap_err();
    assert_eq!(fallback(ending).reason, DeclineCode::NOSMCDEV);
    let server = ExpectProposal::begin(nobody, Circumstances::FINE).unwrap();
    let ending = server.on_message(Message::Proposal(proposal.clone()), &able(2)).unwrap_err();
    assert_eq!(fallback(ending).reason, DeclineCode::NOSMCRDEV);
    // A client without one is served: Linux sends it so.
    let kernel = Proposal { local: Local::default(), ..proposal };
    assert!(choose(host(&able(2)), kernel).peer().peer_id.is_none());
}

#[test]
fn a_proposal_in_the_syn_is_the_same_and_ends_well_only_with_smc() {
    let (_, ordinary) = propose(host(&able(1)));
    let begin = || client::begin_in_syn(host(&able(1)), false, &devices()).unwrap();
    let (state, message) = begin();
    assert_eq!(message, Message::Proposal(ordinary.clone()));
    let expect_accept = state.on_syn_ack(true).unwrap();
    // The server's Fast Open is its listener's; its application knows of none.
    let (_, accept) = choose(host(&able(2)), ordinary).accept(&side(true));
    assert!(matches!(expect_accept.on_message(accept), Ok(Accepted::R(_))));
    let ending = begin().0.on_syn_ack(false).unwrap_err();
    assert_eq!(ending, Ending::Failed(Fault::ProposedToPlain));
}

/// The Proposal of an end in user space that a kernel accepted (capture addlink of m0).
#[test]
fn the_proposal_is_one_that_a_kernel_has_accepted() {
    let peer_id = PeerId([0xb3, 0x56, 2, 0xbb, 0x87, 0x43, 0x8f, 0x3b]);
    let host = Host { peer_id, features: clc::FeatureMask(0), ..host(&able(1)) };
    let mac = MacAddr([0x52, 0x54, 0, 0, 0, 1]);
    let devices = client::Devices { smcr_v2_mac: mac, ..devices() };
    let gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1];
    let mut expected = vec![0xe2, 0xd4, 0xc3, 0xd9, 1, 0, 156, 0x22];
    expected.extend(peer_id.0);
    expected.extend(gid);
    expected.extend(mac.0);
    expected.resize(50, 0);
    expected.extend([0, 28]);
    expected.resize(80, 0);
    expected.extend([1, 0, 0, 0x10, 0, 0, 0, 0]);
    expected.extend(gid);
    expected.extend([255, 2, 0, 0]);
    expected.resize(120, 0);
    expected.extend(b"TESTEID                         ");
    expected.extend([0xe2, 0xd4, 0xc3, 0xd9]);
    let (_, message) = client::begin(host, Circumstances::FINE, &devices).unwrap();
    let mut buffer = [0; clc::MAX_LEN];
    assert_eq!(message.emit(&mut buffer).unwrap(), expected);
}

/// Nothing is said to a peer that has not said that it speaks SMC, no Decline either.
#[test]
fn without_an_offer_nothing_travels_with_the_syn() {
    let nothing = client::Devices::default();
    assert!(client::begin_in_syn(host(&able(1)), false, &nothing).is_none());
    assert!(client::begin_in_syn(host(&able(1)), true, &devices()).is_none());
}

/// The application's own Fast Open: its bytes stand where CLC would.
#[test]
fn fast_open_of_the_application_stays_tcp() {
    let circumstances = Circumstances { fast_open: true, ..Circumstances::FINE };
    let endings = [
        client::begin(host(&able(1)), circumstances, &devices()).map(drop).unwrap_err(),
        ExpectProposal::begin(host(&able(2)), circumstances).map(drop).unwrap_err(),
    ];
    for ending in endings {
        let ending = fallback(ending);
        assert_eq!((ending.reason, ending.decline), (DeclineCode::OPTUNSUPP, None));
    }
}

/// A peer of release 0 has no field for the number of links.
#[test]
fn a_single_link_holds_here_though_release_0_cannot_say_it() {
    let old = Host { release: Release::V2_0, ..host(&able(1)) };
    let (accepted, expect_confirm) = accepted(old, host(&able(2)), true, true);
    assert_eq!(stated(&Answer::R(accepted.answer().clone())).max_links, 0);
    let (_, confirm) = accepted.confirm(&side(true)).unwrap();
    let Finished::ConfirmingLink(link) = expect_confirm.on_message(confirm).unwrap().finish()
    else {
        panic!()
    };
    assert_eq!(link.agreement().max_links, 1);
    // Nor has version 1.
    let mut setup = able(1);
    (setup.devices.smcr_v2, setup.devices.smcd_v1) = (None, None);
    setup.devices.smcd_v2 = List::new();
    let (_, proposal) = client::begin(setup.host, Circumstances::FINE, &setup.devices).unwrap();
    let Message::Proposal(proposal) = proposal else { panic!("{proposal:?}") };
    let choice = choose(host(&able(2)), proposal).single_link();
    assert_eq!(choice.path(), Path::Rv1);
    let (expect_confirm, accept) = choice.accept(&side(true));
    let Message::Accept(confirm) = accept else { panic!("{accept:?}") };
    let confirmed = expect_confirm.on_message(Message::Confirm(confirm)).unwrap();
    assert_eq!(confirmed.agreement().max_links, 1);
}
