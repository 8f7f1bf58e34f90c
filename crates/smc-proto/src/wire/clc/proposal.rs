//! Proposal: what a client offers (RFC 7609 A.2; `smc_clc.h`).
//!
//! ```text
//!   0  header                                                    8
//!   8  peer id, GID, MAC of SMC-Rv1                              30
//!  38  IP area offset, from 40: 40, or 0 without SMC-D area       2
//!  40  SMC-D area: GID, CHID; v2 extension offset (from 52)      40   (v1: may be absent)
//!  80  IP area: IPv4 subnet, up to 8 IPv6 prefixes         8 + 17·n   (absent if v1 is "none")
//!      v2 extension: RoCEv2 GID, limits, EIDs             40 + 32·n   (absent if v2 is "none")
//!      SMC-Dv2 extension: SEID, GIDs with CHIDs           48 + 10·n   (if v2 has SMC-D)
//!      trailer                                                    4
//! ```

use super::super::field::{Field, bytes, put, u16_be, u64_be};
use super::{
    Error, FeatureMask, Header, Kind, Local, Modes, Part, Release, SMCR, TRAILER_LEN, frame,
};
use crate::ids::{Chid, Eid, RoceGid, SmcdGid};
use crate::list::List;

/// A client's offer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// The client and its RoCE port; all zero unless SMC-Rv1 is offered.
    pub local: Local,
    /// What is offered.
    pub versions: Versions,
}

/// What versions are offered, and what each needs.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is no allocator; a handshake holds one")]
pub enum Versions {
    /// A message of version 1: RFC 7609, and SMC-Dv1 if it has an SMC-D area.
    V1 {
        /// The offer.
        v1: V1,
        /// The SMC-D area; there has to be one if SMC-D is offered.
        ism: Option<Ism>,
    },
    /// A message of version 2, which may offer version 1 as well.
    V2 {
        /// The SMC-D area.
        ism: Ism,
        /// The offer of version 1.
        v1: Option<V1>,
        /// The offer of version 2.
        v2: V2Offer,
    },
}

/// What a message of version 2 has of that version.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is no allocator; a handshake holds one")]
pub enum V2Offer {
    /// It is not offered.
    None,
    /// It is offered and its extension is missing (offset 0, code 03030004). Linux took such a message
    /// for a Proposal without version 2 until 6.12, and since then for a malformed one.
    Bare(Modes),
    /// It is offered.
    Whole(V2),
}

/// Version 1's offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct V1 {
    /// SMC-R, SMC-D, or both.
    pub modes: Modes,
    /// The client's IP subnets: v1 peers have to be in the same one.
    pub prefix: Prefix,
}

/// Subnets of the interface that the TCP connection uses.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Prefix {
    /// IPv4 network; zero over IPv6.
    pub subnet: [u8; 4],
    /// Bits of the mask, 0 to 32.
    pub prefix_len: u8,
    /// IPv6 networks; none over IPv4.
    pub ipv6: List<Ipv6Prefix, 8>,
}

/// One IPv6 network.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Ipv6Prefix {
    /// The address.
    pub prefix: [u8; 16],
    /// Bits of the mask, 0 to 128.
    pub len: u8,
}

/// The SMC-D area: the ISM device of version 1, and identification of the vendor.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Ism {
    /// GID of the native ISM device, or 0.
    pub gid: u64,
    /// Its CHID, or [`Chid::NONE`].
    pub chid: Chid,
    /// Vendor OUI; Linux sends 0.
    pub vendor_oui: [u8; 3],
    /// Options of the vendor; Linux sends 0.
    pub vendor_options: [u8; 5],
}

/// Version 2's offer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct V2 {
    /// SMC-R, SMC-D with its devices, or both.
    pub modes: V2Modes,
    /// Whether the SEID of the SMC-Dv2 extension counts.
    pub seid: bool,
    /// The newest release that the client speaks.
    pub release: Release,
    /// GID of the RoCEv2 port, or 0.
    pub gid: RoceGid,
    /// Connections per link group that the client allows (16 to 255), SMC-R of release 1 only.
    pub max_conns: u8,
    /// Links per link group that the client allows (1 or 2), SMC-R of release 1 only.
    pub max_links: u8,
    /// Features, release 1 only.
    pub features: FeatureMask,
    /// User-defined EIDs; Linux allows 4 to be configured.
    pub eids: List<Eid, 8>,
}

