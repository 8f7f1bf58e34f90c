//! `usmc enable` for services of systemd.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::compose::shell_words;
use crate::config::profiles::Profile;
use crate::library::{self, Library};
use crate::place::{self, Place};
use crate::program;
use crate::steps::{Steps, call};
use crate::units::dropin::{self, DropIn, Made, Wanted};
use crate::units::files::{self, Unit};
use crate::units::{group, manager, reader, syscalls};

use super::Args;

/// A unit, and what it gets.
struct Plan {
    unit: Unit,
    users: Vec<String>,
    drop_in: DropIn,
}

/// All is looked at before anything is changed.
pub fn run(args: &Args) -> Result<()> {
    let is_root = rustix::process::geteuid().is_root();
    ensure!(
        is_root || args.dry_run,
        "run it as root: it changes services; --dry-run says what it would do"
    );
    let steps = Steps { is_dry: args.dry_run };
    let library = library::find()?;
    library.files().try_for_each(trusted)?;
    let profile = args.profile()?;
    let plan = |name: &String| plan(name, args, &library, profile.as_ref());
    let plans: Result<Vec<Plan>> = args.services.iter().map(plan).collect();
    let plans = plans?;
    let is_ours = group::is_ours_to_undo(&args.name);
    let done = bring(&steps, args, &plans);
    if done.is_err() && is_ours && !args.dry_run {
        // Of a group that no service is in now, nothing stays.
        let _ = group::tidy(&steps, &args.name, &[]);
    }
    done
}

/// Does what is planned.
fn bring(steps: &Steps, args: &Args, plans: &[Plan]) -> Result<()> {
    let before = files::enabled();
    let names: Vec<String> = plans.iter().map(|plan| plan.unit.name.clone()).collect();
    let mut users = group::users(&args.name, &names);
    users.extend(plans.iter().flat_map(|plan| plan.users.iter().cloned()));
    group::set_up(steps, &args.name, &users)?;
    let is_new = plans.iter().map(|plan| change(steps, plan)).collect::<Result<Vec<bool>>>()?;
    leave_others(steps, &args.name, plans, &before)?;
    if manager::is_running() && is_new.contains(&true) {
        steps.run("systemctl", &["daemon-reload"])?;
    }
    for plan in plans {
        plan.drop_in.notes.iter().for_each(|note| println!("note: {}: {note}", plan.unit.name));
        if !args.dry_run {
            settled(plan)?;
        }
    }
    finish(steps, args, plans)
}

/// Whoever can change the library, or exchange it by a directory around it, can do what the services can.
fn trusted(library: &Path) -> Result<()> {
    let real = library.canonicalize().with_context(|| library.display().to_string())?;
    for place in library.ancestors().chain(real.ancestors()) {
        let meta = fs::metadata(place).with_context(|| place.display().to_string())?;
        // In a directory such as /tmp nobody exchanges what is root's.
        let is_sticky = meta.is_dir() && meta.mode() & 0o1000 != 0;
        ensure!(
            meta.uid() == 0 && (is_sticky || meta.mode() & 0o022 == 0),
            "{} can be changed by others than root, who would be all services then; install uSMC (`make install`, or its \
             package), and use that",
            place.display()
        );
    }
    Ok(())
}

fn plan(name: &str, args: &Args, library: &Library, profile: Option<&Profile>) -> Result<Plan> {
    let unit = Unit::find(name)?;
    let before = unit.made()?;
    let (users, mut notes) = users(&unit, &args.user, before)?;
    let is_musl = served(&unit, library)?;
    let preload = library.preload_for(is_musl);
    let wanted = Wanted {
        group: &args.name,
        ism_dir: &group::ism_dir(&args.name),
        preload,
        library_dir: &dropin::directory_of(preload),
        users: &users,
        profile,
    };
    let made = dropin::of(&unit.settings, &wanted, syscalls::set);
    let mut drop_in = made.map_err(|why| anyhow::anyhow!("{}: {why}", unit.name))?;
    overridden(&unit, &drop_in)?;
    notes.append(&mut drop_in.notes);
    drop_in.notes = notes;
    Ok(Plan { unit, users, drop_in })
}

