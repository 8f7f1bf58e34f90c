//! `usmc bench`: compares TCP, UNIX sockets and uSMC on this machine.

use std::ffi::c_int;
use std::fs;
use std::io::{self, Write};
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::process::{Resource, Rlimit, getpid, getrlimit, set_child_subreaper, setrlimit};

use crate::bench::case::{Case, End, Tier};
use crate::bench::control::{PORT, SECONDS};
use crate::bench::cores::{Confined, Cores};
use crate::bench::ending::Ending;
use crate::bench::far::Far;
use crate::bench::host::Ends;
use crate::bench::machine::Machine;
use crate::bench::mode::Way;
use crate::bench::record::{FORMAT, Missed, Record, ServerRecord};
use crate::bench::sweep::{Place, Sweep};
use crate::bench::table::{self, Style};
use crate::bench::{
    How, Step, between, catalogue, cpus, highlights, is_wanted, measure, obstacle, plot, runs,
    serving, tell,
};
use crate::config::{Config, ConfigArgs};
use crate::{library, proc};

/// Compare TCP, UNIX sockets and uSMC on this machine
///
/// Each round measures all of them in turn. Connections that were not where their column says, as the library itself
/// tells, are an error and no figure.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Exit status: 0 all was measured, also where a target is missed; 1 something failed or was \
                        interrupted.\n\
                        Example: usmc bench --quick --plot bench.svg pingpong redis 'nginx/close/*'"
)]
pub struct Args {
    /// Workloads, or cases as --list shows them; * stands for anything [default: most of all]
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Show what can be measured here, and measure nothing
    #[arg(short, long)]
    list: bool,
    /// Fewer cases, two rounds, short runs
    #[arg(short, long)]
    quick: bool,
    /// All cases of each workload
    #[arg(short, long, conflicts_with = "quick")]
    all: bool,
    /// Those few cases that have words for people, and a plot of these figures alone, by their words
    #[arg(long, conflicts_with_all = ["all", "vm", "rdma", "sweep", "beside", "cores"])]
    highlights: bool,
    /// Measure between two machines: clients here, servers where `usmc bench --serve ADDRESS` runs
    ///
    /// Frames on the wire are counted, too. The workloads are fewer: --list with this option shows them.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = place)]
    #[arg(conflicts_with_all = ["all", "beside", "cores"])]
    vm: Option<SocketAddrV4>,
    /// As --vm, between two hosts with agents: all connections of uSMC have to be by RDMA
    ///
    /// What the agents of both hosts do meanwhile is counted, too: posts, requests (WRs), completions, CPU time.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = place)]
    #[arg(conflicts_with_all = ["all", "beside", "cores", "vm"])]
    rdma: Option<SocketAddrV4>,
    /// Start the servers of `usmc bench --vm ADDRESS`, or --rdma, in another machine, at this address of this one, until Ctrl-C
    ///
    /// Whoever reaches the port can have the fixed workloads run, one client at a time. Nothing listens at another address.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = place)]
    #[arg(exclusive = true)]
    serve: Option<SocketAddrV4>,
    /// Rounds of each case [default: 5; quick: 2]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Length of each run; programs that know whole seconds only run longer [default: 1; quick: 0.2]
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    duration: Option<f64>,
    /// Measure uSMC with each value of a setting: busy (the spin), window (the ring), device, or VARIABLE=VALUE,…
    ///
    /// `device` compares the memory of one host with a region, which is made for each run. `default` among the values leaves the setting to the library. TCP is measured once in each round.
    #[arg(long, value_name = "SETTING")]
    sweep: Option<Sweep>,
    /// Measure uSMC by default and with these profiles, in turn: comma list; see usmc.toml(5)
    #[arg(long, value_name = "NAME,…", value_parser = Sweep::of_profiles)]
    #[arg(conflicts_with_all = ["sweep", "vm", "rdma"])]
    profile: Option<Sweep>,
    /// So many programs that only compute run beside each run; several numbers are measured one after the other
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0")]
    beside: Vec<u16>,
    /// All programs together have so many CPUs: all, a number, or a share of one as 0.5; several one after the other
    ///
    /// A share is a quota in a group of processes of its own, which only root may make.
    #[arg(long, value_name = "CPUS,…", value_delimiter = ',', default_value = "all")]
    cores: Vec<Cores>,
    /// Write all figures there
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    json: Option<PathBuf>,
    /// Measure nothing: show what an earlier run's --json wrote there, as a table, and by --plot
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    #[arg(conflicts_with_all = ["workloads", "list", "quick", "all", "vm", "rdma", "rounds", "duration", "sweep", "beside", "cores", "json"])]
    from: Option<PathBuf>,
    /// Draw a plot there, in SVG
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    plot: Option<PathBuf>,
    /// How the table is drawn
    #[arg(long, value_name = "STYLE", default_value = "text")]
    table: Style,
}