/// SMC variants of version 2. SMC-D without its extension can be sent (offset 0, code 03030005).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum V2Modes {
    /// SMC-R.
    R,
    /// SMC-D.
    D(Option<SmcdV2>),
    /// Either.
    Both(Option<SmcdV2>),
}

/// The SMC-Dv2 extension.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SmcdV2 {
    /// The SEID of the client's system, or none.
    pub seid: Eid,
    /// GIDs of the client's ISM devices. An emulated device takes two entries with equal CHIDs, the
    /// halves of its GID: see [`SmcdV2::devices`].
    pub gids: List<GidChid, 8>,
}

/// One entry of the SMC-Dv2 extension.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct GidChid {
    /// A GID, or half of one.
    pub gid: u64,
    /// The channel.
    pub chid: Chid,
}

mod at {
    use super::Field;
    pub(super) const IP_AREA_OFFSET: Field = 38..40;
    /// Where [`IP_AREA_OFFSET`] counts from.
    pub(super) const IP_AREA_BASE: usize = 40;
    pub(super) const ISM_LEN: usize = 40;
    pub(super) const ISM_GID: Field = 40..48;
    pub(super) const ISM_CHID: Field = 48..50;
    pub(super) const V2_OFFSET: Field = 50..52;
    /// Where [`V2_OFFSET`] counts from.
    pub(super) const V2_BASE: usize = 52;
    pub(super) const OUI: Field = 52..55;
    pub(super) const VENDOR: Field = 55..60;
}

mod prefix {
    use super::Field;
    pub(super) const SUBNET: Field = 0..4;
    pub(super) const LEN_BITS: usize = 4;
    pub(super) const IPV6_COUNT: usize = 7;
    pub(super) const FIXED: usize = 8;
    pub(super) const IPV6_ENTRY: usize = 17;
}

mod v2 {
    use super::Field;
    pub(super) const EID_COUNT: usize = 0;
    pub(super) const GID_COUNT: usize = 1;
    pub(super) const RELEASE_SEID: usize = 3;
    pub(super) const SMCD_OFFSET: Field = 6..8;
    /// Where [`SMCD_OFFSET`] counts from.
    pub(super) const SMCD_BASE: usize = 8;
    pub(super) const ROCE_GID: Field = 8..24;
    pub(super) const MAX_CONNS: usize = 24;
    pub(super) const MAX_LINKS: usize = 25;
    pub(super) const FEATURES: Field = 26..28;
    pub(super) const FIXED: usize = 40;
}

mod smcd_v2 {
    use super::Field;
    pub(super) const SEID: Field = 0..32;
    pub(super) const FIXED: usize = 48;
    pub(super) const ENTRY: usize = 10;
}

impl Proposal {
    /// The offer of version 1, in a message of either version.
    pub fn v1(&self) -> Option<&V1> {
        match &self.versions {
            Versions::V1 { v1, .. } => Some(v1),
            Versions::V2 { v1, .. } => v1.as_ref(),
        }
    }

    /// The offer of version 2, if its extension is there.
    pub fn v2(&self) -> Option<&V2> {
        match &self.versions {
            Versions::V2 { v2: V2Offer::Whole(v2), .. } => Some(v2),
            _ => None,
        }
    }

    /// Whether SMC-R is offered, in whichever version.
    pub fn offers_smcr(&self) -> bool {
        let modes = [self.v1().map(|v1| v1.modes), self.v2_modes()];
        modes.into_iter().flatten().any(|modes| modes != Modes::D)
    }

    /// The SMC variants of version 2 that the header names, with an extension or without.
    pub fn v2_modes(&self) -> Option<Modes> {
        match &self.versions {
            Versions::V1 { .. } => None,
            Versions::V2 { v2, .. } => match v2 {
                V2Offer::None => None,
                V2Offer::Bare(modes) => Some(*modes),
                V2Offer::Whole(v2) => Some(v2.modes.modes()),
            },
        }
    }

    /// The SMC-D area.
    pub fn ism(&self) -> Option<&Ism> {
        match &self.versions {
            Versions::V1 { ism, .. } => ism.as_ref(),
            Versions::V2 { ism, .. } => Some(ism),
        }
    }

    /// Whether this is a message of version 1.
    pub fn is_v1(&self) -> bool {
        matches!(self.versions, Versions::V1 { .. })
    }

