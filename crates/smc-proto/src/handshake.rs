//! The CLC handshake, client and server, as states that are named by what they wait for.
//!
//! Each state is consumed by what happens to it and gives the next one, with the message to send;
//! or it ends the handshake ([`Ending`]): on with TCP, or the connection has failed. The caller
//! owns the TCP connection, the clock and the devices:
//!
//! ```text
//! client                                               server
//! client::begin ──────────── Proposal ───────────────▶ ExpectProposal
//! ExpectAccept                                         Choice: memory for the best mode, or the
//!                                                              next one
//! Accepted: memory ◀───────── Accept ───────────────── ExpectConfirm
//!            ──────────────── Confirm ───────────────▶ Confirmed: attach the peer's memory
//! Established | ConfirmingLink                         Established | ConfirmingLink
//! ```
//!
//! A new SMC-R link group has to prove itself over RDMA before the handshake is finished
//! ([`ConfirmingLink`]); everything else is finished with the Confirm.
//!
//! Sources: RFC 7609 section 3; the kernel's `af_smc.c` for version 2, the order of preference
//! and the codes.

pub mod client;
pub mod server;

use core::time::Duration;

use crate::decline::DeclineCode;
use crate::ids::{Chid, Eid, PeerId, SmcdGid};
use crate::list::List;
use crate::wire::clc::{self, Answer, Decline, FeatureMask, FirstContact, Hostname, Os, Release};

/// How long a peer may take for a CLC message (`smc_clc.h`: CLC_WAIT_TIME). A client that hears
/// nothing has failed: ETIMEDOUT, since the server may still be about to answer.
pub const CLC_TIMEOUT: Duration = Duration::from_secs(6);
/// How long to wait for a Decline after LLC failed (CLC_WAIT_TIME_SHORT).
pub const DECLINE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a peer may take for an LLC message (`smc_llc.h`: SMC_LLC_WAIT_TIME).
pub const LLC_TIMEOUT: Duration = Duration::from_secs(2);

/// Fewest connections that a link group may be limited to (`smc_core.h`).
pub const MIN_CONNS: u8 = 16;
/// Most links that SMC v2.1 may negotiate (`smc_core.h`).
pub const MAX_LINKS: u8 = 2;

/// What a host says of itself in every handshake.
#[derive(Clone, Debug)]
pub struct Host {
    /// Unique for each owner of link groups, and new each time that it starts: a peer finds its link
    /// groups by it, and ends them all when it is told that one is out of sync. Zero without a RoCE
    /// port: such a host has no SMC-R, whatever devices it names, for with zero it would be given
    /// the link groups of its own kernel.
    pub peer_id: PeerId,
    /// Shown to the peer's administrators.
    pub hostname: Hostname,
    /// The newest release spoken.
    pub release: Release,
    /// Features of release 1.
    pub features: FeatureMask,
    /// Connections allowed in an SMC-R link group, 16 to 255.
    pub max_conns: u8,
    /// Links allowed in an SMC-R link group, 1 or 2. A host that cannot have a second one says 1: a Linux
    /// client waits 3 s for an ADD_LINK otherwise.
    pub max_links: u8,
    /// User-defined EIDs.
    pub ueids: List<Eid, { Eid::MAX_CONFIGURED }>,
    /// The system's own EID, if there is one and it is enabled.
    pub seid: Option<Eid>,
    /// Whether SMC-Dv2 is possible at all here.
    pub smcd_v2: bool,
}

/// What is true of the TCP connection, before any CLC message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Circumstances {
    /// The peer said that it speaks SMC: TCP option, or configuration.
    pub peer_says_smc: bool,
    /// An IPsec policy applies to the connection.
    pub ipsec: bool,
    /// The application uses TCP Fast Open itself: its bytes stand where the Proposal would. False
    /// where only the Proposal travels so ([`client::begin_in_syn`]), at both ends.
    pub fast_open: bool,
}

impl Circumstances {
    /// Nothing speaks against SMC.
    pub const FINE: Circumstances =
        Circumstances { peer_says_smc: true, ipsec: false, fast_open: false };
}

