//! Hosts that die, stop or lie, and ports that go down.

use std::collections::HashSet;
use std::time::Duration;

use usmc_rdma::nic::{DeviceId, QpId};

use crate::hosts::{Network, Outcome, Plan};
use crate::run;

/// Schedules of each kind.
const SCHEDULES: u64 = 100;

impl Network {
    /// The host says nothing any more, and nobody is told.
    fn die(&mut self, host: usize) {
        {
            let mut wire = self.wire.borrow_mut();
            wire.dead.push(host);
            for (at, qp) in &mut wire.qps {
                if at.0 == host {
                    (qp.acknowledged, qp.chains) = (0, Default::default());
                }
            }
        }
        for pair in 0..self.pairs.len() {
            for side in 0..2 {
                if self.pairs[pair].hosts[side] == host {
                    self.pairs[pair].outcomes[side].get_or_insert(Outcome::Failed);
                    self.lose_tcp(pair, 1 - side);
                }
            }
        }
        self.plan.connections = self.begun;
    }

    fn stop(&mut self, host: usize) {
        self.plan.connections = self.begun;
        self.plan.cuts = 1;
        self.cuts = 0;
        let machine = &mut self.machines[host];
        machine.engine.stop(&mut machine.nic, self.now);
        self.poll(host);
    }

    fn port(&mut self, host: usize, device: u8, is_up: bool) {
        let port = (host, DeviceId(device));
        self.wire.borrow_mut().down.retain(|down| *down != port);
        if !is_up {
            self.wire.borrow_mut().down.push(port);
        }
        let machine = &mut self.machines[host];
        machine.engine.handle_port(port.1, is_up, &mut machine.nic, self.now);
        self.poll(host);
    }

    /// Whether that becomes so within minutes.
    fn comes_to(&mut self, is_so: impl Fn(&Network) -> bool) -> bool {
        let until = self.now + Duration::from_secs(180);
        while self.now < until && !is_so(self) {
            self.go(1000);
            let next = self.timers().min().unwrap_or(until);
            self.pass(next);
        }
        is_so(self)
    }

    /// A message of the last host that its engine would never send.
    fn lie(&mut self) {
        let liar = self.machines.len() - 1;
        let victims: Vec<(usize, u32)> = {
            let wire = self.wire.borrow();
            let is_victim = |at: &(usize, u32)| {
                wire.qps[at].peer.is_some_and(|peer| peer.0 == liar) && at.0 != liar
            };
            wire.qps.keys().filter(|at| is_victim(at)).copied().collect()
        };
        if victims.is_empty() {
            return;
        }
        let (host, qp) = victims[self.below(victims.len())];
        let mut message = [0; 72];
        for byte in &mut message {
            *byte = if self.below(3) == 0 { self.below(256) as u8 } else { 0 };
        }
        let types = [
            0xfe, 0x01, 0x02, 0x03, 0x04, 0x06, 0x07, 0x08, 0x09, 0x21, 0x22, 0x24, 0x25, 0x26,
            0x27, 0x28, 0x29,
        ];
        message[0] = types[self.below(types.len())];
        let len = if self.below(8) == 0 { self.below(72) } else { 44 };
        (message[1], message[3]) = (44, message[3] & 0xe0);
        if message[0] == 0xfe {
            // Somebody's token, more or less.
            let conns: Vec<u32> =
                self.machines[host].ends.keys().map(|conn| conn.token()).collect();
            if !conns.is_empty() && self.below(4) > 0 {
                let token = conns[self.below(conns.len())];
                message[4..8].copy_from_slice(&token.to_be_bytes());
            }
            message[2] = 0;
        }
        let machine = &mut self.machines[host];
        machine.engine.handle_received(QpId(qp), &message[..len], &mut machine.nic, self.now);
        self.poll(host);
    }
}

#[test]
fn a_host_that_dies_silently_takes_nobody_with_it() {
    for seed in 0..SCHEDULES {
        let plan = Plan { connections: 12, bytes: 400_000, ..Plan::default() };
        let mut network = Network::new(seed, Plan { devices: 1 + seed as u8 % 2, cuts: 1, ..plan });
        network.cuts = 0;
        network.go(40 * seed as usize);
        network.die(seed as usize / 2 % 2);
        network.run();
        network.settle();
        assert!(network.pairs.iter().all(|pair| pair.is_over()), "{}", network.story());
    }
}

