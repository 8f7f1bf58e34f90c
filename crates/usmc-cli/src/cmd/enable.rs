//! `usmc enable`: brings the library into services of systemd, of a project of docker compose, or into pods of Kubernetes.

mod units;

use std::ffi::c_int;
use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::compose;
use crate::config::profiles::Profile;
use crate::config::{Config, ConfigArgs};
use crate::kubernetes::{self, Target};
use crate::steps::Steps;
use crate::units::group;

/// Bring services of systemd, of docker compose, or pods of Kubernetes under uSMC
///
/// Each service gets a drop-in that preloads the library and names an ISM directory, and a place in the group whose members
/// share that directory. Nothing else of the service is changed, and none is started anew without --restart.
#[derive(clap::Args, Debug)]
#[command(after_help = "Undone by `usmc disable`; shown by `usmc status`. See usmc-enable(8).")]
pub struct Args {
    /// The group of services that share memory: /run/usmc/GROUP
    #[arg(long, value_name = "GROUP", default_value = "default", conflicts_with_all = ["compose", "kubernetes"])]
    name: String,
    /// User that a service changes to by itself; may be repeated
    #[arg(long, value_name = "USER", conflicts_with_all = ["compose", "kubernetes"])]
    user: Vec<String>,
    /// Defaults by a name: latency, throughput, shared, or one of /etc/usmc.toml; see usmc.toml(5)
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Start services that run anew
    #[arg(long, conflicts_with_all = ["compose", "kubernetes"])]
    restart: bool,
    /// A project of docker compose: its file, or its directory
    #[arg(long, value_name = "FILE|DIR", value_hint = clap::ValueHint::AnyPath)]
    compose: Option<PathBuf>,
    /// A namespace of Kubernetes, or one workload of it; may be repeated
    #[arg(long, value_name = "NAMESPACE[/KIND/NAME]", conflicts_with_all = ["compose", "services"])]
    kubernetes: Vec<Target>,
    /// Services: of systemd, or of the project (then all of it by default)
    #[arg(value_name = "SERVICE", required_unless_present_any = ["compose", "kubernetes"])]
    services: Vec<String>,
}

impl Args {
    /// The profile that is named. `usmc run` is not there to look it up when a service starts, so that its values go into what is written.
    fn profile(&self) -> Result<Option<Profile>> {
        let Some(name) = &self.profile else { return Ok(None) };
        let files = Config::load_files(&ConfigArgs::default())?;
        files.profile_named(name, "--profile").map(Some)
    }
}

/// Does it.
///
/// # Errors
/// What is in the way, and what to do; then no service is changed.
pub fn run(args: &Args) -> Result<c_int> {
    if let Some(project) = &args.compose {
        let profile = args.profile()?;
        return compose::enable(project, &args.services, profile.as_ref(), args.dry_run)
            .map(|()| 0);
    }
    if !args.kubernetes.is_empty() {
        let steps = Steps { is_dry: args.dry_run };
        return kubernetes::enable(&args.kubernetes, &steps).map(|()| 0);
    }
    ensure!(
        group::is_name(&args.name),
        "--name {:?}: a group's name has small letters, digits and `-`, at most 27 of them, and is not `agent`",
        args.name
    );
    units::run(args).map(|()| 0)
}