/// How data is moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// RFC 7609.
    Rv1,
    /// SMC-Rv2.
    Rv2,
    /// SMC-Dv1.
    Dv1,
    /// SMC-Dv2.
    Dv2,
}

/// What both sides agreed on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// Mode and version.
    pub path: Path,
    /// The EID in common, in version 2.
    pub eid: Option<Eid>,
    /// Whether the link group begins with this connection.
    pub first_contact: bool,
    /// The release, if the link group begins with this connection.
    pub release: Release,
    /// The features of both, likewise.
    pub features: FeatureMask,
    /// Connections in the link group, likewise.
    pub max_conns: u8,
    /// Links in the link group, likewise; 2 where nothing can be negotiated (version 1, release 0).
    /// A client that wants fewer gives its link group fewer, which then rejects ADD_LINK.
    pub max_links: u8,
    /// The peer's side: its memory, and who it is.
    pub peer: Answer,
}

/// The end of a handshake without SMC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The connection goes on over TCP.
    Fallback(Fallback),
    /// The connection cannot go on: no one knows where the application's bytes begin.
    Failed(Fault),
}

/// Why and how a connection goes on over TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fallback {
    /// The reason that is shown.
    pub reason: DeclineCode,
    /// The reason that the peer gave, if it declined.
    pub peer_reason: Option<DeclineCode>,
    /// To be sent to the peer before anything else.
    pub decline: Option<Decline>,
    /// The peer says, or is told, that the link group is out of step: it has to end.
    pub out_of_sync: bool,
}

/// Why a connection failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// No answer in time: ETIMEDOUT.
    TimedOut,
    /// The peer closed the connection instead of answering: ECONNRESET.
    Closed,
    /// The Proposal was sent with the SYN, and the peer does not speak SMC: its application may have
    /// read the Proposal as data. EPROTO.
    ProposedToPlain,
    /// What it sent is no CLC message: EPROTO.
    Malformed(clc::Error),
    /// It sent another message than the one expected: EPROTO.
    Unexpected {
        /// What was expected.
        expected: clc::Kind,
        /// What came.
        got: clc::Kind,
    },
    /// The server chose an ISM device that was not offered: EPROTO.
    UnknownChid {
        /// The device.
        chid: Chid,
    },
    /// The client confirmed another mode or version than the server chose: EPROTO.
    OtherPath {
        /// What was chosen.
        chosen: Path,
        /// What was confirmed.
        confirmed: Path,
    },
}

/// This side's memory for an SMC-D connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmcdSide {
    /// The device.
    pub gid: SmcdGid,
    /// Names the DMB.
    pub token: u64,
    /// Size of the DMB.
    pub size: crate::ids::BufferSize,
    /// Identifies the link group here.
    pub link_id: u32,
    /// Whether the link group begins here with this connection.
    pub first_contact: bool,
}

/// This side's memory for an SMC-R connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmcrSide {
    /// The RoCE port.
    pub local: clc::Local,
    /// The queue pair.
    pub qpn: crate::ids::U24,
    /// Key of the RMB.
    pub rkey: u32,
    /// Names the connection in CDC messages; not
    /// [`NOBODY`](crate::wire::cdc::SmcrRepr::NOBODY).
    pub alert_token: u32,
    /// Size of the RMB element.
    pub size: crate::ids::BufferSize,
    /// Path MTU of the queue pair.
    pub mtu: crate::ids::MtuCode,
    /// Address of the RMB.
    pub rmb_addr: u64,
    /// First packet sequence number.
    pub psn: crate::ids::U24,
    /// SMC-Rv2: no gateway lies between the peers.
    pub direct: bool,
    /// SMC-Rv2, client: the RoCEv2 GIDs, those for a second link included.
    pub gids: List<crate::ids::RoceGid, 8>,
    /// Whether the link group begins here with this connection.
    pub first_contact: bool,
}