    pub(super) fn emitted_len(&self) -> usize {
        at::IP_AREA_BASE
            + self.ism().map_or(0, |_| at::ISM_LEN)
            + self.v1().map_or(0, |v1| v1.prefix.emitted_len())
            + self.v2().map_or(0, V2::emitted_len)
            + TRAILER_LEN
    }

    pub(super) fn parse(header: &Header, message: &[u8]) -> Result<Proposal, Error> {
        let length = message.len();
        if length < at::IP_AREA_BASE + TRAILER_LEN {
            return Err(Error::Length { length, expected: at::IP_AREA_BASE + TRAILER_LEN });
        }
        // What is left to read, without the trailer.
        let mut rest = &message[at::IP_AREA_BASE..length - TRAILER_LEN];
        let ip_offset = u16_be(message, at::IP_AREA_OFFSET);
        let v1_modes = Modes::from_bits(header.low_bits());
        let local = Local::parse(message);
        let versions = if header.is_v1() {
            let modes = v1_modes.ok_or(Error::Modes { bits: header.low_bits() })?;
            let ism = match usize::from(ip_offset) {
                0 => None,
                at::ISM_LEN => {
                    take(&mut rest, at::ISM_LEN, length)?;
                    Some(Ism::parse(message))
                }
                _ => return Err(bad_offset(Part::IpArea, ip_offset, at::ISM_LEN)),
            };
            let v1 = V1 { modes, prefix: Prefix::parse(&mut rest, length)? };
            Versions::V1 { v1, ism }
        } else {
            take(&mut rest, at::ISM_LEN, length)?;
            let ism = Ism::parse(message);
            let v1 = match v1_modes {
                None => None,
                Some(_) if usize::from(ip_offset) != at::ISM_LEN => {
                    return Err(bad_offset(Part::IpArea, ip_offset, at::ISM_LEN));
                }
                Some(modes) => Some(V1 { modes, prefix: Prefix::parse(&mut rest, length)? }),
            };
            let v2 = match Modes::from_bits(header.high_bits()) {
                None => V2Offer::None,
                Some(modes) if u16_be(message, at::V2_OFFSET) == 0 => V2Offer::Bare(modes),
                Some(modes) => {
                    let offset = u16_be(message, at::V2_OFFSET);
                    let expected = length - TRAILER_LEN - rest.len() - at::V2_BASE;
                    if usize::from(offset) != expected {
                        return Err(bad_offset(Part::V2Extension, offset, expected));
                    }
                    V2Offer::Whole(V2::parse(modes, &mut rest, length)?)
                }
            };
            Versions::V2 { ism, v1, v2 }
        };
        if !rest.is_empty() {
            return Err(Error::Length { length, expected: length - rest.len() });
        }
        Ok(Proposal { local, versions })
    }

    pub(super) fn emit(&self, message: &mut [u8]) {
        let length = message.len();
        self.local.emit(message);
        if let Some(ism) = self.ism() {
            ism.emit(message);
        }
        let mut at = at::IP_AREA_BASE + self.ism().map_or(0, |_| at::ISM_LEN);
        if let Some(v1) = self.v1() {
            let offset = if self.ism().is_some() { at::ISM_LEN as u16 } else { 0 };
            put(message, at::IP_AREA_OFFSET, offset.to_be_bytes());
            v1.prefix.emit(&mut message[at..]);
            at += v1.prefix.emitted_len();
        }
        if let Some(v2) = self.v2() {
            put(message, at::V2_OFFSET, ((at - at::V2_BASE) as u16).to_be_bytes());
            v2.emit(&mut message[at..length - TRAILER_LEN]);
        }
        let v1 = Modes::bits(self.v1().map(|v1| v1.modes));
        let v2 = Modes::bits(self.v2_modes());
        match self.versions {
            Versions::V1 { .. } => frame(message, Kind::Proposal, SMCR, 1, v1),
            Versions::V2 { .. } => frame(message, Kind::Proposal, SMCR, 2, v2 << 2 | v1),
        }
    }
}

impl Ism {
    fn parse(message: &[u8]) -> Ism {
        Ism {
            gid: u64_be(message, at::ISM_GID),
            chid: Chid(u16_be(message, at::ISM_CHID)),
            vendor_oui: bytes(message, at::OUI),
            vendor_options: bytes(message, at::VENDOR),
        }
    }

