//! The client's side of the handshake: it offers, the server chooses.

use core::time::Duration;

use super::{
    Agreement, CLC_TIMEOUT, Circumstances, ConfirmingLink, Decliner, Ending, Fallback, Fault,
    Finished, Host, MAX_LINKS, MIN_CONNS, Path, SmcdSide, SmcrSide, Terms,
};
use crate::decline::DeclineCode;
use crate::ids::{Chid, MacAddr, RoceGid, SmcdGid};
use crate::list::List;
use crate::wire::clc::{
    Answer, Error, FeatureMask, FirstContact, GidChid, Hostname, Ism, Kind, Local, Message, Modes,
    Prefix, Proposal, Release, Smcd, SmcdV2, SmcdVersion, Smcr, SmcrVersion, V1, V2,
    V2FirstContact, V2Modes, V2Offer, Versions,
};

/// The devices that a client has for a connection.
#[derive(Clone, Default, Debug)]
pub struct Devices {
    /// The RoCE port for SMC-Rv1.
    pub smcr_v1: Option<Local>,
    /// The ISM device for SMC-Dv1 (and for v2 as well): one with the interface's pnet id.
    pub smcd_v1: Option<(u64, Chid)>,
    /// The subnets of the interface; without them there is no version 1.
    pub prefix: Option<Prefix>,
    /// The RoCEv2 port for SMC-Rv2. Only over IPv4, and only with a UEID.
    pub smcr_v2: Option<RoceGid>,
    /// Its MAC, which nobody but an administrator reads.
    pub smcr_v2_mac: MacAddr,
    /// Further ISM devices for SMC-Dv2, with different CHIDs, as many as a Proposal has room for.
    pub smcd_v2: List<(SmcdGid, Chid), 8>,
    /// The VLAN of the interface could not be found out: nothing but SMC-Dv2 does without.
    pub vlan_unknown: bool,
}

impl Devices {
    /// What may be used of them: some need the VLAN, SMC-R an id of the host, SMC-Rv2 a UEID, SMC-Dv2
    /// a host that speaks it.
    fn usable(&self, host: &Host) -> Devices {
        let vlan = !self.vlan_unknown;
        let smcd_v1 = self.smcd_v1.filter(|_| vlan);
        // The native device has no area of its own in a Proposal without version 1. (The kernel
        // leaves it there, and takes it for malformed where it has to read it.)
        let moved = self.smcd_v1.filter(|_| smcd_v1.is_none() || self.prefix.is_none());
        let moved = moved.filter(|(_, chid)| *chid != Chid::NONE);
        let moved = moved.map(|(gid, chid)| (SmcdGid { gid, ext: 0 }, chid));
        let mut smcd_v2 = List::new();
        for device in moved.iter().chain(self.smcd_v2.iter()).filter(|_| host.smcd_v2) {
            let _ = smcd_v2.push(*device);
        }
        Devices {
            smcr_v1: self.smcr_v1.filter(|_| vlan && !host.peer_id.is_none()),
            smcd_v1,
            smcr_v2: self
                .smcr_v2
                .filter(|_| vlan && !host.peer_id.is_none() && !host.ueids.is_empty()),
            smcd_v2,
            ..*self
        }
    }
}

/// Begins a handshake: what to send, and the state that waits for the answer.
pub fn begin(
    host: Host,
    circumstances: Circumstances,
    devices: &Devices,
) -> Result<(ExpectAccept, Message), Ending> {
    if circumstances.fast_open {
        return Err(Fallback::silent(DeclineCode::OPTUNSUPP));
    }
    if !circumstances.peer_says_smc {
        return Err(Fallback::silent(DeclineCode::PEERNOSMC));
    }
    offer(host, circumstances.ipsec, devices)
}

/// Begins a handshake whose Proposal travels with the SYN (TCP Fast Open), which saves one round
/// trip: for a peer that is configured so, before it has said whether it speaks SMC. None: there is
/// nothing to offer; the caller connects without Fast Open, and [`begin`] gives the reason.
///
/// The caller has to know that the Proposal goes out: with TCP_FASTOPEN_CONNECT and without a cookie
/// the connection is made first, and [`begin`] is the right one. A server that takes no part in Fast
/// Open gets the Proposal behind the SYN-ACK, without another question.
pub fn begin_in_syn(host: Host, ipsec: bool, devices: &Devices) -> Option<(InSyn, Message)> {
    let (then, proposal) = offer(host, ipsec, devices).ok()?;
    Some((InSyn { then }, proposal))
}

