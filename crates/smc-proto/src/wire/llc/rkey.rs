//! LLC messages about keys of RMBs: ADD_LINK_CONT, CONFIRM_RKEY, DELETE_RKEY; and lists of entries.
//!
//! Lists of up to 255 entries are views of the received message, or of entries that the sender has
//! put into wire form ([`RkeyUpdate::to_wire`]): there is no allocator to copy them with.

use super::super::field::{bytes, put, u32_be, u64_be};
use super::link::entries;
use super::{Error, LEN, Version};
use crate::list::List;

macro_rules! wire_list {
    ($(#[$doc:meta])* $name:ident of $len:literal bytes, $item:ty, $read:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name<'m>(&'m [[u8; $len]]);

        impl<'m> $name<'m> {
            /// The most entries that a message holds.
            pub const MAX: usize = 255;

            /// A view of entries in wire form; those above the 255th are left out.
            pub fn from_wire(entries: &'m [[u8; $len]]) -> $name<'m> {
                $name(entries.get(..Self::MAX).unwrap_or(entries))
            }

            /// The entries in wire form.
            pub fn as_wire(&self) -> &'m [[u8; $len]] {
                self.0
            }

            /// How many there are.
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }

            /// The entries.
            pub fn iter(&self) -> impl ExactSizeIterator<Item = $item> + 'm {
                self.0.iter().map($read)
            }
        }

        impl core::fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_list().entries(self.iter()).finish()
            }
        }
    };
}

wire_list! {
    /// Keys of RMBs for a further link, 16 bytes each.
    RkeyUpdates of 16 bytes, RkeyUpdate, RkeyUpdate::from_wire
}
wire_list! {
    /// Keys of RMBs, 4 bytes each.
    Rkeys of 4 bytes, u32, |key| u32::from_be_bytes(*key)
}
wire_list! {
    /// GIDs of RoCE ports, 16 bytes each.
    Gids of 16 bytes, crate::ids::RoceGid, |gid| crate::ids::RoceGid(*gid)
}

/// What an RMB is called on a further link.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RkeyUpdate {
    /// Its key on the link that the message travels on.
    pub old: u32,
    /// Its key on the new link.
    pub new: u32,
    /// Its virtual address on the new link.
    pub addr: u64,
}

/// What an RMB is called on a link.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct LinkRkey {
    /// Number of the link.
    pub link_id: u8,
    /// Key of the RMB on it.
    pub rkey: u32,
    /// Its virtual address on it.
    pub addr: u64,
}

/// ADD_LINK_CONT (RFC 7609 A.3, version 1): two RMBs at a time. Both sides send in turn until
/// neither has any left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddLinkCont {
    /// Number of the new link.
    pub link_id: u8,
    /// RMBs in this message.
    pub rkeys: List<RkeyUpdate, 2>,
    /// RMBs still to come; only counted if this message is full.
    pub more: u8,
}

/// CONFIRM_RKEY (RFC 7609 A.3): a new RMB, and its key on every link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfirmRkey {
    /// Its key on the link that the message travels on.
    pub rkey: u32,
    /// Its virtual address there.
    pub addr: u64,
    /// Its names on the other links.
    pub others: List<LinkRkey, 2>,
    /// In a response: the key could not be recorded.
    pub negative: bool,
    /// In a response: the sender may try again.
    pub retry: bool,
}

/// CONFIRM_RKEY_CONT (RFC 7609 A.3, version 1): more links than a CONFIRM_RKEY can name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfirmRkeyCont {
    /// Names of the RMB on further links.
    pub others: List<LinkRkey, 3>,
    /// Links still to come; only counted if this message is full.
    pub more: u8,
    /// In a response: the keys could not be recorded.
    pub negative: bool,
    /// In a response: the sender may try again.
    pub retry: bool,
}

/// DELETE_RKEY (RFC 7609 A.3): RMBs that are no longer there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeleteRkey<'m> {
    /// Their keys on the link that the message travels on: at most 8 in version 1. Linux repeats
    /// them in its response of version 1 and sends zeros in that of version 2.
    pub rkeys: Rkeys<'m>,
    /// In a response: keys that were not known. Version 1: a bit each, 0x80 for the first; version
    /// 2: how many.
    pub invalid: u8,
    /// In a response: some keys were not known.
    pub negative: bool,
}

const NEGATIVE: u8 = 0x20;
const RETRY: u8 = 0x10;
const LINK_RKEY_LEN: usize = 13;

mod cont {
    pub(super) const LINK: usize = 4;
    pub(super) const COUNT: usize = 5;
    pub(super) const RKEYS: usize = 8;
}

mod confirm {
    pub(super) const COUNT: usize = 4;
    /// The first entry; its link number is the count.
    pub(super) const FIRST: usize = 4;
    pub(super) const OTHERS: usize = 17;
    pub(super) const CONT_RKEYS: usize = 5;
}

mod delete {
    pub(super) const COUNT: usize = 4;
    pub(super) const INVALID: usize = 5;
    pub(super) const RKEYS: usize = 8;
}

impl RkeyUpdate {
    fn from_wire(entry: &[u8; 16]) -> RkeyUpdate {
        RkeyUpdate {
            old: u32_be(entry, 0..4),
            new: u32_be(entry, 4..8),
            addr: u64_be(entry, 8..16),
        }
    }

    /// The 16 bytes of the wire.
    pub fn to_wire(self) -> [u8; 16] {
        let mut entry = [0; 16];
        put(&mut entry, 0..4, self.old.to_be_bytes());
        put(&mut entry, 4..8, self.new.to_be_bytes());
        put(&mut entry, 8..16, self.addr.to_be_bytes());
        entry
    }
}

