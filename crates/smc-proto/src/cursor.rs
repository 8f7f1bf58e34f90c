//! Cursors: positions in a ring that wraps (RFC 7609 section 4).
//!
//! A cursor is the byte offset in the ring and a count of how often it went round. Distances are
//! only meaningful between cursors that are at most one ring apart, and that is checked: a peer
//! whose cursor is anywhere else is told off by [`CursorError`], never believed.

/// A position in a ring of `size` bytes: `count` bytes into lap `wrap`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Cursor {
    /// How often the ring's end was passed; wraps from 65535 to 0.
    pub wrap: u16,
    /// Offset in bytes from the start of the ring, below its size.
    pub count: u32,
}

/// A cursor that no correct peer sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CursorError {
    /// The offset lies outside the ring.
    OutsideRing {
        /// The offset.
        count: u32,
        /// The size of the ring in bytes.
        size: u32,
    },
    /// The new position is not within one ring after the old one.
    TooFar {
        /// Where the peer was.
        old: Cursor,
        /// Where it says it is.
        new: Cursor,
        /// The size of the ring in bytes.
        size: u32,
    },
}

impl Cursor {
    /// The position `bytes` further on, at most one ring (`bytes <= size`, otherwise one ring).
    ///
    /// `self` has to lie inside the ring.
    #[must_use]
    pub fn advanced(self, bytes: u32, size: u32) -> Cursor {
        debug_assert!(self.count < size && bytes <= size, "{self:?} + {bytes} in {size}");
        let count = u64::from(self.count) + u64::from(bytes.min(size));
        match u32::try_from(count) {
            Ok(count) if count < size => Cursor { count, ..self },
            _ => Cursor {
                wrap: self.wrap.wrapping_add(1),
                count: (count - u64::from(size)).try_into().unwrap_or(0),
            },
        }
    }

    /// Bytes from `old` to `self`, 0 to `size`, if that is a step which a correct peer can make.
    pub fn since(self, old: Cursor, size: u32) -> Result<u32, CursorError> {
        if self.count >= size {
            return Err(CursorError::OutsideRing { count: self.count, size });
        }
        let laps = u32::from(self.wrap.wrapping_sub(old.wrap));
        let distance = match laps {
            0 => self.count.checked_sub(old.count),
            // The offset did not grow, or the peer went more than one ring ahead.
            1 if self.count <= old.count => size.checked_sub(old.count - self.count),
            _ => None,
        };
        distance.ok_or(CursorError::TooFar { old, new: self, size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(wrap: u16, count: u32) -> Cursor {
        Cursor { wrap, count }
    }

    #[test]
    fn a_step_is_at_most_one_ring_forward() {
        let far = |old, new| Err(CursorError::TooFar { old, new, size: 10 });
        let cases = [
            (at(0, 0), at(0, 0), Ok(0)),
            (at(0, 0), at(0, 9), Ok(9)),
            (at(0, 0), at(1, 0), Ok(10)),
            (at(0, 7), at(1, 3), Ok(6)),
            (at(0, 7), at(1, 7), Ok(10)),
            (at(0, 7), at(1, 8), far(at(0, 7), at(1, 8))),
            (at(0, 7), at(0, 6), far(at(0, 7), at(0, 6))),
            (at(0, 7), at(2, 0), far(at(0, 7), at(2, 0))),
            (at(1, 0), at(0, 9), far(at(1, 0), at(0, 9))),
            (at(0xffff, 9), at(0, 1), Ok(2)),
            (at(0, 0), at(0, 10), Err(CursorError::OutsideRing { count: 10, size: 10 })),
        ];
        for (old, new, expected) in cases {
            assert_eq!(new.since(old, 10), expected, "{old:?} to {new:?}");
        }
    }

    #[test]
    fn advancing_and_measuring_agree_for_every_step_of_a_small_ring() {
        for size in 1..=9 {
            for (wrap, count) in (0..size).flat_map(|c| [(0, c), (0xffff, c)]) {
                for bytes in 0..=size {
                    let old = at(wrap, count);
                    assert_eq!(old.advanced(bytes, size).since(old, size), Ok(bytes));
                }
            }
        }
    }

    #[test]
    fn the_largest_ring_does_not_overflow() {
        let old = at(7, u32::MAX - 1);
        let new = old.advanced(u32::MAX, u32::MAX);
        assert_eq!(new, at(8, u32::MAX - 1));
        assert_eq!(new.since(old, u32::MAX), Ok(u32::MAX));
    }
}
