//! LLC messages about links: CONFIRM_LINK, ADD_LINK, DELETE_LINK, REQ_ADD_LINK.

use super::super::field::{Field, bytes, put, u32_be};
use super::rkey::{Gids, RkeyUpdates};
use super::{Error, LEN, Version, field};
use crate::ids::{MacAddr, MtuCode, RoceGid, U24};

/// CONFIRM_LINK (RFC 7609 A.3): the first message over a new queue pair, from the server, and its
/// answer. The server assigns the link its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfirmLink {
    /// MAC of the sender's RoCE port.
    pub mac: MacAddr,
    /// GID of the sender's RoCE port.
    pub gid: RoceGid,
    /// The sender's queue pair.
    pub qpn: U24,
    /// Number of the link in its group.
    pub link_id: u8,
    /// Names the link in the sender's diagnosis.
    pub link_uid: [u8; 4],
    /// Links that the sender allows in the group.
    pub max_links: u8,
    /// Connections that the sender allows in the group; 0 below release 1.
    pub max_conns: u8,
    /// The sender keeps no eyecatchers in RMB elements. A peer that wants them cannot be served
    /// (decline code 03050000), Linux always sets this.
    pub no_rmbe_eyecatcher: bool,
}

/// ADD_LINK (RFC 7609 A.3): the sender's parameters of a further link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddLink<'m> {
    /// MAC of the sender's RoCE port.
    pub mac: MacAddr,
    /// GID of the sender's RoCE port.
    pub gid: RoceGid,
    /// The sender's new queue pair.
    pub qpn: U24,
    /// Number of the new link.
    pub link_id: u8,
    /// Path MTU; 0 is no valid offer.
    pub mtu: MtuCode,
    /// The first packet sequence number that the sender will use.
    pub psn: U24,
    /// In a response: the link is not wanted, with a reason of four bits that only version 1 has
    /// room for (1 = no alternate path).
    pub rejected: Option<u8>,
    /// Version 2: the keys of all RMBs for the new link. Missing in a rejection.
    pub extension: Option<AddLinkExt<'m>>,
}

/// What ADD_LINK of version 2 has behind its 44 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddLinkExt<'m> {
    /// No gateway lies between the peers.
    pub direct: bool,
    /// The GID of the client that the new link is meant for.
    pub target_gid: RoceGid,
    /// The sender's RMBs, at most 255.
    pub rkeys: RkeyUpdates<'m>,
}

/// DELETE_LINK (RFC 7609 A.3). Only the server decides: a client's request comes back as the
/// server's request, which the client then answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeleteLink {
    /// Which link; without a meaning if all are deleted.
    pub link_id: u8,
    /// Why; in a response 0 or why not.
    pub reason: DeleteReason,
    /// The whole link group ends.
    pub all: bool,
    /// Connections have been moved away first.
    pub orderly: bool,
}

/// Why a link is deleted (`smc_llc.h`).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DeleteReason(pub u32);

impl DeleteReason {
    /// No reason: the answer that all is well.
    pub const NONE: DeleteReason = DeleteReason(0);
    /// The path is gone.
    pub const LOST_PATH: DeleteReason = DeleteReason(0x0001_0000);
    /// An operator ended it in an orderly way.
    pub const OPERATOR: DeleteReason = DeleteReason(0x0002_0000);
    /// The program ended it.
    pub const PROGRAM: DeleteReason = DeleteReason(0x0003_0000);
    /// The peer broke the protocol.
    pub const PROTOCOL: DeleteReason = DeleteReason(0x0004_0000);
    /// An asymmetric link is needed no longer.
    pub const NO_ASYMMETRIC: DeleteReason = DeleteReason(0x0005_0000);
    /// Answer: there is no such link.
    pub const NO_SUCH_LINK: DeleteReason = DeleteReason(0x0010_0000);
    /// Answer: the sender's link is gone already.
    pub const LINK_GONE: DeleteReason = DeleteReason(0x0020_0000);
}