/// The handshake is done, but for a new SMC-R link group's first LLC messages.
#[derive(Debug)]
pub enum Finished {
    /// SMC from here on.
    Established(Agreement),
    /// CONFIRM_LINK has to go both ways over the new queue pair first.
    ConfirmingLink(ConfirmingLink),
}

/// Waits for CONFIRM_LINK over the first link of a link group.
#[derive(Debug)]
pub struct ConfirmingLink {
    decliner: Decliner,
    agreement: Agreement,
    is_server: bool,
}

/// Waits for a Decline that may explain why LLC did not come.
#[derive(Debug)]
pub struct ExpectDecline {
    decliner: Decliner,
}

impl ConfirmingLink {
    /// What was agreed on; it holds when the link is confirmed.
    pub fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// How long the peer's CONFIRM_LINK may take. A client waits twice as long, so that the
    /// Declines of both sides do not cross.
    pub fn timeout(&self) -> Duration {
        if self.is_server { LLC_TIMEOUT } else { 2 * LLC_TIMEOUT }
    }

    /// The peer's CONFIRM_LINK came, and the link is ready. The peer must not want eyecatchers.
    pub fn on_confirmed(
        self,
        confirm: &crate::wire::llc::ConfirmLink,
    ) -> Result<Agreement, Ending> {
        if !confirm.no_rmbe_eyecatcher {
            return Err(self.decline(DeclineCode::RMBE_EC));
        }
        Ok(self.agreement)
    }

    /// The link could not be made ready here.
    pub fn decline(self, code: DeclineCode) -> Ending {
        self.decliner.decline(code)
    }

    /// No CONFIRM_LINK in time: maybe the peer has declined.
    pub fn on_timeout(self) -> ExpectDecline {
        ExpectDecline { decliner: self.decliner }
    }

    /// A CLC message came instead: a Decline.
    pub fn on_message(self, message: &clc::Message) -> Ending {
        self.decliner.unexpected(message, clc::Kind::Decline)
    }
}

impl ExpectDecline {
    /// How long to wait.
    pub const TIMEOUT: Duration = DECLINE_TIMEOUT;

    /// The peer's message.
    pub fn on_message(self, message: &clc::Message) -> Ending {
        self.decliner.unexpected(message, clc::Kind::Decline)
    }

    /// There was none: this side declines.
    pub fn on_timeout(self) -> Ending {
        self.decliner.decline(DeclineCode::TIMEOUT_CL)
    }
}

/// How this side declines.
#[derive(Clone, Copy, Debug)]
struct Decliner {
    peer_id: PeerId,
    as_v1: bool,
}

impl Decliner {
    /// Declines with a message.
    fn decline(self, code: DeclineCode) -> Ending {
        self.decline_with(Decline::new(self.as_v1, self.peer_id, code))
    }

    /// The server goes on with a link group that this side does not have. `lost`: it was this
    /// side's, and so the server has to end it. Otherwise it belongs to another host that the
    /// server takes for this side, and that would lose all connections.
    fn out_of_sync(self, lost: bool) -> Ending {
        let decline = Decline::new(self.as_v1, self.peer_id, DeclineCode::SYNCERR);
        self.decline_with(Decline { out_of_sync: lost, ..decline })
    }

    fn decline_with(self, decline: Decline) -> Ending {
        Ending::Fallback(Fallback {
            reason: decline.code,
            peer_reason: None,
            out_of_sync: decline.out_of_sync,
            decline: Some(decline),
        })
    }

    /// Another message than the expected one came: a Decline is always possible.
    fn unexpected(self, message: &clc::Message, expected: clc::Kind) -> Ending {
        match message {
            clc::Message::Decline(decline) => Fallback::by_peer(decline),
            other => Ending::Failed(Fault::Unexpected { expected, got: other.kind() }),
        }
    }
}

impl Fallback {
    /// The peer has declined.
    pub fn by_peer(decline: &Decline) -> Ending {
        Ending::Fallback(Fallback {
            reason: DeclineCode::PEERDECL,
            peer_reason: Some(decline.code),
            decline: None,
            out_of_sync: decline.out_of_sync,
        })
    }

