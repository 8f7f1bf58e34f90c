//! CLC, Connection Layer Control: the messages in the TCP stream by which two peers agree on SMC.
//!
//! ```text
//! client ── Proposal ──▶ server     what I have
//! client ◀── Accept ──── server     what we use, and where my memory is
//! client ── Confirm ───▶ server     where mine is
//!        ◀── Decline ──▶            instead of any of these: go on over TCP
//! ```
//!
//! Layouts: RFC 7609 A.2 for version 1, the kernel's `smc_clc.h` for version 2 and 2.1.
//! All numbers are big-endian. Every message starts with a header of 8 bytes and ends with a
//! 4-byte eyecatcher; nothing tells where a message ends but its length, so a receiver takes 8
//! bytes, then exactly the rest ([`Reception`]): what follows belongs to the application.

mod accept_confirm;
mod decline;
mod proposal;
mod reception;

pub use accept_confirm::{
    Answer, FirstContact, Hostname, Os, Smcd, SmcdVersion, Smcr, SmcrVersion, V2FirstContact,
};
pub use decline::Decline;
pub use proposal::{
    GidChid, Ipv6Prefix, Ism, Prefix, Proposal, SmcdV2, V1, V2, V2Modes, V2Offer, Versions,
};
pub use reception::Reception;

use super::field::{Field, put, u16_be};
use super::{NoRoom, zeroed};
use crate::ids::{MacAddr, PeerId, RoceGid};

/// Length of the header that tells how long a message is, in bytes.
pub const HEADER_LEN: usize = 8;
/// The longest message that is read or written, in bytes: a Proposal with everything in it.
pub const MAX_LEN: usize = 652;

const TRAILER_LEN: usize = 4;
/// What every message begins with, of SMC-R and of SMC-D.
pub const EYECATCHER: [u8; 3] = [0xe2, 0xd4, 0xc3];
const SMCR: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];
const SMCD: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xc4];

mod field {
    use super::Field;
    pub(super) const EYECATCHER: Field = 0..4;
    pub(super) const KIND: usize = 4;
    pub(super) const LENGTH: Field = 5..7;
    pub(super) const FLAGS: usize = 7;
}

/// Any CLC message.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is no allocator; a handshake holds one")]
pub enum Message {
    /// The client's offer.
    Proposal(Proposal),
    /// The server's choice.
    Accept(Answer),
    /// The client's consent.
    Confirm(Answer),
    /// Either side's refusal.
    Decline(Decline),
}

/// The type of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// 1
    Proposal,
    /// 2
    Accept,
    /// 3
    Confirm,
    /// 4
    Decline,
}

/// What SMC variants a version offers (two bits: 0 = R, 1 = D, 3 = both; 2, "none", is an Option).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Modes {
    /// RDMA.
    R,
    /// Direct memory: ISM.
    D,
    /// Either.
    Both,
}

/// Who sends, and from which RoCE port; all zero where SMC-Rv1 is not offered.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Local {
    /// Unique for a boot of a host.
    pub peer_id: PeerId,
    /// GID of the RoCE port.
    pub gid: RoceGid,
    /// MAC of the RoCE port.
    pub mac: MacAddr,
}

/// The minor version of SMC v2, 0 to 15: 0 is "v2.0" (Linux to 6.6), 1 is "v2.1".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Release(u8);

impl Release {
    /// The first SMC v2.
    pub const V2_0: Release = Release(0);
    /// SMC v2.1: feature mask, negotiated limits, emulated ISM.
    pub const V2_1: Release = Release(1);

    /// The release with this number, 0 to 15.
    pub const fn new(number: u8) -> Option<Release> {
        if number <= 15 { Some(Release(number)) } else { None }
    }

    const fn from_low_bits(bits: u8) -> Release {
        Release(bits & 0x0f)
    }

    /// The number, 0 to 15.
    pub const fn number(self) -> u8 {
        self.0
    }
}

/// Supplemental features of SMC v2.1; unknown bits are kept.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FeatureMask(pub u16);

impl FeatureMask {
    /// Emulated ISM devices with 128-bit GIDs (`smc.h`: bit 0).
    pub const EMULATED_ISM: FeatureMask = FeatureMask(1);

    /// The features in both.
    #[must_use]
    pub const fn and(self, other: FeatureMask) -> FeatureMask {
        FeatureMask(self.0 & other.0)
    }

