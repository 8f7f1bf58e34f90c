//! Accept and Confirm: the chosen mode, and where the sender's memory is (RFC 7609 A.2;
//! `smc_clc.h`). Both have the same layout; only a Confirm of SMC-Rv2 has a list of GIDs.

use core::fmt;

use super::super::field::{Field, bytes, put, u16_be, u32_be, u64_be};
use super::{
    Error, FeatureMask, Header, Kind, Local, Modes, Part, Release, SMCD, SMCR, TRAILER_LEN, frame,
};
use crate::ids::{BufferSize, Chid, Eid, MtuCode, RoceGid, U24};
use crate::list::List;

/// An Accept or a Confirm: which of them, says the [`Message`](super::Message) around it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// SMC-R was chosen.
    R(Smcr),
    /// SMC-D was chosen.
    D(Smcd),
}

/// The sender's side of an SMC-R connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Smcr {
    /// The sender and the RoCE port of the link.
    pub local: Local,
    /// Queue pair of the link at the sender.
    pub qpn: U24,
    /// Key for RDMA WRITEs into the RMB.
    pub rkey: u32,
    /// Index of the element in the RMB, from 1; Linux has one element per RMB, so 1.
    pub rmbe_idx: u8,
    /// Names the connection in every CDC message sent to the sender.
    pub alert_token: u32,
    /// Size of the element.
    pub size: BufferSize,
    /// Path MTU; in a Confirm the smaller of both.
    pub mtu: MtuCode,
    /// Virtual address of the RMB.
    pub rmb_addr: u64,
    /// The first packet sequence number that the sender will use.
    pub psn: U24,
    /// Version, and what only one of them has.
    pub version: SmcrVersion,
}

/// What an SMC-R Accept or Confirm says beyond the common part.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is no allocator; a handshake holds one")]
pub enum SmcrVersion {
    /// RFC 7609.
    V1 {
        /// Whether a new link group begins.
        first_contact: bool,
    },
    /// SMC-Rv2.
    V2 {
        /// The EID that both have.
        eid: Eid,
        /// Present if a new link group begins.
        first_contact: Option<V2FirstContact>,
    },
}

/// The sender's side of an SMC-D connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Smcd {
    /// GID of the sender's device; for an emulated one its first half.
    pub gid: u64,
    /// Names the DMB at the device.
    pub token: u64,
    /// Index of the element in the DMB; Linux sends 0.
    pub dmbe_idx: u8,
    /// Size of the DMB.
    pub size: BufferSize,
    /// Identifies the sender's link group, native byte order.
    pub link_id: u32,
    /// Version, and what only one of them has.
    pub version: SmcdVersion,
}

/// What an SMC-D Accept or Confirm says beyond the common part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SmcdVersion {
    /// SMC-Dv1.
    V1 {
        /// Whether a new link group begins.
        first_contact: bool,
    },
    /// SMC-Dv2.
    V2 {
        /// CHID of the chosen device.
        chid: Chid,
        /// The EID that both have.
        eid: Eid,
        /// Second half of an emulated device's GID, otherwise 0.
        gid_ext: u64,
        /// Present if a new link group begins. Its limits and features are on the wire from release
        /// 1 on.
        first_contact: Option<FirstContact>,
    },
}

/// First contact extension (FCE): who the sender is and what it can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FirstContact {
    /// SMC-R: no gateway lies between the peers.
    pub direct: bool,
    /// The sender's system.
    pub os: Os,
    /// The release that the sender uses from here on.
    pub release: Release,
    /// The sender's host name.
    pub hostname: Hostname,
    /// Connections per link group; SMC-R only.
    pub max_conns: u8,
    /// Links per link group; SMC-R only.
    pub max_links: u8,
    /// The server's features; in a Confirm those of both.
    pub features: FeatureMask,
    /// Options of the vendor; Linux sends 0.
    pub vendor_options: u32,
}

/// First contact extension of SMC-R.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct V2FirstContact {
    /// The extension.
    pub extension: FirstContact,
    /// The client's RoCEv2 GIDs, those for a second link included. Only a Confirm has this list: an
    /// Accept is written without it and read as empty.
    pub gids: List<RoceGid, 8>,
}

/// An operating system, 0 to 15.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Os(u8);

impl Os {
    /// Not said.
    pub const UNSPECIFIED: Os = Os(0);
    /// z/OS.
    pub const ZOS: Os = Os(1);
    /// Linux.
    pub const LINUX: Os = Os(2);
    /// AIX.
    pub const AIX: Os = Os(3);

    pub(super) const fn from_low_bits(bits: u8) -> Os {
        Os(bits & 0x0f)
    }

    /// The number, 0 to 15.
    pub const fn number(self) -> u8 {
        self.0
    }
}

