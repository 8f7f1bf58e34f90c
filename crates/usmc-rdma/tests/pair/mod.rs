//! Two engines whose messages a test hands over one by one.
#![allow(dead_code, reason = "each test needs a part of it")]

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use smc_proto::handshake::{Circumstances, Host};
use smc_proto::ids::{BufferSize, Eid, MacAddr, MtuCode, PeerId, RoceGid, U24};
use smc_proto::link_group::{Connect, Key, Port};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_rdma::buffers::{Buffers, PARTS};
use usmc_rdma::nic::{ArenaId, DeviceId, Nic, PostFailed, QpId, Range, RmbId, Write};
use usmc_rdma::{Config, ConnId, Engine, Event, Memory, Wish};
use usmc_shm::Broken;

/// Rings without bytes.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) written: Cell<u64>,
    pub(crate) arrived: Cell<u64>,
}

pub(crate) struct Rings(Rc<Counters>);

impl Buffers for Rings {
    fn written(&self) -> Result<u64, Broken> {
        Ok(self.0.written.get())
    }

    fn source(&self, at: u64, len: u32) -> Result<[Range; PARTS], Broken> {
        let mut parts = [Range::default(); PARTS];
        parts[0] = Range { addr: at, len };
        Ok(parts)
    }

    fn release(&self, _: u64) -> bool {
        false
    }

    fn read(&self) -> u64 {
        self.0.arrived.get()
    }

    fn arrived(&self, upto: u64) {
        self.0.arrived.set(upto);
    }

    fn leave(&self) {}

    fn taken(&self, _: u64) {}
}

/// Queue pairs whose messages wait in one queue: both hosts' numbers are the same, as each creates one when the other does.
pub(crate) struct Queue {
    host: u8,
    qps: u32,
    /// Messages, each with the bytes that were to be written before it.
    pub(crate) posted: VecDeque<(QpId, u32, Vec<u8>)>,
    pub(crate) calls: u64,
    pub(crate) cuts: Vec<QpId>,
    pub(crate) forgotten: Vec<(QpId, RmbId)>,
}

impl Nic for Queue {
    fn port(&self, device: DeviceId) -> Port {
        Port {
            gid: RoceGid::from_ipv4([10, 0, device.0, self.host]),
            mac: MacAddr([2, 0, 0, 0, device.0, self.host]),
            mtu: MtuCode::from_code(3).expect("1024"),
            direct: true,
            ..Port::default()
        }
    }

    fn are_together(&self, _: DeviceId, _: DeviceId) -> bool {
        true
    }

    fn create(&mut self, device: DeviceId) -> Option<(QpId, Port)> {
        self.qps += 1;
        Some((QpId(self.qps), Port { qpn: U24::truncate(self.qps), ..self.port(device) }))
    }

    fn connect(&mut self, _: QpId, _: &Port) -> Connect {
        Connect::Done
    }

    fn destroy(&mut self, _: QpId) {}

    fn cut(&mut self, qp: QpId) -> Vec<Vec<u8>> {
        self.cuts.push(qp);
        Vec::new()
    }

    fn taken(&mut self, _: QpId) -> Vec<Vec<u8>> {
        Vec::new()
    }

    fn rmb(&mut self, qp: QpId, rmb: RmbId) -> Option<Key> {
        Some(Key { rkey: qp.0 << 16 | (rmb.0 as u32 + 1), addr: 0 })
    }

    fn forget(&mut self, qp: QpId, rmb: RmbId) {
        self.forgotten.push((qp, rmb));
    }

    fn arena(&mut self, _: QpId, _: ArenaId) -> Option<u32> {
        self.calls += 1;
        Some(1)
    }

    fn post(&mut self, qp: QpId, writes: &[Write], message: &[u8]) -> Result<(), PostFailed> {
        self.calls += 1;
        let bytes = writes.iter().map(Write::len).sum();
        self.posted.push_back((qp, bytes, message.to_vec()));
        Ok(())
    }
}

pub(crate) struct Side {
    pub(crate) engine: Engine<Rings>,
    pub(crate) nic: Queue,
    pub(crate) events: Vec<Event>,
}

pub(crate) const NOW: Duration = Duration::from_secs(1);

