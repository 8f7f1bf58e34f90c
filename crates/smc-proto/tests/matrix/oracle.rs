//! What has to come out of a handshake, by the rules that servers and clients of the kernel follow,
//! one after the other. Codes are the numbers of the wire. Nothing here is the crate's own logic.

use smc_proto::handshake::Path;

use crate::case::{
    Case, Contact, EMULATED_ISM, NATIVE_ISM, ROCE_V1, ROCE_V2, Refusal, Side, Version,
};

/// What the client has said it speaks, and what of it the server understands.
struct Offers {
    dv1: bool,
    rv1: bool,
    dv2: bool,
    rv2: bool,
}

/// How a handshake ends that nothing goes wrong with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Verdict {
    /// Not a word is said by either side.
    Silent,
    /// The option reached one side only.
    OneSided,
    /// Both use SMC.
    Smc(Chosen),
    /// One side declines, the other one reads it.
    Declined { by_client: bool, at: At, code: u32, v1_form: bool },
    /// The server declines when a client that needs no new link has gone over to SMC.
    Unheard { chosen: Chosen, code: u32 },
}

/// What the server chose.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Chosen {
    pub path: Path,
    pub eid: Option<&'static str>,
    /// Of SMC-Dv2: the device.
    pub ism: u8,
    /// Of a first contact of version 2.
    pub release: u8,
    pub first_contact: bool,
}

/// Where a Decline stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    /// Instead of the Proposal.
    Start,
    /// Instead of the Accept.
    Proposal,
    /// Instead of the Confirm.
    Accept,
    /// Behind the Confirm, while a new SMC-R link is to be confirmed.
    Link,
}

pub const PEERNOSMC: u32 = 0x0301_0000;
pub const PEERDECL: u32 = 0x0500_0000;
pub const TIMEOUT_CL: u32 = 0x0201_0000;
const IPSEC: u32 = 0x0302_0000;
const NO_DEVICE: u32 = 0x0303_0000;
const NO_SMCD_DEVICE: u32 = 0x0303_0001;
const NO_SMCR_DEVICE: u32 = 0x0303_0002;
const NO_SMCD_V2: u32 = 0x0303_0003;
/// The kernel's server has no word for that.
const NO_SEID: u32 = 0x0303_0006;
const NO_COMMON_ISM: u32 = 0x0303_0007;
const NO_UEID: u32 = 0x0303_0008;
const OTHER_SUBNET: u32 = 0x0307_0000;
const OUT_OF_SYNC: u32 = 0x0400_0000;

fn offers(client: &Side) -> Offers {
    let v2 = client.speaks_v2();
    Offers {
        dv1: client.has(NATIVE_ISM),
        rv1: client.has(ROCE_V1),
        dv2: client.speaks_smcd_v2(),
        // RoCEv2 is of no use without a UEID.
        rv2: v2 && client.has(ROCE_V2) && !client.eids.ueids.is_empty(),
    }
}

pub fn verdict(case: &Case) -> Verdict {
    let Case { client, server, contact, refusal, .. } = case;
    match (client.option, server.option) {
        (false, false) => return Verdict::Silent,
        (true, true) => {}
        _ => return Verdict::OneSided,
    }
    let mut offers = offers(client);
    let declined =
        |by_client, at, code, v1_form| Verdict::Declined { by_client, at, code, v1_form };
    let early_form = !client.speaks_smcd_v2();
    if *refusal == Refusal::Client {
        return declined(true, At::Start, IPSEC, early_form);
    }
    if !(offers.dv1 || offers.rv1 || offers.dv2 || offers.rv2) {
        return declined(true, At::Start, NO_DEVICE, early_form);
    }
    // A server of RFC 7609 reads version 1 only, and who proposes so is answered so.
    let v1_form = !client.speaks_v2() || !server.speaks_v2();
    if !server.speaks_v2() {
        if !(offers.dv1 || offers.rv1) {
            return declined(false, At::Proposal, NO_DEVICE, true);
        }
        (offers.dv2, offers.rv2) = (false, false);
    }
    if *refusal == Refusal::Server {
        return declined(false, At::Proposal, IPSEC, v1_form);
    }
    let choice = match choose(case, &offers) {
        Ok(choice) => choice,
        Err(code) => return declined(false, At::Proposal, code, v1_form),
    };
    // From the Accept on the client speaks as the server chose; the server as it was spoken to.
    let proposal_form = v1_form;
    let v1_form = matches!(choice.path, Path::Dv1 | Path::Rv1);
    if let Refusal::OnAccept(code) = *refusal {
        return declined(true, At::Accept, code.0, v1_form);
    }
    if *contact == Contact::ClientForgot {
        return declined(true, At::Accept, OUT_OF_SYNC, v1_form);
    }
    let new_link = choice.first_contact && matches!(choice.path, Path::Rv1 | Path::Rv2);
    match *refusal {
        Refusal::OnConfirm(code) if new_link => declined(false, At::Link, code.0, proposal_form),
        Refusal::OnConfirm(code) => Verdict::Unheard { chosen: choice, code: code.0 },
        Refusal::OnLink(code) if new_link => declined(true, At::Link, code.0, v1_form),
        _ => Verdict::Smc(choice),
    }
}

