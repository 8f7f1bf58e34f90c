//! What a message costs two agents that are awake, over a fabric that costs nothing: their time, and system calls.

mod bare;
mod process;

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use process::pair::{Pair, connect};
use process::{End, Process, alone, fake};

/// Bytes of a message.
const BYTES: usize = 14;
/// How many round trips the rounds below make, where that is said: for the count of system calls.
const ROUNDS: &str = "USMC_AGENT_ROUNDS";

/// Agents that turn in a thread of their own until the end, and a connection between them, in the process of each end.
struct World {
    ends: [Process; 2],
    is_over: Arc<AtomicBool>,
    /// System calls of the agents' waits so far.
    calls: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl World {
    fn new() -> World {
        let test = fake::next_test();
        let is_over = Arc::new(AtomicBool::new(false));
        let until = is_over.clone();
        let calls = Arc::new(AtomicU64::new(0));
        let counted = calls.clone();
        let (ready, is_ready) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut agents = Pair::new(test);
            ready.send(()).expect("the test");
            while !until.load(Ordering::Relaxed) {
                agents.turn();
                let calls = agents.0.iter().map(|agent| agent.service().rest().calls());
                counted.store(calls.sum(), Ordering::Relaxed);
            }
        });
        is_ready.recv().expect("the agents");
        let ends = connect(test);
        World { ends, is_over, calls, thread }
    }

    fn end(self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("the agents")
    }
}

/// A message to the other end. An agent that has not looked there for a while has to be told.
fn send(end: &End, byte: u8) {
    end.send_message::<BYTES>(byte);
}

/// Takes one as soon as it is there.
fn receive(end: &End, byte: u8) {
    // The clock is asked where nothing comes for long: what it costs is not measured.
    let mut begun = None;
    let mut looks = 0_u32;
    while end.rings()[0].data().expect("a ring in order").len < BYTES {
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(1 << 20) {
            let waited = begun.get_or_insert_with(Instant::now).elapsed();
            assert!(waited < process::LIMIT, "nothing comes");
        }
        std::hint::spin_loop();
    }
    end.take_message::<BYTES>(byte);
}

/// So many messages there and back: how long one takes.
fn round_trips(ends: &[Process; 2], count: u32) -> Duration {
    let [client, server] = ends.each_ref().map(|process| &process.ends[0]);
    let begun = Instant::now();
    for at in 0..count {
        let byte = at as u8;
        send(client, byte);
        receive(server, byte);
        send(server, !byte);
        receive(client, !byte);
    }
    begun.elapsed() / count
}

/// The rounds whose system calls are counted.
#[test]
#[ignore = "run by the next test, under strace"]
fn rounds() {
    let count = std::env::var(ROUNDS).ok().and_then(|n| n.parse().ok()).unwrap_or(1000);
    let world = World::new();
    println!("{:?} for a round trip", round_trips(&world.ends, count));
    world.end();
}

/// System calls of so many round trips, but for those of waits; those of the start and the end are among them.
fn calls(count: u32) -> u64 {
    let log = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("calls-{}-{count}", std::process::id()));
    let mut command = Command::new("strace");
    command.args(["-f", "-c", "-U", "calls,name", "-o"]).arg(&log);
    command.arg(std::env::current_exe().expect("this program"));
    command.args(["--exact", "rounds", "--ignored"]).env(ROUNDS, count.to_string());
    let done = command.output().expect("strace, which `make test-deps` installs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    let text = std::fs::read_to_string(&log).expect("strace's output");
    std::fs::remove_file(&log).expect("strace's output");
    let lines = text.lines().filter_map(|line| line.trim().split_once(' '));
    let all = lines.filter_map(|(calls, name)| Some((calls.parse().ok()?, name.trim())));
    let waits = ["epoll_wait", "epoll_pwait", "epoll_pwait2", "sched_yield", "total"];
    all.filter(|(_, name)| !waits.contains(name)).map(|(calls, _): (u64, &str)| calls).sum()
}