impl Args {
    /// Where the servers are, if in another machine, and how uSMC gets there.
    fn far(&self) -> Option<(SocketAddrV4, Way)> {
        let by_rdma = self.rdma.map(|at| (at, Way::Rdma));
        by_rdma.or(self.vm.map(|at| (at, Way::Any)))
    }
}

fn place(text: &str) -> Result<SocketAddrV4, String> {
    let alone = text.parse().map(|address| SocketAddrV4::new(address, PORT)).ok();
    match alone.or_else(|| text.parse().ok()) {
        Some(at)
            if at.ip().is_unspecified() || at.ip().is_multicast() || at.ip().is_broadcast() =>
        {
            Err("it has to be one address, by which the other machine reaches this one".to_owned())
        }
        Some(at) => Ok(at),
        None => Err("it is no IPv4 address, with or without :PORT".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if SECONDS.contains(&seconds) => Ok(seconds),
        _ => Err("it is not between 0.01 and 3600".to_owned()),
    }
}

/// Measures what is wanted and shows it.
///
/// # Errors
/// When there is nothing to measure, or no place for its files.
pub fn run(args: &Args) -> Result<c_int> {
    if let Some(at) = args.serve {
        return serve(at);
    }
    if let Some(file) = &args.from {
        return show(args, &earlier(file)?);
    }
    let cases = chosen(args)?;
    check_profiles(args)?;
    if args.list {
        return list(args, &cases);
    }
    // Without it every run would fail; with words it fails once.
    library::find()?;
    for file in args.json.iter().chain(&args.plot) {
        write(file, "")?;
    }
    let ending = prepare()?;
    let ends = match args.far() {
        Some((at, way)) => {
            check_own_process()?;
            Ends::Client(Rc::new(Far::connect(at, way, &ending)?))
        }
        None => Ends::Both,
    };
    let record = measure_all(args, &ends, &ending)?;
    drop(ends);
    show(args, &record)
}

/// What a run wrote there.
fn earlier(file: &Path) -> Result<Record> {
    let shown = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    let record: Record = serde_json::from_str(&text)
        .with_context(|| format!("{shown} is nothing that `usmc bench --json` wrote"))?;
    if record.format != FORMAT {
        bail!("{shown} has format {}, this version of usmc reads format {FORMAT}", record.format);
    }
    Ok(record)
}

/// Makes this process one that starts programs.
fn prepare() -> Result<Ending> {
    let ending = Ending::listen()?;
    // What a server leaves behind becomes ours, and is ended.
    set_child_subreaper(Some(getpid())).context("prctl")?;
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    Ok(ending)
}

fn serve(at: SocketAddrV4) -> Result<c_int> {
    library::find()?;
    check_own_process()?;
    serving::serve(at, &prepare()?)?;
    Ok(0)
}

/// What two machines say to each other about a run is not to be a part of it.
fn check_own_process() -> Result<()> {
    if !proc::record_files(getpid().as_raw_nonzero().get() as u32).is_empty() {
        bail!(
            "uSMC is in this process; start `usmc bench` without `usmc run`, it starts the programs so"
        );
    }
    Ok(())
}

/// Each run would fail by a name that is none.
fn check_profiles(args: &Args) -> Result<()> {
    let Some(Sweep(settings)) = &args.profile else { return Ok(()) };
    let config = Config::load_files(&ConfigArgs::default())?;
    let names = settings.iter().filter_map(|setting| setting.value.as_ref());
    names.into_iter().try_for_each(|name| config.profile_named(name, "--profile").map(drop))
}

/// The cases that are wanted.
fn chosen(args: &Args) -> Result<Vec<Case>> {
    let cases = all(args);
    for pattern in &args.workloads {
        let one = std::slice::from_ref(pattern);
        if !cases.iter().any(|case| is_wanted(case, one, Tier::All)) {
            let list = match args.far() {
                Some((_, Way::Any)) => "--vm ADDRESS --list",
                Some((_, Way::Rdma)) => "--rdma ADDRESS --list",
                None => "--list --all",
            };
            bail!("there is no workload {pattern}; `usmc bench {list}` shows them");
        }
    }
    let cases = wanted(args, cases);
    if cases.is_empty() {
        bail!(
            "nothing of that is run by --quick or --highlights; leave them out, or name a case as --list shows it"
        );
    }
    Ok(cases)
}

/// All that there is, with the CPUs that can be used now.
fn all(args: &Args) -> Vec<Case> {
    match args.far() {
        Some((_, way)) => between(way),
        None => catalogue(&cpus::usable()),
    }
}

fn wanted(args: &Args, mut cases: Vec<Case>) -> Vec<Case> {
    let tier = match (args.quick, args.all) {
        (true, _) => Tier::Quick,
        (_, true) => Tier::All,
        _ => Tier::Standard,
    };
    cases.retain(|case| match args.highlights {
        true => case.has_highlight() && is_wanted(case, &args.workloads, Tier::All),
        false => is_wanted(case, &args.workloads, tier),
    });
    cases
}

/// The ends that are here.
fn ends_of(args: &Args) -> &'static [End] {
    if args.far().is_some() { &[End::Client] } else { &[End::Client, End::Server] }
}

