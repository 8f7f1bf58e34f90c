//! What the engine tells its caller.

use smc_proto::close::Direction;
use smc_proto::connection::PeerMisbehaved;
use smc_proto::decline::DeclineCode;
use smc_proto::handshake::{Fault, Path};
use smc_proto::ids::{Eid, PeerId, RoceGid};

use crate::ConnId;
use crate::groups::GroupIndex;
use crate::nic::RmbId;

/// What happened. Of each connection, the last event is [`Event::Fallback`], [`Event::Failed`] or [`Event::Over`]; its number is not
/// valid any more then.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// It is SMC from here on.
    Established {
        /// The connection.
        conn: ConnId,
        /// Its group.
        group: GroupIndex,
        /// Mode and version.
        path: Path,
        /// The EID in common.
        eid: Option<Eid>,
        /// Whether the group began with it.
        first_contact: bool,
    },
    /// It goes on over TCP; what the application has written into its send buffer goes out there, once the CLC messages are out
    /// ([`crate::Engine::poll_clc`]).
    Fallback {
        /// The connection.
        conn: ConnId,
        /// Why.
        reason: DeclineCode,
        /// The peer's reason, if it has declined.
        peer_reason: Option<DeclineCode>,
    },
    /// It cannot go on, for nobody knows where the application's bytes begin.
    Failed {
        /// The connection.
        conn: ConnId,
        /// Why.
        fault: Fault,
    },
    /// Bytes have come: the application is to be woken if it sleeps.
    Data {
        /// The connection.
        conn: ConnId,
    },
    /// The application's send buffer has room again, for which somebody waits ([`crate::buffers::Buffers::release`]).
    Room {
        /// The connection.
        conn: ConnId,
    },
    /// The peer's end, or the link group's: what the application's calls find from now on, once it has read what has come.
    Ending {
        /// The connection.
        conn: ConnId,
        /// What reads find.
        reading: Direction,
        /// What writes find.
        writing: Direction,
        /// Whether the peer has closed altogether, and not only ended its writing direction: nobody reads what is written.
        closed: bool,
    },
    /// The peer has broken the protocol, and the connection is aborted.
    Misbehaved {
        /// The connection.
        conn: ConnId,
        /// How.
        how: PeerMisbehaved,
    },
    /// The connection is over at both ends: its buffers can have another one, of the group that holds the RMB ([`crate::Engine::holder`]).
    Over {
        /// The connection.
        conn: ConnId,
    },
    /// No peer has a key for this RMB any more: it was asked for ([`crate::Engine::withdraw`]), or its group had too many.
    Withdrawn {
        /// The RMB.
        rmb: RmbId,
    },
    /// A link group has its first link.
    GroupUp {
        /// The group.
        group: GroupIndex,
        /// The peer, as its CLC message names it.
        peer: PeerId,
        /// The peer's port.
        gid: RoceGid,
    },
    /// A link group is gone, and its connections have ended or end.
    GroupDown {
        /// The group.
        group: GroupIndex,
    },
}
