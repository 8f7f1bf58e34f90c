//! `usmc bench`: TCP, UNIX sockets and uSMC, measured in turn.
//!
//! [`built_in`] and [`programs`] say what can be measured, [`measure`] measures it, [`record`] is what came out, and
//! [`table`], [`plot`] and [`highlights`] show it. The two ends of a run can be in two machines: [`far`] and [`serving`] say [`control`]'s lines to each
//! other. Built-in workloads have client and server of their own: [`part`].

pub mod agents;
pub mod beside;
pub mod built_in;
pub mod case;
pub mod control;
pub mod cores;
pub mod cpus;
pub mod ending;
pub mod far;
pub mod highlights;
pub mod host;
pub mod local;
pub mod machine;
pub mod mode;
pub mod pair;
pub mod part;
pub mod plot;
pub mod process;
pub mod programs;
pub mod proof;
pub mod record;
pub mod serving;
pub mod statistics;
pub mod sweep;
pub mod sweep_plot;
pub mod table;
pub mod targets;
pub mod verdict;
pub mod watch;
pub mod wire;

use std::collections::BTreeMap;
use std::io::{self, Write};

use anyhow::Result;

use beside::Beside;
use case::{Case, End, Outcome, Tier};
use ending::{Ending, Interrupted};
use host::{Ends, World};
use mode::{Mode, NO_UNIX, Way};
use record::{CaseRecord, Missed, Rounds};
use sweep::{Place, Setting};

/// All that can be measured with these CPUs.
pub fn catalogue(cpus: &[usize]) -> Vec<Case> {
    let mut cases = built_in::cases(cpus);
    cases.extend(programs::cases(cpus));
    cases
}

/// What can be measured between two machines. All of them start their servers apart from their clients.
pub fn between(way: Way) -> Vec<Case> {
    let mut cases = built_in::between(way);
    cases.extend(programs::between());
    for case in &mut cases {
        case.modes = NO_UNIX;
    }
    cases
}

/// Whether a case is wanted: by its tier if nothing or its workload is named, in any case if it is named itself.
pub fn is_wanted(case: &Case, patterns: &[String], tier: Tier) -> bool {
    let in_tier = case.tier <= tier;
    if patterns.is_empty() {
        return in_tier;
    }
    patterns.iter().any(|pattern| match pattern.contains('/') {
        true => targets::matches(pattern, &case.name()),
        false => targets::matches(pattern, case.workload) && (in_tier || case.variant.is_empty()),
    })
}

/// Why these ends of a case cannot run here, and what to do.
pub fn obstacle(case: &Case, ends: &[End]) -> Option<String> {
    if let Some(missing) = programs::missing(case.needs, ends) {
        let (program, package) = (missing.program, missing.package);
        return Some(format!("{program} is not installed: apt-get install {package}"));
    }
    case.obstacle.clone()
}

/// What happens to a case while it is measured.
pub enum Step {
    /// A run begins.
    Run {
        /// Its round, from 1.
        round: usize,
        /// Its mode.
        mode: Mode,
    },
    /// All runs of a round are done.
    Round,
}

/// How a case ended.
pub struct Ended {
    /// Its figures, of as many rounds as there are: one record, or one for each setting.
    pub figures: Vec<CaseRecord>,
    /// What went wrong.
    pub failure: Option<Missed>,
}

/// What a round of a case consists of: its modes, or all of them but uSMC and then uSMC with each setting.
pub fn runs<'a>(case: &Case, settings: &'a [Setting]) -> Vec<(Mode, Option<&'a Setting>)> {
    if settings.is_empty() {
        return case.modes.iter().map(|&mode| (mode, None)).collect();
    }
    let others = case.modes.iter().filter(|mode| **mode != Mode::Usmc).map(|&mode| (mode, None));
    others.chain(settings.iter().map(|setting| (Mode::Usmc, Some(setting)))).collect()
}

/// How a case is measured.
#[derive(Clone, Copy)]
pub struct How<'a> {
    /// What is swept.
    pub settings: &'a [Setting],
    /// Where.
    pub place: Place,
    /// Which ends are here.
    pub ends: &'a Ends,
    /// How many rounds.
    pub rounds: usize,
    /// The length of a run.
    pub seconds: f64,
}

/// Measures a case: so many rounds, in each of which every run has its turn, and another one the first.
pub fn measure(case: &Case, how: How<'_>, ending: &Ending, told: &mut dyn FnMut(Step)) -> Ended {
    let runs = runs(case, how.settings);
    let mut outcomes: Vec<Vec<Outcome>> = runs.iter().map(|_| Vec::new()).collect();
    for round in 0..how.rounds {
        for turn in 0..runs.len() {
            let at = (turn + round) % runs.len();
            let (mode, setting) = runs[at];
            told(Step::Run { round: round + 1, mode });
            match once(case, mode, setting, how, ending) {
                Ok(outcome) => outcomes[at].push(outcome),
                Err(problem) if problem.is::<Interrupted>() || ending.has_come() => {
                    return Ended {
                        figures: records(case, how.place, &runs, &outcomes),
                        failure: None,
                    };
                }
                Err(problem) => {
                    // Figures of a case that fails now and then are none to rely on.
                    let why = format!("{mode}: {problem:#}");
                    let name = case.name() + &how.place.suffix();
                    let failure = Some(Missed { case: name, why });
                    return Ended { figures: Vec::new(), failure };
                }
            }
        }
        told(Step::Round);
    }
    Ended { figures: records(case, how.place, &runs, &outcomes), failure: None }
}

