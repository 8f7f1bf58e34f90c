//! What one process has counted, by what it counts and of which device.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use usmc::observe::{AGENT_ID, State};

use crate::cmd::stats::is_error;
use crate::observed::{Reading, Socket};
use crate::sockets::is_connected;

/// What is counted. Each is a family of metrics.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Counter {
    /// Bytes sent.
    TransmitBytes,
    /// Bytes received.
    ReceiveBytes,
    /// Connections that went to a ring.
    ChangedOver,
    /// Connections that ended without one, by reason.
    Fallbacks,
    /// Those of them whose handshake was begun and failed.
    HandshakeErrors,
    /// Times something was put into a ring.
    TransmitCalls,
    /// Times something was taken out of one.
    ReceiveCalls,
    /// Sends that a ring could not take as a whole.
    RingFull,
    /// Sleeps.
    Sleeps,
    /// Spins that made a sleep unnecessary.
    SpinsPaid,
    /// Bytes that woke a peer.
    DoorbellsSent,
    /// Such bytes of peers.
    DoorbellsReceived,
    /// Connections by the size of their rings: [`Key::code`] is its logarithm.
    Rings,
    /// Connections in memory that an earlier one had used.
    SlotsReused,
    /// Calls by kind: [`Key::code`] is a place in [`CALLS`].
    SpecialCalls,
    /// Processes that have ended.
    ProcessesEnded,
}

/// The kinds of [`Counter::SpecialCalls`].
pub const CALLS: [&str; 5] = ["cork", "nodelay", "sendfile", "splice", "urgent"];

/// What carries bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Device {
    /// Whatever is not counted by device.
    All,
    /// The kernel's TCP.
    Tcp,
    /// The memory of the ISM directory.
    Loopback,
    /// RDMA.
    Rdma,
    /// A region's memory, by the halves of its id.
    Region([u64; 2]),
    /// Regions beyond those that are told apart.
    OtherRegion,
}

impl Device {
    /// Of a connection that is or was in memory of this region.
    pub fn of(region: Option<u128>) -> Device {
        match region {
            None => Device::Loopback,
            Some(AGENT_ID) => Device::Rdma,
            Some(id) => Device::Region([(id >> 64) as u64, id as u64]),
        }
    }

    /// `usmc ss`' name for the mode.
    pub fn mode(self) -> &'static str {
        match self {
            Device::Tcp => "TCP",
            Device::Rdma => "SMCR",
            Device::All | Device::Loopback | Device::Region(_) | Device::OtherRegion => "SMCD",
        }
    }

    /// The device's name, as commands show it.
    pub fn name(self) -> String {
        match self {
            Device::All => String::new(),
            Device::Tcp => "tcp".to_owned(),
            Device::Loopback => "loopback".to_owned(),
            Device::Rdma => "rdma".to_owned(),
            Device::Region(halves) => crate::regions::hex(halves),
            Device::OtherRegion => "other".to_owned(),
        }
    }
}

/// Which of a process' numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Key {
    /// What is counted.
    pub counter: Counter,
    /// Of which device.
    pub device: Device,
    /// Of connecting ends, where ends are told apart.
    pub is_client: bool,
    /// A part of it; see [`Counter`].
    pub code: u8,
}

impl Key {
    /// What is counted by nothing else.
    pub const fn of(counter: Counter) -> Key {
        Key { counter, device: Device::All, is_client: false, code: 0 }
    }
}

/// More than any process can count. A file with such a number is refused: sums are to stay sums.
pub const MOST: u64 = 1 << 56;

/// A process' numbers, or sums of them.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "Vec<(Key, u64)>", into = "Vec<(Key, u64)>")]
pub struct Counts(BTreeMap<Key, u64>);

impl From<Vec<(Key, u64)>> for Counts {
    fn from(list: Vec<(Key, u64)>) -> Counts {
        Counts(list.into_iter().collect())
    }
}

