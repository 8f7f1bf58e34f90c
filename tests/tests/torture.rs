//! Random programs look the same over TCP and under uSMC.
//!
//! `USMC_TORTURE` is their number, `USMC_TORTURE_SEED` the first one's seed: `make torture` runs many, from a seed by
//! the clock. `USMC_TORTURE_PROGRAM` runs a file instead. A find is printed as the shortest program that shows it;
//! once it is corrected, it goes to `tests/torture`. With `USMC_TORTURE_SHRINK=0` it is printed as it was drawn.

use std::fs;
use std::time::{Duration, Instant};

use usmc_tests::region::Hosts;
use usmc_tests::torture::program::Program;
use usmc_tests::torture::run::{Filled, PROCESSES};
use usmc_tests::torture::verdict::Court;
use usmc_tests::{Fixture, build, is_plain, number, region, ss};

/// Of so many programs one is looked at for connections in shared memory.
const LOOK_AT: u64 = 50;
/// In so many programs some fill a connection.
const FILLS_IN: u64 = 500;
/// Bytes of the region between two hosts.
const REGION: usize = 64 << 20;

#[test]
fn random_programs_look_the_same_as_over_tcp() {
    let count = number("USMC_TORTURE", 600);
    let fixture = Fixture::with_limit("torture", Duration::from_secs(240 + count / 4));
    let filled = compare(&fixture, None, count);
    assert!(count < FILLS_IN || filled.all >= count / 20, "hardly any connection was filled");
    assert!(filled.in_ring >= filled.all / 4, "connections are filled over TCP only");
    fixture.finish();
}

/// Each process is another host's.
#[test]
fn random_programs_of_two_hosts_look_the_same_as_over_tcp() {
    if is_plain() {
        return;
    }
    let count = number("USMC_TORTURE", 600) / 5;
    let fixture = Fixture::with_limit("torture in a region", Duration::from_secs(240 + count / 4));
    let hosts = Hosts::new(&fixture, PROCESSES, REGION);
    compare(&fixture, Some(&hosts), count);
    assert!(region::was_used(hosts.region()), "no connection's memory is the region's");
    fixture.finish();
}

/// So many random programs, of hosts if there are some. How many connections they filled.
fn compare(fixture: &Fixture, hosts: Option<&Hosts>, count: u64) -> Filled {
    let finds_wanted = number("USMC_TORTURE_FINDS", 3);
    let first = number("USMC_TORTURE_SEED", 1);
    let shrinks = number("USMC_TORTURE_SHRINK", 1) != 0;
    println!("USMC_TORTURE_SEED={first}");
    let mut court = Court::new(fixture, hosts);
    let (mut steps, mut rare, mut in_rings, mut finds) = (0, Vec::new(), 0, Vec::new());
    let start = Instant::now();
    for number in 0..count {
        let seed = first.wrapping_add(number);
        let look = || {
            if number % LOOK_AT == 0 {
                let ends = ss::list();
                in_rings += match hosts {
                    Some(hosts) => hosts.count(&ends),
                    None => ends.iter().filter(|s| s.is_smcd()).count(),
                };
            }
        };
        let (program, difference) = court.try_seed(seed, look);
        steps += program.steps.len();
        match difference {
            None => {}
            Some(found) if found.is_reproducible() => {
                let shortest = if shrinks { court.shrink(found) } else { found };
                eprintln!("\n# USMC_TORTURE_SEED={seed} USMC_TORTURE=1\n{}", shortest.report());
                finds.push(seed);
                if finds.len() as u64 >= finds_wanted {
                    break;
                }
            }
            Some(found) => rare.push((seed, found)),
        }
    }
    let filled = court.filled();
    println!("{} connections were filled, {} of them in shared memory", filled.all, filled.in_ring);
    println!(
        "{count} programs of {} steps on average in {:.0?}; {in_rings} ends in shared memory in one of \
         {LOOK_AT}; {} differed once only",
        steps as u64 / count.max(1),
        start.elapsed(),
        rare.len()
    );
    for (seed, found) in &rare {
        println!("# once, USMC_TORTURE_SEED={seed} USMC_TORTURE=1\n{}", found.report());
    }
    assert!(finds.is_empty(), "uSMC differs from TCP in the programs of these seeds: {finds:?}");
    let looks = count.div_ceil(LOOK_AT);
    assert!(count < LOOK_AT || in_rings as u64 >= looks / 4, "the programs use TCP only");
    filled
}

#[test]
fn what_was_found_before_is_as_over_tcp() {
    let given = std::env::var_os("USMC_TORTURE_PROGRAM").map(std::path::PathBuf::from);
    let dir = build::tests_dir().join("torture");
    let listed = || {
        let entries = fs::read_dir(&dir).expect("tests/torture").flatten().map(|e| e.path());
        let mut files: Vec<_> =
            entries.filter(|p| p.extension().is_some_and(|e| e == "txt")).collect();
        files.sort();
        files
    };
    let files = given.map_or_else(listed, |file| vec![file]);
    assert!(!files.is_empty(), "no programs in {}", dir.display());
    let fixture = Fixture::with_limit("what torture found", Duration::from_secs(120));
    let mut court = Court::new(&fixture, None);
    let mut failed = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a program");
        let program: Program = text.parse().unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        if let Some(found) = court.try_program(&program) {
            eprintln!("\n# {}\n{}", file.display(), found.report());
            if found.is_reproducible() {
                failed.push(file);
            }
        }
    }
    assert!(failed.is_empty(), "uSMC differs from TCP again: {failed:?}");
    drop(court);
    fixture.finish();
}