/// Waits for the SYN-ACK, which says whether the peer, to which the Proposal is on its way, speaks
/// SMC.
#[derive(Debug)]
pub struct InSyn {
    then: ExpectAccept,
}

impl InSyn {
    /// The SYN-ACK came. A peer that does not speak SMC may have read the Proposal as data: the
    /// connection has failed.
    pub fn on_syn_ack(self, peer_says_smc: bool) -> Result<ExpectAccept, Ending> {
        match peer_says_smc {
            true => Ok(self.then),
            false => Err(Ending::Failed(Fault::ProposedToPlain)),
        }
    }
}

/// What a client offers to a peer that is taken for one of SMC.
fn offer(host: Host, ipsec: bool, devices: &Devices) -> Result<(ExpectAccept, Message), Ending> {
    let decliner = Decliner { peer_id: host.peer_id, as_v1: !host.smcd_v2 };
    if ipsec {
        return Err(decliner.decline(DeclineCode::IPSEC));
    }
    if devices.vlan_unknown && !host.smcd_v2 {
        return Err(decliner.decline(DeclineCode::GETVLANERR));
    }
    let devices = &devices.usable(&host);
    let v1_modes = Modes::of(devices.smcr_v1.is_some(), devices.smcd_v1.is_some());
    let v2 = v2_offer(&host, devices);
    if v1_modes.is_none() && v2.is_none() {
        return Err(decliner.decline(DeclineCode::NOSMCDEV));
    }
    let v1 = match (v1_modes, devices.prefix) {
        (Some(modes), Some(prefix)) => Some(V1 { modes, prefix }),
        (Some(_), None) if v2.is_none() => return Err(decliner.decline(DeclineCode::CNFERR)),
        _ => None,
    };
    let has =
        |smcr: bool| v1.is_some_and(|v1| if smcr { v1.modes.smcr() } else { v1.modes.smcd() });
    // Linux leaves this zero in a Proposal without version 1, and so all its link groups with hosts
    // behind one GID are one to a server. Here the host always names itself.
    let local_v2 =
        devices.smcr_v2.map(|gid| Local { peer_id: host.peer_id, gid, mac: devices.smcr_v2_mac });
    let proposal = Proposal {
        local: devices.smcr_v1.filter(|_| has(true)).or(local_v2).unwrap_or_default(),
        versions: Versions::V2 {
            ism: match devices.smcd_v1.filter(|_| has(false)) {
                Some((gid, chid)) => Ism { gid, chid, ..Ism::default() },
                None => Ism::default(),
            },
            v1,
            v2: v2.map_or(V2Offer::None, V2Offer::Whole),
        },
    };
    let state = ExpectAccept {
        decliner,
        v1: proposal.v1().map(|v1| v1.modes),
        v2: proposal.v2_modes(),
        chids: chids(&proposal),
        hostname: host.hostname,
        features: host.features,
    };
    Ok((state, Message::Proposal(proposal)))
}

/// The offer of version 2 that these usable devices allow.
fn v2_offer(host: &Host, devices: &Devices) -> Option<V2> {
    let smcr = devices.smcr_v2;
    let native = devices.smcd_v1.is_some_and(|(_, chid)| chid != Chid::NONE);
    let smcd = host.smcd_v2 && (native || !devices.smcd_v2.is_empty());
    let modes = Modes::of(smcr.is_some(), smcd)?;
    let mut extension =
        SmcdV2 { seid: host.seid.unwrap_or_default(), gids: List::<GidChid, 8>::new() };
    for &(gid, chid) in devices.smcd_v2.iter() {
        extension.push_device(gid, chid);
    }
    let v2_1 = host.release >= Release::V2_1;
    Some(V2 {
        modes: match modes {
            Modes::R => V2Modes::R,
            Modes::D => V2Modes::D(Some(extension)),
            Modes::Both => V2Modes::Both(Some(extension)),
        },
        seid: smcd && host.seid.is_some(),
        release: host.release,
        gid: smcr.unwrap_or_default(),
        max_conns: if v2_1 && smcr.is_some() { host.max_conns } else { 0 },
        max_links: if v2_1 && smcr.is_some() { host.max_links } else { 0 },
        features: if v2_1 { host.features } else { Default::default() },
        eids: List::from_slice(&host.ueids).unwrap_or_default(),
    })
}

