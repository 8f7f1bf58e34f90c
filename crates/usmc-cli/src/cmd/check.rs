//! `usmc check`: says in words whether this machine, user and directory can do SMC-D, and what to do
//! where they cannot. The last word has a live connection between two processes.

mod between_hosts;
mod command;
mod declines;
mod directory;
mod live;
mod machine;
mod reasons;
mod regions;

use std::ffi::{OsStr, OsString, c_int};
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};

use between_hosts::Target;

use crate::config::{Config, ConfigArgs};
use crate::{differences, library};

/// Say whether SMC-D works here, and what is in the way
///
/// Looks at the kernel, the limits, the configuration, the ISM directory and the library, then lets two
/// processes talk to each other under it. Nothing is changed, except that the directory is created as
/// the first program would. A program that is named is looked at, too: whether the library gets into it,
/// and which of the known differences from TCP it may meet. For HOST:PORT one connection is made under the library, and it is
/// said what that is by, and why it is TCP where it is.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Exit status: 0 SMC-D works, and the connection to HOST:PORT left TCP; 1 one of them not."
)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print all known differences from TCP, and check nothing
    #[arg(long, exclusive = true)]
    differences: bool,
    /// Print the codes with which peers decline SMC, and check nothing
    #[arg(long, exclusive = true)]
    declines: bool,
    /// Print the reasons for which connections are TCP, and what can be done about each, and check nothing
    #[arg(long, exclusive = true)]
    reasons: bool,
    /// Program to look at; or HOST:PORT, where a connection is made, which moves no byte
    #[arg(value_name = "PROGRAM|HOST:PORT")]
    what: Option<OsString>,
}

/// How much a finding matters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Weight {
    /// As it should be.
    Good,
    /// Worth knowing.
    Note,
    /// Keeps SMC-D from working.
    Failure,
}

/// One finding.
#[derive(Debug)]
struct Finding {
    weight: Weight,
    /// The fact.
    fact: String,
    /// What to do about it.
    remedy: Option<String>,
}

impl Finding {
    fn good(fact: impl Into<String>) -> Finding {
        Finding { weight: Weight::Good, fact: fact.into(), remedy: None }
    }

    fn note(fact: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { weight: Weight::Note, fact: fact.into(), remedy: Some(remedy.into()) }
    }

    fn failure(fact: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { weight: Weight::Failure, fact: fact.into(), remedy: Some(remedy.into()) }
    }
}

/// Prints findings as they are made, and counts failures.
struct Report<W> {
    out: W,
    failures: usize,
    /// Those that are about another place than this machine.
    failures_elsewhere: usize,
}

impl<W: Write> Report<W> {
    fn title(&mut self, title: impl Display) -> io::Result<()> {
        writeln!(self.out, "{title}")
    }

    fn add(&mut self, findings: impl IntoIterator<Item = Finding>) -> io::Result<()> {
        for finding in findings {
            let label = match finding.weight {
                Weight::Good => "ok  ",
                Weight::Note => "note",
                Weight::Failure => "FAIL",
            };
            writeln!(self.out, "  {label}  {}", finding.fact)?;
            if let Some(remedy) = finding.remedy {
                writeln!(self.out, "        -> {remedy}")?;
            }
            self.failures += usize::from(finding.weight == Weight::Failure);
        }
        Ok(())
    }
}

/// Checks everything and prints it.
///
/// # Errors
/// When the output cannot be written.
pub fn run(args: &Args) -> Result<c_int> {
    let done = match args {
        Args { differences: true, .. } => list_differences(),
        Args { declines: true, .. } => declines::list(&mut io::stdout().lock()).map(|()| 0),
        Args { reasons: true, .. } => reasons::list(&mut io::stdout().lock()).map(|()| 0),
        _ => check(args),
    };
    done.context("cannot write the report; free the output's disk")
}

fn list_differences() -> io::Result<c_int> {
    let mut out = io::stdout().lock();
    for difference in differences::all() {
        writeln!(out, "{difference}\n")?;
    }
    Ok(0)
}

