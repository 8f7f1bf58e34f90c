//! What both ends have told, in findings. "This end" is the one that prints.

use std::net::SocketAddr;

use usmc::reason::Reason;

use super::super::report::Finding;
use super::trial::{By, End};
use super::wire::{Outcome, Side, shown};
use crate::remedies;

/// Where both ends are, and what they have in common.
pub fn places(us: &Side, them: &Side) -> Vec<Finding> {
    let mut findings = vec![versions(us, them), hosts(us, them)];
    findings.extend(them.facts.problem.as_ref().map(|problem| {
        Finding::failure(
            format!("the other end is not able to leave TCP: {}", shown(problem)),
            "see what `usmc check --serve` or `--connect` has printed there",
        )
    }));
    findings.extend(devices(us, them));
    findings.push(addresses(us, them));
    findings
}

fn versions(us: &Side, them: &Side) -> Finding {
    let (ours, theirs) = (&us.facts, &them.facts);
    let version = shown(&theirs.version);
    if ours.device_version != theirs.device_version {
        return Finding::failure(
            format!(
                "the other end is uSMC {version}, whose devices have layout {}; here it is {}",
                theirs.device_version, ours.device_version
            ),
            "use one version of uSMC at both ends",
        );
    }
    let (host, uid) = (shown(&theirs.host), theirs.uid);
    Finding::good(format!("the other end is uSMC {version}, of user {uid} at {host}"))
}

fn is_one_host(us: &Side, them: &Side) -> bool {
    !us.facts.boot.is_empty() && us.facts.boot == them.facts.boot
}

fn hosts(us: &Side, them: &Side) -> Finding {
    Finding::good(match (is_one_host(us, them), us.facts.netns == them.facts.netns) {
        (true, true) => "both are on one host, in one network namespace",
        (true, false) => "both are on one host, in two network namespaces",
        (false, _) => "they are on two hosts: each has a kernel of its own",
    })
}

/// What memory or devices they have in common.
fn devices(us: &Side, them: &Side) -> Vec<Finding> {
    let (ours, theirs) = (&us.facts, &them.facts);
    let common = ours.regions.iter().find(|id| theirs.regions.contains(id));
    let mut findings: Vec<Finding> = common
        .map(|id| Finding::good(format!("both have region {} in common", shown(id))))
        .into_iter()
        .collect();
    let agents = ours.has_agent && theirs.has_agent;
    // An end that has a problem may have made no device.
    let is_known =
        [ours, theirs].iter().all(|facts| facts.gid.is_some() || facts.problem.is_none());
    if is_one_host(us, them) {
        findings.extend(is_known.then(|| directories(us, them, common.is_some() || agents)));
    } else if common.is_none() {
        findings.push(agents_of(us, them));
    }
    findings
}

fn directories(us: &Side, them: &Side, has_other: bool) -> Finding {
    let (ours, theirs) = (&us.facts, &them.facts);
    let gid = |gid: &Option<String>| {
        gid.as_ref().map_or("no device yet".to_owned(), |gid| format!("device {}", shown(gid)))
    };
    if ours.gid.is_some() && ours.gid == theirs.gid {
        return Finding::good(format!("both use one ISM directory: {}", gid(&ours.gid)));
    }
    let fact = format!(
        "they use different ISM directories: {} ({}) here, {} ({}) there",
        ours.directory,
        gid(&ours.gid),
        shown(&theirs.directory),
        gid(&theirs.gid)
    );
    let remedy = "give both one: mount it into both containers, name it by `ism_dir` or USMC_ISM_DIR, and for two users make it a group's";
    if has_other { Finding::note(fact, remedy) } else { Finding::failure(fact, remedy) }
}

