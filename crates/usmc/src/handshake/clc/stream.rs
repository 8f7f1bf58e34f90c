//! CLC messages in the kernel's stream: told from the application's bytes, and taken out.

use smc_proto::wire::clc::{HEADER_LEN, Header, MAX_LEN, Message};

use crate::os::sys;
use crate::record::kernel;

/// What stands at the place of a message.
#[expect(clippy::large_enum_variant, reason = "there is no allocator; a call holds one")]
pub enum Found {
    /// This.
    Message(Message),
    /// The beginning of one.
    Part,
    /// The beginning of one behind which the stream ends: its sender's process was killed, and its kernel has not sent the rest.
    Cut,
    /// Nothing yet.
    Nothing,
    /// Something else, or the stream's end.
    Other,
}

/// Looks for a message, and how long it is, or the part that is there. Nothing is taken out.
pub fn look(fd: i32) -> (Found, usize) {
    match look_once(fd) {
        // The rest may have come before the end did.
        (Found::Part, _) if kernel::has_fin(fd) => match look_once(fd) {
            (Found::Part, length) => (Found::Cut, length),
            found => found,
        },
        found => found,
    }
}

fn look_once(fd: i32) -> (Found, usize) {
    let mut bytes = [0u8; MAX_LEN];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: writable for its length.
    let n = match unsafe { sys::recv(fd, bytes.as_mut_ptr(), bytes.len(), flags) } {
        Ok(0) => return (Found::Other, 0),
        Ok(n) => n,
        Err(libc::EAGAIN) => return (Found::Nothing, 0),
        Err(_) => return (Found::Other, 0),
    };
    let there = &bytes[..n.min(MAX_LEN)];
    let length = match Header::parse(there) {
        Ok(header) => header.length,
        Err(_) if there.len() < HEADER_LEN && may_become_one(there) => {
            return (Found::Part, there.len());
        }
        Err(_) => return (Found::Other, 0),
    };
    if there.len() < length {
        return (Found::Part, there.len());
    }
    match Message::parse(&there[..length]) {
        Ok(message) => (Found::Message(message), length),
        Err(_) => (Found::Other, 0),
    }
}

/// Whether less than a header can be the beginning of one.
fn may_become_one(bytes: &[u8]) -> bool {
    let mut header = [0; HEADER_LEN];
    let known = bytes.len().min(HEADER_LEN);
    // The shortest Decline of version 2, but for what is there.
    let like = [0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x20];
    header[known..].copy_from_slice(&like[known..]);
    header[..known].copy_from_slice(&bytes[..known]);
    // The eyecatcher's last byte is one of two.
    known == 0 || Header::parse(&header).is_ok() || bytes == &like[..known]
}

/// Takes bytes out that have been peeked at.
pub fn discard(fd: i32, mut count: usize) {
    while count > 0 {
        match sys::discard(fd, count) {
            Ok(n) if n > 0 => count -= n.min(count),
            _ => return,
        }
    }
}
