//! From a send buffer into the peer's ring: which RDMA WRITEs move the bytes.
//!
//! The bytes to send lie in up to two pieces of the send buffer, and go into up to two pieces of
//! the peer's ring: both wrap, each at an end of its own. One WRITE has one destination and gathers
//! its bytes from up to two places.

use super::Piece;

/// One RDMA WRITE.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Write {
    /// Where it goes, in bytes from the start of the peer's ring.
    pub offset: u32,
    /// What it gathers, in this order: offsets of the send buffer. The second is empty (length 0)
    /// if the bytes lie in one place; the first never is.
    pub sources: [Piece; 2],
}

impl Write {
    /// Length in bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "no WRITE is empty")]
    pub fn len(&self) -> u32 {
        self.sources[0].len + self.sources[1].len
    }
}

/// The WRITEs that [`writes`] gives, at most two.
#[derive(Clone, Debug)]
pub struct Writes {
    sources: [Piece; 2],
    destinations: [Piece; 2],
}

/// The WRITEs that move the bytes of `sources` to `destinations`, in order, one for each piece of
/// the destination that is used. If one side is shorter, as much as it has is moved. Pieces of
/// length 0 are passed over.
pub fn writes(sources: [Piece; 2], destinations: [Piece; 2]) -> Writes {
    Writes { sources, destinations }
}

impl Iterator for Writes {
    type Item = Write;

    fn next(&mut self) -> Option<Write> {
        let [first, second] = self.destinations;
        let (to, left) = if first.len > 0 { (first, second) } else { (second, Piece::default()) };
        self.destinations = [left, Piece::default()];
        let (a, rest_a) = split(self.sources[0], to.len);
        let (b, rest_b) = split(self.sources[1], to.len - a.len);
        self.sources = [rest_a, rest_b];
        let sources = if a.len > 0 { [a, b] } else { [b, Piece::default()] };
        (sources[0].len > 0).then_some(Write { offset: to.offset, sources })
    }
}

/// The first `len` bytes of a piece, if it has so many, and the others.
fn split(piece: Piece, len: u32) -> (Piece, Piece) {
    let len = len.min(piece.len);
    let rest = Piece { offset: piece.offset.saturating_add(len), len: piece.len - len };
    (Piece { len, ..piece }, rest)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const fn piece(offset: u32, len: u32) -> Piece {
        Piece { offset, len }
    }

    /// All rings up to five bytes, all places in both, all lengths.
    #[test]
    fn every_byte_is_moved_once_and_in_order() {
        let mut runs = 0;
        let at = |ring: u32, at: u32, len: u32| {
            let first = len.min(ring - at);
            [piece(at, first), piece(0, len - first)]
        };
        for (source, destination) in (1..=5).flat_map(|a| (1..=5).map(move |b| (a, b))) {
            for (from, to) in (0..source).flat_map(|a| (0..destination).map(move |b| (a, b))) {
                for (has, room) in (0..=source).flat_map(|a| (0..=destination).map(move |b| (a, b)))
                {
                    let (sources, destinations) =
                        (at(source, from, has), at(destination, to, room));
                    let mut moved = Vec::new();
                    let mut count = 0;
                    for write in writes(sources, destinations) {
                        count += 1;
                        assert!(write.len() > 0 && write.sources[0].len > 0);
                        let bytes = write.sources.iter().flat_map(|p| p.offset..p.offset + p.len);
                        moved.extend(bytes.zip(write.offset..));
                    }
                    let expected: Vec<(u32, u32)> = (0..has.min(room))
                        .map(|n| ((from + n) % source, (to + n) % destination))
                        .collect();
                    assert_eq!(moved, expected, "{sources:?} {destinations:?}");
                    assert!(count <= 2);
                    runs += 1;
                }
            }
        }
        assert!(runs > 4_000);
    }

    #[test]
    fn a_write_is_made_for_each_piece_of_the_destination_and_gathers_two_sources() {
        let all: Vec<Write> =
            writes([piece(6, 4), piece(0, 6)], [piece(10, 5), piece(0, 5)]).collect();
        let first = Write { offset: 10, sources: [piece(6, 4), piece(0, 1)] };
        let second = Write { offset: 0, sources: [piece(1, 5), Piece::default()] };
        assert_eq!(all, [first, second]);
        assert_eq!(writes([Piece::default(); 2], [piece(0, 9), Piece::default()]).next(), None);
        let late = [Piece::default(), piece(3, 2)];
        let write = Write { offset: 3, sources: [piece(3, 2), Piece::default()] };
        assert!(writes(late, late).eq([write]));
    }
}
