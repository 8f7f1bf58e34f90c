//! Requests and answers: `pingpong`, `stream`, `ipc`, `rr1`, `rr10`, `streaming`, `streams`.

use anyhow::Result;

use super::spec;
use crate::bench::case::{Case, Cpu, Measure, Outcome, Tier, cost, rate, size};
use crate::bench::cpus::places;
use crate::bench::host::World;
use crate::bench::mode::ALL;
use crate::bench::pair::{self, Measured, Shown};
use crate::bench::part::spec::{Exchange, Role, Spec, Wait};

/// The sizes, 1 B to 1 MB.
const SIZES: [usize; 7] = [1, 14, 100, 1 << 10, 16 << 10, 64 << 10, 1 << 20];
const WAITS: [Wait; 4] = [Wait::Blocking, Wait::Poll, Wait::Epoll, Wait::Busy];
/// Bytes of one burst of `stream`, or fewer where messages are small.
const BURST: usize = 32 << 20;
/// Messages of one burst at most.
const BURST_MESSAGES: usize = 50_000;

/// ipc-bench's `-c 1000000 -s 100`.
const IPC_COUNT: u64 = 1_000_000;
const IPC_SIZE: usize = 100;

/// IBM's patterns for SMC-R: request and answer.
const RR: [(usize, usize); 4] = [(1, 1), (200, 1000), (200, 32 << 10), (64 << 10, 64 << 10)];
/// And its stream: 20 MB one way, 1 byte back.
const STREAMING: usize = 20_000_000;

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
    cases
}

fn client(connections: usize, seconds: f64, most: u64) -> Role {
    Role::Exchange(Exchange { connections, seconds, most })
}

fn run(
    world: &World,
    spec: &Spec,
    connections: usize,
    seconds: f64,
    most: u64,
) -> Result<Measured> {
    let server = Role::ServeLines { connections };
    let client = client(connections, seconds, most);
    pair::run(world, spec, server, client, 1, Shown::Bytes(connections))
}

/// A case of its own pair of processes.
fn case(
    workload: &'static str,
    variant: String,
    measures: &[Measure],
    per: &'static str,
    tier: Tier,
    run: impl Fn(&mut World, f64) -> Result<(Vec<f64>, Option<Cpu>, Measured)> + 'static,
) -> Case {
    Case {
        workload,
        variant,
        modes: ALL,
        measures: measures.to_vec(),
        per,
        tier,
        needs: &[],
        obstacle: None,
        run: Box::new(move |world, seconds| {
            let (values, cpu, measured) = run(world, seconds)?;
            Ok(Outcome { values, cpu, proof: measured.proof })
        }),
    }
}

fn ping_pong(bytes: usize, wait: Wait, cores: &'static str, cpus: Vec<usize>) -> Case {
    let tier = match (bytes, wait, cores) {
        (14, Wait::Blocking, _) => Tier::Quick,
        (14, ..) | (1 | 0x400 | 0x10000 | 0x10_0000, Wait::Blocking, _) => Tier::Standard,
        _ => Tier::All,
    };
    let variant = format!("{}/{}/{cores}", size(bytes), wait.name());
    let spec = spec(bytes, bytes, bytes, wait, cpus);
    let measures = [cost("one way, median", "µs")];
    case("pingpong", variant, &measures, "message", tier, move |world, seconds| {
        let measured = run(world, &spec, 1, seconds, u64::MAX)?;
        Ok((vec![measured.done[0].one_way_us], measured.cpu(2.0), measured))
    })
}

fn stream(bytes: usize, wait: Wait, cores: &'static str, cpus: Vec<usize>) -> Case {
    let tier = match (bytes, wait, cores) {
        (0x10000, Wait::Blocking, "two-cores") => Tier::Quick,
        (0x10000, ..) | (1 | 100 | 0x400 | 0x4000 | 0x10_0000, Wait::Blocking, "two-cores") => {
            Tier::Standard
        }
        _ => Tier::All,
    };
    let variant = format!("{}/{}/{cores}", size(bytes), wait.name());
    let burst = bytes * (BURST / bytes).min(BURST_MESSAGES);
    let spec = spec(burst, 1, bytes, wait, cpus);
    case("stream", variant, &[rate("bandwidth", "MB/s")], "KB", tier, move |world, seconds| {
        let measured = run(world, &spec, 1, seconds, u64::MAX)?;
        let rate = measured.rate() * burst as f64 / 1e6;
        Ok((vec![rate], measured.cpu(burst as f64 / 1e3), measured))
    })
}

fn ipc() -> Case {
    let spec = spec(IPC_SIZE, IPC_SIZE, IPC_SIZE, Wait::Blocking, Vec::new());
    let measures = [rate("messages", "k/s")];
    case("ipc", String::new(), &measures, "message", Tier::Quick, move |world, seconds| {
        let measured = run(world, &spec, 1, seconds, IPC_COUNT)?;
        Ok((vec![measured.rate() / 1e3], measured.cpu(1.0), measured))
    })
}

fn rr(request: usize, answer: usize, connections: usize) -> Case {
    let workload = if connections == 1 { "rr1" } else { "rr10" };
    let tier = if (request, answer) == (1, 1) { Tier::Quick } else { Tier::Standard };
    let variant = format!("{}-{}", size(request), size(answer));
    let spec = spec(request, answer, request.max(answer), Wait::Blocking, Vec::new());
    let measures = [rate("transactions", "k/s"), cost("half a transaction, median", "µs")];
    case(workload, variant, &measures, "transaction", tier, move |world, seconds| {
        let measured = run(world, &spec, connections, seconds, u64::MAX)?;
        let times = measured.done[0].one_way_us;
        Ok((vec![measured.rate() / 1e3, times], measured.cpu(1.0), measured))
    })
}

fn streaming() -> Case {
    let spec = spec(STREAMING, 1, 64 << 10, Wait::Blocking, Vec::new());
    let measures = [rate("bandwidth", "MB/s")];
    case("streaming", String::new(), &measures, "KB", Tier::Quick, move |world, seconds| {
        let measured = run(world, &spec, 1, seconds, u64::MAX)?;
        let rate = measured.rate() * STREAMING as f64 / 1e6;
        Ok((vec![rate], measured.cpu(STREAMING as f64 / 1e3), measured))
    })
}

/// Several streams of one client to one server, each with two threads.
fn streams(connections: usize) -> Case {
    let spec = spec(BURST, 1, 64 << 10, Wait::Blocking, Vec::new());
    let (variant, measures) = (connections.to_string(), [rate("bandwidth", "MB/s")]);
    case("streams", variant, &measures, "KB", Tier::All, move |world, seconds| {
        let measured = run(world, &spec, connections, seconds, u64::MAX)?;
        let rate = measured.rate() * BURST as f64 / 1e6;
        Ok((vec![rate], measured.cpu(BURST as f64 / 1e3), measured))
    })
}