fn list(args: &Args, cases: &[Case]) -> Result<c_int> {
    let mut text = String::new();
    for case in cases {
        let measures: Vec<&str> = case.measures.iter().map(|measure| measure.name).collect();
        let modes: Vec<String> = case.modes.iter().map(ToString::to_string).collect();
        let note = obstacle(case, ends_of(args))
            .map(|why| format!("  [skipped: {why}]"))
            .unwrap_or_default();
        let (name, modes, measures) = (case.name(), modes.join(" "), measures.join(", "));
        text += &format!("{name:<36} {modes:<14} {measures}{note}\n");
    }
    io::stdout().write_all(text.as_bytes()).context("cannot write the list")?;
    Ok(0)
}

fn measure_all(args: &Args, ends: &Ends, ending: &Ending) -> Result<Record> {
    let rounds = usize::from(args.rounds.unwrap_or(if args.quick { 2 } else { 5 }));
    let seconds = args.duration.unwrap_or(if args.quick { 0.2 } else { 1.0 });
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut record = Record {
        format: FORMAT,
        usmc: env!("CARGO_PKG_VERSION").to_owned(),
        started,
        machine: Machine::here(),
        server: match ends {
            Ends::Client(far) => Some(ServerRecord {
                address: far.address,
                interface: far.wire.interface.clone(),
                machine: far.greeting.machine.clone(),
            }),
            _ => None,
        },
        rounds,
        seconds,
        interrupted: false,
        cases: Vec::new(),
        skipped: Vec::new(),
        failed: Vec::new(),
    };
    tell(&format!("Machine: {}", record.machine.shown()));
    if let Some(server) = &record.server {
        let (address, interface) = (server.address, &server.interface);
        tell(&format!("Server at {address} (by {interface}): {}", server.machine.shown()));
    }
    if record.machine.is_busy() {
        tell(&format!(
            "Other programs are busy here (load {}): expect noise.",
            record.machine.load
        ));
    }
    let settings = args.sweep.as_ref().or(args.profile.as_ref());
    let settings = settings.map_or(&[][..], |sweep| &sweep.0);
    'all: for &cores in &args.cores {
        let _confined = Confined::enter(cores)?;
        // On fewer CPUs there may be fewer cases.
        let ready = ready(args, wanted(args, all(args)), ends, &mut record);
        for &beside in &args.beside {
            let place = Place { cores, beside: beside.into() };
            measure_there(
                &ready,
                How { settings, place, ends, rounds, seconds },
                ending,
                &mut record,
            );
            if ending.has_come() {
                record.interrupted = true;
                break 'all;
            }
        }
    }
    record.judge();
    Ok(record)
}

