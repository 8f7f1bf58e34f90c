//! Hosts, and the schedule that says whose turn it is.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use smc_proto::wire::clc::{MAX_LEN, Message};
use usmc_rdma::ConnId;
use usmc_rdma::nic::QpId;
use usmc_shm::layout::{ACCEPTOR, CLIENT};

use crate::application::{Application, Manner};
use crate::machine::Machine;
use crate::wire::Wire;

/// What is tried.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) hosts: usize,
    /// Of each host.
    pub(crate) devices: u8,
    /// In all. Each has two hosts by turns.
    pub(crate) connections: usize,
    /// Connections of a host at a time.
    pub(crate) slots: u32,
    /// That each end sends at most.
    pub(crate) bytes: u64,
    /// Links that are cut.
    pub(crate) cuts: usize,
    /// log2 of a ring's bytes, by turns of the hosts.
    pub(crate) shifts: [u32; 2],
    /// Applications do all sorts of things.
    pub(crate) is_wild: bool,
    /// The last host does what it likes.
    pub(crate) is_hostile: bool,
    /// Of a thousand calls of verbs so many are refused.
    pub(crate) refusals: u64,
    /// Of a hundred CLC messages so many are late, garbage, or never come.
    pub(crate) clc_faults: usize,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            hosts: 2,
            devices: 1,
            connections: 1,
            slots: 16,
            bytes: 60_000,
            cuts: 0,
            shifts: [14; 2],
            is_wild: false,
            is_hostile: false,
            refusals: 0,
            clc_faults: 0,
        }
    }
}

/// What comes by TCP.
pub(crate) enum Packet {
    Message(Box<Message>),
    Garbage,
    Closed,
}

/// How an end's connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// SMC, to the end.
    Over,
    Tcp,
    Failed,
}

/// A TCP connection and the applications at its ends.
pub(crate) struct Pair {
    pub(crate) hosts: [usize; 2],
    conns: [Option<ConnId>; 2],
    pub(crate) applications: [Option<Application>; 2],
    /// CLC messages on their way to each end, and when they come at the earliest.
    pub(crate) tcp: [VecDeque<(Duration, Packet)>; 2],
    /// Nothing comes to this end any more.
    pub(crate) is_mute: [bool; 2],
    pub(crate) outcomes: [Option<Outcome>; 2],
}

impl Pair {
    pub(crate) fn is_over(&self) -> bool {
        self.outcomes.iter().all(Option::is_some)
    }
}

/// Steps of a schedule, before it is taken for one that does not end.
const STEPS: usize = 3_000_000;

pub(crate) struct Network {
    random: u64,
    pub(crate) plan: Plan,
    pub(crate) wire: Rc<RefCell<Wire>>,
    pub(crate) machines: Vec<Machine>,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) begun: usize,
    pub(crate) cuts: usize,
    pub(crate) moved: usize,
    pub(crate) now: Duration,
}

impl Network {
    pub(crate) fn new(seed: u64, plan: Plan) -> Network {
        let wire = Rc::new(RefCell::new(Wire::default()));
        wire.borrow_mut().random = seed;
        wire.borrow_mut().refusals = plan.refusals;
        let machines = (0..plan.hosts).map(|host| Machine::new(host, plan, &wire)).collect();
        Network {
            random: seed.wrapping_mul(2).wrapping_add(0x1234_5679),
            plan,
            wire,
            machines,
            pairs: Vec::new(),
            begun: 0,
            cuts: plan.cuts,
            moved: 0,
            now: Duration::from_secs(1),
        }
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n.max(1)
    }

    /// Until nothing is left to do.
    pub(crate) fn run(&mut self) {
        for step in 0.. {
            assert!(step < STEPS, "{}", self.story());
            if !self.step() && !self.wait() {
                return;
            }
        }
    }

    /// Something, if there is anything.
    pub(crate) fn step(&mut self) -> bool {
        let kinds = 7;
        let first = self.below(kinds);
        for kind in 0..kinds {
            let is_done = match (first + kind) % kinds {
                0 => self.begin(),
                1 => self.deliver_message(),
                2 => self.deliver_chain(),
                3 => self.complete(),
                4 => self.cut(),
                5 => self.hand_over(),
                _ => self.let_application(),
            };
            if is_done {
                return true;
            }
        }
        false
    }

