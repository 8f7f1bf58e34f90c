//! What a run of `usmc bench` found, as its JSON says it; table and plot are made of this.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::case::{Better, Case, Count, Outcome};
use super::machine::Machine;
use super::mode::Mode;
use super::proof::Proof;
use super::statistics::{Spread, factors, spread};
use super::sweep::{Place, Point, Setting};
use super::targets::{self, Target};
use super::verdict::Verdict;

/// The version of this form. Members are added without a new one.
pub const FORMAT: u32 = 1;

/// All of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of uSMC.
    pub usmc: String,
    /// Seconds since 1970 at the start.
    pub started: u64,
    /// Where.
    pub machine: Machine,
    /// Where the servers were, if in another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerRecord>,
    /// Rounds wanted of each case.
    pub rounds: usize,
    /// Seconds wanted of each run.
    pub seconds: f64,
    /// Whether it was ended before all was measured.
    pub interrupted: bool,
    /// What was measured.
    pub cases: Vec<CaseRecord>,
    /// What cannot be measured here.
    pub skipped: Vec<Missed>,
    /// What went wrong.
    pub failed: Vec<Missed>,
}

/// The machine of the servers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerRecord {
    /// Where they listened.
    pub address: Ipv4Addr,
    /// The client's network interface, whose frames were counted.
    pub interface: String,
    /// What it is.
    pub machine: Machine,
}

/// A case without figures.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Missed {
    /// Its name.
    pub case: String,
    /// Why, and what to do.
    pub why: String,
}

/// A case with figures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseRecord {
    /// Workload and variant.
    pub name: String,
    /// The workload.
    pub workload: String,
    /// What CPU time is counted by.
    pub per: String,
    /// Its figures.
    pub measures: Vec<MeasureRecord>,
    /// CPU time of one operation.
    pub cpu: BTreeMap<Mode, CpuRecord>,
    /// Frames on the wire, where there is one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub frames: BTreeMap<Mode, CountRecord>,
    /// Sleeps and doorbells of uSMC's connections, at both ends: what takes system calls there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakes: Option<CountRecord>,
    /// What the agents at both ends did during runs of uSMC, where its connections are by RDMA: `posts`, `requests`, …
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub agents: BTreeMap<String, CountRecord>,
    /// What carried the bytes, of the last round.
    pub proof: BTreeMap<Mode, Proof>,
    /// Of a sweep: what was set, and where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<Point>,
}

/// One figure of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasureRecord {
    /// What it is.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// Which of two is better.
    pub better: Better,
    /// Of a highlight: what it is, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub highlight: Option<String>,
    /// Of each round, in their order.
    pub samples: BTreeMap<Mode, Vec<f64>>,
    /// Of the samples.
    pub figures: BTreeMap<Mode, Spread>,
    /// How many times better than TCP in the same round; nothing where the difference is what counts.
    pub factors: BTreeMap<Mode, Spread>,
    /// How much more than TCP's uSMC's figure is in the same round, where the difference is what counts.
    pub beyond_tcp: Option<Spread>,
    /// What was expected.
    pub targets: Vec<Verdict>,
    /// The kernel's SMC over TCP, as it was published; UNIX sockets there.
    pub kernel_smc: Option<f64>,
    /// See `kernel_smc`.
    pub kernel_unix: Option<f64>,
}

/// Median CPU time of an operation, in nanoseconds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CpuRecord {
    /// Of the client.
    pub client_ns: Spread,
    /// Of the server.
    pub server_ns: Spread,
    /// Of the agents at both ends, of uSMC where its connections are by RDMA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents_ns: Option<Spread>,
}

/// Something that was counted.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CountRecord {
    /// Of a run.
    pub run: Spread,
    /// Of an operation.
    pub each: Spread,
}

/// The rounds of one case.
pub struct Rounds<'a> {
    /// Which.
    pub case: &'a Case,
    /// Where; it stands behind the case's name.
    pub place: Place,
    /// What the library was told; it stands behind the case's name.
    pub setting: Option<Setting>,
    /// Outcomes of each mode, in the order of rounds.
    pub outcomes: BTreeMap<Mode, Vec<Outcome>>,
}

