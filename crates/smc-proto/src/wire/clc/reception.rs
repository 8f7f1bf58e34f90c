//! Taking one CLC message out of a TCP stream without touching what follows.

use super::{Error, HEADER_LEN, Header, MAX_LEN, Message};

/// A CLC message that is arriving, byte by byte if it has to be.
///
/// Read at most [`Reception::wanted`] bytes from the stream (the kernel peeks at 8 bytes and then
/// reads the rest, `smc_clc_wait_msg`), hand them over with [`Reception::push`], and repeat until
/// it returns a message. How long that may take is for the caller's timeout.
#[derive(Debug)]
pub struct Reception {
    buffer: [u8; MAX_LEN],
    have: usize,
    /// Up to where bytes are wanted: the end of the header, then the end of the message.
    end: usize,
}

impl Reception {
    /// Nothing has arrived yet.
    pub const fn new() -> Reception {
        Reception { buffer: [0; MAX_LEN], have: 0, end: HEADER_LEN }
    }

    /// How many bytes may be taken from the stream now: 1 to [`MAX_LEN`].
    pub const fn wanted(&self) -> usize {
        self.end - self.have
    }

    /// Whether the peer has begun to send.
    pub const fn has_begun(&self) -> bool {
        self.have > 0
    }

    /// What was taken off the stream since the last message: where it turns out to be no message, it
    /// is the application's.
    pub fn taken(&self) -> &[u8] {
        self.buffer.get(..self.have).unwrap_or_default()
    }

    /// Takes bytes that were read; no more than were wanted.
    ///
    /// The result is the message once it is complete; then this is ready for the next one.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<Message>, Error> {
        let Some(room) = self.buffer.get_mut(self.have..self.end) else { return Ok(None) };
        let Some(room) = room.get_mut(..bytes.len()) else {
            return Err(Error::Length { length: self.have + bytes.len(), expected: self.end });
        };
        room.copy_from_slice(bytes);
        self.have += bytes.len();
        if self.have < self.end {
            return Ok(None);
        }
        let so_far = self.taken();
        let header = Header::parse(so_far)?;
        if self.have < header.length {
            self.end = header.length;
            return Ok(None);
        }
        let message = Message::parse(so_far)?;
        (self.have, self.end) = (0, HEADER_LEN);
        Ok(Some(message))
    }
}

impl Default for Reception {
    fn default() -> Self {
        Reception::new()
    }
}
