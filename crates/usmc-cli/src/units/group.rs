//! The group of users that share an ISM directory, `/run/usmc/NAME`: a system group, its members, and the line by which
//! systemd-tmpfiles(8) makes the directory at each boot.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::steps::{Steps, call};

use super::files;

/// Longest name: groupadd(8) takes 32 letters, `usmc-` included.
const LONGEST: usize = 27;
/// Each member keeps his own files, which are the group's.
const MODE: u32 = 0o3770;
/// In the tmpfiles.d(5) file of a group that was made here, and goes with its last unit.
const OURS: &str = "# The group was made with it.";

/// Whether a name can be a part of file names and of a group's name.
pub fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= LONGEST
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name.chars().all(plain)
}

/// The group's name in /etc/group.
pub fn unix_name(name: &str) -> String {
    format!("usmc-{name}")
}

/// The ISM directory.
pub fn ism_dir(name: &str) -> PathBuf {
    Path::new("/run/usmc").join(name)
}

/// The file of tmpfiles.d(5).
pub fn tmpfiles(name: &str) -> PathBuf {
    PathBuf::from(format!("/etc/tmpfiles.d/usmc-{name}.conf"))
}

/// A group, as the system knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Known {
    /// Its number.
    pub gid: u32,
    /// Its members in /etc/group.
    pub members: Vec<String>,
}

/// Looks it up.
pub fn known(name: &str) -> Option<Known> {
    let named = Command::new("getent").args(["group", &unix_name(name)]).output();
    let text = match named {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        // musl has none.
        Err(_) => fs::read_to_string("/etc/group").unwrap_or_default(),
    };
    known_in(&text, &unix_name(name))
}

fn known_in(groups: &str, name: &str) -> Option<Known> {
    let mut fields = groups.lines().map(|line| line.split(':'));
    let mut fields =
        fields.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
    let gid = fields.nth(1)?.parse().ok()?;
    let members = fields.next().unwrap_or_default().split(',');
    Some(Known { gid, members: members.filter(|m| !m.is_empty()).map(str::to_owned).collect() })
}

/// Makes the group, its directory, and the line for the next boot. All of it may be there.
///
/// # Errors
/// The step that failed.
pub fn set_up(steps: &Steps, name: &str) -> Result<()> {
    let unix = unix_name(name);
    let was_known = known(name).is_some();
    if !was_known {
        steps.run("groupadd", &["--system", &unix])?;
    }
    let file = tmpfiles(name);
    let is_ours = !was_known || fs::read_to_string(&file).is_ok_and(|text| text.contains(OURS));
    steps.write(&file, &line(name, is_ours))?;
    let dir = ism_dir(name);
    let gid = known(name).map_or(u32::MAX, |group| group.gid);
    if !steps.is_dry && is_right(&dir, gid) {
        return Ok(());
    }
    let what = format!("make {} for the group {unix}, mode {MODE:04o}", dir.display());
    steps.step(&what, || make_directory(&dir, gid))
}

fn line(name: &str, is_ours: bool) -> String {
    let (dir, unix) = (ism_dir(name), unix_name(name));
    let ours = if is_ours { format!("{OURS}\n") } else { String::new() };
    format!(
        "# Made by `usmc enable`: the ISM directory of some services.\n{ours}d {} {MODE:04o} root {unix} -\n",
        dir.display()
    )
}

/// Whether the directory is as it should be.
pub fn is_ready(name: &str) -> bool {
    known(name).is_some_and(|group| is_right(&ism_dir(name), group.gid))
}

fn is_right(dir: &Path, gid: u32) -> bool {
    let is_it = |meta: fs::Metadata| {
        meta.is_dir() && (meta.uid(), meta.gid(), meta.mode() & 0o7777) == (0, gid, MODE)
    };
    fs::symlink_metadata(dir).is_ok_and(is_it)
}

fn make_directory(dir: &Path, gid: u32) -> Result<()> {
    let parent = dir.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => made?,
    }
    let is_directory = fs::symlink_metadata(dir)?.is_dir();
    ensure!(is_directory, "{} is something else; remove it", dir.display());
    chown(dir, Some(0), Some(gid))?;
    fs::set_permissions(dir, Permissions::from_mode(MODE)).map_err(Into::into)
}

/// Makes a user a member. systemd gives a service the groups of its user, and so do programs that change to another user
/// (initgroups(3)); a group that is gone one day keeps neither from starting.
///
/// # Errors
/// There is no such user, or gpasswd(1) fails.
pub fn add_member(steps: &Steps, name: &str, user: &str) -> Result<()> {
    if known(name).is_some_and(|group| group.members.iter().any(|member| member == user)) {
        return Ok(());
    }
    call("getent", &["passwd", user]).with_context(|| format!("there is no user {user}"))?;
    steps.run("gpasswd", &["--add", user, &unix_name(name)])
}

/// Takes back what no unit needs any more: members whom none of them names, and with the last unit the group and its directory.
///
/// # Errors
/// The step that failed.
pub fn tidy(steps: &Steps, name: &str, gone: &[String]) -> Result<()> {
    let left = files::enabled()
        .into_iter()
        .filter(|unit| unit.made.group == name && !(steps.is_dry && gone.contains(&unit.name)));
    let left: Vec<files::Enabled> = left.collect();
    let Some(group) = known(name) else { return remove_files(steps, name) };
    let wanted: BTreeSet<&String> = left.iter().flat_map(|unit| &unit.made.users).collect();
    let file = fs::read_to_string(tmpfiles(name)).unwrap_or_default();
    let is_ours = file.contains(OURS);
    if left.is_empty() {
        remove_files(steps, name)?;
        return if is_ours { steps.run("groupdel", &[&unix_name(name)]) } else { Ok(()) };
    }
    // Of a group that was here before nobody knows why its members are.
    for member in group.members.iter().filter(|member| is_ours && !wanted.contains(member)) {
        steps.run("gpasswd", &["--delete", member, &unix_name(name)])?;
    }
    Ok(())
}

fn remove_files(steps: &Steps, name: &str) -> Result<()> {
    steps.remove(&tmpfiles(name))?;
    let dir = ism_dir(name);
    if fs::symlink_metadata(&dir).is_err() {
        return Ok(());
    }
    steps
        .step(&format!("remove {}", dir.display()), || fs::remove_dir_all(&dir).map_err(Into::into))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files_and_groups() {
        assert!(is_name("web") && is_name("a-1") && is_name(&"a".repeat(27)));
        for bad in ["", "-a", "A", "a/b", "..", "a b", "ä", &"a".repeat(28)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn groups_are_found_by_their_whole_name() {
        let groups = "root:x:0:\nusmc-web2:x:7:c\nusmc-web:x:998:a,b\nusmc-x:x:9:\nbroken\n";
        let web = Known { gid: 998, members: vec!["a".into(), "b".into()] };
        assert_eq!(known_in(groups, "usmc-web"), Some(web));
        assert_eq!(known_in(groups, "usmc-x").unwrap().members, Vec::<String>::new());
        assert_eq!(known_in(groups, "usmc-we"), None);
        assert_eq!(known_in(groups, "broken"), None);
    }

    #[test]
    fn the_line_for_the_next_boot() {
        let text = line("web", true);
        assert!(text.ends_with("d /run/usmc/web 3770 root usmc-web -\n") && text.contains(OURS));
        assert!(!line("web", false).contains(OURS));
    }
}