impl From<Counts> for Vec<(Key, u64)> {
    fn from(counts: Counts) -> Vec<(Key, u64)> {
        counts.0.into_iter().collect()
    }
}

impl Counts {
    /// So many more of a kind.
    pub fn more(&mut self, key: Key, n: u64) {
        if n > 0 {
            let sum = self.0.entry(key).or_default();
            *sum = sum.saturating_add(n);
        }
    }

    /// All of another's.
    pub fn add(&mut self, other: &Counts) {
        other.0.iter().for_each(|(key, n)| self.more(*key, *n));
    }

    /// At least another's. A file is not read at one moment: a connection that closes meanwhile is in neither of its parts, and what
    /// was seen before is not taken back for that.
    pub fn raise_to(&mut self, other: &Counts) {
        for (key, n) in &other.0 {
            let known = self.0.entry(*key).or_default();
            *known = (*known).max(*n);
        }
    }

    /// In the order of [`Counter`].
    pub fn iter(&self) -> impl Iterator<Item = (Key, u64)> {
        self.0.iter().map(|(key, n)| (*key, *n))
    }

    /// Whether a process can have counted that.
    pub fn is_plausible(&self) -> bool {
        self.0.values().all(|n| *n < MOST)
    }

    /// The same with other devices.
    pub fn with_devices(&self, mut device: impl FnMut(Device) -> Device) -> Counts {
        let mut counts = Counts::default();
        for (key, n) in self.iter() {
            counts.more(Key { device: device(key.device), ..key }, n);
        }
        counts
    }

    /// What a file says of a process. `has_ended`: its open connections count as closed ones.
    pub fn of(reading: &Reading, has_ended: bool) -> Counts {
        let mut counts = Counts::default();
        counts.add_closed(reading);
        for socket in &reading.sockets {
            counts.add_socket(socket, has_ended);
        }
        let totals = &reading.totals;
        counts.more(Key::of(Counter::Sleeps), totals.set_sleeps);
        counts.more(Key::of(Counter::SpinsPaid), totals.set_spins);
        counts.more(Key::of(Counter::SlotsReused), totals.reused);
        for (i, n) in totals.buffers.iter().enumerate() {
            let code = 14 + i as u8;
            counts.more(Key { code, ..Key::of(Counter::Rings) }, *n);
        }
        let calls = [totals.cork, totals.nodelay, totals.sendpage, totals.splice, totals.urgent];
        for (code, n) in calls.into_iter().enumerate() {
            counts.more(Key { code: code as u8, ..Key::of(Counter::SpecialCalls) }, n);
        }
        counts
    }

    /// Of connections that are closed. The part that is no region's is the ISM directory's.
    fn add_closed(&mut self, reading: &Reading) {
        let totals = &reading.totals;
        self.add_process_wide(&totals.closed);
        let rest = |all: u64, of: &dyn Fn(usize) -> u64| {
            (0..totals.regions.len()).fold(all, |rest, i| rest.saturating_sub(of(i)))
        };
        for (i, counter) in [Counter::TransmitBytes, Counter::ReceiveBytes].into_iter().enumerate()
        {
            let key = |device| Key { device, ..Key::of(counter) };
            let loopback = rest(totals.closed[i], &|n| totals.regions[n].bytes[i]);
            self.more(key(Device::Loopback), loopback);
            for (id, region) in reading.regions.iter().zip(&totals.regions) {
                self.more(key(Device::of(Some(*id))), region.bytes[i]);
            }
        }
        for is_client in [false, true] {
            let role = usize::from(is_client);
            let key = |device| Key { device, is_client, ..Key::of(Counter::ChangedOver) };
            let loopback = rest(totals.smcd[role], &|n| totals.regions[n].smcd[role]);
            self.more(key(Device::Loopback), loopback);
            for (id, region) in reading.regions.iter().zip(&totals.regions) {
                self.more(key(Device::of(Some(*id))), region.smcd[role]);
            }
            for (code, n) in totals.fallback[role].iter().enumerate() {
                self.add_fallback(code as u8, is_client, *n);
            }
        }
    }

