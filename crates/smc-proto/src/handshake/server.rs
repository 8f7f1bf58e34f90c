//! The server's side of the handshake: it tries what the client offers, in the order SMC-Dv2,
//! SMC-Dv1, SMC-Rv2, SMC-Rv1 (`smc_listen_find_device`), and states its choice.

use core::time::Duration;

use super::{
    Agreement, CLC_TIMEOUT, Circumstances, ConfirmingLink, Decliner, Ending, Fallback, Fault,
    Finished, Host, MIN_CONNS, Path, SmcdSide, SmcrSide, Terms,
};
use crate::decline::DeclineCode;
use crate::ids::{Chid, Eid, SmcdGid};
use crate::list::List;
use crate::wire::clc::{
    Answer, Error, Kind, Local, Message, Modes, Prefix, Proposal, Release, V2, V2FirstContact,
};

/// What only the server's surroundings know.
pub trait Surroundings {
    /// Whether an ISM device here has this CHID and reaches this peer.
    fn reaches(&self, gid: SmcdGid, chid: Chid) -> bool;

    /// Whether the client is in the same IP subnet.
    fn same_subnet(&self, prefix: &Prefix) -> bool;

    /// Whether the VLAN of the interface is known.
    fn vlan_is_known(&self) -> bool;
}

/// Waits for the client's Proposal.
#[derive(Debug)]
pub struct ExpectProposal {
    host: Host,
    circumstances: Circumstances,
}

/// One thing to try: the server needs memory for it.
#[derive(Debug)]
pub enum Choice {
    /// A DMB.
    D(ChoiceD),
    /// An RMB, and a link if the link group is new.
    R(ChoiceR),
}

/// SMC-D with a device that reaches the client.
#[derive(Debug)]
pub struct ChoiceD {
    choosing: Choosing,
    path: Path,
    peer: SmcdGid,
    chid: Chid,
}

/// SMC-R.
#[derive(Debug)]
pub struct ChoiceR {
    choosing: Choosing,
    path: Path,
    peer: Local,
}

/// Waits for the client's Confirm.
#[derive(Debug)]
pub struct ExpectConfirm {
    decliner: Decliner,
    path: Path,
    terms: Terms,
    first_contact: bool,
}

/// The client confirmed; its memory has to be attached or recorded.
#[derive(Debug)]
pub struct Confirmed {
    decliner: Decliner,
    agreement: Agreement,
}

#[derive(Debug)]
struct Choosing {
    host: Host,
    decliner: Decliner,
    proposal: Proposal,
    offer: Offer,
    terms: Terms,
    /// Whatever was negotiated, there will be no second link.
    single_link: bool,
    eid: Option<Eid>,
    /// ISM devices of the client that can be used with SMC-Dv2.
    devices: List<(SmcdGid, Chid), 9>,
    same_subnet: bool,
    vlan_is_known: bool,
    next: Step,
    /// The first reason why something did not work: it is the one that is sent.
    reason: Option<DeclineCode>,
}

/// What is offered, as far as this side can use it.
#[derive(Clone, Copy, Debug)]
struct Offer {
    v1: Option<Modes>,
    dv2: bool,
    rv2: bool,
}

/// What to try next.
#[derive(Clone, Copy, Debug)]
enum Step {
    Dv2(usize),
    Dv1,
    Rv2,
    Rv1,
    End,
}

impl ExpectProposal {
    /// How long to wait.
    pub const TIMEOUT: Duration = CLC_TIMEOUT;

    /// Begins a handshake, unless the client did not say that it speaks SMC.
    pub fn begin(host: Host, circumstances: Circumstances) -> Result<ExpectProposal, Ending> {
        if circumstances.fast_open {
            return Err(Fallback::silent(DeclineCode::OPTUNSUPP));
        }
        if !circumstances.peer_says_smc {
            return Err(Fallback::silent(DeclineCode::PEERNOSMC));
        }
        Ok(ExpectProposal { host, circumstances })
    }

