//! Requests and answers: `pingpong`, `stream`, `ipc`, `rr1`, `rr10`, `streaming`, `streams`, `paced`.

use super::spec;
use crate::bench::case::{Case, Measure, Outcome, Serve, Tier, cost, rate, size};
use crate::bench::cpus::places;
use crate::bench::host::World;
use crate::bench::mode::ALL;
use crate::bench::pair::{self, Measured, Shown};
use crate::bench::part::spec::{Exchange, Role, Spec, Wait};
use crate::bench::proof::Wanted;
use crate::bench::sweep::Setting;

/// The sizes, 1 B to 1 MB.
const SIZES: [usize; 7] = [1, 14, 100, 1 << 10, 16 << 10, 64 << 10, 1 << 20];
const WAITS: [Wait; 4] = [Wait::Blocking, Wait::Poll, Wait::Epoll, Wait::Busy];
/// Bytes of one burst of `stream`, or fewer where messages are small.
const BURST: usize = 32 << 20;
const BURST_BETWEEN: usize = 4 << 20;
/// Messages of one burst at most.
const BURST_MESSAGES: usize = 50_000;

/// ipc-bench's `-c 1000000 -s 100`.
const IPC_COUNT: u64 = 1_000_000;
const IPC_SIZE: usize = 100;

/// IBM's patterns for SMC-R: request and answer.
const RR: [(usize, usize); 4] = [(1, 1), (200, 1000), (200, 32 << 10), (64 << 10, 64 << 10)];
/// And its stream: 20 MB one way, 1 byte back.
const STREAMING: usize = 20_000_000;

/// Microseconds between two exchanges: longer than a wait spins by default.
const PACES: [u64; 2] = [200, 1000];

/// The place of a pair with a core for each.
const TWO: &str = "two-cores";

/// Streams at the same time, of messages of 64 KB.
const STREAMS: [usize; 3] = [1, 8, 64];

/// All of them.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (cores, cpus) in places(cpus) {
        for wait in WAITS {
            for size in SIZES {
                cases.push(ping_pong(size, wait, cores, cpus.clone()));
            }
        }
    }
    for (cores, cpus) in places(cpus) {
        for wait in WAITS {
            for size in SIZES {
                cases.push(stream(size, wait, cores, cpus.clone()));
            }
        }
    }
    cases.push(ipc());
    for connections in [1, 10] {
        cases.extend(RR.iter().map(|(request, answer)| rr(*request, *answer, connections)));
    }
    cases.push(streaming());
    cases.extend(STREAMS.map(streams));
    if let Some((_, cpus)) = places(cpus).into_iter().find(|(cores, _)| *cores == TWO) {
        cases.extend(PACES.map(|pause_us| paced(pause_us, cpus.clone())));
    }
    cases
}

/// Those between two machines: each end has CPUs of its own, and nothing is pinned.
pub fn between() -> Vec<Case> {
    vec![
        ping_pong(14, Wait::Blocking, "", Vec::new()),
        awake(ping_pong(14, Wait::Blocking, "awake", Vec::new())),
        stream(64 << 10, Wait::Blocking, "", Vec::new()),
    ]
}

/// The same, but no end sleeps before the answer is there, unless it takes a second.
fn awake(case: Case) -> Case {
    let spin =
        || Setting { name: "USMC_BUSY_POLL_US".to_owned(), value: Some(1_000_000.to_string()) };
    let (server, run) = (case.server, case.run);
    let server = server.map(|server| -> Serve {
        Box::new(move |world| {
            world.setting.get_or_insert_with(spin);
            server(world)
        })
    });
    let run = Box::new(move |world: &mut World, seconds: f64| {
        world.setting.get_or_insert_with(spin);
        run(world, seconds)
    });
    Case { server, run, ..case }
}

/// What is exchanged, and on how many connections.
struct Talk {
    spec: Spec,
    connections: usize,
    /// Exchanges after which a run ends earlier.
    most: u64,
    /// Microseconds between two of them.
    pause_us: u64,
}

