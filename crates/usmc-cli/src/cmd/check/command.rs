//! A program that is to run under uSMC: can the library get into it, and which differences may it meet?

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::report::Finding;
use crate::config::Config;
use crate::differences::{self, Difference};
use crate::imports::Imports;
use crate::library::Library;
use crate::program::{self, NoProgram};
use crate::shim::{self, Shim};
use crate::tested;

const REMEDY: &str = "`exclude_programs` keeps it on TCP, see usmc.toml(5)";

/// What is known of a program, and what that comes to.
pub struct Judged {
    /// In order.
    pub findings: Vec<Finding>,
    /// Whether its connections can leave TCP, as far as it is up to it; `None`: it starts another program.
    pub can_leave: Option<bool>,
}

/// Judges `command`, see [`findings`].
pub fn judge(command: &OsStr, config: &Config, library: &Library, in_detail: bool) -> Judged {
    let (findings, is_known) = findings(command, config, library, in_detail);
    let can_leave = is_known.then(|| !findings.iter().any(Finding::is_failure));
    Judged { findings, can_leave }
}

/// All findings about `command`, which is looked up as execvp(3) does. `in_detail`: each difference from TCP that it may
/// meet. Whether they are about the program that will run.
fn findings(
    command: &OsStr,
    config: &Config,
    library: &Library,
    in_detail: bool,
) -> (Vec<Finding>, bool) {
    let Some(path) = program::find(command) else { return (vec![nothing(command)], true) };
    let mut findings = Vec::new();
    let path = match shim::of(&path) {
        Some(Shim::Becomes(real)) => {
            let fact = format!("{} is a script that becomes {}", path.display(), real.display());
            findings.push(Finding::good(fact));
            real
        }
        Some(Shim::Unclear(line)) => return (vec![unclear(&path, &line)], false),
        None => path,
    };
    let executed = program::executed(&path);
    findings.extend(excluded(&[command, path.as_os_str()], &executed, config));
    if let Some((path, obstacle)) = program::obstacle(&path, library) {
        let fact = format!("{} runs on TCP: {obstacle}", path.display());
        findings.push(Finding::failure(fact, "use another build of it, if there is one"));
        return (findings, true);
    }
    findings.push(Finding::good(format!("the library gets into {}", executed.display())));
    let name = command.to_string_lossy();
    let names = [Some(&*name), path.to_str(), executed.to_str()];
    findings.extend(is_tested(names.into_iter().flatten()));
    let imports = Imports::of(&executed);
    let more = format!("usmc check --differences {name}");
    findings.extend(differences_of(|word| imports.has(word), in_detail, &more));
    (findings, true)
}

/// Whether it is one of those that uSMC is tested with.
pub fn is_tested<'a>(names: impl Iterator<Item = &'a str>) -> Option<Finding> {
    let by = names.filter_map(|name| name.rsplit('/').next()).find_map(tested::by)?;
    Some(Finding::good(format!("uSMC is tested with it: {by}")))
}

/// The differences from TCP that a program with these functions and libraries may meet: each, or how many. `more` prints them.
pub fn differences_of(
    has: impl Fn(&str) -> bool + Copy,
    in_detail: bool,
    more: &str,
) -> Vec<Finding> {
    let met: Vec<(Difference, String)> = differences::all()
        .into_iter()
        .filter_map(|difference| difference.sign(has).map(|sign| (difference, sign)))
        .collect();
    match (met.len(), in_detail) {
        (0, _) => vec![Finding::good(
            "no difference from TCP is known by what it calls; --differences lists them all",
        )],
        (count, false) => {
            let differences = if count == 1 {
                "1 rare difference".to_owned()
            } else {
                format!("{count} rare differences")
            };
            let fact = format!("{differences} from TCP could concern it, by what it calls");
            vec![Finding::note(fact, format!("`{more}` lists them; few programs meet any"))]
        }
        (_, true) => {
            let note = |(difference, sign): (Difference, String)| {
                let fact = format!("{}: {}", difference.what, difference.seen);
                Finding::note(fact, format!("it may do that, for it has {sign}; {REMEDY}"))
            };
            met.into_iter().map(note).collect()
        }
    }
}

fn nothing(command: &OsStr) -> Finding {
    let name = command.display();
    match program::why_none(command) {
        NoProgram::Nowhere => Finding::failure(
            format!("there is no program {name}"),
            "install it, give its path, or correct PATH",
        ),
        NoProgram::NotExecutable(path) => Finding::failure(
            format!("{} is not executable", path.display()),
            "name a program, or make it executable (chmod +x)",
        ),
        NoProgram::Directory(path) => {
            Finding::failure(format!("{} is a directory", path.display()), "name a program in it")
        }
    }
}

fn unclear(path: &Path, line: &str) -> Finding {
    let fact = format!(
        "{} is a script that starts another program, which is not looked at: {}",
        path.display(),
        line.escape_debug()
    );
    let remedy = match shim::manager(path, line) {
        Some(which) => format!("usmc check \"$({which})\""),
        None => "name that program; or look at it once it runs: `usmc check --pid PID`".to_owned(),
    };
    Finding::note(fact, remedy)
}

/// Whether the rules about programs keep the library out. They go by the name of the file that is executed, where links have been
/// followed: a rule that fits none but the command's own name does nothing.
fn excluded(names: &[&OsStr], executed: &Path, config: &Config) -> Option<Finding> {
    let real = executed.canonicalize().unwrap_or_else(|_| executed.to_owned());
    let real = file_name(&real);
    let said = |key: &str| {
        let (_, value) = config.iter().find(|(found, _)| found.name == key)?;
        value.filter(|value| !value.text.is_empty())
    };
    if let Some(rules) = said("exclude_programs") {
        if program::is_named(&rules.text, &real) {
            let fact = format!(
                "{real} is excluded by exclude_programs = {} ({})",
                rules.text, rules.source
            );
            return Some(Finding::failure(
                fact,
                "take it out of `exclude_programs`, see usmc.toml(5)",
            ));
        }
        let names = names.iter().map(|name| file_name(&PathBuf::from(name)));
        if let Some(name) = names.into_iter().find(|name| program::is_named(&rules.text, name)) {
            let fact = format!(
                "exclude_programs = {} ({}) names {name}, but the file is {real}, and rules go by that",
                rules.text, rules.source
            );
            return Some(Finding::note(fact, format!("write {real}, if it is to be excluded")));
        }
    }
    let rules = said("include_programs").filter(|rules| !program::is_named(&rules.text, &real))?;
    let fact = format!("{real} is not among include_programs = {} ({})", rules.text, rules.source);
    Some(Finding::failure(fact, format!("add {real} to `include_programs`, see usmc.toml(5)")))
}

/// Whether rules about programs let the library serve the one at `executed`.
pub fn is_served(executed: &Path, config: &Config) -> bool {
    excluded(&[], executed, config).is_none_or(|finding| !finding.is_failure())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
