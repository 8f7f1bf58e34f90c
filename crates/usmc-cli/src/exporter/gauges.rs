//! What is open now: connections, the memory that they lie in, and why they are on TCP.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use usmc::observe::{AGENT_ID, Mode, State};

use super::counts::Device;
use super::families::{self, Metrics};
use super::ledger::{OTHER, Owner};
use super::tracked::Seen;
use crate::observed::Reading;
use crate::regions::{Regions, shown};
use crate::sockets::{Look, Seen as Found};

/// Ports that are told apart: those with the most connections.
const PORTS: usize = 64;
/// Sockets of one process that are looked at.
const SOCKETS: usize = 1 << 16;
/// Of all processes.
const ALL_SOCKETS: usize = 1 << 18;

/// Adds what processes have open.
pub fn show(seen: &[Seen], metrics: &mut Metrics) {
    for about in families::GAUGES {
        metrics.family(about);
    }
    for one in seen {
        metrics.more(families::PROCESSES, of(&one.owner), 1);
    }
    let mut look = Look { sockets: published(seen), ..Look::default() };
    look.settle_ends();
    let found = look.sockets;
    show_sockets(seen, &found, metrics);
    show_rings(seen, &found, metrics);
    show_segments(seen, &found, metrics);
    show_regions(seen, metrics);
}

fn of(owner: &Owner) -> [&str; 2] {
    [&owner.ism_dir, &owner.program]
}

/// Their sockets; those beyond the limits are in no gauge.
fn published(seen: &[Seen]) -> Vec<Found> {
    let of_one = |(index, one): (usize, &Seen)| {
        let sockets = one.readings.iter().flat_map(|reading| &reading.sockets).take(SOCKETS);
        let netns = one.process.netns;
        sockets.map(|socket| Found::new(socket.clone(), index, netns, None)).collect::<Vec<_>>()
    };
    seen.iter().enumerate().flat_map(of_one).take(ALL_SOCKETS).collect()
}

/// The device of an open connection, and the mode's name.
fn carrier(found: &Found) -> (&'static str, String) {
    let device = match found.socket.mode {
        Mode::Tcp => Device::Tcp,
        Mode::Smcr => Device::Rdma,
        Mode::Smcd => Device::of(found.socket.region),
    };
    (device.mode(), device.name())
}

/// The port of the accepting end.
fn port(found: &Found) -> u16 {
    let s = &found.socket;
    if s.is_client { s.peer.port() } else { s.local.port() }
}

/// The ports with the most sockets, by name; all others are [`OTHER`].
fn told_apart(found: &[Found]) -> BTreeSet<u16> {
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    found.iter().for_each(|f| *counts.entry(port(f)).or_default() += 1);
    let mut ports: Vec<(u16, usize)> = counts.into_iter().collect();
    ports.sort_by_key(|(port, count)| (std::cmp::Reverse(*count), *port));
    ports.into_iter().take(PORTS).map(|(port, _)| port).collect()
}

fn show_sockets(seen: &[Seen], found: &[Found], metrics: &mut Metrics) {
    let ports = told_apart(found);
    for f in found {
        let [dir, program] = of(&seen[f.program].owner);
        let port = Some(port(f)).filter(|port| ports.contains(port));
        let port = port.map_or_else(|| OTHER.to_owned(), |port| port.to_string());
        if f.socket.state == State::Listen {
            metrics.more(families::LISTENERS, [dir, program, &port], 1);
        }
        if !f.life.is_connected() {
            continue;
        }
        let (mode, device) = carrier(f);
        metrics.more(families::CONNECTIONS, [dir, program, mode, &device, &port], 1);
        if f.socket.mode == Mode::Tcp {
            let reason = reason(f.socket.reason);
            metrics.more(families::ON_TCP, [dir, program, &reason], 1);
        }
    }
}

/// A reason by its number, without what a peer says about it.
pub fn reason(code: u8) -> String {
    use usmc::reason::Reason;
    match Reason::from_code(code) {
        Some(Reason::None) => "not decided yet".to_owned(),
        Some(reason) => reason.text().to_owned(),
        None => format!("reason {code}"),
    }
}

fn show_rings(seen: &[Seen], found: &[Found], metrics: &mut Metrics) {
    for f in found.iter().filter(|f| f.socket.mode != Mode::Tcp) {
        let [dir, program] = of(&seen[f.program].owner);
        let (mode, device) = carrier(f);
        let labels = [dir, program, mode, &*device];
        metrics.more(
            families::RING_SIZE,
            labels,
            f.socket.ring_size.unwrap_or(f.socket.window).into(),
        );
        if let [Some(sent), _] = f.queued() {
            metrics.more(families::RING_QUEUED, labels, sent);
        }
    }
}

fn show_segments(seen: &[Seen], found: &[Found], metrics: &mut Metrics) {
    let mut known = BTreeSet::new();
    for one in seen {
        for segment in one.process.segments.iter().filter(|s| known.insert(s.identity)) {
            let dir = [&*one.owner.ism_dir];
            metrics.more(families::SEGMENTS, dir, 1);
            metrics.more(families::SEGMENT_SIZE, dir, segment.size);
            metrics.more(families::SEGMENT_RESIDENT, dir, segment.resident);
        }
    }
    // Both ends of a connection lie in one slot.
    let mut slots = BTreeSet::new();
    for f in found.iter().filter(|f| f.socket.mode == Mode::Smcd && f.socket.segment != 0) {
        if slots.insert((f.socket.segment, f.socket.slot)) {
            let (_, device) = carrier(f);
            let dir = &*seen[f.program].owner.ism_dir;
            metrics.more(families::SLOTS, [dir, &device], 1);
        }
    }
}

