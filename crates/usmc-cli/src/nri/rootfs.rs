//! What a container's root file system says, once there is one: which users its programs may become, and whether the library gets
//! into what is started. It is somebody else's: each name is looked up inside of it, and only so much is read of a file.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

use super::api::Container;
use super::choice::variable;
use crate::fit::{self, Fit};

/// Bytes of /etc/passwd that are read.
const PASSWD: u64 = 256 << 10;
/// Bytes of a program: its headers, and the dynamic linker's name.
const START: u64 = 64 << 10;
/// Where programs are where nothing says so.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A root file system.
pub struct Root {
    dir: rustix::fd::OwnedFd,
}

impl Root {
    /// That of a process; `None`: it has ended, or nobody lets us look.
    pub fn of(pid: u32) -> Option<Root> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(CWD, format!("/proc/{pid}/root"), flags, Mode::empty()).ok()?;
        Some(Root { dir })
    }

    /// The first bytes of a file.
    fn read(&self, path: &str, most: u64) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let file = File::from(openat2(&self.dir, path, flags, Mode::empty(), inside).ok()?);
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The users that it knows.
    pub fn users(&self) -> BTreeSet<u32> {
        let bytes = self.read("/etc/passwd", PASSWD).unwrap_or_default();
        users_in(&String::from_utf8_lossy(&bytes))
    }

    /// Whether the library gets into what a container starts; of a script: into what runs it.
    pub fn fit(&self, container: &Container) -> Fit {
        let path = variable(&container.env, "PATH").unwrap_or(PATH);
        let Some(name) = container.args.first() else { return Fit::Unknown("it names no program") };
        let Some(program) = self.program(name, path) else {
            return Fit::Unknown("its program is not to be found");
        };
        let Some(shell) = fit::interpreter_in(&program) else { return fit::of_start(&program) };
        self.program(&shell, path)
            .map_or(Fit::Unknown("its script's shell is not to be found"), |file| {
                fit::of_start(&file)
            })
    }

    fn program(&self, name: &str, path: &str) -> Option<Vec<u8>> {
        if name.contains('/') {
            return self.read(name, START);
        }
        path.split(':').find_map(|dir| self.read(&format!("{dir}/{name}"), START))
    }
}

/// The third field of each line of passwd(5).
fn users_in(text: &str) -> BTreeSet<u32> {
    text.lines().filter_map(|line| line.split(':').nth(2)?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_those_of_passwd() {
        let text = "root:x:0:0::/root:/bin/sh\nredis:x:999:999::/:/bin/false\nbroken\na:b:-1:c\n";
        assert_eq!(users_in(text), [0, 999].into());
    }

    #[test]
    fn a_root_is_looked_at_from_inside() {
        let root = Root::of(std::process::id()).expect("our own root");
        assert!(root.users().contains(&0));
        let container =
            |arg: &str| Container { args: vec![arg.to_owned()], ..Container::default() };
        assert_eq!(root.fit(&container("sh")), Fit::Glibc);
        assert_eq!(
            root.fit(&container("/proc/self/exe")),
            Fit::Unknown("its program is not to be found")
        );
        assert_eq!(root.fit(&container("/etc/passwd")), Fit::Unknown("it is no program"));
        assert_eq!(root.read("/dev/zero", 9), None);
        assert!(Root::of(u32::MAX).is_none());
    }
}