pub(crate) fn side(host: u8, max_links: u8) -> Side {
    let mut ueids = List::new();
    ueids.push(Eid::user("COST").expect("an EID")).expect("room");
    let identity = Host {
        peer_id: PeerId([1, 0, 2, 0, 0, 0, 0, host]),
        hostname: Hostname::new("cost"),
        release: Release::V2_1,
        features: FeatureMask(0),
        max_conns: 255,
        max_links,
        ueids,
        seid: None,
        smcd_v2: false,
    };
    let config = Config {
        host: identity,
        devices: (0..max_links).map(DeviceId).collect(),
        first_token: host.into(),
        test_interval: Duration::from_secs(30),
    };
    let nic = Queue {
        host,
        qps: 0,
        posted: VecDeque::new(),
        calls: 0,
        cuts: Vec::new(),
        forgotten: Vec::new(),
    };
    Side { engine: Engine::new(config), nic, events: Vec::new() }
}

/// The oldest message of a host arrives, unless the link was cut.
pub(crate) fn step(sides: &mut [Side; 2], from: usize) -> bool {
    step_at(NOW, sides, from)
}

fn step_at(now: Duration, sides: &mut [Side; 2], from: usize) -> bool {
    let Some((qp, _, message)) = sides[from].nic.posted.pop_front() else { return false };
    if !sides[from].nic.cuts.contains(&qp) {
        let Side { engine, nic, .. } = &mut sides[from];
        engine.handle_sent(qp, nic, now);
        let Side { engine, nic, .. } = &mut sides[1 - from];
        engine.handle_received(qp, &message, nic, now);
    }
    take_events(sides);
    true
}

fn take_events(sides: &mut [Side; 2]) {
    for side in sides {
        while let Some(event) = side.engine.poll_event() {
            side.events.push(event);
        }
    }
}

/// Until nothing is on its way.
pub(crate) fn settle(sides: &mut [Side; 2]) {
    settle_at(NOW, sides);
}

/// At that time.
pub(crate) fn settle_at(now: Duration, sides: &mut [Side; 2]) {
    while step_at(now, sides, 0) || step_at(now, sides, 1) {}
    take_events(sides);
}

/// It is time, at both hosts, and nothing is on its way then.
pub(crate) fn pass(sides: &mut [Side; 2]) {
    while sides.iter().any(|side| side.engine.next_timeout().is_some_and(|due| due <= NOW)) {
        for Side { engine, nic, .. } in sides.iter_mut() {
            engine.handle_timeout(nic, NOW);
        }
        settle(sides);
    }
}

/// Both ends close.
pub(crate) fn close(sides: &mut [Side; 2], conns: [ConnId; 2]) {
    for (Side { engine, nic, .. }, conn) in sides.iter_mut().zip(conns) {
        engine.close(conn, false, nic, NOW);
    }
    settle(sides);
}

/// A connection with the RMB of this number.
pub(crate) fn wish(rmb: u64) -> (Wish<Rings>, Rc<Counters>) {
    let counters: Rc<Counters> = Default::default();
    let wish = Wish {
        buffers: Rings(counters.clone()),
        memory: Memory { rmb: RmbId(rmb), size: BufferSize::at_least(65536), arena: ArenaId(0) },
        device: DeviceId(0),
        circumstances: Circumstances::FINE,
    };
    (wish, counters)
}

/// A connection's two ends begin, with the RMB of this number; the first host is the client.
pub(crate) fn begin(sides: &mut [Side; 2], rmb: u64) -> ([ConnId; 2], [Rc<Counters>; 2]) {
    let [one, other] = [wish(rmb), wish(rmb)];
    let [client, server] = sides;
    let conns = [
        client.engine.connect(one.0, &mut client.nic, NOW).expect("room"),
        server.engine.accept(other.0, &mut server.nic, NOW).expect("room"),
    ];
    (conns, [one.1, other.1])
}

/// The oldest CLC message of a host arrives.
pub(crate) fn clc(sides: &mut [Side; 2], from: usize, conns: [ConnId; 2]) {
    let (conn, message) = sides[from].engine.poll_clc().expect("a message");
    assert_eq!(conn, conns[from]);
    let Side { engine, nic, .. } = &mut sides[1 - from];
    engine.handle_clc(conns[1 - from], Ok(message), nic, NOW);
}

/// A connection that is established at both ends.
pub(crate) fn connect(sides: &mut [Side; 2], rmb: u64) -> ([ConnId; 2], [Rc<Counters>; 2]) {
    let (conns, counters) = begin(sides, rmb);
    for from in [0, 1, 0] {
        clc(sides, from, conns);
        settle(sides);
    }
    (conns, counters)
}