/// The cases that can run; says why the others cannot, once for each reason.
fn ready(args: &Args, cases: Vec<Case>, ends: &Ends, record: &mut Record) -> Vec<Case> {
    let there = match ends {
        Ends::Client(far) => &far.greeting.obstacles[..],
        _ => &[],
    };
    let obstacle = |case: &Case| {
        let far = || there.iter().find(|missed| missed.case == case.name());
        let far = || far().map(|missed| format!("in the other machine {}", missed.why));
        obstacle(case, ends_of(args)).or_else(far)
    };
    let mut told = Vec::new();
    let mut ready = Vec::new();
    for case in cases {
        let Some(why) = obstacle(&case) else {
            ready.push(case);
            continue;
        };
        let missed = Missed { case: case.name(), why };
        if record.skipped.contains(&missed) {
            continue;
        }
        if !told.contains(&missed.why) {
            tell(&format!("{}: skipped: {}", case.workload, missed.why));
            told.push(missed.why.clone());
        }
        record.skipped.push(missed);
    }
    ready
}

/// Measures the cases at one place.
fn measure_there(cases: &[Case], how: How<'_>, ending: &Ending, record: &mut Record) {
    let rounds = how.rounds;
    let runs_of = |case: &Case| runs(case, how.settings).len();
    let bar = progress(cases.iter().map(|case| runs_of(case) * rounds).sum());
    let suffix = how.place.suffix();
    for case in cases {
        let before = bar.position();
        let ended = measure(case, how, ending, &mut |step| match step {
            Step::Run { round, mode } => {
                let name = case.name();
                bar.set_message(format!("{name}{suffix}, round {round} of {rounds}, {mode}"));
                bar.tick();
            }
            Step::Round => bar.inc(runs_of(case) as u64),
        });
        bar.set_position(before + (runs_of(case) * rounds) as u64);
        if let Some(missed) = ended.failure {
            bar.suspend(|| tell(&format!("{}: failed: {}", missed.case, missed.why)));
            record.failed.push(missed);
        }
        record.cases.extend(ended.figures);
        if ending.has_come() {
            break;
        }
    }
    bar.finish_and_clear();
}

/// Drawn on a terminal only.
fn progress(runs: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(runs as u64), ProgressDrawTarget::stderr());
    let form = "{bar:30} {pos}/{len}  {elapsed} (about {eta} left)  {wide_msg}";
    if let Ok(style) = ProgressStyle::with_template(form) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

fn show(args: &Args, record: &Record) -> Result<c_int> {
    let mut text = String::new();
    if !record.cases.is_empty() {
        text = format!("{}\n", table::table(record, args.table));
        text += &table::note(record);
    }
    let missed: Vec<String> = record
        .missed()
        .map(|(case, measure, verdict)| {
            format!("  {}: {}: target {}\n", case.name, measure.name, verdict.target)
        })
        .collect();
    if !missed.is_empty() {
        text += &format!("\nTargets missed:\n{}", missed.concat());
    }
    // Files first: standard output may be gone.
    if let Some(file) = &args.json {
        write(file, &(serde_json::to_string_pretty(record).context("JSON")? + "\n"))?;
    }
    if let Some(file) = &args.plot {
        let svg = if args.highlights { highlights::svg(record)? } else { plot::svg(record)? };
        write(file, &svg)?;
    }
    io::stdout().write_all(text.as_bytes()).context("cannot write the table")?;
    if record.interrupted {
        tell("usmc: interrupted: the figures above are of what was measured before");
    }
    if !record.failed.is_empty() {
        let names: Vec<&str> = record.failed.iter().map(|missed| &missed.case[..]).collect();
        tell(&format!("usmc: failed, see above: {}", names.join(", ")));
    }
    Ok(c_int::from(record.interrupted || !record.failed.is_empty()))
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