    /// No Proposal in time.
    pub fn on_timeout(self) -> Ending {
        Ending::Failed(Fault::TimedOut)
    }

    /// The client closed the connection.
    pub fn on_closed(self) -> Ending {
        Ending::Failed(Fault::Closed)
    }

    /// What came is no CLC message.
    pub fn on_malformed(self, error: Error) -> Ending {
        error.into()
    }

    /// What came does not begin as CLC messages do ([`Error::Eyecatcher`]): the client is plain TCP.
    /// Its SYN had the option, and it has not seen the one of the SYN-ACK. What it sent
    /// ([`crate::wire::clc::Reception::taken`]) is its application's. The kernel fails the connection instead.
    pub fn on_plain(self) -> Ending {
        Fallback::silent(DeclineCode::PEERNOSMC)
    }

    /// The client's message: gives the first thing to try.
    pub fn on_message(
        self,
        message: Message,
        surroundings: &impl Surroundings,
    ) -> Result<Choice, Ending> {
        let ExpectProposal { host, circumstances } = self;
        let mut decliner = Decliner { peer_id: host.peer_id, as_v1: true };
        let Message::Proposal(proposal) = message else {
            return Err(decliner.unexpected(&message, Kind::Proposal));
        };
        decliner.as_v1 = proposal.is_v1();
        let decline = |code| decliner.decline(code);
        if circumstances.ipsec {
            return Err(decline(DeclineCode::IPSEC));
        }
        let offer = usable_offer(&host, &proposal).map_err(decline)?;
        let terms = terms(&host, &offer, proposal.v2()).map_err(decline)?;
        let mut reason = None;
        let (eid, devices) = if offer.dv2 {
            let devices = reachable(&proposal, surroundings);
            if devices.is_empty() {
                reason = Some(DeclineCode::NOSMCD2DEV);
            }
            let eid = common_eid(&host, proposal.v2(), true);
            if eid.is_none() && lacks_seid(&host, proposal.v2()) {
                reason.get_or_insert(DeclineCode::NOSEID);
            }
            (eid, devices)
        } else {
            (None, List::new())
        };
        let same_subnet = proposal.v1().is_none_or(|v1| surroundings.same_subnet(&v1.prefix));
        let choosing = Choosing {
            host,
            decliner,
            offer,
            terms,
            single_link: false,
            eid,
            devices,
            same_subnet,
            vlan_is_known: surroundings.vlan_is_known(),
            next: Step::Dv2(0),
            reason,
            proposal,
        };
        choosing.next()
    }
}

/// What of the Proposal can be used at all (`smc_listen_v2_check`).
fn usable_offer(host: &Host, proposal: &Proposal) -> Result<Offer, DeclineCode> {
    let v1 = proposal.v1().map(|v1| v1.modes);
    let mut offer = Offer { v1, dv2: false, rv2: false };
    let mut reason = DeclineCode::PEERNOSMC;
    if proposal.v2_modes().is_some() && proposal.v2().is_none() {
        reason = DeclineCode::NOV2EXT;
    }
    if let Some(v2) = proposal.v2() {
        if v2.modes.modes().smcd() {
            if !host.smcd_v2 {
                reason = DeclineCode::NOISM2SUPP;
            } else if v2.modes.smcd().is_none() {
                reason = DeclineCode::NOV2DEXT;
            } else if v2.eids.is_empty() && !v2.seid {
                reason = DeclineCode::NOUEID;
            } else {
                offer.dv2 = true;
            }
        }
        if v2.modes.modes().smcr() {
            if v2.eids.is_empty() {
                reason = DeclineCode::NOUEID;
            } else {
                offer.rv2 = true;
            }
        }
    }
    if v1.is_none() && !offer.dv2 && !offer.rv2 { Err(reason) } else { Ok(offer) }
}

