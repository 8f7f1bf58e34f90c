//! RDMA devices: queue pairs whose WRITEs and SENDs come in order, and keys that are checked.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use smc_proto::ids::{MacAddr, MtuCode, RoceGid, U24};
use smc_proto::link_group::{Connect, Key, Port};
use usmc_rdma::nic::{ArenaId, DeviceId, Nic, PostFailed, QpId, RmbId, Write};

/// Receives of a queue pair.
const RECEIVES: usize = 3 * usmc_rdma::SENDS;

/// What all devices of all hosts have in common.
#[derive(Default)]
pub(crate) struct Wire {
    pub(crate) qps: BTreeMap<(usize, u32), Qp>,
    next: u32,
    /// Memory that may be registered: address and bytes, by host and number.
    pub(crate) rmbs: BTreeMap<(usize, u64), (u64, usize)>,
    pub(crate) arenas: BTreeMap<usize, (u64, usize)>,
    /// Queue pairs in error, of which their hosts have not been told.
    pub(crate) errors: Vec<(usize, QpId)>,
    /// Of a thousand calls so many are refused.
    pub(crate) refusals: u64,
    /// Each device is in a physical network of its own.
    pub(crate) are_apart: bool,
    /// No queue pair can be made.
    pub(crate) makes_none: bool,
    pub(crate) refused: usize,
    pub(crate) random: u64,
    /// Hosts that have died: what is sent to them never arrives, and nobody is told.
    pub(crate) dead: Vec<usize>,
    /// Ports that are down.
    pub(crate) down: Vec<(usize, DeviceId)>,
    /// A key that nobody knows is an error of the sender's link, not of the test.
    pub(crate) is_hostile: bool,
}

/// A queue pair.
pub(crate) struct Qp {
    device: DeviceId,
    local: Port,
    /// The host and queue pair at the other end, once it is connected.
    pub(crate) peer: Option<(usize, u32)>,
    pub(crate) is_broken: bool,
    /// The peer knows that it is destroyed once what was posted is out.
    is_gone: bool,
    /// What is on its way.
    pub(crate) chains: VecDeque<Chain>,
    /// Chains that have come, and of which the sender has not heard.
    pub(crate) acknowledged: usize,
    /// Messages that have come, of which the sender hears, and which the host has not looked at.
    pub(crate) landed: VecDeque<Vec<u8>>,
    keys: BTreeMap<u32, (u64, usize)>,
    names: BTreeMap<u64, Key>,
    /// Keys that it has had: each is another one.
    named: u32,
}

/// What was posted at once.
#[derive(Clone)]
pub(crate) struct Chain {
    pub(crate) writes: Vec<Write>,
    pub(crate) message: Vec<u8>,
}

impl Wire {
    /// Whether this call is refused.
    fn refuses(&mut self) -> bool {
        if self.refusals == 0 {
            return false;
        }
        self.random =
            self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let is_so = (self.random >> 33) % 1000 < self.refusals;
        self.refused += usize::from(is_so);
        is_so
    }

    /// Whether no port on its way is down.
    pub(crate) fn can_go(&self, from: (usize, u32)) -> bool {
        let Some(qp) = self.qps.get(&from) else { return false };
        let peer = qp.peer.and_then(|at| Some((at.0, self.qps.get(&at)?.device)));
        let is_there =
            |port: &(usize, DeviceId)| *port == (from.0, qp.device) || Some(*port) == peer;
        // A peer without a receive turns the message away for now.
        let has_receive =
            qp.peer.and_then(|at| self.qps.get(&at)).is_none_or(|to| to.landed.len() < RECEIVES);
        has_receive && !self.down.iter().any(is_there)
    }

