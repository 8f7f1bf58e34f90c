//! `usmc disable`: undoes what `usmc enable` has done.

use std::ffi::c_int;
use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};

use crate::compose;
use crate::kubernetes::{self, Target};
use crate::steps::Steps;
use crate::units::files::{self, Unit};
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
    let units: Result<Vec<files::Enabled>> =
        args.services.iter().map(|name| enabled(name, &known)).collect();
    let mut units = units?;
    units.sort_by(|a, b| a.name.cmp(&b.name));
    units.dedup();
    for unit in &units {
        let path = files::drop_in(&unit.name);
        steps.remove(&path)?;
        // With other drop-ins in it, it stays.
        let _ = path.parent().filter(|_| !args.dry_run).map(fs::remove_dir);
    }
    if manager::is_running() {
        steps.run("systemctl", &["daemon-reload"])?;
    }
    restart(args, &steps, &units)?;
    let names: Vec<String> = units.iter().map(|unit| unit.name.clone()).collect();
    let mut groups: Vec<&str> = units.iter().map(|unit| &*unit.made.group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups.into_iter().try_for_each(|name| group::tidy(&steps, name, &names))?;
    Ok(0)
}

/// The service of that name, or alias. It may have been uninstalled.
fn enabled(name: &str, known: &[files::Enabled]) -> Result<files::Enabled> {
    let full = files::full_name(name)?;
    let of_name = |name: &str| known.iter().find(|unit| unit.name == name);
    let by_alias = || of_name(&Unit::find(name).ok()?.name);
    match of_name(&full).or_else(by_alias) {
        Some(unit) => Ok(unit.clone()),
        None => bail!("{full} is not enabled; `usmc status` shows which services are"),
    }
}

fn restart(args: &Args, steps: &Steps, units: &[files::Enabled]) -> Result<()> {
    let names = units.iter().map(|unit| &*unit.name);
    let running: Vec<&str> =
        names.filter(|name| manager::is_running() && manager::is_active(name)).collect();
    if running.is_empty() {
        return Ok(());
    }
    if args.restart {
        return running.into_iter().try_for_each(|name| steps.run("systemctl", &["restart", name]));
    }
    println!(
        "they run with the library until they start anew: systemctl restart {}",
        running.join(" ")
    );
    Ok(())
}
