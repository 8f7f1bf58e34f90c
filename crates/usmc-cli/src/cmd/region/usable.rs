//! Whether programs can use a region: the library's own code opens it here.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};

use usmc::provider;
use usmc::reason::Reason;
use usmc_shm::region::Region;

use crate::remedies;

/// Opens a region as programs do. The mapping lasts as long as this process.
///
/// # Errors
/// Why programs cannot use it.
pub fn open(path: &str) -> Result<Region, Reason> {
    let (fd, len) = provider::open(path)?;
    // SAFETY: a fresh descriptor of this process.
    #[expect(unsafe_code, reason = "a descriptor of the library's")]
    let _fd = unsafe { OwnedFd::from_raw_fd(fd) };
    provider::map(fd, len).map(|(_, region)| region)
}

/// What to do about a region that programs cannot use. `is_auto`: nobody has named it.
pub fn remedy(path: &str, reason: Reason, is_auto: bool) -> &'static str {
    let is_device = path.starts_with("/sys/") || path.starts_with("/dev/dax");
    match reason {
        Reason::RegionClosed if fs::symlink_metadata(path).is_err() => {
            "name a file or device that is there, in `regions`"
        }
        Reason::RegionClosed if is_device => {
            "run `usmc region setup` as root, once, and put this user into the group usmc (usermod -aG usmc USER)"
        }
        Reason::RegionClosed => "give it to a group of this user's by chgrp, chmod g+rw",
        Reason::RegionForeign if is_auto => {
            "make a region of its file on the host by `usmc region init`, before the machines start; leave it, if it is \
             another program's"
        }
        Reason::NoMemory => "free memory, or raise the limit of addresses (ulimit -v)",
        reason => remedies::of(reason).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_a_region_from_use_has_a_remedy() {
        let said = |path, reason| remedy(path, reason, true);
        assert!(said("/sys", Reason::RegionClosed).contains("chgrp"));
        assert!(said("/sys/bus", Reason::RegionClosed).contains("region setup"));
        assert!(said("/nothing", Reason::RegionClosed).contains("that is there"));
        assert!(said("/sys/x", Reason::Uncached).contains("/dev/dax"));
        assert!(said("/sys/x", Reason::Lockdown).contains("kernel_lockdown"));
    }
}
