//! What can be measured: one [`Case`] is one line of `usmc bench --list`.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::host::World;
use super::mode::Mode;
use super::proof::{Proof, Wanted};

/// Which of two figures is better.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Rates.
    Higher,
    /// Times and sizes.
    Lower,
}

/// One figure of a case.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// What it is.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Which of two is better.
    pub better: Better,
    /// For people who do not know the case's name: what it measures, if it is one of the few that such people are shown.
    pub highlight: Option<&'static str>,
}

impl Measure {
    /// It is a highlight, in these words.
    pub const fn in_words(self, words: &'static str) -> Measure {
        Measure { highlight: Some(words), ..self }
    }
}

/// A rate.
pub const fn rate(name: &'static str, unit: &'static str) -> Measure {
    Measure { name, unit, better: Better::Higher, highlight: None }
}

/// A time or a size.
pub const fn cost(name: &'static str, unit: &'static str) -> Measure {
    Measure { name, unit, better: Better::Lower, highlight: None }
}

/// Who runs a case if its workload is wanted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// Everybody.
    Quick,
    /// Everybody without `--quick`.
    Standard,
    /// Who says `--all`, or names the case itself.
    All,
}

/// Which end of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The one that connects.
    Client,
    /// The one that listens.
    Server,
}

/// A program that has to be installed.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Its name.
    pub program: &'static str,
    /// Debian's package that has it.
    pub package: &'static str,
    /// The end that needs it; nothing: both.
    pub end: Option<End>,
}

/// A program and its package.
pub const fn needs(program: &'static str, package: &'static str) -> Needs {
    Needs { program, package, end: None }
}

impl Needs {
    /// It is needed at this end only.
    pub const fn at(self, end: End) -> Needs {
        Needs { end: Some(end), ..self }
    }
}

/// CPU time of one operation, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cpu {
    /// Of the client.
    pub client_ns: f64,
    /// Of the server.
    pub server_ns: f64,
    /// Of the agents at both ends, where connections are by RDMA and the agents tell.
    pub agents_ns: Option<f64>,
}

/// Something that is counted, such as frames on the wire between two machines.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Count {
    /// Of the run.
    pub all: f64,
    /// Of one operation.
    pub each: f64,
}

impl Count {
    /// So many, of so many operations.
    pub fn new(count: u64, operations: f64) -> Option<Count> {
        let all = count as f64;
        (operations > 0.0).then(|| Count { all, each: all / operations })
    }
}

/// Things that are counted, by name.
pub type Counts = BTreeMap<&'static str, Count>;

/// What one run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// One for each measure of the case.
    pub values: Vec<f64>,
    /// Where there is an operation to count by.
    pub cpu: Option<Cpu>,
    /// Frames on the wire, in both directions, where there is one.
    pub frames: Option<Count>,
    /// Sleeps and doorbells of connections in shared memory, at both ends, where they were counted.
    pub wakes: Option<Count>,
    /// What the agents at both ends did meanwhile ([`super::agents::Work`]), where connections are by RDMA.
    pub agents: Counts,
    /// What carried the bytes.
    pub proof: Proof,
}

impl Outcome {
    /// Of a run within this machine, in which nothing was counted but CPU time.
    pub fn here(values: Vec<f64>, cpu: Option<Cpu>, proof: Proof) -> Outcome {
        Outcome { values, cpu, frames: None, wakes: None, agents: Counts::new(), proof }
    }
}

/// Starts the server of a case, which listens then, and says what its connections have to show.
pub type Serve = Box<dyn Fn(&mut World) -> Result<Wanted>>;
/// Runs a case once, for about so many seconds. Its server is there, if it has a [`Case::server`].
pub type Run = Box<dyn Fn(&mut World, f64) -> Result<Outcome>>;

/// What is measured in one go.
pub struct Case {
    /// The workload it belongs to.
    pub workload: &'static str,
    /// What sets it apart from the others of its workload; empty if it is the only one.
    pub variant: String,
    /// What carries its bytes.
    pub modes: &'static [Mode],
    /// Its figures.
    pub measures: Vec<Measure>,
    /// What CPU time is counted by: `message`, `KB`, `request`, ….
    pub per: &'static str,
    /// Who runs it.
    pub tier: Tier,
    /// What has to be installed.
    pub needs: &'static [Needs],
    /// Why it cannot run on this machine.
    pub obstacle: Option<String>,
    /// Starts its server, if the two ends can be in two machines.
    pub server: Option<Serve>,
    /// Runs it.
    pub run: Run,
}

impl Case {
    /// Workload and variant.
    pub fn name(&self) -> String {
        name(self.workload, &self.variant)
    }

    /// Whether a figure of it is a highlight.
    pub fn has_highlight(&self) -> bool {
        self.measures.iter().any(|measure| measure.highlight.is_some())
    }
}

/// Workload and variant in a word.
pub fn name(workload: &str, variant: &str) -> String {
    if variant.is_empty() { workload.to_owned() } else { format!("{workload}/{variant}") }
}

/// Bytes, shortly.
pub fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{}MB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{}KB", b >> 10),
        b => format!("{b}B"),
    }
}
