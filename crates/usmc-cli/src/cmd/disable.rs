//! `usmc disable`: undoes what `usmc enable` has done.

use std::ffi::c_int;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};

use crate::compose::{self, shell_words};
use crate::kubernetes::{self, Target};
use crate::steps::Steps;
use crate::units::files::{self, Enabled};
use crate::units::{group, manager};

/// Take services of systemd, of docker compose, or pods of Kubernetes from under uSMC
///
/// Removes what `usmc enable` has written for them, and with the last service of a group the group and its directory. Programs
/// that run go on as they are until they are started anew.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Start services that run anew
    #[arg(long, conflicts_with_all = ["compose", "kubernetes"])]
    restart: bool,
    /// A project of docker compose: its file, or its directory
    #[arg(long, value_name = "FILE|DIR", conflicts_with = "services", value_hint = clap::ValueHint::AnyPath)]
    compose: Option<PathBuf>,
    /// A namespace of Kubernetes, or one workload of it; may be repeated
    #[arg(long, value_name = "NAMESPACE[/KIND/NAME]", conflicts_with_all = ["compose", "services"])]
    kubernetes: Vec<Target>,
    /// Services
    #[arg(value_name = "SERVICE", required_unless_present_any = ["compose", "kubernetes"])]
    services: Vec<String>,
}

/// Does it.
///
/// # Errors
/// What is in the way, and what to do.
pub fn run(args: &Args) -> Result<c_int> {
    let steps = Steps { is_dry: args.dry_run };
    if let Some(project) = &args.compose {
        return compose::disable(project, &steps).map(|()| 0);
    }
    if !args.kubernetes.is_empty() {
        return kubernetes::disable(&args.kubernetes, &steps).map(|()| 0);
    }
    let is_root = rustix::process::geteuid().is_root();
    ensure!(
        is_root || args.dry_run,
        "run it as root: it changes services; --dry-run says what it would do"
    );
    let known = files::enabled();
    let units: Result<Vec<Enabled>> =
        args.services.iter().map(|name| Enabled::of(name, &known)).collect();
    let mut units = units?;
    units.sort_by(|a, b| a.name.cmp(&b.name));
    units.dedup();
    units.iter().try_for_each(|unit| files::remove_drop_in(&steps, &unit.name))?;
    // The units are no longer known as enabled: whatever fails from here on, their groups are tidied up.
    let restarted = restart(args, &steps, &units);
    let names: Vec<String> = units.iter().map(|unit| unit.name.clone()).collect();
    let mut groups: Vec<&str> = units.iter().map(|unit| &*unit.made.group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups.into_iter().try_for_each(|name| group::tidy(&steps, name, &names))?;
    restarted.map(|()| 0)
}

/// Tells systemd, and has services start anew, or says how.
fn restart(args: &Args, steps: &Steps, units: &[Enabled]) -> Result<()> {
    if !manager::is_running() {
        return Ok(());
    }
    steps.run("systemctl", &["daemon-reload"])?;
    let running: Vec<String> = units.iter().flat_map(|unit| files::running(&unit.name)).collect();
    if running.is_empty() {
        return Ok(());
    }
    if !args.restart {
        println!(
            "they run with the library until they start anew: systemctl restart {}",
            shell_words(&running)
        );
        return Ok(());
    }
    let fails = |name: &&String| steps.run("systemctl", &["restart", name]).is_err();
    let failed: Vec<&str> = running.iter().filter(fails).map(String::as_str).collect();
    if let Some(first) = failed.first() {
        bail!(
            "{} is disabled, and does not start anew; see `journalctl -u {first}`",
            failed.join(", ")
        );
    }
    Ok(())
}
