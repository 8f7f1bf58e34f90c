//! Clients' handshakes wait their turn: a kernel answers one after the other. One that is not answered for a while has its place no more.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// So many clients' handshakes with one peer at a time.
const AT_A_TIME: usize = 8;

struct Line<T> {
    under_way: usize,
    waiting: VecDeque<T>,
}

/// A line for each peer.
pub(crate) struct Lines<T>(HashMap<IpAddr, Line<T>>);

impl<T: Copy + PartialEq> Lines<T> {
    /// Nobody waits.
    pub(crate) fn new() -> Lines<T> {
        Lines(HashMap::new())
    }

    /// One more with that peer. Whether it may begin at once: otherwise [`Lines::leave`] gives it back.
    pub(crate) fn join(&mut self, peer: IpAddr, one: T) -> bool {
        let line = self.0.entry(peer).or_insert(Line { under_way: 0, waiting: VecDeque::new() });
        let may_begin = line.under_way < AT_A_TIME;
        match may_begin {
            true => line.under_way += 1,
            false => line.waiting.push_back(one),
        }
        may_begin
    }

    /// One that had begun needs its place no more; the one that begins now.
    pub(crate) fn leave(&mut self, peer: IpAddr) -> Option<T> {
        let line = self.0.get_mut(&peer)?;
        let next = line.waiting.pop_front();
        if next.is_none() {
            line.under_way -= 1;
            if line.under_way == 0 {
                self.0.remove(&peer);
            }
        }
        next
    }

    /// One that waits does not any more.
    pub(crate) fn give_up(&mut self, peer: IpAddr, one: T) {
        if let Some(line) = self.0.get_mut(&peer) {
            line.waiting.retain(|other| *other != one);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_at_a_time_and_the_others_in_order() {
        let mut lines = Lines::new();
        let [one, other] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        assert!((0..8).all(|at| lines.join(one, at)));
        assert!(!(8..12).any(|at| lines.join(one, at)));
        assert!(lines.join(other, 100));
        lines.give_up(one, 9);
        assert_eq!([(); 4].map(|()| lines.leave(one)), [Some(8), Some(10), Some(11), None]);
        assert!(lines.join(one, 12) && !lines.join(one, 13));
        assert_eq!(lines.leave(one), Some(13));
        (0..8).for_each(|_| assert_eq!(lines.leave(one), None));
        assert_eq!((lines.leave(other), lines.leave(other)), (None, None));
        assert!(lines.0.is_empty());
    }
}