/// A record for each setting, or one where there is none. The figures of TCP and UNIX sockets are in each of them.
fn records(
    case: &Case,
    place: Place,
    runs: &[(Mode, Option<&Setting>)],
    outcomes: &[Vec<Outcome>],
) -> Vec<CaseRecord> {
    let of = |setting: Option<&Setting>| {
        let mut rounds =
            Rounds { case, place, setting: setting.cloned(), outcomes: BTreeMap::new() };
        for ((mode, own), outcomes) in runs.iter().zip(outcomes) {
            if *mode != Mode::Usmc || *own == setting {
                rounds.outcomes.insert(*mode, outcomes.clone());
            }
        }
        rounds.record()
    };
    match runs.iter().any(|(_, setting)| setting.is_some()) {
        true => runs.iter().filter_map(|(_, setting)| of(Some((*setting)?))).collect(),
        false => of(None).into_iter().collect(),
    }
}

fn once(
    case: &Case,
    mode: Mode,
    setting: Option<&Setting>,
    how: How<'_>,
    ending: &Ending,
) -> Result<Outcome> {
    ending.check()?;
    let _beside = Beside::start(how.place.beside)?;
    let mut world = World::new(mode, how.ends, ending)?;
    world.setting = setting.cloned();
    let outcome = world.begin(case, how.seconds).and_then(|()| (case.run)(&mut world, how.seconds));
    // The client ends first, and a server that cannot be ended is a failure, too.
    drop(world);
    let stopped = match how.ends {
        Ends::Client(far) => far.stop(),
        _ => Ok(()),
    };
    outcome.and_then(|outcome| stopped.map(|()| outcome))
}

/// Says a line to whoever watches. That nobody does must not end the run.
pub fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(patterns: &[&str], tier: Tier) -> Vec<String> {
        let patterns: Vec<String> = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let cases = catalogue(&[0, 1]);
        cases.iter().filter(|c| is_wanted(c, &patterns, tier)).map(Case::name).collect()
    }

    #[test]
    fn names_are_unique_and_sort_into_tiers() {
        let all = chosen(&[], Tier::All);
        let unique: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(unique.len(), all.len());
        let (quick, standard) = (chosen(&[], Tier::Quick), chosen(&[], Tier::Standard));
        assert!(quick.len() < standard.len() && standard.len() < all.len());
        for workload in [
            "pingpong",
            "stream",
            "ipc",
            "rr1",
            "rr10",
            "streaming",
            "connect",
            "fanin",
            "ring",
            "foreign",
            "idle",
            "oversubscribed",
            "sockperf",
            "redis",
            "nginx",
            "memcached",
            "pgbench",
        ] {
            assert!(!chosen(&[workload], Tier::Quick).is_empty(), "{workload}");
        }
    }

    #[test]
    fn both_ends_of_what_is_between_machines_are_apart() {
        let cases = between(Way::Rdma);
        assert!(
            cases.iter().all(|case| case.server.is_some() && !case.modes.contains(&Mode::Unix))
        );
        let mut expected = vec![
            "pingpong/14B/blocking",
            "pingpong/14B/blocking/awake",
            "stream/64KB/blocking",
            "connect/c1-t1",
            "sockperf/pp-14B",
            "sockperf/tp-64000B",
            "redis/c50",
            "redis/c1",
        ];
        assert_eq!(cases.iter().map(Case::name).collect::<Vec<String>>(), expected);
        // Short connections stay TCP where there is no agent.
        expected.retain(|name| !name.starts_with("connect"));
        assert_eq!(between(Way::Any).iter().map(Case::name).collect::<Vec<String>>(), expected);
    }

    #[test]
    fn cases_are_chosen_by_workload_or_by_name() {
        assert_eq!(chosen(&["ipc"], Tier::Quick), ["ipc"]);
        assert_eq!(chosen(&["qperf"], Tier::Standard), ["qperf/tcp_lat", "qperf/tcp_bw"]);
        let named = chosen(&["pingpong/1MB/busy/*"], Tier::Quick);
        assert_eq!(named, ["pingpong/1MB/busy/two-cores", "pingpong/1MB/busy/one-core"]);
        assert_eq!(chosen(&["rr*"], Tier::Quick), ["rr1/1B-1B", "rr10/1B-1B"]);
        assert!(chosen(&["nothing"], Tier::All).is_empty());
    }

    #[test]
    fn one_core_is_enough_for_what_needs_one() {
        let cases = catalogue(&[0]);
        assert!(cases.iter().all(|case| !case.name().contains("two-cores")));
        assert!(cases.iter().any(|case| case.workload == "ring" && case.obstacle.is_some()));
    }
}
