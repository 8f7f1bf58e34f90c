//! The services that share an ISM directory, `/run/usmc/NAME`: systemd-tmpfiles(8) makes it at each boot, and lets their users in.
//!
//! Users are let in by name (acl(5)), not as members of the group: a program that drops its groups together with its rights, as
//! memcached does, stays in, and no service fails to start for a group that is gone. The group is for those that have no lasting
//! user (`DynamicUser=`), and for whomever the administrator makes a member.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::steps::Steps;

use super::files;

/// Longest name: groupadd(8) takes 32 letters, `usmc-` included.
const LONGEST: usize = 27;
/// Each member keeps his own files, which are the group's.
const MODE: u32 = 0o3770;
/// The package's own file below a library directory.
const PACKAGE: &str = "tmpfiles.d/usmc.conf";
/// The first words of a tmpfiles.d(5) file of ours.
const MARK: &str = "# Made by `usmc enable`";
/// In the tmpfiles.d(5) file of a group that was made here, and goes with its last unit.
const OURS: &str = "# The group was made with it.";

/// Whether a name can be a part of file names and of a group's name.
pub fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    // The agent's socket is beside the directories.
    name != usmc_shm::agent::SOCKET
        && name.len() <= LONGEST
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

/// The group's number, if there is such a group.
pub fn gid(name: &str) -> Option<u32> {
    let named = Command::new("getent").args(["group", &unix_name(name)]).output();
    let text = match named {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        // musl has none.
        Err(_) => fs::read_to_string("/etc/group").unwrap_or_default(),
    };
    gid_in(&text, &unix_name(name))
}

fn gid_in(groups: &str, name: &str) -> Option<u32> {
    let mut fields = groups.lines().map(|line| line.split(':'));
    let mut fields =
        fields.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
    fields.nth(1)?.parse().ok()
}

/// Whether a user's name can be written into an ACL.
pub fn is_user(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-@$".contains(c);
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}

/// Makes the group, and the directory for these users, now and at each boot. All of it may be there.
///
/// # Errors
/// The step that failed; the file is somebody else's.
pub fn set_up(steps: &Steps, name: &str, users: &BTreeSet<String>) -> Result<()> {
    ensure!(
        !is_foreign(name),
        "{} was not made by usmc; give it another name, or name another group by --name",
        tmpfiles(name).display()
    );
    let unix = unix_name(name);
    let was_known = gid(name).is_some();
    if !was_known {
        steps.run("groupadd", &["--system", &unix])?;
    }
    let is_ours = !was_known || is_ours(name);
    let written = steps.write(&tmpfiles(name), &lines(name, users, is_ours));
    if written.is_err() && !was_known {
        // Without the file nobody knows whose it is.
        let _ = steps.run("groupdel", &[&unix]);
    }
    written?;
    create(steps, name)
}

fn create(steps: &Steps, name: &str) -> Result<()> {
    let file = tmpfiles(name);
    steps.run("systemd-tmpfiles", &["--create", &file.to_string_lossy()])?;
    let dir = ism_dir(name);
    ensure!(
        steps.is_dry || is_ready(name),
        "systemd-tmpfiles has not made {} as {} says; remove what is there, and try again",
        dir.display(),
        file.display()
    );
    Ok(())
}

/// Whether somebody else has made the file.
fn is_foreign(name: &str) -> bool {
    let file = tmpfiles(name);
    fs::symlink_metadata(&file).is_ok()
        && !fs::read_to_string(&file).is_ok_and(|text| text.starts_with(MARK))
}

/// Whether all of a group's is ours to take back, should enabling fail: its directory is not there, or was made by our file.
pub fn is_ours_to_undo(name: &str) -> bool {
    !is_foreign(name) && (tmpfiles(name).exists() || !ism_dir(name).exists())
}

/// Whether the group was made by `usmc enable`.
fn is_ours(name: &str) -> bool {
    fs::read_to_string(tmpfiles(name)).is_ok_and(|text| text.contains(OURS))
}