    /// Nothing else happens: time passes.
    fn wait(&mut self) -> bool {
        if (0..self.pairs.len() * 2).any(|end| self.close_lazily(end / 2, end % 2)) {
            return true;
        }
        // Links are tested for ever.
        if self.begun == self.plan.connections && self.pairs.iter().all(Pair::is_over) {
            return false;
        }
        let packets = self.pairs.iter().flat_map(|pair| &pair.tcp).filter_map(|tcp| tcp.front());
        let timers = self.timers();
        let Some(next) = packets.map(|packet| packet.0).chain(timers).min() else { return false };
        self.pass(next);
        true
    }

    /// When each host has something to do.
    pub(crate) fn timers(&self) -> impl Iterator<Item = Duration> {
        let alive = self.machines.iter().enumerate().filter(|(host, _)| !self.is_dead(*host));
        alive.filter_map(|(_, machine)| machine.engine.next_timeout())
    }

    pub(crate) fn is_dead(&self, host: usize) -> bool {
        self.wire.borrow().dead.contains(&host)
    }

    /// So many steps, or fewer if nothing is left to do.
    pub(crate) fn go(&mut self, steps: usize) {
        for _ in 0..steps {
            if !self.step() {
                return;
            }
        }
    }

    /// Time passes.
    pub(crate) fn pass(&mut self, until: Duration) {
        self.now = self.now.max(until);
        for host in 0..self.machines.len() {
            if self.is_dead(host) {
                continue;
            }
            let machine = &mut self.machines[host];
            machine.engine.handle_timeout(&mut machine.nic, self.now);
            self.poll(host);
        }
    }

    /// One more connection.
    fn begin(&mut self) -> bool {
        if self.begun == self.plan.connections {
            return false;
        }
        let client = self.below(self.plan.hosts);
        let server = (client + 1 + self.below(self.plan.hosts - 1)) % self.plan.hosts;
        // Of two hosts one is always the client, so that one group can serve all.
        let hosts = if self.plan.hosts == 2 { [0, 1] } else { [client, server] };
        if hosts.iter().any(|&host| self.machines[host].free.is_empty()) {
            return false;
        }
        self.begun += 1;
        let pair = self.pairs.len();
        self.pairs.push(Pair {
            hosts,
            conns: [None; 2],
            applications: [None, None],
            tcp: Default::default(),
            is_mute: [false; 2],
            outcomes: [None; 2],
        });
        for side in [CLIENT, ACCEPTOR] {
            let host = hosts[side];
            let mut wants = self.below(self.plan.bytes as usize) as u64;
            let manner = match self.below(if self.plan.is_wild { 10 } else { 1 }) {
                0..4 => Manner::Orderly,
                4 | 5 => Manner::Bytewise,
                6 => Manner::Leaves(self.below(self.plan.bytes as usize) as u64),
                7 | 8 => Manner::ClosesAtOnce,
                _ => Manner::NeverReads,
            };
            if manner == Manner::Bytewise {
                wants %= 500;
            }
            let machine = &mut self.machines[host];
            let slot = machine.free.pop().expect("a slot");
            let (wish, application) =
                machine.prepare(slot, [2 * pair + side, 2 * pair + 1 - side], (manner, wants));
            let conn = match side {
                CLIENT => machine.engine.connect(wish, &mut machine.nic, self.now),
                _ => machine.engine.accept(wish, &mut machine.nic, self.now),
            };
            let conn = conn.expect("room");
            machine.ends.insert(conn, (2 * pair + side, slot));
            self.pairs[pair].conns[side] = Some(conn);
            self.pairs[pair].applications[side] = Some(application);
        }
        self.poll(hosts[0]);
        true
    }