    /// Whether all features of `other` are in this mask.
    pub const fn contains(self, other: FeatureMask) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Why bytes are not a CLC message. After any of these the stream cannot be used further: the
/// kernel's answer is EPROTO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// It does not begin with "SMCR" or "SMCD" in EBCDIC.
    Eyecatcher {
        /// What stands there.
        found: [u8; 4],
    },
    /// It does not end with one.
    Trailer {
        /// What stands there.
        found: [u8; 4],
    },
    /// The type is not 1 to 4.
    Kind {
        /// What it is.
        kind: u8,
    },
    /// Version 0.
    Version {
        /// What it is.
        version: u8,
    },
    /// Fewer bytes than the header says, or than a header has.
    Truncated {
        /// Bytes that it needs.
        need: usize,
        /// Bytes there are.
        have: usize,
    },
    /// The length field is not what the message's own counts and flags call for.
    Length {
        /// What it is.
        length: usize,
        /// What it should be, or at least be.
        expected: usize,
    },
    /// The length field is above [`MAX_LEN`].
    TooLong {
        /// What it is.
        length: usize,
    },
    /// An offset does not lead to where the part it belongs to has to begin.
    Offset {
        /// The part.
        part: Part,
        /// What it is.
        offset: u16,
        /// What it should be.
        expected: u16,
    },
    /// A count above the limit of the format.
    Count {
        /// What is counted.
        part: Part,
        /// How many.
        count: u8,
        /// How many there may be.
        limit: u8,
    },
    /// The mode bits say "none" or "both" where one is needed.
    Modes {
        /// The two bits.
        bits: u8,
    },
}

/// A variable part of a message, named in an [`Error`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The IP prefix area of a Proposal.
    IpArea,
    /// IPv6 prefixes, at most 8.
    Ipv6Prefixes,
    /// The SMC v2 extension of a Proposal.
    V2Extension,
    /// The SMC-Dv2 extension behind it.
    SmcdV2Extension,
    /// EIDs, at most 8.
    Eids,
    /// ISM GIDs with their CHIDs, at most 8.
    IsmGids,
    /// RoCEv2 GIDs of a Confirm, at most 8.
    RoceGids,
}

/// The first 8 bytes of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Which message this is.
    pub kind: Kind,
    /// Its length in bytes, with header and trailer: 8 to [`MAX_LEN`].
    pub length: usize,
    version: u8,
    flags: u8,
}

impl Header {
    /// Reads a header, so that exactly [`Header::length`] bytes can be taken from the stream.
    pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
        let Some(header) = bytes.first_chunk::<HEADER_LEN>() else {
            return Err(Error::Truncated { need: HEADER_LEN, have: bytes.len() });
        };
        let eyecatcher = super::field::bytes(header, field::EYECATCHER);
        if eyecatcher != SMCR && eyecatcher != SMCD {
            return Err(Error::Eyecatcher { found: eyecatcher });
        }
        let kind = match header[field::KIND] {
            1 => Kind::Proposal,
            2 => Kind::Accept,
            3 => Kind::Confirm,
            4 => Kind::Decline,
            kind => return Err(Error::Kind { kind }),
        };
        let flags = header[field::FLAGS];
        if flags >> 4 == 0 {
            return Err(Error::Version { version: 0 });
        }
        let length = usize::from(u16_be(header, field::LENGTH));
        if length < HEADER_LEN + TRAILER_LEN {
            return Err(Error::Length { length, expected: HEADER_LEN + TRAILER_LEN });
        }
        if length > MAX_LEN {
            return Err(Error::TooLong { length });
        }
        Ok(Header { kind, length, version: flags >> 4, flags: flags & 0x0f })
    }

    /// Whether the message is of version 1; everything above is read as version 2.
    pub fn is_v1(&self) -> bool {
        self.version == 1
    }

    /// Bits 3:2: the v2 modes of a Proposal.
    fn high_bits(&self) -> u8 {
        self.flags >> 2
    }

    /// Bits 1:0: the v1 modes of a Proposal, the chosen mode of an Accept or Confirm.
    fn low_bits(&self) -> u8 {
        self.flags & 3
    }

    /// Bit 3: first contact in an Accept or Confirm, out of sync in a Decline.
    fn bit3(&self) -> bool {
        self.flags & 8 != 0
    }
}

