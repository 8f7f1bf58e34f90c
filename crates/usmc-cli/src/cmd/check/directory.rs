//! The ISM directory: the same questions that the library asks (usmc's host/directory.rs), in words.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Access, access, statfs};
use usmc::observe::DEVICE_PREFIX;

use super::report::Finding;
use crate::cmd::switch;

/// Magic numbers of file systems in memory: tmpfs, ramfs, hugetlbfs.
const MEMORY: [u64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];
/// File systems on other machines: NFS, SMB, CIFS, SMB2, FUSE, 9P, Ceph.
const REMOTE: [u64; 7] =
    [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546, 0x0102_1997, 0x00c3_6400];
/// Room for the device file (2.6 MB) and the mailboxes' names.
const ROOM: u64 = 4 << 20;

/// Judges `dir`; `is_default` when nobody configured it.
pub fn findings(dir: &Path, is_default: bool) -> Vec<Finding> {
    let shown = dir.display();
    let mut findings = Vec::new();
    match fs::symlink_metadata(dir) {
        Ok(meta) => {
            if let Err(failure) = existing(dir, &meta, is_default) {
                return vec![failure];
            }
            findings.push(Finding::good(format!(
                "exists, owner {}, mode {:04o}",
                meta.uid(),
                meta.mode() & 0o7777
            )));
            if switch::is_off(dir) {
                findings.push(Finding::failure(
                    "was switched off by usmc off: connections stay TCP",
                    "usmc on",
                ));
            }
            findings.extend(remarks(dir, &meta, is_default));
            findings.extend(file_system(dir));
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let parent = dir.parent().unwrap_or(Path::new("/"));
            if let Err(failure) = missing(dir, parent) {
                return vec![failure];
            }
            findings.push(Finding::good("does not exist yet; the first program creates it"));
            findings.extend(file_system(parent));
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotADirectory => {
            return vec![Finding::failure(
                format!("a part of the path {shown} is not a directory"),
                "choose another with --ism-dir, USMC_ISM_DIR or ism_dir",
            )];
        }
        Err(e) => {
            return vec![Finding::failure(
                format!("cannot look at {shown}: {e}"),
                "open the directories above it for this user (chmod o+x), or choose another",
            )];
        }
    }
    findings
}

fn existing(dir: &Path, meta: &Metadata, is_default: bool) -> Result<(), Finding> {
    let shown = dir.display();
    let user = rustix::process::geteuid().as_raw();
    if meta.is_symlink() {
        let target = fs::read_link(dir).unwrap_or_default();
        return Err(Finding::failure(
            format!("{shown} is a symbolic link, which the library does not follow"),
            format!("name its target instead: --ism-dir {}", target.display()),
        ));
    }
    if !meta.is_dir() {
        return Err(Finding::failure(
            format!("{shown} is not a directory"),
            "remove it, or choose another with --ism-dir, USMC_ISM_DIR or ism_dir",
        ));
    }
    if is_default && meta.uid() != user {
        return Err(Finding::failure(
            format!(
                "{shown} belongs to user {}, not to {user}: a stranger may have put it there",
                meta.uid()
            ),
            format!("have it removed (rm -r {shown}), or choose another with --ism-dir"),
        ));
    }
    if meta.mode() & 0o002 != 0 {
        return Err(Finding::failure(
            format!("{shown} is writable for everybody (mode {:04o})", meta.mode() & 0o7777),
            format!("take that away: chmod o-w {shown}"),
        ));
    }
    let file = dir.join(format!("{DEVICE_PREFIX}device"));
    if fs::symlink_metadata(&file).is_ok_and(|file| file.mode() & 0o002 != 0) {
        let shown = file.display();
        return Err(Finding::failure(
            format!("{shown} is writable for everybody, who could end the programs that use it"),
            format!("take that away: chmod o-w {shown}"),
        ));
    }
    access(dir, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK).map_err(|e| {
        Finding::failure(
            format!(
                "user {user} cannot use {shown} (owner {}, group {}, mode {:04o}): {e}",
                meta.uid(),
                meta.gid(),
                meta.mode() & 0o7777
            ),
            "let its owner give you rwx (for a group: chgrp and chmod 3770), or choose another with --ism-dir",
        )
    })
}

fn missing(dir: &Path, parent: &Path) -> Result<(), Finding> {
    let (shown, above) = (dir.display(), parent.display());
    match fs::metadata(parent) {
        Ok(meta) if !meta.is_dir() => Err(Finding::failure(
            format!("{shown} cannot be created: {above} is not a directory"),
            "choose another with --ism-dir, USMC_ISM_DIR or ism_dir",
        )),
        Ok(_) => access(parent, Access::WRITE_OK | Access::EXEC_OK).map_err(|e| {
            Finding::failure(
                format!("{shown} cannot be created in {above}: {e}"),
                "create it as a user who may and give it to this one, or choose another with --ism-dir",
            )
        }),
        Err(e) => Err(Finding::failure(
            format!("{shown} cannot be created: {above}: {e}"),
            format!("create that first: mkdir -p {above}; only the last part is made by the library"),
        )),
    }
}

/// What is unusual and not wrong.
fn remarks(dir: &Path, meta: &Metadata, is_default: bool) -> Vec<Finding> {
    let shown = dir.display();
    let mut remarks = Vec::new();
    let user = rustix::process::geteuid().as_raw();
    if meta.uid() != user {
        remarks.push(Finding::note(
            format!("it belongs to user {}, not to {user}", meta.uid()),
            "right for a shared device; everybody who can open it can share memory with you, and its owner can end your \
             programs (SIGBUS), by truncating a file that they have mapped",
        ));
    }
    if meta.mode() & 0o020 != 0 {
        remarks.push(Finding::note(
            format!(
                "everybody in its group ({}) can end the programs that use it (SIGBUS), by truncating a file that they \
                 have mapped",
                meta.gid()
            ),
            "let nobody into the group whom you do not trust so far; users with a directory each stay on TCP",
        ));
    }
    if meta.mode() & 0o020 != 0 && meta.mode() & 0o1000 == 0 {
        remarks.push(Finding::note(
            "everybody in its group can replace what others have made in it, so that different users stay on TCP",
            format!("let each keep his own: chmod +t {shown}"),
        ));
    }
    if is_default && meta.mode() & 0o077 != 0 {
        remarks.push(Finding::note(
            "others can look into it",
            format!("close it, unless that is wanted: chmod 700 {shown}"),
        ));
    }
    let others = of_other_versions(dir);
    if !others.is_empty() {
        let names = others.join(" ");
        remarks.push(Finding::note(
            format!(
                "files of other versions of uSMC, whose programs do not meet this one's: {names}"
            ),
            format!("once none of their programs runs: cd {shown} && rm {names}"),
        ));
    }
    remarks
}

/// Names of device files and mailboxes that this version does not use. The first versions' had no prefix.
fn of_other_versions(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|e| e.file_name().into_string().ok());
    let is_other = |name: &str| {
        let (version, rest) = match name.strip_prefix('v').and_then(|n| n.split_once('.')) {
            Some((version, rest)) => (version, rest),
            None => ("0", name),
        };
        let number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
        let ours = rest == "device" || rest.strip_prefix("m.").is_some_and(number);
        ours && number(version) && !name.starts_with(DEVICE_PREFIX)
    };
    let mut others: Vec<String> = names.filter(|name| is_other(name)).collect();
    others.sort();
    others
}

fn file_system(dir: &Path) -> Option<Finding> {
    let facts = statfs(dir).ok()?;
    let kind = facts.f_type as u64 & 0xffff_ffff;
    let free = (facts.f_bavail as u64).saturating_mul(facts.f_bsize as u64);
    if free < ROOM && !dir.join(format!("{DEVICE_PREFIX}device")).exists() {
        return Some(Finding::failure(
            format!("its file system has {free} bytes left and the device file needs {ROOM}"),
            "free some, or choose another with --ism-dir",
        ));
    }
    Some(if MEMORY.contains(&kind) {
        Finding::good("on a file system in memory")
    } else if REMOTE.contains(&kind) {
        Finding::note(
            format!("on a network or user-space file system (type {kind:#x})"),
            "programs on other machines that see it cannot share memory; prefer one under /dev/shm",
        )
    } else {
        Finding::note(
            format!(
                "not on a file system in memory (type {kind:#x}); the kernel writes its tables to disk"
            ),
            "works; a directory under /dev/shm is faster",
        )
    })
}
