//! What agents of RDMA count, kept beyond their end.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::families::{self, About, Metrics};
use crate::agent::{AgentCounts, Report};

/// Devices and agents that are told apart.
const MOST: usize = 64;

/// What is counted of a device, in the order of its numbers.
const OF_DEVICES: [About; 6] = [
    families::RDMA_POSTS,
    families::RDMA_REQUESTS,
    families::RDMA_BYTES,
    families::RDMA_COMPLETIONS,
    families::RDMA_MESSAGES,
    families::RDMA_ERRORS,
];
/// The outcomes of connections, likewise.
const OUTCOMES: [&str; 3] = ["rdma", "tcp", "reset"];

/// The numbers of one agent, or of one of its devices.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Numbers {
    /// Of agents that were there before.
    before: Vec<u64>,
    /// Of the one that is there, as last seen.
    last: Vec<u64>,
}

impl Numbers {
    fn look(&mut self, now: &[u64]) {
        self.before.resize(now.len(), 0);
        self.last.resize(now.len(), 0);
        // One number that is smaller says that all have begun anew.
        if now.iter().zip(&self.last).any(|(now, last)| now < last) {
            for (before, last) in self.before.iter_mut().zip(&self.last) {
                *before = before.saturating_add(*last);
            }
        }
        self.last = now.to_vec();
    }

    fn sum(&self, i: usize) -> u64 {
        let of = |numbers: &[u64]| numbers.get(i).copied().unwrap_or(0);
        of(&self.before).saturating_add(of(&self.last))
    }
}

/// All agents.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Agents {
    /// By the agent's socket.
    connections: BTreeMap<String, Numbers>,
    /// Each agent's devices.
    devices: BTreeMap<String, BTreeMap<String, Numbers>>,
}

impl Agents {
    /// What they tell now.
    pub fn look(&mut self, counts: &[AgentCounts]) {
        for agent in counts {
            let name = agent.socket.display().to_string();
            if self.connections.len() >= MOST && !self.connections.contains_key(&name) {
                continue;
            }
            let outcomes = [agent.established, agent.fallbacks, agent.failures];
            self.connections.entry(name.clone()).or_default().look(&outcomes);
            let devices = self.devices.entry(name).or_default();
            for device in &agent.devices {
                if devices.len() >= MOST && !devices.contains_key(&device.ibdevice) {
                    continue;
                }
                devices.entry(device.ibdevice.clone()).or_default().look(&[
                    device.posts,
                    device.requests,
                    device.tx_bytes,
                    device.completions,
                    device.messages,
                    device.errors,
                ]);
            }
        }
    }

    /// The counters.
    pub fn show(&self, metrics: &mut Metrics) {
        metrics.family(families::AGENT_CONNECTIONS);
        for (agent, numbers) in &self.connections {
            for (i, outcome) in OUTCOMES.into_iter().enumerate() {
                metrics.more(families::AGENT_CONNECTIONS, [agent, outcome], numbers.sum(i));
            }
        }
        for (i, about) in OF_DEVICES.into_iter().enumerate() {
            metrics.family(about);
            for (agent, devices) in &self.devices {
                for (device, numbers) in devices {
                    metrics.more(about, [agent, device], numbers.sum(i));
                }
            }
        }
    }
}

/// What is there now.
pub fn show_report(report: &Report, metrics: &mut Metrics) {
    let mut known: BTreeSet<String> = BTreeSet::new();
    let mut name = |name: &str| match known.len() < MOST || known.contains(name) {
        true => {
            known.insert(name.to_owned());
            name.to_owned()
        }
        false => super::ledger::OTHER.to_owned(),
    };
    metrics.more(families::AGENTS, [], report.agents.len() as u64);
    for about in
        [families::RDMA_GROUPS, families::RDMA_LINKS, families::RDMA_CONNECTIONS, families::RDMA_UP]
    {
        metrics.family(about);
    }
    for device in &report.devices {
        let labels = [&*name(&device.name), &*device.port.to_string()];
        metrics.more(families::RDMA_UP, labels, u64::from(device.is_up()));
    }
    for group in &report.groups {
        metrics.more(families::RDMA_GROUPS, [&name(&group.role)], 1);
        for link in &group.links {
            let device = name(&link.ibdevice);
            metrics.more(families::RDMA_LINKS, [&device, &name(&link.state)], 1);
            metrics.more(families::RDMA_CONNECTIONS, [&device], link.conns as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::families::Value;
    use super::*;
    use crate::agent::DeviceCounts;

    #[test]
    fn counts_outlive_the_agent() {
        let of = |established, posts| AgentCounts {
            socket: "/run/usmc/agent".into(),
            established,
            devices: vec![DeviceCounts {
                ibdevice: "rxe0".to_owned(),
                posts,
                ..DeviceCounts::default()
            }],
            ..AgentCounts::default()
        };
        let mut agents = Agents::default();
        for (established, posts) in [(5, 100), (6, 130), (0, 10), (1, 20)] {
            agents.look(&[of(established, posts)]);
        }
        // It is away.
        agents.look(&[]);
        let mut metrics = Metrics::default();
        agents.show(&mut metrics);
        let mut get = |about, labels: &[&str]| {
            let labels: Vec<String> = labels.iter().map(|l| (*l).to_owned()).collect();
            metrics.family(about).get(&labels).copied()
        };
        let agent = "/run/usmc/agent";
        let rdma = get(families::AGENT_CONNECTIONS, &[agent, "rdma"]);
        assert_eq!(rdma, Some(Value::Count(7)));
        assert_eq!(get(families::RDMA_POSTS, &[agent, "rxe0"]), Some(Value::Count(150)));
    }
}
