//! What has to be true in the end.

use std::time::Duration;

use crate::application::{Application, Manner};
use crate::hosts::{Network, Outcome, Pair};

impl Network {
    /// Whether connections may end before their time.
    pub(crate) fn has_faults(&self) -> bool {
        self.plan.cuts > 0
            || self.plan.refusals > 0
            || self.plan.clc_faults > 0
            || self.plan.is_hostile
    }

    /// Each connection is over, and nobody has got a byte that was not sent.
    pub(crate) fn check(&self) {
        assert!(self.pairs.iter().all(Pair::is_over), "{}", self.story());
        assert_eq!(self.begun, self.plan.connections);
        assert!(self.machines.iter().all(|machine| machine.engine.connections() == 0));
        for pair in &self.pairs {
            self.check_pair(pair);
        }
    }

    /// Both ends are SMC, or both are TCP and no byte went by SMC; or it is lost, which both see.
    fn check_pair(&self, pair: &Pair) {
        let [Some(one), Some(other)] = &pair.applications else { panic!("not begun") };
        match pair.outcomes.map(|outcome| outcome.expect("over")) {
            [Outcome::Over, Outcome::Over] => {
                for (end, peer) in [(one, other), (other, one)] {
                    let is_orderly = matches!(end.manner, Manner::Orderly | Manner::Bytewise);
                    let has_all = end.read == peer.written;
                    let is_fine = !is_orderly || has_all || end.is_aborted();
                    assert!(is_fine, "bytes are missing: {}", self.story());
                    if !self.has_faults() {
                        let is_reset = matches!(peer.manner, Manner::Orderly | Manner::Bytewise)
                            && is_orderly
                            && end.is_aborted();
                        assert!(!is_reset, "reset for nothing: {}", self.story());
                    }
                }
            }
            [Outcome::Tcp, Outcome::Tcp] => {}
            [Outcome::Over, _] => Self::is_lost(one),
            [_, Outcome::Over] => Self::is_lost(other),
            // TCP tells whoever goes on.
            _ => {}
        }
    }

    /// Its peer does not speak SMC any more.
    fn is_lost(end: &Application) {
        // Who has closed by itself may have seen nothing of it.
        let is_orderly = matches!(end.manner, Manner::Orderly | Manner::Bytewise);
        assert!(end.is_aborted() || !is_orderly, "it takes itself for SMC");
        assert_eq!(end.read, 0);
    }

    /// Once idle time has passed nothing is left of anything.
    pub(crate) fn settle(&mut self) {
        let end = self.now + Duration::from_secs(2000);
        self.wire.borrow_mut().refusals = 0;
        while self.now < end {
            while self.step() {}
            let Some(next) = self.timers().min() else { break };
            self.pass(next);
        }
        for (host, machine) in self.machines.iter().enumerate() {
            if self.is_dead(host) {
                continue;
            }
            assert_eq!((machine.engine.groups(), machine.engine.connections()), (0, 0));
            assert_eq!(machine.engine.next_timeout(), None);
            assert_eq!(machine.free.len(), self.plan.slots as usize, "slots come back");
        }
        let wire = self.wire.borrow();
        assert!(wire.qps.keys().all(|(host, _)| self.is_dead(*host)), "queue pairs are left");
    }

    /// Connections whose bytes have all arrived, in both directions.
    pub(crate) fn whole(&self) -> usize {
        let is_whole = |pair: &&Pair| {
            let [Some(one), Some(other)] = &pair.applications else { return false };
            let is_so = one.read == other.wants && other.read == one.wants;
            is_so && !one.is_aborted() && !other.is_aborted()
        };
        self.pairs.iter().filter(is_whole).count()
    }

    /// Connections that stay TCP, as their link was lost in the handshake: at both ends, which have got nothing.
    pub(crate) fn tcp(&self) -> usize {
        self.pairs.iter().filter(|pair| pair.outcomes == [Some(Outcome::Tcp); 2]).count()
    }

    /// Connections whose link was lost between Accept and Confirm: they are aborted before they have moved anything.
    pub(crate) fn unused(&self) -> usize {
        let is_unused = |pair: &&Pair| {
            let [Some(one), Some(other)] = &pair.applications else { return false };
            one.read + other.read == 0 && (one.is_aborted() || other.is_aborted())
        };
        self.pairs.iter().filter(is_unused).count()
    }

    /// Messages that were lost with a link.
    pub(crate) fn moved(&self) -> usize {
        self.moved
    }

    /// Calls that were refused.
    pub(crate) fn refused(&self) -> usize {
        self.wire.borrow().refused
    }

    /// How far each connection is.
    pub(crate) fn story(&self) -> String {
        let ends = self.pairs.iter().map(|pair| {
            let ends = pair.applications.each_ref().map(|application| {
                application.as_ref().map(|a| {
                    (a.written, a.wants, a.read, a.is_shut, a.is_closed, a.reading, a.manner)
                })
            });
            format!("{:?} {ends:?} {:?}\n", pair.hosts, pair.outcomes)
        });
        ends.collect()
    }
}
