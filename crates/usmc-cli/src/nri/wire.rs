//! Frames between a container runtime and its plugins: ttrpc messages of two connections, multiplexed over one UNIX socket, the
//! trunk. Bytes go in, messages come out; the lengths that the runtime names are checked here, the contents by [`super::api`].
//!
//! The formats are those of containerd/nri (pkg/net/multiplex) and of containerd/ttrpc (PROTOCOL.md). All numbers are big-endian.

use std::fmt;

/// The connection on which the runtime asks the plugin.
pub const PLUGIN: u32 = 1;
/// The connection on which the plugin asks the runtime.
pub const RUNTIME: u32 = 2;
/// Bytes before a frame's payload: the connection, and how long the payload is.
const FRAME: usize = 8;
/// Bytes before a message's body: its length, its stream, its kind, and flags.
const HEADER: usize = 10;
/// Longest body (`messageLengthMax` in ttrpc).
const LONGEST: usize = 4 << 20;

/// What a message is (`messageType` in ttrpc).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Asks for a call.
    Request,
    /// Answers one.
    Response,
    /// A part of a stream, which no call of NRI has.
    Other(u8),
}

impl Kind {
    fn of(byte: u8) -> Kind {
        match byte {
            1 => Kind::Request,
            2 => Kind::Response,
            other => Kind::Other(other),
        }
    }

    fn byte(self) -> u8 {
        match self {
            Kind::Request => 1,
            Kind::Response => 2,
            Kind::Other(byte) => byte,
        }
    }
}

/// One message of ttrpc.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// [`PLUGIN`] or [`RUNTIME`].
    pub connection: u32,
    /// By which an answer is told from others.
    pub stream: u32,
    /// What it is.
    pub kind: Kind,
    /// A message of protobuf.
    pub body: Vec<u8>,
}

impl Message {
    /// The message in one frame. Bodies are some kilobytes at most here.
    pub fn encode(&self) -> Vec<u8> {
        let message = HEADER + self.body.len();
        let mut bytes = Vec::with_capacity(FRAME + message);
        for number in [self.connection, message as u32, self.body.len() as u32, self.stream] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend([self.kind.byte(), 0]);
        bytes.extend(&self.body);
        bytes
    }
}

/// Why nothing more can be read from a trunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// A frame says that its payload has so many bytes.
    Frame(usize),
    /// A message says that its body has so many bytes.
    Body(usize),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, length) = match self {
            Broken::Frame(length) => ("frame", length),
            Broken::Body(length) => ("message", length),
        };
        write!(f, "a {what} of {length} bytes; {LONGEST} are allowed")
    }
}

impl std::error::Error for Broken {}

/// Puts messages together from what a trunk brings.
#[derive(Default)]
pub struct Reader {
    trunk: Vec<u8>,
    /// What the frames of each connection carried, up to the last whole message: a message may come in several frames.
    carried: [Vec<u8>; 2],
}

impl Reader {
    /// Takes bytes from the trunk.
    pub fn push(&mut self, bytes: &[u8]) {
        self.trunk.extend(bytes);
    }

    /// The next whole message, if all of it has come.
    ///
    /// # Errors
    /// A length that no runtime sends. The trunk is of no use then.
    pub fn next(&mut self) -> Result<Option<Message>, Broken> {
        loop {
            for (connection, bytes) in (PLUGIN..).zip(&mut self.carried) {
                if let Some(message) = message(connection, bytes)? {
                    return Ok(Some(message));
                }
            }
            if !self.unpack()? {
                return Ok(None);
            }
        }
    }

