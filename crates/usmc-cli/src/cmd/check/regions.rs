//! Regions that programs would use.

use usmc::provider;

use super::Finding;
use crate::cmd::region::usable;

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
            let [high, low] = region.gid();
            let (free, units) = (region.words().free(), region.units());
            Finding::good(format!(
                "{path} can be used: region {high:016x}{low:016x}, {free} of {units} units are free"
            ))
        }
        Err(reason) => Finding::note(
            format!("{path}: {}", reason.text()),
            usable::remedy(path, reason, is_auto),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_region_has_a_line() {
        let found = findings("none");
        assert_eq!((found.len(), &found[0].remedy), (1, &None));
        let found = findings("/nothing,/neither");
        assert!(found.len() == 2 && found.iter().all(|finding| finding.remedy.is_some()));
    }
}
