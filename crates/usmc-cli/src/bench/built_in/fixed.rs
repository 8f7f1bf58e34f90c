//! Fixed costs: `ring`, the shared memory by itself, and `foreign`, what the library adds to calls it has no part in.

use super::spec;
use crate::bench::case::{Case, Outcome, Tier, cost};
use crate::bench::mode::{Mode, NO_UNIX};
use crate::bench::pair::{self, Part, Shown};
use crate::bench::part::spec::{Role, Spec, Wait};

/// Bytes of a message through the ring, as in sockperf's pattern.
const MESSAGE: usize = 14;

/// Both.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    vec![ring(cpus), foreign()]
}

fn ring(cpus: &[usize]) -> Case {
    let ends = [cpus[0], cpus[cpus.len() - 1]];
    let spec = spec(MESSAGE, MESSAGE, MESSAGE, Wait::Busy, ends.to_vec());
    Case {
        workload: "ring",
        variant: String::new(),
        modes: &[Mode::Usmc],
        measures: vec![cost("one way", "µs"), cost("one way, a bare word", "µs")],
        per: "message",
        tier: Tier::Quick,
        needs: &[],
        obstacle: (cpus.len() < 2).then(|| "needs two cores".to_owned()),
        run: Box::new(move |world, seconds| {
            let own = Spec { role: Role::Ring { seconds }, ..spec.clone() };
            let mut part = Part::start(world, "ring", &own)?;
            part.hear::<()>("begin")?;
            part.tell("go")?;
            part.hear::<()>("measured")?;
            part.tell("tell")?;
            let done = part.hear::<crate::bench::part::spec::Done>("done")?;
            part.tell("end")?;
            let how = "the ring itself; no sockets".to_owned();
            let proof = crate::bench::proof::Proof { how, ..Default::default() };
            let values = vec![done.one_way_us, done.further.first().copied().unwrap_or_default()];
            Ok(Outcome { values, cpu: None, proof })
        }),
    }
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
        run: Box::new(move |world, seconds| {
            let own = Spec { role: Role::Foreign { seconds }, ..spec.clone() };
            let client = Part::start(world, "program", &own)?;
            let mut measured = pair::go(world, &spec, &[], vec![client], Shown::OneThatLasts)?;
            let values = std::mem::take(&mut measured.done[0].further);
            Ok(Outcome { values, cpu: None, proof: measured.proof })
        }),
    }
}