/// Whether its program is musl's. A program that is known not to load the library is refused.
fn served(unit: &Unit, library: &Library) -> Result<bool> {
    let Some(named) = unit.settings.program() else {
        bail!("{} starts nothing: it has no ExecStart=", unit.name)
    };
    let Some(path) = program::find(named.as_os_str()) else { return Ok(false) };
    if let Some((program, obstacle)) = program::obstacle(&path, library) {
        bail!("{} stays TCP: {}: {obstacle}", unit.name, program.display());
    }
    Ok(program::is_musl(&path))
}

/// The users that the service's programs are, for the group; and what is to be known of that.
fn users(
    unit: &Unit,
    named: &[String],
    before: Option<Made>,
) -> Result<(Vec<String>, Vec<String>)> {
    let settings = &unit.settings;
    let mut users = BTreeSet::new();
    let mut notes = Vec::new();
    if settings.last("Type") == Some("oneshot") {
        notes.push(
            "it is of Type=oneshot, and may start nothing that lasts; name the service that does"
                .to_owned(),
        );
    }
    if settings.is_on("DynamicUser") {
        // Such a user is in no file.
        return Ok((Vec::new(), notes));
    }
    let own = settings.last("User").unwrap_or("root");
    let mut wanted: Vec<String> = named.to_vec();
    match files::specified(own, &unit.name) {
        Some(own) => wanted.push(own),
        None => notes.push(format!(
            "User={own} is known for each instance only; enable instances, or name their users by --user"
        )),
    }
    wanted.extend(running(&unit.name));
    // What was found while it ran, or was named once.
    wanted.extend(before.into_iter().flat_map(|made| made.users));
    for user in wanted.iter().filter(|user| !["root", "0"].contains(&user.as_str())) {
        users.insert(user_name(user).with_context(|| {
            format!("{}: no user {user} is known here; name it by --user", unit.name)
        })?);
    }
    if users.is_empty() {
        notes.push(
            "it runs as root; if it changes to another user by itself, enable it while it runs, or name that by --user"
                .to_owned(),
        );
    }
    Ok((users.into_iter().collect(), notes))
}

/// The users of the service's processes, by number.
fn running(unit: &str) -> Vec<String> {
    let is_it = |place: &Place| matches!(place, Place::Service(name) if files::is_of(name, unit));
    let pids =
        place::all().into_iter().filter(|(place, _)| is_it(place)).flat_map(|(_, pids)| pids);
    let users: BTreeSet<u32> = pids.filter_map(place::user).collect();
    users.into_iter().map(|uid| uid.to_string()).collect()
}

fn user_name(user: &str) -> Option<String> {
    let line = call("getent", &["passwd", user]).ok();
    let name = line.and_then(|line| line.split(':').next().map(str::to_owned));
    // systemd takes numbers that have no name, and so do lists of users.
    let number = || user.parse::<u32>().ok().map(|number| number.to_string());
    name.or_else(number).filter(|name| group::is_user(name))
}

/// What is read after the drop-in, and takes back what it says.
fn overridden(unit: &Unit, drop_in: &DropIn) -> Result<()> {
    let sets = |text: &str| {
        let names =
            |word: String| word.starts_with("LD_PRELOAD=") || word.starts_with("USMC_ISM_DIR=");
        reader::words(text).into_iter().any(names)
    };
    let lines = drop_in.text.lines().filter(|line| !line.starts_with(['#', '[']));
    let keys: BTreeSet<&str> = lines.filter_map(|line| Some(line.split_once('=')?.0)).collect();
    for (file, path) in &unit.later {
        for key in &keys {
            let here = unit.settings.later(key, file - 1).filter(|a| a.file == *file);
            if here
                .into_iter()
                .any(|a| a.value.is_empty() || (*key == "Environment" && sets(&a.value)))
            {
                bail!(
                    "{}: {} is read after the drop-in, and sets {key}= anew; give it a name before {}, such as 40-local.conf",
                    unit.name,
                    path.display(),
                    crate::units::DROP_IN
                );
            }
        }
    }
    for file in unit.settings.paths("EnvironmentFile") {
        let text = fs::read_to_string(&file).unwrap_or_default();
        let lines = text.lines().map(|line| line.trim_start().trim_start_matches("export "));
        if lines
            .into_iter()
            .any(|line| line.starts_with("LD_PRELOAD=") || line.starts_with("USMC_ISM_DIR="))
        {
            bail!(
                "{}: {} sets LD_PRELOAD or USMC_ISM_DIR, and counts more than a drop-in; move it to an Environment= of the unit",
                unit.name,
                file.display()
            );
        }
    }
    Ok(())
}

