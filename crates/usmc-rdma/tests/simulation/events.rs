//! What engines say: CLC messages on their way, and events.

use std::time::Duration;

use smc_proto::close::Direction;
use smc_proto::connection::PeerMisbehaved;
use usmc_rdma::{ConnId, Event};

use crate::hosts::{Network, Outcome, Packet};
use crate::machine::Machine;

/// TCP gives up on a peer that does not answer.
const TCP: Duration = Duration::from_secs(900);

impl Network {
    /// A CLC message leaves, if nothing goes wrong.
    pub(crate) fn send(&mut self, end: usize, packet: Packet) {
        let (pair, to) = (end / 2, 1 - end % 2);
        let mut at = self.now;
        let mut packet = packet;
        if self.plan.clc_faults > 0 && self.below(100) < self.plan.clc_faults {
            match self.below(4) {
                0 => self.lose_tcp(pair, to),
                1 => packet = Packet::Garbage,
                2 => {
                    packet = Packet::Closed;
                    self.pairs[pair].tcp[1 - to].push_back((at, Packet::Closed));
                }
                _ => at += Duration::from_millis(self.below(8000) as u64),
            }
        }
        let pair = &mut self.pairs[pair];
        if !pair.is_mute[to] && pair.outcomes[to].is_none() {
            let last = pair.tcp[to].back().map_or(at, |last| last.0.max(at));
            pair.tcp[to].push_back((last, packet));
        }
    }

    /// Nothing comes to this end any more, and its TCP finds out.
    pub(crate) fn lose_tcp(&mut self, pair: usize, to: usize) {
        let pair = &mut self.pairs[pair];
        if !pair.is_mute[to] {
            pair.is_mute[to] = true;
            let at = pair.tcp[to].back().map_or(self.now, |last| last.0.max(self.now));
            pair.tcp[to].push_back((at + TCP, Packet::Closed));
        }
    }

    /// It is not the engine's any more.
    pub(crate) fn is_over(&mut self, host: usize, conn: ConnId, outcome: Outcome) {
        let machine = &mut self.machines[host];
        let (end, slot) = machine.ends[&conn];
        machine.free.push(slot);
        let pair = &mut self.pairs[end / 2];
        let application = pair.applications[end % 2].as_mut().expect("begun");
        assert!(outcome != Outcome::Tcp || (application.read == 0 && !application.has_data()));
        if outcome == Outcome::Failed {
            application.reading = Direction::Aborted;
        }
        assert_eq!(pair.outcomes[end % 2].replace(outcome), None, "over twice");
        pair.tcp[end % 2].clear();
        if outcome == Outcome::Failed && pair.outcomes[1 - end % 2].is_none() {
            pair.tcp[1 - end % 2].push_back((self.now, Packet::Closed));
        }
    }

    /// What an engine has to say.
    pub(crate) fn poll(&mut self, host: usize) {
        while let Some((conn, message)) = self.machines[host].engine.poll_clc() {
            let (end, _) = self.machines[host].ends[&conn];
            self.send(end, Packet::Message(Box::new(message)));
        }
        while let Some(event) = self.machines[host].engine.poll_event() {
            self.handle(host, event);
        }
    }

    fn handle(&mut self, host: usize, event: Event) {
        let end_of = |machine: &Machine, conn| machine.ends[&conn].0;
        match event {
            Event::Ending { conn, reading, writing, .. } => {
                let end = end_of(&self.machines[host], conn);
                let application =
                    self.pairs[end / 2].applications[end % 2].as_mut().expect("begun");
                (application.reading, application.writing) = (reading, writing);
                if writing == Direction::Ended {
                    application.writing = Direction::Open;
                }
            }
            Event::Over { conn } => self.is_over(host, conn, Outcome::Over),
            Event::Fallback { conn, .. } | Event::Failed { conn, .. } => {
                assert!(self.has_faults(), "{event:?}: {}", self.story());
                let is_tcp = matches!(event, Event::Fallback { .. });
                self.is_over(host, conn, if is_tcp { Outcome::Tcp } else { Outcome::Failed });
            }
            // One end has given up after a link was lost.
            Event::Misbehaved { how: PeerMisbehaved::Lost { .. }, .. } if self.has_faults() => {}
            Event::Misbehaved { .. } if self.plan.is_hostile => {}
            Event::Misbehaved { .. } => panic!("{event:?}: {}", self.story()),
            Event::GroupUp { .. } => self.machines[host].groups += 1,
            Event::Established { .. }
            | Event::Data { .. }
            | Event::Room { .. }
            | Event::Withdrawn { .. }
            | Event::GroupDown { .. } => {}
        }
    }
}
