//! Fixed costs: `ring`, the shared memory by itself, a message or streams, and `foreign`, what the library adds to calls it has no part in.

use anyhow::Result;

use super::spec;
use crate::bench::case::{Case, Measure, Outcome, Tier, cost, rate, size};
use crate::bench::host::World;
use crate::bench::mode::{Mode, NO_UNIX};
use crate::bench::pair::{self, Part, Shown};
use crate::bench::part::spec::{Done, Role, Spec, Wait};
use crate::bench::proof::Proof;

/// Bytes of a message through the ring, as in sockperf's pattern.
const MESSAGE: usize = 14;

/// Streams of `ring/stream`, and the parts in which their bytes are published.
const STREAMS: [u32; 3] = [1, 8, 64];
const PARTS: [usize; 3] = [16 << 10, 64 << 10, 256 << 10];

/// All of them.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    let ends = [cpus[0], cpus[cpus.len() - 1]];
    let flows = STREAMS.iter().flat_map(|n| PARTS.iter().map(move |part| (*n, *part)));
    let mut cases = vec![ring(&ends)];
    cases.extend(flows.map(|(streams, part)| flow(&ends, streams, part)));
    cases.push(foreign());
    cases
}

fn ring(ends: &[usize]) -> Case {
    let spec = spec(MESSAGE, MESSAGE, MESSAGE, Wait::Busy, ends.to_vec());
    let measures = vec![cost("one way", "µs"), cost("one way, a bare word", "µs")];
    let run = move |world: &mut World, seconds| {
        let done = by_itself(world, &Spec { role: Role::Ring { seconds }, ..spec.clone() })?;
        Ok(vec![done.one_way_us, done.further.first().copied().unwrap_or_default()])
    };
    bare(ends, String::new(), measures, Tier::Quick, run)
}

fn flow(ends: &[usize], streams: u32, part: usize) -> Case {
    let spec = spec(part, part, part, Wait::Busy, ends.to_vec());
    let variant = format!("stream/{streams}/{}", size(part));
    let run = move |world: &mut World, seconds| {
        let own = Spec { role: Role::Flow { streams, seconds }, ..spec.clone() };
        let done = by_itself(world, &own)?;
        Ok(vec![done.operations as f64 / done.seconds / 1e9])
    };
    bare(ends, variant, vec![rate("bandwidth", "GB/s")], Tier::All, run)
}

/// A case of rings by themselves.
fn bare(
    ends: &[usize],
    variant: String,
    measures: Vec<Measure>,
    tier: Tier,
    run: impl Fn(&mut World, f64) -> Result<Vec<f64>> + 'static,
) -> Case {
    Case {
        workload: "ring",
        variant,
        modes: &[Mode::Usmc],
        measures,
        per: "message",
        tier,
        needs: &[],
        obstacle: (ends[0] == ends[1]).then(|| "needs two cores".to_owned()),
        server: None,
        run: Box::new(move |world, seconds| {
            let how = "the ring itself; no sockets".to_owned();
            let proof = Proof { how, ..Proof::default() };
            Ok(Outcome::here(run(world, seconds)?, None, proof))
        }),
    }
}

/// Runs a part that has both ends.
fn by_itself(world: &World, spec: &Spec) -> Result<Done> {
    let mut part = Part::start(world, "ring", spec)?;
    part.hear::<()>("begin")?;
    part.tell("go")?;
    part.hear::<()>("measured")?;
    part.tell("tell")?;
    let done = part.hear::<Done>("done")?;
    part.tell("end")?;
    Ok(done)
}

fn foreign() -> Case {
    let spec = spec(MESSAGE, MESSAGE, MESSAGE, Wait::Blocking, Vec::new());
    Case {
        workload: "foreign",
        variant: String::new(),
        modes: NO_UNIX,
        measures: vec![cost("read(2) of /dev/null", "ns"), cost("write(2) to /dev/null", "ns")],
        per: "call",
        tier: Tier::Quick,
        needs: &[],
        obstacle: None,
        server: None,
        run: Box::new(move |world, seconds| {
            let own = Spec { role: Role::Foreign { seconds }, ..spec.clone() };
            let client = Part::start(world, "program", &own)?;
            let mut measured = pair::go(world, &spec, vec![client], Shown::OneThatLasts)?;
            let values = std::mem::take(&mut measured.done[0].further);
            Ok(Outcome::here(values, None, measured.proof))
        }),
    }
}
