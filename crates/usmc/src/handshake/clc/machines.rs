//! The state machines of `smc-proto`, as this host begins them, and the cells in which they are from one message to the next.
//!
//! Each record has a cell, so that there always is one: a table of them is reserved with the first handshake, and a page of it
//! is taken when a record of its own first uses it. A machine is plain data, and a cell is used by the holder of the record's
//! step lock alone. So nothing has to be given back: what a handshake has left that ended is overwritten by the next one.
//! After a fork each process has a copy, which is whole, for a fork takes all those locks.

use core::{mem, ptr};
use smc_proto::decline::DeclineCode;
use smc_proto::handshake::client::{self, AcceptedD, Devices, ExpectAccept};
use smc_proto::handshake::server::{Choice, ChoiceD, ExpectConfirm, ExpectProposal, Surroundings};
use smc_proto::handshake::{Circumstances, Ending, Host, Path, SmcdSide};
use smc_proto::ids::{BufferSize, Chid, Eid, PeerId, SmcdGid};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Message, Prefix, Proposal, Release, Smcd};
use usmc_shm::sync::AtomicPtr;

use crate::device::{self, Index, identity};
use crate::host::{self, OfferId, PeerProcess};
use crate::os::reason::Reason;
use crate::os::{config, sys};
use crate::record::conn::{self, Conn};

/// A handshake between two messages. All zero: none.
#[repr(u32)]
pub enum Machine {
    /// None, or there is no memory for it.
    None = 0,
    /// Client: waits for the answer.
    Proposed(ExpectAccept),
    /// Client: has read the Accept and will confirm.
    Accepted(AcceptedD),
    /// Acceptor: has read the Proposal and will send this Accept.
    Chosen(ExpectConfirm, Smcd),
    /// Acceptor: waits for the Confirm.
    Answered(ExpectConfirm),
    /// Either: will decline what it has read.
    Declines(DeclineCode),
}

impl Machine {
    /// With what is declined, if nothing better is to be done.
    pub fn code(&self) -> DeclineCode {
        match self {
            Machine::Declines(code) => *code,
            _ => DeclineCode::MEM,
        }
    }
}

const _: () = assert!(size_of::<Machine>() <= 192 && !mem::needs_drop::<Machine>());

static CELLS: AtomicPtr<Machine> = AtomicPtr::new(ptr::null_mut());

/// Puts a machine into the record's cell. The one that was there; none where there is no memory. The caller holds the
/// step's lock.
fn replace(conn: &Conn, machine: Machine) -> Option<Machine> {
    let cells = sys::reserve(&CELLS, conn::CONNS)?;
    // SAFETY: there are as many cells as records, which are never unmapped, and zero is valid; the lock makes the reference unique.
    Some(mem::replace(unsafe { &mut *cells.add(conn::index_of(conn) as usize) }, machine))
}

/// Keeps a machine until the peer's next message, or until ours can be sent. False where there is no memory. The caller holds
/// the step's lock.
pub fn keep(conn: &Conn, machine: Machine) -> bool {
    replace(conn, machine).is_some()
}

/// The machine that was kept, which is not any more. The caller holds the step's lock.
pub fn take(conn: &Conn) -> Machine {
    replace(conn, Machine::None).unwrap_or(Machine::None)
}

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

