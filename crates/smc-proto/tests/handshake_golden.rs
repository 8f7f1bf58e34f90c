//! The handshakes of the captures again: from the same facts, this crate makes the messages that
//! the kernel made.

mod support;

use smc_proto::decline::DeclineCode;
use smc_proto::handshake::client::{self, Accepted};
use smc_proto::handshake::server::{Choice, ExpectProposal, Surroundings};
use smc_proto::handshake::{
    Agreement, Circumstances, Ending, Finished, Host, Path, SmcdSide, SmcrSide,
};
use smc_proto::ids::{Chid, Eid, PeerId, SmcdGid};
use smc_proto::list::List;
use smc_proto::wire::clc::{
    Answer, Hostname, Local, Message, Modes, Prefix, Proposal, Release, SmcdVersion, SmcrVersion,
};
use support::{Frame, captures, frames};

#[test]
fn handshakes_of_the_kernel_are_reproduced_message_by_message() {
    let mut reproduced = 0;
    for path in captures() {
        let messages: Vec<Message> = frames(&path)
            .iter()
            .filter_map(|frame| match frame {
                Frame::Clc(bytes) => Some(Message::parse(bytes).unwrap()),
                _ => None,
            })
            .collect();
        for exchange in messages.windows(3) {
            if let [Message::Proposal(p), Message::Accept(a), Message::Confirm(c)] = exchange {
                reproduce(p, a, c);
                reproduced += 1;
            }
        }
    }
    assert_eq!(reproduced, 15);
}

fn reproduce(proposal: &Proposal, accept: &Answer, confirm: &Answer) {
    let client_host = host(proposal, confirm);
    let (expect_accept, sent) =
        client::begin(client_host, Circumstances::FINE, &devices(proposal)).unwrap();
    let mut expected = proposal.clone();
    if proposal.v1().is_none() && proposal.v2_modes().is_some_and(Modes::smcr) {
        // The one thing that is done otherwise here: the kernel does not say who it is.
        assert_eq!(proposal.local, Local::default());
        let gid = proposal.v2().unwrap().gid;
        expected.local = Local { peer_id: NAMELESS, gid, ..Local::default() };
    }
    assert_eq!(sent, Message::Proposal(expected));

    // The kernel's server has a feature mask of its own and at least the client's limits.
    let server_host = host(proposal, accept);
    let expect_proposal = ExpectProposal::begin(server_host, Circumstances::FINE).unwrap();
    let mut choice = expect_proposal.on_message(sent, &Everything).unwrap();
    // As the kernel found no device for what it passed over.
    while path_of(&choice) != Path::of(accept) {
        choice = match choice {
            Choice::D(choice) => choice.reject(DeclineCode::NOSMCDDEV).unwrap(),
            Choice::R(choice) => choice.reject(DeclineCode::NOSMCRDEV).unwrap(),
        };
    }
    let (expect_confirm, sent) = match choice {
        Choice::D(choice) => choice.accept(&smcd_side(accept)),
        Choice::R(choice) => choice.accept(&smcr_side(accept)),
    };
    assert_eq!(sent, Message::Accept(accept.clone()));

    let (client_agreement, sent) = match expect_accept.on_message(sent).unwrap() {
        Accepted::D(accepted) => accepted.confirm(&smcd_side(confirm)).unwrap(),
        Accepted::R(accepted) => {
            let (finished, sent) = accepted.confirm(&smcr_side(confirm)).unwrap();
            (agreement(&finished).clone(), sent)
        }
    };
    assert_eq!(sent, Message::Confirm(confirm.clone()));

    let finished = expect_confirm.on_message(sent).unwrap().finish();
    let server_agreement = agreement(&finished);
    let expected = Agreement { peer: confirm.clone(), ..client_agreement };
    if expected.first_contact {
        assert_eq!(*server_agreement, expected);
    }
}

fn path_of(choice: &Choice) -> Path {
    match choice {
        Choice::D(choice) => choice.path(),
        Choice::R(choice) => choice.path(),
    }
}

fn agreement(finished: &Finished) -> &Agreement {
    match finished {
        Finished::Established(agreement) => agreement,
        Finished::ConfirmingLink(confirming) => confirming.agreement(),
    }
}

/// Reaches every device, is in every subnet.
struct Everything;

impl Surroundings for Everything {
    fn reaches(&self, _: SmcdGid, _: Chid) -> bool {
        true
    }

    fn same_subnet(&self, _: &Prefix) -> bool {
        true
    }

    fn vlan_is_known(&self) -> bool {
        true
    }
}

/// The id of a host that sends none.
const NAMELESS: PeerId = PeerId([0xee; 8]);

/// A host that is like the client of this Proposal, or its peer of the same kind.
fn host(proposal: &Proposal, answer: &Answer) -> Host {
    let v2 = proposal.v2();
    let features = v2.map(|v2| v2.features).unwrap_or_default();
    Host {
        peer_id: if proposal.local.peer_id.is_none() { NAMELESS } else { proposal.local.peer_id },
        hostname: answer.first_contact().map_or(Hostname::new("(none)"), |first| first.hostname),
        release: v2.map_or(Release::V2_1, |v2| v2.release),
        features,
        max_conns: v2.map_or(255, |v2| if v2.max_conns == 0 { 255 } else { v2.max_conns }),
        max_links: v2.map_or(2, |v2| if v2.max_links == 0 { 2 } else { v2.max_links }),
        ueids: v2.map_or(List::new(), |v2| List::from_slice(&v2.eids).unwrap()),
        seid: None,
        smcd_v2: v2.is_some_and(|v2| v2.modes.modes().smcd()),
    }
}

