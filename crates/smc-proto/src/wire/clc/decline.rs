//! Decline: one side goes on over TCP (RFC 7609 A.2; `smc_clc.h`).

use super::super::field::{Field, bytes, put, u32_be};
use super::{Error, Header, Kind, Os, SMCR, frame};
use crate::decline::DeclineCode;
use crate::ids::PeerId;

/// A refusal, with its reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decline {
    /// Who declines; zero if it has no RoCE port.
    pub peer_id: PeerId,
    /// Why.
    pub code: DeclineCode,
    /// The system that declines; Linux leaves it 0 in version 1.
    pub os: Os,
    /// The link group of both is out of step and has to end (header bit 3).
    pub out_of_sync: bool,
    /// Only in version 2: four more codes, all 0 from Linux.
    pub v2: Option<[u32; 4]>,
}

mod at {
    use super::Field;
    pub(super) const PEER_ID: Field = 8..16;
    pub(super) const CODE: Field = 16..20;
    pub(super) const OS: usize = 20;
    pub(super) const V2_CODES: usize = 24;
    pub(super) const V1_LEN: usize = 28;
    pub(super) const V2_LEN: usize = 44;
}

impl Decline {
    /// A Decline in the form that Linux sends for this version.
    pub fn new(v1: bool, peer_id: PeerId, code: DeclineCode) -> Decline {
        Decline {
            peer_id,
            code,
            os: if v1 { Os::UNSPECIFIED } else { Os::LINUX },
            out_of_sync: code == DeclineCode::SYNCERR,
            v2: if v1 { None } else { Some([0; 4]) },
        }
    }

    pub(super) fn emitted_len(&self) -> usize {
        if self.v2.is_none() { at::V1_LEN } else { at::V2_LEN }
    }

    pub(super) fn parse(header: &Header, message: &[u8]) -> Result<Decline, Error> {
        let expected = if header.is_v1() { at::V1_LEN } else { at::V2_LEN };
        if message.len() != expected {
            return Err(Error::Length { length: message.len(), expected });
        }
        let code = |n: usize| u32_be(message, at::V2_CODES + 4 * n..at::V2_CODES + 4 * n + 4);
        Ok(Decline {
            peer_id: PeerId(bytes(message, at::PEER_ID)),
            code: DeclineCode(u32_be(message, at::CODE)),
            os: Os::from_low_bits(message[at::OS] >> 4),
            out_of_sync: header.bit3(),
            v2: if header.is_v1() { None } else { Some([code(0), code(1), code(2), code(3)]) },
        })
    }

    pub(super) fn emit(&self, message: &mut [u8]) {
        put(message, at::PEER_ID, self.peer_id.0);
        put(message, at::CODE, self.code.0.to_be_bytes());
        message[at::OS] = self.os.number() << 4;
        if let Some(codes) = self.v2 {
            for (n, code) in codes.into_iter().enumerate() {
                put(message, at::V2_CODES + 4 * n..at::V2_CODES + 4 * n + 4, code.to_be_bytes());
            }
        }
        let version = if self.v2.is_none() { 1 } else { 2 };
        frame(message, Kind::Decline, SMCR, version, u8::from(self.out_of_sync) << 3);
    }
}