    fn emit(&self, message: &mut [u8]) {
        put(message, at::ISM_GID, self.gid.to_be_bytes());
        put(message, at::ISM_CHID, self.chid.0.to_be_bytes());
        put(message, at::OUI, self.vendor_oui);
        put(message, at::VENDOR, self.vendor_options);
    }
}

impl Prefix {
    fn emitted_len(&self) -> usize {
        prefix::FIXED + prefix::IPV6_ENTRY * self.ipv6.len()
    }

    fn parse(rest: &mut &[u8], length: usize) -> Result<Prefix, Error> {
        let fixed = take(rest, prefix::FIXED, length)?;
        let count = fixed[prefix::IPV6_COUNT];
        let mut ipv6 = List::new();
        for _ in 0..check_count(Part::Ipv6Prefixes, count)? {
            let entry = take(rest, prefix::IPV6_ENTRY, length)?;
            let _ = ipv6.push(Ipv6Prefix { prefix: bytes(entry, 0..16), len: entry[16] });
        }
        let prefix_len = fixed[prefix::LEN_BITS];
        Ok(Prefix { subnet: bytes(fixed, prefix::SUBNET), prefix_len, ipv6 })
    }

    fn emit(&self, section: &mut [u8]) {
        put(section, prefix::SUBNET, self.subnet);
        section[prefix::LEN_BITS] = self.prefix_len;
        section[prefix::IPV6_COUNT] = self.ipv6.len() as u8;
        let entries = section[prefix::FIXED..].chunks_exact_mut(prefix::IPV6_ENTRY);
        for (entry, network) in entries.zip(self.ipv6.iter()) {
            put(entry, 0..16, network.prefix);
            entry[16] = network.len;
        }
    }
}

impl V2Modes {
    /// The bits of the header.
    pub fn modes(&self) -> Modes {
        match self {
            V2Modes::R => Modes::R,
            V2Modes::D(_) => Modes::D,
            V2Modes::Both(_) => Modes::Both,
        }
    }

    /// The SMC-Dv2 extension, if SMC-D is offered and it is there.
    pub fn smcd(&self) -> Option<&SmcdV2> {
        match self {
            V2Modes::R => None,
            V2Modes::D(extension) | V2Modes::Both(extension) => extension.as_ref(),
        }
    }
}

impl V2 {
    fn emitted_len(&self) -> usize {
        let gids = self.modes.smcd().map_or(0, |smcd| smcd.gids.len());
        let smcd =
            if self.modes.modes().smcd() { smcd_v2::FIXED + smcd_v2::ENTRY * gids } else { 0 };
        v2::FIXED + Eid::LEN * self.eids.len() + smcd
    }

    fn parse(modes: Modes, rest: &mut &[u8], length: usize) -> Result<V2, Error> {
        let fixed = take(rest, v2::FIXED, length)?;
        let mut eids = List::new();
        for _ in 0..check_count(Part::Eids, fixed[v2::EID_COUNT])? {
            let _ = eids.push(Eid::from_bytes(bytes(take(rest, Eid::LEN, length)?, 0..Eid::LEN)));
        }
        let mut extension = None;
        if modes.smcd() {
            let smcd = SmcdV2::parse(fixed[v2::GID_COUNT], rest, length)?;
            let offset = u16_be(fixed, v2::SMCD_OFFSET);
            let expected = v2::FIXED - v2::SMCD_BASE + Eid::LEN * eids.len();
            match usize::from(offset) {
                0 => {}
                offset if offset == expected => extension = Some(smcd),
                _ => return Err(bad_offset(Part::SmcdV2Extension, offset, expected)),
            }
        }
        Ok(V2 {
            modes: match modes {
                Modes::R => V2Modes::R,
                Modes::D => V2Modes::D(extension),
                Modes::Both => V2Modes::Both(extension),
            },
            seid: fixed[v2::RELEASE_SEID] & 1 != 0,
            release: Release::from_low_bits(fixed[v2::RELEASE_SEID] >> 4),
            gid: RoceGid(bytes(fixed, v2::ROCE_GID)),
            max_conns: fixed[v2::MAX_CONNS],
            max_links: fixed[v2::MAX_LINKS],
            features: FeatureMask(u16_be(fixed, v2::FEATURES)),
            eids,
        })
    }

