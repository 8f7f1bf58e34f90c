//! `oversubscribed`: more busy processes than cores. Four pairs on two cores, whatever the machine has.

use super::spec;
use crate::bench::case::{Case, Measure, Outcome, Tier, rate};
use crate::bench::mode::ALL;
use crate::bench::pair::{self, Shown};
use crate::bench::part::spec::{Exchange, Role, Wait};

const PAIRS: usize = 4;
/// Bytes of a burst of the stream, and of its messages.
const BURST: usize = 8 << 20;
const CHUNK: usize = 64 << 10;

/// Messages by blocking calls and by epoll, and a stream.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    let cpus = [cpus[0], cpus[cpus.len() - 1]].to_vec();
    let messages = |wait| (100, 100, 100, wait, rate("messages", "k/s"));
    let stream = (BURST, 1, CHUNK, Wait::Blocking, rate("bandwidth", "MB/s"));
    let all = [
        ("100B-blocking", messages(Wait::Blocking), Tier::Quick),
        ("100B-epoll", messages(Wait::Epoll), Tier::Standard),
        ("stream-64KB", stream, Tier::Standard),
    ];
    all.into_iter().map(|(name, what, tier)| case(name, what, tier, &cpus)).collect()
}

type What = (usize, usize, usize, Wait, Measure);

fn case(name: &'static str, what: What, tier: Tier, cpus: &[usize]) -> Case {
    let (request, answer, chunk, wait, measure) = what;
    let spec = spec(request, answer, chunk, wait, cpus.to_vec());
    let is_stream = request == BURST;
    Case {
        workload: "oversubscribed",
        variant: name.to_owned(),
        modes: ALL,
        measures: vec![measure],
        per: if is_stream { "KB" } else { "message" },
        tier,
        needs: &[],
        obstacle: None,
        server: None,
        run: Box::new(move |world, seconds| {
            let client =
                Role::Exchange(Exchange { connections: 1, seconds, most: u64::MAX, pause_us: 0 });
            let server = Role::ServeLines { connections: 1 };
            let measured = pair::run(world, &spec, &server, &client, PAIRS, Shown::Bytes(1))?;
            let (scale, parts) = match is_stream {
                true => (request as f64 / 1e6, request as f64 / 1e3),
                false => (2.0 / 1e3, 2.0),
            };
            let values = vec![measured.rate() * scale];
            let cpu = measured.cpu(parts);
            Ok(Outcome::here(values, cpu, measured.proof))
        }),
    }
}
