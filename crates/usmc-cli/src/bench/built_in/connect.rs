//! `connect`: connect, one request, its answer, close. Within a machine such connections stay TCP, so that this shows what it costs to
//! be ready to leave it. Between agents they are by RDMA.

use super::spec;
use crate::bench::case::{Case, Outcome, Tier, cost, rate};
use crate::bench::mode::NO_UNIX;
use crate::bench::pair::{self, Shown};
use crate::bench::part::spec::{Brief, Role, Wait};
use crate::bench::proof::Wanted;

const CONCURRENCY: [usize; 6] = [1, 2, 5, 10, 200, 2000];
const THREADS: [usize; 3] = [1, 4, 8];
/// Bytes of the request and of its answer.
const REQUEST: usize = 64;
const ANSWER: usize = 1024;

/// Each concurrency with as many threads as can have a connection each.
pub fn cases() -> Vec<Case> {
    let all = CONCURRENCY.into_iter().flat_map(|c| THREADS.map(|t| (c, t)));
    all.filter(|(c, t)| t <= c).map(|(c, t)| case(c, t)).collect()
}

/// That between agents.
pub fn by_rdma() -> Case {
    case(1, 1)
}

fn case(concurrency: usize, threads: usize) -> Case {
    let spec = spec(REQUEST, ANSWER, REQUEST, Wait::Epoll, Vec::new());
    let server_spec = spec.clone();
    let tier = match (concurrency, threads) {
        (1 | 200, 1) => Tier::Quick,
        _ => Tier::Standard,
    };
    Case {
        workload: "connect",
        variant: format!("c{concurrency}-t{threads}"),
        modes: NO_UNIX,
        measures: vec![rate("connections", "k/s"), cost("CPU, both sides", "µs")],
        per: "connection",
        tier,
        needs: &[],
        obstacle: None,
        server: Some(Box::new(move |world| {
            pair::serve(world, &server_spec, Role::ServeEvents, 1)?;
            Ok(Wanted::Some)
        })),
        run: Box::new(move |world, seconds| {
            let client = Role::Brief(Brief { concurrency, threads, seconds });
            let measured = pair::clients(world, &spec, &client, Shown::OneThatLasts)?;
            let cpu = measured.cpu(1.0);
            let both = cpu.map_or(0.0, |cpu| (cpu.client_ns + cpu.server_ns) / 1e3);
            let values = vec![measured.rate() / 1e3, both];
            let ([frames, wakes], agents) = (measured.counts(1.0), measured.agents(1.0));
            Ok(Outcome { values, cpu, frames, wakes, agents, proof: measured.proof })
        }),
    }
}
