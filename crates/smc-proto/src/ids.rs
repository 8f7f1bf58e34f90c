//! Who is who on the wire: EID, GID, CHID, peer id, and the small numbers that name memory.

use core::fmt;

/// Enterprise ID: 32 bytes of ASCII, padded with blanks (SMC v2).
///
/// Two hosts may use SMC v2 with each other if they have an EID in common: a user-defined one
/// (UEID) or the system's own (SEID, s390 only). All zero means "none".
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Eid([u8; Eid::LEN]);

/// Why a text is not a UEID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EidError {
    /// No character but blanks.
    Empty,
    /// More than 32 characters.
    TooLong {
        /// How many there are.
        len: usize,
    },
    /// A character that is not allowed where it stands: A-Z and 0-9 anywhere, `.` and `-` not
    /// first.
    Character {
        /// Its position from 0.
        at: usize,
        /// The byte.
        byte: u8,
    },
}

impl Eid {
    /// Bytes on the wire.
    pub const LEN: usize = 32;
    /// UEIDs one host may have configured (kernel `smc_clc.h`: SMC_MAX_UEID).
    pub const MAX_CONFIGURED: usize = 4;
    /// No EID.
    pub const NONE: Eid = Eid([0; Eid::LEN]);

    /// A user-defined EID, checked as the kernel does (`smc_clc.c`); it gets its padding here.
    pub fn user(text: &str) -> Result<Eid, EidError> {
        let text = text.trim_end_matches(' ').as_bytes();
        if text.is_empty() {
            return Err(EidError::Empty);
        }
        let mut eid = [b' '; Eid::LEN];
        let padded = eid.get_mut(..text.len()).ok_or(EidError::TooLong { len: text.len() })?;
        for (at, &byte) in text.iter().enumerate() {
            let allowed = byte.is_ascii_uppercase()
                || byte.is_ascii_digit()
                || (at > 0 && matches!(byte, b'.' | b'-'));
            if !allowed {
                return Err(EidError::Character { at, byte });
            }
        }
        padded.copy_from_slice(text);
        Ok(Eid(eid))
    }

    /// An EID as a peer sent it; nothing about it is checked, it is only compared.
    pub const fn from_bytes(bytes: [u8; Eid::LEN]) -> Eid {
        Eid(bytes)
    }

    /// The bytes of the wire.
    pub const fn as_bytes(&self) -> &[u8; Eid::LEN] {
        &self.0
    }

    /// Whether this stands for "none": the first byte is 0.
    pub const fn is_none(&self) -> bool {
        self.0[0] == 0
    }
}

impl fmt::Display for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.trim_ascii_end().escape_ascii())
    }
}

impl fmt::Debug for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Eid(\"{self}\")")
    }
}

/// Who sends: 2 random bytes of this boot and the MAC of one of its RoCE ports (RFC 7609 A.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct PeerId(pub [u8; 8]);

impl PeerId {
    /// No id. A Linux client that offers version 2 alone sends it in its Proposal.
    pub const NONE: PeerId = PeerId([0; 8]);

    /// Whether this is no id.
    pub const fn is_none(self) -> bool {
        matches!(self.0, [0, 0, 0, 0, 0, 0, 0, 0])
    }
}

/// The GID of a RoCE port, an IPv6 address or, for RoCEv2 over IPv4, `::ffff:a.b.c.d`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct RoceGid(pub [u8; 16]);

impl RoceGid {
    /// The GID of an IPv4 address.
    pub const fn from_ipv4(ip: [u8; 4]) -> RoceGid {
        let [a, b, c, d] = ip;
        RoceGid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
    }
}

/// The MAC address of a RoCE port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct MacAddr(pub [u8; 6]);

/// The GID of an ISM device: 64 bits for hardware, 128 for an emulated one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct SmcdGid {
    /// The only part that hardware has; all that SMC-Dv1 knows.
    pub gid: u64,
    /// The second half of an emulated ISM device's GID, otherwise 0.
    pub ext: u64,
}

/// Channel ID of an ISM device: devices talk to each other only if their CHIDs are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Chid(pub u16);

impl Chid {
    /// No channel: SMC-Dv1 without a device that SMC-Dv2 could use as well.
    pub const NONE: Chid = Chid(0);
    /// Loopback-ism, the device of one kernel (and of one uSMC device directory).
    pub const LOOPBACK: Chid = Chid(0xffff);

    /// Whether the device is emulated, 0xFF00-0xFFFF, and has 128-bit GIDs (`smc_ism.h`).
    pub const fn is_emulated(self) -> bool {
        self.0 >= 0xff00
    }
}

impl fmt::Debug for Chid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chid({:#06x})", self.0)
    }
}

/// A number of 24 bits: queue pair numbers and packet sequence numbers of InfiniBand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct U24(u32);

impl U24 {
    /// The greatest one, 16 777 215.
    pub const MAX: U24 = U24(0x00ff_ffff);