fn host() -> Host {
    let mut name = [0u8; 65];
    Host {
        peer_id: PeerId::default(),
        hostname: Hostname::new(sys::hostname(&mut name)),
        release: Release::V2_1,
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

/// The client's Proposal, whose answer is waited for from now on. `id`: where a board keeps the handshake, by whose device it is to
/// be. `says_where`: the server cannot look for it by the connection's name. The place goes where a host with RoCE ports has the id
/// of one of them.
///
/// # Errors
/// The reason why the connection stays TCP.
pub fn propose(conn: &Conn, id: OfferId, says_where: bool) -> Result<Message, Reason> {
    let mut devices = Devices::default();
    let gid = identity::gid(id.device).ok_or(Reason::NoDevice)?;
    let _ = devices.smcd_v2.push((gid, identity::chid(id.device)));
    let begun = client::begin(host(), Circumstances::FINE, &devices);
    let (state, mut message) = begun.map_err(|_| Reason::NoDevice)?;
    if says_where && let Message::Proposal(proposal) = &mut message {
        proposal.local.peer_id = PeerId(bytes_of(id));
    }
    if keep(conn, Machine::Proposed(state)) { Ok(message) } else { Err(Reason::NoMemory) }
}

fn bytes_of(id: OfferId) -> [u8; 8] {
    (u64::from(id.index) << 32 | u64::from(id.use_count)).to_be_bytes()
}

/// Where a client of this device says that the handshake is kept.
pub fn id_in(proposal: &Proposal) -> Option<OfferId> {
    let devices = proposal.v2().and_then(|v2| v2.modes.smcd())?;
    let id = u64::from_be_bytes(proposal.local.peer_id.0);
    let is_here =
        |device| devices.devices().any(|(gid, chid)| identity::reaches(device, gid, chid));
    let (device, _) = device::all().find(|(device, _)| is_here(*device))?;
    Some(OfferId { device, index: (id >> 32) as u32, use_count: id as u32 })
}

/// Of a peer only the device counts: it is this one, or it is out of reach.
struct OnDevice(Index);

impl Surroundings for OnDevice {
    fn reaches(&self, gid: SmcdGid, chid: Chid) -> bool {
        identity::reaches(self.0, gid, chid)
    }

    fn same_subnet(&self, _: &Prefix) -> bool {
        // What needs one is declined for want of a device.
        true
    }

    fn vlan_is_known(&self) -> bool {
        true
    }
}

/// What an acceptor makes of a client's message: SMC-Dv2 on this device.
///
/// # Errors
/// With what it is to be declined.
pub fn choose(proposal: Message, device: Index) -> Result<ChoiceD, DeclineCode> {
    identity::gid(device).ok_or(DeclineCode::NOSMCDDEV)?;
    let mut chosen = ExpectProposal::begin(host(), Circumstances::FINE)
        .and_then(|state| state.on_message(proposal, &OnDevice(device)));
    loop {
        chosen = match chosen {
            Ok(Choice::D(choice)) if choice.path() == Path::Dv2 => return Ok(choice),
            Ok(Choice::D(choice)) => choice.reject(DeclineCode::NOSMCDDEV),
            Ok(Choice::R(choice)) => choice.reject(DeclineCode::NOSMCRDEV),
            Err(Ending::Fallback(fallback)) => {
                return Err(fallback.decline.map_or(DeclineCode::PEERDECL, |decline| decline.code));
            }
            Err(Ending::Failed(_)) => return Err(DeclineCode::INTERR),
        };
    }
}

/// Our side's memory, as it is stated on the wire.
pub fn side(device: Index, token: u64) -> Option<SmcdSide> {
    Some(SmcdSide {
        gid: identity::gid(device)?,
        token,
        size: BufferSize::at_least(1 << config::get().ring_shift),
        link_id: link_id()?,
        // Each connection states the terms anew: its ends know nothing of each other's other connections.
        first_contact: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_has_a_machine_of_its_own_which_is_taken_once() {
        let [one, other] = [(); 2].map(|()| conn::alloc().expect("a record"));
        let [a, b] = [one, other].map(conn::at);
        assert!(matches!(take(a), Machine::None));
        assert!(keep(a, Machine::Declines(DeclineCode::NOSMCDDEV)));
        assert!(keep(b, Machine::Declines(DeclineCode::INTERR)));
        assert!(keep(b, Machine::Declines(DeclineCode::VERSMISMAT)));
        assert_eq!(take(a).code(), DeclineCode::NOSMCDDEV);
        assert_eq!(take(b).code(), DeclineCode::VERSMISMAT);
        assert!(matches!((take(a), take(b)), (Machine::None, Machine::None)));
        // Where there should be one and is none, there was no memory for it.
        assert_eq!(take(a).code(), DeclineCode::MEM);
    }
}
