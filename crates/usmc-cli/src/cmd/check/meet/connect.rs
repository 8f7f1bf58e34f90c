//! The connecting end of a check.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::{Duration, Instant};

use super::super::between_hosts::Target;
use super::super::live;
use super::super::report::{Finding, Report};
use super::facts::Facts;
use super::judge;
use super::trial::{self, PATIENCE, Plan, SMALL, Seen};
use super::wire::{
    Answer, Hello, Outcome, PROTOCOL, Request, Side, Talk, Trouble, Wants, Welcome, shown,
};
use crate::config::Config;
use crate::library::Library;

/// Addresses of a name that are tried.
const ADDRESSES: usize = 8;
/// Round trips by TCP that are measured, unless they take longer.
const PINGS: usize = 100;
const MEASURE: Duration = Duration::from_millis(500);
/// The longest time that a trial takes: connecting, settling, measuring, comparing.
const TRIAL: Duration = Duration::from_secs(40);

/// Checks it step by step; whether the connection left TCP.
///
/// # Errors
/// When the output cannot be written.
pub fn check<W: Write>(
    config: &Config,
    target: &Target,
    means: Option<(&Path, &Library)>,
    facts: &Facts,
    report: &mut Report<W>,
) -> io::Result<bool> {
    report.title(format_args!("Connection to {target}"))?;
    let Some((stream, address)) = reach(target, report)? else { return stays(report) };
    let (mut talk, us) = match greet(stream, facts) {
        Ok(begun) => begun,
        Err(e) => {
            report.add([not_served(&Trouble::from(e), address)])?;
            return stays(report);
        }
    };
    let welcome: Welcome = match talk.hear(soon()) {
        Ok(welcome) => welcome,
        Err(trouble) => {
            report.add([not_served(&trouble, address)])?;
            return stays(report);
        }
    };
    if welcome.usmc_check != PROTOCOL {
        let fact = format!("the other end's check is of another version ({})", welcome.usmc_check);
        report.add([Finding::failure(fact, "use one version of uSMC at both ends")])?;
        return stays(report);
    }
    report.add(judge::places(&us, &welcome.side))?;
    let mut outcome = Outcome { end: None, tcp_ns: None, ns: None, bytes: 0, problem: None };
    match trial::measure(PINGS, MEASURE, || ping(&mut talk)) {
        Ok(ns) => outcome.tcp_ns = Some(ns),
        Err(trouble) => {
            let fact = format!("the other end does not answer any more: {trouble}");
            report.add([Finding::failure(fact, "see what it has printed, and try again")])?;
            return stays(report);
        }
    }
    match means {
        Some(means) => try_it(config, means, (address, welcome.token), &mut outcome),
        None => {
            outcome.problem = Some("the library cannot be used at the connecting end".to_owned())
        }
    }
    let theirs = conclude(&mut talk, &outcome);
    let ours = outcome.end.as_ref();
    let theirs = match theirs {
        Ok(answer) => answer.end,
        Err(trouble) => {
            let fact = format!("the other end does not say what it has seen: {trouble}");
            report.add([Finding::failure(fact, "see what it has printed, and try again")])?;
            None
        }
    };
    report.add(judge::tried(ours, theirs.as_ref(), &outcome))?;
    let works = judge::works(ours, theirs.as_ref(), &outcome);
    report.verdict(judge::verdict(ours, works))?;
    Ok(works)
}

fn stays<W: Write>(report: &mut Report<W>) -> io::Result<bool> {
    report.verdict("Nothing can be said of connections there: see the failure above.")?;
    Ok(false)
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// A connection by TCP, and the address that it is to.
fn reach<W: Write>(
    target: &Target,
    report: &mut Report<W>,
) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    let addresses: Vec<SocketAddr> = match target.as_str().to_socket_addrs() {
        Ok(found) => found.take(ADDRESSES).collect(),
        Err(e) => {
            let fact = format!("{target} is not known: {e}");
            report.add([Finding::failure(fact, "give an address, or see resolv.conf(5)")])?;
            return Ok(None);
        }
    };
    let names: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    if names.first().is_some_and(|name| name != target.as_str()) {
        report.add([Finding::good(format!("{target} is {}", names.join(", ")))])?;
    }
    let mut failures = Vec::new();
    for address in addresses {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => {
                let local = stream.local_addr()?;
                report
                    .add([Finding::good(format!("TCP reaches {address} from {}", local.ip()))])?;
                return Ok(Some((stream, address)));
            }
            Err(e) => failures.push(unreached(address, &e)),
        }
    }
    if failures.is_empty() {
        failures.push(Finding::failure(format!("{target} has no address"), "give an address"));
    }
    report.add(failures)?;
    Ok(None)
}

