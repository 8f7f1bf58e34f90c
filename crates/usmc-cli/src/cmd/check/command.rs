//! A program that is to run under uSMC: can the library get into it, and which differences may it meet?

use std::ffi::OsStr;

use super::Finding;
use crate::imports::Imports;
use crate::library::Library;
use crate::{differences, program};

const REMEDY: &str = "`exclude_programs` keeps it on TCP, see usmc.toml(5)";

/// All findings about `command`, which is looked up as execvp(3) does.
pub fn findings(command: &OsStr, library: &Library) -> Vec<Finding> {
    let name = command.display();
    let Some(path) = program::find(command) else {
        let fact = format!("there is no program {name}");
        return vec![Finding::failure(fact, "give its path, or correct PATH")];
    };
    if let Some((path, obstacle)) = program::obstacle(&path, library) {
        let fact = format!("{} runs on TCP: {obstacle}", path.display());
        return vec![Finding::failure(fact, "use another build of it, if there is one")];
    }
    let path = program::executed(&path);
    let imports = Imports::of(&path);
    let mut findings = vec![Finding::good(format!("the library gets into {}", path.display()))];
    let before = findings.len();
    for difference in differences::all() {
        if let Some(sign) = difference.sign(|word| imports.has(word)) {
            let fact = format!("{}: {}", difference.what, difference.seen);
            let remedy = format!("it may do that, for it has {sign}; {REMEDY}");
            findings.push(Finding::note(fact, remedy));
        }
    }
    if findings.len() == before {
        findings.push(Finding::good(
            "no difference from TCP is known by what it calls; --differences lists them all",
        ));
    }
    findings
}
