//! The work of two hosts' agents during a run, as the agents count it themselves: for all of their connections, of all users.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::case::{Count, Counts};
use crate::agent::{self, AgentCounts};
use crate::config::{Config, ConfigArgs};

/// The work of agents: of those of one host since they began, or of those of both hosts during a run.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Work {
    /// Chains of requests that were posted.
    pub posts: u64,
    /// Requests (WRs) in them.
    pub requests: u64,
    /// Bytes that their WRITEs took from send buffers.
    pub tx_bytes: u64,
    /// Chains that are complete.
    pub completions: u64,
    /// Messages that have come: CDC and LLC.
    pub messages: u64,
    /// Connections that became SMC-R; each end counts.
    pub established: u64,
    /// Connections that stay TCP.
    pub fallbacks: u64,
    /// Connections that were reset.
    pub failures: u64,
    /// CPU time in nanoseconds; `None`: not all of them tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
}

impl Work {
    /// Of the agents that programs of this user have in this host.
    ///
    /// # Errors
    /// When there is none.
    pub fn here() -> Result<Work> {
        Work::at(&Config::load(&ConfigArgs::default())?.ism_dir())
    }

    fn at(ism_dir: &Path) -> Result<Work> {
        let counts = agent::report(ism_dir).counts;
        let Some(sum) = counts.iter().map(Work::of).reduce(Work::plus) else {
            bail!(
                "no agent answers for {}; start `usmc agent`, which owns the RDMA devices (usmc-agent(8))",
                ism_dir.display()
            );
        };
        Ok(sum)
    }

    fn of(agent: &AgentCounts) -> Work {
        let own = Work {
            established: agent.established,
            fallbacks: agent.fallbacks,
            failures: agent.failures,
            cpu_ns: agent.cpu_ns,
            ..Work::default()
        };
        agent.devices.iter().fold(own, |sum, device| Work {
            posts: sum.posts.saturating_add(device.posts),
            requests: sum.requests.saturating_add(device.requests),
            tx_bytes: sum.tx_bytes.saturating_add(device.tx_bytes),
            completions: sum.completions.saturating_add(device.completions),
            messages: sum.messages.saturating_add(device.messages),
            ..sum
        })
    }

    /// The sum of two.
    pub fn plus(self, other: Work) -> Work {
        self.with(other, |one, other| Some(one.saturating_add(other))).unwrap_or_default()
    }

    /// The work since then.
    ///
    /// # Errors
    /// When less has been done by now.
    pub fn since(self, before: Work) -> Result<Work> {
        let more = self.with(before, u64::checked_sub);
        more.context("an agent ended during the run, and another one has begun")
    }

    fn with(self, other: Work, join: impl Fn(u64, u64) -> Option<u64>) -> Option<Work> {
        Some(Work {
            posts: join(self.posts, other.posts)?,
            requests: join(self.requests, other.requests)?,
            tx_bytes: join(self.tx_bytes, other.tx_bytes)?,
            completions: join(self.completions, other.completions)?,
            messages: join(self.messages, other.messages)?,
            established: join(self.established, other.established)?,
            fallbacks: join(self.fallbacks, other.fallbacks)?,
            failures: join(self.failures, other.failures)?,
            cpu_ns: match self.cpu_ns.zip(other.cpu_ns) {
                Some((own, other)) => Some(join(own, other)?),
                None => None,
            },
        })
    }

    /// The counts that are shown, beside so many operations.
    pub fn counts(&self, operations: f64) -> Counts {
        let named = [
            ("posts", self.posts),
            ("requests", self.requests),
            ("tx_bytes", self.tx_bytes),
            ("completions", self.completions),
            ("messages", self.messages),
            ("established", self.established),
            ("fallbacks", self.fallbacks),
            ("failures", self.failures),
        ];
        named.into_iter().filter_map(|(name, n)| Some((name, Count::new(n, operations)?))).collect()
    }

    /// CPU time of one of so many operations, in nanoseconds.
    pub fn cpu_of(&self, operations: f64) -> Option<f64> {
        Some(self.cpu_ns? as f64 / operations)
    }
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;
    use crate::agent::DeviceCounts;

    fn work(n: u64) -> Work {
        let device = |posts| DeviceCounts { posts, requests: 3 * posts, ..DeviceCounts::default() };
        Work::of(&AgentCounts {
            established: n,
            cpu_ns: Some(1000 * n),
            devices: vec![device(n), device(10 * n)],
            ..AgentCounts::default()
        })
    }

    #[test]
    fn devices_and_hosts_are_summed_and_what_was_before_is_left_out() {
        let run = work(7).plus(work(5)).since(work(2)).expect("more");
        assert_eq!((run.posts, run.requests), (110, 330));
        assert_eq!((run.established, run.cpu_ns), (10, Some(10_000)));
        let counts = run.counts(20.0);
        assert_eq!(counts["posts"], Count { all: 110.0, each: 5.5 });
        assert_eq!(counts["completions"].all, 0.0);
        assert_eq!(run.cpu_of(20.0), Some(500.0));
        assert!(run.counts(0.0).is_empty(), "nothing to count by");
    }

    #[test]
    fn an_agent_that_began_anew_is_no_figure_and_an_earlier_version_tells_no_cpu_time() {
        let problem = work(2).since(work(7)).expect_err("less than before");
        assert!(problem.to_string().contains("another one has begun"), "{problem}");
        let earlier = Work { cpu_ns: None, ..work(3) };
        let run = earlier.plus(work(4)).since(earlier).expect("more");
        assert_eq!((run.posts, run.cpu_ns, run.cpu_of(1.0)), (44, None, None));
    }

    #[test]
    fn versions_with_other_counters_understand_each_other() {
        let text = r#"{"posts":7,"weather":1}"#;
        let heard: Work = serde_json::from_str(text).expect("counters");
        assert_eq!(heard, Work { posts: 7, ..Work::default() });
    }

    #[test]
    fn where_no_agent_is_there_it_says_what_to_do() {
        let nowhere = env::temp_dir().join("usmc-no-agent-here");
        // The host's own agent would answer.
        if Path::new("/run/usmc/agent").exists() {
            return;
        }
        let problem = Work::at(&nowhere).expect_err("no agent").to_string();
        assert!(problem.contains("usmc-no-agent-here; start `usmc agent`"), "{problem}");
    }
}
