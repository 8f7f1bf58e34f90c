//! `usmc run`: becomes the command, with the library preloaded and the configuration in its environment.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString, c_int};
use std::io::{Error, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Result, bail};

use super::check;
use crate::config::{self, Config, ConfigArgs};
use crate::library::Library;
use crate::program::Obstacle;
use crate::{exec, library, program};

/// Exit status when usmc itself failed, as env(1) and nohup(1) have it.
pub const OWN_FAILURE: c_int = 125;
/// The command was found and could not be started.
const CANNOT_INVOKE: c_int = 126;
/// The command was not found.
const NOT_FOUND: c_int = 127;

/// Run a program with its TCP sockets over shared memory
///
/// Connections between programs under uSMC that share an ISM directory, by default those of one user, move
/// through shared memory; all others stay on TCP. `usmc ss` shows which, and why.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Exit status: the command's own; 125 usmc failed, 126 the command cannot be \
                        started, 127 it was not found.\n\
                        Example: usmc run -- redis-server --port 6379"
)]
pub struct Args {
    /// Say which library, directory and configuration are used, and whether the library gets into the command
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    config: ConfigArgs,
    /// Start the command without uSMC
    #[arg(long, help_heading = "Configuration (see usmc.toml(5))")]
    off: bool,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
}

/// Runs the command; returns only when that failed.
///
/// # Errors
/// A configuration that is refused, or a library that is missing.
pub fn run(args: &Args) -> Result<c_int> {
    refuse_unknown_option(&args.command)?;
    let config = Config::load(&ConfigArgs { off: args.off, ..args.config.clone() })?;
    for mistyped in config::mistyped_variables() {
        eprintln!("usmc: {mistyped}");
    }
    let mut variables: BTreeMap<OsString, OsString> = env::vars_os().collect();
    for (name, value) in config.environment() {
        match value {
            Some(value) => variables.insert(name.into(), value.into()),
            None => variables.remove(OsStr::new(name)),
        };
    }
    let name = &args.command[0];
    let before = variables.remove(OsStr::new("LD_PRELOAD"));
    let mut said = Said::default();
    let preload = if config.is_off() {
        said.program = "it starts without uSMC, as that is switched off".to_owned();
        before.as_deref().and_then(library::strip)
    } else {
        let library = library::find()?;
        let program = program::find(name);
        said.look(&library, program.as_deref(), &config);
        if let Some((path, obstacle)) =
            program.as_deref().and_then(|path| program::obstacle(path, &library))
        {
            warn(name, &path, &obstacle);
            said.program = format!("the library cannot get into {}", path.display());
        } else {
            warn_of_directory(&config);
        }
        let is_musl = program.as_deref().is_some_and(program::is_musl);
        Some(library::prepend(library.preload_for(is_musl), before.as_deref()))
    };
    if args.verbose {
        said.describe(&config, preload.as_deref());
    }
    if let Some(list) = preload {
        variables.insert("LD_PRELOAD".into(), list);
    }
    let variables: Vec<_> = variables.into_iter().collect();
    let failure = exec::replace(&args.command, &variables);
    Ok(report(name, &failure))
}

/// A trailing argument list takes anything, so a mistyped option arrives as the command.
fn refuse_unknown_option(command: &[OsString]) -> Result<()> {
    let Some(name) = command.first().filter(|name| name.as_bytes().starts_with(b"-")) else {
        return Ok(());
    };
    let argv: Vec<OsString> = env::args_os().collect();
    let before = argv.len().checked_sub(command.len() + 1).map(|at| &argv[at]);
    if before.is_some_and(|arg| arg == "--") {
        return Ok(());
    }
    let name = name.display();
    bail!(
        "there is no option {name}; see `usmc run --help`, or put -- before a command of that name"
    )
}