/// What a new link group will be held to (`smc_clc_srv_v2x_features_validate`).
fn terms(host: &Host, offer: &Offer, v2: Option<&V2>) -> Result<Terms, DeclineCode> {
    let Some(v2) = v2 else { return Ok(Terms::DEFAULT) };
    let release = v2.release.min(host.release);
    let mut terms = Terms { release, ..Terms::DEFAULT };
    if release < Release::V2_1 || !(offer.dv2 || offer.rv2) {
        return Ok(terms);
    }
    terms.features = host.features;
    if offer.rv2 {
        terms.max_conns = v2.max_conns.min(host.max_conns);
        if terms.max_conns < MIN_CONNS {
            return Err(DeclineCode::MAXCONNERR);
        }
        terms.max_links = v2.max_links.min(host.max_links);
        if terms.max_links < 1 {
            return Err(DeclineCode::MAXLINKERR);
        }
    }
    Ok(terms)
}

/// The client's devices that can be talked to: the native one, then those of the extension.
fn reachable(proposal: &Proposal, surroundings: &impl Surroundings) -> List<(SmcdGid, Chid), 9> {
    let native = proposal
        .ism()
        .filter(|ism| ism.chid != Chid::NONE)
        .map(|ism| (SmcdGid { gid: ism.gid, ext: 0 }, ism.chid));
    let extension = proposal.v2().and_then(|v2| v2.modes.smcd());
    let further = extension.into_iter().flat_map(|smcd| smcd.devices());
    let mut devices = List::new();
    for (gid, chid) in native.into_iter().chain(further) {
        if surroundings.reaches(gid, chid) {
            let _ = devices.push((gid, chid));
        }
    }
    devices
}

/// The EID that both have: the SEID first (SMC-D only), then the client's first
/// (`smc_clc_match_eid`).
fn common_eid(host: &Host, v2: Option<&V2>, smcd: bool) -> Option<Eid> {
    let v2 = v2?;
    let seid = v2.modes.smcd().map(|extension| extension.seid);
    if smcd && v2.seid && seid.is_some() && seid == host.seid {
        return seid;
    }
    v2.eids.iter().find(|eid| host.ueids.contains(eid)).copied()
}

/// Whether the SEID is all that this side has, and the client sent none. The kernel, which defines
/// [`DeclineCode::NOSEID`] and does not use it, says [`DeclineCode::NOSMCDDEV`] then.
fn lacks_seid(host: &Host, v2: Option<&V2>) -> bool {
    host.seid.is_some() && host.ueids.is_empty() && v2.is_some_and(|v2| !v2.seid)
}

impl Choosing {
    /// The next thing to try, or the reason why there is none.
    fn next(mut self) -> Result<Choice, Ending> {
        loop {
            match self.next {
                Step::Dv2(n) => {
                    if let (Some(&(peer, chid)), Some(_)) = (self.devices.get(n), self.eid) {
                        self.next = Step::Dv2(n + 1);
                        let path = Path::Dv2;
                        return Ok(Choice::D(ChoiceD { choosing: self, path, peer, chid }));
                    }
                    self.eid = None;
                    if !self.same_subnet {
                        self.remember(DeclineCode::DIFFPREFIX);
                    }
                    if !self.vlan_is_known {
                        return Err(self.give_up(DeclineCode::GETVLANERR));
                    }
                    self.next = Step::Dv1;
                }
                Step::Dv1 => {
                    self.next = Step::Rv2;
                    let offered = self.same_subnet && self.offer.v1.is_some_and(Modes::smcd);
                    if let Some(ism) = self.proposal.ism().copied().filter(|_| offered) {
                        let (path, chid) = (Path::Dv1, ism.chid);
                        let peer = SmcdGid { gid: ism.gid, ext: 0 };
                        return Ok(Choice::D(ChoiceD { choosing: self, path, peer, chid }));
                    }
                }
                Step::Rv2 => {
                    if !self.proposal_has_smcr() {
                        return Err(self.give_up(DeclineCode::NOSMCDDEV));
                    }
                    if self.host.peer_id.is_none() {
                        return Err(self.give_up(DeclineCode::NOSMCRDEV));
                    }
                    self.next = Step::Rv1;
                    if let Some(v2) = self.proposal.v2().filter(|_| self.offer.rv2) {
                        self.eid = common_eid(&self.host, Some(v2), false);
                        let peer = Local { gid: v2.gid, ..self.proposal.local };
                        if self.eid.is_some() {
                            let path = Path::Rv2;
                            return Ok(Choice::R(ChoiceR { choosing: self, path, peer }));
                        }
                    }
                }
                Step::Rv1 => {
                    self.eid = None;
                    self.next = Step::End;
                    if !self.same_subnet {
                        return Err(self.decliner.decline(DeclineCode::DIFFPREFIX));
                    }
                    if self.offer.v1.is_some_and(Modes::smcr) {
                        let (path, peer) = (Path::Rv1, self.proposal.local);
                        return Ok(Choice::R(ChoiceR { choosing: self, path, peer }));
                    }
                }
                Step::End => return Err(self.give_up(DeclineCode::NOSMCDEV)),
            }
        }
    }