fn check(args: &Args) -> io::Result<c_int> {
    let mut report = Report { out: io::stdout().lock(), failures: 0, failures_elsewhere: 0 };
    report.title("Machine")?;
    report.add(machine::findings())?;
    report.title("Configuration")?;
    match Config::load(&args.config) {
        Ok(config) => {
            report.add(configuration(&config))?;
            check_configured(&config, args.what.as_deref(), &mut report)?;
        }
        Err(refusal) => {
            let remedy = "correct it; `usmc run` refuses to start programs until then";
            report.add([Finding::failure(format!("{refusal:#}"), remedy)])?;
        }
    }
    let uid = rustix::process::geteuid().as_raw();
    match report.failures {
        0 => report.title(format_args!("SMC-D works here for user {uid}."))?,
        1 => report.title(format_args!(
            "SMC-D does not work here for user {uid}: the failure above is in the way. \
             Programs run on TCP."
        ))?,
        n => report.title(format_args!(
            "SMC-D does not work here for user {uid}: {n} failures above are in the way. \
             Programs run on TCP."
        ))?,
    }
    Ok(c_int::from(report.failures + report.failures_elsewhere > 0))
}

/// What depends on the configuration: directory, library, and both at work.
fn check_configured<W: Write>(
    config: &Config,
    name: Option<&OsStr>,
    report: &mut Report<W>,
) -> io::Result<()> {
    let dir = config.ism_dir();
    report.title(format_args!("ISM directory {}", dir.display()))?;
    let before = report.failures;
    report.add(directory::findings(&dir, config.text("ism_dir").is_none()))?;
    let usable = report.failures == before;

    report.title("Regions")?;
    report.add(regions::findings(config.text("regions").unwrap_or("auto")))?;

    report.title("Library")?;
    let library = match library::find() {
        Ok(library) => library,
        Err(problem) => {
            let remedy = "then run `usmc check` again";
            return report.add([Finding::failure(format!("{problem:#}"), remedy)]);
        }
    };
    let probe = live::probe();
    let (loaded, probe) = match probe {
        Ok(probe) => (live::loads(&probe, &library), Some(probe)),
        Err(untried) => (untried, None),
    };
    let probe = probe.filter(|_| loaded.weight == Weight::Good);
    report.add([loaded])?;
    report.add(live::loads_narrow(&library))?;
    let target = name.and_then(OsStr::to_str).and_then(Target::of);
    if let Some(name) = name.filter(|_| target.is_none()) {
        report.title(format_args!("Program {}", name.display()))?;
        report.add(command::findings(name, &library))?;
    }
    if let Some(probe) = probe.as_ref().filter(|_| usable) {
        report.title("Two processes on 127.0.0.1")?;
        report.add([live::connection(probe, config, &library)])?;
    }
    report.title("Agents of RDMA")?;
    report.add(between_hosts::agents(&dir))?;
    if let (Some(target), Some(probe)) = (target, probe) {
        report.title(format_args!("Connection to {target}"))?;
        let before = report.failures;
        between_hosts::check(&target, &probe, (config, &library), report)?;
        report.failures_elsewhere = std::mem::replace(&mut report.failures, before) - before;
    }
    Ok(())
}

fn configuration(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    if config.files.is_empty() {
        findings.push(Finding::good("no configuration file; see usmc.toml(5) to make one"));
    }
    let read = |path: &Path| Finding::good(format!("read {}", path.display()));
    findings.extend(config.files.iter().map(|path| read(path)));
    if let Some(path) = &config.skipped {
        let fact = format!("{} is skipped: this user may not read it", path.display());
        findings
            .push(Finding::note(fact, "set HOME or XDG_CONFIG_HOME to this user's own directory"));
    }
    for (key, value) in config.iter() {
        let said = match value {
            Some(v) if v.text.is_empty() => format!("{} is as by default ({})", key.name, v.source),
            Some(v) => format!("{} = {} ({})", key.name, v.text, v.source),
            None => continue,
        };
        findings.push(Finding::good(said));
    }
    if config.iter().all(|(_, value)| value.is_none()) {
        findings.push(Finding::good("every value is the default"));
    }
    if config.is_off() {
        findings.push(Finding::failure(
            "uSMC is switched off",
            "take `off` back where it is said, see above",
        ));
    }
    findings
}
