//! From parts of the send buffer to parts of the peer's RMB: the RDMA WRITEs of one chain.

use smc_proto::connection::Piece;
use smc_proto::link_group::Key;

use crate::buffers::PARTS;
use crate::nic::{Range, Write};

/// Most WRITEs of a chain: each part of the send buffer has an end, the RMB wraps once, and a WRITE has two parts.
pub const WRITES: usize = PARTS + 1;

/// The WRITEs of a chain, in order.
#[derive(Clone, Copy, Default, Debug)]
pub struct Writes {
    all: [Write; WRITES],
    len: usize,
}

impl Writes {
    /// Those that move `source`, part after part, into the `pieces` of the peer's RMB, which hold as many bytes.
    pub fn new(source: &[Range], lkey: u32, pieces: [Piece; 2], rmb: Key) -> Writes {
        let mut writes = Writes::default();
        writes.move_all(source, lkey, pieces, rmb);
        writes
    }

    /// In place: a list is some 300 bytes, of which most messages need one entry.
    fn move_all(&mut self, source: &[Range], lkey: u32, pieces: [Piece; 2], rmb: Key) {
        let mut parts = source.iter().copied().filter(|part| part.len > 0);
        let mut rest = Range::default();
        for piece in pieces {
            let mut done = 0;
            while done < piece.len {
                let to = Key { rkey: rmb.rkey, addr: rmb.addr + u64::from(piece.offset + done) };
                let mut write = Write { lkey, to, ..Write::default() };
                for half in &mut write.source {
                    if rest.len == 0 {
                        rest = parts.next().unwrap_or_default();
                    }
                    *half = Range { len: rest.len.min(piece.len - done), ..rest };
                    rest =
                        Range { addr: rest.addr + u64::from(half.len), len: rest.len - half.len };
                    done += half.len;
                }
                if write.is_empty() || !self.push(write) {
                    return;
                }
            }
        }
    }

    fn push(&mut self, write: Write) -> bool {
        let Some(place) = self.all.get_mut(self.len) else { return false };
        *place = write;
        self.len += 1;
        true
    }

    /// All of them.
    pub fn as_slice(&self) -> &[Write] {
        self.all.get(..self.len).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte of the source, in order, with its place in the RMB.
    fn moved(writes: &Writes) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for write in writes.as_slice() {
            let bytes = write
                .source
                .iter()
                .flat_map(|part| (0..part.len).map(|i| part.addr + u64::from(i)));
            all.extend(bytes.zip(write.to.addr..));
        }
        all
    }

    #[test]
    fn every_byte_is_written_once_in_its_place() {
        let mut shapes = 0;
        let lens = [0, 1, 3, 7];
        for a in lens {
            for b in lens {
                for c in lens {
                    for d in lens {
                        let len = a + b + c + d;
                        let source: Vec<Range> = [(1000, a), (2000, b), (3000, c), (4000, d)]
                            .map(|(addr, len)| Range { addr, len })
                            .into();
                        let bytes: Vec<u64> = source
                            .iter()
                            .flat_map(|part| (0..part.len).map(|i| part.addr + u64::from(i)))
                            .collect();
                        for first in 0..=len {
                            let pieces = [
                                Piece { offset: 50, len: first },
                                Piece { offset: 0, len: len - first },
                            ];
                            let rmb = Key { rkey: 9, addr: 100 };
                            let writes = Writes::new(&source, 5, pieces, rmb);
                            let places = (150..150 + u64::from(first))
                                .chain(100..100 + u64::from(len - first));
                            let expected: Vec<(u64, u64)> =
                                bytes.iter().copied().zip(places).collect();
                            assert_eq!(moved(&writes), expected, "{source:?} {pieces:?}");
                            let is_ok = |write: &Write| {
                                (write.lkey, write.to.rkey) == (5, 9) && write.source[0].len > 0
                            };
                            assert!(writes.as_slice().iter().all(is_ok));
                            shapes += 1;
                        }
                    }
                }
            }
        }
        assert!(shapes > 1000, "{shapes}");
    }
}