    fn reject(mut self, code: DeclineCode) -> Result<Choice, Ending> {
        self.remember(code);
        self.next()
    }

    fn remember(&mut self, code: DeclineCode) {
        self.reason.get_or_insert(code);
    }

    fn give_up(&self, code: DeclineCode) -> Ending {
        self.decliner.decline(self.reason.unwrap_or(code))
    }

    fn proposal_has_smcr(&self) -> bool {
        let v1 = self.proposal.v1().map(|v1| v1.modes);
        let v2 = self.proposal.v2_modes();
        v1.is_some_and(Modes::smcr) || v2.is_some_and(Modes::smcr)
    }

    fn accept(self, path: Path, first_contact: bool, answer: Answer) -> (ExpectConfirm, Message) {
        let Choosing { decliner, terms, single_link, .. } = self;
        let mut terms = if path.is_v1() { Terms::DEFAULT } else { terms };
        if single_link {
            terms.max_links = 1;
        }
        (ExpectConfirm { decliner, path, terms, first_contact }, Message::Accept(answer))
    }
}

impl ChoiceD {
    /// Mode and version.
    pub fn path(&self) -> Path {
        self.path
    }

    /// The client's device. Version 1 knows only half of its GID.
    pub fn peer(&self) -> SmcdGid {
        self.peer
    }

    /// The channel that this side's device needs to have too; in version 1 it may be none.
    pub fn chid(&self) -> Chid {
        self.chid
    }

    /// This cannot be: no device ([`DeclineCode::NOSMCDDEV`]), no DMB left
    /// ([`DeclineCode::MAX_DMB`]), no memory. Gives the next thing to try.
    pub fn reject(self, code: DeclineCode) -> Result<Choice, Ending> {
        self.choosing.reject(code)
    }

    /// This side has its memory: what to send, and the state that waits for the Confirm.
    pub fn accept(self, side: &SmcdSide) -> (ExpectConfirm, Message) {
        let Choosing { host, terms, eid, .. } = &self.choosing;
        let extension = terms.extension(host.hostname, false, false);
        let v2 = eid.map(|eid| (self.chid, eid, extension));
        let answer = side.answer(v2);
        self.choosing.accept(self.path, side.first_contact, answer)
    }
}

impl ChoiceR {
    /// Mode and version.
    pub fn path(&self) -> Path {
        self.path
    }

    /// The client and its RoCE port.
    pub fn peer(&self) -> &Local {
        &self.peer
    }

    /// Offers no second link, as with [`Host::max_links`] 1: the chosen port has no other beside it.
    /// A peer of version 1 or release 0 cannot be told; its ADD_LINK is rejected. It holds for what
    /// is tried after this choice, too.
    #[must_use]
    pub fn single_link(mut self) -> ChoiceR {
        (self.choosing.single_link, self.choosing.terms.max_links) = (true, 1);
        self
    }

    /// Connections that a new link group may have, as far as is known before the Confirm.
    pub fn max_conns(&self) -> u8 {
        self.choosing.terms.max_conns
    }

