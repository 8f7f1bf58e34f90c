//! What is expected of uSMC, and what others have published of the kernel's SMC: one table, with its sources.

/// A bound on a figure of uSMC.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Target {
    /// So many times better than TCP at least.
    Factor(f64),
    /// Better than UNIX sockets, too.
    AboveUnix,
    /// At most this, in the figure's unit.
    AtMost(f64),
    /// At most so much more than TCP's, in the figure's unit.
    BeyondTcp(f64),
    /// At most so many times uSMC's figure of the other case.
    Times(f64, &'static str),
}

/// A target of the cases whose names fit.
#[derive(Debug)]
pub struct Row {
    /// A case's name; `*` stands for anything.
    pub cases: &'static str,
    /// One of their measures; empty: all.
    pub measure: &'static str,
    /// What is expected.
    pub target: Target,
}

const fn row(cases: &'static str, measure: &'static str, target: Target) -> Row {
    Row { cases, measure, target }
}

use Target::{AboveUnix, AtMost, BeyondTcp, Factor, Times};

/// The project's goals for a machine of two cores.
pub static TARGETS: &[Row] = &[
    row("ring", "one way", AtMost(0.20)),
    row("sockperf/pp-14B/two-cores", "", AtMost(0.35)),
    row("sockperf/pp-14B/epoll/two-cores", "", AtMost(0.5)),
    // At most 0.6 of TCP's latency.
    row("pingpong/*/one-core", "", Factor(1.0 / 0.6)),
    row("ipc", "", Factor(15.0)),
    row("sockperf/tp-64000B", "", Factor(4.0)),
    row("redis/c200-d1024", "", Factor(2.2)),
    row("redis/c200-d1024", "", AboveUnix),
    row("redis/c1", "", Factor(8.0)),
    row("nginx/keep-alive/c10", "", Factor(3.0)),
    row("nginx/keep-alive/c200", "", Factor(3.0)),
    row("nginx/keep-alive/c1000", "", Factor(3.0)),
    row("nginx/close/*", "", Factor(1.0)),
    row("connect/*", "connections", Factor(1.0)),
    // Set-up and tear-down beyond TCP's own; the system calls are counted by the tests.
    row("connect/c1-t1", "CPU, both sides", BeyondTcp(1.0)),
    row("pgbench/*", "", Factor(1.4)),
    row("memcached/*", "", Factor(1.4)),
    row("oversubscribed/*", "", Factor(1.0)),
    // As far as a figure can say that it is nothing.
    row("idle/1000", "CPU of both sides", AtMost(0.01)),
    row("idle/1000", "resident, per connection", BeyondTcp(8.0)),
    row("fanin/10000*", "", Times(1.2, "fanin/10")),
    row("foreign", "", BeyondTcp(3.0)),
];

/// What was published of the kernel's SMC, as a factor over TCP on the same machine.
#[derive(Debug)]
pub struct Published {
    /// A case's name; `*` stands for anything.
    pub cases: &'static str,
    /// One of their measures; empty: all.
    pub measure: &'static str,
    /// Better by this factor.
    pub factor: f64,
    /// UNIX sockets over TCP in the same publication, if it says so.
    pub unix: Option<f64>,
}

const fn published(cases: &'static str, measure: &'static str, factor: f64) -> Published {
    Published { cases, measure, factor, unix: None }
}

/// From the series that brought loopback-ism to net/smc (ipc-bench, sockperf, nginx, redis), and from complaints about
/// the rate of connections over SMC. Other machines, other versions: the order of magnitude compares.
pub static PUBLISHED: &[Published] = &[
    Published { cases: "ipc", measure: "", factor: 1.95, unix: Some(1.36) },
    published("sockperf/tp-64000B", "", 1.55),
    // Latency less by 48 %.
    published("sockperf/pp-14B/two-cores", "", 1.0 / 0.52),
    published("nginx/keep-alive/*", "", 1.32),
    published("redis/c200-d1024", "GET", 1.41),
    published("redis/c200-d1024", "SET", 1.38),
    published("nginx/close/c1-t1", "", 0.89),
    published("nginx/close/c2000-*", "", 0.09),
    published("connect/c1-t1", "connections", 0.89),
    published("connect/c2000-*", "connections", 0.09),
];

/// The targets of a measure of a case.
pub fn of(case: &str, measure: &str) -> impl Iterator<Item = Target> {
    let rows = TARGETS.iter().filter(move |row| fits(row.cases, row.measure, case, measure));
    rows.map(|row| row.target)
}

/// What was published about a measure of a case.
pub fn published_of(case: &str, measure: &str) -> Option<&'static Published> {
    PUBLISHED.iter().find(|row| fits(row.cases, row.measure, case, measure))
}

fn fits(cases: &str, wanted: &str, case: &str, measure: &str) -> bool {
    matches(cases, case) && (wanted.is_empty() || wanted == measure)
}

/// Whether the name is as the pattern says; `*` stands for anything, also for nothing.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|name| {
            let mut tails = (0..=name.len()).filter_map(|at| name.get(at..));
            tails.any(|tail| matches(rest, tail))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalogue;
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, fits) in [
            ("ipc", "ipc", true),
            ("ipc", "ipc2", false),
            ("*", "anything/at/all", true),
            ("connect/*", "connect/c1-t1", true),
            ("connect/*", "connect", false),
            ("pingpong/*/one-core", "pingpong/14B/epoll/one-core", true),
            ("pingpong/*/one-core", "pingpong/14B/epoll/two-cores", false),
            ("*c2000-*", "nginx/close/c2000-t8", true),
            ("fanin/10000*", "fanin/1000", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn every_row_is_about_a_figure_that_is_measured() {
        let cases = catalogue(&[0, 1]);
        let is_there = |pattern: &str, measure: &str| {
            cases.iter().any(|case| {
                let names = case.measures.iter().any(|m| measure.is_empty() || m.name == measure);
                matches(pattern, &case.name()) && names
            })
        };
        for row in TARGETS {
            assert!(is_there(row.cases, row.measure), "{row:?}");
            if let Times(_, other) = row.target {
                assert!(is_there(other, row.measure), "{row:?}");
            }
        }
        for row in PUBLISHED {
            assert!(is_there(row.cases, row.measure), "{row:?}");
        }
    }
}