/// REQ_ADD_LINK (version 2): the client asks the server to begin with ADD_LINK. The answer that
/// there will be none has no GIDs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReqAddLink<'m> {
    /// GIDs that the client has, at most 255.
    pub gids: Gids<'m>,
}

const NO_RMBE_EYECATCHER: u8 = 0x03;
const ADD_REJECTED: u8 = 0x40;
const DELETE_ALL: u8 = 0x40;
const DELETE_ORDERLY: u8 = 0x20;

mod confirm {
    use super::Field;
    pub(super) const MAC: Field = 4..10;
    pub(super) const GID: Field = 10..26;
    pub(super) const QPN: Field = 26..29;
    pub(super) const LINK: usize = 29;
    pub(super) const UID: Field = 30..34;
    pub(super) const MAX_LINKS: usize = 34;
    pub(super) const MAX_CONNS: usize = 35;
}

mod add {
    use super::Field;
    pub(super) const MAC: Field = 4..10;
    pub(super) const GID: Field = 12..28;
    pub(super) const QPN: Field = 28..31;
    pub(super) const LINK: usize = 31;
    pub(super) const MTU: usize = 32;
    pub(super) const PSN: Field = 33..36;
    // Version 2:
    pub(super) const DIRECT: usize = 44;
    pub(super) const TARGET_GID: Field = 46..62;
    /// Native byte order.
    pub(super) const COUNT: Field = 70..72;
    pub(super) const RKEYS: usize = 72;
}

mod delete {
    use super::Field;
    pub(super) const LINK: usize = 4;
    pub(super) const REASON: Field = 5..9;
}

mod request {
    pub(super) const COUNT: usize = 24;
    pub(super) const GIDS: usize = 28;
}

impl ConfirmLink {
    pub(super) fn parse(message: &[u8], flags: u8) -> ConfirmLink {
        ConfirmLink {
            mac: MacAddr(bytes(message, confirm::MAC)),
            gid: RoceGid(bytes(message, confirm::GID)),
            qpn: U24::from_be_bytes(bytes(message, confirm::QPN)),
            link_id: message[confirm::LINK],
            link_uid: bytes(message, confirm::UID),
            max_links: message[confirm::MAX_LINKS],
            max_conns: message[confirm::MAX_CONNS],
            no_rmbe_eyecatcher: flags & NO_RMBE_EYECATCHER != 0,
        }
    }

    /// Writes the body and returns the flags.
    pub(super) fn emit(&self, message: &mut [u8]) -> u8 {
        put(message, confirm::MAC, self.mac.0);
        put(message, confirm::GID, self.gid.0);
        put(message, confirm::QPN, self.qpn.to_be_bytes());
        message[confirm::LINK] = self.link_id;
        put(message, confirm::UID, self.link_uid);
        message[confirm::MAX_LINKS] = self.max_links;
        message[confirm::MAX_CONNS] = self.max_conns;
        if self.no_rmbe_eyecatcher { NO_RMBE_EYECATCHER } else { 0 }
    }
}

impl<'m> AddLink<'m> {
    pub(super) fn content_len(&self) -> usize {
        match &self.extension {
            Some(extension) => add::RKEYS + extension.rkeys.as_wire().as_flattened().len(),
            None => LEN,
        }
    }

