//! One case of the matrix, and the two peers that it stands for.

use smc_proto::decline::DeclineCode;
use smc_proto::ids::{Chid, Eid};
use smc_proto::list::List;
use smc_proto::wire::clc::{Proposal, Release, V2Offer, Versions};

use crate::support::peers::{ISM_CHID, Setup, able};

/// What a host speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// RFC 7609, with SMC-Dv1: another make's, as this crate always speaks version 2 as well.
    V1,
    /// SMC v2, release 0.
    V2_0,
    /// SMC v2.1.
    V2_1,
}

pub const VERSIONS: [Version; 3] = [Version::V1, Version::V2_0, Version::V2_1];

/// A device of a host: a bit of [`Side::devices`].
pub const NATIVE_ISM: u8 = 1;
pub const EMULATED_ISM: u8 = 2;
pub const ROCE_V1: u8 = 4;
pub const ROCE_V2: u8 = 8;
/// All sets of devices.
pub const DEVICES: std::ops::Range<u8> = 0..16;

/// The EIDs of a host.
#[derive(Clone, Copy, Debug)]
pub struct Eids {
    pub ueids: &'static [&'static str],
    /// The system's own, where it is enabled.
    pub seid: Option<&'static str>,
}

impl Eids {
    pub fn are_none(&self) -> bool {
        self.ueids.is_empty() && self.seid.is_none()
    }
}

const fn eids(ueids: &'static [&'static str], seid: Option<&'static str>) -> Eids {
    Eids { ueids, seid }
}

/// The sets that hosts have, four UEIDs at most.
pub const EIDS: [Eids; 7] = [
    eids(&[], None),
    eids(&["A"], None),
    eids(&["B", "A"], None),
    eids(&["C", "D", "E", "B"], None),
    eids(&[], Some("S")),
    eids(&["A"], Some("S")),
    eids(&["B"], Some("T")),
];

/// What another make may send: eight.
pub const EIGHT: Eids = eids(&["C", "D", "E", "F", "G", "H", "B", "A"], None);

/// One end.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    pub version: Version,
    pub devices: u8,
    pub eids: Eids,
    /// Whether it has seen the other's TCP option.
    pub option: bool,
}

/// Who has a link group with the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contact {
    /// Nobody: the first contact.
    First,
    /// Both: the group is used again.
    Next,
    /// The client only: the server begins a new one.
    ServerForgot,
    /// The server only: out of sync.
    ClientForgot,
}

pub const CONTACTS: [Contact; 4] =
    [Contact::First, Contact::Next, Contact::ServerForgot, Contact::ClientForgot];

/// Who declines for a reason of its own, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    Nobody,
    /// The client, before it proposes: IPsec.
    Client,
    /// The server, on the Proposal: IPsec.
    Server,
    /// The server, for every choice that it could make.
    EveryChoice(DeclineCode),
    /// The client, on the Accept.
    OnAccept(DeclineCode),
    /// The server, on the Confirm.
    OnConfirm(DeclineCode),
    /// The client, on the server's CONFIRM_LINK.
    OnLink(DeclineCode),
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub client: Side,
    pub server: Side,
    pub contact: Contact,
    pub refusal: Refusal,
    pub same_subnet: bool,
}

impl Side {
    pub fn has(&self, device: u8) -> bool {
        self.devices & device != 0
    }

    pub fn speaks_v2(&self) -> bool {
        self.version != Version::V1
    }

    /// Of version 2 and with an ISM device, as the kernel counts it.
    pub fn speaks_smcd_v2(&self) -> bool {
        self.speaks_v2() && self.has(NATIVE_ISM | EMULATED_ISM)
    }

    fn setup(&self, id: u8) -> Setup {
        let mut setup = able(id);
        setup.circumstances.peer_says_smc = self.option;
        let host = &mut setup.host;
        host.smcd_v2 = self.speaks_smcd_v2();
        host.release = if self.version == Version::V2_1 { Release::V2_1 } else { Release::V2_0 };
        host.ueids = List::new();
        host.seid = None;
        if self.speaks_v2() {
            let configured = self.eids.ueids.iter().take(Eid::MAX_CONFIGURED);
            configured.for_each(|ueid| host.ueids.push(eid(ueid)).unwrap());
            host.seid = self.eids.seid.map(eid);
        }
        setup
    }
}

