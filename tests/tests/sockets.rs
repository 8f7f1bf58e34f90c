//! The cases of the C programs, one test per case and variant. See `programs/common/check.h`.
//!
//! Besides, on musl, and on x86-64: 32-bit programs, and peers of which one has 32 bits and one 64. Of these, `make test` runs each
//! case in one variant, a different one for each case; `USMC_TESTS_32=1` runs all.
//!
//! A case prints `@smcd PORT PORT` where its connection should have changed over, and `@tcp PORT PORT` where it should
//! not; the answer comes once `usmc ss` has confirmed it.

use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use usmc_tests::{Fixture, Process, build, rdma, region};

/// The slowest case takes two seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Cases at once, for each processor. A case waits for four fifths of its time.
const AT_ONCE: usize = 2;

/// Cases that do not pass under uSMC yet, by name.
const KNOWN_FAILURES: &str = include_str!("../known_failures.txt");

/// Cases that are left out on musl: `CASE: why`.
const NOT_ON_MUSL: &str = include_str!("../programs/musl/left_out.txt");

/// The same for a region, whose ends have memory in common and nothing else.
const NOT_IN_A_REGION: &str = include_str!("../programs/region/left_out.txt");

/// The same by RDMA, whose ends are two hosts'.
const NOT_BY_RDMA: &str = include_str!("../programs/rdma/left_out.txt");

/// One of so many cases is run by RDMA.
const RDMA_SHARE: usize = 8;

/// Bytes of such a region, of which hardly any are ever in memory.
const REGION: usize = 1 << 30;

/// A C program, and of another class perhaps the one that plays the peer.
#[derive(Clone, Copy)]
struct Set {
    name: &'static str,
    program: &'static str,
    peer: Option<&'static str>,
    /// One variant of each case, unless all are asked for.
    sampled: bool,
    over: Over,
}

/// What the ends have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    /// The host's memory.
    Host,
    /// A region.
    Region,
    /// A network, and an agent for RDMA.
    Rdma,
}

const fn all(program: &'static str) -> Set {
    Set { name: program, program, peer: None, sampled: false, over: Over::Host }
}

const fn sampled(name: &'static str, program: &'static str, peer: Option<&'static str>) -> Set {
    Set { name, program, peer, sampled: true, over: Over::Host }
}

const SETS: &[Set] = &[
    all("cases"),
    all("fortified"),
    all("uring"),
    Set { over: Over::Region, ..sampled("cases-region", "cases", None) },
    Set { over: Over::Rdma, ..sampled("cases-rdma", "cases", Some("cases")) },
];

/// Programs on musl, among themselves and with a peer on glibc.
const MUSL_SETS: &[Set] = &[
    sampled("cases-musl", "cases-musl", None),
    sampled("cases-musl_glibc", "cases-musl", Some("cases")),
    sampled("cases-glibc_musl", "cases", Some("cases-musl")),
];

const NARROW_SETS: &[Set] = &[
    all("fortified32"),
    sampled("cases32", "cases32", None),
    sampled("cases32t", "cases32t", None),
    sampled("cases32_64", "cases32", Some("cases")),
    sampled("cases64_32", "cases", Some("cases32")),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    arguments.test_threads.get_or_insert(AT_ONCE * cpus);
    let mut trials = Vec::new();
    let narrow = if cfg!(target_arch = "x86_64") { NARROW_SETS } else { &[] };
    for set in SETS.iter().chain(MUSL_SETS).chain(narrow) {
        let path = build::program(set.program);
        let list = Command::new(&path).arg("--list").output().expect("listing the cases");
        let list = String::from_utf8(list.stdout).expect("names");
        let cases = list.lines().map(|line| line.split(' ').map(str::to_owned).collect());
        let mut cases: Vec<Vec<String>> = cases.collect();
        let left_out = match set {
            Set { over: Over::Region, .. } => NOT_IN_A_REGION,
            Set { over: Over::Rdma, .. } => NOT_BY_RDMA,
            set if set.program.ends_with("-musl") => NOT_ON_MUSL,
            _ => "",
        };
        for name in named_in(left_out) {
            let before = cases.len();
            cases.retain(|words| words[0] != name && words.join("::") != name);
            assert!(cases.len() < before, "left_out.txt: there is no case {name}");
        }
        for words in chosen(*set, cases) {
            let name = format!("{}::{}", set.name, words.join("::"));
            let known =
                !usmc_tests::is_plain() && KNOWN_FAILURES.lines().any(|k| matches(k, *set, &words));
            let trial = Trial::test(name.clone(), move || {
                run(&name, *set, &words);
                Ok(())
            });
            trials.push(trial.with_ignored_flag(known));
        }
    }
    trials.sort_by(|a, b| a.name().cmp(b.name()));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The names in a list of those left out: of cases, or of one variant of a case.
fn named_in(list: &'static str) -> impl Iterator<Item = &'static str> {
    list.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (name, why) = line.split_once(": ").expect("CASE: why");
        assert!(!why.is_empty());
        name
    })
}

