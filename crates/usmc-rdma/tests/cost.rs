//! What a message costs must not depend on how many connections there are.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smc_proto::handshake::{Circumstances, Host};
use smc_proto::ids::{BufferSize, Eid, MacAddr, MtuCode, PeerId, RoceGid, U24};
use smc_proto::link_group::{Connect, Key, Port};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_rdma::buffers::{Buffers, PARTS};
use usmc_rdma::nic::{ArenaId, DeviceId, Nic, PostFailed, QpId, Range, RmbId, Write};
use usmc_rdma::{Config, ConnId, Engine, Memory, Wish};
use usmc_shm::Broken;

/// Rings without bytes.
#[derive(Default)]
struct Counters {
    written: Cell<u64>,
    arrived: Cell<u64>,
}

struct Rings(Rc<Counters>);

impl Buffers for Rings {
    fn written(&self) -> Result<u64, Broken> {
        Ok(self.0.written.get())
    }

    fn source(&self, at: u64, len: u32) -> Result<[Range; PARTS], Broken> {
        let mut parts = [Range::default(); PARTS];
        parts[0] = Range { addr: at, len };
        Ok(parts)
    }

    fn release(&self, _: u64) {}

    fn read(&self) -> u64 {
        self.0.arrived.get()
    }

    fn arrived(&self, upto: u64) {
        self.0.arrived.set(upto);
    }
}

/// Queue pairs whose messages wait in one queue: both hosts' numbers are the same, as each creates one when the other does.
struct Queue {
    host: u8,
    qps: u32,
    posted: VecDeque<(QpId, [u8; 44])>,
    calls: u64,
}

impl Nic for Queue {
    fn port(&self, _: DeviceId) -> Port {
        Port {
            gid: RoceGid::from_ipv4([10, 0, 0, self.host]),
            mac: MacAddr([2, 0, 0, 0, 0, self.host]),
            mtu: MtuCode::from_code(3).expect("1024"),
            direct: true,
            ..Port::default()
        }
    }

    fn create(&mut self, device: DeviceId) -> Option<(QpId, Port)> {
        self.qps += 1;
        Some((QpId(self.qps), Port { qpn: U24::truncate(self.qps), ..self.port(device) }))
    }

    fn connect(&mut self, _: QpId, _: &Port) -> Connect {
        Connect::Done
    }

    fn destroy(&mut self, _: QpId) {}

    fn cut(&mut self, _: QpId) {}

    fn rmb(&mut self, _: QpId, rmb: RmbId) -> Option<Key> {
        Some(Key { rkey: rmb.0 as u32 + 1, addr: 0 })
    }

    fn arena(&mut self, _: QpId, _: ArenaId) -> Option<u32> {
        self.calls += 1;
        Some(1)
    }

    fn post(&mut self, qp: QpId, _: &[Write], message: &[u8]) -> Result<(), PostFailed> {
        self.calls += 1;
        self.posted.push_back((qp, message.try_into().expect("44 bytes")));
        Ok(())
    }
}

struct Side {
    engine: Engine<Rings>,
    nic: Queue,
}

const NOW: Duration = Duration::from_secs(1);

fn side(host: u8) -> Side {
    let mut ueids = List::new();
    ueids.push(Eid::user("COST").expect("an EID")).expect("room");
    let identity = Host {
        peer_id: PeerId([1, 0, 2, 0, 0, 0, 0, host]),
        hostname: Hostname::new("cost"),
        release: Release::V2_1,
        features: FeatureMask(0),
        max_conns: 255,
        max_links: 1,
        ueids,
        seid: None,
        smcd_v2: false,
    };
    let config = Config {
        host: identity,
        devices: vec![DeviceId(0)],
        first_token: host.into(),
        test_interval: Duration::from_secs(30),
    };
    let nic = Queue { host, qps: 0, posted: VecDeque::new(), calls: 0 };
    Side { engine: Engine::new(config), nic }
}

/// Until nothing is on its way.
fn settle(sides: &mut [Side; 2]) {
    while let Some(from) = (0..2).find(|&from| !sides[from].nic.posted.is_empty()) {
        let (qp, message) = sides[from].nic.posted.pop_front().expect("a message");
        let Side { engine, nic } = &mut sides[from];
        engine.handle_sent(qp, nic, NOW);
        let Side { engine, nic } = &mut sides[1 - from];
        engine.handle_received(qp, &message, nic, NOW);
        sides.iter_mut().for_each(|side| while side.engine.poll_event().is_some() {});
    }
}

/// As many connections as that.
fn connected(count: u64) -> ([Side; 2], ConnId, Rc<Counters>) {
    let mut sides = [side(1), side(2)];
    let mut last = None;
    for n in 0..count {
        let counters = Rc::new(Counters::default());
        let wish = |counters: &Rc<Counters>| Wish {
            buffers: Rings(counters.clone()),
            memory: Memory { rmb: RmbId(n), size: BufferSize::at_least(65536), arena: ArenaId(0) },
            device: DeviceId(0),
            circumstances: Circumstances::FINE,
        };
        let [client, server] = &mut sides;
        let wishes = [wish(&counters), wish(&Rc::default())];
        let [one, other] = wishes;
        let conns = [
            client.engine.connect(one, &mut client.nic, NOW).expect("room"),
            server.engine.accept(other, &mut server.nic, NOW).expect("room"),
        ];
        for from in [0, 1, 0] {
            let (_, message) = sides[from].engine.poll_clc().expect("a message");
            let Side { engine, nic } = &mut sides[1 - from];
            engine.handle_clc(conns[1 - from], Ok(message), nic, NOW);
        }
        settle(&mut sides);
        last = Some((conns[0], counters));
    }
    let (conn, counters) = last.expect("one at least");
    (sides, conn, counters)
}

/// What a message takes, as the best of some tries, and the calls of verbs.
fn cost(count: u64) -> (Duration, u64) {
    let (mut sides, conn, counters) = connected(count);
    let groups = sides[0].engine.groups() as u64;
    assert_eq!(groups, count.div_ceil(usmc_rdma::RMBS as u64));
    let before = sides[0].nic.calls;
    let mut best = Duration::MAX;
    for _ in 0..20 {
        let begun = Instant::now();
        for _ in 0..500 {
            counters.written.set(counters.written.get() + 100);
            let Side { engine, nic } = &mut sides[0];
            engine.handle_dirty(conn, nic);
            assert!(engine.next_timeout().is_some_and(|due| due > NOW), "a link is tested");
            settle(&mut sides);
        }
        best = best.min(begun.elapsed() / 500);
    }
    (best, sides[0].nic.calls - before)
}

#[test]
fn a_message_costs_the_same_among_ten_thousand_connections() {
    let (few, calls) = cost(10);
    let (many, calls_of_many) = cost(10_000);
    println!("{few:?} among 10 connections, {many:?} among 10 000");
    assert_eq!(calls, calls_of_many);
    // One post each.
    assert_eq!(calls, 20 * 500);
    assert!(many < 4 * few + Duration::from_micros(2), "{few:?}, {many:?}");
}
