//! LLC, Link Layer Control: the messages by which the two ends of an SMC-R link group manage their
//! links and the keys of their RMBs. They travel as RDMA SENDs.
//!
//! Layouts: RFC 7609 A.3 for version 1, the kernel's `smc_llc.c` for both. A message of version 1
//! has 44 bytes; one of version 2 has at least 44, bit 5 of its type is set and its length field
//! has 16 bits in the byte order of the sender's host.

mod link;
mod rkey;

pub use link::{AddLink, AddLinkExt, ConfirmLink, DeleteLink, DeleteReason, ReqAddLink};
pub use rkey::{
    AddLinkCont, ConfirmRkey, ConfirmRkeyCont, DeleteRkey, Gids, LinkRkey, RkeyUpdate, RkeyUpdates,
    Rkeys,
};

use super::field::{Field, put};
use super::{NoRoom, zeroed};

/// Length of a version 1 message, and the least of a version 2 message, in bytes.
pub const LEN: usize = 44;
/// The longest message, in bytes: ADD_LINK of version 2 with 255 keys.
pub const MAX_LEN: usize = 4152;

/// Major version of the link group; both ends use the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// RFC 7609.
    V1,
    /// SMC-Rv2.
    V2,
}

/// Any LLC message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message<'m> {
    version: Version,
    response: bool,
    body: Body<'m>,
}