    /// Without a word: no CLC message was exchanged.
    fn silent(reason: DeclineCode) -> Ending {
        Ending::Fallback(Fallback { reason, peer_reason: None, decline: None, out_of_sync: false })
    }
}

impl From<clc::Error> for Ending {
    fn from(error: clc::Error) -> Ending {
        Ending::Failed(Fault::Malformed(error))
    }
}

impl Path {
    /// The mode and version of an Accept or a Confirm.
    pub fn of(answer: &Answer) -> Path {
        match (answer, answer.is_v1()) {
            (Answer::R(_), true) => Path::Rv1,
            (Answer::R(_), false) => Path::Rv2,
            (Answer::D(_), true) => Path::Dv1,
            (Answer::D(_), false) => Path::Dv2,
        }
    }

    /// Whether this is SMC-R.
    pub fn is_smcr(self) -> bool {
        matches!(self, Path::Rv1 | Path::Rv2)
    }

    /// Whether this is of version 1.
    pub fn is_v1(self) -> bool {
        matches!(self, Path::Rv1 | Path::Dv1)
    }
}

/// What a first contact negotiates.
#[derive(Clone, Copy, Debug)]
struct Terms {
    release: Release,
    features: FeatureMask,
    max_conns: u8,
    max_links: u8,
}

impl Terms {
    /// Those of a link group that nothing was negotiated for.
    const DEFAULT: Terms = Terms {
        release: Release::V2_0,
        features: FeatureMask(0),
        max_conns: u8::MAX,
        max_links: MAX_LINKS,
    };

    /// The first contact extension that states these terms.
    fn extension(&self, hostname: Hostname, smcr: bool, direct: bool) -> FirstContact {
        let v2_1 = self.release >= Release::V2_1;
        FirstContact {
            direct: smcr && direct,
            os: Os::LINUX,
            release: self.release,
            hostname,
            max_conns: if v2_1 && smcr { self.max_conns } else { 0 },
            max_links: if v2_1 && smcr { self.max_links } else { 0 },
            features: if v2_1 { self.features } else { FeatureMask(0) },
            vendor_options: 0,
        }
    }

    fn agreement(&self, path: Path, first_contact: bool, peer: Answer) -> Agreement {
        Agreement {
            path,
            eid: peer.eid(),
            first_contact,
            release: self.release,
            features: self.features,
            max_conns: self.max_conns,
            max_links: self.max_links,
            peer,
        }
    }
}

/// Memory on this side, as it is stated in an Accept or a Confirm.
impl SmcdSide {
    fn answer(&self, v2: Option<(Chid, Eid, FirstContact)>) -> Answer {
        let version = match v2 {
            None => clc::SmcdVersion::V1 { first_contact: self.first_contact },
            Some((chid, eid, extension)) => clc::SmcdVersion::V2 {
                chid,
                eid,
                gid_ext: if chid.is_emulated() { self.gid.ext } else { 0 },
                first_contact: self.first_contact.then_some(extension),
            },
        };
        Answer::D(clc::Smcd {
            gid: self.gid.gid,
            token: self.token,
            dmbe_idx: 0,
            size: self.size,
            link_id: self.link_id,
            version,
        })
    }
}

impl SmcrSide {
    fn answer(&self, mtu: crate::ids::MtuCode, v2: Option<(Eid, clc::V2FirstContact)>) -> Answer {
        let version = match v2 {
            None => clc::SmcrVersion::V1 { first_contact: self.first_contact },
            Some((eid, first)) => {
                clc::SmcrVersion::V2 { eid, first_contact: self.first_contact.then_some(first) }
            }
        };
        Answer::R(clc::Smcr {
            local: self.local,
            qpn: self.qpn,
            rkey: self.rkey,
            // One element per RMB.
            rmbe_idx: 1,
            alert_token: self.alert_token,
            size: self.size,
            mtu,
            rmb_addr: self.rmb_addr,
            psn: self.psn,
            version,
        })
    }
}