#[test]
fn a_host_that_stops_tells_its_peers_at_once() {
    for seed in 0..SCHEDULES {
        let plan = Plan { connections: 40, slots: 40, bytes: 400_000, ..Plan::default() };
        let mut network = Network::new(seed, Plan { devices: 1 + seed as u8 % 2, ..plan });
        network.go(60 * seed as usize);
        let (host, before) = (seed as usize / 2 % 2, network.now);
        network.stop(host);
        let links = network.machines[1 - host].engine.links();
        network.run();
        assert!(
            links == 0 || network.now - before < Duration::from_secs(10),
            "by time, not at once"
        );
        network.settle();
        assert!(network.pairs.iter().all(|pair| pair.is_over()), "{}", network.story());
    }
}

#[test]
fn ports_go_down_and_come_back_and_no_byte_is_lost() {
    for seed in 0..SCHEDULES {
        let devices = 1 + seed as u8 % 2;
        let plan = Plan { connections: 8, devices, cuts: 1, bytes: 400_000, ..Plan::default() };
        let mut network = Network::new(seed, plan);
        network.cuts = 0;
        network.go(200);
        for round in 0..6 {
            let (host, device) = (network.below(2), network.below(devices.into()) as u8);
            network.port(host, device, false);
            network.go(30 * round);
            network.port(host, device, true);
            network.go(600);
        }
        network.run();
        network.check();
        let unused = if devices == 2 { network.unused() } else { 0 };
        assert_eq!(network.whole() + network.tcp() + unused, 8, "seed {seed}: {}", network.story());
        network.settle();
    }
}

#[test]
fn a_second_link_comes_back_with_its_port() {
    let plan = Plan { connections: 3, devices: 2, cuts: 1, ..Plan::default() };
    let mut network = run(1, plan);
    for host in 0..2 {
        network.port(host, 1, false);
        network.go(100);
        // There may be two all the same, both from the port that is left.
        assert!(network.machines.iter().all(|machine| machine.engine.links() >= 1));
        network.port(host, 1, true);
        network.go(100);
        assert!(network.machines.iter().all(|machine| machine.engine.links() == 2), "host {host}");
    }
}

#[test]
fn links_of_a_group_are_in_one_physical_network() {
    let plan = Plan { connections: 3, devices: 2, cuts: 0, ..Plan::default() };
    let mut network = Network::new(1, plan);
    network.wire.borrow_mut().are_apart = true;
    network.run();
    network.check();
    // Nor does a port that comes back bring another one.
    network.port(0, 1, false);
    network.port(0, 1, true);
    assert!(!network.comes_to(|network| network.machines.iter().any(|m| m.engine.links() > 1)));
}

#[test]
fn a_second_link_that_could_not_be_made_is_tried_again() {
    for host in 0..2 {
        let plan = Plan { connections: 3, devices: 2, cuts: 1, ..Plan::default() };
        let mut network = run(1, plan);
        let has_both = |network: &Network| {
            network.machines.iter().all(|machine| {
                let groups = machine.engine.view();
                let active = groups[0].links.iter().filter(|link| link.is_active);
                let devices: HashSet<_> = active.filter_map(|link| link.device).collect();
                devices.len() == 2
            })
        };
        assert!(has_both(&network));
        // The port is back before a link can be made.
        network.wire.borrow_mut().makes_none = true;
        network.port(host, 1, false);
        network.go(100);
        network.port(host, 1, true);
        network.go(100);
        assert!(!has_both(&network));
        network.wire.borrow_mut().makes_none = false;
        assert!(network.comes_to(has_both), "host {host}");
        network.settle();
    }
}

#[test]
fn a_host_that_lies_harms_itself_only() {
    for seed in 0..SCHEDULES {
        let plan = Plan { hosts: 3, connections: 18, is_hostile: true, ..Plan::default() };
        let mut network = Network::new(seed, Plan { devices: 1 + seed as u8 % 2, ..plan });
        network.wire.borrow_mut().is_hostile = true;
        for _ in 0..3000 {
            network.go(5);
            network.lie();
        }
        network.run();
        for pair in network.pairs.iter().filter(|pair| !pair.hosts.contains(&2)) {
            let [Some(one), Some(other)] = &pair.applications else { panic!("begun") };
            assert!(one.read == other.wants && other.read == one.wants, "{}", network.story());
        }
    }
}
