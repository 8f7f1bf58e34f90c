//! The ISM directories of a node, one for each namespace of Kubernetes: only that namespace's pods have it mounted.
//!
//! Users are let in by number, by ACLs, as `usmc enable` does for services: a plugin can add no group to a container, and a program
//! that changes its user loses its groups. The directories' own group is for pods that name it (`supplementalGroups`), as they do
//! where there is no plugin.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::acl;
use super::choice::is_namespace;

/// The directories' group, which that of docker compose's projects is, too.
pub const GROUP: u32 = 61_000;
/// Each user keeps the files that he made.
const MODE: u32 = 0o3770;
/// Of the directory around them: nobody but root comes in by it.
const AROUND: u32 = 0o700;
/// The user that the kernel names where it knows none; no program is taken for his.
const OVERFLOW: u32 = 65_534;

/// The directories.
pub struct Devices {
    dir: PathBuf,
}

impl Devices {
    /// Those in `dir`, which is made.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(dir: &Path) -> Result<Devices> {
        let made = fs::create_dir_all(dir)
            .and_then(|()| fs::set_permissions(dir, Permissions::from_mode(AROUND)));
        made.with_context(|| {
            format!("cannot make {}; run it as root, with that directory mounted", dir.display())
        })?;
        Ok(Devices { dir: dir.to_owned() })
    }

    /// The directory around them.
    pub fn around(&self) -> &Path {
        &self.dir
    }

    /// The directory of a namespace, made if it is not there.
    ///
    /// # Errors
    /// What is in the way.
    pub fn of(&self, namespace: &str) -> Result<PathBuf> {
        ensure!(is_namespace(namespace), "{namespace:?} is no name of a namespace");
        let dir = self.dir.join(namespace);
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot make {}", dir.display()));
            }
            _ => {}
        }
        let facts = fs::symlink_metadata(&dir)?;
        ensure!(
            facts.is_dir() && facts.uid() == 0,
            "{} is not a directory of root's; remove it",
            dir.display()
        );
        // The list's mask is the group's mode, too.
        if (facts.gid(), facts.mode() & 0o7777) != (GROUP, MODE) {
            let given = chown(&dir, None, Some(GROUP))
                .and_then(|()| fs::set_permissions(&dir, Permissions::from_mode(MODE)));
            given.with_context(|| format!("cannot give {} its mode", dir.display()))?;
            ensure!(
                fs::symlink_metadata(&dir)?.mode() & 0o7777 == MODE,
                "{} cannot be given the mode {MODE:04o}; it takes CAP_FSETID",
                dir.display()
            );
        }
        Ok(dir)
    }

    /// Lets users into a namespace's directory, and to the files in it.
    ///
    /// # Errors
    /// What is in the way; they stay out then.
    pub fn admit(&self, namespace: &str, new: &BTreeSet<u32>) -> Result<()> {
        let dir = self.of(namespace)?;
        let known = users(&dir)?;
        let mut users: BTreeSet<u32> = known.union(new).copied().collect();
        users.retain(|user| !matches!(*user, 0 | OVERFLOW));
        if users == known {
            return Ok(());
        }
        ensure!(
            users.len() <= acl::USERS,
            "{} has {} users already; give the pods one user, or the group {GROUP}",
            dir.display(),
            known.len()
        );
        let set = || {
            // New files first: what is made meanwhile is in neither list else.
            acl::set(&dir, acl::DEFAULT, &acl::encode(&users, 7))?;
            let entries = fs::read_dir(&dir)?.flatten().map(|entry| entry.path());
            entries.for_each(|path| share(&path, &users));
            acl::set(&dir, acl::ACCESS, &acl::encode(&users, 7))
        };
        set().with_context(|| format!("cannot let users into {}", dir.display()))
    }
}

/// The users whom a directory lets in.
fn users(dir: &Path) -> Result<BTreeSet<u32>> {
    let listed = || {
        let all = acl::users(dir, acl::DEFAULT)?;
        // Both lists, or what comes of an interruption is not set right.
        Ok(all.intersection(&acl::users(dir, acl::ACCESS)?).copied().collect())
    };
    listed().map_err(|error: io::Error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => anyhow::anyhow!(
            "{} is on a file system without ACLs; give the pods the group {GROUP} (supplementalGroups)",
            dir.display()
        ),
        _ => error.into(),
    })
}

/// Lets users to a file that is the directory's group's already. Whoever made it may have taken it away, and links have no list.
fn share(path: &Path, users: &BTreeSet<u32>) {
    let is_shared = fs::symlink_metadata(path).is_ok_and(|facts| facts.mode() & 0o020 != 0);
    if is_shared {
        let _ = acl::set(path, acl::ACCESS, &acl::encode(users, 6));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespaces_directory_is_for_its_users_alone() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = std::env::temp_dir().join(format!("usmc-devices-{}", std::process::id()));
        let devices = Devices::new(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o7777, AROUND);
        for bad in ["..", "a/b", "", "A"] {
            assert!(devices.of(bad).is_err(), "{bad}");
        }
        let shop = devices.of("shop").unwrap();
        fs::write(shop.join("old"), "").unwrap();
        fs::write(shop.join("own"), "").unwrap();
        for (name, mode) in [("old", 0o660), ("own", 0o600)] {
            fs::set_permissions(shop.join(name), Permissions::from_mode(mode)).unwrap();
        }
        std::os::unix::fs::symlink("/etc/hostname", shop.join("link")).unwrap();
        let before = fs::metadata("/etc/hostname").map(|facts| facts.mode()).ok();
        if let Err(error) = devices.admit("shop", &[999, 0, OVERFLOW].into()) {
            assert!(error.to_string().contains("without ACLs"), "{error}");
            fs::remove_dir_all(&dir).unwrap();
            return;
        }
        devices.admit("shop", &[1000].into()).unwrap();
        for name in [acl::ACCESS, acl::DEFAULT] {
            assert_eq!(acl::users(&shop, name).unwrap(), [999, 1000].into(), "{name}");
        }
        assert_eq!(acl::users(&shop.join("old"), acl::ACCESS).unwrap(), [999, 1000].into());
        assert_eq!(acl::users(&shop.join("own"), acl::ACCESS).unwrap(), [].into());
        assert_eq!(fs::metadata("/etc/hostname").map(|facts| facts.mode()).ok(), before);
        let facts = fs::metadata(&shop).unwrap();
        assert_eq!((facts.uid(), facts.gid(), facts.mode() & 0o7777), (0, GROUP, MODE));
        // A second plugin, or the same one again, changes nothing.
        Devices::new(&dir).unwrap().admit("shop", &[1000].into()).unwrap();
        assert_eq!(devices.of("shop").unwrap(), shop);
        let many: BTreeSet<u32> = (1..=1001).collect();
        assert!(devices.admit("shop", &many).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