fn agents_of(us: &Side, them: &Side) -> Finding {
    let remedy = "between hosts connections leave TCP by RDMA, with `usmc agent` at both; between virtual machines of one host by a \
                  region in common (`usmc region`)";
    let missing = match (us.facts.has_agent, them.facts.has_agent) {
        (true, true) => {
            let named = |side: &Side| {
                side.facts.devices.iter().map(|name| shown(name)).collect::<Vec<_>>().join(", ")
            };
            let none = [us, them].iter().any(|side| side.facts.devices.is_empty());
            let fact = format!(
                "an agent is at both: devices {} here, {} there",
                or_none(named(us)),
                or_none(named(them))
            );
            return if none {
                Finding::failure(
                    fact,
                    "see `rdma link`, and bring the devices' network interfaces up",
                )
            } else {
                Finding::good(fact)
            };
        }
        (true, false) => "no region is in common, and no agent is at the other end",
        (false, true) => "no region is in common, and no agent is at this end",
        (false, false) => "no region is in common, and no agent is at either end",
    };
    Finding::failure(missing, remedy)
}

fn or_none(names: String) -> String {
    if names.is_empty() { "none that is up".to_owned() } else { names }
}

/// Whether both ends know the connection by the same addresses.
fn addresses(us: &Side, them: &Side) -> Finding {
    let plain = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
    let [ours, seen_there] = [us.local, them.peer].map(plain);
    let [theirs, seen_here] = [them.local, us.peer].map(plain);
    let mut changed = Vec::new();
    if ours != seen_there {
        changed.push(format!("this end is {ours}, and {seen_there} to the other"));
    }
    if theirs != seen_here {
        changed.push(format!("the other end is {theirs}, and {seen_here} to this one"));
    }
    if changed.is_empty() {
        return Finding::good("no address is translated on the way");
    }
    let remedy = format!(
        "name each other in `peers`: {} here, {} there; or have the kernels say SMC in SYNs (`usmc ebpf load`, once on each host)",
        seen_here.ip(),
        seen_there.ip()
    );
    Finding::note(
        format!("addresses are translated on the way (NAT): {}", changed.join("; ")),
        remedy,
    )
}

/// Whether the connection that was tried has left TCP at both ends, with all that was sent.
pub fn works(ours: Option<&End>, theirs: Option<&End>, outcome: &Outcome) -> bool {
    let has_left = |end: Option<&End>| end.is_some_and(|end| end.by != By::Tcp);
    has_left(ours) && has_left(theirs) && outcome.problem.is_none() && outcome.bytes > 0
}

/// What became of the connection that was tried.
pub fn tried(ours: Option<&End>, theirs: Option<&End>, outcome: &Outcome) -> Vec<Finding> {
    let mut findings = vec![end("this end", ours), end("the other end", theirs)];
    if !works(ours, theirs, outcome) {
        findings.extend(said_smc(ours, theirs));
    }
    findings.push(match &outcome.problem {
        None => Finding::good(format!("{} bytes came back as they were sent", outcome.bytes)),
        Some(problem) => Finding::failure(
            format!("the connection failed: {}", shown(problem)),
            "try again; `usmc run --log debug` says what happens",
        ),
    });
    findings.extend(times(ours, outcome));
    findings
}

fn end(who: &str, end: Option<&End>) -> Finding {
    let Some(end) = end else {
        return Finding::failure(format!("{who} is TCP: it is without the library"), "see above");
    };
    let device = end.device.as_deref().unwrap_or("rdma");
    match end.by {
        By::Smcd if device == "loopback" => {
            Finding::good(format!("{who} is in shared memory (SMC-D), of the ISM directory"))
        }
        By::Smcd => {
            Finding::good(format!("{who} is in shared memory (SMC-D), of region {}", shown(device)))
        }
        By::Smcr => Finding::good(format!("{who} is by RDMA (SMC-R), by device {}", shown(device))),
        By::Tcp => {
            let reason = Reason::from_code(end.reason).filter(|reason| *reason != Reason::None);
            let text = match reason {
                Some(reason) if reason != Reason::Declined => reason.text().to_owned(),
                _ => shown(&end.text),
            };
            let remedy = reason.and_then(remedies::of).unwrap_or("see the other end's reason");
            Finding::failure(format!("{who} is TCP: {text}"), remedy)
        }
    }
}