/// The cases of a set: of a case in several variants one that its name and the set's draw.
fn chosen(set: Set, mut cases: Vec<Vec<String>>) -> Vec<Vec<String>> {
    if set.peer.is_some() {
        // In the others nobody else takes part.
        cases.retain(|words| words.get(1).is_some_and(|variant| variant.starts_with("remote")));
    }
    if set.over == Over::Rdma && !usmc_tests::flag("USMC_TESTS_RDMA") {
        // `make test-rdma` runs all.
        cases.retain(|words| words[0].bytes().map(usize::from).sum::<usize>() % RDMA_SHARE == 0);
    }
    if !set.sampled || usmc_tests::flag("USMC_TESTS_32") {
        return cases;
    }
    let drawn = |case: &[Vec<String>]| {
        let letters = case[0][0].bytes().chain(set.name.bytes());
        case[letters.map(usize::from).sum::<usize>() % case.len()].clone()
    };
    cases.chunk_by(|a, b| a[0] == b[0]).map(drawn).collect()
}

/// A known failure: `CASE`, or `CASE cold` or `CASE warm`, or `CASE 32`: where one of the programs is a 32-bit one.
fn matches(known: &str, set: Set, words: &[String]) -> bool {
    let (case, variant) = known.split_once(' ').unwrap_or((known, ""));
    let is_meant = match variant {
        "32" => set.name.contains(variant),
        _ => words.get(1).is_none_or(|w| w.ends_with(variant)),
    };
    case == words[0] && is_meant
}

fn run(name: &str, set: Set, words: &[String]) {
    let fixture = Fixture::with_limit(name, LIMIT);
    let mut command = fixture.command(build::program(set.program));
    command.args(words);
    if let Some(peer) = set.peer {
        command.env("USMC_TESTS_PEER", build::program(peer));
    }
    if words[0].ends_with("without_spinning") {
        command.env("USMC_BUSY_POLL_US", "0");
    }
    if words[0].ends_with("long_spins") {
        command.env("USMC_BUSY_POLL_US", "1000000");
    }
    if words[0].ends_with("changes_over_at_once") {
        command.env("USMC_CHANGE_OVER", "at-once");
    }
    let region = (set.over == Over::Region).then(|| region::create(fixture.scratch(), REGION));
    let agent = (set.over == Over::Rdma && !usmc_tests::is_plain()).then(|| {
        command.env("USMC_PEERS", "127.0.0.1").env("USMC_LOOPBACK", "off");
        rdma::start_for_loopback(&fixture)
    });
    if let Some(region) = &region {
        command.env("USMC_REGIONS", region).env("USMC_LOOPBACK", "off");
    }
    let mut process = fixture.spawn(command);
    let mut in_memory = false;
    while let Some(line) = process.try_line() {
        if let Some(request) = line.strip_prefix('@') {
            in_memory |= request.starts_with("smcd");
            answer(&fixture, &mut process, request, set.over);
        }
    }
    process.succeed();
    if let Some(mut agent) = agent {
        agent.signal(libc::SIGTERM);
        agent.succeed();
    }
    if let Some(region) = region.filter(|_| in_memory && !usmc_tests::is_plain()) {
        assert!(region::was_used(&region), "the connection's memory is not the region's");
    }
    fixture.finish();
}

fn answer(fixture: &Fixture, process: &mut Process, request: &str, over: Over) {
    let words: Vec<&str> = request.split(' ').collect();
    let port = |i: usize| words[i].parse::<u16>().expect("a port");
    match words[0] {
        "smcd" if over == Over::Rdma => fixture.assert_smcr(port(1), port(2)),
        "smcd" => fixture.assert_smcd(port(1), port(2)),
        "tcp" => fixture.assert_tcp(port(1), port(2)),
        other => panic!("unknown request {other}"),
    }
    process.say("ok");
}