/// tmpfiles.d(5). A user that is not known at some boot costs its own lines only.
fn lines(name: &str, users: &BTreeSet<String>, is_ours: bool) -> String {
    let (dir, unix) = (ism_dir(name), unix_name(name));
    let dir = dir.display();
    let mut text = format!("{MARK}: the ISM directory of some services.\n");
    if is_ours {
        text.push_str(OURS);
        text.push('\n');
    }
    let _ = writeln!(text, "d {dir} {MODE:04o} root {unix} -");
    // Users of before are out.
    let _ = writeln!(text, "a {dir} - - - - u::rwx,g::rwx,o::---,d:u::rwx,d:g::rwx,d:o::---");
    let _ = writeln!(text, "a {dir}/* - - - - u::rw-,g::rw-,o::---");
    for user in users {
        let _ = writeln!(text, "a+ {dir} - - - - u:{user}:rwx,d:u:{user}:rwx");
        let _ = writeln!(text, "a+ {dir}/* - - - - u:{user}:rw-");
    }
    text
}

/// Whether the directory is as it should be.
pub fn is_ready(name: &str) -> bool {
    let Some(gid) = gid(name) else { return false };
    let is_it = |meta: fs::Metadata| {
        meta.is_dir() && (meta.uid(), meta.gid(), meta.mode() & 0o7777) == (0, gid, MODE)
    };
    fs::symlink_metadata(ism_dir(name)).is_ok_and(is_it)
}

/// The users of a group's services, but those of `without`.
pub fn users(name: &str, without: &[String]) -> BTreeSet<String> {
    let units = files::enabled().into_iter();
    let others = units.filter(|unit| unit.made.group == name && !without.contains(&unit.name));
    others.flat_map(|unit| unit.made.users).filter(|user| is_user(user)).collect()
}

/// Takes back what no service needs any more: users, and with the last service the group and its directory. `gone`: services
/// that have just left it, or would in a dry run.
///
/// # Errors
/// The step that failed.
pub fn tidy(steps: &Steps, name: &str, gone: &[String]) -> Result<()> {
    if is_foreign(name) {
        return Ok(());
    }
    let is_left = |unit: &files::Enabled| unit.made.group == name && !gone.contains(&unit.name);
    if files::enabled().iter().any(is_left) {
        steps.write(&tmpfiles(name), &lines(name, &users(name, gone), is_ours(name)))?;
        return create(steps, name);
    }
    let is_ours = is_ours(name);
    steps.remove(&tmpfiles(name))?;
    let dir = ism_dir(name);
    if fs::symlink_metadata(&dir).is_ok() {
        steps.step(&format!("remove {}", dir.display()), || {
            fs::remove_dir_all(&dir).map_err(Into::into)
        })?;
    }
    // Others' directories may be in it, and the package wants it.
    let is_wanted =
        ["/usr/lib", "/usr/local/lib"].iter().any(|lib| Path::new(lib).join(PACKAGE).exists());
    if !steps.is_dry && !is_wanted {
        let _ = dir.parent().map(fs::remove_dir);
    }
    if is_ours && gid(name).is_some() {
        steps.run("groupdel", &[&unix_name(name)])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files_and_groups() {
        assert!(is_name("web") && is_name("a-1") && is_name(&"a".repeat(27)));
        for bad in ["", "agent", "-a", "A", "a/b", "..", "a b", "ä", &"a".repeat(28)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn groups_are_found_by_their_whole_name() {
        let groups = "root:x:0:\nusmc-web2:x:7:c\nusmc-web:x:998:a,b\nbroken\n";
        assert_eq!(gid_in(groups, "usmc-web"), Some(998));
        assert_eq!(gid_in(groups, "usmc-we"), None);
        assert_eq!(gid_in(groups, "broken"), None);
    }

    #[test]
    fn the_lines_for_the_next_boot() {
        let users = ["redis", "www-data"].map(str::to_owned).into();
        let text = lines("web", &users, true);
        assert!(text.contains("\nd /run/usmc/web 3770 root usmc-web -\n") && text.contains(OURS));
        assert!(text.contains("\na+ /run/usmc/web - - - - u:redis:rwx,d:u:redis:rwx\n"));
        assert!(text.ends_with("\na+ /run/usmc/web/* - - - - u:www-data:rw-\n"), "{text}");
        assert!(!lines("web", &users, false).contains(OURS));
        assert!(
            is_user("www-data")
                && is_user("a.b$")
                && !is_user("a,b")
                && !is_user("")
                && !is_user("-a")
        );
    }
}