fn warn(name: &OsStr, path: &Path, obstacle: &Obstacle) {
    let name = name.display();
    if path.file_name() == Path::new(&*name.to_string()).file_name() {
        eprintln!("usmc: {name} runs on TCP: {obstacle}");
    } else {
        eprintln!(
            "usmc: {name} runs on TCP because of its interpreter {}: {obstacle}",
            path.display()
        );
    }
}

/// Says it once where no connection will leave TCP for the directory's sake, and what to do.
fn warn_of_directory(config: &Config) {
    let dir = config.ism_dir();
    let findings = check::of_directory(&dir, config.text("ism_dir").is_none());
    if let Some(failure) = findings.iter().find(|finding| finding.is_failure()) {
        let remedy = failure.remedy.as_deref().unwrap_or("see usmc check");
        eprintln!(
            "usmc: connections stay TCP, unless a region or an agent has them: the ISM directory {}: {}; {remedy}",
            dir.display(),
            failure.fact
        );
    }
}

/// What `--verbose` says besides values.
#[derive(Default)]
struct Said {
    library: Option<String>,
    program: String,
}

impl Said {
    fn look(&mut self, library: &Library, program: Option<&Path>, config: &Config) {
        self.library = Some(library.path.display().to_string());
        let executed = program.map(program::executed);
        self.program = match &executed {
            Some(path) if !check::is_served(path, config) => {
                format!("rules about programs leave {} alone", path.display())
            }
            Some(path) => format!("the library gets into {}", path.display()),
            None => "there is no such program".to_owned(),
        };
    }

    fn describe(&self, config: &Config, preload: Option<&OsStr>) {
        for file in &config.files {
            eprintln!("usmc: read {}", file.display());
        }
        for file in &config.absent {
            eprintln!("usmc: there is no {}", file.display());
        }
        if let Some(file) = &config.skipped {
            eprintln!("usmc: skipped {}, which this user may not read", file.display());
        }
        if let Some(profile) = &config.profile {
            eprintln!("usmc: the profile is {} ({})", profile.name, profile.source);
        }
        for (key, value) in config.iter() {
            let Some(value) = value else { continue };
            let instead = config.overridden(key);
            let instead = instead.map(|text| format!("; the profile says {text}"));
            let instead = instead.unwrap_or_default();
            eprintln!("usmc: {}={} ({}){instead}", key.env, value.text, value.source);
        }
        eprintln!("usmc: the ISM directory is {}", config.ism_dir().display());
        if let Some(library) = &self.library {
            eprintln!("usmc: the library is {library}");
        }
        match preload {
            Some(list) => eprintln!("usmc: LD_PRELOAD={}", list.display()),
            None => eprintln!("usmc: nothing is preloaded"),
        }
        eprintln!("usmc: {}", self.program);
    }
}

/// Says why the command did not start; the exit status is env(1)'s.
fn report(name: &OsStr, failure: &Error) -> c_int {
    let shown = name.display();
    match failure.kind() {
        ErrorKind::NotFound if program::exists(Path::new(name)) => {
            eprintln!(
                "usmc: cannot run {shown}: the interpreter it names is missing; install that"
            );
            NOT_FOUND
        }
        ErrorKind::NotFound => {
            eprintln!("usmc: cannot run {shown}: not found; install it, or give its path");
            NOT_FOUND
        }
        ErrorKind::PermissionDenied if Path::new(name).is_dir() => {
            eprintln!("usmc: cannot run {shown}: it is a directory; name a program in it");
            CANNOT_INVOKE
        }
        ErrorKind::PermissionDenied if program::is_nowhere(name) => {
            eprintln!(
                "usmc: cannot run {shown}: not found, and PATH has directories this user may not \
                 search; install it, or give its path"
            );
            CANNOT_INVOKE
        }
        ErrorKind::PermissionDenied => {
            eprintln!("usmc: cannot run {shown}: permission denied; make it executable (chmod +x)");
            CANNOT_INVOKE
        }
        _ => {
            eprintln!("usmc: cannot run {shown}: {failure}; try to start it without usmc");
            CANNOT_INVOKE
        }
    }
}
