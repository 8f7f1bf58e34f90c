//! What waits to be polled for.

/// First in, first out. Calls that may be refused are refused before it is full
/// (`LinkGroup::has_room`), and what cannot be refused fits into the places that are left then. If
/// that were wrong, the newest would be lost, and counted.
#[derive(Debug)]
pub(super) struct Queue<T, const N: usize> {
    items: [Option<T>; N],
    first: usize,
    len: usize,
    lost: u64,
}

impl<T, const N: usize> Queue<T, N> {
    pub(super) fn new() -> Queue<T, N> {
        Queue { items: [const { None }; N], first: 0, len: 0, lost: 0 }
    }

    pub(super) fn push(&mut self, item: T) {
        if let Some(slot) = self.items.get_mut((self.first + self.len) % N)
            && self.len < N
        {
            *slot = Some(item);
            self.len += 1;
        } else {
            self.lost += 1;
        }
    }

    /// Places that are free.
    pub(super) fn free(&self) -> usize {
        N - self.len
    }

    /// Items that found no place.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        let item = self.items.get_mut(self.first)?.take()?;
        self.first = (self.first + 1) % N;
        self.len -= 1;
        Some(item)
    }
}