/// What SYN and SYN-ACK said, where it may matter.
fn said_smc(ours: Option<&End>, theirs: Option<&End>) -> Option<Finding> {
    let said = |end: Option<&End>| end.and_then(|end| end.said_smc);
    let who = match (said(ours), said(theirs)) {
        (Some(true), Some(true)) => {
            return Some(Finding::good("both said SMC when the connection was made"));
        }
        (Some(false), _) => "the other end",
        (_, Some(false)) => "this end",
        _ => return None,
    };
    let fact = format!("{who} did not say SMC when the connection was made");
    Some(Finding::note(
        fact,
        "where that is needed: `usmc ebpf load` on its host, or `peers` at both ends",
    ))
}

fn times(ours: Option<&End>, outcome: &Outcome) -> Option<Finding> {
    let tcp = micros(outcome.tcp_ns?);
    let by = match ours.map(|end| end.by) {
        Some(By::Smcd) => "shared memory",
        Some(By::Smcr) => "RDMA",
        _ => return Some(Finding::good(format!("a round trip takes {tcp} by TCP"))),
    };
    Some(Finding::good(format!("a round trip takes {tcp} by TCP, {} by {by}", micros(outcome.ns?))))
}

fn micros(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{}.{:02} µs", ns / 1000, ns % 1000 / 10),
        _ => format!("{} µs", ns / 1000),
    }
}