fn uses_region(reading: &Reading) -> bool {
    reading.regions.iter().any(|id| !matches!(*id, 0 | AGENT_ID))
}

fn show_regions(seen: &[Seen], metrics: &mut Metrics) {
    let mut regions = Regions::default();
    let mut known: HashMap<String, [u64; 3]> = HashMap::new();
    for one in seen.iter().filter(|one| one.readings.iter().any(uses_region)) {
        for (_, region) in regions.mapped(one.process.pid) {
            let shown = shown(region);
            let bytes = |units: usize| (units * shown.unit_bytes) as u64;
            let numbers = [bytes(shown.units), bytes(shown.free), shown.alive() as u64];
            known.insert(shown.gid.clone(), numbers);
        }
    }
    for (device, [size, free, peers]) in known.into_iter().take(PORTS) {
        metrics.more(families::REGION_SIZE, [&device], size);
        metrics.more(families::REGION_FREE, [&device], free);
        metrics.more(families::REGION_PEERS, [&device], peers);
    }
}

#[cfg(test)]
mod tests {
    use super::super::families::Value;
    use super::*;
    use crate::observed::Socket;
    use crate::proc::{Process, Segment};

    fn socket(local: u16, peer: u16, is_client: bool, mode: Mode) -> Socket {
        let end = |port: u16| std::net::SocketAddr::from(([127, 0, 0, 1], port));
        Socket {
            fd: 3,
            state: State::Active,
            mode,
            reason: if mode == Mode::Tcp { 1 } else { 0 },
            declined: 0,
            local: end(local),
            peer: end(peer),
            tx_bytes: if is_client { 100 } else { 40 },
            rx_bytes: if is_client { 30 } else { 60 },
            window: 16_384,
            ring_size: Some(262_144),
            syn_option: None,
            slot: local.max(peer).into(),
            index: 0,
            is_client,
            was_smcd: mode != Mode::Tcp,
            segment: 5,
            region: None,
            counters: [0; 9],
        }
    }

    fn seen(pid: u32, program: &str, sockets: Vec<Socket>) -> Seen {
        let segment = Segment { identity: (1, 2), size: 1 << 20, resident: 4096 };
        let process = Process {
            pid,
            comm: program.to_owned(),
            netns: Some(1),
            files: Vec::new(),
            sockets: HashMap::new(),
            device: None,
            segments: vec![segment],
        };
        let owner = Owner { ism_dir: "/d".to_owned(), program: program.to_owned() };
        let mut reading = Reading::default();
        reading.sockets = sockets;
        Seen { process, owner, readings: vec![reading] }
    }

    #[test]
    fn connections_are_told_by_mode_reason_and_port() {
        let listener = Socket { state: State::Listen, ..socket(80, 0, false, Mode::Tcp) };
        let server = vec![
            listener,
            socket(80, 50_001, false, Mode::Smcd),
            socket(80, 50_002, false, Mode::Tcp),
        ];
        let client = vec![socket(50_001, 80, true, Mode::Smcd)];
        let mut metrics = Metrics::default();
        show(&[seen(1, "server", server), seen(2, "client", client)], &mut metrics);
        let mut get = |about, labels: &[&str]| {
            let labels: Vec<String> = labels.iter().map(|l| (*l).to_owned()).collect();
            metrics.family(about).get(&labels).copied()
        };
        let one = Some(Value::Count(1));
        for (about, labels, value) in [
            (families::PROCESSES, &["/d", "server"][..], one),
            (families::CONNECTIONS, &["/d", "server", "SMCD", "loopback", "80"], one),
            (families::CONNECTIONS, &["/d", "client", "SMCD", "loopback", "80"], one),
            (families::CONNECTIONS, &["/d", "server", "TCP", "tcp", "80"], one),
            (families::ON_TCP, &["/d", "server", "peer is not under uSMC on this device"], one),
            (families::LISTENERS, &["/d", "server", "80"], one),
            (families::SEGMENTS, &["/d"], one),
            (families::SEGMENT_RESIDENT, &["/d"], Some(Value::Count(4096))),
            (families::SLOTS, &["/d", "loopback"], one),
            // 100 sent, 60 read.
            (families::RING_QUEUED, &["/d", "client", "SMCD", "loopback"], Some(Value::Count(40))),
        ] {
            assert_eq!(get(about, labels), value, "{} {labels:?}", about.name);
        }
    }

    #[test]
    fn ports_beyond_the_limit_are_others() {
        let many = (1..=2 * PORTS as u16).map(|port| socket(port, 50_000, false, Mode::Smcd));
        let busy = (0..3).map(|i| socket(9999, 50_001 + i, false, Mode::Smcd));
        let mut metrics = Metrics::default();
        show(&[seen(1, "s", many.chain(busy).collect())], &mut metrics);
        let ports: Vec<&String> =
            metrics.family(families::CONNECTIONS).keys().map(|l| &l[4]).collect();
        assert_eq!(ports.len(), PORTS + 1);
        assert!(ports.iter().any(|p| *p == "9999") && ports.iter().any(|p| *p == OTHER));
    }
}