/// An agent that is awake looks at shared memory and at the device alone, and at sockets now and then. The application rings where it has stood still
/// for so long that an agent does not look at its connection any more.
#[test]
fn messages_of_those_awake_take_no_system_call() {
    const COUNT: u32 = 100_000;
    const SLICES: u32 = 101;
    let _alone = alone();
    let [few, many] = [1000, 1000 + COUNT].map(calls);
    let world = World::new();
    // Where the application's thread has no processor the agents have nothing to do, and give theirs away: in some slices.
    let slice = |_| {
        let before = world.calls.load(Ordering::Relaxed);
        round_trips(&world.ends, COUNT / SLICES);
        world.calls.load(Ordering::Relaxed) - before
    };
    let mut waits: Vec<u64> = (0..SLICES).map(slice).collect();
    waits.sort_unstable();
    let waits = waits[waits.len() / 2];
    world.end();
    println!(
        "{few} and {many} system calls of {COUNT} round trips, and {waits} of waits in {}",
        COUNT / SLICES
    );
    // Where another program takes the application's processor away it rings, which takes several.
    assert!(many.saturating_sub(few) < u64::from(COUNT) / 20);
    assert!(waits < u64::from(COUNT / SLICES) / 5, "it looks at sockets too often");
}

/// How long both agents and the application work on a message, in one thread that never waits.
fn work(count: u32) -> Duration {
    let test = fake::next_test();
    let (ready, is_ready) = mpsc::channel();
    let (give, given) = mpsc::channel::<[Process; 2]>();
    let agents = thread::spawn(move || {
        let mut agents = Pair::new(test);
        ready.send(()).expect("the test");
        let ends = loop {
            agents.turn();
            if let Ok(ends) = given.try_recv() {
                break ends;
            }
        };
        let [client, server] = ends.each_ref().map(|process| &process.ends[0]);
        let begun = Instant::now();
        for at in 0..count {
            send(client, at as u8);
            while !server.rings()[0].has_data() {
                agents.turn();
            }
            receive(server, at as u8);
        }
        begun.elapsed() / count
    });
    is_ready.recv().expect("the agents");
    give.send(connect(test)).expect("the agents");
    agents.join().expect("the agents")
}

/// `make bench-agent`: a round trip goes twice through both agents, which are one thread's; over a fabric that echoes it would go through one
/// of them, there and back.
#[test]
#[ignore = "a measurement"]
fn hop_there_and_back() {
    let world = World::new();
    round_trips(&world.ends, 100_000);
    let mut all: Vec<Duration> = (0..9).map(|_| round_trips(&world.ends, 100_000)).collect();
    all.sort();
    let [least, median, most] = [all[0], all[4], all[8]].map(|trip| trip.as_nanos() / 2);
    world.end();
    let fabric = bare::message(BYTES, 100_000).as_nanos();
    println!(
        "{median} ns ({least}-{most}) for a message to an echo and back, of which the fabric takes {fabric} ns"
    );
}

/// What a message costs both agents, less what the fabric takes for it. `make bench-agent`, too.
#[test]
#[ignore = "a measurement"]
fn hop_of_an_agent() {
    let count = std::env::var(ROUNDS).ok().and_then(|n| n.parse().ok()).unwrap_or(200_000);
    let mut all: Vec<[u128; 2]> = (0..9)
        .map(|_| [work(count), bare::message(BYTES, count)].map(|time| time.as_nanos() / 2))
        .collect();
    all.sort_by_key(|[all, fabric]| all.saturating_sub(*fabric));
    let own = |at: usize| all[at][0].saturating_sub(all[at][1]);
    println!(
        "{} ns ({}-{}) of an agent's own for a message, with half of the application's; {} ns with the fabric's {}",
        own(4),
        own(0),
        own(8),
        all[4][0],
        all[4][1],
    );
}