/// The last word.
pub fn verdict(ours: Option<&End>, works: bool) -> String {
    match ours.map(|end| end.by).filter(|_| works) {
        Some(By::Smcd) => "Connections between these two leave TCP: by shared memory.".to_owned(),
        Some(By::Smcr) => "Connections between these two leave TCP: by RDMA.".to_owned(),
        _ => "Connections between these two stay TCP.".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::Facts;
    use super::*;

    fn side(change: impl FnOnce(&mut Facts), local: &str, peer: &str) -> Side {
        let mut facts = Facts::example();
        change(&mut facts);
        let at = |text: &str| text.parse().expect("an address");
        Side { facts, local: at(local), peer: at(peer) }
    }

    fn told(us: &Side, them: &Side) -> String {
        let line = |finding: &Finding| {
            format!("{:?} {} -> {:?}\n", finding.weight, finding.fact, finding.remedy)
        };
        places(us, them).iter().map(line).collect()
    }

    const C: &str = "10.0.0.1:4000";
    const S: &str = "10.0.0.2:7000";

    #[test]
    fn what_both_have_in_common_is_named() {
        let us = side(|_| {}, C, S);
        let text = told(&us, &side(|_| {}, "[::ffff:10.0.0.2]:7000", "[::ffff:10.0.0.1]:4000"));
        for fact in [
            "Good both are on one host, in one network",
            "Good both use one ISM directory: device 1",
            "Good no address is translated",
        ] {
            assert!(text.contains(fact), "{text}");
        }
        let text = told(&us, &side(|facts| facts.gid = Some("2".to_owned()), S, C));
        assert!(text.contains("Failure they use different ISM directories: /d (device 1) here, /d (device 2) there"), "{text}");
        let other = |facts: &mut Facts| (facts.gid, facts.regions) = (None, vec!["7".to_owned()]);
        let text = told(&side(other, C, S), &side(other, S, C));
        assert!(
            text.contains("Good both have region 7 in common\"")
                || text.contains("region 7 in common"),
            "{text}"
        );
        assert!(
            text.contains("Note they use different ISM directories: /d (no device yet)"),
            "{text}"
        );
        let far = |facts: &mut Facts| facts.boot = "other".to_owned();
        let text = told(&us, &side(far, S, C));
        assert!(
            text.contains("Good they are on two hosts")
                && text.contains("Failure no region is in common, and no agent is at either end"),
            "{text}"
        );
        let agent =
            |facts: &mut Facts| (facts.has_agent, facts.devices) = (true, vec!["rxe0".to_owned()]);
        let text = told(
            &side(agent, C, S),
            &side(
                |facts| {
                    agent(facts);
                    far(facts);
                },
                S,
                C,
            ),
        );
        assert!(text.contains("Good an agent is at both: devices rxe0 here, rxe0 there"), "{text}");
        let text = told(&us, &side(|facts| facts.device_version += 1, S, C));
        assert!(text.contains("Failure the other end is uSMC 0.1.0, whose devices"), "{text}");
    }

    #[test]
    fn translated_addresses_are_seen_by_either_end() {
        let us = side(|_| {}, C, "10.9.9.9:80");
        let text = told(&us, &side(|_| {}, S, "192.0.2.1:5000"));
        for fact in [
            "this end is 10.0.0.1:4000, and 192.0.2.1:5000 to the other",
            "the other end is 10.0.0.2:7000, and 10.9.9.9:80 to this one",
            "in `peers`: 10.9.9.9 here, 192.0.2.1 there",
        ] {
            assert!(text.contains(fact), "{fact}: {text}");
        }
    }

    #[test]
    fn what_the_other_end_says_is_escaped() {
        let evil = |facts: &mut Facts| {
            facts.version = "\u{1b}]0;x\u{7}".to_owned();
            facts.host = "a\nb".to_owned();
            facts.directory = "\u{202e}".repeat(5000);
            facts.gid = Some("\r".to_owned());
            facts.problem = Some("\u{9b}2J".to_owned());
        };
        let text = told(&side(|_| {}, C, S), &side(evil, S, C));
        assert!(text.is_ascii() && text.lines().all(|line| line.len() < 3000), "{text}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert_eq!(text.lines().count(), 5, "{text}");
        let broken =
            |facts: &mut Facts| (facts.gid, facts.problem) = (None, Some("no library".to_owned()));
        let text = told(&side(|_| {}, C, S), &side(broken, S, C));
        assert!(text.contains("no library") && !text.contains("different"), "{text}");
    }

    fn an_end(by: By, reason: u8, text: &str) -> End {
        End {
            by,
            device: Some("loopback".to_owned()),
            reason,
            text: text.to_owned(),
            said_smc: None,
        }
    }

    #[test]
    fn it_works_only_where_both_ends_have_left_tcp_with_all_bytes() {
        let good =
            Outcome { end: None, tcp_ns: Some(31_000), ns: Some(900), bytes: 5, problem: None };
        let (smcd, tcp) = (an_end(By::Smcd, 0, ""), an_end(By::Tcp, 200, "new\u{1b}"));
        assert!(works(Some(&smcd), Some(&smcd), &good));
        for (ours, theirs) in [
            (Some(&smcd), Some(&tcp)),
            (Some(&tcp), Some(&smcd)),
            (Some(&smcd), None),
            (None, None),
        ] {
            assert!(!works(ours, theirs, &good));
        }
        assert!(!works(
            Some(&smcd),
            Some(&smcd),
            &Outcome { problem: Some("x".to_owned()), ..good.clone() }
        ));
        assert!(!works(Some(&smcd), Some(&smcd), &Outcome { bytes: 0, ..good.clone() }));
        let facts = |ours, theirs| {
            tried(ours, theirs, &good).into_iter().map(|f| f.fact).collect::<Vec<_>>()
        };
        assert_eq!(
            facts(Some(&smcd), Some(&smcd))[3],
            "a round trip takes 31 µs by TCP, 0.90 µs by shared memory"
        );
        let text = facts(Some(&tcp), None).join("\n");
        assert!(
            text.contains("this end is TCP: new\\u{1b}") && text.contains("without the library"),
            "{text}"
        );
    }
}
