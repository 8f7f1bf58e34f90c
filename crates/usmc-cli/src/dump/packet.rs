//! One TCP segment as an IP packet.

use std::net::{IpAddr, SocketAddr};

use etherparse::{PacketBuilder, TcpHeader};

/// Most bytes of a stream in one packet, so that every packet's length fits its header.
pub const MOST: usize = 65_000;

/// TCP's flag FIN.
pub const FIN: u8 = 1;
/// TCP's flag SYN.
pub const SYN: u8 = 2;
/// TCP's flag PSH.
pub const PSH: u8 = 8;
const HOPS: u8 = 64;
const WINDOW: u16 = 0xffff;

/// A segment.
pub struct Segment<'a> {
    /// Who sends it.
    pub from: SocketAddr,
    /// Who receives it; of the same family.
    pub to: SocketAddr,
    /// Its sequence number.
    pub seq: u32,
    /// The sender's acknowledgement, if it knows one.
    pub ack: Option<u32>,
    /// [`FIN`], [`SYN`], [`PSH`]; ACK goes with `ack`.
    pub flags: u8,
    /// At most [`MOST`] bytes.
    pub bytes: &'a [u8],
}

impl Segment<'_> {
    /// The packet.
    pub fn packet(&self) -> Vec<u8> {
        let tcp = TcpHeader {
            ack: self.ack.is_some(),
            acknowledgment_number: self.ack.unwrap_or(0),
            fin: self.flags & FIN != 0,
            syn: self.flags & SYN != 0,
            psh: self.flags & PSH != 0,
            ..TcpHeader::new(self.from.port(), self.to.port(), self.seq, WINDOW)
        };
        let ip = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                PacketBuilder::ipv4(from.octets(), to.octets(), HOPS)
            }
            (from, to) => {
                let octets = |ip: IpAddr| match ip {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                PacketBuilder::ipv6(octets(from), octets(to), HOPS)
            }
        };
        let builder = ip.tcp_header(tcp);
        let mut packet = Vec::with_capacity(builder.size(self.bytes.len()));
        builder.write_to_vec(&mut packet, self.bytes).expect("at most MOST bytes");
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment<'a>(from: &str, to: &str, bytes: &'a [u8]) -> Segment<'a> {
        let addr = |text: &str| text.parse().expect("an address");
        Segment { from: addr(from), to: addr(to), seq: 1, ack: Some(9), flags: PSH, bytes }
    }

    /// RFC 1071 over parts of even length, but for the last.
    fn checksum(parts: &[&[u8]]) -> u16 {
        let words = parts.iter().flat_map(|part| part.chunks(2));
        let mut sum: u64 = words
            .map(|w| u64::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)])))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    /// A checksum over what holds a correct one is zero.
    #[test]
    fn checksums_are_those_of_the_rfcs() {
        for len in [0, 1, 2, 3, 1000, MOST] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let v4 = segment("10.1.2.3:80", "192.168.255.254:65535", &bytes).packet();
            assert_eq!(v4.len(), 40 + len);
            assert_eq!(usize::from(u16::from_be_bytes([v4[2], v4[3]])), v4.len());
            assert_eq!(checksum(&[&v4[..20]]), 0);
            let tcp_len = ((v4.len() - 20) as u32).to_be_bytes();
            assert_eq!(checksum(&[&v4[12..20], &tcp_len, &[0, 6], &v4[20..]]), 0);
            let v6 = segment("[2001:db8::1]:80", "[::1]:81", &bytes).packet();
            assert_eq!(v6.len(), 60 + len);
            assert_eq!(usize::from(u16::from_be_bytes([v6[4], v6[5]])), v6.len() - 40);
            let tcp_len = ((v6.len() - 40) as u32).to_be_bytes();
            assert_eq!(checksum(&[&v6[8..40], &tcp_len, &[0, 6], &v6[40..]]), 0);
        }
    }

    /// The example of RFC 1071 §3.
    #[test]
    fn the_sum_is_the_rfcs_own() {
        assert_eq!(!checksum(&[&[0x00, 0x01, 0xf2, 0x03], &[0xf4, 0xf5, 0xf6, 0xf7]]), 0xddf2);
    }
}