/// A host name: 32 bytes, padded with blanks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hostname(pub [u8; 32]);

impl Hostname {
    /// The first 32 bytes of a name.
    pub fn new(name: &str) -> Hostname {
        let mut bytes = [b' '; 32];
        for (to, from) in bytes.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        Hostname(bytes)
    }
}

impl fmt::Display for Hostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.trim_ascii_end().escape_ascii())
    }
}

impl fmt::Debug for Hostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hostname(\"{self}\")")
    }
}

mod r {
    use super::Field;
    pub(super) const QPN: Field = 38..41;
    pub(super) const RKEY: Field = 41..45;
    pub(super) const RMBE_IDX: usize = 45;
    pub(super) const TOKEN: Field = 46..50;
    pub(super) const SIZE_MTU: usize = 50;
    pub(super) const ADDR: Field = 52..60;
    pub(super) const PSN: Field = 61..64;
    pub(super) const V1_END: usize = 64;
    pub(super) const EID: Field = 64..96;
    pub(super) const V2_END: usize = 104;
}

mod d {
    use super::Field;
    pub(super) const GID: Field = 8..16;
    pub(super) const TOKEN: Field = 16..24;
    pub(super) const IDX: usize = 24;
    pub(super) const SIZE: usize = 25;
    pub(super) const LINK_ID: Field = 28..32;
    pub(super) const V1_END: usize = 44;
    pub(super) const CHID: Field = 32..34;
    pub(super) const EID: Field = 34..66;
    pub(super) const GID_EXT: Field = 66..74;
    pub(super) const V2_END: usize = 74;
}

mod fce {
    use super::Field;
    pub(super) const DIRECT: usize = 0;
    pub(super) const OS_RELEASE: usize = 1;
    pub(super) const HOSTNAME: Field = 4..36;
    /// Length of the part that release 0 of SMC-D has.
    pub(super) const SHORT: usize = 36;
    pub(super) const MAX_CONNS: usize = 36;
    pub(super) const MAX_LINKS: usize = 37;
    pub(super) const FEATURES: Field = 38..40;
    pub(super) const VENDOR: Field = 40..44;
    pub(super) const LONG: usize = 52;
    /// The list of GIDs behind it in a Confirm: how many, 3 reserved bytes, 16 bytes each.
    pub(super) const GIDS_FIXED: usize = 4;
    pub(super) const GID: usize = 16;
}

impl Answer {
    /// Whether the sender begins a new link group.
    pub fn is_first_contact(&self) -> bool {
        match self {
            Answer::R(Smcr { version: SmcrVersion::V1 { first_contact }, .. })
            | Answer::D(Smcd { version: SmcdVersion::V1 { first_contact }, .. }) => *first_contact,
            Answer::R(Smcr { version: SmcrVersion::V2 { first_contact, .. }, .. }) => {
                first_contact.is_some()
            }
            Answer::D(Smcd { version: SmcdVersion::V2 { first_contact, .. }, .. }) => {
                first_contact.is_some()
            }
        }
    }

    /// Whether this is a message of version 1.
    pub fn is_v1(&self) -> bool {
        matches!(
            self,
            Answer::R(Smcr { version: SmcrVersion::V1 { .. }, .. })
                | Answer::D(Smcd { version: SmcdVersion::V1 { .. }, .. })
        )
    }

    /// The first contact extension, if there is one.
    pub fn first_contact(&self) -> Option<&FirstContact> {
        match self {
            Answer::R(Smcr { version: SmcrVersion::V2 { first_contact, .. }, .. }) => {
                first_contact.as_ref().map(|first| &first.extension)
            }
            Answer::D(Smcd { version: SmcdVersion::V2 { first_contact, .. }, .. }) => {
                first_contact.as_ref()
            }
            _ => None,
        }
    }

    /// The EID that was chosen, in version 2.
    pub fn eid(&self) -> Option<Eid> {
        match self {
            Answer::R(Smcr { version: SmcrVersion::V2 { eid, .. }, .. })
            | Answer::D(Smcd { version: SmcdVersion::V2 { eid, .. }, .. }) => Some(*eid),
            _ => None,
        }
    }

    pub(super) fn emitted_len(&self, kind: Kind) -> usize {
        let content = match self {
            Answer::R(Smcr { version: SmcrVersion::V1 { .. }, .. }) => r::V1_END,
            Answer::R(Smcr { version: SmcrVersion::V2 { first_contact, .. }, .. }) => {
                r::V2_END
                    + match first_contact {
                        None => 0,
                        Some(_) if kind == Kind::Accept => fce::LONG,
                        Some(first) => fce::LONG + fce::GIDS_FIXED + fce::GID * first.gids.len(),
                    }
            }
            Answer::D(Smcd { version: SmcdVersion::V1 { .. }, .. }) => d::V1_END,
            Answer::D(Smcd { version: SmcdVersion::V2 { first_contact, .. }, .. }) => {
                d::V2_END + first_contact.as_ref().map_or(0, FirstContact::smcd_len)
            }
        };
        content + TRAILER_LEN
    }

