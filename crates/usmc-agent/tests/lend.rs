//! Agents and applications on one processor: an agent gives it away behind what it has brought, and finds the answer when it is back.

mod process;

use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use process::{Agent, Process, alone, fake, loopback};
use usmc_agent::rest::Spin;
use usmc_shm::layout::ACCEPTOR;

const BYTES: usize = 14;
const COUNT: u8 = 250;

/// How often a server rings for its answers, whose agent sleeps at once if it has nothing to do.
#[test]
#[ignore = "run by the next test, on one processor"]
fn answers() {
    fake::fabric().0.direct().expect("a fabric");
    let test = fake::next_test();
    let spin = Spin::For(Duration::from_nanos(1));
    let agents = [0, 1].map(|host| Agent::start_spinning(test, host, spin));
    let mut ends = [Process::default(), Process::default()];
    for (side, tcp) in loopback().into_iter().enumerate() {
        ends[side].hand(&agents[side], side, tcp, 0, 0);
    }
    let [client, server] = &ends.each_ref().map(|process| &process.ends[0]);
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            for byte in 0..COUNT {
                server.wait_for_data();
                server.take_message::<BYTES>(byte);
                server.send_message::<BYTES>(!byte);
            }
        });
        for byte in 0..COUNT {
            client.send_message::<BYTES>(byte);
            client.wait_for_data();
            client.take_message::<BYTES>(!byte);
        }
    });
    println!("{:?} for a round trip", begun.elapsed() / u32::from(COUNT));
    println!("{} doorbells", server.known().dir[ACCEPTOR].producer.bells_sent.load(Relaxed));
    drop(ends);
    agents.into_iter().for_each(|agent| _ = agent.end());
}

/// The processors that this program may use.
fn processors() -> Vec<String> {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = allowed.expect("a list").trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let [first, last] = [first, last].map(|one| one.parse::<u32>().expect("a number"));
        first..=last
    });
    ranges.flatten().map(|one| one.to_string()).collect()
}

/// An agent that sleeps at once hears a doorbell for each answer. Another test's program may take the processor for long, so that the agent stops
/// lending: one run without such a program is enough.
#[test]
fn an_answer_on_the_agents_processor_needs_no_doorbell() {
    const RUNS: usize = 40;
    let (_alone, processors) = (alone(), processors());
    let rung = |processor: &String| {
        let mut command = Command::new("taskset");
        command.args(["-c", processor]).arg(std::env::current_exe().expect("this program"));
        command.args(["--exact", "answers", "--ignored", "--nocapture"]);
        let done = command.output().expect("taskset");
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
        let line = said.lines().find_map(|line| line.strip_suffix(" doorbells")).expect("a count");
        line.rsplit(' ').next().and_then(|count| count.parse::<u32>().ok()).expect("a count")
    };
    let mut all = Vec::new();
    while !all.iter().any(|rung| *rung < u32::from(COUNT) / 4) {
        assert!(all.len() < RUNS, "{all:?} doorbells for {COUNT} answers");
        all.push(rung(&processors[all.len() % processors.len()]));
    }
    println!("{all:?} doorbells for {COUNT} answers");
}