/// Writes the drop-in; whether that is another one now.
fn change(steps: &Steps, plan: &Plan) -> Result<bool> {
    let path = plan.unit.drop_in();
    let old = fs::read_to_string(&path).ok();
    steps.write(&path, &plan.drop_in.text)?;
    Ok(old.as_deref() != Some(&*plan.drop_in.text))
}

/// Takes units out of the groups that they were in.
fn leave_others(
    steps: &Steps,
    name: &str,
    plans: &[Plan],
    before: &[files::Enabled],
) -> Result<()> {
    let ours = |unit: &&files::Enabled| plans.iter().any(|plan| plan.unit.name == unit.name);
    let mut groups: BTreeSet<&str> =
        before.iter().filter(ours).map(|unit| &*unit.made.group).collect();
    groups.remove(name);
    let gone: Vec<String> = plans.iter().map(|plan| plan.unit.name.clone()).collect();
    groups.into_iter().try_for_each(|group| group::tidy(steps, group, &gone))
}

/// Whether the manager has understood it.
fn settled(plan: &Plan) -> Result<()> {
    let unit = &plan.unit.name;
    if !manager::is_running() || files::is_template(unit) {
        return Ok(());
    }
    let shown = manager::show(unit, &["Environment", "NeedDaemonReload"])?;
    let environment = reader::words(shown.get("Environment").map_or("", String::as_str));
    let has = |name: &str, part: &str| {
        environment
            .iter()
            .any(|word| word.strip_prefix(name).is_some_and(|value| value.contains(part)))
    };
    let dir = "/run/usmc/";
    ensure!(
        has("LD_PRELOAD=", library::NAME) && has("USMC_ISM_DIR=", dir),
        "systemd does not give {unit} the library; look at `systemctl cat {unit}`, and undo it by `usmc disable {unit}`"
    );
    Ok(())
}

/// Starts services anew, or says how.
fn finish(steps: &Steps, args: &Args, plans: &[Plan]) -> Result<()> {
    let names = plans.iter().map(|plan| &*plan.unit.name);
    let running: Vec<(&str, String)> = names
        .flat_map(|unit| files::running(unit).into_iter().map(move |service| (unit, service)))
        .collect();
    if running.is_empty() {
        println!("it takes effect when they start");
    } else if args.restart {
        // One that fails keeps none of the others from it.
        let failed =
            running.iter().filter_map(|(unit, service)| restart(steps, unit, service).err());
        let problems: Vec<String> = failed.map(|problem| format!("{problem:#}")).collect();
        ensure!(problems.is_empty(), "{}", problems.join("; "));
    } else {
        let services: Vec<&String> = running.iter().map(|(_, service)| service).collect();
        println!(
            "it takes effect when they start anew: systemctl restart {}",
            shell_words(&services)
        );
    }
    Ok(())
}

/// A service that does not start with its unit's drop-in is started without.
fn restart(steps: &Steps, unit: &str, service: &str) -> Result<()> {
    let Err(problem) = steps.run("systemctl", &["restart", service]) else { return Ok(()) };
    files::remove_drop_in(steps, unit)?;
    steps.run("systemctl", &["daemon-reload"])?;
    let again = steps.run("systemctl", &["restart", service]);
    let outcome =
        if again.is_ok() { "it runs without" } else { "it does not start without it, either" };
    bail!(
        "{service} does not start with the drop-in, which is removed: {outcome} ({problem:#}); see `journalctl -u {service}`"
    )
}