/// Waits for the server's answer to the Proposal. It keeps of the Proposal what an answer is checked
/// against, so that a caller can have many of them.
#[derive(Debug)]
pub struct ExpectAccept {
    decliner: Decliner,
    /// The modes that were offered.
    v1: Option<Modes>,
    v2: Option<Modes>,
    /// The ISM devices that were offered.
    chids: List<Chid, 9>,
    hostname: Hostname,
    features: FeatureMask,
}

/// The server accepted; now this side needs memory.
#[derive(Debug)]
pub enum Accepted {
    /// A DMB.
    D(AcceptedD),
    /// An RMB, and a link if the link group is new.
    R(AcceptedR),
}

/// The server accepted SMC-D.
#[derive(Debug)]
pub struct AcceptedD {
    common: Common,
    answer: Smcd,
}

/// The server accepted SMC-R.
#[derive(Debug)]
pub struct AcceptedR {
    common: Common,
    answer: Smcr,
}

#[derive(Debug)]
struct Common {
    hostname: Hostname,
    decliner: Decliner,
    path: Path,
    terms: Terms,
    /// The server begins a new link group.
    first_contact: bool,
}

impl ExpectAccept {
    /// How long to wait.
    pub const TIMEOUT: Duration = CLC_TIMEOUT;

    /// No answer in time.
    pub fn on_timeout(self) -> Ending {
        Ending::Failed(Fault::TimedOut)
    }

    /// Nobody waits for the server any more. One that answers all the same finds the Decline.
    pub fn decline(self, code: DeclineCode) -> Ending {
        self.decliner.decline(code)
    }

    /// The server closed the connection.
    pub fn on_closed(self) -> Ending {
        Ending::Failed(Fault::Closed)
    }

    /// What came is no CLC message.
    pub fn on_malformed(self, error: Error) -> Ending {
        error.into()
    }

    /// The server's message.
    pub fn on_message(mut self, message: Message) -> Result<Accepted, Ending> {
        let Message::Accept(answer) = message else {
            return Err(self.decliner.unexpected(&message, Kind::Accept));
        };
        let path = Path::of(&answer);
        self.decliner.as_v1 = path.is_v1();
        if !self.offered(path) {
            return Err(self.decliner.decline(DeclineCode::MODEUNSUPP));
        }
        let terms = match answer.first_contact() {
            None => Terms::DEFAULT,
            Some(extension) => check_terms(self.features, path, extension)
                .map_err(|code| self.decliner.decline(code))?,
        };
        let first_contact = answer.is_first_contact();
        let ExpectAccept { hostname, decliner, .. } = self;
        let common = Common { hostname, decliner, path, terms, first_contact };
        match answer {
            Answer::R(answer) => Ok(Accepted::R(AcceptedR { common, answer })),
            Answer::D(answer) => {
                if let SmcdVersion::V2 { chid, .. } = answer.version
                    && !self.chids.contains(&chid)
                {
                    return Err(Ending::Failed(Fault::UnknownChid { chid }));
                }
                Ok(Accepted::D(AcceptedD { common, answer }))
            }
        }
    }

    fn offered(&self, path: Path) -> bool {
        let modes = if path.is_v1() { self.v1 } else { self.v2 };
        modes.is_some_and(if path.is_smcr() { Modes::smcr } else { Modes::smcd })
    }
}

/// The terms that a server states, if they are acceptable (`smc_clc_clnt_v2x_features_validate`).
fn check_terms(own: FeatureMask, path: Path, stated: &FirstContact) -> Result<Terms, DeclineCode> {
    let mut terms = Terms { release: stated.release, ..Terms::DEFAULT };
    if stated.release < Release::V2_1 {
        return Ok(terms);
    }
    if path.is_smcr() {
        if stated.max_conns < MIN_CONNS {
            return Err(DeclineCode::MAXCONNERR);
        }
        if !(1..=MAX_LINKS).contains(&stated.max_links) {
            return Err(DeclineCode::MAXLINKERR);
        }
        (terms.max_conns, terms.max_links) = (stated.max_conns, stated.max_links);
    }
    terms.features = stated.features.and(own);
    Ok(terms)
}

/// The CHIDs of a Proposal: of the native device, then those of the extension.
fn chids(proposal: &Proposal) -> List<Chid, 9> {
    let native = proposal.ism().map(|ism| ism.chid).filter(|chid| *chid != Chid::NONE);
    let extension = proposal.v2().and_then(|v2| v2.modes.smcd());
    let further = extension.iter().flat_map(|smcd| smcd.gids.iter()).map(|entry| entry.chid);
    let mut chids = List::new();
    for chid in native.into_iter().chain(further) {
        let _ = chids.push(chid);
    }
    chids
}

