//! `usmc check --serve` and `usmc check --connect`: what a connection between two places is by, and why, said at both.
//!
//! Two connections go to the port that is served. By the first one, which is plain, both ends tell what they are ([`facts`], [`wire`]) and
//! measure TCP. The second one is between two processes under the library, as programs' would be ([`trial`]). [`judge`] makes findings of
//! what both have seen. Neither end believes more of the other than it shows.

mod connect;
mod facts;
mod judge;
mod serve;
mod trial;
mod wire;

use std::ffi::{OsString, c_int};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::between_hosts::Target;
use super::report::{Finding, Report, Style};
use super::{directory, live};
use crate::config::Config;
use crate::exec;
use crate::library::{self, Library};

pub use serve::host;
pub use trial::client as trial;

/// Where to serve: `PORT` of all addresses, or `ADDRESS:PORT`.
///
/// # Errors
/// What to write instead.
pub fn place(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').or_else(|| text.strip_prefix("*:")).unwrap_or(text);
    match port.parse::<u16>() {
        Ok(port) => Ok(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)),
        Err(_) => text.parse().map_err(|_| {
            format!("{text:?} is no port, and no address with one; write 7000, 10.0.0.1:7000 or [fd00::1]:7000")
        }),
    }
}

/// What this end can bring to a connection.
struct Own {
    /// The probe and the library, if it gets into it.
    means: Option<(PathBuf, Library)>,
    /// Why not.
    problem: Option<String>,
}

/// Looks at this end, as far as it is in the way; and lets two processes here talk to each other, which makes the directory.
fn own<W: Write>(config: &Config, report: &mut Report<W>) -> io::Result<Own> {
    report.beside("This end")?;
    let mut problem = None;
    let mut note = |findings: &[Finding]| {
        let first = findings.iter().find(|finding| finding.is_failure());
        problem = problem.take().or_else(|| first.map(|finding| finding.fact.clone()));
        first.is_none()
    };
    if config.is_off() {
        let off =
            [Finding::failure("uSMC is switched off", "take `off` back in the configuration")];
        note(&off);
        report.add(off)?;
    }
    let dir = config.ism_dir();
    let of_dir = directory::findings(&dir, config.text("ism_dir").is_none());
    let is_usable = note(&of_dir);
    report.add(of_dir)?;
    let library = match library::find() {
        Ok(library) => library,
        Err(missing) => {
            let missing = [Finding::failure(format!("{missing:#}"), "then try again")];
            note(&missing);
            report.add(missing)?;
            return Ok(Own { means: None, problem });
        }
    };
    let probe = match live::probe() {
        Ok(probe) => probe,
        Err(untried) => {
            let fact = untried.fact.clone();
            report.add([untried])?;
            return Ok(Own { means: None, problem: Some(fact) });
        }
    };
    let loads = [live::loads(&probe, &library)];
    let does_load = note(&loads);
    report.add(loads)?;
    if does_load && is_usable {
        let two = [live::connection(&probe, config, &library)];
        note(&two);
        report.add(two)?;
    }
    let means = (does_load && !config.is_off()).then_some((probe, library));
    Ok(Own { means, problem })
}

/// Serves checks at a place.
///
/// # Errors
/// The place cannot be listened at, or the output not be written.
pub fn serve(config: &Config, at: SocketAddr, once: bool, style: Style) -> Result<c_int> {
    // As JSON there is nothing but an object for each check.
    let mut report = Report::new(io::stdout().lock(), style);
    let own = own(config, &mut report).context("cannot write the report")?;
    drop(report);
    let plan = serve::Plan {
        at,
        once,
        style: serve::named(style),
        facts: facts::collect(config, own.problem),
    };
    let Some((probe, library)) = own.means else {
        // Not under the library: the other end is told why.
        return serve::serve_here(&plan);
    };
    // What accepts has to be under the library: this process becomes it.
    let plan = serde_json::to_string(&plan).context("cannot tell the server its plan")?;
    let argv: Vec<OsString> = vec![probe.into(), "probe".into(), "host".into(), plan.into()];
    let failure = exec::replace(&argv, &live::environment(config, &library));
    bail!("cannot start usmc itself under the library: {failure}")
}

/// Checks a connection to a place that is served.
///
/// # Errors
/// When the output cannot be written.
pub fn connect<W: Write>(
    config: &Config,
    target: &Target,
    mut report: Report<W>,
) -> io::Result<c_int> {
    let own = own(config, &mut report)?;
    let facts = facts::collect(config, own.problem);
    let means = own.means.as_ref().map(|(probe, library)| (&**probe, library));
    let works = connect::check(config, target, means, &facts, &mut report)?;
    report.end(works)?;
    Ok(c_int::from(!works))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_to_serve_are_ports_or_have_one() {
        for (text, at) in [
            ("7000", "[::]:7000"),
            (":0", "[::]:0"),
            ("*:80", "[::]:80"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(place(text).map(|at| at.to_string()).as_deref(), Ok(at), "{text}");
        }
        for text in ["", "x", "65536", "10.0.0.1", "host:80", "::1:"] {
            assert!(place(text).is_err(), "{text}");
        }
    }
}
