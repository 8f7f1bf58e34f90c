//! The bytes of SMC: CLC over TCP, LLC and CDC over RDMA, CDC in a DMB, and the TCP option.
//!
//! Every format is a `Repr`, a value that can only be valid, with `parse` and `emit`:
//!
//! - `parse` takes whatever a peer sent. It never panics; what it refuses it names, with the
//!   numbers that explain it.
//! - `emit` writes into a buffer of the caller and returns the part it used. It never panics
//!   either; a buffer that is too short is an error.
//! - `parse(emit(repr)) == repr`, but for fields that say when the wire has no room for them. The
//!   other way round, `emit(parse(bytes))` are the bytes that this crate would have sent: reserved
//!   fields 0, no unknown tail.
//!
//! Numbers are big-endian except where the kernel's implementation uses the byte order of its host
//! ("native"); each such field says so.

pub mod cdc;
pub mod clc;
pub(crate) mod field;
pub mod llc;
pub mod tcp_option;

/// The buffer given to `emit` is too short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom {
    /// Bytes that the message has.
    pub need: usize,
    /// Bytes that the buffer has.
    pub have: usize,
}

/// The part of `buffer` that a message of `need` bytes occupies, zeroed: reserved fields are 0.
pub(crate) fn zeroed(buffer: &mut [u8], need: usize) -> Result<&mut [u8], NoRoom> {
    let have = buffer.len();
    let message = buffer.get_mut(..need).ok_or(NoRoom { need, have })?;
    message.fill(0);
    Ok(message)
}