impl AcceptedD {
    /// The server's memory.
    pub fn answer(&self) -> &Smcd {
        &self.answer
    }

    /// Whether the server begins a new link group; then this side has to as well.
    pub fn is_first_contact(&self) -> bool {
        self.common.first_contact
    }

    /// This side cannot: no DMB left ([`DeclineCode::MAX_DMB`]), no memory, no VLAN.
    pub fn decline(self, code: DeclineCode) -> Ending {
        self.common.decliner.decline(code)
    }

    /// This side has its memory: what to send, and what was agreed on. The server that goes on with
    /// a link group which this side does not have is out of step.
    pub fn confirm(self, side: &SmcdSide) -> Result<(Agreement, Message), Ending> {
        let AcceptedD { common, answer } = self;
        if side.first_contact && !common.first_contact {
            return Err(common.decliner.decline(DeclineCode::SYNCERR));
        }
        let side = SmcdSide { first_contact: common.first_contact, ..*side };
        let v2 = match answer.version {
            SmcdVersion::V1 { .. } => None,
            SmcdVersion::V2 { chid, eid, .. } => {
                Some((chid, eid, common.terms.extension(common.hostname, false, false)))
            }
        };
        let confirm = Message::Confirm(side.answer(v2));
        Ok((common.agreement(Answer::D(answer)), confirm))
    }
}

impl AcceptedR {
    /// The server's memory.
    pub fn answer(&self) -> &Smcr {
        &self.answer
    }

    /// Whether the server begins a new link group; then this side has to as well.
    pub fn is_first_contact(&self) -> bool {
        self.common.first_contact
    }

    /// Connections and links that a new link group may have, as the server says.
    pub fn limits(&self) -> (u8, u8) {
        (self.common.terms.max_conns, self.common.terms.max_links)
    }

    /// The server's next message, a Decline: it goes on over TCP, and reads no answer.
    pub fn on_message(self, message: &Message) -> Ending {
        self.common.decliner.unexpected(message, Kind::Decline)
    }

    /// This side cannot: no memory, no route ([`DeclineCode::NOROUTE`]), the server's link is not
    /// known ([`DeclineCode::NOSRVLINK`]), its RMB could not be recorded, and so on.
    pub fn decline(self, code: DeclineCode) -> Ending {
        self.common.decliner.decline(code)
    }

    /// The server goes on with a link group for a queue pair that this side does not have, though it
    /// had it and `lost` it: all of the group has to end. [`AcceptedR::confirm`] declines where it
    /// never had it. Then the server takes somebody else for this side, whose connections have to
    /// live: Linux ends all of them when it is told "out of sync".
    pub fn out_of_sync(self, lost: bool) -> Ending {
        self.common.decliner.out_of_sync(lost)
    }

    /// This side has its memory: what to send, and what comes next. The server that goes on with a
    /// link group which this side does not have is out of step; and where it reaches this side
    /// through a gateway, this side has to reach it through one, too (`smc_connect_rdma_v2_prepare`).
    pub fn confirm(self, side: &SmcrSide) -> Result<(Finished, Message), Ending> {
        let AcceptedR { common, answer } = self;
        if side.first_contact && !common.first_contact {
            return Err(common.decliner.out_of_sync(false));
        }
        let server_direct = match &answer.version {
            SmcrVersion::V2 { first_contact: Some(first), .. } => first.extension.direct,
            _ => side.direct,
        };
        if side.direct && !server_direct {
            return Err(common.decliner.decline(DeclineCode::NOINDIRECT));
        }
        let side = SmcrSide { first_contact: common.first_contact, ..*side };
        let mtu = side.mtu.min(answer.mtu);
        // The server's word counts where it says that there is none.
        let extension = common.terms.extension(common.hostname, true, server_direct);
        let answer = Answer::R(answer);
        let v2 = answer.eid().map(|eid| (eid, V2FirstContact { extension, gids: side.gids }));
        let confirm = Message::Confirm(side.answer(mtu, v2));
        let (decliner, first_contact) = (common.decliner, common.first_contact);
        let agreement = common.agreement(answer);
        let finished = if first_contact {
            Finished::ConfirmingLink(ConfirmingLink { decliner, agreement, is_server: false })
        } else {
            Finished::Established(agreement)
        };
        Ok((finished, confirm))
    }
}

impl Common {
    fn agreement(&self, peer: Answer) -> Agreement {
        self.terms.agreement(self.path, self.first_contact, peer)
    }
}