impl Case {
    /// The two peers.
    pub fn setups(&self) -> [Setup; 2] {
        let mut client = self.client.setup(1);
        let devices = &mut client.devices;
        let has = |device| self.client.has(device);
        devices.smcr_v1 = devices.smcr_v1.filter(|_| has(ROCE_V1));
        devices.smcd_v1 = devices.smcd_v1.filter(|_| has(NATIVE_ISM));
        devices.smcr_v2 = devices.smcr_v2.filter(|_| has(ROCE_V2));
        if !has(EMULATED_ISM) {
            devices.smcd_v2 = List::new();
        }
        client.has_link_group = matches!(self.contact, Contact::Next | Contact::ServerForgot);
        client.lost_link_group = self.contact == Contact::ClientForgot;
        client.proposes = match self.client.eids.ueids.len() {
            _ if self.client.version == Version::V1 => Some(as_rfc_7609),
            0..=4 => None,
            _ => Some(with_eight_eids),
        };

        let mut server = self.server.setup(2);
        let has = |device| self.server.has(device);
        let v2 = self.server.speaks_v2();
        use smc_proto::handshake::Path::{Dv1, Dv2, Rv1, Rv2};
        let paths = [
            (Dv1, has(NATIVE_ISM)),
            (Dv2, self.server.speaks_smcd_v2()),
            (Rv1, has(ROCE_V1)),
            (Rv2, v2 && has(ROCE_V2)),
        ];
        server.paths = paths.into_iter().filter(|(_, has)| *has).map(|(path, _)| path).collect();
        let chids = [(ISM_CHID, has(NATIVE_ISM)), (Chid::LOOPBACK, has(EMULATED_ISM))];
        server.chids = chids.into_iter().filter(|(_, has)| *has).map(|(chid, _)| chid).collect();
        server.has_link_group = matches!(self.contact, Contact::Next | Contact::ClientForgot);
        server.same_subnet = self.same_subnet;
        if !v2 {
            server.understands = Some(as_read_by_rfc_7609);
        }
        match self.refusal {
            Refusal::Nobody => {}
            Refusal::Client => client.circumstances.ipsec = true,
            Refusal::Server => server.circumstances.ipsec = true,
            Refusal::EveryChoice(code) => server.no_memory = Some(code),
            Refusal::OnAccept(code) => client.no_memory = Some(code),
            Refusal::OnConfirm(code) => server.no_link = Some(code),
            Refusal::OnLink(code) => client.no_link = Some(code),
        }
        [client, server]
    }
}

pub fn eid(text: &str) -> Eid {
    Eid::user(text).unwrap()
}

/// A Proposal as a client of RFC 7609 makes it.
fn as_rfc_7609(proposal: &mut Proposal) {
    let v1 = *proposal.v1().expect("nothing else is offered");
    let ism = proposal.ism().copied().filter(|_| v1.modes.smcd());
    proposal.versions = Versions::V1 { v1, ism };
}

/// A Proposal as a server of RFC 7609 understands it; not at all, if version 1 is not offered.
fn as_read_by_rfc_7609(proposal: &mut Proposal) -> bool {
    let offers = proposal.v1().is_some();
    if offers {
        as_rfc_7609(proposal);
    }
    offers
}

fn with_eight_eids(proposal: &mut Proposal) {
    let Versions::V2 { v2: V2Offer::Whole(v2), .. } = &mut proposal.versions else { return };
    v2.eids = List::new();
    EIGHT.ueids.iter().for_each(|ueid| v2.eids.push(eid(ueid)).unwrap());
}

/// The device that a CHID of an Accept has to stand for.
pub fn chid_of(device: u8) -> Chid {
    if device == NATIVE_ISM { ISM_CHID } else { Chid::LOOPBACK }
}