    fn emit(&self, section: &mut [u8]) {
        section[v2::EID_COUNT] = self.eids.len() as u8;
        section[v2::RELEASE_SEID] = self.release.number() << 4 | u8::from(self.seid);
        put(section, v2::ROCE_GID, self.gid.0);
        section[v2::MAX_CONNS] = self.max_conns;
        section[v2::MAX_LINKS] = self.max_links;
        put(section, v2::FEATURES, self.features.0.to_be_bytes());
        for (entry, eid) in section[v2::FIXED..].chunks_exact_mut(Eid::LEN).zip(self.eids.iter()) {
            put(entry, 0..Eid::LEN, *eid.as_bytes());
        }
        if let Some(smcd) = self.modes.smcd() {
            let at = v2::FIXED + Eid::LEN * self.eids.len();
            section[v2::GID_COUNT] = smcd.gids.len() as u8;
            put(section, v2::SMCD_OFFSET, ((at - v2::SMCD_BASE) as u16).to_be_bytes());
            smcd.emit(&mut section[at..]);
        }
    }
}

impl SmcdV2 {
    /// The devices that the entries stand for, in their order. An entry of an emulated device whose
    /// second half is missing is passed over, as in the kernel (`smc_find_ism_v2_device_serv`).
    pub fn devices(&self) -> impl Iterator<Item = (SmcdGid, Chid)> {
        let mut rest: &[GidChid] = &self.gids;
        core::iter::from_fn(move || {
            while let [first, after @ ..] = rest {
                rest = after;
                if !first.chid.is_emulated() {
                    return Some((SmcdGid { gid: first.gid, ext: 0 }, first.chid));
                }
                if let [second, after @ ..] = rest
                    && second.chid == first.chid
                {
                    rest = after;
                    return Some((SmcdGid { gid: first.gid, ext: second.gid }, first.chid));
                }
            }
            None
        })
    }

    /// Adds the entries of a device: two if it is emulated. False if there is no room for it.
    pub fn push_device(&mut self, gid: SmcdGid, chid: Chid) -> bool {
        let needed = if chid.is_emulated() { 2 } else { 1 };
        if self.gids.len() + needed > 8 {
            return false;
        }
        let halves = [GidChid { gid: gid.gid, chid }, GidChid { gid: gid.ext, chid }];
        halves.iter().take(needed).all(|&half| self.gids.push(half).is_ok())
    }

    fn parse(count: u8, rest: &mut &[u8], length: usize) -> Result<SmcdV2, Error> {
        let count = check_count(Part::IsmGids, count)?;
        let seid = Eid::from_bytes(bytes(take(rest, smcd_v2::FIXED, length)?, smcd_v2::SEID));
        let mut gids = List::new();
        for _ in 0..count {
            let entry = take(rest, smcd_v2::ENTRY, length)?;
            let chid = Chid(u16_be(entry, 8..10));
            let _ = gids.push(GidChid { gid: u64_be(entry, 0..8), chid });
        }
        Ok(SmcdV2 { seid, gids })
    }

    fn emit(&self, section: &mut [u8]) {
        put(section, smcd_v2::SEID, *self.seid.as_bytes());
        let entries = section[smcd_v2::FIXED..].chunks_exact_mut(smcd_v2::ENTRY);
        for (entry, device) in entries.zip(self.gids.iter()) {
            put(entry, 0..8, device.gid.to_be_bytes());
            put(entry, 8..10, device.chid.0.to_be_bytes());
        }
    }
}

/// Takes `len` bytes off the front of `rest`; `length` is that of the whole message, for the error.
fn take<'m>(rest: &mut &'m [u8], len: usize, length: usize) -> Result<&'m [u8], Error> {
    match rest.split_at_checked(len) {
        Some((section, after)) => {
            *rest = after;
            Ok(section)
        }
        None => Err(Error::Length { length, expected: length + len - rest.len() }),
    }
}

/// `count`, if it is within the limit of 8 that all lists of a Proposal have.
fn check_count(part: Part, count: u8) -> Result<u8, Error> {
    if count <= 8 { Ok(count) } else { Err(Error::Count { part, count, limit: 8 }) }
}

fn bad_offset(part: Part, offset: u16, expected: usize) -> Error {
    Error::Offset { part, offset, expected: expected as u16 }
}
