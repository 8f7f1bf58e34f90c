//! Network namespaces that can reach each other, for programs on both sides of what containers are made of.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::fixture::{Fixture, tool};
use crate::{build, is_plain};

/// Two network namespaces joined by a pair of virtual devices. Gone when dropped.
pub struct Netns {
    names: [String; 2],
    subnet: u32,
}

/// Who runs a program.
#[derive(Clone, Copy, Default)]
pub struct Who {
    /// User and group; root otherwise.
    pub user: Option<u32>,
    /// One further group.
    pub group: Option<u32>,
    /// Whether in PID and mount namespaces of its own.
    pub alone: bool,
}

impl Netns {
    /// Makes both.
    ///
    /// # Panics
    /// When that is not permitted.
    pub fn new() -> Netns {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let names = ["a", "b"].map(|end| format!("usmc-{pid}-{number}{end}"));
        let net = Netns { names, subnet: (pid + number) % 250 };
        for name in &net.names {
            ip(&["netns", "add", name]);
        }
        let [a, b] = &net.names;
        ip(&["link", "add", "v0", "netns", a, "type", "veth", "peer", "name", "v0", "netns", b]);
        for (end, name) in net.names.iter().enumerate() {
            ip(&["-n", name, "addr", "add", &format!("{}/24", net.address(end)), "dev", "v0"]);
            ip(&["-n", name, "link", "set", "v0", "up"]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        net
    }

    /// The address of one of both, 0 or 1.
    pub fn address(&self, end: usize) -> String {
        format!("10.213.{}.{}", self.subnet, end + 1)
    }

    /// A tool in one of both, which has to succeed.
    ///
    /// # Panics
    /// When it does not.
    pub fn tool(&self, end: usize, command: &[&str]) {
        ip(&[&["netns", "exec", &self.names[end]], command].concat());
    }

    /// A command that runs there under `usmc run`, or plainly in a plain run.
    pub fn command(&self, fixture: &Fixture, end: usize, who: Who, program: &str) -> Command {
        let mut command = self.plain(fixture, end, who);
        if !is_plain() {
            command.arg(build::usmc()).args(["run", "--"]);
        }
        command.arg(program);
        command
    }

    /// The beginning of a command that runs there, and never under uSMC.
    pub fn plain(&self, fixture: &Fixture, end: usize, who: Who) -> Command {
        let mut command = fixture.plain(Path::new("ip"));
        command.args(["netns", "exec", &self.names[end]]);
        if who.alone {
            command.args(["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]);
        }
        if let Some(user) = who.user {
            let id = user.to_string();
            command.args(["setpriv", "--reuid", &id, "--regid", &id]);
            match who.group {
                Some(group) => command.args(["--groups", &group.to_string()]),
                None => command.arg("--clear-groups"),
            };
        }
        command
    }
}

impl Default for Netns {
    fn default() -> Netns {
        Netns::new()
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

fn ip(args: &[&str]) {
    let out = tool("ip", args);
    assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}