    /// Takes the oldest chain of a queue pair to its peer: bytes are in memory, and the message waits to be handed over.
    pub(crate) fn deliver(&mut self, from: (usize, u32)) -> Option<()> {
        let to = self.qps.get(&from)?.peer.expect("a connected queue pair");
        let answers = self.qps.get(&to).is_some_and(|peer| !peer.is_gone && !peer.is_broken)
            && !self.dead.contains(&to.0);
        let qp = self.qps.get_mut(&from)?;
        if !answers {
            if self.dead.contains(&to.0) {
                // There is no end of retries.
                qp.chains.clear();
                return None;
            }
            // The retries are used up.
            qp.is_broken = true;
            qp.chains.clear();
            match qp.is_gone {
                true => drop(self.qps.remove(&from)),
                false => self.errors.push((from.0, QpId(from.1))),
            }
            return None;
        }
        let knows = |peer: &Qp, chain: &Chain| {
            chain.writes.iter().all(|write| peer.keys.contains_key(&write.to.rkey))
        };
        if self.is_hostile {
            let chain = qp.chains.front()?.clone();
            if !self.qps.get(&to).is_some_and(|peer| knows(peer, &chain)) {
                self.cut(from);
                return None;
            }
        }
        let qp = self.qps.get_mut(&from)?;
        let chain = qp.chains.pop_front()?;
        let is_last = qp.is_gone && qp.chains.is_empty();
        if !is_last {
            qp.acknowledged += 1;
        } else {
            self.qps.remove(&from);
        }
        let peer = self.qps.get(&to)?;
        let (arena, room) = self.arenas[&from.0];
        for write in &chain.writes {
            let known = peer.keys.get(&write.to.rkey);
            let &(addr, len) = known.unwrap_or_else(|| panic!("no such key: {write:?}"));
            let is_inside = write.to.addr >= addr
                && write.to.addr + u64::from(write.len()) <= addr + len as u64;
            assert!(is_inside, "{write:?} is outside of {addr:#x}, {len}");
            let is_others = self.qps.iter().any(|(at, other)| {
                let host = other.peer.map(|peer| peer.0);
                let is_alive = !other.is_gone && !other.is_broken;
                let is_other = at.0 == to.0 && host.is_some_and(|host| host != from.0);
                is_alive && is_other && other.keys.values().any(|key| key.0 == addr)
            });
            assert!(!is_others, "{write:?} goes where another host can write");
            let mut to = write.to.addr;
            for part in write.source {
                let is_inside = part.len == 0
                    || (part.addr >= arena
                        && part.addr + u64::from(part.len) <= arena + room as u64);
                assert!(is_inside, "{write:?} is not of the arena");
                // SAFETY: the host's memory and a registered RMB, which live as long as the test. No other thread is there. Only now
                // the device reads what was posted.
                unsafe {
                    std::ptr::copy(
                        std::ptr::with_exposed_provenance::<u8>(part.addr as usize),
                        std::ptr::with_exposed_provenance_mut(to as usize),
                        part.len as usize,
                    );
                }
                to += u64::from(part.len);
            }
        }
        self.qps.get_mut(&to)?.landed.push_back(chain.message);
        Some(())
    }

    /// Both ends of a link are in error, and what is on its way is lost.
    pub(crate) fn cut(&mut self, end: (usize, u32)) {
        let Some(peer) = self.qps.get(&end).and_then(|qp| qp.peer) else { return };
        for end in [end, peer] {
            if let Some(qp) = self.qps.get_mut(&end) {
                qp.is_broken = true;
                qp.chains.clear();
                self.errors.push((end.0, QpId(end.1)));
            }
        }
    }
}

/// The devices of a host.
pub(crate) struct Devices {
    pub(crate) host: usize,
    pub(crate) wire: Rc<RefCell<Wire>>,
}

impl Devices {
    fn gid(&self, device: DeviceId) -> RoceGid {
        RoceGid::from_ipv4([10, device.0, 0, self.host as u8])
    }
}

impl Nic for Devices {
    fn port(&self, device: DeviceId) -> Port {
        Port {
            gid: self.gid(device),
            mac: MacAddr([2, 0, 0, 0, device.0, self.host as u8]),
            mtu: MtuCode::from_code(3).expect("1024"),
            direct: true,
            ..Port::default()
        }
    }

    fn are_together(&self, one: DeviceId, other: DeviceId) -> bool {
        one == other || !self.wire.borrow().are_apart
    }

    fn create(&mut self, device: DeviceId) -> Option<(QpId, Port)> {
        let mut wire = self.wire.borrow_mut();
        if wire.refuses() || wire.makes_none || wire.down.contains(&(self.host, device)) {
            return None;
        }
        wire.next += 1;
        let number = wire.next;
        let (qpn, psn) = (U24::truncate(number + 100), U24::truncate(number * 7919));
        let local = Port { qpn, psn, ..self.port(device) };
        let qp = Qp {
            device,
            local,
            peer: None,
            is_broken: false,
            is_gone: false,
            chains: VecDeque::new(),
            acknowledged: 0,
            landed: VecDeque::new(),
            keys: BTreeMap::new(),
            names: BTreeMap::new(),
            named: 0,
        };
        wire.qps.insert((self.host, number), qp);
        Some((QpId(number), local))
    }