/// Why TCP does not reach it.
fn unreached(address: SocketAddr, e: &io::Error) -> Finding {
    let port = address.port();
    let (how, remedy) = match e.kind() {
        ErrorKind::ConnectionRefused => (
            "is refused: nobody listens there, or a firewall says so".to_owned(),
            format!(
                "start `usmc check --serve {port}` there; where it is in a container, publish the port"
            ),
        ),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => (
            format!(
                "is not answered within {} s: the host is down, or a firewall drops it",
                PATIENCE.as_secs()
            ),
            format!(
                "let firewalls in between pass port {port} (nft list ruleset, security groups)"
            ),
        ),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => (
            format!("has no way there: {e}"),
            "see `ip route get`, and whether its host is up".to_owned(),
        ),
        ErrorKind::PermissionDenied => (
            "is forbidden here: by a firewall, or by a cgroup's program".to_owned(),
            format!("let it pass port {port} (nft list ruleset)"),
        ),
        _ => (format!("fails: {e}"), "see ip(8) and nft(8)".to_owned()),
    };
    Finding::failure(format!("TCP to {address} {how}"), remedy)
}

fn greet(stream: TcpStream, facts: &Facts) -> io::Result<(Talk, Side)> {
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let side = Side { facts: facts.clone(), local, peer };
    let mut talk = Talk::new(stream)?;
    let hello = Hello { usmc_check: PROTOCOL, wants: Wants::Check(Box::new(side.clone())) };
    talk.say(&hello, soon()).map_err(io::Error::other)?;
    Ok((talk, side))
}

fn not_served(trouble: &Trouble, address: SocketAddr) -> Finding {
    let port = address.port();
    let fact = format!("what is at {address} is no `usmc check --serve`: {trouble}");
    let remedy = format!(
        "start `usmc check --serve {port}` there, at a port of its own; or `usmc check {address}`, for which any server will do"
    );
    Finding::failure(fact, remedy)
}

fn ping(talk: &mut Talk) -> Result<(), Trouble> {
    let sent = "p".repeat(SMALL - "{\"ping\":\"\"}\n".len());
    talk.say(&Request::Ping(sent), soon())?;
    talk.hear::<Request>(soon()).map(drop)
}

/// Has a process under the library make the connection that is tried.
fn try_it(
    config: &Config,
    (program, library): (&Path, &Library),
    (to, token): (SocketAddr, String),
    outcome: &mut Outcome,
) {
    let plan = Plan { to, token, ism_dir: config.ism_dir() };
    let plan = serde_json::to_string(&plan).unwrap_or_default();
    let environment = live::environment(config, library);
    match live::one_line(program, &environment, &["trial", &plan], TRIAL)
        .and_then(|line| Ok(serde_json::from_str::<Seen>(&line)?))
    {
        Ok(Seen { end, ns, bytes, problem }) => {
            (outcome.end, outcome.ns, outcome.bytes, outcome.problem) = (end, ns, bytes, problem);
        }
        Err(problem) => outcome.problem = Some(shown(&format!("{problem:#}"))),
    }
}

fn conclude(talk: &mut Talk, outcome: &Outcome) -> Result<Answer, Trouble> {
    talk.say(&Request::Done(Box::new(outcome.clone())), soon())?;
    talk.hear(soon())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_tcp_does_not_get_there_is_said() {
        let at: SocketAddr = "10.0.0.1:7000".parse().expect("an address");
        for (kind, fact, remedy) in [
            (ErrorKind::ConnectionRefused, "is refused", "--serve 7000"),
            (ErrorKind::TimedOut, "within 5 s", "pass port 7000"),
            (ErrorKind::HostUnreachable, "no way there", "ip route get"),
            (ErrorKind::PermissionDenied, "is forbidden here", "nft list ruleset"),
            (ErrorKind::AddrNotAvailable, "fails", "ip(8)"),
        ] {
            let finding = unreached(at, &kind.into());
            assert!(finding.is_failure() && finding.fact.contains(fact), "{finding:?}");
            assert!(finding.remedy.is_some_and(|text| text.contains(remedy)), "{kind:?}");
        }
    }

    #[test]
    fn a_ping_is_as_long_as_a_small_message() {
        let sent = "p".repeat(SMALL - "{\"ping\":\"\"}\n".len());
        let line = serde_json::to_string(&Request::Ping(sent)).expect("JSON");
        assert_eq!(line.len() + 1, SMALL);
    }
}
