//! The running service manager, asked by systemctl(1).

use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;

use crate::steps::call;

/// Whether systemd runs this machine, as sd_booted(3) finds out.
pub fn is_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Properties of a unit.
///
/// # Errors
/// When systemctl does not answer.
pub fn show(unit: &str, properties: &[&str]) -> Result<HashMap<String, String>> {
    let list = properties.join(",");
    let text = call("systemctl", &["show", "--no-pager", "--property", &list, "--", unit])?;
    let pair = |line: &str| line.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()));
    Ok(text.lines().filter_map(pair).collect())
}

/// The process that a service is known by; `None`: it does not run, or nobody can say.
pub fn main_pid(unit: &str) -> Option<u32> {
    let shown = show(unit, &["MainPID"]).ok()?;
    shown.get("MainPID")?.parse().ok().filter(|pid| *pid != 0)
}

/// Whether a service has started, and has not ended.
pub fn is_active(unit: &str) -> bool {
    let shown = show(unit, &["ActiveState"]).unwrap_or_default();
    shown.get("ActiveState").is_some_and(|state| state == "active")
}
