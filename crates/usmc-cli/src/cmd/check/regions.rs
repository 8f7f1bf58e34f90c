//! Regions that programs would use.

use usmc::provider;

use super::report::Finding;
use crate::cmd::region::usable;
use crate::regions::{self, Host, Shown};

/// Peers that are named in one line.
const NAMED: usize = 8;

/// Judges the regions of the configuration: `auto`, `none`, or a list.
pub fn findings(configured: &str) -> Vec<Finding> {
    let is_auto = provider::is_auto(configured);
    let mut findings = Vec::new();
    provider::each(configured, |path| findings.push(judge(path, is_auto)));
    if findings.is_empty() {
        findings.push(Finding::good(if is_auto {
            "no ivshmem device is here, which would have a region in it"
        } else {
            "none is wanted"
        }));
    }
    findings
}

fn judge(path: &str, is_auto: bool) -> Finding {
    match usable::open(path) {
        Ok(region) => {
            let shown = regions::shown(&region);
            let Shown { gid, free, units, .. } = &shown;
            let peers = peers(&shown);
            Finding::good(format!(
                "{path} can be used: region {gid}, {free} of {units} units are free, {peers}"
            ))
        }
        Err(reason) => Finding::note(
            format!("{path}: {}", reason.text()),
            usable::remedy(path, reason, is_auto),
        ),
    }
}

/// Those that live, by name and number, and how many are gone.
fn peers(shown: &Shown) -> String {
    let is = |state| move |peer: &&regions::Peer| peer.state == state;
    let alive = shown.alive();
    let host = |peer: &regions::Peer| Host { peer: peer.number, name: peer.name.clone() };
    let living = shown.peers.iter().filter(is("alive"));
    let names: Vec<String> = living.take(NAMED).map(|peer| host(peer).to_string()).collect();
    let mut said = match names.len() {
        0 => "no peer lives in it".to_owned(),
        _ => format!("peers: {}", names.join(", ")),
    };
    let (more, gone) = (alive - names.len(), shown.peers.iter().filter(is("gone")).count());
    if more > 0 {
        said += &format!(" and {more} more (usmc region show)");
    }
    if gone > 0 {
        said += &format!("; {gone} gone");
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_that_live_are_named_and_others_counted() {
        let peer = |number, name: &str, state| regions::Peer {
            number,
            name: name.to_owned(),
            state,
            units: 0,
            host: String::new(),
            directory: String::new(),
        };
        let said = |peers| {
            let gid = String::new();
            super::peers(&Shown { gid, units: 9, free: 9, unit_bytes: 1, peers })
        };
        assert_eq!(said(Vec::new()), "no peer lives in it");
        assert_eq!(
            said(vec![peer(1, "vm1", "alive"), peer(2, "", "alive"), peer(3, "vm1", "gone")]),
            "peers: vm1/1, ?/2; 1 gone"
        );
        let many = (1..=10).map(|number| peer(number, "h", "alive")).collect();
        assert!(said(many).ends_with("h/8 and 2 more (usmc region show)"));
    }

    #[test]
    fn each_region_has_a_line() {
        let found = findings("none");
        assert_eq!((found.len(), &found[0].remedy), (1, &None));
        let found = findings("/nothing,/neither");
        assert!(found.len() == 2 && found.iter().all(|finding| finding.remedy.is_some()));
    }
}