/// What an LLC message is about, by its type (the low five bits).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body<'m> {
    /// 1: a new queue pair works.
    ConfirmLink(ConfirmLink),
    /// 2: the parameters of a further link.
    AddLink(AddLink<'m>),
    /// 3: the keys of the RMBs for that link; version 1 only.
    AddLinkCont(AddLinkCont),
    /// 4: a link, or all of them, ends.
    DeleteLink(DeleteLink),
    /// 5: the client asks for a further link; version 2 only.
    ReqAddLink(ReqAddLink<'m>),
    /// 6: a new RMB.
    ConfirmRkey(ConfirmRkey),
    /// 7: is the link alive? 16 bytes of the sender's choice, which the response repeats.
    TestLink([u8; 16]),
    /// 8: more keys of a new RMB, where a group has more than three links; version 1 only, and
    /// Linux never sends it.
    ConfirmRkeyCont(ConfirmRkeyCont),
    /// 9: RMBs are gone.
    DeleteRkey(DeleteRkey<'m>),
}

/// Why bytes are not an LLC message. The kernel ignores such messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// Fewer bytes than the message has.
    Truncated {
        /// Bytes that it needs.
        need: usize,
        /// Bytes there are.
        have: usize,
    },
    /// A type that this version does not have.
    Kind {
        /// The whole type byte.
        kind: u8,
    },
    /// The length field does not fit the bytes received.
    Length {
        /// What it is.
        length: usize,
        /// Bytes there are.
        have: usize,
    },
    /// More entries than the message may have.
    Count {
        /// How many.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
}

mod field {
    use super::Field;
    pub(super) const KIND: usize = 0;
    pub(super) const LENGTH_V1: usize = 1;
    pub(super) const LENGTH_V2: Field = 1..3;
    /// Low half: reason of a rejected ADD_LINK, version 1 only.
    pub(super) const REASON: usize = 2;
    pub(super) const FLAGS: usize = 3;
    pub(super) const TEST_DATA: Field = 4..20;
}

mod kind {
    pub(super) const CONFIRM_LINK: u8 = 1;
    pub(super) const ADD_LINK: u8 = 2;
    pub(super) const ADD_LINK_CONT: u8 = 3;
    pub(super) const DELETE_LINK: u8 = 4;
    pub(super) const REQ_ADD_LINK: u8 = 5;
    pub(super) const CONFIRM_RKEY: u8 = 6;
    pub(super) const TEST_LINK: u8 = 7;
    pub(super) const CONFIRM_RKEY_CONT: u8 = 8;
    pub(super) const DELETE_RKEY: u8 = 9;
    pub(super) const V2: u8 = 0x20;
}

const RESPONSE: u8 = 0x80;

impl<'m> Message<'m> {
    /// A request. A body that only one version has fixes the version, and what the version has no
    /// room for is dropped: in 1 the extension of ADD_LINK and keys of DELETE_RKEY above the
    /// eighth, in 2 the reason of a rejected ADD_LINK.
    pub fn request(version: Version, body: Body<'m>) -> Message<'m> {
        Message::new(version, false, body)
    }

    /// A response, under the same rules.
    pub fn response(version: Version, body: Body<'m>) -> Message<'m> {
        Message::new(version, true, body)
    }

    fn new(version: Version, response: bool, body: Body<'m>) -> Message<'m> {
        let (version, body) = match (version, body) {
            (_, Body::AddLinkCont(_) | Body::ConfirmRkeyCont(_)) => (Version::V1, body),
            (_, Body::ReqAddLink(_)) => (Version::V2, body),
            (Version::V1, Body::AddLink(add)) => {
                (version, Body::AddLink(AddLink { extension: None, ..add }))
            }
            (Version::V2, Body::AddLink(add)) => {
                (version, Body::AddLink(AddLink { rejected: add.rejected.map(|_| 0), ..add }))
            }
            (Version::V1, Body::DeleteRkey(delete)) => {
                let rkeys = Rkeys::from_wire(delete.in_message(version));
                (version, Body::DeleteRkey(DeleteRkey { rkeys, ..delete }))
            }
            (version, body) => (version, body),
        };
        Message { version, response, body }
    }

    /// The version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether this answers a request.
    pub fn is_response(&self) -> bool {
        self.response
    }

    /// What it is about.
    pub fn body(&self) -> &Body<'m> {
        &self.body
    }

    /// Reads a message as it was received: `bytes` are all that the SEND carried.
    pub fn parse(bytes: &'m [u8]) -> Result<Message<'m>, Error> {
        let have = bytes.len();
        if have < LEN {
            return Err(Error::Truncated { need: LEN, have });
        }
        let type_byte = bytes[field::KIND];
        let version = if type_byte & kind::V2 == 0 { Version::V1 } else { Version::V2 };
        let length = match version {
            Version::V1 => usize::from(bytes[field::LENGTH_V1]),
            Version::V2 => native_length(super::field::bytes(bytes, field::LENGTH_V2), have),
        };
        let message = match (version, bytes.get(..length)) {
            (Version::V1, Some(message)) if length == LEN => message,
            (Version::V2, Some(message)) if length >= LEN => message,
            _ => return Err(Error::Length { length, have }),
        };
        let flags = message[field::FLAGS];
        let body = match (type_byte & !kind::V2, version) {
            (kind::CONFIRM_LINK, _) => Body::ConfirmLink(ConfirmLink::parse(message, flags)),
            (kind::ADD_LINK, _) => Body::AddLink(AddLink::parse(version, message, flags)?),
            (kind::ADD_LINK_CONT, Version::V1) => Body::AddLinkCont(AddLinkCont::parse(message)),
            (kind::DELETE_LINK, _) => Body::DeleteLink(DeleteLink::parse(message, flags)),
            (kind::REQ_ADD_LINK, Version::V2) => Body::ReqAddLink(ReqAddLink::parse(message)?),
            (kind::CONFIRM_RKEY, _) => Body::ConfirmRkey(ConfirmRkey::parse(message, flags)?),
            (kind::TEST_LINK, _) => Body::TestLink(super::field::bytes(message, field::TEST_DATA)),
            (kind::CONFIRM_RKEY_CONT, Version::V1) => {
                Body::ConfirmRkeyCont(ConfirmRkeyCont::parse(message, flags))
            }
            (kind::DELETE_RKEY, _) => Body::DeleteRkey(DeleteRkey::parse(version, message, flags)?),
            _ => return Err(Error::Kind { kind: type_byte }),
        };
        Ok(Message { version, response: flags & RESPONSE != 0, body })
    }

    /// Length of the message on the wire, in bytes: 44 to [`MAX_LEN`].
    pub fn emitted_len(&self) -> usize {
        let content = match &self.body {
            Body::AddLink(add) => add.content_len(),
            Body::ReqAddLink(request) => request.content_len(),
            Body::DeleteRkey(delete) => delete.content_len(self.version),
            _ => LEN,
        };
        content.max(LEN)
    }

    /// Writes the message to the start of `buffer` and returns it.
    pub fn emit<'b>(&self, buffer: &'b mut [u8]) -> Result<&'b [u8], NoRoom> {
        let length = self.emitted_len();
        let message = zeroed(buffer, length)?;
        // Before the body: the reason of a rejection shares its byte with the length of version 2.
        match self.version {
            Version::V1 => message[field::LENGTH_V1] = LEN as u8,
            Version::V2 => put(message, field::LENGTH_V2, (length as u16).to_ne_bytes()),
        }
        let (kind, flags) = match &self.body {
            Body::ConfirmLink(confirm) => (kind::CONFIRM_LINK, confirm.emit(message)),
            Body::AddLink(add) => (kind::ADD_LINK, add.emit(self.version, message)),
            Body::AddLinkCont(cont) => (kind::ADD_LINK_CONT, cont.emit(message)),
            Body::DeleteLink(delete) => (kind::DELETE_LINK, delete.emit(message)),
            Body::ReqAddLink(request) => (kind::REQ_ADD_LINK, request.emit(message)),
            Body::ConfirmRkey(confirm) => (kind::CONFIRM_RKEY, confirm.emit(message)),
            Body::TestLink(data) => {
                put(message, field::TEST_DATA, *data);
                (kind::TEST_LINK, 0)
            }
            Body::ConfirmRkeyCont(cont) => (kind::CONFIRM_RKEY_CONT, cont.emit(message)),
            Body::DeleteRkey(delete) => (kind::DELETE_RKEY, delete.emit(self.version, message)),
        };
        message[field::KIND] = kind | if self.version == Version::V2 { kind::V2 } else { 0 };
        message[field::FLAGS] = flags | if self.response { RESPONSE } else { 0 };
        Ok(message)
    }
}

impl Body<'_> {
    /// The name of the message, as in the kernel and the RFC.
    pub fn name(&self) -> &'static str {
        match self {
            Body::ConfirmLink(_) => "CONFIRM_LINK",
            Body::AddLink(_) => "ADD_LINK",
            Body::AddLinkCont(_) => "ADD_LINK_CONT",
            Body::DeleteLink(_) => "DELETE_LINK",
            Body::ReqAddLink(_) => "REQ_ADD_LINK",
            Body::ConfirmRkey(_) => "CONFIRM_RKEY",
            Body::TestLink(_) => "TEST_LINK",
            Body::ConfirmRkeyCont(_) => "CONFIRM_RKEY_CONT",
            Body::DeleteRkey(_) => "DELETE_RKEY",
        }
    }
}

/// The length field of version 2. A sender of the other byte order is recognised: of the two
/// readings only one is possible for the `have` bytes that came (44 and more, up to 4152).
fn native_length(field: [u8; 2], have: usize) -> usize {
    let native = usize::from(u16::from_ne_bytes(field));
    let swapped = usize::from(u16::from_ne_bytes(field).swap_bytes());
    let possible = LEN..=have;
    if !possible.contains(&native) && possible.contains(&swapped) { swapped } else { native }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_of_the_other_byte_order_is_understood() {
        let mut buffer = [0; LEN];
        let test = Message::request(Version::V2, Body::TestLink([7; 16]));
        test.emit(&mut buffer).unwrap();
        buffer.swap(1, 2);
        assert_eq!(Message::parse(&buffer), Ok(test));
    }

    #[test]
    fn lengths_and_types_are_checked() {
        let mut bytes = [0; 60];
        (bytes[0], bytes[1]) = (7, 44);
        assert!(Message::parse(&bytes[..44]).is_ok());
        assert!(Message::parse(&bytes).is_ok(), "what follows is ignored");
        assert_eq!(Message::parse(&bytes[..43]), Err(Error::Truncated { need: 44, have: 43 }));
        bytes[1] = 45;
        assert_eq!(Message::parse(&bytes), Err(Error::Length { length: 45, have: 60 }));
        bytes[1] = 44;
        for kind in [0x00, 0x05, 0x0a, 0x1f, 0x47, 0xfe] {
            bytes[0] = kind;
            assert!(Message::parse(&bytes).is_err(), "{kind:02x}");
        }
        bytes[1..3].copy_from_slice(&44_u16.to_ne_bytes());
        for kind in [0x20, 0x23, 0x28, 0x2a] {
            bytes[0] = kind;
            assert_eq!(Message::parse(&bytes), Err(Error::Kind { kind }));
        }
    }
}