    pub(super) fn parse(header: &Header, message: &[u8]) -> Result<Answer, Error> {
        match Modes::from_bits(header.low_bits()) {
            Some(Modes::R) => Ok(Answer::R(Smcr::parse(header, message)?)),
            Some(Modes::D) => Ok(Answer::D(Smcd::parse(header, message)?)),
            _ => Err(Error::Modes { bits: header.low_bits() }),
        }
    }

    pub(super) fn emit(&self, kind: Kind, message: &mut [u8]) {
        let (eyecatcher, mode) = match self {
            Answer::R(smcr) => {
                smcr.emit(kind, message);
                (SMCR, Modes::R)
            }
            Answer::D(smcd) => {
                smcd.emit(message);
                (SMCD, Modes::D)
            }
        };
        let version = if self.is_v1() { 1 } else { 2 };
        let flags = u8::from(self.is_first_contact()) << 3 | Modes::bits(Some(mode));
        frame(message, kind, eyecatcher, version, flags);
    }
}

impl Smcr {
    fn parse(header: &Header, message: &[u8]) -> Result<Smcr, Error> {
        let version = if header.is_v1() {
            exactly(message, r::V1_END + TRAILER_LEN)?;
            SmcrVersion::V1 { first_contact: header.bit3() }
        } else {
            at_least(message, r::V2_END + TRAILER_LEN)?;
            let first_contact = match header.bit3() {
                false => None,
                true => Some(V2FirstContact::parse(header.kind, message)?),
            };
            SmcrVersion::V2 { eid: Eid::from_bytes(bytes(message, r::EID)), first_contact }
        };
        Ok(Smcr {
            local: Local::parse(message),
            qpn: U24::from_be_bytes(bytes(message, r::QPN)),
            rkey: u32_be(message, r::RKEY),
            rmbe_idx: message[r::RMBE_IDX],
            alert_token: u32_be(message, r::TOKEN),
            size: BufferSize::from_low_bits(message[r::SIZE_MTU] >> 4),
            mtu: MtuCode::from_low_bits(message[r::SIZE_MTU]),
            rmb_addr: u64_be(message, r::ADDR),
            psn: U24::from_be_bytes(bytes(message, r::PSN)),
            version,
        })
    }

    fn emit(&self, kind: Kind, message: &mut [u8]) {
        self.local.emit(message);
        put(message, r::QPN, self.qpn.to_be_bytes());
        put(message, r::RKEY, self.rkey.to_be_bytes());
        message[r::RMBE_IDX] = self.rmbe_idx;
        put(message, r::TOKEN, self.alert_token.to_be_bytes());
        message[r::SIZE_MTU] = self.size.code() << 4 | self.mtu.code();
        put(message, r::ADDR, self.rmb_addr.to_be_bytes());
        put(message, r::PSN, self.psn.to_be_bytes());
        if let SmcrVersion::V2 { eid, first_contact } = &self.version {
            put(message, r::EID, *eid.as_bytes());
            if let Some(first) = first_contact {
                first.emit(kind, &mut message[r::V2_END..]);
            }
        }
    }
}

impl Smcd {
    fn parse(header: &Header, message: &[u8]) -> Result<Smcd, Error> {
        let version = if header.is_v1() {
            exactly(message, d::V1_END + TRAILER_LEN)?;
            SmcdVersion::V1 { first_contact: header.bit3() }
        } else {
            at_least(message, d::V2_END + TRAILER_LEN)?;
            let first_contact = match header.bit3() {
                false => None,
                true => Some(FirstContact::parse_smcd(message)?),
            };
            SmcdVersion::V2 {
                chid: Chid(u16_be(message, d::CHID)),
                eid: Eid::from_bytes(bytes(message, d::EID)),
                gid_ext: u64_be(message, d::GID_EXT),
                first_contact,
            }
        };
        Ok(Smcd {
            gid: u64_be(message, d::GID),
            token: u64_be(message, d::TOKEN),
            dmbe_idx: message[d::IDX],
            size: BufferSize::from_low_bits(message[d::SIZE] >> 4),
            link_id: u32::from_ne_bytes(bytes(message, d::LINK_ID)),
            version,
        })
    }