    pub(super) fn parse(
        version: Version,
        message: &'m [u8],
        flags: u8,
    ) -> Result<AddLink<'m>, Error> {
        let reason = match version {
            Version::V1 => message[field::REASON] & 0x0f,
            Version::V2 => 0,
        };
        let extension = match version {
            Version::V2 if message.len() >= add::RKEYS => Some(AddLinkExt::parse(message)?),
            _ => None,
        };
        Ok(AddLink {
            mac: MacAddr(bytes(message, add::MAC)),
            gid: RoceGid(bytes(message, add::GID)),
            qpn: U24::from_be_bytes(bytes(message, add::QPN)),
            link_id: message[add::LINK],
            mtu: MtuCode::from_low_bits(message[add::MTU]),
            psn: U24::from_be_bytes(bytes(message, add::PSN)),
            rejected: (flags & ADD_REJECTED != 0).then_some(reason),
            extension,
        })
    }

    pub(super) fn emit(&self, version: Version, message: &mut [u8]) -> u8 {
        put(message, add::MAC, self.mac.0);
        put(message, add::GID, self.gid.0);
        put(message, add::QPN, self.qpn.to_be_bytes());
        message[add::LINK] = self.link_id;
        message[add::MTU] = self.mtu.code();
        put(message, add::PSN, self.psn.to_be_bytes());
        if let Some(extension) = &self.extension {
            extension.emit(message);
        }
        let Some(reason) = self.rejected else { return 0 };
        if version == Version::V1 {
            message[field::REASON] = reason & 0x0f;
        }
        ADD_REJECTED
    }
}

impl<'m> AddLinkExt<'m> {
    fn parse(message: &'m [u8]) -> Result<AddLinkExt<'m>, Error> {
        // At most 255, so a count of the other byte order cannot be mistaken.
        let count = u16::from_ne_bytes(bytes(message, add::COUNT));
        let count = usize::from(if count > 255 { count.swap_bytes() } else { count });
        Ok(AddLinkExt {
            direct: message[add::DIRECT] & 0x80 != 0,
            target_gid: RoceGid(bytes(message, add::TARGET_GID)),
            rkeys: RkeyUpdates::from_wire(entries(message, add::RKEYS, count)?),
        })
    }

    fn emit(&self, message: &mut [u8]) {
        message[add::DIRECT] = u8::from(self.direct) << 7;
        put(message, add::TARGET_GID, self.target_gid.0);
        let entries = self.rkeys.as_wire();
        put(message, add::COUNT, (entries.len() as u16).to_ne_bytes());
        message[add::RKEYS..].copy_from_slice(entries.as_flattened());
    }
}

impl DeleteLink {
    pub(super) fn parse(message: &[u8], flags: u8) -> DeleteLink {
        DeleteLink {
            link_id: message[delete::LINK],
            reason: DeleteReason(u32_be(message, delete::REASON)),
            all: flags & DELETE_ALL != 0,
            orderly: flags & DELETE_ORDERLY != 0,
        }
    }

    pub(super) fn emit(&self, message: &mut [u8]) -> u8 {
        message[delete::LINK] = self.link_id;
        put(message, delete::REASON, self.reason.0.to_be_bytes());
        let all = if self.all { DELETE_ALL } else { 0 };
        all | if self.orderly { DELETE_ORDERLY } else { 0 }
    }
}

impl<'m> ReqAddLink<'m> {
    pub(super) fn content_len(&self) -> usize {
        request::GIDS + self.gids.as_wire().as_flattened().len()
    }

    pub(super) fn parse(message: &'m [u8]) -> Result<ReqAddLink<'m>, Error> {
        let count = usize::from(message[request::COUNT]);
        Ok(ReqAddLink { gids: Gids::from_wire(entries(message, request::GIDS, count)?) })
    }

    pub(super) fn emit(&self, message: &mut [u8]) -> u8 {
        let gids = self.gids.as_wire();
        message[request::COUNT] = gids.len() as u8;
        message[request::GIDS..request::GIDS + 16 * gids.len()]
            .copy_from_slice(gids.as_flattened());
        0
    }
}

/// `count` entries of `N` bytes each, from `at` on, if the message is long enough.
pub(super) fn entries<const N: usize>(
    message: &[u8],
    at: usize,
    count: usize,
) -> Result<&[[u8; N]], Error> {
    let need = at + N * count;
    let bytes = message.get(at..need).ok_or(Error::Truncated { need, have: message.len() })?;
    Ok(bytes.as_chunks().0)
}
