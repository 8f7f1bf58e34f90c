//! Real programs from the distribution's packages, one file each. What is not installed is left out with a word.

mod iperf3;
mod memcached;
mod nginx;
mod postgresql;
mod qperf;
mod redis;
mod sockperf;

use std::env;
use std::path::Path;

use anyhow::{Result, anyhow, bail};

use super::case::{Case, Count, Cpu, End, Measure, Needs, Outcome, Tier};
use super::host::{Load, World};
use super::mode::Mode;

/// Where servers are that are not in everybody's PATH.
const SYSTEM: &str = "/usr/local/sbin:/usr/sbin:/sbin";

/// All of them, for these CPUs.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    let mut cases = sockperf::cases(cpus);
    cases.extend(redis::cases());
    cases.extend(nginx::cases());
    cases.extend(qperf::cases());
    cases.extend(iperf3::cases());
    cases.extend(memcached::cases());
    cases.extend(postgresql::cases());
    cases
}

/// Those between two machines.
pub fn between() -> Vec<Case> {
    let mut cases = sockperf::between();
    cases.extend(redis::between());
    cases
}

/// PATH with the system's directories.
pub fn search_path() -> String {
    let path = env::var("PATH").unwrap_or_default();
    if path.is_empty() { SYSTEM.to_owned() } else { format!("{path}:{SYSTEM}") }
}

/// The first of these that is not installed, though these ends need it.
pub fn missing<'a>(needed: &'a [Needs], ends: &[End]) -> Option<&'a Needs> {
    let is_needed = |needs: &&Needs| needs.end.is_none_or(|end| ends.contains(&end));
    needed.iter().filter(is_needed).find(|needs| {
        let is_there = |dir: &str| Path::new(dir).join(needs.program).is_file();
        let elsewhere = needs.package == "postgresql" && postgresql::directory().is_some();
        !elsewhere && !search_path().split(':').any(is_there)
    })
}

/// A case of programs.
fn case(
    workload: &'static str,
    variant: &str,
    modes: &'static [Mode],
    measures: Vec<Measure>,
    needs: &'static [Needs],
    run: impl Fn(&mut World, f64) -> Result<Outcome> + 'static,
) -> Case {
    let (variant, run) = (variant.to_owned(), Box::new(run));
    let tier = Tier::Standard;
    let per = "request";
    let (obstacle, server) = (None, None);
    Case { workload, variant, modes, measures, per, tier, needs, obstacle, server, run }
}

/// The outcome of a load that had so many operations.
fn outcome(values: Vec<f64>, load: Load, operations: f64) -> Result<Outcome> {
    if values.iter().any(|value| value.is_nan() || *value <= 0.0) {
        bail!("a figure is missing.\n{}", load.output);
    }
    let each = |seconds: f64| seconds * 1e9 / operations.max(1.0);
    let cpu = Cpu {
        client_ns: each(load.client_cpu),
        server_ns: each(load.server_cpu),
        agents_ns: load.agents.and_then(|agents| agents.cpu_of(operations.max(1.0))),
    };
    let frames = load.frames.and_then(|count| Count::new(count, operations.max(1.0)));
    let agents = load.agents.map(|agents| agents.counts(operations.max(1.0))).unwrap_or_default();
    Ok(Outcome { values, cpu: Some(cpu), frames, wakes: None, agents, proof: load.proof })
}

/// The first number after this text, and what follows it.
fn number_after<'a>(output: &'a str, text: &str) -> Result<(f64, &'a str)> {
    let missing = || anyhow!("no figure after {text:?} in:\n{output}");
    let at = output.find(text).ok_or_else(missing)? + text.len();
    let rest = output[at..].trim_start_matches(|c: char| c.is_whitespace() || c == '=' || c == ':');
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let number = rest[..end].trim_end_matches('.').parse().map_err(|_| missing())?;
    Ok((number, rest[end..].trim_start()))
}

/// Whole seconds, for programs that know no others.
fn whole(seconds: f64) -> f64 {
    seconds.ceil().max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_what_programs_print() {
        let output = "tcp_lat:\n    latency  =  12.5 us\nRequests/sec:  71234.56\nend 7.";
        assert_eq!(
            number_after(output, "latency").expect("there"),
            (12.5, "us\nRequests/sec:  71234.56\nend 7.")
        );
        assert_eq!(number_after(output, "Requests/sec").expect("there").0, 71234.56);
        assert_eq!(number_after(output, "end").expect("there"), (7.0, ""));
        assert!(number_after(output, "bw").is_err());
        assert!(number_after("bw = none", "bw").is_err());
    }
}
