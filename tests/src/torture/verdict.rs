//! Whether uSMC did what TCP does, and the shortest program that shows that it did not.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::generate::Generator;
use super::program::{Program, Step};
use super::run::{Filled, Observation, Pace, World};
use crate::Fixture;
use crate::region::Hosts;

/// What a program showed, step by step.
type Outcome = Vec<Observation>;

/// How often a program is run over TCP before an outcome counts as none of TCP's.
const TCP_RUNS: usize = 10;
/// How often a program that differed is run under uSMC, to tell a rule from an accident.
const SMC_RUNS: usize = 6;
/// A program that waits for a timer again and again takes long to shrink.
const SHRINK_LIMIT: Duration = Duration::from_secs(120);

/// A program that showed under uSMC what it never showed over TCP.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The program.
    pub program: Program,
    /// An outcome over TCP.
    pub tcp: Outcome,
    /// One under uSMC that TCP did not have.
    pub smc: Outcome,
    /// How many of the runs under uSMC had such outcomes, and how many runs there were.
    pub share: (usize, usize),
}

impl Difference {
    /// Whether it comes again and again: one run in six may have met a pause of the machine.
    pub fn is_reproducible(&self) -> bool {
        self.share.0 >= 2
    }

    /// How many steps showed the same, and the one that did not.
    fn parting(&self) -> (usize, Option<&Step>) {
        let alike = self.tcp.iter().zip(&self.smc).take_while(|(a, b)| a == b).count();
        (alike, self.program.steps.get(alike))
    }

    /// The program as a file of `tests/torture`, with what differs as comments.
    pub fn report(&self) -> String {
        let mut text = format!("# differs in {} of {} runs\n", self.share.0, self.share.1);
        let mut told = false;
        for ((step, tcp), smc) in self.program.steps.iter().zip(&self.tcp).zip(&self.smc) {
            text += &format!("{step}");
            if tcp == smc || told {
                text += &format!("    # {}\n", tcp.join("; "));
            } else {
                told = true;
                text += &format!("\n#   TCP:  {}\n#   uSMC: {}\n", tcp.join("; "), smc.join("; "));
            }
        }
        text
    }
}

/// Runs programs both ways.
pub struct Court<'a> {
    tcp: World<'a>,
    smc: World<'a>,
    is_between_hosts: bool,
}

impl<'a> Court<'a> {
    /// With processes of both kinds; under uSMC they may be different hosts'.
    pub fn new(fixture: &'a Fixture, hosts: Option<&'a Hosts>) -> Court<'a> {
        let (tcp, smc) = (World::new(fixture, false, None), World::new(fixture, true, hosts));
        Court { tcp, smc, is_between_hosts: hosts.is_some() }
    }

    /// Draws a program while it runs over TCP, runs it under uSMC, and compares.
    pub fn try_seed(&mut self, seed: u64, look: impl FnOnce()) -> (Program, Option<Difference>) {
        let mut generator = Generator::new(seed, self.is_between_hosts);
        let mut program = Program::default();
        let mut tcp = Vec::new();
        while let Some(step) = generator.next() {
            let seen = self.tcp.step(&step);
            generator.learn(&step, &seen);
            tcp.push(seen);
            program.steps.push(step);
        }
        self.tcp.tidy();
        let smc = self.smc.run_and(&program, look);
        let difference = if smc == tcp { None } else { self.judge(&program, tcp, smc) };
        (program, difference)
    }

    /// How many connections were filled under uSMC.
    pub fn filled(&self) -> Filled {
        self.smc.filled()
    }

    /// Runs a program both ways and compares.
    pub fn try_program(&mut self, program: &Program) -> Option<Difference> {
        let (tcp, smc) = (self.tcp.run(program), self.smc.run(program));
        if smc == tcp { None } else { self.judge(program, tcp, smc) }
    }

    fn judge(&mut self, program: &Program, tcp: Outcome, smc: Outcome) -> Option<Difference> {
        self.compare(program, tcp, smc, TCP_RUNS, SMC_RUNS)
    }

    /// A difference, if outcomes under uSMC are none of those that TCP has in so many runs.
    fn compare(
        &mut self,
        program: &Program,
        tcp: Outcome,
        smc: Outcome,
        tcp_runs: usize,
        smc_runs: usize,
    ) -> Option<Difference> {
        let mut known = BTreeSet::from([tcp.clone()]);
        let mut ours = vec![smc];
        for round in 1..tcp_runs.max(smc_runs) {
            if round < tcp_runs {
                // What comes later than at once comes at one step or another.
                self.tcp.set_pace(match round {
                    1 => Pace::Patient,
                    2..=6 => Pace::AsUnderSmc,
                    _ => Pace::Quick,
                });
                known.insert(self.tcp.run(program));
                self.tcp.set_pace(Pace::Quick);
            }
            if round < smc_runs {
                ours.push(self.smc.run(program));
            }
            if ours.iter().all(|outcome| known.contains(outcome)) && round >= 2 {
                return None;
            }
        }
        let odd: Vec<&Outcome> = ours.iter().filter(|outcome| !known.contains(*outcome)).collect();
        let smc = (*odd.first()?).clone();
        // The TCP outcome that is like it for longest tells best where they part.
        let alike = |tcp: &&Outcome| tcp.iter().zip(&smc).take_while(|(a, b)| a == b).count();
        let tcp = known.iter().max_by_key(alike).unwrap_or(&tcp).clone();
        let share = (odd.len(), ours.len());
        Some(Difference { program: program.clone(), tcp, smc, share })
    }

    /// Leaves out steps as long as the difference remains: the same step is the first to differ. Others may become
    /// what the generator avoids, being known. After [`SHRINK_LIMIT`] it is as short as it is.
    pub fn shrink(&mut self, found: Difference) -> Difference {
        let until = Instant::now() + SHRINK_LIMIT;
        let mut best = found;
        // What follows the first difference does not matter.
        let (alike, Some(odd)) = best.parting() else { return best };
        let odd = odd.clone();
        let mut steps = best.program.steps.clone();
        steps.truncate(alike + 1);
        if let Some(shorter) = self.still_differs(steps, &odd) {
            best = shorter;
        }
        let mut piece = best.program.steps.len().div_ceil(2);
        while piece > 0 {
            let mut at = 0;
            while at < best.program.steps.len() {
                if Instant::now() > until {
                    return best;
                }
                let mut steps = best.program.steps.clone();
                steps.drain(at..(at + piece).min(steps.len()));
                match self.still_differs(steps, &odd) {
                    Some(shorter) => best = shorter,
                    None => at += piece,
                }
            }
            piece = if piece == 1 { 0 } else { piece.div_ceil(2) };
        }
        best
    }

    fn still_differs(&mut self, steps: Vec<Step>, odd: &Step) -> Option<Difference> {
        let program = Program { steps };
        let (tcp, smc) = (self.tcp.run(&program), self.smc.run(&program));
        let found = if smc == tcp { None } else { self.compare(&program, tcp, smc, 5, 4) };
        found.filter(|found| found.is_reproducible() && found.parting().1 == Some(odd))
    }
}