    /// Moves a whole frame's payload to its connection; `false`: none is whole.
    fn unpack(&mut self) -> Result<bool, Broken> {
        let (Some(connection), Some(length)) = (number(&self.trunk, 0), number(&self.trunk, 4))
        else {
            return Ok(false);
        };
        let length = length as usize;
        if length > HEADER + LONGEST {
            return Err(Broken::Frame(length));
        }
        let Some(payload) = self.trunk.get(FRAME..FRAME + length) else { return Ok(false) };
        // Others are for nobody: the runtime's own end drops them, too.
        let place = (connection as usize).checked_sub(PLUGIN as usize);
        if let Some(carried) = place.and_then(|place| self.carried.get_mut(place)) {
            carried.extend(payload);
        }
        self.trunk.drain(..FRAME + length);
        Ok(true)
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

/// Takes the first message from a connection's bytes.
fn message(connection: u32, bytes: &mut Vec<u8>) -> Result<Option<Message>, Broken> {
    let (Some(length), Some(stream)) = (number(bytes, 0), number(bytes, 4)) else {
        return Ok(None);
    };
    let length = length as usize;
    if length > LONGEST {
        return Err(Broken::Body(length));
    }
    let Some(body) = bytes.get(HEADER..HEADER + length) else { return Ok(None) };
    let message = Message { connection, stream, kind: Kind::of(bytes[8]), body: body.to_vec() };
    bytes.drain(..HEADER + length);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(connection: u32, body: &[u8]) -> Message {
        Message { connection, stream: 7, kind: Kind::Request, body: body.to_vec() }
    }

    fn all(reader: &mut Reader) -> Vec<Message> {
        std::iter::from_fn(|| reader.next().expect("whole frames")).collect()
    }

    #[test]
    fn a_message_comes_out_as_it_went_in_wherever_it_is_cut() {
        let messages = [sent(PLUGIN, b"one"), sent(RUNTIME, b""), sent(PLUGIN, &[3; 5000])];
        let bytes: Vec<u8> = messages.iter().flat_map(Message::encode).collect();
        for cut in 0..bytes.len() {
            let mut reader = Reader::default();
            let mut found = Vec::new();
            for part in [&bytes[..cut], &bytes[cut..]] {
                reader.push(part);
                found.extend(all(&mut reader));
            }
            assert_eq!(found, messages, "cut at {cut}");
        }
    }

    #[test]
    fn a_message_may_come_in_frames_between_those_of_others() {
        let whole = sent(PLUGIN, b"a body").encode();
        let other = sent(RUNTIME, b"other");
        let mut bytes = Vec::new();
        for part in whole[FRAME..].chunks(3) {
            bytes.extend(PLUGIN.to_be_bytes());
            bytes.extend((part.len() as u32).to_be_bytes());
            bytes.extend(part);
            bytes.extend(other.encode());
        }
        let mut reader = Reader::default();
        reader.push(&bytes);
        let found = all(&mut reader);
        assert_eq!(found.iter().filter(|m| **m == sent(PLUGIN, b"a body")).count(), 1);
        assert_eq!(found.iter().filter(|m| **m == other).count(), found.len() - 1);
    }

    #[test]
    fn frames_of_connections_that_nobody_has_are_dropped() {
        let mut reader = Reader::default();
        for connection in [0, 3, u32::MAX] {
            reader.push(&sent(connection, b"x").encode());
        }
        reader.push(&sent(PLUGIN, b"y").encode());
        assert_eq!(all(&mut reader), [sent(PLUGIN, b"y")]);
    }

    #[test]
    fn no_length_makes_it_wait_for_what_will_not_come() {
        let mut frame = Reader::default();
        frame.push(&[0, 0, 0, 1, 0x7f, 0xff, 0xff, 0xff]);
        assert_eq!(frame.next(), Err(Broken::Frame(0x7fff_ffff)));
        let mut body = Reader::default();
        body.push(&[0, 0, 0, 1, 0, 0, 0, 10, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0]);
        assert_eq!(body.next(), Err(Broken::Body(0xffff_ffff)));
    }

    #[test]
    fn no_bytes_break_it() {
        bolero::check!().for_each(|bytes: &[u8]| {
            let mut reader = Reader::default();
            for part in bytes.chunks(5) {
                reader.push(part);
                let mut taken = 0;
                while let Ok(Some(message)) = reader.next() {
                    taken += HEADER + message.body.len();
                    assert!(taken <= bytes.len());
                }
            }
        });
    }
}
