//! Network namespaces that can reach each other, for programs on both sides of what containers are made of.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::fixture::{Fixture, tool};
use crate::{build, is_plain};

/// Two network namespaces joined by a pair of virtual devices, or three in a row. Gone when dropped.
pub struct Netns {
    names: Vec<String>,
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

/// Root, in this process' own namespaces of processes and mounts.
pub const ROOT: Who = Who { user: None, group: None, alone: false };

impl Netns {
    /// Makes both.
    ///
    /// # Panics
    /// When that is not permitted.
    pub fn new() -> Netns {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let names = ["a", "b"].map(|end| format!("usmc-{pid}-{number}{end}")).to_vec();
        let net = Netns { names, subnet: (pid + number) % 250 };
        for name in &net.names {
            ip(&["netns", "add", name]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        net.join([0, 1], "v0", [&net.address(0), &net.address(1)]);
        net
    }

    /// Makes both, and a third one that is joined to the second.
    ///
    /// # Panics
    /// When that is not permitted.
    pub fn chain() -> Netns {
        let mut net = Netns::new();
        let name = net.names[1].replace('b', "c");
        ip(&["netns", "add", &name]);
        net.names.push(name);
        ip(&["-n", &net.names[2], "link", "set", "lo", "up"]);
        net.join([1, 2], "v1", [&net.address_to_third(), &net.address(2)]);
        net
    }

    fn join(&self, ends: [usize; 2], device: &str, addresses: [&str; 2]) {
        let [a, b] = ends.map(|end| &self.names[end]);
        let peer = ["type", "veth", "peer", "name", device, "netns", b];
        ip(&[&["link", "add", device, "netns", a][..], &peer].concat());
        for (name, address) in [a, b].into_iter().zip(addresses) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", device]);
            ip(&["-n", name, "link", "set", device, "up"]);
        }
    }

    /// The address of one of them, 0, 1 or 2.
    pub fn address(&self, end: usize) -> String {
        match end {
            0 | 1 => format!("10.213.{}.{}", self.subnet, end + 1),
            _ => format!("10.216.{}.2", self.subnet),
        }
    }

    /// The second one's address for the third.
    pub fn address_to_third(&self) -> String {
        format!("10.216.{}.1", self.subnet)
    }

    /// A tool in one of them, which has to succeed.
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

/// The value of a counter in /proc/net/netstat, whose lines come in pairs: names, and values.
///
/// # Panics
/// Without that counter.
pub fn counter(netstat: &str, name: &str) -> u64 {
    let lines: Vec<Vec<&str>> =
        netstat.lines().map(|line| line.split_whitespace().collect()).collect();
    let found = lines.chunks_exact(2).find_map(|pair| {
        let at = pair[0].iter().position(|word| *word == name)?;
        pair[1].get(at)?.parse().ok()
    });
    found.unwrap_or_else(|| panic!("no {name} in {netstat}"))
}
