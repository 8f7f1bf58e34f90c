//! `usmc check`: says in words whether this machine, user and directory can do SMC-D, and what to do
//! where they cannot. The last word has a live connection between two processes.

mod between_hosts;
mod command;
mod declines;
mod directory;
mod live;
mod machine;
pub mod meet;
mod process;
mod reasons;
mod regions;
mod report;

use std::ffi::{OsStr, OsString, c_int};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};

use between_hosts::Target;
use report::{Finding, Report, Style};

use crate::config::{self, Config, ConfigArgs};
use crate::{differences, library};

pub use command::is_served;
pub use directory::findings as of_directory;

/// Say whether SMC-D works here, and what is in the way
///
/// Looks at the kernel, the limits, the configuration, the ISM directory and the library, then lets two
/// processes talk to each other under it. Nothing is changed, except that the directory is created as
/// the first program would. A program that is named is looked at, too: whether the library gets into it,
/// and whether it may meet known differences from TCP. For HOST:PORT one connection is made under the library, and it is
/// said what that is by, and why it is TCP where it is. --serve in one place and --connect in another find out, step by step, what is
/// in the way between these two.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Exit status: 0 SMC-D works, the program can leave TCP, the connection has left it; 1 one of them not."
)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print all known differences from TCP, and check nothing; with a program, those that it may meet
    #[arg(long, conflicts_with_all = ["serve", "connect"])]
    differences: bool,
    /// Print the codes with which peers decline SMC, and check nothing
    #[arg(long, exclusive = true)]
    declines: bool,
    /// Print the reasons for which connections are TCP, and what can be done about each, and check nothing
    #[arg(long, exclusive = true)]
    reasons: bool,
    /// Serve the other end of `usmc check --connect`, at this port, until ended
    #[arg(long, value_name = "[ADDRESS:]PORT", group = "subject", value_parser = meet::place)]
    serve: Option<SocketAddr>,
    /// End with the first check that was served
    #[arg(long, requires = "serve")]
    once: bool,
    /// Check connections to a place where `usmc check --serve` runs
    #[arg(long, value_name = "HOST:PORT", group = "subject", value_parser = Target::parse)]
    connect: Option<Target>,
    /// Look at a process that runs: whether the library is in it, and what else
    #[arg(long, value_name = "PID", group = "subject")]
    pid: Option<u32>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    /// Print what is in the way, and nothing else
    #[arg(short, long, conflicts_with_all = ["json", "verbose"])]
    quiet: bool,
    /// Print what is as it should be, too, where something else was asked for; and each difference that a program may meet
    #[arg(short, long)]
    verbose: bool,
    /// Program to look at; or HOST:PORT, where a connection is made, which moves no byte
    #[arg(value_name = "PROGRAM|HOST:PORT", group = "subject")]
    what: Option<OsString>,
}

/// What is checked besides the machine.
enum Subject<'a> {
    Nothing,
    Program(&'a OsStr),
    Place(Target),
}

impl Args {
    fn subject(&self) -> Subject<'_> {
        let Some(what) = self.what.as_deref() else { return Subject::Nothing };
        match what.to_str().and_then(Target::of) {
            Some(target) => Subject::Place(target),
            None => Subject::Program(what),
        }
    }

    fn style(&self) -> Style {
        let is_all = match self.subject() {
            Subject::Program(_) => false,
            Subject::Place(_) => true,
            Subject::Nothing => {
                self.pid.is_none() && self.serve.is_none() && self.connect.is_none()
            }
        };
        match self {
            Args { json: true, .. } => Style::Json,
            Args { quiet: true, .. } => Style::Quiet,
            Args { verbose: true, .. } => Style::Full,
            _ if is_all => Style::Full,
            _ => Style::Brief,
        }
    }

    fn in_detail(&self) -> bool {
        self.verbose || self.differences
    }
}