fn devices(proposal: &Proposal) -> client::Devices {
    let mut devices = client::Devices::default();
    if let Some(v1) = proposal.v1() {
        devices.prefix = Some(v1.prefix);
        devices.smcr_v1 = v1.modes.smcr().then_some(proposal.local);
    }
    if let Some(v2) = proposal.v2() {
        devices.smcr_v2 = v2.modes.modes().smcr().then_some(v2.gid);
        for device in v2.modes.smcd().into_iter().flat_map(|smcd| smcd.devices()) {
            devices.smcd_v2.push(device).unwrap();
        }
    }
    devices
}

fn smcd_side(answer: &Answer) -> SmcdSide {
    let Answer::D(smcd) = answer else { panic!("{answer:?}") };
    let ext = match smcd.version {
        SmcdVersion::V1 { .. } => 0,
        SmcdVersion::V2 { gid_ext, .. } => gid_ext,
    };
    SmcdSide {
        gid: SmcdGid { gid: smcd.gid, ext },
        token: smcd.token,
        size: smcd.size,
        link_id: smcd.link_id,
        first_contact: answer.is_first_contact(),
    }
}

fn smcr_side(answer: &Answer) -> SmcrSide {
    let Answer::R(smcr) = answer else { panic!("{answer:?}") };
    let (direct, gids) = match &smcr.version {
        SmcrVersion::V2 { first_contact: Some(first), .. } => (first.extension.direct, first.gids),
        _ => (false, List::new()),
    };
    SmcrSide {
        local: smcr.local,
        qpn: smcr.qpn,
        rkey: smcr.rkey,
        alert_token: smcr.alert_token,
        size: smcr.size,
        mtu: smcr.mtu,
        rmb_addr: smcr.rmb_addr,
        psn: smcr.psn,
        direct,
        gids,
        first_contact: answer.is_first_contact(),
    }
}

fn bare_host(peer_id: [u8; 8]) -> Host {
    Host {
        peer_id: PeerId(peer_id),
        hostname: Hostname::new("(none)"),
        release: Release::V2_1,
        features: Default::default(),
        max_conns: 255,
        max_links: 2,
        ueids: List::new(),
        seid: None,
        smcd_v2: false,
    }
}

fn sent(ending: Ending) -> Vec<u8> {
    let Ending::Fallback(fallback) = ending else { panic!("{ending:?}") };
    let mut buffer = [0; 652];
    Message::Decline(fallback.decline.unwrap()).emit(&mut buffer).unwrap().to_vec()
}

fn captured(name: &str) -> Vec<Vec<u8>> {
    let path = captures().into_iter().find(|path| path.ends_with(name)).unwrap();
    let clc = |frame| match frame {
        Frame::Clc(bytes) => Some(bytes),
        _ => None,
    };
    frames(&path).into_iter().filter_map(clc).collect()
}

#[test]
fn a_client_without_ueid_declines_as_the_kernel_does() {
    let expected = &captured("decline-client-no-ueid.pcap")[0];
    // Its only device is RoCEv2, which needs a UEID.
    let devices = client::Devices { smcr_v2: Some(Default::default()), ..Default::default() };
    let host = bare_host([0x10, 0x10, 0xe6, 0x52, 0x54, 0, 0, 0]);
    let peer_id: [u8; 8] = expected[8..16].try_into().unwrap();
    let host = Host { peer_id: PeerId(peer_id), ..host };
    let ending = client::begin(host, Circumstances::FINE, &devices).unwrap_err();
    assert_eq!(sent(ending), *expected);
}

#[test]
fn a_server_with_another_ueid_declines_as_the_kernel_does() {
    let messages = captured("decline-server-ueid-differs.pcap");
    let (proposal, expected) = (&messages[0], &messages[1]);
    let mut host = bare_host(expected[8..16].try_into().unwrap());
    host.ueids.push(Eid::user("TESTEID").unwrap()).unwrap();
    let server = ExpectProposal::begin(host, Circumstances::FINE).unwrap();
    let proposal = Message::parse(proposal).unwrap();
    assert_eq!(sent(server.on_message(proposal, &Everything).unwrap_err()), *expected);
}

#[test]
fn nothing_is_said_to_a_peer_that_does_not_speak_smc() {
    let plain = Circumstances { peer_says_smc: false, ..Circumstances::FINE };
    let devices = client::Devices { smcr_v1: Some(Local::default()), ..Default::default() };
    let endings = [
        client::begin(bare_host([0; 8]), plain, &devices).map(|_| ()).unwrap_err(),
        ExpectProposal::begin(bare_host([0; 8]), plain).map(|_| ()).unwrap_err(),
    ];
    for ending in endings {
        let Ending::Fallback(fallback) = ending else { panic!("{ending:?}") };
        assert_eq!((fallback.reason, fallback.decline), (DeclineCode::PEERNOSMC, None));
    }
}
