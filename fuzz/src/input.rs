//! A fuzz input, read as the draws of a random program. What is beyond its end is 0.

/// The rest of the input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Nothing is left.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `len` bytes, or what is left of them.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut all = [0; N];
        let got = self.bytes(N);
        all[..got.len()].copy_from_slice(got);
        all
    }

    /// A byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// One bit of a byte.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// Of `0..limit`, by one byte.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::from(self.u8()) % limit
    }

    /// What a hostile peer would write over a word that holds `now`; `known` are numbers it knows to matter.
    pub fn word(&mut self, now: u64, known: &[u64]) -> u64 {
        match self.below(8) {
            0 => self.u8().into(),
            1 => now.wrapping_add_signed(i64::from(self.u8().cast_signed())),
            2 => now.wrapping_add_signed(i64::from(self.u16().cast_signed())),
            3 => (1 << self.below(64)) - u64::from(self.flag()),
            4 => 0u64.wrapping_sub(self.u8().into()),
            5 if !known.is_empty() => known[self.below(known.len())],
            6 => self.u32().into(),
            _ => self.u64(),
        }
    }
}