    fn add_socket(&mut self, socket: &Socket, has_ended: bool) {
        let (device, is_client) = (Device::of(socket.region), socket.is_client);
        self.add_process_wide(&socket.counters);
        let key = |counter| Key { device, ..Key::of(counter) };
        self.more(key(Counter::TransmitBytes), socket.counters[0]);
        self.more(key(Counter::ReceiveBytes), socket.counters[1]);
        if socket.was_smcd {
            self.more(Key { is_client, ..key(Counter::ChangedOver) }, 1);
        } else if has_ended && is_connected(socket.state) {
            self.add_fallback(socket.reason, is_client, 1);
        }
    }

    /// As `usmc::observe::Totals::closed` orders them.
    fn add_process_wide(&mut self, counters: &[u64; 9]) {
        let [_, _, tx_calls, rx_calls, full, sleeps, spins, sent, drained] = counters;
        for (counter, n) in [
            (Counter::TransmitCalls, tx_calls),
            (Counter::ReceiveCalls, rx_calls),
            (Counter::RingFull, full),
            (Counter::Sleeps, sleeps),
            (Counter::SpinsPaid, spins),
            (Counter::DoorbellsSent, sent),
            (Counter::DoorbellsReceived, drained),
        ] {
            self.more(Key::of(counter), *n);
        }
    }

    fn add_fallback(&mut self, code: u8, is_client: bool, n: u64) {
        let key = |counter| Key { is_client, code, ..Key::of(counter) };
        self.more(key(Counter::Fallbacks), n);
        if is_error(code) {
            self.more(Key { code: 0, ..key(Counter::HandshakeErrors) }, n);
        }
    }
}

/// The counters of a record that have 32 bits, and what counts them.
pub const NARROW: [Counter; 5] = [
    Counter::RingFull,
    Counter::Sleeps,
    Counter::SpinsPaid,
    Counter::DoorbellsSent,
    Counter::DoorbellsReceived,
];

/// Finds counters of 32 bits that have begun anew while their connection was open: a busy one counts four billion spins within
/// the hour.
#[derive(Default, Debug)]
pub struct Wraps {
    last: BTreeMap<usize, ([std::net::SocketAddr; 2], [u64; 5])>,
}

impl Wraps {
    /// Compares with the last look, and tells what is missing in these records since then.
    pub fn look(&mut self, sockets: &[Socket]) -> Counts {
        let mut missing = Counts::default();
        let mut now = BTreeMap::new();
        for socket in sockets.iter().filter(|s| !matches!(s.state, State::Init | State::Listen)) {
            let ends = [socket.local, socket.peer];
            let [.., full, sleeps, spins, sent, drained] = socket.counters;
            let counters = [full, sleeps, spins, sent, drained];
            let before = self.last.get(&socket.index).filter(|(known, _)| *known == ends);
            for (i, counter) in NARROW.into_iter().enumerate() {
                // Another connection with these ends begins small, too, but has not followed one that was so large.
                let has_wrapped =
                    before.is_some_and(|(_, before)| before[i] > 1 << 31 && counters[i] < 1 << 31);
                missing.more(Key::of(counter), if has_wrapped { 1 << 32 } else { 0 });
            }
            // What is small now does not wrap before the next look.
            if counters.iter().any(|n| *n > 1 << 31) {
                now.insert(socket.index, (ends, counters));
            }
        }
        self.last = now;
        missing
    }
}

#[cfg(test)]
mod tests {
    use usmc::observe::Mode;
    use usmc::reason::Reason;

    use super::*;