/// A case of its own pair of processes. `made_of` says of how many operations CPU time is counted in an exchange.
fn case(
    name: (&'static str, String),
    measures: &[Measure],
    (per, made_of): (&'static str, f64),
    tier: Tier,
    talk: Talk,
    values: impl Fn(&Measured) -> Vec<f64> + 'static,
) -> Case {
    let Talk { spec, connections, most, pause_us } = talk;
    let server_spec = spec.clone();
    Case {
        workload: name.0,
        variant: name.1,
        modes: ALL,
        measures: measures.to_vec(),
        per,
        tier,
        needs: &[],
        obstacle: None,
        server: Some(Box::new(move |world| {
            pair::serve(world, &server_spec, Role::ServeLines { connections }, 1)?;
            Ok(Wanted::All(connections))
        })),
        run: Box::new(move |world, seconds| {
            let client = Role::Exchange(Exchange { connections, seconds, most, pause_us });
            let measured = pair::clients(world, &spec, &client, Shown::Bytes(connections))?;
            let cpu = measured.cpu(made_of);
            let [frames, wakes] = measured.counts(made_of);
            let (values, agents) = (values(&measured), measured.agents(made_of));
            Ok(Outcome { values, cpu, frames, wakes, agents, proof: measured.proof })
        }),
    }
}

fn one(spec: Spec) -> Talk {
    Talk { spec, connections: 1, most: u64::MAX, pause_us: 0 }
}

fn ping_pong(bytes: usize, wait: Wait, cores: &'static str, cpus: Vec<usize>) -> Case {
    let tier = match (bytes, wait, cores) {
        (14, Wait::Blocking, _) => Tier::Quick,
        (14, ..) | (1 | 0x400 | 0x10000 | 0x10_0000, Wait::Blocking, _) => Tier::Standard,
        _ => Tier::All,
    };
    let name = ("pingpong", variant(bytes, wait, cores));
    let spec = spec(bytes, bytes, bytes, wait, cpus);
    let measures = [cost("one way, median", "µs")];
    case(name, &measures, ("message", 2.0), tier, one(spec), |m| vec![m.done[0].one_way_us])
}

fn variant(bytes: usize, wait: Wait, cores: &str) -> String {
    let name = format!("{}/{}", size(bytes), wait.name());
    if cores.is_empty() { name } else { format!("{name}/{cores}") }
}

fn stream(bytes: usize, wait: Wait, cores: &'static str, cpus: Vec<usize>) -> Case {
    let tier = match (bytes, wait, cores) {
        (0x10000, Wait::Blocking, "two-cores" | "") => Tier::Quick,
        (0x10000, ..) | (1 | 100 | 0x400 | 0x4000 | 0x10_0000, Wait::Blocking, "two-cores") => {
            Tier::Standard
        }
        _ => Tier::All,
    };
    let name = ("stream", variant(bytes, wait, cores));
    // Between machines shorter: what is emulated would take seconds for one.
    let most = if cores.is_empty() { BURST_BETWEEN } else { BURST };
    let burst = bytes * (most / bytes).min(BURST_MESSAGES);
    let talk = one(spec(burst, 1, bytes, wait, cpus));
    flow(name, burst, tier, talk)
}

/// A case of bursts of so many bytes.
fn flow(name: (&'static str, String), burst: usize, tier: Tier, talk: Talk) -> Case {
    let per = ("KB", burst as f64 / 1e3);
    let measures = [rate("bandwidth", "MB/s")];
    case(name, &measures, per, tier, talk, move |m| vec![m.rate() * burst as f64 / 1e6])
}

fn ipc() -> Case {
    let spec = spec(IPC_SIZE, IPC_SIZE, IPC_SIZE, Wait::Blocking, Vec::new());
    let measures = [rate("messages", "k/s").in_words("100 bytes there and back")];
    let talk = Talk { most: IPC_COUNT, ..one(spec) };
    let name = ("ipc", String::new());
    case(name, &measures, ("message", 1.0), Tier::Quick, talk, |m| vec![m.rate() / 1e3])
}

fn rr(request: usize, answer: usize, connections: usize) -> Case {
    let workload = if connections == 1 { "rr1" } else { "rr10" };
    let tier = if (request, answer) == (1, 1) { Tier::Quick } else { Tier::Standard };
    let name = (workload, format!("{}-{}", size(request), size(answer)));
    let spec = spec(request, answer, request.max(answer), Wait::Blocking, Vec::new());
    let measures = [rate("transactions", "k/s"), cost("half a transaction, median", "µs")];
    let talk = Talk { connections, ..one(spec) };
    let values = |m: &Measured| vec![m.rate() / 1e3, m.done[0].one_way_us];
    case(name, &measures, ("transaction", 1.0), tier, talk, values)
}

fn streaming() -> Case {
    let talk = one(spec(STREAMING, 1, 64 << 10, Wait::Blocking, Vec::new()));
    flow(("streaming", String::new()), STREAMING, Tier::Quick, talk)
}

/// Several streams of one client to one server, each with two threads.
fn streams(connections: usize) -> Case {
    let spec = spec(BURST, 1, 64 << 10, Wait::Blocking, Vec::new());
    let talk = Talk { connections, ..one(spec) };
    flow(("streams", connections.to_string()), BURST, Tier::All, talk)
}

/// An exchange now and then: the client computes in between, on a core of its own.
fn paced(pause_us: u64, cpus: Vec<usize>) -> Case {
    let spec = spec(14, 14, 14, Wait::Epoll, cpus);
    let name = ("paced", format!("{pause_us}us"));
    let measures = [cost("half an exchange, median", "µs")];
    let talk = Talk { pause_us, ..one(spec) };
    case(name, &measures, ("exchange", 1.0), Tier::All, talk, |m| vec![m.done[0].one_way_us])
}
