//! The application's buffers: one or many, walked once.

use core::{mem, ptr};

/// Room for the entries of one system call, none of which is filled yet.
pub const NO_ENTRIES: [libc::iovec; 64] =
    [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; 64];

/// A cursor over an array of buffers. The entries are the application's; they are only read.
pub struct Buffers {
    iov: *const libc::iovec,
    count: usize,
    offset: usize,
}

impl Buffers {
    /// Walks `count` entries.
    ///
    /// # Safety
    /// `iov` is readable for `count` entries, each of which is a buffer valid for the intended access,
    /// for as long as the result is used.
    pub unsafe fn new(iov: *const libc::iovec, count: usize) -> Buffers {
        Buffers { iov, count, offset: 0 }
    }

    fn entry(&self, i: usize) -> libc::iovec {
        debug_assert!(i < self.count);
        // SAFETY: i < count at every caller; `new`'s contract.
        unsafe { ptr::read(self.iov.add(i)) }
    }

    /// Another walk from here on.
    pub fn again(&self) -> Buffers {
        Buffers { iov: self.iov, count: self.count, offset: self.offset }
    }

    /// Bytes left; saturates.
    pub fn left(&self) -> usize {
        let sum = (0..self.count).fold(0usize, |n, i| n.saturating_add(self.entry(i).iov_len));
        sum - self.offset
    }

    /// The next contiguous piece, at most `most` bytes.
    #[inline]
    pub fn piece(&mut self, most: usize) -> Option<(*mut u8, usize)> {
        while self.count > 0 {
            let entry = self.entry(0);
            if self.offset < entry.iov_len {
                let len = (entry.iov_len - self.offset).min(most);
                // SAFETY: offset is within the entry's buffer.
                return Some((unsafe { entry.iov_base.cast::<u8>().add(self.offset) }, len));
            }
            // SAFETY: one further entry or one past the end.
            self.iov = unsafe { self.iov.add(1) };
            self.count -= 1;
            self.offset = 0;
        }
        None
    }

    /// `n` bytes of the current piece are done.
    #[inline]
    pub fn advance(&mut self, n: usize) {
        self.offset += n;
    }

    /// `n` bytes are done, across pieces.
    pub fn skip(&mut self, mut n: usize) {
        while n > 0 {
            let Some((_, len)) = self.piece(n) else { return };
            self.advance(len);
            n -= len;
        }
    }

    /// Moves `len` bytes that follow the next `at + gap` to where the gap is. All lie in the buffers.
    pub fn pull(&self, at: usize, gap: usize, len: usize) {
        let cursor = |from: usize| {
            let mut cursor = self.again();
            cursor.skip(from);
            cursor
        };
        let (mut to, mut from) = (cursor(at), cursor(at + gap));
        let mut left = len;
        while left > 0
            && let (Some((dst, room)), Some((src, there))) = (to.piece(left), from.piece(left))
        {
            let n = room.min(there);
            // SAFETY: both pieces are the application's buffers, valid for `n` bytes.
            unsafe { ptr::copy(src, dst, n) };
            to.advance(n);
            from.advance(n);
            left -= n;
        }
    }

    /// The same as a message, whose entries are put to `out`.
    pub fn message(&self, out: &mut [libc::iovec], most: usize) -> libc::msghdr {
        // SAFETY: all-zero is a valid msghdr.
        let mut msg: libc::msghdr = unsafe { mem::zeroed() };
        msg.msg_iovlen = self.fill(out, most);
        msg.msg_iov = out.as_mut_ptr();
        msg
    }

    /// The remaining entries as an array for one system call of at most `most` bytes: at most
    /// `out.len()` of them, the last one cut.
    pub fn fill(&self, out: &mut [libc::iovec], most: usize) -> usize {
        let (mut n, mut room, mut offset) = (0, most, self.offset);
        for i in 0..self.count {
            if n == out.len() || room == 0 {
                break;
            }
            let entry = self.entry(i);
            let len = (entry.iov_len - offset).min(room);
            if len > 0 {
                // SAFETY: offset is within the entry's buffer.
                let base = unsafe { entry.iov_base.cast::<u8>().add(offset) };
                out[n] = libc::iovec { iov_base: base.cast(), iov_len: len };
                n += 1;
            }
            room -= len;
            offset = 0;
        }
        n
    }
}
