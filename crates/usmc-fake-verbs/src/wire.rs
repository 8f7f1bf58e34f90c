//! Packets: a header of fixed size, then data. Both ends are the same program on one machine, so numbers are in its own order.

/// Bytes of data in a packet, at most. A real port's MTU is less; nothing depends on it here.
pub(crate) const DATA_MAX: usize = 16 << 10;

/// Bytes of the header.
pub(crate) const HEADER: usize = 72;

/// Sequence numbers have 24 bits.
pub(crate) const PSN_MASK: u32 = 0xff_ffff;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Write,
    Send,
    /// All up to the sequence number has arrived.
    Ack,
    /// All before it has arrived; for this one there is no receive. `code` is the time to wait.
    NotReady,
    /// All before it has arrived; this one is refused. `code` is the status for the sender.
    Refused,
}

/// The last packet of a message.
pub(crate) const LAST: u8 = 1;
/// The message wakes a peer that waits for solicited ones.
pub(crate) const SOLICITED: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u8,
    pub(crate) code: u8,
    pub(crate) psn: u32,
    pub(crate) from_qp: u32,
    pub(crate) to_qp: u32,
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// Of a WRITE: where the message starts.
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    /// Bytes of the whole message.
    pub(crate) total: u32,
    /// Where in the message the packet's data starts.
    pub(crate) offset: u32,
}

impl Header {
    pub(crate) fn emit(&self, into: &mut Vec<u8>) {
        let kind = match self.kind {
            Kind::Write => 1,
            Kind::Send => 2,
            Kind::Ack => 3,
            Kind::NotReady => 4,
            Kind::Refused => 5,
        };
        into.extend([kind, self.flags, self.code, 0]);
        for number in [self.psn, self.from_qp, self.to_qp] {
            into.extend(number.to_ne_bytes());
        }
        into.extend(self.from);
        into.extend(self.to);
        into.extend(self.address.to_ne_bytes());
        for number in [self.rkey, self.total, self.offset, 0] {
            into.extend(number.to_ne_bytes());
        }
    }

    /// The header and the data behind it.
    pub(crate) fn parse(packet: &[u8]) -> Option<(Header, &[u8])> {
        let (header, data) = packet.split_at_checked(HEADER)?;
        let number = |at: usize| header[at..at + 4].try_into().map(u32::from_ne_bytes).ok();
        let kind = match header[0] {
            1 => Kind::Write,
            2 => Kind::Send,
            3 => Kind::Ack,
            4 => Kind::NotReady,
            5 => Kind::Refused,
            _ => return None,
        };
        let header = Header {
            kind,
            flags: header[1],
            code: header[2],
            psn: number(4)?,
            from_qp: number(8)?,
            to_qp: number(12)?,
            from: header[16..32].try_into().ok()?,
            to: header[32..48].try_into().ok()?,
            address: u64::from_ne_bytes(header[48..56].try_into().ok()?),
            rkey: number(56)?,
            total: number(60)?,
            offset: number(64)?,
        };
        Some((header, data))
    }
}

/// How far `a` is behind `b`, which may be negative; the nearer way round.
pub(crate) fn psn_after(a: u32, b: u32) -> i32 {
    ((a.wrapping_sub(b) << 8) as i32) >> 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_out_as_it_went_in() {
        let header = Header {
            kind: Kind::Write,
            flags: LAST,
            code: 7,
            psn: 0xff_ffff,
            from_qp: 17,
            to_qp: 18,
            from: [1; 16],
            to: [2; 16],
            address: 1 << 40,
            rkey: 3,
            total: 9,
            offset: 5,
        };
        let mut bytes = Vec::new();
        header.emit(&mut bytes);
        assert_eq!(bytes.len(), HEADER);
        bytes.extend(b"data");
        assert_eq!(Header::parse(&bytes), Some((header, &b"data"[..])));
        assert_eq!(Header::parse(&bytes[..HEADER - 1]), None);
    }

    #[test]
    fn sequence_numbers_wrap_at_24_bits() {
        assert_eq!(psn_after(0, 0xff_ffff), 1);
        assert_eq!(psn_after(0xff_fffe, 1), -3);
        assert_eq!(psn_after(5, 5), 0);
    }
}