impl Rounds<'_> {
    /// As a record; nothing if no round is whole.
    pub fn record(&self) -> Option<CaseRecord> {
        let whole = self.case.modes.iter().map(|mode| self.outcomes.get(mode).map_or(0, Vec::len));
        let whole = whole.min().filter(|rounds| *rounds > 0)?;
        let of = |mode: &Mode| &self.outcomes[mode][..whole];
        let mut cpu = BTreeMap::new();
        let mut frames = BTreeMap::new();
        let usmc = self.case.modes.iter().find(|mode| **mode == Mode::Usmc);
        let mut proof = BTreeMap::new();
        for mode in self.case.modes {
            let each: Vec<_> = of(mode).iter().filter_map(|outcome| outcome.cpu).collect();
            let clients: Vec<f64> = each.iter().map(|cpu| cpu.client_ns).collect();
            let servers: Vec<f64> = each.iter().map(|cpu| cpu.server_ns).collect();
            let agents: Vec<f64> = each.iter().filter_map(|cpu| cpu.agents_ns).collect();
            if let (Some(client_ns), Some(server_ns)) = (spread(&clients), spread(&servers)) {
                let agents_ns = spread(&agents);
                cpu.insert(*mode, CpuRecord { client_ns, server_ns, agents_ns });
            }
            let own = count(of(mode), |outcome| outcome.frames);
            frames.extend(own.map(|own| (*mode, own)));
            proof.extend(of(mode).last().map(|outcome| (*mode, outcome.proof.clone())));
        }
        let measures = (0..self.case.measures.len()).map(|i| {
            let samples = |mode: &Mode| of(mode).iter().map(|o| o.values[i]).collect();
            let samples = self.case.modes.iter().map(|mode| (*mode, samples(mode))).collect();
            measure(self.case, i, samples)
        });
        Some(CaseRecord {
            name: match &self.setting {
                Some(setting) => format!("{} {setting}{}", self.case.name(), self.place.suffix()),
                None => self.case.name() + &self.place.suffix(),
            },
            workload: self.case.workload.to_owned(),
            per: self.case.per.to_owned(),
            measures: measures.collect(),
            cpu,
            frames,
            wakes: usmc.and_then(|usmc| count(of(usmc), |outcome| outcome.wakes)),
            agents: usmc.map(|usmc| agents(of(usmc))).unwrap_or_default(),
            proof,
            point: self.setting.as_ref().map(|setting| Point {
                case: self.case.name(),
                setting: setting.short_name(),
                value: setting.shown(),
                place: self.place.to_string(),
            }),
        })
    }
}

fn agents(outcomes: &[Outcome]) -> BTreeMap<String, CountRecord> {
    let names = outcomes.iter().flat_map(|outcome| outcome.agents.keys());
    let all: BTreeSet<&str> = names.copied().collect();
    let of = |name| count(outcomes, |outcome| outcome.agents.get(name).copied());
    all.into_iter().filter_map(|name| Some((name.to_owned(), of(name)?))).collect()
}

fn count(outcomes: &[Outcome], of: impl Fn(&Outcome) -> Option<Count>) -> Option<CountRecord> {
    let all: Vec<Count> = outcomes.iter().filter_map(of).collect();
    let spread_of = |part: fn(&Count) -> f64| spread(&all.iter().map(part).collect::<Vec<f64>>());
    Some(CountRecord { run: spread_of(|count| count.all)?, each: spread_of(|count| count.each)? })
}