    fn deliver_message(&mut self) -> bool {
        let waiting: Vec<(usize, usize)> = (0..self.pairs.len())
            .flat_map(|pair| [(pair, 0), (pair, 1)])
            .filter(|&(pair, side)| {
                self.pairs[pair].tcp[side].front().is_some_and(|packet| packet.0 <= self.now)
            })
            .collect();
        if waiting.is_empty() {
            return false;
        }
        let (pair, side) = waiting[self.below(waiting.len())];
        let (_, packet) = self.pairs[pair].tcp[side].pop_front().expect("a message");
        let (host, conn) =
            (self.pairs[pair].hosts[side], self.pairs[pair].conns[side].expect("begun"));
        let machine = &mut self.machines[host];
        let mut bytes = [0; MAX_LEN];
        match packet {
            // As it stands on the wire.
            Packet::Message(message) => {
                let message = Message::parse(message.emit(&mut bytes).expect("room"));
                machine.engine.handle_clc(conn, message, &mut machine.nic, self.now);
            }
            Packet::Garbage => {
                machine.engine.handle_clc(
                    conn,
                    Message::parse(&bytes[..60]),
                    &mut machine.nic,
                    self.now,
                );
            }
            Packet::Closed => machine.engine.handle_clc_closed(conn, &mut machine.nic, self.now),
        }
        self.poll(host);
        true
    }

    fn deliver_chain(&mut self) -> bool {
        let ready: Vec<(usize, u32)> = {
            let wire = self.wire.borrow();
            let has = |(at, qp): (&(usize, u32), &crate::wire::Qp)| {
                (!qp.chains.is_empty() && wire.can_go(*at)).then_some(*at)
            };
            wire.qps.iter().filter_map(has).collect()
        };
        if ready.is_empty() {
            return false;
        }
        let from = ready[self.below(ready.len())];
        self.wire.borrow_mut().deliver(from);
        true
    }

    /// A host looks at a message that has come.
    fn hand_over(&mut self) -> bool {
        let ready: Vec<(usize, u32)> = {
            let wire = self.wire.borrow();
            let has = |(at, qp): (&(usize, u32), &crate::wire::Qp)| {
                (!qp.landed.is_empty() && !wire.dead.contains(&at.0)).then_some(*at)
            };
            wire.qps.iter().filter_map(has).collect()
        };
        if ready.is_empty() {
            return false;
        }
        let at = ready[self.below(ready.len())];
        let message = self.wire.borrow_mut().qps.get_mut(&at).and_then(|qp| qp.landed.pop_front());
        let machine = &mut self.machines[at.0];
        let message = message.expect("a message");
        machine.engine.handle_received(QpId(at.1), &message, &mut machine.nic, self.now);
        self.poll(at.0);
        true
    }

    fn complete(&mut self) -> bool {
        let ready: Vec<(usize, u32)> = {
            let wire = self.wire.borrow();
            wire.qps.iter().filter(|(_, qp)| qp.acknowledged > 0).map(|(at, _)| *at).collect()
        };
        if ready.is_empty() {
            // Errors come behind what was successful.
            return self.tell_error();
        }
        let at = ready[self.below(ready.len())];
        if let Some(qp) = self.wire.borrow_mut().qps.get_mut(&at) {
            qp.acknowledged -= 1;
        }
        let machine = &mut self.machines[at.0];
        machine.engine.handle_sent(QpId(at.1), &mut machine.nic, self.now);
        self.poll(at.0);
        true
    }

    fn tell_error(&mut self) -> bool {
        let count = self.wire.borrow().errors.len();
        if count == 0 {
            return false;
        }
        let which = self.below(count);
        let (host, qp) = self.wire.borrow_mut().errors.swap_remove(which);
        let machine = &mut self.machines[host];
        machine.engine.handle_link_down(qp, &mut machine.nic, self.now);
        self.poll(host);
        true
    }

