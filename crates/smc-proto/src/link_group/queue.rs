//! What waits to be polled for.

/// First in, first out. A caller that polls after every event never fills it; one that does not
/// loses the newest, and the timeouts of the flows make up for it.
#[derive(Debug)]
pub(super) struct Queue<T, const N: usize> {
    items: [Option<T>; N],
    first: usize,
    len: usize,
}

impl<T, const N: usize> Queue<T, N> {
    pub(super) fn new() -> Queue<T, N> {
        Queue { items: [const { None }; N], first: 0, len: 0 }
    }

    pub(super) fn push(&mut self, item: T) {
        if let Some(slot) = self.items.get_mut((self.first + self.len) % N)
            && self.len < N
        {
            *slot = Some(item);
            self.len += 1;
        }
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        let item = self.items.get_mut(self.first)?.take()?;
        self.first = (self.first + 1) % N;
        self.len -= 1;
        Some(item)
    }
}