fn measure(case: &Case, i: usize, samples: BTreeMap<Mode, Vec<f64>>) -> MeasureRecord {
    let measure = case.measures[i];
    let figures: BTreeMap<Mode, Spread> =
        samples.iter().filter_map(|(mode, all)| Some((*mode, spread(all)?))).collect();
    let (mut over_tcp, mut beyond_tcp) = (BTreeMap::new(), None);
    let name = case.name();
    let is_difference =
        targets::of(&name, measure.name).any(|target| matches!(target, Target::BeyondTcp(_)));
    if let (true, Some(tcp), Some(usmc)) =
        (is_difference, samples.get(&Mode::Tcp), samples.get(&Mode::Usmc))
    {
        let more: Vec<f64> = usmc.iter().zip(tcp).map(|(usmc, tcp)| usmc - tcp).collect();
        beyond_tcp = spread(&more);
    } else if let Some(tcp) = samples.get(&Mode::Tcp) {
        for (mode, all) in samples.iter().filter(|(mode, _)| **mode != Mode::Tcp) {
            let spread = spread(&factors(all, tcp, measure.better));
            over_tcp.extend(spread.map(|spread| (*mode, spread)));
        }
    }
    let published = targets::published_of(&name, measure.name);
    MeasureRecord {
        name: measure.name.to_owned(),
        unit: measure.unit.to_owned(),
        better: measure.better,
        highlight: measure.highlight.map(str::to_owned),
        samples,
        figures,
        factors: over_tcp,
        beyond_tcp,
        targets: Vec::new(),
        kernel_smc: published.map(|row| row.factor),
        kernel_unix: published.and_then(|row| row.unix),
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::agents::Work;
    use super::super::case::{Count, Counts, Cpu, Tier, cost, rate};
    use super::super::cores::Cores;
    use super::super::mode::ALL;
    use super::*;

    fn case(
        workload: &'static str,
        variant: &str,
        measures: Vec<super::super::case::Measure>,
    ) -> Case {
        Case {
            workload,
            variant: variant.to_owned(),
            modes: ALL,
            measures,
            per: "message",
            tier: Tier::Quick,
            needs: &[],
            obstacle: None,
            server: None,
            run: Box::new(|_, _| anyhow::bail!("not run here")),
        }
    }

    fn rounds<'a>(case: &'a Case, figures: [&[f64]; 3]) -> Rounds<'a> {
        let outcome = |value: &f64| Outcome {
            values: vec![*value; case.measures.len()],
            cpu: Some(Cpu { client_ns: value * 2.0, server_ns: *value, agents_ns: None }),
            frames: Count::new(*value as u64, 10.0),
            wakes: Count::new(*value as u64, 100.0),
            agents: Counts::new(),
            proof: Proof { how: "seen".to_owned(), ..Proof::default() },
        };
        let all = ALL.iter().zip(figures);
        let outcomes = all.map(|(mode, f)| (*mode, f.iter().map(outcome).collect())).collect();
        Rounds { case, place: Place { cores: Cores::All, beside: 0 }, setting: None, outcomes }
    }

    /// A record with some of everything.
    pub fn sample() -> Record {
        let ipc = case("ipc", "", vec![rate("messages", "k/s")]);
        let redis = case("redis", "c200-d1024", vec![rate("SET", "k/s"), rate("GET", "k/s")]);
        let ten = case("fanin", "10", vec![cost("round trip, one of the active", "µs")]);
        let foreign = case("foreign", "", vec![cost("read(2) of /dev/null", "ns")]);
        let many = case("fanin", "10000", vec![cost("round trip, one of the active", "µs")]);
        let all = [
            rounds(&ipc, [&[10.0, 20.0, 30.0], &[20.0, 20.0, 20.0], &[200.0, 400.0, 300.0, 1.0]]),
            rounds(&redis, [&[100.0], &[300.0], &[250.0]]),
            rounds(&ten, [&[10.0], &[10.0], &[2.0]]),
            rounds(&many, [&[10.0], &[10.0], &[2.5]]),
            rounds(&foreign, [&[90.0, 100.0], &[0.0, 0.0], &[92.5, 102.0]]),
        ];
        let missed =
            |case: &str| Missed { case: case.to_owned(), why: "a <reason> & more".to_owned() };
        let mut record = Record {
            format: FORMAT,
            usmc: "1.2.3".to_owned(),
            started: 1_700_000_000,
            machine: Machine::here(),
            server: None,
            rounds: 3,
            seconds: 0.5,
            interrupted: false,
            cases: all.iter().filter_map(Rounds::record).collect(),
            skipped: vec![missed("qperf/tcp_lat")],
            failed: vec![missed("rr1/1B-1B")],
        };
        record.judge();
        record
    }

    /// The same between two hosts with agents.
    pub fn sample_by_rdma() -> Record {
        let ping = case("pingpong", "14B", vec![cost("one way", "µs")]);
        let mut both = rounds(&ping, [&[30.0, 20.0], &[1.0, 1.0], &[10.0, 12.0]]);
        for (outcome, posts) in
            both.outcomes.get_mut(&Mode::Usmc).into_iter().flatten().zip([50, 70])
        {
            let (requests, completions) = (2 * posts, posts - 1);
            let work = Work { posts, requests, completions, ..Work::default() };
            outcome.agents = work.counts(100.0);
            outcome.cpu.iter_mut().for_each(|cpu| cpu.agents_ns = Some(400.0));
        }
        let (address, interface) = ([10, 0, 0, 1].into(), "eth0".to_owned());
        let mut record = sample();
        let server = ServerRecord { address, interface, machine: record.machine.clone() };
        record.server = Some(server);
        record.cases = both.record().into_iter().collect();
        record
    }

    #[test]
    fn what_agents_did_stands_beside_the_figures() {
        let record = sample_by_rdma();
        let value = serde_json::to_value(&record).expect("JSON");
        let case = &value["cases"][0];
        assert_eq!(case["agents"]["posts"]["run"]["median"], 60.0, "{case}");
        assert_eq!(case["agents"]["requests"]["each"]["most"], 1.4, "{case}");
        assert_eq!(case["cpu"]["usmc"]["agents_ns"]["median"], 400.0, "{case}");
        assert!(case["cpu"]["tcp"].get("agents_ns").is_none(), "{case}");
        let back: Record = serde_json::from_value(value.clone()).expect("the same");
        assert_eq!(serde_json::to_value(&back).expect("JSON"), value);
        let plain = serde_json::to_value(sample()).expect("JSON");
        assert!(plain["cases"][0].get("agents").is_none(), "no agents, no member");
    }

    #[test]
    fn figures_and_ratios_are_of_whole_rounds() {
        let record = sample();
        let ipc = &record.cases[0].measures[0];
        assert_eq!(
            ipc.samples[&Mode::Usmc],
            [200.0, 400.0, 300.0],
            "the fourth round is not whole"
        );
        assert_eq!(ipc.figures[&Mode::Tcp], Spread { median: 20.0, least: 10.0, most: 30.0 });
        assert_eq!(ipc.factors[&Mode::Usmc], Spread { median: 20.0, least: 10.0, most: 20.0 });
        assert_eq!(ipc.kernel_smc, Some(1.95));
        let cpu = &record.cases[0].cpu[&Mode::Tcp];
        assert_eq!((cpu.client_ns.median, cpu.server_ns.median), (40.0, 20.0));
    }

    #[test]
    fn targets_are_met_or_missed() {
        let record = sample();
        let verdicts = |case: usize, measure: usize| -> Vec<(&str, Option<bool>)> {
            let targets = &record.cases[case].measures[measure].targets;
            targets.iter().map(|verdict| (&verdict.target[..], verdict.met)).collect()
        };
        assert_eq!(verdicts(0, 0), [("≥ 15 ×", Some(true))]);
        let redis = [("≥ 2.2 ×", Some(true)), ("better than UNIX", Some(false))];
        assert_eq!((verdicts(1, 0), verdicts(1, 1)), (redis.to_vec(), redis.to_vec()));
        assert_eq!(verdicts(2, 0), []);
        assert_eq!(verdicts(3, 0), [("≤ 1.2 × fanin/10", Some(false))]);
        assert_eq!(verdicts(4, 0), [("≤ TCP + 3 ns", Some(true))]);
        let foreign = &record.cases[4].measures[0];
        let more = Spread { median: 2.25, least: 2.0, most: 2.5 };
        assert_eq!((foreign.beyond_tcp, foreign.factors.len()), (Some(more), 0));
        assert_eq!(record.missed().count(), 3);
        let mut alone = record.clone();
        alone.cases.remove(2);
        alone.judge();
        assert_eq!(alone.cases[2].measures[0].targets[0].met, None, "nothing to compare with");
    }

    #[test]
    fn its_json_is_what_the_manual_says() {
        let record = sample();
        let text = serde_json::to_string_pretty(&record).expect("JSON");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["format"], FORMAT);
        let measure = &value["cases"][0]["measures"][0];
        for pointer in
            ["/samples/tcp/0", "/figures/unix/median", "/factors/usmc/least", "/kernel_smc"]
        {
            assert!(
                measure.pointer(pointer).is_some_and(serde_json::Value::is_number),
                "{pointer}"
            );
        }
        assert_eq!(measure["targets"][0]["met"], true);
        assert_eq!(measure["better"], "higher");
        assert!(value["cases"][0]["cpu"]["usmc"]["server_ns"]["median"].is_number());
        assert_eq!(value["cases"][0]["proof"]["usmc"]["how"], "seen");
        assert_eq!(value["failed"][0]["case"], "rr1/1B-1B");
        let back: Record = serde_json::from_str(&text).expect("the same");
        assert_eq!(serde_json::to_value(&back).expect("JSON"), value);
    }

    #[test]
    fn half_a_round_is_no_record() {
        let ipc = case("ipc", "", vec![rate("messages", "k/s")]);
        assert!(rounds(&ipc, [&[1.0], &[], &[1.0]]).record().is_none());
    }
}