impl LinkRkey {
    fn parse(entry: &[u8]) -> LinkRkey {
        LinkRkey { link_id: entry[0], rkey: u32_be(entry, 1..5), addr: u64_be(entry, 5..13) }
    }

    fn emit(self, entry: &mut [u8]) {
        entry[0] = self.link_id;
        put(entry, 1..5, self.rkey.to_be_bytes());
        put(entry, 5..13, self.addr.to_be_bytes());
    }
}

impl AddLinkCont {
    pub(super) fn parse(message: &[u8]) -> AddLinkCont {
        let count = message[cont::COUNT];
        let mut rkeys = List::new();
        for entry in message[cont::RKEYS..cont::RKEYS + 32].chunks_exact(16).take(count.into()) {
            let _ = rkeys.push(RkeyUpdate::from_wire(&bytes(entry, 0..16)));
        }
        AddLinkCont { link_id: message[cont::LINK], rkeys, more: count.saturating_sub(2) }
    }

    pub(super) fn emit(&self, message: &mut [u8]) -> u8 {
        message[cont::LINK] = self.link_id;
        message[cont::COUNT] = count_with_more::<2>(self.rkeys.len(), self.more);
        for (entry, rkey) in message[cont::RKEYS..].chunks_exact_mut(16).zip(self.rkeys.iter()) {
            put(entry, 0..16, rkey.to_wire());
        }
        0
    }
}

impl ConfirmRkey {
    pub(super) fn parse(message: &[u8], flags: u8) -> Result<ConfirmRkey, Error> {
        let count = usize::from(message[confirm::COUNT]);
        if count > 2 {
            return Err(Error::Count { count, limit: 2 });
        }
        let first = LinkRkey::parse(&message[confirm::FIRST..confirm::OTHERS]);
        let mut others = List::new();
        for entry in message[confirm::OTHERS..LEN].chunks_exact(LINK_RKEY_LEN).take(count) {
            let _ = others.push(LinkRkey::parse(entry));
        }
        Ok(ConfirmRkey {
            rkey: first.rkey,
            addr: first.addr,
            others,
            negative: flags & NEGATIVE != 0,
            retry: flags & RETRY != 0,
        })
    }

    pub(super) fn emit(&self, message: &mut [u8]) -> u8 {
        let first = LinkRkey { link_id: self.others.len() as u8, rkey: self.rkey, addr: self.addr };
        first.emit(&mut message[confirm::FIRST..confirm::OTHERS]);
        emit_link_rkeys(&mut message[confirm::OTHERS..LEN], &self.others);
        answer_flags(self.negative, self.retry)
    }
}

impl ConfirmRkeyCont {
    pub(super) fn parse(message: &[u8], flags: u8) -> ConfirmRkeyCont {
        let count = message[confirm::COUNT];
        let mut others = List::new();
        let entries = message[confirm::CONT_RKEYS..LEN].chunks_exact(LINK_RKEY_LEN);
        for entry in entries.take(count.into()) {
            let _ = others.push(LinkRkey::parse(entry));
        }
        ConfirmRkeyCont {
            others,
            more: count.saturating_sub(3),
            negative: flags & NEGATIVE != 0,
            retry: flags & RETRY != 0,
        }
    }

    pub(super) fn emit(&self, message: &mut [u8]) -> u8 {
        message[confirm::COUNT] = count_with_more::<3>(self.others.len(), self.more);
        emit_link_rkeys(&mut message[confirm::CONT_RKEYS..LEN], &self.others);
        answer_flags(self.negative, self.retry)
    }
}

impl<'m> DeleteRkey<'m> {
    /// How many keys a message of this version can name.
    pub const fn limit(version: Version) -> usize {
        match version {
            Version::V1 => 8,
            Version::V2 => 255,
        }
    }

    pub(super) fn in_message(&self, version: Version) -> &'m [[u8; 4]] {
        let rkeys = self.rkeys.as_wire();
        rkeys.get(..Self::limit(version)).unwrap_or(rkeys)
    }

    pub(super) fn content_len(&self, version: Version) -> usize {
        delete::RKEYS + self.in_message(version).as_flattened().len()
    }

    pub(super) fn parse(
        version: Version,
        message: &'m [u8],
        flags: u8,
    ) -> Result<DeleteRkey<'m>, Error> {
        let count = usize::from(message[delete::COUNT]);
        let limit = Self::limit(version);
        if count > limit {
            return Err(Error::Count { count, limit });
        }
        Ok(DeleteRkey {
            rkeys: Rkeys::from_wire(entries(message, delete::RKEYS, count)?),
            invalid: message[delete::INVALID],
            negative: flags & NEGATIVE != 0,
        })
    }

    pub(super) fn emit(&self, version: Version, message: &mut [u8]) -> u8 {
        let rkeys = self.in_message(version);
        message[delete::COUNT] = rkeys.len() as u8;
        message[delete::INVALID] = self.invalid;
        message[delete::RKEYS..delete::RKEYS + 4 * rkeys.len()]
            .copy_from_slice(rkeys.as_flattened());
        if self.negative { NEGATIVE } else { 0 }
    }
}

fn emit_link_rkeys(section: &mut [u8], rkeys: &[LinkRkey]) {
    for (entry, rkey) in section.chunks_exact_mut(LINK_RKEY_LEN).zip(rkeys) {
        rkey.emit(entry);
    }
}

fn answer_flags(negative: bool, retry: bool) -> u8 {
    (if negative { NEGATIVE } else { 0 }) | if retry { RETRY } else { 0 }
}

/// The count of a message with room for `N`: what is in it and, if it is full, what is to come.
fn count_with_more<const N: usize>(len: usize, more: u8) -> u8 {
    if len < N { len as u8 } else { more.saturating_add(N as u8) }
}