    fn connect(&mut self, qp: QpId, remote: &Port) -> Connect {
        let mut wire = self.wire.borrow_mut();
        if wire.refuses() {
            return Connect::Failed;
        }
        let is_it = |(_, peer): &(&(usize, u32), &Qp)| {
            (peer.local.gid, peer.local.qpn) == (remote.gid, remote.qpn)
        };
        let Some((&at, peer)) = wire.qps.iter().find(is_it) else { return Connect::Failed };
        assert_eq!(peer.local.psn, remote.psn, "another sequence number");
        let qp = wire.qps.get_mut(&(self.host, qp.0)).expect("a queue pair");
        assert_eq!(qp.peer, None, "connected twice");
        qp.peer = Some(at);
        if qp.is_broken { Connect::Failed } else { Connect::Done }
    }

    fn destroy(&mut self, qp: QpId) {
        let mut wire = self.wire.borrow_mut();
        let at = (self.host, qp.0);
        let Some(qp) = wire.qps.get_mut(&at) else { return };
        qp.is_gone = true;
        if qp.chains.is_empty() || qp.is_broken {
            wire.qps.remove(&at);
        }
    }

    fn cut(&mut self, qp: QpId) -> Vec<Vec<u8>> {
        let gone = self.wire.borrow_mut().qps.remove(&(self.host, qp.0));
        gone.map(|qp| qp.landed.into()).unwrap_or_default()
    }

    fn taken(&mut self, qp: QpId) -> Vec<Vec<u8>> {
        let mut wire = self.wire.borrow_mut();
        let qp = wire.qps.get_mut(&(self.host, qp.0));
        qp.map(|qp| std::mem::take(&mut qp.landed).into()).unwrap_or_default()
    }

    fn rmb(&mut self, qp: QpId, rmb: RmbId) -> Option<Key> {
        let mut wire = self.wire.borrow_mut();
        if wire.refuses() {
            return None;
        }
        let &(addr, len) = wire.rmbs.get(&(self.host, rmb.0))?;
        let qp_number = qp.0;
        let qp = wire.qps.get_mut(&(self.host, qp.0))?;
        qp.named += 1;
        let next = qp_number << 12 | qp.named;
        let key = *qp.names.entry(rmb.0).or_insert(Key { rkey: next, addr });
        qp.keys.insert(key.rkey, (addr, len));
        Some(key)
    }

    fn forget(&mut self, qp: QpId, rmb: RmbId) {
        let mut wire = self.wire.borrow_mut();
        let Some(qp) = wire.qps.get_mut(&(self.host, qp.0)) else { return };
        if let Some(key) = qp.names.remove(&rmb.0) {
            qp.keys.remove(&key.rkey);
        }
    }

    fn arena(&mut self, qp: QpId, _: ArenaId) -> Option<u32> {
        if self.wire.borrow_mut().refuses() { None } else { Some(qp.0) }
    }

    fn post(&mut self, qp: QpId, writes: &[Write], message: &[u8]) -> Result<(), PostFailed> {
        let mut wire = self.wire.borrow_mut();
        let (qp_id, number) = (qp, qp.0);
        if wire.refuses() {
            return Err(PostFailed);
        }
        let qp = wire.qps.get_mut(&(self.host, qp.0)).ok_or(PostFailed)?;
        if qp.is_broken || qp.peer.is_none() {
            return Err(PostFailed);
        }
        let port = (self.host, qp.device);
        assert!(!wire.down.contains(&port), "posted while the port is down");
        let qp = wire.qps.get_mut(&(self.host, qp_id.0)).ok_or(PostFailed)?;
        assert!(
            qp.chains.len() + qp.acknowledged < usmc_rdma::SENDS,
            "more than the peer has receives for"
        );
        assert!(writes.iter().all(|write| write.lkey == number), "a key of another queue pair");
        qp.chains.push_back(Chain { writes: writes.to_vec(), message: message.to_vec() });
        Ok(())
    }
}
