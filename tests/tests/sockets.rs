//! The cases of the C programs, one test per case and variant. See `programs/common/check.h`.
//!
//! A case prints `@smcd PORT PORT` where its connection should have changed over, and `@tcp PORT PORT` where it should
//! not; the answer comes once `usmc ss` has confirmed it.

use std::process::{Command, ExitCode};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use usmc_tests::{Fixture, Process, build};

/// The slowest case takes two seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Cases that do not pass under uSMC yet, by name.
const KNOWN_FAILURES: &str = include_str!("../known_failures.txt");

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for program in ["cases", "fortified", "uring"] {
        let path = build::program(program);
        let list = Command::new(&path).arg("--list").output().expect("listing the cases");
        for line in String::from_utf8(list.stdout).expect("names").lines() {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let name = format!("{program}::{}", words.join("::"));
            let known =
                !usmc_tests::is_plain() && KNOWN_FAILURES.lines().any(|k| matches(k, &words));
            let trial = Trial::test(name.clone(), move || {
                run(&name, program, &words);
                Ok(())
            });
            trials.push(trial.with_ignored_flag(known));
        }
    }
    trials.sort_by(|a, b| a.name().cmp(b.name()));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A known failure: `CASE`, or `CASE cold` or `CASE warm`.
fn matches(known: &str, words: &[String]) -> bool {
    let (case, variant) = known.split_once(' ').unwrap_or((known, ""));
    case == words[0] && words.get(1).is_none_or(|w| w.ends_with(variant))
}

fn run(name: &str, program: &str, words: &[String]) {
    let fixture = Fixture::with_limit(name, LIMIT);
    let mut command = fixture.command(build::program(program));
    command.args(words);
    if words[0].ends_with("without_spinning") {
        command.env("USMC_BUSY_POLL_US", "0");
    }
    let mut process = fixture.spawn(command);
    while let Some(line) = process.try_line() {
        if let Some(request) = line.strip_prefix('@') {
            answer(&fixture, &mut process, request);
        }
    }
    process.succeed();
    fixture.finish();
}

fn answer(fixture: &Fixture, process: &mut Process, request: &str) {
    let words: Vec<&str> = request.split(' ').collect();
    let port = |i: usize| words[i].parse::<u16>().expect("a port");
    match words[0] {
        "smcd" => fixture.assert_smcd(port(1), port(2)),
        "tcp" => fixture.assert_tcp(port(1), port(2)),
        other => panic!("unknown request {other}"),
    }
    process.say("ok");
}
