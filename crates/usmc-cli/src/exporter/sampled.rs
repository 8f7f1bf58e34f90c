//! Bytes of connections on TCP, which the library does not count: the kernel's counts of open sockets, looked at again and again.

use std::collections::HashMap;

use super::counts::{Counter, Counts, Device, Key};
use crate::sock_diag::Kernel;

/// What was seen of each socket, by its inode.
#[derive(Default, Debug)]
pub struct Sampled {
    last: HashMap<u64, [u64; 2]>,
    now: HashMap<u64, [u64; 2]>,
}

impl Sampled {
    /// What a socket has moved since the last look. `is_known`: it was counted by an exporter before this one, so that what it has
    /// moved so far is not new. A socket that several processes have is counted for the first one.
    pub fn look(&mut self, inode: u64, kernel: &Kernel, is_known: bool) -> Counts {
        let mut counts = Counts::default();
        let now = [kernel.tx_bytes, kernel.rx_bytes];
        if self.now.insert(inode, now).is_some() {
            return counts;
        }
        let before = match self.last.get(&inode) {
            Some(before) => *before,
            None if is_known => now,
            None => [0, 0],
        };
        let counters = [Counter::TransmitBytes, Counter::ReceiveBytes];
        for ((counter, now), before) in counters.into_iter().zip(now).zip(before) {
            // Another socket with the number of one that is gone begins anew.
            let more = now.checked_sub(before).unwrap_or(now);
            counts.more(Key { device: Device::Tcp, ..Key::of(counter) }, more);
        }
        counts
    }

    /// The socket is open, and not on TCP now: should it come back, what it has moved by TCP before does not count again.
    pub fn keep(&mut self, inode: u64) {
        if let Some(known) = self.last.get(&inode) {
            self.now.entry(inode).or_insert(*known);
        }
    }

    /// The look is over: what was not seen in it is gone.
    pub fn end_look(&mut self) {
        self.last = std::mem::take(&mut self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(counts: &Counts) -> u64 {
        let of_it = counts.iter().filter(|(key, _)| key.counter == Counter::TransmitBytes);
        of_it.map(|(_, n)| n).sum()
    }

    #[test]
    fn what_a_socket_moves_is_counted_once() {
        let local = "127.0.0.1:80".parse().expect("an address");
        let kernel = |tx_bytes| Kernel {
            state: crate::sock_diag::ESTABLISHED,
            local,
            peer: local,
            tx_bytes,
            rx_bytes: 0,
            tx_queued: 0,
            rx_queued: 0,
            tx_segments: 0,
            rx_segments: 0,
        };
        let mut sampled = Sampled::default();
        for (bytes, known, more) in
            [(100, false, 100), (150, false, 50), (150, false, 0), (20, false, 20)]
        {
            assert_eq!(sent(&sampled.look(1, &kernel(bytes), known)), more, "{bytes}");
            assert_eq!(sent(&sampled.look(1, &kernel(bytes), known)), 0, "a second holder");
            sampled.end_look();
        }
        assert_eq!(sent(&sampled.look(2, &kernel(1000), true)), 0);
        sampled.end_look();
        assert_eq!(sent(&sampled.look(2, &kernel(1001), true)), 1);
        // In shared memory in between.
        sampled.keep(2);
        sampled.end_look();
        assert_eq!(sent(&sampled.look(2, &kernel(1005), true)), 4);
        sampled.end_look();
        // Gone in between.
        sampled.end_look();
        sampled.end_look();
        assert_eq!(sent(&sampled.look(2, &kernel(9), false)), 9);
    }
}