    /// The client's next message, a Decline: it goes on over TCP, and reads no answer.
    pub fn on_message(self, message: &Message) -> Ending {
        self.choosing.decliner.unexpected(message, Kind::Decline)
    }

    /// This cannot be, and nothing else is tried.
    pub fn decline(self, code: DeclineCode) -> Ending {
        self.choosing.decliner.decline(code)
    }

    /// This cannot be: no device ([`DeclineCode::NOSMCRDEV`], in version 1
    /// [`DeclineCode::NOSMCDEV`]), no memory, no registration. Gives the next thing to try.
    pub fn reject(self, code: DeclineCode) -> Result<Choice, Ending> {
        self.choosing.reject(code)
    }

    /// This side has its memory: what to send, and the state that waits for the Confirm.
    pub fn accept(self, side: &SmcrSide) -> (ExpectConfirm, Message) {
        let Choosing { host, terms, eid, .. } = &self.choosing;
        let extension = terms.extension(host.hostname, true, side.direct);
        let first = V2FirstContact { extension, gids: List::new() };
        let answer = side.answer(side.mtu, eid.map(|eid| (eid, first)));
        self.choosing.accept(self.path, side.first_contact, answer)
    }
}

impl ExpectConfirm {
    /// How long to wait.
    pub const TIMEOUT: Duration = CLC_TIMEOUT;

    /// No Confirm in time.
    pub fn on_timeout(self) -> Ending {
        Ending::Failed(Fault::TimedOut)
    }

    /// The client closed the connection.
    pub fn on_closed(self) -> Ending {
        Ending::Failed(Fault::Closed)
    }

    /// What came is no CLC message.
    pub fn on_malformed(self, error: Error) -> Ending {
        error.into()
    }

    /// The client's message.
    ///
    /// The kernel does not compare the confirmed path with the chosen one and would read one layout
    /// as the other; here that is a fault.
    pub fn on_message(self, message: Message) -> Result<Confirmed, Ending> {
        let ExpectConfirm { decliner, path, mut terms, first_contact } = self;
        let Message::Confirm(answer) = message else {
            return Err(decliner.unexpected(&message, Kind::Confirm));
        };
        let confirmed = Path::of(&answer);
        if confirmed != path {
            return Err(Ending::Failed(Fault::OtherPath { chosen: path, confirmed }));
        }
        if answer.is_first_contact() != first_contact {
            return Err(decliner.decline(DeclineCode::SYNCERR));
        }
        if let Some(stated) = answer.first_contact() {
            if stated.release != terms.release {
                return Err(decliner.decline(DeclineCode::RELEASEERR));
            }
            if terms.release >= Release::V2_1 {
                if path.is_smcr() && stated.max_conns != terms.max_conns {
                    return Err(decliner.decline(DeclineCode::MAXCONNERR));
                }
                if path.is_smcr() && stated.max_links != terms.max_links {
                    return Err(decliner.decline(DeclineCode::MAXLINKERR));
                }
                // Only what was offered: the client cannot add to it.
                terms.features = stated.features.and(terms.features);
            }
        }
        let agreement = terms.agreement(path, first_contact, answer);
        Ok(Confirmed { decliner, agreement })
    }
}

impl Confirmed {
    /// What was agreed on, and the client's memory.
    pub fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// The client's memory cannot be used: it could not be attached ([`DeclineCode::MEM`]), its RMB
    /// not recorded ([`DeclineCode::ERR_RTOK`]), the link not made ready.
    pub fn decline(self, code: DeclineCode) -> Ending {
        self.decliner.decline(code)
    }

    /// It can: SMC, or CONFIRM_LINK first.
    pub fn finish(self) -> Finished {
        let Confirmed { decliner, agreement } = self;
        if agreement.path.is_smcr() && agreement.first_contact {
            Finished::ConfirmingLink(ConfirmingLink { decliner, agreement, is_server: true })
        } else {
            Finished::Established(agreement)
        }
    }
}
