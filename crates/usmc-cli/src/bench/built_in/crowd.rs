//! Many connections: `fanin`, of which few are active, and `idle`, of which none is.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::spec;
use crate::bench::case::{Case, Outcome, Tier, cost};
use crate::bench::cpus;
use crate::bench::host::World;
use crate::bench::mode::{Mode, NO_UNIX};
use crate::bench::pair::{self, Part, Shown};
use crate::bench::part::spec::{Done, Hold, Role, Spec, Wait};
use crate::bench::proof::Wanted;

const SIZES: [usize; 5] = [1, 10, 100, 1000, 10_000];
/// Connections with requests, if there are so many.
const ACTIVE: usize = 10;
/// Bytes of a request, and of its answer.
const MESSAGE: usize = 100;
/// Exchanges that an inactive connection has had: it lasts, and changes over at its next use.
const SOME: usize = 2;
/// Exchanges after which it has changed over.
const ENOUGH: usize = 150;
/// Idle connections, as many as the target speaks of.
const IDLE: usize = 1000;
/// Idle connections that have had large messages, and how large these were.
const LARGE_IDLE: usize = 100;
const LARGE: usize = 64 << 10;
/// Descriptors of a process besides its connections.
const OTHERS: u64 = 64;

/// All of them.
pub fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = SIZES.into_iter().map(|n| fanin(n, SOME, "")).collect();
    cases.extend([1000, 10_000].map(|n| fanin(n, ENOUGH, "-in-shared-memory")));
    cases.push(idle(IDLE, MESSAGE, ""));
    cases.push(idle(LARGE_IDLE, LARGE, "-64KB"));
    cases
}

/// What is in the way of so many connections.
fn obstacle(connections: usize) -> Option<String> {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let wanted = connections as u64 + OTHERS;
    most.is_some_and(|most| most < wanted)
        .then(|| format!("needs {wanted} descriptors in a process; raise `ulimit -Hn`"))
}

/// Starts both, and waits until the client has its first connection.
fn start(world: &mut World, spec: &Spec, hold: &Hold) -> Result<Part> {
    pair::serve(world, spec, Role::ServeEvents, 1)?;
    let at = pair::addresses(world).into_iter().next().context("no server")?;
    let own = Spec { at, role: Role::Hold(hold.clone()), ..spec.clone() };
    let mut client = Part::start(world, "client", &own)?;
    client.hear::<()>("base")?;
    Ok(client)
}

fn fanin(connections: usize, before: usize, suffix: &str) -> Case {
    let spec = spec(MESSAGE, MESSAGE, MESSAGE, Wait::Epoll, Vec::new());
    let active = connections.min(ACTIVE);
    Case {
        workload: "fanin",
        variant: format!("{connections}{suffix}"),
        modes: NO_UNIX,
        measures: vec![cost("round trip, one of the active", "µs")],
        per: "message",
        tier: match (connections, before) {
            (10 | 1000, SOME) => Tier::Quick,
            (_, SOME) => Tier::Standard,
            _ => Tier::All,
        },
        needs: &[],
        obstacle: obstacle(connections),
        server: None,
        run: Box::new(move |world, seconds| {
            let hold = Hold { connections, active, before, seconds };
            let mut client = start(world, &spec, &hold)?;
            client.tell("go")?;
            // The first connection is one of them or was used as much.
            let shown = if connections > active { active + 1 } else { active };
            let measured = pair::go(world, &spec, vec![client], Shown::Bytes(shown))?;
            let each = 1e6 / measured.rate();
            let (cpu, proof) = (measured.cpu(2.0), measured.proof);
            Ok(Outcome::here(vec![each], cpu, proof))
        }),
    }
}

/// Connections that have had messages of so many bytes.
fn idle(connections: usize, message: usize, suffix: &str) -> Case {
    let spec = spec(message, message, message, Wait::Epoll, Vec::new());
    Case {
        workload: "idle",
        variant: format!("{connections}{suffix}"),
        modes: NO_UNIX,
        measures: vec![cost("CPU of both sides", "ms/s"), cost("resident, per connection", "KiB")],
        per: "connection",
        tier: if message == MESSAGE { Tier::Quick } else { Tier::All },
        needs: &[],
        obstacle: obstacle(connections),
        server: None,
        run: Box::new(move |world, seconds| run_idle(world, &spec, connections, seconds)),
    }
}

fn run_idle(world: &mut World, spec: &Spec, idle: usize, seconds: f64) -> Result<Outcome> {
    let hold = Hold { connections: idle + 1, active: 0, before: ENOUGH, seconds };
    let mut client = start(world, spec, &hold)?;
    let pids = [world.servers(), vec![client.pid()]].concat();
    let base = cpus::resident(&pids);
    client.tell("go")?;
    client.hear::<()>("begin")?;
    client.tell("go")?;
    // Who spun after the last answer is asleep by then.
    rest(world, 0.1)?;
    let (cpu, begin) = (cpus::seconds(&pids), Instant::now());
    rest(world, seconds)?;
    let cpu = (cpus::seconds(&pids) - cpu) / begin.elapsed().as_secs_f64();
    let resident = cpus::resident(&pids) - base;
    let wanted = Wanted::All(if world.mode == Mode::Usmc { idle + 1 } else { 0 });
    let proof = world.judge(&world.look(&pids, 0)?, wanted)?;
    client.tell("over")?;
    client.hear::<()>("measured")?;
    client.tell("tell")?;
    client.hear::<Done>("done")?;
    let values = vec![cpu * 1e3, resident / 1024.0 / idle as f64];
    Ok(Outcome::here(values, None, proof))
}

/// Waits, unless somebody wants us to end.
fn rest(world: &World, seconds: f64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < end {
        world.ending.check()?;
        let left = end.saturating_duration_since(Instant::now());
        thread::sleep(left.min(Duration::from_millis(100)));
    }
    Ok(())
}