    fn socket(was_smcd: bool, counters: [u64; 9]) -> Socket {
        let addr = "127.0.0.1:80".parse().expect("an address");
        Socket {
            fd: 3,
            state: State::Active,
            mode: if was_smcd { Mode::Smcd } else { Mode::Tcp },
            reason: if was_smcd { 0 } else { Reason::PeerGone as u8 },
            declined: 0,
            local: addr,
            peer: addr,
            tx_bytes: counters[0],
            rx_bytes: counters[1],
            window: 0,
            ring_size: None,
            syn_option: None,
            slot: 0,
            index: 0,
            is_client: true,
            was_smcd,
            segment: 0,
            region: None,
            counters,
        }
    }

    fn get(counts: &Counts, counter: Counter, device: Device) -> u64 {
        let of_it = counts.iter().filter(|(key, _)| key.counter == counter && key.device == device);
        of_it.map(|(_, n)| n).sum()
    }

    #[test]
    fn closed_and_open_connections_are_summed_by_device() {
        let mut reading = Reading::default();
        reading.totals.closed = [1000, 500, 10, 5, 1, 2, 3, 4, 5];
        reading.regions[1] = 7;
        reading.regions[4] = AGENT_ID;
        reading.totals.regions[1].bytes = [300, 200];
        reading.totals.regions[4].bytes = [100, 50];
        reading.totals.smcd = [4, 6];
        reading.totals.regions[1].smcd = [0, 2];
        reading.totals.set_spins = 30;
        reading.sockets.push(socket(true, [11, 12, 1, 1, 0, 0, 7, 0, 0]));
        let counts = Counts::of(&reading, false);
        let region = Device::Region([0, 7]);
        for (device, sent) in [(Device::Loopback, 611), (region, 300), (Device::Rdma, 100)] {
            assert_eq!(get(&counts, Counter::TransmitBytes, device), sent, "{device:?}");
        }
        assert_eq!(get(&counts, Counter::ChangedOver, Device::Loopback), 9);
        assert_eq!(get(&counts, Counter::ChangedOver, region), 2);
        assert_eq!(get(&counts, Counter::SpinsPaid, Device::All), 40);
        assert_eq!(get(&counts, Counter::TransmitCalls, Device::All), 11);
        assert!(counts.is_plausible());
    }

    #[test]
    fn what_is_open_at_the_end_counts_as_closed() {
        let mut reading = Reading::default();
        reading.sockets.push(socket(false, [0; 9]));
        let fallbacks = |ended| get(&Counts::of(&reading, ended), Counter::Fallbacks, Device::All);
        assert_eq!((fallbacks(false), fallbacks(true)), (0, 1));
        let errors = get(&Counts::of(&reading, true), Counter::HandshakeErrors, Device::All);
        assert_eq!(errors, 1);
    }

    #[test]
    fn counts_do_not_go_backwards() {
        let key = Key::of(Counter::Sleeps);
        let of = |n| Counts::from(vec![(key, n)]);
        let mut counts = of(5);
        counts.raise_to(&of(3));
        assert_eq!(counts, of(5));
        counts.raise_to(&of(9));
        assert_eq!(counts, of(9));
        counts.add(&of(u64::MAX));
        assert_eq!(counts, of(u64::MAX));
        assert!(!counts.is_plausible());
        let text = serde_json::to_string(&counts).expect("JSON");
        assert_eq!(serde_json::from_str::<Counts>(&text).expect("its own text"), counts);
    }

    #[test]
    fn a_narrow_counter_that_begins_anew_is_completed() {
        let spins = |n| socket(true, [0, 0, 0, 0, 0, 0, n, 0, 0]);
        let mut wraps = Wraps::default();
        for (n, missing) in [(u64::from(u32::MAX), 0), (7, 1 << 32), (9, 0), (1 << 30, 0)] {
            let found = wraps.look(&[spins(n)]);
            assert_eq!(get(&found, Counter::SpinsPaid, Device::All), missing, "{n}");
        }
        // Another connection in its place.
        wraps.look(&[spins(u64::from(u32::MAX))]);
        let other = Socket { local: "127.0.0.1:81".parse().expect("an address"), ..spins(1) };
        assert_eq!(wraps.look(&[other]), Counts::default());
    }
}
