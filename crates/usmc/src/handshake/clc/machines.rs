//! What this host says of itself, and the state machines of `smc-proto` begun with it. They are begun anew for each
//! message, and so need no memory between the application's calls: what they know follows from the configuration, the
//! device and a few numbers of the record.

use smc_proto::handshake::client::{self, Devices, ExpectAccept};
use smc_proto::handshake::server::{Choice, ChoiceD, ExpectConfirm, ExpectProposal, Surroundings};
use smc_proto::handshake::{Circumstances, Ending, Host, Path, SmcdSide};
use smc_proto::ids::{BufferSize, Chid, Eid, PeerId, SmcdGid};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Message, Prefix, Proposal, Release};

use crate::device::identity;
use crate::host::{self, OfferId, PeerProcess};
use crate::os::{config, sys};

/// The EID of hosts that have none configured: the device's GID decides then.
const DEFAULT_EID: &str = "USMC";

/// Low bits of a link id that number the process on the device; above them its incarnation.
const PROCESS_BITS: u32 = 12;

/// One link group for each pair of processes: its id says where memory is sent to.
pub fn link_id() -> Option<u32> {
    let identity = host::current().own_identity().ok()?;
    Some(identity as u32 & PROCESS_MASK | ((identity >> 32) as u32) << PROCESS_BITS)
}

const PROCESS_MASK: u32 = (1 << PROCESS_BITS) - 1;

/// The process of a link id.
pub fn process_of(link_id: u32) -> PeerProcess {
    PeerProcess(link_id & PROCESS_MASK)
}

fn host(release: Release) -> Host {
    let mut name = [0u8; 65];
    Host {
        peer_id: PeerId::default(),
        hostname: Hostname::new(sys::hostname(&mut name)),
        release,
        features: FeatureMask::EMULATED_ISM,
        max_conns: u8::MAX,
        max_links: 2,
        ueids: eids(),
        seid: None,
        smcd_v2: true,
    }
}

fn eids() -> List<Eid, { Eid::MAX_CONFIGURED }> {
    let mut eids = List::new();
    for text in config::get().ueids() {
        if let Ok(eid) = Eid::user(text) {
            let _ = eids.push(eid);
        }
    }
    if eids.is_empty()
        && let Ok(eid) = Eid::user(DEFAULT_EID)
    {
        let _ = eids.push(eid);
    }
    eids
}

/// The client's Proposal, and the state that waits for its answer. `None`: there is no device. `id`: where the device
/// keeps the handshake, for a server that cannot look for it by the connection's name. It goes where a host with RoCE
/// ports has the id of one of them.
pub fn propose(id: Option<OfferId>) -> Option<Result<(ExpectAccept, Message), Ending>> {
    let mut devices = Devices::default();
    let _ = devices.smcd_v2.push((identity::gid()?, identity::chid()));
    let mut begun = client::begin(host(Release::V2_1), Circumstances::FINE, &devices);
    if let (Ok((_, Message::Proposal(proposal))), Some(id)) = (&mut begun, id) {
        proposal.local.peer_id = PeerId(bytes_of(id));
    }
    Some(begun)
}

fn bytes_of(id: OfferId) -> [u8; 8] {
    (u64::from(id.index) << 32 | u64::from(id.use_count)).to_be_bytes()
}

/// Where a client of this device says that the handshake is kept.
pub fn id_in(proposal: &Proposal) -> Option<OfferId> {
    let devices = proposal.v2().and_then(|v2| v2.modes.smcd());
    let here = devices.is_some_and(|d| d.devices().any(|(gid, chid)| identity::reaches(gid, chid)));
    let id = u64::from_be_bytes(proposal.local.peer_id.0);
    here.then_some(OfferId { index: (id >> 32) as u32, use_count: id as u32 })
}

/// Of a peer only the device counts: it is the same, or it is out of reach.
struct SameDevice;

impl Surroundings for SameDevice {
    fn reaches(&self, gid: SmcdGid, chid: Chid) -> bool {
        identity::reaches(gid, chid)
    }

    fn same_subnet(&self, _: &Prefix) -> bool {
        // What needs one is declined for want of a device.
        true
    }

    fn vlan_is_known(&self) -> bool {
        true
    }
}

/// What an acceptor makes of a client's message: SMC-Dv2 on this device, or the end.
pub fn choose(proposal: Message) -> Option<Result<ChoiceD, Ending>> {
    identity::gid()?;
    let chosen = ExpectProposal::begin(host(Release::V2_1), Circumstances::FINE)
        .and_then(|state| state.on_message(proposal, &SameDevice));
    let mut chosen = match chosen {
        Ok(choice) => choice,
        Err(ending) => return Some(Err(ending)),
    };
    loop {
        let next = match chosen {
            Choice::D(choice) if choice.path() == Path::Dv2 => return Some(Ok(choice)),
            Choice::D(choice) => choice.reject(smc_proto::decline::DeclineCode::NOSMCDDEV),
            Choice::R(choice) => choice.reject(smc_proto::decline::DeclineCode::NOSMCRDEV),
        };
        chosen = match next {
            Ok(choice) => choice,
            Err(ending) => return Some(Err(ending)),
        };
    }
}

/// What an acceptor makes of a good Proposal of this release.
pub fn choice_for(release: Release) -> Option<ChoiceD> {
    let mut devices = Devices::default();
    let _ = devices.smcd_v2.push((identity::gid()?, identity::chid()));
    let (_, proposal) = client::begin(host(release), Circumstances::FINE, &devices).ok()?;
    choose(proposal)?.ok()
}

/// The state that waits for a Confirm, for a client that has proposed with this release.
pub fn expect_confirm(release: Release, side: &SmcdSide) -> Option<ExpectConfirm> {
    Some(choice_for(release)?.accept(side).0)
}

/// Our side's memory, as it is stated on the wire.
pub fn side(token: u64) -> Option<SmcdSide> {
    Some(SmcdSide {
        gid: identity::gid()?,
        token,
        size: BufferSize::at_least(1 << config::get().ring_shift),
        link_id: link_id()?,
        // Each connection states the terms anew: its ends know nothing of each other's other connections.
        first_contact: true,
    })
}
