//! What became of the targets.

use serde::{Deserialize, Serialize};

use super::case::Better;
use super::mode::Mode;
use super::record::{CaseRecord, MeasureRecord, Record};
use super::statistics::{Spread, short};
use super::targets::{self, Target};

/// A target and what became of it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// In words.
    pub target: String,
    /// Nothing where there is nothing to compare with in this run.
    pub met: Option<bool>,
}

impl Record {
    /// Compares all figures with their targets. Some of them compare cases with each other. Those of two machines have none, and what
    /// was published is of one.
    pub fn judge(&mut self) {
        let cases = self.cases.clone();
        if self.server.is_some() {
            let measures = self.cases.iter_mut().flat_map(|case| &mut case.measures);
            measures.for_each(|measure| (measure.kernel_smc, measure.kernel_unix) = (None, None));
            return;
        }
        for case in &mut self.cases {
            for measure in &mut case.measures {
                let all = targets::of(&case.name, &measure.name);
                measure.targets = all.map(|t| measure.verdict(t, &cases)).collect();
            }
        }
    }

    /// Targets that were missed: case, measure, and what was expected.
    pub fn missed(&self) -> impl Iterator<Item = (&CaseRecord, &MeasureRecord, &Verdict)> {
        self.cases.iter().flat_map(|case| {
            case.measures.iter().flat_map(move |measure| {
                let missed = measure.targets.iter().filter(|verdict| verdict.met == Some(false));
                missed.map(move |verdict| (case, measure, verdict))
            })
        })
    }
}

impl MeasureRecord {
    fn verdict(&self, target: Target, cases: &[CaseRecord]) -> Verdict {
        let median = |mode| self.figures.get(&mode).map(|figure: &Spread| figure.median);
        let factor = |mode| self.factors.get(&mode).map(|factor: &Spread| factor.median);
        let (usmc, unit) = (median(Mode::Usmc), &self.unit);
        let is_better = |figure: f64, than: f64| match self.better {
            Better::Higher => figure >= than,
            Better::Lower => figure <= than,
        };
        let (target, met) = match target {
            Target::Factor(least) => {
                (format!("≥ {} ×", short(least)), factor(Mode::Usmc).map(|f| f >= least))
            }
            Target::AboveUnix => {
                let met = usmc.zip(median(Mode::Unix)).map(|(usmc, unix)| is_better(usmc, unix));
                ("better than UNIX".to_owned(), met)
            }
            Target::AtMost(most) => {
                (format!("≤ {} {unit}", short(most)), usmc.map(|usmc| usmc <= most))
            }
            Target::BeyondTcp(most) => {
                let met = self.beyond_tcp.map(|more| more.median <= most);
                (format!("≤ TCP + {} {unit}", short(most)), met)
            }
            Target::Times(most, other) => {
                let other_case = cases.iter().find(|case| case.name == other);
                let other_figure = other_case.and_then(|case| {
                    let same = case.measures.iter().find(|m| m.name == self.name)?;
                    same.figures.get(&Mode::Usmc)
                });
                let met = usmc.zip(other_figure).map(|(usmc, f)| usmc <= most * f.median);
                (format!("≤ {} × {other}", short(most)), met)
            }
        };
        Verdict { target, met }
    }
}