impl Message {
    /// Reads one message. `bytes` has to hold all of it; what follows is not looked at.
    pub fn parse(bytes: &[u8]) -> Result<Message, Error> {
        let header = Header::parse(bytes)?;
        let message = bytes
            .get(..header.length)
            .ok_or(Error::Truncated { need: header.length, have: bytes.len() })?;
        if header.kind != Kind::Decline {
            // The kernel does not look at the trailer of a Decline (`smc_clc_msg_hdr_valid`).
            let found = super::field::bytes(message, header.length - TRAILER_LEN..header.length);
            if found != SMCR && found != SMCD {
                return Err(Error::Trailer { found });
            }
        }
        Ok(match header.kind {
            Kind::Proposal => Message::Proposal(Proposal::parse(&header, message)?),
            Kind::Accept => Message::Accept(Answer::parse(&header, message)?),
            Kind::Confirm => Message::Confirm(Answer::parse(&header, message)?),
            Kind::Decline => Message::Decline(Decline::parse(&header, message)?),
        })
    }

    /// Which message this is.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Proposal(_) => Kind::Proposal,
            Message::Accept(_) => Kind::Accept,
            Message::Confirm(_) => Kind::Confirm,
            Message::Decline(_) => Kind::Decline,
        }
    }

    /// Length of the message on the wire, in bytes.
    pub fn emitted_len(&self) -> usize {
        match self {
            Message::Proposal(proposal) => proposal.emitted_len(),
            Message::Accept(answer) => answer.emitted_len(Kind::Accept),
            Message::Confirm(answer) => answer.emitted_len(Kind::Confirm),
            Message::Decline(decline) => decline.emitted_len(),
        }
    }

    /// Writes the message to the start of `buffer` and returns it; [`MAX_LEN`] bytes always do.
    pub fn emit<'b>(&self, buffer: &'b mut [u8]) -> Result<&'b [u8], NoRoom> {
        let message = zeroed(buffer, self.emitted_len())?;
        match self {
            Message::Proposal(proposal) => proposal.emit(message),
            Message::Accept(answer) => answer.emit(Kind::Accept, message),
            Message::Confirm(answer) => answer.emit(Kind::Confirm, message),
            Message::Decline(decline) => decline.emit(message),
        }
        Ok(message)
    }
}

impl Modes {
    fn from_bits(bits: u8) -> Option<Modes> {
        match bits & 3 {
            0 => Some(Modes::R),
            1 => Some(Modes::D),
            2 => None,
            _ => Some(Modes::Both),
        }
    }

    fn bits(modes: Option<Modes>) -> u8 {
        match modes {
            Some(Modes::R) => 0,
            Some(Modes::D) => 1,
            None => 2,
            Some(Modes::Both) => 3,
        }
    }

    /// Whether SMC-R is among them.
    pub fn smcr(self) -> bool {
        self != Modes::D
    }

    /// Whether SMC-D is among them.
    pub fn smcd(self) -> bool {
        self != Modes::R
    }

    /// The modes that stand for these two, if at least one is offered.
    pub fn of(smcr: bool, smcd: bool) -> Option<Modes> {
        match (smcr, smcd) {
            (true, true) => Some(Modes::Both),
            (true, false) => Some(Modes::R),
            (false, true) => Some(Modes::D),
            (false, false) => None,
        }
    }
}

impl Local {
    const PEER_ID: Field = 8..16;
    const GID: Field = 16..32;
    const MAC: Field = 32..38;

    fn parse(message: &[u8]) -> Local {
        Local {
            peer_id: PeerId(super::field::bytes(message, Self::PEER_ID)),
            gid: RoceGid(super::field::bytes(message, Self::GID)),
            mac: MacAddr(super::field::bytes(message, Self::MAC)),
        }
    }

    fn emit(&self, message: &mut [u8]) {
        put(message, Self::PEER_ID, self.peer_id.0);
        put(message, Self::GID, self.gid.0);
        put(message, Self::MAC, self.mac.0);
    }
}

/// Writes header and trailer around a message that fills `message`.
fn frame(message: &mut [u8], kind: Kind, eyecatcher: [u8; 4], version: u8, flags: u8) {
    let length = message.len();
    put(message, field::EYECATCHER, eyecatcher);
    message[field::KIND] = match kind {
        Kind::Proposal => 1,
        Kind::Accept => 2,
        Kind::Confirm => 3,
        Kind::Decline => 4,
    };
    let on_wire = u16::try_from(length).unwrap_or(u16::MAX);
    put(message, field::LENGTH, on_wire.to_be_bytes());
    message[field::FLAGS] = version << 4 | flags;
    put(message, length - TRAILER_LEN..length, eyecatcher);
}