    /// `value`, if it fits into 24 bits.
    pub const fn new(value: u32) -> Option<U24> {
        if value <= U24::MAX.0 { Some(U24(value)) } else { None }
    }

    /// The low 24 bits of `value`.
    pub const fn truncate(value: u32) -> U24 {
        U24(value & U24::MAX.0)
    }

    /// The number.
    pub const fn value(self) -> u32 {
        self.0
    }

    pub(crate) const fn from_be_bytes(bytes: [u8; 3]) -> U24 {
        U24(u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]))
    }

    pub(crate) const fn to_be_bytes(self) -> [u8; 3] {
        let [_, a, b, c] = self.0.to_be_bytes();
        [a, b, c]
    }
}

impl fmt::Debug for U24 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

/// The size of an RMBE or DMB in four bits: code n stands for 16 KiB · 2ⁿ (`smc_core.h`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord, Debug)]
pub struct BufferSize(u8);

impl BufferSize {
    /// Greatest code an SMC-D peer of Linux uses: 1 MiB.
    pub const MAX_SMCD: BufferSize = BufferSize(6);
    /// Greatest code the field holds: 512 MiB.
    pub const MAX: BufferSize = BufferSize(15);

    /// The size with this code (0 to 15).
    pub const fn from_code(code: u8) -> Option<BufferSize> {
        if code <= BufferSize::MAX.0 { Some(BufferSize(code)) } else { None }
    }

    pub(crate) const fn from_low_bits(bits: u8) -> BufferSize {
        BufferSize(bits & 0x0f)
    }

    /// The smallest size that holds `bytes`, or the greatest there is.
    pub const fn at_least(bytes: u32) -> BufferSize {
        let mut size = BufferSize(0);
        while size.0 < BufferSize::MAX.0 && size.bytes() < bytes {
            size.0 += 1;
        }
        size
    }

    /// The code, 0 to 15.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u32 {
        0x4000 << self.0
    }
}

/// Path MTU of a queue pair in InfiniBand's code: 1 = 256, 2 = 512, 3 = 1024, 4 = 2048, 5 = 4096.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord, Debug)]
pub struct MtuCode(u8);

impl MtuCode {
    /// The MTU with this code; any four bits can stand on the wire.
    pub const fn from_code(code: u8) -> Option<MtuCode> {
        if code <= 15 { Some(MtuCode(code)) } else { None }
    }

    pub(crate) const fn from_low_bits(bits: u8) -> MtuCode {
        MtuCode(bits & 0x0f)
    }

    /// The code, 0 to 15.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The MTU in bytes, if the code is one that InfiniBand knows.
    pub const fn bytes(self) -> Option<u32> {
        match self.0 {
            1..=5 => Some(128 << self.0),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ueids_are_checked_as_in_the_kernel() {
        let cases: &[(&str, Result<&str, EidError>)] = &[
            ("TESTEID", Ok("TESTEID")),
            ("A.B-9  ", Ok("A.B-9")),
            ("ABCDEFGHIJKLMNOPQRSTUVWXYZ012345", Ok("ABCDEFGHIJKLMNOPQRSTUVWXYZ012345")),
            ("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456", Err(EidError::TooLong { len: 33 })),
            ("", Err(EidError::Empty)),
            ("   ", Err(EidError::Empty)),
            ("test", Err(EidError::Character { at: 0, byte: b't' })),
            (".A", Err(EidError::Character { at: 0, byte: b'.' })),
            ("A B", Err(EidError::Character { at: 1, byte: b' ' })),
            ("A_B", Err(EidError::Character { at: 1, byte: b'_' })),
        ];
        for (text, expected) in cases {
            let eid = Eid::user(text);
            match expected {
                Ok(shown) => {
                    let eid = eid.unwrap();
                    let bytes = eid.as_bytes();
                    assert_eq!(&bytes[..shown.len()], shown.as_bytes());
                    assert!(bytes[shown.len()..].iter().all(|&b| b == b' '), "{text}");
                }
                Err(error) => assert_eq!(eid, Err(*error), "{text}"),
            }
        }
    }

    #[test]
    fn sizes_are_16_kib_times_powers_of_two() {
        let bytes: [u32; 16] = core::array::from_fn(|code| BufferSize(code as u8).bytes());
        assert_eq!(bytes[0], 16 << 10);
        assert_eq!(bytes[2], 64 << 10);
        assert_eq!(bytes[6], 1 << 20);
        assert_eq!(bytes[15], 512 << 20);
        assert_eq!(BufferSize::at_least(0), BufferSize(0));
        assert_eq!(BufferSize::at_least(65_536), BufferSize(2));
        assert_eq!(BufferSize::at_least(65_537), BufferSize(3));
        assert_eq!(BufferSize::at_least(u32::MAX), BufferSize::MAX);
        assert_eq!(MtuCode(3).bytes(), Some(1024));
        assert_eq!(MtuCode(6).bytes(), None);
    }
}