    /// A link that carries bytes is lost.
    fn cut(&mut self) -> bool {
        if self.cuts == 0 || self.below(200) > 0 {
            return false;
        }
        let established: Vec<(usize, u32)> = {
            let wire = self.wire.borrow();
            let all = wire.qps.iter().filter(|(_, qp)| qp.peer.is_some() && !qp.is_broken);
            // With two links, once both are there.
            let all: Vec<(usize, u32)> = all.map(|(at, _)| *at).collect();
            if all.len() < 2 * usize::from(self.plan.devices) { Vec::new() } else { all }
        };
        let is_under_way = self.pairs.iter().filter(|pair| !pair.is_over()).count();
        if established.is_empty() || is_under_way < 2 || !self.are_up() {
            return false;
        }
        self.cuts -= 1;
        let end = established[self.below(established.len())];
        let peer = self.wire.borrow().qps[&end].peer.expect("connected");
        self.moved +=
            self.wire.borrow().qps[&end].chains.len() + self.wire.borrow().qps[&peer].chains.len();
        self.wire.borrow_mut().cut(end);
        true
    }

    /// Whether each group has all its links.
    fn are_up(&self) -> bool {
        self.machines.iter().all(|machine| machine.engine.links() == usize::from(self.plan.devices))
    }

    pub(crate) fn let_application(&mut self) -> bool {
        let count = self.pairs.len();
        let first = self.below(count * 2);
        for n in 0..count * 2 {
            let end = (first + n) % (count * 2);
            if self.act(end / 2, end % 2) {
                return true;
            }
        }
        false
    }

    fn act(&mut self, pair: usize, side: usize) -> bool {
        let (mut most, mut much) = (1 + self.below(9000) as u64, 1 + self.below(9000));
        let Pair { hosts, conns, applications, outcomes, .. } = &mut self.pairs[pair];
        let (host, Some(conn)) = (hosts[side], conns[side]) else { return false };
        let Some(application) = applications[side].as_mut().filter(|_| outcomes[side].is_none())
        else {
            return false;
        };
        if application.is_closed {
            return false;
        }
        let machine = &mut self.machines[host];
        match application.manner {
            Manner::Bytewise => (most, much) = (1, 1),
            Manner::NeverReads => much = 0,
            Manner::Leaves(after) => much = much.min((after - application.read) as usize),
            Manner::Orderly | Manner::ClosesAtOnce => {}
        }
        let mut is_done = application.read(much);
        is_done |= application.write(most);
        let shuts = application.manner != Manner::ClosesAtOnce;
        if shuts && !application.is_shut && application.written == application.wants {
            application.is_shut = true;
            is_done = true;
            machine.engine.shut(conn, &mut machine.nic);
        }
        if application.closes() {
            application.is_closed = true;
            is_done = true;
            let unread = application.has_data();
            machine.engine.close(conn, unread, &mut machine.nic, self.now);
        } else if is_done {
            machine.engine.handle_dirty(conn, &mut machine.nic);
        }
        self.poll(host);
        is_done
    }

    /// An application that has waited for nothing.
    fn close_lazily(&mut self, pair: usize, side: usize) -> bool {
        let Pair { hosts, conns, applications, outcomes, .. } = &mut self.pairs[pair];
        let (host, Some(conn)) = (hosts[side], conns[side]) else { return false };
        let is_lazy = |application: &&mut Application| {
            application.manner == Manner::NeverReads && !application.is_closed
        };
        let lazy = applications[side].as_mut().filter(is_lazy);
        let Some(application) = lazy.filter(|_| outcomes[side].is_none()) else { return false };
        application.is_closed = true;
        let unread = application.has_data();
        let machine = &mut self.machines[host];
        machine.engine.close(conn, unread, &mut machine.nic, self.now);
        self.poll(host);
        true
    }

    /// How many groups each host has had.
    pub(crate) fn groups(&self) -> Vec<usize> {
        self.machines.iter().map(|machine| machine.groups).collect()
    }

    /// How many RMBs each host has in its groups.
    pub(crate) fn keys(&self) -> [usize; 2] {
        [0, 1].map(|host| self.machines[host].engine.rmbs())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for machine in &self.machines {
            // SAFETY: allocated so, and nothing uses it any more.
            unsafe { std::alloc::dealloc(machine.memory.0, machine.memory.1) };
        }
    }
}