    fn emit(&self, message: &mut [u8]) {
        put(message, d::GID, self.gid.to_be_bytes());
        put(message, d::TOKEN, self.token.to_be_bytes());
        message[d::IDX] = self.dmbe_idx;
        message[d::SIZE] = self.size.code() << 4;
        put(message, d::LINK_ID, self.link_id.to_ne_bytes());
        if let SmcdVersion::V2 { chid, eid, gid_ext, first_contact } = &self.version {
            put(message, d::CHID, chid.0.to_be_bytes());
            put(message, d::EID, *eid.as_bytes());
            put(message, d::GID_EXT, gid_ext.to_be_bytes());
            if let Some(first) = first_contact {
                first.emit(&mut message[d::V2_END..d::V2_END + first.smcd_len()]);
            }
        }
    }
}

impl FirstContact {
    /// Length in an SMC-D message: the tail came with release 1.
    fn smcd_len(&self) -> usize {
        if self.release < Release::V2_1 { fce::SHORT } else { fce::LONG }
    }

    /// From a section of 36 or 52 bytes.
    fn parse(section: &[u8]) -> FirstContact {
        let long = section.len() >= fce::LONG;
        FirstContact {
            direct: section[fce::DIRECT] & 0x80 != 0,
            os: Os::from_low_bits(section[fce::OS_RELEASE] >> 4),
            release: Release::from_low_bits(section[fce::OS_RELEASE]),
            hostname: Hostname(bytes(section, fce::HOSTNAME)),
            max_conns: if long { section[fce::MAX_CONNS] } else { 0 },
            max_links: if long { section[fce::MAX_LINKS] } else { 0 },
            features: FeatureMask(if long { u16_be(section, fce::FEATURES) } else { 0 }),
            vendor_options: if long { u32_be(section, fce::VENDOR) } else { 0 },
        }
    }

    fn parse_smcd(message: &[u8]) -> Result<FirstContact, Error> {
        at_least(message, d::V2_END + fce::SHORT + TRAILER_LEN)?;
        let short = FirstContact::parse(&message[d::V2_END..d::V2_END + fce::SHORT]);
        let len = short.smcd_len();
        at_least(message, d::V2_END + len + TRAILER_LEN)?;
        Ok(FirstContact::parse(&message[d::V2_END..d::V2_END + len]))
    }

    /// Into a section of 36 or 52 bytes.
    fn emit(&self, section: &mut [u8]) {
        section[fce::DIRECT] = u8::from(self.direct) << 7;
        section[fce::OS_RELEASE] = self.os.number() << 4 | self.release.number();
        put(section, fce::HOSTNAME, self.hostname.0);
        if section.len() >= fce::LONG {
            section[fce::MAX_CONNS] = self.max_conns;
            section[fce::MAX_LINKS] = self.max_links;
            put(section, fce::FEATURES, self.features.0.to_be_bytes());
            put(section, fce::VENDOR, self.vendor_options.to_be_bytes());
        }
    }
}

impl V2FirstContact {
    fn parse(kind: Kind, message: &[u8]) -> Result<V2FirstContact, Error> {
        let gids_at = r::V2_END + fce::LONG;
        at_least(message, gids_at + TRAILER_LEN)?;
        let extension = FirstContact::parse(&message[r::V2_END..gids_at]);
        let mut gids = List::new();
        if kind == Kind::Confirm {
            let first_at = gids_at + fce::GIDS_FIXED;
            at_least(message, first_at + TRAILER_LEN)?;
            let count = message[gids_at];
            if count > 8 {
                return Err(Error::Count { part: Part::RoceGids, count, limit: 8 });
            }
            let end = first_at + fce::GID * usize::from(count);
            at_least(message, end + TRAILER_LEN)?;
            for gid in message[first_at..end].chunks_exact(fce::GID) {
                let _ = gids.push(RoceGid(bytes(gid, 0..fce::GID)));
            }
        }
        Ok(V2FirstContact { extension, gids })
    }

    fn emit(&self, kind: Kind, section: &mut [u8]) {
        self.extension.emit(&mut section[..fce::LONG]);
        if kind == Kind::Confirm {
            section[fce::LONG] = self.gids.len() as u8;
            let entries = section[fce::LONG + fce::GIDS_FIXED..].chunks_exact_mut(fce::GID);
            for (entry, gid) in entries.zip(self.gids.iter()) {
                put(entry, 0..fce::GID, gid.0);
            }
        }
    }
}

fn exactly(message: &[u8], expected: usize) -> Result<(), Error> {
    let length = message.len();
    if length == expected { Ok(()) } else { Err(Error::Length { length, expected }) }
}

fn at_least(message: &[u8], expected: usize) -> Result<(), Error> {
    let length = message.len();
    if length >= expected { Ok(()) } else { Err(Error::Length { length, expected }) }
}