/// Checks everything and prints it.
///
/// # Errors
/// When the output cannot be written, a configuration is refused, or a place cannot be served.
pub fn run(args: &Args) -> Result<c_int> {
    if let Some(at) = args.serve {
        return meet::serve(&Config::load(&args.config)?, at, args.once, args.style());
    }
    let report = || Report::new(io::stdout().lock(), args.style());
    let done = match args {
        Args { differences: true, what: None, pid: None, .. } => list_differences(),
        Args { declines: true, .. } => declines::list(&mut io::stdout().lock()).map(|()| 0),
        Args { reasons: true, .. } => reasons::list(&mut io::stdout().lock()).map(|()| 0),
        Args { pid: Some(pid), .. } => check_process(*pid, args.in_detail(), report()),
        Args { connect: Some(target), .. } => {
            meet::connect(&Config::load(&args.config)?, target, report())
        }
        _ => check(args, report()),
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

fn check_process<W: Write>(pid: u32, in_detail: bool, mut report: Report<W>) -> io::Result<c_int> {
    let looked = process::look(pid, library::find().ok().as_ref(), in_detail);
    report.title(uppercase(&looked.name))?;
    report.add(looked.findings)?;
    let works = report.failures == 0;
    let verdict = if works { "can leave TCP" } else { "stays TCP" };
    report.verdict(format_args!("{} {verdict}.", uppercase(&looked.name)))?;
    report.end(works)?;
    Ok(c_int::from(!works))
}

fn uppercase(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

fn check<W: Write>(args: &Args, mut report: Report<W>) -> io::Result<c_int> {
    let config = Config::load(&args.config);
    let (mut of_program, mut can_leave) = (0, Some(true));
    if let (Subject::Program(name), Ok(config), Ok(library)) =
        (args.subject(), &config, library::find())
    {
        report.title(format_args!("Program {}", name.display()))?;
        let judged = command::judge(name, config, &library, args.in_detail());
        report.add(judged.findings)?;
        (of_program, can_leave) = (report.failures, judged.can_leave);
    }
    report.aside("Machine")?;
    report.add(machine::findings())?;
    report.aside("Configuration")?;
    let mut elsewhere = 0;
    match config {
        Ok(config) => {
            report.add(configuration(&config))?;
            elsewhere = check_configured(&config, &args.subject(), &mut report)?;
        }
        Err(refusal) => {
            let remedy = "correct it; `usmc run` refuses to start programs until then";
            report.add([Finding::failure(format!("{refusal:#}"), remedy)])?;
        }
    }
    let here = report.failures - elsewhere - of_program;
    conclude(&mut report, &args.subject(), here, can_leave)?;
    let works = report.failures == 0;
    report.end(works)?;
    Ok(c_int::from(!works))
}

/// The last word: about the machine, and about the program if one was named.
fn conclude<W: Write>(
    report: &mut Report<W>,
    subject: &Subject<'_>,
    here: usize,
    can_leave: Option<bool>,
) -> io::Result<()> {
    let uid = rustix::process::geteuid().as_raw();
    let program = match subject {
        Subject::Program(name) => Some(name.display()),
        _ => None,
    };
    match here {
        0 if program.is_some() => {}
        0 => report.verdict(format_args!("SMC-D works here for user {uid}."))?,
        1 => report.verdict(format_args!(
            "SMC-D does not work here for user {uid}: the failure above is in the way. \
             Programs run on TCP."
        ))?,
        n => report.verdict(format_args!(
            "SMC-D does not work here for user {uid}: {n} failures above are in the way. \
             Programs run on TCP."
        ))?,
    }
    let Some(name) = program else { return Ok(()) };
    match can_leave {
        Some(true) if here == 0 => report.verdict(format_args!("{name} can leave TCP here.")),
        // The machine is in the way, as said above.
        Some(true) => Ok(()),
        Some(false) => report.verdict(format_args!("{name} stays TCP: see its failure above.")),
        None => report.verdict(format_args!("What {name} starts was not looked at.")),
    }
}

/// What depends on the configuration: directory, library, and both at work. How many failures are about another place than this machine.
fn check_configured<W: Write>(
    config: &Config,
    subject: &Subject<'_>,
    report: &mut Report<W>,
) -> io::Result<usize> {
    let dir = config.ism_dir();
    report.aside(format_args!("ISM directory {}", dir.display()))?;
    let before = report.failures;
    report.add(directory::findings(&dir, config.text("ism_dir").is_none()))?;
    let usable = report.failures == before;

    report.aside("Regions")?;
    report.add(regions::findings(config.text("regions").unwrap_or("auto")))?;

    report.aside("Library")?;
    let library = match library::find() {
        Ok(library) => library,
        Err(problem) => {
            let remedy = "then run `usmc check` again";
            report.add([Finding::failure(format!("{problem:#}"), remedy)])?;
            return Ok(0);
        }
    };
    let probe = live::probe();
    let (loaded, probe) = match probe {
        Ok(probe) => (live::loads(&probe, &library), Some(probe)),
        Err(untried) => (untried, None),
    };
    let probe = probe.filter(|_| !loaded.is_failure());
    report.add([loaded])?;
    report.add(live::loads_narrow(&library))?;
    if let Some(probe) = probe.as_ref().filter(|_| usable) {
        report.aside("Two processes on 127.0.0.1")?;
        report.add([live::connection(probe, config, &library)])?;
    }
    // A program's connections inside the host need none.
    if !matches!(subject, Subject::Program(_)) {
        report.aside("Agents of RDMA")?;
        report.add(between_hosts::agents(&dir))?;
    }
    let before = report.failures;
    if let (Subject::Place(target), Some(probe)) = (subject, probe) {
        report.title(format_args!("Connection to {target}"))?;
        between_hosts::check(target, &probe, (config, &library), report)?;
    }
    Ok(report.failures - before)
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
        let instead = config.overridden(key).map(|text| format!("; the profile says {text}"));
        findings.push(Finding::good(said + &instead.unwrap_or_default()));
    }
    if let Some(profile) = &config.profile {
        let (name, source) = (&profile.name, &profile.source);
        findings.push(Finding::good(format!("the profile {name} is used ({source})")));
    }
    if config.iter().all(|(_, value)| value.is_none()) {
        findings.push(Finding::good("every value is the default"));
    }
    for mistyped in config::mistyped_variables() {
        findings.push(Finding::note(mistyped.to_string(), "correct the name, or unset it"));
    }
    if config.is_off() {
        findings.push(Finding::failure(
            "uSMC is switched off",
            "take `off` back where it is said, see above",
        ));
    }
    findings
}