/// SMC-Dv2, SMC-Dv1, SMC-Rv2, SMC-Rv1: the first that works. If none does, the first reason why one
/// did not is told.
fn choose(case: &Case, offers: &Offers) -> Result<Chosen, u32> {
    let Case { client, server, contact, .. } = case;
    let mut reasons = Vec::new();
    // What stands in the way of using a device that is there.
    let refused = match case.refusal {
        Refusal::EveryChoice(code) => Some(code.0),
        _ => None,
    };
    let first_contact = matches!(contact, Contact::First | Contact::ServerForgot);
    let release = u8::from(client.version == Version::V2_1 && server.version == Version::V2_1);
    let chosen = |path, eid, ism| Chosen { path, eid, ism, release, first_contact };

    // An offer of SMC-Dv2 counts if the server knows it, and with any EID at all.
    let any_eid = !client.eids.ueids.is_empty() || client.eids.seid.is_some();
    let dv2 = offers.dv2 && server.speaks_smcd_v2() && any_eid;
    let v1 = offers.dv1 || offers.rv1;
    if !v1 && !dv2 && !offers.rv2 {
        return Err(if server.speaks_smcd_v2() { NO_UEID } else { NO_SMCD_V2 });
    }

    if dv2 {
        let both = client.devices & server.devices;
        let common = [NATIVE_ISM, EMULATED_ISM].into_iter().filter(|device| both & device != 0);
        let common: Vec<u8> = common.collect();
        if common.is_empty() {
            reasons.push(NO_COMMON_ISM);
        } else if let Some(eid) = common_seid(case).or(common_ueid(case)) {
            match refused {
                None => return Ok(chosen(Path::Dv2, Some(eid), common[0])),
                Some(code) => reasons.push(code),
            }
        } else if client.eids.seid.is_none() && server.eids.ueids.is_empty() {
            // One has UEIDs only, the other the SEID at most.
            reasons.extend(server.eids.seid.map(|_| NO_SEID));
        }
    }
    if v1 && !case.same_subnet {
        reasons.push(OTHER_SUBNET);
    }
    if offers.dv1 && case.same_subnet {
        match refused {
            _ if !server.has(NATIVE_ISM) => reasons.push(NO_SMCD_DEVICE),
            None => return Ok(chosen(Path::Dv1, None, 0)),
            Some(code) => reasons.push(code),
        }
    }
    if !offers.rv1 && !offers.rv2 {
        return Err(*reasons.first().unwrap_or(&NO_SMCD_DEVICE));
    }
    if offers.rv2
        && let Some(eid) = common_ueid(case)
    {
        match refused {
            _ if !server.has(ROCE_V2) => reasons.push(NO_SMCR_DEVICE),
            None => return Ok(chosen(Path::Rv2, Some(eid), 0)),
            Some(code) => reasons.push(code),
        }
    }
    if v1 && !case.same_subnet {
        return Err(OTHER_SUBNET);
    }
    if offers.rv1 {
        match refused {
            _ if !server.has(ROCE_V1) => reasons.push(NO_DEVICE),
            None => return Ok(chosen(Path::Rv1, None, 0)),
            Some(code) => reasons.push(code),
        }
    }
    Err(*reasons.first().unwrap_or(&NO_DEVICE))
}

/// Where both have the same one enabled it comes first, and with SMC-D only.
fn common_seid(case: &Case) -> Option<&'static str> {
    case.client.eids.seid.filter(|_| case.client.eids.seid == case.server.eids.seid)
}

/// The client's first that the server has, too.
fn common_ueid(case: &Case) -> Option<&'static str> {
    let mut ueids = case.client.eids.ueids.iter();
    ueids.find(|ueid| case.server.eids.ueids.contains(ueid)).copied()
}
