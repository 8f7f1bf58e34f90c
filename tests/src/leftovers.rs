//! What a runner that was killed has left behind. All directories of a runner bear its pid, and the next runner removes those of
//! runners that have ended.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::procfs;

const PREFIX: &str = "usmc-tests-";

/// A name for directories of this runner, no two alike. With `USMC_TESTS_KEEP` no runner removes them.
pub fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let kept = if is_kept() { "kept-" } else { "" };
    format!("{PREFIX}{kept}{}-{number}", std::process::id())
}

/// Whether directories stay for a person to look at.
pub fn is_kept() -> bool {
    crate::flag("USMC_TESTS_KEEP")
}

/// Removes directories of this user's runners that have ended.
pub fn sweep(parent: &Path) {
    // SAFETY: geteuid(2) has no arguments.
    let own_uid = unsafe { libc::geteuid() };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let runner = entry.file_name().to_str().and_then(runner);
        let is_left = runner.is_some_and(procfs::has_ended)
            && entry.metadata().is_ok_and(|facts| facts.is_dir() && facts.uid() == own_uid);
        // A cgroup is removed as if it were empty. Another runner may be first.
        if is_left && fs::remove_dir(entry.path()).is_err() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn runner(name: &str) -> Option<i32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}
